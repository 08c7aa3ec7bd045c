"""The compiled attention of the CPU: for any mix of queries, over blocks of K and V.

One attention kernel serves prefill, chunks and decode. A *work item* is one KV head of up to `queries_per_item` consecutive
queries of a row, or of as many decoding rows that begin with the same blocks; the GQA group's heads ride along, so that each
K/V tile is read once for all of them: the shared ones for all rows, then each row's own. Each (query, head) has a line in the
buffers and walks its KV blocks from the first visible one with a running softmax (m, l, acc): tile by tile, the tokens of a
tile in order, arithmetic fixed by the query's own position. So its bits do not depend on what else is in the batch or shares
its blocks, on how the prompt was chunked, on preemption, or on the number of threads.
"""

from __future__ import annotations

import numpy as np

from .items import END_KV_HEAD, END_ROW, FIRST_QUERY, KV_HEAD, NUM_SHARED, ROW, plan_items
from .jit import inner, keep_alive, kernel, on_threads
from .simd import hmax, hsum, is_uint8, item_bytes, load, splat, store, vmul
from .softmax import make_softmax
from .tiles import NUM_SUMS, aligned_floats, pv_tile, qk_tile
from .vmath import vexp
from .write import store_token

_softmax_16 = make_softmax(16)
_softmax_4 = make_softmax(4)


@inner
def _scores(q, q_row, k, k_row, tag, s, s_row, depth, num_rows, block_size, ahead, sizes):
    """All scores of a tile, by columns of two vectors, one, or (for small blocks) a narrow one.

    Where two leave no room for all rows' sums, one column serves twice as many rows with what it loads. How a tile is cut
    changes no sum's order. `ahead`: bytes from this tile of K to the one that is read next.
    """
    if is_uint8(sizes) and block_size < 16:
        for c in range(block_size // 4):
            kc = k + c * 4 * item_bytes(tag)
            qk_tile(q, q_row, kc, k_row, tag, s + c * 16, s_row, depth, num_rows, kc + ahead, k_row, 1, 4)
    elif block_size == 16 or (NUM_SUMS < 16 and 2 * num_rows > NUM_SUMS):
        for c in range(block_size // 16):
            kc = k + c * 16 * item_bytes(tag)
            qk_tile(q, q_row, kc, k_row, tag, s + c * 64, s_row, depth, num_rows, kc + ahead, k_row, 1, 16)
    else:
        for c in range(block_size // 32):
            kc = k + c * 32 * item_bytes(tag)
            qk_tile(q, q_row, kc, k_row, tag, s + c * 128, s_row, depth, num_rows, kc + ahead, k_row, 2, 16)


@inner
def _weigh(p, p_row, v, v_row, tag, acc, acc_row, correction, num_tokens, num_rows, head_dim, ahead, sizes):
    """Add a tile's weighted values to every row's accumulator, by columns of four or two vectors and then of one.

    The last vector of a head_dim that is no multiple of the width starts earlier and overlaps its neighbour; it has its own
    accumulator, so shared lanes are computed twice with the same result. `ahead`: as in `_scores`, of V.
    """
    if is_uint8(sizes) and head_dim < 16:
        for c in range((head_dim + 3) // 4):
            vc = v + min(c * 4, head_dim - 4) * item_bytes(tag)
            pv_tile(p, p_row, vc, v_row, tag, acc + c * 16, acc_row, correction, num_tokens, num_rows, vc + ahead, v_row, 1, 4)
        return
    wide = 0  # vectors done
    if NUM_SUMS >= 16 or 4 * num_rows <= NUM_SUMS:
        for c in range(0, head_dim // 64 * 4, 4):
            vc = v + c * 16 * item_bytes(tag)
            pv_tile(p, p_row, vc, v_row, tag, acc + c * 64, acc_row, correction, num_tokens, num_rows, vc + ahead, v_row, 4, 16)
        wide = head_dim // 64 * 4
    elif 2 * num_rows <= NUM_SUMS:
        for c in range(0, head_dim // 32 * 2, 2):
            vc = v + c * 16 * item_bytes(tag)
            pv_tile(p, p_row, vc, v_row, tag, acc + c * 64, acc_row, correction, num_tokens, num_rows, vc + ahead, v_row, 2, 16)
        wide = head_dim // 32 * 2
    for c in range(wide, (head_dim + 15) // 16):
        vc = v + min(c * 16, head_dim - 16) * item_bytes(tag)
        pv_tile(p, p_row, vc, v_row, tag, acc + c * 64, acc_row, correction, num_tokens, num_rows, vc + ahead, v_row, 1, 16)


@inner
def _load_query(source, target, count, scale, tag, f32, sizes):
    """Widen one head's query to fp32 and scale it once."""
    if is_uint8(sizes) and count < 16:
        factor4 = splat(scale, 4)
        for c in range((count + 3) // 4):
            i = min(c * 4, count - 4)
            store(target + 4 * i, vmul(load(source + i * item_bytes(tag), tag, 4), factor4), f32)
        return
    factor = splat(scale, 16)
    for c in range((count + 15) // 16):
        i = min(c * 16, count - 16)
        store(target + 4 * i, vmul(load(source + i * item_bytes(tag), tag, 16), factor), f32)


@inner
def _store_output(acc, target, head_dim, inverse, tag, f32, sizes):
    """Divide an accumulator by its sum of weights and round it to the output dtype."""
    if is_uint8(sizes) and head_dim < 16:
        factor4 = splat(inverse, 4)
        for c in range((head_dim + 3) // 4):
            store(target + min(c * 4, head_dim - 4) * item_bytes(tag), vmul(load(acc + c * 16, f32, 4), factor4), tag)
        return
    factor = splat(inverse, 16)
    for c in range((head_dim + 15) // 16):
        store(target + min(c * 16, head_dim - 16) * item_bytes(tag), vmul(load(acc + c * 64, f32, 16), factor), tag)


@inner
def _attend_tiles(
    first_tile, end_tile, block_tables, row, first_kv_head, end_kv_head, key_cache, key_strides, value_cache, value_strides,
    key_scales, value_scales, first_line, num_queries, group, lines_per_head, first_position, q_addr, s_addr, acc_addr, l_addr,
    m_addr, tops, correction, head_dim, block_size, window, softcap, new_key, new_value, new_head, slot, codes, q_tag, kv_tag,
    f32, sizes,
):  # fmt: skip
    """Fold the tiles [first_tile, end_tile) of a row's block table into the running softmax of `num_queries` queries.

    The queries stand at `first_position` and the positions after it; their lines of the buffers, `group` a query, begin at
    `first_line` of the lines of each KV head. A block's heads lie side by side, so all of an item's are read before the next
    block.

    slot: unless below 0, where the row's newest token belongs, in the last of the tiles. Its K and V, `new_head` bytes a head,
    are stored as that tile's turn comes: by then its cache lines, most of which are written to, are on their way.
    """
    q_row, s_row, acc_row = 4 * head_dim, 4 * block_size, 4 * ((head_dim + 15) // 16 * 16)
    for tile in range(first_tile, end_tile):
        base = tile * block_size
        # Rows are query-major, so those that see any token of this tile are one range: queries past its start, and for a
        # window those it has not left behind.
        low_query = max(0, base - first_position)
        high_query = num_queries
        if window > 0:
            high_query = min(num_queries, base + block_size - 1 + window - first_position)
        num_lines = (high_query - low_query) * group
        # Past the last query's position a slot may be unwritten (and NaN): its weight is 0, but it is not even read.
        num_tokens = min(block_size, first_position + high_query - base)
        block = np.int64(block_tables[row, tile])
        next_block = np.int64(block_tables[row, tile + 1]) if tile + 1 < end_tile else block
        if slot >= 0 and tile + 1 == end_tile:
            store_token(
                new_key, new_value, new_head, key_cache, (key_strides[0], key_strides[1], item_bytes(kv_tag), key_strides[2]),
                value_cache, (value_strides[0], value_strides[1], value_strides[2], item_bytes(kv_tag)), key_scales,
                value_scales, slot, first_kv_head, end_kv_head, block_size, codes, head_dim, q_tag, kv_tag, f32,
            )  # fmt: skip
        for kv_head in range(first_kv_head, end_kv_head):
            r0 = (kv_head - first_kv_head) * lines_per_head + first_line + low_query * group
            k = key_cache + block * key_strides[0] + kv_head * key_strides[1]
            v = value_cache + block * value_strides[0] + kv_head * value_strides[1]
            if kv_head + 1 < end_kv_head:  # what is read next
                k_ahead, v_ahead = key_strides[1], value_strides[1]
            else:
                blocks, heads = next_block - block, first_kv_head - kv_head
                k_ahead = blocks * key_strides[0] + heads * key_strides[1]
                v_ahead = blocks * value_strides[0] + heads * value_strides[1]
            k_scales = key_scales[0] + block * key_scales[1] + kv_head * key_scales[2]
            v_scales = value_scales[0] + block * value_scales[1] + kv_head * value_scales[2]
            _scores(
                q_addr + r0 * q_row, q_row, k, key_strides[2], kv_tag, s_addr, s_row, head_dim, num_lines,
                block_size, k_ahead, sizes,
            )  # fmt: skip
            if is_uint8(sizes) and block_size < 16:
                _softmax_4(
                    s_addr, block_size // 4, num_lines, group, base, first_position + low_query, window, softcap, k_scales,
                    v_scales, m_addr + r0 * 4, l_addr + r0 * 64, tops, correction, kv_tag, f32,
                )  # fmt: skip
            else:
                _softmax_16(
                    s_addr, block_size // 16, num_lines, group, base, first_position + low_query, window, softcap, k_scales,
                    v_scales, m_addr + r0 * 4, l_addr + r0 * 64, tops, correction, kv_tag, f32,
                )  # fmt: skip
            _weigh(
                s_addr, s_row, v, value_strides[2], kv_tag, acc_addr + r0 * acc_row, acc_row, correction, num_tokens, num_lines,
                head_dim, v_ahead, sizes,
            )  # fmt: skip


@inner
def _attend_items(
    thread, items, bounds, query, query_strides, key_cache, key_strides, value_cache, value_strides, key_scales, value_scales,
    out, out_strides, new_key, new_value, new_strides, slots, block_tables, cu_seqlens_q, seq_lens_kv, sinks, group, head_dim,
    block_size, queries_per_item, lines_per_head, max_lines, scale, window, softcap, q_tag, kv_tag, f32, sizes,
):  # fmt: skip
    """Do a thread's work items, from bounds[thread] to bounds[thread + 1]."""
    q_row, acc_row = 4 * head_dim, (head_dim + 15) // 16 * 64
    # One piece of memory: accumulators, sums of weights, largest scores, a tile's scores, queries, codes of a newest token.
    m_bytes, tile_bytes = (max_lines + 31) // 16 * 64, (lines_per_head + 31) // 16 * 64
    num_bytes = max_lines * (acc_row + 64 + q_row) + lines_per_head * 4 * block_size + m_bytes + 2 * tile_bytes + head_dim
    room = aligned_floats(num_bytes // 4 + 1)
    acc_addr = np.int64(room.ctypes.data)
    l_addr = acc_addr + max_lines * acc_row
    m_addr = l_addr + max_lines * 64  # read by vectors from any line on, as are the next two
    tops = m_addr + m_bytes
    correction = tops + tile_bytes
    s_addr = correction + tile_bytes
    q_addr = s_addr + lines_per_head * 4 * block_size
    codes = q_addr + max_lines * q_row
    for item in range(bounds[thread], bounds[thread + 1]):
        row, end_row = items[item, ROW], items[item, END_ROW]
        first_kv_head, end_kv_head = items[item, KV_HEAD], items[item, END_KV_HEAD]
        q_start, num_shared = cu_seqlens_q[row] + items[item, FIRST_QUERY], items[item, NUM_SHARED]
        num_queries = min(queries_per_item, cu_seqlens_q[end_row] - q_start)
        for kv_head in range(first_kv_head, end_kv_head):
            for line in range(num_queries * group):
                r = (kv_head - first_kv_head) * lines_per_head + line
                token, head = q_start + line // group, kv_head * group + line % group
                source = query + token * query_strides[0] + head * query_strides[1]
                _load_query(source, q_addr + r * q_row, head_dim, scale, q_tag, f32, sizes)
                for c in range(0, acc_row, 64):
                    store(acc_addr + r * acc_row + c, splat(np.float32(0), 16), f32)
                store(l_addr + r * 64, splat(np.float32(0), 16), f32)
                store(m_addr + r * 4, splat(np.float32(-np.inf), 1), f32)
        done = 0
        # The shared tiles come first, for all rows at once, and then each row's own.
        for r in range(row - 1 if num_shared > 0 else row, end_row):
            # Shared tiles are full and every row sees them all: there the rows' queries may pass for later ones of the first.
            of, begin, end, count, slot = row, 0, num_shared, num_queries, -1
            first_position = seq_lens_kv[row] - 1
            if r >= row:
                left = cu_seqlens_q[r + 1] - q_start - done
                count = min(num_queries - done, left)
                first_position = seq_lens_kv[r] - left
                of, end = r, (first_position + count - 1) // block_size + 1
                begin = max(0, first_position - window + 1) // block_size if window > 0 else num_shared
                if slots.shape[0] > 0:
                    slot = slots[r]
            _attend_tiles(
                begin, end, block_tables, of, first_kv_head, end_kv_head, key_cache, key_strides, value_cache,
                value_strides, key_scales, value_scales, done * group, count, group, lines_per_head, first_position, q_addr,
                s_addr, acc_addr, l_addr, m_addr, tops, correction, head_dim, block_size, window, softcap,
                new_key + of * new_strides[0], new_value + of * new_strides[0], new_strides[1], slot, codes, q_tag, kv_tag,
                f32, sizes,
            )  # fmt: skip
            if r >= row:
                done += count
        for kv_head in range(first_kv_head, end_kv_head):
            for line in range(num_queries * group):
                r = (kv_head - first_kv_head) * lines_per_head + line
                token, head = q_start + line // group, kv_head * group + line % group
                total = hsum(load(l_addr + r * 64, f32, 16))
                factor = np.float32(1)
                if sinks.shape[0] > 0:
                    # A sink is one more logit with no value: it only adds to the sum of weights.
                    highest = hmax(load(m_addr + r * 4, f32, 1))
                    top = max(highest, sinks[head])
                    factor = hmax(vexp(splat(highest - top, 4)))
                    total = total * factor + hmax(vexp(splat(sinks[head] - top, 4)))
                target = out + token * out_strides[0] + head * out_strides[1]
                _store_output(acc_addr + r * acc_row, target, head_dim, factor / total, q_tag, f32, sizes)
    keep_alive(room)


@kernel
def attend(
    query,
    query_strides,
    key_cache,
    key_strides,
    value_cache,
    value_strides,
    key_scales,
    value_scales,
    out,
    out_strides,
    new_key,
    new_value,
    new_strides,
    slots,
    block_tables,
    cu_seqlens_q,
    seq_lens_kv,
    row_bounds,
    num_shared_blocks,
    sinks,
    num_heads,
    num_kv_heads,
    head_dim,
    block_size,
    queries_per_item,
    heads_per_item,
    scale,
    window,
    softcap,
    num_threads,
    q_tag,
    kv_tag,
    f32,
    sizes,
):
    """Attention of every query over its row's cached tokens, itself included.

    Rows row_bounds[g] : row_bounds[g + 1] begin with the same num_shared_blocks[g] full blocks; where that is not 0, they have
    one query each and there is no window.

    slots (S,) int64 or empty: where K and V of each row's only query, which lies past its shared blocks, are stored before
    they are attended to; unless below 0. new_key, new_value: their addresses, strides in bytes (row, head).

    query, out: addresses; strides in bytes (token, head). key_cache, value_cache: addresses; strides in bytes (block, head,
    inner), inner being one head_dim element of K and one token of V. key_scales, value_scales: address and strides in bytes
    (block, head) of int8 caches' scales, fp32, a head's contiguous; zeros otherwise. block_tables (S, B), cu_seqlens_q
    (S + 1,), seq_lens_kv (S,), row_bounds (G + 1,), num_shared_blocks (G,) int32. window 0 and softcap 0 mean none; sinks (H,)
    fp32 or empty. sizes: a tag, uint8 where block_size or head_dim may be below 16, or else of any other dtype: then
    what serves narrow vectors is not compiled, a sixth of the whole.
    """
    group = num_heads // num_kv_heads
    items, bounds = plan_items(
        cu_seqlens_q, seq_lens_kv, row_bounds, num_shared_blocks, num_kv_heads, heads_per_item, block_size,
        queries_per_item, window, num_threads,
    )  # fmt: skip
    work = (
        items, bounds, query, query_strides, key_cache, key_strides, value_cache, value_strides, key_scales, value_scales, out,
        out_strides, new_key, new_value, new_strides, slots, block_tables, cu_seqlens_q, seq_lens_kv, sinks, group, head_dim,
        block_size, queries_per_item, queries_per_item * group, heads_per_item * queries_per_item * group, scale, window,
        softcap, q_tag, kv_tag, f32, sizes,
    )  # fmt: skip
    on_threads(_attend_items, num_threads, work)
    return True
