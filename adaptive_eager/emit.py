"""From a group to a kernel and the launch that runs it.

The group's dims are collapsed as far as its operands' strides allow. What collapses to one dim runs flat, in rows of
`FLAT_COLS` elements; a group with row reductions keeps its columns. Values written in the group are read from
registers; a slot nobody else needs has no operand at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptive_eager.kernels.build import Builder, Val
from adaptive_eager.kernels.ir import FLAT_COLS, Inner, Kernel, Operand, Space, pruned
from adaptive_eager.kernels.schedule import TURN
from adaptive_eager.meta import Meta
from adaptive_eager.plan import Group, Item, Use, store_slot

if TYPE_CHECKING:
    from adaptive_eager.tape import Node


@dataclass(slots=True)
class Emitted:
    """A kernel with everything a launch of it needs, addresses and scalars apart.

    slots, offsets: buffer slot and byte offset of each operand. scalars: for each kernel scalar an index into the segment's
    scalars, or ("const", number). guards: (operand index of the fault count, slot and meta of the checked operand, error, node).
    """

    kernel: Kernel
    space: Space
    slots: list[int]
    offsets: list[int]
    scalars: list[int | tuple[str, int]]
    guards: list[tuple[int, int, Meta, Any, Node]]


GUARD = 1 << 60
"""Slot number of the word that counts faults."""


def collapse(dims: tuple[int, ...], uses: list[tuple[int, ...]]) -> list[list[int]]:
    """Neighbouring dims that every operand walks with one stride, as lists of dim numbers, outermost first."""
    blocks: list[list[int]] = []
    for d in range(len(dims)):
        if blocks and all(s[blocks[-1][-1]] == s[d] * dims[d] for s in uses):
            blocks[-1].append(d)
        else:
            blocks.append([d])
    return blocks


class Emitter:
    """Traces one group."""

    def __init__(self, group: Group, stored: set[int], metas: dict[int, Meta]) -> None:
        assert group.dims is not None
        self.group, self.stored, self.metas = group, stored, metas
        self.dims = group.dims
        self.b = Builder()
        self.operands: list[Operand] = []
        self.uses: list[Use] = []
        self.slots: list[int] = []
        self.offsets: list[int] = []
        self.known: dict[tuple[int, Use], int] = {}
        self.values: dict[tuple[int, Use], Val] = {}
        self.positions: dict[Use, Val] = {}
        self.scalars: list[int | tuple[str, int]] = []
        self.scalar_kinds: list[str] = []
        self.scalar_known: dict[Any, int] = {}
        self.guards: list[tuple[int, int, Meta, Any, Node]] = []
        self.rowwise = bool(group.kinds & {"row", "col"})
        self._layout()

    def _layout(self) -> None:
        """Collapse dims and choose rows and columns."""
        dims = self.dims
        every = [
            u[2]
            for us in (*self.group.reads.values(), *self.group.writes.values())
            for u in us
            if u[0] == "p"
        ]
        every += [i.position[2] for i in self.group.items if i.position is not None]
        n = len(dims)
        if self.rowwise:
            blocks = collapse(dims[:-1], every)
            blocks.append([n - 1])
        else:
            blocks = collapse(dims, every) or [[]]
        self.blocks = blocks
        sizes = []
        for block in blocks:
            size = 1
            for d in block:
                size *= dims[d]
            sizes.append(size)
        self.outer: tuple[int, ...]
        if len(sizes) == 1:
            size = sizes[0]
            if not self.rowwise and size > FLAT_COLS:
                self.outer, self.cols, self.numel = (-(-size // FLAT_COLS),), FLAT_COLS, size
            else:
                self.outer, self.cols, self.numel = (1,), size, size
        else:
            self.outer, self.cols = tuple(sizes[:-1]), sizes[-1]
            self.numel = self.cols
            for size in self.outer:
                self.numel *= size

    def strides(self, use: Use) -> tuple[int, ...]:
        """A use's strides over the kernel's outer dims and columns."""
        kind, _, st = use
        if kind == "f":
            return (0,) * (len(self.outer) + 1)
        if kind == "c":
            return (*[0] * len(self.outer), st[-1])
        steps = [st[block[-1]] if block else 0 for block in self.blocks]
        if len(steps) == 1:
            s = steps[0]
            return (s * FLAT_COLS if len(self.outer) == 1 and self.outer[0] > 1 else 0, s)
        return tuple(steps)

    def operand(self, slot: int, use: Use, memory_dtype: str, itemsize: int) -> int:
        """The number of the operand for this slot and use."""
        k = self.known.get((slot, use))
        if k is None:
            strides = self.strides(use)
            k = self.known[slot, use] = len(self.operands)
            self.operands.append(Operand(memory_dtype, self.inner(slot, use, strides)))
            self.uses.append(use)
            self.slots.append(slot)
            self.offsets.append(use[1] * itemsize)
        return k

    def inner(self, slot: int, use: Use, strides: tuple[int, ...]) -> Inner:
        """How an operand's columns lie in memory."""
        if strides[-1] in (0, 1):
            return "unit" if strides[-1] else "zero"
        read_only = slot not in self.group.writes and use[0] == "p"
        totals = self.group.kinds & {"col", "all"}
        large = self.outer[-1] >= TURN and self.cols >= TURN
        return "turn" if strides[-2] == 1 and read_only and large and not totals else "any"

    def value(self, slot: int, use: Use, m: Meta, finish: bool) -> Val:
        """An operand's value: what the group wrote, else a load."""
        found = self.values.get((slot, use))
        if found is not None:
            return found
        assert m.tname is not None
        k = self.operand(slot, use, m.tname, m.itemsize)
        v = self.b.fload(k, m.tname) if finish else self.b.load(k, m.tname)
        self.values[slot, use] = v
        return v

    def position(self, use: Use) -> Val:
        """How many points come before this one in its tensor."""
        found = self.positions.get(use)
        if found is None:
            *outer, inner = self.strides(use)
            found = self.b.const(use[1], "i64")
            for d, step in enumerate(outer):
                if step:
                    found = found + self.b.iota(d) * self.scalar(("const", step), "i64")
            if inner:
                column = self.b.iota("inner")
                found = found + (
                    column if inner == 1 else column * self.scalar(("const", inner), "i64")
                )
            self.positions[use] = found
        return found

    def scalar(self, source: int | tuple[str, int], kind: str) -> Val:
        """A run-time scalar of the kernel."""
        k = self.scalar_known.get(source)
        if k is None:
            k = self.scalar_known[source] = len(self.scalars)
            self.scalars.append(source)
            self.scalar_kinds.append(kind)
        return self.b.scalar(k, kind)

    def trace(self, item: Item) -> None:
        """Append an item's arithmetic."""
        node = item.node
        r = node.recipe
        body = r.body
        assert body is not None
        finish = item.level in "fc"
        ins: list[Val | None] = []
        for slot, use, m in zip(node.ins, item.ins, r.ins, strict=True):
            ins.append(None if use is None else self.value(slot, use, m, finish))
        if item.position is not None:
            ins.append(self.position(item.position))
        scalars = [
            self.scalar(node.scalar0 + i, "i64" if t is int else "f64")
            for i, t in enumerate(r.scalar_types)
        ]
        scalars += [self.scalar(("const", n), "i64") for n in body.sizes]
        results = body.build(self.b, ins, scalars)
        for (slot, use), v in zip(item.stores, results, strict=False):
            self.values[slot, use] = v
        if body.guard is not None:
            operand, error = body.guard
            single: Use = ("f", 0, (0,) * len(self.dims))
            k = self.operand(GUARD + len(self.guards), single, "i64", 8)
            self.b.store(results[-1].to("i64"), k)
            self.guards.append((k, node.ins[operand], r.ins[operand], error, node))

    def finish(self) -> Emitted:
        """Trace everything, store what is needed."""
        for item in self.group.items:
            self.trace(item)
        for slot, uses in self.group.writes.items():
            if slot not in self.stored:
                continue
            use = uses[-1]
            m = self.metas[slot]
            assert m.tname is not None
            k = self.operand(slot, use, m.tname, m.itemsize)
            self.b.store(self.values[slot, use], k)
        kernel = pruned(
            Kernel(
                len(self.outer), tuple(self.operands), tuple(self.scalar_kinds), tuple(self.b.insts)
            )
        )
        strides = tuple([self.strides(u) for u in self.uses])
        space = Space(self.outer, self.cols, self.numel, strides)
        return Emitted(
            kernel,
            space,
            self.slots,
            self.offsets,
            self.scalars,
            self.guards,
        )


def dtype_of_writes(nodes: list[Node]) -> dict[int, Meta]:
    """For each written slot a meta with its dtype, as the kernel stores it."""
    out: dict[int, Meta] = {}
    for node in nodes:
        body = node.recipe.body
        if body is None:
            continue
        for target, _ in body.stores:
            out[store_slot(node, target)] = (
                node.recipe.outs[target] if target >= 0 else node.recipe.ins[~target]
            )
    return out
