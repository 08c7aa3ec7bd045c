"""Rows out: one JSONL or Parquet file, in input order, whole or not at all (temporary file, fsync, rename)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import OutputError, UsageError
from .schema import OutputSchema, Result, fit, jsonable

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
    if Path(output).suffix not in FORMATS:
        raise UsageError(f"--output {output}: the suffix must be one of {', '.join(FORMATS)} (or - for JSONL on stdout)")
    check_writable(output, "--output", overwrite=overwrite, inputs=inputs)
    return FORMATS[Path(output).suffix]


def check_writable(name: str, flag: str, *, overwrite: bool, inputs: list[Path]) -> None:
    """Refuse a path that can't be written or must not be.

    Raises:
        UsageError: one of the inputs, an existing file without --overwrite, a directory or a device; OutputError: its
            directory is missing or can't be written.
    """
    path = Path(name)
    try:
        if path.is_dir():
            raise UsageError(f"{flag} {name} is a directory")
        if path.exists():
            if not path.is_file():
                raise UsageError(f"{flag} {name} is not a regular file")
            if any(file.samefile(path) for file in inputs if file.exists()):
                raise UsageError(f"{flag} {name} is one of the inputs")
            if not overwrite:
                raise UsageError(f"{flag} {name} exists; pass --overwrite to replace it")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise OutputError(f"can't write {name}: {error.strerror} (errno {error.errno})") from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path` that replaces it, synced to disk, when the block ends without an exception.

    A symbolic link is followed and an existing file's permissions are kept.

    Raises:
        OutputError: with path and errno, when any step fails; what was at `path` is untouched then.
    """
    try:
        target = path.resolve()
        temporary = target.with_name(f".pagedgen-{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                if target.exists():
                    os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            directory = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    except OSError as error:
        raise OutputError(f"can't write {path}: {error.strerror} (errno {error.errno})") from error


class ResultWriter:
    """Writes a job's results once, in input order, to one file or to stdout."""

    def __init__(
        self,
        output: str,
        output_format: str,
        input_columns: list[str],
        id_column: str | None,
        *,
        input_types: dict[str, Any],
        with_token_ids: bool,
    ):
        """`input_types`: Arrow types of Parquet input columns. An `id` column that is the row's id isn't carried twice."""
        self._output = output
        self._format = output_format
        self._id_column = id_column
        self._input_types = input_types
        self._schema = OutputSchema(tuple(c for c in input_columns if c != "id" or id_column != "id"), with_token_ids)

    def check(self, results: list[Result]) -> None:
        """Fail now, before the hours of work, if the rows' own columns can't be written. `results` hold no answers yet."""
        if self._format == "parquet":
            self._tables([self._schema.to_dict(r) for r in results])
        else:
            for result in results:
                json_line(self._schema.to_dict(result))

    def write(self, results: list[Result]) -> None:
        """Write all results.

        Raises:
            OutputError: the file can't be written, or the reader of stdout has gone.
        """
        if self._output == "-":
            self._write_stdout(results)
            return
        with atomic_file(Path(self._output)) as file:
            if self._format == "jsonl":
                for result in results:
                    file.write(json_line(self._schema.to_dict(result)))
            else:
                import pyarrow.parquet as pq

                schema, tables = self._tables([self._schema.to_dict(r) for r in results])
                with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                    for table in tables:
                        writer.write_table(table)

    def _write_stdout(self, results: list[Result]) -> None:
        if sys.stdout is None:
            raise OutputError("can't write to stdout: it is closed")
        try:
            for result in results:
                sys.stdout.buffer.write(json_line(self._schema.to_dict(result)))
            sys.stdout.buffer.flush()
        except OSError as error:
            # What is still buffered can't be written; without this Python would complain once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            reason = "it was closed" if isinstance(error, BrokenPipeError) else f"{error.strerror} (errno {error.errno})"
            raise OutputError(f"can't write all rows to stdout: {reason}") from error

    def _tables(self, rows: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
        """Return the Arrow schema and the rows as tables of one row group each."""
        import pyarrow as pa

        schema, as_json = self._schema.arrow_schema(rows, self._input_types, self._id_column)
        tables = []
        for start in range(0, max(len(rows), 1), _ROWS_PER_GROUP):
            group = rows[start : start + _ROWS_PER_GROUP]
            columns = [
                pa.array([fit(row[name], field.type, as_json=name in as_json) for row in group], type=field.type)
                for name, field in zip(self._schema.columns, schema, strict=True)
            ]
            tables.append(pa.Table.from_arrays(columns, schema=schema))
        return schema, tables


def json_line(row: dict[str, Any]) -> bytes:
    """Return one JSON line: UTF-8, no NaN or Infinity, integers and decimals in full."""
    cleaned = jsonable(row)
    text = json.dumps(cleaned, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: only its escape can be written
        return json.dumps(cleaned, allow_nan=False).encode("ascii") + b"\n"
