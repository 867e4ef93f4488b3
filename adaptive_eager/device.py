"""`torch.neuron`: the functions PyTorch asks of a device module, and the device guard.

Imported inside `import torch`, so nothing here imports numba or the recorder at module level.
"""

from __future__ import annotations

import functools
import itertools
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from adaptive_eager.memory import DeviceMemory
    from adaptive_eager.record import Tape

Device = torch.device | str | int | None


_next_type = itertools.repeat(torch._C._autograd.DeviceType.PrivateUse1).__next__
ESCAPED: list[BaseException] = []
"""Exceptions that were raised inside a backward pass; `backward` raises the first at the pass's caller."""


class NeuronGuard(torch._C._acc.DeviceGuard):  # type: ignore[misc]
    """Tells C++ the device type, some five times an autograd node.

    Note [Errors in backward]
    An exception of a hook, or of an op's dispatch, unwinds C++ frames with Python's error indicator set, and their guards
    call here on the way; a guard that fails there ends the process. Calling anything written in C then raises SystemError,
    caused by the exception in flight: that one is kept, and the indicator is clear again.
    """

    @staticmethod
    def type_() -> Any:
        try:
            return _next_type()
        except SystemError as e:
            if e.__cause__ is not None:
                ESCAPED.append(e.__cause__)
            return torch._C._autograd.DeviceType.PrivateUse1


def _memory() -> DeviceMemory:
    from adaptive_eager.memory import memory

    return memory()


@functools.cache
def _tape() -> Tape:
    from adaptive_eager.record import TAPE

    return TAPE


def check_device(device: Device) -> int:
    """The index of a device argument.

    Raises:
        ValueError: for a device that is not `neuron`.
        RuntimeError: for an index that does not exist.
    """
    if device is None:
        return 0
    index = device if isinstance(device, int) else None
    if index is None:
        parsed = torch.device(device)  # type: ignore[arg-type]
        if parsed.type != "neuron":
            raise ValueError(f"Expected a neuron device, but got: {device}")
        index = parsed.index or 0
    if index != 0:
        raise RuntimeError(f"neuron: invalid device ordinal {index}, this process has 1 device")
    return index


class NeuronModule(types.ModuleType):
    """The device module, reachable as `torch.neuron`."""

    __file__ = __file__

    # -- the device ---------------------------------------------------------------------------

    def is_available(self) -> bool:
        """True: the simulated NeuronCore is always there."""
        return True

    def is_initialized(self) -> bool:
        """True: the device needs no set-up."""
        return True

    def init(self) -> None:
        """Do nothing; for code that initialises CUDA-like devices."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """One simulated NeuronCore."""
        return 1

    def current_device(self) -> int:
        """The index of the current device: 0."""
        return 0

    def set_device(self, device: Device) -> None:
        """Select a device; only index 0 exists."""
        check_device(device)

    def get_device_name(self, device: Device = None) -> str:
        """The simulated chip's name, for example `TRN2 (simulated)`."""
        check_device(device)
        return f"{_memory().spec.name} (simulated)"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The dtypes autocast may use."""
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        """True."""
        return True

    def synchronize(self, device: Device = None) -> None:
        """Run all recorded work and wait for it; raises the earliest pending error."""
        if device is not None:
            check_device(device)
        _tape().synchronize("synchronize")

    # -- random numbers -----------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        """Seed the device's random numbers."""
        from adaptive_eager.random import GENERATOR

        GENERATOR.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        """Seed and offset as a uint8 CPU tensor of 16 bytes."""
        check_device(device)
        from adaptive_eager.random import GENERATOR

        return GENERATOR.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Device = None) -> None:
        """Restore what `get_rng_state` gave."""
        check_device(device)
        from adaptive_eager.random import GENERATOR

        GENERATOR.set_state(state)

    # -- memory -------------------------------------------------------------------------------

    def memory_stats(self, device: Device = None) -> dict[str, int]:
        """The allocator's counters under PyTorch's key names, bytes and counts."""
        check_device(device)
        return dict(_memory().stats())

    def memory_allocated(self, device: Device = None) -> int:
        """Bytes of HBM held by tensors. Pending results hold none yet."""
        return self.memory_stats(device)["allocated_bytes.all.current"]

    def max_memory_allocated(self, device: Device = None) -> int:
        """Peak of `memory_allocated` in bytes."""
        return self.memory_stats(device)["allocated_bytes.all.peak"]

    def memory_reserved(self, device: Device = None) -> int:
        """Bytes of HBM that the caching allocator holds."""
        return self.memory_stats(device)["reserved_bytes.all.current"]

    def max_memory_reserved(self, device: Device = None) -> int:
        """Peak of `memory_reserved` in bytes."""
        return self.memory_stats(device)["reserved_bytes.all.peak"]

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        """(free, total) bytes of HBM."""
        check_device(device)
        hbm = _memory().hbm
        total = min(hbm.limit, hbm.capacity)
        return max(0, total - self.memory_reserved(device)), total

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        """Start the peaks anew."""
        check_device(device)
        _memory().hbm.reset_peak_stats()

    def reset_accumulated_memory_stats(self, device: Device = None) -> None:
        """Start the accumulated counters anew."""
        check_device(device)
        _memory().hbm.reset_accumulated_stats()

    @property
    def memory(self) -> types.ModuleType:
        """History and snapshots of HBM: `adaptive_eager.snapshots`."""
        from adaptive_eager import snapshots

        return snapshots

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """The allocator's segments and their blocks, as `torch.cuda.memory_snapshot` gives them."""
        segments: list[dict[str, Any]] = self.memory._snapshot()["segments"]
        return segments

    def empty_cache(self) -> None:
        """Return unused segments of HBM to the simulated chip."""
        _memory().hbm.empty_cache()
