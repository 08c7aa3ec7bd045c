"""Rounding to 8 bits: a head of K or V, or a row that is to be multiplied, becomes codes from -127 to 127 and one fp32 scale.

scale = (largest |x|) / 127 and code = x / scale, rounded to nearest, ties to even: x is at most half a scale from code * scale.
Zeros have scale 0. What holds a NaN or an infinity has scale NaN, so that what it is used for is no number either.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .simd import hmax, hsum, load, splat, vadd, vdiv, vmax, vmul, vsub


@njit(boundscheck=False, error_model="numpy")
def row_scale(scales, row):
    """Return a row's scale; 1 where there are none."""
    return scales[row] if scales.shape[0] > 0 else np.float32(1)


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
