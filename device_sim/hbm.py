"""HBM: one lazily committed arena with a caching segment allocator.

It works as AWS documents Neuron's (guidelines-memory-management): segments are taken from the
arena, blocks are cut from segments, freed blocks stay for reuse. Requests below 1 MiB and the
others have pools of their own; sizes below 16 MiB are rounded to a class, larger ones are not.
reserved >= allocated >= active at all times.

On a CPU, warm memory is worth more than anything else an allocator can do: a page fault costs more
than the arithmetic on the page. So the block of a size that was freed last is handed out first (two
dict and list operations), neighbours are merged only when no chunk fits, and pages go back to the
system only on `empty_cache` or when HBM is full.

Note [Finalizers take no lock]
A block frees itself when its last reference goes, which may happen anywhere, also inside `alloc` on
the same thread. It only appends to a deque; whoever allocates next, or asks for statistics, drains
it. Other finalizers and signal handlers that ask for HBM while they interrupt the allocator on its
own thread get an error, for waiting would be forever.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from adaptive_eager.device_sim.arena import forget, map_memory
from adaptive_eager.device_sim.freelist import FreeList
from adaptive_eager.device_sim.tally import Tally

GRAIN = 512
"""Bytes: smallest class, and alignment of every block. A multiple of Neuron's minimum, 256, that is
a whole number of cache lines and of the widest vectors."""
LARGE = 1 << 20
"""Bytes from which a request belongs to the large pool."""
LARGE_GRAIN = 1 << 17
"""Bytes: distance of the classes of the large pool, so that nearly equal shapes share blocks."""
UNROUNDED = 16 << 20
"""Bytes from which sizes are not rounded to a class."""
SMALL_SEGMENT = 2 << 20
"""Bytes of a segment of the small pool: a huge page. All segments are multiples of it while the
arena has room."""
LARGE_SEGMENT = 32 << 20
"""Bytes of a segment of the large pool that several blocks share."""
OWN_SEGMENT = 10 << 20
"""Bytes from which a block gets a segment of its own, so that it can be given back whole."""


def size_class(nbytes: int) -> int:
    """The bytes that a request of nbytes takes."""
    grain = LARGE_GRAIN if LARGE <= nbytes < UNROUNDED else GRAIN
    return (nbytes + grain - 1) & -grain or GRAIN


class OutOfHBM(MemoryError):  # noqa: N818 - it reads as the field says it
    """No free range is large enough.

    asked, free (in total), largest (free range), held (by live blocks), capacity: bytes.
    """

    def __init__(self, asked: int, free: int, largest: int, held: int, capacity: int) -> None:
        super().__init__(asked, free, largest, held, capacity)
        self.asked, self.free, self.largest = asked, free, largest
        self.held, self.capacity = held, capacity

    def __str__(self) -> str:
        return (
            f"asked for {self.asked} bytes; {self.free} of {self.capacity} are free "
            f"(largest range {self.largest}), {self.held} are held"
        )


class Freed(deque[tuple[FreeList, int, int, int]]):
    """Blocks that were let go and not yet drained: (pool, offset, size, asked).

    Each block refers to it, and it to the mapping, which so lives as long as any block.
    """

    __slots__ = ("buffer",)
    buffer: mmap.mmap


class Block:
    """A range of HBM, freed when its last reference goes.

    address: absolute, usable as a pointer. offset: in the arena. size: rounded. asked: as given.
    All are bytes.
    """

    __slots__ = ("_freed", "_pool", "address", "asked", "offset", "size")

    def __init__(
        self, freed: Freed, pool: FreeList, address: int, offset: int, size: int, asked: int
    ) -> None:
        self._freed, self._pool = freed, pool
        self.address, self.offset, self.size, self.asked = address, offset, size, asked

    def __del__(self) -> None:
        self._freed.append((self._pool, self.offset, self.size, self.asked))

    def __reduce__(self) -> str:
        raise TypeError("a block owns its range of HBM; it cannot be copied or pickled")

    def __repr__(self) -> str:
        return f"Block({self.asked} bytes @hbm:{self.offset:#x})"


class HBM:
    """An arena of `capacity` bytes and its allocator. Safe in threads; a forked child has a copy.

    buffer: the memory mapping. base: its address. capacity: bytes, fewer than asked for where the
    system refuses them. limit: bytes that segments may take of it; may be set at any time.
    """

    def __init__(self, capacity: int) -> None:
        self.buffer = map_memory(capacity)
        self.capacity = len(self.buffer)
        self.limit = self.capacity
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self._freed = Freed()
        self._freed.buffer = self.buffer
        self._small, self._large, self._adopted = FreeList(), FreeList(), FreeList()
        self._segments: dict[int, int] = {}  # start -> size
        self._holes = [(0, self.capacity)]  # (start, size) in order: what no segment covers
        self._blocks, self._bytes, self._asked = Tally(), Tally(), Tally()
        self._reserved, self._taken = Tally(), Tally()
        self._retries = self._ooms = 0
        self._busy = False
        self._lock = threading.RLock()  # reentrant only so that `_busy` can be seen
        _hold_over_fork(self)

    # -- taking and giving back -------------------------------------------------------------

    def alloc(self, nbytes: int, pool: FreeList | None = None) -> Block:
        """A block of at least nbytes; a request for 0 bytes gets the smallest class.

        Raises:
            OutOfHBM: when no free range is large enough, also after giving every chunk back.
            ValueError: for a negative size.
            RuntimeError: in a finalizer or signal handler that interrupted the allocator on its
                own thread.
        """
        if nbytes < LARGE:
            if nbytes < 0:
                raise ValueError(f"asked for {nbytes} bytes of HBM")
            size = (nbytes + GRAIN - 1) & -GRAIN or GRAIN
            if pool is None:
                pool = self._small
        else:
            size = size_class(nbytes)
            if pool is None:
                pool = self._large
        with self._lock:
            if self._busy:
                raise _reentered()
            self._busy = True
            try:
                if self._freed:
                    self._drain()
                held = pool.chunks.get(size)
                offset = held.pop() if held else self._find(pool, size, nbytes)
                # `Tally.add` three times, without its call: 0.08 us less.
                tally = self._blocks
                tally.current = now = tally.current + 1
                if now > tally.peak:
                    tally.peak = now
                tally = self._bytes
                tally.current = now = tally.current + size
                if now > tally.peak:
                    tally.peak = now
                tally = self._asked
                tally.current = now = tally.current + nbytes
                if now > tally.peak:
                    tally.peak = now
            finally:
                self._busy = False
        return Block(self._freed, pool, self.base + offset, offset, size, nbytes)

    def adopt(self, nbytes: int) -> Block:
        """A block for memory that lives elsewhere. The caller sets `address`.

        It takes address space and is counted, but its pages are never touched, and it comes from a
        pool of its own, so that it takes no warm memory from others.

        Raises:
            OutOfHBM, ValueError, RuntimeError: as `alloc`.
        """
        return self.alloc(nbytes, self._adopted)

    def _drain(self) -> None:
        """Put what finalizers left into the free lists."""
        freed, blocks, total, wanted = self._freed, self._blocks, self._bytes, self._asked
        while freed:
            pool, offset, size, asked = freed.popleft()
            held = pool.chunks.get(size)
            if held is None:
                pool.put(offset, size)
            else:
                held.append(offset)
            blocks.current -= 1
            blocks.freed += 1
            total.current -= size
            total.freed += size
            wanted.current -= asked
            wanted.freed += asked

    def _find(self, pool: FreeList, size: int, asked: int) -> int:
        """Best fit, else best fit after merging, else a new segment, else one after giving back."""
        offset = pool.take(size)
        if offset is None and pool.stale(self._blocks.freed):
            pool.merge(self._segments, self._blocks.freed)
            offset = pool.take(size)
        if offset is None:
            offset = self._new_segment(pool, size)
        if offset is None:
            self._retries += 1
            self._give_back(split=True)
            offset = self._new_segment(pool, size)
        if offset is None:
            self._ooms += 1
            free = max(0, min(self.limit, self.capacity) - self._reserved.current)
            largest = min(free, max([n for _, n in self._holes], default=0))
            held, capacity = self._bytes.current, min(self.limit, self.capacity)
            raise OutOfHBM(asked, free, largest, held, capacity)
        return offset

    # -- segments ---------------------------------------------------------------------------

    def _new_segment(self, pool: FreeList, size: int) -> int | None:
        """Take a segment out of the first hole that has room and cut a block off its front."""
        usual = SMALL_SEGMENT if size < LARGE else LARGE_SEGMENT if size < OWN_SEGMENT else size
        roomy = (max(size, usual) + SMALL_SEGMENT - 1) & -SMALL_SEGMENT
        last = pool is self._adopted  # from the far end: its pages stay untouched
        room_left = self.limit - self._reserved.current
        for want in (roomy, size):
            if want > room_left:
                continue
            for at in sorted(range(len(self._holes)), reverse=last):
                start, room = self._holes[at]
                if room < want:
                    continue
                first = start + room - want if last else start
                rest = (start, room - want) if last else (start + want, room - want)
                self._holes[at : at + 1] = [rest] if room > want else []
                self._segments[first] = want
                self._reserved.add(want)
                self._taken.add(1)
                if want > size:
                    pool.put(first + size, want - size)
                return first
        return None

    def _give_back(self, *, split: bool) -> None:
        """Return whole free segments, with `split` also free parts of segments, to the arena."""
        for pool in (self._small, self._large, self._adopted):
            pool.merge(self._segments, self._blocks.freed)
            starts = sorted(self._segments)
            chunks = sorted(pool.clear())
            try:
                while chunks:  # from the right: what is left of a segment keeps its start
                    offset, size = chunks.pop()
                    start = starts[bisect_right(starts, offset) - 1]
                    if split or size == self._segments[start]:
                        self._cut_out(start, offset, size)
                    else:
                        pool.put(offset, size)
            finally:
                for chunk in chunks:
                    pool.put(*chunk)
        joined: list[tuple[int, int]] = []
        for start, size in self._holes:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._holes = joined

    def _cut_out(self, start: int, offset: int, size: int) -> None:
        """Make a hole of a free chunk; what lies left and right of it in the segment become two."""
        left, right = offset - start, start + self._segments.pop(start) - offset - size
        if left:
            self._segments[start] = left
        if right:
            self._segments[offset + size] = right
        insort(self._holes, (offset, size))
        self._reserved.remove(size)
        self._taken.remove(1)
        self._taken.add((left > 0) + (right > 0))
        forget(self.buffer, offset, size)

    # -- statistics -------------------------------------------------------------------------

    @contextmanager
    def _settled(self) -> Iterator[bool]:
        """Hold the lock, nothing left to drain. False where this interrupts the allocator."""
        with self._lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                self._drain()
                yield True
            finally:
                self._busy = False

    def _tallies(self) -> dict[str, Tally]:
        return {
            "allocation": self._blocks,
            "allocated_bytes": self._bytes,
            "active_bytes": self._bytes,  # in use until freed: no stream frees later
            "requested_bytes": self._asked,
            "reserved_bytes": self._reserved,
            "segment": self._taken,
        }

    def stats(self) -> dict[str, int]:
        """Bytes and counts under the key names of `torch.cuda.memory_stats`."""
        with self._settled():
            counts: dict[str, int] = {}
            for name, tally in self._tallies().items():
                counts |= tally.report(name)
            return counts | {"num_alloc_retries": self._retries, "num_ooms": self._ooms}

    def empty_cache(self) -> None:
        """Give back all segments in which nothing is held, and their pages to the system."""
        with self._settled() as mine:
            if mine:
                self._give_back(split=False)

    def reset_peak_stats(self) -> None:
        """Let the peaks start from the current values."""
        with self._settled():
            for tally in self._tallies().values():
                tally.reset_peak()

    def reset_accumulated_stats(self) -> None:
        """Let all sums and the counts of retries and failures start from zero."""
        with self._settled():
            for tally in self._tallies().values():
                tally.reset_accumulated()
            self._retries = self._ooms = 0


def _hold_over_fork(hbm: HBM) -> None:
    """Fork only between two operations: the child's copy is whole and its lock is free."""
    if not hasattr(os, "register_at_fork"):
        return
    known = weakref.ref(hbm)  # the hooks stay for ever, the arena need not

    def hold() -> None:
        if arena := known():
            arena._lock.acquire()

    def release() -> None:
        if arena := known():
            arena._lock.release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release)


def _reentered() -> RuntimeError:
    return RuntimeError(
        "a finalizer or signal handler asked for HBM while it interrupted the allocator "
        "on the same thread"
    )
