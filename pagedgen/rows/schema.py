"""The output's columns: ours, always the same, around the input's own; and how values become JSON."""

from __future__ import annotations

import base64
import datetime
import decimal
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Ours in order; the input's columns stand between the two groups.
HEAD_COLUMNS = ("id", "row_index", "sample_index", "turn_index")
TAIL_COLUMNS = (
    "response",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "num_prompt_tokens",
    "num_truncated_tokens",
    "num_cached_tokens",
    "num_generated_tokens",
    "score",
    "seed",
    "error_code",
    "error",
)


@dataclass
class Result:
    """What came of one row, sample and turn. `finish_reason` is stop, length, error or skipped."""

    row_index: int
    sample_index: int = 0
    turn_index: int = 0
    response: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str = "error"
    stop_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_truncated_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    score: float | None = None
    seed: int | None = None
    error_code: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class OutputSchema:
    """Names of the output's columns. An input column called like one of ours is written as `input_<name>`.

    `id_column`: the input's column that becomes `id`, None for the row's index. A column `id` that does isn't carried twice.
    """

    input_columns: tuple[str, ...]
    id_column: str | None
    with_token_ids: bool
    with_cached_tokens: bool
    names: dict[str, str] = field(init=False, repr=False, compare=False)  # input column -> output column

    def __post_init__(self) -> None:
        carried = [c for c in self.input_columns if c != "id" or self.id_column != "id"]
        taken = set(HEAD_COLUMNS + TAIL_COLUMNS) | set(carried)
        names = {}
        for column in carried:
            name = column
            while name in HEAD_COLUMNS + TAIL_COLUMNS or (name != column and name in taken):
                name = f"input_{name}"
            taken.add(name)
            names[column] = name
        object.__setattr__(self, "names", names)

    @property
    def tail_columns(self) -> list[str]:
        left_out = {"token_ids"} if not self.with_token_ids else set()
        left_out |= {"num_cached_tokens"} if not self.with_cached_tokens else set()
        return [c for c in TAIL_COLUMNS if c not in left_out]

    @property
    def columns(self) -> list[str]:
        """Return the output's column names in order."""
        return [*HEAD_COLUMNS, *self.names.values(), *self.tail_columns]

    def to_dict(self, result: Result, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return one output row with every column present, given the input row's values."""
        row: dict[str, Any] = {name: getattr(result, name) for name in HEAD_COLUMNS[1:]}
        row = {"id": values.get(self.id_column) if self.id_column else result.row_index, **row}
        for column, name in self.names.items():
            row[name] = values.get(column)
        row.update((name, getattr(result, name)) for name in self.tail_columns)
        return row


def own_types() -> dict[str, Any]:
    """Return the Arrow types of our columns, `id` left out: it has its column's."""
    import pyarrow as pa

    types: dict[str, Any] = dict.fromkeys(HEAD_COLUMNS[1:] + TAIL_COLUMNS, pa.string())
    types |= {"row_index": pa.int64(), "sample_index": pa.int32(), "turn_index": pa.int32()}
    types |= {"token_ids": pa.list_(pa.int32()), "score": pa.float64(), "seed": pa.uint64()}
    return types | {name: pa.int64() for name in TAIL_COLUMNS if name.startswith("num_")}


def text_of(value: str) -> str:
    """Return text that has a UTF-8 form: a lone surrogate, which has none, becomes a question mark."""
    return value.encode("utf-8", "replace").decode("utf-8")


def jsonable(value: Any) -> Any:
    """Return a value as JSON holds it: non-finite floats as null, decimals as their digits in text, times as ISO 8601, bytes
    in base64."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return str(value)
