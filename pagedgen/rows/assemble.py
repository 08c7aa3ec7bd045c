"""The last step of a job: input rows and their results, both in order, become the output in one pass. Memory does not grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import RowError
from .inputs import Input, Selection
from .schema import Result
from .sinks import Picked, Sink


@dataclass
class Totals:
    """What is counted while the output is written."""

    num_rows: int = 0
    num_results: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    row_errors: Counter[str] = field(default_factory=Counter)
    num_errors: int = 0
    first_error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    packed_tokens: int = 0  # of all answers, prompts included
    padded_tokens: int = 0  # the same in padded batches


class _Counting:
    """Adds results up; padded batches are those of `batch_rows` answers in input order."""

    def __init__(self, batch_rows: int):
        self.totals = Totals()
        self._batch_rows = batch_rows
        self._in_batch = self._longest = 0

    def add(self, results: list[Result]) -> None:
        """Count one row's results."""
        totals = self.totals
        totals.num_rows += 1
        totals.num_results += len(results)
        prompts: dict[tuple[int, int], int] = {}
        for result in results:
            totals.finish_reasons[result.finish_reason] += 1
            totals.output_tokens += result.num_generated_tokens
            if result.error_code is not None:
                totals.row_errors[result.error_code] += 1
                totals.num_errors += 1
                totals.first_error = totals.first_error or f"row {result.row_index}: {result.error}"
            elif result.num_generated_tokens:
                prompt = result.num_prompt_tokens or 0
                # samples share their first turn's prompt
                prompts[result.turn_index, result.turn_index and result.sample_index] = prompt
                self._pad(prompt + result.num_generated_tokens)
        totals.prompt_tokens += sum(prompts.values())

    def _pad(self, length: int) -> None:
        self.totals.packed_tokens += length
        self._in_batch += 1
        self._longest = max(self._longest, length)
        if self._in_batch == self._batch_rows:
            self.close()

    def close(self) -> None:
        """Count the batch that is not full."""
        self.totals.padded_tokens += self._in_batch * self._longest
        self._in_batch = self._longest = 0


def assemble(
    source: Input,
    selection: Selection,
    results: Iterator[Result],
    sink: Sink,
    *,
    batch_rows: int,
    with_values: bool,
) -> Totals:
    """Write every selected row of the input with its results, which come in the order of their keys; return what was counted.

    `with_values`: the sink wants the rows' values as Python's even where they come in batches.

    Raises:
        AssertionError: a row has no result, or an incomplete set of them, or a result no row.
    """
    counting = _Counting(batch_rows)
    upcoming = next(results, None)
    for chunk in source.chunks(values=with_values):
        picked: Picked = []
        for place, row in enumerate(chunk.rows):
            if not selection.takes(row.index):
                continue
            own: list[Result] = []
            while upcoming is not None and upcoming.row_index == row.index:
                own.append(upcoming)
                upcoming = next(results, None)
            _check_complete(row.index, own)
            if row.error is not None:  # a column that only the output needs is broken: the row is not whole
                own = [_failed(result, row.error) for result in own]
            counting.add(own)
            picked.append((place, own))
        if picked:
            sink.write(chunk, picked)
    counting.close()
    assert upcoming is None, f"row {upcoming.row_index} is not in the input"
    return counting.totals


def _failed(result: Result, error: RowError) -> Result:
    """Return a result with the error of its row instead of an answer."""
    where = (result.row_index, result.sample_index, result.turn_index)
    return Result(*where, error_code=error.code, error=error.message)


def _check_complete(row_index: int, results: list[Result]) -> None:
    """Read = written + failed: a row has all of its samples, each from its first turn on, none twice."""
    assert results, f"row {row_index} has no answer"
    allowed = [(0, 0)]
    for result in results:
        sample, turn = result.sample_index, result.turn_index
        assert (sample, turn) in allowed, f"row {row_index}: sample {sample}, turn {turn} is out of order"
        allowed = [(sample, turn + 1), (sample + 1, 0)]
