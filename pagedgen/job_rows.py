"""The rows of a job and what came of each: read, rendered, tokenized, and with a request or a result. Loads no model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from .config import JobConfig
from .errors import InputError, RowError
from .request import Request
from .rows.readers import Row, column_names, read_rows
from .rows.schema import Result
from .sampling_params import SamplingParams
from .stats import RunStats

SAMPLING_COLUMN = "sampling_params"
_GROUP_ROWS = 256  # rows tokenized at once


class Progress(Protocol):
    """What a job tells while it runs; the CLI shows it."""

    def phase(self, text: str) -> None:
        """A new phase has begun."""

    def rows(self, total: int) -> None:
        """Generation of so many rows begins."""

    def step(self, report: Any) -> None:
        """A step has ended (`engine.generation.StepReport`)."""

    def note(self, text: str) -> None:
        """Something the user should know that is no error."""


@dataclass
class JobRows:
    """All rows of a job: each has a request or an error."""

    rows: list[Row]
    columns: list[str]
    id_column: str | None
    ids: list[Any]
    requests: list[Request] = field(default_factory=list)
    results: dict[tuple[int, int, int], Result] = field(default_factory=dict)  # by (row, sample, turn)
    conversations: dict[int, Any] = field(default_factory=dict)  # by row, of those with several turns
    going_on: dict[tuple[int, int], Any] = field(default_factory=dict)  # by (row, sample), once they have an answer

    def num_turns(self, row_index: int) -> int:
        """Return how many answers each sample of a row has."""
        conversation = self.conversations.get(row_index)
        return 1 if conversation is None else conversation.num_turns

    def end(self, result: Result, num_samples: int) -> None:
        """Take the result of a row that ends without the engine: the same for each of its samples and turns."""
        for sample_index in range(num_samples):
            self.end_sample(replace(result, sample_index=sample_index))

    def end_sample(self, result: Result) -> None:
        """Take the result of a turn after which there is no next one: it stands for those that would have followed."""
        for turn_index in range(result.turn_index, self.num_turns(result.row_index)):
            self.results[result.row_index, result.sample_index, turn_index] = replace(result, turn_index=turn_index)

    def conversation(self, row_index: int, sample_index: int) -> Any:
        """Return a sample's own conversation; None for a row without turns."""
        key = (row_index, sample_index)
        if key not in self.going_on and row_index in self.conversations:
            self.going_on[key] = self.conversations[row_index].fork()
        return self.going_on.get(key)

    def not_run(self) -> dict[str, int]:
        """Count the rows that ended before the engine, as a plan does."""
        first = [r for (_, sample_index, turn_index), r in self.results.items() if sample_index == turn_index == 0]
        too_long = sum(r.error_code == "prompt_too_long" for r in first)
        errors = sum(r.error_code is not None for r in first)
        return {"num_row_errors": errors - too_long, "num_too_long": too_long, "num_empty": len(first) - errors}


def read_job_rows(config: JobConfig, files: list[Path], opened: Any, stats: RunStats, progress: Progress) -> JobRows:
    """Read, render and tokenize every row.

    Raises:
        InputError: no rows, or no usable column.
    """
    from .prompts.render import PromptRenderer, Rendered
    from .prompts.tokenize import PromptTokenizer
    from .prompts.turns import Conversation

    renderer = PromptRenderer(opened.tokenizer, prompt_column=config.prompt_column, messages_column=config.messages_column)
    tokenizer = PromptTokenizer(opened.tokenizer, opened.spec.vocab_size)
    progress.phase("reading prompts")
    with stats.timed("read"):
        rows = list(read_rows(files, config.limit))
    if not rows:
        raise InputError(f"the input has no rows: {', '.join(map(str, files))}")
    names = column_names(files, rows)
    renderer.check_columns(names, has_rows=any(row.error is None for row in rows))
    if config.id_column is not None and config.id_column not in names:
        raise InputError(f"--id-column {config.id_column}: no such column; found {', '.join(names) or 'none'}")
    if config.cache_salt_column is not None and config.cache_salt_column not in names:
        raise InputError(f"--cache-salt-column {config.cache_salt_column}: no such column; found {', '.join(names) or 'none'}")
    id_column = config.id_column or ("id" if "id" in names else None)
    ids = [row.values.get(id_column) if id_column else row.index for row in rows]

    prompts = JobRows(rows, names, id_column, ids)
    progress.phase(f"tokenizing {len(rows):,} prompts")
    start = perf_counter()
    for first in range(0, len(rows), _GROUP_ROWS):
        group: list[tuple[Row, Rendered, SamplingParams]] = []
        for row in rows[first : first + _GROUP_ROWS]:
            try:
                if row.error is not None:
                    raise row.error
                params = _row_params(config.sampling, row)
                group.append((row, renderer.render(row.values), params))
            except RowError as error:
                prompts.end(error_result(row, ids[row.index], error), config.sampling.n)
        for (row, rendered, params), token_ids in zip(group, tokenizer.tokenize([g[1] for g in group]), strict=True):
            try:
                if rendered.turns:
                    prompts.conversations[row.index] = Conversation(renderer, tokenizer, rendered.turns)
                if isinstance(token_ids, RowError):
                    raise token_ids
                request = opened.make_request(
                    row.index,
                    token_ids,
                    params,
                    cache_salt=_cache_salt(config, row),
                    later_tokens=_later_tokens(prompts.conversations.get(row.index), params),
                )
            except RowError as error:
                length = None if isinstance(token_ids, RowError) else len(token_ids)
                # Parameters that can't be used say nothing about how many samples there should be.
                samples = config.sampling.n if error.code == "bad_sampling_params" else params.n
                prompts.end(error_result(row, ids[row.index], error, length), samples)
                continue
            if request.max_tokens == 0:
                empty = make_result(
                    row,
                    ids[row.index],
                    response="",
                    token_ids=[],
                    finish_reason="length",
                    num_prompt_tokens=len(token_ids),
                    seed=request.seed,
                )
                prompts.end(empty, params.n)
            else:
                prompts.requests.append(request)
    stats.add_time("tokenize", perf_counter() - start)
    if getattr(opened.tokenizer, "chat_template", None) and tokenizer.num_plain:
        progress.note(
            f"{tokenizer.num_plain:,} prompts are plain text and are continued as they are; to have the model answer "
            "as in a chat, give rows of messages"
        )
    if tokenizer.num_bos_kept:
        progress.note(f"{tokenizer.num_bos_kept} prompts begin with the BOS text themselves; no second one was added")
    return prompts


def _row_params(sampling: SamplingParams, row: Row) -> SamplingParams:
    try:
        return sampling.override(row.values.get(SAMPLING_COLUMN))
    except ValueError as error:
        raise RowError("bad_sampling_params", str(error)) from error


def _cache_salt(config: JobConfig, row: Row) -> str:
    """Return the text that keeps a row's K/V apart from others'; no salt, null and "" are the same."""
    value = row.values.get(config.cache_salt_column) if config.cache_salt_column else None
    if value is not None and not isinstance(value, str):
        raise RowError("not_text", f"column {config.cache_salt_column} holds {type(value).__name__}, not text")
    return value or ""


def _later_tokens(conversation: Any, params: SamplingParams) -> int:
    """Return what a conversation's later turns may add to its length."""
    if conversation is None or conversation.num_turns == 1:
        return 0
    if params.beam_width > 1:
        raise RowError("bad_sampling_params", "beam search can't be used for several turns")
    return int(conversation.later_tokens(params.max_tokens))


def make_result(row: Row, row_id: Any, **fields: Any) -> Result:
    """Return a row's result; `fields` are those of `rows.schema.Result`."""
    return Result(row_index=row.index, row_id=row_id, values=row.values, **fields)


def error_result(row: Row, row_id: Any, error: RowError, num_prompt_tokens: int | None = None) -> Result:
    """Return the result of a row that can't be answered."""
    return make_result(
        row,
        row_id,
        finish_reason="error",
        error_code=error.code,
        error=error.message,
        num_prompt_tokens=num_prompt_tokens,
    )
