"""One job from files to file: the CLI's one entry to `jobs/`. Opens and checks everything, then runs or plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

from . import threads
from .config import EngineConfig, JobConfig
from .errors import InputError, PagedgenError, UsageError
from .jobs.output import output_schema
from .jobs.planning import tuned
from .jobs.report import JobReport, PlanReport, Progress
from .jobs.resume import begin, begun_block_size, check_side_files, clear_up, find_finished, own_files, refuse_inside
from .jobs.run import Run
from .jobs.setup import Job, estimate_plan, prepare
from .machine import without_collector
from .rows.output_path import check_output
from .rows.sinks import parquet_schema
from .rows.sources import Source, expand_inputs
from .rows.workspace import Workspace
from .stats import RunStats
from .stopping import Stopper


def run_job(config: JobConfig, progress: Progress, stopper: Stopper) -> JobReport:
    """Run one job, or go on with one that was stopped: every row of the input is in the output once, in order.

    Raises:
        UsageError: before weights load, when the job can't be run at all; OutputError: the output, or what belongs to it,
            can't be written. Finished rows are kept in `<output>.parts/`.
    """
    name = config.output
    assert name is not None
    stats = RunStats()
    sources, skipped = expand_inputs(config.inputs, config.format, own_files(config))
    output = check_output(name, [s.path for s in sources if s.path is not None])
    threads.prepare()
    if config.auto_block_size:
        config = with_block_size(config, progress, stopper)
    progress.phase("opening the model")
    with stats.timed("open"), without_collector():
        from .engine.opened import open_model

        opened = tuned(open_model(config.engine, chat_template=config.chat_template), config.engine)
    with opened_workspace(name, stopper) as workspace:
        if "-" in config.inputs:
            sources, skipped = _with_stdin(config, workspace)
        for path in skipped:
            progress.note(f"{path} is passed over: not a format that can be read")
        job = prepare(config, opened, sources, stats)
        if not opened.spec.eos_token_ids and not config.sampling.ignore_eos:
            progress.note("the model names no EOS token: rows end only by length or by --stop")
        refuse_inside(workspace, config, [s.path for s in sources if s.path is not None])
        schema = job.source.schema()
        if output.format == "parquet" and schema is not None:  # else its types are known only when all rows were read
            parquet_schema(output_schema(job, schema.names), {f.name: f.type for f in schema})
        finished = find_finished(job, output, workspace)
        job.may_replace = output.path is not None and output.path.exists()
        going_on = finished is not None or workspace.manifest() is not None
        inputs = [s.path for s in sources if s.path is not None]
        check_side_files(config, output, inputs, openai=job.openai, going_on=going_on)
        if finished is not None and not config.retry_errors:
            clear_up(job, workspace, progress)
            counts = {name: finished[name] for name in ("num_results", "num_errors", "first_error")}
            return JobReport(output=name, is_repeat=True, **counts)
        if finished is not None and job.openai:
            raise UsageError("--retry-errors can't go on from a finished OpenAI batch: run the requests that failed as a batch")
        begin(job, output, workspace, finished is not None, progress)
        stopper.keeps_results = output.path is not None
        return Run(job, workspace, output, progress, stopper).run()


@contextlib.contextmanager
def opened_workspace(output: str, stopper: Stopper) -> Iterator[Workspace]:
    """Open a job's directory. It goes again when the job turns out to be impossible before anything in it is worth keeping."""
    workspace = Workspace(output)
    stopper.on_abort = workspace.remove_temporary
    try:
        yield workspace
    except BaseException:
        with contextlib.suppress(PagedgenError):
            if workspace.manifest() is None or not workspace.has_parts():
                workspace.end()
        raise
    finally:
        workspace.close()
        stopper.on_abort = None


def _with_stdin(config: JobConfig, workspace: Workspace) -> tuple[list[Source], list[str]]:
    if config.inputs.count("-") > 1:
        raise UsageError("stdin (-) can be read only once")
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("the input is - but nothing is piped in")
    return expand_inputs(config.inputs, config.format, own_files(config), workspace.copy_stdin(sys.stdin.buffer))


def plan_only(
    config: JobConfig, progress: Progress, stopper: Stopper, device_memory_bytes: int | None = None, trace: str | None = None
) -> PlanReport:
    """Plan a job from config and tokenizer alone, and foretell its run; no weights are loaded.

    `trace`: a file of lengths that stands in the place of rows (`rows.traces`).

    Raises:
        UsageError: as `run_job`, and when the pool can't hold one row.
    """
    from .engine.opened import open_model
    from .jobs.planning import assumed_lengths, read_rows, report, trace_rows

    stats = RunStats()
    progress.phase("opening the model")
    threads.prepare()
    if config.auto_block_size:
        config = with_block_size(config, progress, stopper, device_memory_bytes)
    opened = open_model(config.engine, planning=device_memory_bytes is not None, chat_template=config.chat_template)
    opened = tuned(opened, config.engine)
    facts: dict[str, Any] = {"stats": stats, "progress": progress}
    if trace is not None:
        rows, outputs, too_long = trace_rows(opened, trace, config)
        lost: dict[str, Any] = dict(too_long)
        with contextlib.closing(rows):
            estimate = functools.partial(estimate_plan, opened, device_memory_bytes=device_memory_bytes, **lost)
            return report(opened, config, estimate, rows, lambda r, _: outputs[r.row_index], files=[trace], **facts)
    with opened_job(config, opened, stats, stopper) as job:
        rows, ended = read_rows(job, progress)
        not_run: dict[str, Any] = dict(ended)
        with contextlib.closing(rows):
            estimate = functools.partial(estimate_plan, opened, device_memory_bytes=device_memory_bytes, **not_run)
            files = [s.name if s.path is None else str(s.path) for s in job.source.sources]
            return report(opened, config, estimate, rows, assumed_lengths(config), files=files, **facts)


@contextlib.contextmanager
def opened_job(config: JobConfig, opened: Any, stats: RunStats, stopper: Stopper) -> Iterator[Job]:
    """Open a job's input to look at it; nothing of it is kept."""
    sources, _ = expand_inputs(config.inputs, config.format, own_files(config) if config.output is not None else ())
    with opened_workspace("-", stopper) as workspace:
        if "-" in config.inputs:
            sources, _ = _with_stdin(config, workspace)
        yield prepare(config, opened, sources, stats, planning=True)


def with_block_size(
    config: JobConfig, progress: Progress, stopper: Stopper, device_memory_bytes: int | None = None
) -> JobConfig:
    """Read a job's rows once and return it with the block size that suits them; an unfinished run of it keeps its own.

    Raises:
        UsageError: the rows come from stdin, which can't be read twice, or there are none.
    """
    from .engine.opened import open_model
    from .jobs.planning import read_rows, suited_block_size

    if not config.inputs or "-" in config.inputs:
        raise UsageError("--block-size auto reads the rows first: from files, not from stdin or a trace")
    size = None if config.output in (None, "-") or config.restart else begun_block_size(config.output or "")
    if size is not None:
        return dataclasses.replace(config, engine=dataclasses.replace(config.engine, block_size=size))
    opened = open_model(config.engine, planning=True, chat_template=config.chat_template)
    with opened_job(config, opened, RunStats(), stopper) as job:
        rows, _ = read_rows(job, progress, lambda: stopper.reason is not None)
        with contextlib.closing(rows):
            size = suited_block_size(opened, config, rows, device_memory_bytes)
    progress.note(f"blocks of {size} tokens suit these rows (--block-size auto)")
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, block_size=size))


def tune(config: EngineConfig, progress: Progress) -> tuple[Any, str]:
    """See `jobs.planning.tune`."""
    from .jobs.planning import tune as measure

    threads.prepare()
    return measure(config, progress)


def read_block_map(path: str) -> Any:
    """Read what `--block-map` wrote; see `engine.block_map.read_block_map`."""
    from .engine import block_map

    return block_map.read_block_map(path)
