"""The compiled search for each row's best output channel, without computing most of them in full.

A product in whole numbers comes first: rows rounded to LEVELS, weights to 127. What rounding may have changed of a sum is
bounded, so every channel has a value that its exact one can't exceed and one that it can't fall short of. Panels whose
highest possible value is below what some channel reaches at least are done with; the others are computed as `gemm.product`
computes them, bit for bit, and the first of the largest values is the answer.
"""

from __future__ import annotations

import numpy as np

from .gemm import (
    PANEL,
    WORDS_ROOM,
    fill,
    item_of,
    next_item,
    none_taken,
    num_items_of,
    panel_sums,
    rows_per_item_of,
    whole_sums,
)
from .jit import inner, keep_alive, kernel, on_threads, part_of
from .simd import hmax, keep_lanes, load, load_sums, splat, vadd, vmax, vmul, vsub
from .tiles import TOGETHER, aligned_floats

LEVELS = 2032  # 16 * 127: a number is 16 times one byte and another byte
_SMALLEST_SCALE, _LARGEST_SCALE = np.float32(1e-30), np.float32(1e30)
_WHOLE = np.uint8 if TOGETHER == 4 else np.int16
_PARTS = 2 if TOGETHER == 4 else 1  # rows of whole numbers that a row becomes: high and low bytes, or 16 bits


@inner
def _round_row(row, words, part_size):
    """Round a row to whole numbers up to LEVELS: return its scale and its norm. `words` has _PARTS rows of `part_size`."""
    top, odd, squares = np.float32(0), np.float32(0), np.float32(0)
    for value in row:
        top = max(top, abs(value))
        odd += value * np.float32(0)  # 0, or NaN for a NaN or an infinity: a maximum can lose the former
    scale = top / np.float32(LEVELS) + odd
    # Of a row that is not finite, or near what fp32 can not hold, nothing is known: bounds of NaN let it be computed in full.
    if scale != 0 and not _SMALLEST_SCALE < scale < _LARGEST_SCALE:
        scale = np.float32(np.nan)
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    for i in range(row.shape[0]):
        value = row[i] * inverse
        squares += value * value
        whole = np.int64(np.rint(value))
        if TOGETHER == 4:
            high = (whole + 8) >> 4
            words[i] = high + 128
            words[part_size + i] = whole - 16 * high + 128
        else:
            words[i] = whole
    return scale, scale * np.sqrt(squares)


@inner
def _bounds(sums, scales, rounded, slack, scale, norm, first_channel, num_channels, f32):
    """The highest that any channel of a panel may reach, and the highest that one reaches at least, for one row."""
    highest, surest = splat(np.float32(-np.inf), 16), splat(np.float32(-np.inf), 16)
    for c in range(PANEL // 16):
        value = load_sums(sums + c * 64, 16)
        if TOGETHER == 4:
            value = vadd(vmul(value, splat(np.float32(16), 16)), load_sums(sums + (PANEL + c * 16) * 4, 16))
        value = vmul(vmul(value, load(scales + c * 64, f32, 16)), splat(scale, 16))
        doubt = vmul(load(slack + c * 64, f32, 16), splat(norm, 16))
        doubt = vadd(doubt, vmul(load(rounded + c * 64, f32, 16), splat(scale, 16)))
        left = num_channels - first_channel
        highest = vmax(keep_lanes(vadd(value, doubt), c * 16, 0, left), highest)
        surest = vmax(keep_lanes(vsub(value, doubt), c * 16, 0, left), surest)
    return hmax(highest), hmax(surest)


@inner
def _round_rows(thread, x, words, row_scales, norms, num_threads):
    """Round a thread's part of the rows."""
    num_rows, in_features = x.shape
    first_row, end_row = part_of(num_rows, thread, num_threads)
    for row in range(first_row, end_row):
        row_scales[row], norms[row] = _round_row(x[row], words[row], in_features)


@inner
def _bound_panels(
    thread, packed_int8, starts, scales, rounded, slack, words, row_scales, norms, highest, surest, num_channels, in_features,
    rows_per_item, taken, num_items, num_threads, f32,
):  # fmt: skip
    """Bound rows' values in panels, a work item at a time until all are taken."""
    num_rows, num_panels = highest.shape
    num_words = in_features // TOGETHER
    for row in range(num_rows):
        surest[thread, row] = -np.inf
    room = aligned_floats(_PARTS * rows_per_item * PANEL + WORDS_ROOM)
    sums = np.int64(room.ctypes.data)
    words_buf = sums + _PARTS * rows_per_item * PANEL * 4
    item, end = next_item(0, 0, taken, num_items, num_threads)
    while item < num_items:
        panel, first, count = item_of(item, num_panels, num_rows, rows_per_item)
        channel = panel * PANEL
        whole_sums(
            words.ctypes.data + first * _PARTS * num_words * 4, num_words * 4,
            packed_int8 + panel * num_words * TOGETHER * PANEL, starts.ctypes.data + channel * 4, sums,
            num_words, _PARTS * count, words_buf, 0, 0, 0, 0, 0,
        )  # fmt: skip
        for r in range(count):
            row = first + r
            high, sure = _bounds(
                sums + r * _PARTS * PANEL * 4, scales.ctypes.data + channel * 4,
                rounded.ctypes.data + channel * 4, slack.ctypes.data + channel * 4, row_scales[row], norms[row], channel,
                num_channels, f32,
            )  # fmt: skip
            highest[row, panel] = high
            surest[thread, row] = max(surest[thread, row], sure)
        item, end = next_item(item, end, taken, num_items, num_threads)
    keep_alive(room)


@inner
def _decide(thread, x, packed, highest, surest, best, num_channels, num_threads, weight_tag, f32):
    """Compute the panels in question of a thread's part of the rows, and choose."""
    num_rows, in_features = x.shape
    num_panels = highest.shape[1]
    exact = aligned_floats(PANEL + 16)
    sums = np.int64(exact.ctypes.data)
    one = sums + PANEL * 4
    fill(one, np.float32(1), np.int64(1), f32)
    first_row, end_row = part_of(num_rows, thread, num_threads)
    for row in range(first_row, end_row):
        reached = np.float32(-np.inf)
        for other in range(num_threads):
            reached = max(reached, surest[other, row])
        largest, channel_of = np.float32(-np.inf), np.int64(-1)
        for panel in range(num_panels):
            if highest[row, panel] < reached:
                continue
            at = x.ctypes.data + row * in_features * 4
            panel_sums(at, packed, panel, in_features, np.int64(1), sums, one, weight_tag, f32)
            for c in range(min(PANEL, num_channels - panel * PANEL)):
                if exact[c] > largest or np.isnan(exact[c]):
                    largest, channel_of = exact[c], panel * PANEL + c
                    if np.isnan(largest):
                        break
            if np.isnan(largest):
                break
        best[row] = channel_of if np.isfinite(largest) else -1
    keep_alive(exact)


@kernel
def best_channels(
    x, packed, packed_int8, starts, scales, rounded, slack, best, num_channels, num_threads, weight_tag, f32
):  # fmt: skip
    """best[r] = the first of the channels with the largest x[r] @ weight^T, among the first `num_channels`; -1: not finite.

    x (rows, in_features) fp32; packed, packed_int8: addresses of the weight's panels, see `gemm.product` and `product_int8`;
    starts (int32), scales, rounded and slack (fp32): (num_panels * PANEL,). A channel's value in whole numbers, scaled, is
    within slack * norm of the row + rounded * scale of the row of what `gemm.product` makes of it. best (rows,) int64.
    """
    num_rows, in_features = x.shape
    num_panels = (num_channels + PANEL - 1) // PANEL
    rows_per_item = rows_per_item_of(num_rows)
    words = np.empty((num_rows, _PARTS * in_features), _WHOLE)
    row_scales, norms = np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)
    highest, surest = np.empty((num_rows, num_panels), np.float32), np.empty((num_threads, num_rows), np.float32)
    on_threads(_round_rows, num_threads, (x, words, row_scales, norms, num_threads))
    taken = none_taken()
    work = (
        packed_int8, starts, scales, rounded, slack, words, row_scales, norms, highest, surest, num_channels, in_features,
        rows_per_item, taken, num_items_of(num_panels, num_rows, rows_per_item), num_threads, f32,
    )  # fmt: skip
    on_threads(_bound_panels, num_threads, work)
    on_threads(_decide, num_threads, (x, packed, highest, surest, best, num_channels, num_threads, weight_tag, f32))
