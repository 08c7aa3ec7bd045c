"""Rows in: JSONL and Parquet files, one or many, as one numbered stream. Knows nothing of prompts or models.

A row's index is its place among the *records* of all files in order (blank lines get none). A line that is no JSON object is a
row all the same: it carries the error in its place, so that nothing is dropped silently.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, RowError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
_PARQUET_BATCH_ROWS = 1024
MAX_DEPTH = 64  # of nested values; Arrow's own limit is 100


@dataclass
class Row:
    """One record: its place in its file and what it holds, or why it could not be read."""

    index: int
    position: int  # physical line (1-based) in JSONL, row number (0-based) in Parquet
    values: dict[str, Any]
    error: RowError | None = None


def expand_inputs(inputs: list[str]) -> list[Path]:
    """Turn files, globs and directories into a list of files; globs and directories in sorted order, hidden files skipped.

    Raises:
        InputError: nothing there, or a file of a kind that can't be read.
    """
    known = JSONL_SUFFIXES + PARQUET_SUFFIXES
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        try:
            if path.is_dir():
                files.extend(_readable(path.iterdir(), f"{name} holds no {' or '.join(known)} file"))
            elif path.is_file():
                if path.suffix not in known:
                    raise InputError(f"{name}: can't tell its format; known suffixes are {', '.join(known)}")
                files.append(path)
            elif path.exists():
                raise InputError(f"{name} is not a regular file")
            elif glob.has_magic(name):
                matches = map(Path, glob.glob(name, recursive=True))
                files.extend(_readable(matches, f"{name} matches no {' or '.join(known)} file"))
            else:
                raise InputError(f"no such file: {name}")
        except OSError as error:
            raise InputError(f"can't read {name}: {error.strerror}") from error
    return files


def _readable(paths: Iterable[Path], otherwise: str) -> list[Path]:
    """Return the files of a known kind in sorted order, each file once: a link can lead a glob to the same one many times."""
    known = JSONL_SUFFIXES + PARQUET_SUFFIXES
    found = {
        p.resolve(): p for p in sorted(paths, reverse=True) if p.suffix in known and not p.name.startswith(".") and p.is_file()
    }
    if not found:
        raise InputError(otherwise)
    return sorted(found.values())


def read_rows(files: list[Path], limit: int | None = None) -> Iterator[Row]:
    """Yield the rows of all files in order, at most `limit`.

    Raises:
        InputError: a file that can't be opened or is no valid Parquet.
    """
    index = 0
    for file in files:
        if limit is not None and index >= limit:
            return
        rows = _read_parquet(file) if file.suffix in PARQUET_SUFFIXES else _read_jsonl(file)
        for position, values, error in rows:
            if limit is not None and index >= limit:
                return
            yield Row(index, position, values, error)
            index += 1


def _read_jsonl(file: Path) -> Iterator[tuple[int, dict[str, Any], RowError | None]]:
    try:
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                raw = raw.strip()
                if not raw:
                    continue
                yield number, *_parse_line(raw, f"{file.name} line {number}")
    except OSError as error:
        raise InputError(f"can't read {file}: {error.strerror or error}") from error


def _parse_line(raw: bytes, where: str) -> tuple[dict[str, Any], RowError | None]:
    try:
        values = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = str(error) if not isinstance(error, RecursionError) else "nested too deeply"
        return {}, RowError("bad_json", f"{where} is not JSON: {reason}")
    if not isinstance(values, dict):
        return {}, RowError("bad_json", f"{where} is JSON but not an object")
    if _depth(values, MAX_DEPTH) < 0:
        return {}, RowError("bad_json", f"{where} is nested more than {MAX_DEPTH} levels deep")
    return values, None


def _depth(value: Any, left: int) -> int:
    """Return how many of `left` levels a value leaves over, negative when it is deeper."""
    if left < 0 or not isinstance(value, (dict, list)):
        return left
    members = value.values() if isinstance(value, dict) else value
    return min((_depth(m, left - 1) for m in members), default=left - 1)


def _read_parquet(file: Path) -> Iterator[tuple[int, dict[str, Any], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            position = 0
            for batch in parquet.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for values in _exact(batch).to_pylist():
                    yield position, values, None
                    position += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # the last two: values Python can't hold
        raise InputError(f"can't read {file} as Parquet: {str(error).splitlines()[0]}") from error


def _exact(batch: Any) -> Any:
    """Return a record batch whose nanosecond times are integers: Python's own times end at microseconds."""
    import pyarrow as pa

    for i, field in enumerate(batch.schema):
        if getattr(field.type, "unit", None) == "ns":
            batch = batch.set_column(i, field.name, batch.column(i).cast(pa.int64()))
    return batch


def column_names(files: list[Path], sample: list[Row]) -> list[str]:
    """Return the columns a user could name: Parquet schemas and the keys of the sampled JSONL rows, in order of appearance."""
    names: dict[str, None] = {}
    for file in files:
        if file.suffix in PARQUET_SUFFIXES:
            names.update(dict.fromkeys(parquet_schema([file]).names))
    for row in sample:
        names.update(dict.fromkeys(row.values))
    return list(names)


def parquet_schema(files: list[Path]):
    """Return the unified Arrow schema of Parquet files.

    Raises:
        InputError: a file is no Parquet, or two files give a column different types.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = []
    for file in files:
        try:
            schemas.append(pq.read_schema(file).remove_metadata())
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"can't read {file} as Parquet: {str(error).splitlines()[0]}") from error
    try:
        return pa.unify_schemas(schemas)
    except pa.ArrowException as error:
        raise InputError(f"the Parquet files have different columns: {str(error).splitlines()[0]}") from error
