"""What brings the engine its rows: all at once, or as they are read. And what tells it to stop before the end."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from ..request import Request

# How far the engine looks ahead: waiting rows are ordered by length and by what they share with others. Both bound its memory.
LOOKAHEAD_ROWS = 16_384
LOOKAHEAD_TOKENS = 1 << 21
ROWS_AT_ONCE = 512  # that a feed which has them all hands out together


class Feed(Protocol):
    """Requests in the order of the input."""

    @property
    def exhausted(self) -> bool:
        """True when no request will follow."""

    def take(self, *, wait: bool) -> list[Request]:
        """Return the next requests that are ready. With `wait` wait for some; none may come all the same."""


class ListFeed:
    """Requests that are all there."""

    def __init__(self, requests: Iterable[Request]):
        self._requests = list(requests)
        self._next = 0

    @property
    def exhausted(self) -> bool:
        return self._next == len(self._requests)

    def take(self, *, wait: bool) -> list[Request]:
        taken = self._requests[self._next : self._next + ROWS_AT_ONCE]
        self._next += len(taken)
        return taken


class Control(Enum):
    """How a run goes on after a step."""

    GO_ON = "go on"
    DRAIN = "finish the running rows, begin none"
    DROP = "leave at once"
