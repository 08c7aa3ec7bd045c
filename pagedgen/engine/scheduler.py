"""Which rows compute how many tokens in the next step. Plain Python: no torch, no clock, no randomness.

A row's life: waiting → running (prefill in chunks, then decode) → finished. When blocks run out the youngest running row is
preempted: it waits again, and what it had computed is found again as far as nobody else needed the room.

A row whose prompt begins with blocks that a running row (its *leader*) is just computing waits until they are there, so that no
common prefix is computed twice. The beams of a row are preempted together and start again from its prompt.

Why nothing can hang: running rows are served oldest first and may take the blocks of every younger one, no row is admitted that
the whole pool couldn't hold (`BlockManager.blocks_needed`), and a row that waits owns nothing. So the oldest row gains at least
one token in every step. Followers wait for running rows only, and are let go when their leader ends or is preempted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

from ..config import EngineConfig
from ..request import Request, Sequence
from ..stats import PrefixCounters
from .admission import Admission
from .block_manager import BlockManager
from .leaders import Leaders
from .pacing import prompt_tokens

_PEEKED_ROWS = 16  # of the queue, whose ends admission looks at


@dataclass
class ScheduledStep:
    """The rows of one step, decodes first, and how many tokens each computes."""

    sequences: list[Sequence] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_decodes: int = 0

    def without(self, sequences: Iterable[Sequence]) -> ScheduledStep:
        """Return the step less some rows."""
        gone = {id(s) for s in sequences}
        kept = [i for i, s in enumerate(self.sequences) if id(s) not in gone]
        return ScheduledStep(
            [self.sequences[i] for i in kept],
            [self.num_scheduled_tokens[i] for i in kept],
            sum(i < self.num_decodes for i in kept),
        )


class Scheduler:
    """Pick each step's rows under a token budget and the pool's free blocks.

    As a context manager it owns its rows' blocks: on the way out, also by an exception, all of them are returned. Not after
    Ctrl-C, which may have come in the middle of the bookkeeping: what it left is thrown away with the block manager.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float = 0.01,
        keeps_prefixes: bool = False,
        knee_tokens: int = 0,
        admission: Admission | None = None,
    ):
        """`watermark`: share of the pool kept free at admission, so that running rows can grow before any is preempted.
        `keeps_prefixes`: no row is admitted in the place of blocks that others will look for. For rows that come group by
        group: in any other order there may be too many such blocks. `knee_tokens`: a step of fewer takes as long as one of so
        many, a larger one longer by the token, so prompts are spread over steps; 0 where that isn't known. `admission`: another
        rule than the forecast; it keeps a reserve of its own.
        """
        assert max_num_batched_tokens >= max_num_seqs
        self._blocks = block_manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._admission = admission or Admission(block_manager, reserve_blocks=int(watermark * block_manager.num_blocks))
        self._keeps_prefixes = keeps_prefixes
        self._knee_tokens = knee_tokens
        self._waiting: list[tuple[bool, tuple[int, int], int, Sequence]] = []  # a heap, see `_queue`
        self._num_added = 0
        self.num_waiting_tokens = 0  # of prompts that were not admitted yet
        self.admitting = True  # False: running rows go on, no other begins
        self._leaders = Leaders()
        self.running: list[Sequence] = []  # oldest admission first
        self.prefix = PrefixCounters()
        self.num_kept_tokens = 0  # of conversations, from one turn to the next
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return
        for sequence in list(self.running):
            self.finish(sequence)
        for sequence in self.waiting:
            self._blocks.forget(sequence)
        self._waiting.clear()
        self._leaders = Leaders()

    def add(self, sequence: Sequence, priority: int = 0) -> None:
        """Queue a sequence: those of a smaller `priority` come first, equal ones in the order they were added."""
        assert self._blocks.blocks_needed(sequence.request) <= self._blocks.num_blocks
        sequence.order = (priority, self._num_added)
        self._num_added += 1
        self.num_waiting_tokens += sequence.num_prompt_tokens
        known = self._blocks.expect(sequence)
        if self.prefix.enabled:
            self.prefix.shareable_tokens += known * self._blocks.block_size
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        """Let a row wait; those that ran before come first: what they had computed may still be there."""
        heapq.heappush(self._waiting, (not sequence.num_preemptions, sequence.order, sequence.sample_index, sequence))

    @property
    def waiting(self) -> list[Sequence]:
        """Return the rows that are not running."""
        return [entry[-1] for entry in self._waiting] + self._leaders.followers()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._leaders.num_followers

    @property
    def has_unfinished(self) -> bool:
        return bool(self.num_waiting or self.running)

    def schedule(self) -> ScheduledStep:
        """Choose the next step's rows and reserve the slots they write."""
        decodes: list[Sequence] = []
        prefills: list[tuple[Sequence, int]] = []
        num_decoding = sum(len(s.token_ids) - s.num_computed_tokens == 1 for s in self.running)
        prefill_budget = self._prefill_budget(num_decoding)
        preemptions_before = self.num_preemptions

        index = 0
        while index < len(self.running):  # preemption shortens the list from its end while we walk it
            sequence = self.running[index]
            index += 1
            uncomputed = len(sequence.token_ids) - sequence.num_computed_tokens
            if not uncomputed:
                continue  # a beam that waits for the others of its row
            want = 1 if uncomputed == 1 else min(uncomputed, prefill_budget)
            granted = self._reserve_from_younger(sequence, want)
            if granted == 0:
                continue  # the youngest row waits for a block, keeping what it has
            if uncomputed == 1:
                decodes.append(sequence)
            else:
                prefills.append((sequence, granted))
                prefill_budget -= granted

        if self.admitting and self.num_preemptions == preemptions_before:
            self._admit(prefills, prefill_budget, is_busy=bool(decodes or prefills))
        step = ScheduledStep(
            sequences=decodes + [s for s, _ in prefills],
            num_scheduled_tokens=[1] * len(decodes) + [n for _, n in prefills],
            num_decodes=len(decodes),
        )
        assert step.sequences or not self.has_unfinished, "no row can progress"
        return step

    def _prefill_budget(self, num_decoding: int) -> int:
        """Return how many tokens of prompts a step takes; see `pacing.py`."""
        budget, blocks = self._max_num_batched_tokens - num_decoding, self._blocks
        if not self._knee_tokens:
            return budget
        free = blocks.num_available_blocks - (blocks.num_cached_blocks if self._keeps_prefixes else 0)
        paced = prompt_tokens(
            self._knee_tokens, num_decoding, free_blocks=free, num_blocks=blocks.num_blocks, block_size=blocks.block_size
        )
        return min(budget, paced)

    def advance(self, step: ScheduledStep) -> None:
        """Take note that a step was computed; blocks that others wait for can be found from now on."""
        for sequence, count in zip(step.sequences, step.num_scheduled_tokens, strict=True):
            start = sequence.num_computed_tokens
            end = sequence.num_computed_tokens = start + count
            if sequence.num_seen_tokens > start:
                self.num_recomputed_tokens += min(end, sequence.num_seen_tokens) - start
            sequence.num_seen_tokens = max(end, sequence.num_seen_tokens)
            if sequence.leading:
                self._blocks.index(sequence)
                self._let_go(self._leaders.settle(sequence, sequence.digests[: end // self._blocks.block_size]))

    def finish(self, sequence: Sequence) -> None:
        """Take a finished sequence out and return its blocks at once."""
        if sequence.finish_reason in ("stop", "length"):
            self._admission.lengths.observe(sequence)
        self._let_go(self._leaders.settle(sequence, sequence.digests))
        self._blocks.release(sequence)
        self.running.remove(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, finished or not; it is not answered."""
        if sequence in self.running:
            self.finish(sequence)
            return
        self._blocks.forget(sequence)
        if not sequence.num_preemptions:
            self.num_waiting_tokens -= sequence.num_prompt_tokens
        self._waiting = [entry for entry in self._waiting if entry[-1] is not sequence]
        heapq.heapify(self._waiting)
        self._leaders.forget(sequence)

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Start the other samples or beams of a row whose prompt was just computed, with its blocks and behind it."""
        beams = parent.beam_group is not None
        indices = range(1, parent.num_pending_samples + 1) if beams else parent.request.samples[1:]
        children = [Sequence(parent.request, i) for i in indices]
        parent.num_pending_samples = 0
        parent.num_shared_blocks = max(parent.num_shared_blocks, parent.num_prompt_tokens // self._blocks.block_size)
        for child in children:
            self._blocks.fork(parent, child)
            child.order = parent.order
            child.num_shared_blocks = parent.num_shared_blocks
            child.num_cached_tokens = parent.num_cached_tokens
            child.beam_group = parent.beam_group
        place = self.running.index(parent) + 1
        self.running[place:place] = children
        return children

    def next_turn(self, sequence: Sequence, request: Request) -> Sequence:
        """Go on with a conversation: the next turn takes a finished one's place and the blocks of their common beginning."""
        successor = Sequence(request, sequence.sample_index)
        successor.order = sequence.order
        kept = min(_common_prefix(sequence, successor), successor.num_prompt_tokens - 1)
        self._let_go(self._leaders.settle(sequence, sequence.digests))
        self._blocks.hand_over(sequence, successor, kept)
        successor.num_cached_tokens = successor.num_seen_tokens = kept
        successor.num_shared_blocks = min(sequence.num_shared_blocks, kept // self._blocks.block_size)
        self.num_kept_tokens += kept
        self.running[self.running.index(sequence)] = successor
        return successor

    def recompute(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Send rows whose K/V was lost back to the queue; return all that left, their fellow beams included."""
        gone: list[Sequence] = []
        for sequence in sequences:
            if sequence in self.running:
                sequence.num_computed_tokens = 0  # nothing of it is to be found again
                gone += self._preempt(sequence)
        return gone

    def _reserve_from_younger(self, sequence: Sequence, want: int) -> int:
        """Reserve slots for up to `want` more tokens, preempting younger rows if need be; return how many fit."""
        if want == 0:
            return 0
        start = sequence.num_computed_tokens
        while not self._blocks.reserve(sequence, start + want):
            youngest = self.running[-1]
            if youngest is not sequence and not (sequence.beam_group and youngest.beam_group is sequence.beam_group):
                self._preempt(youngest)
                continue
            left = self._blocks.num_available_blocks - self._blocks.copies_needed(sequence, start + want)
            room = (len(sequence.block_table) + left) * self._blocks.block_size - start
            if left < 0 or room <= 0:
                return 0
            want = min(want, room)
        return want

    def _preempt(self, sequence: Sequence) -> list[Sequence]:
        """Take a running row's blocks and queue it again; return the sequences that left: it, or all beams of its row."""
        left = [sequence]
        if sequence.beam_group is not None:
            left = list(sequence.beam_group.beams)
            sequence = sequence.beam_group.suspend()
            self._blocks.trim(sequence, sequence.num_computed_tokens)
            for beam in left:
                if beam is not sequence:
                    self._blocks.release(beam)
                    self.running.remove(beam)
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._blocks.preempt(sequence)
        sequence.num_computed_tokens = 0
        self._let_go(self._leaders.settle(sequence, sequence.digests))
        self.running.remove(sequence)
        self._queue(sequence)
        return left

    def _admit(self, prefills: list[tuple[Sequence, int]], prefill_budget: int, *, is_busy: bool) -> None:
        """Start waiting rows in order while they and the running rows are expected to fit together (see `admission.py`).

        Admitting by the tokens a row has now fills the pool with rows that must evict each other as they grow; admitting by
        the most it may get leaves the pool half empty. Rows that wait for a leader let others pass. In a step that is not
        busy, in which no running row computes anything, the first row that the pool can take starts whatever is forecast.
        """
        admission, blocks = self._admission, self._blocks
        num_seqs = sum(1 + s.num_pending_samples for s in self.running)
        if not self._waiting or num_seqs >= self._max_num_seqs or (is_busy and admission.is_futile()):
            return
        begun = False
        while self._waiting and prefill_budget > 0:
            sequence = self._waiting[0][-1]
            if num_seqs + 1 + sequence.num_pending_samples > self._max_num_seqs:
                return
            hits = blocks.match(sequence)
            if self._leaders.follow(sequence, self._shared_digests(sequence, len(hits))):
                heapq.heappop(self._waiting)
                continue
            sequence.num_shared_blocks = shared = self._num_shared_blocks(sequence, len(hits))
            idle_hits = blocks.num_idle(hits)
            if not begun:
                admission.begin(self.running, [entry[-1] for entry in self._waiting[:_PEEKED_ROWS]])
                begun = True
            kept = blocks.num_cached_blocks - idle_hits if self._keeps_prefixes else 0
            new_shared = shared - len(hits) + idle_hits
            if is_busy and not admission.fits(sequence, new_shared, kept):
                return
            known = len(hits) * blocks.block_size
            chunk = min(len(sequence.token_ids) - known, prefill_budget)
            if not blocks.admit(sequence, hits, known + chunk):
                assert self.running, "a row that fits the pool has no room in an empty one"
                return
            heapq.heappop(self._waiting)
            if not sequence.num_preemptions:
                self.num_waiting_tokens -= sequence.num_prompt_tokens
            self._count_hits(sequence, len(hits))
            self._leaders.lead(sequence, self._shared_digests(sequence, len(hits)), blocks.cache.users)
            admission.admitted(sequence, new_shared)
            num_seqs += 1 + sequence.num_pending_samples
            self.running.append(sequence)
            prefills.append((sequence, chunk))
            prefill_budget -= chunk
            is_busy = True

    def _num_shared_blocks(self, sequence: Sequence, num_hits: int) -> int:
        """Return how many of a waiting row's first blocks are not its alone: found, or looked for by others too."""
        count = num_hits
        for digest in self._shared_digests(sequence, num_hits):
            if self._blocks.cache.users(digest) < 2:  # it is one of them itself
                break
            count += 1
        return count

    def _shared_digests(self, sequence: Sequence, num_hits: int) -> list[bytes]:
        """Return the digests of the blocks behind the ones found that others can look for too."""
        return sequence.digests[num_hits : (len(sequence.token_ids) - 1) // self._blocks.block_size]

    def _let_go(self, followers: list[Sequence]) -> None:
        for follower in followers:
            self._queue(follower)

    def _count_hits(self, sequence: Sequence, num_hits: int) -> None:
        tokens = sequence.num_computed_tokens
        if sequence.num_seen_tokens:  # it ran before: what it finds is its own
            self.prefix.recovered_tokens += tokens
            return
        sequence.num_cached_tokens = sequence.num_seen_tokens = tokens
        self.prefix.hit_rows += num_hits > 0
        self.prefix.hit_blocks += num_hits
        self.prefix.saved_tokens += tokens


def make_scheduler(
    config: EngineConfig, num_blocks: int, host_blocks: int = 0, disk_blocks: int = 0, *, is_ample: bool = False
) -> tuple[BlockManager, Scheduler]:
    """Return the block manager and scheduler of a run, or of its simulation; `is_ample` as `Admission` takes it."""
    assert config.block_size and config.max_num_seqs and config.max_num_batched_tokens
    blocks = BlockManager(
        num_blocks,
        config.block_size,
        prefix_caching=config.enable_prefix_caching,
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
        record_history=config.audit,
    )
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        keeps_prefixes=config.sort == "prefix",
        knee_tokens=config.knee_tokens,
        admission=Admission(blocks, reserve_blocks=int(config.watermark * num_blocks), is_ample=is_ample),
    )
    scheduler.prefix.enabled = config.enable_prefix_caching
    return blocks, scheduler


def _common_prefix(before: Sequence, after: Sequence) -> int:
    """Return how many of a sequence's computed tokens another one begins with."""
    common = 0
    for old, new in zip(before.token_ids[: before.num_computed_tokens], after.token_ids, strict=False):
        if old != new:
            break
        common += 1
    return common
