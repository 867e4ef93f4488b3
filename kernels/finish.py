"""`finish(context)`: totals over tasks in order, then what follows them. One thread runs it, after all tasks."""

from __future__ import annotations

from typing import Any

from adaptive_eager.kernels import reduce
from adaptive_eager.kernels.context import Word
from adaptive_eager.kernels.frame import Function
from adaptive_eager.kernels.ir import Kernel, Operand
from adaptive_eager.kernels.lanes import I64, VALUE, Lanes, constant
from adaptive_eager.kernels.pointwise import compute
from adaptive_eager.kernels.schedule import Schedule
from llvmlite import ir


class Finish(Function):
    """Emits the function that ends a launch with totals."""

    def __init__(
        self, module: ir.Module, kernel: Kernel, s: Schedule, name: str, width: int
    ) -> None:
        super().__init__(module, kernel, s, name, width)
        if s.totals:
            self.uniforms()
            self.cols, self.tasks = self.word(Word.COLS), self.word(Word.TASKS)
            self.sums = {n: self.pointer(self.layout.totals + at) for at, n in enumerate(s.totals)}
            self._single()
            if s.column:
                self.blocks(self.cols, [], self._column_block)
        self.b.ret_void()

    def _base(self, o: int) -> Any:
        return self.pointer(self.layout.pointers + o)

    def _single(self) -> None:
        """Totals of row values, and what is computed from them alone."""
        for n in self.s.totals:
            if n not in self.s.elem_totals:
                self.scalar[n] = self._over_tasks(n)
        for n in self.s.single:
            i = self.k.insts[n]
            if i.op == "store":
                o, operand = self.operand(n)
                self.store_one(self.scalar[i.args[0]], self._base(o), operand.dtype)
            elif i.op == "fload":
                o, operand = self.operand(n)
                self.scalar[n] = self.known(n, self.load_one(self._base(o), operand.dtype))
            else:
                x = compute(self.e, i, [self.scalar[a] for a in i.args])
                self.scalar[n] = self.known(n, x)

    def _over_tasks(self, n: int) -> Lanes:
        dtype = self.k.insts[n].dtype
        t = VALUE[dtype]

        def step(task: Any, acc: list[Any]) -> list[Any]:
            at = self.b.gep(self.sums[n], [task], source_etype=I64)
            return [(Lanes(self.e, acc[0], dtype) + self.load_one(at, dtype)).v]

        first = [constant(t, reduce.zero(dtype))]
        return Lanes(self.e, self.loop("tasks", self.i64(0), self.tasks, 1, first, step)[0], dtype)

    def _column_block(self, j: Any, _: list[Any], mask: Any) -> list[Any]:
        """Totals for each column, and what is computed from them, from column j on."""
        values: dict[int, Lanes] = {}

        def get(n: int) -> Lanes:
            if n not in values:
                wide = n in self.s.elem_totals
                values[n] = self._merged(n, j, mask) if wide else self.e.splat(self.scalar[n])
            return values[n]

        for n in self.s.column:
            i = self.k.insts[n]
            if i.op not in ("store", "fload"):
                values[n] = self.known(n, compute(self.e, i, [get(a) for a in i.args]))
                continue
            o, operand = self.operand(n)
            stride = self.word(self.layout.strides + o * (self.k.outer + 1) + self.k.outer)
            if i.op == "store":
                self.store_block(get(i.args[0]), operand, self._base(o), j, stride, mask)
            else:
                x = self.load_block(operand, self._base(o), j, stride, mask)
                values[n] = self.known(n, x)
        return []

    def _merged(self, n: int, j: Any, mask: Any) -> Lanes:
        """A total for each column from j on; nothing has been written where there was no task."""
        dtype = self.k.insts[n].dtype
        zero = Lanes(self.e, constant(VALUE[dtype], reduce.zero(dtype)), dtype)
        none = Lanes(self.e, self.b.icmp_unsigned("==", self.tasks, self.i64(0)), "bool")
        x = self.load_block(Operand(dtype, "unit"), self.sums[n], j, None, mask)
        return self.e.select(none, self.e.splat(zero), x)
