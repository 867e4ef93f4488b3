"""Segments as text: what was recorded between two cuts, printed and parsed back.

    segment s41 (cut: value-read at train.py:31) {
      %0 = input f32[512,1024]
      %1 = mul %0, %0 : f32[512,1024]
      %2 = mean %1, [-1], True : f32[512,1]
      %3 = mul_ %0, 0.5 : %0 live
    }

`%n` are values; an op written in place names the value it writes after the colon. `live` marks what outlives the segment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptive_eager.tape import S, T

if TYPE_CHECKING:
    from adaptive_eager.tape import Segment


@dataclass(frozen=True, slots=True)
class Line:
    """One input or op. outs: value numbers it makes, with types; writes: values it writes in place."""

    op: str
    operands: tuple[str, ...]
    outs: tuple[tuple[int, str], ...]
    writes: tuple[int, ...] = ()
    live: bool = False

    def __str__(self) -> str:
        names = ", ".join(f"%{n}" for n, _ in self.outs)
        head = f"{names} = {self.op}" if self.outs else self.op
        types = ", ".join([t for _, t in self.outs] + [f"%{w}" for w in self.writes])
        if self.op == "input":
            return f"{head} {types}"
        operands = f" {', '.join(self.operands)}" if self.operands else ""
        return f"{head}{operands} : {types}{' live' if self.live else ''}"


@dataclass(frozen=True, slots=True)
class SegmentText:
    """A segment in a form that prints and parses."""

    name: str
    cause: str
    where: str
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        head = f"segment {self.name} (cut: {self.cause} at {self.where}) {{"
        return "\n".join([head, *[f"  {line}" for line in self.lines], "}"])

    @classmethod
    def parse(cls, text: str) -> SegmentText:
        """The inverse of `str`.

        Raises:
            ValueError: naming the line that is not in the format.
        """
        rows = [r.strip() for r in text.strip().splitlines()]
        head = re.fullmatch(r"segment (\S+) \(cut: (\S+) at (.*)\) \{", rows[0])
        if head is None or rows[-1] != "}":
            raise ValueError(f"not a segment: {rows[0]!r}")
        return cls(head[1], head[2], head[3], tuple(map(_parse_line, rows[1:-1])))


def _parse_line(row: str) -> Line:
    live = row.endswith(" live")
    body = row.removesuffix(" live")
    names, eq, rest = body.partition(" = ")
    if not eq or not re.fullmatch(r"%\d+(, %\d+)*", names):
        names, rest = "", body
    numbers = [int(n[1:]) for n in names.split(", ")] if names else []
    op, _, tail = rest.partition(" ")
    if op == "input":
        return Line(op, (), ((numbers[0], tail),))
    left, colon, types = f" {tail}".rpartition(" : ")
    if not colon:
        raise ValueError(f"not an op line: {row!r}")
    left = left.strip()
    parts = _split(types)
    outs = tuple(zip(numbers, parts[: len(numbers)], strict=True))
    writes = tuple([int(p[1:]) for p in parts[len(numbers) :]])
    return Line(op, tuple(_split(left)) if left else (), outs, writes, live)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets, parentheses and quotes."""
    out, depth, start, quote = [], 0, 0, False
    for k, c in enumerate(text):
        quote ^= c == "'"
        depth += (c in "[(") - (c in "])")
        if c == "," and not depth and not quote:
            out.append(text[start:k].strip())
            start = k + 1
    return [*out, text[start:].strip()]


def describe(seg: Segment, name: str) -> SegmentText:
    """The text form of a closed segment."""
    nodes = seg.node.path()
    number: dict[int, int] = {}
    lines: list[Line] = []
    for node in nodes:
        r = node.recipe
        for slot, m in zip(node.ins, r.ins, strict=True):
            if slot not in number:
                number[slot] = len(number)
                lines.append(Line("input", (), ((number[slot], str(m)),)))

        def show(a: Any, ins: tuple[int, ...] = node.ins, at: int = node.scalar0) -> str:
            if isinstance(a, T):
                return f"%{number[ins[a.i]]}"
            if isinstance(a, S):
                return repr(seg.scalars[at + a.i])
            if isinstance(a, (list, tuple)):
                return f"[{', '.join(map(show, a))}]"
            return repr(a)

        operands = [show(a) for a in r.args] + [f"{k}={show(v)}" for k, v in r.kwargs.items()]
        outs = []
        live = False
        for k, m in enumerate(r.outs):
            slot = node.first_out + k
            number[slot] = len(number)
            outs.append((number[slot], str(m)))
            live |= seg.live[slot]
        written = [node.ins[k] for k in r.writes]
        external = dict(zip(seg.node.written, seg.live_ext, strict=True))
        live |= any(seg.live[s] if s >= 0 else external[~s] for s in written)
        lines.append(
            Line(r.name, tuple(operands), tuple(outs), tuple([number[s] for s in written]), live)
        )
    return SegmentText(name, seg.cause, seg.where, tuple(lines))
