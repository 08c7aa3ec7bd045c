"""One job from files to file: the CLI's one entry. Reads, renders, tokenizes, plans, generates, writes, counts."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import threads
from .config import JobConfig
from .errors import RowError, UsageError
from .job_rows import JobRows, Progress, error_result, make_result, read_job_rows
from .request import Request, Sequence
from .rows.readers import PARQUET_SUFFIXES, expand_inputs, parquet_schema
from .rows.schema import Result
from .rows.writer import ResultWriter, atomic_file, check_output, check_writable
from .stats import RunStats


@dataclass
class JobReport:
    """What a finished job hands back."""

    stats: dict[str, Any]
    output: str
    stats_path: str | None
    num_rows: int
    num_errors: int
    first_error: str | None


@dataclass
class PlanReport:
    """What `plan` hands back: the plan's numbers and what they were made from."""

    plan: dict[str, Any]
    model: dict[str, Any]
    config: dict[str, Any]
    max_tokens: int
    memory_source: str
    files: list[str]


def run_job(config: JobConfig, progress: Progress) -> JobReport:
    """Run one job: every row of the input is in the output once, in order.

    Raises:
        UsageError: before weights load, when the job can't be run at all.
        OutputError: the output or its statistics can't be written.
    """
    assert config.output is not None
    stats = RunStats()
    files = expand_inputs(config.inputs)
    output_format = check_output(config.output, overwrite=config.overwrite, inputs=files)
    stats_path = _stats_path(config, files)
    if config.block_map is not None:
        if config.block_map in ("", "-"):
            raise UsageError("--block-map needs the name of a file")
        check_writable(config.block_map, "--block-map", overwrite=config.overwrite, inputs=files)
        others = [Path(p).resolve() for p in (config.output, stats_path) if p not in (None, "-")]
        if Path(config.block_map).resolve() in others:
            raise UsageError(f"--block-map {config.block_map} is another output of this command")
    progress.phase("opening the model")
    threads.prepare()
    from .engine.opened import open_model

    with stats.timed("open"):
        opened = open_model(config.engine, chat_template=config.chat_template)
    outside = [t for t in config.sampling.stop_token_ids if t >= opened.spec.vocab_size]
    if outside:
        raise UsageError(f"--stop-token-ids {outside[0]} is outside the model's vocabulary of {opened.spec.vocab_size}")
    most_sequences = opened.config.max_num_seqs or 1
    if config.sampling.num_sequences > most_sequences:
        flag = "--beam-width" if config.sampling.beam_width > 1 else "--n"
        raise UsageError(
            f"{flag} {config.sampling.num_sequences} is more than --max-num-seqs {most_sequences}: "
            "a row's samples or beams must be able to run together"
        )
    if not opened.spec.eos_token_ids and not config.sampling.ignore_eos:
        progress.note("the model names no EOS token: rows end only by length or by --stop")
    prompts = read_job_rows(config, files, opened, stats, progress)
    writer = ResultWriter(
        config.output,
        output_format,
        prompts.columns,
        prompts.id_column,
        input_types=_input_types(files),
        with_token_ids=config.token_ids,
    )
    writer.check([error_result(row, prompts.ids[row.index], RowError("bad_json", "")) for row in prompts.rows])
    if prompts.requests:
        plan: Any = _generate(config, opened, prompts, stats, progress)
    else:
        progress.note("there is nothing to generate, so the weights are not loaded")
        plan = None

    progress.phase("writing")
    ordered = [prompts.results[key] for key in sorted(prompts.results)]
    answered = [r.row_index for r in ordered if r.sample_index == r.turn_index == 0]
    assert answered == [row.index for row in prompts.rows], "a row has no answer"
    with stats.timed("write"):
        writer.write(ordered)
    document = _count(stats, ordered, opened, plan, config)
    if stats_path is not None:
        with atomic_file(Path(stats_path)) as file:
            file.write(json.dumps(document, indent=2).encode() + b"\n")
    failed = [f"row {r.row_index}: {r.error}" for r in ordered if r.error is not None]
    return JobReport(document, config.output, stats_path, len(ordered), len(failed), failed[0] if failed else None)


def _generate(config: JobConfig, opened: Any, prompts: JobRows, stats: RunStats, progress: Progress) -> Any:
    """Load the weights, answer every request into `prompts.results`, and return the plan it ran by.

    Raises:
        MemoryPlanError: the pool can't hold one row; found before the weights load where the estimate tells.
    """
    _estimate(opened, prompts, device_memory_bytes=None)
    progress.phase(f"loading {config.engine.model} ({opened.spec.dtype}, {opened.config.device})")
    from .engine.engine import Engine

    engine = Engine(opened, stats)
    plan = engine.plan(prompts.requests, **prompts.not_run())
    by_index = {row.index: row for row in prompts.rows}

    def end_with_error(row: int, sample_index: int, turn_index: int, error: RowError, num_prompt_tokens: int | None) -> None:
        result = error_result(by_index[row], prompts.ids[row], error, num_prompt_tokens)
        prompts.end_sample(replace(result, sample_index=sample_index, turn_index=turn_index))

    def on_finished(sequence: Sequence) -> Request | None:
        request = sequence.request
        key = (request.row_index, sequence.sample_index, request.turn_index)
        prompts.results[key] = make_result(
            by_index[request.row_index],
            prompts.ids[request.row_index],
            sample_index=sequence.sample_index,
            turn_index=request.turn_index,
            response=sequence.text,
            token_ids=sequence.generated_token_ids,
            finish_reason=sequence.finish_reason or "length",
            stop_reason=sequence.stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_generated_tokens=sequence.num_generated_tokens,
            score=sequence.score,
            seed=request.seed,
        )
        conversation = prompts.conversation(request.row_index, sequence.sample_index)
        if conversation is None:
            return None
        try:
            return _next_turn(conversation, sequence, opened)
        except RowError as error:
            end_with_error(request.row_index, sequence.sample_index, request.turn_index + 1, error, None)
            return None

    def on_error(request: Request, sample_index: int, error: RowError) -> None:
        end_with_error(request.row_index, sample_index, request.turn_index, error, request.num_prompt_tokens)

    progress.rows(sum(r.params.n * prompts.num_turns(r.row_index) for r in prompts.requests))
    with contextlib.ExitStack() as stack:
        block_map = None
        if config.block_map is not None:
            from .engine.block_map import BlockMapWriter

            block_map = stack.enter_context(BlockMapWriter(config.block_map, config.block_map_every, progress.note))
        engine.generate(
            prompts.requests,
            plan,
            on_finished=on_finished,
            on_error=on_error,
            on_step=progress.step,
            on_note=progress.note,
            block_map=block_map,
        )
    return plan


def _next_turn(conversation: Any, sequence: Sequence, opened: Any) -> Request | None:
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
    return opened.make_request(
        request.row_index,
        prompt,
        request.params,
        turn_index=request.turn_index + 1,
        cache_salt=request.cache_salt,
        later_tokens=0 if last else max(0, request.max_kv_tokens - len(prompt) - request.params.max_tokens),
    )


def plan_only(config: JobConfig, progress: Progress, device_memory_bytes: int | None = None) -> PlanReport:
    """Plan a job from config and tokenizer alone; no weights are loaded.

    Raises:
        UsageError: as `run_job`, and when the pool can't hold one row.
    """
    from .engine.opened import open_model

    stats = RunStats()
    files = expand_inputs(config.inputs)
    progress.phase("opening the model")
    threads.prepare()
    opened = open_model(config.engine, planning=device_memory_bytes is not None, chat_template=config.chat_template)
    prompts = read_job_rows(config, files, opened, stats, progress)
    plan, source = _estimate(opened, prompts, device_memory_bytes)
    return PlanReport(
        plan.to_dict(),
        opened.spec.to_dict(),
        opened.config.to_dict(),
        config.sampling.max_tokens,
        source,
        [str(f) for f in files],
    )


def _estimate(opened: Any, prompts: JobRows, device_memory_bytes: int | None) -> tuple[Any, str]:
    """Plan a job before its weights are loaded; return the plan and where the memory's size comes from.

    Raises:
        MemoryPlanError: the pool can't hold one row.
    """
    from .engine import memory
    from .engine.planner import estimate_activation_bytes, plan_requests

    config, spec = opened.config, opened.spec
    activation = estimate_activation_bytes(
        spec, max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs
    )
    if device_memory_bytes is not None:
        device = memory.DeviceMemory(device_memory_bytes, device_memory_bytes, "given")
    else:
        device = memory.device_memory(config.device)
    weights = spec.weights_bytes + (spec.tied_head_bytes if config.device == "cpu" else 0)
    plan = plan_requests(
        prompts.requests,
        spec,
        config,
        device=device,
        own_bytes=0,
        pending_bytes=weights + activation,
        activation_peak_bytes=activation,
        **prompts.not_run(),
    )
    return plan, device.source


def _stats_path(config: JobConfig, inputs: list[Path]) -> str | None:
    """Return where statistics go, `--stats` or beside the output, after checking it like the output, before any work.

    Raises:
        UsageError: it is an input, the output or a directory; OutputError: it can't be written.
    """
    assert config.output is not None
    path = config.stats or (None if config.output == "-" else f"{config.output}.stats.json")
    if path is not None:
        if config.output != "-" and Path(path).resolve() == Path(config.output).resolve():
            raise UsageError(f"--stats {path} is the output")
        # Statistics of an earlier output at their usual place belong to it; a path that was named is somebody's file.
        check_writable(path, "--stats", overwrite=config.overwrite or config.stats is None, inputs=inputs)
    return path


def _input_types(files: list[Path]) -> dict[str, Any]:
    """Return the Arrow types of the input's columns when all files are Parquet; JSONL columns have none."""
    if not all(f.suffix in PARQUET_SUFFIXES for f in files):
        return {}
    return {f.name: f.type for f in parquet_schema(files)}


def _count(stats: RunStats, results: list[Result], opened: Any, plan: Any, config: JobConfig) -> dict[str, Any]:
    """Fill in what is known only at the end and return the document of `stats.json`."""
    from .engine.planner import padded_tokens

    for result in results:
        stats.rows[result.finish_reason] += 1
        if result.error_code is not None:
            stats.row_errors[result.error_code] += 1
    answered = [r for r in results if r.finish_reason != "error" and r.num_generated_tokens]
    # samples share their first turn's prompt
    prompt_lens = {(r.row_index, r.turn_index, r.turn_index and r.sample_index): r.num_prompt_tokens or 0 for r in answered}
    stats.prompt_tokens = sum(prompt_lens.values())
    lengths = np.array([(r.num_prompt_tokens or 0) + r.num_generated_tokens for r in answered], dtype=np.int64)
    stats.packed_tokens = int(lengths.sum())
    stats.padded_tokens = padded_tokens(lengths, opened.config.max_num_seqs)
    document = stats.to_dict({**config.to_dict(), "engine": opened.config.to_dict()})
    document["plan"] = None if plan is None else plan.to_dict()
    document["model"] = opened.spec.to_dict()
    return document


def read_block_map(path: str) -> Any:
    """Read what `--block-map` wrote; see `engine.block_map.read_block_map`."""
    from .engine import block_map

    return block_map.read_block_map(path)


def error_rate_exceeded(report: JobReport, max_error_rate: float) -> bool:
    """Return True when more of the rows failed than the user allows (a share between 0 and 1)."""
    return report.num_errors > max_error_rate * report.num_rows
