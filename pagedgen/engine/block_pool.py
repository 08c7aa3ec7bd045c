"""The blocks of all tiers: which are free, which are kept and for whom, and what moves where. No torch, no tensor data.

In every tier free + in use + kept == its size. When a tier is full, the kept block that is needed least makes room: it moves to
the next tier that has room or holds something needed less, else it is given up.

Copies and moves are only noted here, in order; whoever runs the step makes them first (`take_moves`). So a block's place is
free at once when its content is to be moved: the content is read before anything is written there.
"""

from __future__ import annotations

from collections import Counter, deque

from .prefix_cache import CachedBlock, PrefixCache
from .tiers import Address, MoveBatch, Tier, batch_moves

_EVENTS_KEPT = 8


class BlockPool:
    """Free lists, the blocks kept for rows to come, and the moves that are due."""

    def __init__(self, sizes: dict[Tier, int], cache: PrefixCache, *, record_history: bool = False):
        """`sizes`: blocks of each tier. `record_history`: keep each block's last events, to tell when an audit fails."""
        self.sizes = dict(sizes)
        self.free = {tier: list(range(size - 1, -1, -1)) for tier, size in sizes.items()}  # stacks: warm blocks first
        self.cache = cache
        self.indexed: list[CachedBlock | None] = [None] * sizes[Tier.DEVICE]  # the index's entry of a device block
        self.num_evictions = 0  # blocks given up for lack of room although somebody will look for them
        self.num_moves: Counter[tuple[Tier, Tier]] = Counter()
        self._moves: list[tuple[Address, Address]] = []
        self._history: dict[Address, deque[str]] | None = {} if record_history else None

    @property
    def records_history(self) -> bool:
        return self._history is not None

    def take(self) -> int:
        """Return a device block that is nobody's; the caller has checked that one is free or can make room."""
        free = self.free[Tier.DEVICE]
        if not free:
            self.make_room(Tier.DEVICE)
        return free.pop()

    def give_back(self, block_id: int, now: int) -> None:
        """Take a device block that no table names any more: it is kept if somebody will look for it, else free."""
        block = self.indexed[block_id]
        if block is None:
            self.vacate(Address(Tier.DEVICE, block_id))
            return
        self.event(block.address, "cached")
        self.cache.set_idle(block, now)
        if not self.cache.users(block.digest):
            self.give_up(block)

    def make_room(self, tier: Tier) -> None:
        """Free one block of a tier: the idle block to go first moves on or is given up."""
        block = self.cache.first_to_go(tier)
        assert block is not None, f"nothing in the {tier.name} tier can make room"
        self.cache.hold(block)
        below = self._place_below(block)
        if below is not None:
            self.bring(block, below)
            self.cache.set_idle(block, block.last_used)
            return
        if not block.removed:  # making room below may have taken it along
            self.num_evictions += self.give_up(block)
        self.vacate(block.address)

    def _place_below(self, block: CachedBlock) -> Address | None:
        """Return room for a block in a lower tier, taking it from a block that is needed less; None when there is none."""
        for tier in Tier:
            if tier <= block.address.tier or not self.sizes[tier]:
                continue
            if not self.free[tier]:
                rival = self.cache.first_to_go(tier)
                if rival is None or rival.key is None or rival.key > self.cache.order_key(block):
                    continue
                self.make_room(tier)
                if block.removed:  # it stood behind the one that was given up
                    return None
            return Address(tier, self.free[tier].pop())
        return None

    def bring(self, block: CachedBlock, destination: Address) -> None:
        """Move an indexed, held block to a place that is nobody's; its old place is free."""
        source = block.address
        self.move(source, destination)
        block.address = destination
        if source.tier == Tier.DEVICE:
            self.indexed[source.block_id] = None
        if destination.tier == Tier.DEVICE:
            self.indexed[destination.block_id] = block
        self.vacate(source)

    def give_up(self, block: CachedBlock) -> int:
        """Take a block and all behind it out of the index; idle ones are free then. Return how many somebody will look for."""
        wanted = 0
        for gone in self.cache.remove(block):
            wanted += self.cache.users(gone.digest) > 0
            idle = self.cache.hold(gone)
            if gone.address.tier == Tier.DEVICE:
                self.indexed[gone.address.block_id] = None
            if idle:
                self.vacate(gone.address)
        return wanted

    def close_tier(self, tier: Tier) -> None:
        """Take a tier out of use: what it holds can't be read any more."""
        for block in self.cache.blocks():
            if block.address.tier == tier and not block.removed:
                self.give_up(block)
        self.sizes[tier] = 0
        self.free[tier] = []

    def vacate(self, address: Address) -> None:
        """Put a place on its free list."""
        self.event(address, "freed")
        if self.sizes[address.tier]:
            self.free[address.tier].append(address.block_id)

    def move(self, source: Address, destination: Address) -> None:
        """Note a copy to make before the next step."""
        self._moves.append((source, destination))
        self.num_moves[source.tier, destination.tier] += 1
        self.event(destination, f"filled from {source.tier.name} {source.block_id}")

    def take_moves(self) -> list[MoveBatch]:
        """Return the copies and moves to make before the next step, as batches to make one after another."""
        batches = batch_moves(self._moves)
        self._moves.clear()
        return batches

    def event(self, address: Address, what: str) -> None:
        """Remember what happened to a block, if anyone wants to know."""
        if self._history is not None:
            self._history.setdefault(address, deque(maxlen=_EVENTS_KEPT)).append(what)

    def breach(self, block_id: int, what: str, tier: Tier = Tier.DEVICE) -> str:
        """Return a sentence about a block that isn't as it should be, with its last events."""
        past = "not recorded" if self._history is None else ", ".join(self._history.get(Address(tier, block_id), ())) or "none"
        return f"{tier.name} block {block_id} {what}; its last events: {past}"

    def audit(self, named: Counter[int]) -> None:
        """Recount every tier. `named`: how many table entries name each device block.

        Raises:
            AssertionError: a block in no or two states; the message names it and its last events.
        """
        indexed: dict[Address, CachedBlock] = {}
        for block in self.cache.blocks():
            tier, block_id = block.address
            assert block.address not in indexed, self.breach(block_id, "is indexed twice", tier)
            assert block.parent is None or not block.parent.removed, self.breach(block_id, "has lost its parent", tier)
            indexed[block.address] = block
        for tier, size in self.sizes.items():
            twice = [block_id for block_id, n in Counter(self.free[tier]).items() if n > 1]
            assert not twice, self.breach(twice[0], "is twice in the free list", tier)
            free = set(self.free[tier])
            idle = {a.block_id for a, b in indexed.items() if a.tier == tier and b.key is not None}
            assert len(idle) == self.cache.num_idle[tier], (
                f"{len(idle)} idle {tier.name} blocks, {self.cache.num_idle[tier]} counted"
            )
            for block_id in range(size):
                count = named[block_id] if tier == Tier.DEVICE else 0
                states = (block_id in free) + (count > 0) + (block_id in idle)
                assert states == 1, self.breach(block_id, f"is in {states} of the states free, used and cached", tier)
        for block_id, known in enumerate(self.indexed):
            found = indexed.get(Address(Tier.DEVICE, block_id))
            assert known is found, self.breach(block_id, "is indexed at another place")
            assert found is None or (found.key is None) == (named[block_id] > 0), self.breach(block_id, "is held by nobody")
