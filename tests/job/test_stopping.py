"""Stopping in order: running rows may finish, what is finished is kept, the exit code says so, the same command goes on."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import time

import pytest
from command import pagedgen, read_jsonl
from job_runs import leftovers, write_jsonl

from pagedgen.engine.feed import Control
from pagedgen.stopping import FLUSH_MARGIN_S, Stopper, slurm_seconds_left


@pytest.fixture
def prompts(tmp_path):
    rows = [{"id": i, "prompt": f"go on {i}", "sampling_params": {"max_tokens": 30 + i % 41}} for i in range(400)]
    return write_jsonl(tmp_path / "in.jsonl", rows)


def flags(model, *more):
    """Rows of all lengths run side by side, so that some always have a while to go."""
    return ["run", model, "in.jsonl", "-o", "out.jsonl", "--ignore-eos", "--max-num-seqs", 16, "--sort", "none", *more]


class Job:
    """A job in a process of its own."""

    def __init__(self, nursery, model, directory):
        self.nursery, self.model, self.directory = nursery, model, directory

    def __call__(self, *more, **how):
        code, said = self.nursery.run(flags(self.model, *more), self.directory, **how)
        assert "Traceback" not in said, said
        return code, said.replace("\n", " ")

    def kept_tokens(self):
        """Return the tokens of the results that are on disk."""
        lines = [line for p in self.directory.glob("out.jsonl.parts/part-*") for line in p.read_bytes().splitlines()]
        return sum(json.loads(line.split(b" ", 4)[4]).get("num_generated_tokens", 0) for line in lines)

    @property
    def stats(self):
        return json.loads((self.directory / "out.jsonl.stats.json").read_text())


@pytest.fixture
def job(nursery, tiny_model, prompts, tmp_path):
    return Job(nursery, tiny_model(), tmp_path)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP], ids=lambda n: n.name
)
def test_a_signal_lets_running_rows_finish(job, tmp_path, number):
    code, said = job(kill=number, after_s=0.3, until="generating")
    assert code == 75, said
    assert f"stopped by {number.name}" in said
    kept = int(re.search(r"with ([\d,]+) results finished and kept", said)[1].replace(",", ""))
    assert (job.stats["partial"], job.stats["stopped_by"]) == (True, number.name)
    assert kept >= 16, "the rows that ran when the signal came were finished"
    assert job.kept_tokens() == job.stats["generated_tokens"], "no token was generated in vain"
    assert not (tmp_path / "out.jsonl").exists()
    code, said = job()
    assert code == 0, said
    assert f"{kept:,} results of an earlier run are kept" in said
    assert [r["id"] for r in read_jsonl(tmp_path / "out.jsonl")] == list(range(400))
    assert not leftovers(tmp_path)


def test_a_second_interrupt_ends_at_once_and_nothing_finished_is_lost(job):
    begin = time.monotonic()
    code, _ = job("--flush-every", "0s", "--grace", "30s", kill=(signal.SIGINT, signal.SIGINT), after_s=0.5, until="generating")
    assert code == 75
    assert time.monotonic() - begin < 20
    code, said = job()
    assert code == 0, said
    assert "results of an earlier run are kept" in said


def test_other_signals_while_it_stops_change_nothing(job):
    """Slurm sends TERM when what it was told to send before had no effect."""
    code, said = job(kill=(signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM), after_s=0.3, until="generating")
    assert code == 75
    assert "stopped by SIGUSR1" in said


def test_without_grace_running_rows_are_dropped(job):
    code, _ = job("--grace", 0, kill=signal.SIGTERM, after_s=0.3, until="generating")
    assert code == 75
    assert job.kept_tokens() < job.stats["generated_tokens"]


def test_a_deadline_stops_a_job_in_time(tiny_model, prompts, tmp_path):
    """The job would take far longer; it stops so that grace and writing end before the deadline."""
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"go on {i}"} for i in range(60_000)])
    model = tiny_model()
    begin = time.monotonic()
    done = pagedgen(*flags(model, "--deadline", f"{FLUSH_MARGIN_S + 10}s", "--grace", "2s"), cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    assert "stopped by the deadline" in done.stderr.replace("\n", " ")
    assert time.monotonic() - begin < FLUSH_MARGIN_S + 10


def test_slurms_end_of_the_job_is_a_deadline(tiny_model, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1))
    done = pagedgen(*flags(tiny_model()), cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    assert pagedgen(*flags(tiny_model()), cwd=tmp_path).returncode == 0


def test_the_end_time_of_slurm_may_be_missing_or_no_number():
    assert slurm_seconds_left({}) is None
    assert slurm_seconds_left({"SLURM_JOB_END_TIME": "NOT_SET"}) is None
    assert 90 < slurm_seconds_left({"SLURM_JOB_END_TIME": str(int(time.time()) + 100)}) <= 100


@pytest.mark.parametrize(("said", "seconds"), [("END", 100), ("N/A", None), ("", None), ("fail", None)])
def test_squeue_is_asked_where_the_environment_does_not_say(tmp_path, monkeypatch, said, seconds):
    """Slurm 22.05 doesn't tell its jobs when they end."""
    end = datetime.datetime.fromtimestamp(int(time.time()) + 100).isoformat()
    squeue = tmp_path / "squeue"
    answer = "exit 1" if said == "fail" else f"[ $3 = 17 ] && echo {said.replace('END', end)}"
    squeue.write_text(f"#!/bin/sh\n{answer}\n")
    squeue.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    left = slurm_seconds_left({"SLURM_JOB_ID": "17"})
    assert left is None if seconds is None else seconds - 5 < left <= seconds


def test_a_stopper_drains_then_drops(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopper = Stopper(grace_s=20, deadline_s=100)
    assert stopper.control() is Control.GO_ON
    now[0] += 100 - 20 - FLUSH_MARGIN_S
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


def test_only_one_process_works_on_an_output(job, tiny_model, tmp_path):
    from pagedgen.rows.workspace import Workspace

    other = Workspace(str(tmp_path / "out.jsonl"))
    code, said = job()
    assert code == 2
    assert "another pagedgen is writing" in said
    other.close()
    assert job()[0] == 0


@pytest.mark.parametrize("phase", ["opening the model", "reading prompts", "loading"])
def test_interrupted_before_generation_it_leaves_nothing_half_done(job, tmp_path, phase):
    code, said = job(kill=signal.SIGTERM, until=phase)
    assert code == 75, said
    assert not (tmp_path / "out.jsonl").exists()
    assert job()[0] == 0


def test_near_a_deadline_there_is_still_time_for_work(monkeypatch):
    """A deadline shorter than the grace leaves five eighths of it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopper = Stopper(grace_s=20, deadline_s=8)
    now[0] += 4.9
    assert stopper.control() is Control.GO_ON
    now[0] += 0.2
    assert stopper.control() is Control.DRAIN
    now[0] += 2.1
    assert stopper.control() is Control.DROP
