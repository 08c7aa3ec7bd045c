"""The output's columns: ours, always the same, around the input's own."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
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
    "num_cached_tokens",
    "num_generated_tokens",
    "score",
    "seed",
    "error_code",
    "error",
)


@dataclass
class Result:
    """One finished row: the input's values and what came of them. `finish_reason` is stop, length or error."""

    row_index: int
    row_id: Any
    values: dict[str, Any]
    sample_index: int = 0
    turn_index: int = 0
    response: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str = "error"
    stop_reason: int | str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    score: float | None = None
    seed: int | None = None
    error_code: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class OutputSchema:
    """Names of the output's columns. An input column called like one of ours is written as `input_<name>`."""

    input_columns: tuple[str, ...]
    with_token_ids: bool
    names: dict[str, str] = field(init=False, repr=False, compare=False)  # input column -> output column

    def __post_init__(self) -> None:
        taken = set(HEAD_COLUMNS + TAIL_COLUMNS) | set(self.input_columns)
        names = {}
        for column in self.input_columns:
            name = column
            while name in HEAD_COLUMNS + TAIL_COLUMNS or (name != column and name in taken):
                name = f"input_{name}"
            taken.add(name)
            names[column] = name
        object.__setattr__(self, "names", names)

    @property
    def columns(self) -> list[str]:
        """Return the output's column names in order."""
        tail = [c for c in TAIL_COLUMNS if c != "token_ids" or self.with_token_ids]
        return [*HEAD_COLUMNS, *self.names.values(), *tail]

    def to_dict(self, result: Result) -> dict[str, Any]:
        """Return one output row with every column present."""
        row: dict[str, Any] = {
            "id": result.row_id,
            "row_index": result.row_index,
            "sample_index": result.sample_index,
            "turn_index": result.turn_index,
        }
        for column in self.input_columns:
            row[self.names[column]] = result.values.get(column)
        row["response"] = result.response
        if self.with_token_ids:
            row["token_ids"] = result.token_ids
        row["finish_reason"] = result.finish_reason
        row["stop_reason"] = None if result.stop_reason is None else str(result.stop_reason)
        row["num_prompt_tokens"] = result.num_prompt_tokens
        row["num_cached_tokens"] = result.num_cached_tokens
        row["num_generated_tokens"] = result.num_generated_tokens
        row["score"] = result.score
        row["seed"] = result.seed
        row["error_code"] = result.error_code
        row["error"] = result.error
        return row

    def arrow_schema(
        self, rows: list[dict[str, Any]], input_types: dict[str, Any], id_column: str | None
    ) -> tuple[Any, set[str]]:
        """Return the Arrow schema of the output, and the names of columns whose values are written as JSON text.

        `input_types` are the Parquet types of input columns; a column without one (JSONL) gets the type its values have, or
        JSON text where they have no common one that holds them exactly.
        """
        import pyarrow as pa

        types: dict[str, Any] = dict.fromkeys(HEAD_COLUMNS + TAIL_COLUMNS, pa.string())
        types |= {"row_index": pa.int64(), "sample_index": pa.int32(), "turn_index": pa.int32()}
        types |= {"token_ids": pa.list_(pa.int32()), "score": pa.float64(), "seed": pa.uint64()}
        types |= dict.fromkeys(("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens"), pa.int64())
        types["id"] = input_types.get(id_column) if id_column else pa.int64()
        types |= {name: input_types.get(column) for column, name in self.names.items()}
        as_json = set()
        for name, arrow_type in types.items():
            if arrow_type is None:
                inferred = _infer([row[name] for row in rows])
                types[name] = inferred or pa.string()
                if inferred is None:
                    as_json.add(name)
        return pa.schema([pa.field(text_of(name), types[name]) for name in self.columns]), as_json


def _infer(values: list[Any]) -> Any:
    """Return the Arrow type that holds every value exactly, or None where only JSON text does."""
    import pyarrow as pa

    if all(value is None or isinstance(value, str) for value in values):
        return pa.string()
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None
    if _has_no_members(array.type):
        return None
    if pa.types.is_floating(array.type) and any(isinstance(v, int) for v in values):
        return None  # integers beside floats: a float column would lose their exact value
    return array.type if repr(array.to_pylist()) == repr(values) else None  # repr: NaN equals itself, 1 is not 1.0 or True


def _has_no_members(arrow_type: Any) -> bool:
    """True for types Parquet can't store: empty structs anywhere inside."""
    import pyarrow as pa

    if pa.types.is_struct(arrow_type):
        members = [arrow_type.field(i).type for i in range(arrow_type.num_fields)]
        return not members or any(_has_no_members(m) for m in members)
    if pa.types.is_list(arrow_type):
        return _has_no_members(arrow_type.value_type)
    return False


def fit(value: Any, arrow_type: Any, *, as_json: bool) -> Any:
    """Return a value as its column takes it: as JSON text, as text that has a UTF-8 form, or as it is."""
    import pyarrow as pa

    if value is None:
        return None
    if as_json:
        return text_of(json.dumps(jsonable(value), ensure_ascii=False))
    if isinstance(value, str) and (pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)):
        return text_of(value)
    return value


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
