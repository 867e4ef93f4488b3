"""A quantity that rises and falls, counted as PyTorch's allocators count it."""

from __future__ import annotations


class Tally:
    """One counted quantity.

    current: the value now. peak: its highest since the last reset. freed: all that was taken away
    since the last reset; what was added follows from these, so the hot path need not count it.
    """

    __slots__ = ("_base", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.freed = self._base = 0

    def copy(self) -> Tally:
        """Another one with the same counts."""
        other = Tally()
        other.current, other.peak, other.freed, other._base = (
            self.current,
            self.peak,
            self.freed,
            self._base,
        )
        return other

    def add(self, n: int) -> None:
        """Raise the value. `HBM.alloc` has a copy of this line without the call."""
        self.current = now = self.current + n
        if now > self.peak:
            self.peak = now

    def remove(self, n: int) -> None:
        """Lower the value."""
        self.current -= n
        self.freed += n

    def reset_peak(self) -> None:
        """Let the peak start from the current value."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Let the sums of what was added and taken away start from zero."""
        self.freed, self._base = 0, self.current

    def report(self, name: str) -> dict[str, int]:
        """The keys of `torch.cuda.memory_stats` for this quantity."""
        return {
            f"{name}.all.current": self.current,
            f"{name}.all.peak": self.peak,
            f"{name}.all.allocated": self.current - self._base + self.freed,
            f"{name}.all.freed": self.freed,
        }
