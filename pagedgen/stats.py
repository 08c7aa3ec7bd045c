"""Counters of a run and what is made of them: `<output>.stats.json` and the closing table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

SERIES_EVERY = 100  # steps between two samples of the series


@dataclass
class BlockCounters:
    """Use of the pool, added up over steps."""

    total: int = 0
    block_size: int = 0
    peak: int = 0
    final_used: int = 0
    final_cached: int = 0
    sum_used: int = 0
    sum_slots: int = 0  # slots that hold a token
    sum_tables: int = 0  # block tables in use
    sum_entries: int = 0  # entries of those tables
    num_steps: int = 0
    series: list[dict[str, Any]] = field(default_factory=list)

    def record(self, step: int, *, used: int, cached: int, slots: int, entries: int, tables: int, waiting: int) -> None:
        """Count one step's end: `used` blocks hold `slots` tokens; `tables` block tables name them in `entries` entries, shared
        blocks more than once; `cached` blocks are kept for rows to come; `waiting` rows are not admitted.
        """
        self.num_steps += 1
        self.peak = max(self.peak, used)
        self.sum_used += used
        self.sum_slots += slots
        self.sum_tables += tables
        self.sum_entries += entries
        if step % SERIES_EVERY == 0:
            sample = {"step": step, "used_blocks": used, "used_slots": slots, "cached_blocks": cached}
            self.series.append({**sample, "running": tables, "waiting": waiting})

    def to_dict(self) -> dict[str, Any]:
        """Return the shares: of the pool in use, of the used blocks' slots that hold a token, and lost in last blocks."""
        steps = max(1, self.num_steps)
        slot_share = self.sum_slots / (self.sum_used * self.block_size) if self.sum_used else 0.0
        return {
            "total": self.total,
            "block_size": self.block_size,
            "peak": self.peak,
            "final_used": self.final_used,
            "final_cached": self.final_cached,
            "mean_utilization": self.sum_used / steps / self.total if self.total else 0.0,
            "slot_utilization": slot_share,
            "last_block_waste": 1 - slot_share if self.sum_used else 0.0,
            "mean_table_length": self.sum_entries / self.sum_tables if self.sum_tables else 0.0,
            "saved_by_sharing": 1 - self.sum_used / self.sum_entries if self.sum_entries else 0.0,
            "series": self.series,
        }


@dataclass
class PrefixCounters:
    """What rows found computed when they were first admitted. Preemption and what follows from it is counted apart."""

    enabled: bool = False
    shareable_tokens: int = 0  # prompt tokens less if every common prefix of full blocks is computed once
    hit_rows: int = 0
    hit_blocks: int = 0
    saved_tokens: int = 0
    evictions: int = 0  # blocks given up although somebody would have looked for them
    recovered_tokens: int = 0  # that preempted rows found again


@dataclass
class SwapCounters:
    """Blocks of the tiers below the device, how many moved from where to where, and what a block's moves take there."""

    blocks: dict[str, int] = field(default_factory=dict)
    round_trip_s_per_block: dict[str, float] = field(default_factory=dict)
    recompute_s_per_block: float = 0.0
    moved_blocks: dict[str, int] = field(default_factory=dict)
    failed_moves: int = 0


@dataclass
class RunStats:
    """Everything counted in one run."""

    started: float = field(default_factory=perf_counter)
    rows: Counter[str] = field(default_factory=Counter)
    row_errors: Counter[str] = field(default_factory=Counter)
    rows_reused: int = 0  # results that an earlier, stopped run left
    stopped_by: str | None = None  # why the run ended before its rows did
    input_waits: int = 0  # times the engine, once running, had nothing to do but wait for rows to be read
    prompt_tokens: int = 0
    output_tokens: int = 0  # generated for the whole output, by earlier runs too
    generated_tokens: int = 0
    num_steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    kept_tokens: int = 0  # of conversations, from one turn to the next
    prefix: PrefixCounters = field(default_factory=PrefixCounters)
    swap: SwapCounters = field(default_factory=SwapCounters)
    packed_tokens: int = 0  # of all answers, prompts included
    padded_tokens: int = 0  # that padded batches of them would hold
    computed_tokens: int = 0
    spared_block_reads: int = 0  # of a layer: blocks that several rows' attention read together
    peak_memory_bytes: int = 0
    startup_s: float = 0.0
    generate_s: float = 0.0
    time_split_s: dict[str, float] = field(default_factory=dict)
    blocks: BlockCounters = field(default_factory=BlockCounters)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add_time(phase, perf_counter() - start)

    def add_time(self, phase: str, seconds: float) -> None:
        self.time_split_s[phase] = self.time_split_s.get(phase, 0.0) + seconds

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.generate_s if self.generate_s else 0.0

    def to_dict(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the document of `stats.json`. Each row's prompt counts once; recomputed tokens stand apart."""
        return {
            "rows": {"total": sum(self.rows.values()), **dict(sorted(self.rows.items()))},
            "row_errors": dict(sorted(self.row_errors.items())),
            "rows_reused": self.rows_reused,
            "partial": self.stopped_by is not None,
            "stopped_by": self.stopped_by,
            "input_waits": self.input_waits,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.prefix.saved_tokens + self.kept_tokens,
            "output_tokens": self.output_tokens,
            "generated_tokens": self.generated_tokens,
            "wall_s": perf_counter() - self.started,
            "startup_s": self.startup_s,
            "generate_s": self.generate_s,
            "tokens_per_s": self.tokens_per_s,
            "time_split_s": self.time_split_s,
            "num_steps": self.num_steps,
            "blocks": self.blocks.to_dict(),
            "padding_saved": 1 - self.packed_tokens / self.padded_tokens if self.padded_tokens else 0.0,
            "packed_tokens": self.packed_tokens,
            "padded_tokens": self.padded_tokens,
            "computed_tokens": self.computed_tokens,
            "spared_block_reads": self.spared_block_reads,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "kept_tokens": self.kept_tokens,
            "prefix_cache": asdict(self.prefix),
            "swap": asdict(self.swap),
            "peak_memory_bytes": self.peak_memory_bytes,
            "config": config,
        }
