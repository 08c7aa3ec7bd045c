"""Records of Parquet files and Hugging Face datasets, streamed as Arrow record batches of the columns that are needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, RowError

CHUNK_ROWS = 1024
CHUNK_BYTES = 16 << 20


def one_line(error: BaseException) -> str:
    """Return an error's first line, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def open_parquet(path: Path, name: str) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` that reads in small pieces.

    Raises:
        InputError: no Parquet file, or one with two columns of one name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        names = parquet.schema_arrow.names
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"can't read {name} as Parquet: {one_line(error)}") from error
    if len(set(names)) < len(names):
        raise InputError(f"{name} has two columns of one name: {', '.join(sorted(n for n in names if names.count(n) > 1))}")
    return parquet


def read_parquet(path: Path, name: str, columns: list[str] | None, limit: int | None) -> Iterator[Any]:
    """Yield the record batches of a Parquet file, at most `limit` rows.

    Rows of a broken row group come as a pair: how many they are, and their row error.

    Raises:
        InputError: as `open_parquet`.
    """
    import pyarrow as pa

    left = None if limit is None else limit
    with open_parquet(path, name) as parquet:
        present = None if columns is None else [c for c in parquet.schema_arrow.names if c in columns]
        for group in range(parquet.num_row_groups):
            if left == 0:
                return
            group_rows = parquet.metadata.row_group(group).num_rows
            rows = group_rows if left is None else min(left, group_rows)
            done = 0
            try:
                size = _batch_rows(parquet.metadata.row_group(group))
                for batch in parquet.iter_batches(batch_size=size, row_groups=[group], columns=present, use_threads=False):
                    batch = batch.slice(0, rows - done)
                    if present is not None:
                        batch = batch.select(present)
                    batch.validate(full=True)
                    yield batch
                    done += len(batch)
                    if done == rows:
                        break
                reason = "it ends too early"
            except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise InputError(f"can't read {name}: {error.strerror}") from error
                reason = one_line(error)
            if done < rows:
                what = f"{name} is broken in row group {group} after {done} of its rows, the others are lost: {reason}"
                yield rows - done, RowError("unreadable", what)
            if left is not None:
                left -= rows


def _batch_rows(group: Any) -> int:
    """Return how many rows of a group to read at once, so that a batch stays small however wide its rows."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES * group.num_rows // max(group.total_byte_size, 1)))


def open_dataset(path: str, config: str | None, split: str | None, *, on_disk: bool) -> Any:
    """Return a Hugging Face dataset's split: one saved to disk, or by name.

    Raises:
        InputError: there is none, it has several splits and none was named, or `datasets` is not installed.
    """
    name = f"hf:{path}"
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"{name} needs the package datasets: pip install datasets") from error
    datasets.disable_progress_bars()
    try:
        found = datasets.load_from_disk(path) if on_disk else datasets.load_dataset(path, config)
    except Exception as error:  # of many libraries' kinds: no network, no such name, a broken folder
        raise InputError(f"can't load the dataset {name}: {one_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        splits = list(found)
        if split is None and len(splits) > 1:
            raise InputError(f"{name} has the splits {', '.join(splits)}; name one: {name}:{splits[0]}")
        if split is not None and split not in found:
            raise InputError(f"{name} has no split {split}; it has {', '.join(splits)}")
        return found[split or splits[0]]
    if split is not None and str(found.split) != split:
        raise InputError(f"{name} is one data set without a split {split}")
    return found


def read_dataset(dataset: Any, name: str, columns: list[str] | None, limit: int | None) -> Iterator[Any]:
    """Yield a data set's record batches; see `read_parquet`."""
    import pyarrow as pa

    present = dataset.column_names if columns is None else [c for c in dataset.column_names if c in columns]
    rows = len(dataset) if limit is None else min(limit, len(dataset))
    done = 0
    try:
        if not present:
            while done < rows:  # Arrow tables without columns have no length in data sets
                size = min(CHUNK_ROWS, rows - done)
                yield pa.RecordBatch.from_struct_array(pa.array([{}] * size, pa.struct([])))
                done += size
            return
        for table in dataset.select_columns(present).with_format("arrow").iter(CHUNK_ROWS):
            for batch in table.combine_chunks().to_batches():
                if done < rows:
                    batch = batch.slice(0, rows - done)
                    yield batch
                    done += len(batch)
            if done == rows:
                return
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"can't read {name}: {one_line(error)}") from error


def to_rows(batch: Any) -> list[dict[str, Any]]:
    """Return a record batch as Python's values, exactly: nanosecond times, and times that Python's calendar doesn't have, as
    integers."""
    columns = [_to_list(batch.column(i)) for i in range(batch.num_columns)]
    names = batch.schema.names
    if not names:
        return [{} for _ in range(batch.num_rows)]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _to_list(array: Any) -> list[Any]:
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not _has_nanoseconds(array.type):
        try:
            return array.to_pylist()
        except (OverflowError, ValueError, pa.ArrowException):
            pass
    return [_to_value(array[i]) for i in range(len(array))]


def _has_nanoseconds(kind: Any) -> bool:
    return getattr(kind, "unit", None) == "ns" or any(_has_nanoseconds(kind.field(i).type) for i in range(kind.num_fields))


def _to_value(scalar: Any) -> Any:
    """Return one value, whose parts Python may not be able to hold."""
    import pyarrow as pa

    if not scalar.is_valid:
        return None
    kind = scalar.type
    if getattr(kind, "unit", None) == "ns":
        return scalar.value
    if pa.types.is_struct(kind):
        return {name: _to_value(member) for name, member in scalar.items()}
    if isinstance(scalar, pa.MapScalar):
        return [(_to_value(pair["key"]), _to_value(pair["value"])) for pair in scalar.values]
    if isinstance(scalar, pa.ListScalar):
        return [_to_value(member) for member in scalar.values]
    try:
        return scalar.as_py()
    except (OverflowError, ValueError, pa.ArrowException):
        return scalar.value
