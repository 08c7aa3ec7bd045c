"""The compiled kernels between a decoder layer's products: residual + RMSNorm, rotary embedding, gated activation.

Each makes one pass over its rows. A row's sums run over its own elements in a fixed order, and rows are cut evenly into one
range a thread, so a row's bits depend on nothing but the row. Arithmetic is fp32; a result is rounded once, when it is stored.
"""

from __future__ import annotations

import numpy as np

from .jit import inner, kernel, on_threads, part_of
from .quantize import quantize_row
from .simd import hsum, item_bytes, load, splat, store, vadd, vmul, vsub
from .vmath import vsilu


@inner
def _inverse_rms(row, width, eps, tag, f32):
    """1 / sqrt(mean of squares + eps) of `width` elements, a multiple of 4."""
    if width % 16:
        total4 = splat(np.float32(0), 4)
        for c in range(width // 4):
            v4 = load(row + c * 4 * item_bytes(tag), tag, 4)
            total4 = vadd(total4, vmul(v4, v4))
        return np.float32(1) / np.sqrt(hsum(total4) / np.float32(width) + eps)
    total = splat(np.float32(0), 16)
    for c in range(width // 16):
        v = load(row + c * 16 * item_bytes(tag), tag, 16)
        total = vadd(total, vmul(v, v))
    return np.float32(1) / np.sqrt(hsum(total) / np.float32(width) + eps)


@inner
def _add_rms_norm_part(thread, residual, delta, weight, out, num_rows, width, eps, num_threads, delta_tag, tag, f32):
    """A thread's part of the rows."""
    first, end = part_of(num_rows, thread, num_threads)
    for r in range(first, end):
        x, d, o = residual + r * width * 4, delta + r * width * item_bytes(delta_tag), out + r * width * item_bytes(tag)
        if delta != 0:
            for c in range(width // 16):
                added = load(d + c * 16 * item_bytes(delta_tag), delta_tag, 16)
                store(x + c * 64, vadd(load(x + c * 64, f32, 16), added), f32)
        factor = splat(_inverse_rms(x, width, eps, f32, f32), 16)
        for c in range(width // 16):
            v = vmul(vmul(load(x + c * 64, f32, 16), factor), load(weight + c * 64, f32, 16))
            store(o + c * 16 * item_bytes(tag), v, tag)


@kernel
def add_rms_norm(residual, delta, weight, out, num_rows, width, eps, num_threads, delta_tag, tag, f32):
    """residual += delta (unless its address is 0); out = residual / rms(residual) * weight.

    residual (rows, width) fp32, delta (rows, width) of its tag's dtype, out (rows, width) of the other tag's, weight (width,)
    fp32: addresses of contiguous rows. `width` is a multiple of 16.
    """
    work = (residual, delta, weight, out, num_rows, width, eps, num_threads, delta_tag, tag, f32)
    on_threads(_add_rms_norm_part, num_threads, work)
    return True


@inner
def _rotate_head(source, target, cos, sin, weight, head_dim, eps, source_tag, tag, f32):
    """Rotate one head's halves against each other, after its own RMSNorm where `weight` is not 0."""
    half = head_dim // 2
    factor = splat(_inverse_rms(source, head_dim, eps, source_tag, f32) if weight != 0 else np.float32(1), 4)
    for c in range(0, half, 4):
        a = load(source + c * item_bytes(source_tag), source_tag, 4)
        b = load(source + (half + c) * item_bytes(source_tag), source_tag, 4)
        if weight != 0:
            a = vmul(vmul(a, factor), load(weight + c * 4, f32, 4))
            b = vmul(vmul(b, factor), load(weight + (half + c) * 4, f32, 4))
        first = vsub(vmul(a, load(cos + c * 4, f32, 4)), vmul(b, load(sin + c * 4, f32, 4)))
        second = vadd(vmul(b, load(cos + (half + c) * 4, f32, 4)), vmul(a, load(sin + (half + c) * 4, f32, 4)))
        store(target + c * item_bytes(tag), first, tag)
        store(target + (half + c) * item_bytes(tag), second, tag)


@inner
def _rotate_part(
    thread, qkv, cos, sin, q_weight, k_weight, query, key, value, num_rows, num_heads, num_kv_heads, head_dim, eps, num_threads,
    qkv_tag, tag, f32,
):  # fmt: skip
    """A thread's part of the rows."""
    head, qkv_head = head_dim * item_bytes(tag), head_dim * item_bytes(qkv_tag)
    first, end = part_of(num_rows, thread, num_threads)
    for r in range(first, end):
        source = qkv + r * (num_heads + 2 * num_kv_heads) * qkv_head
        at_cos, at_sin = cos + r * head_dim * 4, sin + r * head_dim * 4
        for h in range(num_heads):
            at, target = source + h * qkv_head, query + (r * num_heads + h) * head
            _rotate_head(at, target, at_cos, at_sin, q_weight, head_dim, eps, qkv_tag, tag, f32)
        for h in range(num_kv_heads):
            at, target = source + (num_heads + h) * qkv_head, key + (r * num_kv_heads + h) * head
            _rotate_head(at, target, at_cos, at_sin, k_weight, head_dim, eps, qkv_tag, tag, f32)
            at += num_kv_heads * qkv_head
            target = value + (r * num_kv_heads + h) * head
            for c in range(0, head_dim, 4):
                store(target + c * item_bytes(tag), load(at + c * item_bytes(qkv_tag), qkv_tag, 4), tag)


@kernel
def rotate(
    qkv, cos, sin, q_weight, k_weight, query, key, value, num_rows, num_heads, num_kv_heads, head_dim, eps, num_threads,
    qkv_tag, tag, f32,
):  # fmt: skip
    """Split rows of fused projections: rotated queries and keys, and values.

    qkv (rows, (H + 2 Hkv) * D) of its tag's dtype; query (rows, H * D), key and value (rows, Hkv * D) of the other tag's; cos,
    sin (rows, D) fp32; q_weight, k_weight (D,) fp32 of the heads' RMSNorm, or 0 for none: addresses of contiguous rows. D is a
    multiple of 8.
    """
    work = (
        qkv, cos, sin, q_weight, k_weight, query, key, value, num_rows, num_heads, num_kv_heads, head_dim, eps, num_threads,
        qkv_tag, tag, f32,
    )  # fmt: skip
    on_threads(_rotate_part, num_threads, work)
    return True


@inner
def _silu_mul_part(thread, gate_up, out, num_rows, width, num_threads, gate_up_tag, tag):
    """A thread's part of the rows."""
    first, end = part_of(num_rows, thread, num_threads)
    for r in range(first, end):
        gate, o = gate_up + 2 * r * width * item_bytes(gate_up_tag), out + r * width * item_bytes(tag)
        for c in range(0, width, 16):
            g = load(gate + c * item_bytes(gate_up_tag), gate_up_tag, 16)
            u = load(gate + (width + c) * item_bytes(gate_up_tag), gate_up_tag, 16)
            store(o + c * item_bytes(tag), vmul(vsilu(g), u), tag)


@kernel
def silu_mul(gate_up, out, num_rows, width, num_threads, gate_up_tag, tag):
    """out = silu(gate) * up. gate_up (rows, 2 * width), out (rows, width): addresses; `width` is a multiple of 16."""
    on_threads(_silu_mul_part, num_threads, (gate_up, out, num_rows, width, num_threads, gate_up_tag, tag))


@inner
def _quantize_part(thread, x, out, scales, num_rows, width, num_threads, tag, out_tag):
    """A thread's part of the rows."""
    first, end = part_of(num_rows, thread, num_threads)
    for r in range(first, end):
        source, target = x + r * width * item_bytes(tag), out + r * width * item_bytes(out_tag)
        scales[r] = quantize_row(source, target, width, tag, out_tag)


@kernel
def quantize(x, out, scales, num_rows, width, num_threads, tag, out_tag):
    """Round each row to 255 levels: x = out * scale, the row's largest magnitude at 127; as uint8, out has 128 for 0.

    x (rows, width) of the tag's dtype, out (rows, width) of the other tag's, int16 or uint8: addresses; scales (rows,) fp32 is
    written. A row that holds a NaN or an infinity has a NaN for its scale. `width` is at least 4.
    """
    on_threads(_quantize_part, num_threads, (x, out, scales, num_rows, width, num_threads, tag, out_tag))
