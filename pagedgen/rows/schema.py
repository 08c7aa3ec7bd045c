"""The output's columns: ours, always the same, around the input's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

# Ours in order; the input's columns stand between the two groups.
HEAD_COLUMNS = ("id", "row_index", "sample_index")
TAIL_COLUMNS = (
    "response",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_generated_tokens",
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
    response: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str = "error"
    stop_reason: int | str | None = None
    num_prompt_tokens: int | None = None
    num_generated_tokens: int = 0
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
        row: dict[str, Any] = {"id": result.row_id, "row_index": result.row_index, "sample_index": 0}
        for column in self.input_columns:
            row[self.names[column]] = result.values.get(column)
        row["response"] = result.response
        if self.with_token_ids:
            row["token_ids"] = result.token_ids
        row["finish_reason"] = result.finish_reason
        row["stop_reason"] = None if result.stop_reason is None else str(result.stop_reason)
        row["num_prompt_tokens"] = result.num_prompt_tokens
        row["num_cached_tokens"] = 0
        row["num_generated_tokens"] = result.num_generated_tokens
        row["seed"] = result.seed
        row["error_code"] = result.error_code
        row["error"] = result.error
        return row

    def arrow_schema(self, rows: list[dict[str, Any]], input_types: dict[str, Any], id_column: str | None):
        """Return the Arrow schema of the output.

        `input_types` are the Parquet types of input columns; a column without one (JSONL) gets the type its values have, or
        strings of JSON where they have no common type.
        """
        import pyarrow as pa

        fields = []
        id_type = input_types.get(id_column) if id_column else pa.int64()
        fields.append(pa.field("id", id_type or _infer(row["id"] for row in rows)))
        fields += [pa.field("row_index", pa.int64()), pa.field("sample_index", pa.int32())]
        for column in self.input_columns:
            name = self.names[column]
            fields.append(pa.field(text_of(name), input_types.get(column) or _infer(row[name] for row in rows)))
        ours = {
            "response": pa.string(),
            "token_ids": pa.list_(pa.int32()),
            "finish_reason": pa.string(),
            "stop_reason": pa.string(),
            "num_prompt_tokens": pa.int64(),
            "num_cached_tokens": pa.int64(),
            "num_generated_tokens": pa.int64(),
            "seed": pa.uint64(),
            "error_code": pa.string(),
            "error": pa.string(),
        }
        fields += [pa.field(n, ours[n]) for n in TAIL_COLUMNS if n != "token_ids" or self.with_token_ids]
        return pa.schema(fields)


def _infer(values: Any):
    """Return the Arrow type that holds every value exactly, or string where only JSON text does."""
    import pyarrow as pa

    values = list(values)
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.string()
    if pa.types.is_null(array.type) or _has_no_members(array.type):
        return pa.string()
    if pa.types.is_floating(array.type) and any(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return pa.string()  # integers beside floats: a float column would lose their exact value
    return array.type if array.to_pylist() == values else pa.string()


def _has_no_members(arrow_type: Any) -> bool:
    """True for types Parquet can't store or that lose keys: empty structs anywhere inside."""
    import pyarrow as pa

    if pa.types.is_struct(arrow_type):
        return arrow_type.num_fields == 0 or any(
            _has_no_members(arrow_type.field(i).type) for i in range(arrow_type.num_fields)
        )
    if pa.types.is_list(arrow_type):
        return _has_no_members(arrow_type.value_type)
    return False


def fit(value: Any, arrow_type: Any) -> Any:
    """Return a value as a column of the given type takes it: anything but text in a text column becomes JSON."""
    import pyarrow as pa

    if value is None or not (pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)):
        return value
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return text_of(value)


def text_of(value: str) -> str:
    """Return text that has a UTF-8 form: a lone surrogate, which has none, becomes a question mark."""
    return value.encode("utf-8", "replace").decode("utf-8")
