"""Failures of such tools in the field: what they read (IN). A name carries the case's number."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from case_tools import Prompts, column, one_line, plan_of, read_jsonl, stats_of, user
from command import ENV, pagedgen
from job_runs import leftovers, write_jsonl

from pagedgen.rows.sources import expand_inputs


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".jsonl.gz"])
def test_in_01_a_byte_order_mark_changes_nothing(tiny_model, tmp_path, suffix, count):
    words = [(1, "one"), (2, "two"), (3, "three")][:count]
    lines = [json.dumps({"id": i, "prompt": w}) for i, w in words]
    if suffix == ".csv":
        lines = ["id,prompt", *(f"{i},{w}" for i, w in words)]
    data = "".join(line + "\n" for line in lines).encode()
    pack = gzip.compress if suffix.endswith(".gz") else bytes
    outputs = []
    for name, content in (("plain", data), ("bom", b"\xef\xbb\xbf" + data)):
        source, out = tmp_path / (name + suffix), tmp_path / f"{name}.out.jsonl"
        source.write_bytes(pack(content))
        done = pagedgen("run", tiny_model(), source, "-o", out, "--temperature", 0, "--max-tokens", 4, "--token-ids")
        assert done.returncode == 0, done.stderr
        assert plan_of(tiny_model(), source)["num_rows"] == count
        outputs.append(out)
    rows = read_jsonl(outputs[1])
    assert [int(i) for i in column(rows, "id")] == [i for i, _ in words]
    assert not any("\ufeff" in name for name in rows[0])
    assert column(rows, "token_ids") == column(read_jsonl(outputs[0]), "token_ids")
    assert outputs[1].read_bytes() == outputs[0].read_bytes()


GAPS = b'{"prompt":"a"}\r\n \r\n   \r\n{"prompt":"b"}\r\n'


def test_in_02_blank_lines_get_no_row_and_crlf_no_place_in_a_prompt(tiny_model, tmp_path):
    source, out = tmp_path / "gaps.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(GAPS + b'{"prompt": "c"}')
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    assert [(r["row_index"], r["id"], r["prompt"]) for r in rows] == [(0, 0, "a"), (1, 1, "b"), (2, 2, "c")]
    assert column(rows, "num_prompt_tokens") == [1, 1, 1]


def test_in_02_a_cut_last_line_is_told_by_its_physical_number(tiny_model, tmp_path):
    source, out = tmp_path / "gaps.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(GAPS + b'{"prompt": "c"')
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 2)
    assert done.returncode == 3
    assert "gaps.jsonl line 5" in one_line(done.stderr)
    rows = read_jsonl(out)
    assert [(r["row_index"], r["prompt"], r["error_code"]) for r in rows] == [
        (0, "a", None),
        (1, "b", None),
        (2, None, "bad_json"),
    ]
    assert "gaps.jsonl line 5" in rows[2]["error"]
    assert plan_of(tiny_model(), source)["num_rows"] == 3


@pytest.fixture
def mixed_folder(tmp_path):
    """Rows of all formats: p1 has two, p2 (gzip, two members) three, p3 (zstd) four, p4 one; and what is none."""
    folder = tmp_path / "dir"
    folder.mkdir()

    def lines(name, numbers):
        return "".join(json.dumps({"prompt": f"{name} row {n}"}) + "\n" for n in numbers).encode()

    (folder / "p1.jsonl").write_bytes(lines("p1", [0, 1]))
    (folder / "p2.jsonl.gz").write_bytes(gzip.compress(lines("p2", [0])) + gzip.compress(lines("p2", [1, 2])))
    with pa.CompressedOutputStream(str(folder / "p3.jsonl.zst"), "zstd") as file:
        file.write(lines("p3", range(4)))
    pq.write_table(pa.table({"prompt": ["p4 row 0"]}), folder / "p4.parquet")
    (folder / "notes.txt").write_text("not a row\n")
    (folder / "_SUCCESS").touch()
    (folder / ".hidden.jsonl").write_bytes(lines("hidden", [0]))
    return folder


@pytest.mark.parametrize("name", ["dir/*", "dir"])
def test_in_03_a_folders_files_come_in_sorted_order_packed_or_not(tiny_model, tmp_path, mixed_folder, name):
    out = tmp_path / "out.jsonl"
    done = pagedgen("run", tiny_model(), name, "-o", out, "--max-tokens", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    expected = [f"p{p} row {n}" for p, count in ((1, 2), (2, 3), (3, 4), (4, 1)) for n in range(count)]
    assert column(rows, "prompt") == expected
    assert column(rows, "row_index") == list(range(10))  # with the sorted names and their counts: each row's file
    for passed_over in ("notes.txt", "_SUCCESS"):
        assert one_line(done.stderr).count(f"{passed_over} is passed over") == 1
    assert ".hidden" not in done.stderr
    assert plan_of(tiny_model(), tmp_path / name)["num_rows"] == 10


def test_in_03_a_glob_without_a_match_can_not_be_run(tiny_model, tmp_path, mixed_folder):
    out = tmp_path / "out.jsonl"
    for name in ("dir/q*", "dir/*.txt"):
        done = pagedgen("run", tiny_model(), name, "-o", out, cwd=tmp_path)
        assert done.returncode == 2
        assert f"{name} matches no file" in one_line(done.stderr)
    assert not out.exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.jsonl", b""),
        ("blank.jsonl", b"\r\n \r\n\n"),
        ("bom.jsonl", b"\xef\xbb\xbf"),
        ("packed.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("nothing.jsonl.gz", b""),
        ("header.csv", b"id,prompt\n"),
        ("empty.csv", b""),
    ],
)
def test_in_03_text_without_a_row_can_not_be_run(tiny_model, tmp_path, name, content, command):
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out.jsonl"
    done = pagedgen(command, tiny_model(), tmp_path / name, *(["-o", out] if command == "run" else []))
    assert done.returncode == 2, done.stderr
    assert name in one_line(done.stderr)
    assert not out.exists()
    assert leftovers(tmp_path) == []


TEXTS = ["the first", None, "repeated", "repeated"]


def text_table(kind):
    """Return two row groups of the same four prompts; dictionaries differ between the groups."""
    if kind != "dict":
        arrow = {"string": pa.string(), "large": pa.large_string(), "view": pa.string_view()}[kind]
        return [pa.table({"prompt": pa.array(part, arrow), "tag": pa.array(part, arrow)}) for part in (TEXTS[:2], TEXTS[2:])]
    parts = [pa.array(part).dictionary_encode() for part in (TEXTS[:2], TEXTS[2:])]
    assert parts[0].dictionary != parts[1].dictionary
    return [pa.table({"prompt": part, "tag": part}) for part in parts]


def counted(stats):
    """Return what statistics count, without times, memory and paths."""
    measured = ("wall_s", "startup_s", "generate_s", "tokens_per_s", "time_split_s", "peak_memory_bytes", "input_waits")
    return {k: v for k, v in stats.items() if k not in (*measured, "config", "plan", "swap", "model", "inputs")}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", ["large", "dict", "view"])
def test_in_04_all_text_types_of_parquet_give_the_same(tiny_model, tmp_path, kind, suffix):
    answers, counts = [], []
    for name in ("string", kind):
        source, out = tmp_path / f"{name}.parquet", tmp_path / f"{name}.out{suffix}"
        first, second = text_table(name)
        with pq.ParquetWriter(source, first.schema) as writer:
            writer.write_table(first)
            writer.write_table(second)
        assert pq.ParquetFile(source).num_row_groups == 2
        done = pagedgen("run", tiny_model(), source, "-o", out, "--temperature", 0, "--max-tokens", 6, "--token-ids")
        assert done.returncode == 3, done.stderr
        if suffix == ".parquet":
            schema = pq.read_schema(out)
            assert schema.field("tag").type == schema.field("prompt").type == first.schema.field("tag").type
        answers.append(pq.read_table(out).to_pylist() if suffix == ".parquet" else read_jsonl(out))
        counts.append(counted(stats_of(out)))
    assert answers[0] == answers[1]
    assert counts[0] == counts[1]
    assert column(answers[0], "tag") == column(answers[0], "prompt") == TEXTS
    assert column(answers[0], "error_code") == [None, "null_prompt", None, None]
    assert answers[0][2]["token_ids"] == answers[0][3]["token_ids"]


HOLES = [
    {"id": 1, "prompt": "hello"}, {"id": 2, "prompt": ""}, {"id": 3, "prompt": None}, {"id": 4}, {"id": 5, "messages": []},
    {"id": 6, "prompt": 123}, {"id": 7, "prompt": "world"},
]  # fmt: skip


@pytest.mark.parametrize("bos", [False, True])
def test_in_05_each_hole_has_a_reason_of_its_own_and_the_others_run(tiny_model, tmp_path, bos):
    model, out, good = tiny_model("llama", bos=bos), tmp_path / "out.jsonl", tmp_path / "good.out.jsonl"
    flags = ["--max-tokens", 3, "--ignore-eos"]
    done = pagedgen("run", model, write_jsonl(tmp_path / "holes.jsonl", HOLES), "-o", out, *flags)
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert column(rows, "id") == [1, 2, 3, 4, 5, 6, 7]
    reasons = ["null_prompt", "missing_prompt", "no_messages", "not_text"]
    assert column(rows, "error_code") == [None, None if bos else "empty_prompt", *reasons, None]
    assert all(bool(r["error"]) == (r["error_code"] is not None) for r in rows)
    if bos:
        assert (rows[1]["num_prompt_tokens"], rows[1]["num_generated_tokens"]) == (1, 3)
    reasons += [] if bos else ["empty_prompt"]
    assert stats_of(out)["row_errors"] == dict.fromkeys(sorted(reasons), 1)
    assert all(f"1 {reason}" in one_line(done.stderr) for reason in reasons)
    assert pagedgen("run", model, write_jsonl(tmp_path / "g.jsonl", [HOLES[0], HOLES[6]]), "-o", good, *flags).returncode == 0
    assert column(read_jsonl(good), "response") == [rows[0]["response"], rows[6]["response"]]


PARTS = [
    [user([{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}])],
    [user("Hi there")],
    [user([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}])],
    [user(None)],
]


def write_parts(path):
    """Write `PARTS`; in Parquet content is always a list and every part has every member."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, [{"messages": messages} for messages in PARTS])
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("image_url", pa.struct([("url", pa.string())]))])
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(part))]))
    rows = [PARTS[0], [user([{"type": "text", "text": "Hi there"}])], *PARTS[2:]]
    pq.write_table(pa.table({"messages": pa.array(rows, kind)}), path)
    assert pq.read_table(path).column("messages")[0].as_py()[0]["content"][0]["image_url"] is None
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_in_06_text_parts_are_joined_and_others_refused(tiny_model, tmp_path, suffix):
    source, out = write_parts(tmp_path / f"parts{suffix}"), tmp_path / "out.jsonl"
    done = pagedgen(
        "run", tiny_model(), source, "--messages-column", "messages", "-o", out, "--temperature", 0, "--max-tokens", 4,
        "--token-ids",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert column(rows, "error_code") == [None, None, "unsupported_content", "null_prompt"]
    assert "image_url" in rows[2]["error"]
    prompts = Prompts(tiny_model())
    read = [row.values for chunk in expand_inputs([str(source)])[0][0].chunks() for row in chunk.rows]
    assert prompts.ids(read[0]) == prompts.ids(read[1]) == prompts.ids({"messages": [user("Hi there")]})
    assert rows[0]["num_prompt_tokens"] == rows[1]["num_prompt_tokens"] == len(prompts.ids(read[0]))
    assert rows[0]["token_ids"] == rows[1]["token_ids"]


BIG_ROWS = 10_000
BIG_BOUND = 256 << 20  # above the same command with a hundred rows


def write_big(path, num_rows, blob_bytes):
    """Write one row group of short prompts, chats, and noise that nobody asks for."""
    noise = np.random.default_rng(0).bytes(num_rows * blob_bytes)
    offsets = np.arange(num_rows + 1, dtype=np.int64) * blob_bytes
    blob = pa.LargeBinaryArray.from_buffers(pa.large_binary(), num_rows, [None, pa.py_buffer(offsets), pa.py_buffer(noise)])
    texts = pa.array([f"{i:08} " + "p" * 191 for i in range(num_rows)])
    roles = pa.array(["user"] * num_rows)
    each = pa.array(np.arange(num_rows + 1, dtype=np.int32))
    messages = pa.ListArray.from_arrays(each, pa.StructArray.from_arrays([roles, texts], ["role", "content"]))
    table = pa.table({"prompt": texts, "blob": blob, "messages": messages})
    pq.write_table(table, path, row_group_size=num_rows, use_dictionary=False, compression="none")
    assert pq.ParquetFile(path).num_row_groups == 1
    return path


PEAK = """
import sys
from pagedgen.cli.main import main
from pagedgen.engine import memory
memory.reset_peak = lambda: None  # the whole run's peak, not the one since the model's warm-up
try:
    main()
finally:
    print("peak resident", memory.peak_resident_bytes(), file=sys.stderr)
"""


def peak_bytes(*args, cwd):
    done = subprocess.run([sys.executable, "-c", PEAK, *map(str, args)], cwd=cwd, capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr
    return int(re.search(r"peak resident (\d+)", done.stderr)[1]), done.stdout


@pytest.fixture(scope="module")
def big_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big")
    sizes = {"small": 100, "big": BIG_ROWS, "double": 2 * BIG_ROWS}
    yield {name: write_big(folder / f"{name}.parquet", rows, 20_000) for name, rows in sizes.items()}
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--prompt-column", "prompt"], []], ids=["prompt", "messages"])
def test_in_09_planning_a_large_parquet_file_takes_little_memory_however_many_rows(tiny_model, tmp_path, big_files, flags):
    peaks = {}
    for name, file in big_files.items():
        peaks[name], printed = peak_bytes("plan", tiny_model(), file, *flags, "--json", cwd=tmp_path)
        rows = pq.ParquetFile(file).metadata.num_rows
        assert json.loads(printed)["num_rows"] == rows == expand_inputs([str(file)])[0][0].num_rows()
    assert big_files["double"].stat().st_size > BIG_BOUND  # else the bound would say nothing
    assert max(peaks.values()) - peaks["small"] < BIG_BOUND
    assert peaks["double"] - peaks["big"] < 32 << 20


@pytest.mark.slow
def test_in_09_running_the_first_rows_of_a_large_parquet_file_takes_little_memory(tiny_model, tmp_path, big_files):
    peaks = {}
    flags = ["--prompt-column", "prompt", "--limit", 100, "--max-tokens", 2]
    for name, file in big_files.items():
        out = tmp_path / f"{name}.jsonl"
        peaks[name], _ = peak_bytes("run", tiny_model(), file, *flags, "-o", out, cwd=tmp_path)
        assert column(read_jsonl(out), "row_index") == list(range(100))
    assert max(peaks.values()) - peaks["small"] < BIG_BOUND
    assert peaks["double"] - peaks["big"] < 32 << 20


# Tokenization
