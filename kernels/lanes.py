"""LLVM values with arithmetic: a block's lanes side by side, or one scalar, under the same operators.

`Lanes` wraps a value; `Emit` implements `vmath.Ops` on it and the casts of the loop IR. Vectors wider
than a register are split by LLVM, which hides latencies by itself: of 16, 32 and 64 lanes, 32 was best
with AVX-512 (exp 0.26, 0.24 and 0.22 ns an element; 64 lanes lose on rows of 100 and below, and take
half as long again to compile). Nothing here allows LLVM to change a bit: no fast-math flags, and libm
under names that LLVM knows nothing about.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

from adaptive_eager.kernels import jit, vmath
from adaptive_eager.kernels.grid import UNKNOWN, Fact
from adaptive_eager.kernels.ir import FLOATS
from llvmlite import ir

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
    return Splat(t, c) if isinstance(t, ir.VectorType) else c


class Splat(ir.Constant):  # type: ignore[misc]
    """A scalar constant in all lanes; written out lane by lane these are most of a module's text."""

    def __init__(self, t: Any, element: Any) -> None:
        self.type, self.constant = t, [element] * t.count

    def _get_reference(self) -> str:
        element = self.constant[0]
        return f"splat ({element.type} {element.get_reference()})"


def undefined(t: Any) -> Any:
    """Lanes that will be set."""
    return ir.Constant(t, ir.Undefined)


def _f32(v: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", v))[0])
    except OverflowError:
        return float("inf") if v > 0 else float("-inf")


class Lanes:
    """A value: `v` in LLVM, `dtype` in the loop IR. i32 inside vmath, and for i32 values. fact: where its half types are."""

    __slots__ = ("dtype", "e", "fact", "v")

    def __init__(self, e: Emit, v: Any, dtype: str, fact: Fact = UNKNOWN) -> None:
        self.e, self.v, self.dtype, self.fact = e, v, dtype, fact

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

    def __init__(self, module: ir.Module, b: ir.IRBuilder, width: int) -> None:
        self.m, self.b, self.w = module, b, width
        self.scales = "+avx512f" in jit.features()

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

    def ldexp(self, x: Lanes, n: Lanes) -> Lanes:
        if not self.scales:
            return vmath.ldexp(self, x, n)  # type: ignore[no-any-return]
        name = f"llvm.ldexp.{suffix(x.v.type)}.{suffix(n.v.type)}"
        return Lanes(self, self.call(name, x.v.type, [x.v, n.v]), x.dtype)

    def copysign(self, x: Lanes, y: Lanes) -> Lanes:
        return self.bin("copysign", x, y)

    def const(self, like: Lanes, v: float) -> Lanes:
        return Lanes(self, constant(like.v.type, v), like.dtype)

    iconst = const

    def wide(self, name: str, *args: Lanes) -> Lanes:
        """libm's function lane by lane in f64."""
        wide = [self.cast(a, "f64").v for a in args]
        t = wide[0].type
        looped = isinstance(t, ir.VectorType)
        f = self._looped(name, t, len(args)) if looped else self._libm(name, len(args))
        return self.cast(Lanes(self, self.b.call(f, wide), "f64"), args[0].dtype)

    def _libm(self, name: str, arity: int) -> Any:
        """libm's function, declared."""
        name = jit.LIBM_PREFIX + name
        known = self.m.globals.get(name)
        return known or ir.Function(self.m, ir.FunctionType(F64, [F64] * arity), name)

    def _looped(self, name: str, t: Any, arity: int) -> Any:
        """A function of this module that calls libm's for each lane: unrolled in place, the calls would
        be most of a kernel's compile time."""
        full = f"{name}_{suffix(t)}"
        if full in self.m.globals:
            return self.m.globals[full]
        scalar = self._libm(name, arity)
        f = ir.Function(self.m, ir.FunctionType(t, [t] * arity), full)
        f.linkage = "internal"
        f.attributes.add("noinline")
        entry, each, done = (f.append_basic_block(n) for n in ("entry", "each", "done"))
        b = ir.IRBuilder(entry)
        typed = [b.alloca(t) for _ in range(arity + 1)]
        cells = [b.inttoptr(b.ptrtoint(cell, I64), PTR) for cell in typed]
        for x, cell in zip(f.args, cells, strict=False):
            b.store(x, cell)
        b.branch(each)
        b.position_at_end(each)
        k = b.phi(I64)
        k.add_incoming(ir.Constant(I64, 0), entry)
        at = [b.gep(cell, [k], source_etype=F64) for cell in cells]
        b.store(b.call(scalar, [b.load(p, typ=F64) for p in at[:-1]]), at[-1])
        following = b.add(k, ir.Constant(I64, 1))
        k.add_incoming(following, each)
        b.cbranch(b.icmp_unsigned("<", following, ir.Constant(I64, t.count)), each, done)
        b.position_at_end(done)
        b.ret(b.load(cells[-1], typ=t))
        return f

    def where_rare(self, c: Lanes, slow: Callable[[], Lanes], fast: Lanes) -> Lanes:
        """`slow()` in the lanes where c is set, else `fast`: a value does not depend on its neighbours.
        A branch skips the slow work where no lane needs it."""
        b = self.b
        before = b.block
        rare, after = b.append_basic_block("rare"), b.append_basic_block("after")
        b.cbranch(self.any(c), rare, after)
        b.position_at_end(rare)
        r = self.select(c, slow(), fast)
        end = b.block
        b.branch(after)
        b.position_at_end(after)
        phi = b.phi(fast.v.type)
        phi.add_incoming(fast.v, before)
        phi.add_incoming(r.v, end)
        return Lanes(self, phi, fast.dtype)

    def any(self, c: Lanes) -> Any:
        """Whether c is set in any lane, as an i1."""
        t = c.v.type
        if not isinstance(t, ir.VectorType):
            return c.v
        return self.call(f"llvm.vector.reduce.or.{suffix(t)}", I1, [c.v])

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
        t = ir.VectorType(x.v.type, self.w)
        if isinstance(x.v, ir.Constant):
            return Lanes(self, Splat(t, x.v), x.dtype, x.fact)
        one = self.b.insert_element(undefined(t), x.v, ir.Constant(I32, 0))
        zeros = constant(ir.VectorType(I32, self.w), 0)
        return Lanes(self, self.b.shuffle_vector(one, undefined(t), zeros), x.dtype, x.fact)

    def ramp(self, dtype: str) -> Any:
        """0, 1, 2, ... in the lanes."""
        return ir.Constant(ir.VectorType(VALUE[dtype], self.w), list(range(self.w)))

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

    def _rounded(self, x: Lanes) -> Any:
        """The bits of an f32 on the grid of bf16, in the upper half; the lower half may hold anything."""
        b = self.b
        u = b.bitcast(x.v, self.like(x.v.type, I32))
        if "bf16" in x.fact.grids:
            return u
        c = lambda n: constant(u.type, n)  # noqa: E731
        # where the last bit of u is set, u is no tie, and adding 1 more would change nothing above: "or" is as good
        odd = b.and_(b.lshr(u, c(16)), c(1))
        r = b.add(b.or_(u, odd), c(0x7FFF))
        if not x.fact.tidy:
            r = b.select(b.fcmp_unordered("uno", x.v, x.v), c(0x7FC00000), r)
        return r

    def round(self, x: Lanes, memory: str) -> Lanes:
        """An f32 on the grid of a half type."""
        if memory in x.fact.grids:
            return x
        if memory != "bf16":
            return self.widen(self.narrow(x, memory), memory)
        r = self._rounded(x)
        r = self.b.and_(r, constant(r.type, 0xFFFF0000))
        return Lanes(self, self.b.bitcast(r, x.v.type), "f32")

    def narrow(self, x: Lanes, memory: str) -> Any:
        """A value as it lies in memory; half types round to nearest even, NaN becomes the quiet NaN."""
        b = self.b
        if memory == "bf16":
            x = self.cast(x, "f32")
            u = self._rounded(x)
            return b.trunc(b.lshr(u, constant(u.type, 16)), self.like(u.type, I16))
        if memory == "f16":
            return b.fptrunc(self.cast(x, "f32").v, self.like(x.v.type, F16))
        x = self.cast(x, memory)
        return b.zext(x.v, self.like(x.v.type, I8)) if memory == "bool" else x.v
