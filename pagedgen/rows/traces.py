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
_LONGEST = 1 << 30
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
    numbers: dict[Any, int] = {}  # of hash ids, which may be any numbers or texts
    unique = -1
    count = 0
    for line, row in _rows(name):
        if limit is not None and count >= limit:
            return
        count += 1
        given, made = _lengths(row, f"{name}, line {line}")
        num_blocks = -(-given // HASHED_TOKENS)
        hash_ids = row.get("hash_ids")
        if hash_ids is None:  # as many numbers that no other prompt has
            yield TracePrompt(given, range(unique, unique - num_blocks, -1)), made
            unique -= num_blocks
            continue
        if not isinstance(hash_ids, list) or not all(isinstance(h, (int, str)) for h in hash_ids):
            raise InputError(f"{name}, line {line}: hash_ids is not a list of numbers")
        if len(hash_ids) < num_blocks:
            raise InputError(f"{name}, line {line}: {len(hash_ids)} hash_ids for {given} tokens")
        yield TracePrompt(given, [numbers.setdefault(h, len(numbers)) for h in hash_ids[:num_blocks]]), made


def _rows(name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row with its line."""
    number = 0
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            if name.lower().endswith(".csv"):
                reader = csv.DictReader(file)
                for row in reader:
                    number = reader.line_num
                    yield number, {key: value for key, value in row.items() if key != "hash_ids"}
                return
            for number, text in enumerate(file, 1):
                if text.strip():
                    found = json.loads(text)
                    if not isinstance(found, dict):
                        raise InputError(f"{name}, line {number}: not a JSON object")
                    yield number, found
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}: the trace can't be read: {error}") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"{name}, line {number}: can't be read: {error}") from error


def _lengths(row: dict[str, Any], where: str) -> tuple[int, int]:
    for names in _NAMES:
        try:
            given, made = (int(row[n]) for n in names)
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if 1 <= given < _LONGEST and 0 <= made < _LONGEST:
            return given, made
    raise InputError(f"{where}: no lengths; a row needs input_length >= 1 and output_length")
