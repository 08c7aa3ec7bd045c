"""Any value in any column comes back exactly or is a row error; read = written + failed."""

from __future__ import annotations

import json
import math
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo import EchoJobs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = 2000 if os.environ.get("PAGEDGEN_PROFILE") == "nightly" else 60
PROPERTY = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
NAMES = st.sampled_from(
    ["prompt", "messages", "a", "b", "id", "response", "error", "sampling_params", "row_index", "text", "é"]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=[]), max_size=8),  # surrogates too
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(NAMES, JSON, max_size=5), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def jobs(tiny_model):
    return EchoJobs(tiny_model("llama"))


def same(a, b):
    """Equal in value and type, NaN to itself, zeros by sign."""
    return repr(a) == repr(b)


def own_columns(row, carried):
    return {name: row.get(name if name not in row or name in carried else f"input_{name}") for name in carried}


def check_counts(report, rows, got):
    """Read = written + failed, in order, each row once."""
    assert report.num_results == len(rows) == len(got)
    assert [r["row_index"] for r in got] == list(range(len(rows)))
    assert report.num_errors == sum(r["error_code"] is not None for r in got)
    assert all((r["finish_reason"] == "error") == (r["error"] is not None) for r in got)


def output_name(column, columns):
    """Return the name under which the output carries an input's column (see the README)."""
    from pagedgen.rows.schema import OutputSchema

    return OutputSchema(tuple(columns), "id" if "id" in columns else None, False, False).names.get(column, column)


@PROPERTY
@given(rows=ROWS, suffix=st.sampled_from(["jsonl", "parquet"]))
def test_json_values(jobs, tmp_path_factory, rows, suffix):
    rows = [{"text": "t", **rows[0]}, *rows[1:]]
    folder = tmp_path_factory.mktemp("v")
    source, output = folder / "in.jsonl", folder / f"out.{suffix}"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = jobs.run([source], output)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if suffix == "jsonl":
        got = [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]
    else:
        got = pq.read_table(output).to_pylist()
    check_counts(report, rows, got)
    for column in columns:
        values = [row.get(column) for row in rows]
        back = [row[output_name(column, columns)] for row in got]
        if suffix == "parquet" and not all(same(a, b) for a, b in zip(values, back, strict=True)):
            back = [None if b is None else json.loads(b) for b in back]  # a column without one exact type is JSON text
        assert all(same(a, b) for a, b in zip(values, back, strict=True)), (column, values, back)


ARROW = st.sampled_from(
    [
        pa.int8(), pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.float16(), pa.bool_(), pa.string(),
        pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary(4), pa.date32(), pa.date64(),
        pa.time32("ms"),
        pa.time64("us"), pa.time64("ns"), pa.timestamp("us"), pa.timestamp("ns"),
        pa.timestamp("us", "Europe/Paris"), pa.duration("us"), pa.decimal128(20, 3), pa.decimal256(60, 5), pa.null(),
    ]
)  # fmt: skip


def nested(kind, how):
    if how == "list":
        return pa.list_(kind)
    if how == "struct":
        return pa.struct([("x", kind), ("y", pa.list_(pa.int8()))])
    if how == "dictionary" and (pa.types.is_string(kind) or pa.types.is_integer(kind)):
        return pa.dictionary(pa.int32(), kind)
    return kind


@st.composite
def arrays(draw, length):
    """An Arrow array of any type and of bits that may mean anything, nulls among them."""
    kind = draw(ARROW)
    how = draw(st.sampled_from(["plain", "list", "struct", "dictionary"]))
    raw = draw(st.binary(min_size=64 * length, max_size=64 * length))
    nulls = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    flat = _from_bits(kind, raw, length)
    flat = pa.array([None if n else v for n, v in zip(nulls, flat, strict=True)], kind) if isinstance(flat, list) else flat
    full = nested(kind, how)
    if full == kind:
        return flat
    if how == "dictionary":
        return flat.dictionary_encode()
    if how == "list":
        return pa.ListArray.from_arrays(pa.array([*range(length), length], pa.int32()), flat)
    return pa.StructArray.from_arrays([flat, pa.array([[i] for i in range(length)], pa.list_(pa.int8()))], ["x", "y"])


def _from_bits(kind, raw, length):
    """Return values of a type: whole ranges, where Python has them not too."""
    width = {"float16": 2, "halffloat": 2}.get(str(kind)) or (kind.bit_width // 8 if _is_fixed(kind) else 0)
    if width and not pa.types.is_decimal(kind) and not pa.types.is_boolean(kind):
        if pa.types.is_date64(kind) or pa.types.is_time(kind):
            days = [(int.from_bytes(raw[i * 8 : i * 8 + 4], "little", signed=True)) for i in range(length)]
            unit = pa.int64() if kind.bit_width == 64 else pa.int32()
            values = [d * 86_400_000 if pa.types.is_date64(kind) else abs(d) % 86_400_000 for d in days]
            return pa.array(values, unit).cast(kind)
        return pa.Array.from_buffers(kind, length, [None, pa.py_buffer(raw[: width * length])])
    texts = [raw[i * 8 : i * 8 + 4] for i in range(length)]
    if pa.types.is_null(kind):
        return pa.nulls(length)
    if pa.types.is_boolean(kind):
        return [t[0] % 2 == 0 for t in texts]
    if pa.types.is_decimal(kind):
        import decimal

        return [decimal.Decimal(int.from_bytes(t, "little", signed=True)).scaleb(-3) for t in texts]
    if "binary" in str(kind):
        return texts
    return [t.decode("latin-1") for t in texts]


def _is_fixed(kind):
    try:
        return kind.bit_width > 0 and not pa.types.is_fixed_size_binary(kind)
    except ValueError:
        return False


@PROPERTY
@given(data=st.data())
def test_arrow_values(jobs, tmp_path_factory, data):
    """Parquet to Parquet: the very same column; Parquet to JSON lines: every row is there."""
    length = data.draw(st.integers(1, 5))
    columns = {f"c{i}": data.draw(arrays(length)) for i in range(data.draw(st.integers(1, 3)))}
    table = pa.table({"prompt": ["p"] * length, **columns})
    folder = tmp_path_factory.mktemp("v")
    source = folder / "in.parquet"
    pq.write_table(table, source, store_schema=True)
    stored = pq.read_table(source)
    report = jobs.run([source], folder / "out.parquet")
    got = pq.read_table(folder / "out.parquet")
    check_counts(report, range(length), got.select(["row_index", "error_code", "error", "finish_reason"]).to_pylist())
    for name in columns:
        assert got.schema.field(name).type == stored.schema.field(name).type
        assert got.column(name).combine_chunks().equals(stored.column(name).combine_chunks()) or _same_with_nan(
            got.column(name), stored.column(name)
        )
    report = jobs.run([source], folder / "out.jsonl")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (folder / "out.jsonl").read_bytes().split(b"\n")[:-1]]
    check_counts(report, range(length), lines)
    for name, column in columns.items():
        nulls = [not scalar.is_valid for scalar in column]
        back = [line[name] for line in lines]
        assert all((b is None) == n or _is_not_finite(column[i]) for i, (b, n) in enumerate(zip(back, nulls, strict=True)))


def _same_with_nan(a, b):
    return str(a.to_pylist()) == str(b.to_pylist())


def _is_not_finite(scalar):
    return pa.types.is_floating(scalar.type) and not math.isfinite(scalar.as_py())
