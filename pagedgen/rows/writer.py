"""Rows out: one JSONL or Parquet file, in input order, whole or not at all (temporary file, fsync, rename)."""

from __future__ import annotations

import base64
import contextlib
import datetime
import decimal
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import OutputError, UsageError
from .schema import OutputSchema, Result, fit

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_ROWS_PER_GROUP = 10_000


def check_output(output: str, *, overwrite: bool, inputs: list[Path]) -> str:
    """Return the format of an output path after checking, before any work, that it can be written.

    Raises:
        UsageError: unknown suffix, an existing file without --overwrite, or one of the inputs.
        OutputError: the directory is missing or can't be written.
    """
    if output == "-":
        return "jsonl"
    path = Path(output)
    if path.suffix not in FORMATS:
        raise UsageError(f"--output {output}: the suffix must be one of {', '.join(FORMATS)} (or - for JSONL on stdout)")
    if any(path.exists() and file.samefile(path) for file in inputs):
        raise UsageError(f"--output {output} is one of the inputs")
    if path.is_dir():
        raise UsageError(f"--output {output} is a directory")
    if path.exists() and not overwrite:
        raise UsageError(f"--output {output} exists; pass --overwrite to replace it")
    directory = path.parent
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OutputError(f"can't write into {directory}: {error.strerror} (errno {error.errno})") from error
    return FORMATS[path.suffix]


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path` that replaces it, synced to disk, when the block ends without an exception.

    Raises:
        OutputError: with path and errno, when any step fails; what was at `path` is untouched then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    except OSError as error:
        raise OutputError(f"can't write {path}: {error.strerror} (errno {error.errno})") from error


def write_results(
    output: str,
    output_format: str,
    results: list[Result],
    schema: OutputSchema,
    *,
    input_types: dict[str, Any],
    id_column: str | None,
) -> None:
    """Write finished rows, already in input order.

    Raises:
        OutputError: the file can't be written, or the reader of stdout has gone.
    """
    if output == "-":
        try:
            for result in results:
                sys.stdout.buffer.write(json_line(schema.to_dict(result)))
            sys.stdout.buffer.flush()
        except BrokenPipeError as error:
            # What is still buffered has no reader; without this Python would complain once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise OutputError("stdout was closed before all rows were written") from error
        return
    with atomic_file(Path(output)) as file:
        if output_format == "jsonl":
            for result in results:
                file.write(json_line(schema.to_dict(result)))
        else:
            _write_parquet(file, [schema.to_dict(r) for r in results], schema, input_types, id_column)


def _write_parquet(
    file: IO[bytes],
    rows: list[dict[str, Any]],
    schema: OutputSchema,
    input_types: dict[str, Any],
    id_column: str | None,
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow_schema = schema.arrow_schema(rows, input_types, id_column)
    with pq.ParquetWriter(file, arrow_schema, compression="zstd") as writer:
        for start in range(0, len(rows), _ROWS_PER_GROUP):
            group = rows[start : start + _ROWS_PER_GROUP]
            columns = [pa.array([fit(row[f.name], f.type) for row in group], type=f.type) for f in arrow_schema]
            writer.write_table(pa.Table.from_arrays(columns, schema=arrow_schema))


def json_line(row: dict[str, Any]) -> bytes:
    """Return one JSON line: UTF-8, no NaN or Infinity, integers and decimals in full."""
    cleaned = _jsonable(row)
    text = json.dumps(cleaned, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: only its escape can be written
        return json.dumps(cleaned, allow_nan=False).encode("ascii") + b"\n"


def _jsonable(value: Any) -> Any:
    """Return a value as JSON holds it: non-finite floats as null, decimals as their digits in text, times as ISO 8601."""
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return str(value)
