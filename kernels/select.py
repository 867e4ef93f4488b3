"""Which engine instructions a kernel's loop IR becomes: the analysis that cost and tile plans start from.

One engine instruction may do the work of several IR ones: engines convert types as they read and write,
Vector takes two scalar operations in one go, Scalar evaluates a whole activation function of a scaled
and shifted argument. What happens inside an instruction takes no memory of SBUF. Results stay those of
the IR: the tile interpreter evaluates the covered instructions one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from adaptive_eager.kernels.build import Builder, Val, fn, maximum
from adaptive_eager.kernels.ir import (
    INTS,
    MATH,
    ROW_REDUCE,
    TOTAL,
    Inst,
    Kernel,
    levels,
)


@dataclass(slots=True)
class Op:
    """One or more engine instructions in a row that make one value of a tile.

    kinds: keys of `engines.KINDS`; empty where nothing but DMA is needed. out: the IR value, a
    reduction's or total's included. covers: IR instructions it computes, in order, `out` last. reads:
    the values it takes from tiles. level: of `out`. dtype: memory dtype of `out` in SBUF.
    """

    kinds: tuple[str, ...]
    out: int
    covers: list[int]
    reads: list[int]
    level: str
    dtype: str
    simple: int = 0
    """Scalar operations so far, where it is a `tensor_scalar` that could take another."""


@dataclass(slots=True)
class Selection:
    """ops: in order of the values they make. virtual: values that exist only inside the ops that read
    them: conversions of what lies in a tile. tile: for a loaded or computed value its dtype in SBUF."""

    ops: list[Op] = field(default_factory=list)
    virtual: set[int] = field(default_factory=set)
    tile: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pattern:
    """IR that the engines have in fewer instructions."""

    name: str
    fn: Callable[..., Val]
    holes: int
    kinds: tuple[str, ...]


def _silu(x: Val) -> Val:
    return x / (1 + fn("exp", -x))


def _gelu_tanh(x: Val) -> Val:
    k = math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5
    return 0.5 * x * (1 + fn("tanh", k * (x + 0.044715 * (x * x * x))))


def _gelu(x: Val) -> Val:
    return x * 0.5 * (1 + fn("erf", x * math.sqrt(0.5)))


def _silu_dx(g: Val, x: Val) -> Val:
    s = fn("sigmoid", x)
    return g * s * (1 + x * (1 - s))


def _gelu_dx(g: Val, x: Val) -> Val:
    cdf = 0.5 * (1 + fn("erf", x * math.sqrt(0.5)))
    width = (2 / math.sqrt(math.pi)) * math.sqrt(0.5) * 0.5
    return g * (cdf + x * (fn("exp", x * x * -0.5) * width))


ACT = ("activation",)
PATTERNS: tuple[Pattern, ...] = (
    Pattern("gelu_dx", _gelu_dx, 2, (*ACT, "tensor_tensor")),
    Pattern("silu_dx", _silu_dx, 2, (*ACT, "tensor_tensor")),
    Pattern("gelu_apprx_tanh", _gelu_tanh, 1, ACT),
    Pattern("gelu", _gelu, 1, ACT),
    Pattern("silu", _silu, 1, ACT),
    Pattern("sigmoid", lambda x: 1 / (1 + fn("exp", -x)), 1, ACT),
    Pattern("rsqrt", lambda x: 1 / fn("sqrt", x), 1, ACT),
    Pattern("reciprocal", lambda x: 1 / x, 1, ACT),
    Pattern("relu", lambda x: maximum(x, 0.0), 1, ACT),
    Pattern("square", lambda x: x * x, 1, ACT),
)
"""Scalar-engine functions (nki.api.shared lists them), larger ones first."""


def _traced(p: Pattern, dtype: str) -> list[Inst]:
    b = Builder()
    holes = [b.inst("hole", (), dtype, k) for k in range(p.holes)]
    p.fn(*holes)
    return b.insts


_TRACED = {(p.name, t): _traced(p, t) for p in PATTERNS for t in ("f32", "f64")}


def _match(
    insts: tuple[Inst, ...], at: int, want: list[Inst], k: int, found: dict[int, int]
) -> bool:
    """Whether value `at` computes what pattern value k does. found: IR value of each pattern value."""
    if k in found:
        return found[k] == at
    p, i = want[k], insts[at]
    if p.op != "hole":
        if i.op != p.op or i.attr != p.attr or i.dtype != p.dtype or len(i.args) != len(p.args):
            return False
        for a, b in zip(i.args, p.args, strict=True):
            if not _match(insts, a, want, b, found):
                return False
    elif i.dtype != p.dtype:
        return False
    found[k] = at
    return True


def _patterns(
    kernel: Kernel, at: list[str], uses: list[int]
) -> dict[int, tuple[Pattern, list[int], list[int]]]:
    """Pattern, covered values and holes, by the value that the pattern ends in."""
    insts = kernel.insts
    taken: set[int] = set()
    found: dict[int, tuple[Pattern, list[int], list[int]]] = {}
    for n in range(len(insts) - 1, -1, -1):
        i = insts[n]
        if n in taken or at[n] == "uniform" or i.op not in ("mul", "div", "max"):
            continue
        for p in PATTERNS:
            want = _TRACED.get((p.name, i.dtype))
            values: dict[int, int] = {}
            if want is None or not _match(insts, n, want, len(want) - 1, values):
                continue
            inner = [v for k, v in values.items() if want[k].op not in ("hole", "const")]
            holes = [values[k] for k in range(p.holes)]
            hidden = [v for v in inner if v != n]
            inside = {v: sum(insts[u].args.count(v) for u in inner) for v in hidden}
            if any(uses[v] != inside[v] for v in hidden) or taken & set(inner):
                continue
            if any(at[h] == "uniform" for h in holes):
                continue
            taken |= set(inner)
            found[n] = (p, sorted(inner), holes)
            break
    return found


class _Selector:
    """Walks a kernel's instructions once."""

    def __init__(self, kernel: Kernel) -> None:
        self.k, self.insts = kernel, kernel.insts
        self.at: list[str] = list(levels(kernel))
        self.uses = [0] * len(self.insts)
        for i in self.insts:
            for a in i.args:
                self.uses[a] += 1
        self.made: dict[int, Op] = {}
        self.s = Selection()

    def run(self) -> Selection:
        found = _patterns(self.k, self.at, self.uses)
        hidden = {v for p, inner, _ in found.values() for v in inner} - found.keys()
        for n, i in enumerate(self.insts):
            if n in hidden or i.op == "store" or self.at[n] == "uniform":
                continue
            if i.op in ("load", "fload"):
                assert isinstance(i.attr, int)
                self.s.tile[n] = self.k.operands[i.attr].dtype
            elif n in found:
                p, inner, holes = found[n]
                self.add(p.kinds, n, inner, holes)
            elif i.op in ("cast", "round"):
                self.convert(n, i)
            else:
                self.plain(n, i)
        self.s.ops = sorted(self.made.values(), key=lambda op: op.out)
        return self.s

    def base(self, n: int, covers: list[int]) -> int:
        """The value in a tile that a conversion starts from; conversions on the way are appended."""
        if n not in self.s.virtual:
            return n
        found = self.base(self.insts[n].args[0], covers)
        covers.append(n)
        return found

    def add(self, kinds: tuple[str, ...], n: int, inner: list[int], args: list[int]) -> Op:
        """An op that makes value n of the values args."""
        covers: list[int] = []
        reads = [self.base(a, covers) for a in args if self.at[a] != "uniform"]
        op = Op(
            kinds, n, sorted({*covers, *inner}), list(dict.fromkeys(reads)), self.at[n],
            self.insts[n].dtype,
        )  # fmt: skip
        self.made[n] = op
        self.s.tile[n] = op.dtype
        return op

    def convert(self, n: int, i: Inst) -> None:
        """Written out by the instruction that makes the value, or done by those that read it."""
        a = i.args[0]
        op = self.made.get(a)
        kept = op is None or self.insts[a].op in ROW_REDUCE | TOTAL
        if kept or self.uses[a] != 1 or self.at[a] != self.at[n]:
            self.s.virtual.add(n)
            return
        assert op is not None
        del self.made[a], self.s.tile[a]
        op.out, op.dtype, op.simple = n, (str(i.attr) if i.op == "round" else i.dtype), 0
        op.covers.append(n)
        self.made[n] = op
        self.s.tile[n] = op.dtype

    def plain(self, n: int, i: Inst) -> None:
        """An instruction by itself, or merged into the one that makes its operand."""
        args = list(i.args)
        wide = [a for a in args if self.at[a] == self.at[n]]
        kinds = self.kinds(i, len(dict.fromkeys(wide)), n)
        op = self.add(kinds, n, [n], args)
        if kinds == ("tensor_scalar",):
            op.simple = 1
        if kinds in (("tensor_scalar",), ("activation",)) and len(wide) == 1:
            self.merge(op, wide[0], kinds)

    def merge(self, op: Op, a: int, kinds: tuple[str, ...]) -> None:
        """Take a scalar operation on the operand into the same instruction."""
        before = self.made.get(a)
        if before is None or not before.simple or self.uses[a] != 1 or op.level != before.level:
            return
        if kinds == ("tensor_scalar",) and before.simple > 1:
            return
        arithmetic = {"mul", "add", "sub", "neg"}
        if kinds == ("activation",) and not {self.insts[c].op for c in before.covers} <= arithmetic:
            return
        del self.made[a], self.s.tile[a]
        op.covers = sorted({*before.covers, *op.covers})
        op.reads = list(dict.fromkeys([*before.reads, *[r for r in op.reads if r != a]]))
        op.simple = before.simple + 1 if kinds == ("tensor_scalar",) else 0

    def kinds(self, i: Inst, wide: int, n: int) -> tuple[str, ...]:
        """Engine instructions of one IR instruction with so many operands that are tiles."""
        if i.op == "total":
            return ("partition_sum",)
        if i.op in ROW_REDUCE:
            return ("reduce",)
        if i.op == "random":
            return ("rng",)
        if i.op == "iota":
            return ("iota",) if i.attr == "inner" else ("tensor_copy",)
        if i.op == "pow" or (i.dtype in INTS and i.op in ("add", "sub", "mul", "neg")):
            return ("integer",)
        if i.op in MATH or i.op == "sqrt":
            return ("activation",)
        if i.op == "select":
            return ("select",)
        if i.op == "div":
            by = i.args[1]
            quick = (
                self.at[by] in ("uniform", self.at[n]) and wide == 1 and self.at[by] == "uniform"
            )
            if quick or self.at[by] != self.at[n]:
                return ("tensor_scalar",)
            return ("activation", "tensor_tensor")
        return ("tensor_tensor",) if wide > 1 else ("tensor_scalar",)


def select(kernel: Kernel) -> Selection:
    """The engine instructions of a verified kernel in which nothing is in vain (`ir.pruned`)."""
    return _Selector(kernel).run()
