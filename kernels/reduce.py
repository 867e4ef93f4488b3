"""Row reductions: lanes that accumulate, and the tree that makes one value of them.

The order is that of Note [Fixed reduction order] (ir.py). A state is a list of LLVM values that a loop
over blocks carries.

Note [NaN beside the extremum]
`llvm.maximum` costs six instructions where the processor's own maximum is one. So the lanes keep
`x if x > best else best`, which never takes a NaN, and a second value remembers whether one was seen:
an "unordered" comparison of a block's lower half with its upper tells for both. One NaN makes the
result NaN; which zero wins among equal ones is fixed by the order, not by sign.
"""

from __future__ import annotations

from typing import Any

from adaptive_eager.kernels.ir import FLOATS, Inst
from adaptive_eager.kernels.lanes import I1, I32, VALUE, Emit, Lanes, constant, undefined
from llvmlite import ir


def zero(dtype: str) -> float:
    """What adds nothing, not even to -0.0."""
    return -0.0 if dtype in FLOATS else 0


def identity(i: Inst) -> float:
    """What an absent lane holds."""
    if i.op == "prod":
        return 1
    if i.op == "sum":
        return zero(i.dtype)
    if i.dtype in FLOATS:
        return float("-inf") if i.op == "rmax" else float("inf")
    unsigned = i.dtype in ("u8", "bool")
    bits = int(VALUE[i.dtype].width)
    low, high = (0, (1 << bits) - 1) if unsigned else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return low if i.op == "rmax" else high


def _watches_nan(i: Inst) -> bool:
    return i.op in ("rmax", "rmin") and i.dtype in FLOATS


def _combine(e: Emit, i: Inst, x: Lanes, y: Lanes) -> Lanes:
    if i.op == "sum":
        return x + y
    if i.op == "prod":
        return x * y
    if _watches_nan(i):
        return e.select(y > x if i.op == "rmax" else y < x, y, x)
    return e.extreme("max" if i.op == "rmax" else "min", x, y)


def _halves(e: Emit, v: Any) -> tuple[Any, Any]:
    half = v.type.count // 2
    picks = ([*range(half)], [*range(half, 2 * half)])
    lower, upper = (
        e.b.shuffle_vector(v, undefined(v.type), ir.Constant(ir.VectorType(I32, half), p))
        for p in picks
    )
    return lower, upper


def start(e: Emit, i: Inst) -> list[Any]:
    """Lanes of identities."""
    lanes = constant(ir.VectorType(VALUE[i.dtype], e.w), identity(i))
    return [lanes, constant(ir.VectorType(I1, e.w // 2), 0)] if _watches_nan(i) else [lanes]


def step(e: Emit, i: Inst, state: list[Any], x: Lanes, mask: Any) -> list[Any]:
    """The state after one more block."""
    v = e.cast(x, i.dtype).v
    if mask is not None:
        v = e.b.select(mask, v, constant(v.type, identity(i)))
    new = _combine(e, i, Lanes(e, state[0], i.dtype), Lanes(e, v, i.dtype)).v
    if not _watches_nan(i):
        return [new]
    return [new, e.b.or_(state[1], e.b.fcmp_unordered("uno", *_halves(e, v)))]


def result(e: Emit, i: Inst, state: list[Any]) -> Lanes:
    """The lanes' values as one: upper half onto lower half until one is left."""
    v = state[0]
    while v.type.count > 1:
        lower, upper = _halves(e, v)
        v = _combine(e, i, Lanes(e, lower, i.dtype), Lanes(e, upper, i.dtype)).v
    x = Lanes(e, e.b.extract_element(v, ir.Constant(I32, 0)), i.dtype)
    if not _watches_nan(i):
        return x
    return e.select(
        Lanes(e, e.any(Lanes(e, state[1], "bool")), "bool"), e.const(x, float("nan")), x
    )
