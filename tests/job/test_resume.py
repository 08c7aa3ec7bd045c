"""A job that is killed, signalled or stopped at any moment goes on by the same command; its output shows nothing of it."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest
from job_runs import leftovers, mixed_rows, read_bytes, write_jsonl

MOMENTS = 200 if os.environ.get("PAGEDGEN_PROFILE") == "nightly" else 20
QUICK = ["--flush-every", "0.02s", "--max-tokens", "24", "--ignore-eos", "--max-num-seqs", "8", "--progress", "none"]

JOBS = {
    "fp32": ["--dtype", "float32"],
    "bf16": ["--dtype", "bfloat16"],
    "sampled": ["--dtype", "float32", "--temperature", "1", "--n", "3", "--seed", "5", "--token-ids"],
    "parquet": ["--dtype", "bfloat16", "--temperature", "0.7"],
    "talks": ["--dtype", "float32", "--temperature", "1", "--n", "2"],
    "beams": ["--dtype", "float32", "--beam-width", "3", "--n", "2"],
}


class Case:
    """One job with its undisturbed output."""

    def __init__(self, nursery, model, directory, name):
        self.nursery, self.directory = nursery, directory
        self.output = directory / ("out.parquet" if name == "parquet" else "out.jsonl")
        rows = mixed_rows(120)
        if name == "talks":
            rows = [{"id": i, "turns": ["hello", "and?", "so"][: 1 + i % 3]} for i in range(60)] + rows[:10]
        write_jsonl(directory / "in.jsonl", rows[:60] if name == "beams" else rows)
        self.args = ["run", model, "in.jsonl", "-o", self.output.name, *QUICK, *JOBS[name]]
        code, said = self.run()
        assert code == 3, said
        self.wanted = self.output.read_bytes()
        self.duration_s = json.loads((directory / f"{self.output.name}.stats.json").read_text())["wall_s"]
        self.clear()

    def run(self, *more, **how):
        return self.nursery.run([*self.args, *more], self.directory, **how)

    def clear(self):
        for path in self.directory.iterdir():
            if path.name != "in.jsonl":
                path.unlink()

    def check_finished(self):
        assert read_bytes(self.output) == self.wanted
        assert not leftovers(self.directory)


@pytest.fixture(scope="module", params=JOBS)
def case(request, nursery, tiny_model, tmp_path_factory):
    return Case(nursery, tiny_model("llama"), tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_killed_at_random_moments(case, number):
    """Each moment is followed by the same command; a job that got through by then begins anew."""
    rng = random.Random(str(number))
    moments = MOMENTS if number == signal.SIGKILL else MOMENTS // 2 + 2
    finished = killed = with_parts = runs = 0
    wanted, latest_s = -(-moments // len(JOBS)), case.duration_s * 1.1
    while runs < wanted or (not killed and runs < wanted + 20):
        runs += 1
        how = {"kill": number, "after_s": rng.uniform(0, latest_s)}
        code, said = case.run("--grace", "0s", **how) if number != signal.SIGKILL else case.run(**how)
        assert "Traceback" not in said and "internal error" not in said, said
        if code == 3:
            finished += 1
            if not killed:
                latest_s *= 0.7  # the machine was slower when the undisturbed run was timed
        else:
            assert code == (-signal.SIGKILL if number == signal.SIGKILL else 75) or code == -number, said
            killed += 1
        if case.output.exists():
            assert read_bytes(case.output) == case.wanted, "an output is whole or absent"
        parts = case.directory / f"{case.output.name}.parts"
        with_parts += parts.exists() and any(p.name.startswith("part-") for p in parts.iterdir())
        if code == 3:
            case.check_finished()
            case.clear()
        elif rng.random() < 0.3:
            code, said = case.run()
            assert code == 3, said
            case.check_finished()
            case.clear()
    code, said = case.run()
    assert code == 3, said
    case.check_finished()
    case.clear()
    assert killed and (with_parts or moments < 40), (finished, killed, with_parts)
