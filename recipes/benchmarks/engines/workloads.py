"""Workloads: made from the small samples under data/, and read into rows of token ids that every engine gets alike."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedgen.sampling_params import DEFAULT_MAX_TOKENS

SHORTEST_SHARED = 64  # tokens; a common beginning below that isn't worth a run of its own
SHAPES = """\
w1  mixed lengths    128 rows, prompts of 16 to 1024 tokens (log-normal, median 110), outputs of 16 to 256 (median 56)
w2  shared prefixes  128 rows over 4 prefixes of 512 tokens, each with 16 to 64 tokens of its own, outputs of 64
w3  natural chats     64 rows of one user message, at most 256 tokens, ended by the model's EOS
In w1 and w2 every row runs to its max_tokens. Their text is made of the samples' sentences in random order."""


@dataclass(frozen=True)
class Row:
    """A prompt, how many tokens it gets, and whether the EOS may end it earlier."""

    ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool


def make(tokenizer: Any, data: Path, out: Path, seed: int) -> Iterator[Path]:
    """Write `SHAPES` as JSON lines that `pagedgen run` reads too; lengths are in the tokenizer's tokens."""
    rng = random.Random(seed)
    problems, chats = _samples(data)
    corpus = _corpus(tokenizer, [*problems, *chats], rng)

    def chunk(length: int) -> str:
        """Return text of so many tokens; cut text may be tokenized otherwise, then another place is tried."""
        text = ""
        for _ in range(100):
            start = rng.randrange(len(corpus) - length)
            text = tokenizer.decode(corpus[start : start + length])
            if len(tokenizer(text, add_special_tokens=False)["input_ids"]) == length:
                break
        return text

    def spread(median: int, sigma: float, least: int, most: int) -> int:
        return min(most, max(least, round(median * math.exp(rng.gauss(0, sigma)))))

    def fixed(max_tokens: int) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}

    mixed: list[dict[str, Any]] = [
        {"prompt": chunk(spread(110, 1.05, 16, 1024)), "sampling_params": fixed(spread(56, 0.85, 16, 256))} for _ in range(128)
    ]
    prefixes = [chunk(512) for _ in range(4)]
    shared: list[dict[str, Any]] = [
        {"prompt": prefixes[i % 4] + chunk(rng.randint(16, 64)), "sampling_params": fixed(64)} for i in range(128)
    ]
    rng.shuffle(shared)
    natural: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}], "sampling_params": {"temperature": 0.0, "max_tokens": 256}}
        for text in rng.sample(chats, 64)
    ]
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("w1", mixed), ("w2", shared), ("w3", natural)):
        path = out / f"{name}.jsonl"
        lines = (json.dumps({"id": i, **row}, ensure_ascii=False) + "\n" for i, row in enumerate(rows))
        path.write_text("".join(lines), encoding="utf-8")
        yield path


def _samples(data: Path) -> tuple[list[str], list[str]]:
    """Return the samples' texts: worked problems, and what one may say to a chat model."""
    import pyarrow.parquet as parquet

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (data / name).read_text(encoding="utf-8").splitlines()]

    problems = parquet.read_table(data / "gsm8k_sample.parquet").to_pylist()
    chats = [row["messages"][0]["content"] for row in lines("chat_sample.jsonl")]
    chats += [row["prompt"] for row in lines("ifeval_sample.jsonl")] + [row["question"] for row in problems]
    return [row["answer"] for row in problems], chats


def _corpus(tokenizer: Any, texts: list[str], rng: random.Random, num_tokens: int = 100_000) -> list[int]:
    """Return the tokens of the texts' sentences, in a new order each time around, until there are enough."""
    sentences = [s for text in texts for s in re.split(r"(?<=[.!?])\s+|\n+", text) if s]
    ids: list[int] = []
    while len(ids) < num_tokens:
        rng.shuffle(sentences)
        ids += tokenizer(" ".join(sentences) + "\n", add_special_tokens=False)["input_ids"]
    return ids


def read(path: Path, tokenizer: Any, *, limit: int | None, max_model_len: int) -> list[Row]:
    """Read rows with `messages`, `prompt` or `prompt_token_ids`, and tokenize them.

    Raises:
        SystemExit: a row that isn't greedy, asks for what not every engine is told, or is too long for the model.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:limit]
    rows = []
    for number, line in enumerate(lines):
        values = json.loads(line)
        params = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS, "ignore_eos": False} | values.get("sampling_params", {})
        if len(params) > 3 or params["temperature"]:
            raise SystemExit(f"{path}, row {number}: sampling_params may have max_tokens, ignore_eos and a temperature of 0")
        row = Row(tuple(_token_ids(values, tokenizer)), params["max_tokens"], params["ignore_eos"])
        if len(row.ids) + row.max_tokens > max_model_len:
            raise SystemExit(
                f"{path}, row {number}: {len(row.ids)} + {row.max_tokens} tokens, but the model's context is {max_model_len}"
            )
        rows.append(row)
    if not rows:
        raise SystemExit(f"{path} has no rows")
    return rows


def _token_ids(values: dict[str, Any], tokenizer: Any) -> list[int]:
    if "messages" in values:
        return tokenizer.apply_chat_template(values["messages"], add_generation_prompt=True, return_dict=False)
    return values["prompt_token_ids"] if "prompt_token_ids" in values else tokenizer(values["prompt"])["input_ids"]


def shared_beginnings(rows: list[Row], least: int = SHORTEST_SHARED) -> list[tuple[int, ...]]:
    """Return what groups of rows have in common at their beginning, once a group.

    With `least` 2, [1 2 3], [1 2 4] and [5 6 7] have (1, 2).
    """
    found: list[tuple[int, ...]] = []
    common: tuple[int, ...] = ()
    for ids in sorted(row.ids for row in rows):
        length = next((i for i, (a, b) in enumerate(zip(common, ids, strict=False)) if a != b), min(len(common), len(ids)))
        if length < least:
            common = ids
            continue
        if found and found[-1] == common:
            found.pop()
        common = ids[:length]
        found.append(common)
    return found
