"""A job without its model: the engine's own scheduler and block manager, rows of given lengths, made-up tokens. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ..request import Request, Sequence
from .block_manager import BlockManager
from .feed import LOOKAHEAD_ROWS, LOOKAHEAD_TOKENS, Feed
from .scheduler import ScheduledStep, Scheduler

_SERIES_SAMPLES = 200


class CostModel(Protocol):
    """What a step takes (`engine.profile.MachineProfile`)."""

    def step_s(self, step: ScheduledStep, sampled: list[Sequence]) -> float:
        """Return a step's seconds, before its tokens are counted as computed; `sampled` get a token, and their samples."""


@dataclass
class SimulatedRun:
    """What came of it."""

    num_blocks: int
    block_size: int
    steps: int = 0
    seconds: float = 0.0  # by the cost model
    seconds_before_drain: float = 0.0
    rows_at_drain: int = 0  # in flight when no row waited any more
    peak_blocks: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    saved_tokens: int = 0  # prompt tokens found computed
    recomputed_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0  # blocks given up although somebody would look for them
    steps_before_drain: int = 0
    use_before_drain: float = 0.0  # blocks in tables and blocks kept for rows to come ÷ all, until no row waited
    live_before_drain: float = 0.0  # the same of blocks in tables alone
    mean_rows: float = 0.0  # in flight
    series: list[tuple[int, float, int, int, int]] = field(default_factory=list)  # step, seconds, used, kept, waiting


def simulate(
    feed: Feed,
    blocks: BlockManager,
    scheduler: Scheduler,
    lengths: Callable[[Request, int], int],
    cost: CostModel | None = None,
) -> SimulatedRun:
    """Run rows to their ends. `lengths(request, sample)`: how many tokens each gets, if that is less than its max_tokens.

    A row's samples are run, its beams as one sequence, its later turns not at all.
    """
    run = SimulatedRun(blocks.num_blocks, blocks.block_size)
    used_before_drain = live_before_drain = rows_in_flight = 0
    every = 1
    while True:
        while not feed.exhausted and scheduler.num_waiting < LOOKAHEAD_ROWS and scheduler.num_waiting_tokens < LOOKAHEAD_TOKENS:
            for request in feed.take(wait=True):
                if blocks.blocks_needed(request) <= blocks.num_blocks:  # else a row error
                    scheduler.add(Sequence(request))
        if not scheduler.has_unfinished:
            break
        step = scheduler.schedule()
        blocks.take_moves()
        used, kept = blocks.num_used_blocks, blocks.num_cached_blocks
        if scheduler.num_waiting:
            run.steps_before_drain += 1
            used_before_drain += used + kept
            live_before_drain += used
        else:
            run.rows_at_drain = max(run.rows_at_drain, len(scheduler.running))
        run.peak_blocks = max(run.peak_blocks, used)
        rows_in_flight += len(scheduler.running)
        run.computed_tokens += sum(step.num_scheduled_tokens)
        sampled = [s for s, n in zip(step.sequences, step.num_scheduled_tokens, strict=True) if n == s.num_uncomputed_tokens]
        if cost is not None:
            run.seconds += cost.step_s(step, sampled)
        if scheduler.num_waiting:
            run.seconds_before_drain = run.seconds
        if run.steps % every == 0:
            run.series.append((run.steps, run.seconds, used, kept, scheduler.num_waiting))
            if len(run.series) > 2 * _SERIES_SAMPLES:
                run.series = run.series[::2]
                every *= 2
        run.steps += 1
        scheduler.advance(step)
        for first in sampled:
            for sequence in [first, *scheduler.fork(first)] if first.num_pending_samples else [first]:
                sequence.token_ids.append(0)
                run.generated_tokens += 1
                request = sequence.request
                if sequence.num_generated_tokens >= min(lengths(request, sequence.sample_index), request.max_tokens):
                    sequence.finish_reason = "length" if sequence.num_generated_tokens == request.max_tokens else "stop"
                    scheduler.finish(sequence)
    run.saved_tokens = scheduler.prefix.saved_tokens
    run.recomputed_tokens = scheduler.num_recomputed_tokens
    run.preemptions = scheduler.num_preemptions
    run.evictions = blocks.pool.num_evictions
    before = max(1, run.steps_before_drain) * blocks.num_blocks
    run.use_before_drain, run.live_before_drain = used_before_drain / before, live_before_drain / before
    run.mean_rows = rows_in_flight / max(1, run.steps)
    return run
