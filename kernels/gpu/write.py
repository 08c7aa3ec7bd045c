"""The kernel that stores a step's new keys and values in their slots of the pool."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_key_block,
    stride_key_cache_head,
    stride_key_slot,
    stride_value_block,
    stride_value_cache_head,
    stride_value_slot,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """key_cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = key[token], and the same for value.

    key, value (T, Hkv, D); key_cache, value_cache (num_blocks, Hkv, block_size, D); last dimensions contiguous, the
    other strides as passed. slot_mapping (T,) int64, -1 = skip. Values are converted to the caches' dtype. Grid: (T,),
    one program per token and all its heads, (BLOCK_H, BLOCK_D) padded to powers of two and masked. Exact against
    `reference.py`.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    key = tl.load(key_ptr + token * stride_key_token + heads * stride_key_head + dims, mask=mask)
    value = tl.load(value_ptr + token * stride_value_token + heads * stride_value_head + dims, mask=mask)
    key_offsets = block_id * stride_key_block + offset * stride_key_slot + heads * stride_key_cache_head + dims
    value_offsets = block_id * stride_value_block + offset * stride_value_slot + heads * stride_value_cache_head + dims
    tl.store(key_cache_ptr + key_offsets, key, mask=mask)
    tl.store(value_cache_ptr + value_offsets, value, mask=mask)
