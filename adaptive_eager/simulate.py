"""What the recorded run would take on the simulated chip: its record, its clock, and what-if.

Note [The record]
A session's record is two numbers for each segment that ran and each copy between host and device. One
is its place in the program: segments run on several threads, and a timeline must not depend on which
was first. The other names a *happening*: the items of a plan, or a copy, kept once however often it recurs. So
recording costs an append, and everything else (times, traffic, instructions, the same on another chip)
is computed when somebody asks. The log is bounded: its older half is folded into counts.

Device time is the device's alone. Work follows work; the host is never waited for, since its wall time
and the device's are different clocks.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from adaptive_eager.device_sim.clock import Clock
from adaptive_eager.device_sim.spec import ChipSpec
from adaptive_eager.device_sim.work import Cost, Work, copy_ns, cost

Kind = Literal["kernel", "library", "fallback", "upload", "download"]
Site = tuple[str, str]
"""An op's name and the `file:line` that called it."""

MAX_LOG = 1 << 20
"""Entries of a record's log before the older half is folded into counts."""
MAX_HAPPENINGS = 100_000
"""Different happenings that a record keeps; what comes after is only summed up."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing on the device's timeline. works: what its launches do, none for a copy. uploaded,
    downloaded: bytes between host and device."""

    kind: Kind
    ops: tuple[Site, ...]
    works: tuple[Work, ...] = ()
    uploaded: int = 0
    downloaded: int = 0

    def cost(self, spec: ChipSpec) -> Cost:
        """All of it; the works of one item share a launch."""
        if not self.works:
            ns = 0.0
            if self.uploaded or self.kind in ("upload", "fallback"):
                ns += copy_ns(self.uploaded, spec)
            if self.downloaded or self.kind in ("download", "fallback"):
                ns += copy_ns(self.downloaded, spec)
            return Cost(ns, 0.0, 0.0)
        costs = [cost(w, spec) for w in self.works]
        if len(costs) == 1:
            return costs[0]
        engines: dict[str, float] = {}
        for c in costs:
            for e, ns in c.engine_ns.items():
                engines[e] = engines.get(e, 0.0) + ns
        return Cost(
            sum([c.ns for c in costs]) - (len(costs) - 1) * spec.launch_ns,
            spec.launch_ns,
            sum([c.dma_ns for c in costs]),
            engines,
            sum([c.read for c in costs]),
            sum([c.written for c in costs]),
            max([c.sbuf for c in costs]),
        )


class Happening:
    """Items that happen together, again and again. replan: the items on another chip, or None where
    they are the same on every one."""

    __slots__ = ("_on", "items", "ns", "replan", "spec")

    def __init__(
        self,
        items: tuple[Item, ...],
        spec: ChipSpec,
        replan: Callable[[ChipSpec], tuple[Item, ...]] | None = None,
    ) -> None:
        self.items, self.spec, self.replan = items, spec, replan
        self.ns = sum([i.cost(spec).ns for i in items])
        self._on: dict[ChipSpec, tuple[Item, ...]] = {}

    def on(self, spec: ChipSpec) -> tuple[Item, ...]:
        """The items as another chip would have them."""
        if spec == self.spec or self.replan is None:
            return self.items
        found = self._on.get(spec)
        if found is None:
            found = self._on[spec] = self.replan(spec)
        return found


@dataclass(slots=True)
class Simulated:
    """A run on a simulated chip. Times are ns of device time, sizes bytes.

    ns: all of it. launches: kernels and library calls. launch_ns, copy_ns: of `ns`, launch overhead and
    copies between host and device. dma_ns, engine_ns: work of one physical core; these overlap. sbuf:
    bytes of a partition in use, at most. complete: False where a very long run was cut short.
    """

    spec: ChipSpec
    ns: float = 0.0
    launches: int = 0
    fallbacks: int = 0
    launch_ns: float = 0.0
    copy_ns: float = 0.0
    dma_ns: float = 0.0
    engine_ns: dict[str, float] = field(default_factory=dict)
    hbm_read: int = 0
    hbm_written: int = 0
    uploaded: int = 0
    downloaded: int = 0
    sbuf: int = 0
    complete: bool = True

    def add(self, item: Item, times: int) -> None:
        """Count an item that happened so many times."""
        c = item.cost(self.spec)
        self.ns += times * c.ns
        self.launches += times * bool(item.works)
        self.fallbacks += times * (item.kind == "fallback")
        self.launch_ns += times * c.launch_ns
        if not item.works:
            self.copy_ns += times * c.ns
        self.dma_ns += times * c.dma_ns
        for e, ns in c.engine_ns.items():
            self.engine_ns[e] = self.engine_ns.get(e, 0.0) + times * ns
        self.hbm_read += times * c.read
        self.hbm_written += times * c.written
        self.uploaded += times * item.uploaded
        self.downloaded += times * item.downloaded
        self.sbuf = max(self.sbuf, c.sbuf)

    def __str__(self) -> str:
        share = 100 * self.launch_ns / self.ns if self.ns else 0.0
        room = self.spec.sbuf_partition_bytes / 1024
        head = f"{self.spec.name}: {self.ns / 1e3:,.1f} µs in {self.launches} launches"
        lines = {
            "HBM": f"{self.hbm_read / 1e6:,.2f} MB read, {self.hbm_written / 1e6:,.2f} MB written",
            "host": f"{self.uploaded / 1e6:,.2f} MB up, {self.downloaded / 1e6:,.2f} MB down, "
            f"{self.copy_ns / 1e3:,.1f} µs",
            "SBUF": f"{self.sbuf / 1024:,.1f} of {room:,.0f} KiB of a partition, at most",
            "DMA": f"{self.dma_ns / 1e3:,.1f} µs of a core's rings",
        }
        lines |= {e.capitalize(): f"{ns / 1e3:,.1f} µs" for e, ns in self.engine_ns.items() if ns}
        rows = [f"{head} ({share:.0f}% launch overhead), {self.fallbacks} fallbacks"]
        rows += [f"  {name:8} {text}" for name, text in lines.items()]
        if not self.complete:
            rows.append("  (the run had more different segments than are kept: times are a part)")
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Span:
    """An item at its time. ns: from start to end; both of device time since the session began."""

    start: float
    ns: float
    item: Item


class Record:
    """What a session's run did (Note [The record])."""

    def __init__(self) -> None:
        self.happenings: list[Happening] = []
        self.lost = 0
        self._number: dict[int, int] = {}
        self._log, self._order = array("I"), array("Q")
        self._folded: np.ndarray = np.zeros(0, np.int64)

    def add(self, h: Happening, order: int) -> None:
        """A happening happened, at this place in the program."""
        n = self._number.get(id(h))
        if n is None:
            if len(self.happenings) >= MAX_HAPPENINGS:
                self.lost += 1
                return
            n = self._number[id(h)] = len(self.happenings)
            self.happenings.append(h)
        self._log.append(n)
        self._order.append(order)
        if len(self._log) > MAX_LOG:
            half = MAX_LOG // 2
            self._folded = self._sum(self._log[:half])
            del self._log[:half], self._order[:half]

    def _sum(self, log: array[int]) -> np.ndarray:
        counts = np.bincount(np.frombuffer(log, np.uint32), minlength=len(self.happenings)) if log else (
            np.zeros(len(self.happenings), np.int64)
        )  # fmt: skip
        counts[: len(self._folded)] += self._folded
        return counts

    def on(self, spec: ChipSpec) -> Simulated:
        """The run's totals on a chip."""
        out = Simulated(spec, complete=not self.lost)
        for h, times in zip(
            self.happenings, self._sum(array("I", self._log)).tolist(), strict=False
        ):
            for item in h.on(spec):
                out.add(item, times)
        return out

    def spans(self, spec: ChipSpec) -> Iterator[Span]:
        """The newest entries, in order, from device time 0 on."""
        clock = Clock()
        known: dict[int, tuple[tuple[Item, float], ...]] = {}
        log, order = np.array(self._log), np.array(self._order)
        for n in log[np.argsort(order[: len(log)], kind="stable")].tolist():
            items = known.get(n)
            if items is None:
                on = self.happenings[n].on(spec)
                items = known[n] = tuple([(i, i.cost(spec).ns) for i in on])
            for item, ns in items:
                yield Span(clock.run(ns), ns, item)


class Simulator:
    """The device's clock and the records that are open."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.records: list[Record] = []
        self._copies: dict[tuple[Kind, int, int, Site], Happening] = {}
        self._lock = threading.Lock()
        self.next = itertools.count().__next__

    def happened(self, h: Happening, order: int) -> None:
        """Advance the clock, and tell the open records. order: from `next`, when it was recorded."""
        with self._lock:
            self.clock.run(h.ns)
            for record in self.records:
                record.add(h, order)

    def copied(
        self, kind: Kind, op: str, where: Callable[[], str], spec: ChipSpec, up: int, down: int
    ) -> None:
        """A copy between host and device, or a round trip to the CPU."""
        site = (op, where() if self.records else "")  # walking frames costs microseconds
        key = (kind, up, down, site)
        h = self._copies.get(key)
        if h is None:
            if len(self._copies) >= MAX_HAPPENINGS:
                self._copies.clear()
            h = self._copies[key] = Happening((Item(kind, (site,), (), up, down),), spec)
        self.happened(h, self.next())


SIMULATOR = Simulator()
"""The device's simulator. Outside of sessions its clock goes on, and nothing is recorded."""
