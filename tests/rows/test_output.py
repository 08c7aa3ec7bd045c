"""Every value of the input in the output exactly, every row once and in order, whatever the formats."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedgen.errors import OutputError, UsageError
from pagedgen.rows import sinks
from pagedgen.rows.assemble import assemble
from pagedgen.rows.inputs import Input, Selection
from pagedgen.rows.json_types import ColumnTypes
from pagedgen.rows.schema import HEAD_COLUMNS, TAIL_COLUMNS, OutputSchema, Result
from pagedgen.rows.sinks import MANIFEST_KEY, JsonlSink, ParquetSink, json_line, parquet_schema
from pagedgen.rows.sources import expand_inputs


def done(row, sample=0, turn=0, **fields):
    return Result(row, sample, turn, **{"response": f"r{row}", "finish_reason": "stop", **fields})


def opened(*paths, limit=None):
    return Input(expand_inputs([str(p) for p in paths])[0], limit)


def types_of(source):
    """As a job finds them: from the schema, else from the rows."""
    schema = source.schema()
    if schema is not None:
        return {field.name: field.type for field in schema}
    types = ColumnTypes()
    for chunk in source.chunks():
        for row in chunk.rows:
            types.observe(row.values)
    return types.arrow_types()


def to_parquet(source, results=None, *, id_column=None, selection=None, types=None, token_ids=False):
    types = types_of(source) if types is None else types
    file = io.BytesIO()
    sink = ParquetSink(file, OutputSchema(tuple(types), id_column, token_ids, False), types)
    results = [done(i) for i in range(source.count())] if results is None else results
    assemble(source, selection or Selection(), iter(results), sink, batch_rows=4, with_values=False)
    sink.close({"n": 1})
    return pq.ParquetFile(io.BytesIO(file.getvalue()))


def to_jsonl(source, results=None, *, id_column=None, selection=None):
    file = io.BytesIO()
    sink = JsonlSink(file, OutputSchema(tuple(types_of(source)), id_column, False, False))
    results = [done(i) for i in range(source.count())] if results is None else results
    assemble(source, selection or Selection(), iter(results), sink, batch_rows=4, with_values=True)
    sink.close({})
    return [json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is no JSON")) for line in file.getvalue().splitlines()]


def as_table(tmp_path, table, **settings):
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    return to_parquet(opened(tmp_path / "in.parquet"), **settings).read()


def as_jsonl_file(tmp_path, rows):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return opened(tmp_path / "in.jsonl")


# Columns


def test_every_row_has_every_column_in_one_order(tmp_path):
    schema = OutputSchema(("prompt", "response", "error"), None, with_token_ids=True, with_cached_tokens=True)
    good = schema.to_dict(done(0), {"prompt": "p", "response": "theirs"})
    bad = schema.to_dict(Result(1, error_code="bad_json", error="x"), {})
    assert list(good) == list(bad) == schema.columns
    assert schema.columns == [*HEAD_COLUMNS, "prompt", "input_response", "input_error", *TAIL_COLUMNS]
    assert good["response"] == "r0"
    assert good["input_response"] == "theirs"
    assert bad["prompt"] is None


def test_columns_that_were_not_asked_for_are_left_out():
    columns = OutputSchema(("p",), None, with_token_ids=False, with_cached_tokens=False).columns
    assert columns == [*HEAD_COLUMNS, "p", *(c for c in TAIL_COLUMNS if c not in ("token_ids", "num_cached_tokens"))]


@pytest.mark.parametrize(
    "columns",
    [
        ("response", "input_response"),
        ("input_response", "response"),
        ("response", "input_response", "input_input_response"),
        ("input_input_error", "input_error", "error"),
        ("id", "input_id"),
        ("row_index", "seed", "score", "stop_reason", "token_ids", "num_cached_tokens"),
    ],
)
def test_names_that_collide_with_ours_get_a_prefix_until_they_are_free(columns):
    schema = OutputSchema(columns, None, with_token_ids=True, with_cached_tokens=True)
    names = schema.columns
    assert len(set(names)) == len(names) == len(HEAD_COLUMNS) + len(columns) + len(TAIL_COLUMNS)
    row = schema.to_dict(done(5), {c: f"theirs {c}" for c in columns})
    assert row["id"] == row["row_index"] == 5
    assert row["response"] == "r5"
    for column in columns:
        name = schema.names[column]
        assert row[name] == f"theirs {column}"
        if column in HEAD_COLUMNS + TAIL_COLUMNS:
            assert name.startswith("input_") and name.endswith(column)
        else:
            assert name == column


def test_the_id_is_the_rows_index_or_its_column_which_is_not_carried_twice():
    values = {"id": "x", "key": 7}
    own_id = OutputSchema(("id", "key"), "id", False, False)
    assert own_id.columns.count("id") == 1 and "input_id" not in own_id.columns
    assert own_id.to_dict(done(3), values)["id"] == "x"
    assert OutputSchema(("key",), None, False, False).to_dict(done(3), values)["id"] == 3
    by_key = OutputSchema(("id", "key"), "key", False, False).to_dict(done(3), values)
    assert (by_key["id"], by_key["key"], by_key["input_id"]) == (7, 7, "x")
    assert OutputSchema(("id",), "id", False, False).to_dict(done(3), {})["id"] is None


@pytest.mark.parametrize("columns", [("\ud800", "\ud801"), ("?", "\ud800"), ("\ud800response", "?response")])
def test_columns_whose_names_have_no_utf8_form_stay_apart_in_parquet(columns):
    types = dict.fromkeys(columns, pa.int64())
    names = parquet_schema(OutputSchema(columns, None, False, False), types).names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["", "a.b", "a\x00b", "ü", "list", "\ud800"])
def test_any_name_of_a_json_column_can_be_written(tmp_path, name):
    source = as_jsonl_file(tmp_path, [{name: 1, "a": {"b": 2}}])
    (row,) = to_parquet(source).read().to_pylist()
    assert row[name.replace("\ud800", "?")] == 1
    assert row["a"] == {"b": 2}
    assert to_jsonl(source)[0][name] == 1


# Values of columnar inputs

SECONDS = datetime.datetime(2026, 1, 2, 3, 4, 5)
EXACT = {
    "int64": pa.array([2**63 - 1, 2**53 + 1, None, -(2**63)], pa.int64()),
    "uint64": pa.array([2**64 - 1, 0, None, 1], pa.uint64()),
    "int8": pa.array([1, -128, None, 127], pa.int8()),
    "float": pa.array([0.1, math.inf, None, -0.0]),
    "float32": pa.array([0.1, math.inf, None, -0.0], pa.float32()),
    "float16": pa.array([0.5, math.inf, None, -0.0], pa.float16()),
    "bool": pa.array([True, False, None, True]),
    "decimal": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-3.00"), None], pa.decimal128(10, 2)),
    "decimal256": pa.array([decimal.Decimal(10**60), None, decimal.Decimal(-1), None], pa.decimal256(70, 3)),
    "time": pa.array([SECONDS, None] * 2, pa.timestamp("us")),
    "zone": pa.array([SECONDS, None] * 2, pa.timestamp("ms", "Europe/Berlin")),
    "ns": pa.array([1_234_567_891, None, -1, 2**63 - 1], pa.int64()).cast(pa.timestamp("ns", "UTC")),
    "far": pa.array([4 * 10**17, None, -(4 * 10**17), 0], pa.int64()).cast(pa.timestamp("us")),
    "date": pa.array([2**31 - 1, None, -(2**31), 0], pa.int32()).cast(pa.date32()),
    "time64": pa.array([1_234_567_891, None, 0, 1], pa.int64()).cast(pa.time64("ns")),
    "duration": pa.array([1_234_567_891, None, 0, -1], pa.int64()).cast(pa.duration("ns")),
    "text": pa.array(["01", "", None, "ü\x00"]),
    "large": pa.array(["01", "", None, "ü\x00"], pa.large_string()),
    "words": pa.array(["a", None, "b", "a"]).dictionary_encode(),
    "bytes": pa.array([b"\xff\x00", b"", None, b"a"]),
    "fixed": pa.array([b"\xff\x00", None, b"aa", b"bb"], pa.binary(2)),
    "list": pa.array([[{"a": 1}], None, [], [{"a": None}]], pa.list_(pa.struct({"a": pa.int8()}))),
    "pair": pa.array([[1, None], None, [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
    "struct": pa.array([{"a": 1, "b": None}, None, {"a": None, "b": ["x"]}, {"a": 2, "b": []}]),
    "map": pa.array([[("k", 1)], None, [], [("k", None)]], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(4),
    "uuid": pa.array([b"0123456789abcdef", None] * 2, pa.uuid()),
}
VIEWS = {
    "text": pa.array(["a", None, "", "longer than twelve bytes"], pa.string_view()),
    "bytes": pa.array([b"a", None, b"", b"longer than twelve bytes"], pa.binary_view()),
    "inside": pa.array([["a"], None, [], ["longer than twelve bytes"]], pa.list_(pa.string_view())),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_parquet_column_comes_back_as_it_was(tmp_path, name):
    out = as_table(tmp_path, pa.table({"x": EXACT[name]}))
    there = pq.read_table(tmp_path / "in.parquet").column("x")
    assert out.column("x").combine_chunks().equals(there.combine_chunks())
    assert out.schema.field("x").type == there.type


@pytest.mark.parametrize("name", VIEWS)
def test_a_parquet_column_of_views_comes_back_as_it_was(tmp_path, name):
    out = as_table(tmp_path, pa.table({"x": VIEWS[name]}))
    assert out.column("x").to_pylist() == VIEWS[name].to_pylist()


@pytest.mark.parametrize("name", ["int64", "uint64", "decimal", "text", "words", "uuid", "ns"])
def test_an_id_column_is_kept_exactly_with_its_type(tmp_path, name):
    out = as_table(tmp_path, pa.table({"key": EXACT[name], "id": range(4)}), id_column="key")
    for column in ("id", "key"):
        assert out.column(column).combine_chunks().equals(pq.read_table(tmp_path / "in.parquet").column("key").combine_chunks())
    assert out.column("input_id").to_pylist() == [0, 1, 2, 3]


def test_parquet_to_jsonl_is_strict_json_without_rounding(tmp_path):
    table = pa.table({name: EXACT[name] for name in EXACT})
    pq.write_table(table, tmp_path / "in.parquet")
    first, *_, last = to_jsonl(opened(tmp_path / "in.parquet"))
    expected = {
        "int64": 2**63 - 1, "uint64": 2**64 - 1, "float": 0.1, "float32": 0.10000000149011612, "bool": True, "decimal": "1.10",
        "decimal256": "1" + "0" * 60 + ".000", "time": "2026-01-02T03:04:05", "ns": 1_234_567_891, "far": 4 * 10**17,
        "date": 2**31 - 1, "time64": 1_234_567_891, "duration": 1_234_567_891, "text": "01", "words": "a", "bytes": "/wA=",
        "list": [{"a": 1}], "pair": [1, None], "struct": {"a": 1, "b": None}, "map": [["k", 1]], "null": None,
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected
    assert last["text"] == "ü\x00"
    assert math.copysign(1, last["float"]) == -1


def test_nulls_fill_what_a_file_or_a_broken_group_lacks(tmp_path):
    columns = {
        "x": range(6),
        "w": pa.array(["a", "b"] * 3).dictionary_encode(),
        "m": pa.array([[("k", 1)]] * 6, EXACT["map"].type),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=3, use_dictionary=False, write_page_checksum=True)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    begin = pq.read_metadata(tmp_path / "a.parquet").row_group(1).column(0).data_page_offset
    content[begin : begin + 40] = bytes(40)
    (tmp_path / "a.parquet").write_bytes(content)
    pq.write_table(pa.table({"x": [6], "y": [0.5]}), tmp_path / "b.parquet")
    out = to_parquet(opened(tmp_path)).read()
    assert out.column("row_index").to_pylist() == list(range(7))
    assert out.column("x").to_pylist() == [0, 1, 2, None, None, None, 6]
    assert out.column("w").to_pylist() == ["a", "b", "a", None, None, None, None]
    assert out.column("m").to_pylist() == [[("k", 1)]] * 3 + [None] * 4
    assert out.column("y").to_pylist() == [None] * 6 + [0.5]


@pytest.mark.parametrize(
    "kind",
    [pa.month_day_nano_interval(), pa.run_end_encoded(pa.int32(), pa.string()), pa.list_(pa.struct([])),
     pa.dense_union([pa.field("a", pa.int8())])],
    ids=str,
)  # fmt: skip
def test_a_type_parquet_does_not_have_is_refused_with_its_column(kind):
    with pytest.raises(UsageError, match=r"column odd of type .*\.jsonl"):
        parquet_schema(OutputSchema(("a", "odd"), None, False, False), {"a": pa.int8(), "odd": kind})


def test_a_struct_without_members_is_refused_with_its_column():
    with pytest.raises(UsageError, match=r"column odd of type struct<>"):
        parquet_schema(OutputSchema(("odd",), None, False, False), {"odd": pa.struct([])})


def test_times_in_seconds_that_parquet_can_not_hold_are_told(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset(pa.table({"t": pa.array([10**17], pa.int64()).cast(pa.timestamp("s"))})).save_to_disk(tmp_path / "in")
    source = opened(tmp_path / "in")
    with pytest.raises(OutputError, match="can't write the rows as Parquet"):
        to_parquet(source)


def test_a_refused_columns_name_is_the_outputs():
    with pytest.raises(UsageError, match="column input_response"):
        parquet_schema(OutputSchema(("response",), None, False, False), {"response": pa.month_day_nano_interval()})


# Values of JSON and CSV inputs


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, -(2**63), 2**63 - 1], pa.int64()),
        ([0, 2**64 - 1, None], pa.uint64()),
        ([True, None, False], pa.bool_()),
        ([0.1, -0.0, None, 1e308, 5e-324, 1.0], pa.float64()),
        (["1", "", None, "ü\x00"], pa.string()),
        ([None, None], pa.string()),
        ([[1, None], [], None], pa.list_(pa.int64())),
        ([[], None], pa.list_(pa.string())),
        ([{"a": 1, "b": None}, {"a": None, "b": ["x"]}, None], pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())})),
        ([[{"a": 1}], [{"a": 2**63}]], pa.list_(pa.struct({"a": pa.uint64()}))),
    ],
)
def test_a_json_column_with_one_exact_type_has_it(tmp_path, values, kind):
    out = to_parquet(as_jsonl_file(tmp_path, [{"x": v} for v in values])).read()
    assert out.schema.field("x").type.equals(kind)
    assert repr(out.column("x").to_pylist()) == repr(values)


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5, 3], [1, "a", None], [2**70, 1], [-1, 2**63], [{"a": 1}, {"b": 2}], [{}, {}], [[1], "x"], ["\ud800", "b"],
        [2**53 + 1, 0.5], ["1", 1], [{"a": "\ud800"}, 1], [["\ud800"], None], [True, 1], [[{}], []], [{"a": {}}, None],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [{"\ud800": 1}], [[1], [0.5]], [{"a": 1}, {"a": "x"}], [[1, "x"], None],
    ],
)  # fmt: skip
def test_a_column_without_one_exact_type_is_json_text(tmp_path, values):
    """Nothing is rounded and nothing fails."""
    source = as_jsonl_file(tmp_path, [{"x": v} for v in values])
    out = to_parquet(source).read()
    assert out.schema.field("x").type == pa.string()
    got = [None if text is None else json.loads(text) for text in out.column("x").to_pylist()]
    assert repr(got) == repr(values)
    assert repr([row["x"] for row in to_jsonl(source)]) == repr(values)


def test_nan_and_infinities_are_null_in_json_and_themselves_in_parquet(tmp_path):
    source = as_jsonl_file(tmp_path, [{"x": math.nan}, {"x": math.inf}, {"x": 1.5}])
    assert [row["x"] for row in to_jsonl(source)] == [None, None, 1.5]
    assert repr(to_parquet(source).read().column("x").to_pylist()) == "[nan, inf, 1.5]"


@pytest.mark.parametrize("depth", [10, 45, 62])
@pytest.mark.parametrize("kind", ["lists", "objects", "both"])
def test_values_as_deep_as_the_input_may_be_come_back(tmp_path, depth, kind):
    value = 1
    for i in range(depth):
        value = [value] if kind == "lists" or (kind == "both" and i % 2) else {"a": value}
    out = to_parquet(as_jsonl_file(tmp_path, [{"x": value}])).read().column("x").to_pylist()
    assert (json.loads(out[0]) if isinstance(out[0], str) else out[0]) == value


def test_a_row_whose_other_columns_are_broken_is_an_error(tmp_path):
    """The prompt could be read and was answered, but what the output carries beside it is lost."""
    table = pa.table({"prompt": [f"p{i}" for i in range(40)], "other": [f"{i}" * 50 for i in range(40)]})
    path = tmp_path / "in.parquet"
    pq.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"25" * 50)] ^= 1
    path.write_bytes(bytes(content))
    for rows in (to_jsonl(opened(path)), to_parquet(opened(path)).read().to_pylist()):
        assert [r["error_code"] for r in rows] == [None] * 20 + ["unreadable"] * 10 + [None] * 10
        assert all((r["response"] is None) == (r["other"] is None) == (r["error"] is not None) for r in rows)


def test_csv_columns_are_text(tmp_path):
    (tmp_path / "in.csv").write_text("id,x\n01,1.0\n2,\n")
    out = to_parquet(opened(tmp_path / "in.csv"), id_column="id").read()
    assert out.column("id").to_pylist() == ["01", "2"]
    assert out.column("x").to_pylist() == ["1.0", ""]


@pytest.mark.parametrize(
    ("column", "line"),
    [
        (pa.array([1]), '{"x": 0.5}'),
        (pa.array([decimal.Decimal("1.10")]), '{"x": 1}'),
        (pa.array([SECONDS]), '{"x": null}'),
        (pa.array([b"\xff"]), '{"y": 1}'),
    ],
    ids=["int and float", "decimal", "time", "bytes"],
)
def test_a_parquet_file_beside_json_lines_can_be_written_as_parquet(tmp_path, column, line):
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(line + "\n")
    try:
        out = to_parquet(opened(tmp_path))
    except UsageError:
        return  # refusing the mixture would do as well
    assert out.read().column("row_index").to_pylist() == [0, 1]


def test_json_lines_are_strict_json():
    row = {
        "a": float("nan"),
        "b": float("inf"),
        "c": 2**70,
        "d": decimal.Decimal("1.10"),
        "e": b"\xff",
        "f": "\ud800",
        "g": "ü",
    }
    line = json_line(row)
    back = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert back == {"a": None, "b": None, "c": 2**70, "d": "1.10", "e": "/w==", "f": "\ud800", "g": "ü"}
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert "ü".encode() in json_line({"g": "ü"})


def test_our_own_columns_have_their_types_and_text_without_utf8_form_is_marked(tmp_path):
    result = done(
        0, response="a\ud800b", token_ids=[1, 2], seed=2**64 - 1, score=-0.5, stop_reason="\udfff", num_prompt_tokens=3
    )
    out = to_parquet(as_jsonl_file(tmp_path, [{"p": 1}]), [result], token_ids=True).read()
    (row,) = out.to_pylist()
    assert (row["response"], row["stop_reason"]) == ("a?b", "?")
    assert (row["token_ids"], row["seed"], row["score"]) == ([1, 2], 2**64 - 1, -0.5)
    kinds = {"row_index": pa.int64(), "sample_index": pa.int32(), "seed": pa.uint64(), "num_prompt_tokens": pa.int64()}
    assert {name: out.schema.field(name).type for name in kinds} == kinds
    assert to_jsonl(as_jsonl_file(tmp_path, [{"p": 1}]), [result])[0]["response"] == "a\ud800b"


# Assembling


def rows_source(tmp_path, count=5):
    return as_jsonl_file(tmp_path, [{"n": i} for i in range(count)])


@pytest.mark.parametrize(
    "results",
    [
        [],
        [done(0), done(1), done(3), done(4)],
        [done(1), done(2), done(3), done(4)],
        [done(0), done(1), done(2), done(3)],
        [*(done(i) for i in range(5)), done(5)],
        [*(done(i) for i in range(5)), done(4, 1), done(2)],
        [done(0), done(0), *(done(i) for i in range(1, 5))],
        [done(0), done(2), done(1), done(3), done(4)],
        [*(done(i) for i in range(4)), done(4, 1)],
        [*(done(i) for i in range(4)), done(4, 0, 1)],
        [*(done(i) for i in range(5)), done(4, 2)],
        [*(done(i) for i in range(5)), done(4, 0, 2)],
        [*(done(i) for i in range(5)), done(4, 1), done(4, 0, 1)],
        [*(done(i) for i in range(5)), done(4, 1), done(4, 1)],
        [*(done(i) for i in range(5)), done(4, 1, 1)],
    ],
    ids=["none", "one missing", "first missing", "last missing", "stray", "stray after samples", "twice", "out of order",
         "no first sample", "no first turn", "a sample missing", "a turn missing", "samples out of order", "sample twice",
         "no first turn of a sample"],
)  # fmt: skip
def test_results_that_are_missing_double_stray_or_out_of_order_are_refused(tmp_path, results):
    for write in (to_jsonl, to_parquet):
        with pytest.raises(AssertionError, match="row"):
            write(rows_source(tmp_path), results)


def test_a_result_of_a_row_that_was_not_selected_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="row"):
        to_jsonl(rows_source(tmp_path), [done(i) for i in range(5)], selection=Selection(shard=(0, 2)))


def test_selected_rows_keep_their_index_and_values(tmp_path):
    source, selection = rows_source(tmp_path), Selection(shard=(1, 2))
    pq.write_table(pa.table({"n": range(5)}), tmp_path / "in.parquet")
    results = [done(1), done(3)]
    expected = [(1, 1, "r1"), (3, 3, "r3")]
    for out in (
        to_jsonl(source, results, selection=selection),
        to_parquet(source, results, selection=selection).read().to_pylist(),
        to_parquet(opened(tmp_path / "in.parquet"), results, selection=selection).read().to_pylist(),
    ):
        assert [(row["row_index"], row["n"], row["response"]) for row in out] == expected


def test_all_samples_and_turns_of_a_row_repeat_its_values(tmp_path):
    results = [done(0, s, t) for s in range(2) for t in range(3)] + [done(1)]
    pq.write_table(pa.table({"n": [10, 11]}), tmp_path / "in.parquet")
    keys = [(r.row_index, r.sample_index, r.turn_index) for r in results]
    for out in (
        to_jsonl(opened(tmp_path / "in.parquet"), results),
        to_parquet(opened(tmp_path / "in.parquet"), results).read().to_pylist(),
    ):
        assert [(row["row_index"], row["sample_index"], row["turn_index"]) for row in out] == keys
        assert [row["n"] for row in out] == [10] * 6 + [11]


def test_totals_count_rows_results_errors_and_tokens(tmp_path):
    results = [
        done(0, num_prompt_tokens=3, num_generated_tokens=2),
        done(0, 1, num_prompt_tokens=3, num_generated_tokens=4),
        done(1, num_prompt_tokens=10, num_generated_tokens=1, finish_reason="length"),
        Result(2, error_code="bad_json", error="why"),
        Result(3, error_code="null_prompt", error="other"),
    ]
    file = io.BytesIO()
    sink = JsonlSink(file, OutputSchema(("n",), None, False, False))
    totals = assemble(rows_source(tmp_path, 4), Selection(), iter(results), sink, batch_rows=2, with_values=True)
    assert (totals.num_rows, totals.num_results, totals.num_errors) == (4, 5, 2)
    assert totals.finish_reasons == {"stop": 2, "length": 1, "error": 2}
    assert totals.row_errors == {"bad_json": 1, "null_prompt": 1}
    assert totals.first_error == "row 2: why"
    assert totals.prompt_tokens == 13  # two samples share their prompt
    assert totals.packed_tokens == 5 + 7 + 11
    assert totals.padded_tokens == 2 * 7 + 11


# Parquet files


def test_row_groups_end_by_rows_or_bytes_and_hold_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "_GROUP_ROWS", 1500)
    pq.write_table(pa.table({"n": range(5000)}), tmp_path / "in.parquet")
    out = to_parquet(opened(tmp_path / "in.parquet"))
    sizes = [out.metadata.row_group(i).num_rows for i in range(out.num_row_groups)]
    assert sizes == [2048, 2048, 904]
    assert out.read().column("n").to_pylist() == list(range(5000))
    monkeypatch.setattr(sinks, "_GROUP_BYTES", 10)
    assert to_parquet(opened(tmp_path / "in.parquet")).num_row_groups == 5


def test_dictionaries_of_several_batches_become_one(tmp_path):
    words = [f"w{i % 3000}" for i in range(5000)]
    pq.write_table(pa.table({"w": pa.array(words).dictionary_encode()}), tmp_path / "in.parquet", row_group_size=900)
    out = to_parquet(opened(tmp_path / "in.parquet"))
    assert out.num_row_groups == 1
    assert out.read().column("w").to_pylist() == words


def test_an_input_without_rows_gives_a_file_with_columns_and_the_manifest(tmp_path):
    pq.write_table(pa.table({"n": pa.array([], pa.int8())}), tmp_path / "in.parquet")
    out = to_parquet(opened(tmp_path / "in.parquet"))
    assert out.read().num_rows == 0
    assert out.schema_arrow.field("n").type == pa.int8()
    assert json.loads(out.metadata.metadata[MANIFEST_KEY.encode()]) == {"n": 1}


def test_the_same_rows_give_the_same_bytes(tmp_path):
    pq.write_table(pa.table(EXACT), tmp_path / "in.parquet")
    source = opened(tmp_path / "in.parquet")
    files = []
    for _ in range(2):
        files.append(io.BytesIO())
        sink = ParquetSink(files[-1], OutputSchema(tuple(EXACT), None, False, False), types_of(source))
        assemble(source, Selection(), (done(i) for i in range(4)), sink, batch_rows=4, with_values=False)
        sink.close({})
    assert files[0].getvalue() == files[1].getvalue()
