"""Counters of what the device did. Sessions report differences between two snapshots."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stats:
    """What happened between two moments.

    ops: recorded ops that ran. segments: stretches between cuts. launches: kernels and library calls run, fallbacks excluded. kernels_compiled,
    kernels_reused: fused kernels built, and looked up ready. fallbacks: ops run by a CPU round trip. cuts: count by cause.
    hbm_read, hbm_written: bytes moved by launches. uploaded, downloaded: bytes copied from and to the host.
    """

    ops: int = 0
    segments: int = 0
    launches: int = 0
    kernels_compiled: int = 0
    kernels_reused: int = 0
    fallbacks: int = 0
    cuts: dict[str, int] = field(default_factory=dict)
    hbm_read: int = 0
    hbm_written: int = 0
    uploaded: int = 0
    downloaded: int = 0


class Counters:
    """Monotonic counters of the device. Written with the tape's or the runtime's lock held."""

    NUMBERS = (
        "ops",
        "segments",
        "launches",
        "kernels_compiled",
        "kernels_reused",
        "fallbacks",
        "hbm_read",
        "hbm_written",
        "uploaded_bytes",
        "downloaded_bytes",
    )

    def __init__(self) -> None:
        for name in self.NUMBERS:
            setattr(self, name, 0)
        self.cuts: collections.Counter[str] = collections.Counter()
        self.fallback_ops: collections.Counter[str] = collections.Counter()

    ops: int
    segments: int
    launches: int
    kernels_compiled: int
    kernels_reused: int
    fallbacks: int
    hbm_read: int
    hbm_written: int
    uploaded_bytes: int
    downloaded_bytes: int

    def cut(self, cause: str, ops: int) -> None:
        """A segment of `ops` ops ended."""
        self.ops += ops
        self.segments += 1
        self.cuts[cause] += 1

    def fallback(self, name: str) -> None:
        """An op went to the CPU and back."""
        self.fallbacks += 1
        self.fallback_ops[name] += 1

    def uploaded(self, nbytes: int) -> None:
        """Host to device copy."""
        self.uploaded_bytes += nbytes

    def downloaded(self, nbytes: int) -> None:
        """Device to host copy."""
        self.downloaded_bytes += nbytes

    def snapshot(self) -> tuple[list[int], collections.Counter[str], collections.Counter[str]]:
        """The counters now."""
        return [getattr(self, n) for n in self.NUMBERS], self.cuts.copy(), self.fallback_ops.copy()


def difference(
    now: tuple[list[int], collections.Counter[str], collections.Counter[str]],
    then: tuple[list[int], collections.Counter[str], collections.Counter[str]],
) -> Stats:
    """What was counted between two snapshots."""
    numbers = {
        n.removesuffix("_bytes"): a - b
        for n, a, b in zip(Counters.NUMBERS, now[0], then[0], strict=True)
    }
    return Stats(cuts=dict(now[1] - then[1]), **numbers)


COUNTERS = Counters()
