"""Failures of such tools in the field: what a restart did (RS). A name carries the case's number."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest
from case_tools import STRICT_TEMPLATE, column, keep_lines, leave_unwritten, one_line, parts_of, read_jsonl, stats_of, user
from command import pagedgen
from job_runs import write_jsonl

RESUMED_ROWS = [{"id": i, "prompt": f"Grüße {i} 世界" + "!" * i, "label": i} for i in range(12)]
RESUMED_FLAGS = ["--max-tokens", 6, "--ignore-eos", "--temperature", 1, "--seed", 3, "--token-ids"]


def half_a_character(data):
    """Cut inside the last character that has more than one byte; parts hold its escape."""
    return data[: data.rindex(b"\\u") + 4]


DAMAGES = {
    "mid_object": lambda data: data[: len(data) * 2 // 3],
    "mid_character": half_a_character,
    "half_a_utf8_character_at_the_end": lambda data: data[:-30] + "世".encode()[:2],
    "half_a_utf8_character_behind_the_last_line": lambda data: data + "世".encode()[:2],
    "no_newline": lambda data: data[:-1],
    "empty_file": lambda data: b"",
    "nul_bytes_behind_the_last_line": lambda data: data + b"\0" * 4096,
    "nul_bytes_instead_of_the_end": lambda data: data[:-40] + b"\0" * 40,
    "the_next_row_right_behind_half_a_line": lambda data: data[:-40] + data[: data.index(b"\n") + 1],
}


@pytest.fixture(scope="module")
def resumed_folder(tiny_model, tmp_path_factory):
    """A folder with a job's undisturbed outputs of both formats, and the same job before its output was written."""
    folder = tmp_path_factory.mktemp("resumed")
    args = ["run", tiny_model(), write_jsonl(folder / "in.jsonl", RESUMED_ROWS), *RESUMED_FLAGS]
    for suffix in (".jsonl", ".parquet"):
        assert pagedgen(*args, "-o", folder / f"whole{suffix}").returncode == 0
        leave_unwritten(*args, "-o", folder / f"out{suffix}")
    return folder


@pytest.fixture
def resumed_job(tiny_model, resumed_folder, tmp_path):
    """Return the job's arguments without its output; its files are in `tmp_path`."""
    shutil.copytree(resumed_folder, tmp_path, dirs_exist_ok=True)
    return ["run", tiny_model(), tmp_path / "in.jsonl", *RESUMED_FLAGS]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_rs_01_whole_results_are_kept_and_torn_ones_made_again(resumed_job, tmp_path, damage, suffix):
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    (part,) = parts_of(out)
    before = part.read_bytes()
    part.write_bytes(DAMAGES[damage](before))
    kept = len(set(before.splitlines()) & set(part.read_bytes().split(b"\n")))
    assert kept == {"no_newline": 12, "empty_file": 0}.get(damage, 12 if "behind_the_last" in damage else kept)
    done = pagedgen(*resumed_job, "-o", out)
    assert done.returncode == 0, done.stderr
    stats = stats_of(out)
    assert (stats["rows_reused"], stats["generated_tokens"]) == (kept, 6 * (12 - kept))
    assert (f"{kept} results of an earlier run" in one_line(done.stderr)) == (kept > 0)
    assert out.read_bytes() == whole.read_bytes()
    rows = read_jsonl(out) if suffix == ".jsonl" else pq.read_table(out).to_pylist()
    assert column(rows, "row_index") == list(range(12))
    assert not out.with_name(out.name + ".parts").exists()


def test_rs_01_a_part_that_was_just_being_written_is_no_part(resumed_job, tmp_path):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    (part,) = parts_of(out)
    part.rename(part.with_name(".pagedgen-1-0.tmp"))
    done = pagedgen(*resumed_job, "-o", out)
    assert done.returncode == 0, done.stderr
    assert stats_of(out)["rows_reused"] == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name(out.name + ".parts").exists()


def test_rs_01_it_is_told_how_many_results_were_damaged(resumed_job, tmp_path):
    out = tmp_path / "out.jsonl"
    (part,) = parts_of(out)
    part.write_bytes(part.read_bytes()[:-30])
    done = pagedgen(*resumed_job, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "1 kept results were damaged" in one_line(done.stderr)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("damage", ["mid_object", "no_newline", "empty_file", "nul_bytes_behind_the_last_line"])
def test_rs_01_a_finished_output_that_was_damaged_is_refused_not_added_to(resumed_job, tmp_path, damage, suffix):
    out = tmp_path / f"whole{suffix}"
    whole = out.read_bytes()
    out.write_bytes(DAMAGES[damage](whole))
    damaged = out.read_bytes()
    done = pagedgen(*resumed_job, "-o", out)
    assert done.returncode == 2
    assert "exists; pass --overwrite" in one_line(done.stderr)
    assert out.read_bytes() == damaged
    assert pagedgen(*resumed_job, "-o", out, "--overwrite").returncode == 0
    assert out.read_bytes() == whole


def half_job(folder):
    flags = ["--temperature", 0, "--max-tokens", 5, "--ignore-eos"]
    return ["run", folder / "model", folder / "in.jsonl", *flags], folder / "whole.jsonl", folder / "out.jsonl"


@pytest.fixture(scope="module")
def half_folder(tiny_model, tmp_path_factory):
    """A folder with the first half of a greedy job's rows finished, and a model of its own."""
    folder = tmp_path_factory.mktemp("half")
    shutil.copytree(tiny_model(), folder / "model")
    write_jsonl(folder / "in.jsonl", [{"messages": [user(f"row {i}")]} for i in range(12)])
    args, whole, out = half_job(folder)
    assert pagedgen(*args, "-o", whole).returncode == 0
    leave_unwritten(*args, "-o", out)
    keep_lines(out, lambda row, sample, turn: row < 6)
    return folder


@pytest.fixture
def half_done(half_folder, tmp_path):
    """Return the arguments of a job that is half done, its undisturbed output and its output to be."""
    shutil.copytree(half_folder, tmp_path, dirs_exist_ok=True)
    return half_job(tmp_path)


def change_weights(model):
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def change_template(model):
    (model / "chat_template.jinja").write_text(STRICT_TEMPLATE)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("flags", "change", "named"),
    [
        (["--temperature", 0.7], None, "sampling.temperature was 0.0, is 0.7"),
        (["--stop", "x"], None, 'sampling.stop was [], is ["x"]'),
        ([], change_weights, "model.files.model.safetensors was"),
        (["--chat-template", "other.jinja"], None, "prompts.chat_template was"),
        ([], change_template, "prompts.chat_template was"),
        (["--seed", 1], None, "engine.seed was 0, is 1"),
        (["--max-tokens", 6], None, "sampling.max_tokens was 5, is 6"),
        (["--kv-cache-dtype", "int8"], None, 'engine.kv_cache_dtype was "auto", is "int8"'),
    ],
    ids=["temperature", "stop", "weights", "template_flag", "template_file", "seed", "max_tokens", "kv_cache_dtype"],
)
def test_rs_02_a_changed_setting_is_refused_by_name(half_done, tmp_path, flags, change, named, finished):
    args, whole, out = half_done
    (tmp_path / "other.jinja").write_text(STRICT_TEMPLATE)
    if change is not None:
        change(tmp_path / "model")
    target = whole if finished else out
    before = [p.read_bytes() for p in (*parts_of(out), whole)]
    done = pagedgen(*args, *flags, "-o", target, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert named in one_line(done.stderr)
    assert ("--overwrite" if finished else "--restart") in one_line(done.stderr)
    assert [p.read_bytes() for p in (*parts_of(out), whole)] == before  # nothing is lost
    assert not out.exists()


@pytest.mark.parametrize(
    "flags", [["--stats", "other.json"], ["--max-num-seqs", 2, "--max-num-batched-tokens", 64], ["--progress", "json"]]
)
def test_rs_02_what_shapes_no_result_may_change(half_done, tmp_path, flags):
    args, whole, out = half_done
    done = pagedgen(*args, *flags, "-o", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stats = json.loads((tmp_path / ("other.json" if "--stats" in flags else "out.jsonl.stats.json")).read_text())
    assert (stats["rows_reused"], stats["generated_tokens"]) == (6, 30)
    assert out.read_bytes() == whole.read_bytes()


def repeated_job(tiny_model, tmp_path):
    """Return a job of four samples a row, where rows 5 and 6 have the same text, and its undisturbed output."""
    rows = [{"id": f"q{i}", "prompt": "the same text" if i in (5, 6) else f"row {i}"} for i in range(8)]
    args = ["run", tiny_model(), write_jsonl(tmp_path / "in.jsonl", rows), "--n", 4, "--temperature", 1, "--seed", 3]
    args += ["--max-tokens", 6, "--ignore-eos"]
    whole = tmp_path / "whole.jsonl"
    assert pagedgen(*args, "-o", whole).returncode == 0
    return args, whole


@pytest.mark.parametrize(
    ("missing", "count"),
    [
        (lambda row, sample: (row, sample) in ((5, 1), (5, 3)), 2),
        (lambda row, sample: (row == 5 and sample in (1, 3)) or row > 5, 10),
        (lambda row, sample: row == 6, 4),
    ],
    ids=["samples_1_and_3_of_row_5", "all_behind_them_too", "one_of_two_rows_of_the_same_text"],
)
def test_rs_03_only_missing_samples_are_made(tiny_model, tmp_path, missing, count):
    args, whole = repeated_job(tiny_model, tmp_path)
    out = tmp_path / "out.jsonl"
    leave_unwritten(*args, "-o", out)
    keep_lines(out, lambda row, sample, turn: not missing(row, sample))
    done = pagedgen(*args, "-o", out)
    assert done.returncode == 0, done.stderr
    stats = stats_of(out)
    assert (stats["rows_reused"], stats["generated_tokens"]) == (32 - count, 6 * count)
    assert out.read_bytes() == whole.read_bytes()
    rows = read_jsonl(out)
    assert [(r["id"], r["sample_index"]) for r in rows] == [(f"q{i}", s) for i in range(8) for s in range(4)]
    assert all(len({r["response"] for r in rows if r["row_index"] == i}) == 4 for i in range(8))
    answers = [[r["response"] for r in rows if r["row_index"] == i] for i in (5, 6)]
    assert answers[0] != answers[1]


# The command line
