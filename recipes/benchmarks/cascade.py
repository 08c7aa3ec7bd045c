"""Decode attention over blocks that rows share, read once for a group or once a row, alternating in one run.

    python recipes/benchmarks/cascade.py [--rows 128] [--prefixes 4] [--prefix-tokens 512] [--suffix-tokens 40]

    python recipes/benchmarks/cascade.py --model smollm2-135m [--new-tokens 32] [--rounds 3]

Prints a table, and one JSON line with medians and their ratio. Both ways give the same bits, which is checked. With a model the
whole engine is measured, in generation seconds: rows of random tokens, each prefix computed once either way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as pagedgen.threads.prepare

import numba
import torch
from pagedgen.kernels.api import SharedPrefixes, load_backend

from pagedgen.config import EngineConfig
from pagedgen.engine.engine import Engine
from pagedgen.engine.opened import open_model
from pagedgen.engine.planner import RequestLengths
from pagedgen.errors import RowError
from pagedgen.request import Request, Sequence
from pagedgen.sampling_params import SamplingParams
from pagedgen.stats import RunStats


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


def measure_engine(dtype: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the median generation seconds of a model with and without cascade attention, and check that tokens are equal."""
    engine = Engine(open_model(EngineConfig(args.model, dtype=dtype, threads=args.threads, block_size=args.block_size)))
    opened = engine.opened
    gen = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(100, opened.num_token_ids, (count,), generator=gen).tolist()

    prefixes = [tokens(args.prefix_tokens) for _ in range(args.prefixes)]
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    prompts = [prefixes[i % args.prefixes] + tokens(args.suffix_tokens) for i in range(args.rows)]
    requests = [opened.make_request(i, prompt, params) for i, prompt in enumerate(prompts)]
    times: dict[str, list[float]] = {"alone": [], "shared": []}
    answers: dict[str, dict[int, list[int]]] = {"alone": {}, "shared": {}}

    def failed(request: Request, sample: int, error: RowError) -> None:
        raise SystemExit(f"row {request.row_index}: {error}")

    for _ in range(args.rounds):
        for way, done in answers.items():
            engine.opened = replace(opened, config=replace(opened.config, cascade_attention=way == "shared"))
            engine.stats = RunStats()

            def finished(sequence: Sequence, done: dict[int, list[int]] = done) -> None:
                done[sequence.request.row_index] = sequence.generated_token_ids

            engine.generate(requests, engine.plan(RequestLengths(requests)), on_finished=finished, on_error=failed)
            times[way].append(engine.stats.generate_s)
    if answers["alone"] != answers["shared"]:
        raise SystemExit("the two ways differ")
    return {way: statistics.median(values) for way, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rows", 128), ("prefixes", 4), ("prefix-tokens", 512), ("suffix-tokens", 40), ("heads", 9), ("kv-heads", 3),
        ("head-dim", 64), ("block-size", 32), ("repeats", 30), ("threads", len(os.sched_getaffinity(0))),
        ("new-tokens", 32), ("rounds", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", help="measure the whole engine with this model")
    parser.add_argument("--dtype", action="append", help="of the engine; default: bfloat16 and float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numba.set_num_threads(args.threads)
    results = {}
    if args.model is not None:
        print(f"{'generation, s':<20}{'alone':>10}{'shared':>10}{'ratio':>10}")
        for name in args.dtype or ("bfloat16", "float32"):
            seconds = measure_engine(name, args)
            ratio = seconds["alone"] / seconds["shared"]
            print(f"{name:<20}{seconds['alone']:>10.2f}{seconds['shared']:>10.2f}{ratio:>10.2f}")
            results[name] = {**{f"{way}_s": round(s, 2) for way, s in seconds.items()}, "ratio": round(ratio, 3)}
        print(json.dumps({"benchmark": "cascade/engine", **vars(args), "seed": 0, "results": results}))
        return
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
