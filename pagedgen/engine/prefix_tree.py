"""All prompts of a job in one tree of their common beginnings: what can be shared, and an order that shares it. No torch.

A prompt's *group* is the longest run of full blocks that it has in common with another prompt. Groups contain one another; rows
and groups within a group, and those in none, are ordered by what is expected of them. The tree holds each distinct token once
and less than 100 bytes a prompt beside; 1,000,000 prompts of 200 tokens take seconds (`recipes/benchmarks/prefix_tree.py`).

Radix tree: Morrison 1968 (PATRICIA); for K/V: Zheng et al. 2023 (SGLang's RadixAttention), whose tree is of what was computed;
this one is of what will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.compiled import import_compiled

BLOCK_SIZES = (8, 16, 32, 64)  # that are compared
_BATCH_TOKENS = 1 << 16  # inserted at once
_ROW_SLACK = 1 << 10


@dataclass(frozen=True)
class Sharing:
    """What a job's prompts have in common, in full blocks unless said otherwise."""

    num_groups: int  # sets of rows that begin with the same blocks, those within others included
    num_grouped_rows: int
    prompt_tokens: int
    distinct_tokens: int  # prompt tokens less every common beginning, to the token
    attainable_tokens: int  # prompt tokens that needn't be computed when every common block is computed once
    group_sizes: np.ndarray  # (num_groups,) rows, largest first
    group_tokens: np.ndarray  # (num_groups,) tokens their rows have in common
    attainable_by_block_size: dict[int, int]  # attainable_tokens with blocks of this and other sizes


class PrefixTree:
    """A tree of prompts, filled in the order of the rows. Rows of different salts share nothing."""

    def __init__(self, block_size: int):
        self._radix = import_compiled(f"{__package__}.radix", "radix.py")
        self._block_size = block_size
        self._roots: dict[str, int] = {}
        self._num_nodes = 0
        self._num_pooled = 0
        self._parents = np.empty(0, np.int32)
        self._starts = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int32)
        self._pool = np.empty(0, np.int32)
        self._table = np.full(1 << 12, -1, np.int32)
        self._ends = np.empty(0, np.int32)
        self._prompt_lens = np.empty(0, np.int32)
        self._weights = np.empty(0, np.int32)
        self._num_rows = 0
        self._waiting: list[tuple[Sequence[int], int]] = []
        self._num_waiting_tokens = 0

    def __len__(self) -> int:
        return self._num_rows + len(self._waiting)

    def add(self, token_ids: Sequence[int], weight: int, salt: str = "") -> None:
        """Add the next row: its prompt, and how much is expected of it (rows of more come first)."""
        if salt not in self._roots:
            self._make_room(1, 0)
            self._roots[salt] = self._num_nodes
            self._parents[self._num_nodes], self._starts[self._num_nodes], self._lengths[self._num_nodes] = -1, 0, 0
            self._num_nodes += 1
        row = len(self)
        self._ends = _grown(self._ends, row + 1)
        self._prompt_lens = _grown(self._prompt_lens, row + 1)
        self._weights = _grown(self._weights, row + 1)
        self._prompt_lens[row], self._weights[row] = len(token_ids), min(weight, 2**31 - 1)
        self._waiting.append((token_ids, self._roots[salt]))
        self._num_waiting_tokens += len(token_ids)
        if self._num_waiting_tokens >= _BATCH_TOKENS:
            self._insert()

    def _insert(self) -> None:
        """Insert the rows that were added since the last time."""
        count = len(self._waiting)
        if not count:
            return
        prompts = [np.asarray(token_ids, np.int32) for token_ids, _ in self._waiting]
        bounds = np.zeros(count + 1, np.int64)
        np.cumsum([len(p) for p in prompts], out=bounds[1:])
        roots = np.array([root for _, root in self._waiting], np.int32)
        self._make_room(2 * count, int(bounds[-1]))
        self._num_nodes, self._num_pooled = self._radix.insert(
            self._parents, self._starts, self._lengths, self._pool, self._table, self._num_nodes, self._num_pooled,
            np.concatenate(prompts), bounds, roots, self._ends[self._num_rows : self._num_rows + count],
        )  # fmt: skip
        self._num_rows += count
        self._waiting.clear()
        self._num_waiting_tokens = 0

    def _make_room(self, num_nodes: int, num_tokens: int) -> None:
        nodes = self._num_nodes + num_nodes
        self._parents, self._starts = _grown(self._parents, nodes), _grown(self._starts, nodes)
        self._lengths = _grown(self._lengths, nodes)
        self._pool = _grown(self._pool, self._num_pooled + num_tokens)
        if nodes * 3 > len(self._table) * 2:
            size = len(self._table)
            while nodes * 3 > size * 2:
                size *= 2
            self._table = np.full(size, -1, np.int32)
            self._radix.fill_table(self._parents, self._starts, self._pool, self._table, self._num_nodes)

    def plan(self) -> tuple[np.ndarray, np.ndarray, Sharing]:
        """Return (order, shared_blocks, sharing): rows in the order to run them, and for each row of the input how many of its
        first blocks others begin with too; both (num_rows,) int32. The tree can be added to no more.
        """
        self._insert()
        n, num_rows, size = self._num_nodes, self._num_rows, self._block_size
        self._table = self._pool = np.empty(0, np.int32)  # no longer needed, and the largest parts
        self._starts = np.empty(0, np.int64)
        parents, lengths, ends = self._parents[:n], self._lengths[:n], self._ends[:num_rows]
        depths, users, preorder, group_of = (np.empty(n, np.int32) for _ in range(4))
        self._radix.measure(parents, lengths, ends, depths, users, preorder)
        self._radix.find_groups(parents, depths, users, preorder, size, group_of)
        prompt_lens, weights = self._prompt_lens[:num_rows], self._weights[:num_rows]
        row_group = group_of[ends] if num_rows else np.empty(0, np.int32)
        grouped = row_group >= 0
        shared_blocks = np.where(grouped, depths[row_group] // size, 0).astype(np.int32)
        np.minimum(shared_blocks, np.maximum(prompt_lens - 1, 0) // size, out=shared_blocks)
        groups = np.flatnonzero(group_of == np.arange(n, dtype=np.int32))
        by_size = {s: self._attainable(parents, depths, users, s) for s in {size, *BLOCK_SIZES}}
        largest_first = np.argsort(-users[groups], kind="stable")
        sharing = Sharing(
            num_groups=len(groups),
            num_grouped_rows=int(grouped.sum()),
            prompt_tokens=int(prompt_lens.sum(dtype=np.int64)),
            distinct_tokens=int(lengths.sum(dtype=np.int64)),
            attainable_tokens=by_size[size],
            attainable_by_block_size=by_size,
            group_sizes=users[groups][largest_first],
            group_tokens=(depths[groups] // size * size)[largest_first],
        )
        order = self._order(groups, row_group, group_of, parents, preorder, weights)
        return order, shared_blocks, sharing

    def _attainable(self, parents: np.ndarray, depths: np.ndarray, users: np.ndarray, size: int) -> int:
        """Return the tokens of all blocks that rows look for, less those that must be computed for it: each distinct one once.

        A row doesn't look for a block that ends with its last token: that token's logits are needed. It computes the block all
        the same, so where it comes first no other row has to.
        """
        above = np.where(parents >= 0, depths[parents], 0)
        full = depths // size - above // size  # blocks that end within the node's edge
        saved = full.astype(np.int64) * (users - 1)
        at_end = np.flatnonzero((full > 0) & (depths % size == 0))
        ending = np.bincount(self._ends[: self._num_rows], minlength=len(parents))[at_end]
        saved[at_end] -= np.maximum(ending - 1, 0)
        return int(saved.sum()) * size

    def _order(
        self,
        groups: np.ndarray,
        row_group: np.ndarray,
        group_of: np.ndarray,
        parents: np.ndarray,
        preorder: np.ndarray,
        weights: np.ndarray,
    ) -> np.ndarray:
        """Depth first by group; within each, rows and groups by the most that is expected of one of their rows."""
        num_rows, num_groups = len(row_group), len(groups)
        rows = np.arange(num_rows, dtype=np.int32)
        number = np.full(len(parents) + 1, -1, np.int32)  # of a group by its node; the last entry stands for no group
        number[groups] = np.arange(num_groups)
        above = np.where(parents[groups] >= 0, group_of[parents[groups]], -1)  # the group a group is in
        row_parent, group_parent = number[row_group] + 1, number[above] + 1
        weight = np.full(num_groups + 1, -1, np.int32)  # entry 0 is all that is in no group
        first_row = np.full(num_groups + 1, num_rows, np.int32)
        np.maximum.at(weight, row_parent, weights)
        np.minimum.at(first_row, row_parent, rows)
        number[preorder] = np.arange(len(parents))  # from here on: a node's place in preorder
        for g in np.argsort(-number[groups]):  # the innermost first
            p = group_parent[g]
            weight[p] = max(weight[p], weight[g + 1])
            first_row[p] = min(first_row[p], first_row[g + 1])
        parent_of_item = np.concatenate([row_parent, group_parent])
        weight_of_item = np.concatenate([-weights, -weight[1:]])
        first_of_item = np.concatenate([rows, first_row[1:]])
        by = np.lexsort((first_of_item, weight_of_item, parent_of_item)).astype(np.int32)
        order = np.empty(num_rows, np.int32)
        self._radix.walk(parent_of_item[by], by, num_rows, order)
        return order


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    """Return an array of at least `size` entries that begins with the old ones."""
    if size <= len(array):
        return array
    array.resize(max(size, len(array) * 33 // 32, _ROW_SLACK), refcheck=False)  # in place where the system can
    return array
