"""From a scheduled kernel to an LLVM module with two functions, `body(ctx)` and `finish(ctx)`.

Direct vector IR, not numba source: lanes, masked tails and reduction order are then ours to fix, and a kernel compiles
in some 20 ms instead of some 150 (numba's front end is most of that). numba's code generator stays the JIT (jit.py).

Note [The context]
A launch passes one array of 64-bit words: counters and sizes (`Word`), then outer sizes, strides in bytes, operand addresses,
addresses of partial totals, scalars. `body` may run on any number of threads at once: each takes tasks from an atomic
counter and a scratch area from another, so results depend on neither.
"""

from __future__ import annotations

import enum
from typing import Any

from adaptive_eager.kernels import vmath
from adaptive_eager.kernels.ir import FLOATS, ITEMSIZE, MATH, Kernel, levels
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
    W,
    constant,
    suffix,
)
from adaptive_eager.kernels.schedule import Loop, Schedule
from llvmlite import ir


class Word(enum.IntEnum):
    """Fixed words of the context."""

    NEXT_TASK = 0
    TASKS = 1
    ROWS = 2
    COLS = 3
    NUMEL = 4
    ROWS_PER_TASK = 5
    NEXT_SCRATCH = 6
    SCRATCH = 7
    SCRATCH_BYTES = 8
    TILE_BYTES = 9
    COUNT = 10


class Layout:
    """Word numbers of a kernel's context."""

    def __init__(self, k: Kernel, totals: int) -> None:
        self.sizes = int(Word.COUNT)
        self.strides = self.sizes + k.outer
        self.pointers = self.strides + len(k.operands) * (k.outer + 1)
        self.scalars = self.pointers + len(k.operands)
        self.totals = self.scalars + len(k.scalars)
        self.words = self.totals + totals


class Generator:
    """Generates one kernel. `scalar` and `lanes` hold the values of the level being emitted."""

    def __init__(self, kernel: Kernel, s: Schedule, name: str) -> None:
        self.k, self.s, self.name = kernel, s, name
        self.at = levels(kernel)
        self.layout = Layout(kernel, len(s.totals))
        self.module = ir.Module("kernel")
        self.tile = {n: i for i, n in enumerate(s.tiles)}
        self.total = {n: i for i, n in enumerate(s.totals)}

    # -- small things ---------------------------------------------------------------------------

    def function(self, name: str) -> None:
        """Begin a function of the context."""
        f = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [PTR]), f"{name}_{self.name}")
        self.b = ir.IRBuilder(f.append_basic_block("entry"))
        self.e = Emit(self.module, self.b)
        self.ctx = f.args[0]
        self.scalar: dict[int, Lanes] = {}

    def word_at(self, n: int) -> Any:
        """Address of a context word."""
        return self.b.gep(self.ctx, [ir.Constant(I64, n)], source_etype=I64)

    def word(self, n: int) -> Any:
        """A context word."""
        return self.b.load(self.word_at(n), typ=I64)

    def i64(self, n: int) -> Any:
        """An i64 constant."""
        return ir.Constant(I64, n)

    def loop(
        self, name: str, start: Any, stop: Any, step: int, values: list[Any], body: Any
    ) -> list[Any]:
        """for i in range(start, stop, step), unsigned, carrying values; returns them. body(i, values) → new values."""
        b = self.b
        before = b.block
        head, inside, after = (b.append_basic_block(f"{name}.{p}") for p in ("head", "body", "end"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(start, before)
        phis = []
        for v in values:
            p = b.phi(v.type)
            p.add_incoming(v, before)
            phis.append(p)
        b.cbranch(b.icmp_unsigned("<", i, stop), inside, after)
        b.position_at_end(inside)
        new = body(i, phis)
        i.add_incoming(b.add(i, self.i64(step)), b.block)
        for p, v in zip(phis, new, strict=True):
            p.add_incoming(v, b.block)
        b.branch(head)
        b.position_at_end(after)
        return phis

    # -- memory ---------------------------------------------------------------------------------

    def load_block(self, base: Any, j: Any, inner: str, stride: Any, memory: str, mask: Any) -> Any:
        """W elements from column j on."""
        b, t = self.b, ir.VectorType(MEMORY[memory], W)
        size = ITEMSIZE[memory]
        if inner == "unit":
            p = b.gep(base, [b.mul(j, self.i64(size))], source_etype=I8)
            if mask is None:
                return b.load(p, typ=t, align=size)
            return self.e.call(
                f"llvm.masked.load.{suffix(t)}.p0",
                t,
                [p, ir.Constant(I32, size), mask, constant(t, 0)],
            )
        ptrs = self._addresses(base, j, stride)
        if mask is None:
            mask = constant(ir.VectorType(I1, W), 1)
        return self.e.call(
            f"llvm.masked.gather.{suffix(t)}.v{W}p0",
            t,
            [ptrs, ir.Constant(I32, size), mask, constant(t, 0)],
        )

    def store_block(
        self, v: Any, base: Any, j: Any, inner: str, stride: Any, memory: str, mask: Any
    ) -> None:
        """W elements to column j on."""
        b, t = self.b, v.type
        size = ITEMSIZE[memory]
        if inner == "unit":
            p = b.gep(base, [b.mul(j, self.i64(size))], source_etype=I8)
            if mask is None:
                b.store(v, p, align=size)
            else:
                self.e.call(
                    f"llvm.masked.store.{suffix(t)}.p0",
                    ir.VoidType(),
                    [v, p, ir.Constant(I32, size), mask],
                )
            return
        ptrs = self._addresses(base, j, stride)
        if mask is None:
            mask = constant(ir.VectorType(I1, W), 1)
        self.e.call(
            f"llvm.masked.scatter.{suffix(t)}.v{W}p0",
            ir.VoidType(),
            [v, ptrs, ir.Constant(I32, size), mask],
        )

    def _addresses(self, base: Any, j: Any, stride: Any) -> Any:
        b = self.b
        t = ir.VectorType(I64, W)
        at = b.mul(
            b.add(self.e.splat(Lanes(self.e, j, "i64")).v, ir.Constant(t, list(range(W)))),
            self.e.splat(Lanes(self.e, stride, "i64")).v,
        )
        start = self.e.splat(Lanes(self.e, b.ptrtoint(base, I64), "i64")).v
        return b.inttoptr(b.add(start, at), ir.VectorType(PTR, W))

    # -- instructions -----------------------------------------------------------------------------

    def compute(self, n: int, args: list[Lanes]) -> Lanes:
        """A pointwise instruction on scalars or lanes."""
        i, e = self.k.insts[n], self.e
        x = args[0]
        match i.op:
            case "add" | "sub" | "mul" | "div" | "and" | "or" | "xor":
                return e.arith(i.op, x, args[1])
            case "min" | "max":
                return e.extreme(i.op, x, args[1])
            case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
                return e.compare(i.op, x, args[1])
            case "neg":
                return e.neg(x)
            case "abs":
                return e.abs(x)
            case "not":
                return e.invert(x)
            case "select":
                return e.select(x, args[1], args[2])
            case "fma":
                return e.fma(x, args[1], args[2])
            case "copysign":
                return e.copysign(x, args[1])
            case "sqrt" | "rint" | "floor" | "ceil" | "trunc":
                return e.un(i.op, x)
            case "cast":
                return e.cast(x, i.dtype)
            case "round":
                return e.widen(e.narrow(x, str(i.attr)), str(i.attr))
        if i.op in MATH:
            return self._math(i.op, args)
        raise AssertionError(i.op)

    def _math(self, op: str, args: list[Lanes]) -> Lanes:
        e, x = self.e, args[0]
        if x.dtype == "f32" and op in vmath.NARROW:
            return vmath.NARROW[op](e, x)  # type: ignore[no-any-return]
        if x.dtype == "f32" and op in vmath.PERIODIC:
            fast = vmath._sincos(e, x, vmath.PERIODIC[op])
            return e.if_any(e.invert(e.abs(x) < e.const(x, 1e4)), lambda: e.wide(op, x), fast)
        if op == "sigmoid":
            one = e.const(x, 1.0)
            return one / (one + e.wide("exp", -x))
        return e.wide(op, *args)

    def leaf(self, n: int) -> Lanes | None:
        """A uniform source."""
        i = self.k.insts[n]
        if i.op == "const":
            assert i.attr is not None
            assert not isinstance(i.attr, str)
            return Lanes(self.e, constant(VALUE[i.dtype], i.attr), i.dtype)
        if i.op == "scalar":
            assert isinstance(i.attr, int)
            raw = self.word(self.layout.scalars + i.attr)
            return Lanes(self.e, self.b.bitcast(raw, F64) if i.dtype == "f64" else raw, i.dtype)
        return None

    def uniforms(self) -> None:
        """Everything that is one value for the launch."""
        for n in self.s.uniform:
            leaf = self.leaf(n)
            self.scalar[n] = (
                leaf
                if leaf is not None
                else self.compute(n, [self.scalar[a] for a in self.k.insts[n].args])
            )

    # -- body -------------------------------------------------------------------------------------

    def body(self) -> None:
        """Tasks, their rows, and the loops over columns."""
        self.function("body")
        b = self.b
        self.rows, self.cols, self.numel = (
            self.word(w) for w in (Word.ROWS, Word.COLS, Word.NUMEL)
        )
        self.outer_sizes = [self.word(self.layout.sizes + d) for d in range(self.k.outer)]
        self.stride = [
            [
                self.word(self.layout.strides + o * (self.k.outer + 1) + d)
                for d in range(self.k.outer + 1)
            ]
            for o in range(len(self.k.operands))
        ]
        self.base = [
            b.inttoptr(self.word(self.layout.pointers + o), PTR)
            for o in range(len(self.k.operands))
        ]
        self.uniforms()
        per, tasks = self.word(Word.ROWS_PER_TASK), self.word(Word.TASKS)
        self.tile_bytes = self.word(Word.TILE_BYTES)
        if self.tile:
            mine = b.atomic_rmw("add", self.word_at(Word.NEXT_SCRATCH), self.i64(1), "monotonic")
            self.scratch = b.inttoptr(
                b.add(self.word(Word.SCRATCH), b.mul(mine, self.word(Word.SCRATCH_BYTES))), PTR
            )
        head, inside, done = (b.append_basic_block(n) for n in ("task.head", "task", "done"))
        b.branch(head)
        b.position_at_end(head)
        task = b.atomic_rmw("add", self.word_at(Word.NEXT_TASK), self.i64(1), "monotonic")
        b.cbranch(b.icmp_unsigned("<", task, tasks), inside, done)
        b.position_at_end(inside)
        first = b.mul(task, per)
        stop = b.add(first, per)
        stop = b.select(b.icmp_unsigned("<", stop, self.rows), stop, self.rows)
        self.partial = {n: self._partial(n, task) for n in self.s.totals}
        for n in self.s.totals:
            self._clear(n)
        self.loop("row", first, stop, 1, [], lambda r, _: self._row(r))
        b.branch(head)
        b.position_at_end(done)
        b.ret_void()

    def _partial(self, n: int, task: Any) -> Any:
        b = self.b
        base = b.inttoptr(self.word(self.layout.totals + self.total[n]), PTR)
        step = b.mul(task, self.cols) if n in self.s.elem_totals else task
        return b.gep(base, [step], source_etype=I64)

    def _identity(self, dtype: str) -> float:
        return -0.0 if dtype in FLOATS else 0

    def _clear(self, n: int) -> None:
        """Start a task's partial totals at the identity."""
        dtype = self.k.insts[n].dtype
        t = VALUE[dtype]
        p = self.partial[n]
        zero = constant(t, self._identity(dtype))
        if n not in self.s.elem_totals:
            self.b.store(zero, p)
            return

        def put(j: Any, _: Any) -> list[Any]:
            self.b.store(zero, self.b.gep(p, [j], source_etype=t))
            return []

        self.loop("clear", self.i64(0), self.cols, 1, [], put)

    def _row(self, r: Any) -> list[Any]:
        b, k, s = self.b, self.k, self.s
        index: list[Any] = [None] * k.outer
        rest = r
        for d in range(k.outer - 1, 0, -1):
            q = b.udiv(rest, self.outer_sizes[d])
            index[d] = b.sub(rest, b.mul(q, self.outer_sizes[d]))
            rest = q
        index[0] = rest
        self.index = index
        self.at_row = []
        for o in range(len(k.operands)):
            off = b.mul(index[0], self.stride[o][0])
            for d in range(1, k.outer):
                off = b.add(off, b.mul(index[d], self.stride[o][d]))
            self.at_row.append(b.gep(self.base[o], [off], source_etype=I8))
        left = b.sub(self.numel, b.mul(r, self.cols))
        self.n = b.select(b.icmp_unsigned("<", left, self.cols), left, self.cols)
        uniform = dict(self.scalar)
        for depth, loop in enumerate(s.loops):
            for v in s.row[depth]:
                if v not in self.scalar:
                    self.scalar[v] = self._row_value(v)
            if not loop.empty():
                self._columns(loop)
        for v in s.row_totals:
            self._row_total(v)
        for v in s.row_stores:
            i = k.insts[v]
            assert isinstance(i.attr, int)
            memory = k.operands[i.attr].dtype
            b.store(
                self.e.narrow(self.scalar[i.args[0]], memory),
                self.at_row[i.attr],
                align=ITEMSIZE[memory],
            )
        self.scalar = uniform
        return []

    def _row_value(self, n: int) -> Lanes:
        i = self.k.insts[n]
        if i.op == "load":
            assert isinstance(i.attr, int)
            memory = self.k.operands[i.attr].dtype
            return self.e.widen(
                self.b.load(self.at_row[i.attr], typ=MEMORY[memory], align=ITEMSIZE[memory]), memory
            )
        if i.op == "iota":
            assert isinstance(i.attr, int)
            return Lanes(self.e, self.index[i.attr], "i64")
        return self.compute(n, [self.scalar[a] for a in i.args])

    def _row_total(self, n: int) -> None:
        i = self.k.insts[n]
        x = self.e.cast(self.scalar[i.args[0]], i.dtype)
        t = VALUE[i.dtype]
        old = Lanes(self.e, self.b.load(self.partial[n], typ=t), i.dtype)
        self.b.store((old + x).v, self.partial[n])

    # -- a pass over the columns -------------------------------------------------------------------

    def _columns(self, loop: Loop) -> None:
        """Full blocks, then one masked block for the rest; reductions come out as row values."""
        b = self.b
        accs = [self._start(n) for n in loop.reduces]
        full = b.and_(self.n, self.i64(-W))
        accs = self.loop(
            "block", self.i64(0), full, W, accs, lambda j, a: self._block(loop, j, a, None)
        )
        tail, after = b.append_basic_block("tail"), b.append_basic_block("after")
        before = b.block
        b.cbranch(b.icmp_unsigned("<", full, self.n), tail, after)
        b.position_at_end(tail)
        left = self.e.splat(Lanes(self.e, b.trunc(b.sub(self.n, full), I32), "i32")).v
        mask = b.icmp_unsigned("<", ir.Constant(ir.VectorType(I32, W), list(range(W))), left)
        new = self._block(loop, full, accs, mask)
        end = b.block
        b.branch(after)
        b.position_at_end(after)
        ends = []
        for old, v in zip(accs, new, strict=True):
            p = b.phi(old.type)
            p.add_incoming(old, before)
            p.add_incoming(v, end)
            ends.append(p)
        for n, p in zip(loop.reduces, ends, strict=True):
            self.scalar[n] = self._tree(n, p)

    def _start(self, n: int) -> Any:
        return constant(ir.VectorType(VALUE[self.k.insts[n].dtype], W), self._reduce_identity(n))

    def _reduce_identity(self, n: int) -> float:
        i = self.k.insts[n]
        if i.op == "prod":
            return 1
        if i.op == "sum":
            return self._identity(i.dtype)
        if i.dtype in FLOATS:
            return float("-inf") if i.op == "rmax" else float("inf")
        unsigned = i.dtype in ("u8", "bool")
        bits = int(VALUE[i.dtype].width)
        if i.op == "rmax":
            return 0 if unsigned else -(1 << (bits - 1))
        return (1 << bits) - 1 if unsigned else (1 << (bits - 1)) - 1

    def _combine(self, n: int, x: Lanes, y: Lanes) -> Lanes:
        match self.k.insts[n].op:
            case "sum":
                return x + y
            case "prod":
                return x * y
            case "rmax":
                return self.e.extreme("max", x, y)
        return self.e.extreme("min", x, y)

    def _tree(self, n: int, v: Any) -> Lanes:
        """The lanes' values as one: upper half onto lower half, five times."""
        dtype = self.k.insts[n].dtype
        width = W
        while width > 1:
            half = width // 2
            und = ir.Constant(v.type, ir.Undefined)
            lo = self.b.shuffle_vector(
                v, und, ir.Constant(ir.VectorType(I32, half), list(range(half)))
            )
            hi = self.b.shuffle_vector(
                v, und, ir.Constant(ir.VectorType(I32, half), list(range(half, width)))
            )
            v = self._combine(n, Lanes(self.e, lo, dtype), Lanes(self.e, hi, dtype)).v
            width = half
        return Lanes(self.e, self.b.extract_element(v, ir.Constant(I32, 0)), dtype)

    def _block(self, loop: Loop, j: Any, accs: list[Any], mask: Any) -> list[Any]:
        """One block of W columns: values, then reductions and totals, then stores."""
        e, k = self.e, self.k
        lanes: dict[int, Lanes] = {}

        def get(n: int) -> Lanes:
            if n not in lanes:
                lanes[n] = e.splat(self.scalar[n])
            return lanes[n]

        for n in loop.needs:
            i = k.insts[n]
            if n in loop.from_tile:
                lanes[n] = self._tile_load(n, j)
            elif i.op == "load":
                assert isinstance(i.attr, int)
                o = k.operands[i.attr]
                v = self.load_block(
                    self.at_row[i.attr], j, o.inner, self.stride[i.attr][-1], o.dtype, mask
                )
                lanes[n] = e.widen(v, o.dtype)
            elif i.op == "iota":
                at = e.splat(Lanes(e, j, "i64")).v
                lanes[n] = Lanes(e, self.b.add(at, ir.Constant(at.type, list(range(W)))), "i64")
            else:
                lanes[n] = self.compute(n, [get(a) for a in i.args])
            if n in loop.to_tile:
                self._tile_store(n, j, lanes[n])
        out = []
        for n, acc in zip(loop.reduces, accs, strict=True):
            i = k.insts[n]
            x = e.cast(get(i.args[0]), i.dtype)
            if mask is not None:
                x = Lanes(
                    e,
                    self.b.select(mask, x.v, constant(x.v.type, self._reduce_identity(n))),
                    i.dtype,
                )
            out.append(self._combine(n, Lanes(e, acc, i.dtype), x).v)
        for n in loop.totals:
            i = k.insts[n]
            x = e.cast(get(i.args[0]), i.dtype)
            old = self.load_block(self.partial[n], j, "unit", None, i.dtype, mask)
            self.store_block(
                (Lanes(e, old, i.dtype) + x).v, self.partial[n], j, "unit", None, i.dtype, mask
            )
        for n in loop.stores:
            i = k.insts[n]
            assert isinstance(i.attr, int)
            o = k.operands[i.attr]
            self.store_block(
                e.narrow(get(i.args[0]), o.dtype),
                self.at_row[i.attr],
                j,
                o.inner,
                self.stride[i.attr][-1],
                o.dtype,
                mask,
            )
        return out

    def _tile_address(self, n: int, j: Any) -> Any:
        at = self.b.add(
            self.b.mul(self.tile_bytes, self.i64(self.tile[n])), self.b.mul(j, self.i64(8))
        )
        return self.b.gep(self.scratch, [at], source_etype=I8)

    def _tile_store(self, n: int, j: Any, x: Lanes) -> None:
        self.b.store(x.v, self._tile_address(n, j), align=8)

    def _tile_load(self, n: int, j: Any) -> Lanes:
        dtype = self.k.insts[n].dtype
        return Lanes(
            self.e,
            self.b.load(self._tile_address(n, j), typ=ir.VectorType(VALUE[dtype], W), align=8),
            dtype,
        )

    # -- finish -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Totals over tasks in order, then what follows them."""
        self.function("finish")
        b, k, s = self.b, self.k, self.s
        self.cols, tasks = self.word(Word.COLS), self.word(Word.TASKS)
        self.uniforms()
        operands = {
            int(i.attr or 0)
            for n, i in enumerate(k.insts)
            if self.at[n] == "finish" and i.op in ("fload", "store")
        }
        base = {o: b.inttoptr(self.word(self.layout.pointers + o), PTR) for o in operands}
        stride = {o: self.word(self.layout.strides + o * (k.outer + 1) + k.outer) for o in operands}
        sums = {n: b.inttoptr(self.word(self.layout.totals + self.total[n]), PTR) for n in s.totals}
        for n in s.totals:
            if n not in s.elem_totals:
                self.scalar[n] = self._sum_tasks(n, sums[n], tasks)
        for n in s.single:
            i = k.insts[n]
            if i.op == "store":
                o = k.operands[i.attr]  # type: ignore[index]
                b.store(
                    self.e.narrow(self.scalar[i.args[0]], o.dtype),
                    base[int(i.attr or 0)],
                    align=ITEMSIZE[o.dtype],
                )
            elif i.op == "fload":
                o = k.operands[i.attr]  # type: ignore[index]
                self.scalar[n] = self.e.widen(
                    b.load(base[int(i.attr or 0)], typ=MEMORY[o.dtype], align=ITEMSIZE[o.dtype]),
                    o.dtype,
                )
            else:
                self.scalar[n] = self.compute(n, [self.scalar[a] for a in i.args])
        if s.column:
            self._finish_columns(base, stride, sums, tasks)
        b.ret_void()

    def _sum_tasks(self, n: int, p: Any, tasks: Any) -> Lanes:
        dtype = self.k.insts[n].dtype
        t = VALUE[dtype]

        def step(i: Any, acc: list[Any]) -> list[Any]:
            x = Lanes(self.e, self.b.load(self.b.gep(p, [i], source_etype=t), typ=t), dtype)
            return [(Lanes(self.e, acc[0], dtype) + x).v]

        return Lanes(
            self.e,
            self.loop("tasks", self.i64(0), tasks, 1, [constant(t, self._identity(dtype))], step)[
                0
            ],
            dtype,
        )

    def _finish_columns(self, base: Any, stride: Any, sums: Any, tasks: Any) -> None:
        b = self.b

        def block(j: Any, mask: Any) -> None:
            e, k = self.e, self.k
            lanes: dict[int, Lanes] = {}

            def get(n: int) -> Lanes:
                if n not in lanes:
                    lanes[n] = (
                        self._column_total(n, sums[n], tasks, j, mask)
                        if n in self.s.elem_totals
                        else e.splat(self.scalar[n])
                    )
                return lanes[n]

            for n in self.s.column:
                i = k.insts[n]
                if i.op == "store":
                    o = k.operands[i.attr]  # type: ignore[index]
                    self.store_block(
                        e.narrow(get(i.args[0]), o.dtype),
                        base[i.attr],
                        j,
                        o.inner,
                        stride[i.attr],
                        o.dtype,
                        mask,
                    )
                elif i.op == "fload":
                    o = k.operands[i.attr]  # type: ignore[index]
                    lanes[n] = e.widen(
                        self.load_block(base[i.attr], j, o.inner, stride[i.attr], o.dtype, mask),
                        o.dtype,
                    )
                else:
                    lanes[n] = self.compute(n, [get(a) for a in i.args])

        def full_block(j: Any, _: Any) -> list[Any]:
            block(j, None)
            return []

        full = b.and_(self.cols, self.i64(-W))
        self.loop("columns", self.i64(0), full, W, [], full_block)
        left = self.e.splat(Lanes(self.e, b.trunc(b.sub(self.cols, full), I32), "i32")).v
        mask = b.icmp_unsigned("<", ir.Constant(ir.VectorType(I32, W), list(range(W))), left)
        block(full, mask)

    def _column_total(self, n: int, p: Any, tasks: Any, j: Any, mask: Any) -> Lanes:
        dtype = self.k.insts[n].dtype
        t = ir.VectorType(VALUE[dtype], W)

        def step(i: Any, acc: list[Any]) -> list[Any]:
            row = self.b.gep(p, [self.b.mul(i, self.cols)], source_etype=I64)
            x = Lanes(self.e, self.load_block(row, j, "unit", None, dtype, mask), dtype)
            return [(Lanes(self.e, acc[0], dtype) + x).v]

        return Lanes(
            self.e,
            self.loop("parts", self.i64(0), tasks, 1, [constant(t, self._identity(dtype))], step)[
                0
            ],
            dtype,
        )


def generate(kernel: Kernel, s: Schedule, name: str) -> ir.Module:
    """The LLVM module of a kernel: functions `body_<name>` and `finish_<name>`, each of one pointer."""
    g = Generator(kernel, s, name)
    g.body()
    g.finish()
    return g.module
