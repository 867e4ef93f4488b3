"""Pointwise instructions of the loop IR on lanes or scalars; the two have the same bits."""

from __future__ import annotations

from adaptive_eager.kernels import vmath
from adaptive_eager.kernels.ir import MATH, Inst
from adaptive_eager.kernels.lanes import Emit, Lanes


def compute(e: Emit, i: Inst, args: list[Lanes]) -> Lanes:
    """The value of a pointwise instruction."""
    x = args[0]
    match i.op:
        case "add" | "sub" | "mul" | "div" | "and" | "or" | "xor":
            return e.arith(i.op, x, args[1])
        case "min" | "max":
            return e.extreme(i.op, x, args[1])
        case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
            return e.compare(i.op, x, args[1])
        case "neg":
            return e.neg(x)
        case "abs":
            return e.abs(x)
        case "not":
            return e.invert(x)
        case "select":
            return e.select(x, args[1], args[2])
        case "fma":
            return e.fma(x, args[1], args[2])
        case "copysign":
            return e.copysign(x, args[1])
        case "sqrt" | "rint" | "floor" | "ceil" | "trunc":
            return e.un(i.op, x)
        case "cast":
            return e.cast(x, i.dtype)
        case "round":
            return e.round(x, str(i.attr))
    assert i.op in MATH, i.op
    return _math(e, i.op, args)


def _math(e: Emit, op: str, args: list[Lanes]) -> Lanes:
    x = args[0]
    if x.dtype == "f32" and op in vmath.NARROW:
        return vmath.NARROW[op](e, x)  # type: ignore[no-any-return]
    if x.dtype == "f32" and op in vmath.PERIODIC:
        far = e.invert(e.abs(x) < e.const(x, vmath.PERIODIC_LIMIT))
        fast = vmath.sincos(e, x, vmath.PERIODIC[op])
        return e.where_rare(far, lambda: e.wide(op, x), fast)
    if op == "sigmoid":
        one = e.const(x, 1.0)
        return one / (one + e.wide("exp", -x))
    return e.wide(op, *args)
