"""What a tile plan costs: its transfers and engine instructions, as `device_sim.work` wants them."""

from __future__ import annotations

from functools import lru_cache

from adaptive_eager.device_sim.engines import Instruction
from adaptive_eager.device_sim.spec import ChipSpec
from adaptive_eager.device_sim.work import Transfer, Work
from adaptive_eager.kernels.ir import ITEMSIZE, ROW_REDUCE, Kernel, Space, levels
from adaptive_eager.kernels.select import Op
from adaptive_eager.kernels.tiling import Load, Put, TilePlan, sharing, tile_plan


@lru_cache(maxsize=8192)
def planned(kernel: Kernel, space: Space, spec: ChipSpec) -> tuple[bool, Work]:
    """(whether a group of ops may be this one kernel, its launch) on a chip: `TilePlan.fits`, `work_of`.

    Raises:
        ValueError: as `tile_plan`.
    """
    plan = tile_plan(kernel, space, spec)
    return plan.fits, work_of(plan)


def work_of(plan: TilePlan) -> Work:
    """The launch of a tile plan: bytes as the tile interpreter moves them, one by one."""
    return _Coster(plan).work()


class _Coster:
    """Counts one plan."""

    def __init__(self, plan: TilePlan) -> None:
        self.p, self.k, self.space = plan, plan.kernel, plan.space
        self.at = levels(plan.kernel)
        self.partitions = min(plan.spec.partitions, -(-self.space.rows // plan.rows)) or 1
        self.moving = plan.spec.tensor_moving
        self.tiles, self.blocks = plan.tiles(), plan.blocks

    def work(self) -> Work:
        plan = self.p
        transfers: list[Transfer] = []
        known: set[int] = set()
        if self.tiles:
            for s in plan.sections:
                for x in s.loads:
                    if x.how != "resident" or x.value not in known:
                        transfers.append(self.load(x))
                    known.add(x.value)
                transfers += [self.put(p) for p in s.puts]
            transfers += [self.load(x) for x in plan.row_loads]
            transfers += [self.put(p) for p in plan.row_puts]
            transfers += self.spills()
        transfers += self.finish_transfers()
        body = self.body() if self.tiles else ()
        return Work(
            max(1, self.tiles), tuple(transfers), body, self.tail(), plan.buffers == 2,
            plan.sbuf, plan.psum,
        )  # fmt: skip

    # -- bytes --------------------------------------------------------------------------------

    def run(self, o: int, *, wide: bool) -> int:
        """Contiguous bytes of one partition's share of a tile."""
        operand, strides = self.k.operands[o], self.space.strides[o]
        size = ITEMSIZE[operand.dtype]
        if not wide:
            return size * (self.p.rows if strides[-2:-1] == (1,) else 1)
        if operand.inner == "any":
            return size  # a "turn" operand is transposed by DMA on its way (trainium2_arch)
        whole = self.p.cols >= self.space.cols and strides[-2:-1] == (self.space.cols,)
        return size * min(self.p.cols, self.space.cols) * (self.p.rows if whole else 1)

    def load(self, x: Load) -> Transfer:
        size = ITEMSIZE[self.k.operands[x.operand].dtype]
        slices = sharing(self.space.outer, self.space.strides[x.operand])[1]
        each = self.space.cols if x.wide else 1
        if x.how == "tile":
            count = self.space.numel if x.wide else self.space.rows
        else:
            count = slices * each
        times = 1 if x.how == "resident" else self.tiles * (self.blocks if x.wide else 1)
        return Transfer(
            count * size, self.run(x.operand, wide=x.wide), self.partitions, False, times
        )

    def put(self, p: Put) -> Transfer:
        size = ITEMSIZE[self.k.operands[p.operand].dtype]
        count = self.space.numel if p.wide else self.space.rows
        times = self.tiles * (self.blocks if p.wide else 1)
        return Transfer(
            count * size, self.run(p.operand, wide=p.wide), self.partitions, True, times
        )

    def spills(self) -> list[Transfer]:
        """Totals of columns that lie in HBM go in and out with each tile."""
        if self.p.totals_at != "hbm":
            return []
        sums = len(self.p.schedule.elem_totals)
        nbytes, times = 16 * self.space.cols * sums * self.tiles, self.tiles * self.blocks
        run = 8 * min(self.p.cols, self.space.cols)
        return [Transfer(nbytes, run, 1, out, times) for out in (False, True)]

    def finish_transfers(self) -> list[Transfer]:
        s = self.p.schedule
        if not s.totals:
            return []
        out = []
        for group, count in ((s.single, 1), (s.column, self.space.cols)):
            for n in group:
                i = self.k.insts[n]
                if i.op in ("store", "fload"):
                    assert isinstance(i.attr, int)
                    nbytes = count * ITEMSIZE[self.k.operands[i.attr].dtype]
                    out.append(Transfer(nbytes, min(nbytes, 2048) or 1, 1, i.op == "store", 1))
        if self.p.totals_at == "hbm" and s.column:
            nbytes = 8 * self.space.cols * len(s.elem_totals)
            out.append(Transfer(nbytes, 4096, 1, False, 1))
        return out

    # -- instructions -------------------------------------------------------------------------

    def itemsize(self, op: Op) -> int:
        """Bytes of the widest tile that an op touches; HBM's 64-bit types compute in 32 bits there."""
        tile = self.p.selection.tile
        return min(4, max([ITEMSIZE[tile[v]] for v in (op.out, *op.reads) if v in tile]))

    def issue(self, op: Op, sequence: list[Instruction], made: dict[int, int], times: int) -> None:
        """Append an op's instructions."""
        i = self.k.insts[op.out]
        wide = self.at[op.out] == "elem" or i.op in ROW_REDUCE or i.op == "total"
        free = self.p.rows * min(self.p.cols, self.space.cols) if wide else self.p.rows
        after = tuple(sorted({made[r] for r in op.reads if r in made}))
        if i.op == "total":
            pieces = -(-min(self.p.cols, self.space.cols) // self.moving) * self.p.rows
            n = min(self.moving, self.p.cols, self.space.cols)
            sequence.append(Instruction("partition_sum", n, 4, after, times * pieces))
            return
        for kind in op.kinds:
            sequence.append(Instruction(kind, free, self.itemsize(op), after, times))
            after = (len(sequence) - 1,)
        made[op.out] = len(sequence) - 1

    def body(self) -> tuple[Instruction, ...]:
        """One tile's instructions."""
        sequence: list[Instruction] = []
        made: dict[int, int] = {}
        for s in self.p.sections:
            for op in s.before:
                self.issue(op, sequence, made, 1)
            for op in s.ops:
                self.issue(op, sequence, made, self.blocks if self.at[op.out] != "row" else 1)
            for p in s.puts:
                if p.source < 0:
                    free = self.p.rows * min(self.p.cols, self.space.cols)
                    size = ITEMSIZE[self.k.operands[p.operand].dtype]
                    sequence.append(Instruction("tensor_copy", free, size, (), self.blocks))
        for n in self.p.schedule.row_totals:
            after = tuple(made[a] for a in self.k.insts[n].args if a in made)
            sequence.append(Instruction("partition_sum", max(1, self.p.rows), 4, after))
        return tuple(sequence)

    def tail(self) -> tuple[Instruction, ...]:
        """What follows the last tile: single values, then columns."""
        s = self.p.schedule
        ops = {op.out: op for op in self.p.selection.ops}
        sequence: list[Instruction] = []
        made: dict[int, int] = {}
        for group, count in ((s.single, 1), (s.column, max(1, self.space.cols))):
            for n in group:
                op = ops.get(n)
                if op is None:
                    continue
                after = tuple(made[r] for r in op.reads if r in made)
                for kind in op.kinds:
                    sequence.append(Instruction(
                        kind, min(count, self.moving), 4, after, -(-count // self.moving)
                    ))  # fmt: skip
                    after = (len(sequence) - 1,)
                made[n] = len(sequence) - 1
        return tuple(sequence)
