"""The prefix tree of many prompts: seconds to fill and to plan, and bytes.

    python recipes/benchmarks/prefix_tree.py [--rows 1000000] [--shared 150] [--own 50] [--groups 1000]

Prompts of random tokens in `groups` groups; with `--shared 0` none has anything in common. One JSON line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter

import numpy as np

from pagedgen.engine.prefix_tree import PrefixTree

_AT_ONCE = 1000


def peak_bytes() -> int:
    """Return the most memory this process has held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 1_000_000), ("shared", 150), ("own", 50), ("groups", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    common = rng.integers(0, 50_000, (args.groups, args.shared)).astype(np.int32)
    warm = PrefixTree(16)  # compiles, or finds the compiled code
    warm.add([1], 1)
    warm.plan()
    before, tree, fill_s = peak_bytes(), PrefixTree(16), 0.0
    for _ in range(0, args.rows, _AT_ONCE):
        own = rng.integers(0, 50_000, (_AT_ONCE, args.own)).astype(np.int32)
        prompts = np.concatenate([common[rng.integers(0, args.groups, _AT_ONCE)], own], axis=1)
        start = perf_counter()
        for prompt in prompts:
            tree.add(prompt, int(prompt[-1]))
        fill_s += perf_counter() - start
    start = perf_counter()
    _, _, sharing = tree.plan()
    plan_s = perf_counter() - start
    beside = peak_bytes() - before - 4 * sharing.distinct_tokens
    line = {
        "benchmark": "prefix_tree",
        **vars(args),
        "fill_s": round(fill_s, 2),
        "plan_s": round(plan_s, 2),
        "distinct_tokens": sharing.distinct_tokens,
        "attainable_tokens": sharing.attainable_tokens,
        "bytes_a_prompt_beside_tokens": round(beside / args.rows, 1),
        "seed": 0,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
