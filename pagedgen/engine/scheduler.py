"""Which rows compute how many tokens in the next step. Plain Python: no torch, no clock, no randomness.

A row's life: waiting → running (prefill in chunks, then decode) → finished. When blocks run out the youngest running row is
preempted: its blocks go back and it waits, first in line, to be recomputed.

Why nothing can hang: running rows are served oldest first and may take the blocks of every younger one, and no row is
admitted that the whole pool couldn't hold (`max_kv_tokens`, checked by the planner). So the oldest row gains at least one
token in every step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..request import Sequence
from .block_manager import BlockManager


@dataclass
class ScheduledStep:
    """The rows of one step, decodes first, and how many tokens each computes."""

    sequences: list[Sequence] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_decodes: int = 0


class Scheduler:
    """Pick each step's rows under a token budget and the pool's free blocks."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float = 0.01,
        expected_share: float = 0.5,
    ):
        """`watermark`: share of the pool kept free at admission, so that running rows can grow before anyone is preempted.
        `expected_share`: how much of the tokens it may still get a row is expected to get, when it is admitted.
        """
        assert max_num_batched_tokens >= max_num_seqs
        self._blocks = block_manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._watermark_blocks = int(watermark * block_manager.num_blocks)
        self._expected_share = expected_share
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those already waiting."""
        assert self._blocks.blocks_for(sequence.request.max_kv_tokens) <= self._blocks.num_blocks
        self.waiting.append(sequence)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledStep:
        """Choose the next step's rows and reserve the slots they write."""
        decodes: list[Sequence] = []
        prefills: list[tuple[Sequence, int]] = []
        num_decoding = sum(1 for s in self.running if s.num_uncomputed_tokens == 1)
        prefill_budget = self._max_num_batched_tokens - num_decoding
        preemptions_before = self.num_preemptions

        index = 0
        while index < len(self.running):  # preemption shortens the list from its end while we walk it
            sequence = self.running[index]
            index += 1
            decoding = sequence.num_uncomputed_tokens == 1
            want = 1 if decoding else min(sequence.num_uncomputed_tokens, prefill_budget)
            granted = self._reserve_from_younger(sequence, want)
            if granted == 0:
                continue  # the youngest row waits for a block, keeping what it has
            if decoding:
                decodes.append(sequence)
            else:
                prefills.append((sequence, granted))
                prefill_budget -= granted

        if self.num_preemptions == preemptions_before:
            self._admit(prefills, prefill_budget)
        step = ScheduledStep(
            sequences=decodes + [s for s, _ in prefills],
            num_scheduled_tokens=[1] * len(decodes) + [n for _, n in prefills],
            num_decodes=len(decodes),
        )
        assert step.sequences or not self.has_unfinished, "no row can progress"
        return step

    def finish(self, sequence: Sequence) -> None:
        """Take a finished sequence out and return its blocks at once."""
        self._blocks.release(sequence)
        self.running.remove(sequence)

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Start the other samples of a row whose prompt was just computed; they share its blocks and stand behind it."""
        children = [Sequence(parent.request, i) for i in range(1, parent.num_pending_samples + 1)]
        parent.num_pending_samples = 0
        for child in children:
            self._blocks.fork(parent, child)
        place = self.running.index(parent) + 1
        self.running[place:place] = children
        return children

    def _reserve_from_younger(self, sequence: Sequence, want: int) -> int:
        """Reserve slots for up to `want` more tokens, preempting younger rows if need be; return how many fit."""
        if want == 0:
            return 0
        start = sequence.num_computed_tokens
        while not self._blocks.reserve(sequence, start + want):
            if self.running[-1] is not sequence:
                self._preempt(self.running[-1])
                continue
            free = self._blocks.num_free_blocks - self._blocks.copies_needed(sequence, start + want)
            room = (len(sequence.block_table) + free) * self._blocks.block_size - start
            if free < 0 or room <= 0:
                return 0
            want = min(want, room)
        return want

    def _preempt(self, sequence: Sequence) -> None:
        """Give a running row's blocks back; it waits first in line and is recomputed from its first token."""
        self.num_preemptions += 1
        self.num_recomputed_tokens += sequence.num_computed_tokens
        sequence.num_preemptions += 1
        sequence.num_computed_tokens = 0
        self._blocks.release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def _admit(self, prefills: list[tuple[Sequence, int]], prefill_budget: int) -> None:
        """Start waiting rows in order while they and the running rows are expected to fit together.

        Admitting by the tokens a row has now fills the pool with rows that must evict each other as they grow; admitting by
        the most it may get leaves the pool half empty. So a row is expected to get a share (`expected_share`) of the tokens it
        may still get; recipes/benchmarks/admission.py measures shares.
        """
        if not self.waiting:
            return
        num_seqs = sum(1 + s.num_pending_samples for s in self.running)
        growth = sum(self._expected_blocks(s) - len(s.block_table) for s in self.running)
        while self.waiting and prefill_budget > 0:
            sequence = self.waiting[0]
            if num_seqs + 1 + sequence.num_pending_samples > self._max_num_seqs:
                return
            needed = self._expected_blocks(sequence)
            if self.running and needed + growth + self._watermark_blocks > self._blocks.num_free_blocks:
                return
            self.waiting.popleft()
            chunk = min(sequence.num_uncomputed_tokens, prefill_budget)
            reserved = self._blocks.reserve(sequence, chunk)
            assert reserved
            growth += needed - len(sequence.block_table)
            num_seqs += 1 + sequence.num_pending_samples
            self.running.append(sequence)
            prefills.append((sequence, chunk))
            prefill_budget -= chunk

    def _expected_blocks(self, sequence: Sequence) -> int:
        """Return the blocks a row is expected to need in the end, those of samples not yet forked included."""
        blocks = max(self._blocks.blocks_for(self._expected_tokens(sequence)), len(sequence.block_table))
        shared = sequence.num_prompt_tokens // self._blocks.block_size
        return blocks + sequence.num_pending_samples * (blocks - shared)

    def _expected_tokens(self, sequence: Sequence) -> int:
        """Return the tokens a row is expected to hold in the end."""
        remaining = sequence.request.max_tokens - sequence.num_generated_tokens
        return len(sequence.token_ids) + int(max(0, remaining - 1) * self._expected_share)
