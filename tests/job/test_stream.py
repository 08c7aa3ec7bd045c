"""Rows stream through in bounded memory, however many there are and however far out of order they finish."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

NIGHTLY = os.environ.get("PAGEDGEN_PROFILE") == "nightly"
SIZES = (200_000, 1_000_000) if NIGHTLY else (20_000, 60_000)

_SCRIPT = """
import json, random, sys, time
sys.path[:0] = json.loads(sys.argv[1])
from echo import EchoJobs
model, source, output = sys.argv[2:]
jobs = EchoJobs(model)
begin = time.perf_counter()
report = jobs.run([source], output, rng=random.Random(1), flush_s=1e9)
status = open("/proc/self/status").read()  # the process's own: `getrusage` counts the one it was forked from too
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"peak_bytes": peak, "results": report.num_results, "seconds": time.perf_counter() - begin}))
"""


def run_apart(model, source, output):
    """Run an echo job in a process of its own; return its peak memory and what it wrote."""
    paths = json.dumps([p for p in sys.path if p.endswith(("tests", "job", "cli"))])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, paths, str(model), str(source), str(output)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_rows(tiny_model, tmp_path, suffix):
    peaks = []
    for size in SIZES:
        source, output = tmp_path / "in.jsonl", tmp_path / f"out.{suffix}"
        with source.open("w") as file:
            for i in range(size):
                file.write(f'{{"id": {i}, "prompt": "row {i} {"x" * (i % 150)}", "meta": {{"n": {i % 7}}}}}\n')
        got = run_apart(tiny_model("llama"), source, output)
        sys.stdout.write(json.dumps({"rows": size, **got}) + "\n")
        assert got["results"] == size
        peaks.append(got["peak_bytes"])
        output.unlink()
        output.with_name(output.name + ".stats.json").unlink()
    assert max(peaks) < 2**30
    assert peaks[1] < peaks[0] + (64 << 20), peaks
