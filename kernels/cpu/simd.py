"""Explicit vectors inside numba: a type that holds an LLVM vector of floats, and the few operations attention needs.

Everything works on raw addresses (int64), so a kernel addresses any layout by 64-bit byte offsets. Loads widen the stored
dtype to fp32; which dtype it is comes from the *type* of a `tag` argument, an empty numpy array of the storage type (uint16
stands for bf16, int16 for fp16), so that numba specializes and caches one kernel per dtype. `width` arguments must be
literal constants.

LLVM lowers the portable vector IR to AVX-512, AVX2 or NEON. No operation is marked reassociable: the order of every sum is
the order written here, on every machine and for any number of rows handled together.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

# Sums of 16 lanes that stay in registers beside what is loaded: AVX-512 has 32 registers of 16 lanes; AVX2 has 16 of 8, NEON
# 32 of 4. More would be written to the stack and read again with every product.
NUM_SUMS = 16 if binding.get_host_cpu_features().get("avx512f") else 6


class Vec(types.Type):
    """A vector of `width` fp32 lanes, kept in registers."""

    def __init__(self, width: int):
        self.width = width
        super().__init__(f"f32x{width}")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.VectorType(_F32, fe_type.width))


def _vec_t(width):
    return ir.VectorType(_F32, width)


def _const(width, value):
    return ir.Constant(_vec_t(width), [value] * width)


def _ints(width, value):
    return ir.Constant(ir.VectorType(_I32, width), [value] * width)


def _call(builder, name, ret, args):
    fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ret, [a.type for a in args]), name)
    return builder.call(fn, args)


def _broadcast(builder, scalar, width):
    vec_t = ir.VectorType(scalar.type, width)
    one = builder.insert_element(ir.Constant(vec_t, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vec_t, ir.Undefined), _ints(width, 0))


def _fma(builder, a, b, c):
    return _call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def _tag_name(tag):
    return str(tag.dtype)


def _load_widened(builder, address, tag_name, width):
    """Load `width` stored elements at an address and widen them to fp32."""
    if tag_name == "float32":
        value = builder.load(builder.inttoptr(address, _vec_t(width).as_pointer()))
        value.align = 4
        return value
    if tag_name == "uint16":  # bf16 is the upper half of an fp32
        raw = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(16), width).as_pointer()))
        raw.align = 2
        wide = builder.shl(builder.zext(raw, ir.VectorType(_I32, width)), _ints(width, 16))
        return builder.bitcast(wide, _vec_t(width))
    if tag_name == "int16":
        raw = builder.load(builder.inttoptr(address, ir.VectorType(ir.HalfType(), width).as_pointer()))
        raw.align = 2
        return builder.fpext(raw, _vec_t(width))
    raise TypeError(f"no vector load for {tag_name}")


def _store_narrowed(builder, address, value, tag_name):
    """Round fp32 lanes to the stored dtype (to nearest, ties to even) and store them."""
    width = value.type.count
    if tag_name == "float32":
        builder.store(value, builder.inttoptr(address, _vec_t(width).as_pointer())).align = 4
    elif tag_name == "uint16":
        bits = builder.bitcast(value, ir.VectorType(_I32, width))
        odd = builder.and_(builder.lshr(bits, _ints(width, 16)), _ints(width, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _ints(width, 0x7FFF))), _ints(width, 16))
        is_nan = builder.fcmp_unordered("uno", value, value)
        rounded = builder.select(is_nan, _ints(width, 0x7FC0), rounded)
        half_t = ir.VectorType(ir.IntType(16), width)
        builder.store(builder.trunc(rounded, half_t), builder.inttoptr(address, half_t.as_pointer())).align = 2
    elif tag_name == "int16":
        half_t = ir.VectorType(ir.HalfType(), width)
        builder.store(builder.fptrunc(value, half_t), builder.inttoptr(address, half_t.as_pointer())).align = 2
    else:
        raise TypeError(f"no vector store for {tag_name}")


@intrinsic(prefer_literal=True)
def load(typingctx, address, tag, width):
    """Load `width` elements of the tag's dtype and widen them to fp32."""
    lanes, name = width.literal_value, _tag_name(tag)

    def codegen(context, builder, signature, args):
        return _load_widened(builder, args[0], name, lanes)

    return Vec(lanes)(types.int64, tag, width), codegen


@intrinsic
def store(typingctx, address, value, tag):
    """Round a vector to the tag's dtype and store it."""
    name = _tag_name(tag)

    def codegen(context, builder, signature, args):
        _store_narrowed(builder, args[0], args[1], name)
        return context.get_dummy_value()

    return types.void(types.int64, value, tag), codegen


@intrinsic
def store_unsigned(typingctx, address, value):
    """Round lanes from -127 to 127 to the nearest integer (ties to even) and store them as bytes, 128 standing for 0."""

    def codegen(context, builder, signature, args):
        width = args[1].type.count
        rounded = _call(builder, f"llvm.nearbyint.v{width}f32", args[1].type, [args[1]])
        whole = builder.add(builder.fptosi(rounded, ir.VectorType(_I32, width)), _ints(width, 128))
        byte_t = ir.VectorType(ir.IntType(8), width)
        builder.store(builder.trunc(whole, byte_t), builder.inttoptr(args[0], byte_t.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@intrinsic
def copy_element(typingctx, destination, source, tag):
    """Copy one stored element between two addresses, bit for bit."""
    bits = ir.IntType(32 if _tag_name(tag) == "float32" else 16)

    def codegen(context, builder, signature, args):
        value = builder.load(builder.inttoptr(args[1], bits.as_pointer()))
        builder.store(value, builder.inttoptr(args[0], bits.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, tag), codegen


@intrinsic(prefer_literal=True)
def splat(typingctx, scalar, width):
    """Return a vector whose lanes all hold one fp32 scalar."""
    lanes = width.literal_value

    def codegen(context, builder, signature, args):
        return _broadcast(builder, args[0], lanes)

    return Vec(lanes)(types.float32, width), codegen


def _binary(emit):
    @intrinsic
    def operation(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return emit(builder, *args)

        return a(a, b), codegen

    return operation


vadd = _binary(lambda builder, a, b: builder.fadd(a, b))
vsub = _binary(lambda builder, a, b: builder.fsub(a, b))
vmul = _binary(lambda builder, a, b: builder.fmul(a, b))
vdiv = _binary(lambda builder, a, b: builder.fdiv(a, b))
vmax = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def _halves(builder, value, combine):
    """Fold a vector to one lane by a fixed tree of halves."""
    while value.type.count > 1:
        half = value.type.count // 2
        undefined = ir.Constant(value.type, ir.Undefined)
        pick = ir.VectorType(_I32, half)
        low = builder.shuffle_vector(value, undefined, ir.Constant(pick, list(range(half))))
        high = builder.shuffle_vector(value, undefined, ir.Constant(pick, list(range(half, 2 * half))))
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(_I32, 0))


@intrinsic
def hsum(typingctx, v):
    """Sum the lanes by a fixed tree."""

    def codegen(context, builder, signature, args):
        return _halves(builder, args[0], builder.fadd)

    return types.float32(v), codegen


@intrinsic
def hmax(typingctx, v):
    """Return the largest lane."""

    def codegen(context, builder, signature, args):
        return _halves(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(v), codegen


@intrinsic
def keep_lanes(typingctx, v, first, low, high):
    """Keep lanes whose index `first + lane` lies in [low, high); the others become -inf, whatever they held."""

    def codegen(context, builder, signature, args):
        value, first_, low_, high_ = args
        width = value.type.count
        lane = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
        index = builder.add(lane, _broadcast(builder, builder.trunc(first_, _I32), width))
        above = builder.icmp_signed(">=", index, _broadcast(builder, builder.trunc(low_, _I32), width))
        below = builder.icmp_signed("<", index, _broadcast(builder, builder.trunc(high_, _I32), width))
        return builder.select(builder.and_(above, below), value, _const(width, float("-inf")))

    return v(v, types.int64, types.int64, types.int64), codegen


# exp after the Cephes library's expf: n = round(x / ln 2), a polynomial on the rest, scaled by 2**n in the exponent.
_EXP_POLY = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_MIN, _EXP_MAX = -87.3365, 88.3762


def _emit_exp(builder, x):
    width = x.type.count
    clamped = builder.select(builder.fcmp_ordered(">", x, _const(width, _EXP_MIN)), x, _const(width, _EXP_MIN))
    clamped = builder.select(builder.fcmp_ordered("<", clamped, _const(width, _EXP_MAX)), clamped, _const(width, _EXP_MAX))
    n = _call(
        builder,
        f"llvm.nearbyint.v{width}f32",
        x.type,
        [builder.fmul(clamped, _const(width, 1.44269504088896341))],
    )
    f = _fma(builder, n, _const(width, -0.693359375), clamped)
    f = _fma(builder, n, _const(width, 2.12194440e-4), f)
    p = _const(width, _EXP_POLY[0])
    for coefficient in _EXP_POLY[1:]:
        p = _fma(builder, p, f, _const(width, coefficient))
    p = builder.fadd(_fma(builder, p, builder.fmul(f, f), f), _const(width, 1.0))
    exponent = builder.shl(builder.add(builder.fptosi(n, ir.VectorType(_I32, width)), _ints(width, 127)), _ints(width, 23))
    result = builder.fmul(p, builder.bitcast(exponent, x.type))
    # Far below the range the answer is exactly 0: a masked score (-inf) must weigh nothing.
    return builder.select(builder.fcmp_ordered("<", x, _const(width, _EXP_MIN)), _const(width, 0.0), result)


@intrinsic
def vexp(typingctx, v):
    """exp of every lane, within 2 units in the last place; exactly 0 below -87.3."""

    def codegen(context, builder, signature, args):
        return _emit_exp(builder, args[0])

    return v(v), codegen


@intrinsic
def vtanh(typingctx, v):
    """tanh of every lane as 1 - 2 / (exp(2x) + 1)."""

    def codegen(context, builder, signature, args):
        width = args[0].type.count
        e = _emit_exp(builder, builder.fmul(args[0], _const(width, 2.0)))
        ratio = builder.fdiv(_const(width, 2.0), builder.fadd(e, _const(width, 1.0)))
        return builder.fsub(_const(width, 1.0), ratio)

    return v(v), codegen


def _offset(builder, base, index, stride):
    return builder.add(base, builder.mul(ir.Constant(_I64, index), stride))


def _accumulators(builder, vec_t, rows, cols):
    """Stack slots that LLVM promotes to registers: `rows x cols` vectors that live across a loop."""
    return [[cgutils.alloca_once(builder, vec_t) for _ in range(cols)] for _ in range(rows)]


def _for_row_groups(builder, num_rows, largest, emit):
    """Emit code that handles `num_rows` rows in groups of `largest` (8 at most), then of 4, and at last of 3, 2 or 1.

    `emit(first_row, rows)` emits one group; the rows of a group share what they load, not what they compute, so a row's
    result doesn't depend on its group.
    """
    done = cgutils.alloca_once_value(builder, ir.Constant(_I64, 0))

    def left():
        return builder.sub(num_rows, builder.load(done))

    def group(rows):
        emit(builder.load(done), rows)
        builder.store(builder.add(builder.load(done), ir.Constant(_I64, rows)), done)

    with cgutils.for_range(builder, builder.sdiv(num_rows, ir.Constant(_I64, largest))):
        group(largest)
    if largest > 4:
        with builder.if_then(builder.icmp_signed(">=", left(), ir.Constant(_I64, 4))):
            group(4)
    for rows in range(min(3, largest - 1), 0, -1):
        with builder.if_then(builder.icmp_signed("==", left(), ir.Constant(_I64, rows))):
            group(rows)


@intrinsic(prefer_literal=True)
def qk_tile(typingctx, q, q_row, k, k_row, tag, scores, scores_row, depth, num_rows, cols, width):
    """scores[r, c] = sum_d q[r, d] * k[d, c] for `num_rows` rows and `cols` vectors of `width` tokens, kept in registers.

    q: fp32, one row of `depth` each `q_row` bytes. k: the tag's dtype, one row of tokens each `k_row` bytes (K transposed
    inside its block). scores: fp32, one row each `scores_row` bytes. The sum over d runs in order for every element.
    """
    num_cols, lanes = cols.literal_value, width.literal_value
    name = _tag_name(tag)
    itemsize = 4 if name == "float32" else 2

    def codegen(context, builder, signature, args):
        q_, q_row_, k_, k_row_, _, s_, s_row_, depth_, num_rows_ = args[:9]

        def emit(first, rows):
            acc = _accumulators(builder, _vec_t(lanes), rows, num_cols)
            for slot in (slot for line in acc for slot in line):
                builder.store(_const(lanes, 0.0), slot)
            q_first = builder.add(q_, builder.mul(first, q_row_))
            with cgutils.for_range(builder, depth_) as loop:
                k_line = builder.add(k_, builder.mul(loop.index, k_row_))
                keys = [
                    _load_widened(builder, builder.add(k_line, ir.Constant(_I64, c * lanes * itemsize)), name, lanes)
                    for c in range(num_cols)
                ]
                q_column = builder.add(q_first, builder.mul(loop.index, ir.Constant(_I64, 4)))
                for r in range(rows):
                    scalar = builder.load(builder.inttoptr(_offset(builder, q_column, r, q_row_), _F32.as_pointer()))
                    spread = _broadcast(builder, scalar, lanes)
                    for c in range(num_cols):
                        builder.store(_fma(builder, spread, keys[c], builder.load(acc[r][c])), acc[r][c])
            s_first = builder.add(s_, builder.mul(first, s_row_))
            for r in range(rows):
                line = _offset(builder, s_first, r, s_row_)
                for c in range(num_cols):
                    address = builder.add(line, ir.Constant(_I64, c * lanes * 4))
                    _store_narrowed(builder, address, builder.load(acc[r][c]), "float32")

        _for_row_groups(builder, num_rows_, min(8, NUM_SUMS // num_cols), emit)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, tag, i64, i64, i64, i64, cols, width), codegen


@intrinsic(prefer_literal=True)
def pv_tile(typingctx, p, p_row, v, v_row, tag, acc, acc_row, correction, num_tokens, num_rows, cols, width):
    """acc[r, c] = acc[r, c] * correction[r] + sum_t p[r, t] * v[t, c], tokens in order, kept in registers.

    p: fp32 weights, one row each `p_row` bytes. v: the tag's dtype, one token each `v_row` bytes. acc: fp32, one row each
    `acc_row` bytes. correction: fp32, one a row. `num_rows` rows by `cols` vectors of `width` lanes of head_dim.
    """
    num_cols, lanes = cols.literal_value, width.literal_value
    name = _tag_name(tag)
    itemsize = 4 if name == "float32" else 2

    def codegen(context, builder, signature, args):
        p_, p_row_, v_, v_row_, _, acc_, acc_row_, correction_, count_, num_rows_ = args[:10]

        def emit(first, rows):
            slots = _accumulators(builder, _vec_t(lanes), rows, num_cols)
            acc_first = builder.add(acc_, builder.mul(first, acc_row_))
            for r in range(rows):
                address = builder.add(correction_, builder.mul(builder.add(first, ir.Constant(_I64, r)), ir.Constant(_I64, 4)))
                factor = _broadcast(builder, builder.load(builder.inttoptr(address, _F32.as_pointer())), lanes)
                line = _offset(builder, acc_first, r, acc_row_)
                for c in range(num_cols):
                    old = _load_widened(builder, builder.add(line, ir.Constant(_I64, c * lanes * 4)), "float32", lanes)
                    builder.store(builder.fmul(old, factor), slots[r][c])
            p_first = builder.add(p_, builder.mul(first, p_row_))
            with cgutils.for_range(builder, count_) as loop:
                v_line = builder.add(v_, builder.mul(loop.index, v_row_))
                values = [
                    _load_widened(builder, builder.add(v_line, ir.Constant(_I64, c * lanes * itemsize)), name, lanes)
                    for c in range(num_cols)
                ]
                p_column = builder.add(p_first, builder.mul(loop.index, ir.Constant(_I64, 4)))
                for r in range(rows):
                    scalar = builder.load(builder.inttoptr(_offset(builder, p_column, r, p_row_), _F32.as_pointer()))
                    spread = _broadcast(builder, scalar, lanes)
                    for c in range(num_cols):
                        builder.store(_fma(builder, spread, values[c], builder.load(slots[r][c])), slots[r][c])
            for r in range(rows):
                line = _offset(builder, acc_first, r, acc_row_)
                for c in range(num_cols):
                    address = builder.add(line, ir.Constant(_I64, c * lanes * 4))
                    _store_narrowed(builder, address, builder.load(slots[r][c]), "float32")

        _for_row_groups(builder, num_rows_, min(8, NUM_SUMS // num_cols), emit)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, tag, i64, i64, i64, i64, i64, cols, width), codegen
