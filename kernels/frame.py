"""What both functions of a kernel need: the context they are called with, loops, blocks in memory, uniforms.

Note [The context]
A launch passes one array of 64-bit words: counters and sizes (`Word`), then outer sizes, strides in
bytes, operand addresses, addresses of partial totals, scalars. `body` may run on any number of threads
at once: each takes tasks from atomic counters (context.py, Note [Shares]) and a scratch area from another, so results depend on
neither.

Note [Totals of columns]
A task adds its rows up in its thread's scratch, then waits until all tasks before it have been merged
(`Word.MERGED` counts them) and adds its sums to the launch's. Tasks are taken in order, so whoever holds
the first unmerged one never waits. A row of sums for each task, added up at the end, would be as exact
but is memory that wide rows need twice as much of as of their input.

Note [Streaming stores]
A plain store first reads the line it writes. For a result larger than the caches that is a third of the
traffic of a copy, and what else they held is gone. Such results are written past them, a whole cache line at a time: where
rows start anywhere, a row's blocks begin at its first line, and what lies before that and after the last is stored plainly
(RMS norm over rows of 1000: half the time). A fence at the end of the body makes them visible before its thread is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from adaptive_eager.kernels.context import Layout
from adaptive_eager.kernels.grid import facts
from adaptive_eager.kernels.ir import ITEMSIZE, Kernel, Operand
from adaptive_eager.kernels.lanes import (
    F64,
    I1,
    I8,
    I32,
    I64,
    MEMORY,
    PTR,
    VALUE,
    Emit,
    Lanes,
    constant,
    suffix,
)
from adaptive_eager.kernels.pointwise import compute
from adaptive_eager.kernels.schedule import Schedule, stream_align
from llvmlite import ir

LoopBody = Callable[[Any, list[Any]], list[Any]]


class Function:
    """One function of a kernel, `<name>(context)`. scalar: values of which there is one at this point."""

    def __init__(
        self, module: ir.Module, kernel: Kernel, s: Schedule, name: str, width: int
    ) -> None:
        self.k, self.s, self.w = kernel, s, width
        self.layout = Layout(kernel, len(s.totals))
        f = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), name)
        self.b = ir.IRBuilder(f.append_basic_block("entry"))
        self.e = Emit(module, self.b, width)
        self.ctx = f.args[0]
        self.scalar: dict[int, Lanes] = {}
        self.facts = facts(kernel)

    def known(self, n: int, x: Lanes) -> Lanes:
        """The value of instruction n, with what is known of it."""
        x.fact = self.facts[n]
        return x

    # -- context ----------------------------------------------------------------------------------

    def word_at(self, n: int) -> Any:
        """Address of a context word."""
        return self.b.gep(self.ctx, [self.i64(n)], source_etype=I64)

    def word(self, n: int) -> Any:
        """A context word."""
        return self.b.load(self.word_at(n), typ=I64)

    def pointer(self, n: int) -> Any:
        """A context word that is an address."""
        return self.b.inttoptr(self.word(n), PTR)

    def i64(self, n: int) -> Any:
        """An i64 constant."""
        return ir.Constant(I64, n)

    def operand(self, n: int) -> tuple[int, Operand]:
        """The operand that a load or store names."""
        o = self.k.insts[n].attr
        assert isinstance(o, int)
        return o, self.k.operands[o]

    def uniforms(self) -> None:
        """Everything that is one value for the launch."""
        for n in self.s.uniform:
            self.scalar[n] = self.known(n, self._uniform(n))

    def _uniform(self, n: int) -> Lanes:
        i = self.k.insts[n]
        if i.op == "const":
            assert isinstance(i.attr, int | float)
            return Lanes(self.e, constant(VALUE[i.dtype], i.attr), i.dtype)
        if i.op == "scalar":
            assert isinstance(i.attr, int)
            raw = self.word(self.layout.scalars + i.attr)
            if i.dtype != "f64":
                return Lanes(self.e, raw, i.dtype)
            v = self.b.bitcast(raw, F64)
            nan = self.b.fcmp_unordered("uno", v, v)
            return Lanes(self.e, self.b.select(nan, constant(F64, math.nan), v), i.dtype)
        return compute(self.e, i, [self.scalar[a] for a in i.args])

    # -- control ----------------------------------------------------------------------------------

    def loop(
        self, name: str, start: Any, stop: Any, step: int, values: list[Any], body: LoopBody
    ) -> list[Any]:
        """for i in range(start, stop, step), unsigned, carrying values; body(i, values) gives the next."""
        b = self.b
        before = b.block
        head, inside, after = (b.append_basic_block(f"{name}.{p}") for p in ("head", "body", "end"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(start, before)
        carried = []
        for v in values:
            p = b.phi(v.type)
            p.add_incoming(v, before)
            carried.append(p)
        b.cbranch(b.icmp_unsigned("<", i, stop), inside, after)
        b.position_at_end(inside)
        new = body(i, carried)
        i.add_incoming(b.add(i, self.i64(step)), b.block)
        for p, v in zip(carried, new, strict=True):
            p.add_incoming(v, b.block)
        b.branch(head)
        b.position_at_end(after)
        return carried

    def blocks(
        self,
        n: Any,
        values: list[Any],
        body: Callable[[Any, list[Any], Any], list[Any]],
        head: Any = None,
    ) -> list[Any]:
        """body(column, values, mask) for each block of n columns: full ones without a mask, then one
        with it for the rest. head: columns, less than a block, that come first with a mask; carries no values."""
        b = self.b
        start = self.i64(0)
        if head is not None:
            assert not values
            start = b.select(b.icmp_unsigned("<", head, n), head, n)
            first, rest = b.append_basic_block("head"), b.append_basic_block("rest")
            b.cbranch(b.icmp_unsigned("!=", start, self.i64(0)), first, rest)
            b.position_at_end(first)
            some = self.e.splat(Lanes(self.e, b.trunc(start, I32), "i32")).v
            body(self.i64(0), [], b.icmp_unsigned("<", self.e.ramp("i32"), some))
            b.branch(rest)
            b.position_at_end(rest)
        full = b.add(start, b.and_(b.sub(n, start), self.i64(-self.w)))
        values = self.loop("block", start, full, self.w, values, lambda j, v: body(j, v, None))
        tail, after = b.append_basic_block("tail"), b.append_basic_block("after")
        before = b.block
        b.cbranch(b.icmp_unsigned("<", full, n), tail, after)
        b.position_at_end(tail)
        left = self.e.splat(Lanes(self.e, b.trunc(b.sub(n, full), I32), "i32")).v
        new = body(full, values, b.icmp_unsigned("<", self.e.ramp("i32"), left))
        end = b.block
        b.branch(after)
        b.position_at_end(after)
        out = []
        for old, v in zip(values, new, strict=True):
            p = b.phi(old.type)
            p.add_incoming(old, before)
            p.add_incoming(v, end)
            out.append(p)
        return out

    # -- memory -----------------------------------------------------------------------------------

    def load_one(self, at: Any, memory: str) -> Lanes:
        """One element, as a value."""
        return self.e.widen(self.b.load(at, typ=MEMORY[memory], align=ITEMSIZE[memory]), memory)

    def store_one(self, x: Lanes, at: Any, memory: str) -> None:
        """One element."""
        self.b.store(self.e.narrow(x, memory), at, align=ITEMSIZE[memory])

    def load_block(self, o: Operand, base: Any, j: Any, stride: Any, mask: Any) -> Lanes:
        """The columns from j on as a value. base: the row's address. stride: along columns, in bytes."""
        b, t = self.b, ir.VectorType(MEMORY[o.dtype], self.w)
        align = ir.Constant(I32, ITEMSIZE[o.dtype])
        if o.inner == "unit":
            at = self._column(base, j, o.dtype)
            if mask is None:
                v = b.load(at, typ=t, align=ITEMSIZE[o.dtype])
            else:
                name = f"llvm.masked.load.{suffix(t)}.p0"
                v = self.e.call(name, t, [at, align, mask, constant(t, 0)])
        else:
            name = f"llvm.masked.gather.{suffix(t)}.v{self.w}p0"
            at = self._addresses(base, j, stride)
            v = self.e.call(name, t, [at, align, self._every(mask), constant(t, 0)])
        return self.e.widen(v, o.dtype)

    def store_block(
        self,
        x: Lanes,
        o: Operand,
        base: Any,
        j: Any,
        stride: Any,
        mask: Any,
        *,
        stream: bool = False,
    ) -> None:
        """The columns from j on. stream: past the caches, Note [Streaming stores]."""
        v = self.e.narrow(x, o.dtype)
        align = ir.Constant(I32, ITEMSIZE[o.dtype])
        if o.inner == "unit":
            at = self._column(base, j, o.dtype)
            if mask is None and stream:
                inst = self.b.store(v, at, align=stream_align(o.dtype))
                hint = self.b.module.add_metadata([ir.Constant(I32, 1)])
                inst.set_metadata("nontemporal", hint)
            elif mask is None:
                self.b.store(v, at, align=ITEMSIZE[o.dtype])
            else:
                name = f"llvm.masked.store.{suffix(v.type)}.p0"
                self.e.call(name, ir.VoidType(), [v, at, align, mask])
        else:
            name = f"llvm.masked.scatter.{suffix(v.type)}.v{self.w}p0"
            at = self._addresses(base, j, stride)
            self.e.call(name, ir.VoidType(), [v, at, align, self._every(mask)])

    def _column(self, base: Any, j: Any, memory: str) -> Any:
        return self.b.gep(base, [self.b.mul(j, self.i64(ITEMSIZE[memory]))], source_etype=I8)

    def _every(self, mask: Any) -> Any:
        return constant(ir.VectorType(I1, self.w), 1) if mask is None else mask

    def _addresses(self, base: Any, j: Any, stride: Any) -> Any:
        b = self.b
        column, step, start = (
            self.e.splat(Lanes(self.e, v, "i64")).v for v in (j, stride, b.ptrtoint(base, I64))
        )
        at = b.add(start, b.mul(b.add(column, self.e.ramp("i64")), step))
        return b.inttoptr(at, ir.VectorType(PTR, self.w))
