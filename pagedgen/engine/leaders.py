"""Who computes a common beginning, and who waits for it. Knows digests and rows, no blocks.

The first row admitted that needs a block other rows will look for *leads*: it computes the block. Rows that come to that block
*follow*: they wait until it can be found, or never will be (the leader ended, was preempted or cancelled).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..request import Sequence


class Leaders:
    """The digests that running rows are computing, and the waiting rows by the digest they wait for."""

    def __init__(self) -> None:
        self._led: set[bytes] = set()  # digests of blocks that running rows compute
        self._followers: dict[bytes, list[Sequence]] = {}
        self.num_followers = 0

    def followers(self) -> list[Sequence]:
        """Return the rows that wait."""
        return [s for group in self._followers.values() for s in group]

    def lead(self, sequence: Sequence, digests: Iterable[bytes], users: Callable[[bytes], int]) -> None:
        """Note that a row is going to compute blocks, of which those with `users` left are led."""
        for digest in digests:
            if not users(digest):
                break  # who looks for a block looks for all before it
            if digest not in self._led:
                self._led.add(digest)
                sequence.leading.append(digest)

    def follow(self, sequence: Sequence, digests: Iterable[bytes]) -> bool:
        """Let a row wait if the first of the blocks it needs is being computed: for the last such, one wait is enough."""
        awaited = None
        for digest in digests:
            if digest not in self._led:
                break
            awaited = digest
        if awaited is None:
            return False
        self._followers.setdefault(awaited, []).append(sequence)
        self.num_followers += 1
        return True

    def settle(self, sequence: Sequence, digests: Iterable[bytes]) -> list[Sequence]:
        """A row has computed some of its blocks, or computes them no more; return who waited for them."""
        if not sequence.leading:
            return []
        settled = set(digests)
        let_go: list[Sequence] = []
        for digest in settled.intersection(sequence.leading):
            self._led.remove(digest)
            let_go += self._followers.pop(digest, [])
        sequence.leading = [digest for digest in sequence.leading if digest not in settled]
        self.num_followers -= len(let_go)
        return let_go

    def forget(self, sequence: Sequence) -> None:
        """Take a row out of those that wait, if it is one."""
        for group in self._followers.values():
            if sequence in group:
                group.remove(sequence)
                self.num_followers -= 1
