"""Where a block can lie: an address is (tier, id). And how moves between addresses are grouped. No torch.

Attention reads the device tier only. Host and disk hold blocks that somebody will need again: they are read back into device
blocks before the step that needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Tier(IntEnum):
    """Kinds of memory, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Address(NamedTuple):
    """One block's place."""

    tier: Tier
    block_id: int


@dataclass
class MoveBatch:
    """Moves from one tier to one tier that can be made at once: no address is written twice or both read and written."""

    source: Tier
    destination: Tier
    pairs: list[tuple[int, int]] = field(default_factory=list)
    reads: set[Address] = field(default_factory=set)
    writes: set[Address] = field(default_factory=set)

    def must_precede(self, source: Address, destination: Address) -> bool:
        """Return True when a later move must not come before this batch is done, nor join it."""
        return source in self.writes or destination in self.reads or destination in self.writes

    def add(self, source: Address, destination: Address) -> None:
        self.pairs.append((source.block_id, destination.block_id))
        self.reads.add(source)
        self.writes.add(destination)


def batch_moves(moves: list[tuple[Address, Address]]) -> list[MoveBatch]:
    """Group moves, to be made in order, into few batches with the same result.

    A move joins the earliest batch of its kind that no batch in between forbids.
    """
    batches: list[MoveBatch] = []
    for source, destination in moves:
        joined = None
        for batch in reversed(batches):
            if batch.must_precede(source, destination):
                break
            if batch.source == source.tier and batch.destination == destination.tier:
                joined = batch
        if joined is None:
            joined = MoveBatch(source.tier, destination.tier)
            batches.append(joined)
        joined.add(source, destination)
    return batches
