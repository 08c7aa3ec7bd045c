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
