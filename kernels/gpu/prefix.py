"""Decode attention over blocks that many rows share: their queries together, one new token a row, over the shared blocks.

The queries of a group of rows and the query heads of a KV head fill the M side of the product as a prompt's queries do in
`prefill.py`, with the same tile sizes. The results are partials of splits like those of `decode.py`, which attends to the
rest of each row and merges them all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import attend_range, find_segment, initial_max_and_sum


@triton.jit(
    do_not_specialize=["num_groups", "first_row", "end_row", "num_splits", "stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "row_bounds_ptr", "num_shared_blocks_ptr", "sinks_ptr"],
)
def prefix_split_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    row_bounds_ptr,
    num_shared_blocks_ptr,
    sinks_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    partial_acc_ptr,
    scale,
    num_groups,
    first_row,
    end_row,
    num_splits,
    stride_query_token,
    stride_query_head,
    stride_key_block,
    stride_key_head,
    stride_key_slot,
    stride_value_block,
    stride_value_head,
    stride_value_slot,
    stride_table,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """The running (max, sum, acc) of `tile.py` over one split of a group's shared blocks, for many of its rows.

    query (S, H, D); key_cache, value_cache (num_blocks, Hkv, block_size, D); last dimensions contiguous, the other strides
    as passed. block_tables (S, B), row_bounds (G + 1,), num_shared_blocks (G,) int32; sinks (H,) or None. partial_max,
    partial_sum (end_row - first_row, H, num_splits) and partial_acc (end_row - first_row, H, num_splits, D) fp32,
    contiguous: of the rows [first_row, end_row) alone. SOFTCAP may be None. ALIGNMENT divides all strides but the table's
    (see `load_tile`).

    Grid: (S // ROWS + G, Hkv, splits of the longest prefix) with ROWS = BLOCK_M // GROUP. One program takes ROWS rows of a
    group and all GROUP query heads of one KV head; `find_segment` tells which. Lane m of M is row m // GROUP, head
    m % GROUP; lanes past ROWS * GROUP and rows outside the group or [first_row, end_row) are masked. Split i is the
    positions [i * SPLIT_SIZE, (i + 1) * SPLIT_SIZE) up to the end of the shared blocks; programs past it return. The sink
    belongs to split 0. Accumulation is fp32; tolerances are those of `decode_split_kernel`.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    pid = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    group = find_segment(row_bounds_ptr, num_groups, pid, ROWS)
    group_begin = tl.load(row_bounds_ptr + group)
    chunk_begin = group_begin + (pid - (group_begin // ROWS + group)) * ROWS
    begin = tl.maximum(chunk_begin, first_row)
    end = tl.minimum(tl.minimum(chunk_begin + ROWS, tl.load(row_bounds_ptr + group + 1)), end_row)
    split_begin = split * SPLIT_SIZE
    split_end = tl.minimum(split_begin + SPLIT_SIZE, tl.load(num_shared_blocks_ptr + group) * BLOCK_SIZE)
    if (begin >= end) | (split_begin >= split_end):
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    rows = chunk_begin + offs_m // GROUP
    valid = (offs_m < ROWS * GROUP) & (rows >= begin) & (rows < end)
    heads = kv_head * GROUP + offs_m % GROUP
    mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    query_offsets = tl.multiple_of(rows.to(tl.int64) * stride_query_token + heads * stride_query_head, ALIGNMENT)
    query = tl.load(query_ptr + query_offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)

    row_max, row_sum = initial_max_and_sum(sinks_ptr, heads, valid, BLOCK_M)
    if split > 0:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max, row_sum, acc = attend_range(
        query,
        valid,
        key_cache_ptr + kv_head * stride_key_head,
        value_cache_ptr + kv_head * stride_value_head,
        block_tables_ptr + group_begin.to(tl.int64) * stride_table,
        split_begin,
        split_end,
        row_max,
        row_sum,
        acc,
        scale,
        stride_key_block,
        stride_key_slot,
        stride_value_block,
        stride_value_slot,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        ALIGNMENT,
        SOFTCAP,
        TILE,
    )

    partials = ((rows - first_row) * NUM_HEADS + heads) * num_splits + split
    tl.store(partial_max_ptr + partials, row_max, mask=valid)
    tl.store(partial_sum_ptr + partials, row_sum, mask=valid)
    tl.store(partial_acc_ptr + partials[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask)
