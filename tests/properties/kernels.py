"""Generated kernels of the loop IR, with memory to run them on: every dtype, level, stride and sharing.

A kernel is drawn instruction by instruction; its operands get random strides (contiguous, strided,
shared by rows or columns) and values with specials among them.
"""

from __future__ import annotations

import ctypes

import numpy as np
from adaptive_eager.kernels import ir
from adaptive_eager.kernels.build import (
    Builder,
    Val,
    column_totals,
    fma,
    fn,
    maximum,
    minimum,
    random,
    row_max,
    row_min,
    row_sum,
    total,
    where,
)
from adaptive_eager.kernels.numops import MEMORY
from hypothesis import strategies as st

COLS = (1, 2, 5, 7, 16, 31, 32, 33, 64, 100, 257, 600, 1500, 3000, 40_000)
"""Columns of a row; the wide ones do not fit into the smallest chips' SBUF."""
FLOAT_OPS = ("add", "sub", "mul", "div", "min", "max", "fma", "where", "copysign")
FLOAT_ONE = ("exp", "log", "tanh", "sigmoid", "erf", "sin", "cos", "exp2", "expm1", "log1p",
             "sqrt", "abs", "neg", "floor", "rint", "silu", "rsqrt", "pow", "square")  # fmt: skip
INT_OPS = ("add", "sub", "mul", "min", "max", "where", "and", "or", "xor")


class Case:
    """A kernel and one launch of it. arrays: memory behind each operand. stored: operands it writes."""

    def __init__(self, kernel, space, arrays, scalars, stored):
        self.kernel, self.space, self.arrays = kernel, space, arrays
        self.scalars, self.stored = scalars, stored

    def __repr__(self):
        return f"{self.kernel}\n{self.space}\nscalars {self.scalars}"

    def pointers(self, arrays):
        return [a.ctypes.data for a in arrays]


def values(rng, dtype, count):
    """Memory of a dtype, specials among its values."""
    kind = MEMORY[dtype]
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(np.uint8)
    if dtype in ir.INTS:
        info = np.iinfo(kind)
        v = rng.integers(-9, 10, count).astype(kind)
        v[rng.random(count) < 0.05] = info.max
        v[rng.random(count) < 0.05] = info.min
        return v
    v = rng.standard_normal(count) * rng.choice([0.1, 1.0, 30.0])
    for special in (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-41, 3e38):
        v[rng.random(count) < 0.01] = special
    if dtype == "bf16":
        with np.errstate(all="ignore"):
            return (v.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return v.astype(kind)


def _pair(op: str, x: Val, y: Val) -> Val:
    match op:
        case "add":
            return x + y
        case "sub":
            return x - y
        case "mul":
            return x * y
        case "div":
            return x / y
        case "min":
            return minimum(x, y)
        case "max":
            return maximum(x, y)
        case "fma":
            return fma(x, y, x)
        case "where":
            return where(x < y, x, y)
        case "and":
            return x & y
        case "or":
            return x | y
        case "xor":
            return x ^ y
    return fn(op, x, y)


def _one(op: str, x: Val) -> Val:
    match op:
        case "abs":
            return abs(x)
        case "neg":
            return -x
        case "silu":
            return x / (1 + fn("exp", -x))
        case "rsqrt":
            return 1 / fn("sqrt", x)
        case "square":
            return x * x
        case "pow":
            return fn("pow", abs(x), x.b.const(0.7, x.dtype))
    return fn(op, x)


class _Drawer:
    """Draws one kernel."""

    def __init__(self, draw, flat: bool) -> None:
        self.draw, self.b = draw, Builder()
        self.flat = flat
        self.operands: list[ir.Operand] = []
        self.shares: list[tuple[bool, ...]] = []
        self.known: list[tuple[Val, str]] = []
        self.scalars: list[str] = []
        self.finish: list[tuple[Val, bool]] = []
        self.stored: set[int] = set()

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def operand(self, dtype: str, inner: str, shares: tuple[bool, ...]) -> int:
        self.operands.append(ir.Operand(dtype, inner))
        self.shares.append(shares)
        return len(self.operands) - 1

    def load(self, outer: int) -> None:
        dtype = self.pick(*ir.MEMORY_DTYPES, "f32", "f32", "bf16")
        if self.flat:
            inner, shares = self.pick("unit", "unit", "unit", "any", "zero"), (False,) * outer
        else:
            inner = self.pick("unit", "unit", "unit", "any", "zero", "turn")
            shares = tuple([self.pick(False, False, True) for _ in range(outer)])
        k = self.operand(dtype, inner, shares)
        self.known.append((self.b.load(k, dtype), "row" if inner == "zero" else "elem"))

    def value(self, level: str | None = None) -> tuple[Val, str]:
        found = [v for v in self.known if level in (None, v[1])]
        return self.draw(st.sampled_from(found[-6:]))

    def step(self, outer: int) -> None:
        x, level = self.value()
        kinds = ("pair", "pair", "one", "one", "cast", "reduce", "reduce", "reduce", "scalar")
        kind = self.pick(*kinds, "iota", "compare", "random")
        if kind == "reduce" and self.flat:
            kind = "one"
        if kind == "pair":
            y, other = self.value()
            y = y.to(x.dtype) if y.dtype != x.dtype else y
            both = "elem" if "elem" in (level, other) else level
            ops = FLOAT_OPS if x.dtype in ir.FLOATS else INT_OPS
            if x.dtype == "bool":
                ops = ("and", "or", "xor", "min", "max")
            self.known.append((_pair(self.pick(*ops), x, y), both))
        elif kind == "one":
            x = x if x.dtype in ir.FLOATS else x.to("f32")
            self.known.append((_one(self.pick(*FLOAT_ONE), x), level))
        elif kind == "cast":
            self.known.append((x.to(self.pick(*ir.MEMORY_DTYPES, "bf16", "f16")), level))
        elif kind == "reduce" and level == "elem":
            if x.dtype == "bool":
                x = x.to("i64")
            op = self.pick("sum", "sum", "max", "min", "prod")
            if op == "prod":
                wide = x.to("f64" if x.dtype in ir.FLOATS else "i64")
                v = self.b.inst("prod", (wide,), wide.dtype)
            else:
                v = {"sum": row_sum, "max": row_max, "min": row_min}[op](x)
            self.known.append((v.to("f32") if self.pick(True, False) else v, "row"))
        elif kind == "scalar":
            t = "f64" if x.dtype in ir.FLOATS else "i64"
            self.scalars.append(t)
            v = self.b.scalar(len(self.scalars) - 1, t)
            if x.dtype != "bool":
                self.known.append((x * v.to(x.dtype), level))
        elif kind == "iota" and not self.flat:
            self.known.append((self.b.iota("inner").to(self.pick("f32", "i64", "i32")), "elem"))
        elif kind == "random" and not self.flat:
            self.scalars += ["i64", "i64"]
            seed, offset = (self.b.scalar(len(self.scalars) - k, "i64") for k in (1, 2))
            index = self.b.iota("inner") + self.b.iota(0) * 1000
            index = self.pick(index, self.b.iota(0))
            at = "row" if index.id == self.b.iota(0).id else "elem"
            found = random(index, seed, offset, self.pick("f32", "f64"), self.pick(0, 1))
            self.known.append((found, at))
        elif kind == "compare":
            y, other = self.value()
            y = y.to(x.dtype) if y.dtype != x.dtype else y
            both = "elem" if "elem" in (level, other) else level
            self.known.append((x.eq(y) if self.pick(True, False) else x < y, both))

    def totals(self) -> None:
        x, level = self.value()
        x = x.to("i64") if x.dtype == "bool" else x
        if level == "elem" or self.pick(True, False):
            self.finish.append((column_totals(x), True))
        else:
            self.finish.append((total(x), False))

    def store(self, v: Val, level: str, outer: int, wide: bool = True) -> None:
        own = (v.dtype,) * 8  # every bit of a value shows only in its own type
        dtype = self.pick(*ir.MEMORY_DTYPES, "bf16", *own)
        if level == "finish":
            inner, shares = ("unit" if wide else "zero"), (True,) * outer
        elif level == "row" and not self.flat and self.pick(True, False):
            inner, shares = "zero", (False,) * outer
        else:
            inner, shares = "unit", (False,) * outer
        k = self.operand(dtype, inner, shares)
        self.stored.add(k)
        self.b.store(v.to("f32") if dtype in ("bf16", "f16") and v.dtype != "f64" else v, k)


@st.composite
def cases(draw):
    """A verified kernel, its space, memory and scalars."""
    flat = draw(st.sampled_from([False, False, True]))
    outer = 1 if flat else draw(st.integers(1, 3))
    d = _Drawer(draw, flat)
    for _ in range(draw(st.integers(1, 4))):
        d.load(outer)
    for _ in range(draw(st.integers(1, 9))):
        d.step(outer)
    if not flat and draw(st.integers(0, 2)) == 0:
        d.totals()
    for v, wide in d.finish:
        v = v * 2 if draw(st.booleans()) else v
        d.store(v, "finish", outer, wide)
    for v, level in draw(st.lists(st.sampled_from(d.known), min_size=1, max_size=2, unique_by=id)):
        d.store(v, level, outer)
    kernel = ir.Kernel(outer, tuple(d.operands), tuple(d.scalars), tuple(d.b.insts))
    ir.verify(kernel)
    return Case(kernel, *memory(draw, kernel, d))


def memory(draw, kernel, d):
    """A space and memory behind the operands."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    if d.flat:
        numel = draw(st.sampled_from([1, 7, 300, 4096, 4097, 20_000]))
        cols = min(numel, ir.FLAT_COLS)
        sizes = (-(-numel // cols),)
    else:
        cols = draw(st.sampled_from(COLS))
        sizes = tuple(
            draw(st.lists(st.integers(1, 6), min_size=kernel.outer, max_size=kernel.outer))
        )
        sizes = (sizes[0] * draw(st.sampled_from([1, 1, 30, 150])), *sizes[1:])
        if cols > 300:
            few = 150 if cols < 1000 else 2
            sizes = (min(sizes[0], few), *[min(n, 2) for n in sizes[1:]])
        elif kernel.outer == 3:
            sizes = (min(sizes[0], 12), *sizes[1:])
        numel = cols * int(np.prod(sizes))
    arrays, strides = [], []
    for k, o in enumerate(kernel.operands):
        step = {"unit": 1, "zero": 0, "any": int(rng.integers(2, 4)), "turn": 0}[o.inner]
        if d.flat:
            outer = (step * cols if sizes[0] > 1 else 0,)
            reach = (sizes[0] * cols) * max(1, step)
        elif (
            o.inner == "turn"
        ):  # the last outer dim is contiguous, then the columns, then the others
            step = sizes[-1] + int(rng.integers(0, 3))
            reach, steps = step * cols, [1]
            for size, shared in zip(reversed(sizes[:-1]), reversed(d.shares[k][:-1]), strict=True):
                steps.append(0 if shared else reach)
                reach *= 1 if shared else size
            outer = tuple(reversed(steps))
        else:
            reach, steps = max(1, cols * step), []
            for size, shared in zip(reversed(sizes), reversed(d.shares[k]), strict=True):
                steps.append(0 if shared else reach)
                reach *= 1 if shared else size
            outer = tuple(reversed(steps))
        strides.append((*outer, step))
        arrays.append(values(rng, o.dtype, reach + 64))
    scalars = [float(rng.standard_normal()) if t == "f64" else int(rng.integers(-5, 6))
               for t in kernel.scalars]  # fmt: skip
    return ir.Space(sizes, cols, numel, tuple(strides)), arrays, scalars, d.stored


def same(a, b, dtype):
    """Whether two memories have the same bits, any NaN being any other."""
    if dtype == "bf16":
        x, y = (v.astype(np.uint32) << 16 for v in (a, b))
        a, b = x.view(np.float32), y.view(np.float32)
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[a.itemsize]
    return bool(((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))).all())


def bytes_at(address, nbytes):
    """A copy of memory."""
    return ctypes.string_at(address, nbytes)
