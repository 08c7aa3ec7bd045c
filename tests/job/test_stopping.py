"""Stopping in order: running rows may finish, what is finished is kept, the exit code says so, the same command goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
from command import COMMAND, ENV, pagedgen, read_jsonl
from job_runs import finish, leftovers, start, write_jsonl

from pagedgen.engine.feed import Control
from pagedgen.stopping import FLUSH_MARGIN_S, Stopper, slurm_seconds_left

assert COMMAND and ENV


@pytest.fixture
def prompts(tmp_path):
    return write_jsonl(tmp_path / "in.jsonl", [{"id": i, "prompt": f"go on {i}"} for i in range(400)])


def flags(model, *more):
    return ["run", model, "in.jsonl", "-o", "out.jsonl", "--max-tokens", 60, "--ignore-eos", "--max-num-seqs", 16, *more]


def until_generating(process):
    for line in process.stderr:
        if b"generating" in line:
            return


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP], ids=lambda n: n.name
)
def test_a_signal_lets_running_rows_finish(tiny_model, prompts, tmp_path, number):
    process = start(*flags(tiny_model()), cwd=tmp_path)
    until_generating(process)
    time.sleep(0.3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    said = err.decode()
    assert process.returncode == 75, said
    assert f"stopped by {number.name}" in said.replace("\n", " ")
    kept = int(re.search(r"with ([\d,]+) results finished and kept", said.replace("\n", " "))[1].replace(",", ""))
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    assert (stats["partial"], stats["stopped_by"]) == (True, number.name)
    assert kept >= 16, "the rows that ran when the signal came were finished"
    assert kept * 60 == stats["generated_tokens"], "no token was generated in vain"
    assert not (tmp_path / "out.jsonl").exists()
    code, said = finish(*flags(tiny_model()), cwd=tmp_path)
    assert code == 0, said
    assert f"{kept:,} results of an earlier run are kept" in said
    assert [r["id"] for r in read_jsonl(tmp_path / "out.jsonl")] == list(range(400))
    assert not leftovers(tmp_path)


def test_a_second_interrupt_ends_at_once_and_nothing_finished_is_lost(tiny_model, prompts, tmp_path):
    process = start(*flags(tiny_model(), "--flush-every", "0s"), cwd=tmp_path)
    until_generating(process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.01)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert time.monotonic() - begin < 1
    assert b"Traceback" not in err
    code, said = finish(*flags(tiny_model()), cwd=tmp_path)
    assert code == 0, said
    assert "results of an earlier run are kept" in said


def test_without_grace_running_rows_are_dropped(tiny_model, prompts, tmp_path):
    process = start(*flags(tiny_model(), "--grace", 0), cwd=tmp_path)
    until_generating(process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    kept = sum(1 for p in (tmp_path / "out.jsonl.parts").glob("part-*") for _ in p.open())
    assert kept * 60 < stats["generated_tokens"]


def test_a_deadline_stops_a_job_in_time(tiny_model, prompts, tmp_path):
    """The job would take far longer; it stops so that grace and writing end before the deadline."""
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"go on {i}"} for i in range(20_000)])
    begin = time.monotonic()
    done = pagedgen(*flags(tiny_model(), "--deadline", f"{FLUSH_MARGIN_S + 6}s", "--grace", "2s"), cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    assert "stopped by the deadline" in done.stderr.replace("\n", " ")
    assert time.monotonic() - begin < FLUSH_MARGIN_S + 6


def test_slurms_end_of_the_job_is_a_deadline(tiny_model, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 10))
    done = pagedgen(*flags(tiny_model()), cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    assert pagedgen(*flags(tiny_model()), cwd=tmp_path).returncode == 0


def test_the_end_time_of_slurm_may_be_missing_or_no_number():
    assert slurm_seconds_left({}) is None
    assert slurm_seconds_left({"SLURM_JOB_END_TIME": "NOT_SET"}) is None
    assert 90 < slurm_seconds_left({"SLURM_JOB_END_TIME": str(int(time.time()) + 100)}) <= 100


def test_a_stopper_drains_then_drops(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopper = Stopper(grace_s=20, deadline_s=60)
    assert stopper.control() is Control.GO_ON
    now[0] += 60 - 20 - FLUSH_MARGIN_S
    assert stopper.control() is Control.DRAIN
    stopper.stop("TERM")
    assert stopper.reason == "the deadline"
    now[0] += 19.9
    assert stopper.control() is Control.DRAIN
    now[0] += 0.2
    assert stopper.control() is Control.DROP


def test_on_error_stop_names_the_row_before_any_generation(tiny_model, tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": None}, {"prompt": "b"}])
    done = pagedgen(*flags(tiny_model(), "--on-error", "stop"), cwd=tmp_path)
    assert done.returncode == 3
    assert "stopped at the first error, row 1: column prompt is null" in done.stderr.replace("\n", " ")
    assert "loading" not in done.stderr
    assert pagedgen(*flags(tiny_model()), cwd=tmp_path).returncode == 3
    assert [r["error_code"] for r in read_jsonl(tmp_path / "out.jsonl")] == [None, "null_prompt", None]


def test_only_one_process_works_on_an_output(tiny_model, prompts, tmp_path):
    process = start(*flags(tiny_model()), cwd=tmp_path)
    until_generating(process)
    done = pagedgen(*flags(tiny_model()), cwd=tmp_path)
    assert done.returncode == 2
    assert "another pagedgen is writing" in done.stderr
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 400


def test_interrupted_before_generation_it_leaves_nothing_half_done(tiny_model, prompts, tmp_path):
    process = start(*flags(tiny_model()), cwd=tmp_path)
    for line in process.stderr:
        if b"loading" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert b"Traceback" not in err
    assert not (tmp_path / "out.jsonl").exists()
    assert finish(*flags(tiny_model()), cwd=tmp_path)[0] == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_log_that_is_full_does_not_stop_a_signal(tiny_model, prompts, tmp_path):
    import subprocess

    with open("/dev/full", "w") as full:
        process = subprocess.Popen([*COMMAND, *map(str, flags(tiny_model()))], cwd=tmp_path, stderr=full, env=ENV)
        time.sleep(6)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (75, 0)
