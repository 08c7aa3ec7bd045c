"""What the first run on a machine takes longer than later ones: its kernels are compiled.

    python recipes/benchmarks/first_use.py smollm2-135m [--rounds 3] [FLAGS OF RUN ...]

`pagedgen run` on two short rows, in turn with an empty cache of compiled kernels and with the one that this left. One JSON
line: medians in seconds and their difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from pagedgen.machine import cache_root, cpu_name

ROWS = [{"prompt": "Hello there"}, {"prompt": "The capital of France is"}]


def run(model: str, flags: list[str], folder: Path, cache: Path) -> float:
    """Run the command and return its seconds."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [sys.executable, "-c", "from pagedgen.cli.main import command; command()", "run", model, str(prompts)]
    command += ["-o", str(folder / "out.jsonl"), "--overwrite", "--max-tokens", "4", *flags]
    start = perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PAGEDGEN_CACHE": str(cache)})
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    args, flags = parser.parse_known_args()
    first, later = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) / "cache"
            cache.mkdir()
            for part in ("models", "hashes.json"):  # the demo model, if it is that, is not fetched again
                if (cache_root() / part).exists():
                    (cache / part).symlink_to(cache_root() / part)
            first.append(run(args.model, flags, Path(folder), cache))
            later.append(run(args.model, flags, Path(folder), cache))
    line = {"first_s": median(first), "later_s": median(later), "compiling_s": median(first) - median(later)}
    rounded = {key: round(value, 1) for key, value in line.items()}
    print(json.dumps({"benchmark": "first_use", "cpu": cpu_name(), "rounds": args.rounds, **rounded}))


if __name__ == "__main__":
    main()
