"""`pagedgen merge`: the outputs of a job's shards become one."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedgen.jobs.merge import merge as merge_shards

from .output import stderr


def merge(
    shards: Annotated[list[str], typer.Argument(help="Outputs of `run --shard I/N`, all of them.", metavar="SHARDS...")],
    output: Annotated[str, typer.Option("--output", "-o", help="Where to write: .jsonl or .parquet, as the shards are.")],
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output.")] = False,
) -> None:
    """Join the outputs of a job's shards, in input order, and check that every row is there exactly once."""
    report = merge_shards(shards, output, overwrite=overwrite)
    stderr.print(
        f"{report.output}: {report.num_results:,} results of {report.num_shards} shards, {report.num_errors:,} of them errors",
        highlight=False,
        markup=False,
    )
