"""What people really have in their files: every record keeps its place, and one that can't be read says why."""

from __future__ import annotations

import gzip
import io
import json
import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedgen.errors import InputError
from pagedgen.rows import sources, text
from pagedgen.rows.inputs import Input, Selection
from pagedgen.rows.sources import expand_inputs


def opened(*paths, limit=None, format="auto"):
    return Input(expand_inputs([str(p) for p in paths], format)[0], limit)


def read(*paths, columns=None, limit=None, format="auto"):
    return [row for chunk in opened(*paths, limit=limit, format=format).chunks(columns) for row in chunk.rows]


def codes(rows):
    return [row.error.code if row.error else None for row in rows]


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def short_lines(monkeypatch):
    """Lines may have 32 bytes."""
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 32)


# JSON lines


def test_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    lines = b"".join(b'{"id":%d,"prompt":"p"}\n' % i for i in (1, 2, 3))
    plain = written(tmp_path / "plain.jsonl", lines)
    bom = written(tmp_path / "bom.jsonl", b"\xef\xbb\xbf" + lines)
    assert [r.values for r in read(bom)] == [r.values for r in read(plain)]


def test_blank_lines_get_no_index_and_crlf_no_place_in_a_prompt(tmp_path):
    file = written(tmp_path / "gaps.jsonl", b'{"prompt":"a"}\r\n \r\n   \r\n{"prompt":"b"}\r\n{"prompt": "c"}')
    assert [(r.index, r.values["prompt"], r.position) for r in read(file)] == [(0, "a", 1), (1, "b", 4), (2, "c", 5)]


def test_line_separators_of_unicode_end_no_line(tmp_path):
    file = written(tmp_path / "u.jsonl", '{"prompt": "a\u2028b\u2029c\x85d"}\n')
    assert [r.values["prompt"] for r in read(file)] == ["a\u2028b\u2029c\x85d"]


@pytest.mark.parametrize(
    "bad",
    [b'{"prompt": "c"', b"[1, 2]", b"7", b"\xff\xfe", b'{"a": \xff}', b"[" * 100_000, b"nonsense", b'{"a" 1}', b'{"a": 1e400}',
     b'{"a": -1e400}', b'{"a": "\xed\xa0\x80"}', b"\x00", b'{"a": 1}{"a": 2}', b'{"a": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_bad_line_is_a_row_error_that_names_its_line(tmp_path, bad):
    file = written(tmp_path / "bad.jsonl", b'{"prompt":"a"}\n\n' + bad + b'\n{"prompt":"b"}\n')
    rows = read(file)
    assert codes(rows) == [None, "bad_json", None]
    assert [r.position for r in rows] == [1, 3, 4]
    assert "bad.jsonl line 3" in rows[1].error.message
    assert rows[1].values == {}


def test_numbers_are_exact(tmp_path):
    """NaN and infinities, which Python's own writer makes, are read as floats."""
    file = written(tmp_path / "n.jsonl", f'{{"a": {2**70}, "b": 0.1, "c": NaN, "d": -Infinity, "e": 9007199254740993}}\n')
    values = read(file)[0].values
    assert repr(values) == repr({"a": 2**70, "b": 0.1, "c": float("nan"), "d": float("-inf"), "e": 9007199254740993})


def test_deep_nesting_is_a_row_error(tmp_path):
    deep = {d: '{"prompt": "a", "d": ' + "[" * d + "]" * d + "}\n" for d in (60, 63, 64, 500)}
    assert codes(read(written(tmp_path / "deep.jsonl", "".join(deep.values())))) == [None, None, "bad_json", "bad_json"]


def test_a_line_that_is_too_long_is_a_row_error_and_the_others_are_read(tmp_path, short_lines):
    long = b'{"a": "' + b"x" * 100 + b'"}'
    file = written(tmp_path / "l.jsonl", b'{"a": 1}\n' + long + b'\n{"a": 2}\n' + long)
    rows = read(file)
    assert codes(rows) == [None, "bad_json", None, "bad_json"]
    assert [r.position for r in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
def test_the_longest_line_that_is_allowed_is_read(tmp_path, short_lines, compress):
    suffix = {bytes: "", gzip.compress: ".gz", zstd: ".zst"}[compress]
    line = b'{"a": "' + b"x" * 22 + b'"}\n'
    assert len(line) == 32
    file = written(tmp_path / f"l.jsonl{suffix}", compress(line + line[:-3] + b'x"}\n' + line))
    assert codes(read(file)) == [None, "bad_json", None]


def test_a_first_line_that_is_too_long_only_with_its_byte_order_mark_is_one_row(tmp_path, short_lines):
    rows = read(written(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"a": "' + b"x" * 60 + b'"}\n{"a": 1}\n'))
    assert [(r.position, r.error is None) for r in rows] == [(1, False), (2, True)]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_is_refused(tmp_path, suffix, encoding):
    content = ("\ufeff" if encoding != "utf-16" else "") + '{"a": 1}\n'
    with pytest.raises(InputError, match=r"x\.\w+ is UTF-16"):
        read(written(tmp_path / f"x.{suffix}", content.encode(encoding)))


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_json_array_is_refused_with_the_way_to_convert_it(tmp_path, name):
    content = b'\n [\n  {"prompt": "a"}\n]\n'
    with pytest.raises(InputError, match=r"JSON array.*jq"):
        read(written(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content))


def test_a_json_file_of_lines_is_read(tmp_path):
    assert len(read(written(tmp_path / "a.json", '{"a": 1}\n{"a": 2}\n'))) == 2


def test_an_empty_file_has_no_rows(tmp_path):
    for name in ("a.jsonl", "a.csv", "a.jsonl.gz", "a.jsonl.zst"):
        assert read(written(tmp_path / name, b"")) == []


# Compression

LINES = b"".join(b'{"id": %d}\n' % i for i in range(2000))
HALF = LINES.index(b"\n", len(LINES) // 2) + 1


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_members_and_frames_that_follow_each_other_are_one_stream(tmp_path, suffix, compress):
    for middle in (HALF, HALF + 5):  # between two lines and within one
        content = compress(LINES[:middle]) + compress(b"") + compress(LINES[middle:])
        rows = read(written(tmp_path / f"x.jsonl.{suffix}", content))
        assert [r.values["id"] for r in rows] == list(range(2000))
        assert rows[-1].position == 2000


def big_lines():
    """Lines that compress badly, so that a cut leaves some of them whole."""
    rng = random.Random(0)
    return b"".join(b'{"id": %d, "x": "%s"}\n' % (i, rng.randbytes(40).hex().encode()) for i in range(30_000))


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_rows_before_broken_compressed_data_are_read_and_one_row_tells_the_loss(tmp_path, suffix, compress, damage):
    content = bytearray(compress(big_lines()))
    place = len(content) * 2 // 3
    if damage == "cut":
        del content[place:]
    else:
        content[place : place + 64] = bytes(64)
    rows = read(written(tmp_path / f"x.jsonl.{suffix}", bytes(content)))
    *whole, last = rows
    assert last.error.code == "unreadable"
    assert f"broken after line {last.position - 1}," in last.error.message
    assert [r.index for r in rows] == list(range(len(rows)))
    good = [r for r in whole if not r.error]
    assert len(good) > 1000
    assert [r.values["id"] for r in good[:1000]] == list(range(1000))


@pytest.mark.parametrize("tail", [b"garbage", gzip.compress(b"{}")[:4]])
def test_garbage_behind_gzip_data_costs_no_row_and_is_told(tmp_path, tail):
    rows = read(written(tmp_path / "x.jsonl.gz", gzip.compress(LINES) + tail))
    assert codes(rows) == [None] * 2000 + ["unreadable"]


def test_gzip_without_its_end_costs_no_row_and_is_told(tmp_path):
    rows = read(written(tmp_path / "x.jsonl.gz", gzip.compress(LINES)[:-3]))
    assert codes(rows) == [None] * 2000 + ["unreadable"]


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_whole_lines_just_before_a_break_in_zstd_data_are_read(tmp_path, damage):
    content = zstd(LINES) + (zstd(LINES)[:-2] if damage == "cut" else b"garbage")
    rows = read(written(tmp_path / "x.jsonl.zst", content))
    assert [r.values["id"] for r in rows if not r.error] == list(range(2000))
    assert rows[-1].error.code == "unreadable"


def test_frames_that_hold_no_data_are_passed_over(tmp_path):
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    assert len(read(written(tmp_path / "x.jsonl.zst", skippable + zstd(LINES)))) == 2000


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_is_not_compressed_at_all_is_told(tmp_path, suffix):
    assert codes(read(written(tmp_path / f"x.jsonl.{suffix}", b"plain text, not compressed\n"))) == ["unreadable"]


# CSV and TSV


def test_csv_and_tsv_values_are_text_and_keep_every_character(tmp_path):
    csv = written(tmp_path / "x.csv", '\ufeffid,prompt\r\n01,"a ""b"", c"\r\n,  x \r\n2,ü\x00\r\n')
    tsv = written(tmp_path / "x.tsv", 'id\tprompt\n01\t"a ""b"", c"\n\t  x \n2\tü\x00')
    expected = [{"id": "01", "prompt": 'a "b", c'}, {"id": "", "prompt": "  x "}, {"id": "2", "prompt": "ü\x00"}]
    assert [r.values for r in read(csv)] == expected
    assert [r.values for r in read(tsv)] == expected


def test_quoted_newlines_belong_to_the_record_whose_first_line_is_its_position(tmp_path):
    file = written(tmp_path / "x.csv", b'a,b\r\n"one\r\ntwo\n\nthree",1\r\n\r\nx,2\n')
    assert [(r.position, r.values) for r in read(file)] == [
        (2, {"a": "one\r\ntwo\n\nthree", "b": "1"}),
        (7, {"a": "x", "b": "2"}),
    ]


def test_bad_csv_records_are_row_errors_that_name_their_line(tmp_path):
    file = written(tmp_path / "x.csv", b'a,b\n1,2\n3\n4,5,6\n"x"y,2\n\xff,7\n\n8,9\n')
    rows = read(file)
    assert codes(rows) == [None, "bad_csv", "bad_csv", "bad_csv", "bad_csv", None]
    assert [r.position for r in rows] == [2, 3, 4, 5, 6, 8]
    for row in rows[1:5]:
        assert f"x.csv line {row.position} " in row.error.message
    assert rows[5].values == {"a": "8", "b": "9"}


def test_an_unclosed_quote_is_one_row_error_where_it_opens(tmp_path):
    rows = read(written(tmp_path / "x.csv", 'a,b\n1,2\n"3,4\n5,6\n'))
    assert [(r.position, r.error and r.error.code) for r in rows] == [(2, None), (3, "bad_csv")]


def test_an_unclosed_quote_swallows_no_more_than_a_line_may_have(tmp_path, short_lines):
    rows = read(written(tmp_path / "x.csv", 'a,b\n"1,2\n' + "3,4\n" * 40))
    assert rows[0].error.code == "bad_csv"
    assert rows[-1].values == {"a": "3", "b": "4"}


def test_a_csv_line_that_is_too_long_is_a_row_error(tmp_path, short_lines):
    rows = read(written(tmp_path / "x.csv", "a,b\n1,2\n" + "q" * 50 + ",1\n5,6\n"))
    assert codes(rows) == [None, "bad_csv", None]
    assert [r.position for r in rows] == [2, 3, 4]


def test_a_record_that_holds_a_line_too_long_is_no_good_record(tmp_path, short_lines):
    rows = read(written(tmp_path / "x.csv", 'a,b\n"x\n' + "y" * 50 + '\nz",2\n3,4\n'))
    assert [r.values for r in rows if not r.error] == [{"a": "3", "b": "4"}]


@pytest.mark.parametrize("header", ["a,a", "a,", ",", "a,b,a"])
def test_a_header_with_equal_or_empty_names_is_refused(tmp_path, header):
    with pytest.raises(InputError, match=r"x\.csv"):
        read(written(tmp_path / "x.csv", f"{header}\n1,2\n"))


@pytest.mark.parametrize(
    "content", [b'"a,b\n1,2\n', b'"a"x,b\n1,2\n', b"a,b\r1,2\r3,4\r"], ids=["unclosed", "text behind a quote", "only CR"]
)
def test_a_header_that_can_not_be_read_is_refused(tmp_path, content):
    with pytest.raises(InputError, match=r"x\.csv"):
        read(written(tmp_path / "x.csv", content))


def test_a_header_behind_broken_compressed_data_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"x\.csv\.gz"):
        read(written(tmp_path / "x.csv.gz", b"not compressed"))


def test_a_header_that_is_too_long_is_refused(tmp_path, short_lines):
    with pytest.raises(InputError, match=r"x\.csv"):
        read(written(tmp_path / "x.csv", "a" * 50 + ",b\n1,2\n"))


def test_a_header_that_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"x\.csv"):
        read(written(tmp_path / "x.csv", b"a,\xff\n1,2\n"))


def test_a_header_alone_has_columns_and_no_rows(tmp_path):
    file = written(tmp_path / "x.csv", "\n\na,b\n")
    assert read(file) == []
    assert opened(file).sample_columns() == ["a", "b"]


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_compressed_csv_is_read(tmp_path, suffix, compress):
    file = written(tmp_path / f"x.tsv.{suffix}", compress(b"a\tb\n1\t2\n"))
    assert [r.values for r in read(file)] == [{"a": "1", "b": "2"}]


# Parquet

TEXTS = ["one", None, "two", "two", ""]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_text_types_read_alike(tmp_path, kind):
    array = pa.array(TEXTS).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(TEXTS, kind)
    pq.write_table(pa.table({"prompt": array}), tmp_path / "x.parquet", row_group_size=2)
    assert [r.values["prompt"] for r in read(tmp_path / "x.parquet")] == TEXTS


def test_broken_parquet_is_told(tmp_path):
    with pytest.raises(InputError, match=r"x\.parquet"):
        read(written(tmp_path / "x.parquet", b"PAR1 nothing of the kind"))


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], ["a", "a"]), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="two columns of one name: a"):
        read(tmp_path / "x.parquet")


GROUPS = 3
GROUP_ROWS = 2500  # more than are read at once


def with_broken_group(path, compression, checksums, damage):
    """Write three row groups and break the second; return the table."""
    count = GROUPS * GROUP_ROWS
    table = pa.table({"id": range(count), "prompt": [f"text {i * 7919 % 1000}" for i in range(count)]})
    pq.write_table(
        table,
        path,
        row_group_size=GROUP_ROWS,
        compression=compression,
        write_page_checksum=checksums,
        use_dictionary=False,
    )
    metadata = pq.read_metadata(path)
    start, end = (metadata.row_group(i).column(0).data_page_offset for i in (1, 2))
    content = bytearray(path.read_bytes())
    if damage == "zeros":
        content[start:end] = bytes(end - start)
    else:
        content[start + 40 : start + 60] = b"\xff" * 20
    path.write_bytes(content)
    return table


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize(("checksums", "damage"), [(False, "zeros"), (True, "zeros"), (True, "bytes")])
def test_a_broken_row_group_costs_its_own_rows_only(tmp_path, compression, checksums, damage):
    path = tmp_path / "x.parquet"
    table = with_broken_group(path, compression, checksums, damage)
    rows = read(path)
    assert [r.index for r in rows] == [r.position for r in rows] == list(range(len(table)))
    lost = {r.index for r in rows if r.error}
    assert lost == set(range(GROUP_ROWS, 2 * GROUP_ROWS))
    assert {rows[i].error.code for i in lost} == {"unreadable"}
    assert [r.values for r in rows if not r.error] == [v for i, v in enumerate(table.to_pylist()) if i not in lost]
    assert "row group 1" in rows[GROUP_ROWS].error.message


def test_batches_before_a_break_within_a_row_group_are_read(tmp_path):
    path = tmp_path / "x.parquet"
    table = pa.table({"id": range(8000)})
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True, "data_page_size": 1024}
    pq.write_table(table, path, **options)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    rows = read(path)
    lost = [r.index for r in rows if r.error]
    assert 0 < lost[0] < 8000
    assert lost == list(range(lost[0], 8000))
    assert [r.values["id"] for r in rows if not r.error] == list(range(lost[0]))


def test_a_broken_group_is_not_met_by_a_limit_before_it(tmp_path):
    with_broken_group(tmp_path / "x.parquet", "none", True, "bytes")
    assert codes(read(tmp_path / "x.parquet", limit=GROUP_ROWS + 1)) == [None] * GROUP_ROWS + ["unreadable"]
    assert codes(read(tmp_path / "x.parquet", limit=GROUP_ROWS)) == [None] * GROUP_ROWS


def test_only_the_columns_that_are_needed_are_read(tmp_path):
    table = pa.table({"a": [1, 2], "b": ["x", "y"], "a.c": [3, 4], "s": [{"t": 1}, {"t": 2}]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert [r.values for r in read(tmp_path / "x.parquet", columns=["s", "a", "other"])] == table.select(["a", "s"]).to_pylist()
    assert [r.values for r in read(tmp_path / "x.parquet", columns=["a.c"])] == table.select(["a.c"]).to_pylist()


def test_rows_without_a_needed_column_are_rows_all_the_same(tmp_path):
    pq.write_table(pa.table({"a": range(3000)}), tmp_path / "x.parquet", row_group_size=1500)
    assert [r.values for r in read(tmp_path / "x.parquet", columns=[])] == [{}] * 3000
    assert len(read(tmp_path / "x.parquet", columns=["other"], limit=1700)) == 1700


def test_values_can_be_left_in_their_batch(tmp_path):
    pq.write_table(pa.table({"a": range(5)}), tmp_path / "x.parquet")
    (chunk,) = opened(tmp_path / "x.parquet").chunks(values=False)
    assert [r.values for r in chunk.rows] == [{}] * 5
    assert chunk.batch.to_pylist() == [{"a": i} for i in range(5)]


def test_times_python_can_not_hold_are_integers(tmp_path):
    """Nanoseconds are finer than Python's own times, and its calendar ends."""
    table = pa.table(
        {
            "ns": pa.array([1_234_567_891, None], pa.timestamp("ns")),
            "far": pa.array([4 * 10**17, 0], pa.timestamp("us")),
            "date": pa.array([2**31 - 1, None], pa.int32()).cast(pa.date32()),
            "inside": pa.array([{"t": [4 * 10**17]}, None], pa.struct({"t": pa.list_(pa.timestamp("us"))})),
            "zone": pa.array([1, None], pa.timestamp("us", "Nowhere/AtAll")),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    first, second = (r.values for r in read(tmp_path / "x.parquet"))
    assert first == {"ns": 1_234_567_891, "far": 4 * 10**17, "date": 2**31 - 1, "inside": {"t": [4 * 10**17]}, "zone": 1}
    assert second["far"].isoformat() == "1970-01-01T00:00:00"


def test_a_map_reads_alike_whatever_its_values(tmp_path):
    kinds = {"plain": pa.int64(), "ns": pa.timestamp("ns")}
    table = pa.table({n: pa.array([[("k", 5)], [], None], pa.map_(pa.string(), kind)) for n, kind in kinds.items()})
    pq.write_table(table, tmp_path / "x.parquet")
    for row in read(tmp_path / "x.parquet"):
        assert row.values["ns"] == row.values["plain"]


def test_parquet_files_with_other_types_are_refused_not_rounded(tmp_path):
    pq.write_table(pa.table({"y": pa.array([9007199254740993], pa.int64())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": pa.array([0.5])}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="different columns"):
        opened(tmp_path / "a.parquet", tmp_path / "b.parquet").schema()


def test_the_schema_has_the_columns_of_all_files(tmp_path):
    pq.write_table(pa.table({"a": [1], "n": pa.nulls(1)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"b": ["x"], "n": [0.5]}), tmp_path / "b.parquet")
    both = opened(tmp_path / "a.parquet", tmp_path / "b.parquet").schema()
    assert both == pa.schema({"a": pa.int64(), "n": pa.float64(), "b": pa.string()})
    written(tmp_path / "c.jsonl", "{}")
    assert opened(tmp_path / "a.parquet", tmp_path / "c.jsonl").schema() is None


# Hugging Face data sets


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A data set, one of two splits, and what the first holds."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    directory = tmp_path_factory.mktemp("saved")
    rows = [{"id": i, "prompt": f"p{i}", "tags": ["x"] * (i % 3)} for i in range(2500)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(directory / "one")
    dataset.save_to_disk(directory / "again")
    splits = {"train": dataset, "test": dataset.select([4, 2])}
    datasets.DatasetDict(splits).save_to_disk(directory / "dict")
    datasets.DatasetDict({"only": dataset}).save_to_disk(directory / "single")
    dataset.map(lambda row: {"prompt": row["prompt"].upper()}).save_to_disk(directory / "changed")
    return directory, rows


def test_a_saved_data_set_is_read_by_its_folder_or_by_name(saved):
    directory, rows = saved
    for name in (directory / "one", f"hf:{directory / 'one'}", f"hf:{directory / 'dict'}:train", directory / "single"):
        got = read(name)
        assert [r.values for r in got] == rows
        assert [r.index for r in got] == list(range(2500))
    assert [r.values["id"] for r in read(f"hf:{directory / 'dict'}:test")] == [4, 2]


def test_a_data_sets_columns_and_limit(saved):
    directory, rows = saved
    assert [r.values for r in read(directory / "one", columns=["prompt"], limit=1030)] == [
        {"prompt": row["prompt"]} for row in rows[:1030]
    ]
    assert [r.values for r in read(directory / "one", columns=[])] == [{}] * 2500
    source = opened(directory / "one")
    assert source.count() == 2500
    assert source.schema().names == ["id", "prompt", "tags"]


def test_splits_that_are_not_there_or_not_named_are_told(saved):
    directory, _ = saved
    with pytest.raises(InputError, match=r"splits train, test; name one: hf:.*:train"):
        read(directory / "dict")
    with pytest.raises(InputError, match="no split other; it has train, test"):
        read(f"hf:{directory / 'dict'}:other")
    with pytest.raises(InputError, match="without a split train"):
        read(f"hf:{directory / 'one'}:train")
    with pytest.raises(InputError, match="hf:NAME:CONFIG:SPLIT"):
        expand_inputs(["hf:a:b:c:d"])
    with pytest.raises(InputError, match="can't load the dataset hf:"):
        read(f"hf:{directory / 'nothing'}")


# Inputs: files, directories, globs, stdin


def test_files_directories_and_globs_come_in_sorted_order_without_hidden_files(tmp_path):
    for name in ("b.jsonl", "a.jsonl", ".hidden.jsonl", "notes.txt", "_SUCCESS"):
        written(tmp_path / name, json.dumps({"prompt": name}))
    for name in (tmp_path, tmp_path / "*"):
        found, skipped = expand_inputs([str(name)])
        assert [s.name for s in found] == ["a.jsonl", "b.jsonl"]
        assert sorted(skipped) == [str(tmp_path / "_SUCCESS"), str(tmp_path / "notes.txt")]
    given = read(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    assert [(r.index, r.values["prompt"]) for r in given] == [(0, "b.jsonl"), (1, "a.jsonl")]


def test_what_is_not_there_is_told_by_its_name(tmp_path):
    written(tmp_path / "notes.txt", "x")
    for missing in ("nothing.jsonl", "no*.jsonl", "notes.txt", ""):
        with pytest.raises(InputError) as caught:
            expand_inputs([str(tmp_path / missing)])
        assert str(tmp_path / missing) in str(caught.value)


def test_a_pipe_or_a_folder_among_the_files_is_passed_over(tmp_path):
    written(tmp_path / "a.jsonl", '{"prompt": "a"}\n')
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert [s.name for s in expand_inputs([str(tmp_path)])[0]] == ["a.jsonl"]
    assert len(expand_inputs([str(tmp_path / "**" / "*.jsonl")])[0]) == 1
    with pytest.raises(InputError, match="not a regular file"):
        expand_inputs([str(tmp_path / "pipe.jsonl")])


def test_a_format_that_is_given_counts_more_than_the_suffix(tmp_path):
    file = written(tmp_path / "x.txt.gz", gzip.compress(b"a,b\n1,2\n"))
    assert [r.values for r in read(file, format="csv")] == [{"a": "1", "b": "2"}]
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.data")
    assert [r.values for r in read(tmp_path / "x.data", format="parquet")] == [{"a": 1}]
    with pytest.raises(InputError, match="compressed inside"):
        read(written(tmp_path / "x.parquet.gz", b""))


def parquet_bytes():
    file = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "format", "value"),
    [
        (b'{"a": 1}', "auto", 1),
        (gzip.compress(b'{"a": 1}'), "auto", 1),
        (zstd(b'{"a": 1}'), "auto", 1),
        (parquet_bytes(), "auto", 1),
        (b"a\n1\n", "csv", "1"),
        (gzip.compress(b"a\n1\n"), "tsv", "1"),
    ],
    ids=["jsonl", "gz", "zst", "parquet", "csv", "tsv.gz"],
)
def test_stdin_is_told_by_how_it_begins(tmp_path, content, format, value):
    found, _ = expand_inputs(["-"], format, stdin=written(tmp_path / "copy", content))
    (source,) = found
    assert source.name == "stdin"
    assert [r.values for chunk in source.chunks() for r in chunk.rows] == [{"a": value}]


@pytest.mark.parametrize("limit", [0, 1, 1500, 2000, 2001, 9000])
def test_a_limit_counts_rows_of_all_files_in_order(tmp_path, limit):
    pq.write_table(pa.table({"id": range(2000)}), tmp_path / "a.parquet")
    written(tmp_path / "b.jsonl", b"".join(b'{"id": %d}\n' % i for i in range(2000, 4000)))
    rows = read(tmp_path, limit=limit)
    assert [r.values["id"] for r in rows] == [r.index for r in rows] == list(range(min(limit, 4000)))
    assert opened(tmp_path, limit=limit).count() == len(rows)


def test_a_selection_takes_the_shard_of_what_was_chosen():
    chosen = Selection(frozenset({1, 2, 5, 8}), (2, 3))
    assert [i for i in range(10) if chosen.takes(i)] == [2, 5, 8]
    assert [i for i in range(7) if Selection(shard=(1, 3)).takes(i)] == [1, 4]
    assert all(Selection().takes(i) for i in range(10))


def test_columns_a_user_could_name_come_from_schemas_headers_and_first_rows(tmp_path):
    pq.write_table(pa.table({"p": pa.array([], pa.string())}), tmp_path / "a.parquet")
    written(tmp_path / "b.csv", "c,p\n")
    written(tmp_path / "c.jsonl", 'broken\n{"d": 1}\n{"e": 1, "c": 2}\n')
    assert opened(tmp_path).sample_columns() == ["p", "c", "d", "e"]


# Fingerprints


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet"])
def test_a_fingerprint_changes_with_the_content_and_nothing_else(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sources, "_HASHED_BYTES", 1000)
    path = tmp_path / name
    if name == "x.parquet":
        pq.write_table(pa.table({"a": [f"{i}" for i in range(3000)]}), path, row_group_size=1000, use_dictionary=False)
    else:
        path.write_bytes(b"a\n" + b"1\n" * 2000)
    content = path.read_bytes()
    before = opened(path).fingerprint()
    os.utime(path, (1, 1))
    assert opened(path).fingerprint() == before
    (tmp_path / "other").mkdir()
    moved = written(tmp_path / "other" / f"moved{path.suffix}", content)
    assert opened(moved).fingerprint() == before
    for place in (4, 100, 1000, len(content) // 2, 2001):
        changed = bytearray(content)
        changed[place] ^= 1
        assert opened(written(path, bytes(changed))).fingerprint() != before
    if name != "x.parquet":
        assert opened(written(path, content + b"\n")).fingerprint() != before
        assert opened(written(path, content[:-1])).fingerprint() != before
    assert json.loads(json.dumps(before)) == before


def test_every_byte_of_a_parquet_file_counts_once_whatever_its_row_groups(tmp_path):
    pq.write_table(pa.table({"a": range(10)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": range(10)}), tmp_path / "b.parquet", row_group_size=5)
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "c.parquet")
    prints = [json.dumps(opened(tmp_path / f"{n}.parquet").fingerprint()) for n in "abc"]
    assert len(set(prints)) == 3


def test_a_data_sets_fingerprint_changes_with_its_content_only(saved):
    directory, _ = saved
    prints = {n: opened(directory / n).fingerprint() for n in ("one", "again", "changed", "single")}
    assert prints["one"] == prints["again"] == prints["single"]
    assert prints["one"] != prints["changed"]
    assert opened(f"hf:{directory / 'dict'}:train").fingerprint() != opened(f"hf:{directory / 'dict'}:test").fingerprint()


def test_a_change_is_told_at_once(tmp_path):
    source = opened(written(tmp_path / "x.jsonl", "{}\n"))
    assert not source.changed()
    written(tmp_path / "x.jsonl", "{}\n{}\n")
    assert source.changed()
    (tmp_path / "x.jsonl").unlink()
    assert source.changed()


def test_a_fingerprint_of_a_file_that_went_away_is_an_input_error(tmp_path):
    source = opened(written(tmp_path / "x.jsonl", "{}\n"))
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(InputError, match=r"x\.jsonl"):
        source.fingerprint()
