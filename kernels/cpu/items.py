"""The work items of attention, and which thread takes which."""

from __future__ import annotations

import numpy as np

from .jit import inner

# What an item is, one int64 each: its row and the row after its last one (rows that share blocks), its KV head and the one
# after its last, its first query of the row, its shared blocks, and what all items before it cost.
ROW, END_ROW, KV_HEAD, END_KV_HEAD, FIRST_QUERY, NUM_SHARED, COST_BEFORE = range(7)


@inner
def plan_items(
    cu_seqlens_q, seq_lens_kv, row_bounds, num_shared_blocks, num_kv_heads, heads_per_item, block_size, queries_per_item,
    window, num_threads,
):  # fmt: skip
    """List the work items, and cut the list into one range a thread with equal KV tokens to read.

    Returns the items (N + more, fields above) and the ranges' bounds (num_threads + 1,) in them.
    """
    max_items = 1
    for row in range(seq_lens_kv.shape[0]):
        q_len = cu_seqlens_q[row + 1] - cu_seqlens_q[row]
        max_items += (q_len + queries_per_item - 1) // queries_per_item * num_kv_heads
    items = np.empty((max_items, 7), np.int64)
    n, total = 0, 0
    for g in range(num_shared_blocks.shape[0]):
        num_shared = num_shared_blocks[g]
        # Rows that share blocks have one query each.
        rows_per_item = queries_per_item if num_shared > 0 else 1
        for row in range(row_bounds[g], row_bounds[g + 1], rows_per_item):
            end_row = min(row + rows_per_item, row_bounds[g + 1])
            q_len = cu_seqlens_q[end_row] - cu_seqlens_q[row]
            for kv_head in range(0, num_kv_heads, heads_per_item):
                end_kv_head = min(kv_head + heads_per_item, num_kv_heads)
                for first in range(0, q_len, queries_per_item):
                    last = min(first + queries_per_item, q_len)
                    items[n, ROW], items[n, END_ROW] = row, end_row
                    items[n, KV_HEAD], items[n, END_KV_HEAD] = kv_head, end_kv_head
                    items[n, FIRST_QUERY], items[n, NUM_SHARED], items[n, COST_BEFORE] = first, num_shared, total
                    cost = (last - first + 1) * num_shared * block_size
                    queries_per_row = (last - first) // (end_row - row)
                    for r in range(row, end_row):
                        context = seq_lens_kv[r] - q_len + last
                        if window > 0:
                            context = min(context, window + last - first)
                        cost += (queries_per_row + 1) * (context - num_shared * block_size + 16)
                    total += cost * (end_kv_head - kv_head)
                    n += 1
    items[n, COST_BEFORE] = total
    bounds = np.empty(num_threads + 1, np.int64)
    bounds[0] = 0
    end = 0
    for t in range(1, num_threads):  # a thread's range ends at the item's edge nearest to its share
        while end < n and num_threads * (items[end, COST_BEFORE] + items[end + 1, COST_BEFORE]) < 2 * total * t:
            end += 1
        bounds[t] = end
    bounds[num_threads] = n
    return items, bounds
