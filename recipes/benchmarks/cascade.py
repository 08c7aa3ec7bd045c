"""Decode attention over blocks that rows share, read once for a group or once a row, alternating in one run.

    python recipes/benchmarks/cascade.py [--rows 128] [--prefixes 4] [--prefix-tokens 512] [--suffix-tokens 40]

Prints a table, and one JSON line with medians and their ratio. Both ways give the same bits, which is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as pagedgen.threads.prepare

import numba
import torch
from pagedgen.kernels.api import SharedPrefixes, load_backend


def alternate(ways: dict, repeats: int) -> dict[str, float]:
    """Return the median time of each way in milliseconds: called in turn, after two rounds that don't count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 2):
        for name, call in ways.items():
            start = time.perf_counter()
            call()
            if i >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def kernel_ways(dtype: torch.dtype, args: argparse.Namespace) -> dict:
    """Return the two ways to call the CPU's decode attention on one random batch."""
    backend = load_backend("cpu")
    prefix_blocks = args.prefix_tokens // args.block_size
    own_blocks = -(-(args.prefix_tokens % args.block_size + args.suffix_tokens) // args.block_size)
    num_blocks = args.prefixes * prefix_blocks + args.rows * own_blocks
    gen = torch.Generator().manual_seed(0)
    shape = (num_blocks, args.kv_heads, args.block_size, args.head_dim)
    key, value = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
    key = key.transpose(2, 3).contiguous().transpose(2, 3)

    ids = torch.randperm(num_blocks, generator=gen).int()
    prefixes, own = ids[: args.prefixes * prefix_blocks], ids[args.prefixes * prefix_blocks :]
    bounds = torch.arange(args.prefixes + 1) * args.rows // args.prefixes
    prefix_of_row = torch.arange(args.prefixes).repeat_interleave(bounds.diff())
    tables = torch.cat([prefixes.view(args.prefixes, -1)[prefix_of_row], own.view(args.rows, -1)], dim=1)
    lengths = torch.full((args.rows,), args.prefix_tokens + args.suffix_tokens, dtype=torch.int32)
    query = torch.randn(args.rows, args.heads, args.head_dim, generator=gen).to(dtype)
    shared = SharedPrefixes(
        row_bounds=bounds.int(),
        num_shared_blocks=torch.full((args.prefixes,), prefix_blocks, dtype=torch.int32),
        num_rows=args.rows,
        max_shared_blocks=prefix_blocks,
    )

    def decode(shared: SharedPrefixes | None) -> torch.Tensor:
        out = torch.empty_like(query)
        backend.paged_decode(query, key, value, tables, lengths, out, scale=args.head_dim**-0.5, shared=shared)
        return out

    if not torch.equal(decode(None), decode(shared)):
        raise RuntimeError("the two ways differ")
    return {"alone": lambda: decode(None), "shared": lambda: decode(shared)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rows", 128), ("prefixes", 4), ("prefix-tokens", 512), ("suffix-tokens", 40), ("heads", 9), ("kv-heads", 3),
        ("head-dim", 64), ("block-size", 32), ("repeats", 30), ("threads", len(os.sched_getaffinity(0))),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numba.set_num_threads(args.threads)
    results = {}
    print(f"{'attention, ms':<20}{'alone':>10}{'shared':>10}{'ratio':>10}")
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        times = alternate(kernel_ways(dtype, args), args.repeats)
        ratio = times["alone"] / times["shared"]
        print(f"{name:<20}{times['alone']:>10.2f}{times['shared']:>10.2f}{ratio:>10.2f}")
        results[name] = {"alone_ms": round(times["alone"], 3), "shared_ms": round(times["shared"], 3), "ratio": round(ratio, 2)}
    print(json.dumps({"benchmark": "cascade/kernel", **vars(args), "seed": 0, "results": results}))


if __name__ == "__main__":
    main()
