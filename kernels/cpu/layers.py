"""A decoder's layers in one compiled call: the kernels one after another, with no Python between them.

Kernels stream through the caches, and what Python needs between them is gone from there each time: of a step with few rows it
took a third. The kernels come as first-class functions, by their addresses, so that this one is compiled in a second and not
with all of them inside once more.
"""

from __future__ import annotations

import numpy as np

from .jit import kernel

# What a layer has beside its products, one int64 each: addresses of norms (0: none) and its sliding window (0: none).
LAYER_FIELDS = INPUT_NORM, POST_NORM, QUERY_NORM, KEY_NORM, WINDOW = range(5)
PRODUCTS = QKV, OUT, GATE_UP, DOWN = range(4)
# Its part of the pool: addresses.
CACHE_FIELDS = KEYS, VALUES, KEY_SCALES, VALUE_SCALES = range(4)


@kernel
def run_layers(
    add_rms_norm, multiply, rotate, store_kv, attend, layers, operands, caches, cache_strides, scale_strides, work, num_rows,
    chunk_rows, num_decodes, sizes, slot_mapping, decodes, windowed_decodes, prefills, eps, scale, num_threads, no_sinks, f32,
    weight_tag, cache_tag, narrow_tag,
):  # fmt: skip
    """Run all layers on the rows of a step, but for the last one's products after attention.

    add_rms_norm, multiply, rotate, store_kv, attend: the kernels of `rows.py`, `gemm.py` (either product), `write.py` and
    `attend.py`, as first-class functions. layers (L, LAYER_FIELDS), operands (L, PRODUCTS, gemm.OPERAND_FIELDS) and caches
    (L, CACHE_FIELDS) int64. cache_strides: of K (block, head, token, dim), then of V; scale_strides: of K's scales (block,
    head), then of V's: bytes, the same in all layers.

    work: addresses of contiguous fp32 arrays: residual and normed (rows, hidden), query (rows, H, D), key and value
    (rows, Hkv, D), attended (rows, H, D), cos and sin (rows, D), activated (chunk_rows, intermediate), product (chunk_rows,
    widest product). The residual holds the embedded tokens, and at the end what the last layer's attention, which is left in
    `attended`, is yet to be added to. sizes: hidden, H, Hkv, D, block_size.

    Returns whether all of them did their work: a kernel that fails has no other way to say so from here.

    decodes, windowed_decodes, prefills: see `attention.Rows`; of the rows that decode, of the same in layers with a window, and
    of the others.
    """
    residual, normed, query, key, value, attended, cos, sin, activated, product = work
    hidden, num_heads, num_kv_heads, head_dim, block_size = sizes
    key_block, key_head, key_token, key_dim, value_block, value_head, value_token, value_dim = cache_strides
    head_bytes = head_dim * 4
    row_bytes, kv_row_bytes = num_heads * head_bytes, num_kv_heads * head_bytes
    done = True
    for layer in range(layers.shape[0]):
        for start in range(0, num_rows, chunk_rows):
            rows = min(chunk_rows, num_rows - start)
            x, states = residual + start * hidden * 4, normed + start * hidden * 4
            delta = 0
            if layer > 0:
                before, delta = operands[layer - 1], product
                done &= multiply(
                    attended + start * row_bytes, before[OUT], product, rows, 1, num_threads, f32, weight_tag, f32, f32
                )  # fmt: skip
                norm = layers[layer - 1, POST_NORM]
                done &= add_rms_norm(x, product, norm, states, rows, hidden, eps, num_threads, f32, f32, f32)
                done &= multiply(states, before[GATE_UP], activated, rows, 2, num_threads, f32, weight_tag, f32, f32)
                done &= multiply(activated, before[DOWN], product, rows, 1, num_threads, f32, weight_tag, f32, f32)
            norm = layers[layer, INPUT_NORM]
            done &= add_rms_norm(x, delta, norm, states, rows, hidden, eps, num_threads, f32, f32, f32)
            done &= multiply(states, operands[layer, QKV], product, rows, 1, num_threads, f32, weight_tag, f32, f32)
            done &= rotate(
                product, cos + start * head_bytes, sin + start * head_bytes, layers[layer, QUERY_NORM], layers[layer, KEY_NORM],
                query + start * row_bytes, key + start * kv_row_bytes, value + start * kv_row_bytes, rows, num_heads,
                num_kv_heads, head_dim, eps, num_threads, f32, f32, f32,
            )  # fmt: skip
        keys, values = caches[layer, KEYS], caches[layer, VALUES]
        key_scales = (caches[layer, KEY_SCALES], scale_strides[0], scale_strides[1])
        value_scales = (caches[layer, VALUE_SCALES], scale_strides[2], scale_strides[3])
        if num_decodes < num_rows:  # the tokens of rows that decode are stored when attention comes to their blocks
            prompts = num_decodes * kv_row_bytes
            done &= store_kv(
                key + prompts, (kv_row_bytes, head_bytes), value + prompts, (kv_row_bytes, head_bytes), keys,
                (key_block, key_head, key_token, key_dim), values, (value_block, value_head, value_token, value_dim),
                key_scales, value_scales, slot_mapping[num_decodes:], num_kv_heads, head_dim, block_size, num_threads, f32,
                cache_tag, f32,
            )  # fmt: skip
        window = layers[layer, WINDOW]
        for first, end in ((0, num_decodes), (num_decodes, num_rows)):
            if first == end:
                continue
            slots = slot_mapping[:end]
            if end > num_decodes:
                of_rows, slots = prefills, slot_mapping[:0]
            elif window > 0:
                of_rows = windowed_decodes
            else:
                of_rows = decodes
            tables, bounds, lengths, groups, num_shared, queries_per_item, heads_per_item = of_rows
            done &= attend(
                query + first * row_bytes, (row_bytes, head_bytes), keys, (key_block, key_head, key_dim), values,
                (value_block, value_head, value_token), key_scales, value_scales, attended + first * row_bytes,
                (row_bytes, head_bytes), key, value, (kv_row_bytes, head_bytes), slots, tables, bounds, lengths, groups,
                num_shared, no_sinks, num_heads, num_kv_heads, head_dim, block_size, queries_per_item, heads_per_item, scale,
                window, np.float32(0), num_threads, f32, cache_tag, f32, narrow_tag,
            )  # fmt: skip
    return done
