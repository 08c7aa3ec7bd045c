"""Rounding to 8 bits: a head of K or V, or a row that is to be multiplied, becomes codes from -127 to 127 and one fp32 scale.

scale = (largest |x|) / 127 and code = x / scale, rounded to nearest, ties to even: x is at most half a scale from code * scale.
Zeros have scale 0. What holds a NaN or an infinity has scale NaN, so that what it is used for is no number either.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .simd import hmax, hsum, load, splat, vadd, vdiv, vmax, vmul, vsub

# A division takes as long as many products; below this scale its inverse may be more than fp32 holds.
_SMALLEST_INVERTED = np.float32(1e-37)


def make_quantize(width, put, by_inverse):
    """Build the quantization of contiguous elements by `width`-lane vectors, stored by `put` (compile-time constants).

    by_inverse: multiply by 1 / scale instead, which may round a tie the other way; what has a scale below 1e-37 becomes 0.
    """

    def quantize(source, codes, count, tag, code_tag):
        """Write the codes of `count` elements and return their scale. The last vector may overlap its neighbour."""
        zero = splat(np.float32(0), width)
        top, top2, odd, odd2 = zero, zero, zero, zero  # two of each, so that one doesn't wait for the other
        for c in range(0, (count + width - 1) // width, 2):
            x = load(source + min(c * width, count - width) * tag.itemsize, tag, width)
            x2 = load(source + min((c + 1) * width, count - width) * tag.itemsize, tag, width)
            top, top2 = vmax(top, vmax(x, vsub(zero, x))), vmax(top2, vmax(x2, vsub(zero, x2)))
            # 0, or NaN for a NaN or an infinity: a maximum can lose the former
            odd, odd2 = vadd(odd, vmul(x, zero)), vadd(odd2, vmul(x2, zero))
        scale = hmax(vmax(top, top2)) / np.float32(127) + hsum(vadd(odd, odd2))
        inverse = splat(np.float32(1) / scale if scale > _SMALLEST_INVERTED else np.float32(0), width)
        for c in range((count + width - 1) // width):
            first = min(c * width, count - width)
            x = zero
            if scale > np.float32(0):
                x = load(source + first * tag.itemsize, tag, width)
                x = vmul(x, inverse) if by_inverse else vdiv(x, splat(scale, width))
            put(codes + first * code_tag.itemsize, x, code_tag)
        return scale

    quantize.__qualname__ = f"quantize_{width}_{put.__name__}_{by_inverse}"  # see kernels._make_softmax_row
    return njit(boundscheck=False, error_model="numpy")(quantize)
