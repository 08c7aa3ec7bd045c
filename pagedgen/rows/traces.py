"""Request traces: the lengths of real prompts and answers, and what prompts have in common, without their text.

CSV with columns `ContextTokens` and `GeneratedTokens`, or `input_length` and `output_length` (Azure's traces); JSON lines
with `input_length`, `output_length` and, where known, `hash_ids`: one number for each 512 tokens, equal where all up to there
is equal (Mooncake's).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from ..errors import InputError

HASHED_TOKENS = 512
_NAMES = (("input_length", "output_length"), ("ContextTokens", "GeneratedTokens"))


class TracePrompt(Sequence[int]):
    """Token ids that nobody knows: equal where the trace says that prompts are, made up elsewhere."""

    def __init__(self, length: int, hash_ids: Sequence[int]):
        self._length = length
        self._hash_ids = np.asarray(hash_ids, np.int32)

    def __len__(self) -> int:
        return self._length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        ids = np.repeat(self._hash_ids, HASHED_TOKENS)[: self._length]
        return ids.astype(dtype or np.int32)

    def __iter__(self) -> Iterator[int]:
        return iter(np.asarray(self).tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return np.asarray(self)[index].tolist()


def read_trace(path: str | Path, limit: int | None = None) -> Iterator[tuple[TracePrompt, int]]:
    """Yield each row's prompt and the tokens that were generated for it.

    Raises:
        InputError: the file can't be read, or a row lacks a length; the message has its line.
    """
    name = str(path)
    unique = -1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows: Any = csv.DictReader(file) if name.endswith(".csv") else (json.loads(line) for line in file if line.strip())
            for number, row in enumerate(rows, 2 if name.endswith(".csv") else 1):
                if limit is not None and number >= limit + (2 if name.endswith(".csv") else 1):
                    return
                given, made = _lengths(row, f"{name}, line {number}")
                hash_ids = row.get("hash_ids")
                if hash_ids is None:  # as many numbers that no other prompt has
                    num_blocks = -(-given // HASHED_TOKENS)
                    hash_ids = range(unique, unique - num_blocks, -1)
                    unique -= num_blocks
                if len(hash_ids) * HASHED_TOKENS < given:
                    raise InputError(f"{name}, line {number}: {len(hash_ids)} hash_ids for {given} tokens")
                yield TracePrompt(given, list(hash_ids)), made
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise InputError(f"{name}: the trace can't be read: {error}") from error


def _lengths(row: Any, where: str) -> tuple[int, int]:
    for names in _NAMES:
        try:
            given, made = (int(row[n]) for n in names)
        except (KeyError, TypeError, ValueError):
            continue
        if given >= 1 and made >= 0:
            return given, made
    raise InputError(
        f"{where}: no lengths; a row needs input_length >= 1 and output_length (or ContextTokens, GeneratedTokens)"
    )
