"""Pointwise instructions of the loop IR on lanes or scalars; the two have the same bits."""

from __future__ import annotations

from collections.abc import Callable

from adaptive_eager.kernels import philox, vmath
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
        case "random":
            return _random(e, i, args)
    assert i.op in MATH, i.op
    return _math(e, i.op, args)


def _random(e: Emit, i: Inst, args: list[Lanes]) -> Lanes:
    """Round keys of a launch's seed are scalars, lanes differ in their index."""
    index, seed, offset = args

    def number(like: Lanes) -> Callable[[int], Lanes]:
        return lambda n: e.const(like, n)

    wide = index.v.type != seed.v.type
    one = number(seed)
    low, high = offset & one(philox.MASK), (offset >> 32) & one(philox.MASK)
    rounds = philox.keys(seed, one)
    if wide:
        low, high = e.splat(low), e.splat(high)
        rounds = [(e.splat(a), e.splat(b)) for a, b in rounds]
    found = philox.words(index, (low, high), rounds, number(index))
    first, second = found[:2] if i.attr == 0 else found[2:]
    if i.dtype == "f32":
        x = e.cast(first >> 8, "f32")
        return x * e.const(x, 2.0**-24)
    x = e.cast(((first >> 5) << 26) + (second >> 6), "f64")
    return x * e.const(x, 2.0**-53)


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
