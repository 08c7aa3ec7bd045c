"""Which decoding rows attend to a common beginning together. NumPy only.

Rows that share leading blocks are put side by side and cut into groups of neighbours where they share least, as long as that
spares more block reads. Reading a block once for n rows spares n - 1 reads.
"""

from __future__ import annotations

import numpy as np

from .batch import BlockTableArray, SharedGroups
from .scheduler import ScheduledStep

_DEEPEST = 400  # cuts within cuts: no prompts differ so, but a stack has an end
_LEAST_SPARED = 4  # block reads; below it a group of its own isn't worth its work items


def group_decodes(step: ScheduledStep, tables: BlockTableArray, block_size: int) -> tuple[ScheduledStep, SharedGroups | None]:
    """Return the step with its decodes so ordered that those which share blocks are neighbours, and their groups, if any."""
    n = step.num_decodes
    if n < 2:
        return step, None
    decodes = step.sequences[:n]
    table = tables.array[[s.table_row for s in decodes]]
    if (np.bincount(table[:, 0]) < 2).all():
        return step, None  # rows that share anything share their first block
    columns = [0, *(1 << k for k in range(table.shape[1].bit_length() - 1))]
    order = np.lexsort([table[:, c] for c in reversed(columns)])
    table = table[order]
    full = np.array([decodes[i].num_computed_tokens // block_size for i in order])  # blocks that nobody writes any more
    differ = table[1:] != table[:-1]
    equal = np.where(differ.any(axis=1), differ.argmax(axis=1), table.shape[1])
    common = np.minimum(equal, np.minimum(full[1:], full[:-1]))
    groups = _best_groups(common)
    if not groups:
        return step, None
    bounds, shared = [0], []
    for first, end, blocks in groups:
        while bounds[-1] < first:  # rows on their own, one group each
            bounds.append(bounds[-1] + 1)
            shared.append(0)
        bounds.append(end)
        shared.append(blocks)
    while bounds[-1] < n:
        bounds.append(bounds[-1] + 1)
        shared.append(0)
    ordered = ScheduledStep([decodes[i] for i in order] + step.sequences[n:], step.num_scheduled_tokens, n)
    spared = sum((end - first - 1) * blocks for first, end, blocks in groups)
    return ordered, SharedGroups(np.array(bounds, np.int32), np.array(shared, np.int32), spared)


def _best_groups(common: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first row, end row, blocks) of groups, in order; `common` (n - 1,): what each row shares with the one before."""
    return _best(common, 0, len(common) + 1, _DEEPEST)[1]


def _best(common: np.ndarray, first: int, end: int, depth: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the block reads spared by the best groups of rows first to end, and those groups."""
    between = common[first : end - 1]
    if not len(between):
        return 0, []
    least = int(between.min())
    spared = least * len(between)
    one = (spared, [(first, end, least)]) if spared >= _LEAST_SPARED else (0, [])
    # A cut where least is shared spares at most all the rest; where that is no more, one group is best.
    if not depth or spared >= int(between.sum()) - least:
        return one
    cut = first + int(between.argmin()) + 1
    left, right = _best(common, first, cut, depth - 1), _best(common, cut, end, depth - 1)
    return one if one[0] >= left[0] + right[0] else (left[0] + right[0], left[1] + right[1])
