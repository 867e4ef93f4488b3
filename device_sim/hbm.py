"""HBM: one lazily committed arena with a caching segment allocator.

Two pools as Neuron's allocator has them: blocks below 1 MiB and above. Sizes below 16 MiB are rounded to a class,
larger ones are not. A freed block goes to a list of its size and is handed out again first, warm from its last use;
neighbours are merged when a request finds no block, and whole free segments are given back when HBM runs out.

Note [Finalizers take no lock]
A block frees itself when its last reference goes, which may happen anywhere, also inside `alloc` on the same thread. It
only appends to a deque; whoever allocates next, or asks for statistics, drains it.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import mmap
import os
import threading

GRAIN = 512
"""Bytes: alignment and smallest class."""
LARGE = 1 << 20
"""Bytes from which a block belongs to the large pool."""
UNROUNDED = 16 << 20
"""Bytes from which sizes are not rounded to a class."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 32 << 20
OWN_SEGMENT = 10 << 20
"""Bytes from which a block gets a segment of its own, so that it can be given back whole."""
STATS = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "reserved_bytes",
    "active_bytes",
    "segment",
)


def size_class(nbytes: int) -> int:
    """The rounded size of a request, in bytes."""
    grain = GRAIN if nbytes < LARGE or nbytes >= UNROUNDED else 1 << 17
    return max(GRAIN, (nbytes + grain - 1) & -grain)


class OutOfHBM(MemoryError):  # noqa: N818
    """No free range is large enough. All numbers are bytes."""

    def __init__(self, asked: int, free: int, largest: int, held: int, capacity: int) -> None:
        super().__init__(
            f"asked for {asked} bytes; {free} of {capacity} are free (largest range {largest}), {held} are held"
        )
        self.asked, self.free, self.largest, self.held, self.capacity = (
            asked,
            free,
            largest,
            held,
            capacity,
        )


class Block:
    """A range of HBM. address: absolute, usable as a pointer. offset: in the arena. size: rounded, asked: as requested."""

    __slots__ = ("_home", "address", "asked", "offset", "size")

    def __init__(
        self,
        home: collections.deque[tuple[int, int, int]],
        address: int,
        offset: int,
        size: int,
        asked: int,
    ) -> None:
        self._home = home
        self.address, self.offset, self.size, self.asked = address, offset, size, asked

    def __del__(self) -> None:
        self._home.append((self.offset, self.size, self.asked))


class HBM:
    """An arena of `capacity` bytes and its allocator. Thread-safe.

    buffer: the memory mapping. base: its address.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        flags = (
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            if hasattr(mmap, "MAP_PRIVATE")
            else 0
        )
        self.buffer = mmap.mmap(-1, capacity, flags=flags) if flags else mmap.mmap(-1, capacity)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.buffer.madvise(mmap.MADV_HUGEPAGE)
        self._freed: collections.deque[tuple[int, int, int]] = collections.deque()
        self._lists: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
        self._segments: dict[int, int] = {}
        self._starts: list[int] = []
        self._holes: list[tuple[int, int]] = [(0, capacity)]
        self._counts = dict.fromkeys(
            [f"{s}.all.{k}" for s in STATS for k in ("current", "peak", "allocated", "freed")], 0
        )
        self._counts |= {"num_alloc_retries": 0, "num_ooms": 0}
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._new_lock)

    def _new_lock(self) -> None:
        self._lock = threading.Lock()

    # -- taking and giving back -----------------------------------------------------------------

    def alloc(self, nbytes: int) -> Block:
        """A block of at least nbytes; a request for 0 bytes gets the smallest class.

        Raises:
            OutOfHBM: when no free range is large enough, also after merging and giving back cached segments.
        """
        size = size_class(nbytes)
        with self._lock:
            if self._freed:
                self._drain()
            ready = self._lists[size >= LARGE].get(size)
            offset = ready.pop() if ready else self._find(size, nbytes)
            self._count(nbytes, size)
        return Block(self._freed, self.base + offset, offset, size, nbytes)

    def adopt(self, nbytes: int) -> Block:
        """A block for memory that lives elsewhere: it takes address space and is counted, but never touched. The caller
        sets `address`."""
        return self.alloc(nbytes)

    def _count(self, nbytes: int, size: int) -> None:
        c = self._counts
        for name, n in (
            ("allocation", 1),
            ("allocated_bytes", size),
            ("requested_bytes", nbytes),
            ("active_bytes", size),
        ):
            c[f"{name}.all.allocated"] += n
            now = c[f"{name}.all.current"] = c[f"{name}.all.current"] + n
            if now > c[f"{name}.all.peak"]:
                c[f"{name}.all.peak"] = now

    def _drain(self) -> None:
        c = self._counts
        while self._freed:
            offset, size, asked = self._freed.popleft()
            self._lists[size >= LARGE].setdefault(size, []).append(offset)
            for name, n in (
                ("allocation", 1),
                ("allocated_bytes", size),
                ("requested_bytes", asked),
                ("active_bytes", size),
            ):
                c[f"{name}.all.current"] -= n
                c[f"{name}.all.freed"] += n

    def _find(self, size: int, asked: int) -> int:
        """Best fit, then the same after merging, then a new segment, then the same after giving cached ones back."""
        large = size >= LARGE
        found = self._best_fit(size, large)
        if found is None:
            self._merge()
            found = self._best_fit(size, large)
        if found is None:
            found = self._new_segment(size, large)
        if found is None:
            self._counts["num_alloc_retries"] += 1
            self._give_back()
            found = self._new_segment(size, large)
        if found is None:
            self._counts["num_ooms"] += 1
            held = self._counts["allocated_bytes.all.current"]
            largest = max(
                [n for _, n in self._holes]
                + [n for lists in self._lists for n, at in lists.items() if at],
                default=0,
            )
            raise OutOfHBM(asked, self.capacity - held, largest, held, self.capacity)
        return found

    def _best_fit(self, size: int, large: bool) -> int | None:
        lists = self._lists[large]
        fits = [n for n, at in lists.items() if n >= size and at]
        if not fits:
            return None
        n = min(fits)
        offset = lists[n].pop()
        if n > size:
            self._lists[large].setdefault(n - size, []).append(offset + size)
        return offset

    def _new_segment(self, size: int, large: bool) -> int | None:
        """Take a segment out of the arena and cut the block off its front."""
        usual = SMALL_SEGMENT if not large else LARGE_SEGMENT if size < OWN_SEGMENT else size
        want = (max(size, usual) + SMALL_SEGMENT - 1) & -SMALL_SEGMENT
        for n in dict.fromkeys((want, size)):
            for k, (start, room) in enumerate(self._holes):
                if room >= n:
                    self._holes[k : k + 1] = [(start + n, room - n)] if room > n else []
                    self._segments[start] = n
                    bisect.insort(self._starts, start)
                    self._reserve(n, 1)
                    if n > size:
                        self._lists[large].setdefault(n - size, []).append(start + size)
                    return start
        return None

    def _reserve(self, nbytes: int, segments: int) -> None:
        c = self._counts
        kind = "allocated" if nbytes > 0 else "freed"
        for name, n in (("reserved_bytes", nbytes), ("segment", segments)):
            c[f"{name}.all.{kind}"] += abs(n)
            now = c[f"{name}.all.current"] = c[f"{name}.all.current"] + n
            c[f"{name}.all.peak"] = max(c[f"{name}.all.peak"], now)

    def _merge(self) -> None:
        """Join free neighbours inside each segment."""
        for large in (False, True):
            chunks = sorted((at, n) for n, ats in self._lists[large].items() for at in ats)
            lists: dict[int, list[int]] = {}
            k = 0
            while k < len(chunks):
                at, n = chunks[k]
                first = self._starts[bisect.bisect_right(self._starts, at) - 1]
                end = first + self._segments[first]
                k += 1
                while k < len(chunks) and chunks[k][0] == at + n < end:
                    n += chunks[k][1]
                    k += 1
                lists.setdefault(n, []).append(at)
            self._lists[large].clear()
            self._lists[large].update(lists)

    def _give_back(self) -> None:
        """Return segments that are wholly free to the arena, their pages to the system."""
        self._merge()
        for lists in self._lists:
            for n, ats in lists.items():
                for at in [a for a in ats if self._segments.get(a) == n]:
                    ats.remove(at)
                    del self._segments[at]
                    self._starts.remove(at)
                    self._holes.append((at, n))
                    self._reserve(-n, -1)
                    if hasattr(self.buffer, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
                        first = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
                        if at + n > first:
                            self.buffer.madvise(
                                mmap.MADV_DONTNEED,
                                first,
                                (at + n - first) // mmap.PAGESIZE * mmap.PAGESIZE or mmap.PAGESIZE,
                            )
        self._holes.sort()
        joined: list[tuple[int, int]] = []
        for at, n in self._holes:
            if joined and joined[-1][0] + joined[-1][1] == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + n)
            else:
                joined.append((at, n))
        self._holes = joined

    # -- statistics -------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters under PyTorch's key names: `allocated_bytes.all.current` and so on. Bytes and counts."""
        with self._lock:
            self._drain()
            return dict(self._counts)

    def empty_cache(self) -> None:
        """Give back all segments in which nothing is held."""
        with self._lock:
            self._drain()
            self._give_back()

    def reset_peak_stats(self) -> None:
        """Let the peaks start from the current values."""
        with self._lock:
            self._drain()
            for s in STATS:
                self._counts[f"{s}.all.peak"] = self._counts[f"{s}.all.current"]

    def reset_accumulated_stats(self) -> None:
        """Zero the accumulated counters."""
        with self._lock:
            self._drain()
            for s in STATS:
                self._counts[f"{s}.all.allocated"] = self._counts[f"{s}.all.freed"] = 0
            self._counts["num_alloc_retries"] = self._counts["num_ooms"] = 0
