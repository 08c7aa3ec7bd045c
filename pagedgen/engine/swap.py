"""The bytes of the host and disk tiers, and moving blocks between tiers. Knows no rows and makes no decisions.

A block is one contiguous region for all layers, so each move is one copy of `bytes_per_block` bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import IO

import numpy as np
import torch

from ..kernels.api import Backend
from .tiers import Address, MoveBatch, Tier

MEASURED_BLOCKS = 16  # that `round_trip_s` moves
_MEASURED_TIMES = 3
_STAGING_BYTES = 32 << 20  # moved at once


class BlockStore:
    """The device pool and what lies below it."""

    def __init__(
        self,
        kv: torch.Tensor,
        backend: Backend,
        *,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        disk_path: str | None = None,
    ):
        """kv: the pool (num_blocks, ...), contiguous. The disk tier is an unnamed file in the directory `disk_path`: it is gone
        when the process is, however that ends.

        Raises:
            OSError: the file can't be made.
        """
        self._kv = kv
        self._backend = backend
        self._bytes_per_block = kv[0].numel() * kv.element_size()
        self._at_once = max(1, _STAGING_BYTES // self._bytes_per_block)
        staged = self._at_once if host_blocks or disk_blocks else 0
        pinned = kv.device.type == "cuda"
        self._host, self._staging = (
            torch.empty((count, *kv.shape[1:]), dtype=kv.dtype, pin_memory=pinned and count > 0)
            for count in (host_blocks, staged)
        )
        self._file: IO[bytes] | None = None
        if disk_blocks:
            self._file = tempfile.TemporaryFile(dir=disk_path, buffering=0)  # noqa: SIM115 (closed by close)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def move(self, batches: list[MoveBatch]) -> tuple[set[Address], list[Exception]]:
        """Make moves, one batch after another; return the addresses whose content is not what it should be, and why.

        A batch that fails spoils its destinations, and so does what would be read from a spoiled address.
        """
        spoiled: set[Address] = set()
        errors: list[Exception] = []
        for batch in batches:
            pairs = []
            for source, destination in batch.pairs:
                if Address(batch.source, source) in spoiled:
                    spoiled.add(Address(batch.destination, destination))
                else:
                    pairs.append((source, destination))
            try:
                if pairs:
                    self._move_batch(batch.source, batch.destination, pairs)
            except (OSError, RuntimeError, MemoryError) as error:
                errors.append(error)
                spoiled.update(Address(batch.destination, d) for _, d in pairs)
            else:
                spoiled.difference_update(Address(batch.destination, d) for _, d in pairs)
        return spoiled, errors

    def _move_batch(self, source: Tier, destination: Tier, pairs: list[tuple[int, int]]) -> None:
        ids = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
        if source == destination == Tier.DEVICE:
            ids = ids.to(self._kv.device, dtype=torch.int32)
            self._backend.copy_blocks(self._kv, ids[0], ids[1])
            return
        for start in range(0, len(pairs), self._at_once):
            some = ids[:, start : start + self._at_once]
            staging = self._staging[: some.shape[1]]
            self._read(source, some[0], staging)
            self._write(destination, some[1], staging)

    def _read(self, tier: Tier, ids: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy blocks into staging memory (N, ...)."""
        if tier == Tier.DEVICE:
            staging.copy_(self._kv.index_select(0, ids.to(self._kv.device)))
        elif tier == Tier.HOST:
            torch.index_select(self._host, 0, ids, out=staging)
        else:
            self._through_file(os.preadv, ids, staging)

    def _through_file(
        self, transfer: Callable[[int, list[memoryview], int], int], ids: torch.Tensor, staging: torch.Tensor
    ) -> None:
        """Read or write blocks whole, however few bytes the system takes at once."""
        assert self._file is not None
        for row, block_id in zip(_as_bytes(staging), ids.tolist(), strict=True):
            view, at = memoryview(row), block_id * self._bytes_per_block
            while len(view):
                count = transfer(self._file.fileno(), [view], at)
                if count == 0:
                    raise OSError("the disk tier's file ends early")
                view, at = view[count:], at + count

    def _write(self, tier: Tier, ids: torch.Tensor, data: torch.Tensor) -> None:
        if tier == Tier.DEVICE:
            self._kv.index_copy_(0, ids.to(self._kv.device), data.to(self._kv.device))
        elif tier == Tier.HOST:
            self._host.index_copy_(0, ids, data)
        else:
            self._through_file(os.pwritev, ids, data)

    def round_trip_s(self, tier: Tier) -> float:
        """Measure the seconds a block takes to a tier and back; the store must have MEASURED_BLOCKS blocks in each tier.

        A disk is measured without the page cache's help: written through, and read after the cache was dropped.
        """
        there = [(i, i) for i in range(MEASURED_BLOCKS)]
        times = []
        for _ in range(_MEASURED_TIMES + 1):
            start = perf_counter()
            self._move_batch(Tier.DEVICE, tier, there)
            if self._file is not None and tier == Tier.DISK:
                os.fdatasync(self._file.fileno())
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._move_batch(tier, Tier.DEVICE, there)
            if self._kv.device.type == "cuda":
                torch.cuda.synchronize()
            times.append((perf_counter() - start) / MEASURED_BLOCKS)
        return median(times[1:])  # the first touches memory for the first time


def _as_bytes(data: torch.Tensor) -> np.ndarray:
    """Return contiguous blocks (N, ...) as bytes (N, bytes_per_block), sharing memory."""
    return data.view(len(data), -1).view(torch.uint8).numpy()
