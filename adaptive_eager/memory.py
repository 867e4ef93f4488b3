"""Device memory as the torch layer sees it: buffers, and host views of them for library kernels.

Note [A view never owns bytes]
A tensor is (buffer, meta). A buffer owns one block of HBM, or none yet: its result is still pending, or nobody
has written to it. Views share the buffer and differ in their meta alone, so two views of one base cannot disagree about
its contents or its order of writes.

Note [Adopted memory]
A library kernel without an `out=` form allocates its own result. We keep that memory where it is and give the buffer a
range of HBM addresses of the same size, so that capacity and statistics are right and nothing is copied.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import torch

from adaptive_eager.device_sim.blocks import Block, OutOfHBM, Site
from adaptive_eager.device_sim.hbm import HBM
from adaptive_eager.device_sim.spec import SPECS, TRN2, ChipSpec, named
from adaptive_eager.meta import Meta

MAX_VIEWS = 20_000
"""Host views that are kept for the next time: a step of a training loop has hundreds, at the same few places."""


class Buffer:
    """The storage of a tensor and of all its views.

    block: its HBM, None while it holds nothing. owner: a torch storage over the block, made when a host view is first
    asked for, or the one that adopted memory came with. nbytes: size of the storage.
    seg, slot: where the open segment knows it (see tape). error: why its contents will never exist.
    """

    __slots__ = ("block", "error", "nbytes", "owner", "seg", "slot")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.block: Block | None = None
        self.owner: torch.UntypedStorage | None = None
        self.seg: Any = None
        self.slot = 0
        self.error: BaseException | None = None


class DeviceMemory:
    """HBM of the simulated chip."""

    def __init__(self, spec: ChipSpec) -> None:
        self.spec = spec
        most = max([spec.hbm_bytes, *[s.hbm_bytes for s in SPECS.values()]])
        self.hbm = HBM(most, **_debug_options())
        self._end = self.hbm.base + self.hbm.capacity
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}
        self.use(spec)

    def use(self, spec: ChipSpec) -> None:
        """Be a chip with so much HBM. What is held stays, also where it is more than that."""
        self.spec = spec
        self.hbm.set_limit(spec.hbm_bytes)

    def stats(self) -> dict[str, int]:
        """Allocator counters under PyTorch's names."""
        return self.hbm.stats()

    def allocate(self, buffer: Buffer, site: Site | None = None) -> int:
        """Give the buffer HBM and return its address. site: the op that asks, and its `file:line`.

        Raises:
            torch.OutOfMemoryError: when no free range is large enough; it names the largest blocks.
        """
        try:
            block = self.hbm.alloc(buffer.nbytes, site=site)
        except OutOfHBM:
            gc.collect()  # tensors in cycles, as an earlier error and its traceback make them
            try:
                block = self.hbm.alloc(buffer.nbytes, site=site)
            except OutOfHBM as e:
                raise torch.OutOfMemoryError(self._oom_text(e)) from None
        buffer.block = block
        return block.address

    def _oom_text(self, e: OutOfHBM) -> str:
        mib = 1024 * 1024
        blocks = "".join([f"\n  {b}" for b in e.blocks])
        return (
            f"neuron:0 out of memory. Tried to allocate {e.asked / mib:.2f} MiB. {self.spec.name} has "
            f"{e.capacity / mib:.2f} MiB of HBM: {e.held / mib:.2f} MiB are held by tensors, {e.free / mib:.2f} MiB are free, "
            f"the largest free range is {e.largest / mib:.2f} MiB. Free tensors, or lower the batch size."
            + (f" The largest held:{blocks}" if blocks else "")
        )

    def adopt(self, buffer: Buffer, t: torch.Tensor, site: Site | None = None) -> None:
        """Let the buffer own the memory of a CPU tensor (Note [Adopted memory])."""
        storage = t.untyped_storage()
        try:
            block = self.hbm.adopt(buffer.nbytes, site=site)
        except OutOfHBM as e:
            raise torch.OutOfMemoryError(self._oom_text(e)) from None
        block.address = storage.data_ptr()
        buffer.block, buffer.owner = block, storage

    def host(self, buffer: Buffer, m: Meta) -> torch.Tensor:
        """A CPU tensor over the buffer's memory with the given metadata: shares bytes, copies nothing."""
        owner: Any = buffer.owner
        if owner is None:
            block = buffer.block
            assert block is not None
            owner = torch._C._construct_storage_from_data_pointer(
                block.address, _CPU, buffer.nbytes
            )
            buffer.owner = owner  # type: ignore[assignment]
        return torch.empty(0, dtype=m.dtype, device="cpu").set_(owner, m.offset, m.shape, m.stride)

    def view(self, buffer: Buffer, m: Meta) -> torch.Tensor:
        """As `host`, but maybe a tensor that was handed out before: for reading and writing at once, not for keeping.

        It is found by its range of HBM's arena, which no other memory ever has; the metas are interned.
        """
        block = buffer.block
        assert block is not None
        key = (block.address, buffer.nbytes, id(m))
        found = self._views.get(key)
        if found is None:
            found = self.host(buffer, m)
            if self.hbm.base <= block.address < self._end:
                if len(self._views) >= MAX_VIEWS:
                    self._views.clear()
                self._views[key] = found
        return found

    def owns(self, t: torch.Tensor) -> bool:
        """Whether a CPU tensor lies in HBM."""
        return t.numel() > 0 and self.hbm.base <= t.data_ptr() < self._end


_CPU = torch.device("cpu")
_MEMORY: DeviceMemory | None = None
_LOCK = threading.Lock()


def memory() -> DeviceMemory:
    """The device's memory, made when first asked for."""
    global _MEMORY
    if _MEMORY is None:
        with _LOCK:
            if _MEMORY is None:
                _MEMORY = DeviceMemory(default_spec())
    return _MEMORY


def _debug_options() -> dict[str, Any]:
    """`ADAPTIVE_EAGER_POISON=1`: memory nobody wrote, or that was freed, reads as NaN.
    `ADAPTIVE_EAGER_MAX_SPLIT_BYTES`: as `HBM`'s."""
    split = os.environ.get("ADAPTIVE_EAGER_MAX_SPLIT_BYTES")
    return {
        "poison": os.environ.get("ADAPTIVE_EAGER_POISON", "0") not in ("", "0"),
        "max_split_bytes": int(split) if split else None,
    }


def default_spec() -> ChipSpec:
    """The chip of programs that name none: TRN2, or what `ADAPTIVE_EAGER_SPEC` says, a name or a
    `.toml` file; with `ADAPTIVE_EAGER_HBM_BYTES` of HBM.

    Raises:
        ValueError, TypeError, OSError: for a variable that can't be used, naming it.
    """
    name = os.environ.get("ADAPTIVE_EAGER_SPEC")
    nbytes = os.environ.get("ADAPTIVE_EAGER_HBM_BYTES")
    try:
        spec = named(name) if name else TRN2
    except (ValueError, TypeError, OSError) as e:
        raise type(e)(f"ADAPTIVE_EAGER_SPEC={name}: {e}") from None
    try:
        return spec.replace(hbm_bytes=int(nbytes)) if nbytes else spec
    except ValueError as e:
        raise ValueError(f"ADAPTIVE_EAGER_HBM_BYTES={nbytes}: {e}") from None
