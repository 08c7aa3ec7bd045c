"""The running softmax of attention: scores of a tile's tokens become weights, beside a largest score and a sum for each line.

Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

from __future__ import annotations

import numpy as np

from .jit import inner
from .simd import hmax, is_int8, keep_lanes, keep_lanes_or_zero, load, splat, store, vadd, vmax, vmul, vsub
from .vmath import vexp, vtanh


def make_softmax(width):
    """Build the softmax update of a tile's lines by `width`-lane vectors (a compile-time constant)."""

    def softmax(
        scores, num_vectors, num_lines, group, base, first_position, window, softcap, k_scales, v_scales, m, sums, tops,
        correction, kv_tag, f32,
    ):  # fmt: skip
        """Turn the scores of a tile's lines into weights in place, and say how what was summed before them shrinks.

        scores: the address of `num_vectors` vectors a line, of the tokens from position `base` on; tokens that a line's query,
        `group` lines a position from `first_position` on, doesn't see weigh 0. m, sums: addresses of a line's largest score so
        far, fp32, and its sum of weights, 16 lanes; both are brought up to date. tops, correction: addresses of one fp32 a
        line, and room for 15 more.

        Of int8 tiles, k_scales and v_scales are the addresses of one scale a token. V's go into the weights but not into
        their sum, and only where a token is seen: an unwritten slot's scale may be NaN.
        """
        num_tokens = num_vectors * width
        all_seen = window <= 0 and first_position >= base + num_tokens - 1
        plain = all_seen and softcap <= np.float32(0) and not is_int8(kv_tag)
        for line in range(num_lines):
            row = scores + line * num_tokens * 4
            top = splat(np.float32(-np.inf), width)
            if plain:
                for c in range(num_vectors):
                    top = vmax(top, load(row + c * (4 * width), f32, width))
            else:
                position = first_position + line // group
                high, low = position - base + 1, position - window + 1 - base if window > 0 else 0
                for c in range(num_vectors):
                    address = row + c * (4 * width)
                    s = load(address, f32, width)
                    if is_int8(kv_tag):
                        s = vmul(s, load(k_scales + c * (4 * width), f32, width))
                    if softcap > np.float32(0):
                        s = vmul(vtanh(vmul(s, splat(np.float32(1) / softcap, width))), splat(softcap, width))
                    s = keep_lanes(s, c * width, low, high)
                    store(address, s, f32)
                    top = vmax(top, s)
            store(tops + line * 4, vmax(load(m + line * 4, f32, 1), splat(hmax(top), 1)), f32)
        for line in range(0, num_lines, 16):
            shrunk = vexp(vsub(load(m + line * 4, f32, 16), load(tops + line * 4, f32, 16)))
            store(correction + line * 4, shrunk, f32)
        for line in range(num_lines):
            row = scores + line * num_tokens * 4
            new = load(tops + line * 4, f32, 1)
            store(m + line * 4, new, f32)
            shift = splat(hmax(new), width)
            total = vmul(load(sums + line * 64, f32, width), splat(hmax(load(correction + line * 4, f32, 1)), width))
            for c in range(num_vectors):
                address = row + c * (4 * width)
                e = vexp(vsub(load(address, f32, width), shift))
                total = vadd(total, e)
                if is_int8(kv_tag):
                    scale = load(v_scales + c * (4 * width), f32, width)
                    if not all_seen:
                        position = first_position + line // group
                        low = position - window + 1 - base if window > 0 else 0
                        scale = keep_lanes_or_zero(scale, c * width, low, position - base + 1)
                    e = vmul(e, scale)
                store(address, e, f32)
            store(sums + line * 64, total, f32)

    # numba names compiled code by this name, the argument types and a counter, and code from its disk cache keeps the
    # counter of the process that compiled it: under one name, one width could be linked in place of the other.
    softmax.__qualname__ = f"softmax_{width}"
    return inner(softmax)
