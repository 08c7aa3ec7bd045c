"""Packing a step's rows into one batch without padding, and the block-table array kept between steps. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..request import Sequence
from .scheduler import ScheduledStep


@dataclass(frozen=True)
class SharedGroups:
    """Groups of consecutive decodes: rows row_bounds[g] to row_bounds[g + 1] have num_shared_blocks[g] leading blocks alike.

    row_bounds (G + 1,) int32, num_shared_blocks (G,) int32; rows on their own are groups of 0 blocks.
    """

    row_bounds: np.ndarray
    num_shared_blocks: np.ndarray
    num_spared_reads: int


@dataclass(frozen=True)
class PackedBatch:
    """One step's tokens, T of them from S rows, decodes first. Shared by all layers.

    input_ids, positions, slot_mapping (T,) int64; cu_seqlens_q (S + 1,) int32; seq_lens_kv (S,) int32, this step's tokens
    included; block_tables (S, B) int32, -1 past a row's last block, taken from rows `table_rows` (S,) of the persistent array;
    sample_positions: indices into T of the rows' last tokens
    that need logits, belonging to `sample_rows` (indices into S).
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens_kv: np.ndarray
    block_tables: np.ndarray
    table_rows: np.ndarray
    num_decodes: int
    sample_positions: np.ndarray
    sample_rows: np.ndarray
    shared: SharedGroups | None = None  # what the decodes' tables have in common

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class BlockTableArray:
    """The running rows' block tables as one int32 array (max_num_seqs, width), -1 past each row's last block.

    Rows keep their place between steps and only new entries are written; the width grows by doubling, so an index past the
    table can't occur.
    """

    def __init__(self, max_num_seqs: int, width: int = 16):
        self.array = np.full((max_num_seqs, width), -1, dtype=np.int32)
        self._lengths = np.zeros(max_num_seqs, dtype=np.int64)
        self._owner: list[Sequence | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._changed: set[int] = set()

    def take_changed_rows(self) -> np.ndarray:
        """Return the rows written since the last call, for a copy of the array to catch up."""
        changed = np.array(sorted(self._changed), dtype=np.int64)
        self._changed.clear()
        return changed

    def update(self, running: list[Sequence]) -> None:
        """Drop rows whose sequence left, give new sequences a row, and append the blocks added since the last step."""
        present = {id(s) for s in running}
        for row, owner in enumerate(self._owner):
            if owner is not None and id(owner) not in present:
                self._drop(row, owner)
        for sequence in running:
            row = sequence.table_row
            if row < 0:
                row = sequence.table_row = self._free_rows.pop()
                self._owner[row] = sequence
            known, length = self._lengths[row], len(sequence.block_table)
            if sequence.rewritten_from is not None:  # copy-on-write put another block in
                known = min(known, sequence.rewritten_from)
                sequence.rewritten_from = None
            if known == length:
                continue
            assert length > known, "a table shrank while its row was running"
            if length > self.array.shape[1]:
                self._widen(length)
            self.array[row, known:length] = sequence.block_table[known:]
            self._lengths[row] = length
            self._changed.add(row)

    def _drop(self, row: int, owner: Sequence) -> None:
        owner.table_row = -1
        self._owner[row] = None
        self.array[row, : self._lengths[row]] = -1
        self._lengths[row] = 0
        self._free_rows.append(row)

    def _widen(self, length: int) -> None:
        width = self.array.shape[1]
        while width < length:
            width *= 2
        wider = np.full((self.array.shape[0], width), -1, dtype=np.int32)
        wider[:, : self.array.shape[1]] = self.array
        self.array = wider


def build_batch(
    step: ScheduledStep, tables: BlockTableArray, block_size: int, shared: SharedGroups | None = None
) -> PackedBatch:
    """Pack a step's rows back to back; `shared` describes its decodes (`cascade.group_decodes`).

    Raises:
        AssertionError: cu_seqlens and the rows' own lengths disagree, or a slot lies outside its row's blocks.
    """
    counts = np.asarray(step.num_scheduled_tokens, dtype=np.int64)
    starts = np.asarray([s.num_computed_tokens for s in step.sequences], dtype=np.int64)
    cu_seqlens_q = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=cu_seqlens_q[1:])
    num_tokens = int(cu_seqlens_q[-1])

    input_ids = np.empty(num_tokens, dtype=np.int64)
    for sequence, start, count, at in zip(step.sequences, starts, counts, cu_seqlens_q, strict=False):
        input_ids[at : at + count] = sequence.token_ids[start : start + count]
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(num_tokens) - np.repeat(cu_seqlens_q[:-1], counts) + np.repeat(starts, counts)

    seq_lens_kv = (starts + counts).astype(np.int32)
    table_rows = np.asarray([s.table_row for s in step.sequences], dtype=np.int64)
    width = -(-int(seq_lens_kv.max()) // block_size)
    block_tables = tables.array[table_rows, :width]
    block_ids = block_tables[row_of_token, positions // block_size].astype(np.int64)
    assert (block_ids >= 0).all(), "a token has no block"
    slot_mapping = block_ids * block_size + positions % block_size

    lengths = [len(s.token_ids) for s in step.sequences]
    sample_rows = np.flatnonzero(seq_lens_kv == np.asarray(lengths))
    assert num_tokens == sum(step.num_scheduled_tokens)
    assert (seq_lens_kv <= np.asarray(lengths)).all(), "a row is scheduled past its last token"
    assert len(np.unique(slot_mapping)) == num_tokens, "two tokens share a slot"
    return PackedBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens_kv=seq_lens_kv,
        block_tables=block_tables,
        table_rows=table_rows,
        num_decodes=step.num_decodes,
        sample_positions=cu_seqlens_q[1:][sample_rows].astype(np.int64) - 1,
        sample_rows=sample_rows,
        shared=shared,
    )
