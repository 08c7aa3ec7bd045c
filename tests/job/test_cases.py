"""Failures that such tools had in the field, each with its right outcome; a test's name carries the case's number."""

from __future__ import annotations

import contextlib
import decimal
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import COMMAND, ENV, pagedgen
from job_runs import leftovers, start, write_jsonl

from pagedgen.config import PromptConfig
from pagedgen.engine.model_runner import ModelRunner
from pagedgen.errors import OutputError, RowError
from pagedgen.prompts.render import PromptRenderer
from pagedgen.prompts.tokenize import PromptTokenizer
from pagedgen.rows import sinks
from pagedgen.rows.sources import expand_inputs

BOS, EOS = 1, 2
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% if loop.previtem is defined and loop.previtem['role'] == m['role'] %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def read_jsonl(path):
    """Return a file's rows. Only a newline ends one; text's `splitlines` knows other ends, which answers may hold."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def stats_of(out):
    return json.loads(out.with_name(out.name + ".stats.json").read_text())


def plan_of(model, *args):
    done = pagedgen("plan", model, *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def column(rows, name):
    return [row[name] for row in rows]


def one_line(text):
    """Return a message without the line breaks and frames that depend on the terminal."""
    return " ".join(re.sub(r"[│\n]", " ", text).split())


class Prompts:
    """A model's prompts as the command makes them: text and token ids of a row's columns."""

    def __init__(self, model):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._renderer = PromptRenderer(self.tokenizer, PromptConfig())
        self._tokens = PromptTokenizer(self.tokenizer, 263)

    def text(self, values):
        return self._renderer.render(values).text

    def ids(self, values):
        ids = self._tokens.tokenize([self._renderer.render(values)])[0]
        assert not isinstance(ids, RowError), ids
        return ids


# Input


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
        ("packed.jsonl.gz", gzip.compress(b"")),
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


def test_tk_01_every_prompt_has_exactly_one_bos(tiny_model, tmp_path):
    model, out = tiny_model("llama", bos=True, chat_template=BOS_TEMPLATE), tmp_path / "out.jsonl"
    prompts = Prompts(model)
    chat = {"messages": [user("hi")]}
    rendered = {"prompt": "<s><|user|>hi<|end|><|assistant|>"}
    rows = [chat, rendered, {"prompt": "plain text"}, {"prompt": "<s>again"}]
    apply = prompts.tokenizer.apply_chat_template
    expected = list(apply(chat["messages"], tokenize=True, add_generation_prompt=True, return_dict=False))
    assert prompts.ids(rows[0]) == prompts.ids(rows[1]) == expected
    assert prompts.ids(rows[2]) == list(prompts.tokenizer("plain text")["input_ids"])
    assert [prompts.ids(row).count(BOS) for row in rows] == [1, 1, 1, 1]
    assert all(prompts.ids(row)[0] == BOS and EOS not in prompts.ids(row) for row in rows)
    source = write_jsonl(tmp_path / "bos.jsonl", rows)
    done = pagedgen("run", model, source, "-o", out, "--token-ids", "--max-tokens", 5, "--ignore-eos")
    assert done.returncode == 0, done.stderr
    got = read_jsonl(out)
    assert column(got, "num_prompt_tokens") == [len(prompts.ids(row)) for row in rows]
    assert got[0]["token_ids"] == got[1]["token_ids"]
    assert one_line(done.stderr).count("2 prompts begin with the BOS text themselves") == 1  # one notice for both


def test_tk_01_an_eos_that_the_tokenizer_appends_is_never_in_a_prompt(tiny_model, tmp_path):
    from tokenizers import Tokenizer, processors

    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(tiny_model("llama", bos=True), model)
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)])
    backend.save(str(model / "tokenizer.json"))
    prompts = Prompts(model)
    assert prompts.tokenizer("plain")["input_ids"][-1] == EOS
    assert prompts.ids({"prompt": "plain"}) == prompts.tokenizer("plain")["input_ids"][:-1]
    done = pagedgen("run", model, write_jsonl(tmp_path / "p.jsonl", [{"prompt": "plain"}]), "-o", out, "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    assert column(read_jsonl(out), "num_prompt_tokens") == [6]


def test_tk_02_chats_without_a_template_fail_before_the_weights_load(tiny_model, tmp_path):
    model, out = tiny_model("llama", chat_template=None), tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "chat.jsonl", [{"id": 1, "messages": [user("hi")]}])
    done = pagedgen("run", model, source, "-o", out)
    assert done.returncode == 2
    assert "no chat template" in one_line(done.stderr) and "--chat-template" in one_line(done.stderr)
    assert "loading" not in done.stderr and "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["chat.jsonl"]


def test_tk_02_a_template_in_a_file_of_its_own_just_works(tiny_model, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(tiny_model("llama", chat_template=None), model)
    (model / "chat_template.jinja").write_text(STRICT_TEMPLATE)
    source = write_jsonl(tmp_path / "chat.jsonl", [{"id": 1, "messages": [user("hi")]}])
    done = pagedgen("run", model, source, "-o", out, "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    assert column(read_jsonl(out), "num_prompt_tokens") == [len("<hi>") + 1]  # user, h, i, end, assistant


def test_tk_03_rows_that_the_template_refuses_fail_alone(tiny_model, tmp_path):
    model, out = tiny_model("llama", chat_template=STRICT_TEMPLATE), tmp_path / "out.jsonl"
    chats = [
        [user("hi")],
        [{"role": "system", "content": "be brief"}, user("hi")],
        [user("hi"), user("are you there?")],
        [user("hi"), {"role": "assistant", "content": "well,"}],
        [user("hello")],
    ]
    source = write_jsonl(tmp_path / "roles.jsonl", [{"messages": chat} for chat in chats])
    done = pagedgen("run", model, source, "-o", out, "--max-tokens", 3, "--ignore-eos")
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert column(rows, "error_code") == [None, "template_error", "template_error", None, None]
    assert "no system role here" in rows[1]["error"]
    assert "roles must alternate" in rows[2]["error"]
    assert [r["num_generated_tokens"] for r in rows] == [3, 0, 0, 3, 3]
    prompts = Prompts(model)
    # The rule: a last message of the assistant is continued. Nothing stands behind it, neither its end nor a new beginning.
    assert prompts.text({"messages": chats[3]}) == "<|user|>hi<|end|><|assistant|>well,"
    assert rows[3]["num_prompt_tokens"] == len(prompts.ids({"messages": chats[3]}))


def limit_rows():
    return [
        {"prompt_token_ids": [10 + i % 200 for i in range(length)], "sampling_params": {"max_tokens": most}}
        for length in (62, 63, 64, 65)
        for most in (1, 100)
    ]


def test_tk_04_a_prompt_may_fill_the_context_up_to_one_token(tiny_model, tmp_path):
    model, out = tiny_model("llama", bos=True, max_position_embeddings=64), tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "limit.jsonl", limit_rows())
    positions = []

    def run(self, batch, *args, _run=ModelRunner.run, **kwargs):
        positions.append(int(batch.positions.max()))
        return _run(self, batch, *args, **kwargs)

    with mock.patch.object(ModelRunner, "run", run):
        done = pagedgen("run", model, source, "-o", out, "--ignore-eos")
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert column(rows, "num_generated_tokens") == [1, 2, 1, 1, 0, 0, 0, 0]
    assert column(rows, "finish_reason") == ["length"] * 4 + ["error"] * 4
    assert column(rows, "error_code") == [None] * 4 + ["prompt_too_long"] * 4
    for row in rows[4:]:
        assert "leaves no room" in row["error"] and str(row["num_prompt_tokens"]) in row["error"]
    assert positions and max(positions) < 64


def test_tk_04_plan_agrees_on_what_fits(tiny_model, tmp_path):
    model = tiny_model("llama", bos=True, max_position_embeddings=64)
    plan = plan_of(model, write_jsonl(tmp_path / "limit.jsonl", limit_rows()))
    assert (plan["num_rows"], plan["num_too_long"], plan["prompt_tokens"]) == (8, 4, 2 * (62 + 63))
    assert plan["max_new_tokens"] == 1 + 2 + 1 + 1


def test_tk_04_a_context_beyond_the_models_positions_is_refused_at_start(tiny_model, tmp_path):
    model, out = tiny_model("llama", bos=True, max_position_embeddings=64), tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "limit.jsonl", limit_rows())
    done = pagedgen("run", model, source, "-o", out, "--max-model-len", 128)
    assert done.returncode == 2
    assert "--max-model-len 128" in one_line(done.stderr) and "64" in done.stderr and "loading" not in done.stderr
    assert not out.exists()
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    wider = tiny_model("llama", max_position_embeddings=128, rope_parameters=scaled)
    assert plan_of(wider, source, "--max-model-len", 128)["num_too_long"] == 0


def long_rows(count=1000):
    return [{"prompt": "y" * 9_000 + "z" * 1_000 if i == 500 else f"row {i}"} for i in range(count)]


@pytest.fixture
def long_job(tiny_model, tmp_path):
    """Return the arguments of a job with one prompt that is far too long, and its output."""
    model = tiny_model("llama", bos=True, max_position_embeddings=2048)
    source, out = write_jsonl(tmp_path / "long1.jsonl", long_rows()), tmp_path / "out.jsonl"
    return ["run", model, source, "-o", out, "--max-tokens", 2, "--ignore-eos"], out


def others_done(rows):
    assert column(rows, "row_index") == list(range(1000))
    assert column(rows, "prompt") == column(long_rows(), "prompt")
    return all(r["finish_reason"] == "length" and r["num_generated_tokens"] == 2 for r in rows if r["row_index"] != 500)


@pytest.mark.parametrize("flags", [[], ["--too-long", "error"]])
def test_tk_05_one_prompt_that_is_too_long_is_one_row_error(long_job, flags):
    args, out = long_job
    done = pagedgen(*args, *flags)
    assert done.returncode == 3, done.stderr
    rows = read_jsonl(out)
    assert others_done(rows)
    assert (rows[500]["finish_reason"], rows[500]["error_code"]) == ("error", "prompt_too_long")
    assert "10001 tokens" in rows[500]["error"] and "2048" in rows[500]["error"]  # with the BOS
    assert stats_of(out)["rows"] == {"total": 1000, "error": 1, "length": 999}


def test_tk_05_on_error_stop_ends_before_any_generation_and_names_the_row(long_job):
    args, out = long_job
    done = pagedgen(*args, "--on-error", "stop")
    assert done.returncode == 3, done.stderr
    assert "row 500" in one_line(done.stderr) and "10001 tokens" in one_line(done.stderr)
    assert not out.exists()
    assert "loading" not in done.stderr and stats_of(out)["generated_tokens"] == 0


def test_tk_05_skip_passes_over_the_row_without_an_error(long_job):
    args, out = long_job
    done = pagedgen(*args, "--too-long", "skip")
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    assert others_done(rows)
    assert (rows[500]["finish_reason"], rows[500]["stop_reason"], rows[500]["error"]) == ("skipped", "too_long", None)
    assert (rows[500]["response"], rows[500]["num_prompt_tokens"], rows[500]["num_generated_tokens"]) == (None, 10001, 0)


def test_tk_05_truncate_left_keeps_the_bos_and_the_end(long_job, tmp_path):
    args, out = long_job
    done = pagedgen(*args, "--too-long", "truncate-left", "--token-ids")
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    assert others_done(rows)
    left = 2048 - 2  # room for max_tokens
    assert (rows[500]["num_prompt_tokens"], rows[500]["num_truncated_tokens"]) == (left, 10001 - left)
    assert rows[500]["num_generated_tokens"] == 2
    ids = Prompts(args[1]).ids(long_rows()[500])
    same = write_jsonl(tmp_path / "same.jsonl", [{"prompt_token_ids": [BOS, *ids[-(left - 1) :]]}])
    whole = tmp_path / "same.out.jsonl"
    done = pagedgen("run", args[1], same, "-o", whole, "--max-tokens", 2, "--ignore-eos", "--token-ids")
    assert done.returncode == 0, done.stderr
    assert read_jsonl(whole)[0]["token_ids"] == rows[500]["token_ids"]


def test_tk_05_truncate_left_keeps_a_chats_head_and_its_last_words(tiny_model, tmp_path):
    model, out = tiny_model("llama", bos=True, chat_template=BOS_TEMPLATE, max_position_embeddings=2048), tmp_path / "o.jsonl"
    system = {"role": "system", "content": "be brief"}
    source = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [system, user("y" * 9_000 + "z" * 1_000)]}])
    done = pagedgen(
        "run", model, source, "-o", out, "--max-tokens", 2, "--ignore-eos", "--token-ids", "--too-long", "truncate-left"
    )
    assert done.returncode == 0, done.stderr
    row = read_jsonl(out)[0]
    frame = len(Prompts(model).ids({"messages": [system, user("")]}))
    assert row["num_prompt_tokens"] == 2046
    cut = [system, user(("y" * 9_000 + "z" * 1_000)[-(2046 - frame) :])]
    same, whole = write_jsonl(tmp_path / "same.jsonl", [{"messages": cut}]), tmp_path / "same.out.jsonl"
    done = pagedgen("run", model, same, "-o", whole, "--max-tokens", 2, "--ignore-eos", "--token-ids")
    assert done.returncode == 0, done.stderr
    assert (read_jsonl(whole)[0]["token_ids"], read_jsonl(whole)[0]["num_prompt_tokens"]) == (row["token_ids"], 2046)


# Output


def parquet_job(tiny_model, tmp_path, name, prompts, code):
    source, out = tmp_path / f"{name}.parquet", tmp_path / f"{name}.out.parquet"
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string()), "n": pa.array(range(len(prompts)), pa.int16())}), source)
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 1, "--ignore-eos", "--token-ids")
    assert done.returncode == code, done.stderr
    return pq.read_table(out), out


def test_ou_01_the_schema_is_fixed_whatever_the_rows_hold(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "_GROUP_ROWS", 1000)
    late, path = parquet_job(tiny_model, tmp_path, "late", [None if i == 4321 else "a" for i in range(5000)], 3)
    assert pq.ParquetFile(path).num_row_groups >= 4
    assert [i for i, code in enumerate(late.column("error_code").to_pylist()) if code] == [4321]
    assert late.column("error")[4321].as_py() and late.column("token_ids")[4321].as_py() is None
    assert len(late.column("token_ids")[4320].as_py()) == 1
    failed, _ = parquet_job(tiny_model, tmp_path, "failed", [None] * 30, 3)
    assert failed.column("error_code").to_pylist() == ["null_prompt"] * 30
    empty, _ = parquet_job(tiny_model, tmp_path, "empty", [], 0)
    assert len(empty) == 0
    assert failed.schema.remove_metadata() == empty.schema.remove_metadata() == late.schema.remove_metadata()
    types = {field.name: field.type for field in late.schema}
    text, number = pa.string(), pa.int64()
    assert types == {
        "id": number, "row_index": number, "sample_index": pa.int32(), "turn_index": pa.int32(), "prompt": text,
        "n": pa.int16(), "response": text, "token_ids": pa.list_(pa.int32()), "finish_reason": text, "stop_reason": text,
        "num_prompt_tokens": number, "num_truncated_tokens": number, "num_generated_tokens": number, "score": pa.float64(),
        "seed": pa.uint64(), "error_code": text, "error": text,
    }  # fmt: skip


def test_ou_01_a_parquet_file_without_rows_gives_an_empty_output_of_either_format(tiny_model, tmp_path):
    source, out = tmp_path / "none.parquet", tmp_path / "out.jsonl"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), source)
    done = pagedgen("run", tiny_model(), source, "-o", out)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == b""
    assert stats_of(out)["rows"]["total"] == 0
    assert plan_of(tiny_model(), source)["num_rows"] == 0


IDS = {
    "int64": pa.array([9223372036854775807, 9007199254740993, None, 1], pa.int64()),
    "string": pa.array(["1", "01", "1.0", None]),
    "uint64": pa.array([2**64 - 1, None, 2**53 + 1, 0], pa.uint64()),
    "decimal": pa.array([decimal.Decimal("1.10"), decimal.Decimal("123456789012345678.90"), None], pa.decimal128(20, 2)),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", list(IDS))
def test_ou_02_ids_come_back_exactly(tiny_model, tmp_path, kind, suffix):
    ids = IDS[kind]
    source, out = tmp_path / "ids.parquet", tmp_path / f"out{suffix}"
    pq.write_table(pa.table({"id": ids, "prompt": ["a"] * len(ids)}), source)
    done = pagedgen("run", tiny_model(), source, "--id-column", "id", "-o", out, "--max-tokens", 1)
    assert done.returncode == 0, done.stderr
    if suffix == ".parquet":
        table = pq.read_table(out)
        assert table.schema.field("id").type == ids.type
        assert table.column("id").to_pylist() == ids.to_pylist()
        assert table.column("row_index").to_pylist() == list(range(len(ids)))
        return
    rows = read_jsonl(out)
    expected = [str(v) if isinstance(v, decimal.Decimal) else v for v in ids.to_pylist()]
    assert column(rows, "id") == expected
    assert [type(i) for i in column(rows, "id")] == [type(i) for i in expected]
    assert column(rows, "row_index") == list(range(len(ids)))
    for line, value in zip(out.read_bytes().splitlines(), expected, strict=True):
        assert line.startswith(f'{{"id": {json.dumps(value)}, "row_index": '.encode())


def test_ou_02_ids_of_json_lines_become_exact_integers_in_parquet(tiny_model, tmp_path):
    ids = [9223372036854775807, 9007199254740993, None, 1]
    source, out = write_jsonl(tmp_path / "ids.jsonl", [{"id": i, "prompt": "a"} for i in ids]), tmp_path / "out.parquet"
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 1)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(out)
    assert (table.column("id").to_pylist(), table.schema.field("id").type) == (ids, pa.int64())


def test_ou_03_results_stand_in_the_order_of_the_input_each_exactly_once(tiny_model, tmp_path):
    wanted = [1 + (i * 37) % 25 for i in range(300)]
    rows = [
        {"id": f"q{(i * 7919) % 300}", "prompt": f"row {i}", "sampling_params": {"max_tokens": wanted[i]}} for i in range(300)
    ]
    bad, too_long = set(range(4, 300, 30)), set(range(11, 300, 60))
    assert (len(bad), len(too_long)) == (10, 5)
    for i in bad:
        rows[i]["prompt"] = None
    for i in too_long:
        rows[i]["prompt"] = "x" * 200
    source = write_jsonl(tmp_path / "mix.jsonl", rows)
    flags = ["--n", 2, "--temperature", 1, "--seed", 5, "--ignore-eos", "--max-model-len", 99, "--max-error-rate", 0.1]
    outputs = tmp_path / "out.jsonl", tmp_path / "unsorted.jsonl"
    for out, more in zip(outputs, ([], ["--sort", "none", "--max-num-seqs", 48]), strict=True):
        done = pagedgen("run", tiny_model(), source, "-o", out, *flags, *more)
        assert done.returncode == 0, done.stderr
    got = read_jsonl(outputs[0])
    assert len(got) == 600
    assert [(r["row_index"], r["sample_index"]) for r in got] == [(i, s) for i in range(300) for s in range(2)]
    assert next(iter(got[0])) == "id"
    by_id = {row["id"]: row for row in rows}
    assert len({(r["id"], r["sample_index"]) for r in got}) == 600  # a join meets nothing twice
    for r in got:
        i = r["row_index"]
        assert by_id[r["id"]] == rows[i] and r["prompt"] == rows[i]["prompt"]
        expected = "null_prompt" if i in bad else "prompt_too_long" if i in too_long else None
        assert r["error_code"] == expected
        assert r["num_generated_tokens"] == (0 if expected else wanted[i])
    assert outputs[0].read_bytes() == outputs[1].read_bytes()  # order of work shows nowhere


def duplicate_ids(folder):
    """Write two files of a glob, both with equal ids, and return what the glob's rows hold."""
    parts = [[(7, "a"), (7, "b"), ("7", "a"), (8, "c")], [(7, "a"), (8, "d")]]
    for number, rows in enumerate(parts):
        write_jsonl(folder / f"part{number}.jsonl", [{"id": i, "prompt": f"row {p}"} for i, p in rows])
    return [(i, f"row {p}") for rows in parts for i, p in rows]


def test_ou_04_rows_of_one_id_stay_rows_of_their_own(tiny_model, tmp_path):
    expected = duplicate_ids(tmp_path)
    out = tmp_path / "out.jsonl"
    done = pagedgen("run", tiny_model(), "part*.jsonl", "--id-column", "id", "-o", out, "--max-tokens", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(out)
    assert [(r["id"], r["prompt"]) for r in rows] == expected
    assert [type(r["id"]) for r in rows] == [int, int, str, int, int, int]  # 7 and "7" are two ids
    assert column(rows, "row_index") == list(range(6))


def test_ou_04_no_row_is_taken_for_done_because_of_its_twin(tiny_model, tmp_path):
    duplicate_ids(tmp_path)
    args = ["run", tiny_model(), tmp_path / "part*.jsonl", "--id-column", "id", "--max-tokens", 3, "--ignore-eos"]
    args += ["--temperature", 1]
    whole, out = tmp_path / "whole.out.jsonl", tmp_path / "resumed.out.jsonl"
    assert pagedgen(*args, "-o", whole).returncode == 0
    leave_unwritten(*args, "-o", out)
    keep_lines(out, lambda row, sample, turn: row == 0)
    done = pagedgen(*args, "-o", out)
    assert done.returncode == 0, done.stderr
    assert (stats_of(out)["rows_reused"], stats_of(out)["generated_tokens"]) == (1, 15)
    assert out.read_bytes() == whole.read_bytes()


# Resuming


def leave_unwritten(*args):
    """Run a job whose output can't be written: all its rows are finished and stay in its parts."""
    with mock.patch("pagedgen.jobs.run.write_output", side_effect=OutputError("no space left")):
        done = pagedgen(*args)
    assert done.returncode == 4, done.stderr


def parts_of(out):
    """Return a job's parts, oldest first."""
    return sorted(out.with_name(out.name + ".parts").glob("part-*.jsonl"))


def keep_lines(out, wanted):
    """Take all results out of a job's parts but those whose row, sample and turn are wanted."""
    for part in parts_of(out):
        lines = part.read_bytes().splitlines(keepends=True)
        part.write_bytes(b"".join(line for line in lines if wanted(*map(int, line.split(b" ", 4)[1:4]))))


RESUMED_ROWS = [{"id": i, "prompt": f"Grüße {i} 世界" + "!" * i, "label": i} for i in range(12)]
RESUMED_FLAGS = ["--max-tokens", 6, "--ignore-eos", "--temperature", 1, "--seed", 3, "--token-ids"]


def half_a_character(data):
    """Cut inside the last character that has more than one byte; parts hold its escape."""
    return data[: data.rindex(b"\\u") + 4]


DAMAGES = {
    "mid_object": lambda data: data[: len(data) * 2 // 3],
    "mid_character": half_a_character,
    "half_a_utf8_character_at_the_end": lambda data: data[:-30] + "世".encode()[:2],
    "half_a_utf8_character_behind_the_last_line": lambda data: data + "世".encode()[:2],
    "no_newline": lambda data: data[:-1],
    "empty_file": lambda data: b"",
    "nul_bytes_behind_the_last_line": lambda data: data + b"\0" * 4096,
    "nul_bytes_instead_of_the_end": lambda data: data[:-40] + b"\0" * 40,
    "the_next_row_right_behind_half_a_line": lambda data: data[:-40] + data[: data.index(b"\n") + 1],
}


@pytest.fixture(scope="module")
def resumed_folder(tiny_model, tmp_path_factory):
    """A folder with a job's undisturbed outputs of both formats, and the same job before its output was written."""
    folder = tmp_path_factory.mktemp("resumed")
    args = ["run", tiny_model(), write_jsonl(folder / "in.jsonl", RESUMED_ROWS), *RESUMED_FLAGS]
    for suffix in (".jsonl", ".parquet"):
        assert pagedgen(*args, "-o", folder / f"whole{suffix}").returncode == 0
        leave_unwritten(*args, "-o", folder / f"out{suffix}")
    return folder


@pytest.fixture
def resumed_job(tiny_model, resumed_folder, tmp_path):
    """Return the job's arguments without its output; its files are in `tmp_path`."""
    shutil.copytree(resumed_folder, tmp_path, dirs_exist_ok=True)
    return ["run", tiny_model(), tmp_path / "in.jsonl", *RESUMED_FLAGS]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_rs_01_whole_results_are_kept_and_torn_ones_made_again(resumed_job, tmp_path, damage, suffix):
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    (part,) = parts_of(out)
    before = part.read_bytes()
    part.write_bytes(DAMAGES[damage](before))
    kept = len(set(before.splitlines()) & set(part.read_bytes().split(b"\n")))
    assert kept == {"no_newline": 12, "empty_file": 0}.get(damage, 12 if "behind_the_last" in damage else kept)
    done = pagedgen(*resumed_job, "-o", out)
    assert done.returncode == 0, done.stderr
    stats = stats_of(out)
    assert (stats["rows_reused"], stats["generated_tokens"]) == (kept, 6 * (12 - kept))
    assert (f"{kept} results of an earlier run" in one_line(done.stderr)) == (kept > 0)
    assert out.read_bytes() == whole.read_bytes()
    rows = read_jsonl(out) if suffix == ".jsonl" else pq.read_table(out).to_pylist()
    assert column(rows, "row_index") == list(range(12))
    assert not out.with_name(out.name + ".parts").exists()


def test_rs_01_a_part_that_was_just_being_written_is_no_part(resumed_job, tmp_path):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    (part,) = parts_of(out)
    part.rename(part.with_name(".pagedgen-1-0.tmp"))
    done = pagedgen(*resumed_job, "-o", out)
    assert done.returncode == 0, done.stderr
    assert stats_of(out)["rows_reused"] == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name(out.name + ".parts").exists()


def test_rs_01_it_is_told_how_many_results_were_damaged(resumed_job, tmp_path):
    out = tmp_path / "out.jsonl"
    (part,) = parts_of(out)
    part.write_bytes(part.read_bytes()[:-30])
    done = pagedgen(*resumed_job, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "1 kept results were damaged" in one_line(done.stderr)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("damage", ["mid_object", "no_newline", "empty_file", "nul_bytes_behind_the_last_line"])
def test_rs_01_a_finished_output_that_was_damaged_is_refused_not_added_to(resumed_job, tmp_path, damage, suffix):
    out = tmp_path / f"whole{suffix}"
    whole = out.read_bytes()
    out.write_bytes(DAMAGES[damage](whole))
    damaged = out.read_bytes()
    done = pagedgen(*resumed_job, "-o", out)
    assert done.returncode == 2
    assert "exists; pass --overwrite" in one_line(done.stderr)
    assert out.read_bytes() == damaged
    assert pagedgen(*resumed_job, "-o", out, "--overwrite").returncode == 0
    assert out.read_bytes() == whole


def half_job(folder):
    flags = ["--temperature", 0, "--max-tokens", 5, "--ignore-eos"]
    return ["run", folder / "model", folder / "in.jsonl", *flags], folder / "whole.jsonl", folder / "out.jsonl"


@pytest.fixture(scope="module")
def half_folder(tiny_model, tmp_path_factory):
    """A folder with the first half of a greedy job's rows finished, and a model of its own."""
    folder = tmp_path_factory.mktemp("half")
    shutil.copytree(tiny_model(), folder / "model")
    write_jsonl(folder / "in.jsonl", [{"messages": [user(f"row {i}")]} for i in range(12)])
    args, whole, out = half_job(folder)
    assert pagedgen(*args, "-o", whole).returncode == 0
    leave_unwritten(*args, "-o", out)
    keep_lines(out, lambda row, sample, turn: row < 6)
    return folder


@pytest.fixture
def half_done(half_folder, tmp_path):
    """Return the arguments of a job that is half done, its undisturbed output and its output to be."""
    shutil.copytree(half_folder, tmp_path, dirs_exist_ok=True)
    return half_job(tmp_path)


def change_weights(model):
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def change_template(model):
    (model / "chat_template.jinja").write_text(STRICT_TEMPLATE)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("flags", "change", "named"),
    [
        (["--temperature", 0.7], None, "sampling.temperature was 0.0, is 0.7"),
        (["--stop", "x"], None, 'sampling.stop was [], is ["x"]'),
        ([], change_weights, "model.files.model.safetensors was"),
        (["--chat-template", "other.jinja"], None, "prompts.chat_template was"),
        ([], change_template, "prompts.chat_template was"),
        (["--seed", 1], None, "engine.seed was 0, is 1"),
        (["--max-tokens", 6], None, "sampling.max_tokens was 5, is 6"),
    ],
    ids=["temperature", "stop", "weights", "template_flag", "template_file", "seed", "max_tokens"],
)
def test_rs_02_a_changed_setting_is_refused_by_name(half_done, tmp_path, flags, change, named, finished):
    args, whole, out = half_done
    (tmp_path / "other.jinja").write_text(STRICT_TEMPLATE)
    if change is not None:
        change(tmp_path / "model")
    target = whole if finished else out
    before = [p.read_bytes() for p in (*parts_of(out), whole)]
    done = pagedgen(*args, *flags, "-o", target, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert named in one_line(done.stderr)
    assert ("--overwrite" if finished else "--restart") in one_line(done.stderr)
    assert [p.read_bytes() for p in (*parts_of(out), whole)] == before  # nothing is lost
    assert not out.exists()


@pytest.mark.parametrize(
    "flags", [["--stats", "other.json"], ["--max-num-seqs", 2, "--max-num-batched-tokens", 64], ["--progress", "json"]]
)
def test_rs_02_what_shapes_no_result_may_change(half_done, tmp_path, flags):
    args, whole, out = half_done
    done = pagedgen(*args, *flags, "-o", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stats = json.loads((tmp_path / ("other.json" if "--stats" in flags else "out.jsonl.stats.json")).read_text())
    assert (stats["rows_reused"], stats["generated_tokens"]) == (6, 30)
    assert out.read_bytes() == whole.read_bytes()


def repeated_job(tiny_model, tmp_path):
    """Return a job of four samples a row, where rows 5 and 6 have the same text, and its undisturbed output."""
    rows = [{"id": f"q{i}", "prompt": "the same text" if i in (5, 6) else f"row {i}"} for i in range(8)]
    args = ["run", tiny_model(), write_jsonl(tmp_path / "in.jsonl", rows), "--n", 4, "--temperature", 1, "--seed", 3]
    args += ["--max-tokens", 6, "--ignore-eos"]
    whole = tmp_path / "whole.jsonl"
    assert pagedgen(*args, "-o", whole).returncode == 0
    return args, whole


@pytest.mark.parametrize(
    ("missing", "count"),
    [
        (lambda row, sample: (row, sample) in ((5, 1), (5, 3)), 2),
        (lambda row, sample: (row == 5 and sample in (1, 3)) or row > 5, 10),
        (lambda row, sample: row == 6, 4),
    ],
    ids=["samples_1_and_3_of_row_5", "all_behind_them_too", "one_of_two_rows_of_the_same_text"],
)
def test_rs_03_only_missing_samples_are_made(tiny_model, tmp_path, missing, count):
    args, whole = repeated_job(tiny_model, tmp_path)
    out = tmp_path / "out.jsonl"
    leave_unwritten(*args, "-o", out)
    keep_lines(out, lambda row, sample, turn: not missing(row, sample))
    done = pagedgen(*args, "-o", out)
    assert done.returncode == 0, done.stderr
    stats = stats_of(out)
    assert (stats["rows_reused"], stats["generated_tokens"]) == (32 - count, 6 * count)
    assert out.read_bytes() == whole.read_bytes()
    rows = read_jsonl(out)
    assert [(r["id"], r["sample_index"]) for r in rows] == [(f"q{i}", s) for i in range(8) for s in range(4)]
    assert all(len({r["response"] for r in rows if r["row_index"] == i}) == 4 for i in range(8))
    answers = [[r["response"] for r in rows if r["row_index"] == i] for i in (5, 6)]
    assert answers[0] != answers[1]


# The command line


def pipeline(script, tmp_path, **env):
    return subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**ENV, "PYTHONWARNINGS": "always", **env},
    )


def test_cl_01_only_json_lines_are_on_stdout_and_all_else_on_stderr(tiny_model, tmp_path):
    write_jsonl(tmp_path / "p.jsonl", [*({"prompt": f"row {i}"} for i in range(20)), {"prompt": None}])
    command = shlex.join([*COMMAND, "run", str(tiny_model()), "-", "-o", "-", "--max-tokens", "4"])
    parse = "import sys, json; [json.loads(l) for l in sys.stdin]"
    reader = shlex.join([sys.executable, "-c", parse])
    done = pipeline(f'cat p.jsonl | {command} | tee seen.jsonl | {reader}; echo "${{PIPESTATUS[@]}}"', tmp_path)
    assert done.stdout.split() == ["0", "3", "0", "0"], done.stderr  # 3: a row failed
    assert column(read_jsonl(tmp_path / "seen.jsonl"), "row_index") == list(range(21))
    assert "generating" in done.stderr and "pagedgen run" in done.stderr and "rows failed" in done.stderr
    assert "\r" not in done.stderr and "\x1b" not in done.stderr  # no bar where no terminal is
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl", "seen.jsonl"]


def test_cl_01_a_reader_that_closes_early_ends_it_quietly(tiny_model, tmp_path):
    write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"row {i}", "ballast": "x" * 10_000} for i in range(100)])  # no pipe holds it
    command = shlex.join([*COMMAND, "run", str(tiny_model()), "-", "-o", "-", "--max-tokens", "4"])
    done = pipeline(f'cat p.jsonl | {command} | head -1; exit "${{PIPESTATUS[1]}}"', tmp_path)
    assert done.returncode == 4, done.stderr
    assert [json.loads(line)["row_index"] for line in done.stdout.splitlines()] == [0]
    assert "stdout" in done.stderr.splitlines()[-1] and "closed" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr and "BrokenPipeError" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl"]


def test_cl_01_plan_prints_one_json_document(tiny_model, tmp_path):
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "<s>a"}, {"prompt": None}])
    done = pagedgen("plan", tiny_model("llama", bos=True), source, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_rows"] == 2  # one document: anything else on stdout would not parse
    assert done.stderr == ""


def rows_with_errors(count, num_errors):
    return [{"prompt": None if i < num_errors else f"row {i}"} for i in range(count)]


@pytest.mark.parametrize(
    ("num_errors", "flags", "code"),
    [
        (0, [], 0),
        (1, [], 3),
        (1, ["--max-error-rate", 0.01], 0),
        (2, ["--max-error-rate", 0.01], 3),
        (100, [], 3),
        (100, ["--max-error-rate", 0.99], 3),
    ],
)
def test_cl_02_the_exit_code_says_whether_rows_failed(tiny_model, tmp_path, num_errors, flags, code):
    source, out = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(100, num_errors)), tmp_path / "out.jsonl"
    args = ["run", tiny_model(), source, "-o", out, "--max-tokens", 1, *flags]
    done = pagedgen(*args)
    assert done.returncode == code, done.stderr
    which = "all 100 rows failed" if num_errors == 100 else f"{num_errors} of 100 rows failed"
    assert (which in one_line(done.stderr)) == (code == 3)
    rows = read_jsonl(out)
    assert [r["finish_reason"] == "error" for r in rows] == [i < num_errors for i in range(100)]
    assert all((r["error_code"] is not None) == (r["error"] is not None) == (r["finish_reason"] == "error") for r in rows)
    assert pagedgen(*args).returncode == code  # the same when it was done already


def test_cl_02_a_run_without_one_usable_row_is_never_a_success(tiny_model, tmp_path):
    source, out = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(10, 10)), tmp_path / "out.jsonl"
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 1, "--max-error-rate", 1)
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "MODEL", "x.jsonl", "-o", "out.jsonl", "--no-such-flag"], "--no-such-flag"),
        (["run", "MODEL", "x.jsonl", "-o", "out.jsonl", "--max-tokens", "many"], "--max-tokens"),
        (["run", "MODEL", "missing.jsonl", "-o", "out.jsonl"], "no such file: missing.jsonl"),
        (["run", "MODEL", "empty.jsonl", "-o", "out.jsonl"], "no rows"),
        (["run", "MODEL", "x.jsonl", "-o", "existing.jsonl"], "existing.jsonl exists; pass --overwrite"),
        (["run", "MODEL", "x.jsonl", "-o", "existing.jsonl", "--restart"], "existing.jsonl exists; pass --overwrite"),
    ],
)
def test_cl_02_what_can_not_be_run_exits_with_2_and_touches_nothing(tiny_model, tmp_path, args, said):
    write_jsonl(tmp_path / "x.jsonl", rows_with_errors(2, 0))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "existing.jsonl").write_text("somebody's\n")
    before = sorted(os.listdir(tmp_path))
    done = pagedgen(*[tiny_model() if a == "MODEL" else a for a in args], cwd=tmp_path)
    assert done.returncode == 2
    assert said in one_line(done.stderr)
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "existing.jsonl").read_text() == "somebody's\n"


def test_cl_02_an_existing_output_is_replaced_only_on_demand(tiny_model, tmp_path):
    source, out = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(2, 0)), tmp_path / "existing.jsonl"
    out.write_text("somebody's\n")
    done = pagedgen("run", tiny_model(), source, "-o", out, "--max-tokens", 1, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert len(read_jsonl(out)) == 2


def test_cl_02_an_output_that_can_not_be_written_exits_with_4(tiny_model, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(2, 0))
    done = pagedgen("run", tiny_model(), source, "-o", tmp_path / "missing" / "out.jsonl", "--max-tokens", 1)
    assert done.returncode == 4
    assert "out.jsonl" in one_line(done.stderr) and "loading" not in done.stderr


def test_cl_02_an_interrupted_run_exits_with_75(tiny_model, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", rows_with_errors(200, 0))
    args = ["run", tiny_model(), source, "-o", "out.jsonl", "--max-tokens", 500, "--ignore-eos", "--max-num-seqs", 2]
    process = start(*args, "--grace", "0s", cwd=tmp_path)
    with contextlib.suppress(StopIteration):
        while b"generating" not in next(process.stderr):
            pass
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert b"Traceback" not in err
    assert not (tmp_path / "out.jsonl").exists()
    assert pagedgen(*args, "--deadline", "0.001s", cwd=tmp_path).returncode == 75


# Statistics


def test_pc_05_unrelated_prompts_have_no_hits_however_often_they_are_preempted(tiny_model, tmp_path, eager_admission):
    prompts = np.random.default_rng(5).integers(7, 263, size=(60, 40)).tolist()
    source = write_jsonl(tmp_path / "nohit.jsonl", [{"prompt_token_ids": p} for p in prompts])
    out, roomy, file = tmp_path / "out.jsonl", tmp_path / "roomy.jsonl", tmp_path / "s.json"
    flags = ["--block-size", 4, "--max-tokens", 60, "--ignore-eos"]
    done = pagedgen("run", tiny_model(), source, "-o", out, *flags, "--max-block-num", 48, "--stats", file, "--cached-tokens")
    assert done.returncode == 0, done.stderr
    rows, stats = read_jsonl(out), json.loads(file.read_text())
    assert stats["preemptions"] > 0 and stats["recomputed_tokens"] > 0
    prefix = stats["prefix_cache"]
    assert prefix["enabled"]
    assert prefix["shareable_tokens"] == prefix["hit_rows"] == prefix["hit_blocks"] == prefix["saved_tokens"] == 0
    assert prefix["recovered_tokens"] > 0  # what preempted rows found of their own stands apart
    assert stats["cached_tokens"] == 0 and not any(r["num_cached_tokens"] for r in rows)
    assert stats["prompt_tokens"] == sum(r["num_prompt_tokens"] for r in rows) == 60 * 40
    assert stats["generated_tokens"] == sum(r["num_generated_tokens"] for r in rows) == 60 * 60
    fed = 60 * (40 + 60 - 1)  # a row's last token is never fed back
    assert stats["computed_tokens"] == fed + stats["recomputed_tokens"]
    assert pagedgen("run", tiny_model(), source, "-o", roomy, *flags, "--cached-tokens").returncode == 0
    assert roomy.read_bytes() == out.read_bytes()
    undisturbed = stats_of(roomy)
    assert (undisturbed["preemptions"], undisturbed["recomputed_tokens"], undisturbed["computed_tokens"]) == (0, 0, fed)
    assert undisturbed["prefix_cache"]["recovered_tokens"] == 0
