"""What the attention kernels share: reading one tile of the pool, and one step of the online softmax.

A tile is TILE consecutive positions of one row. It is decoupled from block_size: each lane looks up its own block id,
so one tile may span many blocks or a part of one. A tile always starts at a multiple of TILE, counted from the row's
first token, so the order of a row's additions depends on its own positions only, never on the batch or on how its
prompt was chunked.

Scores live in units of log2 (`exp2` is the hardware's instruction). Running values of one query, all fp32:

    max   the largest score so far, -inf before the first visible position
    sum   sum of exp2(score - max)
    acc   sum of exp2(score - max) * v
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_segment(bounds_ptr, num_segments, pid, CHUNK: tl.constexpr):
    """Return the segment that program `pid` works on, where segment s has bounds[s] : bounds[s + 1] cut in chunks.

    Segment s owns the programs from `bounds[s] // CHUNK + s` up to the next one's first: enough for its chunks, known
    without asking the device.
    """
    segment = 0
    after = num_segments
    while after - segment > 1:
        middle = (segment + after) // 2
        if tl.load(bounds_ptr + middle) // CHUNK + middle <= pid:
            segment = middle
        else:
            after = middle
    return segment


@triton.jit
def load_block_ids(block_table_ptr, positions, visible, BLOCK_SIZE: tl.constexpr):
    """Return the block id of each position, (TILE,) int64: a 32-bit id times a block's stride would wrap.

    The table is -1 past its last block; those entries are not read, and lanes that are not visible get block 0.
    """
    return tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)


@triton.jit
def load_tile(
    cache_ptr,
    block_ids,
    positions,
    visible,
    stride_block,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Return one head's K or V at `positions`, (TILE, BLOCK_D) in the cache's dtype.

    `cache_ptr` points at the head: (num_blocks, block_size, HEAD_DIM), strides (stride_block, stride_slot, 1),
    both multiples of ALIGNMENT: the compiler itself notices multiples of 16 only, and a head_dim of 100 would be loaded
    one element at a time. Lanes that are not visible are zero whatever the slot holds. Hiding their scores would not be
    enough: a slot that no row has written may hold NaN, and 0 * NaN would poison the sum over V.
    """
    offs_d = tl.arange(0, BLOCK_D)
    slots = (positions % BLOCK_SIZE).to(tl.int64)
    offsets = tl.multiple_of(block_ids * stride_block + slots * stride_slot, ALIGNMENT)
    mask = visible[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (offs_d < HEAD_DIM)[None, :]
    return tl.load(cache_ptr + offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def attend_tile(query, key, value, seen, row_max, row_sum, acc, scale, SOFTCAP: tl.constexpr):
    """Fold one tile into the running softmax and return the new (row_max, row_sum, acc).

    query (BLOCK_M, BLOCK_D), key and value (TILE, BLOCK_D), all of one dtype; seen (BLOCK_M, TILE) bool. Both products
    accumulate in fp32; the probabilities are rounded to V's dtype for the second, as every tensor-core kernel does.
    fp32 operands are multiplied in fp32 ("ieee"), not TF32. A tile of which a query sees nothing leaves that query's
    running values unchanged to the bit.
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP is not None:
        # tanh from exp2 of a negative number, which cannot overflow.
        x = scores * (scale / SOFTCAP)
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
        tanh = (1.0 - e) / (1.0 + e)
        scores = tl.where(x < 0, -tanh, tanh) * (SOFTCAP * LOG2_E)
    else:
        scores = scores * (scale * LOG2_E)
    scores = tl.where(seen, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A query that has seen nothing yet keeps -inf; subtracting it from itself would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    probs = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(probs, 1)
    acc = tl.dot(probs.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def load_key_value(
    block_table_ptr,
    key_head_ptr,
    value_head_ptr,
    positions,
    visible,
    stride_key_block,
    stride_key_slot,
    stride_value_block,
    stride_value_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Return one KV head's (key, value) tiles (TILE, BLOCK_D) at a row's positions, 0 where not visible."""
    block_ids = load_block_ids(block_table_ptr, positions, visible, BLOCK_SIZE)
    key = load_tile(
        key_head_ptr,
        block_ids,
        positions,
        visible,
        stride_key_block,
        stride_key_slot,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        ALIGNMENT,
    )
    value = load_tile(
        value_head_ptr,
        block_ids,
        positions,
        visible,
        stride_value_block,
        stride_value_slot,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        ALIGNMENT,
    )
    return key, value


@triton.jit
def attend_range(
    query,
    valid,
    key_head_ptr,
    value_head_ptr,
    block_table_ptr,
    begin,
    end,
    row_max,
    row_sum,
    acc,
    scale,
    stride_key_block,
    stride_key_slot,
    stride_value_block,
    stride_value_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold the positions [begin, end) of one block table, all seen by every valid query; return (row_max, row_sum, acc)."""
    for start in range(begin // TILE * TILE, end, TILE):
        positions = start + tl.arange(0, TILE)
        visible = (positions >= begin) & (positions < end)
        key, value = load_key_value(
            block_table_ptr,
            key_head_ptr,
            value_head_ptr,
            positions,
            visible,
            stride_key_block,
            stride_key_slot,
            stride_value_block,
            stride_value_slot,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_SIZE,
            ALIGNMENT,
        )
        seen = visible[None, :] & valid[:, None]
        row_max, row_sum, acc = attend_tile(query, key, value, seen, row_max, row_sum, acc, scale, SOFTCAP)
    return row_max, row_sum, acc


@triton.jit
def initial_max_and_sum(sinks_ptr, heads, valid, SHAPE: tl.constexpr):
    """Return the running (max, sum) before any tile. A sink is a logit without a value: it counts in the sum alone."""
    if sinks_ptr is None:
        row_max = tl.full([SHAPE], float("-inf"), tl.float32)
        row_sum = tl.zeros([SHAPE], tl.float32)
    else:
        row_max = tl.load(sinks_ptr + heads, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        row_sum = tl.full([SHAPE], 1.0, tl.float32)
    return row_max, row_sum


@triton.jit
def normalize(acc, row_sum):
    """Return acc / row_sum, and zeros for a query that saw nothing. acc (M, D), row_sum (M,)."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
