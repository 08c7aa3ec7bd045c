"""The two products of a tile of K or V, many rows at a time, with all sums in registers; a tile of whole numbers; work space.

Rows handled together share what they load, not what they compute: a row's sums run in the order written here, whatever its
group.
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import inner
from .simd import (
    F32,
    I64,
    ITEM_BYTES,
    broadcast,
    constant,
    dtype_name,
    fetch,
    fma,
    halves_of_pairs,
    load_widened,
    store_narrowed,
    vector_type,
)

_FEATURES = binding.get_host_cpu_features()
# Lanes of a register, and sums of 16 lanes that stay in registers beside what is loaded: AVX-512 has 32 registers of 16 lanes;
# AVX2 has 16 of 8, NEON 32 of 4. More would be written to the stack and read again with every product.
LANES, NUM_SUMS = (16, 28) if _FEATURES.get("avx512f") else (8, 6)
# Rows of a group that has so many columns of 16 lanes.
_GROUP_ROWS = {1: 14, 2: 14, 4: 6} if LANES == 16 else {1: 6, 2: 3, 4: 1}
ROWS_TOGETHER = _GROUP_ROWS[2 * LANES // 16]  # beside two registers of columns


@inner
def aligned_floats(count):
    """Return an fp32 array (count,) that begins with a cache line; numba's own arrays begin with half of one."""
    raw = np.empty(count + 16, np.float32)
    skipped = (-raw.ctypes.data % 64) // 4
    return raw[skipped : skipped + count]


def _offset(builder, base, index, stride):
    return builder.add(base, builder.mul(ir.Constant(I64, index), stride))


def _accumulators(builder, vec_t, rows, cols):
    """Stack slots that LLVM promotes to registers: `rows x cols` vectors that live across a loop."""
    return [[cgutils.alloca_once(builder, vec_t) for _ in range(cols)] for _ in range(rows)]


def _for_row_groups(builder, num_rows, largest, emit):
    """Emit code that handles `num_rows` rows in groups of `largest` and the rest in one or two smaller ones.

    `emit(first_row, rows)` emits one group; the rows of a group share what they load, not what they compute, so a row's
    result doesn't depend on its group. A group of 1 to 3 rows takes about as long as one of 4, too few sums being in flight
    to hide an addition's latency: of groups of 6, the last one shares its rows with a rest of up to 3.
    """
    done = cgutils.alloca_once_value(builder, ir.Constant(I64, 0))

    def number(value):
        return ir.Constant(I64, value)

    def group(rows):
        emit(builder.load(done), rows)
        builder.store(builder.add(builder.load(done), number(rows)), done)

    groups, rest = builder.sdiv(num_rows, number(largest)), builder.srem(num_rows, number(largest))
    if largest == 6:
        shares = builder.and_(builder.icmp_signed(">=", rest, number(1)), builder.icmp_signed("<=", rest, number(3)))
        shares = builder.and_(shares, builder.icmp_signed(">", groups, number(0)))
        groups = builder.sub(groups, builder.zext(shares, I64))
    with cgutils.for_range(builder, groups):
        group(largest)
    rest = builder.sub(num_rows, builder.load(done))
    whole = 5 if largest == 6 else (largest + 1) // 2  # a rest of so many is one group; a larger one, two halves
    half = builder.sdiv(builder.add(rest, number(1)), number(2))
    first = builder.select(builder.icmp_signed(">", rest, number(whole)), half, rest)
    with cgutils.for_range(builder, number(2)) as loop:
        part = builder.select(builder.icmp_signed("==", loop.index, number(0)), first, builder.sub(rest, first))
        for rows in range(1, whole + 1):
            with builder.if_then(builder.icmp_signed("==", part, number(rows))):
                group(rows)


def _fetch_ahead(builder, ahead, index, row_bytes, num_bytes):
    """Ask for the cache lines of `num_bytes` in the line `index` of what is read next, a line each `row_bytes`."""
    start = builder.add(ahead, builder.mul(index, row_bytes))
    for offset in range(0, num_bytes, 64):
        fetch(builder, builder.add(start, ir.Constant(I64, offset)))


def _line_bytes(name, count):
    """Return the bytes of `count` stored elements; a pair of bf16 is two."""
    return count * ITEM_BYTES[name] // (2 if name == "uint32" else 1)


def _add_products(builder, line, name, column, row_stride, slots):
    """slots[r][c] += (the fp32 at `column` of row r) * (vector c of the stored dtype at `line`).

    What there is less of stays in registers, the rows' numbers or the vectors: beside the sums there is no room for both.
    Of pairs of bf16, vector c is the lower halves of the words c, and the upper ones of the words c - half the vectors.
    """
    lanes = slots[0][0].type.pointee.count
    pairs = {}

    def number(r):
        scalar = builder.load(builder.inttoptr(_offset(builder, column, r, row_stride), F32.as_pointer()))
        return broadcast(builder, scalar, lanes)

    def vector(c):
        if name == "uint32":
            words = c % (len(slots[0]) // 2)
            if words not in pairs:
                pairs[words] = halves_of_pairs(builder, builder.add(line, ir.Constant(I64, words * lanes * 4)), lanes)
            return pairs[words][c != words]
        return load_widened(builder, builder.add(line, ir.Constant(I64, c * lanes * ITEM_BYTES[name])), name, lanes)

    def add(r, c, spread, values):
        builder.store(fma(builder, spread, values, builder.load(slots[r][c])), slots[r][c])

    if len(slots) < len(slots[0]):
        numbers = [number(r) for r in range(len(slots))]
        for c in range(len(slots[0])):
            values = vector(c)
            for r, spread in enumerate(numbers):
                add(r, c, spread, values)
    else:
        vectors = [vector(c) for c in range(len(slots[0]))]
        for r in range(len(slots)):
            spread = number(r)
            for c, values in enumerate(vectors):
                add(r, c, spread, values)


def _store_sums(builder, first, row_stride, slots):
    """Store each row's sums side by side as fp32."""
    for r, line in enumerate(slots):
        address = _offset(builder, first, r, row_stride)
        for c, slot in enumerate(line):
            value = builder.load(slot)
            store_narrowed(builder, builder.add(address, ir.Constant(I64, c * 4 * value.type.count)), value, "float32")


@intrinsic(prefer_literal=True)
def qk_tile(typingctx, q, q_row, k, k_row, tag, scores, scores_row, depth, num_rows, ahead, ahead_row, cols, width):
    """scores[r, c] = sum_d q[r, d] * k[d, c] for `num_rows` rows and `cols` vectors of `width` tokens, kept in registers.

    q: fp32, one row of `depth` each `q_row` bytes. k: the tag's dtype, one row of tokens each `k_row` bytes (K transposed
    inside its block). scores: fp32, one row each `scores_row` bytes. The sum over d runs in order for every element.
    ahead: the address of what is read next, asked for as this tile is read, a line of the same length each `ahead_row` bytes.
    """
    lanes = min(width.literal_value, LANES)
    num_vectors = cols.literal_value * width.literal_value // lanes
    name = dtype_name(tag)

    def codegen(context, builder, signature, args):
        q_, q_row_, k_, k_row_, _, s_, s_row_, depth_, num_rows_, ahead_, ahead_row_ = args[:11]

        def emit(first, rows):
            acc = _accumulators(builder, vector_type(lanes), rows, num_vectors)
            for slot in (slot for line in acc for slot in line):
                builder.store(constant(lanes, 0.0), slot)
            q_first = builder.add(q_, builder.mul(first, q_row_))
            with cgutils.for_range(builder, depth_) as loop:
                k_line = builder.add(k_, builder.mul(loop.index, k_row_))
                _fetch_ahead(builder, ahead_, loop.index, ahead_row_, _line_bytes(name, num_vectors * lanes))
                q_column = builder.add(q_first, builder.mul(loop.index, ir.Constant(I64, 4)))
                _add_products(builder, k_line, name, q_column, q_row_, acc)
            s_first = builder.add(s_, builder.mul(first, s_row_))
            _store_sums(builder, s_first, s_row_, acc)

        _for_row_groups(builder, num_rows_, _GROUP_ROWS[cols.literal_value], emit)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, tag, i64, i64, i64, i64, i64, i64, cols, width), codegen


@intrinsic(prefer_literal=True)
def pv_tile(typingctx, p, p_row, v, v_row, tag, acc, acc_row, correction, num_tokens, num_rows, ahead, ahead_row, cols, width):
    """acc[r, c] = acc[r, c] * correction[r] + sum_t p[r, t] * v[t, c], tokens in order, kept in registers.

    p: fp32 weights, one row each `p_row` bytes. v: the tag's dtype, one token each `v_row` bytes. acc: fp32, one row each
    `acc_row` bytes. correction: fp32, one a row. `num_rows` rows by `cols` vectors of `width` lanes of head_dim. ahead,
    ahead_row: as `qk_tile`'s.
    """
    lanes = min(width.literal_value, LANES)
    num_vectors = cols.literal_value * width.literal_value // lanes
    name = dtype_name(tag)

    def codegen(context, builder, signature, args):
        p_, p_row_, v_, v_row_, _, acc_, acc_row_, correction_, count_, num_rows_, ahead_, ahead_row_ = args[:12]

        def emit(first, rows):
            slots = _accumulators(builder, vector_type(lanes), rows, num_vectors)
            acc_first = builder.add(acc_, builder.mul(first, acc_row_))
            for r in range(rows):
                address = builder.add(correction_, builder.mul(builder.add(first, ir.Constant(I64, r)), ir.Constant(I64, 4)))
                factor = broadcast(builder, builder.load(builder.inttoptr(address, F32.as_pointer())), lanes)
                line = _offset(builder, acc_first, r, acc_row_)
                for c in range(num_vectors):
                    old = load_widened(builder, builder.add(line, ir.Constant(I64, c * lanes * 4)), "float32", lanes)
                    builder.store(builder.fmul(old, factor), slots[r][c])
            p_first = builder.add(p_, builder.mul(first, p_row_))
            with cgutils.for_range(builder, count_) as loop:
                v_line = builder.add(v_, builder.mul(loop.index, v_row_))
                _fetch_ahead(builder, ahead_, loop.index, ahead_row_, _line_bytes(name, num_vectors * lanes))
                p_column = builder.add(p_first, builder.mul(loop.index, ir.Constant(I64, 4)))
                _add_products(builder, v_line, name, p_column, p_row_, slots)
            _store_sums(builder, acc_first, acc_row_, slots)

        _for_row_groups(builder, num_rows_, _GROUP_ROWS[cols.literal_value], emit)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, tag, i64, i64, i64, i64, i64, i64, i64, cols, width), codegen


# Whole numbers whose products one instruction adds up: bytes in fours where AVX-512 has VNNI, else 16 bits in twos.
TOGETHER = 4 if LANES == 16 and _FEATURES.get("avx512vnni") else 2


@intrinsic
def dot_tile(
    typingctx, x, x_row, weight, starts, starts_row, sums, sums_row, num_words, num_rows, ahead, row_scales, row_scales_row,
    added, added_row, scales,
):  # fmt: skip
    """sums[r, c] = starts[r, c] + sum over w and i of x[r, w, i] * weight[w, c, i], for 2 * LANES channels c. x86 with AVX2.

    x: (num_words, TOGETHER) of a row each `x_row` bytes; weight: (num_words, 2 * LANES, TOGETHER): uint8 and int8 where
    TOGETHER is 4, int16 where it is 2. starts, sums: int32, one row each `starts_row` (0: the same for all) and `sums_row`
    bytes, exact. ahead: the address of the int8 weights that are read next, asked for meanwhile.

    Unless the address row_scales is 0, what is stored is fp32: (sums[r, c] * row_scales[r] + added[r, c]) * scales[c], of which
    each row's stand each `row_scales_row` and `added_row` bytes. `added` may be `sums`.
    """
    i32 = ir.IntType(32)
    short_t, sum_t = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(i32, LANES)
    vector_bytes = 4 * LANES

    def codegen(context, builder, signature, args):
        x_, x_row_, weight_, starts_, starts_row_, sums_, sums_row_, words_, num_rows_, ahead_ = args[:10]
        row_scales_, row_scales_row_, added_, added_row_, scales_ = args[10:]

        def declared(name, *arguments):
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(sum_t, arguments), name)

        def add_products(total, spread, line):
            if TOGETHER == 4:
                return builder.call(declared("llvm.x86.avx512.vpdpbusd.512", sum_t, sum_t, sum_t), [total, spread, line])
            madd = declared("llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd", short_t, short_t)
            spread, line = builder.bitcast(spread, short_t), builder.bitcast(line, short_t)
            return builder.add(total, builder.call(madd, [spread, line]))

        def emit(first, rows):
            slots = _accumulators(builder, sum_t, rows, 2)

            def places(base, row_bytes):
                begin = builder.add(base, builder.mul(first, row_bytes))
                for r in range(rows):
                    for half in range(2):
                        address = builder.add(_offset(builder, begin, r, row_bytes), ir.Constant(I64, half * vector_bytes))
                        yield builder.inttoptr(address, sum_t.as_pointer()), slots[r][half]

            for pointer, slot in places(starts_, starts_row_):
                held = builder.load(pointer)
                held.align = 4
                builder.store(held, slot)
            x_first = builder.add(x_, builder.mul(first, x_row_))

            def add_word(index):
                at = builder.add(weight_, builder.mul(index, ir.Constant(I64, 2 * vector_bytes)))
                stored_bytes = 2 * LANES * TOGETHER
                _fetch_ahead(builder, ahead_, index, ir.Constant(I64, stored_bytes), stored_bytes)
                halves = []
                for half in range(2):
                    address = builder.add(at, ir.Constant(I64, half * vector_bytes))
                    loaded = builder.load(builder.inttoptr(address, sum_t.as_pointer()))
                    loaded.align = 1
                    halves.append(loaded)
                column = builder.add(x_first, builder.mul(index, ir.Constant(I64, 4)))
                for r in range(rows):
                    word = builder.load(builder.inttoptr(_offset(builder, column, r, x_row_), i32.as_pointer()))
                    word.align = 1
                    spread = broadcast(builder, word, LANES)
                    for half in range(2):
                        builder.store(add_products(builder.load(slots[r][half]), spread, halves[half]), slots[r][half])

            two, one = ir.Constant(I64, 2), ir.Constant(I64, 1)
            with cgutils.for_range(builder, builder.sdiv(words_, two)) as loop:
                first_word = builder.mul(loop.index, two)
                add_word(first_word)
                add_word(builder.add(first_word, one))
            with builder.if_then(builder.icmp_signed("==", builder.srem(words_, two), one)):
                add_word(builder.sub(words_, one))
            scaled = builder.icmp_signed("!=", row_scales_, ir.Constant(I64, 0))
            with builder.if_else(scaled) as (as_floats, as_whole):
                with as_whole:
                    for pointer, slot in places(sums_, sums_row_):
                        builder.store(builder.load(slot), pointer).align = 4
                with as_floats:
                    store_scaled(first, slots)

        def store_scaled(first, slots):
            float_t = vector_type(LANES)
            of_channels = [
                load_widened(builder, builder.add(scales_, ir.Constant(I64, half * vector_bytes)), "float32", LANES)
                for half in range(2)
            ]
            at_sums, at_added, at_scale = (
                builder.add(base, builder.mul(first, row_bytes))
                for base, row_bytes in ((sums_, sums_row_), (added_, added_row_), (row_scales_, row_scales_row_))
            )
            for r, line in enumerate(slots):
                address = builder.inttoptr(_offset(builder, at_scale, r, row_scales_row_), F32.as_pointer())
                of_row = broadcast(builder, builder.load(address), LANES)
                for half, slot in enumerate(line):
                    offset = ir.Constant(I64, half * vector_bytes)
                    total = builder.fmul(builder.sitofp(builder.load(slot), float_t), of_row)
                    earlier = builder.add(_offset(builder, at_added, r, added_row_), offset)
                    total = builder.fadd(total, load_widened(builder, earlier, "float32", LANES))
                    target = builder.add(_offset(builder, at_sums, r, sums_row_), offset)
                    store_narrowed(builder, target, builder.fmul(total, of_channels[half]), "float32")

        _for_row_groups(builder, num_rows_, _GROUP_ROWS[2 * LANES // 16], emit)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(*[i64] * 15), codegen
