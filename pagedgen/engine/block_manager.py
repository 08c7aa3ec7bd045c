"""Which block belongs to whom: the free list, reference counts and each sequence's block table. No torch, no tensor data.

A block is `block_size` slots of K/V for all layers. It is free or used, never both:

    free   on the free list, reference count 0
    used   in at least one block table, reference count = number of table entries that name it

    free + used == num_blocks, after every call

Blocks are given on demand and returned at once; the free list is a stack, so that warm blocks are used again first.
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

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow a sequence's table until it holds `num_tokens` tokens; all of the blocks or, when too few are free, none."""
        missing = self.blocks_missing(sequence, num_tokens)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block_id = self._free.pop()
            assert self._ref_counts[block_id] == 0, f"block {block_id} is on the free list and in use"
            self._ref_counts[block_id] = 1
            sequence.block_table.append(block_id)
        return True

    def release(self, sequence: Sequence) -> None:
        """Give back every block of a sequence, the last one first, so that its head is the first to be used again."""
        while sequence.block_table:
            block_id = sequence.block_table.pop()
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} was released twice"
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

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
