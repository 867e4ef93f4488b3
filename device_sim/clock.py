"""Simulated time of one device: a hardware queue, streams that feed it, events between them.

Work of one stream runs in order. Streams share the one hardware queue, as TorchNeuron multiplexes them;
between streams only events order. Times are ns since the clock was made, of the device alone: the
host's wall time never enters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """A moment of a stream: when all its work so far is done."""

    ns: float

    def elapsed(self, end: Event) -> float:
        """ms from this event to another."""
        return (end.ns - self.ns) / 1e6


class Clock:
    """now: when the hardware queue is free. streams: when each stream's work is done, once there is
    another one than stream 0."""

    __slots__ = ("now", "streams")

    def __init__(self) -> None:
        self.now = 0.0
        self.streams: dict[int, float] = {}

    def run(self, ns: float, stream: int = 0) -> float:
        """Put work on a stream; gives its start."""
        start = self.now
        if stream or self.streams:
            self._several()
            start = max(start, self.streams.get(stream, 0.0))
            self.streams[stream] = start + ns
        self.now = start + ns
        return start

    def _several(self) -> None:
        self.streams.setdefault(0, self.now)

    def record(self, stream: int = 0) -> Event:
        """An event after all work of a stream so far."""
        self._several()
        return Event(self.streams.get(stream, 0.0))

    def wait(self, event: Event, stream: int = 0) -> None:
        """Let later work of a stream start no earlier than an event."""
        self._several()
        self.streams[stream] = max(self.streams.get(stream, 0.0), event.ns)

    def synchronize(self) -> float:
        """When everything is done."""
        return max([self.now, *self.streams.values()])
