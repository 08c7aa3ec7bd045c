"""One job from files to file: the CLI's one entry. Reads ahead, plans, generates, keeps what is finished, assembles, counts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from . import threads
from .config import JobConfig
from .errors import EXIT_OK, EXIT_ROW_ERRORS, EXIT_STOPPED, InputError, RowError, UsageError
from .job_output import import_finished, output_schema, write_output
from .job_reader import Group, RowFeed
from .job_setup import Job, cpu_name, prepare
from .request import Request, Sequence
from .rows.durable import write_whole
from .rows.manifest import differences
from .rows.output_path import OutputPath, check_output, check_writable
from .rows.parts import PartStore
from .rows.schema import Result
from .rows.sinks import parquet_schema
from .rows.sources import expand_inputs
from .rows.workspace import Workspace, finished_manifest
from .stats import RunStats
from .stopping import Stopper


class Progress(Protocol):
    """What a job tells while it runs; the CLI shows it."""

    def phase(self, text: str) -> None:
        """A new phase has begun."""

    def rows(self, total: int | None) -> None:
        """Generation begins, or more is known: there are so many answers to generate; None while rows are still being read."""

    def step(self, report: Any) -> None:
        """A step has ended (`engine.generation.StepReport`)."""

    def note(self, text: str) -> None:
        """Something the user should know that is no error."""


@dataclass
class JobReport:
    """What a job hands back. `stopped_by`: why it ended before its rows did; `is_repeat`: its output was there already."""

    stats: dict[str, Any] = field(default_factory=dict)
    output: str = "-"
    stats_path: str | None = None
    num_results: int = 0
    num_errors: int = 0
    first_error: str | None = None
    stopped_by: str | None = None
    stopping_error: str | None = None
    is_repeat: bool = False

    def exit_code(self, max_error_rate: float) -> int:
        """Return the documented exit code, when no more than this share of the results may be errors. All of them never may."""
        if self.stopping_error is not None:
            return EXIT_ROW_ERRORS
        if self.stopped_by is not None:
            return EXIT_STOPPED
        too_many = self.num_errors > max_error_rate * self.num_results or 0 < self.num_results == self.num_errors
        return EXIT_ROW_ERRORS if too_many else EXIT_OK


@dataclass
class PlanReport:
    """What `plan` hands back: the plan's numbers and what they were made from."""

    plan: dict[str, Any]
    model: dict[str, Any]
    config: dict[str, Any]
    max_tokens: int
    memory_source: str
    files: list[str]


def run_job(config: JobConfig, progress: Progress, stopper: Stopper) -> JobReport:
    """Run one job, or go on with one that was stopped: every row of the input is in the output once, in order.

    Raises:
        UsageError: before weights load, when the job can't be run at all; OutputError: the output, or what belongs to it,
            can't be written. Finished rows are kept in `<output>.parts/`.
    """
    assert config.output is not None
    stats = RunStats()
    sources, skipped = expand_inputs([i for i in config.inputs if i != "-"], config.format)
    inputs = [s.path for s in sources if s.path is not None]
    output = check_output(config.output, inputs)
    progress.phase("opening the model")
    threads.prepare()
    from .engine.opened import open_model

    with stats.timed("open"):
        opened = open_model(config.engine, chat_template=config.chat_template)
    with _workspace(config.output, stopper) as workspace:
        if "-" in config.inputs:
            sources, skipped = _with_stdin(config, workspace)
        for path in skipped:
            progress.note(f"{path} is passed over: not a format that can be read")
        job = prepare(config, opened, sources, stats)
        if not opened.spec.eos_token_ids and not config.sampling.ignore_eos:
            progress.note("the model names no EOS token: rows end only by length or by --stop")
        schema = job.source.schema()
        if output.format == "parquet" and schema is not None:  # else its types are known only when all rows were read
            parquet_schema(output_schema(job, schema.names), {f.name: f.type for f in schema})
        finished = _finished(job)
        stats_path = _check_side_files(config, inputs, going_on=finished is not None or workspace.manifest() is not None)
        if finished is not None and not config.retry_errors:
            workspace.end()  # what a run that ended between writing and clearing up left behind
            facts = finished["result"]
            counts = {name: facts[name] for name in ("num_results", "num_errors", "first_error")}
            return JobReport(output=config.output, is_repeat=True, **counts)
        _begin(job, workspace, finished is not None, progress)
        return _Run(job, workspace, output, stats, stats_path, progress, stopper).run()


@contextlib.contextmanager
def _workspace(output: str, stopper: Stopper) -> Iterator[Workspace]:
    """Open a job's directory. It goes again when the job turns out to be impossible before anything in it is worth keeping."""
    workspace = Workspace(output)
    stopper.on_abort = workspace.remove_temporary
    try:
        yield workspace
    except UsageError:
        if workspace.manifest() is None or not workspace.has_parts():
            workspace.end()
        raise
    finally:
        workspace.close()
        stopper.on_abort = None


def _with_stdin(config: JobConfig, workspace: Workspace) -> tuple[list[Any], list[str]]:
    if config.inputs.count("-") > 1:
        raise UsageError("stdin (-) can be read only once")
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("the input is - but nothing is piped in")
    return expand_inputs(config.inputs, config.format, workspace.copy_stdin(sys.stdin.buffer))


def _finished(job: Job) -> dict[str, Any] | None:
    """Return the manifest of this job's output when it is there and whole.

    Raises:
        UsageError: another file is at its place and may not be replaced.
    """
    config = job.config
    assert config.output is not None
    path = Path(config.output)
    if config.output == "-" or config.overwrite or not path.exists():
        return None
    there = finished_manifest(path)
    if there is None:
        raise UsageError(f"--output {path} exists; pass --overwrite to replace it")
    different = differences({k: v for k, v in there.items() if k != "result"}, job.manifest)
    if different:
        raise UsageError(
            f"--output {path} exists and was made by another job: {_some(different)}; pass --overwrite to replace it"
        )
    return there


def _begin(job: Job, workspace: Workspace, from_output: bool, progress: Progress) -> None:
    """Take up what an earlier run of the same job left in the workspace, or begin.

    Raises:
        UsageError: it is another job's.
    """
    config = job.config
    before = workspace.manifest()
    if before is not None and not config.restart:
        different = differences(before["job"], job.manifest)
        if different and workspace.has_parts():
            raise UsageError(
                f"{workspace.directory} holds a job that was begun otherwise: {_some(different)}. Give the same settings to go "
                "on with it, --restart to throw its rows away, or another --output"
            )
        if not different:
            if before["made_on"] != cpu_name():
                progress.note(f"this job was begun on another machine ({before['made_on']}); the last bits may differ here")
            return
    workspace.restart()
    if from_output:
        assert config.output is not None
        parts = PartStore(workspace.directory, flush_s=config.flush_s)
        import_finished(Path(config.output), parts)
    workspace.begin({"job": job.manifest, "made_on": cpu_name()})


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


class _Run:
    """One run of a job on its way, from its rows to its output or to where it was stopped."""

    def __init__(
        self,
        job: Job,
        workspace: Workspace,
        output: OutputPath,
        stats: RunStats,
        stats_path: str | None,
        progress: Progress,
        stopper: Stopper,
    ):
        self._job = job
        self._config = job.config
        self._workspace = workspace
        self._output = output
        self._stats = stats
        self._stats_path = stats_path
        self._progress = progress
        self._stopper = stopper
        self._parts = PartStore(workspace.directory, flush_s=job.config.flush_s)
        self._reader = job.reader(self._stored())
        self._conversations: dict[int, Any] = {}  # by row, of those in flight with several turns
        self._going_on: dict[tuple[int, int], Any] = {}  # by (row, sample), once it has an answer
        self._samples_left: dict[int, int] = {}  # by row, of the same rows
        self._together: dict[tuple[int, int], list[Result]] = {}  # results that are kept together or not at all
        self._num_results = 0  # that the rows read so far have in the end
        self._num_to_generate = 0
        self._num_kept = 0  # in this run
        self._not_run: Counter[str] = Counter()
        self._stopping_error: str | None = None

    def run(self) -> JobReport:
        """Run until the output is written, or the run is stopped."""
        from .engine.feed import LOOKAHEAD_ROWS, LOOKAHEAD_TOKENS

        progress = self._progress
        sources_before = self._job.source.state()
        progress.phase("reading prompts")
        feed = RowFeed(self._reader.groups(), self._take_in)
        plan, completed = None, True
        try:
            ahead = feed.look_ahead(LOOKAHEAD_ROWS, LOOKAHEAD_TOKENS)
            if self._stats.rows_reused:
                progress.note(f"{self._stats.rows_reused:,} results of an earlier run are kept")
            if self._stopping_error is not None:
                completed = False
            elif ahead:
                plan, completed = self._generate(feed, ahead)
            else:
                progress.note("there is nothing to generate, so the weights are not loaded")
        finally:
            feed.close()
        self._tell_of_prompts()
        self._parts.flush()
        if not completed or self._stopping_error is not None:
            return self._stopped(plan)
        if self._num_results == 0 and self._reader.column_types is not None:
            raise InputError(f"the input has no rows: {', '.join(self._config.inputs)}")
        if self._job.source.state() != sources_before:
            raise InputError(
                f"the input changed while the job ran; its finished rows stay in {self._workspace.directory}, "
                "the same command tells what changed"
            )
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
        for results in group.ended:
            self._keep(results)
        self._conversations |= group.conversations
        for request in group.requests:
            if request.row_index in group.conversations:
                self._samples_left[request.row_index] = len(request.samples)
            self._num_to_generate += len(request.samples) * self._num_turns(request.row_index)
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

    def _tell_of_prompts(self) -> None:
        tokenizer = self._reader.tokenizer
        if getattr(self._job.opened.tokenizer, "chat_template", None) and tokenizer.num_plain:
            self._progress.note(
                f"{tokenizer.num_plain:,} prompts are plain text and are continued as they are; to have the model answer "
                "as in a chat, give rows of messages, or --as-chat"
            )
        for extent in self._job.source.extents.values():
            if not extent["num_rows"]:
                self._progress.note(f"{extent['name']} has no rows")
        if tokenizer.num_bos_kept:
            self._progress.note(f"{tokenizer.num_bos_kept} prompts begin with the BOS text themselves; no second one was added")

    # Generating

    def _generate(self, feed: RowFeed, ahead: list[Request]) -> tuple[Any, bool]:
        """Load the weights and answer requests; return the plan and whether all were answered before the run was stopped.

        Raises:
            MemoryPlanError: the pool can't hold one row; found before the weights load where the estimate tells.
        """
        from .engine.planner import RequestLengths

        config, opened, progress = self._config, self._job.opened, self._progress
        self._job.estimate(RequestLengths(ahead), None, covers_all_rows=feed.at_end, **self._not_run)
        progress.phase(f"loading {config.engine.model} ({opened.spec.dtype}, {opened.config.device})")
        from .engine.engine import Engine

        engine = Engine(opened, self._stats)
        plan = engine.plan(ahead, covers_all_rows=feed.at_end, **self._not_run)
        shown: list[int | None] = []

        def on_step(report: Any) -> None:
            self._parts.flush_if_due()
            total = self._num_to_generate if feed.at_end else None
            if shown[-1:] != [total]:
                shown.append(total)
                progress.rows(total)
            progress.step(report)

        shown.append(self._num_to_generate if feed.at_end else None)
        progress.rows(shown[0])
        with contextlib.ExitStack() as stack:
            block_map = None
            if config.block_map is not None:
                from .engine.block_map import BlockMapWriter

                block_map = stack.enter_context(BlockMapWriter(config.block_map, config.block_map_every, progress.note))
            stack.enter_context(self._stopper.watched())
            completed = engine.generate(
                feed,
                plan,
                on_finished=self._on_finished,
                on_error=self._on_error,
                on_step=on_step,
                on_note=progress.note,
                control=self._stopper.control,
                block_map=block_map,
            )
        return plan, completed

    def _on_finished(self, sequence: Sequence) -> Request | None:
        """Keep a finished sequence's answer; return the request of its conversation's next turn, if it has one."""
        request = sequence.request
        result = Result(
            request.row_index,
            sequence.sample_index,
            request.turn_index,
            response=sequence.text,
            token_ids=sequence.generated_token_ids if self._config.token_ids else None,
            finish_reason=sequence.finish_reason or "length",
            stop_reason=None if sequence.stop_reason is None else str(sequence.stop_reason),
            num_prompt_tokens=request.num_prompt_tokens,
            num_truncated_tokens=request.num_truncated_tokens,
            num_cached_tokens=sequence.num_cached_tokens if self._config.cached_tokens else 0,
            num_generated_tokens=sequence.num_generated_tokens,
            score=sequence.score,
            seed=request.seed,
        )
        if request.params.beam_width > 1:
            self._collect((request.row_index, -1), [result], request.params.n)
            return None
        key = (request.row_index, sequence.sample_index)
        conversation = self._conversation(*key)
        if conversation is None:
            self._keep([result])
            return None
        following = None
        results = [result]
        try:
            following = self._next_turn(conversation, sequence)
        except RowError as error:
            results += self._failed_turns(request, sequence.sample_index, request.turn_index + 1, error, None)
        self._collect(key, results, conversation.num_turns)
        return following

    def _on_error(self, request: Request, sample_index: int, error: RowError) -> None:
        self._conversation(request.row_index, sample_index)
        results = self._failed_turns(request, sample_index, request.turn_index, error, request.num_prompt_tokens)
        if request.params.beam_width > 1:
            self._collect((request.row_index, -1), results, request.params.n)
        else:
            self._collect((request.row_index, sample_index), results, self._num_turns(request.row_index))

    def _failed_turns(
        self, request: Request, sample_index: int, turn_index: int, error: RowError, num_prompt_tokens: int | None
    ) -> list[Result]:
        """Return the results of a turn that can't be answered and of all that would have followed."""
        facts: dict[str, Any] = {"error_code": error.code, "error": error.message, "num_prompt_tokens": num_prompt_tokens}
        turns = range(turn_index, self._num_turns(request.row_index))
        return [Result(request.row_index, sample_index, turn, **facts) for turn in turns]

    def _num_turns(self, row_index: int) -> int:
        conversation = self._conversations.get(row_index)
        return 1 if conversation is None else conversation.num_turns

    def _collect(self, key: tuple[int, int], results: list[Result], wanted: int) -> None:
        """Hold back the turns of a conversation, or a row's best beams, until all of them are there."""
        held = self._together.setdefault(key, [])
        held += results
        if len(held) == wanted:
            self._keep(self._together.pop(key))
            if self._going_on.pop(key, None) is not None:
                self._samples_left[key[0]] -= 1
                if not self._samples_left[key[0]]:
                    del self._samples_left[key[0]], self._conversations[key[0]]

    def _conversation(self, row_index: int, sample_index: int) -> Any:
        """Return a sample's own conversation; None for a row without turns."""
        key = (row_index, sample_index)
        if key not in self._going_on and row_index in self._conversations:
            self._going_on[key] = self._conversations[row_index].fork()
        return self._going_on.get(key)

    def _next_turn(self, conversation: Any, sequence: Sequence) -> Request | None:
        """Return the request of a conversation's next turn; None after the last.

        Raises:
            RowError: it can't be rendered, or leaves no room.
        """
        request, answer_ids = sequence.request, sequence.generated_token_ids
        if sequence.finish_reason == "stop" and not isinstance(sequence.stop_reason, str):
            answer_ids = answer_ids[:-1]  # the closing EOS or stop token is not part of the answer's text
        prompt = conversation.next_prompt(sequence.text or "", list(request.prompt_token_ids), answer_ids)
        if prompt is None:
            return None
        last = conversation.num_asked == conversation.num_turns
        return self._job.opened.make_request(
            request.row_index,
            prompt,
            request.params,
            turn_index=request.turn_index + 1,
            cache_salt=request.cache_salt,
            later_tokens=0 if last else max(0, request.max_kv_tokens - len(prompt) - request.params.max_tokens),
        )

    # Ending

    def _stopped(self, plan: Any) -> JobReport:
        """End a run before its rows did: what is finished is in the parts."""
        reason = self._stopper.reason
        assert reason is not None
        self._stats.stopped_by = reason
        self._write_stats(plan)
        report = JobReport(stopped_by=reason, stopping_error=self._stopping_error, stats_path=self._stats_path)
        report.output = self._output.name
        report.num_results = self._stats.rows_reused + self._num_kept
        return report

    def _finish(self, plan: Any) -> JobReport:
        """Assemble the output, write the statistics, and put the output in its place."""
        self._progress.phase("writing")
        seen, schema = self._reader.column_types, self._job.source.schema()
        types = seen.arrow_types() if seen is not None else {f.name: f.type for f in schema}
        begin = perf_counter()
        with write_output(self._job, self._output, self._workspace, self._parts, types) as totals:
            assert totals.num_results == self._num_results, f"{totals.num_results} results of {self._num_results}"
            self._stats.add_time("write", perf_counter() - begin)
            self._stats.rows, self._stats.row_errors = totals.finish_reasons, totals.row_errors
            self._stats.prompt_tokens = totals.prompt_tokens
            self._stats.packed_tokens, self._stats.padded_tokens = totals.packed_tokens, totals.padded_tokens
            self._write_stats(plan)
        if self._parts.num_damaged_lines:
            self._progress.note(f"{self._parts.num_damaged_lines} kept results were damaged and have been made again")
        self._workspace.end()
        return JobReport(
            self._document,
            self._output.name,
            self._stats_path,
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
        if self._stats_path is not None:
            path = Path(self._stats_path)
            write_whole(path, [json.dumps(document, indent=2).encode(), b"\n"], self._workspace.via(path))


def plan_only(config: JobConfig, progress: Progress, stopper: Stopper, device_memory_bytes: int | None = None) -> PlanReport:
    """Plan a job from config and tokenizer alone; no weights are loaded.

    Raises:
        UsageError: as `run_job`, and when the pool can't hold one row.
    """
    from .engine.opened import open_model
    from .engine.planner import RequestLengths

    stats = RunStats()
    sources, _ = expand_inputs([i for i in config.inputs if i != "-"], config.format)
    progress.phase("opening the model")
    threads.prepare()
    opened = open_model(config.engine, planning=device_memory_bytes is not None, chat_template=config.chat_template)
    with _workspace("-", stopper) as workspace:
        if "-" in config.inputs:
            sources, _ = _with_stdin(config, workspace)
        job = prepare(config, opened, sources, stats, planning=True)
        progress.phase("reading prompts")
        lengths = RequestLengths()
        not_run: Counter[str] = Counter()
        num_rows = 0
        for group in job.reader().groups():
            num_rows += group.num_results
            lengths.add(group.requests)
            not_run += group.not_run()
        if not num_rows and job.source.schema() is None:
            raise InputError(f"the input has no rows: {', '.join(config.inputs)}")
    plan, source = job.estimate(lengths, device_memory_bytes, covers_all_rows=True, **not_run)
    return PlanReport(
        plan.to_dict(),
        opened.spec.to_dict(),
        opened.config.to_dict(),
        config.sampling.max_tokens,
        source,
        [s.name if s.path is None else str(s.path) for s in sources],
    )


def _check_side_files(config: JobConfig, inputs: list[Path], *, going_on: bool) -> str | None:
    """Check where statistics and the block map go, before any work; return the statistics' path. What an earlier run of the job
    wrote there (`going_on`) may be replaced.

    Raises:
        UsageError: an input, another output or a directory; OutputError: it can't be written.
    """
    assert config.output is not None
    path = config.stats or (None if config.output == "-" else f"{config.output}.stats.json")
    if path is not None:
        if config.output != "-" and Path(path).resolve() == Path(config.output).resolve():
            raise UsageError(f"--stats {path} is the output")
        # Statistics of an earlier output at their usual place belong to it; a path that was named is somebody's file.
        check_writable(path, "--stats", overwrite=config.overwrite or going_on or config.stats is None, inputs=inputs)
    if config.block_map is not None:
        if config.block_map in ("", "-"):
            raise UsageError("--block-map needs the name of a file")
        check_writable(config.block_map, "--block-map", overwrite=config.overwrite or going_on, inputs=inputs)
        others = [Path(p).resolve() for p in (config.output, path) if p not in (None, "-")]
        if Path(config.block_map).resolve() in others:
            raise UsageError(f"--block-map {config.block_map} is another output of this command")
    return path


def read_block_map(path: str) -> Any:
    """Read what `--block-map` wrote; see `engine.block_map.read_block_map`."""
    from .engine import block_map

    return block_map.read_block_map(path)
