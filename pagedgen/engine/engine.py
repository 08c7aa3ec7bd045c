"""A loaded model that answers requests: what it holds between calls, what a call needs, and the plan for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

from ..errors import MemoryPlanError, RowError
from ..kernels.compiled import Compiling
from ..machine import without_collector
from ..model import loader
from ..request import Request, Sequence
from ..sampling.sampler import ROWS_AT_ONCE, Sampler
from ..sampling.stops import StopChecker
from ..sampling_params import SamplingParams
from ..stats import RunStats
from ..threads import set_threads
from . import memory
from .batch import BlockTableArray
from .block_map import BlockMapWriter
from .feed import Control, Feed, ListFeed
from .generation import Callbacks, Generation, StepReport
from .model_runner import ModelRunner
from .opened import OpenedModel
from .order import PlannedFeed
from .planner import Plan, RequestLengths, plan_requests
from .scheduler import make_scheduler
from .tiers import Tier


class Engine:
    """A loaded model that answers requests. Knows token ids and lengths; reading, rendering and writing are others' work."""

    def __init__(self, opened: OpenedModel, stats: RunStats | None = None):
        """Load the weights and run the largest batch once, to learn what memory it takes; compile what isn't yet.

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
        precompilation = opened.precompilation
        with self.stats.timed("load"), _out_of_memory_is_told("the weights"), without_collector():
            model = loader.load_model(
                opened.files,
                opened.hf_config,
                spec,
                config.device,
                row_invariant=config.device == "cpu",
                fused=config.backend == "cpu",
            )
        self.runner = ModelRunner(
            model,
            spec,
            device=config.device,
            backend=config.backend,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        )
        self._sampler = Sampler(opened.num_token_ids)
        self._round_trip_s: dict[Tier, float] = {}  # measured when a tier is first asked for
        # Every row drawn at random with every filter: the most memory the sampler can take.
        params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01)
        probe = Sequence(Request(0, [0], params, 1, frozenset(), 0))
        compiling, waited_s = Compiling(), 0.0
        with self.stats.timed("warm_up"), _out_of_memory_is_told("the largest step"), compiling:
            if precompilation is not None:
                model.compile_products()
                start = perf_counter()
                precompilation.wait()
                waited_s = perf_counter() - start
            self._activation_peak_bytes = self.runner.warm_up(
                max_num_batched_tokens=self._max_num_batched_tokens,
                max_num_seqs=self._max_num_seqs,
                sample=lambda logits: self._sampler(logits[:ROWS_AT_ONCE], [probe] * min(len(logits), ROWS_AT_ONCE)),
            )

        self.compiling_s = compiling.seconds + waited_s  # of the start; later ones have none

    def plan(self, lengths: RequestLengths, *, covers_all_rows: bool = True, must_fit: bool = True, **not_run: int) -> Plan:
        """Plan rows of these lengths on what memory is free now; `not_run` counts rows that ended before (`planner.plan_job`).

        Raises:
            MemoryPlanError: not even one row fits.
        """
        config = self.opened.config
        return plan_requests(
            lengths,
            self.opened.spec,
            config,
            device=memory.device_memory(config.device),
            own_bytes=_own_bytes(config.device),
            pending_bytes=self._activation_peak_bytes,
            activation_peak_bytes=self._activation_peak_bytes,
            covers_all_rows=covers_all_rows,
            must_fit=must_fit,
            **not_run,
        )

    def generate(
        self,
        requests: Iterable[Request] | Feed,
        plan: Plan,
        *,
        on_finished: Callable[[Sequence], Request | None],
        on_error: Callable[[Request, int, RowError], None],
        on_step: Callable[[StepReport], None] = lambda report: None,
        on_note: Callable[[str], None] = lambda text: None,
        control: Callable[[], Control] = lambda: Control.GO_ON,
        block_map: BlockMapWriter | None = None,
    ) -> bool:
        """Answer every request; each of its samples ends in exactly one call of `on_finished` or `on_error`. The rows of a feed
        are run in the order in which it gives them, or longest first (`--sort length`); a list is put in order here.

        Unless `control`, which is asked before each step, ends the run before: then return False.

        `on_finished` may return the request of the conversation's next turn, which goes on from the finished one's blocks and
        is answered for that sample alone.
        """
        config, stats = self.opened.config, self.stats
        assert config.block_size
        host_blocks, disk_blocks = self._tiers_worth_using(plan, on_note)
        blocks, scheduler = make_scheduler(config, plan.num_blocks, host_blocks, disk_blocks, is_ample=plan.is_ample)
        stats.blocks.total, stats.blocks.block_size = blocks.num_blocks, config.block_size
        with _out_of_memory_is_told(f"a KV pool of {blocks.num_blocks} blocks"):
            self.runner.allocate_cache(
                blocks.num_blocks, host_blocks=host_blocks, disk_blocks=disk_blocks, disk_path=config.disk_swap_path
            )
        planned = None
        try:
            feed: Feed = ListFeed(requests) if isinstance(requests, Iterable) else requests
            if config.sort == "prefix" and isinstance(requests, Iterable):
                feed = planned = PlannedFeed(feed, config.block_size)
            with scheduler:
                finished = Generation(
                    feed=feed,
                    longest_first=config.sort == "length",
                    runner=self.runner,
                    sampler=self._sampler,
                    stops=StopChecker(self.opened.tokenizer),
                    scheduler=scheduler,
                    blocks=blocks,
                    tables=BlockTableArray(self._max_num_seqs),
                    stats=stats,
                    callbacks=Callbacks(on_finished, on_error, on_step, on_note, control),
                    block_map=block_map,
                    audit=config.audit,
                    cascade=config.cascade_attention,
                ).run()
            stats.peak_memory_bytes = _peak_bytes(config.device)
            if isinstance(feed, PlannedFeed) and feed.sharing is not None:
                stats.prefix.shareable_tokens = feed.sharing.attainable_tokens
            if config.audit:
                blocks.audit([])
            return finished
        finally:
            self.runner.release_cache()  # the next call plans with this memory
            if planned is not None:
                planned.close()

    def _tiers_worth_using(self, plan: Plan, on_note: Callable[[str], None]) -> tuple[int, int]:
        """Return the host and disk blocks to use: those of tiers that give a block back sooner than it is computed again."""
        config, sizes = self.opened.config, []
        assert config.block_size
        recompute_s = config.block_size * self.runner.prefill_s_per_token
        for tier, num_blocks in ((Tier.HOST, plan.host_blocks), (Tier.DISK, plan.disk_blocks)):
            if num_blocks:
                if tier not in self._round_trip_s:
                    with _out_of_memory_is_told("measuring the swap space"):
                        self._round_trip_s[tier] = self._measure_tier(tier, on_note)
                round_trip_s = self._round_trip_s[tier]
                if round_trip_s >= recompute_s:
                    num_blocks = 0
                    if round_trip_s < float("inf"):
                        on_note(
                            f"the {tier.name.lower()} swap space is not used: a block takes {round_trip_s * 1e3:.2f} ms there "
                            f"and back, computing it again {recompute_s * 1e3:.2f} ms"
                        )
            sizes.append(num_blocks)
        self.stats.swap.recompute_s_per_block = recompute_s
        self.stats.swap.blocks = {"host": sizes[0], "disk": sizes[1]}
        measured = {tier.name.lower(): s for tier, s in self._round_trip_s.items() if s < float("inf")}
        self.stats.swap.round_trip_s_per_block = measured
        return sizes[0], sizes[1]

    def _measure_tier(self, tier: Tier, on_note: Callable[[str], None]) -> float:
        """Return the seconds a block takes to a tier and back; infinity where the disk fails already."""
        try:
            return self.runner.round_trip_s(tier, self.opened.config.disk_swap_path)
        except OSError as error:
            on_note(f"the disk swap space failed while it was measured: {error}")
            return float("inf")


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
