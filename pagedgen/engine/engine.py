"""The loop: schedule → run → postprocess, until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from ..errors import MemoryPlanError, RowError
from ..model import loader
from ..request import Request, Sequence
from ..sampling.sampler import ROWS_AT_ONCE, Sampler
from ..sampling.stops import StopChecker
from ..sampling_params import SamplingParams
from ..stats import RunStats
from ..threads import set_threads
from . import memory
from .batch import BlockTableArray, PackedBatch, build_batch
from .block_manager import BlockManager
from .model_runner import ModelRunner
from .opened import OpenedModel
from .planner import Plan, plan_requests
from .scheduler import ScheduledStep, Scheduler


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
        on_finished: Callable[[Sequence], None],
        on_error: Callable[[Request, int, RowError], None],
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> None:
        """Answer every request; each of its samples ends in exactly one call of `on_finished` or `on_error`."""
        config, stats = self.opened.config, self.stats
        assert config.block_size
        num_blocks = plan.num_blocks
        blocks = BlockManager(num_blocks, config.block_size)
        scheduler = Scheduler(blocks, max_num_seqs=self._max_num_seqs, max_num_batched_tokens=self._max_num_batched_tokens)
        for request in self._in_order(requests):
            needed = blocks.blocks_for(request.max_kv_tokens)
            if needed > num_blocks:
                for sample in range(request.params.n):
                    on_error(request, sample, _too_large(request, needed, num_blocks, config.block_size))
            else:
                scheduler.add(Sequence(request))
        tables = BlockTableArray(self._max_num_seqs)
        stops = StopChecker(self.opened.tokenizer)
        stats.blocks.total, stats.blocks.block_size = num_blocks, config.block_size
        with _out_of_memory_is_told(f"a KV pool of {num_blocks} blocks"):
            self._runner.allocate_cache(num_blocks)
        try:
            self._loop(scheduler, blocks, tables, stops, on_finished, on_error, on_step)
        finally:
            self._runner.release_cache()  # the next call plans with this memory

    def _loop(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        tables: BlockTableArray,
        stops: StopChecker,
        on_finished: Callable[[Sequence], None],
        on_error: Callable[[Request, int, RowError], None],
        on_step: Callable[[StepReport], None],
    ) -> None:
        """Step until every row has ended."""
        config, stats = self.opened.config, self.stats
        finished = 0
        tokens_left = sum(s.request.max_tokens * s.request.params.n for s in scheduler.waiting)
        start = perf_counter()
        stats.startup_s = start - stats.started
        while scheduler.has_unfinished:
            generated_before = stats.generated_tokens
            with stats.timed("schedule"):
                step = scheduler.schedule()
                tables.update(scheduler.running)
                batch = build_batch(step, tables, blocks.block_size)
            self._runner.copy_blocks(blocks.take_copies())
            ended = self._run_step(scheduler, step, batch, tables, stops)
            num_entries = sum(len(s.block_table) for s in scheduler.running)
            stats.blocks.record(
                stats.num_steps,
                used=blocks.num_used_blocks,
                slots=_filled_slots(scheduler.running, blocks, num_entries),
                entries=num_entries,
                tables=len(scheduler.running),
                waiting=len(scheduler.waiting),
            )
            stats.num_steps += 1
            tokens_left -= stats.generated_tokens - generated_before
            for sequence in ended:
                tokens_left -= sequence.request.max_tokens - sequence.num_generated_tokens
                scheduler.finish(sequence)
                finished += 1
                if sequence.finish_reason == "error":
                    on_error(sequence.request, sequence.sample_index, RowError("nan_logits", _nan_logits(sequence)))
                else:
                    on_finished(sequence)
            if config.audit:
                blocks.audit(scheduler.running)
            on_step(StepReport(finished, stats.generated_tokens, tokens_left, blocks.num_used_blocks, blocks.num_blocks))
        assert blocks.num_used_blocks == 0, f"{blocks.num_used_blocks} blocks leaked"
        stats.generate_s += perf_counter() - start
        stats.preemptions += scheduler.num_preemptions
        stats.recomputed_tokens += scheduler.num_recomputed_tokens
        stats.peak_memory_bytes = _peak_bytes(config.device)

    def _in_order(self, requests: Iterable[Request]) -> list[Request]:
        """Longest expected rows first, so that short ones fill the tail; ties and `--sort none` keep the input order."""
        ordered = list(requests)
        if self.opened.config.sort == "length":
            ordered.sort(key=lambda r: -(r.num_prompt_tokens + r.max_tokens))
        return ordered

    def _run_step(
        self, scheduler: Scheduler, step: ScheduledStep, batch: PackedBatch, tables: BlockTableArray, stops: StopChecker
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
        for sequence, count in zip(step.sequences, step.num_scheduled_tokens, strict=True):
            sequence.num_computed_tokens += count
        stats.computed_tokens += batch.num_tokens
        sampled, sources = [], []  # every row's logits serve all samples that are forked from it now
        for place, row in enumerate(batch.sample_rows):
            sequence = step.sequences[row]
            family = [sequence, *scheduler.fork(sequence)] if sequence.num_pending_samples else [sequence]
            sampled += family
            sources += [place] * len(family)
        if len(sampled) > len(batch.sample_rows):
            logits = logits[sources]
        ended = []
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


def _filled_slots(running: list[Sequence], blocks: BlockManager, num_entries: int) -> int:
    """Return the slots that hold a token, those of shared blocks once; `num_entries`: of all block tables."""
    if num_entries == blocks.num_used_blocks:  # nothing is shared
        return sum(s.num_computed_tokens for s in running)
    filled: dict[int, int] = {}
    for sequence in running:
        for i, block_id in enumerate(sequence.block_table):
            held = min(blocks.block_size, max(0, sequence.num_computed_tokens - i * blocks.block_size))
            filled[block_id] = max(held, filled.get(block_id, 0))
    return sum(filled.values())


def _nan_logits(sequence: Sequence) -> str:
    return f"the model's output after {len(sequence.token_ids)} tokens is not a number (NaN or infinite logits)"


def _too_large(request: Request, needed: int, num_blocks: int, block_size: int) -> RowError:
    return RowError(
        "kv_pool_too_small",
        f"the row needs {needed} blocks of {block_size} tokens ({request.num_prompt_tokens} prompt tokens, up to "
        f"{request.max_tokens} generated), the pool has {num_blocks}",
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
            "--max-num-seqs, a smaller --gpu-memory-utilization, or a device with more memory"
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
