"""Snapshots of the pool while a job runs: which block belongs to which row. JSON lines, read back by `pagedgen blocks`.

The first line is a header: {"version", "block_size", "num_blocks", "host_blocks", "disk_blocks", "every"}. Every other line is
a snapshot: {"step", "used": [[block_id, row_index, sample_index, num_slots_used, ref_count], ...], "cached": [[block_id,
num_remaining_users], ...], "host": [block_id, ...], "disk": [block_id, ...]}; blocks in no list are free. A shared block is
listed once, under the oldest row that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import InputError, OutputError
from ..request import Sequence
from .block_manager import BlockManager
from .tiers import Tier

VERSION = 1


class BlockMapWriter:
    """Writes a snapshot every so many steps. As a context manager it closes its file.

    A file that can't be written any more ends the snapshots, not the job: `on_failure` is told.

    Raises:
        OutputError: the file can't be made.
    """

    def __init__(self, path: str, every: int, on_failure: Callable[[str], None]):
        self._path = path
        self._every = every
        self._on_failure = on_failure
        self._works = True
        self._has_header = False
        try:
            self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise OutputError(self._reason(error)) from error

    def __enter__(self) -> BlockMapWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def record(self, step: int, running: list[Sequence], blocks: BlockManager) -> None:
        """Write a snapshot of a step's end if it is due."""
        if step % self._every or not self._works:
            return
        try:
            if not self._has_header:
                self._write(
                    version=VERSION,
                    block_size=blocks.block_size,
                    num_blocks=blocks.num_blocks,
                    host_blocks=blocks.pool.sizes[Tier.HOST],
                    disk_blocks=blocks.pool.sizes[Tier.DISK],
                    every=self._every,
                )
                self._has_header = True
            self._write(step=step, **snapshot(running, blocks))
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _write(self, **values: Any) -> None:
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")

    def _fail(self, error: OSError) -> None:
        if self._works:
            self._on_failure(self._reason(error))
        self._works = False

    def _reason(self, error: OSError) -> str:
        return f"can't write --block-map {self._path}: {error.strerror} (errno {error.errno})"


def snapshot(running: list[Sequence], blocks: BlockManager) -> dict[str, list[Any]]:
    """Return the lists of a snapshot; see the module."""
    used: dict[int, list[int]] = {}
    for sequence in running:
        for index, block_id in enumerate(sequence.block_table):
            filled = min(blocks.block_size, max(0, sequence.num_computed_tokens - index * blocks.block_size))
            if block_id in used:
                used[block_id][3] = max(filled, used[block_id][3])
                used[block_id][4] += 1
            else:
                used[block_id] = [block_id, sequence.request.row_index, sequence.sample_index, filled, 1]
    kept: dict[Tier, list[Any]] = {tier: [] for tier in Tier}
    for block in blocks.cache.blocks():
        tier, block_id = block.address
        if tier != Tier.DEVICE:
            kept[tier].append(block_id)
        elif block.key is not None:
            kept[tier].append([block_id, blocks.cache.users(block.digest)])
    return {
        "used": sorted(used.values()),
        "cached": sorted(kept[Tier.DEVICE]),
        "host": sorted(kept[Tier.HOST]),
        "disk": sorted(kept[Tier.DISK]),
    }


@dataclass(frozen=True)
class BlockMap:
    """A file of snapshots that was read back."""

    header: dict[str, Any]
    snapshots: list[dict[str, Any]]

    def at(self, step: int | None) -> dict[str, Any]:
        """Return the last snapshot, or the last one not after a step (the first where all are after it)."""
        if step is None:
            return self.snapshots[-1]
        return next((s for s in reversed(self.snapshots) if s["step"] <= step), self.snapshots[0])


def read_block_map(path: str) -> BlockMap:
    """Read a block map; one whose writer was killed ends at its last whole line.

    Raises:
        InputError: it can't be read, or is no block map, or has no snapshot yet.
    """
    try:
        lines = list(_whole_lines(Path(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not lines or not isinstance(lines[0], dict) or lines[0].get("version") != VERSION:
        raise InputError(f"{path} is no block map of this version (a file that run --block-map wrote)")
    if not _is_header(lines[0]) or not all(_is_snapshot(line, lines[0]["num_blocks"]) for line in lines[1:]):
        raise InputError(f"{path} is a damaged block map")
    if len(lines) == 1:
        raise InputError(f"{path} holds no snapshot")
    return BlockMap(lines[0], lines[1:])


def _is_header(line: dict[str, Any]) -> bool:
    counts = [line.get(key) for key in ("block_size", "num_blocks", "host_blocks", "disk_blocks")]
    return all(type(count) is int and count >= 0 for count in counts) and line["block_size"] > 0


def _is_snapshot(line: Any, num_blocks: int) -> bool:
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    for key, width in (("used", 5), ("cached", 2)):
        entries = line.get(key)
        if not isinstance(entries, list):
            return False
        for entry in entries:
            numbers = isinstance(entry, list) and len(entry) == width and all(type(n) is int and n >= 0 for n in entry)
            if not numbers or entry[0] >= num_blocks:
                return False
    return isinstance(line.get("host"), list) and isinstance(line.get("disk"), list)


def _whole_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                return
