"""Paged attention and products on CPU against torch, in one run: time, ratio, and the share of what the machine can do.

    python recipes/benchmarks/kernels.py [--rows 64] [--context 512] [--heads 9] [--kv-heads 3] [--head-dim 64]

Prints JSON lines: decode attention for each dtype, prefill attention of one row of --prompt tokens for each dtype, and products
of one decoder layer's shapes for each number of rows. The torch twins of decode gather each row's blocks and call
scaled_dot_product_attention with the mask that rows of unequal length need. Three of them, since layouts and GQA handling
differ by several times:

    expanded     blocks (Hkv, block_size, D); K/V repeated for each query head, as transformers' models do
    grouped      the same pool; enable_gqa=True, nothing repeated
    token_major  blocks (block_size, Hkv, D), the layout that suits a gather best; enable_gqa=True

The pool is the engine's, with as many layers as the caches can't hold, and decode goes through them in turn. Read bandwidth is
the median rate at which torch sums a buffer of the pool's size with the same threads. Prefill's twin is
scaled_dot_product_attention on contiguous tensors; its rate counts half of the square. Products run through as many layers as
the caches can't hold, as a step does: ours on bf16 weights (`model/panels.py`) against `linear` and oneDNN's prepacked weights.
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

from pagedgen.engine.kv_cache import KVCache
from pagedgen.machine import cpu_name
from pagedgen.model.linear import PACKED, RowInvariantLinear, RowInvariantProduct
from pagedgen.model.panels import PanelLinear

UNCACHED_BYTES = 256 * 2**20


def median_ms(call, repeats: int) -> float:
    """Return the median time of a call in milliseconds, after two calls that don't count."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        call()
        if i >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def read_gb_per_s(num_bytes: int, repeats: int) -> float:
    """Return the rate of reading a buffer of this size in order."""
    buffer = torch.ones(num_bytes // 4)
    return num_bytes / median_ms(buffer.sum, repeats) / 1e6


def measure(dtype: torch.dtype, args: argparse.Namespace) -> dict:
    """Measure one dtype and return the JSON line's content."""
    backend = load_backend("cpu")
    block_size, rows, context = args.block_size, args.rows, args.context
    blocks_per_row = -(-context // block_size)
    num_blocks = rows * blocks_per_row
    layer_bytes = 2 * num_blocks * args.kv_heads * block_size * args.head_dim * dtype.itemsize
    num_layers = -(-UNCACHED_BYTES // layer_bytes)
    pool = KVCache(
        num_blocks=num_blocks, num_layers=num_layers, num_kv_heads=args.kv_heads, block_size=block_size,
        head_dim=args.head_dim, dtype=dtype, device="cpu", key_transposed=True,
    )  # fmt: skip
    pool.kv.normal_()
    key, value = (t.contiguous() for t in (pool.layers[0].key, pool.layers[0].value))
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

    def paged(layers):
        for layer in layers:
            backend.paged_decode(query, layer.key, layer.value, int_tables, lengths, out, scale=scale)

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

    paged(pool.layers[:1])
    error = float((out.float() - expanded()[:, :, 0].float()).abs().max())
    ours = median_ms(lambda: paged(pool.layers), args.repeats) / num_layers
    twins = {f.__name__: median_ms(f, args.repeats) for f in (expanded, grouped, token_major)}
    bandwidth = read_gb_per_s(layer_bytes * num_layers, args.repeats)
    rate = layer_bytes / ours / 1e6
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


def measure_prefill(dtype: torch.dtype, args: argparse.Namespace) -> dict:
    """Measure causal attention of one whole prompt; return the JSON line's content."""
    backend = load_backend("cpu")
    tokens, size = args.prompt, args.block_size
    num_blocks = -(-tokens // size)
    shape = (num_blocks, args.kv_heads, size, args.head_dim)
    key, value = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    key_transposed = key.transpose(2, 3).contiguous().transpose(2, 3)
    query = torch.randn(tokens, args.heads, args.head_dim).to(dtype)
    out, scale = torch.empty_like(query), args.head_dim**-0.5
    tables = torch.arange(num_blocks, dtype=torch.int32)[None]
    bounds, lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    k, v = (t.transpose(0, 1).reshape(1, args.kv_heads, -1, args.head_dim)[:, :, :tokens].contiguous() for t in (key, value))
    q = query.transpose(0, 1)[None].contiguous()

    def paged():
        backend.paged_prefill(query, key_transposed, value, tables, bounds, lengths, out, scale=scale, max_seqlen_q=tokens)

    def sdpa():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    paged()
    error = float((out.float() - sdpa()[0].transpose(0, 1).float()).abs().max())
    ours, twin = median_ms(paged, args.repeats), median_ms(sdpa, args.repeats)
    work = 4 * args.heads * args.head_dim * tokens * (tokens + 1) / 2
    return {
        "benchmark": "paged_prefill_cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "prompt": tokens,
        "paged_ms": round(ours, 3),
        "sdpa_ms": round(twin, 3),
        "ratio": round(twin / ours, 2),
        "gflop_per_s": round(work / ours / 1e6, 1),
        "max_abs_difference": error,
    }


def measure_products(num_rows: int) -> dict:
    """Measure the products of SmolLM2-135M's layers on so many rows; return the JSON line's content."""
    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
    linears = [torch.nn.Linear(k, n, bias=False).requires_grad_(False) for n, k in shapes * 30]
    for linear in linears:
        linear.weight.copy_(linear.weight.bfloat16())
    panels = [PanelLinear(linear) for linear in linears]
    packed = [RowInvariantLinear(linear, RowInvariantProduct())._operand[0] for linear in linears]
    x = {k: torch.randn(num_rows, k) for _, k in shapes}
    ways = {
        "ours": lambda: [panel(x[panel.in_features]) for panel in panels],
        "linear": lambda: [linear(x[linear.in_features]) for linear in linears],
        "prepacked": lambda: [
            PACKED.apply(x[linear.in_features], operand, None) for linear, operand in zip(linears, packed, strict=True)
        ],
    }
    times = {name: median_ms(call, 5) for name, call in ways.items()}
    work = 2 * num_rows * sum(n * k for n, k in shapes) * 30
    return {
        "benchmark": "products_cpu",
        "rows": num_rows,
        "ms": {name: round(ms, 2) for name, ms in times.items()},
        "gflop_per_s": {name: round(work / ms / 1e6) for name, ms in times.items()},
        "ratio": {name: round(ms / times["ours"], 2) for name, ms in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rows", 64), ("context", 512), ("prompt", 1024), ("heads", 9), ("kv-heads", 3), ("head-dim", 64), ("block-size", 32),
        ("repeats", 30),
        ("threads", len(os.sched_getaffinity(0))),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    numba.set_num_threads(args.threads)
    for dtype in (torch.bfloat16, torch.float32):
        print(json.dumps(measure(dtype, args)), flush=True)
        print(json.dumps(measure_prefill(dtype, args)), flush=True)
    for num_rows in (1, 4, 16, 48, 128, 512):
        print(json.dumps(measure_products(num_rows)), flush=True)


if __name__ == "__main__":
    main()
