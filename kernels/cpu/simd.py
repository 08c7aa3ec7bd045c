"""Explicit vectors inside numba: a type that holds an LLVM vector of floats, and the few operations attention needs.

Everything works on raw addresses (int64), so a kernel addresses any layout by 64-bit byte offsets. Loads widen the stored
dtype to fp32; which dtype it is comes from the *type* of a `tag` argument, a number of the storage type (uint16
stands for bf16, int16 for fp16, int8 for the codes of a quantized pool, uint32 for pairs of bf16, see `halves_of_pairs`), so
that numba specializes and caches one kernel per dtype. `width` arguments must be literal constants.

LLVM lowers the portable vector IR to AVX-512, AVX2 or NEON. No operation is marked reassociable: the order of every sum is
the order written here, on every machine and for any number of rows handled together.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)


ITEM_BYTES = {"float32": 4, "uint16": 2, "int16": 2, "int8": 1, "uint8": 1, "uint32": 4}
LARGEST_CODE = 127.0  # of an int8; -128 stays unused, so that a code's negative is one too


class Vec(types.Type):
    """A vector of `width` fp32 lanes, kept in registers."""

    def __init__(self, width: int):
        self.width = width
        super().__init__(f"f32x{width}")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.VectorType(F32, fe_type.width))


def vector_type(width):
    return ir.VectorType(F32, width)


def constant(width, value):
    return ir.Constant(vector_type(width), [value] * width)


def ints(width, value):
    return ir.Constant(ir.VectorType(I32, width), [value] * width)


def _call(builder, name, ret, args):
    fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ret, [a.type for a in args]), name)
    return builder.call(fn, args)


def broadcast(builder, scalar, width):
    vec_t = ir.VectorType(scalar.type, width)
    one = builder.insert_element(ir.Constant(vec_t, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vec_t, ir.Undefined), ints(width, 0))


def fma(builder, a, b, c):
    return _call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def fetch(builder, address):
    """Ask for the cache line at an address, which will be read soon: into the L2 cache, since the L1 is full."""
    byte_p, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    prefetch_t = ir.FunctionType(ir.VoidType(), [byte_p, i32, i32, i32])
    prefetch = cgutils.get_or_insert_function(builder.module, prefetch_t, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.inttoptr(address, byte_p), i32(0), i32(2), i32(1)])


def dtype_name(tag):
    return str(tag)


def load_widened(builder, address, tag_name, width):
    """Load `width` stored elements at an address and widen them to fp32."""
    if tag_name == "float32":
        value = builder.load(builder.inttoptr(address, vector_type(width).as_pointer()))
        value.align = 4
        return value
    if tag_name == "uint16":  # bf16 is the upper half of an fp32
        raw = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(16), width).as_pointer()))
        raw.align = 2
        wide = builder.shl(builder.zext(raw, ir.VectorType(I32, width)), ints(width, 16))
        return builder.bitcast(wide, vector_type(width))
    if tag_name == "int16":
        raw = builder.load(builder.inttoptr(address, ir.VectorType(ir.HalfType(), width).as_pointer()))
        raw.align = 2
        return builder.fpext(raw, vector_type(width))
    if tag_name == "int8":
        raw = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(8), width).as_pointer()))
        raw.align = 1
        return builder.sitofp(raw, vector_type(width))
    raise TypeError(f"no vector load for {tag_name}")


def store_narrowed(builder, address, value, tag_name):
    """Round fp32 lanes to the stored dtype (to nearest, ties to even) and store them; int8 saturates at -127 and 127."""
    width = value.type.count
    if tag_name == "float32":
        builder.store(value, builder.inttoptr(address, vector_type(width).as_pointer())).align = 4
    elif tag_name == "uint16":
        bits = builder.bitcast(value, ir.VectorType(I32, width))
        odd = builder.and_(builder.lshr(bits, ints(width, 16)), ints(width, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ints(width, 0x7FFF))), ints(width, 16))
        is_nan = builder.fcmp_unordered("uno", value, value)
        rounded = builder.select(is_nan, ints(width, 0x7FC0), rounded)
        half_t = ir.VectorType(ir.IntType(16), width)
        builder.store(builder.trunc(rounded, half_t), builder.inttoptr(address, half_t.as_pointer())).align = 2
    elif tag_name == "int16":
        half_t = ir.VectorType(ir.HalfType(), width)
        builder.store(builder.fptrunc(value, half_t), builder.inttoptr(address, half_t.as_pointer())).align = 2
    elif tag_name == "int8":
        byte_t = ir.VectorType(ir.IntType(8), width)
        low, high = constant(width, -LARGEST_CODE), constant(width, LARGEST_CODE)
        value = builder.select(builder.fcmp_ordered(">", value, low), value, low)  # NaN too: its conversion would be undefined
        value = builder.select(builder.fcmp_ordered("<", value, high), value, high)
        whole = _call(builder, f"llvm.nearbyint.v{width}f32", value.type, [value])
        builder.store(builder.fptosi(whole, byte_t), builder.inttoptr(address, byte_t.as_pointer())).align = 1
    else:
        raise TypeError(f"no vector store for {tag_name}")


@intrinsic(prefer_literal=True)
def load(typingctx, address, tag, width):
    """Load `width` elements of the tag's dtype and widen them to fp32."""
    lanes, name = width.literal_value, dtype_name(tag)

    def codegen(context, builder, signature, args):
        return load_widened(builder, args[0], name, lanes)

    return Vec(lanes)(types.int64, tag, width), codegen


@intrinsic
def store(typingctx, address, value, tag):
    """Round a vector to the tag's dtype and store it."""
    name = dtype_name(tag)

    def codegen(context, builder, signature, args):
        store_narrowed(builder, args[0], args[1], name)
        return context.get_dummy_value()

    return types.void(types.int64, value, tag), codegen


@intrinsic
def store_whole(typingctx, address, value, tag):
    """Round lanes from -127 to 127 to whole numbers (ties to even); store them as the tag's int16, or uint8 with 128 for 0."""
    unsigned = dtype_name(tag) == "uint8"

    def codegen(context, builder, signature, args):
        width = args[1].type.count
        # Beside such a large number the lowest bits of an fp32 are those of the whole number added.
        shifted = builder.fadd(args[1], constant(width, 1.5 * 2.0**23 + (128 if unsigned else 0)))
        whole = builder.bitcast(shifted, ir.VectorType(I32, width))
        stored_t = ir.VectorType(ir.IntType(8 if unsigned else 16), width)
        builder.store(builder.trunc(whole, stored_t), builder.inttoptr(args[0], stored_t.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, value, tag), codegen


@intrinsic
def widen_bytes(typingctx, source, target):
    """Copy 32 int8 as int16."""

    def codegen(context, builder, signature, args):
        byte_t, short_t = (ir.VectorType(ir.IntType(bits), 32) for bits in (8, 16))
        raw = builder.load(builder.inttoptr(args[0], byte_t.as_pointer()))
        raw.align = 1
        builder.store(builder.sext(raw, short_t), builder.inttoptr(args[1], short_t.as_pointer())).align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def halves_of_pairs(builder, address, width):
    """Load `width` words of 32 bits, two bf16 each; return the lower halves and the upper ones as fp32 vectors.

    That is one instruction a vector; bf16 side by side take two, to spread them out and to shift them.
    """
    words = builder.load(builder.inttoptr(address, ir.VectorType(I32, width).as_pointer()))
    words.align = 4
    low, high = builder.shl(words, ints(width, 16)), builder.and_(words, ints(width, 0xFFFF0000))
    return builder.bitcast(low, vector_type(width)), builder.bitcast(high, vector_type(width))


@intrinsic(prefer_literal=True)
def load_sums(typingctx, address, width):
    """Load `width` int32 sums as fp32."""
    lanes = width.literal_value

    def codegen(context, builder, signature, args):
        raw = builder.load(builder.inttoptr(args[0], ir.VectorType(I32, lanes).as_pointer()))
        raw.align = 4
        return builder.sitofp(raw, vector_type(lanes))

    return Vec(lanes)(types.int64, width), codegen


@intrinsic
def item_bytes(typingctx, tag):
    """Return the size of a stored element, a constant."""
    size = ITEM_BYTES[dtype_name(tag)]

    def codegen(context, builder, signature, args):
        return ir.Constant(I64, size)

    return types.int64(tag), codegen


@intrinsic
def copy_element(typingctx, destination, source, tag):
    """Copy one stored element between two addresses, bit for bit."""
    bits = ir.IntType(8 * ITEM_BYTES[dtype_name(tag)])

    def codegen(context, builder, signature, args):
        value = builder.load(builder.inttoptr(args[1], bits.as_pointer()))
        builder.store(value, builder.inttoptr(args[0], bits.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, tag), codegen


@intrinsic
def take_next(typingctx, counter):
    """Return the int64 at an address and leave it one higher, whichever threads do so at once."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64), codegen


def _is_dtype(name):
    @intrinsic
    def question(typingctx, tag):
        answer = int(dtype_name(tag) == name)

        def codegen(context, builder, signature, args):
            return ir.Constant(ir.IntType(1), answer)

        return types.boolean(tag), codegen

    return question


# Whether the tag stands for a dtype: constants, so that the other branch is not compiled.
is_int8, is_pairs, is_uint8 = _is_dtype("int8"), _is_dtype("uint32"), _is_dtype("uint8")


@intrinsic(prefer_literal=True)
def splat(typingctx, scalar, width):
    """Return a vector whose lanes all hold one fp32 scalar."""
    lanes = width.literal_value

    def codegen(context, builder, signature, args):
        return broadcast(builder, args[0], lanes)

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
        pick = ir.VectorType(I32, half)
        low = builder.shuffle_vector(value, undefined, ir.Constant(pick, list(range(half))))
        high = builder.shuffle_vector(value, undefined, ir.Constant(pick, list(range(half, 2 * half))))
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(I32, 0))


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


def _larger_magnitude(builder, a, b):
    """The lanes of a, or of |b| where its bits are a larger number: those of a NaN are, then an infinity's. a >= 0."""
    whole_t = ir.IntType(32) if a.type == F32 else ir.VectorType(I32, a.type.count)
    bits = ir.Constant(whole_t, 0x7FFFFFFF if a.type == F32 else [0x7FFFFFFF] * a.type.count)
    a, b, wanted = builder.bitcast(a, whole_t), builder.and_(builder.bitcast(b, whole_t), bits), a.type
    return builder.bitcast(builder.select(builder.icmp_signed(">", a, b), a, b), wanted)


larger_magnitude = _binary(_larger_magnitude)


@intrinsic
def hmax_magnitude(typingctx, v):
    """Return the lane of the largest magnitude, without its sign; a NaN where there is one."""

    def codegen(context, builder, signature, args):
        return _halves(builder, args[0], lambda a, b: _larger_magnitude(builder, a, b))

    return types.float32(v), codegen


def _lanes_or(fill):
    @intrinsic
    def operation(typingctx, v, first, low, high):
        def codegen(context, builder, signature, args):
            value, first_, low_, high_ = args
            width = value.type.count
            lane = ir.Constant(ir.VectorType(I32, width), list(range(width)))
            index = builder.add(lane, broadcast(builder, builder.trunc(first_, I32), width))
            above = builder.icmp_signed(">=", index, broadcast(builder, builder.trunc(low_, I32), width))
            below = builder.icmp_signed("<", index, broadcast(builder, builder.trunc(high_, I32), width))
            return builder.select(builder.and_(above, below), value, constant(width, fill))

        return v(v, types.int64, types.int64, types.int64), codegen

    return operation


# Keep lanes whose index `first + lane` lies in [low, high); the others become -inf, or 0, whatever they held.
keep_lanes = _lanes_or(float("-inf"))
keep_lanes_or_zero = _lanes_or(0.0)
