"""Decode attention, one new token a row: attention over one split of a row's context, and the merge of its splits.

A split is SPLIT_SIZE consecutive positions, counted from the row's first token: a fixed size, not a fixed count. A
row's partial results and the order of their merge therefore depend on its own length alone, whatever else is in the
batch. When no row of the batch can have two splits, the first kernel writes the output itself; its bits are those of
the two-kernel way.

Behind a prefix that `prefix.py` has attended to, a row's own splits begin where the prefix ends: the split in which it
ends is cut in two. Partials of a row, P shared and L tokens in all, with SPLIT_SIZE = 512, P = 700, L = 1100:

    0 [0, 512)   1 [512, 700)   |   2 [700, 1024)   3 [1024, 1100)

So the bits of such a row depend on P too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import attend_range, initial_max_and_sum, normalize

# 512 positions of K and V weigh 60 times the fp32 partials that a group of 4 heads writes and reads again, and one row
# of 8k tokens with 8 KV heads still makes 128 programs.
SPLIT_SIZE = 512


def decode_config(head_dim: int, group: int, element_size: int) -> dict[str, int]:
    """Return the tile sizes and launch options, from the model alone: a batch's shape must not change a row's bits."""
    row_bytes = triton.next_power_of_2(head_dim) * element_size
    return {
        "BLOCK_M": max(16, triton.next_power_of_2(group)),  # a tensor-core product takes no smaller M
        "TILE": min(64, max(16, 16384 // row_bytes)),  # 16 KB of K and as much of V
        "num_warps": 4,
        "num_stages": 3,
    }


def max_num_splits(max_kv_len: int, sliding_window: int | None) -> int:
    """Return how many splits the positions that one token sees can touch."""
    num_splits = triton.cdiv(max_kv_len, SPLIT_SIZE)
    if sliding_window is not None:
        num_splits = min(num_splits, triton.cdiv(sliding_window - 1, SPLIT_SIZE) + 1)
    return max(1, num_splits)


@triton.jit
def first_position(
    seq_len, shared_blocks_ptr, row, BLOCK_SIZE: tl.constexpr, SLIDING_WINDOW: tl.constexpr, SPLIT_SIZE: tl.constexpr
):
    """Return the first position of a row's own splits, and the number of partials that its shared prefix has before them.

    That is the first position behind the shared prefix, or the first that the row's last token sees; never both.
    """
    begin = 0
    num_prefix_splits = 0
    if shared_blocks_ptr is not None:
        tl.static_assert(SLIDING_WINDOW is None)
        begin = tl.load(shared_blocks_ptr + row) * BLOCK_SIZE
        num_prefix_splits = tl.cdiv(begin, SPLIT_SIZE)
    if SLIDING_WINDOW is not None:
        begin = tl.maximum(seq_len - SLIDING_WINDOW, 0)
    return begin, num_prefix_splits


@triton.jit(
    do_not_specialize=["num_splits", "stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_kv_ptr", "shared_blocks_ptr", "sinks_ptr"],
)
def decode_split_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    seq_lens_kv_ptr,
    shared_blocks_ptr,
    sinks_ptr,
    out_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    partial_acc_ptr,
    scale,
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
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """The running (max, sum, acc) of `tile.py` over one split of one row, for all query heads of one KV head.

    query, out (S, H, D); key_cache, value_cache (num_blocks, Hkv, block_size, D); last dimensions contiguous, the other
    strides as passed. block_tables (S, B), seq_lens_kv (S,) int32; shared_blocks (S,) int32, the leading blocks of each
    row that `prefix.py` attends to, or None; sinks (H,) or None. partial_max, partial_sum (S, H, num_splits) and
    partial_acc (S, H, num_splits, D) fp32, contiguous; all three None = one split, write `out`. SLIDING_WINDOW and
    SOFTCAP may be None. ALIGNMENT divides all strides but the table's (see `load_tile`).

    Grid: (S, Hkv, the most splits of its own that a row can have). Split i of a row is the i-th that its last token
    sees, behind the shared blocks; programs past the row's end return, and the merge does not read their partials. The
    sink belongs to a row's first split. K and V are zero outside the split's visible positions. Accumulation is fp32.
    Against `reference.py`: 2e-5 in fp32, 4e-3 in fp16, 3e-2 in bf16.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_kv_ptr + row)
    begin, num_prefix_splits = first_position(seq_len, shared_blocks_ptr, row, BLOCK_SIZE, SLIDING_WINDOW, SPLIT_SIZE)
    split = begin // SPLIT_SIZE + tl.program_id(2)
    partial = num_prefix_splits + tl.program_id(2)
    if partial_acc_ptr is not None and split * SPLIT_SIZE >= seq_len:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    valid = offs_m < GROUP
    heads = kv_head * GROUP + offs_m
    mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    query_offsets = tl.multiple_of(row * stride_query_token + heads * stride_query_head, ALIGNMENT)
    query = tl.load(query_ptr + query_offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)

    block_table_ptr = block_tables_ptr + row * stride_table
    key_head_ptr = key_cache_ptr + kv_head * stride_key_head
    value_head_ptr = value_cache_ptr + kv_head * stride_value_head
    row_max, row_sum = initial_max_and_sum(sinks_ptr, heads, valid, BLOCK_M)
    if partial > 0:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    split_begin = tl.maximum(split * SPLIT_SIZE, begin)
    split_end = tl.minimum((split + 1) * SPLIT_SIZE, seq_len)
    row_max, row_sum, acc = attend_range(
        query,
        valid,
        key_head_ptr,
        value_head_ptr,
        block_table_ptr,
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

    if partial_acc_ptr is None:
        out_offsets = tl.multiple_of(row * stride_out_token + heads * stride_out_head, ALIGNMENT)
        tl.store(out_ptr + out_offsets[:, None] + offs_d[None, :], normalize(acc, row_sum), mask=mask)
    else:
        partials = (row * NUM_HEADS + heads) * num_splits + partial
        tl.store(partial_max_ptr + partials, row_max, mask=valid)
        tl.store(partial_sum_ptr + partials, row_sum, mask=valid)
        tl.store(partial_acc_ptr + partials[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["seq_lens_kv_ptr", "shared_blocks_ptr"],
)
def merge_splits_kernel(
    partial_max_ptr,
    partial_sum_ptr,
    partial_acc_ptr,
    seq_lens_kv_ptr,
    shared_blocks_ptr,
    out_ptr,
    num_splits,
    stride_out_token,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out = sum_i acc_i * exp2(max_i - max) / sum_i sum_i * exp2(max_i - max), over the splits i that the row has,
    those of its shared prefix included.

    Pointers and shapes as in `decode_split_kernel`. Grid: (S, H), one program per row and head. It walks the row's own
    splits CHUNK at a time: a fixed order. Splits past the row's end were never written; they are masked, so they
    neither set the maximum nor reach a sum. With one split all factors are exactly 1, hence the same bits as without a
    merge.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_kv_ptr + row)
    begin, num_prefix_splits = first_position(seq_len, shared_blocks_ptr, row, BLOCK_SIZE, SLIDING_WINDOW, SPLIT_SIZE)
    row_splits = num_prefix_splits + tl.cdiv(seq_len, SPLIT_SIZE) - begin // SPLIT_SIZE

    offs_d = tl.arange(0, BLOCK_D)
    partials = (row * NUM_HEADS + head) * num_splits
    total_max = tl.full([1], float("-inf"), tl.float32)
    total_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for start in range(0, row_splits, CHUNK):
        splits = start + tl.arange(0, CHUNK)
        valid = splits < row_splits
        split_max = tl.load(partial_max_ptr + partials + splits, mask=valid, other=float("-inf"))
        split_sum = tl.load(partial_sum_ptr + partials + splits, mask=valid, other=0.0)
        mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
        offsets = (partials + splits)[:, None] * HEAD_DIM + offs_d[None, :]
        split_acc = tl.load(partial_acc_ptr + offsets, mask=mask, other=0.0)

        new_max = tl.maximum(total_max, tl.max(split_max, 0))
        decay = tl.exp2(total_max - new_max)
        weights = tl.exp2(split_max - new_max)
        total_sum = total_sum * decay + tl.sum(split_sum * weights, 0)
        acc = acc * decay[:, None] + tl.sum(split_acc * weights[:, None], 0)[None, :]
        total_max = new_max

    out_offsets = row * stride_out_token + head * stride_out_head + offs_d[None, :]
    tl.store(out_ptr + out_offsets, normalize(acc, total_sum), mask=(offs_d < HEAD_DIM)[None, :])
