"""Finished rows on disk while a job runs: append-only parts, each durable once it is renamed to its name.

A part holds one line for each result, sorted by (row, sample, turn): the CRC-32 of what follows, the key, the result's columns
as JSON. A line that fails its CRC is no result, so nothing torn is ever taken for whole. Parts are numbered in the order of
writing; where two hold the same key the later one counts. When `FAN_IN` parts of one size have come together they become one of
the next, so that the number of files grows with the logarithm of the rows, and memory not at all.
"""

from __future__ import annotations

import heapq
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

from .durable import read_lines, remove, telling, write_whole
from .schema import Result

FAN_IN = 32
_FLUSH_RESULTS = 4096
_FLUSH_BYTES = 8 << 20
PART_NAME = re.compile(r"part-(\d+)-(\d{8,})-(\d{8,})\.jsonl")
_EMPTY = {f.name: f.default for f in fields(Result) if f.name not in ("row_index", "sample_index", "turn_index")}

Key = tuple[int, int, int]  # row, sample, turn


@dataclass(frozen=True)
class Part:
    """A part's file, which holds what was written as numbers `first` to `last`."""

    path: Path
    level: int
    first: int
    last: int

    def holds(self, other: Part) -> bool:
        """Return True when another part's lines are all in this one."""
        return self is not other and self.first <= other.first and other.last <= self.last


class PartStore:
    """The parts of one job. Results wait in memory for `flush_s` seconds at most when `flush_if_due` is called often."""

    def __init__(self, directory: Path, *, flush_s: float):
        """Take up the parts that are there.

        Raises:
            OutputError: the directory can't be read or written.
        """
        self._directory = directory
        self._flush_s = flush_s
        self._buffer: list[tuple[Key, bytes]] = []
        self._buffered_bytes = 0
        self._last_flush = monotonic()
        self._damaged: set[tuple[int, int]] = set()  # last number of the part, line
        with telling(directory):
            self._parts = self._take_up()

    def _take_up(self) -> list[Part]:
        parts = []
        for path in sorted(self._directory.iterdir()):
            match = PART_NAME.fullmatch(path.name)
            if match:
                parts.append(Part(path, *map(int, match.groups())))
            elif path.name.endswith(".tmp"):
                remove(path)  # a part that was being written when the process ended
        for part in parts:
            if any(other.holds(part) for other in parts):
                remove(part.path)  # its lines were moved to a larger one
        parts = [p for p in parts if not any(other.holds(p) for other in parts)]
        return sorted(parts, key=lambda p: p.first)

    @property
    def num_damaged_lines(self) -> int:
        """Return how many lines were read that are no results."""
        return len(self._damaged)

    def add(self, results: list[Result]) -> None:
        """Take results that belong together: either all of them will be in a part or none."""
        for result in results:
            line = _encode(result)
            self._buffer.append(((result.row_index, result.sample_index, result.turn_index), line))
            self._buffered_bytes += len(line)
        if len(self._buffer) >= _FLUSH_RESULTS or self._buffered_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush_if_due(self) -> None:
        """Write what has waited long enough."""
        if self._buffer and monotonic() - self._last_flush >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory as a part.

        Raises:
            OutputError: with path and errno; parts that were written before are as they were.
        """
        self._last_flush = monotonic()
        if not self._buffer:
            return
        number = self._parts[-1].last + 1 if self._parts else 1
        # Sorting keeps the order of equal keys, of which the last counts.
        lines = dict(sorted(self._buffer, key=lambda entry: entry[0]))
        self._write(0, number, number, iter(lines.values()))
        self._buffer, self._buffered_bytes = [], 0
        self._compact()

    def _write(self, level: int, first: int, last: int, lines: Iterator[bytes]) -> None:
        path = self._directory / f"part-{level}-{first:08}-{last:08}.jsonl"
        write_whole(path, lines)
        self._parts.append(Part(path, level, first, last))

    def _compact(self) -> None:
        """Join the last `FAN_IN` parts while they are of one level."""
        while len(self._parts) >= FAN_IN and self._parts[-FAN_IN].level == self._parts[-1].level:
            sources = self._parts[-FAN_IN:]
            del self._parts[-FAN_IN:]
            try:
                joined = (line for _, line in self._merge(sources))
                self._write(sources[0].level + 1, sources[0].first, sources[-1].last, joined)
            except BaseException:
                self._parts += sources
                raise
            for part in sources:
                with telling(part.path):
                    remove(part.path)

    def results(self) -> Iterator[Result]:
        """Return every result once, in order of (row, sample, turn), of those in parts now.

        The parts are opened at once, so that it doesn't matter when they become larger ones.

        Raises:
            OutputError: a part can't be read.
        """
        merged = self._merge(list(self._parts))
        first = next(merged, None)
        return iter(()) if first is None else (_decode(line) for _, line in chain([first], merged))

    def count(self) -> int:
        """Return the number of results in parts now."""
        return sum(1 for _ in self._merge(list(self._parts)))

    def _merge(self, parts: list[Part]) -> Iterator[tuple[Key, bytes]]:
        previous = None
        for key, _, line in heapq.merge(*(self._lines(part) for part in parts)):
            if key != previous:
                yield key, line
            previous = key

    def _lines(self, part: Part) -> Iterator[tuple[Key, int, bytes]]:
        """Yield a part's whole lines; the number in the middle puts the latest of equal keys first."""
        with telling(part.path, "read"):
            for place, line in enumerate(read_lines(part.path)):
                key = _key(line)
                if key is None:
                    self._damaged.add((part.last, place))
                else:
                    yield key, -part.last, line + b"\n"


def _encode(result: Result) -> bytes:
    values = {name: value for name, value in asdict(result).items() if name in _EMPTY and value != _EMPTY[name]}
    text = json.dumps(values, ensure_ascii=True, separators=(",", ":"))
    body = f"{result.row_index} {result.sample_index} {result.turn_index} {text}".encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _key(line: bytes) -> Key | None:
    """Return a line's key; None when it is damaged."""
    crc, _, body = line.partition(b" ")
    if len(crc) != 8 or crc != b"%08x" % zlib.crc32(body):
        return None
    fields = body.split(b" ", 3)  # none in an empty body, whose CRC is 0
    return (int(fields[0]), int(fields[1]), int(fields[2])) if len(fields) == 4 else None


def _decode(line: bytes) -> Result:
    _, row, sample, turn, text = line.split(b" ", 4)
    values: dict[str, Any] = json.loads(text)
    return Result(int(row), int(sample), int(turn), **values)
