"""`neuron_eager`: a scope that chooses a mode, makes `neuron` the default device, and tells what happened."""

from __future__ import annotations

import collections
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from torch.overrides import TorchFunctionMode

from adaptive_eager import factories as _factories  # noqa: F401 - op tables
from adaptive_eager.device_sim.spec import ChipSpec, named
from adaptive_eager.operators import FACTORY_MODES
from adaptive_eager.record import TAPE
from adaptive_eager.segment import SegmentText, describe
from adaptive_eager.simulate import SIMULATOR, Record, Simulated, Span
from adaptive_eager.stats import COUNTERS, Stats, difference
from adaptive_eager.tape import Limits, Segment

MODES = ("adaptive", "eager", "blocking")
MAX_KEPT = 10_000
"""Segments and cuts that a session remembers; older ones are dropped, the counts stay right."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a segment: why, where in the user's code, and how many ops it ended."""

    cause: str
    where: str
    ops: int

    def __str__(self) -> str:
        return f"{self.cause} at {self.where} ({self.ops} ops)"


class DefaultDevice(TorchFunctionMode):
    """Gives factory calls without a device the device `neuron`; looks at nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES and not (kwargs and kwargs.get("device") is not None):
            return (
                func(*args, **(kwargs or {}), device="neuron")
                if not kwargs or "device" not in kwargs
                else func(*args, **{**kwargs, "device": "neuron"})
            )
        return func(*args, **(kwargs or {}))


FACTORY_MODES.append(DefaultDevice)


def _factory_functions() -> frozenset[Any]:
    from torch.utils._device import _device_constructors

    return frozenset(_device_constructors())


FACTORIES = _factory_functions()


class Session:
    """What a `neuron_eager` scope did. Readable inside the scope and after it."""

    def __init__(self, mode: str, spec: ChipSpec) -> None:
        self.mode, self.spec = mode, spec
        self._record = Record()
        self._start = COUNTERS.snapshot()
        self._end: Any = None
        self._segments: collections.deque[tuple[int, Segment]] = collections.deque(maxlen=MAX_KEPT)
        self._count = 0

    def _listen(self, seg: Segment) -> None:
        light = Segment(seg.root, seg.spec)
        light.node, light.cause, light.where = seg.node, seg.cause, seg.where
        light.live, light.live_ext, light.scalars = seg.live, seg.live_ext, seg.scalars
        self._segments.append((self._count, light))
        self._count += 1

    @property
    def stats(self) -> Stats:
        """Counts since the scope began: of the whole device, other threads included."""
        return difference(self._end or COUNTERS.snapshot(), self._start)

    @property
    def cuts(self) -> list[Cut]:
        """The cuts, oldest first."""
        return [Cut(s.cause, s.where, s.node.depth) for _, s in self._segments]

    @property
    def segments(self) -> list[SegmentText]:
        """The segments, oldest first; each prints as text and parses back."""
        return [describe(s, f"s{k}") for k, s in self._segments]

    @property
    def kernels(self) -> list[Any]:
        """The fused kernels that these segments ran: `.kernel` is the loop IR, `.source` the generated loop nest."""
        found: dict[int, Any] = {}
        for _, s in self._segments:
            plan = s.node.plans.get((s.live, s.live_ext))
            steps: list[Any] = plan.steps if plan is not None else []
            for step in [job for one in steps for job in getattr(one, "jobs", [one])]:
                compiled = getattr(step, "compiled", None)
                if compiled is not None:
                    found[id(compiled)] = compiled
        return list(found.values())

    @property
    def fallbacks(self) -> dict[str, int]:
        """Ops that ran on the CPU, by name, with counts."""
        return dict((self._end or COUNTERS.snapshot())[2] - self._start[2])

    @property
    def simulated(self) -> Simulated:
        """Time, traffic and memory that the scope takes on its chip so far. Prints as a table.

        What is recorded and not yet cut is not in it: nothing is flushed for a report.
        """
        return self.retime(self.spec)

    def retime(self, spec: ChipSpec | str) -> Simulated:
        """The same on another chip, without running anything: groups are split and tiled anew for its
        SBUF, and everything is timed by its numbers.

        Raises:
            ValueError, TypeError, OSError: for a name or file that gives no chip.
        """
        return self._record.on(spec_of(spec))

    def timeline(self, spec: ChipSpec | str | None = None) -> list[Span]:
        """Launches and copies in order, each with its ops, source lines, instructions and transfers.
        Of a very long scope the newest million segments."""
        return list(self._record.spans(self.spec if spec is None else spec_of(spec)))

    def __repr__(self) -> str:
        s = self.stats
        return f"<neuron session, {self.mode}: {s.ops} ops in {s.segments} segments, {s.launches} launches, {s.fallbacks} fallbacks>"


def spec_of(spec: ChipSpec | str) -> ChipSpec:
    """A chip by itself, by name, or from a file."""
    if isinstance(spec, ChipSpec):
        return spec
    if isinstance(spec, str):
        return named(spec)
    raise TypeError(f"a chip is a ChipSpec, a name or a .toml file, got {spec!r}")


class neuron_eager:  # noqa: N801 - used like a function
    """Run eager PyTorch code on the simulated chip.

    Args:
        mode: "adaptive" records and fuses; "eager" runs one kernel an op, asynchronously; "blocking" waits after each.
            All three give the same bits.
        default_device: inside, factories without a device make neuron tensors.
        byte_budget: bytes of pending results, and of inputs they keep alive, at which a segment ends.
        max_ops: ops after which a segment ends at the next repetition of itself.
        spec: the simulated chip, a `ChipSpec`, the name of a known one ("TRN3") or a `.toml` file; by default the one
            outside the scope. Its SBUF decides what is fused, its HBM what fits; bits never depend on it.
        simulate: keep the record that `Session.simulated`, `retime` and `timeline` answer from.

    Scopes nest, the inner one's settings hold inside it. The device's tape is shared by all threads. On exit, also by an
    exception, nothing is pending and the outer settings are back.

    Raises:
        ValueError: for an unknown mode, a limit below 1, or an unknown chip.
    """

    def __init__(
        self,
        mode: str = "adaptive",
        default_device: bool = True,
        *,
        byte_budget: int | None = None,
        max_ops: int | None = None,
        spec: ChipSpec | str | None = None,
        simulate: bool = True,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"neuron_eager: mode must be one of {', '.join(MODES)}, got {mode!r}")
        for name, value in (("byte_budget", byte_budget), ("max_ops", max_ops)):
            if value is not None and value < 1:
                raise ValueError(f"neuron_eager: {name} must be at least 1, got {value}")
        default = Limits()
        self._limits = replace(
            default, mode=mode, bytes=byte_budget or default.bytes, ops=max_ops or default.ops
        )
        self._default_device, self._simulate = default_device, simulate
        self._spec = None if spec is None else spec_of(spec)
        self._stack: list[tuple[Limits, Session, DefaultDevice | None]] = []

    def __enter__(self) -> Session:
        TAPE.synchronize("session")
        before = TAPE.limits
        limits = replace(self._limits, spec=self._spec or before.spec)
        TAPE.set_limits(limits)
        session = Session(limits.mode, limits.spec)
        if self._simulate:
            SIMULATOR.records.append(session._record)
        TAPE.listeners.append(session._listen)
        device = None
        if self._default_device:
            device = DefaultDevice()
            device.__enter__()
        self._stack.append((before, session, device))
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        before, session, device = self._stack.pop()
        if device is not None:
            device.__exit__(kind, error, tb)
        try:
            TAPE.cut("session")
            TAPE.runtime.drain()
            if error is None:
                TAPE.runtime.raise_pending()
            else:
                TAPE.runtime.errors.clear()
        finally:
            TAPE.set_limits(before)
            TAPE.listeners.remove(session._listen)
            if self._simulate:
                SIMULATOR.records.remove(session._record)
            session._end = COUNTERS.snapshot()
