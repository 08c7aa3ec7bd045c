"""Paged decode attention on CPU against torch, in one run: time, ratio, and the share of the memory's read bandwidth.

    python recipes/benchmarks/kernels.py [--rows 64] [--context 512] [--heads 9] [--kv-heads 3] [--head-dim 64]

Prints one JSON line a dtype. The torch twins gather each row's blocks and call scaled_dot_product_attention with the mask that
rows of unequal length need. Three of them, since layouts and GQA handling differ by several times:

    expanded     blocks (Hkv, block_size, D); K/V repeated for each query head, as transformers' models do
    grouped      the same pool; enable_gqa=True, nothing repeated
    token_major  blocks (block_size, Hkv, D), the layout that suits a gather best; enable_gqa=True

Read bandwidth is the best rate at which torch sums a buffer of the pool's size with the same threads.
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
from pagedgen.kernels.api import load_backend

from pagedgen.machine import cpu_name


def median_ms(call, repeats: int) -> float:
    """Return the median time of a call in milliseconds, after two calls that don't count."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        call()
        if i >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def best_read_gb_per_s(num_bytes: int) -> float:
    """Return the best rate of reading a buffer of this size in order."""
    buffer = torch.ones(num_bytes // 4)
    best = min(median_ms(buffer.sum, 1) for _ in range(20))
    return num_bytes / best / 1e6


def measure(dtype: torch.dtype, args: argparse.Namespace) -> dict:
    """Measure one dtype and return the JSON line's content."""
    backend = load_backend("cpu")
    block_size, rows, context = args.block_size, args.rows, args.context
    blocks_per_row = -(-context // block_size)
    num_blocks = rows * blocks_per_row
    shape = (num_blocks, args.kv_heads, block_size, args.head_dim)
    key, value = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    key_transposed = key.transpose(2, 3).contiguous().transpose(2, 3)
    tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).view(rows, -1)
    lengths = torch.full((rows,), context, dtype=torch.int32)
    lengths[0] = context - 3
    query = torch.randn(rows, args.heads, args.head_dim).to(dtype)
    out, scale = torch.empty_like(query), args.head_dim**-0.5
    int_tables = tables.int()
    group = args.heads // args.kv_heads
    padded = blocks_per_row * block_size
    mask = (torch.arange(padded) < lengths[:, None])[:, None, None]
    q4 = query.view(rows, args.heads, 1, args.head_dim)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    by_token = [t.transpose(1, 2).contiguous() for t in (key, value)]

    def paged():
        backend.paged_decode(query, key_transposed, value, int_tables, lengths, out, scale=scale)

    def gather(cache):
        return cache[tables].permute(0, 2, 1, 3, 4).reshape(rows, args.kv_heads, padded, args.head_dim)

    def expanded():
        k, v = (gather(t).repeat_interleave(group, dim=1) for t in (key, value))
        return sdpa(q4, k, v, attn_mask=mask, scale=scale)

    def grouped():
        return sdpa(q4, gather(key), gather(value), attn_mask=mask, scale=scale, enable_gqa=True)

    def token_major():
        k, v = (t[tables].reshape(rows, padded, args.kv_heads, args.head_dim).transpose(1, 2) for t in by_token)
        return sdpa(q4, k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    paged()
    error = float((out.float() - expanded()[:, :, 0].float()).abs().max())
    pool_bytes = 2 * key.numel() * key.element_size()
    ours = median_ms(paged, args.repeats)
    twins = {f.__name__: median_ms(f, args.repeats) for f in (expanded, grouped, token_major)}
    bandwidth = best_read_gb_per_s(pool_bytes)
    rate = pool_bytes / ours / 1e6
    return {
        "benchmark": "paged_decode_cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        "context": context,
        "heads": f"{args.heads}/{args.kv_heads}x{args.head_dim}",
        "block_size": block_size,
        "paged_ms": round(ours, 3),
        "torch_ms": {k: round(v, 3) for k, v in twins.items()},
        "ratio": {k: round(v / ours, 1) for k, v in twins.items()},
        "read_gb_per_s": round(rate, 1),
        "machine_read_gb_per_s": round(bandwidth, 1),
        "share_of_read_bandwidth": round(rate / bandwidth, 2),
        "max_abs_difference": error,
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "seed": 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rows", 64), ("context", 512), ("heads", 9), ("kv-heads", 3), ("head-dim", 64), ("block-size", 32), ("repeats", 30),
        ("threads", len(os.sched_getaffinity(0))),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    numba.set_num_threads(args.threads)
    for dtype in (torch.bfloat16, torch.float32):
        print(json.dumps(measure(dtype, args)))


if __name__ == "__main__":
    main()
