"""What is known of half-type values before they run: which grid they lie on, and what their NaNs look like.

A half type's value is an f32 on the grid of that type (ir.py, Note [Half types live in memory]). Rounding is most of the
work of a bfloat16 chain, so it pays to know where it does nothing, and where it may skip NaN:

Note [Tidy NaN]
Rounding to bfloat16 adds to the low 16 bits and lets the carry run. A NaN survives that if its low 16 bits are zero: no carry can
reach its exponent. Loaded from memory they are zero, arithmetic hands on an operand's NaN (with the quiet bit set) or makes the
processor's default one, and both keep them zero. A value is *tidy* if its NaNs are; only others need the NaN that rounding gives
made by hand. A run-time scalar is made tidy when a launch begins.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from adaptive_eager.kernels.ir import Inst, Kernel

HALVES = ("bf16", "f16")
NOWHERE: frozenset[str] = frozenset()
SAME = frozenset({"neg", "abs", "copysign"})
"""Results lie where the first argument does."""
AMONG = frozenset({"min", "max"})
"""Results are one of the arguments."""
HANDS_ON = frozenset(
    {"add", "sub", "mul", "div", "fma", "sqrt", "rint", "floor", "ceil", "trunc", *SAME, *AMONG}
)
"""NaNs of the result are an argument's or the processor's."""


@dataclass(frozen=True, slots=True)
class Fact:
    """grids: half types that hold each value exactly. tidy: Note [Tidy NaN]."""

    grids: frozenset[str] = NOWHERE
    tidy: bool = False


UNKNOWN = Fact()


def fact(inst: Inst, args: Sequence[Fact], memory: str | None = None) -> Fact:
    """What is known of an instruction's value, of its arguments' and, for a load, its operand's dtype."""
    match inst.op:
        case "load" | "fload":
            return Fact(frozenset({memory}), True) if memory in HALVES else UNKNOWN
        case "scalar" | "iota" | "random":
            return Fact(NOWHERE, True)
        case "cast":
            return Fact(NOWHERE, args[0].tidy)
        case "const":
            return Fact(_grids(float(inst.attr)), True) if inst.dtype == "f32" else UNKNOWN  # type: ignore[arg-type]
        case "round":
            return Fact(frozenset({str(inst.attr)}), inst.attr == "bf16" or args[0].tidy)
        case "select" if inst.dtype == "f32":
            return Fact(args[1].grids & args[2].grids, args[1].tidy and args[2].tidy)
    if inst.dtype != "f32":
        return UNKNOWN
    grids = NOWHERE
    if inst.op in SAME:
        grids = args[0].grids
    elif inst.op in AMONG:
        grids = args[0].grids & args[1].grids
    return Fact(grids, inst.op in HANDS_ON and all(a.tidy for a in args))


def facts(kernel: Kernel) -> list[Fact]:
    """Of each value of a kernel."""
    out: list[Fact] = []
    for i in kernel.insts:
        memory = None
        if i.op in ("load", "fload"):
            assert isinstance(i.attr, int)
            memory = kernel.operands[i.attr].dtype
        out.append(fact(i, [out[a] for a in i.args], memory))
    return out


def _grids(v: float) -> frozenset[str]:
    """The half types that hold a constant exactly."""
    out = set()
    try:
        if struct.unpack("<I", struct.pack("<f", v))[0] & 0xFFFF == 0:
            out.add("bf16")
        if struct.unpack("<e", struct.pack("<e", v))[0] == v:
            out.add("f16")
    except OverflowError:
        pass
    return frozenset(out)
