"""The tape: recorded ops as a walk through a trie, and the segment that walk has filled so far.

Note [The trie is the tape]
A segment holds no list of ops. It holds a trie node, and the path to that node is the ops: each node knows its
recipe (what the op does to metas), the slots it reads and the slots it makes. Two runs through the same program walk
the same path, so when a segment is cut its plan is found at the node, keyed by which buffers are still alive.

Slots: 0, 1, 2, ... are the buffers that the segment makes, in order; ~0, ~1, ... are external buffers in order of first
touch. `buffer.seg is segment` says whether a buffer already has a slot.

Note [What a key holds]
Shapes, dtypes, dims, slots: literally, with the types of numbers (1, 1.0 and True are equal in Python). Run-time scalars:
only their types; the values wait in `Segment.scalars` and become kernel arguments, so a learning rate that changes every
step changes no key.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptive_eager.device_sim.spec import TRN2, ChipSpec
from adaptive_eager.memory import Buffer
from adaptive_eager.meta import Meta

if TYPE_CHECKING:
    from adaptive_eager.lower import Body
    from adaptive_eager.steps import Plan


@dataclass(frozen=True, slots=True)
class T:
    """Placeholder of the i-th tensor operand in a recipe's argument template."""

    i: int


@dataclass(frozen=True, slots=True)
class S:
    """Placeholder of the i-th run-time scalar in a recipe's argument template."""

    i: int


class Recipe:
    """One op on given metas and literal arguments, wherever it stands on the tape.

    ins: metas of the tensor operands. outs: metas of the buffers it makes. writes: operands it writes in place.
    returns: for each returned value an index of outs, an `~index` of ins, or None. args, kwargs: the call with
    placeholders. body: its loop form, None for library and fallback ops. native: False for a counted fallback.
    """

    __slots__ = (
        "args",
        "body",
        "can_fail",
        "func",
        "ins",
        "kwargs",
        "name",
        "native",
        "outs",
        "returns",
        "scalar_types",
        "single",
        "writes",
    )

    func: Any
    name: str
    ins: tuple[Meta, ...]
    outs: tuple[Meta, ...]
    writes: tuple[int, ...]
    returns: tuple[int | None, ...]
    single: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scalar_types: tuple[type, ...]
    body: Body | None
    native: bool
    can_fail: bool


class Node:
    """A position on the tape: the op that led here, and where that op's operands are."""

    __slots__ = (
        "bytes",
        "depth",
        "full",
        "ins",
        "make",
        "nbufs",
        "nbytes",
        "next",
        "nscalars",
        "out",
        "parent",
        "plans",
        "recipe",
        "scalar0",
        "strides",
        "where",
        "written",
    )

    def __init__(self) -> None:
        self.strides: dict[Any, Stride] | None = None
        self.next: dict[Any, Node] = {}
        self.plans: dict[Any, Plan] = {}
        self.parent: Node | None = None
        self.recipe: Recipe = None  # type: ignore[assignment]
        self.ins: tuple[int, ...] = ()
        self.depth = 0
        self.nbufs = 0
        self.nscalars = 0
        self.scalar0 = 0
        self.bytes = 0
        self.full = False
        self.make: Callable[[], Any] | None = None
        self.out: Meta | None = None
        self.nbytes = 0
        self.where = ""
        self.written: tuple[int, ...] = ()

    def path(self) -> list[Node]:
        """The ops from the start of the segment to here."""
        out: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            out.append(node)
            node = node.parent
        out.reverse()
        return out

    @property
    def first_out(self) -> int:
        """Slot of the op's first new buffer."""
        return self.nbufs - len(self.recipe.outs)


@dataclass(frozen=True, slots=True, eq=False)
class Stride:
    """Nodes in a row that one look-up goes past: the ops of a list (ops/foreach). recipes: theirs.
    outs: the meta of each one's new buffer; None where all write in place."""

    last: Node
    recipes: frozenset[Recipe]
    outs: tuple[Meta, ...] | None


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a segment. Part of a trie's identity, since a node knows at once whether it is full.

    mode: adaptive, eager or blocking. bytes: pending results and the inputs they keep alive. ops: length. spec: the
    chip, whose SBUF decides what is fused.
    """

    mode: str = "adaptive"
    bytes: int = 512 << 20
    ops: int = 1024
    spec: ChipSpec = TRN2


class Segment:
    """What is recorded since the last cut: a trie node and the values its slots stand for."""

    __slots__ = (
        "bufs",
        "cause",
        "error",
        "ext",
        "live",
        "live_ext",
        "next_check",
        "node",
        "order",
        "pc",
        "plan",
        "root",
        "scalars",
        "spec",
        "where",
    )

    def __init__(self, root: Node, spec: ChipSpec) -> None:
        self.spec = spec
        self.root = root
        self.node = root
        self.bufs: list[Buffer] = []
        self.ext: list[Buffer] = []
        self.scalars: list[float] = []
        self.next_check = 0
        self.cause = ""
        self.where = ""
        self.order = 0
        self.live: tuple[bool, ...] = ()
        self.live_ext: tuple[bool, ...] = ()
        self.plan: Plan | None = None
        self.pc = 0
        self.error: BaseException | None = None

    def repair(self) -> None:
        """Make the lists agree with the node after an exception anywhere in recording.

        A Ctrl-C can arrive between any two bytecodes. The node is what counts: entries past it belong to an op
        that was not recorded.
        """
        node = self.node
        del self.bufs[node.nbufs :]
        del self.scalars[node.nscalars :]
        while len(self.bufs) < node.nbufs:
            lost = Buffer(0)
            lost.seg, lost.slot = self, len(self.bufs)
            self.bufs.append(lost)

    def release(self) -> None:
        """Let go of the buffers once the segment has run: living buffers keep a reference to it (`Buffer.seg`)."""
        self.bufs, self.ext, self.scalars = [], [], []

    def close(self, cause: str, where: str) -> None:
        """Fix which buffers outlive the segment. Call with the tape's lock held.

        A buffer that only the segment's own list refers to is dead: nothing can ever read it again.
        """
        rc = sys.getrefcount
        self.cause, self.where = cause, where
        self.live = tuple(
            [rc(b) > 3 for b in self.bufs]
        )  # the list, the loop variable, the argument
        ext = self.ext
        self.live_ext = tuple([rc(ext[k]) > 2 for k in self.node.written])


def span_bytes(m: Meta) -> int:
    """Bytes of a fresh buffer that holds a tensor of this meta."""
    return m.span * m.itemsize
