"""Rows read ahead of the engine, in a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from ..request import Request
from .reader import Group

_TOKENS_AHEAD = 1 << 18  # in the queue, beside what the engine holds; a group more than that at most
_GROUPS_AHEAD = 64
_POLL_S = 0.2


class RowFeed:
    """Runs a `RowReader` in a thread of its own and hands its groups to the engine's (`engine.feed.Feed`)."""

    def __init__(self, groups: Iterator[Group], take_in: Callable[[Group], list[Request]]):
        """`take_in` is called in the engine's thread for each group and returns its requests."""
        self._take_in = take_in
        self._queue: queue.Queue[tuple[Group | BaseException | None, int]] = queue.Queue(_GROUPS_AHEAD)
        self._tokens_queued = 0
        self._room = threading.Condition()
        self._closing = threading.Event()
        self.held: list[Request] = []  # taken in before the engine runs, which gets them first
        self.at_end = False  # all rows have been taken in
        self._thread = threading.Thread(target=self._run, args=(groups,), name="pagedgen-reader", daemon=True)
        self._thread.start()

    def _run(self, groups: Iterator[Group]) -> None:
        try:
            for group in groups:
                self._put(group, sum(request.num_prompt_tokens for request in group.requests))
                if self._closing.is_set():
                    return
            self._put(None, 0)
        except BaseException as error:  # raised again where it can be told
            self._put(error, 0)

    def _put(self, item: Group | BaseException | None, num_tokens: int) -> None:
        with self._room:
            while self._tokens_queued >= _TOKENS_AHEAD and not self._closing.is_set():
                self._room.wait(_POLL_S)
            self._tokens_queued += num_tokens
        while not self._closing.is_set():
            try:
                self._queue.put((item, num_tokens), timeout=_POLL_S)
                return
            except queue.Full:
                pass

    def look_ahead(self, max_rows: int, max_tokens: int, stop: Callable[[], bool]) -> None:
        """Take rows in until so many requests or tokens are held, there are no more rows, or it is to stop."""
        tokens = 0
        while not self.at_end and len(self.held) < max_rows and tokens < max_tokens and not stop():
            requests = self._next(wait=True)
            tokens += sum(r.num_prompt_tokens for r in requests)
            self.held += requests

    @property
    def exhausted(self) -> bool:
        """See `engine.feed.Feed`."""
        return self.at_end and not self.held

    def take(self, *, wait: bool) -> list[Request]:
        """See `engine.feed.Feed`."""
        if self.held:
            taken, self.held = self.held, []
            return taken
        while True:
            requests = self._next(wait)
            # Groups whose rows are all finished have no requests; the next one may.
            if requests or wait or self.at_end or self._queue.empty():
                return requests

    def _next(self, wait: bool) -> list[Request]:
        try:
            item, num_tokens = self._queue.get(timeout=_POLL_S) if wait else self._queue.get_nowait()
        except queue.Empty:
            return []
        with self._room:
            self._tokens_queued -= num_tokens
            self._room.notify()
        if item is None:
            self.at_end = True
            return []
        if isinstance(item, BaseException):
            raise item
        return self._take_in(item)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join(timeout=10)
