"""The type of a JSON column: the same whatever the order of the rows, and one that holds every value exactly."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedgen.rows.json_types import ANY, FLOAT, NULL, TEXT, ColumnTypes, JsonType, arrow_type, join, type_of
from pagedgen.rows.schema import OutputSchema, Result
from pagedgen.rows.sinks import ParquetSink
from pagedgen.rows.sources import Chunk, Row

INTEGERS = st.one_of(st.integers(), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]))
TEXTS = st.text(st.characters() | st.sampled_from("\ud800\udfff\x00"), max_size=4)
NAMES = st.sampled_from(["a", "b", "", "a.b", "\x00", "\ud800"])
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
# Values of any kind seldom have a type in common, so most columns are made of one kind.
ALIKE = st.one_of(
    st.lists(st.none() | st.integers(-(2**63), 2**64), max_size=5),
    st.lists(st.none() | st.integers(0, 2**64 - 1), max_size=5),
    st.lists(st.none() | TEXTS, max_size=5),
    st.lists(st.none() | st.booleans(), max_size=5),
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    st.lists(st.none() | st.lists(st.none() | st.integers(), max_size=3), max_size=5),
    st.lists(st.none() | st.lists(st.none() | st.lists(st.none() | st.text(max_size=2), max_size=2), max_size=3), max_size=5),
    st.lists(
        st.none()
        | st.fixed_dictionaries({"a": st.none() | st.integers(), "": st.none() | st.lists(st.booleans(), max_size=2)}),
        max_size=5,
    ),
)
COLUMNS = ALIKE | st.lists(VALUES, max_size=5)
TYPES = VALUES.map(type_of)


@settings(deadline=None)
@given(TYPES, TYPES, TYPES)
def test_join_is_commutative_associative_and_idempotent(a, b, c):
    assert join(a, b) == join(b, a)
    assert join(join(a, b), c) == join(a, join(b, c))
    assert join(a, a) == a
    assert join(join(a, b), b) == join(a, b)
    assert join(a, NULL) == join(NULL, a) == a


@settings(deadline=None)
@given(COLUMNS.flatmap(lambda column: st.tuples(st.just(column), st.permutations(column))))
def test_a_columns_type_does_not_depend_on_the_order_of_its_rows(columns):
    found = []
    for column in columns:
        types = ColumnTypes()
        for value in column:
            types.observe({"x": value})
        found.append(types.arrow_types())
    assert found[0] == found[1]


def in_and_out(column):
    """Write a column and read it again; return its values, and True when they are JSON text."""
    types = ColumnTypes()
    types.observe({"x": None})
    for value in column:
        types.observe({"x": value})
    kinds = types.arrow_types()
    file = io.BytesIO()
    sink = ParquetSink(file, OutputSchema(("x",), None, False, False), kinds)
    rows = [Row(i, i + 1, {"x": value}) for i, value in enumerate(column)]
    sink.write(Chunk(rows), [(i, [Result(i)]) for i in range(len(rows))])
    sink.close({})
    return pq.read_table(io.BytesIO(file.getvalue())).column("x").to_pylist(), kinds["x"] is None


@settings(deadline=None, max_examples=200)
@given(COLUMNS)
def test_a_column_of_any_json_values_comes_back_exactly(column):
    """As it is or through `json.loads`; `repr` tells 1 from 1.0 and True, 0.0 from -0.0, and the order of members."""
    got, is_json = in_and_out(column)
    if is_json:
        assert all(text is None or isinstance(text, str) for text in got)
        got = [None if text is None else json.loads(text) for text in got]
    assert repr(got) == repr(column)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([], pa.string()),
        ([None], pa.string()),
        ([None, 1], pa.int64()),
        ([-(2**63), 2**63 - 1], pa.int64()),
        ([0, 2**63], pa.uint64()),
        ([-1, 2**63], None),
        ([2**64], None),
        ([-(2**63) - 1], None),
        ([True, 1], None),
        ([1, 1.0], None),
        ([1.0, float("nan")], pa.float64()),
        (["a", "\ud800"], None),
        ([[], [None]], pa.list_(pa.string())),
        ([[], [1]], pa.list_(pa.int64())),
        ([[1], ["a"]], None),
        ([[1], {"a": 1}], None),
        ([{}], None),
        ([{"a": 1}, {"a": 1, "b": 1}], None),
        ([{"a": None}, {"a": [1]}], pa.struct({"a": pa.list_(pa.int64())})),
        ([{"a": {}}], None),
        ([{"\ud800": 1}], None),
    ],
)
def test_the_type_is_the_one_that_holds_all_values_exactly(values, kind):
    types = ColumnTypes()
    types.observe({"x": None})
    for value in values:
        types.observe({"x": value})
    assert types.arrow_types() == {"x": kind}


def test_columns_come_in_order_of_appearance_and_a_missing_one_is_null():
    types = ColumnTypes()
    for row in ({"b": "x"}, {"a": 1}, {"b": "ü", "c": None}, {"a": 0.5}, {"b": "\ud800"}):
        types.observe(row)
    assert types.names == ["b", "a", "c"]
    assert types.arrow_types() == {"b": None, "a": None, "c": pa.string()}


def test_the_fast_ways_for_common_columns_give_what_the_slow_one_gives():
    for values in (["a", None], ["a", 1], [1, "a"], [{}, 1], ["a", "\ud800"]):
        types = ColumnTypes()
        slow = NULL
        for value in values:
            types.observe({"x": value})
            slow = join(slow, type_of(value))
        assert types.arrow_types() == {"x": arrow_type(slow)}


def test_equal_types_are_equal_whoever_made_them():
    assert type_of("a") == TEXT == JsonType("text")
    assert type_of(0.5) == FLOAT
    assert type_of({}) == ANY
    assert join(type_of([1]), type_of([5])) == JsonType("list", members=(("", JsonType("int", 1, 5)),))
