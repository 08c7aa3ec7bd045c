"""`plan` and `tune` at the command line, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import pagedgen


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    common = list(range(5, 45))
    rows = [{"prompt_token_ids": [*common, 50 + i, 3 + i]} for i in range(12)] + [
        {"prompt_token_ids": [9, i]} for i in range(8)
    ]
    path.write_text("".join(json.dumps({**r, "sampling_params": {"max_tokens": 6, "ignore_eos": True}}) + "\n" for r in rows))
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A place of its own for profiles; compiled kernels are found where they were."""
    from pagedgen.jobs import planning

    monkeypatch.setattr(planning, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def plan(*arguments):
    result = pagedgen("plan", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_plan_foretells_what_a_run_does(tiny_model, prompts, tmp_path, cache):
    model, flags = tiny_model("llama"), ["--block-size", 8, "--max-num-seqs", 8, "--max-block-num", 40]
    told = plan(model, prompts, *flags)
    assert told["forecast"]["generate_s"] is None
    out = tmp_path / "out.jsonl"
    assert pagedgen("run", model, prompts, "-o", out, *flags, "--audit").returncode == 0
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    forecast = told["forecast"]
    assert forecast["steps"] == stats["num_steps"]
    assert forecast["peak_blocks"] == stats["blocks"]["peak"]
    assert forecast["computed_tokens"] == stats["computed_tokens"]
    assert forecast["generated_tokens"] == stats["generated_tokens"] == 120
    assert forecast["saved_tokens"] == stats["prefix_cache"]["saved_tokens"] == 11 * 40
    assert told["sharing"]["attainable_tokens"] == 11 * 40
    assert told["sharing"]["group_sizes"] == [12]
    assert sum(b["rows"] for b in told["prompt_lengths"]) == 20
    assert told["recommended_block_size"] in (8, 16, 32, 64)


@pytest.mark.parametrize("sort", ["prefix", "none"])
def test_beams_and_later_turns_are_foretold(tiny_model, tmp_path, cache, sort):
    """Steps and tokens exactly, as they don't depend on which beams go on; blocks nearly."""
    model, path, out = tiny_model("llama"), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    beams = {"sampling_params": {"max_tokens": 24, "ignore_eos": True, "beam_width": 4, "n": 2}}
    rows = [{"prompt_token_ids": list(range(5, 25 + 3 * i)), **beams} for i in range(6)]
    rows += [{"turns": ["a" * 20, "b" * 20, "c" * 20], "sampling_params": {"max_tokens": 9, "ignore_eos": True}}] * 5
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = ["--block-size", 4, "--sort", sort, "--max-num-seqs", 20]
    told = plan(model, path, *flags)["forecast"]
    assert pagedgen("run", model, path, "-o", out, *flags, "--audit").returncode == 0
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    assert told["generated_tokens"] == stats["generated_tokens"] == 6 * 2 * 24 + 5 * 3 * 9
    assert told["steps"] == stats["num_steps"]
    assert told["computed_tokens"] == stats["computed_tokens"]
    assert told["peak_blocks"] == pytest.approx(stats["blocks"]["peak"], rel=0.1)


def test_the_table_has_every_part(tiny_model, prompts, cache):
    result = pagedgen("plan", tiny_model("llama"), prompts)
    assert result.returncode == 0, result.stderr
    for text in (
        "max_block_num",
        "common beginnings",
        "foretold run",
        "block sizes",
        "largest groups",
        "pagedgen tune",
    ):
        assert text in result.stdout


def test_tune_measures_and_plan_uses_it(tiny_model, prompts, cache):
    model = tiny_model("llama")
    tuned = pagedgen("tune", model, "--max-num-seqs", 16, "--json")
    assert tuned.returncode == 0, tuned.stderr
    profile = json.loads(tuned.stdout)
    assert all(t > 0 for t in profile["table_s"])
    assert set(profile["decode_s_by_block_size"]) == {"8", "16", "32", "64"}
    told = plan(model, prompts)
    assert told["forecast"]["generate_s"] > 0
    assert told["forecast"]["wall_s"] > told["forecast"]["generate_s"] + profile["start_s"] - 1
    assert told["config"]["knee_tokens"] == profile["knee_tokens"] > 0
    assert profile["num_seqs"] == 0  # the flag said it
    assert told["config"]["max_num_seqs"] == 128
    path = Path(profile["path"])
    path.write_text(path.read_text().replace('"num_seqs": 0', '"num_seqs": 300'))
    for flags, rows in (([], 300), (["--max-num-seqs", 5], 5), (["--max-num-batched-tokens", 200], 128)):
        assert plan(model, prompts, *flags)["config"]["max_num_seqs"] == rows
    given = plan(model, prompts, "--max-num-batched-tokens", 200)["config"]
    assert (given["max_num_batched_tokens"], given["knee_tokens"]) == (200, 0)
    assert "tokens/s" in pagedgen("plan", model, prompts).stdout


def test_a_trace_is_planned_from_lengths_alone(tiny_model, tmp_path, cache):
    path = tmp_path / "trace.jsonl"
    rows = [{"input_length": 600, "output_length": 5 + i, "hash_ids": [0, 1 + i]} for i in range(6)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    told = plan(tiny_model("llama", max_position_embeddings=4096), "--trace", path, "--block-size", 64, "--max-tokens", 50)
    assert told["sharing"]["attainable_tokens"] == 5 * 512
    assert told["forecast"]["saved_tokens"] == 5 * 512
    assert told["forecast"]["generated_tokens"] == sum(5 + i for i in range(6))


def test_auto_block_size_is_what_plan_recommends(tiny_model, prompts, tmp_path, cache):
    model, out = tiny_model("llama"), tmp_path / "out.jsonl"
    told = plan(model, prompts, "--block-size", "auto")
    assert told["block_size"] == told["recommended_block_size"]
    assert pagedgen("run", model, prompts, "-o", out, "--block-size", "auto").returncode == 0
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    assert stats["config"]["engine"]["block_size"] == told["recommended_block_size"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--trace"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["in.jsonl", "--trace", "x.csv"], "one of them"),
        (["in.jsonl", "--block-size", "many"], "--block-size many"),
        (["in.jsonl", "--sort", "random"], "--sort random"),
        (["in.jsonl", "--assume-output-tokens", "0"], "--assume-output-tokens 0"),
    ],
)
def test_what_cant_be_planned_is_told(tiny_model, cache, arguments, says):
    result = pagedgen("plan", tiny_model("llama"), *arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_auto_block_size_needs_an_input_that_can_be_read_twice(tiny_model, tmp_path, cache):
    result = pagedgen("run", tiny_model("llama"), "-", "-o", tmp_path / "o.jsonl", "--block-size", "auto")
    assert result.returncode == 2
    assert "stdin" in result.stderr


@pytest.mark.parametrize(
    ("rows", "flags", "says"),
    [
        ([[5, 6, 7]], [], "one row"),
        ([[5, 6, i] for i in range(8)], [], "all rows have one length"),
        ([[i] * 50 for i in range(5, 25)], ["--max-block-num", 8, "--block-size", 8], "larger than the pool"),
    ],
)
def test_where_a_plan_cant_help_is_said(tiny_model, tmp_path, cache, rows, flags, says):
    path = tmp_path / "in.jsonl"
    rows = [*rows, [9] * 100] if "pool" in says else rows
    path.write_text("".join(json.dumps({"prompt_token_ids": r}) + "\n" for r in rows))
    told = plan(tiny_model("llama"), path, "--max-tokens", 4, *flags)
    assert any(says in warning for warning in told["warnings"])


@pytest.mark.parametrize(
    "rows", [[{"prompt": 5}, {"prompt": None}], [{"prompt_token_ids": [5] * 5000}]], ids=["bad", "too long"]
)
def test_a_plan_without_a_row_that_runs_is_a_plan(tiny_model, tmp_path, cache, rows):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    told = plan(tiny_model("llama"), path)
    assert told["forecast"]["steps"] == told["forecast"]["generated_tokens"] == 0
    assert told["num_rows"] == len(rows)
    assert pagedgen("plan", tiny_model("llama"), path).returncode == 0


def test_rows_of_a_trace_that_dont_fit_the_context_are_left_out(tiny_model, tmp_path, cache):
    path = tmp_path / "trace.csv"
    path.write_text("input_length,output_length\n20,5\n9000,5\n30,7\n")
    told = plan(tiny_model("llama"), "--trace", path)
    assert (told["num_rows"], told["num_too_long"]) == (3, 1)
    assert told["forecast"]["generated_tokens"] == 12
    assert told["sharing"]["prompt_tokens"] == 50


def test_a_large_job_is_foretold_from_a_sample(tiny_model, tmp_path, cache, monkeypatch):
    """Equal rows: twice as many take twice as long, whether all were simulated or not."""
    from pagedgen.engine import forecast

    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [i % 90, i // 90, 3]}) + "\n" for i in range(1200)))
    flags = ["--max-num-seqs", 8, "--max-tokens", 6, "--ignore-eos"]
    whole = plan(tiny_model("llama"), path, *flags)["forecast"]
    monkeypatch.setattr(forecast, "_MOST_SIMULATED_ROWS", 200)
    sampled = plan(tiny_model("llama"), path, *flags)["forecast"]
    assert whole["simulated_rows"] == 1200
    assert sampled["simulated_rows"] < 400
    for name in ("steps", "generated_tokens", "computed_tokens"):
        assert sampled[name] == pytest.approx(whole[name], rel=0.05)
    assert sampled["peak_blocks"] == whole["peak_blocks"]


def test_an_unfinished_job_keeps_the_block_size_it_chose(tiny_model, prompts, tmp_path, cache):
    from pagedgen.jobs.resume import begun_block_size

    model, out = tiny_model("llama"), tmp_path / "out.jsonl"
    assert begun_block_size(str(out)) is None
    assert pagedgen("run", model, prompts, "-o", out, "--block-size", 4).returncode == 0
    assert begun_block_size(str(out)) == 4
    again = pagedgen("run", model, prompts, "-o", out, "--block-size", "auto")
    assert again.returncode == 0, again.stderr
    assert "complete" in again.stderr


def test_sampling_that_a_trace_cant_be_run_with_is_told(tiny_model, tmp_path, cache):
    path = tmp_path / "trace.csv"
    path.write_text("input_length,output_length\n20,5\n")
    result = pagedgen("plan", tiny_model("llama"), "--trace", path, "--n", 200, "--max-num-seqs", 100)
    assert result.returncode == 2
    assert "n 200 is more than --max-num-seqs 100" in result.stderr.replace("\n", " ")


def test_the_start_that_tune_measures_has_the_imports_in_it(tiny_model):
    """A run's clock starts before torch is imported; a plan adds what `tune` measured to what the steps take."""
    code = (
        "import sys, pagedgen.job, pagedgen.jobs.planning as planning\n"
        "from pagedgen.config import EngineConfig\n"
        "class Clock(Exception): pass\n"
        "def started(): raise Clock(str('torch' in sys.modules))\n"
        "planning.RunStats = started\n"
        "try: pagedgen.job.tune(EngineConfig(sys.argv[1]), None)\n"
        "except Clock as clock: print(clock)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_model())], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr
