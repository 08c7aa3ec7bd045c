"""Failures of such tools in the field: what they wrote and said (OU, CL, PC). A name carries the case's number."""

from __future__ import annotations

import contextlib
import decimal
import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from case_tools import column, keep_lines, leave_unwritten, one_line, plan_of, read_jsonl, stats_of
from command import COMMAND, ENV, pagedgen
from job_runs import start, write_jsonl

from pagedgen.rows import sinks


def parquet_job(tiny_model, tmp_path, name, prompts, code):
    source, out = tmp_path / f"{name}.parquet", tmp_path / f"{name}.out.parquet"
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string()), "n": pa.array(range(len(prompts)), pa.int16())}), source)
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 1, "--ignore-eos", "--token-ids")
    assert done.returncode == code, done.stderr
    return pq.read_table(out), out


def test_ou_01_the_schema_is_fixed_whatever_the_rows_hold(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "_GROUP_ROWS", 1000)
    late, path = parquet_job(tiny_model, tmp_path, "late", [None if i == 4321 else "a" for i in range(5000)], 3)
    assert pq.ParquetFile(path).num_row_groups >= 4
    assert [i for i, code in enumerate(late.column("error_code").to_pylist()) if code] == [4321]
    assert late.column("error")[4321].as_py() and late.column("token_ids")[4321].as_py() is None
    assert len(late.column("token_ids")[4320].as_py()) == 1
    failed, _ = parquet_job(tiny_model, tmp_path, "failed", [None] * 30, 3)
    assert failed.column("error_code").to_pylist() == ["null_prompt"] * 30
    empty, _ = parquet_job(tiny_model, tmp_path, "empty", [], 0)
    assert len(empty) == 0
    assert failed.schema.remove_metadata() == empty.schema.remove_metadata() == late.schema.remove_metadata()
    types = {field.name: field.type for field in late.schema}
    text, number = pa.string(), pa.int64()
    assert types == {
        "id": number, "row_index": number, "sample_index": pa.int32(), "turn_index": pa.int32(), "prompt": text,
        "n": pa.int16(), "response": text, "token_ids": pa.list_(pa.int32()), "finish_reason": text, "stop_reason": text,
        "num_prompt_tokens": number, "num_truncated_tokens": number, "num_generated_tokens": number, "score": pa.float64(),
        "seed": pa.uint64(), "error_code": text, "error": text,
    }  # fmt: skip


def test_ou_01_a_parquet_file_without_rows_gives_an_empty_output_of_either_format(tiny_model, tmp_path):
    source, out = tmp_path / "none.parquet", tmp_path / "out.jsonl"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), source)
    done = pagedgen("run", tiny_model(), source, "-o", out)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == b""
    assert stats_of(out)["rows"]["total"] == 0
    assert plan_of(tiny_model(), source)["num_rows"] == 0


IDS = {
    "int64": pa.array([9223372036854775807, 9007199254740993, None, 1], pa.int64()),
    "string": pa.array(["1", "01", "1.0", None]),
    "uint64": pa.array([2**64 - 1, None, 2**53 + 1, 0], pa.uint64()),
    "decimal": pa.array([decimal.Decimal("1.10"), decimal.Decimal("123456789012345678.90"), None], pa.decimal128(20, 2)),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", list(IDS))
def test_ou_02_ids_come_back_exactly(tiny_model, tmp_path, kind, suffix):
    ids = IDS[kind]
    source, out = tmp_path / "ids.parquet", tmp_path / f"out{suffix}"
    pq.write_table(pa.table({"id": ids, "prompt": ["a"] * len(ids)}), source)
    done = pagedgen("run", tiny_model(), source, "--id-column", "id", "-o", out, "--max-tokens", 1)
    assert done.returncode == 0, done.stderr
    if suffix == ".parquet":
        table = pq.read_table(out)
        assert table.schema.field("id").type == ids.type
        assert table.column("id").to_pylist() == ids.to_pylist()
        assert table.column("row_index").to_pylist() == list(range(len(ids)))
        return
    rows = read_jsonl(out)
    expected = [str(v) if isinstance(v, decimal.Decimal) else v for v in ids.to_pylist()]
    assert column(rows, "id") == expected
    assert [type(i) for i in column(rows, "id")] == [type(i) for i in expected]
    assert column(rows, "row_index") == list(range(len(ids)))
    for line, value in zip(out.read_bytes().splitlines(), expected, strict=True):
        assert line.startswith(f'{{"id": {json.dumps(value)}, "row_index": '.encode())


def test_ou_02_ids_of_json_lines_become_exact_integers_in_parquet(tiny_model, tmp_path):
    ids = [9223372036854775807, 9007199254740993, None, 1]
    source, out = write_jsonl(tmp_path / "ids.jsonl", [{"id": i, "prompt": "a"} for i in ids]), tmp_path / "out.parquet"
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 1)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(out)
    assert (table.column("id").to_pylist(), table.schema.field("id").type) == (ids, pa.int64())


def test_ou_03_results_stand_in_the_order_of_the_input_each_exactly_once(tiny_model, tmp_path):
    wanted = [1 + (i * 37) % 25 for i in range(300)]
    rows = [
        {"id": f"q{(i * 7919) % 300}", "prompt": f"row {i}", "sampling_params": {"max_tokens": wanted[i]}} for i in range(300)
    ]
    bad, too_long = set(range(4, 300, 30)), set(range(11, 300, 60))
    assert (len(bad), len(too_long)) == (10, 5)
    for i in bad:
        rows[i]["prompt"] = None
    for i in too_long:
        rows[i]["prompt"] = "x" * 200
    source = write_jsonl(tmp_path / "mix.jsonl", rows)
    flags = ["--n", 2, "--temperature", 1, "--seed", 5, "--ignore-eos", "--max-model-len", 99, "--max-error-rate", 0.1]
    outputs = tmp_path / "out.jsonl", tmp_path / "unsorted.jsonl"
    for out, more in zip(outputs, ([], ["--sort", "none", "--max-num-seqs", 48]), strict=True):
        done = pagedgen("run", tiny_model(), source, "-o", out, *flags, *more)
        assert done.returncode == 0, done.stderr
    got = read_jsonl(outputs[0])
    assert len(got) == 600
    assert [(r["row_index"], r["sample_index"]) for r in got] == [(i, s) for i in range(300) for s in range(2)]
    assert next(iter(got[0])) == "id"
    by_id = {row["id"]: row for row in rows}
    assert len({(r["id"], r["sample_index"]) for r in got}) == 600  # a join meets nothing twice
    for r in got:
        i = r["row_index"]
        assert by_id[r["id"]] == rows[i] and r["prompt"] == rows[i]["prompt"]
        expected = "null_prompt" if i in bad else "prompt_too_long" if i in too_long else None
        assert r["error_code"] == expected
        assert r["num_generated_tokens"] == (0 if expected else wanted[i])
    assert outputs[0].read_bytes() == outputs[1].read_bytes()  # order of work shows nowhere


def duplicate_ids(folder):
    """Write two files of a glob, both with equal ids, and return what the glob's rows hold."""
    parts = [[(7, "a"), (7, "b"), ("7", "a"), (8, "c")], [(7, "a"), (8, "d")]]
    for number, rows in enumerate(parts):
        write_jsonl(folder / f"part{number}.jsonl", [{"id": i, "prompt": f"row {p}"} for i, p in rows])
    return [(i, f"row {p}") for rows in parts for i, p in rows]


def test_ou_04_rows_of_one_id_stay_rows_of_their_own(tiny_model, tmp_path):
    expected = duplicate_ids(tmp_path)
    out = tmp_path / "out.jsonl"
    done = pagedgen("run", tiny_model(), "part*.jsonl", "--id-column", "id", "-o", out, "--max-tokens", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    assert [(r["id"], r["prompt"]) for r in rows] == expected
    assert [type(r["id"]) for r in rows] == [int, int, str, int, int, int]  # 7 and "7" are two ids
    assert column(rows, "row_index") == list(range(6))


def test_ou_04_no_row_is_taken_for_done_because_of_its_twin(tiny_model, tmp_path):
    duplicate_ids(tmp_path)
    args = ["run", tiny_model(), tmp_path / "part*.jsonl", "--id-column", "id", "--max-tokens", 3, "--ignore-eos"]
    args += ["--temperature", 1]
    whole, out = tmp_path / "whole.out.jsonl", tmp_path / "resumed.out.jsonl"
    assert pagedgen(*args, "-o", whole).returncode == 0
    leave_unwritten(*args, "-o", out)
    keep_lines(out, lambda row, sample, turn: row == 0)
    done = pagedgen(*args, "-o", out)
    assert done.returncode == 0, done.stderr
    assert (stats_of(out)["rows_reused"], stats_of(out)["generated_tokens"]) == (1, 15)
    assert out.read_bytes() == whole.read_bytes()


# Resuming


def pipeline(script, tmp_path, **env):
    return subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**ENV, "PYTHONWARNINGS": "always", **env},
    )


def test_cl_01_only_json_lines_are_on_stdout_and_all_else_on_stderr(tiny_model, tmp_path):
    write_jsonl(tmp_path / "p.jsonl", [*({"prompt": f"row {i}"} for i in range(20)), {"prompt": None}])
    command = shlex.join([*COMMAND, "run", str(tiny_model()), "-", "-o", "-", "--max-tokens", "4"])
    parse = "import sys, json; [json.loads(l) for l in sys.stdin]"
    reader = shlex.join([sys.executable, "-c", parse])
    done = pipeline(f'cat p.jsonl | {command} | tee seen.jsonl | {reader}; echo "${{PIPESTATUS[@]}}"', tmp_path)
    assert done.stdout.split() == ["0", "3", "0", "0"], done.stderr  # 3: a row failed
    assert column(read_jsonl(tmp_path / "seen.jsonl"), "row_index") == list(range(21))
    assert "generating" in done.stderr and "pagedgen run" in done.stderr and "rows failed" in done.stderr
    assert "\r" not in done.stderr and "\x1b" not in done.stderr  # no bar where no terminal is
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl", "seen.jsonl"]


def test_cl_01_a_reader_that_closes_early_ends_it_quietly(tiny_model, tmp_path):
    write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"row {i}", "ballast": "x" * 10_000} for i in range(100)])  # no pipe holds it
    command = shlex.join([*COMMAND, "run", str(tiny_model()), "-", "-o", "-", "--max-tokens", "4"])
    done = pipeline(f'cat p.jsonl | {command} | head -1; exit "${{PIPESTATUS[1]}}"', tmp_path)
    assert done.returncode == 4, done.stderr
    assert [json.loads(line)["row_index"] for line in done.stdout.splitlines()] == [0]
    assert "stdout" in done.stderr.splitlines()[-1] and "closed" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr and "BrokenPipeError" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl"]


def test_cl_01_plan_prints_one_json_document(tiny_model, tmp_path):
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "<s>a"}, {"prompt": None}])
    done = pagedgen("plan", tiny_model("llama", bos=True), source, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_rows"] == 2  # one document: anything else on stdout would not parse
    assert done.stderr == ""


def rows_with_errors(count, num_errors):
    return [{"prompt": None if i < num_errors else f"row {i}"} for i in range(count)]


@pytest.mark.parametrize(
    ("num_errors", "flags", "code"),
    [
        (0, [], 0),
        (1, [], 3),
        (1, ["--max-error-rate", 0.01], 0),
        (2, ["--max-error-rate", 0.01], 3),
        (100, [], 3),
        (100, ["--max-error-rate", 0.99], 3),
    ],
)
def test_cl_02_the_exit_code_says_whether_rows_failed(tiny_model, tmp_path, num_errors, flags, code):
    source, out = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(100, num_errors)), tmp_path / "out.jsonl"
    args = ["run", tiny_model(), source, "-o", out, "--max-tokens", 1, *flags]
    done = pagedgen(*args)
    assert done.returncode == code, done.stderr
    which = "all 100 rows failed" if num_errors == 100 else f"{num_errors} of 100 rows failed"
    assert (which in one_line(done.stderr)) == (code == 3)
    rows = read_jsonl(out)
    assert [r["finish_reason"] == "error" for r in rows] == [i < num_errors for i in range(100)]
    assert all((r["error_code"] is not None) == (r["error"] is not None) == (r["finish_reason"] == "error") for r in rows)
    assert pagedgen(*args).returncode == code  # the same when it was done already


def test_cl_02_a_run_without_one_usable_row_is_never_a_success(tiny_model, tmp_path):
    source, out = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(10, 10)), tmp_path / "out.jsonl"
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 1, "--max-error-rate", 1)
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "MODEL", "x.jsonl", "-o", "out.jsonl", "--no-such-flag"], "--no-such-flag"),
        (["run", "MODEL", "x.jsonl", "-o", "out.jsonl", "--max-tokens", "many"], "--max-tokens"),
        (["run", "MODEL", "missing.jsonl", "-o", "out.jsonl"], "no such file: missing.jsonl"),
        (["run", "MODEL", "empty.jsonl", "-o", "out.jsonl"], "no rows"),
        (["run", "MODEL", "x.jsonl", "-o", "existing.jsonl"], "existing.jsonl exists; pass --overwrite"),
        (["run", "MODEL", "x.jsonl", "-o", "existing.jsonl", "--restart"], "existing.jsonl exists; pass --overwrite"),
    ],
)
def test_cl_02_what_can_not_be_run_exits_with_2_and_touches_nothing(tiny_model, tmp_path, args, said):
    write_jsonl(tmp_path / "x.jsonl", rows_with_errors(2, 0))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "existing.jsonl").write_text("somebody's\n")
    before = sorted(os.listdir(tmp_path))
    done = pagedgen(*[tiny_model() if a == "MODEL" else a for a in args], cwd=tmp_path)
    assert done.returncode == 2
    assert said in one_line(done.stderr)
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "existing.jsonl").read_text() == "somebody's\n"


def test_cl_02_an_existing_output_is_replaced_only_on_demand(tiny_model, tmp_path):
    source, out = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(2, 0)), tmp_path / "existing.jsonl"
    out.write_text("somebody's\n")
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 1, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert len(read_jsonl(out)) == 2


def test_cl_02_an_output_that_can_not_be_written_exits_with_4(tiny_model, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(2, 0))
    done = pagedgen("run", tiny_model(), source, "-o", tmp_path / "missing" / "out.jsonl", "--max-tokens", 1)
    assert done.returncode == 4
    assert "out.jsonl" in one_line(done.stderr) and "loading" not in done.stderr


def test_cl_02_an_interrupted_run_exits_with_75(tiny_model, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(200, 0))
    args = ["run", tiny_model(), source, "-o", "out.jsonl", "--max-tokens", 500, "--ignore-eos", "--max-num-seqs", 2]
    process = start(*args, "--grace", "0s", cwd=tmp_path)
    with contextlib.suppress(StopIteration):
        while b"generating" not in next(process.stderr):
            pass
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert b"Traceback" not in err
    assert not (tmp_path / "out.jsonl").exists()
    assert pagedgen(*args, "--deadline", "0.001s", cwd=tmp_path).returncode == 75


# Statistics


def test_pc_05_unrelated_prompts_have_no_hits_however_often_they_are_preempted(tiny_model, tmp_path, eager_admission):
    prompts = np.random.default_rng(5).integers(7, 263, size=(60, 40)).tolist()
    source = write_jsonl(tmp_path / "nohit.jsonl", [{"prompt_token_ids": p} for p in prompts])
    out, roomy, file = tmp_path / "out.jsonl", tmp_path / "roomy.jsonl", tmp_path / "s.json"
    flags = ["--block-size", 4, "--max-tokens", 60, "--ignore-eos"]
    done = pagedgen("run", tiny_model(), source, "-o", out, *flags, "--max-block-num", 48, "--stats", file, "--cached-tokens")
    assert done.returncode == 0, done.stderr
    rows, stats = read_jsonl(out), json.loads(file.read_text())
    assert stats["preemptions"] > 0 and stats["recomputed_tokens"] > 0
    prefix = stats["prefix_cache"]
    assert prefix["enabled"]
    assert prefix["shareable_tokens"] == prefix["hit_rows"] == prefix["hit_blocks"] == prefix["saved_tokens"] == 0
    assert prefix["recovered_tokens"] > 0  # what preempted rows found of their own stands apart
    assert stats["cached_tokens"] == 0 and not any(r["num_cached_tokens"] for r in rows)
    assert stats["prompt_tokens"] == sum(r["num_prompt_tokens"] for r in rows) == 60 * 40
    assert stats["generated_tokens"] == sum(r["num_generated_tokens"] for r in rows) == 60 * 60
    fed = 60 * (40 + 60 - 1)  # a row's last token is never fed back
    assert stats["computed_tokens"] == fed + stats["recomputed_tokens"]
    assert pagedgen("run", tiny_model(), source, "-o", roomy, *flags, "--cached-tokens").returncode == 0
    assert roomy.read_bytes() == out.read_bytes()
    undisturbed = stats_of(roomy)
    assert (undisturbed["preemptions"], undisturbed["recomputed_tokens"], undisturbed["computed_tokens"]) == (0, 0, fed)
    assert undisturbed["prefix_cache"]["recovered_tokens"] == 0
