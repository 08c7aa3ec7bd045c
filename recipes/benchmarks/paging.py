"""What paging saves against reserved, padded batches: the claims of the PagedAttention paper (Kwon et al. 2023), measured here.

    python recipes/benchmarks/paging.py smollm2-135m [--rows 64] [--kv-tokens N] [--dtype float32] [--figure paging.svg]

The same model, the same rows (random token ids, log-normal lengths, each with its own `max_tokens` and no other end) and the
same KV memory, in one run:

    static       transformers' `generate` over left-padded batches. Every row reserves the data set's longest prompt + longest
                 output, so a batch has kv_tokens // reservation rows; a finished row idles until its batch's longest one is.
    paged        pagedgen with a pool of kv_tokens // block_size blocks
    paged_small  the same, with no more rows in flight than a static batch has: the memory that these take when paged

All take rows in input order (`--sort prefix` is pagedgen's own default). `--cache static` is transformers' StaticCache of the
reserved length, not compiled: its attention reads every reserved slot. With `--cache dynamic` its cache grows as needed and the
reservation is only accounted for, which is kinder to static's seconds. All other numbers are the same.

    kv_utilization    tokens of unfinished rows / slots reserved (static: the batch's rows x reservation; paged: blocks in use x
                      block_size), sums over all steps, prefill included
    kv_with_finished  the same, finished rows that are still in the batch included: nearer to the paper's servers, which let
                      such rows leave
    pool_utilization  tokens of unfinished rows / slots of the budget; the drain, when few rows are left, counts too
    ..._padding       share of the computed prompt or decode tokens that are padding or belong to finished rows. That GEMMs on
                      CPU fill rows up to fixed sizes (pagedgen/model/linear.py) is not in it.
    seconds           all rows, allocating the cache included, loading and a warm-up not; best of `--repeat` rounds, whose order
                      alternates. They compare engines: kernels and GEMMs differ too; `small_ratio` has the same rows in flight.

Then pagedgen by block size: slots lost in last blocks, length of a block table, peak of the pool, seconds. One JSON line on
stdout, tables on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as pagedgen.threads.prepare

import torch
from pagedgen.recipes.benchmarks import paging_report
from transformers import AutoModelForCausalLM, GenerationConfig

from pagedgen.config import DTYPES, SORTS, EngineConfig
from pagedgen.engine.engine import Engine
from pagedgen.engine.opened import OpenedModel, open_model
from pagedgen.engine.planner import RequestLengths
from pagedgen.machine import cpu_name
from pagedgen.sampling_params import SamplingParams
from pagedgen.stats import RunStats

LONGEST_PROMPT, LONGEST_OUTPUT, RESERVED_ROWS = 1024, 256, 8
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A prompt and how many tokens it gets."""

    prompt: list[int]
    max_tokens: int


def make_rows(num_rows: int, seed: int, *, num_token_ids: int, max_model_len: int) -> list[Row]:
    """Make rows: prompts of 16 to 1024 tokens (median 110), outputs of 16 to 256 (median 56), within the context."""
    rng = random.Random(seed)

    def length(median: int, sigma: float, most: int) -> int:
        return min(most, max(16, round(median * math.exp(rng.gauss(0, sigma)))))

    rows = []
    for _ in range(num_rows):
        num_prompt_tokens = length(110, 1.05, min(LONGEST_PROMPT, max_model_len - LONGEST_OUTPUT))
        prompt = [rng.randrange(100, num_token_ids) for _ in range(num_prompt_tokens)]
        rows.append(Row(prompt, length(56, 0.85, LONGEST_OUTPUT)))
    return rows


def reservation_of(rows: list[Row]) -> int:
    """Return the slots that a server without paging reserves for each row, not knowing how long it will be."""
    return max(len(row.prompt) for row in rows) + max(row.max_tokens for row in rows)


def static_counts(rows: list[Row], batch_rows: int, reservation: int) -> Counter[str]:
    """Count what padded batches do, summed over steps.

    Rows with prompts of 2 and 4 tokens and outputs of 3 and 1, reserving 8 each, take 3 steps of 16 slots, which hold
    2 + 3 + 4 tokens of the one and 4 of the other; 8 prompt tokens are computed for 6, and 2 x 2 in decodes for 2.
    """
    counts: Counter[str] = Counter()
    for start in range(0, len(rows), batch_rows):
        batch = rows[start : start + batch_rows]
        steps = max(row.max_tokens for row in batch)
        counts["steps"] += steps
        counts["reserved"] += steps * len(batch) * reservation
        counts["prompt_computed"] += len(batch) * max(len(row.prompt) for row in batch)
        counts["decode_computed"] += len(batch) * (steps - 1)
        for row in batch:
            prompt, new = len(row.prompt), row.max_tokens
            held = new * prompt + new * (new - 1) // 2  # the last token is never fed back
            counts["held"] += held
            counts["held_or_finished"] += held + (steps - new) * (prompt + new - 1)
            counts["row_steps"] += new
            counts["prompt"] += prompt
            counts["decode"] += new - 1
    return counts


def run_static(opened: OpenedModel, rows: list[Row], kv_tokens: int, cache: str) -> Result:
    """Answer the rows by transformers' generate in padded batches."""
    config, spec, reservation = opened.config, opened.spec, reservation_of(rows)
    batch_rows = min(kv_tokens // reservation, len(rows))
    torch.set_num_threads(config.threads or 1)
    model = AutoModelForCausalLM.from_pretrained(
        opened.files.path, dtype=getattr(torch, spec.dtype), **opened.files.hub_options
    )
    model.eval().to(device=config.device)
    # The reserved length whatever the batch: generate would take the batch's own.
    reserved = {"cache_implementation": "static", "max_cache_len": reservation} if cache == "static" else {}
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, disable_compile=True, **reserved)
    computed: list[int] = []  # tokens of each forward pass
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: computed.append(inputs[0].numel()))

    @torch.inference_mode()
    def answer(batch: list[Row], steps: int) -> list[list[int]]:
        width = max(len(row.prompt) for row in batch)
        padding = [width - len(row.prompt) for row in batch]
        ids = torch.tensor([[0] * n + row.prompt for n, row in zip(padding, batch, strict=True)], device=config.device)
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=config.device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=steps)[:, width:].tolist()
        return [tokens[: row.max_tokens] for tokens, row in zip(out, batch, strict=True)]

    answer(rows[:batch_rows], 2)
    computed.clear()
    answers: list[list[int]] = []
    begin = perf_counter()
    for start in range(0, len(rows), batch_rows):
        batch = rows[start : start + batch_rows]
        answers += answer(batch, max(row.max_tokens for row in batch))
    seconds = perf_counter() - begin
    counts = static_counts(rows, batch_rows, reservation)
    assert len(computed) == counts["steps"] and sum(computed) == counts["prompt_computed"] + counts["decode_computed"]
    return {
        "answers": answers,
        "seconds": seconds,
        "steps": counts["steps"],
        "rows_in_flight": counts["row_steps"] / counts["steps"],
        "kv_utilization": counts["held"] / counts["reserved"],
        "kv_with_finished": counts["held_or_finished"] / counts["reserved"],
        "pool_utilization": counts["held"] / (counts["steps"] * kv_tokens),
        "prompt_padding": 1 - counts["prompt"] / counts["prompt_computed"],
        "decode_padding": 1 - counts["decode"] / max(1, counts["decode_computed"]),
        "padding": 1 - (counts["prompt"] + counts["decode"]) / sum(computed),
        "peak_kv_bytes": batch_rows * reservation * spec.bytes_per_token,
    }


def run_paged(model: str, rows: list[Row], kv_tokens: int, block_size: int, max_num_seqs: int, **settings: Any) -> Result:
    """Answer the rows by pagedgen; `settings` are those of `EngineConfig`."""
    num_blocks = kv_tokens // block_size
    settings |= {"block_size": block_size, "num_gpu_blocks_override": num_blocks, "max_num_seqs": max_num_seqs}
    engine = Engine(open_model(EngineConfig(model=model, **settings)))

    def answer(rows: list[Row]) -> list[list[int]]:
        done: dict[int, list[int]] = {}
        params = [SamplingParams(max_tokens=row.max_tokens, ignore_eos=True) for row in rows]
        requests = [engine.opened.make_request(i, row.prompt, params[i]) for i, row in enumerate(rows)]

        def failed(request, sample, error):
            raise SystemExit(f"row {request.row_index}: {error}")

        def finished(sequence):
            done[sequence.request.row_index] = sequence.generated_token_ids

        engine.generate(requests, engine.plan(RequestLengths(requests)), on_finished=finished, on_error=failed)
        return [done[i] for i in range(len(rows))]

    answer([Row(row.prompt, 2) for row in rows[:2]])
    engine.stats = stats = RunStats()
    begin = perf_counter()
    answers = answer(rows)
    seconds = perf_counter() - begin
    needed = sum(len(row.prompt) + row.max_tokens - 1 for row in rows) - stats.prefix.saved_tokens
    padding = 1 - (needed + stats.recomputed_tokens) / stats.computed_tokens
    blocks = stats.blocks
    return {
        "answers": answers,
        "seconds": seconds,
        "steps": stats.num_steps,
        "rows_in_flight": blocks.sum_tables / stats.num_steps,
        "kv_utilization": blocks.sum_slots / (blocks.sum_used * block_size),
        "pool_utilization": blocks.sum_slots / (stats.num_steps * kv_tokens),
        "prompt_padding": padding,
        "decode_padding": padding,
        "padding": padding,
        "recomputed": stats.recomputed_tokens / stats.computed_tokens,
        "preemptions": stats.preemptions,
        "mean_table_length": blocks.sum_entries / blocks.sum_tables,
        "peak_kv_bytes": blocks.peak * engine.opened.spec.bytes_per_block(block_size),
    }


def measure(
    model: str,
    rows: list[Row],
    *,
    kv_tokens: int | None = None,
    block_size: int = 16,
    block_sizes: list[int] | None = None,
    dtype: str = "float32",
    cache: str = "static",
    sort: str = "none",
    repeat: int = 1,
) -> Result:
    """Run all variants `repeat` times, there and back, and return the JSON line's content."""
    opened = open_model(EngineConfig(model=model, dtype=dtype))
    reservation = reservation_of(rows)
    kv_tokens = kv_tokens or RESERVED_ROWS * reservation
    if kv_tokens < reservation or reservation > (opened.config.max_model_len or 0):
        raise SystemExit(
            f"the longest prompt and output have {reservation} tokens: --kv-tokens {kv_tokens} and the model's context of "
            f"{opened.config.max_model_len} must hold that"
        )
    batch_rows = min(kv_tokens // reservation, len(rows))

    def paged(size: int, max_num_seqs: int) -> Callable[[], Result]:
        return lambda: run_paged(model, rows, kv_tokens, size, max_num_seqs, dtype=dtype, sort=sort)

    sizes = sorted({block_size, *(block_sizes or [])})
    variants: dict[Any, Callable[[], Result]] = {
        "static": lambda: run_static(opened, rows, kv_tokens, cache),
        **{size: paged(size, len(rows)) for size in sizes},
        "small": paged(block_size, batch_rows),
    }
    best: dict[Any, Result] = {}
    for turn in range(repeat):
        for name in list(variants)[:: -1 if turn % 2 else 1]:
            result = variants[name]()
            if name not in best or result["seconds"] < best[name]["seconds"]:
                best[name] = result
    static, ours, small = best["static"], best[block_size], best["small"]
    agree = sum(a == b for a, b in zip(static["answers"], ours["answers"], strict=True))
    return {
        "benchmark": "paging",
        "model": model,
        "dtype": opened.spec.dtype,
        "device": opened.config.device,
        "rows": len(rows),
        "prompt_tokens": sum(len(row.prompt) for row in rows),
        "generated_tokens": sum(row.max_tokens for row in rows),
        "kv_tokens": kv_tokens,
        "kv_bytes": kv_tokens * opened.spec.bytes_per_token,
        "reservation": reservation,
        "batch_rows": batch_rows,
        "block_size": block_size,
        "cache": cache,
        "sort": sort,
        "repeat": repeat,
        "static": _shown(static),
        "paged": _shown(ours),
        "paged_small": _shown(small),
        "ratio": round(static["seconds"] / ours["seconds"], 2),
        "small_ratio": round(static["seconds"] / small["seconds"], 2),
        "memory_ratio": round(static["peak_kv_bytes"] / small["peak_kv_bytes"], 2),
        "rows_that_agree": agree,  # all, in fp32, but for ties within rounding; other dtypes promise nothing
        "block_sizes": {
            size: {"last_block_waste": round(1 - best[size]["kv_utilization"], 4), **_shown(best[size])} for size in sizes
        },
        "threads": opened.config.threads,
        "cpu": cpu_name(),
    }


def _shown(result: Result) -> Result:
    """Return a result as it is printed: without the answers, rounded."""
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items() if k != "answers"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or smollm2-135m")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-tokens", type=int, help=f"slots for both (default: the reservations of {RESERVED_ROWS} rows)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[4, 8, 16, 32, 64, 128])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--cache", choices=("static", "dynamic"), default="static")
    parser.add_argument("--sort", choices=SORTS, default="none")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--figure", type=Path, help="a .png or .svg")
    args = vars(parser.parse_args())
    seed, figure = args.pop("seed"), args.pop("figure")
    if figure and not find_spec("matplotlib"):
        raise SystemExit("--figure needs matplotlib: pip install 'pagedgen[bench]'")
    opened = open_model(EngineConfig(model=args["model"]))
    limits = {"num_token_ids": opened.num_token_ids, "max_model_len": opened.config.max_model_len or 0}
    args["rows"] = make_rows(args["rows"], seed, **limits)
    line = {**measure(**args), "seed": seed}
    print(json.dumps(line))
    paging_report.print_tables(line)
    if figure:
        paging_report.draw(line, figure)


if __name__ == "__main__":
    main()
