"""What the HBM allocator did, event by event, where somebody asked it to remember."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from adaptive_eager.device_sim.blocks import Site

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom"
]
"""PyTorch's names."""


@dataclass(frozen=True, slots=True)
class Event:
    """address: absolute, in bytes. size: bytes. time_us: host time, µs since the epoch."""

    action: Action
    address: int
    size: int
    site: Site | None
    stream: int
    time_us: int


class History:
    """The newest `most` events, or all."""

    def __init__(self, most: int | None) -> None:
        if most is not None and most < 1:
            raise ValueError(f"a history must have room for at least 1 event, got {most}")
        self.events: deque[Event] = deque(maxlen=most)

    def note(
        self, action: Action, address: int, size: int, site: Site | None = None, stream: int = 0
    ) -> None:
        """An event happens now."""
        self.events.append(Event(action, address, size, site, stream, time.time_ns() // 1000))
