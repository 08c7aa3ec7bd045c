"""Traces: lengths and what prompts have in common."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from pagedgen.errors import InputError
from pagedgen.rows.traces import HASHED_TOKENS, TracePrompt, read_trace


def test_columns_of_both_kinds(tmp_path):
    azure = tmp_path / "a.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,374,44\n2023,3,0\n")
    plain = tmp_path / "b.csv"
    plain.write_text("input_length,output_length\n374,44\n3,0\n")
    for path in (azure, plain):
        assert [(len(p), n) for p, n in read_trace(path)] == [(374, 44), (3, 0)]
    assert [len(p) for p, _ in read_trace(azure, limit=1)] == [374]


def test_hash_ids_say_what_is_common(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [(1000, [0, 1]), (700, [0, 2]), (512, [0])]
    path.write_text("".join(json.dumps({"input_length": n, "output_length": 9, "hash_ids": h}) + "\n" for n, h in rows))
    first, second, third = (list(p) for p, _ in read_trace(path))
    assert [len(first), len(second), len(third)] == [1000, 700, 512]
    assert first[:512] == second[:512] == third
    assert first[512] != second[512]


def test_hash_ids_may_be_any_numbers(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [
        {"input_length": 513, "output_length": 1, "hash_ids": [2**60, -5]},
        {"input_length": 512, "output_length": 1, "hash_ids": [2**60]},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    first, second = (list(p) for p, _ in read_trace(path))
    assert first[:512] == second


def test_rows_without_hashes_share_nothing(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("input_length,output_length\n" + "600,1\n" * 3)
    assert len({tuple(p) for p, _ in read_trace(path)}) == 3
    assert len({p[0] for p, _ in read_trace(path)}) == 3


def test_a_prompt_is_a_sequence_of_token_ids():
    prompt = TracePrompt(HASHED_TOKENS + 2, [7, 9])
    assert prompt[0] == prompt[511] == 7
    assert prompt[510:514] == [7, 7, 9, 9]
    assert np.asarray(prompt, np.int32).tolist() == list(prompt) == list(pickle.loads(pickle.dumps(prompt)))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "a,b\n1,2\n", "line 2"),
        ("t.csv", "input_length,output_length\n0,2\n", "line 2"),
        ("t.csv", "input_length,output_length\n5,2\nx,2\n", "line 3"),
        ("t.jsonl", '{"input_length": 5, "output_length": 2}\n{"input_length": 5}\n', "line 2"),
        ("t.jsonl", '{"input_length": 600, "output_length": 2, "hash_ids": [1]}\n', "line 1"),
        ("t.jsonl", '\n{"input_length": 5, "output_length": 1}\nnonsense\n', "line 3"),
        ("t.jsonl", '{"input_length": 5, "output_length": 2, "hash_ids": 5}\n', "line 1"),
        ("t.jsonl", '{"input_length": 1e999, "output_length": 2}\n', "line 1"),
        ("t.jsonl", '{"input_length": 5000000000, "output_length": 2}\n', "line 1"),
        ("t.jsonl", "[]\n", "line 1"),
    ],
)
def test_bad_traces_are_told_with_their_line(tmp_path, name, text, says):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        list(read_trace(path))
    with pytest.raises(InputError, match="can't be read"):
        list(read_trace(tmp_path / "missing.csv"))
