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

from .errors import OutputError
from .job_setup import Job
from .rows.assemble import Totals, assemble
from .rows.durable import WholeFile, telling, write_whole
from .rows.output_path import OutputPath
from .rows.parts import PartStore
from .rows.schema import OutputSchema, Result
from .rows.sinks import JsonlSink, OpenAISink, ParquetSink, Sink
from .rows.workspace import Workspace, manifest_path


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
    if output.path is None:
        with _stdout() as stdout:
            sink: Sink = OpenAISink(stdout, stdout, job.config.engine.model) if job.openai else JsonlSink(stdout, schema)
            yield _assemble(job, parts, sink, with_values=True)
        return
    path = output.path
    with telling(path), contextlib.ExitStack() as stack:
        via = workspace.via(path)
        main = WholeFile(path, via)
        stack.callback(main.abandon)
        errors = None
        if job.openai:
            errors = WholeFile(errors_path(path), via)
            stack.callback(errors.abandon)
            sink = OpenAISink(main.file, errors.file, job.config.engine.model)
        elif output.format == "parquet":
            sink = ParquetSink(main.file, schema, types)
        else:
            sink = JsonlSink(main.file, schema)
        stack.callback(sink.abandon)
        totals = _assemble(job, parts, sink, with_values=output.format != "parquet")
        facts = {"num_results": totals.num_results, "num_errors": totals.num_errors, "first_error": totals.first_error}
        manifest = {**job.manifest, "result": facts}
        sink.close(manifest)
        main.sync()
        yield totals
        if output.format == "jsonl":
            facts |= {"bytes": main.num_bytes, "hash": main.hexdigest}
            write_whole(manifest_path(path), [json.dumps(manifest, indent=1).encode(), b"\n"], via)
        if errors is not None:
            errors.sync()
            errors.place()
        main.place()


def errors_path(path: Path) -> Path:
    """Return where the failures of an OpenAI batch go."""
    return path.with_name(f"{path.stem}.errors{path.suffix}")


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
        import pyarrow.parquet as pq

        names = [field.name for field in fields(Result)]
        with pq.ParquetFile(path) as parquet:
            present = [name for name in names if name in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(batch_size=1024, columns=present):
                yield from batch.to_pylist()
        return
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)
