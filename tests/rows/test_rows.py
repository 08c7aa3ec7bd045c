"""Reading and writing rows: what people really have in their files, and files that are whole or absent."""

from __future__ import annotations

import datetime
import decimal
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedgen.errors import InputError, OutputError, UsageError
from pagedgen.rows import writer
from pagedgen.rows.readers import expand_inputs, parquet_schema, read_rows
from pagedgen.rows.schema import HEAD_COLUMNS, TAIL_COLUMNS, OutputSchema, Result
from pagedgen.rows.writer import ResultWriter, atomic_file, check_output, json_line


def rows_of(*files, limit=None):
    return list(read_rows(list(files), limit))


def test_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    lines = b"".join(b'{"id":%d,"prompt":"p"}\n' % i for i in (1, 2, 3))
    plain, bom = tmp_path / "plain.jsonl", tmp_path / "bom.jsonl"
    plain.write_bytes(lines)
    bom.write_bytes(b"\xef\xbb\xbf" + lines)
    assert [r.values for r in rows_of(bom)] == [r.values for r in rows_of(plain)]


def test_blank_lines_get_no_index_and_crlf_no_place_in_a_prompt(tmp_path):
    file = tmp_path / "gaps.jsonl"
    file.write_bytes(b'{"prompt":"a"}\r\n \r\n   \r\n{"prompt":"b"}\r\n{"prompt": "c"}')
    rows = rows_of(file)
    assert [(r.index, r.values["prompt"], r.position) for r in rows] == [(0, "a", 1), (1, "b", 4), (2, "c", 5)]


@pytest.mark.parametrize(
    "bad", [b'{"prompt": "c"', b"[1, 2]", b"7", b"\xff\xfe", b'{"a": \xff}', b"[" * 100_000, b"nonsense", b'{"a" 1}']
)
def test_a_bad_line_is_a_row_error_that_names_its_line(tmp_path, bad):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"prompt":"a"}\n\n' + bad + b'\n{"prompt":"b"}\n')
    rows = rows_of(file)
    assert [r.error is None for r in rows] == [True, False, True]
    assert rows[1].error.code == "bad_json"
    assert "bad.jsonl line 3" in rows[1].error.message


def test_parquet_text_types_read_alike(tmp_path):
    texts = ["one", None, "two", "two"]
    types = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]
    for i, kind in enumerate(types):
        file = tmp_path / f"{i}.parquet"
        array = pa.array(texts, pa.string()).cast(kind) if i != 2 else pa.array(texts).dictionary_encode()
        pq.write_table(pa.table({"prompt": array}), file, row_group_size=2)
        assert [r.values["prompt"] for r in rows_of(file)] == texts


def test_files_directories_and_globs(tmp_path):
    for name in ("b.jsonl", "a.jsonl", ".hidden.jsonl", "notes.txt", "_SUCCESS"):
        (tmp_path / name).write_text(json.dumps({"prompt": name}))
    names = [f.name for f in expand_inputs([str(tmp_path)])]
    assert names == ["a.jsonl", "b.jsonl"]
    assert [f.name for f in expand_inputs([str(tmp_path / "*")])] == names
    both = expand_inputs([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")])
    assert [r.values["prompt"] for r in rows_of(*both)] == ["b.jsonl", "a.jsonl"]
    assert len(rows_of(*both, limit=1)) == 1
    for missing in ("nothing.jsonl", "no*.jsonl", "notes.txt"):
        with pytest.raises(InputError, match=missing.replace("*", r"\*").replace(".", r"\.")):
            expand_inputs([str(tmp_path / missing)])


def test_broken_parquet_is_told(tmp_path):
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(InputError, match=r"x\.parquet"):
        rows_of(file)


def result(index, values=None, **fields):
    return Result(index, index, values or {}, response="r", finish_reason="stop", **fields)


def test_every_row_has_every_column_in_one_order():
    schema = OutputSchema(("prompt", "response", "input_response", "error"), with_token_ids=True)
    good = schema.to_dict(result(0, {"prompt": "p", "response": "theirs"}))
    bad = schema.to_dict(Result(1, None, {}, error_code="bad_json", error="x"))
    assert list(good) == list(bad)
    assert list(good)[:4] == list(HEAD_COLUMNS)
    assert list(good)[-len(TAIL_COLUMNS) :] == list(TAIL_COLUMNS)
    assert good["response"] == "r"
    assert len(good) == len(HEAD_COLUMNS) + 4 + len(TAIL_COLUMNS)
    assert "theirs" in good.values()


def test_parquet_keeps_the_inputs_types_and_ids_exactly(tmp_path):
    table = pa.table(
        {
            "key": pa.array([9223372036854775807, 9007199254740993, None, 1], pa.int64()),
            "u": pa.array([2**64 - 1, 0, None, 1], pa.uint64()),
            "d": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-3.00"), None], pa.decimal128(10, 2)),
            "t": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5)] * 4, pa.timestamp("us")),
            "nested": pa.array([[{"a": 1}], None, [], [{"a": None}]], pa.list_(pa.struct({"a": pa.int8()}))),
            "s": pa.array(["01", "1", "1.0", ""], pa.large_string()),
        }
    )
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(table, source)
    rows = rows_of(source)
    results = [Result(r.index, r.values["key"], r.values) for r in rows]
    types = {f.name: f.type for f in parquet_schema([source])}
    ResultWriter(str(target), "parquet", table.column_names, "key", input_types=types, with_token_ids=False).write(results)
    out = pq.read_table(target)
    for name in table.column_names:
        assert out.column(name).to_pylist() == table.column(name).to_pylist(), name
        assert out.schema.field(name).type == table.schema.field(name).type
    assert out.column("id").to_pylist() == table.column("key").to_pylist()
    assert out.schema.field("id").type == pa.int64()


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5, 3], [1, "a", None], [2**70, 1], [{"a": 1}, {"b": 2}], [{}, {}], [[1], "x"], [None, None], ["\ud800", "b"],
        [9007199254740993, 0.5], ["1", 1],
        [float("nan"), 1.5], [{"a": "\ud800"}, 1], [["\ud800"], None], [True, 1], [[{}], []], [{"a": {}}, None],
    ],
)  # fmt: skip
def test_any_json_column_can_be_written_as_parquet(tmp_path, values):
    """A column without one exact type becomes JSON text; nothing is rounded and nothing fails."""
    target = tmp_path / "o.parquet"
    results = [result(i, {"x": v}) for i, v in enumerate(values)]
    ResultWriter(str(target), "parquet", ["x"], None, input_types={}, with_token_ids=False).write(results)
    got = pq.read_table(target).column("x").to_pylist()

    kept = all(w is None or type(w) is type(v) for w, v in zip(got, values, strict=True))
    only_text = all(v is None or isinstance(v, str) for v in values)
    for wrote, value in zip(got, values, strict=True):
        if "\\ud800" in json.dumps(value):
            assert "?" in wrote  # a lone surrogate has no UTF-8 form
        elif value is None or only_text or (kept and not isinstance(wrote, str)):
            assert repr(wrote) == repr(value)
        else:
            assert json.loads(wrote) == value


def test_nanosecond_times_come_back_exactly(tmp_path):
    """Python's own times end at microseconds, so these travel as integers."""
    types = {"t": pa.timestamp("ns"), "z": pa.timestamp("ns", "UTC"), "c": pa.time64("ns"), "d": pa.duration("ns")}
    table = pa.table({n: pa.array([1_234_567_891, None], pa.int64()).cast(t) for n, t in types.items()})
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(table, source)
    results = [Result(r.index, r.index, r.values) for r in rows_of(source)]
    arrow = {f.name: f.type for f in parquet_schema([source])}
    ResultWriter(str(target), "parquet", table.column_names, None, input_types=arrow, with_token_ids=False).write(results)
    out = pq.read_table(target)
    for name in types:
        assert out.column(name).cast(pa.int64()).to_pylist() == [1_234_567_891, None]
        assert out.schema.field(name).type == types[name]


def test_parquet_files_with_other_types_are_refused_not_rounded(tmp_path):
    pq.write_table(pa.table({"y": pa.array([9007199254740993], pa.int64())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": pa.array([0.5])}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="different columns"):
        parquet_schema([tmp_path / "a.parquet", tmp_path / "b.parquet"])


def test_values_python_can_not_hold_are_told(tmp_path):
    far = pa.array([400_000_000_000_000_000], pa.int64()).cast(pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": ["a"], "t": far}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x\.parquet"):
        rows_of(tmp_path / "x.parquet")


def test_deep_nesting_is_a_row_error(tmp_path):
    file = tmp_path / "deep.jsonl"
    deep = {d: '{"prompt": "a", "d": ' + "[" * d + "]" * d + "}\n" for d in (60, 70, 500)}
    file.write_text("".join(deep.values()))
    assert [r.error.code if r.error else None for r in rows_of(file)] == [None, "bad_json", "bad_json"]


def test_a_pipe_or_a_folder_among_the_files_is_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert [f.name for f in expand_inputs([str(tmp_path)])] == ["a.jsonl"]
    assert len(expand_inputs([str(tmp_path / "**" / "*.jsonl")])) == 1
    with pytest.raises(InputError, match="not a regular file"):
        expand_inputs([str(tmp_path / "pipe.jsonl")])


def test_replacing_a_file_keeps_its_permissions_and_follows_links(tmp_path):
    target, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with atomic_file(link) as file:
        file.write(b"new")
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600


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


def test_output_is_checked_before_work(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    with pytest.raises(UsageError, match="one of the inputs"):
        check_output(str(source), overwrite=True, inputs=[source])
    existing = tmp_path / "out.jsonl"
    existing.write_text("kept")
    with pytest.raises(UsageError, match="--overwrite"):
        check_output(str(existing), overwrite=False, inputs=[source])
    assert check_output(str(existing), overwrite=True, inputs=[source]) == "jsonl"
    assert existing.read_text() == "kept"
    with pytest.raises(UsageError, match="suffix"):
        check_output(str(tmp_path / "o.csv"), overwrite=False, inputs=[])
    with pytest.raises(OutputError, match="errno"):
        check_output(str(tmp_path / "no" / "o.jsonl"), overwrite=False, inputs=[])


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    target = tmp_path / "o.jsonl"
    target.write_text("old")

    def broken(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.os, failing, broken)
    with pytest.raises(OutputError, match="errno 28"), atomic_file(target) as file:
        file.write(b"new")
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["o.jsonl"]


def test_an_exception_while_writing_leaves_the_old_file(tmp_path):
    target = tmp_path / "o.jsonl"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(target) as file:
        file.write(b"half" * (1 // 0))
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["o.jsonl"]
