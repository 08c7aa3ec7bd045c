"""Output formats: each takes chunks of input rows with their results, in order, and writes them as they come."""

from __future__ import annotations

import contextlib
import io
import json
from typing import IO, Any, Protocol

from ..errors import OutputError, UsageError
from .columnar import one_line
from .openai_batch import response_line
from .schema import OutputSchema, Result, jsonable, own_types, text_of
from .sources import Chunk

_GROUP_ROWS = 10_000
_GROUP_BYTES = 64 << 20

Picked = list[tuple[int, list[Result]]]  # places in a chunk, each with that row's results


class Sink(Protocol):
    """Where assembled rows go."""

    def write(self, chunk: Chunk, picked: Picked) -> None:
        """Write the results of some of a chunk's rows."""

    def close(self, manifest: dict[str, Any]) -> None:
        """Write what is still to be written; the file is closed by its owner."""

    def abandon(self) -> None:
        """Let go of the file; unless it was closed before, nobody wants it."""


class JsonlSink:
    """One JSON object a line, every column in each."""

    def __init__(self, file: IO[bytes], schema: OutputSchema):
        self._file = file
        self._schema = schema

    def write(self, chunk: Chunk, picked: Picked) -> None:
        for place, results in picked:
            values = chunk.rows[place].values
            for result in results:
                self._file.write(json_line(self._schema.to_dict(result, values)))

    def close(self, manifest: dict[str, Any]) -> None:
        pass

    def abandon(self) -> None:
        pass


class OpenAISink:
    """OpenAI's batch output, one line a request; failures go to a file of their own."""

    def __init__(self, file: IO[bytes], errors: IO[bytes], model: str):
        self._file = file
        self._errors = errors
        self._model = model

    def write(self, chunk: Chunk, picked: Picked) -> None:
        for place, results in picked:
            line, failed = response_line(chunk.rows[place].values, results, self._model)
            (self._errors if failed else self._file).write(json_line(line))

    def close(self, manifest: dict[str, Any]) -> None:
        pass

    def abandon(self) -> None:
        pass


class ParquetSink:
    """Parquet with zstd. Columns of the input come as they are where the input is columnar, else with their types."""

    def __init__(self, file: IO[bytes], schema: OutputSchema, types: dict[str, Any]):
        """`types`: Arrow types of the input's columns; None for a column that is written as JSON text."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._schema = schema
        self._types = types
        self._arrow_schema = parquet_schema(schema, types)
        self._writer = pq.ParquetWriter(file, self._arrow_schema, compression="zstd", write_page_checksum=True)
        self._input_columns: dict[str, str | None] = {"id": schema.id_column}
        self._input_columns.update((output, column) for column, output in schema.names.items())
        self._batches: list[pa.RecordBatch] = []
        self._num_rows = self._num_bytes = 0

    def write(self, chunk: Chunk, picked: Picked) -> None:
        import pyarrow as pa

        places = pa.array([place for place, results in picked for _ in results], pa.int64())
        results = [result for _, group in picked for result in group]
        columns = []
        for name, field in zip(self._schema.columns, self._arrow_schema, strict=True):
            column = self._input_columns.get(name)
            if column is not None:
                columns.append(self._taken(chunk, column, places, field.type))
            elif name == "id":
                columns.append(pa.array([r.row_index for r in results], field.type))
            else:
                columns.append(pa.array([_own_value(getattr(r, name)) for r in results], field.type))
        batch = pa.RecordBatch.from_arrays(columns, schema=self._arrow_schema)
        self._batches.append(batch)
        self._num_rows += len(batch)
        self._num_bytes += batch.nbytes
        if self._num_rows >= _GROUP_ROWS or self._num_bytes >= _GROUP_BYTES:
            self._write_group()

    def _taken(self, chunk: Chunk, column: str, places: Any, kind: Any) -> Any:
        import pyarrow as pa

        if chunk.batch is not None:
            index = chunk.batch.schema.get_field_index(column)
            if index < 0 or pa.types.is_null(chunk.batch.schema.field(index).type):
                return pa.nulls(len(places), kind)
            assert self._types[column] is not None, "a columnar source's column has a type"
            taken = take(chunk.batch.column(index), places)
            return taken if taken.type == kind else taken.cast(kind)
        as_json = self._types[column] is None
        values = [chunk.rows[place].values.get(column) for place in places.to_pylist()]
        return pa.array([_json_text(v) if as_json and v is not None else v for v in values], kind)

    def _write_group(self) -> None:
        import pyarrow as pa

        if self._batches:
            table = pa.Table.from_batches(self._batches, self._arrow_schema).combine_chunks()
            try:
                self._writer.write_table(table, row_group_size=max(len(table), 1))
            except pa.ArrowException as error:  # for example a time that Parquet's unit can't hold
                raise OutputError(f"can't write the rows as Parquet: {one_line(error)}") from error
        self._batches, self._num_rows, self._num_bytes = [], 0, 0

    def close(self, manifest: dict[str, Any]) -> None:
        self._write_group()
        self._writer.add_key_value_metadata({MANIFEST_KEY: json.dumps(manifest, sort_keys=True)})
        self._writer.close()

    def abandon(self) -> None:
        abandon_writer(self._writer)


def abandon_writer(writer: Any) -> None:
    """Let go of a `pyarrow.parquet.ParquetWriter`, whose file may be full or closed."""
    try:
        with contextlib.suppress(Exception):  # it wants to write a footer
            writer.close()
    finally:
        writer.is_open = False  # or it would try again when it is collected


def take(array: Any, places: Any) -> Any:
    """Return an array's values at some places, in order, of whatever type."""
    import pyarrow as pa

    try:
        return array.take(places)
    except pa.ArrowNotImplementedError:  # views have no such kernel yet
        return pa.concat_arrays([array.slice(place, 1) for place in places.to_pylist()])


MANIFEST_KEY = "pagedgen.manifest"


def parquet_schema(schema: OutputSchema, types: dict[str, Any]) -> Any:
    """Return the Arrow schema of a Parquet output.

    Raises:
        UsageError: Parquet has no such type; the message names the column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = own_types()
    texts = {column: pa.string() for column, kind in types.items() if kind is None}
    kinds["id"] = pa.int64() if schema.id_column is None else {**types, **texts}.get(schema.id_column, pa.string())
    kinds |= {output: {**types, **texts}[column] for column, output in schema.names.items()}
    fields: dict[str, pa.Field] = {}
    tried = set()
    for name in schema.columns:
        unique, kind = text_of(name), kinds[name]
        while unique in fields:
            unique += "_"  # names that differed in what UTF-8 can't hold
        fields[unique] = pa.field(unique, kind)
        if kind in tried:
            continue
        tried.add(kind)
        try:
            pq.write_table(pa.schema([fields[unique]]).empty_table(), io.BytesIO())
        except pa.ArrowException as error:
            raise UsageError(
                f"column {unique} of type {kind} can't be written as Parquet ({one_line(error)}); write .jsonl"
            ) from error
    return pa.schema(list(fields.values()))


def json_line(row: dict[str, Any]) -> bytes:
    """Return one JSON line: UTF-8, no NaN or Infinity, integers and decimals in full."""
    cleaned = jsonable(row)
    text = json.dumps(cleaned, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: only its escape can be written
        return json.dumps(cleaned, allow_nan=False).encode("ascii") + b"\n"


def _json_text(value: Any) -> str:
    text = json.dumps(jsonable(value), ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(jsonable(value))
    return text


def _own_value(value: Any) -> Any:
    return text_of(value) if isinstance(value, str) else value
