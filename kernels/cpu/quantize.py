"""The K/V write into an int8 pool: each head of a token becomes codes from -127 to 127 and one fp32 scale.

scale = (largest |x|) / 127 and code = x / scale, rounded to nearest, ties to even: x is at most half a scale from code * scale.
A head of zeros has scale 0. One that holds a NaN or an infinity has scale NaN, so that what attends to it is no number either.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ..disk_cache import locked
from .simd import copy_element, hmax, hsum, load, splat, store, vadd, vdiv, vmax, vmul, vsub


def make_quantize(width, put):
    """Build the quantization of contiguous elements by `width`-lane vectors, stored by `put` (both compile-time constants)."""

    def quantize(source, codes, count, tag, code_tag):
        """Write the codes of `count` elements and return their scale. The last vector may overlap its neighbour."""
        zero = splat(np.float32(0), width)
        top, odd = zero, zero
        for c in range((count + width - 1) // width):
            x = load(source + min(c * width, count - width) * tag.itemsize, tag, width)
            top = vmax(top, vmax(x, vsub(zero, x)))
            odd = vadd(odd, vmul(x, zero))  # 0, or NaN for a NaN or an infinity: a maximum can lose the former
        scale = hmax(top) / np.float32(127) + hsum(odd)
        for c in range((count + width - 1) // width):
            first = min(c * width, count - width)
            x = zero
            if scale > np.float32(0):
                x = vdiv(load(source + first * tag.itemsize, tag, width), splat(scale, width))
            put(codes + first * code_tag.itemsize, x, code_tag)
        return scale

    quantize.__qualname__ = f"quantize_{width}_{put.__name__}"  # see kernels._make_softmax_row
    return njit(boundscheck=False, error_model="numpy")(quantize)


_quantize_head_16 = make_quantize(16, store)
_quantize_head_4 = make_quantize(4, store)


@njit(boundscheck=False, error_model="numpy")
def _store_head(source, cache, dim_stride, scale_address, codes, head_dim, tag, code_tag, f32):
    """Quantize one head to its slot: `codes` is room for head_dim bytes, `dim_stride` the slot's stride in bytes."""
    if head_dim < 16:
        scale = _quantize_head_4(source, codes, head_dim, tag, code_tag)
    else:
        scale = _quantize_head_16(source, codes, head_dim, tag, code_tag)
    for d in range(head_dim):
        copy_element(cache + d * dim_stride, codes + d, code_tag)
    store(scale_address, splat(scale, 1), f32)


@locked
@njit(parallel=True, cache=True, boundscheck=False, error_model="numpy", nogil=True)
def store_kv_int8(
    key, key_src_strides, value, value_src_strides, key_cache, key_strides, value_cache, value_strides, key_scales,
    value_scales, slot_mapping, num_kv_heads, head_dim, block_size, num_threads, tag, code_tag, f32,
):  # fmt: skip
    """Quantize each token's K and V to its slot.

    Strides as `kernels.store_kv`'s; key_scales, value_scales as `kernels.attend`'s. `tag` is the sources', `code_tag` int8's.
    """
    num_tokens = slot_mapping.shape[0]
    for thread in prange(num_threads):
        codes_buf = np.empty(head_dim, np.int8)
        codes = codes_buf.ctypes.data
        for t in range(num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads):
            slot = slot_mapping[t]
            if slot < 0:
                continue
            block, offset = slot // block_size, slot % block_size
            for h in range(num_kv_heads):
                k_src = key + t * key_src_strides[0] + h * key_src_strides[1]
                v_src = value + t * value_src_strides[0] + h * value_src_strides[1]
                k_dst = key_cache + block * key_strides[0] + h * key_strides[1] + offset * key_strides[2]
                v_dst = value_cache + block * value_strides[0] + h * value_strides[1] + offset * value_strides[2]
                k_scale = key_scales[0] + block * key_scales[1] + h * key_scales[2] + offset * 4
                v_scale = value_scales[0] + block * value_scales[1] + h * value_scales[2] + offset * 4
                _store_head(k_src, k_dst, key_strides[3], k_scale, codes, head_dim, tag, code_tag, f32)
                _store_head(v_src, v_dst, value_strides[3], v_scale, codes, head_dim, tag, code_tag, f32)
