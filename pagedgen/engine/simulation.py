"""A job without its model: the engine's own scheduler and block manager, rows of given lengths, made-up tokens. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ..request import Request, Sequence
from ..sampling.beam import BeamGroup
from .block_manager import BlockManager
from .feed import LOOKAHEAD_ROWS, LOOKAHEAD_TOKENS, Feed
from .scheduler import ScheduledStep, Scheduler
from .search import advance_search, end_search

_SERIES_SAMPLES = 200
_SURPRISE = 2.0  # mean of a made-up continuation's negative log-probability
_TOKEN = 0  # every token that is generated, and those that the user says in later turns


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

    A row's samples are run; its beams with made-up continuations, so that some have children and others none; its later turns
    as if each of them said as much.
    """
    rng = np.random.default_rng(0)
    run = SimulatedRun(blocks.num_blocks, blocks.block_size)
    used_before_drain = live_before_drain = rows_in_flight = 0
    every = 1
    while True:
        while not feed.exhausted and scheduler.num_waiting < LOOKAHEAD_ROWS and scheduler.num_waiting_tokens < LOOKAHEAD_TOKENS:
            for request in feed.take(wait=True):
                if blocks.blocks_needed(request) <= blocks.num_blocks:  # else a row error
                    sequence = Sequence(request)
                    if request.params.beam_width > 1:
                        sequence.beam_group = BeamGroup(sequence)
                    scheduler.add(sequence)
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
            if first.beam_group is not None:
                run.generated_tokens += _search(first, lengths(first.request, 0), rng, scheduler, blocks)
                continue
            for sequence in [first, *scheduler.fork(first)] if first.num_pending_samples else [first]:
                sequence.token_ids.append(_TOKEN)
                run.generated_tokens += 1
                request = sequence.request
                if sequence.num_generated_tokens >= min(lengths(request, sequence.sample_index), request.max_tokens):
                    sequence.finish_reason = "length" if sequence.num_generated_tokens == request.max_tokens else "stop"
                    following = _next_turn(sequence)
                    if following is not None and blocks.blocks_needed(following) <= blocks.num_blocks:
                        scheduler.next_turn(sequence, following)
                    else:
                        scheduler.finish(sequence)
    run.saved_tokens = scheduler.prefix.saved_tokens
    run.recomputed_tokens = scheduler.num_recomputed_tokens
    run.preemptions = scheduler.num_preemptions
    run.evictions = blocks.pool.num_evictions
    before = max(1, run.steps_before_drain) * blocks.num_blocks
    run.use_before_drain, run.live_before_drain = used_before_drain / before, live_before_drain / before
    run.mean_rows = rows_in_flight / max(1, run.steps)
    return run


def _search(beam: Sequence, length: int, rng: np.random.Generator, scheduler: Scheduler, blocks: BlockManager) -> int:
    """Advance a beam with made-up continuations; return the tokens of its row's answers if they are there."""
    group: BeamGroup = beam.beam_group
    request = group.request
    log_probs = -np.sort(rng.exponential(_SURPRISE, group.num_candidates)).astype(np.float32)
    token = next(t for t in itertools.count() if t not in group.ending_token_ids)
    token_ids = np.full(group.num_candidates, token)
    ended = advance_search(beam, log_probs, token_ids, scheduler, blocks)
    length = min(length, request.max_tokens)
    if not ended and (not group.beams or group.beams[0].num_generated_tokens < length):
        return 0
    end_search(group, scheduler)
    return length * request.params.n


def _next_turn(sequence: Sequence) -> Request | None:
    """Return the request of a conversation's next turn, which adds an even share of what all later ones are to say."""
    request = sequence.request
    if not request.later_turns:
        return None
    said = max(0, request.later_tokens - request.later_turns * request.params.max_tokens) // request.later_turns
    prompt = [*sequence.token_ids, *[_TOKEN] * said]
    room = request.max_kv_tokens + 1 - len(prompt)
    if room < 1:
        return None
    max_tokens = min(request.params.max_tokens, room)
    return replace(
        request,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        turn_index=request.turn_index + 1,
        later_tokens=room - max_tokens if request.later_turns > 1 else 0,
        later_turns=request.later_turns - 1,
        sample_indices=(),
    )
