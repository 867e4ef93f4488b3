"""The arithmetic of the loop IR on numpy arrays, with the bits of generated code, NaN payloads apart.

It shares `vmath`'s definitions with code generation and nothing else, so that each judges the other.
Values have the IR's dtypes: f32 for half types, `bool` arrays for bool.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from adaptive_eager.kernels import philox, vmath
from adaptive_eager.kernels.ir import FLOATS, MATH, Inst

Array = npt.NDArray[Any]
VALUE: dict[str, type[np.generic]] = {
    "f64": np.float64,
    "f32": np.float32,
    "i64": np.int64,
    "i32": np.int32,
    "i16": np.int16,
    "i8": np.int8,
    "u8": np.uint8,
    "bool": np.bool_,
}
MEMORY: dict[str, type[np.generic]] = {
    **VALUE,
    "f16": np.float16,
    "bf16": np.uint16,
    "bool": np.uint8,
}
"""numpy types of elements in memory."""


def widen(v: Array, memory: str) -> Array:
    """What lies in memory, as a value."""
    if memory == "bf16":
        return (v.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if memory == "f16":
        return v.astype(np.float32)
    return np.not_equal(v, 0) if memory == "bool" else v


def narrow(x: Array, dtype: str, memory: str) -> Array:
    """A value of an IR dtype as it lies in memory; half types round to nearest even."""
    if memory == "bf16":
        f = cast(x, dtype, "f32")
        u = np.ascontiguousarray(f).view(np.uint32)
        odd = (u >> np.uint32(16)) & np.uint32(1)
        r = ((u + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(f), np.uint16(0x7FC0), r)
    if memory == "f16":
        with np.errstate(all="ignore"):
            return cast(x, dtype, "f32").astype(np.float16)
    out = cast(x, dtype, memory)
    return out.astype(np.uint8) if memory == "bool" else out


def cast(x: Array, a: str, to: str) -> Array:
    """A value in another dtype; floats that i64 can't hold become its smallest value, cut down."""
    if a == to:
        return x
    if to == "bool":
        return np.not_equal(x, 0)
    with np.errstate(all="ignore"):
        return _cast(x, a, to)


def _cast(x: Array, a: str, to: str) -> Array:
    if a in FLOATS and to not in FLOATS:
        two63 = 9223372036854775808.0
        held = (x >= -two63) & (x < two63)
        v = np.where(held, np.where(held, x, 0).astype(np.int64), np.int64(-(1 << 63)))
        return v.astype(VALUE[to])
    return x.astype(VALUE[to])


def fma32(x: Array, y: Array, z: Array) -> Array:
    """x * y + z of f32, rounded once: exact in f64 but for the sum, which is rounded to odd."""
    p = np.asarray(x, np.float64) * np.asarray(y, np.float64)
    c = np.asarray(z, np.float64)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    even = (np.asarray(s).view(np.int64) & 1) == 0
    inexact = np.isfinite(s) & (error != 0) & ~np.isnan(error)
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(inexact & even, np.nextafter(s, toward), s)
    return odd.astype(np.float32)


@cache
def libm(name: str, arity: int) -> Callable[..., Any]:
    """A function of the C library, element by element, in f64."""
    f = getattr(ctypes.CDLL(ctypes.util.find_library("m") or None), name)
    f.restype, f.argtypes = ctypes.c_double, [ctypes.c_double] * arity
    call: Callable[..., Any] = np.frompyfunc(f, arity, 1)
    return call


class NumOps:
    """`vmath.Ops` on f32 and i32 arrays."""

    fma = staticmethod(fma32)

    def select(self, c: Array, x: Array, y: Array) -> Array:
        return np.where(c, x, y)

    def bits(self, x: Array) -> Array:
        return np.ascontiguousarray(x, np.float32).view(np.int32)

    def float_of_bits(self, i: Array) -> Array:
        return np.ascontiguousarray(i, np.int32).view(np.float32)

    def to_float(self, i: Array) -> Array:
        return i.astype(np.float32)

    def abs(self, x: Array) -> Array:
        return np.abs(x)

    def copysign(self, x: Array, y: Array) -> Array:
        return np.copysign(x, y)

    def ldexp(self, x: Array, n: Array) -> Array:
        return np.ldexp(x, n).astype(np.float32)

    def const(self, like: Array, v: float) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(v, np.float32)

    def iconst(self, like: Array, v: int) -> Array:
        return np.asarray(v, np.int32)

    def wide(self, name: str, *args: Array) -> Array:
        wide = np.broadcast_arrays(*[np.asarray(a, np.float64) for a in args])
        return np.asarray(libm(name, len(args))(*wide), np.float64).astype(np.float32)


OPS = NumOps()


def extreme(op: str, x: Array, y: Array, dtype: str) -> Array:
    """min or max; NaN wins, and -0.0 is less than 0.0."""
    if dtype not in FLOATS:
        return np.minimum(x, y) if op == "min" else np.maximum(x, y)
    first = np.signbit(x) if op == "min" else ~np.signbit(x)
    best = np.where((x < y) if op == "min" else (x > y), x, y)
    best = np.where(x == y, np.where(first, x, y), best)
    return np.where(np.isnan(x) | np.isnan(y), VALUE[dtype](np.nan), best)


_PAIRS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "copysign": np.copysign,
}
_ONE: dict[str, Callable[..., Array]] = {
    "sqrt": np.sqrt,
    "rint": np.rint,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "abs": np.abs,
    "not": np.invert,
}
_BIT = {"add": np.bitwise_xor, "sub": np.bitwise_xor, "mul": np.bitwise_and}
"""Arithmetic on one bit."""


def compute(i: Inst, args: Sequence[Array], dtypes: Sequence[str]) -> Array:
    """The value of a pointwise instruction. dtypes: of its arguments."""
    with np.errstate(all="ignore"):
        return _compute(i, args, dtypes)


def _compute(i: Inst, args: Sequence[Array], dtypes: Sequence[str]) -> Array:
    x, of = args[0], dtypes[0]
    if i.op in ("min", "max"):
        return extreme(i.op, x, args[1], of)
    if of == "bool" and i.op in _BIT:
        return _BIT[i.op](x, args[1])
    if i.op in _PAIRS:
        return _PAIRS[i.op](x, args[1])
    if i.op in _ONE:
        return _ONE[i.op](x)
    match i.op:
        case "neg":
            return np.negative(x) if of in FLOATS else np.subtract(VALUE[of](0), x)
        case "select":
            return np.where(x, args[1], args[2])
        case "fma":
            if of == "f32":
                return fma32(x, args[1], args[2])
            return np.asarray(libm("fma", 3)(x, args[1], args[2]), np.float64)
        case "cast":
            return cast(x, of, i.dtype)
        case "round":
            return widen(narrow(x, of, str(i.attr)), str(i.attr))
        case "random":
            return random(i.attr, i.dtype, *args)
    assert i.op in MATH, i.op
    return _math(i.op, args, of)


def random(draw: Any, dtype: str, index: Array, seed: Array, offset: Array) -> Array:
    """Uniform in [0, 1)."""
    low, high = offset & philox.MASK, (offset >> 32) & philox.MASK
    found = philox.words(
        np.asarray(index, np.int64), (low, high), philox.keys(seed, np.int64), np.int64
    )
    first, second = found[:2] if draw == 0 else found[2:]
    if dtype == "f32":
        return np.asarray((first >> 8).astype(np.float32) * np.float32(2.0**-24))
    return np.asarray((((first >> 5) << 26) + (second >> 6)).astype(np.float64) * 2.0**-53)


def _math(op: str, args: Sequence[Array], of: str) -> Array:
    x = args[0]
    if of == "f32" and op in vmath.NARROW:
        return np.asarray(vmath.NARROW[op](OPS, x), np.float32)
    if of == "f32" and op in vmath.PERIODIC:
        far = ~(np.abs(x) < np.float32(vmath.PERIODIC_LIMIT))
        fast = vmath.sincos(OPS, x, vmath.PERIODIC[op])
        slow = fast if not far.any() else OPS.wide(op, np.where(far, x, np.float32(0)))
        return np.where(far, slow, fast).astype(np.float32)
    if op == "sigmoid":
        one = VALUE[of](1)
        return np.asarray(one / (one + _libm64("exp", [np.negative(x)], of)))
    return _libm64(op, args, of)


def _libm64(op: str, args: Sequence[Array], of: str) -> Array:
    wide = np.broadcast_arrays(*[np.asarray(a, np.float64) for a in args])
    return np.asarray(libm(op, len(args))(*wide), np.float64).astype(VALUE[of])
