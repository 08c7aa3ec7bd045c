"""The compiled K/V write: each token's heads to its slot, bit for bit or rounded to 8 bits."""

from __future__ import annotations

import numpy as np

from .jit import inner, keep_alive, kernel, on_threads, part_of
from .quantize import make_quantize
from .simd import copy_element, is_int8, item_bytes, splat, store

_quantize_16 = make_quantize(16, store, by_inverse=False)
_quantize_4 = make_quantize(4, store, by_inverse=False)


@inner
def _store_head(source, cache, dim_stride, scale_address, codes, head_dim, tag, cache_tag, f32):
    """Store one head in its slot, bit for bit or (int8) quantized; `codes` is room for head_dim bytes."""
    if is_int8(cache_tag):
        if head_dim < 16:
            scale = _quantize_4(source, codes, head_dim, tag, cache_tag)
        else:
            scale = _quantize_16(source, codes, head_dim, tag, cache_tag)
        store(scale_address, splat(scale, 1), f32)
        source = codes
    for d in range(head_dim):
        copy_element(cache + d * dim_stride, source + d * item_bytes(cache_tag), cache_tag)


@inner
def _store_heads(
    source, source_row, cache, token_stride, dim_stride, scale_address, codes, num_tokens, head_dim, tag, cache_tag, f32
):  # fmt: skip
    """Store a head of tokens in neighbouring slots, in the order in which the cache has them side by side."""
    if is_int8(cache_tag) or dim_stride < token_stride:
        for t in range(num_tokens):
            _store_head(
                source + t * source_row, cache + t * token_stride, dim_stride, scale_address + t * 4, codes, head_dim, tag,
                cache_tag, f32,
            )  # fmt: skip
        return
    for d in range(head_dim):
        for t in range(num_tokens):
            copy_element(
                cache + d * dim_stride + t * token_stride, source + t * source_row + d * item_bytes(cache_tag), cache_tag
            )  # fmt: skip


@inner
def _places(block, offset, head, key_cache, key_strides, value_cache, value_strides, key_scales, value_scales):
    """The addresses of a slot's K and V of a head, and of their scales."""
    return (
        key_cache + block * key_strides[0] + head * key_strides[1] + offset * key_strides[2],
        value_cache + block * value_strides[0] + head * value_strides[1] + offset * value_strides[2],
        key_scales[0] + block * key_scales[1] + head * key_scales[2] + offset * 4,
        value_scales[0] + block * value_scales[1] + head * value_scales[2] + offset * 4,
    )


@inner
def store_token(
    key, value, head_bytes, key_cache, key_strides, value_cache, value_strides, key_scales, value_scales, slot, first_head,
    end_head, block_size, codes, head_dim, tag, cache_tag, f32,
):  # fmt: skip
    """Store a token's heads [first_head, end_head) in its slot.

    key, value: addresses of its heads, each `head_bytes` from the one before. codes: room for head_dim bytes. The rest as
    `store_kv` takes it.
    """
    block, offset = slot // block_size, slot % block_size
    for h in range(first_head, end_head):
        k_dst, v_dst, k_scale, v_scale = _places(
            block, offset, h, key_cache, key_strides, value_cache, value_strides, key_scales, value_scales
        )
        _store_head(key + h * head_bytes, k_dst, key_strides[3], k_scale, codes, head_dim, tag, cache_tag, f32)
        _store_head(value + h * head_bytes, v_dst, value_strides[3], v_scale, codes, head_dim, tag, cache_tag, f32)


@inner
def _run_of_slots(slot_mapping, first, end, block_size):
    """Return the token after those from `first` on that have neighbouring slots of one block."""
    last = first
    while last + 1 < end and slot_mapping[last + 1] == slot_mapping[last] + 1 and slot_mapping[last + 1] % block_size != 0:
        last += 1
    return last + 1


@inner
def _store_part(
    thread, key, key_src_strides, value, value_src_strides, key_cache, key_strides, value_cache, value_strides, key_scales,
    value_scales, slot_mapping, num_kv_heads, head_dim, block_size, num_threads, tag, cache_tag, f32,
):  # fmt: skip
    """Store a thread's part of the tokens."""
    num_tokens = slot_mapping.shape[0]
    codes_buf = np.empty(head_dim, np.int8)
    codes = np.int64(codes_buf.ctypes.data)
    t, end = part_of(num_tokens, thread, num_threads)
    while t < end:
        run_end = _run_of_slots(slot_mapping, t, end, block_size)
        if slot_mapping[t] >= 0:
            block, offset = slot_mapping[t] // block_size, slot_mapping[t] % block_size
            for h in range(num_kv_heads):
                k_src = key + t * key_src_strides[0] + h * key_src_strides[1]
                v_src = value + t * value_src_strides[0] + h * value_src_strides[1]
                k_dst, v_dst, k_scale, v_scale = _places(
                    block, offset, h, key_cache, key_strides, value_cache, value_strides, key_scales, value_scales
                )
                _store_heads(
                    k_src, key_src_strides[0], k_dst, key_strides[2], key_strides[3], k_scale, codes, run_end - t, head_dim,
                    tag, cache_tag, f32,
                )  # fmt: skip
                _store_heads(
                    v_src, value_src_strides[0], v_dst, value_strides[2], value_strides[3], v_scale, codes, run_end - t,
                    head_dim, tag, cache_tag, f32,
                )  # fmt: skip
        t = run_end
    keep_alive(codes_buf)


@kernel
def store_kv(
    key, key_src_strides, value, value_src_strides, key_cache, key_strides, value_cache, value_strides, key_scales,
    value_scales, slot_mapping, num_kv_heads, head_dim, block_size, num_threads, tag, cache_tag, f32,
):  # fmt: skip
    """Store each token's K and V in its slot; caches have the sources' dtype or are int8.

    Source strides in bytes (token, head); cache strides (block, head, token, dim). key_scales, value_scales as `attend` takes
    them.
    """
    work = (
        key, key_src_strides, value, value_src_strides, key_cache, key_strides, value_cache, value_strides, key_scales,
        value_scales, slot_mapping, num_kv_heads, head_dim, block_size, num_threads, tag, cache_tag, f32,
    )  # fmt: skip
    on_threads(_store_part, num_threads, work)
    return True
