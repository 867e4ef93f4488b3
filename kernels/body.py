"""`body(context)`: tasks, their rows, and the passes over a row's columns.

Note [Transposed operands]
Neighbouring elements of a transposed operand's row are far apart, those of its column side by side. So
sixteen rows are read together, a vector of them for each column, turned in registers, and kept in
scratch, from where each row is read as if it were contiguous. A task is then a multiple of as many rows.
"""

from __future__ import annotations

from typing import Any

from adaptive_eager.kernels import reduce
from adaptive_eager.kernels.context import Word
from adaptive_eager.kernels.frame import Function
from adaptive_eager.kernels.ir import ITEMSIZE, Kernel, Operand
from adaptive_eager.kernels.lanes import (
    I8,
    I32,
    I64,
    MEMORY,
    VALUE,
    Lanes,
    constant,
    suffix,
    undefined,
)
from adaptive_eager.kernels.pointwise import compute
from adaptive_eager.kernels.schedule import TURN, Loop, Schedule, turned
from llvmlite import ir


class Body(Function):
    """Emits the function that threads run."""

    def __init__(
        self,
        module: ir.Module,
        kernel: Kernel,
        s: Schedule,
        name: str,
        width: int,
        streams: frozenset[int] = frozenset(),
        shifted: bool = False,
    ) -> None:
        super().__init__(module, kernel, s, name, width)
        self.streams, self.shifted = streams, shifted
        self.sums = [n for n in s.totals if n in s.elem_totals]
        self.tile = {n: i for i, n in enumerate([*s.tiles, *self.sums])}
        self.turned = {o: len(self.tile) + TURN * i for i, o in enumerate(turned(kernel))}
        self._sizes()
        self.uniforms()
        if self.tile or self.turned:
            self._take_scratch()
        self._tasks()
        if streams:
            self.b.fence("seq_cst")
        self.b.ret_void()

    def _sizes(self) -> None:
        k, at = self.k, self.layout
        self.rows, self.cols, self.numel = (
            self.word(w) for w in (Word.ROWS, Word.COLS, Word.NUMEL)
        )
        self.outer_sizes = [self.word(at.sizes + d) for d in range(k.outer)]
        rank, count = k.outer + 1, len(k.operands)
        self.stride = [
            [self.word(at.strides + o * rank + d) for d in range(rank)] for o in range(count)
        ]
        self.base = [self.pointer(at.pointers + o) for o in range(count)]

    def _take_scratch(self) -> None:
        b = self.b
        self.tile_bytes = self.word(Word.TILE_BYTES)
        mine = b.atomic_rmw("add", self.word_at(Word.NEXT_SCRATCH), self.i64(1), "monotonic")
        offset = b.mul(mine, self.word(Word.SCRATCH_BYTES))
        self.scratch = b.gep(self.pointer(Word.SCRATCH), [offset], source_etype=I8)

    def _tasks(self) -> None:
        """Note [Shares]."""
        b = self.b
        per, tasks, shares = (self.word(w) for w in (Word.ROWS_PER_TASK, Word.TASKS, Word.SHARES))
        mine = b.atomic_rmw("add", self.word_at(Word.ARRIVED), self.i64(1), "monotonic")
        mine = b.urem(mine, shares)
        self.loop(
            "share",
            self.i64(0),
            shares,
            1,
            [],
            lambda k, _: self._share(k, mine, shares, tasks, per),
        )

    def _share(self, k: Any, mine: Any, shares: Any, tasks: Any, per: Any) -> list[Any]:
        """The tasks of the k-th share from one's own on, until none is left."""
        b = self.b
        which = b.urem(b.add(mine, k), shares)
        low = b.udiv(b.mul(which, tasks), shares)
        high = b.udiv(b.mul(b.add(which, self.i64(1)), tasks), shares)
        counter = b.gep(self.word_at(Word.NEXT_TASK), [which], source_etype=I64)
        head, inside, done = (b.append_basic_block(n) for n in ("task.head", "task", "done"))
        b.branch(head)
        b.position_at_end(head)
        task = b.add(low, b.atomic_rmw("add", counter, self.i64(1), "monotonic"))
        b.cbranch(b.icmp_unsigned("<", task, high), inside, done)
        b.position_at_end(inside)
        first = b.mul(task, per)
        stop = b.add(first, per)
        stop = b.select(b.icmp_unsigned("<", stop, self.rows), stop, self.rows)
        self.first, self.fresh = first, self._begin(task, first)
        self.loop("row", first, stop, 1, [], lambda r, _: self._row(r))
        if self.sums:
            self._merge(task)
        b.branch(head)
        b.position_at_end(done)
        return []

    # -- totals -----------------------------------------------------------------------------------

    def _begin(self, task: Any, first: Any) -> Any:
        """Start a task's partial totals. Gives whether its first row may set the columns' instead of
        adding to them, which a short row may not."""
        b, s = self.b, self.s
        self.partial = {}
        for at, n in enumerate(s.totals):
            if n in s.elem_totals:
                self.partial[n] = self._tile(n, self.i64(0))
                continue
            base = self.pointer(self.layout.totals + at)
            self.partial[n] = b.gep(base, [task], source_etype=I64)
            self.store_one(self._zero(n), self.partial[n], self.k.insts[n].dtype)
        whole = b.icmp_unsigned("<=", b.mul(b.add(first, self.i64(1)), self.cols), self.numel)
        count = b.select(whole, self.i64(0), self.cols)
        for n in self.sums:
            self._clear(n, count)
        return whole

    def _zero(self, n: int) -> Lanes:
        dtype = self.k.insts[n].dtype
        return Lanes(self.e, constant(VALUE[dtype], reduce.zero(dtype)), dtype)

    def _clear(self, n: int, count: Any) -> None:
        """The first columns' partial totals are nothing."""

        def put(j: Any, _: Any, mask: Any) -> list[Any]:
            o = Operand(self.k.insts[n].dtype, "unit")
            self.store_block(self.e.splat(self._zero(n)), o, self.partial[n], j, None, mask)
            return []

        self.blocks(count, [], put)

    def _sum_columns(self, n: int, x: Lanes, j: Any, mask: Any, at: Any, fresh: Any) -> None:
        """Add x to what `at` has for column j on; if fresh, whatever is there is nothing."""
        where = (Operand(x.dtype, "unit"), at, j, None, mask)
        old = self.e.select(
            Lanes(self.e, fresh, "bool"), self.e.splat(self._zero(n)), self.load_block(*where)
        )
        self.store_block(old + x, *where)

    def _merge(self, task: Any) -> None:
        """Note [Totals of columns]."""
        b = self.b
        wait, merge = b.append_basic_block("wait"), b.append_basic_block("merge")
        b.branch(wait)
        b.position_at_end(wait)
        merged = b.load_atomic(self.word_at(Word.MERGED), "acquire", 8, typ=I64)
        b.cbranch(b.icmp_unsigned("==", merged, task), merge, wait)
        b.position_at_end(merge)
        first = b.icmp_unsigned("==", task, self.i64(0))
        for n in self.sums:
            total = self.pointer(self.layout.totals + self.s.totals.index(n))

            def add(j: Any, _: Any, mask: Any, n: int = n, total: Any = total) -> list[Any]:
                o = Operand(self.k.insts[n].dtype, "unit")
                x = self.load_block(o, self.partial[n], j, None, mask)
                self._sum_columns(n, x, j, mask, total, first)
                return []

            self.blocks(self.cols, [], add)
        b.atomic_rmw("add", self.word_at(Word.MERGED), self.i64(1), "release")

    def _row_total(self, n: int) -> None:
        i = self.k.insts[n]
        x = self.e.cast(self.scalar[i.args[0]], i.dtype)
        self.store_one(self.load_one(self.partial[n], i.dtype) + x, self.partial[n], i.dtype)

    # -- rows -------------------------------------------------------------------------------------

    def _row(self, r: Any) -> list[Any]:
        b, s = self.b, self.s
        self._locate(r)
        if self.turned:
            self._turn(r)
        self.starts = b.and_(self.fresh, b.icmp_unsigned("==", r, self.first))
        left = b.sub(self.numel, b.mul(r, self.cols))
        self.n = b.select(b.icmp_unsigned("<", left, self.cols), left, self.cols)
        uniform = dict(self.scalar)
        for depth, loop in enumerate(s.loops):
            for v in s.row[depth]:
                if v not in self.scalar:
                    self.scalar[v] = self.known(v, self._row_value(v))
            if not loop.empty():
                self._columns(loop)
        for v in s.row_totals:
            self._row_total(v)
        for v in s.row_stores:
            o, operand = self.operand(v)
            self.store_one(self.scalar[self.k.insts[v].args[0]], self.at_row[o], operand.dtype)
        self.scalar = uniform
        return []

    def _locate(self, r: Any) -> None:
        """Row r's outer indices, and where each operand's row begins."""
        b, k = self.b, self.k
        index: list[Any] = [None] * k.outer
        rest = r
        for d in range(k.outer - 1, 0, -1):
            q = b.udiv(rest, self.outer_sizes[d])
            index[d] = b.sub(rest, b.mul(q, self.outer_sizes[d]))
            rest = q
        index[0] = rest
        self.index, self.at_row = index, []
        for base, stride in zip(self.base, self.stride, strict=True):
            offset = b.mul(index[0], stride[0])
            for d in range(1, k.outer):
                offset = b.add(offset, b.mul(index[d], stride[d]))
            self.at_row.append(b.gep(base, [offset], source_etype=I8))

    def _turn(self, r: Any) -> None:
        """Note [Transposed operands]: at the first row of a block, or of a task, bring the block."""
        b = self.b
        last = self.index[-1]
        self.low = b.and_(last, self.i64(TURN - 1))
        first = b.or_(
            b.icmp_unsigned("==", self.low, self.i64(0)), b.icmp_unsigned("==", r, self.first)
        )
        fill, after = b.append_basic_block("turn"), b.append_basic_block("turned")
        b.cbranch(first, fill, after)
        b.position_at_end(fill)
        left = b.sub(self.outer_sizes[-1], b.sub(last, self.low))
        left = b.select(b.icmp_unsigned("<", left, self.i64(TURN)), left, self.i64(TURN))
        count = ir.VectorType(I64, TURN)
        some = b.insert_element(undefined(count), left, ir.Constant(I32, 0))
        zeros = constant(ir.VectorType(I32, TURN), 0)
        ramp = ir.Constant(count, list(range(TURN)))
        rows = b.icmp_unsigned("<", ramp, b.shuffle_vector(some, undefined(count), zeros))
        for o in self.turned:

            def block(j: Any, _: list[Any], o: int = o) -> list[Any]:
                return self._turn_block(o, j, rows)

            self.loop("columns", self.i64(0), self.cols, TURN, [], block)
        b.branch(after)
        b.position_at_end(after)

    def _turn_block(self, o: int, j: Any, rows: Any) -> list[Any]:
        """Columns j .. j + 16 of a block of rows into scratch, row by row."""
        b, dtype = self.b, self.k.operands[o].dtype
        t, size = ir.VectorType(MEMORY[dtype], TURN), ITEMSIZE[dtype]
        align = ir.Constant(I32, size)
        start = b.gep(self.at_row[o], [b.mul(self.low, self.i64(-size))], source_etype=I8)
        final = b.sub(self.cols, self.i64(1))
        v = []
        for c in range(TURN):
            column = b.add(j, self.i64(c))
            column = b.select(b.icmp_unsigned("<", column, final), column, final)
            at = b.gep(start, [b.mul(column, self.stride[o][-1])], source_etype=I8)
            name = f"llvm.masked.load.{suffix(t)}.p0"
            v.append(self.e.call(name, t, [at, align, rows, constant(t, 0)]))
        k = 1
        while k < TURN:  # exchange blocks of k between vectors k apart
            for i in range(TURN):
                if not i & k:
                    low = [e if not e & k else TURN + e - k for e in range(TURN)]
                    high = [e + k if not e & k else TURN + e for e in range(TURN)]
                    picks = [ir.Constant(ir.VectorType(I32, TURN), p) for p in (low, high)]
                    x, y = v[i], v[i + k]
                    v[i], v[i + k] = (b.shuffle_vector(x, y, p) for p in picks)
            k *= 2
        for row, x in enumerate(v):
            at = b.gep(
                self._turned_row(o, self.i64(row)), [b.mul(j, self.i64(size))], source_etype=I8
            )
            b.store(x, at, align=size)
        return []

    def _turned_row(self, o: int, row: Any) -> Any:
        """Where scratch has a row of a transposed operand's block."""
        b = self.b
        at = b.mul(self.tile_bytes, b.add(self.i64(self.turned[o]), row))
        return b.gep(self.scratch, [at], source_etype=I8)

    def _row_value(self, n: int) -> Lanes:
        i = self.k.insts[n]
        if i.op == "load":
            o, operand = self.operand(n)
            return self.load_one(self.at_row[o], operand.dtype)
        if i.op == "iota":
            assert isinstance(i.attr, int)
            return Lanes(self.e, self.index[i.attr], "i64")
        return compute(self.e, i, [self.scalar[a] for a in i.args])

    # -- a pass over the columns ------------------------------------------------------------------

    def _columns(self, loop: Loop) -> None:
        """All blocks of a row; reductions come out as row values."""
        insts = [self.k.insts[n] for n in loop.reduces]
        starts = [reduce.start(self.e, i) for i in insts]

        def split(flat: list[Any]) -> list[list[Any]]:
            it = iter(flat)
            return [[next(it) for _ in state] for state in starts]

        def block(j: Any, flat: list[Any], mask: Any) -> list[Any]:
            values = self._values(loop, j, mask)
            states = [
                reduce.step(self.e, i, state, self._get(values, i.args[0]), mask)
                for i, state in zip(insts, split(flat), strict=True)
            ]
            self._sinks(loop, values, j, mask)
            return [v for state in states for v in state]

        first = [v for state in starts for v in state]
        ends = self.blocks(self.n, first, block, self._head(loop))
        for n, i, state in zip(loop.reduces, insts, split(ends), strict=True):
            self.scalar[n] = reduce.result(self.e, i, state)

    def _head(self, loop: Loop) -> Any:
        """Columns before the first cache line's start of a row that is written past the caches, None where blocks start with the row."""
        if not self.shifted or loop.reduces or loop.totals or not loop.stores:
            return None
        o = min(self.streams)
        at = self.b.ptrtoint(self.at_row[o], I64)
        before = self.b.and_(self.b.sub(self.i64(0), at), self.i64(63))
        size = ITEMSIZE[self.k.operands[o].dtype]
        return self.b.lshr(before, self.i64(size.bit_length() - 1))

    def _get(self, values: dict[int, Lanes], n: int) -> Lanes:
        if n not in values:
            values[n] = self.e.splat(self.scalar[n])
        return values[n]

    def _values(self, loop: Loop, j: Any, mask: Any) -> dict[int, Lanes]:
        """What a block needs, from column j on."""
        e = self.e
        values: dict[int, Lanes] = {}
        for n in loop.needs:
            i = self.k.insts[n]
            if n in loop.from_tile:
                t = ir.VectorType(VALUE[i.dtype], self.w)
                values[n] = Lanes(e, self.b.load(self._tile(n, j), typ=t, align=4), i.dtype)
            elif i.op == "load":
                o, operand = self.operand(n)
                if o in self.turned:
                    here = Operand(operand.dtype, "unit")
                    values[n] = self.load_block(here, self._turned_row(o, self.low), j, None, None)
                else:
                    at, step = self.at_row[o], self.stride[o][-1]
                    values[n] = self.load_block(operand, at, j, step, mask)
            elif i.op == "iota":
                values[n] = e.splat(Lanes(e, j, "i64")) + Lanes(e, e.ramp("i64"), "i64")
            elif i.op == "random":
                once = [self.scalar[a] for a in i.args[1:]]
                values[n] = compute(e, i, [self._get(values, i.args[0]), *once])
            else:
                values[n] = compute(e, i, [self._get(values, a) for a in i.args])
            self.known(n, values[n])
            if n in loop.to_tile:
                self.b.store(values[n].v, self._tile(n, j), align=4)
        return values

    def _sinks(self, loop: Loop, values: dict[int, Lanes], j: Any, mask: Any) -> None:
        """Totals, then stores, of a block."""
        for n in loop.totals:
            i = self.k.insts[n]
            x = self.e.cast(self._get(values, i.args[0]), i.dtype)
            self._sum_columns(n, x, j, mask, self.partial[n], self.starts)
        for n in loop.stores:
            o, operand = self.operand(n)
            x = self._get(values, self.k.insts[n].args[0])
            at, step = self.at_row[o], self.stride[o][-1]
            self.store_block(x, operand, at, j, step, mask, stream=o in self.streams)

    def _tile(self, n: int, j: Any) -> Any:
        """Where a tile holds column j. A whole block is kept, also of the last columns."""
        b = self.b
        size = ITEMSIZE[self.k.insts[n].dtype]
        at = b.add(b.mul(self.tile_bytes, self.i64(self.tile[n])), b.mul(j, self.i64(size)))
        return b.gep(self.scratch, [at], source_etype=I8)
