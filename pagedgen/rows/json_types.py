"""The Arrow type of a column whose values come from JSON or CSV, found as the rows stream by.

A column gets the type that holds every value exactly. Where there is none (integers beside fractions, objects of different
members, integers past 64 bits, text that has no UTF-8 form) it is written as JSON text, which does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_INT64 = (-(2**63), 2**63 - 1)
_MAX_LEVELS = 90  # Arrow reads no Parquet schema beyond 100


@dataclass(frozen=True)
class JsonType:
    """What the values seen have in common. `kind`: null, bool, int, float, text, list, object, or any (JSON text only).

    `low`, `high`: the range of integers; `members`: an object's, by name in order, or a list's one element type as ("",).
    """

    kind: str
    low: int = 0
    high: int = 0
    members: tuple[tuple[str, JsonType], ...] = ()


NULL, BOOL, FLOAT, TEXT, ANY = (JsonType(kind) for kind in ("null", "bool", "float", "text", "any"))


def type_of(value: Any) -> JsonType:
    """Return the type of one value."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, str):
        return TEXT if value.isascii() or _has_utf8(value) else ANY
    if isinstance(value, int):
        return JsonType("int", value, value)
    if isinstance(value, float):
        return FLOAT
    if isinstance(value, list):
        element = NULL
        for member in value:
            element = join(element, type_of(member))
        return JsonType("list", members=(("", element),))
    assert isinstance(value, dict), type(value)
    if not value or not all(_has_utf8(name) for name in value):
        return ANY  # Parquet has no empty struct
    return JsonType("object", members=tuple((name, type_of(member)) for name, member in value.items()))


def join(a: JsonType, b: JsonType) -> JsonType:
    """Return the type that holds the values of both; commutative and associative."""
    if a is b or b.kind == "null":
        return a
    if a.kind == "null":
        return b
    if a.kind != b.kind or a.kind == "any":
        return ANY
    if a.kind == "int":
        return JsonType("int", min(a.low, b.low), max(a.high, b.high))
    if a.kind in ("list", "object"):
        if [name for name, _ in a.members] != [name for name, _ in b.members]:
            return ANY
        members = zip(a.members, b.members, strict=True)
        return JsonType(a.kind, members=tuple((name, join(x, y)) for (name, x), (_, y) in members))
    return a


def arrow_type(kind: JsonType) -> Any:
    """Return the Arrow type that holds a type's values exactly; None where only JSON text does. Nulls alone are text."""
    import pyarrow as pa

    if _parquet_levels(kind) > _MAX_LEVELS:
        return None
    if kind.kind == "int":
        if _INT64[0] <= kind.low and kind.high <= _INT64[1]:
            return pa.int64()
        return pa.uint64() if kind.low >= 0 and kind.high < 2**64 else None
    if kind.kind in ("list", "object"):
        members = [(name, arrow_type(member)) for name, member in kind.members]
        if any(member is None for _, member in members):
            return None
        return pa.list_(members[0][1]) if kind.kind == "list" else pa.struct(members)
    simple = {"null": pa.string(), "text": pa.string(), "bool": pa.bool_(), "float": pa.float64()}
    return simple.get(kind.kind)


def _parquet_levels(kind: JsonType) -> int:
    """Return how deep a type nests in a Parquet schema, where a list counts twice."""
    own = {"list": 2, "object": 1}.get(kind.kind, 0)
    return own + max((_parquet_levels(member) for _, member in kind.members), default=0)


class ColumnTypes:
    """The columns seen so far, in order of appearance, and their types. Memory grows with columns, not with rows."""

    def __init__(self, *, names_only: bool = False) -> None:
        """`names_only`: nobody will ask for the types."""
        self._types: dict[str, JsonType] = {}
        self._names_only = names_only

    def observe(self, values: Mapping[str, Any]) -> None:
        """Take note of one row; a column it lacks is null there."""
        for name, value in values.items():
            known = self._types.get(name)
            if self._names_only:
                self._types[name] = ANY
            elif known is ANY or (known is TEXT and isinstance(value, str) and value.isascii()):
                pass  # the commonest cases, at once
            else:
                found = type_of(value)
                self._types[name] = found if known is None else join(known, found)

    @property
    def names(self) -> list[str]:
        return list(self._types)

    def arrow_types(self) -> dict[str, Any]:
        """Return each column's Arrow type, None for JSON text."""
        return {name: arrow_type(kind) for name, kind in self._types.items()}


def _has_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
