"""The kernel that copies whole blocks of the pool (copy-on-write)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["src_block_ids_ptr", "dst_block_ids_ptr"])
def copy_blocks_kernel(
    kv_ptr,
    src_block_ids_ptr,
    dst_block_ids_ptr,
    stride_block,
    block_numel,
    CHUNK: tl.constexpr,
):
    """kv[dst[i]] = kv[src[i]], bit by bit.

    kv (num_blocks, block_numel) integers of the pool's element size, strides (stride_block, 1); src_block_ids and
    dst_block_ids (N,) int32 or int64, no id in both. Grid: (N * cdiv(block_numel, CHUNK),), one program per chunk of a
    pair.
    """
    num_chunks = tl.cdiv(block_numel, CHUNK)
    pair = tl.program_id(0) // num_chunks
    chunk = tl.program_id(0) % num_chunks
    offsets = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = offsets < block_numel
    src = tl.load(src_block_ids_ptr + pair).to(tl.int64)
    dst = tl.load(dst_block_ids_ptr + pair).to(tl.int64)
    data = tl.load(kv_ptr + src * stride_block + offsets, mask=mask)
    tl.store(kv_ptr + dst * stride_block + offsets, data, mask=mask)
