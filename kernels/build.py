"""A builder for loop IR: op definitions are plain Python arithmetic over `Val`s, traced into instructions.

    def silu(x: Val) -> Val:
        return x / (1 + exp(-x))

Equal instructions are built once. Python numbers become constants of the other operand's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaptive_eager.kernels.grid import UNKNOWN, Fact, fact
from adaptive_eager.kernels.ir import FLOATS, INTS, Attr, Inst

Number = float | int | bool


@dataclass(frozen=True, slots=True, eq=False)
class Val:
    """A value of a kernel under construction. dtype: one of `ir.VALUE_DTYPES`."""

    b: Builder
    id: int
    dtype: str

    def _with(
        self, op: str, other: Val | Number, swap: bool = False, dtype: str | None = None
    ) -> Val:
        o = self.b.lift(other, self.dtype)
        if o.dtype != self.dtype:
            raise TypeError(f"{op}: {self.dtype} and {o.dtype}")
        x, y = (o, self) if swap else (self, o)
        return self.b.inst(op, (x, y), dtype or self.dtype)

    def __add__(self, o: Val | Number) -> Val:
        return self._with("add", o)

    def __radd__(self, o: Number) -> Val:
        return self._with("add", o, swap=True)

    def __sub__(self, o: Val | Number) -> Val:
        return self._with("sub", o)

    def __rsub__(self, o: Number) -> Val:
        return self._with("sub", o, swap=True)

    def __mul__(self, o: Val | Number) -> Val:
        return self._with("mul", o)

    def __rmul__(self, o: Number) -> Val:
        return self._with("mul", o, swap=True)

    def __truediv__(self, o: Val | Number) -> Val:
        return self._with("div", o)

    def __rtruediv__(self, o: Number) -> Val:
        return self._with("div", o, swap=True)

    def __neg__(self) -> Val:
        return self.b.inst("neg", (self,), self.dtype)

    def __abs__(self) -> Val:
        return self.b.inst("abs", (self,), self.dtype)

    def __and__(self, o: Val | Number) -> Val:
        return self._with("and", o)

    def __or__(self, o: Val | Number) -> Val:
        return self._with("or", o)

    def __xor__(self, o: Val | Number) -> Val:
        return self._with("xor", o)

    def __invert__(self) -> Val:
        return self.b.inst("not", (self,), self.dtype)

    def __lt__(self, o: Val | Number) -> Val:
        return self._with("lt", o, dtype="bool")

    def __le__(self, o: Val | Number) -> Val:
        return self._with("le", o, dtype="bool")

    def __gt__(self, o: Val | Number) -> Val:
        return self._with("gt", o, dtype="bool")

    def __ge__(self, o: Val | Number) -> Val:
        return self._with("ge", o, dtype="bool")

    def eq(self, o: Val | Number) -> Val:
        """Elementwise equality."""
        return self._with("eq", o, dtype="bool")

    def ne(self, o: Val | Number) -> Val:
        """Elementwise inequality; true for NaN."""
        return self._with("ne", o, dtype="bool")

    def to(self, dtype: str) -> Val:
        """Cast to a memory dtype; half types are f32 rounded to their grid."""
        if dtype in ("bf16", "f16"):
            x = self.to("f32")
            return x if self.b.on_grid(x, dtype) else self.b.inst("round", (x,), "f32", dtype)
        return self if dtype == self.dtype else self.b.inst("cast", (self,), dtype)


class Builder:
    """Collects instructions; `insts` is a kernel's body."""

    def __init__(self) -> None:
        self.insts: list[Inst] = []
        self._known: dict[Inst, int] = {}
        self._facts: dict[int, Fact] = {}

    def inst(self, op: str, args: tuple[Val, ...], dtype: str, attr: Attr = None) -> Val:
        """Append an instruction, or find the equal one."""
        i = Inst(op, tuple([a.id for a in args]), dtype, attr)
        key = i if op != "const" else Inst(op, i.args, dtype, repr(attr))
        n = self._known.get(key)
        if n is None:
            n = self._known[key] = len(self.insts)
            self.insts.append(i)
            self._facts[n] = fact(i, [self._facts.get(a, UNKNOWN) for a in i.args])
        return Val(self, n, dtype)

    def on_grid(self, v: Val, dtype: str) -> bool:
        """Whether an f32 value is known to be representable in a half type."""
        return dtype in self._facts[v.id].grids

    def lift(self, x: Val | Number, dtype: str) -> Val:
        """A Python number as a constant; a value as it is."""
        if isinstance(x, Val):
            return x
        return self.const(x, dtype)

    def const(self, x: Number, dtype: str) -> Val:
        """A constant of a value dtype."""
        return self.inst("const", (), dtype, float(x) if dtype in FLOATS else int(x))

    def load(self, operand: int, memory_dtype: str) -> Val:
        """Operand `operand` at the current row and column."""
        half = memory_dtype in ("bf16", "f16")
        v = self.inst("load", (), "f32" if half else memory_dtype, operand)
        self._facts[v.id] = fact(self.insts[v.id], (), memory_dtype)
        return v

    def fload(self, operand: int, memory_dtype: str) -> Val:
        """Operand `operand` at finish level."""
        half = memory_dtype in ("bf16", "f16")
        v = self.inst("fload", (), "f32" if half else memory_dtype, operand)
        self._facts[v.id] = fact(self.insts[v.id], (), memory_dtype)
        return v

    def store(self, v: Val, operand: int) -> None:
        """Write a value to operand `operand`; its memory dtype is the operand's."""
        self.insts.append(Inst("store", (v.id,), v.dtype, operand))

    def scalar(self, number: int, kind: str) -> Val:
        """Run-time scalar `number`, of kind "f64" or "i64"."""
        return self.inst("scalar", (), kind, number)

    def iota(self, axis: int | str = "inner") -> Val:
        """The index along the columns, or along an outer dim."""
        return self.inst("iota", (), "i64", axis)


def fn(op: str, *args: Val) -> Val:
    """A pointwise function of the IR by name; the result has the arguments' dtype."""
    x = args[0]
    return x.b.inst(op, args, x.dtype)


def maximum(x: Val, y: Val | Number) -> Val:
    """The larger one; NaN wins."""
    return x._with("max", y)


def minimum(x: Val, y: Val | Number) -> Val:
    """The smaller one; NaN wins."""
    return x._with("min", y)


def where(cond: Val, x: Val | Number, y: Val | Number) -> Val:
    """x where cond, else y."""
    some = x if isinstance(x, Val) else y
    assert isinstance(some, Val)
    b = cond.b
    u, v = b.lift(x, some.dtype), b.lift(y, some.dtype)
    return b.inst("select", (cond, u, v), u.dtype)


def fma(x: Val, y: Val, z: Val) -> Val:
    """x * y + z with one rounding."""
    return x.b.inst("fma", (x, y, z), x.dtype)


def random(index: Val, seed: Val, offset: Val, dtype: str, draw: int = 0) -> Val:
    """A random number in [0, 1) of dtype f32 or f64 for each index, seed and offset; draw 1 is independent of draw 0."""
    return index.b.inst("random", (index, seed, offset), dtype, draw)


def row_sum(x: Val) -> Val:
    """Sum over the columns of a row: f64 for floats, i64 for ints and bools."""
    return x.b.inst("sum", (x,), "f64" if x.dtype in FLOATS else "i64")


def row_max(x: Val) -> Val:
    """Largest element of a row; NaN wins."""
    return x.b.inst("rmax", (x,), x.dtype)


def row_min(x: Val) -> Val:
    """Smallest element of a row; NaN wins."""
    return x.b.inst("rmin", (x,), x.dtype)


def total(x: Val) -> Val:
    """Sum of a row value over all rows: f64 for floats, i64 for ints and bools."""
    return x.b.inst("total", (x,), "f64" if x.dtype in FLOATS else "i64")


def column_totals(x: Val) -> Val:
    """Sum over all rows for each column, also of a value that is the same in all columns."""
    spread = x.b.inst("select", (x.b.iota("inner") >= 0, x, x), x.dtype)
    return total(spread)


__all__ = [
    "FLOATS",
    "INTS",
    "Builder",
    "Val",
    "column_totals",
    "fma",
    "fn",
    "maximum",
    "minimum",
    "random",
    "row_max",
    "row_min",
    "row_sum",
    "total",
    "where",
]
