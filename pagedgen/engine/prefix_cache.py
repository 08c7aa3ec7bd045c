"""Full blocks found by their content, in whatever tier they lie; who will still use them; which to give up first. No torch.

A block's content is its own tokens after all tokens before it, in one namespace. Its digest is 128 bits of BLAKE2b over its
parent's digest and its tokens, and a hit compares the tokens, the parent and the namespace as well: not even equal digests can
pass one block off as another. The index is a tree: a block is in it only while its parent is, so a hit is a whole prefix.

All prompts are known before the first step, so each digest has a count of *remaining users*: rows that are still to be
admitted and will look for it. A block nobody will look for is not kept. Of the others the one with the fewest remaining users
goes first, then the least recently used, then the one furthest from its prompt's start.

    held   in some block table (or being read back): never given up
    idle   in no block table: can be given up; its place in that order is `key`
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..request import Request, Sequence
from .tiers import Address, Tier

Key = tuple[int, int, int, int]  # remaining users, when last used, minus its depth, a number that makes keys unique


def blake2b_128(data: bytes) -> bytes:
    """Return 128 bits of BLAKE2b (RFC 7693)."""
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block in the index."""

    digest: bytes
    namespace: bytes
    parent: CachedBlock | None
    tokens: list[int]
    depth: int  # blocks before it
    address: Address
    children: dict[bytes, CachedBlock] = field(default_factory=dict)
    last_used: int = 0
    key: Key | None = None  # None while held
    removed: bool = False


class PrefixCache:
    """The index. Knows addresses, not who owns them: the block manager moves, frees and counts."""

    def __init__(self, block_size: int, *, share_rows: bool = True, hash_block: Callable[[bytes], bytes] = blake2b_128):
        """Without `share_rows` every row has a namespace of its own: only its own samples and its own past are found."""
        self._block_size = block_size
        self._share_rows = share_rows
        self._hash = hash_block
        self._blocks: dict[bytes, CachedBlock] = {}
        self._users: Counter[bytes] = Counter()
        self._heaps: dict[Tier, list[tuple[Key, CachedBlock]]] = {tier: [] for tier in Tier}
        self._numbers = itertools.count()
        self.num_idle = dict.fromkeys(Tier, 0)

    def __len__(self) -> int:
        return len(self._blocks)

    def blocks(self) -> list[CachedBlock]:
        """Return every indexed block."""
        return list(self._blocks.values())

    # Names and users

    def _namespace(self, request: Request) -> bytes:
        # JSON of named parts: a salt can't be mistaken for a row, nor two parts for one.
        parts = {"salt": request.cache_salt} if self._share_rows else {"row": request.row_index}
        return json.dumps(parts).encode()

    def digests(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the digests of a sequence's first full blocks; it keeps them."""
        known = sequence.digests
        if len(known) < num_blocks:
            size = self._block_size
            parent = known[-1] if known else self._hash(self._namespace(sequence.request))
            start = len(known) * size
            data = np.asarray(sequence.token_ids[start : num_blocks * size], dtype="<i8").tobytes()
            for at in range(0, len(data), 8 * size):
                parent = self._hash(parent + data[at : at + 8 * size])
                known.append(parent)
        return known[:num_blocks]

    def users(self, digest: bytes) -> int:
        """Return how many rows still to be admitted will look for a digest."""
        return self._users.get(digest, 0)

    def expect(self, sequence: Sequence, num_blocks: int) -> int:
        """Count a row that is to be admitted as a user of its first full blocks; return how many of them are there already, or
        others wait for."""
        assert sequence.num_expected_blocks == 0
        sequence.num_expected_blocks = num_blocks
        num_known = 0
        for digest in self.digests(sequence, num_blocks):
            block = self._blocks.get(digest)
            num_known += block is not None or digest in self._users
            self._users[digest] += 1
            if block is not None and block.key is not None:
                self._queue(block)
        return num_known

    def claim(self, sequence: Sequence) -> list[CachedBlock]:
        """Stop counting a row, which is now admitted or gone; return idle blocks that nobody will look for any more."""
        useless = []
        for digest in sequence.digests[: sequence.num_expected_blocks]:
            self._users[digest] -= 1
            left = self._users[digest]
            assert left >= 0, "a row was claimed twice"
            if not left:
                del self._users[digest]
            block = self._blocks.get(digest)
            if block is not None and block.key is not None:
                if left:
                    self._queue(block)
                else:
                    useless.append(block)
        sequence.num_expected_blocks = 0
        return useless

    # The index

    def match(self, sequence: Sequence) -> list[CachedBlock]:
        """Return the longest indexed prefix of a sequence, its last token never included: that one's logits are needed."""
        hits: list[CachedBlock] = []
        size, namespace = self._block_size, self._namespace(sequence.request)
        parent = None
        for depth, digest in enumerate(self.digests(sequence, (len(sequence.token_ids) - 1) // size)):
            block = self._blocks.get(digest)
            if block is None or not self._holds(block, namespace, parent, sequence, depth):
                break
            hits.append(block)
            parent = block
        return hits

    def _holds(self, block: CachedBlock, namespace: bytes, parent: CachedBlock | None, sequence: Sequence, depth: int) -> bool:
        """Compare a block's content with a sequence's: equal digests alone prove nothing."""
        tokens = sequence.token_ids[depth * self._block_size : (depth + 1) * self._block_size]
        return block.namespace == namespace and block.parent is parent and block.tokens == tokens

    def insert(self, sequence: Sequence, num_blocks: int, address_of: Callable[[int], Address | None]) -> list[CachedBlock]:
        """Index a sequence's first full blocks that aren't yet; return the new ones, held.

        `address_of` gives the address of the sequence's i-th block, None when it is indexed as another content already. What
        stands behind a block that can't be indexed can't be found either, so it is left out.
        """
        new: list[CachedBlock] = []
        size, namespace, parent = self._block_size, self._namespace(sequence.request), None
        for depth, digest in enumerate(self.digests(sequence, num_blocks)):
            block = self._blocks.get(digest)
            if block is None:
                address = address_of(depth)
                if address is None:
                    break
                tokens = sequence.token_ids[depth * size : (depth + 1) * size]
                block = CachedBlock(digest, namespace, parent, tokens, depth, address)
                self._blocks[digest] = block
                if parent is not None:
                    parent.children[digest] = block
                new.append(block)
            elif not self._holds(block, namespace, parent, sequence, depth):
                break  # equal digests of different content
            parent = block
        return new

    def remove(self, block: CachedBlock) -> list[CachedBlock]:
        """Take a block and all that stand behind it out of the index; return them, idle and held."""
        if block.parent is not None:
            del block.parent.children[block.digest]
        gone, stack = [], [block]
        while stack:
            block = stack.pop()
            stack.extend(block.children.values())
            block.children = {}
            block.removed = True
            del self._blocks[block.digest]
            gone.append(block)
        return gone

    # The order in which idle blocks are given up

    def set_idle(self, block: CachedBlock, now: int) -> None:
        """The last table that named a block is gone: it can be given up."""
        assert block.key is None
        block.last_used = now
        self.num_idle[block.address.tier] += 1
        self._queue(block)

    def hold(self, block: CachedBlock) -> bool:
        """Keep a block from being given up; return True when it was idle."""
        if block.key is None:
            return False
        block.key = None
        self.num_idle[block.address.tier] -= 1
        return True

    def first_to_go(self, tier: Tier) -> CachedBlock | None:
        """Return the idle block of a tier to give up first."""
        heap = self._heaps[tier]
        while heap and (heap[0][1].key is not heap[0][0] or heap[0][1].address.tier != tier):
            heapq.heappop(heap)  # it was held, moved or counted anew since
        return heap[0][1] if heap else None

    def order_key(self, block: CachedBlock) -> Key:
        """Return a block's place in the order: smaller goes first."""
        return (self.users(block.digest), block.last_used, -block.depth, next(self._numbers))

    def _queue(self, block: CachedBlock) -> None:
        block.key = self.order_key(block)
        heap = self._heaps[block.address.tier]
        heapq.heappush(heap, (block.key, block))
        if len(heap) > 64 + 4 * self.num_idle[block.address.tier]:  # mostly entries that are out of date
            heap[:] = [(key, b) for key, b in heap if b.key is key and b.address.tier == block.address.tier]
            heapq.heapify(heap)
