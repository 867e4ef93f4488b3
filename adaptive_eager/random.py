"""The device's random numbers: a counter-based generator, so that draws depend on program order alone.

Each random op takes (seed, offset) when it is *recorded*. What runs, in which order, or whether a result is ever read changes no
other draw. Library kernels that draw get a CPU generator seeded from the pair; the CPU's own generator is left alone.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_MASK = (1 << 64) - 1


def mix(seed: int, offset: int) -> int:
    """A 63-bit seed from the pair, by two rounds of splitmix64 (Steele et al., 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


class Generator:
    """Seed and offset of the device. Every random op advances the offset by one."""

    def __init__(self) -> None:
        self.seed = torch.initial_seed() & ((1 << 63) - 1)
        self.offset = 0
        self._lock = threading.Lock()

    def manual_seed(self, seed: int) -> None:
        """Set the seed and start from offset 0."""
        with self._lock:
            self.seed, self.offset = int(seed) & ((1 << 63) - 1), 0

    def draw(self) -> tuple[int, int]:
        """(seed, offset) for one random op."""
        with self._lock:
            self.offset += 1
            return self.seed, self.offset - 1

    def get_state(self) -> torch.Tensor:
        """Seed and offset as 16 bytes in a CPU tensor."""
        return torch.tensor([self.seed, self.offset], dtype=torch.int64, device="cpu").view(
            torch.uint8
        )

    def set_state(self, state: torch.Tensor) -> None:
        """Restore a state from `get_state`."""
        with self._lock:
            self.seed, self.offset = state.cpu().contiguous().view(torch.int64).tolist()

    def call(self, func: Any, args: Any, kwargs: Any, draw: tuple[int, int] | None) -> Any:
        """Run a CPU op that draws, with numbers that belong to `draw`."""
        seed, offset = self.draw() if draw is None else draw
        takes = any(a.name == "generator" for a in func._schema.arguments)
        if (
            takes
            and kwargs.get("generator") is None
            and not any(isinstance(a, torch.Generator) for a in args)
        ):
            fresh = torch.Generator(device="cpu")
            fresh.manual_seed(mix(seed, offset))
            return func(*args, **{**kwargs, "generator": fresh})
        if takes:
            return func(*args, **kwargs)
        with _DEFAULT_LOCK:
            default = torch.default_generator
            state = default.get_state()
            try:
                default.manual_seed(mix(seed, offset))
                return func(*args, **kwargs)
            finally:
                default.set_state(state)


_DEFAULT_LOCK = threading.Lock()
GENERATOR = Generator()
