"""One run of a job: from its rows to its output, or to where it was stopped."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

from ..errors import InputError, OutputError
from ..request import Request
from ..rows.durable import write_whole
from ..rows.output_path import OutputPath
from ..rows.parts import PartStore
from ..rows.schema import Result
from ..rows.workspace import Workspace
from ..stopping import Stopper
from .answers import Answers
from .feed import RowFeed
from .output import write_output
from .reader import Group
from .report import COMPILING, JobReport, Progress
from .resume import stats_path
from .setup import Job, estimate_plan


class Run:
    """Reads ahead, generates, keeps what is finished, and writes the output when all of it is."""

    def __init__(self, job: Job, workspace: Workspace, output: OutputPath, progress: Progress, stopper: Stopper):
        self._job = job
        self._config = job.config
        self._workspace = workspace
        self._output = output
        self._stats = job.stats
        self._progress = progress
        self._stopper = stopper
        self._parts = PartStore(workspace.directory, flush_s=job.config.flush_s)
        self._num_before = self._parts.count()
        self._reader = job.reader(self._stored())
        self._answers = Answers(job, self._keep)
        self._num_results = 0  # that the rows read so far have in the end
        self._num_to_generate = 0
        self._num_kept = 0  # in this run
        self._not_run: Counter[str] = Counter()
        self._stopping_error: str | None = None
        self._document: dict[str, Any] = {}

    def run(self) -> JobReport:
        """Run until the output is written, or the run is stopped."""
        from ..engine.feed import Control

        progress = self._progress
        progress.phase("reading prompts")
        feed = RowFeed(self._reader.groups(), self._take_in)
        rows, plan, completed = None, None, True
        try:

            def stop() -> bool:
                self._parts.flush_if_due()  # rows that ended without the engine
                return self._stopper.control() is not Control.GO_ON

            if self._job.opened.precompilation is not None:
                progress.note(COMPILING)
            rows, lengths = self._read_ahead(feed, stop)
            if self._stats.rows_reused:
                progress.note(f"{self._stats.rows_reused:,} results of an earlier run are kept")
            if self._stopper.reason is not None:
                completed = False
            elif not rows.exhausted:
                plan, completed = self._generate(rows, lengths, feed)
            else:
                progress.note("there is nothing to generate, so the weights are not loaded")
        except OutputError:
            raise
        except BaseException:
            with contextlib.suppress(Exception):
                self._parts.flush()  # what was finished before it went wrong
            raise
        finally:
            feed.close()
            if rows is not None:
                rows.close()
        self._tell_of_prompts()
        self._parts.flush()
        self._check_input()
        if not completed or self._stopping_error is not None:
            return self._stopped(plan)
        return self._finish(plan)

    def _stored(self) -> Iterator[Result]:
        """Yield the results of earlier runs that are kept; with --retry-errors not those of samples that failed."""
        for _, group in groupby(self._parts.results(), key=lambda r: (r.row_index, r.sample_index)):
            results = list(group)
            if not (self._config.retry_errors and any(r.finish_reason == "error" for r in results)):
                yield from results

    def _take_in(self, group: Group) -> list[Request]:
        """Keep what of a group has ended, and return its requests. Runs in this thread, between two steps."""
        self._stats.rows_reused += group.num_reused
        self._num_results += group.num_results
        self._not_run += group.not_run()
        self._num_to_generate += self._answers.expect(group)
        for results in group.ended:
            self._keep(results)
        return group.requests

    def _keep(self, results: list[Result]) -> None:
        """Keep results that belong together. With --on-error stop an error ends the run instead, and is tried again."""
        failed = next((r for r in results if r.finish_reason == "error"), None)
        if failed is not None and self._config.on_error == "stop":
            if self._stopping_error is None:
                self._stopping_error = f"row {failed.row_index}: {failed.error}"
                self._stopper.stop("an error in a row (--on-error stop)")
            return
        self._parts.add(results)
        self._num_kept += len(results)
        self._stats.rows.update(r.finish_reason for r in results)
        self._stats.row_errors.update(r.error_code for r in results if r.error_code is not None)

    def _tell_of_prompts(self) -> None:
        tokenizer, note = self._reader.tokenizer, self._progress.note
        if getattr(self._job.opened.tokenizer, "chat_template", None) and tokenizer.num_plain:
            note(
                f"{tokenizer.num_plain:,} prompts are plain text and are continued as they are; to have the model answer "
                "as in a chat, give rows of messages, or --as-chat"
            )
        for extent in self._job.source.extents.values():
            if not extent["num_rows"]:
                note(f"{extent['name']} has no rows")
        if tokenizer.num_bos_kept:
            note(f"{tokenizer.num_bos_kept} prompts begin with the BOS text themselves; no second one was added")

    def _check_input(self) -> None:
        """Refuse to go on when the input is not what it was at the start.

        Raises:
            InputError: its content changed; no run may take these rows for good.
        """
        if not self._job.source.changed() or self._job.source.fingerprint() == self._job.manifest["input"]:
            return
        self._workspace.spoil()
        raise InputError("the input changed while the job ran, so its rows are of no use; --restart makes them anew")

    def _read_ahead(self, feed: RowFeed, stop: Callable[[], bool]) -> tuple[Any, Any]:
        """Read rows before the weights load: all, to plan their order, or as far as the engine looks ahead without a plan.

        Return what the engine is to take rows from, and the lengths of those that were read.
        """
        from ..engine.feed import LOOKAHEAD_ROWS, LOOKAHEAD_TOKENS
        from ..engine.order import PlannedFeed
        from ..engine.planner import RequestLengths

        engine = self._job.opened.config
        if engine.sort != "prefix":
            feed.look_ahead(LOOKAHEAD_ROWS, LOOKAHEAD_TOKENS, stop)
            return feed, RequestLengths(feed.held)
        planned = PlannedFeed(feed, engine.block_size, directory=str(self._workspace.directory))
        try:
            planned.read(stop)
        except BaseException:
            planned.close()
            raise
        return planned, planned.lengths

    def _generate(self, rows: Any, lengths: Any, feed: RowFeed) -> tuple[Any, bool]:
        """Load the weights and answer requests; return the plan and whether all were answered before the run was stopped.

        Raises:
            MemoryPlanError: the pool can't hold one row; found before the weights load where the estimate tells.
        """
        config, opened, progress = self._config, self._job.opened, self._progress
        # That no row fits is a row error where others fitted, now or in an earlier run or another shard.
        all_rows = feed.at_end and not self._num_before and config.shard is None
        how: dict[str, Any] = {"covers_all_rows": feed.at_end, "must_fit": all_rows, **self._not_run}
        estimate_plan(opened, lengths, **how)
        progress.phase(f"loading {config.engine.model} ({opened.spec.dtype}, {opened.config.device})")
        from ..engine.engine import Engine

        engine = Engine(opened, self._stats)
        plan = engine.plan(lengths, **how)
        shown = [self._num_to_generate if feed.at_end else None]
        progress.rows(shown[0])

        def on_step(report: Any) -> None:
            total = self._num_to_generate if feed.at_end else None
            if shown[0] != total:
                shown[0] = total
                progress.rows(total)
            progress.step(report)

        def control() -> Any:
            self._parts.flush_if_due()
            return self._stopper.control()

        with contextlib.ExitStack() as stack:
            block_map = None
            if config.block_map is not None:
                from ..engine.block_map import BlockMapWriter

                block_map = stack.enter_context(BlockMapWriter(config.block_map, config.block_map_every, progress.note))
            stack.enter_context(self._stopper.watched())
            completed = engine.generate(
                rows,
                plan,
                on_finished=self._answers.on_finished,
                on_error=self._answers.on_error,
                on_step=on_step,
                on_note=progress.note,
                control=control,
                block_map=block_map,
            )
        return plan, completed

    def _stopped(self, plan: Any) -> JobReport:
        """End a run before its rows did: what is finished is in the parts. The statistics count what this run kept."""
        self._stats.stopped_by = self._stopper.reason
        self._write_stats(plan)
        return JobReport(
            self._document,
            self._output.name,
            stats_path(self._config),
            num_results=self._num_before + self._num_kept,
            stopped_by=self._stopper.reason,
            stopping_error=self._stopping_error,
        )

    def _finish(self, plan: Any) -> JobReport:
        """Assemble the output, write the statistics, and put the output in its place."""
        self._progress.phase("writing")
        seen, schema, stats = self._reader.column_types, self._job.source.schema(), self._stats
        if seen is not None and not any(extent["num_rows"] for extent in self._job.source.extents.values()):
            raise InputError(f"the input has no rows: {', '.join(self._config.inputs)}")
        types = seen.arrow_types() if seen is not None else {f.name: f.type for f in schema}
        begin = perf_counter()
        with write_output(self._job, self._output, self._workspace, self._parts, types) as totals:
            assert totals.num_results == self._num_results, f"{totals.num_results} results of {self._num_results}"
            self._check_input()  # it was read once more
            stats.add_time("write", perf_counter() - begin)
            stats.rows, stats.row_errors = totals.finish_reasons, totals.row_errors
            stats.prompt_tokens, stats.output_tokens = totals.prompt_tokens, totals.output_tokens
            stats.packed_tokens, stats.padded_tokens = totals.packed_tokens, totals.padded_tokens
            self._write_stats(plan)
        if self._parts.num_damaged_lines:
            self._progress.note(f"{self._parts.num_damaged_lines} kept results were damaged and have been made again")
        self._workspace.end()
        return JobReport(
            self._document,
            self._output.name,
            stats_path(self._config),
            totals.num_results,
            totals.num_errors,
            totals.first_error,
        )

    def _write_stats(self, plan: Any) -> None:
        opened = self._job.opened
        document = self._stats.to_dict({**self._config.to_dict(), "engine": opened.config.to_dict()})
        document["plan"] = None if plan is None else plan.to_dict()
        document["model"] = opened.spec.to_dict()
        document["inputs"] = list(self._job.source.extents.values())
        self._document = document
        name = stats_path(self._config)
        if name is not None:
            path = Path(name)
            write_whole(path, [json.dumps(document, indent=2).encode(), b"\n"], self._workspace.via(path))
