"""A job's whole input: all sources one after the other, and which of their rows the job takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..errors import InputError
from .columnar import CHUNK_ROWS, one_line
from .schema import jsonable
from .sources import Chunk, Source


def _as_text(chunk: Chunk) -> Chunk:
    if chunk.batch is not None:
        for row in chunk.rows:
            row.values = jsonable(row.values)
    return Chunk(chunk.rows)


@dataclass(frozen=True)
class Selection:
    """Which rows of the input a job takes: `indices`, when given; of these every `shard`th. Rows keep their index."""

    indices: frozenset[int] | None = None
    shard: tuple[int, int] | None = None  # (i, n): rows whose index leaves i when divided by n

    def takes(self, index: int) -> bool:
        """Return True when a row is taken."""
        if self.shard is not None and index % self.shard[1] != self.shard[0]:
            return False
        return self.indices is None or index in self.indices


class Input:
    """A job's whole input: the sources one after the other."""

    def __init__(self, sources: list[Source], limit: int | None = None):
        self.sources = sources
        self.extents: dict[int, dict[str, Any]] = {}  # of the sources read so far, where their rows are among all
        self._limit = limit
        self._state = self._current_state()

    def chunks(self, columns: list[str] | None = None, *, values: bool = True) -> Iterator[Chunk]:
        """Yield all rows in order with their index among all; see `Source.chunks`.

        A columnar source among text sources gives what JSON lines of it would hold.

        Raises:
            InputError: a source can't be read.
        """
        first = 0
        columnar = self.schema() is not None
        for place, source in enumerate(self.sources):
            left = None if self._limit is None else self._limit - first
            if left == 0:
                return
            count = 0
            for chunk in source.chunks(columns, left, values):
                for row in chunk.rows:
                    row.index += first
                count += len(chunk.rows)
                yield chunk if columnar else _as_text(chunk)
            self.extents[place] = {"name": source.name, "first_row_index": first, "num_rows": count}
            first += count

    def schema(self) -> Any:
        """Return the unified Arrow schema when every source has one, else None.

        Raises:
            InputError: two sources give a column different types.
        """
        import pyarrow as pa

        schemas = [source.schema() for source in self.sources]
        if not schemas or any(schema is None for schema in schemas):
            return None
        try:
            return pa.unify_schemas(schemas)
        except pa.ArrowException as error:
            raise InputError(f"the files have different columns: {one_line(error)}") from error

    def sample_columns(self) -> list[str]:
        """Return the columns a user could name: those of schemas and headers, and the keys of each text file's first rows."""
        names: dict[str, None] = {}
        for source in self.sources:
            names.update(dict.fromkeys(source.columns()))
            if source.schema() is None:
                for chunk in islice(source.chunks(limit=CHUNK_ROWS), 1):
                    for row in chunk.rows:
                        names.update(dict.fromkeys(row.values))
        return list(names)

    def count(self) -> int:
        """Return the number of rows, read where it must be."""
        total = 0
        for source in self.sources:
            known = source.num_rows()
            total += sum(len(c.rows) for c in source.chunks([], values=False)) if known is None else known
        return total if self._limit is None else min(total, self._limit)

    def fingerprint(self) -> list[dict[str, Any]]:
        """Return each source's; names don't count."""
        try:
            return [json.loads(json.dumps(source.fingerprint())) for source in self.sources]
        except OSError as error:
            raise InputError(f"can't read {error.filename}: {error.strerror}") from error

    def changed(self) -> bool:
        """Return True when a source may have changed since the start; its content tells."""
        return self._current_state() != self._state

    def _current_state(self) -> list[Any]:
        try:
            return [source.state() for source in self.sources]
        except OSError:
            return []
