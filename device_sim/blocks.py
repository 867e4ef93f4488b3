"""What the HBM allocator hands out and tells about: blocks, live blocks, and the error when there is none."""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass

from adaptive_eager.device_sim.freelist import FreeList

Site = tuple[str, str]
"""Who asked for a block: an op's name and its `file:line`."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block that is held, or several alike (`count`). size: rounded bytes of each. asked: as asked
    for. offset: in the arena, of one of them. waits: freed, but a stream may still use it."""

    offset: int
    size: int
    asked: int
    site: Site | None
    stream: int = 0
    waits: bool = False
    count: int = 1

    def __str__(self) -> str:
        op, where = self.site or ("an unknown op", "an unknown line")
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}{self.asked / MIB:.2f} MiB by {op} at {where}"


def largest(blocks: list[LiveBlock], count: int) -> tuple[LiveBlock, ...]:
    """The `count` blocks, or groups of equal ones of one site, that hold most."""
    groups: dict[tuple[int, Site | None], list[LiveBlock]] = {}
    for b in blocks:
        groups.setdefault((b.asked, b.site), []).append(b)
    ranked = sorted(groups.values(), key=lambda g: -len(g) * g[0].size)[:count]
    return tuple([
        LiveBlock(g[0].offset, g[0].size, g[0].asked, g[0].site, g[0].stream, count=len(g))
        for g in ranked
    ])  # fmt: skip


class OutOfHBM(MemoryError):  # noqa: N818 - it reads as the field says it
    """No free range is large enough.

    asked, free (in total), largest (free range), held (by live blocks), capacity: bytes. blocks: what
    holds most.
    """

    def __init__(
        self,
        asked: int,
        free: int,
        largest: int,
        held: int,
        capacity: int,
        blocks: tuple[LiveBlock, ...] = (),
    ) -> None:
        super().__init__(asked, free, largest, held, capacity, blocks)
        self.asked, self.free, self.largest = asked, free, largest
        self.held, self.capacity, self.blocks = held, capacity, blocks

    def __str__(self) -> str:
        head = (
            f"asked for {self.asked} bytes; {self.free} of {self.capacity} are free "
            f"(largest range {self.largest}), {self.held} are held"
        )
        return "\n  ".join([head, *map(str, self.blocks)])


Uses = list[tuple[int, int]]
"""(stream, ticket) of other streams that use a block."""


class Freed(deque[tuple[FreeList, int, int, int, Uses | None]]):
    """Blocks that were let go and not yet drained: (pool, offset, size, asked, uses).

    Each block refers to it, and it to the mapping, which so lives as long as any block.
    """

    __slots__ = ("buffer",)
    buffer: mmap.mmap


class Block:
    """A range of HBM, freed when its last reference goes.

    address: absolute, usable as a pointer. offset: in the arena. size: rounded. asked: as given.
    All are bytes. uses: other streams that have work on it (`HBM.record_stream`).
    """

    __slots__ = ("_freed", "_pool", "address", "asked", "offset", "size", "uses")

    def __init__(
        self, freed: Freed, pool: FreeList, address: int, offset: int, size: int, asked: int
    ) -> None:
        self._freed, self._pool = freed, pool
        self.address, self.offset, self.size, self.asked = address, offset, size, asked
        self.uses: Uses | None = None

    def __del__(self) -> None:
        self._freed.append((self._pool, self.offset, self.size, self.asked, self.uses))

    def __reduce__(self) -> str:
        raise TypeError("a block owns its range of HBM; it cannot be copied or pickled")

    def __repr__(self) -> str:
        return f"Block({self.asked} bytes @hbm:{self.offset:#x})"
