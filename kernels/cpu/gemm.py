"""The compiled products of rows and a weight for processors whose vectors are no wider than AVX2.

A weight is packed once into panels of 16 output channels, `(panel, in_features, 16)`, in its own dtype: a checkpoint in bf16
stays in bf16 and is widened, exactly, a slice at a time into the L1 cache, so that a product reads half of fp32's bytes. Every
sum runs over the input channels in order, whatever the number of rows or threads: a row's bits depend on the row alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ..disk_cache import locked
from .simd import load, load_sums, store, take_next, vadd, vmul, widen_bytes
from .tiles import madd_tile, pv_tile

PANEL = 16
_RUNS_PER_THREAD = 8  # so few that a run is a long stretch of memory, so many that threads end together
_DEPTH = 192  # input channels of a slice: 12 KiB in fp32, beside the rows' part in an L1 cache


@njit(boundscheck=False, error_model="numpy")
def _widen(source, target, count, tag, f32):
    """Copy `count` elements, a multiple of 16, as fp32."""
    for i in range(0, count, 16):
        store(target + i * 4, load(source + i * tag.itemsize, tag, 16), f32)


@njit(boundscheck=False, error_model="numpy")
def _num_items(num_panels, num_rows, rows_per_item):
    """How many work items a product has: a panel each for a block of rows, all panels of one block before the next."""
    return num_panels * ((num_rows + rows_per_item - 1) // rows_per_item)


@njit(boundscheck=False, error_model="numpy")
def _item(item, num_panels, num_rows, rows_per_item):
    """An item's panel, first row and number of rows."""
    first = item // num_panels * rows_per_item
    return item % num_panels, first, min(rows_per_item, num_rows - first)


@njit(boundscheck=False, error_model="numpy")
def _next_item(item, end, taken, num_items, num_threads):
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


@locked
@njit(parallel=True, cache=True, boundscheck=False, error_model="numpy", nogil=True)
def product(x, packed, bias, out, num_rows, in_features, num_panels, rows_per_item, num_threads, weight_tag, out_tag, f32):
    """out = x @ weight^T + bias.

    x (rows, in_features) fp32, packed (num_panels, in_features, 16) of the weight tag's dtype, out (rows, num_panels * 16) of
    the other tag's: addresses of contiguous arrays. bias (num_panels * 16,) fp32 or empty.
    """
    num_items = _num_items(num_panels, num_rows, rows_per_item)
    weight_row = PANEL * weight_tag.itemsize
    taken = np.zeros(1, np.int64)
    for _ in prange(num_threads):
        slice_buf = np.empty(_DEPTH * PANEL, np.float32)
        sums = np.empty((rows_per_item, PANEL), np.float32)
        ones = np.ones(rows_per_item, np.float32)
        item, end = _next_item(0, 0, taken, num_items, num_threads)
        while item < num_items:
            panel, first, count = _item(item, num_panels, num_rows, rows_per_item)
            sums[:count] = 0
            for start in range(0, in_features, _DEPTH):
                depth = min(_DEPTH, in_features - start)
                weight = packed + (panel * in_features + start) * weight_row
                _widen(weight, slice_buf.ctypes.data, depth * PANEL, weight_tag, f32)
                pv_tile(
                    x + (first * in_features + start) * 4, in_features * 4, slice_buf.ctypes.data, PANEL * 4, f32,
                    sums.ctypes.data, PANEL * 4, ones.ctypes.data, depth, count, weight + depth * weight_row, weight_row, 1, 16,
                )  # fmt: skip
            for r in range(count):
                target = out + ((first + r) * num_panels + panel) * PANEL * out_tag.itemsize
                total = load(sums.ctypes.data + r * PANEL * 4, f32, 16)
                if bias.shape[0] > 0:
                    total = vadd(total, load(bias.ctypes.data + panel * PANEL * 4, f32, 16))
                store(target, total, out_tag)
            item, end = _next_item(item, end, taken, num_items, num_threads)


@locked
@njit(parallel=True, cache=True, boundscheck=False, error_model="numpy", nogil=True)
def product_int8(x, packed, scales, out, num_rows, in_features, num_panels, rows_per_item, num_threads, f32):
    """out = x @ weight^T * scales, from sums of whole numbers.

    x (rows, in_features) int16 of magnitudes to 127, packed (num_panels, in_features / 2, 16, 2) int8, out (rows, num_panels *
    16) fp32: addresses of contiguous arrays. scales (num_panels * 16,) fp32. in_features is even and below 2**17.
    """
    num_items, num_pairs, depth = _num_items(num_panels, num_rows, rows_per_item), in_features // 2, _DEPTH
    taken = np.zeros(1, np.int64)
    for _ in prange(num_threads):
        slice_buf = np.empty(2 * depth * PANEL, np.int16)
        sums = np.empty((rows_per_item, PANEL), np.int32)
        item, end = _next_item(0, 0, taken, num_items, num_threads)
        while item < num_items:
            panel, first, count = _item(item, num_panels, num_rows, rows_per_item)
            sums[:count] = 0
            for start in range(0, num_pairs, depth):
                pairs = min(depth, num_pairs - start)
                weight = packed + (panel * num_pairs + start) * 2 * PANEL
                for pair in range(pairs):
                    widen_bytes(weight + pair * 2 * PANEL, slice_buf.ctypes.data + pair * 4 * PANEL)
                madd_tile(
                    x + (first * in_features + 2 * start) * 2, in_features * 2, slice_buf.ctypes.data, sums.ctypes.data,
                    PANEL * 4, pairs, count,
                )  # fmt: skip
            scale = load(scales.ctypes.data + panel * PANEL * 4, f32, 16)
            for r in range(count):
                target = out + ((first + r) * num_panels + panel) * PANEL * 4
                store(target, vmul(load_sums(sums.ctypes.data + r * PANEL * 4, 16), scale), f32)
            item, end = _next_item(item, end, taken, num_items, num_threads)
