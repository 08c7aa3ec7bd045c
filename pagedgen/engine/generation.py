"""The loop of one call: schedule → move → run → sample, until every row has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ..errors import RowError
from ..request import Request, Sequence
from ..sampling.beam import BeamGroup
from ..sampling.sampler import Sampler
from ..sampling.stops import StopChecker
from ..stats import RunStats
from .batch import BlockTableArray, PackedBatch, build_batch
from .block_manager import BlockManager
from .block_map import BlockMapWriter
from .cascade import group_decodes
from .feed import LOOKAHEAD_ROWS, LOOKAHEAD_TOKENS, Control, Feed
from .model_runner import ModelRunner
from .scheduler import ScheduledStep, Scheduler
from .search import advance_search, end_search
from .tiers import Tier

if TYPE_CHECKING:
    import torch

_MOST_FAILED_MOVES = 100  # then the device is broken, not unlucky


@dataclass(frozen=True)
class StepReport:
    """What progress shows after a step."""

    num_finished: int
    generated_tokens: int
    tokens_left: int  # that the unfinished rows may still get
    used_blocks: int
    total_blocks: int


@dataclass(frozen=True)
class Callbacks:
    """Who is told what; see `Engine.generate`."""

    on_finished: Callable[[Sequence], Request | None]
    on_error: Callable[[Request, int, RowError], None]
    on_step: Callable[[StepReport], None]
    on_note: Callable[[str], None]
    control: Callable[[], Control]


@dataclass
class Generation:
    """One call of `Engine.generate` on its way: everything a step needs."""

    feed: Feed
    longest_first: bool
    runner: ModelRunner
    sampler: Sampler
    stops: StopChecker
    scheduler: Scheduler
    blocks: BlockManager
    tables: BlockTableArray
    stats: RunStats
    callbacks: Callbacks
    block_map: BlockMapWriter | None
    audit: bool
    cascade: bool  # decodes attend to what they share together
    _tokens_left: int = 0  # that the rows taken in may still get

    def run(self) -> bool:
        """Step until every row has ended, or `control` ends the run: then return False."""
        scheduler, blocks, stats = self.scheduler, self.blocks, self.stats
        finished = 0
        self._take_rows_in()
        start = perf_counter()
        stats.startup_s = start - stats.started
        completed = True
        while True:
            control = self.callbacks.control()
            scheduler.admitting = control is Control.GO_ON
            if scheduler.admitting:
                self._take_rows_in()
            if not scheduler.has_unfinished and self.feed.exhausted:
                break
            if control is Control.DROP or (not scheduler.admitting and not scheduler.running):
                completed = False
                break
            if not scheduler.has_unfinished:
                continue  # rows are still being read
            generated_before = stats.generated_tokens
            with stats.timed("schedule"):
                step = scheduler.schedule()
            step = self._make_moves(step)
            self.tables.update(scheduler.running)
            if not step.sequences:
                continue  # what its rows need could not be moved: they wait again
            with stats.timed("schedule"):
                shared = None
                if self.cascade:
                    step, shared = group_decodes(step, self.tables, blocks.block_size)
                    stats.spared_block_reads += shared.num_spared_reads if shared is not None else 0
                batch = build_batch(step, self.tables, blocks.block_size, shared)
            ended = self._run_step(step, batch)
            stats.blocks.record(
                stats.num_steps,
                used=blocks.num_used_blocks,
                cached=blocks.num_cached_blocks,
                slots=blocks.filled_slots(scheduler.running),
                entries=sum(len(s.block_table) for s in scheduler.running),
                tables=len(scheduler.running),
                waiting=scheduler.num_waiting,
            )
            if self.block_map is not None:
                self.block_map.record(stats.num_steps, scheduler.running, blocks)
            stats.num_steps += 1
            self._tokens_left -= stats.generated_tokens - generated_before
            for sequence in ended:
                self._tokens_left -= _most_tokens(sequence.request) - sequence.num_generated_tokens
                finished += 1
                following = self._end(sequence)
                self._tokens_left += _most_tokens(following) if following is not None else 0
            if self.audit:
                blocks.audit(scheduler.running)
            self.callbacks.on_step(
                StepReport(finished, stats.generated_tokens, self._tokens_left, blocks.num_used_blocks, blocks.num_blocks)
            )
        assert not completed or blocks.num_used_blocks == 0, f"{blocks.num_used_blocks} blocks leaked"
        stats.generate_s += perf_counter() - start
        _count(stats, scheduler, blocks)
        return completed

    def _take_rows_in(self) -> None:
        """Queue the rows that are ready, as far as the engine looks ahead; with nothing else to do wait for some, once."""
        scheduler, stats = self.scheduler, self.stats
        while (
            not self.feed.exhausted
            and scheduler.num_waiting < LOOKAHEAD_ROWS
            and scheduler.num_waiting_tokens < LOOKAHEAD_TOKENS
        ):
            begin = perf_counter()
            wait = not scheduler.has_unfinished
            requests = self.feed.take(wait=wait)
            if stats.num_steps and wait:
                stats.input_waits += 1
                stats.add_time("wait for input", perf_counter() - begin)
            if not requests:
                return
            with stats.timed("schedule"):
                for request in requests:
                    self._queue(request)

    def _queue(self, request: Request) -> None:
        """Queue a row, unless it can't fit the pool."""
        error = too_large(request, self.blocks)
        if error is not None:
            for sample in request.samples:
                self.callbacks.on_error(request, sample, error)
            return
        sequence = Sequence(request)
        if request.params.beam_width > 1:
            sequence.beam_group = BeamGroup(sequence)
        self.scheduler.add(sequence, -request.max_kv_tokens if self.longest_first else 0)
        self._tokens_left += _most_tokens(request) * len(request.samples)

    def _make_moves(self, step: ScheduledStep) -> ScheduledStep:
        """Copy and move blocks as the schedule wants; return the step less rows whose K/V could not be moved.

        A failure costs those rows a recomputation, nothing else. A disk that failed is not used again.
        """
        scheduler, blocks, on_note = self.scheduler, self.blocks, self.callbacks.on_note
        batches = blocks.take_moves()
        if not batches:
            return step
        with self.stats.timed("move"):
            spoiled, errors = self.runner.move_blocks(batches)
        if not errors:
            return step
        swap = self.stats.swap
        if not swap.failed_moves:
            on_note(f"blocks could not be moved, their rows are computed again: {errors[0]}")
        swap.failed_moves += len(errors)
        if swap.failed_moves > _MOST_FAILED_MOVES:
            raise errors[0]
        lost = blocks.lose(spoiled, scheduler.running)
        disk_errors = [error for error in errors if isinstance(error, OSError)]
        if disk_errors and blocks.pool.sizes[Tier.DISK]:
            blocks.pool.close_tier(Tier.DISK)
            on_note(f"the disk swap space failed and is not used any more: {disk_errors[0]}")
        return step.without(scheduler.recompute(lost))

    def _end(self, sequence: Sequence) -> Request | None:
        """Hand out what came of a sequence and return its blocks, or go on with the next turn, whose request is returned."""
        scheduler, blocks, callbacks = self.scheduler, self.blocks, self.callbacks
        beams = sequence.beam_group is not None  # its beams have left, this is one of their answers
        if sequence.finish_reason == "error":
            if not beams:
                scheduler.finish(sequence)
            callbacks.on_error(sequence.request, sequence.sample_index, RowError("nan_logits", _nan_logits(sequence)))
            return None
        following = callbacks.on_finished(sequence)
        if beams:
            assert following is None
            return None
        error = too_large(following, blocks) if following is not None else None
        if following is not None and error is None:
            scheduler.next_turn(sequence, following)
            return following
        scheduler.finish(sequence)
        if following is not None and error is not None:
            callbacks.on_error(following, sequence.sample_index, error)
        return None

    def _run_step(self, step: ScheduledStep, batch: PackedBatch) -> list[Sequence]:
        """Run one batch and give each sampled row its token; return the rows that ended."""
        scheduler, stats = self.scheduler, self.stats
        begin = perf_counter()
        best_among = self.sampler.best_among([step.sequences[row] for row in batch.sample_rows])
        logits = self.runner.run(batch, self.tables, best_among=best_among)
        self.runner.synchronize()  # sampling would wait all the same; here the wait is counted where it belongs
        ran = perf_counter()
        # A mixed step's time is shared by tokens: prefill and decode rows run in the same GEMMs.
        share = step.num_decodes / batch.num_tokens
        stats.add_time("decode", (ran - begin) * share)
        stats.add_time("prefill", (ran - begin) * (1 - share))
        scheduler.advance(step)
        stats.computed_tokens += batch.num_tokens
        sampled, sources = [], []  # every row's logits serve all samples that are forked from it now
        beams, beam_sources = [], []
        for place, row in enumerate(batch.sample_rows):
            sequence = step.sequences[row]
            if sequence.beam_group is not None:
                beams.append(sequence)
                beam_sources.append(place)
                continue
            family = [sequence, *scheduler.fork(sequence)] if sequence.num_pending_samples else [sequence]
            sampled += family
            sources += [place] * len(family)
        ended = self._search(logits[beam_sources], beams) if beams else []
        if sources != list(range(len(batch.sample_rows))):
            logits = logits[sources]
        if sampled:
            for sequence, token in zip(sampled, self.sampler(logits, sampled), strict=True):
                if token < 0:
                    sequence.finish_reason = "error"
                    ended.append(sequence)
                    continue
                sequence.token_ids.append(token)
                stats.generated_tokens += 1
                if self.stops.check(sequence):
                    ended.append(sequence)
        stats.add_time("sample", perf_counter() - ran)
        return ended

    def _search(self, logits: torch.Tensor, beams: list[Sequence]) -> list[Sequence]:
        """Advance the beam searches whose beams were computed; return the answers of those that ended."""
        scheduler = self.scheduler
        ended: list[Sequence] = []
        for beam, values, ids in zip(beams, *self.sampler.continuations(logits, beams), strict=True):
            group = beam.beam_group
            if not len(values) and not group.is_suspended and beam in group.beams:
                answers = [Sequence(group.request, i) for i in range(group.request.params.n)]
                for answer in answers:
                    answer.finish_reason = "error"
            elif advance_search(beam, values, ids, scheduler, self.blocks):
                answers = self.stops.beam_answers(group)
            else:
                continue
            for answer in answers:
                answer.beam_group = group
                answer.num_cached_tokens = beam.num_cached_tokens
                self.stats.generated_tokens += answer.num_generated_tokens
            end_search(group, scheduler)
            ended += answers
        return ended


def _count(stats: RunStats, scheduler: Scheduler, blocks: BlockManager) -> None:
    """Add up what scheduler and block manager counted."""
    stats.preemptions += scheduler.num_preemptions
    stats.recomputed_tokens += scheduler.num_recomputed_tokens
    stats.kept_tokens += scheduler.num_kept_tokens
    stats.prefix = scheduler.prefix
    stats.prefix.evictions = blocks.pool.num_evictions
    for (source, destination), count in blocks.pool.num_moves.items():
        name = f"{source.name.lower()} to {destination.name.lower()}"
        stats.swap.moved_blocks[name] = stats.swap.moved_blocks.get(name, 0) + count
    stats.blocks.final_used, stats.blocks.final_cached = blocks.num_used_blocks, blocks.num_cached_blocks


def _nan_logits(sequence: Sequence) -> str:
    return f"the model's output after {len(sequence.token_ids)} tokens is not a number (NaN or infinite logits)"


def _most_tokens(request: Request) -> int:
    """Return the most tokens a request and the turns after it may get."""
    return request.max_tokens + request.later_tokens


def too_large(request: Request, blocks: BlockManager) -> RowError | None:
    """Return what to say of a row that can't fit the pool, with the numbers; None for one that can."""
    needed = blocks.blocks_needed(request)
    if needed <= blocks.num_blocks:
        return None
    beams = f" in {request.params.beam_width} beams" if request.params.beam_width > 1 else ""
    later = f", up to {request.later_tokens} in later turns" if request.later_tokens else ""
    return RowError(
        "kv_pool_too_small",
        f"the row needs {needed} blocks of {blocks.block_size} tokens ({request.num_prompt_tokens} prompt tokens, up to "
        f"{request.max_tokens} generated{beams}{later}), the pool has {blocks.num_blocks}",
    )
