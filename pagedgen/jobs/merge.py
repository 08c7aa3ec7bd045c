"""`pagedgen merge`: the outputs of a job's shards become the output of the whole job, every row checked to be there once."""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import InputError, UsageError
from ..rows.columnar import one_line
from ..rows.durable import read_lines
from ..rows.manifest import differences
from ..rows.output_path import OutputPath, check_output, check_writable
from ..rows.sinks import MANIFEST_KEY, abandon_writer, take
from ..rows.workspace import Workspace, finished_manifest
from .output import placed

Key = tuple[int, int, int]  # row, sample, turn
_BATCH_ROWS = 1024


@dataclass
class MergeReport:
    """What was merged."""

    output: str
    num_shards: int
    num_results: int
    num_errors: int


class _Checker:
    """Sees every key in order and refuses one that is missing or there twice."""

    def __init__(self, all_rows: bool):
        """`all_rows`: rows are numbered without gaps, as they are unless --sample chose them."""
        self._all_rows = all_rows
        self._last: Key = (-1, 0, 0)
        self.num_results = 0

    def see(self, key: Key) -> None:
        """Take note of the next key.

        Raises:
            InputError: it shows that a row is missing or there twice.
        """
        if key <= self._last:
            raise InputError(f"row {key[0]} (sample {key[1]}, turn {key[2]}) is there twice, or a shard is out of order")
        if self._all_rows and key[0] > self._last[0] + 1:
            raise InputError(f"row {self._last[0] + 1} is in no shard")
        self._last = key
        self.num_results += 1


def merge(shards: list[str], output: str, *, overwrite: bool) -> MergeReport:
    """Join the finished outputs of all shards of a job into one, in input order; memory does not grow with the rows.

    Raises:
        InputError: shards that aren't whole, don't belong together, or lack or repeat a row; OutputError: it can't be written.
    """
    given = [Path(shard) for shard in shards]
    paths = [path for path in given if path not in {errors_of(other) for other in given}]  # as a glob takes them
    checked = check_output(output, paths)
    if checked.path is None:
        raise UsageError("--output - can't be merged to; name a file")
    manifest, facts = _joined_manifest(paths)
    if any(path.suffix != checked.path.suffix for path in paths):
        raise UsageError(f"--output {output}: shards and output must have one suffix")
    openai = manifest["prompts"]["format"] == "openai-batch"
    written = [("--output", checked.path)] + ([("the failures' file", checked.errors)] if openai else [])
    beside = [each for path in paths for each in (path, errors_of(path))]
    for what, path in written:
        check_writable(str(path), what, overwrite=overwrite, inputs=beside)
    checker = _Checker(all_rows=manifest["rows"]["sample"] is None)
    document = {**manifest, "result": facts}
    with contextlib.closing(Workspace(output)) as workspace:
        if workspace.manifest() is not None:
            raise UsageError(f"{workspace.directory} holds an unfinished job; finish it or give another --output")
        replace = checked.path.exists()
        with placed(checked, workspace, document, with_errors=openai, replace=replace) as (file, errors_file):
            if checked.format == "parquet":
                import pyarrow as pa

                try:
                    _merge_parquet(paths, file, document, checker)
                except (pa.ArrowException, EOFError) as error:
                    raise InputError(f"a shard is damaged: {one_line(error)}") from error
                except OSError as error:
                    if error.errno is not None:
                        raise
                    raise InputError(f"a shard is damaged: {one_line(error)}") from error
            else:
                _merge_lines(paths, file, errors_file, checker, openai=openai)
            expected = facts["num_rows"] if openai else facts["num_results"]
            if checker.num_results != expected:
                raise InputError(f"the shards have {checker.num_results} results where they should have {expected}")
        workspace.end()
    return MergeReport(output, len(paths), facts["num_results"], facts["num_errors"])


def errors_of(path: Path) -> Path:
    """Return where a shard's failures lie, if it is one of an OpenAI batch."""
    errors = OutputPath(str(path), "jsonl").errors
    assert errors is not None
    return errors


def _merge_lines(paths: list[Path], file: IO[bytes], errors_file: IO[bytes], checker: _Checker, *, openai: bool) -> None:
    streams = [_openai_lines(path, failed=False) if openai else _jsonl_lines(path) for path in paths]
    if openai:  # a row is in one of the two files, so the lines of both are checked in one order
        streams += [_openai_lines(errors_of(path), failed=True) for path in paths]
    for key, failed, line in heapq.merge(*streams):
        checker.see(key)
        (errors_file if failed else file).write(line + b"\n")


def _joined_manifest(paths: list[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest of the whole job and what is known of its results."""
    manifests = []
    for path in paths:
        if not path.is_file():
            raise InputError(f"no such file: {path}")
        found = finished_manifest(path)
        if found is None:
            raise InputError(f"{path} is no whole output of `pagedgen run` (its manifest is missing or doesn't fit it)")
        manifests.append(found)
    places = [manifest["rows"].pop("shard") for manifest in manifests]
    results = [manifest.pop("result") for manifest in manifests]
    for path, manifest in zip(paths, manifests, strict=True):
        different = differences(manifests[0], manifest)
        if different:
            raise InputError(f"{path} is of another job than {paths[0]}: {different[0]}")
    if any(place is None for place in places):
        raise InputError(f"{paths[places.index(None)]} is no shard: it was made without --shard")
    of = {n for _, n in places}
    if len(of) > 1:
        raise InputError(f"the shards are of different divisions: {', '.join(f'{i}/{n}' for i, n in places)}")
    n = of.pop()
    there = sorted(i for i, _ in places)
    twice = next((i for i in there if there.count(i) > 1), None)
    if twice is not None:
        raise InputError(f"shard {twice}/{n} is given twice")
    missing = sorted(set(range(n)) - set(there))
    if missing:
        raise InputError(f"shard {missing[0]}/{n} is missing" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""))
    manifests[0]["rows"]["shard"] = None
    facts = {name: sum(result[name] for result in results) for name in ("num_rows", "num_results", "num_errors")}
    firsts = [result["first_error"] for result in results if result["first_error"]]
    return manifests[0], {**facts, "first_error": min(firsts, key=_row_of, default=None)}


def _row_of(error: str) -> int:
    """Return the number in "row 17: …"."""
    digits = "".join(c for c in error.partition(":")[0] if c.isdecimal())
    return int(digits or 0)


def _jsonl_lines(path: Path) -> Iterator[tuple[Key, bool, bytes]]:
    for line in read_lines(path):
        row = json.loads(line)
        yield (row["row_index"], row["sample_index"], row["turn_index"]), False, line


def _openai_lines(path: Path, *, failed: bool) -> Iterator[tuple[Key, bool, bytes]]:
    for line in read_lines(path):
        try:
            row = int(json.loads(line)["id"].rpartition("_")[2])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} holds a line that is no answer of a batch") from error
        yield (row, 0, 0), failed, line


def _merge_parquet(paths: list[Path], file: Any, manifest: dict[str, Any], checker: _Checker) -> None:
    """Merge sorted Parquet files: what all of them have passed is joined, sorted and written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(pq.ParquetFile(path, page_checksum_verification=True)) for path in paths]
        schema = opened[0].schema_arrow.remove_metadata()
        streams = [parquet.iter_batches(batch_size=_BATCH_ROWS) for parquet in opened]
        pending = [schema.empty_table() for _ in paths]
        open_streams = set(range(len(paths)))
        writer = pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True)
        stack.callback(abandon_writer, writer)
        while open_streams or any(len(table) for table in pending):
            # A row's results may go on in the next batch, so a shard is passed up to its last row, which stays.
            ends = {i: pending[i].column("row_index")[-1].as_py() if len(pending[i]) else -1 for i in open_streams}
            cutoff = min(ends.values(), default=2**63 - 1)
            taken = []
            for i, table in enumerate(pending):
                rows = table.column("row_index").to_numpy()
                count = int((rows < cutoff).sum()) if open_streams else len(rows)
                taken.append(table.slice(0, count))
                pending[i] = table.slice(count)
            _write_sorted(pa.concat_tables(taken), writer, checker)
            for i in [i for i, end in ends.items() if end == cutoff]:
                batch = next(streams[i], None)
                if batch is None:
                    open_streams.discard(i)
                else:
                    more = pa.Table.from_batches([batch]).replace_schema_metadata(None)
                    pending[i] = pa.concat_tables([pending[i], more])
        writer.add_key_value_metadata({MANIFEST_KEY: json.dumps(manifest, sort_keys=True)})
        writer.close()


def _write_sorted(table: Any, writer: Any, checker: _Checker) -> None:
    import pyarrow as pa

    if not len(table):
        return
    keys = zip(*(table.column(name).to_pylist() for name in ("row_index", "sample_index", "turn_index")), strict=True)
    ordered = sorted((key, place) for place, key in enumerate(keys))
    for key, _ in ordered:
        checker.see(key)
    places = pa.array([place for _, place in ordered], pa.int64())
    columns = [take(column.combine_chunks(), places) for column in table.columns]
    writer.write_table(pa.Table.from_arrays(columns, schema=table.schema))
