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
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from adaptive_eager.device_sim.arena import forget, map_memory
from adaptive_eager.device_sim.blocks import (
    Block,
    Freed,
    LiveBlock,
    OutOfHBM,
    Site,
    Uses,
    largest,
)
from adaptive_eager.device_sim.freelist import FreeList
from adaptive_eager.device_sim.history import Event, History
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
POISON = 0xFF
"""What debug mode fills memory with: NaN in every float type, -1 in every int type."""
NAMED = 5
"""Blocks, or groups of equal ones, that an error names."""
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


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a segment: a live block, or free. Bytes."""

    offset: int
    size: int
    live: LiveBlock | None


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment and what fills it, in order. kind: "small", "large" or "adopted"."""

    start: int
    size: int
    kind: str
    stream: int
    blocks: tuple[Piece, ...]


class HBM:
    """An arena of `capacity` bytes and its allocator. Safe in threads; a forked child has a copy.

    buffer: the memory mapping. base: its address. capacity: bytes, fewer than asked for where the
    system refuses them. limit: bytes that segments may take of it (`set_limit`).

    poison: fill fresh and freed memory with 0xFF, NaN as any float; for debugging, it touches every
    page. max_split_bytes: bytes from which a free range is not split for smaller requests, at least
    1 MiB; for programs whose sizes vary, against fragments.

    Raises:
        ValueError: for a max_split_bytes below 1 MiB.
    """

    def __init__(
        self, capacity: int, *, poison: bool = False, max_split_bytes: int | None = None
    ) -> None:
        if max_split_bytes is not None and max_split_bytes < LARGE:
            raise ValueError(
                f"HBM: max_split_bytes must be at least {LARGE}, got {max_split_bytes}"
            )
        self.poison, self.max_split_bytes = poison, max_split_bytes
        self.buffer = map_memory(capacity)
        self.capacity = len(self.buffer)
        self.limit = self.capacity
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self._freed = Freed()
        self._freed.buffer = self.buffer
        self._pools: dict[tuple[str, int], FreeList] = {}
        self._small, self._large = self._pool("small", 0), self._pool("large", 0)
        self._adopted = self._pool("adopted", 0)
        self._segments: dict[int, int] = {}  # start -> size
        self._owners: dict[int, FreeList] = {}  # start -> the pool it was taken for
        self._live: dict[int, tuple[int, int, Site | None, FreeList]] = {}
        self._waiting: list[tuple[FreeList, int, int, int, Uses]] = []
        self._reached: dict[int, int] = {}
        self._active: Tally | None = None  # the same as `_bytes` until a block has to wait
        self._history: History | None = None
        self._holes = [(0, self.capacity)]  # (start, size) in order: what no segment covers
        self._blocks, self._bytes, self._asked = Tally(), Tally(), Tally()
        self._reserved, self._taken = Tally(), Tally()
        self._retries = self._ooms = 0
        self._busy = False
        self._lock = threading.RLock()  # reentrant only so that `_busy` can be seen
        _hold_over_fork(self)

    # -- taking and giving back -------------------------------------------------------------

    def alloc(
        self,
        nbytes: int,
        pool: FreeList | None = None,
        *,
        site: Site | None = None,
        stream: int = 0,
    ) -> Block:
        """A block of at least nbytes; a request for 0 bytes gets the smallest class.

        site: who asks, for errors, history and snapshots. stream: Note [Streams].

        Raises:
            OutOfHBM: when no free range is large enough, also after giving every chunk back. It
                names what holds most.
            ValueError: for a negative size.
            RuntimeError: in a finalizer or signal handler that interrupted the allocator on its
                own thread.
        """
        if nbytes < LARGE:
            if nbytes < 0:
                raise ValueError(f"asked for {nbytes} bytes of HBM")
            size = (nbytes + GRAIN - 1) & -GRAIN or GRAIN
            if pool is None:
                pool = self._small if not stream else self._pool("small", stream)
        else:
            size = size_class(nbytes)
            if pool is None:
                pool = self._large if not stream else self._pool("large", stream)
        with self._lock:
            if self._busy:
                raise _reentered()
            self._busy = True
            try:
                if self._freed:
                    self._drain()
                held = pool.chunks.get(size)
                offset = held.pop() if held else self._find(pool, size, nbytes)
                self._live[offset] = (size, nbytes, site, pool)
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
                if self._active is not None:
                    self._active.add(size)
                if self._history is not None:
                    self._history.note("alloc", self.base + offset, size, site, pool.stream)
            finally:
                self._busy = False
        if self.poison and pool is not self._adopted:
            ctypes.memset(self.base + offset, POISON, size)
        return Block(self._freed, pool, self.base + offset, offset, size, nbytes)

    def adopt(self, nbytes: int, *, site: Site | None = None) -> Block:
        """A block for memory that lives elsewhere. The caller sets `address`.

        It takes address space and is counted, but its pages are never touched, and it comes from a
        pool of its own, so that it takes no warm memory from others.

        Raises:
            OutOfHBM, ValueError, RuntimeError: as `alloc`.
        """
        return self.alloc(nbytes, self._adopted, site=site)

    def _pool(self, kind: str, stream: int) -> FreeList:
        """The free list of a kind and a stream."""
        found = self._pools.get((kind, stream))
        if found is None:
            found = self._pools[kind, stream] = FreeList(kind, stream, self.max_split_bytes)
        return found

    def _drain(self) -> None:
        """Put what finalizers left into the free lists."""
        freed, blocks, total, wanted = self._freed, self._blocks, self._bytes, self._asked
        live, plain = self._live, self._history is None and not self.poison
        while freed:
            pool, offset, size, asked, uses = freed.popleft()
            if self._history is not None:
                where = self.base + offset
                self._history.note("free_requested", where, size, live[offset][2], pool.stream)
            if self._active is not None:
                self._active.remove(size)
            if uses is not None and not self._passed(uses):
                self._waiting.append((pool, offset, size, asked, uses))
                continue
            if not plain:
                self._note_free(pool, offset, size)
            del live[offset]
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

    def _note_free(self, pool: FreeList, offset: int, size: int) -> None:
        """Poison and remember a block that is free now."""
        if self.poison and pool is not self._adopted:
            ctypes.memset(self.base + offset, POISON, size)
        if self._history is not None:
            site = self._live[offset][2]
            self._history.note("free_completed", self.base + offset, size, site, pool.stream)

    # -- streams ------------------------------------------------------------------------------

    def record_stream(self, block: Block, stream: int, ticket: int) -> None:
        """Say that another stream uses the block until it has reached `ticket` (Note [Streams])."""
        with self._settled():
            if self._active is None:
                self._active = self._bytes.copy()
            if block.uses is None:
                block.uses = []
            block.uses.append((stream, ticket))

    def stream_reached(self, stream: int, ticket: int) -> None:
        """Say how far a stream has come. Blocks that waited for it may be reused."""
        with self._settled():
            self._reached[stream] = max(ticket, self._reached.get(stream, ticket))
            waiting, self._waiting = self._waiting, []
            for pool, offset, size, asked, uses in waiting:
                if not self._passed(uses):
                    self._waiting.append((pool, offset, size, asked, uses))
                    continue
                self._note_free(pool, offset, size)
                del self._live[offset]
                pool.put(offset, size)
                self._blocks.remove(1)
                self._bytes.remove(size)
                self._asked.remove(asked)

    def _passed(self, uses: Uses) -> bool:
        return all(self._reached.get(stream, ticket - 1) >= ticket for stream, ticket in uses)

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
            most = min(free, max([n for _, n in self._holes], default=0))
            held, capacity = self._bytes.current, min(self.limit, self.capacity)
            if self._history is not None:
                self._history.note("oom", free, asked, None, pool.stream)
            raise OutOfHBM(asked, free, most, held, capacity, largest(self._held(), NAMED))
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
                self._segments[first], self._owners[first] = want, pool
                self._note_segment("segment_alloc", first, want, pool)
                self._reserved.add(want)
                self._taken.add(1)
                if want > size:
                    pool.put(first + size, want - size)
                return first
        return None

    def _note_segment(
        self, action: Literal["segment_alloc", "segment_free"], at: int, size: int, pool: FreeList
    ) -> None:
        if self._history is not None:
            self._history.note(action, self.base + at, size, None, pool.stream)

    def _give_back(self, *, split: bool) -> None:
        """Return whole free segments, with `split` also free parts of segments, to the arena."""
        for pool in self._pools.values():
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
        pool = self._owners.pop(start)
        if left:
            self._segments[start], self._owners[start] = left, pool
        if right:
            self._segments[offset + size], self._owners[offset + size] = right, pool
        self._note_segment("segment_free", offset, size, pool)
        insort(self._holes, (offset, size))
        self._reserved.remove(size)
        self._taken.remove(1)
        self._taken.add((left > 0) + (right > 0))
        forget(self.buffer, offset, size)

    def set_limit(self, nbytes: int) -> None:
        """Be memory of so many bytes from now on. What is held stays, also where it is more."""
        with self._settled() as mine:
            self.limit = nbytes
            if mine and self._reserved.current > nbytes:
                self._give_back(split=True)

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
            "active_bytes": self._active or self._bytes,
            "requested_bytes": self._asked,
            "reserved_bytes": self._reserved,
            "segment": self._taken,
        }

    def _held(self) -> list[LiveBlock]:
        waits = {offset for _, offset, _, _, _ in self._waiting}
        return [
            LiveBlock(at, size, asked, site, pool.stream, at in waits)
            for at, (size, asked, site, pool) in self._live.items()
        ]

    def live(self) -> list[LiveBlock]:
        """The blocks that are held, largest first."""
        with self._settled():
            return sorted(self._held(), key=lambda b: (-b.size, b.offset))

    def layout(self) -> list[Segment]:
        """The segments with the blocks and free ranges that fill them, in order of address."""
        with self._settled():
            blocks = {b.offset: b for b in self._held()}
            pieces = [Piece(b.offset, b.size, b) for b in blocks.values()]
            for pool in self._pools.values():
                pieces += [Piece(at, size, None) for at, size in pool]
            pieces.sort(key=lambda p: p.offset)
            out, k = [], 0
            for start, size in sorted(self._segments.items()):
                mine = []
                while k < len(pieces) and pieces[k].offset < start + size:
                    mine.append(pieces[k])
                    k += 1
                owner = self._owners[start]
                out.append(Segment(start, size, owner.kind, owner.stream, tuple(mine)))
            return out

    def record_history(self, most: int | None = None, *, on: bool = True) -> None:
        """Remember the newest `most` events, or all, from now on; with on=False forget and stop."""
        with self._settled():
            self._history = History(most) if on else None

    def history(self) -> list[Event]:
        """The events, oldest first; empty where nothing is remembered."""
        with self._settled():
            return [] if self._history is None else list(self._history.events)

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
