"""From parts to the output: assembled, with its manifest, and put in its place whole. And back, to retry what failed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from ..errors import InputError, OutputError
from ..rows.assemble import Totals, assemble
from ..rows.columnar import one_line
from ..rows.durable import WholeFile, telling, write_whole
from ..rows.output_path import OutputPath
from ..rows.parts import PartStore
from ..rows.schema import OutputSchema, Result
from ..rows.sinks import JsonlSink, OpenAISink, ParquetSink, Sink
from ..rows.workspace import Workspace
from .setup import Job


def output_schema(job: Job, columns: list[str]) -> OutputSchema:
    """Return the columns of a job's output, given the input's."""
    return OutputSchema(tuple(columns), job.id_column, job.config.token_ids, job.config.cached_tokens)


@contextlib.contextmanager
def write_output(
    job: Job, output: OutputPath, workspace: Workspace, parts: PartStore, types: dict[str, Any]
) -> Iterator[Totals]:
    """Assemble the output; it is put in its place when the block ends without an exception.

    `types`: Arrow types of the input's columns, None for one that is written as JSON text.

    Raises:
        OutputError: it can't be written; what was at its place is untouched then.
    """
    schema = output_schema(job, list(types))
    facts: dict[str, Any] = {}
    manifest = {**job.manifest, "result": facts}
    if output.path is None:
        with _stdout() as stdout:
            sink: Sink = OpenAISink(stdout, stdout, job.config.engine.model) if job.openai else JsonlSink(stdout, schema)
            yield _assemble(job, parts, sink, with_values=True)
        return
    with placed(output, workspace, manifest, with_errors=job.openai, replace=job.may_replace) as (file, errors_file):
        if job.openai:
            sink = OpenAISink(file, errors_file, job.config.engine.model)
        elif output.format == "parquet":
            sink = ParquetSink(file, schema, types)
        else:
            sink = JsonlSink(file, schema)
        try:
            columnar = output.format == "parquet" and job.source.schema() is not None
            totals = _assemble(job, parts, sink, with_values=not columnar)
            facts |= {name: getattr(totals, name) for name in ("num_rows", "num_results", "num_errors", "first_error")}
            sink.close(manifest)
        finally:
            sink.abandon()
        yield totals


@contextlib.contextmanager
def placed(
    output: OutputPath, workspace: Workspace, manifest: dict[str, Any], *, with_errors: bool, replace: bool
) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a new output; it is put in its place, and a JSONL output's manifest beside it, when the block ends without an
    exception. The second file is for failures, and is the first where there is none. `replace`: a file may be there.

    Raises:
        OutputError: it can't be written; what was at its place is untouched then.
    """
    assert output.path is not None and output.errors is not None
    via = workspace.via(output.path)
    with telling(output.path), contextlib.ExitStack() as stack:
        files = [WholeFile(path, via) for path in ([output.path, output.errors] if with_errors else [output.path])]
        for file in files:
            stack.callback(file.abandon)
        yield files[0].file, files[-1].file
        for file in files:
            file.sync()
        if not replace and output.path.exists():
            raise OutputError(f"can't write {output.path}: a file has appeared there meanwhile")
        if output.manifest is not None:
            proof: dict[str, Any] = {"bytes": files[0].num_bytes, "hash": files[0].hexdigest}
            if with_errors:
                proof |= {"errors_hash": files[1].hexdigest}
            document = {**manifest, "result": {**manifest["result"], **proof}}
            write_whole(output.manifest, [json.dumps(document, indent=1).encode(), b"\n"], via)
        for file in reversed(files):
            file.place()


def _assemble(job: Job, parts: PartStore, sink: Sink, *, with_values: bool) -> Totals:
    return assemble(
        job.source,
        job.selection,
        parts.results(),
        sink,
        batch_rows=job.opened.config.max_num_seqs,
        with_values=with_values,
    )


@contextlib.contextmanager
def _stdout() -> Iterator[IO[bytes]]:
    """Yield stdout's bytes; flush them at the end.

    Raises:
        OutputError: it is closed or full.
    """
    if sys.stdout is None:
        raise OutputError("can't write to stdout: it is closed")
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        # What is still buffered can't be written; without this Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = "it was closed" if isinstance(error, BrokenPipeError) else f"{error.strerror} (errno {error.errno})"
        raise OutputError(f"can't write all rows to stdout: {reason}") from error


def import_finished(path: Path, parts: PartStore) -> None:
    """Take the results of a finished output's samples that did not fail up as parts, so that only the others are made again."""
    own = {field.name for field in fields(Result)}
    results = (Result(**{k: v for k, v in row.items() if k in own and v is not None}) for row in _output_rows(path))
    for _, group in groupby(results, key=lambda r: (r.row_index, r.sample_index)):
        sample = list(group)
        if not any(r.finish_reason == "error" for r in sample):
            parts.add(sample)
    parts.flush()


def _output_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = [field.name for field in fields(Result)]
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
                present = [name for name in names if name in parquet.schema_arrow.names]
                for batch in parquet.iter_batches(batch_size=1024, columns=present):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"can't read {path}: {one_line(error)}; --overwrite makes it anew") from error
        return
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)
