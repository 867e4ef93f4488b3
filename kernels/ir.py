"""Loop IR: what one fused kernel does, as a list of instructions over rows.

Every kernel has the same shape: *rows*, and in each row *columns*. Rows are the product of one or more outer
dims; columns are the one inner dim that runs through the vector lanes. A flat pointwise kernel over N elements is the
same thing with rows of `FLAT_COLS` elements and a short last row. Sizes, strides, addresses and scalars are run-time
values, so a kernel's text (its cache key) depends on structure alone: ranks, dtypes, which inner strides are 0 or 1.

A value lives on one of four levels:

    uniform   one value for the launch           scalar, const
    row       one value for each row             load of a "zero" operand, row reductions, outer iota
    elem      one value for each column of a row load of a "unit"/"any" operand, inner iota
    finish    one value (of a row value) or one for each column (of an elem value) for the launch: `total`

Pointwise instructions live on the highest level of their arguments. `finish` does not mix with row or elem:
it is computed after all rows are done, in an order fixed by the shape.

Note [Row stages]
A row reduction's result is known only after a pass over the row. Code generation splits a row's elem instructions into
stages, one for each depth of reduction, and loops over the columns once a stage. A store to an operand that is also
loaded happens in the last stage, after that lane block's loads.

Note [Half types live in memory]
No value has dtype f16 or bf16. Loads widen to f32, stores round to nearest even, and `round` (attr "bf16" or "f16")
rounds an f32 value onto the half grid, so a chain fused in registers has the bits of one that went through memory.

Note [Fixed reduction order]
Sums of floats accumulate in f64. Lane l of 32 accumulates columns l, l+32, ...; absent lanes hold the identity (-0.0 for
sums, so that signs of zero survive); the tree 32→16→8→4→2→1 adds the upper half to the lower. `total` accumulates the rows of
a task in order, then the tasks in order; a task is `rows_per_task(rows, cols)` rows, whatever the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attr = int | float | str | None
Inner = Literal["unit", "zero", "any", "turn"]
Level = Literal["uniform", "row", "elem", "finish"]

FLAT_COLS = 4096
"""Columns of a row of a flat kernel, in elements."""

MEMORY_DTYPES = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool")
VALUE_DTYPES = ("f64", "f32", "i64", "i32", "i16", "i8", "u8", "bool")
ITEMSIZE = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
}
FLOATS = frozenset({"f64", "f32"})
INTS = frozenset({"i64", "i32", "i16", "i8", "u8"})

SOURCES = frozenset({"load", "fload", "scalar", "const", "iota"})
"""load k: operand k at this row/column. fload k: operand k at finish. scalar k: run-time scalar k (uniform).
const v. iota "inner" (elem, i64) or iota d (row, i64): the index along that dim."""
ARITHMETIC = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "abs",
        "min",
        "max",
        "fma",
        "sqrt",
        "rint",
        "floor",
        "ceil",
        "trunc",
        "copysign",
    }
)
"""IEEE arithmetic on floats, wrapping on ints (no div, fma or rounding there). min and max keep NaN. div is for floats."""
COMPARE = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
"""Result bool. ne with NaN is true, all others false."""
LOGIC = frozenset({"and", "or", "xor", "not", "select"})
"""Bitwise on ints and bool; select(cond, a, b)."""
MATH = frozenset(
    {
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "tanh",
        "sigmoid",
        "erf",
        "sin",
        "cos",
        "tan",
        "pow",
        "sinh",
        "cosh",
        "asin",
        "acos",
        "atan",
        "atan2",
        "erfc",
    }
)
"""Transcendentals on f32 and f64; their definitions are `vmath`'s."""
RANDOM = frozenset({"random"})
"""random(index, seed, offset), all i64: uniform in [0, 1) on the grid of 2^-24 (f32) or 2^-53 (f64), by `philox`. attr 0 or 1:
which of two independent draws."""
CONVERT = frozenset({"cast", "round"})
"""cast: to the inst's dtype (float→int truncates; anything→bool is `!= 0`). round: f32 onto the grid of attr."""
ROW_REDUCE = frozenset({"sum", "prod", "rmax", "rmin"})
"""elem → row. sum: f32/f64 → f64, ints/bool → i64. rmax/rmin keep dtype and NaN. prod: f64 or i64."""
TOTAL = frozenset({"total"})
"""total: sum over all rows of a row or elem value; floats → f64, ints/bool → i64."""
OPS = (
    SOURCES
    | ARITHMETIC
    | COMPARE
    | LOGIC
    | MATH
    | RANDOM
    | CONVERT
    | ROW_REDUCE
    | TOTAL
    | {"store"}
)


@dataclass(frozen=True, slots=True)
class Operand:
    """An address in HBM seen through strides: what a kernel loads from or stores to."""

    dtype: str
    inner: Inner
    """Stride along the columns in elements: 1, 0, or given at run time. "turn" is given at run time, and the stride
    along the last outer dim is 1: a transposed operand, read in blocks of rows (loads only)."""


@dataclass(frozen=True, slots=True)
class Inst:
    """One instruction; its position in `Kernel.insts` is the name of its value."""

    op: str
    args: tuple[int, ...]
    dtype: str
    attr: Attr = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fused loop nest, free of sizes.

    outer: number of outer dims, at least 1. scalars: "f64" or "i64", one for each run-time scalar.
    """

    outer: int
    operands: tuple[Operand, ...]
    scalars: tuple[str, ...]
    insts: tuple[Inst, ...]

    def __str__(self) -> str:
        lines = [f"kernel outer={self.outer} {{"]
        lines += [f"  @{k} = operand {o.dtype} {o.inner}" for k, o in enumerate(self.operands)]
        lines += [f"  ${k} = scalar {s}" for k, s in enumerate(self.scalars)]
        for n, i in enumerate(self.insts):
            attr = "" if i.attr is None else f"[{i.attr!r}]"
            args = ", ".join(f"%{a}" for a in i.args)
            lines.append(f"  %{n} = {i.op}{attr} {args} : {i.dtype}".replace("  :", " :"))
        return "\n".join([*lines, "}"])


@dataclass(frozen=True, slots=True)
class Space:
    """The sizes a launch runs over; everything here is a run-time value.

    outer: sizes of the outer dims. cols: columns of a full row. numel: elements in all; a last row may be
    short (numel < rows * cols) only where len(outer) == 1. strides: for each operand its outer strides then its
    inner stride, in elements.
    """

    outer: tuple[int, ...]
    cols: int
    numel: int
    strides: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        n = 1
        for size in self.outer:
            n *= size
        return n


def pruned(kernel: Kernel) -> Kernel:
    """The kernel without instructions whose results reach no memory; operands and scalars stay."""
    insts = kernel.insts
    live: set[int] = set()
    for n in range(len(insts) - 1, -1, -1):
        if insts[n].op == "store" or n in live:
            live |= {n, *insts[n].args}
    if len(live) == len(insts):
        return kernel
    number = {n: k for k, n in enumerate(sorted(live))}
    kept = [
        Inst(i.op, tuple([number[a] for a in i.args]), i.dtype, i.attr)
        for i in (insts[n] for n in sorted(live))
    ]
    return Kernel(kernel.outer, kernel.operands, kernel.scalars, tuple(kept))


def rows_per_task(rows: int, cols: int) -> int:
    """Rows that one task runs through, fixed by the shape alone (Note [Fixed reduction order])."""
    return max(1, min(rows, 16384 // max(1, cols), 1024))


def levels(kernel: Kernel) -> list[Level]:
    """The level of each value; `store` has the level it runs at."""
    order: tuple[Level, ...] = ("uniform", "row", "elem", "finish")
    out: list[Level] = []
    for inst in kernel.insts:
        match inst.op:
            case "scalar" | "const":
                out.append("uniform")
            case "load":
                assert isinstance(inst.attr, int)
                out.append("row" if kernel.operands[inst.attr].inner == "zero" else "elem")
            case "iota":
                out.append("elem" if inst.attr == "inner" else "row")
            case "fload" | "total":
                out.append("finish")
            case "sum" | "prod" | "rmax" | "rmin":
                out.append("row")
            case "store":
                assert isinstance(inst.attr, int)
                of = out[inst.args[0]]
                narrow = kernel.operands[inst.attr].inner == "zero"
                out.append(of if of == "finish" else "row" if narrow else "elem")
            case _:
                out.append(max((out[a] for a in inst.args), key=order.index, default="uniform"))
    return out


def stages(kernel: Kernel) -> list[int]:
    """How many row reductions deep each value is (Note [Row stages])."""
    out: list[int] = []
    for inst in kernel.insts:
        depth = max((out[a] for a in inst.args), default=0)
        out.append(depth + 1 if inst.op in ROW_REDUCE else depth)
    return out


class InvalidKernel(ValueError):
    """A kernel that breaks a rule of the IR; names the instruction and the rule."""


def verify(kernel: Kernel) -> None:
    """Check the IR's invariants.

    Raises:
        InvalidKernel: with the text of the offending instruction.
    """

    def fail(n: int, rule: str) -> None:
        raise InvalidKernel(f"%{n} = {kernel.insts[n]}: {rule}")

    for n, inst in enumerate(kernel.insts):
        if inst.op not in OPS:
            fail(n, "unknown op")
        if any(a >= n or a < 0 for a in inst.args):
            fail(n, "an argument is not an earlier value")
    at = levels(kernel)
    for n, inst in enumerate(kernel.insts):
        if any(kernel.insts[a].op == "store" for a in inst.args):
            fail(n, "a store has no value")
        if inst.op != "store" and inst.dtype not in VALUE_DTYPES:
            fail(n, "not a value dtype (Note [Half types live in memory])")
        kinds = {at[a] for a in inst.args}
        if "finish" in kinds and kinds & {"row", "elem"}:
            fail(n, "mixes finish with row or elem values")
        if inst.op in ROW_REDUCE and "finish" in kinds:
            fail(n, "row reduction of a finish value")
        if inst.op == "store" and kernel.operands[inst.attr].inner == "turn":  # type: ignore[index]
            fail(n, "a transposed operand is only read")
        if inst.op == "store" and at[n] == "row" and at[inst.args[0]] == "elem":
            fail(n, "an elem value cannot go to an operand with inner stride 0")
        if inst.op in ARITHMETIC | COMPARE and len({kernel.insts[a].dtype for a in inst.args}) > 1:
            fail(n, "arguments differ in dtype")
