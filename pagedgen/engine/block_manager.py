"""Which block belongs to whom: the free list, reference counts and each sequence's block table. No torch, no tensor data.

A block is `block_size` slots of K/V for all layers. It is free or used, never both:

    free   on the free list, reference count 0
    used   in at least one block table, reference count = number of table entries that name it

    free + used == num_blocks, after every call

Blocks are given on demand and returned at once; the free list is a stack, so that warm blocks are used again first.

A fork shares every block of its parent, the partly filled last one too. Who first writes into a shared block gets a copy
(copy-on-write). With blocks of 4, a prompt of 6 tokens and one fork:

    parent [7, 2], fork [7, 2]    counts: 7 → 2, 2 → 2
    the parent writes token 6     2 is shared: parent [7, 5], copy 2 → 5; counts: 2 → 1, 5 → 1
    the fork writes its token 6   2 is its own now: no copy
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from ..request import Sequence


class BlockManager:
    """Hand out the blocks of one pool."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many more blocks a sequence needs to hold its first `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_table))

    def copies_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Return 1 when growing to `num_tokens` tokens would write into a block that others share, else 0."""
        start = sequence.num_computed_tokens
        index = start // self.block_size
        if num_tokens <= start or index >= len(sequence.block_table):
            return 0
        return int(self._ref_counts[sequence.block_table[index]] > 1)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make a sequence's table hold `num_tokens` tokens in blocks it may write; all of it or, with too few free, nothing."""
        missing = self.blocks_missing(sequence, num_tokens)
        copies = self.copies_needed(sequence, num_tokens)
        if missing + copies > len(self._free):
            return False
        if copies:
            index = sequence.num_computed_tokens // self.block_size
            shared, own = sequence.block_table[index], self._take()
            self._ref_counts[shared] -= 1
            sequence.block_table[index] = own
            sequence.rewritten_from = index if sequence.rewritten_from is None else min(index, sequence.rewritten_from)
            self._copies.append((shared, own))
        sequence.block_table.extend(self._take() for _ in range(missing))
        return True

    def _take(self) -> int:
        block_id = self._free.pop()
        assert self._ref_counts[block_id] == 0, f"block {block_id} is on the free list and in use"
        self._ref_counts[block_id] = 1
        return block_id

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child without blocks share all of its parent's. Either may end first: blocks go back by count alone."""
        assert not child.block_table
        child.block_table = list(parent.block_table)
        child.num_computed_tokens = parent.num_computed_tokens
        for block_id in child.block_table:
            self._ref_counts[block_id] += 1

    def take_copies(self) -> list[list[tuple[int, int]]]:
        """Return the (source, destination) block copies to make before the next step, as batches to make one after another.

        Within a batch no block is written twice or both read and written.
        """
        batches: list[list[tuple[int, int]]] = []
        touched: set[int] = set()
        for source, destination in self._copies:
            if not batches or destination in touched or source in {d for _, d in batches[-1]}:
                batches.append([])
                touched = set()
            batches[-1].append((source, destination))
            touched |= {source, destination}
        self._copies.clear()
        return batches

    def release(self, sequence: Sequence) -> None:
        """Give back every block of a sequence, the last one first, so that its head is the first to be used again."""
        while sequence.block_table:
            block_id = sequence.block_table.pop()
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} was released twice"
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)
                if self._copies:  # nobody will read a copy into a block that was given back
                    self._copies = [c for c in self._copies if c[1] != block_id]

    def audit(self, sequences: Iterable[Sequence]) -> None:
        """Recount everything from the tables and compare.

        Raises:
            AssertionError: a leak, a double use or a wrong count; the message names the block.
        """
        named: Counter[int] = Counter()
        for sequence in sequences:
            named.update(sequence.block_table)
            held = len(sequence.block_table) * self.block_size
            assert held >= sequence.num_computed_tokens, (
                f"row {sequence.request.row_index}: {sequence.num_computed_tokens} computed tokens in {held} slots"
            )
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block_id in range(self.num_blocks):
            count = int(self._ref_counts[block_id])
            assert count == named[block_id], f"block {block_id}: count {count}, named by {named[block_id]} table entries"
            assert (count == 0) == (block_id in free), f"block {block_id}: count {count}, on free list {block_id in free}"
