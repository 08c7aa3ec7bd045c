"""Which block belongs to whom: reference counts, each sequence's block table, and what is kept for later. No torch, no tensors.

A block is `block_size` slots of K/V for all layers. A device block is in exactly one state:

    free     on the free list
    used     in at least one block table; its reference count = number of table entries that name it
    cached   in no table, but somebody will look for its content (see `prefix_cache.py`)

    free + used + cached == num_blocks, after every call

Blocks are given on demand and returned at once. A preempted row's blocks are cached like any others: it finds again what nobody
else needed, on the device or wherever that has moved (see `block_pool.py`).

A fork shares every block of its parent, the partly filled last one too. Who first writes into a shared block gets a copy
(copy-on-write). With blocks of 4, a prompt of 6 tokens and one fork:

    parent [7, 2], fork [7, 2]    counts: 7 → 2, 2 → 2
    the parent writes token 6     2 is shared: parent [7, 5], copy 2 → 5; counts: 2 → 1, 5 → 1
    the fork writes its token 6   2 is its own now: no copy
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ..request import Request, Sequence
from .block_pool import BlockPool
from .prefix_cache import CachedBlock, PrefixCache, blake2b_128
from .tiers import Address, MoveBatch, Tier


class BlockManager:
    """Hand out the blocks of one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        record_history: bool = False,
        hash_block: Callable[[bytes], bytes] = blake2b_128,
    ):
        """Without prefix caching and other tiers nothing is kept that no table names.

        `record_history`: keep each block's last events, to tell when an audit fails.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(block_size, share_rows=prefix_caching, hash_block=hash_block)
        sizes = {Tier.DEVICE: num_blocks, Tier.HOST: host_blocks, Tier.DISK: disk_blocks}
        self.pool = BlockPool(sizes, self.cache, record_history=record_history)
        self._keeps = prefix_caching or host_blocks > 0 or disk_blocks > 0
        self._ref_counts = [0] * num_blocks
        self._now = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self.pool.free[Tier.DEVICE])

    @property
    def num_cached_blocks(self) -> int:
        return self.cache.num_idle[Tier.DEVICE]

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that would make room."""
        return self.num_free_blocks + self.num_cached_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_available_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, request: Request) -> int:
        """Return the blocks a row needs to run with nobody else.

        Samples need not run together, beams do: they share the prompt's full blocks and nothing else for certain.
        """
        one = self.blocks_for(request.max_kv_tokens)
        shared = request.num_prompt_tokens // self.block_size
        beams = request.params.beam_width
        return shared + beams * (one - shared) if beams > 1 else one

    # Growing, forking, returning

    def copies_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Return 1 when growing to `num_tokens` tokens would write into a block that isn't the sequence's alone, else 0."""
        start = sequence.num_computed_tokens
        index = start // self.block_size
        if num_tokens <= start or index >= len(sequence.block_table):
            return 0
        block_id = sequence.block_table[index]
        return int(self._ref_counts[block_id] > 1 or self.pool.indexed[block_id] is not None)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make a sequence's table hold `num_tokens` tokens in blocks it may write; all of it or, with too few left, nothing."""
        table = sequence.block_table
        missing = max(0, -(-num_tokens // self.block_size) - len(table))
        copies = self.copies_needed(sequence, num_tokens)
        if not missing and not copies:
            return True
        if copies and self._forget_to_write(table[sequence.num_computed_tokens // self.block_size], missing):
            copies = 0
        if missing + copies > self.num_available_blocks:
            return False
        fresh = self._take(missing + copies)
        if copies:
            index = sequence.num_computed_tokens // self.block_size
            shared, own = table[index], fresh.pop()
            table[index] = own
            _note_rewrite(sequence, index)
            self.pool.move(Address(Tier.DEVICE, shared), Address(Tier.DEVICE, own))
            self._drop_reference(shared)
        table.extend(fresh)
        return True

    def _forget_to_write(self, block_id: int, missing: int) -> bool:
        """Take a block out of the index, to be written in place, if only that keeps a sequence from it and a copy is no use:
        nobody will look for it, or there is no room for a copy. Return True when it was done.
        """
        block = self.pool.indexed[block_id]
        if block is None or self._ref_counts[block_id] > 1:
            return False
        if self.cache.users(block.digest) and missing + 1 <= self.num_available_blocks:
            return False
        self.pool.give_up(block)
        return True

    def _take(self, count: int) -> list[int]:
        """Return blocks with one reference each; the caller has checked that there are as many."""
        taken: list[int] = []
        try:
            while len(taken) < count:
                block_id = self.pool.take()
                assert self._ref_counts[block_id] == 0, self.pool.breach(block_id, "is on the free list and in use")
                self._ref_counts[block_id] = 1
                if self.pool.records_history:
                    self.pool.event(Address(Tier.DEVICE, block_id), "taken")
                taken.append(block_id)
        except BaseException:
            for block_id in reversed(taken):
                self._drop_reference(block_id)
            raise
        return taken

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child without blocks share all of its parent's. Either may end first: blocks go back by count alone."""
        assert not child.block_table
        child.block_table = list(parent.block_table)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_seen_tokens = parent.num_seen_tokens
        for block_id in child.block_table:
            self._add_reference(block_id)

    def reorder(self, sequences: list[Sequence], parents: list[int]) -> None:
        """Give each sequence the blocks of `sequences[parents[i]]`: a beam goes on from another one's tokens."""
        tables = [sequences[p].block_table for p in parents]
        for table in tables:
            for block_id in table:
                self._add_reference(block_id)
        for sequence, table in zip(sequences, [list(t) for t in tables], strict=True):
            old, sequence.block_table = sequence.block_table, table
            for index, (before, after) in enumerate(zip(old, table, strict=True)):
                if before != after:
                    _note_rewrite(sequence, index)
                    break
            for block_id in reversed(old):
                self._drop_reference(block_id)

    def hand_over(self, sequence: Sequence, successor: Sequence, num_tokens: int) -> None:
        """Give a sequence's blocks to the one that goes on from its first `num_tokens` computed tokens."""
        assert not successor.block_table and num_tokens <= sequence.num_computed_tokens
        successor.block_table, sequence.block_table = sequence.block_table, []
        successor.num_computed_tokens = num_tokens
        self.trim(successor, num_tokens)

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks past a sequence's first `num_tokens` tokens."""
        while len(sequence.block_table) > self.blocks_for(num_tokens):
            self._drop_reference(sequence.block_table.pop())

    def release(self, sequence: Sequence) -> None:
        """Give back every block of a sequence, the last one first, so that its head is the first to be used again."""
        self._now += 1
        self.trim(sequence, 0)

    def _add_reference(self, block_id: int) -> None:
        self._ref_counts[block_id] += 1
        if self.pool.records_history:
            self.pool.event(Address(Tier.DEVICE, block_id), "shared")

    def _drop_reference(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        assert self._ref_counts[block_id] >= 0, self.pool.breach(block_id, "was released twice")
        if self._ref_counts[block_id]:
            if self.pool.records_history:
                self.pool.event(Address(Tier.DEVICE, block_id), "one reference less")
            return
        self.pool.give_back(block_id, self._now)

    # What is kept for later

    def expect(self, sequence: Sequence) -> int:
        """Count a row that is to be admitted as a user of its full blocks, but for one that ends with its last token.

        Return how many of these are there already, or others wait for.
        """
        if not self._keeps:
            return 0
        return self.cache.expect(sequence, (len(sequence.token_ids) - 1) // self.block_size)

    def forget(self, sequence: Sequence) -> None:
        """Stop counting a row that was admitted, or never will be."""
        for block in self.cache.claim(sequence):
            if not block.removed:
                self.pool.give_up(block)

    def match(self, sequence: Sequence) -> list[CachedBlock]:
        """Return the blocks, in any tier, that hold the beginning of a sequence; never its last token."""
        return self.cache.match(sequence) if self._keeps else []

    def num_idle(self, hits: list[CachedBlock]) -> int:
        """Return how many of these are in no block table: they count as available until they are taken."""
        return sum(1 for block in hits if block.key is not None)

    def admit(self, sequence: Sequence, hits: list[CachedBlock], num_tokens: int) -> bool:
        """Give a row without blocks the ones found for it, and room for `num_tokens` in all; all of it or nothing.

        Hits are held before anything else is taken, so that making room can't take them away.
        """
        assert not sequence.block_table
        num_blocks = max(self.blocks_for(num_tokens), len(hits))
        if num_blocks - len(hits) + self.num_idle(hits) > self.num_available_blocks:
            return False
        held = [block for block in hits if self.cache.hold(block)]
        away = [block for block in hits if block.address.tier != Tier.DEVICE]
        try:
            fresh = self._take(num_blocks - len(hits) + len(away))
        except BaseException:
            for block in held:
                self.cache.set_idle(block, block.last_used)
            raise
        for block in hits:
            if block.address.tier == Tier.DEVICE:
                self._add_reference(block.address.block_id)
            else:
                self.pool.bring(block, Address(Tier.DEVICE, fresh.pop()))
        sequence.block_table = [block.address.block_id for block in hits] + fresh
        sequence.num_computed_tokens = len(hits) * self.block_size
        self.forget(sequence)
        return True

    def index(self, sequence: Sequence) -> None:
        """Make a sequence's full computed blocks findable."""
        if not self._keeps:
            return
        num_blocks = sequence.num_computed_tokens // self.block_size

        def address_of(index: int) -> Address | None:
            block_id = sequence.block_table[index]
            return Address(Tier.DEVICE, block_id) if self.pool.indexed[block_id] is None else None

        for block in self.cache.insert(sequence, num_blocks, address_of):
            self.pool.indexed[block.address.block_id] = block
            self.pool.event(block.address, "indexed")

    def preempt(self, sequence: Sequence) -> None:
        """Take a row's blocks; what it computed stays findable as long as nobody else needs the room."""
        if self._keeps:
            self.expect(sequence)
            self.index(sequence)
        self.release(sequence)

    def lose(self, addresses: Iterable[Address], sequences: Iterable[Sequence]) -> list[Sequence]:
        """Forget content that could not be moved to `addresses`; return the sequences whose tables name it."""
        lost = set(addresses)
        for block in self.cache.blocks():
            if block.address in lost and not block.removed:
                self.pool.give_up(block)
        block_ids = {block_id for tier, block_id in lost if tier == Tier.DEVICE}
        return [s for s in sequences if block_ids.intersection(s.block_table)]

    def filled_slots(self, running: Iterable[Sequence]) -> int:
        """Return the slots of used blocks that hold a token, those of shared blocks once."""
        size = self.block_size
        partial: dict[int, int] = {}  # only blocks at a table's end are not full
        for sequence in running:
            table, first = sequence.block_table, sequence.num_computed_tokens // size
            for index in range(first, len(table)):
                filled = max(0, sequence.num_computed_tokens - index * size)
                partial[table[index]] = max(filled, partial.get(table[index], 0))
        return self.num_used_blocks * size - sum(size - filled for filled in partial.values())

    def take_moves(self) -> list[MoveBatch]:
        """See `BlockPool.take_moves`."""
        return self.pool.take_moves()

    def audit(self, sequences: Iterable[Sequence]) -> None:
        """Recount everything from the tables and compare.

        Raises:
            AssertionError: a leak, a double use or a wrong count; the message names the block and its last events.
        """
        named: Counter[int] = Counter()
        for sequence in sequences:
            named.update(sequence.block_table)
            held = len(sequence.block_table) * self.block_size
            assert held >= sequence.num_computed_tokens, (
                f"row {sequence.request.row_index}: {sequence.num_computed_tokens} computed tokens in {held} slots"
            )
        for block_id, count in enumerate(self._ref_counts):
            entries = named[block_id]
            assert count == entries, self.pool.breach(block_id, f"has count {count}, {entries} table entries name it")
        self.pool.audit(named)


def _note_rewrite(sequence: Sequence, index: int) -> None:
    """Remember that the persistent copy of a block table is out of date from an entry on."""
    sequence.rewritten_from = index if sequence.rewritten_from is None else min(index, sequence.rewritten_from)
