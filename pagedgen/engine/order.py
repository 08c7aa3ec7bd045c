"""The rows of a job in the order to run them: read to the last one, then handed out by the prefix tree. No torch."""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Callable
from typing import Any

from ..errors import OutputError
from ..request import Request
from .feed import ROWS_AT_ONCE, Feed
from .planner import RequestLengths
from .prefix_tree import PrefixTree, Sharing

_BYTES_IN_MEMORY = 64 << 20  # of rows that wait; more of them wait in a file


class RowSpool:
    """Requests put away as bytes, found again by their number; past 64 MiB they lie in an unnamed file."""

    def __init__(self, directory: str | None = None):
        self._directory = directory or tempfile.gettempdir()
        self._file: Any = tempfile.SpooledTemporaryFile(_BYTES_IN_MEMORY, dir=directory)  # noqa: SIM115
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def add(self, request: Request) -> None:
        """Put away the next request.

        Raises:
            OutputError: there is no room for it; with directory and errno.
        """
        try:
            self._file.seek(self._offsets[-1])
            self._file.write(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise OutputError(
                f"can't keep the rows that wait in {self._directory}: {error.strerror or error} (errno {error.errno})"
            ) from error
        self._offsets.append(self._file.tell())

    def get(self, number: int) -> Request:
        """Return a request that was put away."""
        start, end = self._offsets[number], self._offsets[number + 1]
        self._file.seek(start)
        request: Request = pickle.loads(self._file.read(end - start))
        return request

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


class PlannedFeed:
    """Reads all rows of another feed and hands them out in the planned order (`engine.feed.Feed`).

    Rows that share blocks come one after the other; see `PrefixTree.plan`.
    """

    def __init__(self, inner: Feed, block_size: int, *, directory: str | None = None):
        """`directory`: where rows wait that are too many for memory; the system's own place for such files by default."""
        self._inner = inner
        self._tree: PrefixTree | None = PrefixTree(block_size)
        self._spool = RowSpool(directory)
        self.order: Any = None  # (num_rows,) numbers of rows as they were read, once all were
        self._next = 0
        self.lengths = RequestLengths()
        self.sharing: Sharing | None = None  # known when all rows were read

    def read(self, stop: Callable[[], bool]) -> None:
        """Read rows until there are no more, or it is to stop."""
        while not self._inner.exhausted and not stop():
            self._take_in(self._inner.take(wait=True))
        if self._inner.exhausted:
            self._plan()

    def __len__(self) -> int:
        """Rows that were read."""
        return len(self._spool)

    @property
    def exhausted(self) -> bool:
        """See `engine.feed.Feed`."""
        return self._inner.exhausted and self._next == len(self._spool)

    def take(self, *, wait: bool) -> list[Request]:
        """See `engine.feed.Feed`: nothing before the last row was read."""
        if self.order is None:
            self._take_in(self._inner.take(wait=wait))
            if not self._inner.exhausted:
                return []
            self._plan()
        numbers = self.order[self._next : self._next + ROWS_AT_ONCE].tolist()
        self._next += len(numbers)
        return [self.request(number) for number in numbers]

    def request(self, number: int) -> Request:
        """Return a row by its place among those that were read."""
        return self._spool.get(number)

    def _take_in(self, requests: list[Request]) -> None:
        assert self._tree is not None
        for request in requests:
            self._tree.add(request.prompt_token_ids, request.max_tokens + request.later_tokens, request.cache_salt)
            self._spool.add(request)
        self.lengths.add(requests)

    def _plan(self) -> None:
        if self._tree is not None:
            self.order, _, self.sharing = self._tree.plan()
            self._tree = None  # its tokens are in the rows as well

    def close(self) -> None:
        """Give the rows' file back."""
        self._spool.close()
