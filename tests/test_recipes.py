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
COMMAND = [sys.executable, "-c", "from pagedgen.cli.main import main; main()"]


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
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from pagedgen.cli.main import main; main()" "$@"\n')
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
