"""The compiled products of rows and a weight.

A weight is packed once into panels of PANEL output channels, `(panel, in_features, PANEL)`, in its own dtype: a checkpoint in
bf16 stays in bf16 and is widened, exactly, as it is multiplied, so that a product reads half of fp32's bytes. In a panel of
bf16 each channel of the first half lies beside one of the second (see `simd.halves_of_pairs`). Every sum runs over the input
channels in order, whatever the number of rows or threads: a row's bits depend on the row alone.

A *gated* product's first half of channels is the gate of the second: what comes out is silu(gate) * up.
"""

from __future__ import annotations

import numpy as np

from .jit import inner, keep_alive, kernel, on_threads, part_of
from .quantize import quantize_row
from .simd import is_pairs, item_bytes, load, splat, store, take_next, vadd, vmul, widen_bytes
from .tiles import LANES, ROWS_TOGETHER, TOGETHER, aligned_floats, dot_tile, pv_tile
from .vmath import vsilu

PANEL = 2 * LANES
_VECTORS = PANEL // 16
# What a product needs to know of its weight, one int64 each: addresses (0 where there is none) and sizes. starts, scales and
# the number of groups are those of weights in whole numbers, see `product_int8`.
PACKED, STARTS, SCALES, BIAS, INPUTS, GROUPS, PANELS = range(7)
OPERAND_FIELDS = 7
_MOST_ROWS = 56  # of a work item: their part beside a panel's in the L1 cache, and all of them in the L2 cache
_RUNS_PER_THREAD = 8  # so few that a run is a long stretch of memory, so many that threads end together
_DEPTH = 384  # most input channels of a slice: in 16 bits 12 or 24 KiB, beside the rows' part in an L1 cache
WORDS_ROOM = _DEPTH * PANEL if TOGETHER == 2 else 0  # of fp32: _DEPTH words of a panel in 16 bits


@inner
def rows_per_item_of(num_rows):
    """How many rows a work item takes: all items alike, in whole steps of what is multiplied together."""
    num_items = max(1, (num_rows + _MOST_ROWS - 1) // _MOST_ROWS)
    step = num_items * ROWS_TOGETHER
    return max(1, (num_rows + step - 1) // step) * ROWS_TOGETHER


@inner
def num_items_of(num_panels, num_rows, rows_per_item):
    """How many work items a product has: a panel each for a block of rows, all panels of one block before the next."""
    return num_panels * ((num_rows + rows_per_item - 1) // rows_per_item)


@inner
def item_of(item, num_panels, num_rows, rows_per_item):
    """An item's panel, first row and number of rows."""
    first = item // num_panels * rows_per_item
    return item % num_panels, first, min(rows_per_item, num_rows - first)


@inner
def none_taken():
    """Return the count of runs of work items that threads have taken, an int64 (1,), at its start."""
    taken = np.empty(1, np.int64)
    taken[0] = 0
    return taken


@inner
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


@inner
def fill(target, value, count, f32):
    """Set fp32 at an address to a value: `count` of them, and up to 15 more."""
    for c in range(0, count, 16):
        store(target + c * 4, splat(value, 16), f32)


@inner
def panel_sums(x, packed, panel, in_features, count, sums, ones, tag, f32):
    """sums (count, PANEL) = `count` rows times a panel. x, sums, ones: addresses; of the last, at least `count` ones."""
    weight_row = PANEL * (2 if is_pairs(tag) else item_bytes(tag))
    fill(sums, np.float32(0), count * PANEL, f32)
    num_slices = (in_features + _DEPTH - 1) // _DEPTH
    for index in range(num_slices):
        start, end = in_features * index // num_slices, in_features * (index + 1) // num_slices
        depth = end - start
        weight = packed + (panel * in_features + start) * weight_row
        pv_tile(
            x + start * 4, in_features * 4, weight, weight_row, tag, sums, PANEL * 4, ones, depth, count,
            weight + depth * weight_row, weight_row, _VECTORS, 16,
        )  # fmt: skip


@inner
def _add_bias(sums, bias, count, f32):
    """Add a panel's bias to an item's sums (count, PANEL)."""
    for c in range(_VECTORS):
        added = load(bias + c * 64, f32, 16)
        for r in range(count):
            at = sums + (r * _VECTORS + c) * 64
            store(at, vadd(load(at, f32, 16), added), f32)


@inner
def _store_rows(sums, up, target, target_row, count, out_tag, f32):
    """Store an item's sums (rows, PANEL) in the output's dtype; gated where `up`, the address of other sums, is not 0."""
    for r in range(count):
        for c in range(_VECTORS):
            at = (r * PANEL + c * 16) * 4
            total = load(sums + at, f32, 16)
            if up != 0:
                total = vmul(vsilu(total), load(up + at, f32, 16))
            store(target + r * target_row + c * 16 * item_bytes(out_tag), total, out_tag)


@inner
def _product_part(
    thread, x, packed, bias, in_features, num_groups, out, num_rows, rows_per_item, together, taken, num_items, num_threads,
    weight_tag, out_tag, f32,
):  # fmt: skip
    """Do work items until all are taken."""
    room = aligned_floats(together * rows_per_item * PANEL + rows_per_item + 16)
    sums = np.int64(room.ctypes.data)
    ones = sums + together * rows_per_item * PANEL * 4
    fill(ones, np.float32(1), rows_per_item, f32)
    item, end = next_item(0, 0, taken, num_items, num_threads)
    while item < num_items:
        group, first, count = item_of(item, num_groups, num_rows, rows_per_item)
        for part in range(together):
            panel, own = group + part * num_groups, sums + part * count * PANEL * 4
            panel_sums(x + first * in_features * 4, packed, panel, in_features, count, own, ones, weight_tag, f32)
            if bias != 0:
                _add_bias(own, bias + panel * PANEL * 4, count, f32)
        up = sums + count * PANEL * 4 if together > 1 else 0
        row_bytes = num_groups * PANEL * item_bytes(out_tag)
        target = out + first * row_bytes + group * PANEL * item_bytes(out_tag)
        _store_rows(sums, up, target, row_bytes, count, out_tag, f32)
        item, end = next_item(item, end, taken, num_items, num_threads)
    keep_alive(room)


@kernel
def product(x, operand, out, num_rows, together, num_threads, x_tag, weight_tag, out_tag, f32):
    """out = x @ weight^T + bias; with `together` = 2, not 1, gated.

    x (rows, in_features) fp32 and out (rows, num_panels * PANEL / together) of its tag's dtype: addresses of contiguous arrays.
    operand: the fields above, of packed (num_panels, in_features, PANEL) of the weight tag's dtype and bias (num_panels *
    PANEL,) fp32.
    """
    packed, bias, in_features, num_panels = operand[PACKED], operand[BIAS], operand[INPUTS], operand[PANELS]
    rows_per_item = rows_per_item_of(num_rows)
    num_groups = num_panels // together
    num_items = num_items_of(num_groups, num_rows, rows_per_item)
    taken = none_taken()
    work = (
        x, packed, bias, in_features, num_groups, out, num_rows, rows_per_item, together, taken, num_items, num_threads,
        weight_tag, out_tag, f32,
    )  # fmt: skip
    on_threads(_product_part, num_threads, work)
    return True


@inner
def whole_sums(
    x, x_row, weight, starts, sums, num_words, count, words_buf, row_scales, row_scales_row, added, added_row, scales
):  # fmt: skip
    """sums (count, PANEL) int32 = rows of whole numbers times a panel of int8; see `tiles.dot_tile` for the rows' form.

    starts, sums, words_buf: addresses; starts (PANEL,) int32: what the sums begin with; words_buf: room for WORDS_ROOM fp32.
    The rest as in `dot_tile`: unless row_scales is 0, sums in fp32.
    """
    begin, begin_row = starts, 0
    for start in range(0, num_words, _DEPTH):
        words = min(_DEPTH, num_words - start)
        part = weight + start * TOGETHER * PANEL
        ahead = part + words * TOGETHER * PANEL
        if TOGETHER == 2:
            for c in range(0, words * 2 * PANEL, 32):
                widen_bytes(part + c, words_buf + 2 * c)
            part = words_buf
        dot_tile(
            x + start * 4, x_row, part, begin, begin_row, sums, PANEL * 4, words, count, ahead,
            row_scales if start + words == num_words else 0, row_scales_row, added, added_row, scales,
        )  # fmt: skip
        begin, begin_row = sums, PANEL * 4


@inner
def _round_part(thread, x, words, row_scales, num_parts, part_inputs, num_threads, x_tag, whole_tag, f32):
    """Round a thread's share of `num_parts` neighbouring parts of rows, whose words and scales begin at two addresses."""
    first_part, end_part = part_of(num_parts, thread, num_threads)
    for part in range(first_part, end_part):
        source, target = x + part * part_inputs * item_bytes(x_tag), words + part * (part_inputs // TOGETHER) * 4
        scale = quantize_row(source, target, part_inputs, x_tag, whole_tag)
        store(row_scales + part * 4, splat(scale, 1), f32)


@inner
def _product_int8_part(
    thread, words, row_scales, operand, out, num_rows, rows_per_item, together, taken, num_items, num_threads, out_tag, f32
):  # fmt: skip
    """Do work items until all are taken."""
    packed, starts, scales, bias = operand[PACKED], operand[STARTS], operand[SCALES], operand[BIAS]
    in_features, num_groups, num_panels = operand[INPUTS], operand[GROUPS], operand[PANELS]
    num_parts, num_words = num_panels // together, in_features // TOGETHER
    group_words = num_words // num_groups
    row_bytes = num_parts * PANEL * item_bytes(out_tag)
    # Sums of rows, a line of nothing to add to, one of ones to multiply by, and room for words.
    room = aligned_floats((together * rows_per_item + 2) * PANEL + WORDS_ROOM)
    totals = np.int64(room.ctypes.data)
    no_totals = totals + together * rows_per_item * PANEL * 4
    ones = no_totals + PANEL * 4
    words_buf = ones + PANEL * 4
    fill(no_totals, np.float32(0), PANEL, f32)
    fill(ones, np.float32(1), PANEL, f32)
    item, end = next_item(0, 0, taken, num_items, num_threads)
    while item < num_items:
        first_panel, first, count = item_of(item, num_parts, num_rows, rows_per_item)
        for part in range(together):
            panel, own = first_panel + part * num_parts, totals + part * count * PANEL * 4
            added, added_row = no_totals, 0
            for group in range(num_groups):
                word = group * group_words
                channels = scales + panel * PANEL * 4 if group == num_groups - 1 else ones
                whole_sums(
                    words + (first * num_words + word) * 4, num_words * 4,
                    packed + (panel * num_words + word) * TOGETHER * PANEL,
                    starts + (group * num_panels + panel) * PANEL * 4, own, group_words, count, words_buf,
                    row_scales + (first * num_groups + group) * 4, num_groups * 4, added, added_row, channels,
                )  # fmt: skip
                added, added_row = own, PANEL * 4
            if bias != 0:
                _add_bias(own, bias + panel * PANEL * 4, count, f32)
        up = totals + count * PANEL * 4 if together > 1 else 0
        target = out + first * row_bytes + first_panel * PANEL * item_bytes(out_tag)
        _store_rows(totals, up, target, row_bytes, count, out_tag, f32)
        item, end = next_item(item, end, taken, num_items, num_threads)
    keep_alive(room)


@kernel
def product_int8(x, operand, out, num_rows, together, num_threads, x_tag, whole_tag, out_tag, f32):
    """out = x @ weight^T + bias in whole numbers and scales; with `together` = 2, not 1, gated.

    x (rows, in_features) and out (rows, num_panels * PANEL / together) of their tags' dtypes: addresses of contiguous arrays.
    operand: the fields above, of packed (num_panels, in_features / TOGETHER, PANEL, TOGETHER) int8. A row is rounded to whole
    numbers, the whole tag's int16, or uint8 with 128 for 0 where TOGETHER is 4, by a scale for each of a number of groups of
    neighbouring inputs; a channel has one of scales (num_panels * PANEL,) fp32. starts (groups, num_panels * PANEL) int32: for
    rows of bytes, -128 times each channel's sum of a group's weights. A group's inputs times the largest whole number are
    below 2**24; of several groups each is one slice.
    """
    in_features, num_groups, num_panels = operand[INPUTS], operand[GROUPS], operand[PANELS]
    rows_per_item = rows_per_item_of(num_rows)
    num_items = num_items_of(num_panels // together, num_rows, rows_per_item)
    room = np.empty(num_rows * (in_features // TOGETHER + num_groups), np.int32)
    words = np.int64(room.ctypes.data)
    row_scales = words + num_rows * (in_features // TOGETHER) * 4
    rounding = (x, words, row_scales, num_rows * num_groups, in_features // num_groups, num_threads, x_tag, whole_tag, f32)
    on_threads(_round_part, num_threads, rounding)
    taken = none_taken()
    work = (words, row_scales, operand, out, num_rows, rows_per_item, together, taken, num_items, num_threads, out_tag, f32)
    on_threads(_product_int8_part, num_threads, work)
    keep_alive(room)
    return True
