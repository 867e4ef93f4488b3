"""Planning: which nodes of a segment become one kernel, in which order the launches run, what is stored.

Note [Joining a group]
A node may join a group when (1) they are connected through a slot; (2) it can be laid over the group's iteration
space; (3) every slot written in the group, before or by the node, is used through one index map; (4) no group after it
writes what the node reads or touches what it writes. (3) covers read-after-write, write-after-read, write-after-write,
partial writes and overlapping views at once: whatever does not line up exactly goes to another kernel. When a node
reads from several groups, these merge if (4) allows moving one next to the other.

A slot is stored to HBM iff it outlives the segment or another group touches it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adaptive_eager.lower import Body, IndexMap

if TYPE_CHECKING:
    from adaptive_eager.tape import Node

MAX_OPS = 64
"""Nodes of a group: bounds compile time."""
MAX_OPERANDS = 28
LOOK_BACK = 64
"""How many launches back one looks for an equal kernel to become a job of."""

Use = tuple[str, int, tuple[int, ...]]
"""How a slot is used over a group's dims: class ("p" while rows run, "f"/"c" after), offset, strides."""


@dataclass(slots=True)
class Item:
    """A node inside a group, its maps laid over the group's dims. level: where its pointwise values live.
    position: as a body's, like a use of a tensor that holds its own indices."""

    node: Node
    ins: list[Use | None]
    stores: list[tuple[int, Use]]
    level: str
    position: Use | None = None

    def regrid(self, coarse: tuple[int, ...], fine: tuple[int, ...]) -> Item:
        """The item over a refinement of its dims."""
        return Item(
            self.node,
            [None if u is None else regrid(u, coarse, fine) for u in self.ins],
            [(s, regrid(u, coarse, fine)) for s, u in self.stores],
            self.level,
            None if self.position is None else regrid(self.position, coarse, fine),
        )


@dataclass(slots=True)
class Group:
    """Nodes that run as one launch, in tape order. dims: the iteration space; None for a library call."""

    dims: tuple[int, ...] | None = None
    items: list[Item] = field(default_factory=list)
    reads: dict[int, list[Use]] = field(default_factory=dict)
    writes: dict[int, list[Use]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    library: Node | None = None

    def add(self, item: Item) -> None:
        """Append an item."""
        self.items.append(item)
        node = item.node
        for slot, use in zip(node.ins, item.ins, strict=True):
            if use is not None:
                self.reads.setdefault(slot, []).append(use)
        for slot, use in item.stores:
            self.writes.setdefault(slot, []).append(use)

    def touches(self) -> set[int]:
        """Slots read or written."""
        return self.reads.keys() | self.writes.keys()


def store_slot(node: Node, target: int) -> int:
    """The slot behind a store target of a body: a new buffer, or ~operand."""
    return node.first_out + target if target >= 0 else node.ins[~target]


def read_slots(node: Node) -> list[int]:
    """Slots whose old contents a node needs."""
    body = node.recipe.body
    if body is None:
        return list(node.ins)
    return [s for s, m in zip(node.ins, body.ins, strict=True) if m is not None]


def write_slots(node: Node) -> list[int]:
    """Slots a node writes: its new buffers and what it writes in place."""
    r = node.recipe
    return [*range(node.first_out, node.nbufs), *[node.ins[k] for k in r.writes]]


def refine(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The coarsest dims of which both a and b are groupings of neighbours, or None: (6, 4) and (2, 12) give (2, 3, 4)."""
    out: list[int] = []
    i, j = len(a) - 1, len(b) - 1
    x = y = 1
    while i >= 0 or j >= 0 or x != 1 or y != 1:
        if x == 1:
            if i < 0:
                return None
            x = a[i]
            i -= 1
        if y == 1:
            if j < 0:
                return None
            y = b[j]
            j -= 1
        step = min(x, y)
        if x % step or y % step:
            return None
        if step > 1:
            out.append(step)
        elif x != y:
            continue
        x, y = x // step, y // step
    return tuple(reversed(out))


def split(
    strides: tuple[int, ...], coarse: tuple[int, ...], fine: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides over coarse dims, laid over a refinement of them."""
    if coarse == fine:
        return strides
    out: list[int] = []
    k = len(fine) - 1
    if fine[-1:] == (1,) and coarse[-1:] != (1,):
        out.append(1)  # a row of one column
        k -= 1
    for size, step in zip(reversed(coarse), reversed(strides), strict=True):
        if size == 1 and k >= 0 and fine[k] == 1:
            out.append(step)
            k -= 1
        while size > 1:
            out.append(step)
            step *= fine[k]
            size //= fine[k]
            k -= 1
    return tuple(reversed(out))


def regrid(use: Use, coarse: tuple[int, ...], fine: tuple[int, ...]) -> Use:
    """A use over a refinement of its dims."""
    if use[0] == "p":
        return ("p", use[1], split(use[2], coarse, fine))
    return (use[0], use[1], (*[0] * (len(fine) - 1), use[2][-1]) if fine else ())


def lay(body: Body, dims: tuple[int, ...], how: str, node: Node) -> Item:
    """A node's maps over a group's dims. how: "same", "row", "finish" or "column"."""

    def use(m: IndexMap) -> Use:
        if how == "finish":
            return ("f", m.offset, (0,) * len(dims))
        if how == "column":
            return ("c", m.offset, (*[0] * (len(dims) - 1), m.strides[-1]))
        if m.level in "fc":
            return (m.level, m.offset, (*[0] * (len(dims) - 1), m.strides[-1]) if dims else ())
        if how == "row":
            return ("p", m.offset, (*split(m.strides, body.dims, dims[:-1]), 0))
        return ("p", m.offset, split(m.strides, body.dims, dims))

    level = {"finish": "f", "column": "c", "row": "r"}.get(how, "e")
    return Item(
        node,
        [None if m is None else use(m) for m in body.ins],
        [(store_slot(node, t), use(m)) for t, m in body.stores],
        level,
        None if body.position is None else use(body.position),
    )


def place(g: Group, node: Node) -> tuple[str, tuple[int, ...]] | None:
    """(how, dims): a way to lay the node over the group's space, with the dims the group then has; None if there is none."""
    body = node.recipe.body
    assert body is not None
    assert g.dims is not None
    dims, bd = g.dims, body.dims
    rowwise = g.kinds & {"row", "col"}
    if body.kind == "map" and body.position is None:
        if not bd and g.kinds - {"map"} and _reads_level(g, node, "f"):
            return "finish", dims
        if "col" in g.kinds and bd == dims[-1:] and _reads_level(g, node, "c"):
            return "column", dims
    if (body.kind == "all" and rowwise) or ("all" in g.kinds and body.kind in ("row", "col")):
        return None
    if rowwise and body.kind == "map":
        inner = dims[-1]
        if dims == bd:
            return "same", dims
        fine = refine(dims if inner != 1 else dims[:-1], bd)
        if fine is not None and (inner == 1 or fine[-1:] == (inner,)):
            return "same", (*fine, 1) if inner == 1 else fine
        if "row" in g.kinds:
            outer = refine(dims[:-1], bd)
            if outer is not None:
                return "row", (*outer, inner)
        return None
    if dims == bd:
        return "same", dims
    if body.kind in ("row", "col"):
        inner = bd[-1]
        if inner == 1 or (rowwise and dims[-1] != inner):
            return None
        fine = refine(dims, bd)
        return ("same", fine) if fine is not None and fine[-1] == inner else None
    fine = refine(dims, bd)
    if fine is None or ((body.kind == "all" or "all" in g.kinds) and len(fine) > 1):
        return None
    return "same", fine


def _reads_level(g: Group, node: Node, level: str) -> bool:
    """Whether the node reads a value the group makes at a finish level, and no value it makes while rows run."""
    found = False
    for slot in read_slots(node):
        for use in g.writes.get(slot, ()):
            if use[0] != level:
                return False
            found = True
    return found


def fits(g: Group, item: Item) -> bool:
    """Rule (3): one index map for every slot that is written."""
    for slot, use in zip(item.node.ins, item.ins, strict=True):
        if use is not None and any(w != use for w in g.writes.get(slot, ())):
            return False
    own = [(s, u) for s, u in zip(item.node.ins, item.ins, strict=True) if u is not None]
    for slot, use in item.stores:
        if any(w != use for w in g.writes.get(slot, ())) or any(
            w != use for w in g.reads.get(slot, ())
        ):
            return False
        if any(s == slot and u != use for s, u in own):
            return False
    return (
        len(g.items) < MAX_OPS
        and len(g.touches() | {s for s, _ in own} | {s for s, _ in item.stores}) <= MAX_OPERANDS
    )


def connected(g: Group, item: Item) -> bool:
    """Rule (1): reads what the group writes, or reads or writes what the group touches, single elements aside."""
    for slot, use in zip(item.node.ins, item.ins, strict=True):
        if use is not None and (slot in g.writes or (slot in g.reads and any(use[2]))):
            return True
    return any(slot in g.reads or slot in g.writes for slot, _ in item.stores)


def join(g: Group, node: Node) -> bool:
    """Put the node into the group if rules (1) to (3) allow it."""
    where = place(g, node)
    if where is None:
        return False
    how, dims = where
    body = node.recipe.body
    assert body is not None
    item = lay(body, dims, how, node)
    over = g if dims == g.dims else _regridded(g, dims)
    if not connected(over, item) or not fits(over, item):
        return False
    if over is not g:
        g.dims, g.items, g.reads, g.writes = over.dims, over.items, over.reads, over.writes
    _enter(g, item, body)
    return True


def _enter(g: Group, item: Item, body: Body) -> None:
    g.add(item)
    g.kinds.add(body.kind)


def _regridded(g: Group, dims: tuple[int, ...]) -> Group:
    """The group over a refinement of its dims."""
    assert g.dims is not None
    old = g.dims
    new = Group(dims, kinds=set(g.kinds))
    for i in g.items:
        new.add(i.regrid(old, dims))
    return new


def start(node: Node) -> Group:
    """A group of one node."""
    body = node.recipe.body
    if body is None:
        g = Group(library=node)
        everything: Use = ("p", -1, ())
        for s in node.ins:
            g.reads.setdefault(s, []).append(everything)
        for s in write_slots(node):
            g.writes.setdefault(s, []).append(everything)
        return g
    g = Group(body.dims)
    _enter(g, lay(body, body.dims, "same", node), body)
    return g


class _Order:
    """Groups in launch order while they are formed: which of them touch and write each slot, by position."""

    def __init__(self) -> None:
        self.groups: list[Group | None] = []
        self.touch: dict[int, set[int]] = {}
        self.write: dict[int, set[int]] = {}

    def note(self, at: int, g: Group) -> None:
        """A group has come to a position, or has grown there."""
        for s in g.touches():
            self.touch.setdefault(s, set()).add(at)
        for s in g.writes:
            self.write.setdefault(s, set()).add(at)

    def drop(self, at: int) -> None:
        """A position is empty from now on."""
        g = self.groups[at]
        assert g is not None
        for s in g.touches():
            self.touch[s].discard(at)
        for s in g.writes:
            self.write[s].discard(at)
        self.groups[at] = None

    def add(self, node: Node) -> None:
        """Put a node into a group, a new one if need be, and join the groups that feed it."""
        reads, writes = set(read_slots(node)), set(write_slots(node))
        fused = node.recipe.body is not None
        at = self._join(node, reads, writes) if fused else -1
        if at < 0:
            at = len(self.groups)
            self.groups.append(start(node))
        g = self.groups[at]
        assert g is not None
        self.note(at, g)
        if fused:
            self._merge_sources(at, reads)

    def _join(self, node: Node, reads: set[int], writes: set[int]) -> int:
        """The last group that the node joins, no earlier than rule (4) allows; -1 for none."""
        none: set[int] = set()
        after = [max(self.write.get(s) or (-1,)) for s in reads]
        after += [max(self.touch.get(s) or (-1,)) for s in writes]
        floor = max(after, default=-1)
        near = {p for s in reads | writes for p in self.touch.get(s, none) if p >= floor}
        for at in sorted(near, reverse=True):
            g = self.groups[at]
            if g is not None and g.library is None and join(g, node):
                return at
        return -1

    def _merge_sources(self, at: int, reads: set[int]) -> None:
        """Merge earlier groups that feed the one at `at` into it, nearest first, where rule (4) lets them move there."""
        none: set[int] = set()
        sources = {p for s in reads for p in self.write.get(s, none) if p < at}
        for i in sorted(sources, reverse=True):
            g, target = self.groups[i], self.groups[at]
            assert target is not None
            if g is None or g.library is not None:
                continue
            passed = [self.write.get(s, none) for s in (*g.reads, *g.writes)]
            passed += [self.touch.get(s, none) for s in g.writes]
            if any(i < p < at for positions in passed for p in positions):
                continue
            merged = _merged(g, target)
            if merged is not None:
                self.drop(i)
                self.drop(at)
                self.groups[at] = merged
                self.note(at, merged)


def grouped(nodes: list[Node]) -> list[Group]:
    """Groups in launch order."""
    order = _Order()
    for node in nodes:
        order.add(node)
    return [g for g in order.groups if g is not None]


def _merged(a: Group, b: Group) -> Group | None:
    """Both groups as one, or None. One of them gives the space that the other's nodes are laid over, in tape order."""
    if len(a.items) + len(b.items) > MAX_OPS:
        return None
    for base, guest in ((b, a), (a, b)):
        new = _absorbed(base, guest)
        if new is not None:
            return new
    return None


def _absorbed(base: Group, guest: Group) -> Group | None:
    new = _regridded(base, base.dims or ())
    extra: list[Item] = []
    for old in guest.items:
        body = old.node.recipe.body
        assert body is not None
        where = place(new, old.node)
        if where is None:
            return None
        how, dims = where
        if dims != new.dims:
            coarse = new.dims or ()
            new = _regridded(new, dims)
            extra = [i.regrid(coarse, dims) for i in extra]
        item = lay(body, dims, how, old.node)
        if not fits(new, item):
            return None
        new.kinds.add(body.kind)
        extra.append(item)
    ordered = sorted([*new.items, *extra], key=lambda i: i.node.depth)
    merged = Group(new.dims, kinds=new.kinds)
    for item in ordered:
        if not fits(merged, item):
            return None
        merged.add(item)
    return merged


def needed(nodes: list[Node], live: set[int]) -> list[Node]:
    """The nodes whose results, or errors, somebody can still see."""
    need = set(live)
    keep: list[Node] = []
    for node in reversed(nodes):
        if node.recipe.can_fail or any(s in need for s in write_slots(node)):
            keep.append(node)
            need.update(node.ins)
    keep.reverse()
    return keep


def movable(g: Group, over: list[Group]) -> bool:
    """Whether a group may run before all these, which now run before it."""
    reads, writes = set(g.reads), set(g.writes)
    return not any(reads & o.writes.keys() or writes & o.touches() for o in over)


def halves(g: Group) -> list[Group]:
    """The group's nodes in two parts, each grouped anew: what becomes of a group that is too large."""
    nodes = [i.node for i in g.items]
    middle = len(nodes) // 2
    return grouped(nodes[:middle]) + grouped(nodes[middle:])


def stored_slots(groups: list[Group], live: set[int]) -> set[int]:
    """Slots that need HBM: those that outlive the segment, and those that several groups touch."""
    seen: dict[int, int] = {}
    out = set(live)
    for k, g in enumerate(groups):
        for s in g.touches():
            if seen.setdefault(s, k) != k:
                out.add(s)
        if g.library is not None:
            out |= g.touches()
    return out
