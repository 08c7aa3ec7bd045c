"""Prefill attention, many new tokens a row, each row over its own context: FlashAttention-2's loop over a paged pool.

The query heads that share a KV head are packed into the M side of the product together with BLOCK_Q queries, so each K
and V tile is read once for all of them. BLOCK_M is at least the 64 rows that `wgmma` of sm_90 wants, up to head_dim
256.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import attend_tile, find_segment, initial_max_and_sum, load_key_value, normalize


def prefill_config(head_dim: int, group: int, element_size: int) -> dict[str, int]:
    """Return the tile sizes and launch options, from the model alone: a batch's shape must not change a row's bits.

    Chosen from what the compiler reports: each fits the 99 KB of shared memory of sm_86 and sm_89, and fp16 and bf16 of
    head_dim 64, 128 and 256 spill no register on sm_80 and sm_90. Eight warps halve what each thread accumulates.
    """
    block_d = triton.next_power_of_2(head_dim)
    if element_size == 4:  # outside the tensor cores
        block_m = tile = 32 if block_d <= 256 else 16
    elif block_d <= 128:
        block_m, tile = 128, 64
    else:
        block_m, tile = (64, 32) if block_d <= 256 else (32, 32)
    return {
        "BLOCK_M": max(block_m, triton.next_power_of_2(group)),
        "TILE": tile,
        "num_warps": 8,
        "num_stages": 1 if element_size == 4 else 3,
    }


@triton.jit(
    do_not_specialize=["num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "cu_seqlens_q_ptr", "seq_lens_kv_ptr", "sinks_ptr"],
)
def prefill_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    seq_lens_kv_ptr,
    sinks_ptr,
    out_ptr,
    scale,
    num_seqs,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """out[t, h] = softmax(softcap(query[t, h] . K * scale) + mask, with the sink as one more logit) V

    query, out (T, H, D); key_cache, value_cache (num_blocks, Hkv, block_size, D); last dimensions contiguous, the other
    strides as passed. block_tables (S, B), cu_seqlens_q (S + 1,), seq_lens_kv (S,) int32; sinks (H,) or None.
    SLIDING_WINDOW and SOFTCAP may be None. ALIGNMENT divides all strides but the table's (see `load_tile`).

    Grid: (T // BLOCK_Q + S, Hkv) with BLOCK_Q = BLOCK_M // GROUP. One program takes BLOCK_Q queries of one row and all
    GROUP query heads of one KV head. Row s owns the programs from `cu_seqlens_q[s] // BLOCK_Q + s` up to the next row's
    first: enough for its queries, known without asking the device, found by bisection; programs to spare return at
    once. Lane m of M is query m // GROUP, head m % GROUP; lanes past BLOCK_Q * GROUP and past the row's end are masked.

    Masking: tiles wholly before the window or after the last query are not visited, and K and V are zero at positions
    that no query of this program sees. Accumulation is fp32. Against `reference.py`: 2e-5 in fp32, 4e-3 in fp16, 3e-2
    in bf16.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    pid = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)

    row = find_segment(cu_seqlens_q_ptr, num_seqs, pid, BLOCK_Q)
    row_start = tl.load(cu_seqlens_q_ptr + row)
    q_len = tl.load(cu_seqlens_q_ptr + row + 1) - row_start
    first_query = (pid - (row_start // BLOCK_Q + row)) * BLOCK_Q
    if first_query >= q_len:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    queries = first_query + offs_m // GROUP
    valid = (offs_m < BLOCK_Q * GROUP) & (queries < q_len)
    tokens = (row_start + queries).to(tl.int64)
    heads = kv_head * GROUP + offs_m % GROUP
    mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    query_offsets = tl.multiple_of(tokens * stride_query_token + heads * stride_query_head, ALIGNMENT)
    query = tl.load(query_ptr + query_offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)

    num_context = tl.load(seq_lens_kv_ptr + row) - q_len
    q_positions = num_context + queries
    end = num_context + tl.minimum(first_query + BLOCK_Q, q_len)
    begin = 0
    if SLIDING_WINDOW is not None:
        begin = tl.maximum(num_context + first_query - SLIDING_WINDOW + 1, 0)

    block_table_ptr = block_tables_ptr + tl.cast(row, tl.int64) * stride_table
    key_head_ptr = key_cache_ptr + kv_head * stride_key_head
    value_head_ptr = value_cache_ptr + kv_head * stride_value_head
    row_max, row_sum = initial_max_and_sum(sinks_ptr, heads, valid, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
        seen = visible[None, :] & (positions[None, :] <= q_positions[:, None])
        if SLIDING_WINDOW is not None:
            seen = seen & (positions[None, :] > q_positions[:, None] - SLIDING_WINDOW)
        row_max, row_sum, acc = attend_tile(query, key, value, seen, row_max, row_sum, acc, scale, SOFTCAP)

    out_offsets = tl.multiple_of(tokens * stride_out_token + heads * stride_out_head, ALIGNMENT)
    tl.store(out_ptr + out_offsets[:, None] + offs_d[None, :], normalize(acc, row_sum), mask=mask)
