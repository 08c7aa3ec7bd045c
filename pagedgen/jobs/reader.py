"""From input rows to engine requests, in groups and ahead of the engine. Loads no weights.

What ends before the engine, or is there from an earlier run, comes out beside the requests.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from time import perf_counter
from typing import Any

from ..config import JobConfig
from ..errors import RowError
from ..prompts.render import PromptRenderer, Rendered
from ..prompts.tokenize import PromptTokenizer
from ..prompts.truncate import Truncator, prompt_limit
from ..prompts.turns import Conversation
from ..request import Request
from ..rows import openai_batch
from ..rows.inputs import Input, Selection
from ..rows.json_types import ColumnTypes
from ..rows.schema import Result
from ..rows.sources import Row
from ..sampling_params import SamplingParams
from ..stats import RunStats

SAMPLING_COLUMN = "sampling_params"
_GROUP_ROWS = 256  # rows tokenized at once


@dataclass
class Group:
    """Consecutive rows of the input, each with requests, or results it ended with at once, or results it has already."""

    requests: list[Request] = field(default_factory=list)
    ended: list[list[Result]] = field(default_factory=list)  # results that belong together
    conversations: dict[int, Conversation] = field(default_factory=dict)  # by row, of those with several turns
    num_results: int = 0  # that its rows have in the end
    num_reused: int = 0  # of these, how many an earlier run left

    def not_run(self) -> Counter[str]:
        """Count the rows that ended before the engine, under the names of `engine.planner.plan_job`."""
        kinds = {"prompt_too_long": "num_too_long", "too_long": "num_too_long", "max_total_tokens": "num_skipped"}
        counts: Counter[str] = Counter()
        for first, *_ in self.ended:
            otherwise = "num_row_errors" if first.error_code else "num_empty"
            counts[kinds.get(first.error_code or first.stop_reason or "", otherwise)] += 1
        return counts


@dataclass
class _Pending:
    """A row on its way through the tokenizer."""

    row: Row
    values: dict[str, Any] = field(default_factory=dict)
    rendered: Rendered = field(default_factory=Rendered)
    params: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    num_turns: int = 1
    done: frozenset[int] = frozenset()  # samples that are there already, with all their turns

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_samples) if i not in self.done)


class RowReader:
    """Reads, renders and tokenizes a job's rows, one group after the other."""

    def __init__(
        self,
        config: JobConfig,
        opened: Any,
        source: Input,
        selection: Selection,
        renderer: PromptRenderer,
        *,
        openai: bool,
        stats: RunStats,
        stored: Iterator[Result] | None = None,
    ):
        """`stored`: the results of earlier runs in the order of their keys."""
        self._config = config
        self._opened = opened
        self._source = source
        self._selection = selection
        self._renderer = renderer
        self._openai = openai
        self._stats = stats
        self._stored = (list(results) for _, results in groupby(stored or (), key=lambda r: r.row_index))
        self._next_stored = next(self._stored, None)
        self.tokenizer = PromptTokenizer(opened.tokenizer, opened.spec.vocab_size)
        self._truncator = None
        if config.too_long.startswith("truncate"):
            self._truncator = Truncator(renderer, self.tokenizer, config.too_long)
        self._budget = config.max_total_tokens
        # A source without a schema tells its columns by its rows.
        self.column_types = None
        if source.schema() is None:
            self.column_types = ColumnTypes(names_only=not (config.output or "").endswith(".parquet"))
            for each in source.sources:
                self.column_types.observe(dict.fromkeys(each.columns()))

    def groups(self) -> Iterator[Group]:
        """Yield all selected rows in the order of the input.

        Raises:
            InputError: a source can't be read.
        """
        columns = None
        if self.column_types is None and not self._openai:
            extra = [SAMPLING_COLUMN, self._config.cache_salt_column]
            columns = [*self._renderer.columns(), *(c for c in extra if c)]
        chunks = self._source.chunks(columns)
        while True:
            with self._stats.timed("read"):
                chunk = next(chunks, None)
                if chunk is not None and self.column_types is not None:
                    for row in chunk.rows:
                        self.column_types.observe(row.values)
            if chunk is None:
                return
            rows = [row for row in chunk.rows if self._selection.takes(row.index)]
            for start in range(0, len(rows), _GROUP_ROWS):
                begin = perf_counter()
                group = self._group(rows[start : start + _GROUP_ROWS])
                self._stats.add_time("tokenize", perf_counter() - begin)
                yield group

    def _group(self, rows: list[Row]) -> Group:
        group = Group()
        pending: list[_Pending] = []
        for row in rows:
            one = self._rendered(row, self._stored_of(row.index), group)
            if one is not None:
                pending.append(one)
        token_ids = self.tokenizer.tokenize([p.rendered for p in pending])
        for one, ids in zip(pending, token_ids, strict=True):
            self._finish(one, ids, group)
        return group

    def _stored_of(self, row_index: int) -> list[Result]:
        while self._next_stored is not None and self._next_stored[0].row_index < row_index:
            self._next_stored = next(self._stored, None)
        if self._next_stored is not None and self._next_stored[0].row_index == row_index:
            return self._next_stored
        return []

    def _rendered(self, row: Row, stored: list[Result], group: Group) -> _Pending | None:
        """Return a row ready for the tokenizer; None when it has ended or is complete."""
        one = _Pending(row, params=self._config.sampling, num_samples=self._config.sampling.n)
        error = row.error
        try:
            if error is not None:
                raise error
            one.values = openai_batch.to_row(row.values) if self._openai else row.values
            one.num_turns = self._renderer.num_turns(one.values)
            one.params = self._params(one.values)
            if one.params is not self._config.sampling:  # which was checked at the start
                self._opened.check_params(one.params)
            one.num_samples = one.params.n  # not of parameters that can't be used: they say nothing about a number
        except RowError as caught:
            error = caught
        if stored:
            counts = Counter(r.sample_index for r in stored)
            one.done = frozenset(i for i in range(one.num_samples) if counts[i] == one.num_turns)
        group.num_results += one.num_samples * one.num_turns
        group.num_reused += len(one.done) * one.num_turns
        if one.done and not one.missing and self._budget is None:
            return None
        try:
            if error is not None:
                raise error
            one.rendered = self._renderer.render(one.values)
            return one
        except RowError as caught:
            self._end(group, one, error_result(row.index, caught))
            return None

    def _finish(self, one: _Pending, token_ids: list[int] | RowError, group: Group) -> None:
        """Make a tokenized row's request, or end it."""
        conversation = None
        num_truncated = 0
        try:
            if isinstance(token_ids, RowError):
                raise token_ids
            rendered = one.rendered
            if self._truncator is not None:
                limit = prompt_limit(self._opened.config.max_model_len, one.params.max_tokens)
                before = len(token_ids)
                rendered, token_ids = self._truncator.cut(rendered, token_ids, limit)
                num_truncated = before - len(token_ids)
            if one.num_turns > 1:
                conversation = Conversation(self._renderer, self.tokenizer, rendered)
            request = self._opened.make_request(
                one.row.index,
                array("i", token_ids),  # a ninth of a list's memory, for the rows that wait
                one.params,
                cache_salt=self._cache_salt(one.values),
                later_tokens=_later_tokens(conversation, one.params),
                later_turns=one.num_turns - 1,
                num_truncated_tokens=num_truncated,
                sample_indices=one.missing if one.done and one.params.beam_width == 1 else (),
            )
        except RowError as error:
            result = error_result(one.row.index, error, None if isinstance(token_ids, RowError) else len(token_ids))
            if error.code == "prompt_too_long" and self._config.too_long == "skip":
                result = replace(result, finish_reason="skipped", stop_reason="too_long", error_code=None, error=None)
            self._end(group, one, result)
            return
        if not self._affords(request):
            self._end(group, one, replace(_unanswered(request), finish_reason="skipped", stop_reason="max_total_tokens"))
        elif request.max_tokens == 0:
            no_ids: list[int] | None = [] if self._config.token_ids else None
            empty = replace(_unanswered(request), response="", token_ids=no_ids, finish_reason="length", seed=request.seed)
            self._end(group, one, empty)
        elif not one.done or one.missing:
            if conversation is not None:
                group.conversations[one.row.index] = conversation
            group.requests.append(request)

    def _affords(self, request: Request) -> bool:
        """Return True while rows, taken in input order at their full length, keep within --max-total-tokens."""
        if self._budget is None:
            return True
        self._budget -= request.num_prompt_tokens + request.params.n * (request.max_tokens + request.later_tokens)
        return self._budget >= 0

    def _end(self, group: Group, one: _Pending, result: Result) -> None:
        """End a row before the engine: the same result for each of its samples and turns that isn't there."""
        results = [replace(result, sample_index=i, turn_index=t) for i in one.missing for t in range(one.num_turns)]
        if results:
            group.ended.append(results)

    def _params(self, values: dict[str, Any]) -> SamplingParams:
        try:
            given = values.get(SAMPLING_COLUMN)
            if isinstance(given, str):  # of a CSV file
                given = json.loads(given) if given.strip() else None
            return self._config.sampling.override(given)
        except ValueError as error:
            raise RowError("bad_sampling_params", str(error)) from error

    def _cache_salt(self, values: dict[str, Any]) -> str:
        """Return the text that keeps a row's K/V apart from others'; no salt, null and "" are the same."""
        column = self._config.cache_salt_column
        value = values.get(column) if column else None
        if value is not None and not isinstance(value, str):
            raise RowError("not_text", f"column {column} holds {type(value).__name__}, not text")
        return value or ""


def error_result(row_index: int, error: RowError, num_prompt_tokens: int | None = None) -> Result:
    """Return the result of a row that can't be answered."""
    return Result(row_index, error_code=error.code, error=error.message, num_prompt_tokens=num_prompt_tokens)


def _unanswered(request: Request) -> Result:
    """Return a result with what is known of a request's prompt."""
    return Result(
        request.row_index,
        num_prompt_tokens=request.num_prompt_tokens,
        num_truncated_tokens=request.num_truncated_tokens,
    )


def _later_tokens(conversation: Conversation | None, params: SamplingParams) -> int:
    """Return what a conversation's later turns may add to its length."""
    if conversation is None:
        return 0
    if params.beam_width > 1:
        raise RowError("bad_sampling_params", "beam search can't be used for several turns")
    return conversation.later_tokens(params.max_tokens)
