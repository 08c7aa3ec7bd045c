"""The compiled products of rows and a weight.

A weight is packed once into panels of PANEL output channels, `(panel, in_features, PANEL)`, in its own dtype: a checkpoint in
bf16 stays in bf16 and is widened, exactly, as it is multiplied, so that a product reads half of fp32's bytes. In a panel of
bf16 each channel of the first half lies beside one of the second (see `simd.halves_of_pairs`). Every sum runs over the input
channels in order, whatever the number of rows or threads: a row's bits depend on the row alone.

A *gated* product's first half of channels is the gate of the second: what comes out is silu(gate) * up.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ..disk_cache import locked
from .quantize import row_scale
from .simd import (
    is_pairs,
    load,
    load_sums,
    splat,
    store,
    take_next,
    vadd,
    vmul,
    vsilu,
    widen_bytes,
)
from .tiles import LANES, TOGETHER, aligned_floats, dot_tile, pv_tile

PANEL = 2 * LANES
_VECTORS = PANEL // 16
_RUNS_PER_THREAD = 8  # so few that a run is a long stretch of memory, so many that threads end together
_DEPTH = 384  # input channels of a slice: in 16 bits 12 or 24 KiB, beside the rows' part in an L1 cache


@njit(boundscheck=False, error_model="numpy")
def num_items_of(num_panels, num_rows, rows_per_item):
    """How many work items a product has: a panel each for a block of rows, all panels of one block before the next."""
    return num_panels * ((num_rows + rows_per_item - 1) // rows_per_item)


@njit(boundscheck=False, error_model="numpy")
def item_of(item, num_panels, num_rows, rows_per_item):
    """An item's panel, first row and number of rows."""
    first = item // num_panels * rows_per_item
    return item % num_panels, first, min(rows_per_item, num_rows - first)


@njit(boundscheck=False, error_model="numpy")
def next_item(item, end, taken, num_items, num_threads):
    """The item after `item`, and where its thread's run of neighbouring items ends; an item of `num_items` when all are taken.

    A thread that is at its run's end takes the next one: who is held up takes fewer. `taken` counts the runs, for all threads.
    """
    if item + 1 < end:
        return item + 1, end
    num_runs = min(num_items, _RUNS_PER_THREAD * num_threads)
    run = take_next(taken.ctypes.data)
    if run >= num_runs:
        return num_items, num_items
    return num_items * run // num_runs, num_items * (run + 1) // num_runs


@njit(boundscheck=False, error_model="numpy")
def panel_sums(x, packed, panel, in_features, count, sums, ones, tag):
    """sums (count, PANEL) = `count` rows, at the address x, times a panel. ones: at least `count` ones."""
    weight_row = PANEL * (2 if is_pairs(tag) else tag.itemsize)
    sums[:count] = 0
    for start in range(0, in_features, _DEPTH):
        depth = min(_DEPTH, in_features - start)
        weight = packed + (panel * in_features + start) * weight_row
        pv_tile(
            x + start * 4, in_features * 4, weight, weight_row, tag, sums.ctypes.data, PANEL * 4, ones.ctypes.data, depth,
            count, weight + depth * weight_row, weight_row, _VECTORS, 16,
        )  # fmt: skip


@njit(boundscheck=False, error_model="numpy")
def _add_bias(sums, bias, count, f32):
    """Add a panel's bias to an item's sums (count, PANEL)."""
    for c in range(_VECTORS):
        added = load(bias + c * 64, f32, 16)
        for r in range(count):
            at = sums + (r * _VECTORS + c) * 64
            store(at, vadd(load(at, f32, 16), added), f32)


@njit(boundscheck=False, error_model="numpy")
def _scale_sums(sums, scales, count, f32):
    """Make fp32 of an item's int32 sums (count, PANEL), multiplied by a panel's scales."""
    for c in range(_VECTORS):
        scale = load(scales + c * 64, f32, 16)
        for r in range(count):
            at = sums + (r * _VECTORS + c) * 64
            store(at, vmul(load_sums(at, 16), scale), f32)


@njit(boundscheck=False, error_model="numpy")
def _store_rows(sums, up, row_scales, target, target_row, first, count, out_tag, f32):
    """Store an item's sums (rows, PANEL) in the output's dtype; gated where `up`, the address of other sums, is not 0."""
    for r in range(count):
        scale = splat(row_scale(row_scales, first + r), 16)
        for c in range(_VECTORS):
            at = (r * PANEL + c * 16) * 4
            total = load(sums + at, f32, 16)
            if up != 0:
                total = vmul(vsilu(vmul(total, scale)), vmul(load(up + at, f32, 16), scale))
            store(target + r * target_row + c * 16 * out_tag.itemsize, total, out_tag)


@locked
@njit(parallel=True, cache=True, boundscheck=False, error_model="numpy", nogil=True)
def product(
    x, packed, bias, out, num_rows, in_features, num_panels, together, rows_per_item, num_threads, weight_tag, out_tag, f32
):  # fmt: skip
    """out = x @ weight^T + bias; with `together` = 2, not 1, gated.

    x (rows, in_features) fp32, packed (num_panels, in_features, PANEL) of the weight tag's dtype, out (rows, num_panels * PANEL
    / together) of the other tag's: addresses of contiguous arrays. bias (num_panels * PANEL,) fp32 or empty.
    """
    num_groups = num_panels // together
    num_items = num_items_of(num_groups, num_rows, rows_per_item)
    no_scales = np.empty(0, np.float32)
    taken = np.zeros(1, np.int64)
    for _ in prange(num_threads):
        sums = aligned_floats(together * rows_per_item, PANEL)
        ones = np.ones(rows_per_item, np.float32)
        item, end = next_item(0, 0, taken, num_items, num_threads)
        while item < num_items:
            group, first, count = item_of(item, num_groups, num_rows, rows_per_item)
            for part in range(together):
                panel, own = group + part * num_groups, sums[part * count : (part + 1) * count]
                panel_sums(x + first * in_features * 4, packed, panel, in_features, count, own, ones, weight_tag)
                if bias.shape[0] > 0:
                    _add_bias(own.ctypes.data, bias.ctypes.data + panel * PANEL * 4, count, f32)
            up = sums.ctypes.data + count * PANEL * 4 if together > 1 else 0
            row_bytes = num_groups * PANEL * out_tag.itemsize
            target = out + first * row_bytes + group * PANEL * out_tag.itemsize
            _store_rows(sums.ctypes.data, up, no_scales, target, row_bytes, first, count, out_tag, f32)
            item, end = next_item(item, end, taken, num_items, num_threads)


@njit(boundscheck=False, error_model="numpy")
def whole_sums(x, x_row, weight, starts, sums, num_words, count, words_buf):
    """sums (count, PANEL) int32 = rows of whole numbers times a panel of int8; see `tiles.dot_tile` for the rows' form.

    starts (PANEL,): what the sums begin with, for rows of bytes. words_buf: room for _DEPTH words of a panel in 16 bits.
    """
    for r in range(count):
        for c in range(PANEL):
            sums[r, c] = starts[c] if TOGETHER == 4 else 0
    for start in range(0, num_words, _DEPTH):
        words = min(_DEPTH, num_words - start)
        part = weight + start * TOGETHER * PANEL
        ahead = part + words * TOGETHER * PANEL
        if TOGETHER == 2:
            for c in range(0, words * 2 * PANEL, 32):
                widen_bytes(part + c, words_buf.ctypes.data + 2 * c)
            part = words_buf.ctypes.data
        dot_tile(x + start * 4, x_row, part, sums.ctypes.data, PANEL * 4, words, count, ahead)


@locked
@njit(parallel=True, cache=True, boundscheck=False, error_model="numpy", nogil=True)
def product_int8(
    x, packed, starts, scales, row_scales, out, num_rows, in_features, num_panels, together, rows_per_item, num_threads,
    out_tag, f32
):  # fmt: skip
    """out = x @ weight^T * scales, from sums of whole numbers; with `together` = 2, not 1, gated, rows scaled by `row_scales`.

    x (rows, in_features) whole numbers: int16, or uint8 with 128 for 0 where TOGETHER is 4. packed (num_panels, in_features /
    TOGETHER, PANEL, TOGETHER) int8; out (rows, num_panels * PANEL / together) of the tag's dtype: addresses of contiguous
    arrays. starts (num_panels * PANEL,) int32: -128 times each channel's sum of weights. scales (num_panels * PANEL,),
    row_scales (rows,) or empty: fp32. in_features times the largest magnitude of x is below 2**24.
    """
    num_groups, num_words = num_panels // together, in_features // TOGETHER
    num_items = num_items_of(num_groups, num_rows, rows_per_item)
    taken = np.zeros(1, np.int64)
    for _ in prange(num_threads):
        words_buf = np.empty(2 * _DEPTH * PANEL if TOGETHER == 2 else 0, np.int16)
        sums = np.empty((together * rows_per_item, PANEL), np.int32)
        item, end = next_item(0, 0, taken, num_items, num_threads)
        while item < num_items:
            group, first, count = item_of(item, num_groups, num_rows, rows_per_item)
            for part in range(together):
                panel, own = group + part * num_groups, sums[part * count : (part + 1) * count]
                weight = packed + panel * num_words * TOGETHER * PANEL
                channels = panel * PANEL
                whole_sums(
                    x + first * num_words * 4, num_words * 4, weight, starts[channels : channels + PANEL], own, num_words,
                    count, words_buf,
                )  # fmt: skip
                _scale_sums(own.ctypes.data, scales.ctypes.data + channels * 4, count, f32)
            up = sums.ctypes.data + count * PANEL * 4 if together > 1 else 0
            row_bytes = num_groups * PANEL * out_tag.itemsize
            target = out + first * row_bytes + group * PANEL * out_tag.itemsize
            _store_rows(sums.ctypes.data, up, row_scales, target, row_bytes, first, count, out_tag, f32)
            item, end = next_item(item, end, taken, num_items, num_threads)
