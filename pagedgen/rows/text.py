"""Records of text files: JSON lines, CSV and TSV, plain or compressed, streamed. Broken ones keep their place as row errors.

A record's position is the physical line where it begins, from 1. Blank lines are no records. Memory is bounded by the longest
line that is allowed, whatever the file holds.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import InputError, RowError

MAX_LINE_BYTES = 64 << 20
MAX_DEPTH = 64  # of nested values; Arrow's own limit is 100
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")

Record = tuple[int, dict[str, Any], RowError | None, int]  # position, values, or why there are none, and its size in bytes


def open_text(path: Path, compression: str | None) -> IO[bytes]:
    """Open a file's uncompressed bytes; members or frames that follow each other are one stream.

    Raises:
        OSError: it can't be opened.
    """
    if compression == "gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if compression == "zst":
        return io.BufferedReader(_ZstdReader(path.open("rb")), 1 << 20)
    return path.open("rb", buffering=1 << 20)


class _ZstdReader(io.RawIOBase):
    """The data of one zstd frame after the other; what is whole before a break is read."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._frame: Any = None
        self._input = b""
        self._ready = b""
        self._taken = 0  # of what is ready

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._taken == len(self._ready):
            if not self._input:
                self._input = self._file.read(4096)  # which may become a thousand times as much
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the data ends inside a zstd frame")
                    return 0
            self._decompress()
        count = min(len(buffer), len(self._ready) - self._taken)
        buffer[:count] = self._ready[self._taken : self._taken + count]
        self._taken += count
        return count

    def _decompress(self) -> None:
        import zstandard

        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            self._ready, self._taken = self._frame.decompress(self._input), 0
        except zstandard.ZstdError as error:
            raise zlib.error(str(error)) from error
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None

    def close(self) -> None:
        self._file.close()
        super().close()


def read_jsonl(path: Path, name: str, compression: str | None) -> Iterator[Record]:
    """Yield the records of a JSON lines file.

    Raises:
        InputError: it can't be opened or read, or is JSON or text of another kind as a whole.
    """
    is_first = True
    for number, raw in _lines(path, name, compression):
        if isinstance(raw, RowError):
            yield number, {}, raw, 0
            continue
        raw = raw.strip()
        if not raw:
            continue
        if is_first and raw.startswith(b"[") and path.name.endswith((".json", ".json.gz", ".json.zst")):
            raise InputError(f"{name} is a JSON array, not JSON lines; convert it, for example with: jq -c '.[]'")
        is_first = False
        yield number, *_parse_line(raw, f"{name} line {number}"), len(raw)


def _lines(path: Path, name: str, compression: str | None) -> Iterator[tuple[int, bytes | RowError]]:
    """Yield a file's numbered lines; one that is too long, or what is lost behind broken compressed data, is a row error."""
    number = 0
    try:
        with open_text(path, compression) as stream:
            while True:
                raw = stream.readline(MAX_LINE_BYTES + 1)
                if not raw:
                    return
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    while raw and not raw.endswith(b"\n"):
                        raw = stream.readline(MAX_LINE_BYTES)
                    yield number, RowError("bad_json", f"{name} line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
                    continue
                if number == 1:
                    if raw.startswith(_UTF16):
                        raise InputError(f"{name} is UTF-16 text; convert it to UTF-8")
                    raw = raw.removeprefix(_BOM)
                yield number, raw
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and (error.errno is not None or compression is None):
            raise InputError(f"can't read {name}: {error.strerror or error}") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        yield (
            number + 1,
            RowError("unreadable", f"{name} is broken after line {number}, what follows is lost: {reason:.200}"),
        )


def _parse_line(raw: bytes, where: str) -> tuple[dict[str, Any], RowError | None]:
    try:
        values = _DECODER.decode(raw.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = str(error) if not isinstance(error, RecursionError) else "nested too deeply"
        return {}, RowError("bad_json", f"{where} is not JSON: {reason}")
    if not isinstance(values, dict):
        return {}, RowError("bad_json", f"{where} is JSON but not an object")
    # Without so many brackets it can't be so deep, and most lines needn't be walked through.
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _depth(values, MAX_DEPTH) < 0:
        return {}, RowError("bad_json", f"{where} is nested more than {MAX_DEPTH} levels deep")
    return values, None


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits:.40} is larger than any float")
    return value


def _depth(value: Any, left: int) -> int:
    """Return how many of `left` levels a value leaves over, negative when it is deeper."""
    if left < 0 or not isinstance(value, (dict, list)):
        return left
    members = value.values() if isinstance(value, dict) else value
    return min((_depth(m, left - 1) for m in members), default=left - 1)


_DECODER = json.JSONDecoder(parse_float=_finite)


def csv_header(path: Path, name: str, compression: str | None, delimiter: str) -> list[str]:
    """Return the column names of a CSV file; none for an empty one.

    Raises:
        InputError: two columns of one name, or no readable header.
    """
    header: Any = next(_csv_rows(path, name, compression, delimiter), (0, []))[1]
    if isinstance(header, RowError):
        raise InputError(f"{name} has no readable header: {header.message}")
    if _is_not_utf8(header):
        raise InputError(f"{name} has a header that is not UTF-8 text")
    if len(set(header)) < len(header) or "" in header:
        raise InputError(f"{name} has columns without a name or of one name in its header: {', '.join(header)}")
    return header


def read_csv(path: Path, name: str, compression: str | None, delimiter: str) -> Iterator[Record]:
    """Yield the records of a CSV file with a header line; all values are text.

    Raises:
        InputError: it can't be read at all.
    """
    header = csv_header(path, name, compression, delimiter)
    rows = _csv_rows(path, name, compression, delimiter)
    next(rows, None)
    for number, fields in rows:
        where = f"{name} line {number}"
        if isinstance(fields, RowError):
            yield number, {}, fields, 0
        elif len(fields) != len(header):
            yield number, {}, RowError("bad_csv", f"{where} has {len(fields)} fields, the header {len(header)}"), 0
        elif _is_not_utf8(fields):
            yield number, {}, RowError("bad_csv", f"{where} is not UTF-8 text"), 0
        else:
            yield number, dict(zip(header, fields, strict=True)), None, sum(map(len, fields))


def _is_not_utf8(fields: list[str]) -> bool:
    """Return True when bytes that are no UTF-8 were decoded by "surrogateescape"."""
    return any("\udc80" <= character <= "\udcff" for field in fields if not field.isascii() for character in field)


def _csv_rows(path: Path, name: str, compression: str | None, delimiter: str) -> Iterator[tuple[int, Any]]:
    """Yield the line where each record begins and its fields, the header's included, or a row error."""
    csv.field_size_limit(MAX_LINE_BYTES)
    lost: list[tuple[int, RowError]] = []

    def lines() -> Iterator[str]:
        for number, raw in _lines(path, name, compression):
            if isinstance(raw, RowError):
                lost.append((number, raw))
                if raw.code == "unreadable":
                    return
                yield "\n"
            else:
                yield raw.decode("utf-8", "surrogateescape")

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        begins = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            yield begins, RowError("bad_csv", f"{name} line {begins} can't be read as CSV: {error}")
            continue
        for number, row_error in lost:
            yield number, RowError("bad_csv" if row_error.code == "bad_json" else row_error.code, row_error.message)
        if fields is None:
            return
        if fields and not lost:  # else a line was lost inside this very record
            yield begins, fields
        lost.clear()
