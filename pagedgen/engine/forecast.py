"""What a job will do before it runs: its rows through the run's own scheduler, and the same with other settings. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..model.spec import ModelSpec
from ..request import Request
from .feed import ListFeed
from .order import PlannedFeed
from .prefix_tree import BLOCK_SIZES, Sharing
from .profile import MachineProfile
from .scheduler import make_scheduler
from .simulation import SimulatedRun, simulate

_MOST_SIMULATED_ROWS, _SAMPLE_OF_SEQS, _RUN_ROWS = 2048, 8, 64  # of more rows, a sample is run


@dataclass
class BlockSizeCost:
    """What one block size costs a job."""

    block_size: int
    waste: float  # share of the slots in use that hold no token: the unfilled ends of rows
    mean_table_length: float
    shareable: float  # share of the prompt tokens that needn't be computed
    decode_s: float | None  # attention of a step of 64 rows of 512 tokens, where `tune` has measured it


@dataclass
class Forecast:
    """A job's run, foretold."""

    num_rows: int
    simulated_rows: int  # fewer where the job is large; the numbers below are scaled up
    steps: int
    peak_blocks: int
    pool_use: float  # until no row waits
    recomputed_tokens: int
    preemptions: int
    saved_tokens: int
    attainable_tokens: int
    generated_tokens: int
    computed_tokens: int
    generate_s: float | None  # None without a profile
    tokens_per_s: float | None
    waterline: list[dict[str, float]] = field(default_factory=list)


def forecast(
    rows: PlannedFeed,
    config: EngineConfig,
    num_blocks: int,
    profile: MachineProfile | None,
    lengths: Callable[[Request, int], int],
    *,
    is_ample: bool = False,
) -> Forecast:
    """Run rows, which were all read, through the scheduler in simulation; `is_ample` as `Plan.is_ample`."""
    if not len(rows):
        return _told(SimulatedRun(num_blocks, config.block_size or 1), 0, 0, profile, 0)
    # Of many rows a sample, in runs of neighbours, so that what they share stays shared; enough to fill the pool several times.
    sample = max(_MOST_SIMULATED_ROWS, _SAMPLE_OF_SEQS * (config.max_num_seqs or 1))
    every = max(1, len(rows) // sample)
    order = rows.order if config.sort == "prefix" else np.arange(len(rows))
    chosen = [rows.request(int(i)) for s in range(0, len(order), every * _RUN_ROWS) for i in order[s : s + _RUN_ROWS]]
    if config.sort == "length":
        chosen.sort(key=lambda r: -r.max_kv_tokens)
    blocks, scheduler = make_scheduler(config, num_blocks, is_ample=is_ample)
    run = simulate(ListFeed(chosen), blocks, scheduler, lengths, profile)
    attainable = rows.sharing.attainable_tokens if rows.sharing is not None and config.enable_prefix_caching else 0
    return _told(run, len(rows), len(chosen), profile, attainable)


def _told(run: SimulatedRun, num_rows: int, num_chosen: int, profile: MachineProfile | None, attainable: int) -> Forecast:
    """Scale a simulated sample up to the job: its steps until no row waited are repeated, the drain is not."""
    scale = num_rows / max(1, num_chosen)
    full = (num_rows - run.rows_at_drain) / max(1, num_chosen - run.rows_at_drain) if scale > 1 else 1.0
    steps = run.steps_before_drain * (full - 1) + run.steps
    generate_s = run.seconds_before_drain * (full - 1) + run.seconds if profile is not None else None
    return Forecast(
        num_rows=num_rows,
        simulated_rows=num_chosen,
        steps=round(steps),
        peak_blocks=run.peak_blocks,
        pool_use=run.use_before_drain,
        recomputed_tokens=round(run.recomputed_tokens * scale),
        preemptions=round(run.preemptions * scale),
        saved_tokens=round(run.saved_tokens * scale),
        attainable_tokens=attainable,
        generated_tokens=round(run.generated_tokens * scale),
        computed_tokens=round(run.computed_tokens * scale),
        generate_s=generate_s,
        tokens_per_s=run.generated_tokens * scale / generate_s if generate_s else None,
        waterline=[
            {"step": step, "seconds": round(seconds, 3), "used": used, "kept": kept, "waiting": waiting}
            for step, seconds, used, kept, waiting in run.series
        ],
    )


def block_size_costs(
    prompt_lens: np.ndarray, output_lens: np.ndarray, sharing: Sharing, profile: MachineProfile | None
) -> list[BlockSizeCost]:
    """Compare block sizes on a job's lengths, (num_rows,) each. A row holds its prompt and, growing, its output."""
    result = []
    for size in BLOCK_SIZES:
        # A growing row's last block is half filled on the mean; slots and tables are means over the row's life.
        ends = prompt_lens + np.maximum(output_lens - 1, 0)
        life = np.maximum(output_lens, 1)
        middle = (prompt_lens + ends) / 2
        blocks = np.where(output_lens > size, middle / size + 0.5, -(-(prompt_lens + output_lens // 2) // size))
        slots = float((blocks * size * life).sum())
        tokens = float((middle * life).sum())
        decode_s = profile.decode_s_by_block_size.get(str(size)) if profile is not None else None
        result.append(
            BlockSizeCost(
                block_size=size,
                waste=max(0.0, 1 - tokens / slots) if slots else 0.0,
                mean_table_length=float((blocks * life).sum() / life.sum()) if len(life) else 0.0,
                shareable=sharing.attainable_by_block_size[size] / max(1, sharing.prompt_tokens),
                decode_s=decode_s,
            )
        )
    return result


def recommend_block_size(costs: list[BlockSizeCost], default: int, *, pool_is_short: bool, decode_share: float = 0.3) -> int:
    """Return the block size that costs least: prompt tokens computed again, attention's time where known, and, where the pool
    can't hold all rows at once, slots wasted.

    `decode_share`: what attention of decoding rows is of the whole time, about. Equal within a percent: the default if it is
    one of them, else the largest, which has the shortest tables.
    """
    best = max(c.shareable for c in costs)
    fastest = min((c.decode_s for c in costs if c.decode_s), default=None)

    def cost(c: BlockSizeCost) -> float:
        slower = (c.decode_s / fastest - 1) * decode_share if fastest and c.decode_s else 0.0
        return pool_is_short * c.waste + (best - c.shareable) + slower

    least = min(cost(c) for c in costs)
    equal = [c.block_size for c in costs if cost(c) <= least + 0.01]
    return default if default in equal else max(equal)


def histogram(values: np.ndarray) -> list[dict[str, int]]:
    """Return counts of lengths in bins of powers of two: `from` and `to` (inclusive), `rows`."""
    if not len(values):
        return []
    tops = 2 ** np.arange(0, 63)
    bins = np.searchsorted(tops, values)
    low, high = int(bins.min()), int(bins.max())
    return [
        {"from": int(tops[b - 1]) + 1 if b else 0, "to": int(tops[b]), "rows": int((bins == b).sum())}
        for b in range(low, high + 1)
    ]


def warnings(spec: ModelSpec, plan: Any, prompt_lens: np.ndarray, output_lens: np.ndarray, told: Forecast) -> list[str]:
    """Return where paging, or this plan, can't help."""
    found = []
    if plan.num_rows == 1:
        found.append("one row: nothing to batch or share; a step reads all weights for one token")
    totals = prompt_lens + output_lens
    if len(totals) > 1 and totals.min() == totals.max():
        found.append("all rows have one length: packing saves no padding, and no row's blocks come free before the others'")
    kv_bytes = int(totals.sum()) * spec.bytes_per_token
    if len(totals) and kv_bytes < 0.02 * plan.weights_bytes:
        found.append(
            f"all K/V of the job is {kv_bytes / 2**20:,.1f} MiB, weights are {plan.weights_bytes / 2**20:,.0f} MiB: "
            "how K/V is stored makes no difference"
        )
    if told.recomputed_tokens > 0.03 * max(1, told.computed_tokens):
        found.append(f"{told.recomputed_tokens:,} tokens are computed twice for lack of blocks; more memory or fewer rows help")
    if told.attainable_tokens and told.saved_tokens < 0.9 * told.attainable_tokens:
        found.append(
            f"common beginnings of {told.attainable_tokens:,} tokens, of which {told.saved_tokens:,} are computed once: "
            "the pool can't keep the others, or --sort and the prefix cache are off"
        )
    if plan.num_too_large:
        found.append(f"{plan.num_too_large:,} rows are larger than the pool")
    return found
