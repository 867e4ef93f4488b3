"""LLVM values with arithmetic: 32 lanes side by side, or one scalar, under the same operators.

`Lanes` wraps a value; `Emit` implements `vmath.Ops` on it and the loads, stores and casts of the loop IR. Vectors wider than a
register are split by LLVM, which hides latencies by itself. Nothing here allows LLVM to change a bit: no fast-math flags.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

from adaptive_eager.kernels.ir import FLOATS
from llvmlite import ir

LIBM = "ae_"
"""Goes before the names of libm's functions: LLVM would simplify calls that it knows (pow(x, 2) to x * x), and whether it
sees the argument depends on what was fused."""
W = 32
"""Lanes of a block of columns."""

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()
VALUE = {"f64": F64, "f32": F32, "i64": I64, "i32": I32, "i16": I16, "i8": I8, "u8": I8, "bool": I1}
MEMORY = {**VALUE, "f16": F16, "bf16": I16, "bool": I8}
_SUFFIX = {
    F64: "f64",
    F32: "f32",
    F16: "f16",
    I64: "i64",
    I32: "i32",
    I16: "i16",
    I8: "i8",
    I1: "i1",
}


def suffix(t: Any) -> str:
    """The name of a type inside an intrinsic's name."""
    return f"v{t.count}{_SUFFIX[t.element]}" if isinstance(t, ir.VectorType) else _SUFFIX[t]


def constant(t: Any, v: float) -> Any:
    """A constant of a scalar or vector type."""
    e = t.element if isinstance(t, ir.VectorType) else t
    if isinstance(e, ir.IntType):
        c = ir.Constant(e, int(v) & ((1 << e.width) - 1) if e.width > 1 else bool(v))
    else:
        if e == F32:
            v = _f32(v)
        c = ir.Constant(e, v)
    return ir.Constant(t, [c] * t.count) if isinstance(t, ir.VectorType) else c


def _f32(v: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", v))[0])
    except OverflowError:
        return float("inf") if v > 0 else float("-inf")


class Lanes:
    """A value: `v` in LLVM, `dtype` in the loop IR. i32 inside vmath, and for i32 values."""

    __slots__ = ("dtype", "e", "v")

    def __init__(self, e: Emit, v: Any, dtype: str) -> None:
        self.e, self.v, self.dtype = e, v, dtype

    def _op(self, op: str, y: Lanes) -> Lanes:
        return self.e.arith(op, self, y)

    def __add__(self, y: Lanes) -> Lanes:
        return self._op("add", y)

    def __sub__(self, y: Lanes) -> Lanes:
        return self._op("sub", y)

    def __mul__(self, y: Lanes) -> Lanes:
        return self._op("mul", y)

    def __truediv__(self, y: Lanes) -> Lanes:
        return self._op("div", y)

    def __and__(self, y: Lanes) -> Lanes:
        return self._op("and", y)

    def __or__(self, y: Lanes) -> Lanes:
        return self._op("or", y)

    def __xor__(self, y: Lanes) -> Lanes:
        return self._op("xor", y)

    def __neg__(self) -> Lanes:
        return self.e.neg(self)

    def __lshift__(self, n: int) -> Lanes:
        return Lanes(self.e, self.e.b.shl(self.v, constant(self.v.type, n)), self.dtype)

    def __rshift__(self, n: int) -> Lanes:
        return Lanes(self.e, self.e.b.ashr(self.v, constant(self.v.type, n)), self.dtype)

    def __gt__(self, y: Lanes) -> Lanes:
        return self.e.compare("gt", self, y)

    def __lt__(self, y: Lanes) -> Lanes:
        return self.e.compare("lt", self, y)

    def __eq__(self, y: object) -> Lanes:  # type: ignore[override]
        assert isinstance(y, Lanes)
        return self.e.compare("eq", self, y)

    def __ne__(self, y: object) -> Lanes:  # type: ignore[override]
        assert isinstance(y, Lanes)
        return self.e.compare("ne", self, y)

    __hash__ = None  # type: ignore[assignment]


class Emit:
    """Emits instructions at a builder's position; implements `vmath.Ops`."""

    SYMBOLS: ClassVar = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

    def __init__(self, module: ir.Module, b: ir.IRBuilder) -> None:
        self.m, self.b = module, b

    # -- intrinsics -----------------------------------------------------------------------------

    def call(self, name: str, result: Any, args: list[Any]) -> Any:
        """Call an intrinsic or a libm function by name."""
        f = self.m.globals.get(name)
        if f is None:
            f = ir.Function(self.m, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(f, args)

    def un(self, name: str, x: Lanes) -> Lanes:
        """An overloaded LLVM intrinsic of one or more equal arguments."""
        return Lanes(self, self.call(f"llvm.{name}.{suffix(x.v.type)}", x.v.type, [x.v]), x.dtype)

    def bin(self, name: str, x: Lanes, y: Lanes) -> Lanes:
        """The same for two arguments."""
        return Lanes(
            self, self.call(f"llvm.{name}.{suffix(x.v.type)}", x.v.type, [x.v, y.v]), x.dtype
        )

    # -- vmath.Ops -------------------------------------------------------------------------------

    def fma(self, x: Lanes, y: Lanes, z: Lanes) -> Lanes:
        return Lanes(
            self, self.call(f"llvm.fma.{suffix(x.v.type)}", x.v.type, [x.v, y.v, z.v]), x.dtype
        )

    def select(self, c: Lanes, x: Lanes, y: Lanes) -> Lanes:
        return Lanes(self, self.b.select(c.v, x.v, y.v), x.dtype)

    def bits(self, x: Lanes) -> Lanes:
        return Lanes(self, self.b.bitcast(x.v, self.like(x.v.type, I32)), "i32")

    def float_of_bits(self, i: Lanes) -> Lanes:
        return Lanes(self, self.b.bitcast(i.v, self.like(i.v.type, F32)), "f32")

    def to_float(self, i: Lanes) -> Lanes:
        return Lanes(self, self.b.sitofp(i.v, self.like(i.v.type, F32)), "f32")

    def abs(self, x: Lanes) -> Lanes:
        if x.dtype in FLOATS:
            return self.un("fabs", x)
        return self.select(self.compare("lt", x, self.iconst(x, 0)), self.neg(x), x)

    def copysign(self, x: Lanes, y: Lanes) -> Lanes:
        return self.bin("copysign", x, y)

    def const(self, like: Lanes, v: float) -> Lanes:
        return Lanes(self, constant(like.v.type, v), like.dtype)

    iconst = const

    def wide(self, name: str, *args: Lanes) -> Lanes:
        """libm's function lane by lane in f64."""
        wide = [self.cast(a, "f64") for a in args]
        r = Lanes(
            self,
            self.each(lambda xs: self.call(LIBM + name, F64, xs), [a.v for a in wide], F64),
            "f64",
        )
        return self.cast(r, args[0].dtype)

    def each(self, f: Any, values: list[Any], element: Any) -> Any:
        """Apply a scalar function to each lane."""
        t = values[0].type
        if not isinstance(t, ir.VectorType):
            return f(values)
        out = ir.Constant(ir.VectorType(element, t.count), ir.Undefined)
        for k in range(t.count):
            lane = ir.Constant(I32, k)
            out = self.b.insert_element(
                out, f([self.b.extract_element(v, lane) for v in values]), lane
            )
        return out

    def if_any(self, c: Lanes, slow: Any, fast: Lanes) -> Lanes:
        """`slow()` in the lanes where c is set, `fast` in the others: a lane's value never depends on its neighbours.

        The slow work is skipped by a branch where no lane needs it.
        """
        b = self.b
        t = c.v.type
        some = (
            self.call(f"llvm.vector.reduce.or.{suffix(t)}", I1, [c.v])
            if isinstance(t, ir.VectorType)
            else c.v
        )
        before = b.block
        rare, after = b.append_basic_block("rare"), b.append_basic_block("after")
        b.cbranch(some, rare, after)
        b.position_at_end(rare)
        r = self.select(c, slow(), fast)
        end = b.block
        b.branch(after)
        b.position_at_end(after)
        phi = b.phi(fast.v.type)
        phi.add_incoming(fast.v, before)
        phi.add_incoming(r.v, end)
        return Lanes(self, phi, fast.dtype)

    # -- arithmetic of the loop IR -----------------------------------------------------------------

    @staticmethod
    def like(t: Any, element: Any) -> Any:
        """A type with t's lanes and another element."""
        return ir.VectorType(element, t.count) if isinstance(t, ir.VectorType) else element

    def neg(self, x: Lanes) -> Lanes:
        if x.dtype in FLOATS:
            return Lanes(self, self.b.fneg(x.v), x.dtype)
        return Lanes(self, self.b.sub(constant(x.v.type, 0), x.v), x.dtype)

    def arith(self, op: str, x: Lanes, y: Lanes) -> Lanes:
        """add, sub, mul, div, and, or, xor."""
        name = {"and": "and_", "or": "or_"}.get(op, op)
        if x.dtype in FLOATS:
            name = "f" + name
        return Lanes(self, getattr(self.b, name)(x.v, y.v), x.dtype)

    def extreme(self, op: str, x: Lanes, y: Lanes) -> Lanes:
        """min and max; NaN wins."""
        if x.dtype in FLOATS:
            return self.bin({"min": "minimum", "max": "maximum"}[op], x, y)
        return self.bin(("u" if x.dtype in ("u8", "bool") else "s") + op, x, y)

    def compare(self, op: str, x: Lanes, y: Lanes) -> Lanes:
        """A comparison; with NaN only `ne` is true."""
        symbol = self.SYMBOLS[op]
        if x.dtype in FLOATS:
            v = (
                self.b.fcmp_unordered("!=", x.v, y.v)
                if op == "ne"
                else self.b.fcmp_ordered(symbol, x.v, y.v)
            )
        elif x.dtype in ("u8", "bool"):
            v = self.b.icmp_unsigned(symbol, x.v, y.v)
        else:
            v = self.b.icmp_signed(symbol, x.v, y.v)
        return Lanes(self, v, "bool")

    def invert(self, x: Lanes) -> Lanes:
        """Bitwise not."""
        return Lanes(
            self, self.b.xor(x.v, constant(x.v.type, -1 if x.dtype != "bool" else 1)), x.dtype
        )

    def cast(self, x: Lanes, to: str) -> Lanes:
        """A value in another dtype: float→int truncates, and gives the smallest i64, cut down, where i64 can't hold it."""
        a, b = x.dtype, self.b
        if a == to:
            return x
        t = self.like(x.v.type, VALUE[to])
        if to == "bool":
            return self.compare("ne", x, self.const(x, 0))
        if a in FLOATS and to in FLOATS:
            return Lanes(self, b.fpext(x.v, t) if to == "f64" else b.fptrunc(x.v, t), to)
        if to in FLOATS:
            return Lanes(self, b.uitofp(x.v, t) if a in ("u8", "bool") else b.sitofp(x.v, t), to)
        if a in FLOATS:
            two63 = 9223372036854775808.0
            ok = self.compare("ge", x, self.const(x, -two63)).v
            ok = b.and_(ok, self.compare("lt", x, self.const(x, two63)).v)
            wide = self.like(x.v.type, I64)
            safe = b.select(ok, x.v, constant(x.v.type, 0.0))
            v = b.select(ok, b.fptosi(safe, wide), constant(wide, -(1 << 63)))
            return Lanes(self, v if to == "i64" else b.trunc(v, t), to)
        if t == x.v.type:
            return Lanes(self, x.v, to)
        size = {"bool": 1, "i8": 8, "u8": 8, "i16": 16, "i32": 32, "i64": 64}
        if size[a] > size[to]:
            return Lanes(self, b.trunc(x.v, t), to)
        return Lanes(self, b.zext(x.v, t) if a in ("u8", "bool") else b.sext(x.v, t), to)

    def splat(self, x: Lanes) -> Lanes:
        """A scalar in all lanes."""
        if isinstance(x.v.type, ir.VectorType):
            return x
        if isinstance(x.v, ir.Constant):
            return Lanes(self, constant(ir.VectorType(x.v.type, W), x.v.constant), x.dtype)
        und = ir.Constant(ir.VectorType(x.v.type, W), ir.Undefined)
        one = self.b.insert_element(und, x.v, ir.Constant(I32, 0))
        return Lanes(
            self,
            self.b.shuffle_vector(one, und, ir.Constant(ir.VectorType(I32, W), [0] * W)),
            x.dtype,
        )

    # -- half types ----------------------------------------------------------------------------------

    def widen(self, v: Any, memory: str) -> Lanes:
        """A memory value as a value."""
        if memory == "bf16":
            t = self.like(v.type, I32)
            u = self.b.shl(self.b.zext(v, t), constant(t, 16))
            return Lanes(self, self.b.bitcast(u, self.like(v.type, F32)), "f32")
        if memory == "f16":
            return Lanes(self, self.b.fpext(v, self.like(v.type, F32)), "f32")
        if memory == "bool":
            return Lanes(self, self.b.icmp_unsigned("!=", v, constant(v.type, 0)), "bool")
        return Lanes(self, v, memory)

    def narrow(self, x: Lanes, memory: str) -> Any:
        """A value as it lies in memory; half types round to nearest even, NaN becomes the quiet NaN."""
        b = self.b
        if memory == "bf16":
            x = self.cast(x, "f32")
            u = b.bitcast(x.v, self.like(x.v.type, I32))
            c = lambda n: constant(u.type, n)  # noqa: E731
            odd = b.and_(b.lshr(u, c(16)), c(1))
            r = b.lshr(b.add(u, b.add(odd, c(0x7FFF))), c(16))
            r = b.select(b.fcmp_unordered("uno", x.v, x.v), c(0x7FC0), r)
            return b.trunc(r, self.like(u.type, I16))
        if memory == "f16":
            return b.fptrunc(self.cast(x, "f32").v, self.like(x.v.type, F16))
        x = self.cast(x, memory)
        return b.zext(x.v, self.like(x.v.type, I8)) if memory == "bool" else x.v
