"""Where rows come from: files, globs, directories, data sets and stdin, as an ordered list of `Source`s with numbered records.

A row's index is its place among the *records* of all sources in order. A record that can't be read is a row all the same: it
carries the error in its place, so that nothing is dropped silently.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError, RowError
from . import columnar, text
from .columnar import CHUNK_BYTES, CHUNK_ROWS
from .durable import file_hash

_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_KINDS |= {".parquet": "parquet", ".pq": "parquet"}
_COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_MAGIC = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst"}
_HASHED_BYTES = 64 << 20  # one hash for so much of a file
KNOWN = ".jsonl, .ndjson, .json, .csv, .tsv (each also with .gz or .zst), .parquet, .pq"


@dataclass
class Row:
    """One record: its place among all, where it stands in its file, what it holds, or why it could not be read."""

    index: int
    position: int  # physical line (1-based) in text, row number (0-based) elsewhere
    values: dict[str, Any]
    error: RowError | None = None


@dataclass
class Chunk:
    """Consecutive rows of one source. `batch`: their columns as an Arrow record batch, where they came as one."""

    rows: list[Row]
    batch: Any = None


class Source:
    """One file or data set. Knows records, not prompts."""

    name: str
    path: Path | None

    def schema(self) -> Any:
        """Return the Arrow schema of a source that has one, else None."""
        return None

    def columns(self) -> list[str]:
        """Return the columns a source has even without a row."""
        return [] if self.schema() is None else self.schema().names

    def num_rows(self) -> int | None:
        """Return the number of rows where it is known without reading them."""
        return None

    def chunks(self, columns: list[str] | None = None, limit: int | None = None, values: bool = True) -> Iterator[Chunk]:
        """Yield the rows in order, numbered from 0, with only the named columns where the format can leave others out.

        Without `values` a columnar source's rows hold none beside their batch.
        """
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells this content from any other."""
        raise NotImplementedError

    def state(self) -> Any:
        """Return something that changes when the source does, at once."""
        if self.path is None:
            return None
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns, status.st_ino


class TextSource(Source):
    """A JSON lines, CSV or TSV file."""

    def __init__(self, path: Path, kind: str, compression: str | None, name: str | None = None):
        self.path: Path = path
        self.name = name or path.name
        self._kind = kind
        self._compression = compression

    def chunks(self, columns: list[str] | None = None, limit: int | None = None, values: bool = True) -> Iterator[Chunk]:
        if self._kind == "jsonl":
            records = text.read_jsonl(self.path, self.name, self._compression)
        else:
            records = text.read_csv(self.path, self.name, self._compression, "\t" if self._kind == "tsv" else ",")
        rows: list[Row] = []
        num_bytes = 0
        for index, (position, found, error, size) in enumerate(islice(records, limit)):
            rows.append(Row(index, position, found, error))
            num_bytes += size
            if len(rows) == CHUNK_ROWS or num_bytes >= CHUNK_BYTES:
                yield Chunk(rows)
                rows, num_bytes = [], 0
        if rows:
            yield Chunk(rows)

    def columns(self) -> list[str]:
        if self._kind == "jsonl":
            return []
        return text.csv_header(self.path, self.name, self._compression, "\t" if self._kind == "tsv" else ",")

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": self._kind, **_hashes(self.path)}


class ParquetSource(Source):
    """A Parquet file."""

    def __init__(self, path: Path):
        self.path: Path = path
        self.name = path.name

    @cached_property
    def _facts(self) -> tuple[Any, int]:
        """Its schema and number of rows."""
        with columnar.open_parquet(self.path, self.name) as parquet:
            metadata = parquet.metadata
            num_rows = sum(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            return parquet.schema_arrow.remove_metadata(), num_rows

    def schema(self) -> Any:
        return self._facts[0]

    def num_rows(self) -> int:
        return self._facts[1]

    def chunks(self, columns: list[str] | None = None, limit: int | None = None, values: bool = True) -> Iterator[Chunk]:
        yield from _from_batches(columnar.read_parquet(self.path, self.name, columns, limit), values)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "parquet", **_hashes(self.path)}


class DatasetSource(Source):
    """A split of a Hugging Face data set."""

    def __init__(self, name: str, load: Callable[[], Any]):
        self.name = name
        self.path = None
        self._load = load

    @cached_property
    def _dataset(self) -> Any:
        return self._load()

    def schema(self) -> Any:
        return self._dataset.features.arrow_schema.remove_metadata()

    def num_rows(self) -> int:
        return len(self._dataset)

    def chunks(self, columns: list[str] | None = None, limit: int | None = None, values: bool = True) -> Iterator[Chunk]:
        yield from _from_batches(columnar.read_dataset(self._dataset, self.name, columns, limit), values)

    def fingerprint(self) -> dict[str, Any]:
        files = [Path(entry["filename"]) for entry in self._dataset.cache_files]
        # Rows that were chosen or shuffled lie in no file; what `datasets` calls the result names them.
        made = None if files and self._dataset._indices is None else self._dataset._fingerprint
        return {"kind": "dataset", "rows": len(self._dataset), "made": made, "hashes": [file_hash(f) for f in files]}


def _hashes(path: Path) -> dict[str, Any]:
    """Return a file's size and the hashes of its pieces.

    Pieces are bytes, not row groups: asking a damaged Parquet footer where these begin can end the process inside Arrow.
    """
    size = path.stat().st_size
    starts = range(0, max(size, 1), _HASHED_BYTES)
    return {"bytes": size, "hashes": [file_hash(path, start, min(start + _HASHED_BYTES, size)) for start in starts]}


def _from_batches(batches: Iterable[Any], with_values: bool) -> Iterator[Chunk]:
    index = 0
    for batch in batches:
        if isinstance(batch, tuple):
            count, error = batch
            for start in range(0, count, CHUNK_ROWS):
                size = min(CHUNK_ROWS, count - start)
                yield Chunk([Row(index + i, index + i, {}, error) for i in range(size)])
                index += size
            continue
        rows = columnar.to_rows(batch) if with_values else [{} for _ in range(batch.num_rows)]
        yield Chunk([Row(index + i, index + i, values) for i, values in enumerate(rows)], batch)
        index += len(batch)


def expand_inputs(
    inputs: list[str], format: str = "auto", own_files: Collection[Path] = (), stdin: Path | None = None
) -> tuple[list[Source], list[str]]:
    """Turn files, globs, directories, `hf:` names and - into sources; return them, and what was passed over.

    Globs and directories come in sorted order, without a job's `own_files`. `stdin`: where what - stands for was copied to;
    without it - is left out.

    Raises:
        InputError: nothing there, or something that can't be read.
    """
    sources: list[Source] = []
    skipped: list[str] = []
    for name in inputs:
        path = Path(name)
        try:
            if name == "-":
                if stdin is not None:
                    sources.append(_stdin_source(stdin, format))
            elif name.startswith("hf:"):
                sources.append(_hub_source(name))
            elif path.is_dir():
                if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                    sources.append(_saved_source(name, name, None))
                else:
                    sources += _readable(path.iterdir(), f"{name} holds no file that can be read", format, own_files, skipped)
            elif path.is_file():
                sources.append(_file_source(path, format))
            elif path.exists():
                raise InputError(f"{name} is not a regular file")
            elif glob.has_magic(name):
                matches = map(Path, glob.glob(name, recursive=True))
                sources += _readable(matches, f"{name} matches no file that can be read", format, own_files, skipped)
            else:
                raise InputError(f"no such file: {name}")
        except OSError as error:
            raise InputError(f"can't read {name}: {error.strerror or error}") from error
    return sources, skipped


def _file_source(path: Path, format: str) -> Source:
    kind, compression = _kind_of(path)
    if format != "auto":
        kind = "jsonl" if format == "openai-batch" else format
    if kind is None:
        raise InputError(f"{path}: can't tell its format; known suffixes are {KNOWN}; or say --format")
    if kind == "parquet":
        if compression:
            raise InputError(f"{path}: Parquet files are compressed inside; unpack it first")
        return ParquetSource(path)
    return TextSource(path, kind, compression)


def _kind_of(path: Path) -> tuple[str | None, str | None]:
    suffixes = path.suffixes
    compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes = suffixes[:-1]
    return _KINDS.get(suffixes[-1]) if suffixes else None, compression


def _stdin_source(path: Path, format: str) -> Source:
    with path.open("rb") as file:
        start = file.read(4)
    if format == "parquet" or (format == "auto" and start == b"PAR1"):
        source = ParquetSource(path)
        source.name = "stdin"
        return source
    compression = next((c for magic, c in _MAGIC.items() if start.startswith(magic)), None)
    return TextSource(path, format if format in ("csv", "tsv") else "jsonl", compression, name="stdin")


def _hub_source(name: str) -> Source:
    parts = name.removeprefix("hf:").split(":")
    if len(parts) > 3 or not all(parts):
        raise InputError(f"{name}: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    split = parts[-1] if len(parts) > 1 else None
    config = parts[1] if len(parts) == 3 else None
    folder = Path(parts[0])
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved_source(name, parts[0], split)
    return DatasetSource(name, lambda: columnar.open_dataset(parts[0], config, split, on_disk=False))


def _saved_source(name: str, folder: str, split: str | None) -> Source:
    return DatasetSource(name, lambda: columnar.open_dataset(folder, None, split, on_disk=True))


def _readable(
    paths: Iterable[Path], otherwise: str, format: str, own_files: Collection[Path], skipped: list[str]
) -> list[Source]:
    """Return the files of a known kind in sorted order, each file once: a link can lead a glob to the same one many times."""
    found: dict[Path, Path] = {}
    for path in sorted(paths, reverse=True):
        if path.name.startswith(".") or not path.is_file() or path.resolve() in own_files:
            continue
        if _kind_of(path)[0] is None and format == "auto":
            skipped.append(str(path))
        else:
            found[path.resolve()] = path
    if not found:
        raise InputError(f"{otherwise}; known suffixes are {KNOWN}")
    return [_file_source(path, format) for path in sorted(found.values())]
