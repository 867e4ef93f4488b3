"""The tile interpreter: runs a kernel's loop IR tile by tile on real SBUF and PSUM arrays.

Slow by design. It moves every byte between HBM and on-chip memory and counts it, puts each value where
the tile plan says, and evaluates instructions with numpy. So it judges code generation (same bits), the
plan (nothing overlaps, everything fits) and the cost model (same bytes, same footprint). It reads the
kernel's instructions and the plan's places; of code generation it shares `vmath` and the order that
Note [Fixed reduction order] (ir.py) fixes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from adaptive_eager.device_sim.onchip import OnChip, Tile, psum, sbuf
from adaptive_eager.kernels.ir import FLOATS, ITEMSIZE, ROW_REDUCE, levels, rows_per_task
from adaptive_eager.kernels.numops import MEMORY, VALUE, Array, compute, narrow, widen
from adaptive_eager.kernels.schedule import W
from adaptive_eager.kernels.select import Op
from adaptive_eager.kernels.tiling import Load, Put, Section, TilePlan, aligned, sharing


@dataclass(slots=True)
class Counts:
    """Bytes moved between HBM and on-chip memory; highest bytes of a partition in use."""

    read: int = 0
    written: int = 0
    sbuf: int = 0
    psum: int = 0


def interpret(plan: TilePlan, pointers: Sequence[int], scalars: Sequence[float]) -> Counts:
    """Run a plan on the given addresses (of element 0 of each operand) and scalars.

    Raises:
        OnChipError: when the plan puts a tile where there is no room for it.
    """
    run = _Run(plan, pointers, scalars)
    run.rows()
    run.finish()
    run.counts.sbuf, run.counts.psum = run.sbuf.peak, run.psum.peak
    return run.counts


class _Accumulator:
    """A total: what the rows of the current task come to, and all tasks before it. One for the launch,
    or one for each column: these lie side by side over all partitions, or in HBM."""

    def __init__(self, run: _Run, n: int) -> None:
        plan = run.plan
        self.n, self.dtype = n, run.insts[n].dtype
        self.zero = -0.0 if self.dtype in FLOATS else 0
        self.wide = n in plan.schedule.elem_totals
        self.size = plan.space.cols if self.wide else 1
        offset, _ = plan.places["total", n]
        self.spilled = self.wide and plan.totals_at == "hbm"
        self.run = run
        if self.spilled:
            self.parts = [np.full(self.size, self.zero, VALUE[self.dtype]) for _ in range(2)]
            return
        in_psum = self.wide and plan.totals_at == "psum"
        memory = run.psum if in_psum else run.sbuf
        each = plan.column_total_bytes() if self.wide else 8
        apart = memory.bank or aligned(each)
        self.across = each // 8
        self.tiles = [
            memory.place(offset + k * apart, each, run.P if self.wide else 1) for k in range(2)
        ]
        for t in self.tiles:
            t.view(VALUE[self.dtype], self.across)[...] = self.zero

    def get(self, which: int, c: Array) -> Array:
        """Values of columns c."""
        if self.spilled:
            self.run.counts.read += 8 * c.size
            return self.parts[which][c]
        view: Array = self.tiles[which].view(VALUE[self.dtype], self.across)
        return np.asarray(view[c // self.across, c % self.across])

    def set(self, which: int, c: Array, v: Array) -> None:
        """Set columns c."""
        if self.spilled:
            self.run.counts.written += 8 * c.size
            self.parts[which][c] = v
            return
        view = self.tiles[which].view(VALUE[self.dtype], self.across)
        view[c // self.across, c % self.across] = v

    def add(self, rows: Array, c: Array, x: Array, valid: Array, per: int, last: int) -> None:
        """Add values x (row, column) of rows in order; a task that ends goes to those before it."""
        part, total = self.get(0, c), self.get(1, c)
        zero = VALUE[self.dtype](self.zero)
        with np.errstate(all="ignore"):
            for r, v, ok in zip(rows, x, valid, strict=True):
                if r % per == 0:
                    part = np.full(c.size, zero)
                part = np.where(ok, part + v, part)
                if (r + 1) % per == 0 or r == last:
                    total = part + zero if r // per == 0 else total + part
        self.set(0, c, part)
        self.set(1, c, total)


class _Run:
    """One launch."""

    def __init__(self, plan: TilePlan, pointers: Sequence[int], scalars: Sequence[float]) -> None:
        self.plan, self.k, self.insts = plan, plan.kernel, plan.kernel.insts
        self.at = levels(plan.kernel)
        self.space, self.R, self.F = plan.space, plan.rows, plan.cols
        self.P = plan.spec.partitions
        self.sbuf: OnChip = sbuf(plan.spec)
        self.psum: OnChip = psum(plan.spec)
        self.counts = Counts()
        self.hbm = [self._memory(o, p) for o, p in enumerate(pointers)]
        self.uniform: dict[int, Array] = {}
        for n, level in enumerate(self.at):
            if level == "uniform":
                self.uniform[n] = self._uniform(n, scalars)
        self.tiles: dict[Any, Tile] = {}
        self.totals = {n: _Accumulator(self, n) for n in plan.schedule.totals}
        self.residents: set[Any] = set()
        self.held: dict[int, int] = {}
        self.parity = 0
        self.places: dict[Any, tuple[int, int]] = {}

    # -- memory -------------------------------------------------------------------------------

    def _memory(self, o: int, pointer: int) -> Array:
        """HBM from an operand's element 0 on, as far as its strides reach."""
        dtype = np.dtype(MEMORY[self.k.operands[o].dtype])
        strides = self.space.strides[o]
        reach = sum((n - 1) * s for n, s in zip(self.space.outer, strides, strict=False) if n)
        count = max(1, reach + max(0, self.space.cols - 1) * strides[-1] + 1)
        raw: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        out: Array = np.frombuffer(raw, dtype)
        return out

    def _uniform(self, n: int, scalars: Sequence[float]) -> Array:
        i = self.insts[n]
        if i.op == "scalar":
            assert isinstance(i.attr, int)
            return np.asarray(scalars[i.attr], VALUE[i.dtype])
        if i.op == "const":
            assert i.attr is not None
            with np.errstate(over="ignore"):
                return np.asarray(i.attr).astype(VALUE[i.dtype])
        return np.asarray(
            compute(i, [self.uniform[a] for a in i.args], [self.insts[a].dtype for a in i.args])
        )

    def place(self, key: Any, nbytes: int, count: int, *, double: bool = False) -> Tile:
        """A tile where the plan says; of two buffers the one whose turn it is."""
        offset, size = self.places.get(key) or self.plan.places[key]
        if double and size > nbytes:
            offset += self.parity * aligned(nbytes)
        tile = self.tiles[key] = self.sbuf.place(offset, nbytes, count)
        return tile

    def room(self, size: int, *, wide: bool) -> int:
        """Bytes of a full tile of elements of `size` bytes: what a shorter one takes, too."""
        return self.R * (self.F if wide else 1) * size

    def drop(self, keys: Sequence[Any]) -> None:
        for key in keys:
            self.sbuf.free(self.tiles.pop(key))

    # -- rows ---------------------------------------------------------------------------------

    def rows(self) -> None:
        """All tiles of rows."""
        per_tile = self.P * self.R
        for k in range(self.plan.tiles()):
            first = k * per_tile
            self.number = k
            self.tile(first, min(self.space.rows - first, per_tile))

    def tile(self, first: int, count: int) -> None:
        """`count` rows from `first` on."""
        self.used = -(-count // self.R)
        index = first + np.arange(self.used * self.R).reshape(self.used, self.R)
        self.row = index
        self.real = index < first + count
        left = self.space.numel - index * self.space.cols
        self.length = np.clip(left, 0, self.space.cols) * self.real
        self.index = np.unravel_index(np.minimum(index, self.space.rows - 1), self.space.outer)
        self.values: dict[int, Array] = {}
        before = set(self.tiles)
        self.parity = self.number % 2
        for x in self.plan.row_loads:
            self.load(x, 0, 1)
        for section in self.plan.sections:
            self.section(section)
        for n in self.plan.schedule.row_totals:
            self.sum_rows(n)
        self.parity = self.number % 2
        for p in self.plan.row_puts:
            self.store(p, 0, 1)
        self.drop([k for k in self.tiles if k not in before and k not in self.residents])

    def section(self, section: Section) -> None:
        self.places = section.places
        for op in section.before:
            self.run(op)
        streamed = len(self.plan.sections) > 1
        states = {
            op.out: self._start(op) for op in section.ops
            if streamed and self.insts[op.out].op in ROW_REDUCE
        }  # fmt: skip
        for b in range(self.plan.blocks):
            self.parity = (self.number * self.plan.blocks + b) % 2
            self.block(section, b * self.F, states)
        for n, (tile, state) in states.items():
            self.sbuf.free(tile)
            self.keep(n, self._result(n, *state))

    def block(self, section: Section, c0: int, states: dict[int, Any]) -> None:
        """Columns c0 .. c0 + F of a tile's rows."""
        f = min(self.F, self.space.cols - c0)
        self.columns = c0 + np.arange(f)
        self.valid = self.columns[None, None, :] < self.length[..., None]
        mine: list[Any] = []
        stored = {p.source for p in section.puts}
        mine += [("load", x.value) for x in section.loads if self.load(x, c0, f)]
        last: dict[int, int] = {}
        for at, op in enumerate(section.ops):
            for r in op.reads:
                last[r] = at
        for at, op in enumerate(section.ops):
            i = self.insts[op.out]
            wide = self.at[op.out] == "elem"
            if op.out in states:
                states[op.out] = self._advance(op.out, states[op.out], self.argument(op), c0)
                continue
            result = self.value(op, c0)
            for r in op.reads:
                own = self.at[r] == "elem" and ("value", r) in self.tiles and r not in stored
                if own and last[r] == at:
                    self.drop([("value", r)])
                    mine.remove(("value", r))
                    del self.values[r]
            if i.op == "total":
                continue
            self.keep(op.out, result, double=op.out in stored)
            if wide:
                mine.append(("value", op.out))
        mine += [("put", p.operand) for p in section.puts if self.store(p, c0, f)]
        self.drop(mine)
        for kind, n in mine:
            if kind != "put":
                self.values.pop(n, None)

    # -- DMA ----------------------------------------------------------------------------------

    def offsets(self, o: int, f: int, c0: int) -> Array:
        """Element offsets in an operand of the tile's rows and f columns, 0 where there is none."""
        strides = self.space.strides[o]
        at = sum(i * s for i, s in zip(self.index, strides, strict=False))
        at = np.asarray(at)[..., None] + (c0 + np.arange(f)) * strides[-1]
        return np.where(self.inside(f, c0), at, 0)

    def inside(self, f: int, c0: int) -> Array:
        """Which of the tile's rows and columns exist."""
        return (c0 + np.arange(f))[None, None, :] < self.length[..., None]

    def load(self, x: Load, c0: int, f: int) -> bool:
        """Bring a value for the tile; True where a tile of its own was placed for it."""
        o = x.operand
        dtype = self.k.operands[o].dtype
        size = ITEMSIZE[dtype]
        key = ("load", x.value)
        slices = sharing(self.space.outer, self.space.strides[o])[1]
        if x.how == "resident":
            if key not in self.residents:
                self._bring(x, slices)
            tile = self.tiles[key]
            columns = self.space.cols if x.wide else 1
            every: Array = tile.view(MEMORY[dtype], slices * columns)[: self.used]
            at = self.slice_of(o)[..., None] * columns + (c0 + np.arange(f)) * x.wide
            got = np.take_along_axis(every, at.reshape(self.used, -1), 1)
            self.values[x.value] = widen(got, dtype).reshape(self.used, self.R, f)
            return False
        real = self.inside(f, c0) if x.wide else self.real[..., None]
        if x.how == "hold":
            which = self.slice_of(o)[self.real]
            fresh = np.unique(which)
            fresh = fresh[fresh > self.held.get(x.value, -1)]
            self.held[x.value] = int(which.max(initial=-1))
            self.counts.read += fresh.size * f * size
        else:
            self.counts.read += int(np.count_nonzero(real)) * size
        tile = self.place(key, self.room(size, wide=x.wide), self.used, double=True)
        view = tile.view(MEMORY[dtype], self.R * f).reshape(self.used, self.R, f)
        got = self.hbm[o][self.offsets(o, f, c0)]
        view[...] = np.where(real, got, view)
        self.values[x.value] = widen(view, dtype)
        return True

    def slice_of(self, o: int) -> Array:
        """For each row of the tile the number of the operand's slice that it uses."""
        number = np.zeros_like(self.row)
        for i, n, s in zip(self.index, self.space.outer, self.space.strides[o], strict=False):
            if s and n > 1:
                number = number * n + i
        return number

    def _bring(self, x: Load, slices: int) -> None:
        """Bring all of an operand that rows share into every partition."""
        o = x.operand
        dtype, strides = self.k.operands[o].dtype, self.space.strides[o]
        columns = self.space.cols if x.wide else 1
        shape = [n if s and n > 1 else 1 for n, s in zip(self.space.outer, strides, strict=False)]
        at = np.zeros(1, np.int64)
        for n, s in zip(shape, strides, strict=False):
            at = (at[:, None] + np.arange(n) * s).reshape(-1)
        at = (at[:, None] + np.arange(columns) * strides[-1]).reshape(-1)
        assert at.size == slices * columns
        size = ITEMSIZE[dtype]
        tile = self.place(("load", x.value), at.size * size, self.P)
        tile.view(MEMORY[dtype], at.size)[...] = self.hbm[o][at]
        self.residents.add(("load", x.value))
        self.counts.read += at.size * size

    def store(self, p: Put, c0: int, f: int) -> bool:
        """Take a value out; True where it was spread into a tile of its own first."""
        o = p.operand
        dtype = self.k.operands[o].dtype
        size = ITEMSIZE[dtype]
        x = self.evaluate(p.value, dict(self.values))
        shape = (self.used, self.R, f)
        out = narrow(np.broadcast_to(x, shape), self.insts[p.value].dtype, dtype)
        fresh = not p.wide or p.source < 0
        if fresh:
            room = self.room(size, wide=p.wide)
            tile = self.place(("put", o), room, self.used, double=True)
            view = tile.view(MEMORY[dtype], self.R * f).reshape(shape)
            view[...] = out
            out = view
        real = self.inside(f, c0) if p.wide else self.real[..., None]
        at = self.offsets(o, f, c0) if p.wide else self.row_offsets(o)
        self.hbm[o].flags.writeable = True
        self.hbm[o][at[real]] = out[real]
        self.counts.written += int(np.count_nonzero(real)) * size
        return fresh and p.wide

    def row_offsets(self, o: int) -> Array:
        at = sum(i * s for i, s in zip(self.index, self.space.strides[o], strict=False))
        return np.asarray(at)[..., None]

    # -- engines ------------------------------------------------------------------------------

    def keep(self, n: int, x: Array, *, double: bool = False) -> None:
        """Put an op's result into its tile, in the dtype that it has there."""
        memory = self.plan.selection.tile[n]
        x = np.array(x)  # the tile may take the place of an operand that ends here
        f = x.shape[-1] if self.at[n] == "elem" else 1
        nbytes = self.room(ITEMSIZE[memory], wide=self.at[n] == "elem")
        tile = self.place(("value", n), nbytes, self.used, double=double)
        view = tile.view(MEMORY[memory], self.R * f).reshape(self.used, self.R, f)
        view[...] = narrow(np.broadcast_to(x, view.shape), self.insts[n].dtype, memory)
        self.values[n] = widen(view, memory)

    def run(self, op: Op) -> None:
        """An op on row values."""
        self.keep(op.out, self.value(op, 0))

    def argument(self, op: Op) -> Array:
        """What a reduction or total reduces, over all of the block."""
        a = self.insts[op.out].args[0]
        i = self.insts[op.out]
        known = {r: self.values[r] for r in op.reads}
        x = self.evaluate(a, known)
        f = self.columns.size
        x = np.broadcast_to(x, (self.used, self.R, f))
        with np.errstate(all="ignore"):
            return x.astype(VALUE[i.dtype]) if x.dtype != VALUE[i.dtype] else x

    def evaluate(self, n: int, known: dict[int, Array]) -> Array:
        """Value n: known from a tile, or computed from such values, as an instruction does inside."""
        if n in known:
            return known[n]
        if n in self.uniform:
            return self.uniform[n]
        i = self.insts[n]
        if i.op == "iota":
            known[n] = self._iota(n)
        else:
            args = [self.evaluate(a, known) for a in i.args]
            known[n] = compute(i, args, [self.insts[a].dtype for a in i.args])
        return known[n]

    def _iota(self, n: int) -> Array:
        attr = self.insts[n].attr
        if attr == "inner":
            shape = (self.used, self.R, self.columns.size)
            return np.broadcast_to(self.columns.astype(np.int64), shape)
        assert isinstance(attr, int)
        return self.index[attr].astype(np.int64)[..., None]

    def value(self, op: Op, c0: int) -> Array:
        """What an op makes; a total goes to its accumulator."""
        n = op.out
        i = self.insts[n]
        if i.op == "total":
            x = self.argument(op).reshape(self.used * self.R, -1)
            valid = self.valid.reshape(x.shape)
            per = rows_per_task(self.space.rows, self.space.cols)
            real = self.real.reshape(-1)
            rows = self.row.reshape(-1)[real]
            self.totals[n].add(rows, self.columns, x[real], valid[real], per, self.space.rows - 1)
            return x
        if i.op in ROW_REDUCE:
            lanes, nan = self._advance(n, self._start(op, tile=False), self.argument(op), c0)[1]
            return self._result(n, lanes, nan)
        known = {r: self.values[r] for r in op.reads}
        x = self.evaluate(n, known)
        if self.at[n] == "elem":
            x = np.broadcast_to(x, (self.used, self.R, self.columns.size))
        return x

    def sum_rows(self, n: int) -> None:
        """Add a row value of the tile's rows to a total."""
        i = self.insts[n]
        x = self.evaluate(i.args[0], dict(self.values))
        x = np.broadcast_to(x, (self.used, self.R, 1)).reshape(-1, 1)
        real = self.real.reshape(-1)
        x = x[real].astype(VALUE[i.dtype])
        per = rows_per_task(self.space.rows, self.space.cols)
        rows = self.row.reshape(-1)[real]
        ok = np.ones(x.shape, bool)
        self.totals[n].add(rows, np.zeros(1, np.int64), x, ok, per, self.space.rows - 1)

    # -- row reductions -----------------------------------------------------------------------

    def _identity(self, n: int) -> Any:
        i = self.insts[n]
        if i.op == "prod":
            return 1
        if i.op == "sum":
            return -0.0 if i.dtype in FLOATS else 0
        if i.dtype in FLOATS:
            return float("-inf") if i.op == "rmax" else float("inf")
        if i.dtype == "bool":
            return i.op == "rmin"
        info: Any = np.iinfo(np.dtype(VALUE[i.dtype]))
        return info.min if i.op == "rmax" else info.max

    def _start(self, op: Op, *, tile: bool = True) -> Any:
        """(tile, lanes and whether a NaN was seen) before the first column."""
        dtype = VALUE[self.insts[op.out].dtype]
        shape = (self.used, self.R, W)
        place = self.sbuf.place(
            self.places["state", op.out][0], self.R * W * 9, self.used
        ) if tile else None  # fmt: skip
        return place, (np.full(shape, self._identity(op.out), dtype), np.zeros(shape[:2], bool))

    def _combine(self, n: int, x: Array, y: Array) -> Array:
        i = self.insts[n]
        with np.errstate(all="ignore"):
            if i.op == "sum":
                return x + y
            if i.op == "prod":
                return x * y
            if i.dtype in FLOATS:
                return np.where(y > x if i.op == "rmax" else y < x, y, x)
            return np.maximum(x, y) if i.op == "rmax" else np.minimum(x, y)

    def _advance(self, n: int, state: Any, x: Array, c0: int) -> Any:
        """Lanes after the block's columns: column c goes to lane c % 32, absent ones hold the identity."""
        tile, (lanes, nan) = state
        dtype = x.dtype
        front = c0 % W
        x = np.where(self.valid, x, dtype.type(self._identity(n)))
        if dtype.kind == "f" and self.insts[n].op in ("rmax", "rmin"):
            nan = nan | np.isnan(x).any(-1)
        total = -(-(front + x.shape[-1]) // W) * W
        padded = np.full((*x.shape[:-1], total), self._identity(n), dtype)
        padded[..., front : front + x.shape[-1]] = x
        for b in range(0, total, W):
            lanes = self._combine(n, lanes, padded[..., b : b + W])
        return tile, (lanes, nan)

    def _result(self, n: int, lanes: Array, nan: Array) -> Array:
        """Upper half onto lower half until one lane is left."""
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = self._combine(n, lanes[..., :half], lanes[..., half:])
        return np.where(nan[..., None], np.nan, lanes).astype(lanes.dtype) if nan.any() else lanes

    # -- after the rows -----------------------------------------------------------------------

    def finish(self) -> None:
        """What follows the totals: single values, then a block of columns at a time."""
        s = self.plan.schedule
        if not s.totals:
            return
        single: dict[int, Array] = {
            n: self.totals[n].get(1, np.zeros(1, np.int64))
            for n in s.totals
            if n not in s.elem_totals
        }
        keys = [self._finish_one(n, single, np.zeros(1, np.int64)) for n in s.single]
        size = self.plan.finish_block
        for c0 in range(0, self.space.cols if s.column else 0, size):
            c = np.arange(c0, min(c0 + size, self.space.cols))
            known = dict(single) | {n: self.totals[n].get(1, c) for n in s.elem_totals}
            self.drop([k for k in [self._finish_one(n, known, c) for n in s.column] if k])
        self.drop([k for k in keys if k])

    def _finish_one(self, n: int, known: dict[int, Array], c: Array) -> Any:
        """One finish instruction on columns c; the key of the tile that it made."""
        i = self.insts[n]
        if n not in self.plan.selection.tile and i.op != "store":
            return None  # a conversion inside those that read it
        key = ("finish", n)
        nbytes = 8 * c.size
        if i.op == "store":
            assert isinstance(i.attr, int)
            dtype = self.k.operands[i.attr].dtype
            x = np.broadcast_to(self.evaluate(i.args[0], known), c.shape)
            out = narrow(x, self.insts[i.args[0]].dtype, dtype)
            tile = self.place(key, nbytes, 1)
            view = tile.view(MEMORY[dtype], c.size)[0]
            view[...] = out
            self.hbm[i.attr].flags.writeable = True
            self.hbm[i.attr][c * self.space.strides[i.attr][-1]] = view
            self.counts.written += c.size * ITEMSIZE[dtype]
            return key
        if i.op == "fload":
            assert isinstance(i.attr, int)
            dtype = self.k.operands[i.attr].dtype
            tile = self.place(key, nbytes, 1)
            view = tile.view(MEMORY[dtype], c.size)[0]
            view[...] = self.hbm[i.attr][c * self.space.strides[i.attr][-1]]
            self.counts.read += c.size * ITEMSIZE[dtype]
            known[n] = widen(view, dtype)
            return key
        memory = self.plan.selection.tile[n]
        x = np.broadcast_to(self.evaluate(n, known), c.shape)
        tile = self.place(key, nbytes, 1)
        view = tile.view(MEMORY[memory], c.size)[0]
        view[...] = narrow(x, i.dtype, memory)
        known[n] = widen(view, memory)
        return key
