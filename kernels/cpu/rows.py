"""The compiled kernels between a decoder layer's products: residual + RMSNorm, rotary embedding, gated activation.

Each makes one pass over its rows. A row's sums run over its own elements in a fixed order, and rows are cut evenly into one
range a thread, so a row's bits depend on nothing but the row. Arithmetic is fp32; a result is rounded once, when it is stored.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ..disk_cache import locked
from .simd import hsum, load, splat, store, vadd, vdiv, vexp, vmul, vsub


@njit(boundscheck=False, error_model="numpy")
def _inverse_rms(row, width, eps, tag, f32):
    """1 / sqrt(mean of squares + eps) of `width` elements, a multiple of 4."""
    if width % 16:
        total4 = splat(np.float32(0), 4)
        for c in range(width // 4):
            v4 = load(row + c * 4 * tag.itemsize, tag, 4)
            total4 = vadd(total4, vmul(v4, v4))
        return np.float32(1) / np.sqrt(hsum(total4) / np.float32(width) + eps)
    total = splat(np.float32(0), 16)
    for c in range(width // 16):
        v = load(row + c * 16 * tag.itemsize, tag, 16)
        total = vadd(total, vmul(v, v))
    return np.float32(1) / np.sqrt(hsum(total) / np.float32(width) + eps)


@locked
@njit(parallel=True, cache=True, boundscheck=False, error_model="numpy", nogil=True)
def add_rms_norm(residual, delta, weight, out, num_rows, width, eps, num_threads, tag, f32):
    """residual += delta (unless its address is 0); out = residual / rms(residual) * weight.

    residual (rows, width) fp32, delta and out (rows, width) of the tag's dtype, weight (width,) fp32: addresses of contiguous
    rows. `width` is a multiple of 16.
    """
    for thread in prange(num_threads):
        for r in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            x, d, o = residual + r * width * 4, delta + r * width * tag.itemsize, out + r * width * tag.itemsize
            if delta != 0:
                for c in range(width // 16):
                    store(x + c * 64, vadd(load(x + c * 64, f32, 16), load(d + c * 16 * tag.itemsize, tag, 16)), f32)
            factor = splat(_inverse_rms(x, width, eps, f32, f32), 16)
            for c in range(width // 16):
                v = vmul(vmul(load(x + c * 64, f32, 16), factor), load(weight + c * 64, f32, 16))
                store(o + c * 16 * tag.itemsize, v, tag)


@njit(boundscheck=False, error_model="numpy")
def _rotate_head(source, target, cos, sin, weight, head_dim, eps, tag, f32):
    """Rotate one head's halves against each other, after its own RMSNorm where `weight` is not 0."""
    half = head_dim // 2
    factor = np.float32(1)
    if weight != 0:
        factor = _inverse_rms(source, head_dim, eps, tag, f32)
    scale = splat(factor, 4)
    for c in range(0, half, 4):
        a = load(source + c * tag.itemsize, tag, 4)
        b = load(source + (half + c) * tag.itemsize, tag, 4)
        if weight != 0:
            a = vmul(vmul(a, scale), load(weight + c * 4, f32, 4))
            b = vmul(vmul(b, scale), load(weight + (half + c) * 4, f32, 4))
        first = vsub(vmul(a, load(cos + c * 4, f32, 4)), vmul(b, load(sin + c * 4, f32, 4)))
        second = vadd(vmul(b, load(cos + (half + c) * 4, f32, 4)), vmul(a, load(sin + (half + c) * 4, f32, 4)))
        store(target + c * tag.itemsize, first, tag)
        store(target + (half + c) * tag.itemsize, second, tag)


@locked
@njit(parallel=True, cache=True, boundscheck=False, error_model="numpy", nogil=True)
def rotate(
    qkv, cos, sin, q_weight, k_weight, query, key, value, num_rows, num_heads, num_kv_heads, head_dim, eps, num_threads, tag,
    f32,
):  # fmt: skip
    """Split rows of fused projections: rotated queries and keys, and values.

    qkv (rows, (H + 2 Hkv) * D), query (rows, H * D), key and value (rows, Hkv * D): of the tag's dtype; cos, sin (rows, D)
    fp32; q_weight, k_weight (D,) fp32 of the heads' RMSNorm, or 0 for none: addresses of contiguous rows. D % 8 == 0.
    """
    head = head_dim * tag.itemsize
    for thread in prange(num_threads):
        for r in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            source = qkv + r * (num_heads + 2 * num_kv_heads) * head
            angles_cos, angles_sin = cos + r * head_dim * 4, sin + r * head_dim * 4
            for h in range(num_heads):
                target = query + (r * num_heads + h) * head
                _rotate_head(source + h * head, target, angles_cos, angles_sin, q_weight, head_dim, eps, tag, f32)
            for h in range(num_kv_heads):
                at = source + (num_heads + h) * head
                target = key + (r * num_kv_heads + h) * head
                _rotate_head(at, target, angles_cos, angles_sin, k_weight, head_dim, eps, tag, f32)
                at += num_kv_heads * head
                target = value + (r * num_kv_heads + h) * head
                for c in range(0, head_dim, 4):
                    store(target + c * tag.itemsize, load(at + c * tag.itemsize, tag, 4), tag)


@locked
@njit(parallel=True, cache=True, boundscheck=False, error_model="numpy", nogil=True)
def silu_mul(gate_up, out, num_rows, width, num_threads, tag, f32):
    """out = silu(gate) * up. gate_up (rows, 2 * width), out (rows, width): addresses; `width` is a multiple of 16."""
    one, zero = splat(np.float32(1), 16), splat(np.float32(0), 16)
    for thread in prange(num_threads):
        for r in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
            gate, o = gate_up + 2 * r * width * tag.itemsize, out + r * width * tag.itemsize
            for c in range(0, width, 16):
                g = load(gate + c * tag.itemsize, tag, 16)
                u = load(gate + (width + c) * tag.itemsize, tag, 16)
                store(o + c * tag.itemsize, vmul(vdiv(g, vadd(one, vexp(vsub(zero, g)))), u), tag)
