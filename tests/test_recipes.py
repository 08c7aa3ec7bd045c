"""Every recipe that ships works: TOML files are accepted by `run`, sbatch files start the command they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
COMMAND = [sys.executable, "-c", "from pagedgen.cli.main import command; command()"]


def run(*args, **env):
    return subprocess.run(
        [*map(str, args)], capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "COLUMNS": "200", **env}
    )


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.name)
def test_toml_recipes_are_accepted_and_flags_win(tiny_model, tmp_path, recipe):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    out = tmp_path / "o.jsonl"
    done = run(*COMMAND, "run", tiny_model(), tmp_path / "p.jsonl", "-o", out, "--config", recipe, "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "o.jsonl.stats.json").read_text())["config"]
    assert config["sampling"]["max_tokens"] == 3
    assert config["sampling"]["temperature"] == (0.8 if recipe.name == "sampling.toml" else 0.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-token = 3", "did you mean max-tokens"),
        ("zzz = 3", "known are"),
        ("= nonsense", "can't be read"),
        ('max-tokens = "many"', "integer"),
    ],
)
def test_bad_config_files_are_told(tiny_model, tmp_path, text, said):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    (tmp_path / "c.toml").write_text(text)
    done = run(*COMMAND, "run", tiny_model(), tmp_path / "p.jsonl", "-o", tmp_path / "o.jsonl", "--config", tmp_path / "c.toml")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.sbatch")), ids=lambda p: p.name)
def test_sbatch_recipes_run_the_job(tiny_model, tmp_path, recipe):
    """The script itself, as Slurm's batch shell would run it (a GPU is not asked for here)."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    command = tmp_path / "pagedgen"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from pagedgen.cli.main import command; command()" "$@"\n')
    command.chmod(0o755)
    done = run(
        "bash", recipe, MODEL=str(tiny_model()), PROMPTS=str(tmp_path / "p.jsonl"), OUT=str(tmp_path / "o.jsonl"),
        PAGEDGEN=str(command), PAGEDGEN_FLAGS="--max-tokens 3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "o.jsonl").read_text())["num_generated_tokens"] <= 3


def test_paging_counts_what_both_ways_hold_and_compute(tiny_model, tmp_path):
    """Six rows in three batches of two, and in a pool of two reservations; every count by hand."""
    from pagedgen.recipes.benchmarks import paging, paging_report

    lengths = [(2, 3), (4, 1), (7, 4), (7, 4), (5, 2), (3, 4)]  # prompt, max_tokens
    rows = [paging.Row(list(range(100 + 10 * i, 100 + 10 * i + n)), new) for i, (n, new) in enumerate(lengths)]
    line = paging.measure(str(tiny_model()), rows, kv_tokens=22, block_size=4, block_sizes=[8], cache="static")
    assert (line["reservation"], line["batch_rows"], line["rows_that_agree"]) == (11, 2, 6)

    static = line["static"]
    held = (2 + 3 + 4) + 4 + 2 * (7 + 8 + 9 + 10) + (5 + 6) + (3 + 4 + 5 + 6)
    idle = 2 * 4 + 2 * 6  # finished rows: the second for two steps, the fifth for two
    assert static["steps"] == 3 + 4 + 4
    assert static["kv_utilization"] == round(held / (22 * 11), 4) == static["pool_utilization"]
    assert static["kv_with_finished"] == round((held + idle) / (22 * 11), 4)
    assert static["rows_in_flight"] == round(18 / 11, 4)
    assert static["prompt_padding"] == round(1 - 28 / 32, 4)
    assert static["decode_padding"] == round(1 - 12 / 16, 4)
    assert static["padding"] == round(1 - 40 / 48, 4)

    bytes_per_token = 2 * 3 * 2 * 16 * 4  # K and V, layers, heads, head_dim, fp32
    assert (line["kv_bytes"], static["peak_kv_bytes"]) == (22 * bytes_per_token,) * 2
    paged = line["paged"]
    assert (paged["prompt_padding"], paged["decode_padding"]) == (0, 0)
    assert paged["peak_kv_bytes"] <= 20 * bytes_per_token
    assert paged["kv_utilization"] > static["kv_utilization"]
    assert list(line["block_sizes"]) == [4, 8]
    paging_report.print_tables(line)
    paging_report.draw(line, tmp_path / "paging.svg")
    assert (tmp_path / "paging.svg").stat().st_size > 0


def test_paging_counts_blocks_of_one_row(tiny_model):
    """A prompt of 5 and 3 new tokens holds 5, 6 and 7 tokens in two blocks of 4."""
    from pagedgen.recipes.benchmarks import paging

    result = paging.run_paged(str(tiny_model()), [paging.Row([101, 102, 103, 104, 105], 3)], 16, 4, 1, dtype="float32")
    assert (result["steps"], result["rows_in_flight"], result["mean_table_length"]) == (3, 1, 2)
    assert result["kv_utilization"] == 18 / 24
    assert result["pool_utilization"] == 18 / (3 * 16)


def test_paging_makes_rows_within_the_context():
    from pagedgen.recipes.benchmarks import paging

    rows = paging.make_rows(200, 0, num_token_ids=263, max_model_len=512)
    assert rows == paging.make_rows(200, 0, num_token_ids=263, max_model_len=512)
    assert all(16 <= len(r.prompt) <= 256 and 16 <= r.max_tokens <= 256 for r in rows)
    assert all(100 <= t < 263 for r in rows for t in r.prompt)
    assert paging.reservation_of(rows) <= 512


def test_compare_measures_engines_and_skips_those_that_are_not_there(tiny_model, tmp_path, capsys):
    """Texts, chats and ids, ended by length or EOS: in fp32 both engines have the golden tokens."""
    from pagedgen.recipes.benchmarks import compare

    rows = [
        {"prompt": "one two three", "sampling_params": {"max_tokens": 6, "ignore_eos": True}},
        {"prompt": "one two three four", "sampling_params": {"max_tokens": 9, "ignore_eos": True}},
        {"prompt_token_ids": [100, 101, 102], "sampling_params": {"max_tokens": 4}},
        {"messages": [{"role": "user", "content": "hello"}], "sampling_params": {"max_tokens": 12}},
        {"messages": [{"role": "user", "content": "good bye"}], "sampling_params": {"max_tokens": 5, "temperature": 0}},
        {"prompt": "x", "sampling_params": {"max_tokens": 1}},
    ]
    workload, golden, figure = tmp_path / "six.jsonl", tmp_path / "golden.jsonl", tmp_path / "engines.svg"
    workload.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engines = "pagedgen,transformers,openvino,vllm,transformers-primed"
    flags = (
        f"--engines {engines} --python vllm={tmp_path}/nowhere --rounds 1 --dtype float32 --golden {golden} --figure {figure}"
    )
    compare.main([str(tiny_model()), str(workload), *flags.split(), "--pagedgen-options", "odd=--nonsense 1"])
    out, err = capsys.readouterr()
    lines = {line["engine"]: line for line in map(json.loads, out.splitlines())}
    skipped = {name: line["skipped"] for name, line in lines.items() if "skipped" in line}
    assert skipped == {
        "openvino": "unconverted",
        "vllm": "interpreterless",
        "transformers-primed": "unshared",
        "pagedgen-odd": "failed",
    }
    for name in ("pagedgen", "transformers"):
        line = lines[name]
        assert (line["rows"], line["rows_agree"], line["tokens_agree"]) == (6, 1.0, 1.0)
        assert line["whole_s"] > line["load_s"] + line["generate_s"] and line["peak_rss_bytes"] > 2**27
    assert lines["transformers"]["ratio"] == 1.0
    assert all(
        word in err
        for word in ("tokens/s", "rows agree", "unconverted", "interpreterless", "unshared", "unexpected keyword argument")
    )
    assert len(golden.read_text().splitlines()) == 6
    assert figure.stat().st_size > 0


def test_compare_skips_an_engine_that_is_not_installed():
    from pagedgen.recipes.benchmarks.engines.contest import MODULES, Engine

    found = {name: Engine(name, name, sys.executable, {"model": "x"}).obstacle() for name in MODULES}
    assert found == {**dict.fromkeys(MODULES), "vllm": "missing", "openvino": "missing"}


def test_compare_keeps_golden_answers_by_their_content(tiny_model, tmp_path):
    from pagedgen.recipes.benchmarks.engines.golden import Golden
    from pagedgen.recipes.benchmarks.engines.workloads import Row

    asked = []

    def compute(rows):
        asked.extend(rows)
        return [list(row.ids) for row in rows]

    a, b, same_but_ends = Row((1, 2), 3, True), Row((1, 2), 4, True), Row((1, 2), 3, False)
    path = tmp_path / "golden.jsonl"
    for model in (tiny_model(), tiny_model(), tiny_model("qwen2")):
        golden = Golden(path, model, [2])
        assert golden.answers([a, b, a, same_but_ends], compute) == [[1, 2]] * 4
    assert asked == [a, b, same_but_ends] * 2


def test_compare_puts_shuffled_rows_back():
    from pagedgen.recipes.benchmarks.engines.contest import Contest, Engine
    from pagedgen.recipes.benchmarks.engines.workloads import Row

    seen = []

    class Echo(Contest):
        def run(self, engine, rows, max_num_seqs=None):
            seen.append((rows, max_num_seqs))
            return {"tokens": [list(row.ids) for row in rows]}

    rows = [Row((i,), 1, True) for i in range(16)]
    echo = Echo(Path("model"), "float32", [2])
    assert echo.run_shuffled(Engine("echo", "transformers", sys.executable), rows) == [[i] for i in range(16)]
    assert seen[0][0] != rows and seen[0][1] == 6


def test_compare_measures_speed_against_the_fastest_peer():
    from pagedgen.recipes.benchmarks.engines.contest import with_ratios

    def line(engine, peer, tokens, generate_s, whole_s):
        return {"engine": engine, "peer": peer, "generated_tokens": tokens, "generate_s": generate_s, "whole_s": whole_s}

    absent = {"engine": "vllm", "peer": True, "skipped": "missing"}
    ours, slow, fast, skipped = with_ratios(
        [line("pagedgen", False, 100, 5, 20), line("a", True, 100, 20, 25), line("b", True, 80, 8, 40), absent]
    )
    assert [each["ratio"] for each in (ours, slow, fast)] == [2.0, 0.5, 1.0]
    assert [each["whole_ratio"] for each in (ours, slow, fast)] == [1.25, 1.0, 0.5]
    assert skipped == absent
    assert "ratio" not in with_ratios([line("pagedgen", False, 100, 5, 20), absent])[0]


def test_compare_counts_tokens_before_a_difference():
    from pagedgen.recipes.benchmarks.engines.contest import share_before_difference, share_equal

    expected = [[1, 2, 3, 4], [5, 6], [7, 8]]
    assert share_equal(expected, [[1, 2, 9, 4], [5, 6], [7]]) == 1 / 3
    assert share_before_difference(expected, [[1, 2, 9, 4], [5, 6], [7]]) == 5 / 8


def test_compare_finds_what_rows_share():
    from pagedgen.recipes.benchmarks.engines.workloads import Row, shared_beginnings

    rows = [Row(ids, 1, True) for ids in ((1, 2, 3, 9), (5, 6, 7), (1, 2, 3, 4), (1, 2, 5), (5, 8))]
    assert shared_beginnings(rows, least=2) == [(1, 2)]
    assert shared_beginnings(rows, least=3) == [(1, 2, 3)]
    assert shared_beginnings(rows, least=4) == []


def test_compare_makes_workloads_of_the_samples(tiny_model, tmp_path):
    """The shapes that are documented; the tiny model's tokens are bytes."""
    from pagedgen.recipes.benchmarks import compare

    compare.main([str(tiny_model(max_position_embeddings=2048)), "--make-workloads", str(tmp_path)])
    w1, w2, w3 = ([json.loads(line) for line in (tmp_path / f"w{i}.jsonl").read_text().splitlines()] for i in (1, 2, 3))
    assert (len(w1), len(w2), len(w3)) == (128, 128, 64)
    assert all(16 <= len(row["prompt"].encode()) <= 1024 for row in w1)
    assert len({row["prompt"][:500] for row in w2}) == 4
    assert all(528 <= len(row["prompt"].encode()) <= 576 for row in w2)
    assert len({row["messages"][0]["content"] for row in w3}) == 64
    assert all("ignore_eos" not in row["sampling_params"] for row in w3)


@pytest.mark.parametrize("text", ["int8", "int8=", "=--dtype float32", "int8=quantization int8"])
def test_compare_refuses_options_without_a_name_or_flags(text):
    import argparse

    from pagedgen.recipes.benchmarks.compare import parse_options

    assert parse_options("int8=--quantization int8 --block-size 16 --no-enable-prefix-caching --audit") == (
        "int8",
        {"quantization": "int8", "block_size": 16, "enable_prefix_caching": False, "audit": True},
    )
    with pytest.raises(argparse.ArgumentTypeError):
        parse_options(text)
