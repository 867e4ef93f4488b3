"""`torch.neuron.memory`: what HBM holds and what happened to it, under the names of `torch.cuda.memory`.

    torch.neuron.memory._record_memory_history(max_entries=100_000)
    ...
    torch.neuron.memory._dump_snapshot("hbm.pickle")     # drag it onto pytorch.org/memory_viz

Pending results hold no memory yet: synchronize first to see them.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from adaptive_eager.device_sim.snapshot import snapshot
from adaptive_eager.memory import memory


def _record_memory_history(
    enabled: str | None = "all", *, max_entries: int | None = 100_000
) -> None:
    """Remember the newest `max_entries` allocator events (None: all of them), or stop with enabled=None.

    Raises:
        ValueError: for a max_entries below 1.
    """
    memory().hbm.record_history(max_entries, on=enabled is not None)


def _snapshot(device: Any = None) -> dict[str, Any]:
    """Segments, blocks with the op and line that asked for each, and the history, as PyTorch's tools read them."""
    from adaptive_eager.device import check_device

    return snapshot(memory().hbm, check_device(device))


def _dump_snapshot(filename: str | Path = "dump_snapshot.pickle") -> None:
    """Write `_snapshot()` where pytorch.org/memory_viz can read it."""
    with Path(filename).open("wb") as f:
        pickle.dump(_snapshot(), f, protocol=4)  # the visualiser reads no later one
