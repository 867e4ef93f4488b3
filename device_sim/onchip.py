"""SBUF and PSUM: memory of 128 partitions in which every byte has at most one living tile.

A tile is a range of partitions and, in each of them, the same range of bytes. What hardware refuses is
refused here: a range of partitions that starts where engines can't, a tile past the end or over another
one, a PSUM tile across two banks. Fresh memory holds 0xFF, NaN as any float, so that a value nobody
wrote shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from adaptive_eager.device_sim.spec import ChipSpec


class OnChipError(ValueError):
    """A tile that the chip could not hold. Names the memory, the tile and the rule."""


def check_partitions(start: int, count: int, partitions: int = 128) -> None:
    """The start-partition rule: more than 64 partitions start at 0, more than 32 at 0 or 64, the
    others at a multiple of 32 (trainium_inferentia2_arch).

    Raises:
        OnChipError: for a range of partitions that engines can't reach.
    """
    if count < 1 or start < 0 or start + count > partitions:
        raise OnChipError(f"partitions {start}..{start + count} of {partitions}")
    step = 128 if count > 64 else 64 if count > 32 else 32
    if start % step:
        raise OnChipError(f"{count} partitions can't start at {start}: only at multiples of {step}")


@dataclass(eq=False, slots=True)
class Tile:
    """Bytes `offset`..`offset + nbytes` of partitions `start`..`start + count`."""

    memory: OnChip
    start: int
    count: int
    offset: int
    nbytes: int

    def view(self, dtype: npt.DTypeLike, columns: int) -> npt.NDArray[np.generic]:
        """The tile's first columns as an array (count, columns) that shares its bytes."""
        kind = np.dtype(dtype)
        nbytes = columns * kind.itemsize
        if nbytes > self.nbytes:
            raise OnChipError(f"{nbytes} bytes in a tile of {self.nbytes}")
        rows = self.memory.data[self.start : self.start + self.count]
        return rows[:, self.offset : self.offset + nbytes].view(kind)


class OnChip:
    """One memory of a core. data: its bytes, (partitions, bytes of a partition). peak: end of the
    highest byte that a tile ever had. bank: bytes that a tile must not cross a multiple of, or 0."""

    def __init__(self, name: str, partitions: int, nbytes: int, bank: int = 0) -> None:
        self.name, self.bank, self.peak = name, bank, 0
        self.data = np.full((partitions, nbytes), 0xFF, np.uint8)
        self._live: list[Tile] = []

    def place(self, offset: int, nbytes: int, count: int, start: int = 0) -> Tile:
        """A tile at a fixed place, living until `free`. Its bytes are 0xFF.

        Raises:
            OnChipError: when the chip has no such place, or something lives there.
        """
        partitions, room = self.data.shape
        check_partitions(start, count, partitions)
        what = f"{self.name}: {nbytes} bytes at {offset}"
        if offset < 0 or nbytes < 0 or offset + nbytes > room:
            raise OnChipError(f"{what} of {room} in a partition")
        if self.bank and nbytes and offset // self.bank != (offset + nbytes - 1) // self.bank:
            raise OnChipError(f"{what} cross a bank of {self.bank}")
        for t in self._live:
            apart = offset >= t.offset + t.nbytes or t.offset >= offset + nbytes
            if not apart and start < t.start + t.count and t.start < start + count:
                raise OnChipError(f"{what}: {t.nbytes} at {t.offset} are in use")
        tile = Tile(self, start, count, offset, nbytes)
        self._live.append(tile)
        self.peak = max(self.peak, offset + nbytes)
        self.data[start : start + count, offset : offset + nbytes] = 0xFF
        return tile

    def free(self, tile: Tile) -> None:
        """End a tile's life."""
        self._live.remove(tile)


def sbuf(spec: ChipSpec) -> OnChip:
    """A core's SBUF."""
    return OnChip("SBUF", spec.partitions, spec.sbuf_partition_bytes)


def psum(spec: ChipSpec) -> OnChip:
    """A core's PSUM."""
    return OnChip("PSUM", spec.partitions, spec.psum_partition_bytes, spec.psum_bank_bytes)


class Places:
    """Where tiles of known lifetimes go in a partition: the lowest place that is free, 32-byte aligned.

    high: bytes from 0 that were ever in use. A planner asks it; nothing is moved.
    """

    ALIGN = 32

    def __init__(self, start: int = 0) -> None:
        self.high = self.floor = start
        self._free: list[tuple[int, int]] = []  # (offset, bytes) below `_top`, in order
        self._top = start

    def take(self, nbytes: int) -> int:
        """The offset of so many bytes."""
        size = max(1, -(-nbytes // self.ALIGN)) * self.ALIGN
        for k, (offset, room) in enumerate(self._free):
            if room >= size:
                rest = [(offset + size, room - size)] if room > size else []
                self._free[k : k + 1] = rest
                self.high = max(self.high, offset + nbytes)  # the last user may have been shorter
                return offset
        if self._free and sum(self._free[-1]) == self._top:
            offset = self._free.pop()[0]
        else:
            offset = self._top
        self._top = offset + size
        self.high = max(self.high, offset + nbytes)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take bytes back."""
        size = max(1, -(-nbytes // self.ALIGN)) * self.ALIGN
        self._free.append((offset, size))
        self._free.sort()
        joined: list[tuple[int, int]] = []
        for at, room in self._free:
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((at, room))
        self._free = joined
