"""How a kernel's rows and columns are laid over SBUF: its tile plan.

A tile is 128 partitions of R consecutive rows of F columns each. Its plan says where in a partition each
value lies, which operands stay there for the whole launch, and how many bytes move; from it follow
cost (`cost.work_of`), what the tile interpreter does, and whether a group of ops may be one kernel.

Note [Whole plans]
A plan is *whole* when each element of HBM moves once: a row stays in SBUF until its last reduction is
done, and what several rows share stays for all of them. The planner fuses only what has a whole plan
with two buffers for everything DMA touches (`TilePlan.fits`), so capacity decides fusion. A single op
always runs: its rows are then streamed in blocks of columns, and loaded again after each reduction.

Note [Flat kernels]
A kernel without reductions and without indices whose operands are contiguous, or one value, does not
care where a row ends: its elements are dealt out again in rows that fill the partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from adaptive_eager.device_sim.onchip import Places
from adaptive_eager.device_sim.spec import ChipSpec
from adaptive_eager.kernels.ir import ITEMSIZE, ROW_REDUCE, Kernel, Space, levels, pruned
from adaptive_eager.kernels.schedule import Schedule, W, schedule
from adaptive_eager.kernels.select import Op, Selection, select

SATURATES = 4096
"""Bytes per partition of a transfer from which more brings nothing (bandwidth guide)."""
LEAST_FREE = 128
"""Elements per partition below which an instruction costs more to start than to do."""

How = Literal["tile", "hold", "resident"]
"""tile: each tile brings its own. hold: neighbouring rows share slices, each is brought once and kept
until the next. resident: brought once, kept in every partition."""


@dataclass(frozen=True, slots=True)
class Load:
    """A value that DMA brings. wide: one for each column, else one for each row."""

    value: int
    operand: int
    wide: bool
    how: How


@dataclass(frozen=True, slots=True)
class Put:
    """A value that DMA takes out. source: the value in a tile that it is converted from, or -1 where
    it is spread into a tile first, since it is one value for many columns."""

    value: int
    operand: int
    wide: bool
    source: int


@dataclass(slots=True)
class Section:
    """One pass over the columns of a tile's rows, in blocks. before: ops on row values, once a tile.
    loads, ops, puts: once a block. places: of what lives inside a block, as in the plan."""

    before: list[Op] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    places: dict[Key, tuple[int, int]] = field(default_factory=dict)


Key = tuple[str, int]
"""("load" | "value" | "put" | "state" | "row", number): what lies at a place."""


@dataclass(slots=True)
class TilePlan:
    """Where everything of a launch lies, in bytes of a partition, and how it moves.

    space: the kernel's, or a flat one dealt out anew. rows, cols: R and F. buffers: of what DMA touches,
    2 or 1. places: (offset, bytes) of each tile and its second buffer. totals_at: memory
    of the columns' totals. sbuf, psum: bytes of a partition that are in use, at most. whole: Note [Whole plans].
    """

    kernel: Kernel
    schedule: Schedule
    selection: Selection
    space: Space
    rows: int
    cols: int
    buffers: int
    sections: list[Section]
    row_loads: list[Load]
    row_puts: list[Put]
    places: dict[Key, tuple[int, int]]
    totals_at: Literal["psum", "sbuf", "hbm"]
    sbuf: int
    psum: int
    whole: bool
    spec: ChipSpec

    @property
    def fits(self) -> bool:
        """Whether a group of ops may be this one kernel."""
        size = self.rows * self.cols
        enough = size >= min(LEAST_FREE, max(1, self.space.cols))
        return self.whole and self.buffers == 2 and enough

    @property
    def blocks(self) -> int:
        """Blocks of columns of a row."""
        return -(-self.space.cols // self.cols) if self.space.cols else 0

    def tiles(self) -> int:
        """Tiles of rows."""
        return -(-self.space.rows // (self.spec.partitions * self.rows)) if self.space.cols else 0

    def column_total_bytes(self) -> int:
        """Bytes of a partition that one accumulator of the columns' totals takes."""
        return column_bytes(self.space, self.spec)

    @property
    def finish_block(self) -> int:
        """Columns that what follows the rows takes at a time."""
        return finish_block(self.cols, self.spec)


def aligned(nbytes: int) -> int:
    """Bytes rounded up to where a second buffer starts."""
    return -(-nbytes // Places.ALIGN) * Places.ALIGN


def column_bytes(space: Space, spec: ChipSpec) -> int:
    """Bytes of a partition that 64 bits for each column take, side by side over all partitions."""
    return 8 * -(-space.cols // spec.partitions)


def finish_block(cols: int, spec: ChipSpec) -> int:
    """Columns that what follows the rows takes at a time, in tiles of `cols`."""
    return min(max(1, cols), spec.tensor_moving)


def sharing(outer: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bool, int]:
    """(whether the rows that share a slice are neighbours, number of slices) of an operand."""
    slices, shared, ordered = 1, False, True
    for size, stride in zip(outer, strides, strict=False):
        if size == 1:
            continue
        if stride:
            slices *= size
            ordered = ordered and not shared
        else:
            shared = True
    return ordered, slices


def is_flat(kernel: Kernel, space: Space) -> bool:
    """Note [Flat kernels]."""
    if len(space.outer) != 1 or any(
        i.op in ROW_REDUCE or i.op in ("iota", "total") for i in kernel.insts
    ):
        return False
    return all(space.outer[0] == 1 or s[0] == s[1] * space.cols for s in space.strides)


def dealt(space: Space, cols: int) -> Space:
    """A flat space in rows of `cols`."""
    strides = tuple([(s[1] * cols, s[1]) for s in space.strides])
    return Space((-(-space.numel // cols),), cols, space.numel, strides)


def tile_plan(kernel: Kernel, space: Space, spec: ChipSpec) -> TilePlan:
    """The best plan that fits into SBUF: whole, with two buffers, in large tiles, as far as it goes.

    Raises:
        ValueError: for a kernel that does not fit even one element at a time.
    """
    planner = _Planner(kernel, space, spec)
    for shape, buffers, resident, streamed in planner.choices():
        plan = planner.plan(shape, buffers, resident=resident, streamed=streamed)
        if plan is not None:
            return plan
    raise ValueError(
        f"{spec.name}: {spec.sbuf_partition_bytes} bytes of SBUF in a partition hold no tile of\n{kernel}"
    )


class _Planner:
    """Tries shapes for one kernel."""

    def __init__(self, kernel: Kernel, space: Space, spec: ChipSpec) -> None:
        self.k = kernel = pruned(kernel)
        self.space, self.spec = space, spec
        self.s, self.sel = schedule(kernel), select(kernel)
        self.at = levels(kernel)
        self.flat = is_flat(kernel, space)
        self.widest = max([ITEMSIZE[o.dtype] for o in kernel.operands if o.inner != "zero"] or [4])
        self.op_of = {op.out: op for op in self.sel.ops}

    # -- choices ------------------------------------------------------------------------------

    def choices(self) -> Iterator[tuple[tuple[int, int], int, bool, bool]]:
        """(rows and columns, buffers, keep what rows share, stream rows), best first."""
        for resident in (True, False):
            for buffers in (2, 1):
                for shape in self.shapes():
                    yield shape, buffers, resident, False
        for resident in (True, False):
            for buffers in (2, 1):
                f = max(1, SATURATES // self.widest)
                while f:
                    yield (1, f), buffers, resident, True
                    f //= 2

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Whole tiles, larger ones first."""
        target = max(1, SATURATES // self.widest)
        if self.flat:
            share = -(-self.space.numel // (self.spec.partitions * self.spec.lnc))
            f = max(1, min(target, max(self.spec.min_cycles, share), max(1, self.space.numel)))
            while f:
                yield 1, f
                f //= 2
            return
        cols, rows = max(1, self.space.cols), self.space.rows
        share = -(-rows // (self.spec.partitions * self.spec.lnc))
        r = max(1, min(target // cols, share))
        while r:
            yield r, cols
            r //= 2
        if len(self.s.loops) == 1:
            f = target
            while f:
                if f < cols:
                    yield 1, f
                f //= 2

    # -- sections -----------------------------------------------------------------------------

    def load(self, n: int, blocks: int, space: Space, *, resident: bool, streamed: bool) -> Load:
        o = self.k.insts[n].attr
        assert isinstance(o, int)
        ordered, slices = sharing(space.outer, space.strides[o])
        wide = self.at[n] == "elem"
        if slices == space.rows:
            return Load(n, o, wide, "tile")
        if resident and (slices == 1 or not ordered or (wide and (blocks > 1 or streamed))):
            return Load(n, o, wide, "resident")
        if ordered and not (wide and (blocks > 1 or streamed)):
            return Load(n, o, wide, "hold")
        return Load(n, o, wide, "tile")

    def put(self, n: int) -> Put:
        i = self.k.insts[n]
        assert isinstance(i.attr, int)
        wide = self.at[n] == "elem"
        v = i.args[0]
        source = v
        while source in self.sel.virtual:
            source = self.k.insts[source].args[0]
        if self.at[source] == "uniform" or (wide and self.at[source] != "elem"):
            source = -1
        return Put(v, i.attr, wide, source)

    def closure(self, wanted: list[int], done: set[int]) -> tuple[list[int], list[Op]]:
        """Loads and ops on wide values that these values need, in order."""
        loads: set[int] = set()
        ops: dict[int, Op] = {}
        todo = list(wanted)
        while todo:
            n = todo.pop()
            if n in done or n in ops or n in loads or self.at[n] in ("uniform", "finish"):
                continue
            if n in self.sel.virtual:
                todo.extend(self.k.insts[n].args)
            elif self.k.insts[n].op == "load":
                loads.add(n)
            else:
                op = self.op_of[n]
                ops[n] = op
                todo.extend(op.reads)
        return sorted(loads), [ops[n] for n in sorted(ops)]

    def whole_sections(self, make: dict[int, Load]) -> list[Section]:
        """Everything in one pass, in the order of the instructions."""
        section = Section()
        section.loads = [x for x in make.values() if x.wide]
        finish = {n for n, level in enumerate(self.at) if level == "finish"}
        sums = self.s.elem_totals
        early = {n for n in self.s.row[0] if self.k.insts[n].op not in ROW_REDUCE}
        section.before = [op for op in self.sel.ops if op.out in early]
        section.ops = [
            op
            for op in self.sel.ops
            if op.out not in early and (op.out not in finish or op.out in sums)
        ]  # a total of columns is summed up while rows run
        section.puts = [self.put(n) for n in self.wide_stores()]
        return [section]

    def wide_stores(self) -> list[int]:
        return sorted({n for loop in self.s.loops for n in loop.stores})

    def streamed_sections(self, make: dict[int, Load]) -> list[Section]:
        """A pass for each depth of reduction."""
        out = []
        done = {n for n, level in enumerate(self.at) if level == "row"}
        for depth, loop in enumerate(self.s.loops):
            section = Section()
            section.before = [
                self.op_of[n]
                for n in self.s.row[depth]
                if n in self.op_of and self.k.insts[n].op not in ROW_REDUCE
            ]
            section.puts = [self.put(n) for n in loop.stores]
            sinks = [self.op_of[n] for n in (*loop.reduces, *loop.totals)]
            wanted = [r for op in sinks for r in op.reads]
            wanted += [p.source for p in section.puts if p.source >= 0]
            loads, ops = self.closure(wanted, done)
            section.loads = [make[n] for n in loads]
            section.ops = ops + sinks
            out.append(section)
        return out

    # -- one plan -----------------------------------------------------------------------------

    def plan(
        self, shape: tuple[int, int], buffers: int, *, resident: bool, streamed: bool
    ) -> TilePlan | None:
        """The plan for a shape, or None where it does not fit."""
        rows, cols = shape
        space = dealt(self.space, cols) if self.flat else self.space
        cols = min(cols, max(1, space.cols))
        blocks = -(-space.cols // cols)
        streamed = streamed and len(self.s.loops) > 1
        make = {
            n: self.load(n, blocks, space, resident=resident, streamed=streamed)
            for n, i in enumerate(self.k.insts)
            if i.op == "load"
        }
        sections = self.streamed_sections(make) if streamed else self.whole_sections(make)
        row_loads = [x for x in make.values() if not x.wide]
        row_puts = [self.put(n) for n in self.s.row_stores]
        tiles = -(-space.rows // (self.spec.partitions * rows)) if space.cols else 0
        deep = (buffers if tiles * blocks > 1 else 1, buffers if tiles > 1 else 1)
        moved_once = not streamed and all(
            x.how != "tile" or sharing(space.outer, space.strides[x.operand])[1] == space.rows
            for x in make.values()
        )
        for totals_at in self.homes(space):
            places, sbuf, psum = self.lay(
                rows, cols, deep, space, sections, row_loads, row_puts, totals_at,
                streamed=streamed,
            )  # fmt: skip
            if sbuf <= self.spec.sbuf_partition_bytes:
                return TilePlan(
                    self.k, self.s, self.sel, space, rows, cols, buffers, sections, row_loads,
                    row_puts, places, totals_at, sbuf, psum, moved_once and totals_at != "hbm",
                    self.spec,
                )  # fmt: skip
        return None

    def homes(self, space: Space) -> list[Literal["psum", "sbuf", "hbm"]]:
        """Memories that could hold the columns' totals, best first."""
        count, each = 2 * len(self.s.elem_totals), column_bytes(space, self.spec)
        if not count:
            return ["psum"]
        fits = count <= self.spec.psum_banks and each <= self.spec.psum_bank_bytes
        return ["psum", "sbuf", "hbm"] if fits else ["sbuf", "hbm"]

    def lay(
        self,
        rows: int,
        cols: int,
        deep: tuple[int, int],
        space: Space,
        sections: list[Section],
        row_loads: list[Load],
        row_puts: list[Put],
        totals_at: str,
        *,
        streamed: bool,
    ) -> tuple[dict[Key, tuple[int, int]], int, int]:
        """Places of all tiles, and the bytes of SBUF and PSUM that they need. deep: buffers of wide
        tiles and of row values; where there is one block in all there is one buffer."""
        places: dict[Key, tuple[int, int]] = {}
        fixed = Places()
        psum = 0
        every = {x for s in sections for x in s.loads} | set(row_loads)

        def keep(key: Key, nbytes: int) -> None:
            if key not in places:
                places[key] = (fixed.take(nbytes), nbytes)

        for x in sorted(every, key=lambda x: x.value):
            size = ITEMSIZE[self.k.operands[x.operand].dtype]
            if x.how == "resident":
                slices = sharing(space.outer, space.strides[x.operand])[1]
                keep(("load", x.value), slices * (space.cols if x.wide else 1) * size)
            elif not x.wide:
                keep(("load", x.value), self.buffered(rows * size, deep[1]))
        for n, op in self.op_of.items():
            if self.at[n] == "row":
                keep(("value", n), rows * ITEMSIZE[op.dtype])
        for p in row_puts:
            size = ITEMSIZE[self.k.operands[p.operand].dtype]
            keep(("put", p.operand), self.buffered(rows * size, deep[1]))
        for n in self.s.totals:
            each = column_bytes(space, self.spec) if n in self.s.elem_totals else 8
            if n not in self.s.elem_totals or totals_at == "sbuf":
                keep(("total", n), self.buffered(each, 2))
            elif totals_at == "hbm":  # a block of them at a time
                keep(("total", n), self.buffered(8 * cols, 2))
            elif totals_at == "psum":
                bank = self.spec.psum_bank_bytes
                at = 2 * bank * sorted(self.s.elem_totals).index(n)
                places["total", n] = (at, 2 * each)
                psum = max(psum, at + bank + each)
        high = fixed.high
        for section in sections:
            high = max(high, self.lay_section(
                section, fixed.high, rows * cols, deep[0], streamed=streamed, rows=rows
            ))  # fmt: skip
        finish = Places(fixed.high)
        block = finish_block(cols, self.spec)
        for n in (*self.s.single, *self.s.column):
            i = self.k.insts[n]
            if i.op in ("store", "fload") or n in self.op_of:
                size = 8 * (block if n in self.s.column else 1)
                places["finish", n] = (finish.take(size), size)
        return places, max(high, finish.high), psum

    def buffered(self, nbytes: int, buffers: int) -> int:
        """Bytes of so many buffers, each but the first at a multiple of the alignment."""
        return aligned(nbytes) * (buffers - 1) + nbytes

    def lay_section(
        self,
        section: Section,
        floor: int,
        free: int,
        buffers: int,
        *,
        streamed: bool,
        rows: int,
    ) -> int:
        """Places of a section's wide tiles; the bytes in use, at most. Tiles that DMA touches keep
        their place for the whole section; the others are reused once their last reader has run."""
        space, places = Places(floor), section.places
        stored = {p.source for p in section.puts}
        for x in section.loads:
            if x.how != "resident":
                nbytes = self.buffered(free * ITEMSIZE[self.k.operands[x.operand].dtype], buffers)
                places["load", x.value] = (space.take(nbytes), nbytes)
        for p in section.puts:
            if p.source < 0:
                nbytes = self.buffered(free * ITEMSIZE[self.k.operands[p.operand].dtype], buffers)
                places["put", p.operand] = (space.take(nbytes), nbytes)
        last: dict[int, int] = {}
        for at, op in enumerate(section.ops):
            for r in op.reads:
                last[r] = at
        for op in section.ops:
            if self.k.insts[op.out].op in ROW_REDUCE and streamed:
                nbytes = rows * W * 9  # a lane's value and whether it has seen a NaN
                places["state", op.out] = (space.take(nbytes), nbytes)
            elif op.out in stored and self.at[op.out] == "elem":
                nbytes = self.buffered(free * ITEMSIZE[op.dtype], buffers)
                places["value", op.out] = (space.take(nbytes), nbytes)
        for at, op in enumerate(section.ops):
            for r in op.reads:
                own = self.at[r] == "elem" and self.k.insts[r].op != "load" and r not in stored
                if own and last[r] == at:
                    space.give(*places["value", r])
            if self.at[op.out] == "elem" and op.out not in stored:
                nbytes = free * ITEMSIZE[op.dtype]
                places["value", op.out] = (space.take(nbytes), nbytes)
        return space.high
