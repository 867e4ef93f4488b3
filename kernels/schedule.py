"""When each value of a kernel is computed: the analysis between loop IR and machine code.

A row is run through in *loops*, one for each depth of row reduction (Note [Row stages] in ir.py). A loop computes what
its sinks need: stores, reductions, totals. A value needed in two loops is loaded or computed again, except for
transcendentals, which are kept in a tile of scratch memory (one row long) by the first loop that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from adaptive_eager.kernels.ir import ITEMSIZE, MATH, RANDOM, ROW_REDUCE, Kernel, levels, stages
from adaptive_eager.kernels.vmath import NARROW, PERIODIC

W = 32
"""Lanes of a block of columns."""
SHORT_W = 16
"""Lanes of a block in a kernel's variant for rows of no more columns than that. The bits are the same:
the lanes it lacks would hold identities (Note [Fixed reduction order])."""


def block_width(kernel: Kernel) -> int:
    """Lanes of a block. A processor looks some 500 instructions ahead; blocks of long chains are so long that it sees one or two, and
    waits for results most of the time. More chains side by side in a block then take half the time. Reductions
    add 32 lanes at a time."""
    if any(i.op in ROW_REDUCE or i.op == "total" for i in kernel.insts):
        return W
    depth: list[int] = []
    for i in kernel.insts:
        own = DEPTH["math"] if i.op in MATH else DEPTH.get(i.op, 1)
        depth.append(own + max([depth[a] for a in i.args], default=0))
    return WIDE_W if max(depth, default=0) >= WIDE_DEPTH else W


WIDE_W = 64
"""Lanes of a block where the chain of instructions is long."""
WIDE_DEPTH = 30
DEPTH = {"math": 25, "random": 70, "round": 4, "div": 4, "sqrt": 4}
"""How long a chain of instructions is, in arithmetic ones: those of transcendentals, rounding, division."""


def stream_align(dtype: str) -> int:
    """Bytes that a streaming store's address is a multiple of: a cache line, or a block of narrow lanes."""
    return min(64, W * ITEMSIZE[dtype])


TURN = 16
"""Rows of a transposed operand that are read together: a cache line of float32."""


@dataclass(slots=True)
class Loop:
    """One pass over a row's columns. needs: elem values in order. The others are instruction numbers."""

    needs: list[int] = field(default_factory=list)
    from_tile: set[int] = field(default_factory=set)
    to_tile: set[int] = field(default_factory=set)
    reduces: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)

    def empty(self) -> bool:
        """Nothing to do in this pass."""
        return not (self.reduces or self.totals or self.stores)


@dataclass(slots=True)
class Schedule:
    """The order of everything in a kernel. All lists hold instruction numbers.

    uniform: once a thread. row[s]: row values available after s reductions. loops[s]: the pass that follows. row_totals,
    row_stores: at the end of each row. tiles: values kept in scratch. single, column: finish values and stores.
    """

    uniform: list[int]
    row: list[list[int]]
    loops: list[Loop]
    row_totals: list[int]
    row_stores: list[int]
    tiles: list[int]
    totals: list[int]
    elem_totals: set[int]
    single: list[int]
    column: list[int]


def turned(kernel: Kernel) -> list[int]:
    """Operands that are read in blocks of rows."""
    loaded = {i.attr for i in kernel.insts if i.op == "load"}
    return [o for o, x in enumerate(kernel.operands) if x.inner == "turn" and o in loaded]


def schedule(kernel: Kernel) -> Schedule:
    """Schedule a verified kernel."""
    at, depth = levels(kernel), stages(kernel)
    insts = kernel.insts
    loaded = {i.attr for i in insts if i.op == "load"}
    nloops = 1 + max([0, *[depth[n] for n in range(len(insts)) if at[n] in ("row", "elem")]])
    s = Schedule(
        [],
        [[] for _ in range(nloops)],
        [Loop() for _ in range(nloops)],
        [],
        [],
        [],
        [],
        set(),
        [],
        [],
    )
    for n, i in enumerate(insts):
        if i.op == "total":
            s.totals.append(n)
            of = i.args[0]
            if at[of] == "elem":
                s.elem_totals.add(n)
                s.loops[depth[of]].totals.append(n)
            else:
                s.row_totals.append(n)
        elif i.op == "store":
            if at[n] == "finish":
                continue
            if at[n] == "row":
                s.row_stores.append(n)
            else:
                s.loops[nloops - 1 if i.attr in loaded else depth[i.args[0]]].stores.append(n)
        elif i.op in ROW_REDUCE:
            s.loops[depth[i.args[0]]].reduces.append(n)
            s.row[depth[n]].append(n)
        elif at[n] == "uniform":
            s.uniform.append(n)
        elif at[n] == "row":
            s.row[depth[n]].append(n)
    _needs(kernel, s, at)
    _finish(kernel, s, at)
    return s


def _needs(kernel: Kernel, s: Schedule, at: Sequence[str]) -> None:
    insts = kernel.insts
    first: dict[int, int] = {}
    for k, loop in enumerate(s.loops):
        want: set[int] = set()
        todo = [insts[n].args[0] for n in (*loop.reduces, *loop.totals, *loop.stores)]
        while todo:
            n = todo.pop()
            if at[n] != "elem" or n in want:
                continue
            want.add(n)
            if insts[n].op in MATH | RANDOM and first.setdefault(n, k) < k:
                loop.from_tile.add(n)
                s.loops[first[n]].to_tile.add(n)
                continue
            todo.extend(insts[n].args)
        loop.needs = sorted(want)
    s.tiles = sorted({n for loop in s.loops for n in loop.to_tile})


def _finish(kernel: Kernel, s: Schedule, at: Sequence[str]) -> None:
    insts = kernel.insts
    column: set[int] = set()
    for n, i in enumerate(insts):
        if at[n] != "finish":
            continue
        if i.op == "total":
            wide = n in s.elem_totals
        elif i.op in ("fload", "store"):
            assert isinstance(i.attr, int)
            wide = kernel.operands[i.attr].inner != "zero"
        else:
            wide = any(a in column for a in i.args)
        if wide:
            column.add(n)
        if i.op != "total":
            (s.column if wide else s.single).append(n)


SECONDS = {"element": 6e-11, "cheap": 2e-11, "math": 2e-10, "random": 1.5e-9, "libm": 1e-8}
"""What an element costs on one core from the second-level cache, and what an instruction adds to it: cheap
ones, vmath's, random numbers, and those that call libm lane by lane."""


def seconds_per_element(kernel: Kernel) -> float:
    """An estimate, to choose the number of threads by."""
    total = SECONDS["element"]
    for i, level in zip(kernel.insts, levels(kernel), strict=True):
        if level == "elem":
            inline = i.dtype == "f32" and (i.op in NARROW or i.op in PERIODIC)
            kind = "math" if inline else "libm"
            total += SECONDS[kind if i.op in MATH else "random" if i.op in RANDOM else "cheap"]
    return total
