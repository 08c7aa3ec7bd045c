"""Golden answers: fp32, one row at a time, by transformers' `generate`; kept in a file, so that a row is computed once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from pagedgen.recipes.benchmarks.engines.workloads import Row

SAMPLED_BYTES = 2**20


class Golden:
    """A file of JSON lines, a `key` and its `tokens` each; the key is a hash of the model and all that shapes the answer."""

    def __init__(self, path: Path, model: Path, eos_token_ids: list[int]):
        self._path = path
        self._model = model_digest(model)
        self._eos_token_ids = eos_token_ids
        lines = path.read_text().splitlines() if path.exists() else []
        self._known: dict[str, list[int]] = {line["key"]: line["tokens"] for line in map(json.loads, lines)}

    def answers(self, rows: list[Row], compute: Callable[[list[Row]], list[list[int]]]) -> list[list[int]]:
        """Return the rows' tokens; `compute` is asked once for all that the file doesn't have."""
        keys = [self._key(row) for row in rows]
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._known}
        if missing:
            new = dict(zip(missing, compute(list(missing.values())), strict=True))
            self._known |= new
            with self._path.open("a") as out:
                out.writelines(json.dumps({"key": key, "tokens": tokens}) + "\n" for key, tokens in new.items())
        return [self._known[key] for key in keys]

    def _key(self, row: Row) -> str:
        ends = [] if row.ignore_eos else self._eos_token_ids
        return hashlib.sha256(json.dumps([self._model, row.ids, row.max_tokens, ends]).encode()).hexdigest()


def model_digest(model: Path) -> str:
    """Return a hash of a model's configuration and weights; of each weights file its size and both ends, which is quick."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
