"""`--kv-cache-dtype` at the command line: what a plan counts, where it is refused, that `tune` and `run` take it."""

from __future__ import annotations

import json

import pytest
from command import pagedgen, read_jsonl


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [{"id": i, "prompt": f"row {i} " * (i + 4)} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plan(*arguments):
    result = pagedgen("plan", *arguments, "--json", "--dtype", "bfloat16", "--max-tokens", 40)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_plan_counts_codes_and_scales(tiny_model, prompts):
    flags = [tiny_model(), prompts, "--kv-cache-memory-bytes", "1MiB"]
    auto, int8 = plan(*flags), plan(*flags, "--kv-cache-dtype", "int8")
    assert auto["bytes_per_token"] == 2 * 3 * 2 * 16 * 2
    assert int8["bytes_per_token"] == 2 * 3 * 2 * (16 + 4)
    for told in (auto, int8):
        assert told["bytes_per_block"] == told["block_size"] * told["bytes_per_token"]
        assert told["max_block_num"] == 2**20 // told["bytes_per_block"]
    assert (auto["model"]["kv_cache_dtype"], int8["model"]["kv_cache_dtype"]) == ("bfloat16", "int8")
    assert auto["activation_peak_bytes"] == int8["activation_peak_bytes"]


def test_a_plan_says_what_the_other_dtype_would_change(tiny_model, prompts):
    flags = [tiny_model(), prompts, "--block-size", 4, "--max-block-num", 50]
    for dtype, other, blocks in (("auto", "int8", 80), ("int8", "auto", 31)):  # 32 bytes a head and 20
        what_if = {each["what"]: each["num_blocks"] for each in plan(*flags, "--kv-cache-dtype", dtype)["what_if"]}
        assert what_if == {
            "half the memory for K/V": 25,
            "twice the memory for K/V": 100,
            f"--kv-cache-dtype {other}": blocks,
        }
    on_gpu = plan(*flags, "--device", "cuda", "--device-memory", "80GiB")["what_if"]
    assert not any("kv-cache-dtype" in each["what"] for each in on_gpu)
    table = pagedgen("plan", *flags, "--kv-cache-dtype", "int8", "--max-tokens", 40).stdout
    assert "240 bytes (int8, scales included)" in table


def test_a_gpu_is_refused_before_anything_runs(tiny_model, prompts):
    done = pagedgen("plan", tiny_model(), prompts, "--device", "cuda", "--device-memory", "80GiB", "--kv-cache-dtype", "int8")
    assert done.returncode == 2
    assert "--kv-cache-dtype int8 runs on the cpu and reference backends only" in " ".join(done.stderr.split())
    done = pagedgen("plan", tiny_model(), prompts, "--kv-cache-dtype", "int4")
    assert done.returncode == 2
    assert "--kv-cache-dtype int4 is not one of auto, int8" in done.stderr


def test_a_run_says_what_it_ran_as(tiny_model, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--kv-cache-dtype", "int8", "--dtype", "float32", "--max-tokens", 4, "--ignore-eos"]
    done = pagedgen("run", tiny_model(), prompts, "-o", out, *flags)
    assert done.returncode == 0, done.stderr
    assert "float32, int8 K/V on cpu" in done.stderr
    assert len(read_jsonl(out)) == 12
    stats = json.loads((tmp_path / "out.jsonl.stats.json").read_text())
    assert stats["plan"]["bytes_per_token"] == 2 * 3 * 2 * (16 + 4)
    assert stats["config"]["engine"]["kv_cache_dtype"] == "int8"


def test_tune_keeps_a_profile_for_each(tiny_model, monkeypatch, tmp_path):
    from pagedgen.model import demo

    monkeypatch.setattr(demo, "cache_root", lambda: tmp_path / "cache")
    paths = set()
    for dtype in ("auto", "int8"):
        done = pagedgen("tune", tiny_model(), "--max-num-seqs", 2, "--kv-cache-dtype", dtype, "--json")
        assert done.returncode == 0, done.stderr
        profile = json.loads(done.stdout)
        assert all(seconds > 0 for seconds in profile["decode_s_by_block_size"].values())
        paths.add(profile["path"])
    assert len(paths) == 2
