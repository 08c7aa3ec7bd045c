"""Functions of all lanes of a vector: exp, and what is made of it."""

from __future__ import annotations

from llvmlite import ir
from numba.extending import intrinsic

from .simd import I32, constant, fma, ints

# exp after the Cephes library's expf: n = round(x / ln 2), a polynomial on the rest, scaled by 2**n in the exponent.
_EXP_POLY = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_MIN, _EXP_MAX = -87.3365, 88.3762
_EXP_SHIFT = 1.5 * 2.0**23 + 127  # 127: the bias of an exponent


def _emit_exp(builder, x):
    width = x.type.count
    # The order of the operands lets a NaN through; it makes the polynomial one, whatever exponent its conversion gives.
    low, high = constant(width, _EXP_MIN), constant(width, _EXP_MAX)
    clamped = builder.select(builder.fcmp_ordered(">", low, x), low, x)
    clamped = builder.select(builder.fcmp_ordered("<", high, clamped), high, clamped)
    # Added to such a large number, x / ln 2 is rounded to a whole one, and its lowest bits are those of the exponent wanted.
    shifted = fma(builder, clamped, constant(width, 1.44269504088896341), constant(width, _EXP_SHIFT))
    n = builder.fsub(shifted, constant(width, _EXP_SHIFT))
    f = fma(builder, n, constant(width, -0.693359375), clamped)
    f = fma(builder, n, constant(width, 2.12194440e-4), f)
    p = constant(width, _EXP_POLY[0])
    for coefficient in _EXP_POLY[1:]:
        p = fma(builder, p, f, constant(width, coefficient))
    p = builder.fadd(fma(builder, p, builder.fmul(f, f), f), constant(width, 1.0))
    exponent = builder.shl(builder.bitcast(shifted, ir.VectorType(I32, width)), ints(width, 23))
    result = builder.fmul(p, builder.bitcast(exponent, x.type))
    # Far below the range the answer is exactly 0: a masked score (-inf) must weigh nothing.
    return builder.select(builder.fcmp_ordered("<", x, constant(width, _EXP_MIN)), constant(width, 0.0), result)


@intrinsic
def vexp(typingctx, v):
    """exp of every lane, within 2 units in the last place; exactly 0 below -87.3; NaN of NaN."""

    def codegen(context, builder, signature, args):
        return _emit_exp(builder, args[0])

    return v(v), codegen


@intrinsic
def vsilu(typingctx, v):
    """x / (1 + exp(-x)) of every lane."""

    def codegen(context, builder, signature, args):
        width = args[0].type.count
        e = _emit_exp(builder, builder.fsub(constant(width, 0.0), args[0]))
        return builder.fdiv(args[0], builder.fadd(constant(width, 1.0), e))

    return v(v), codegen


@intrinsic
def vtanh(typingctx, v):
    """tanh of every lane as 1 - 2 / (exp(2x) + 1)."""

    def codegen(context, builder, signature, args):
        width = args[0].type.count
        e = _emit_exp(builder, builder.fmul(args[0], constant(width, 2.0)))
        ratio = builder.fdiv(constant(width, 2.0), builder.fadd(e, constant(width, 1.0)))
        return builder.fsub(constant(width, 1.0), ratio)

    return v(v), codegen
