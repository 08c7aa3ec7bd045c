"""Rounding to 8 bits: a head of K or V, or a row that is to be multiplied, becomes codes from -127 to 127 and one fp32 scale.

scale = (largest |x|) / 127 and code = x / scale, rounded to nearest, ties to even: x is at most half a scale from code * scale.
Zeros have scale 0. What holds a NaN or an infinity has scale NaN, so that what it is used for is no number either.
"""

from __future__ import annotations

import numpy as np

from .jit import inner
from .simd import hmax_magnitude, item_bytes, larger_magnitude, load, splat, store_whole, vdiv, vmul

# A division takes as long as many products; below this scale its inverse may be more than fp32 holds.
_SMALLEST_INVERTED = np.float32(1e-37)


def make_quantize(width, put, by_inverse):
    """Build the quantization of contiguous elements by `width`-lane vectors, stored by `put` (compile-time constants).

    by_inverse: multiply by 1 / scale instead, which may round a tie the other way; what has a scale below 1e-37 becomes 0.
    """

    def quantize(source, codes, count, tag, code_tag):
        """Write the codes of `count` elements and return their scale. The last vector may overlap its neighbour."""
        top = splat(np.float32(0), width)
        last = count - width
        for first in range(0, last, width):
            top = larger_magnitude(top, load(source + first * item_bytes(tag), tag, width))
        top = hmax_magnitude(larger_magnitude(top, load(source + last * item_bytes(tag), tag, width)))
        scale = top / np.float32(127) + top * np.float32(0)  # NaN for an infinity
        if scale > np.float32(0):
            factor = splat(scale, width)
            if by_inverse:
                factor = splat(np.float32(1) / scale if scale > _SMALLEST_INVERTED else np.float32(0), width)
            for first in range(0, last, width):
                x = load(source + first * item_bytes(tag), tag, width)
                put(codes + first * item_bytes(code_tag), vmul(x, factor) if by_inverse else vdiv(x, factor), code_tag)
            x = load(source + last * item_bytes(tag), tag, width)
            put(codes + last * item_bytes(code_tag), vmul(x, factor) if by_inverse else vdiv(x, factor), code_tag)
        else:
            for first in range(0, last, width):
                put(codes + first * item_bytes(code_tag), splat(np.float32(0), width), code_tag)
            put(codes + last * item_bytes(code_tag), splat(np.float32(0), width), code_tag)
        return scale

    quantize.__qualname__ = f"quantize_{width}_{put.__name__}_{by_inverse}"  # see softmax.make_softmax
    return inner(quantize)


_quantize_row_16 = make_quantize(16, store_whole, by_inverse=True)
_quantize_row_4 = make_quantize(4, store_whole, by_inverse=True)


@inner
def quantize_row(source, target, count, tag, whole_tag):
    """Write `count` elements, at least 4, as the tag's whole numbers, see `simd.store_whole`; return their scale."""
    if count < 16:
        return _quantize_row_4(source, target, count, tag, whole_tag)
    return _quantize_row_16(source, target, count, tag, whole_tag)
