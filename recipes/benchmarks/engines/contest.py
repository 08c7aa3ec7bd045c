"""One workload against several engines: runs in turn, each a process of its own, and what comes of them as JSON lines."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from pagedgen.recipes.benchmarks.engines.workloads import Row, shared_beginnings
from pagedgen.recipes.benchmarks.kernels import cpu_name

WORKER = Path(__file__).with_name("worker.py")
MODULES = {
    "pagedgen": "pagedgen",
    "vllm": "vllm",
    "openvino": "openvino_genai",
    "transformers": "transformers",
    "transformers-continuous": "transformers",
}
Line = dict[str, Any]


class Skipped(Exception):
    """A run that came to nothing; says in a word why."""


@dataclass(frozen=True)
class Engine:
    """An engine as it takes part: under a name of its own, by an adapter of the worker, with settings."""

    name: str
    adapter: str
    python: str
    options: dict[str, Any] = field(default_factory=dict)
    primed: bool = False  # what rows have in common is run once before them, in the time that counts

    def obstacle(self) -> str | None:
        """Return in a word why the engine can't take part, or None."""
        if self.adapter == "openvino" and "model" not in self.options:
            return "unconverted"
        # In the engine's own interpreter, and without importing it: that takes many seconds for some.
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({MODULES[self.adapter]!r}) is None)"
        try:
            found = subprocess.run([self.python, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode == 0
        except OSError:
            return "interpreterless"
        return None if found else "missing"

    @property
    def is_peer(self) -> bool:
        """True for all but pagedgen's own variants."""
        return self.adapter != "pagedgen"


@dataclass
class Entry:
    """An engine in one contest: its runs so far, or why it has none."""

    engine: Engine
    runs: list[Line] = field(default_factory=list)
    changed: float | None = None  # share of rows that a shuffle changed
    skipped: str | None = None


@dataclass(frozen=True)
class Contest:
    """What all engines are given alike."""

    model: Path
    dtype: str
    eos_token_ids: list[int]
    batch_size: int = 32
    kv_bytes: int | None = None

    def run(self, engine: Engine, rows: list[Row], max_num_seqs: int | None = None) -> Line:
        """Answer the rows once, in a process of its own; return the worker's result and the seconds of the whole process.

        Raises:
            Skipped: the engine failed (its own words go to stderr), or is to be primed and rows share nothing.
        """
        primes = shared_beginnings(rows) if engine.primed else []
        if engine.primed and not primes:
            raise Skipped("unshared")
        job = {
            "engine": engine.adapter,
            "model": str(self.model),
            "dtype": self.dtype,
            "options": engine.options,
            "rows": [vars(row) for row in rows],
            "primes": primes,
            "eos_token_ids": self.eos_token_ids,
            "batch_size": self.batch_size,
            "max_num_seqs": max_num_seqs,
            "kv_bytes": self.kv_bytes,
        }
        with tempfile.TemporaryDirectory() as folder:
            job_path, result_path, log_path = (Path(folder, name) for name in ("job.json", "result.json", "log"))
            job_path.write_text(json.dumps(job))
            with log_path.open("wb") as log:
                begin = perf_counter()
                command = [engine.python, str(WORKER), str(job_path), str(result_path)]
                done = subprocess.run(command, stdout=log, stderr=log, check=False)
                whole_s = perf_counter() - begin
            if done.returncode or not result_path.exists():
                said = log_path.read_text(errors="replace").strip().splitlines()
                _tell("\n  ".join([f"{engine.name} failed ({done.returncode}):", *said[-15:]]))
                raise Skipped("failed")
            result: Line = json.loads(result_path.read_text())
        tokens = [self.cut(t, row) for t, row in zip(result["tokens"], rows, strict=True)]
        return {**result, "tokens": tokens, "whole_s": whole_s}

    def cut(self, tokens: list[int], row: Row) -> list[int]:
        """Return a row's tokens up to its EOS: engines differ in whether they return that, and padded batches go on."""
        ends = () if row.ignore_eos else self.eos_token_ids
        return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]

    def run_shuffled(self, engine: Engine, rows: list[Row], seed: int = 0) -> list[list[int]]:
        """Return the rows' tokens when they come in another order and are batched otherwise, few at a time."""
        order = random.Random(seed).sample(range(len(rows)), len(rows))
        result = self.run(engine, [rows[i] for i in order], max_num_seqs=max(1, len(rows) * 3 // 8))
        tokens = dict(zip(order, result["tokens"], strict=True))
        return [tokens[i] for i in range(len(rows))]

    def hold(
        self,
        workload: str,
        rows: list[Row],
        engines: list[Engine],
        *,
        rounds: int,
        golden: list[list[int]] | None = None,
        shuffled: bool = False,
    ) -> list[Line]:
        """Run all engines in turn, there and back; return one line for each."""
        entries = [Entry(engine, skipped=engine.obstacle()) for engine in engines]
        for turn in range(rounds):
            for entry in entries[:: -1 if turn % 2 else 1]:
                if entry.skipped is None:
                    _tell(f"{workload}: {entry.engine.name}, round {turn + 1} of {rounds}")
                    try:
                        entry.runs.append(self.run(entry.engine, rows))
                    except Skipped as why:
                        entry.skipped = str(why)
        for entry in entries if shuffled else []:
            if entry.skipped is None:
                _tell(f"{workload}: {entry.engine.name}, shuffled")
                with suppress(Skipped):  # what it has measured stands
                    entry.changed = 1 - share_equal(entry.runs[0]["tokens"], self.run_shuffled(entry.engine, rows))
        return with_ratios([self._line(workload, rows, entry, golden) for entry in entries])

    def _line(self, workload: str, rows: list[Row], entry: Entry, golden: list[list[int]] | None) -> Line:
        engine = entry.engine
        line: Line = {"benchmark": "compare", "workload": workload, "engine": engine.name, "peer": engine.is_peer}
        if entry.skipped is not None:
            return {**line, "skipped": entry.skipped}
        line |= self._measured(rows, entry.runs, golden)
        return line if entry.changed is None else {**line, "rows_changed_by_shuffle": round(entry.changed, 4)}

    def _measured(self, rows: list[Row], runs: list[Line], golden: list[list[int]] | None) -> Line:
        """Return medians over an engine's runs, and how its tokens agree with the golden ones."""
        tokens = runs[0]["tokens"]
        seconds = {name: median(run[name] for run in runs) for name in ("generate_s", "load_s", "whole_s")}
        num_generated = sum(map(len, tokens))
        line: Line = {
            "version": runs[0]["version"],
            "dtype": self.dtype,
            "rows": len(rows),
            "prompt_tokens": sum(len(row.ids) for row in rows),
            "generated_tokens": num_generated,
            **{name: round(value, 3) for name, value in seconds.items()},
            "generate_s_of_rounds": [round(run["generate_s"], 3) for run in runs],
            "tokens_per_s": round(num_generated / seconds["generate_s"], 2),
            "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
        }
        if golden is not None:
            line["rows_agree"] = round(share_equal(golden, tokens), 4)
            line["tokens_agree"] = round(share_before_difference(golden, tokens), 4)
        return line | {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))}


def with_ratios(lines: list[Line]) -> list[Line]:
    """Add each engine's speed over the fastest peer's: tokens a second of generation, and of the whole process."""
    measured = [line for line in lines if "skipped" not in line]
    for name, seconds in (("ratio", "generate_s"), ("whole_ratio", "whole_s")):
        speeds = {line["engine"]: line["generated_tokens"] / line[seconds] for line in measured}
        fastest = max((speeds[line["engine"]] for line in measured if line["peer"]), default=None)
        if fastest:
            for line in measured:
                line[name] = round(speeds[line["engine"]] / fastest, 3)
    return lines


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def share_equal(expected: Sequence[list[int]], tokens: Sequence[list[int]]) -> float:
    """Return the share of rows that have exactly the expected tokens."""
    return sum(a == b for a, b in zip(expected, tokens, strict=True)) / len(expected)


def share_before_difference(expected: Sequence[list[int]], tokens: Sequence[list[int]]) -> float:
    """Return the share of expected tokens that stand before their row's first difference: what follows isn't comparable."""
    same = 0
    for a, b in zip(expected, tokens, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / max(1, sum(map(len, expected)))
