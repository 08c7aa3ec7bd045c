"""The loop: schedule → run → postprocess, until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ..errors import MemoryPlanError, RowError
from ..model import loader
from ..request import Request, Sequence
from ..sampling.beam import BeamGroup
from ..sampling.sampler import ROWS_AT_ONCE, Sampler
from ..sampling.stops import StopChecker
from ..sampling_params import SamplingParams
from ..stats import RunStats
from ..threads import set_threads
from . import memory
from .batch import BlockTableArray, PackedBatch, build_batch
from .block_manager import BlockManager
from .block_map import BlockMapWriter
from .model_runner import ModelRunner
from .opened import OpenedModel
from .planner import Plan, plan_requests
from .scheduler import ScheduledStep, Scheduler
from .tiers import Tier

if TYPE_CHECKING:
    import torch


_MOST_FAILED_MOVES = 100  # then the device is broken, not unlucky


@dataclass(frozen=True)
class _Callbacks:
    """Who is told what; see `Engine.generate`."""

    on_finished: Callable[[Sequence], Request | None]
    on_error: Callable[[Request, int, RowError], None]
    on_step: Callable[[StepReport], None]
    on_note: Callable[[str], None]


@dataclass(frozen=True)
class StepReport:
    """What progress shows after a step."""

    num_finished: int
    generated_tokens: int
    tokens_left: int  # that the unfinished rows may still get
    used_blocks: int
    total_blocks: int


class Engine:
    """A loaded model that answers requests. Knows token ids and lengths; reading, rendering and writing are others' work."""

    def __init__(self, opened: OpenedModel, stats: RunStats | None = None):
        """Load the weights and run the largest batch once, to learn what memory it takes.

        Raises:
            ModelError: the weights can't be used.
        """
        self.opened = opened
        self.stats = stats or RunStats()
        config, spec = opened.config, opened.spec
        assert config.block_size and config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
        self._max_num_seqs, self._max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
        assert config.threads
        set_threads(config.threads, config.backend)
        with self.stats.timed("load"), _out_of_memory_is_told("the weights"):
            model, row_buckets = loader.load_model(
                opened.files,
                opened.hf_config,
                spec.dtype,
                config.device,
                row_invariant=config.device == "cpu",
            )
        self._runner = ModelRunner(
            model,
            spec,
            device=config.device,
            backend=config.backend,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            row_buckets=row_buckets,
        )
        self._sampler = Sampler(opened.num_token_ids)
        self._round_trip_s: dict[Tier, float] = {}  # measured when a tier is first asked for
        # Every row drawn at random with every filter: the most memory the sampler can take.
        params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01)
        probe = Sequence(Request(0, [0], params, 1, frozenset(), 0))
        with self.stats.timed("warm_up"), _out_of_memory_is_told("the largest step"):
            self._activation_peak_bytes = self._runner.warm_up(
                max_num_batched_tokens=self._max_num_batched_tokens,
                max_num_seqs=self._max_num_seqs,
                sample=lambda logits: self._sampler(logits[:ROWS_AT_ONCE], [probe] * min(len(logits), ROWS_AT_ONCE)),
            )

    def plan(self, requests: list[Request], **not_run: int) -> Plan:
        """Plan the requests on what memory is free now; `not_run` counts rows that ended before (see `planner.plan_job`).

        Raises:
            MemoryPlanError: not even one row fits.
        """
        config = self.opened.config
        return plan_requests(
            requests,
            self.opened.spec,
            config,
            device=memory.device_memory(config.device),
            own_bytes=_own_bytes(config.device),
            pending_bytes=self._activation_peak_bytes,
            activation_peak_bytes=self._activation_peak_bytes,
            **not_run,
        )

    def generate(
        self,
        requests: Iterable[Request],
        plan: Plan,
        *,
        on_finished: Callable[[Sequence], Request | None],
        on_error: Callable[[Request, int, RowError], None],
        on_step: Callable[[StepReport], None] = lambda report: None,
        on_note: Callable[[str], None] = lambda text: None,
        block_map: BlockMapWriter | None = None,
    ) -> None:
        """Answer every request; each of its samples ends in exactly one call of `on_finished` or `on_error`.

        `on_finished` may return the request of the conversation's next turn, which goes on from the finished one's blocks and
        is answered for that sample alone.
        """
        config, stats = self.opened.config, self.stats
        assert config.block_size
        host_blocks, disk_blocks = self._tiers_worth_using(plan, on_note)
        blocks = BlockManager(
            plan.num_blocks,
            config.block_size,
            prefix_caching=config.enable_prefix_caching,
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            record_history=config.audit,
        )
        scheduler = Scheduler(
            blocks,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            watermark=config.watermark,
        )
        with stats.timed("schedule"):
            for request in self._in_order(requests):
                needed = blocks.blocks_needed(request)
                if needed > blocks.num_blocks:
                    for sample in range(request.params.n):
                        on_error(request, sample, _too_large(request, needed, blocks))
                    continue
                sequence = Sequence(request)
                if request.params.beam_width > 1:
                    sequence.beam_group = BeamGroup(sequence)
                scheduler.add(sequence)
        stats.blocks.total, stats.blocks.block_size = blocks.num_blocks, config.block_size
        if config.enable_prefix_caching:
            stats.prefix.enabled = True
            stats.prefix.shareable_tokens += blocks.cache.shareable_tokens()
        with _out_of_memory_is_told(f"a KV pool of {blocks.num_blocks} blocks"):
            self._runner.allocate_cache(
                blocks.num_blocks, host_blocks=host_blocks, disk_blocks=disk_blocks, disk_path=config.disk_swap_path
            )
        try:
            with scheduler:
                self._loop(scheduler, blocks, _Callbacks(on_finished, on_error, on_step, on_note), block_map)
            if config.audit:
                blocks.audit([])
        finally:
            self._runner.release_cache()  # the next call plans with this memory

    def _tiers_worth_using(self, plan: Plan, on_note: Callable[[str], None]) -> tuple[int, int]:
        """Return the host and disk blocks to use: those of tiers that give a block back sooner than it is computed again."""
        config, sizes = self.opened.config, []
        assert config.block_size
        recompute_s = config.block_size * self._runner.prefill_s_per_token
        for tier, num_blocks in ((Tier.HOST, plan.host_blocks), (Tier.DISK, plan.disk_blocks)):
            if num_blocks:
                if tier not in self._round_trip_s:
                    with _out_of_memory_is_told("measuring the swap space"):
                        self._round_trip_s[tier] = self._measure_tier(tier, on_note)
                round_trip_s = self._round_trip_s[tier]
                if round_trip_s >= recompute_s:
                    on_note(
                        f"the {tier.name.lower()} swap space is not used: a block takes {round_trip_s * 1e3:.2f} ms there and "
                        f"back, computing it again {recompute_s * 1e3:.2f} ms"
                    )
                    num_blocks = 0
            sizes.append(num_blocks)
        self.stats.swap.recompute_s_per_block = recompute_s
        self.stats.swap.blocks = {"host": sizes[0], "disk": sizes[1]}
        self.stats.swap.round_trip_s_per_block = {tier.name.lower(): s for tier, s in self._round_trip_s.items()}
        return sizes[0], sizes[1]

    def _measure_tier(self, tier: Tier, on_note: Callable[[str], None]) -> float:
        """Return the seconds a block takes to a tier and back; infinity where the disk fails already."""
        try:
            return self._runner.round_trip_s(tier, self.opened.config.disk_swap_path)
        except OSError as error:
            on_note(f"the disk swap space failed: {error}")
            return float("inf")

    def _loop(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        callbacks: _Callbacks,
        block_map: BlockMapWriter | None,
    ) -> None:
        """Step until every row has ended."""
        config, stats = self.opened.config, self.stats
        tables = BlockTableArray(self._max_num_seqs)
        stops = StopChecker(self.opened.tokenizer)
        finished = 0
        tokens_left = sum(_most_tokens(s.request) * s.request.params.n for s in scheduler.waiting)
        start = perf_counter()
        stats.startup_s = start - stats.started
        while scheduler.has_unfinished:
            generated_before = stats.generated_tokens
            with stats.timed("schedule"):
                step = scheduler.schedule()
            step = self._make_moves(scheduler, blocks, step, callbacks.on_note)
            tables.update(scheduler.running)
            if not step.sequences:
                continue  # what its rows need could not be moved: they wait again
            with stats.timed("schedule"):
                batch = build_batch(step, tables, blocks.block_size)
            ended = self._run_step(scheduler, blocks, step, batch, tables, stops)
            stats.blocks.record(
                stats.num_steps,
                used=blocks.num_used_blocks,
                cached=blocks.num_cached_blocks,
                slots=blocks.filled_slots(scheduler.running),
                entries=sum(len(s.block_table) for s in scheduler.running),
                tables=len(scheduler.running),
                waiting=scheduler.num_waiting,
            )
            if block_map is not None:
                block_map.record(stats.num_steps, scheduler.running, blocks)
            stats.num_steps += 1
            tokens_left -= stats.generated_tokens - generated_before
            for sequence in ended:
                tokens_left -= _most_tokens(sequence.request) - sequence.num_generated_tokens
                finished += 1
                following = self._end(scheduler, blocks, sequence, callbacks)
                tokens_left += _most_tokens(following) if following is not None else 0
            if config.audit:
                blocks.audit(scheduler.running)
            callbacks.on_step(
                StepReport(finished, stats.generated_tokens, tokens_left, blocks.num_used_blocks, blocks.num_blocks)
            )
        assert blocks.num_used_blocks == 0, f"{blocks.num_used_blocks} blocks leaked"
        stats.generate_s += perf_counter() - start
        _count(stats, scheduler, blocks)
        stats.peak_memory_bytes = _peak_bytes(config.device)

    def _make_moves(
        self, scheduler: Scheduler, blocks: BlockManager, step: ScheduledStep, on_note: Callable[[str], None]
    ) -> ScheduledStep:
        """Copy and move blocks as the schedule wants; return the step less rows whose K/V could not be moved.

        A failure costs those rows a recomputation, nothing else. A disk that failed is not used again.
        """
        batches = blocks.take_moves()
        if not batches:
            return step
        with self.stats.timed("move"):
            spoiled, errors = self._runner.move_blocks(batches)
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

    def _end(self, scheduler: Scheduler, blocks: BlockManager, sequence: Sequence, callbacks: _Callbacks) -> Request | None:
        """Hand out what came of a sequence and return its blocks, or go on with the next turn, whose request is returned."""
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
        if following is not None and blocks.blocks_needed(following) > blocks.num_blocks:
            needed = blocks.blocks_needed(following)
            callbacks.on_error(following, sequence.sample_index, _too_large(following, needed, blocks))
            following = None
        if following is None:
            scheduler.finish(sequence)
        else:
            scheduler.next_turn(sequence, following)
        return following

    def _in_order(self, requests: Iterable[Request]) -> list[Request]:
        """Longest expected rows first, so that short ones fill the tail; ties and `--sort none` keep the input order."""
        ordered = list(requests)
        if self.opened.config.sort == "length":
            ordered.sort(key=lambda r: -r.max_kv_tokens)
        return ordered

    def _run_step(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        step: ScheduledStep,
        batch: PackedBatch,
        tables: BlockTableArray,
        stops: StopChecker,
    ) -> list[Sequence]:
        """Run one batch and give each sampled row its token; return the rows that ended."""
        stats = self.stats
        begin = perf_counter()
        logits = self._runner.run(batch, tables)
        self._runner.synchronize()  # sampling would wait all the same; here the wait is counted where it belongs
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
        ended = self._search(scheduler, blocks, stops, logits[beam_sources], beams) if beams else []
        if sources != list(range(len(batch.sample_rows))):
            logits = logits[sources]
        if sampled:
            for sequence, token in zip(sampled, self._sampler(logits, sampled), strict=True):
                if token < 0:
                    sequence.finish_reason = "error"
                    ended.append(sequence)
                    continue
                sequence.token_ids.append(token)
                stats.generated_tokens += 1
                if stops.check(sequence):
                    ended.append(sequence)
        stats.add_time("sample", perf_counter() - ran)
        return ended

    def _search(
        self, scheduler: Scheduler, blocks: BlockManager, stops: StopChecker, logits: torch.Tensor, beams: list[Sequence]
    ) -> list[Sequence]:
        """Advance the beam searches whose beams were computed; return the answers of those that ended."""
        ended: list[Sequence] = []
        for beam, values, ids in zip(beams, *self._sampler.continuations(logits, beams), strict=True):
            group = beam.beam_group
            if group.is_suspended:  # the prompt was computed again; its logits are known to lead to these beams
                group.resume(scheduler.fork(beam))
                continue
            if beam not in group.beams:
                continue  # the search ended on another beam's broken logits
            if not len(values):
                answers = [Sequence(group.request, i) for i in range(group.request.params.n)]
                for answer in answers:
                    answer.finish_reason = "error"
            elif group.offer(beam, values, ids):
                selection = group.select()
                if selection is not None:
                    if len(group.beams) == 1:
                        group.beams += scheduler.fork(beam)
                    else:
                        blocks.reorder(group.beams, selection.parents)
                    group.extend(selection)
                    continue
                answers = stops.beam_answers(group)
            else:
                continue
            for answer in answers:
                answer.beam_group = group
                answer.num_cached_tokens = beam.num_cached_tokens
                self.stats.generated_tokens += answer.num_generated_tokens
            for member in group.beams:
                scheduler.finish(member)
            group.beams = []
            ended += answers
        return ended


def _count(stats: RunStats, scheduler: Scheduler, blocks: BlockManager) -> None:
    """Add up what scheduler and block manager counted."""
    stats.preemptions += scheduler.num_preemptions
    stats.recomputed_tokens += scheduler.num_recomputed_tokens
    stats.kept_tokens += scheduler.reuse.kept_tokens
    if stats.prefix.enabled:
        stats.prefix.hit_rows += scheduler.reuse.hit_rows
        stats.prefix.hit_blocks += scheduler.reuse.hit_blocks
        stats.prefix.saved_tokens += scheduler.reuse.saved_tokens
    stats.prefix.evictions += blocks.pool.num_evictions
    stats.prefix.recovered_tokens += scheduler.reuse.recovered_tokens
    for (source, destination), count in blocks.pool.num_moves.items():
        name = f"{source.name.lower()} to {destination.name.lower()}"
        stats.swap.moved_blocks[name] = stats.swap.moved_blocks.get(name, 0) + count
    stats.blocks.final_used, stats.blocks.final_cached = blocks.num_used_blocks, blocks.num_cached_blocks


def _nan_logits(sequence: Sequence) -> str:
    return f"the model's output after {len(sequence.token_ids)} tokens is not a number (NaN or infinite logits)"


def _most_tokens(request: Request) -> int:
    """Return the most tokens a request and the turns after it may get."""
    return request.max_tokens + request.later_tokens


def _too_large(request: Request, needed: int, blocks: BlockManager) -> RowError:
    beams = f" in {request.params.beam_width} beams" if request.params.beam_width > 1 else ""
    later = f", up to {request.later_tokens} in later turns" if request.later_tokens else ""
    return RowError(
        "kv_pool_too_small",
        f"the row needs {needed} blocks of {blocks.block_size} tokens ({request.num_prompt_tokens} prompt tokens, up to "
        f"{request.max_tokens} generated{beams}{later}), the pool has {blocks.num_blocks}",
    )


@contextmanager
def _out_of_memory_is_told(what: str) -> Iterator[None]:
    """Turn a device's out-of-memory error into one a user can act on."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryPlanError(
            f"the device has no room for {what}: {str(error).splitlines()[0]} Use fewer --max-num-batched-tokens or "
            "--max-num-seqs, a smaller --gpu-memory-utilization or --swap-space, or a device with more memory"
        ) from error


def _own_bytes(device: str) -> int:
    """Return the memory this process holds on a device now."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_reserved()
    return memory.resident_bytes()


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return memory.peak_resident_bytes()
