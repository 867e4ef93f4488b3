"""Free ranges of HBM, by size: what the allocator keeps between a free and the next request.

Note [A range has one owner]
Each byte of the arena belongs to exactly one of: a live block, the queue of freed blocks, a free
list, the holes between segments, or the frame that moves it from one to another. A range leaves its
old owner before it enters the new one, so an interrupt in between (Ctrl-C) can lose a range but
never hand it out twice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator

ROOMY = 20 << 20
"""Bytes that a request which may not be split off a larger chunk may waste of it."""


class FreeList:
    """The free chunks of one pool. Offsets and sizes are bytes.

    kind, stream: whose requests it serves. whole: bytes from which a chunk is not split for a request
    of less, or None. chunks: size -> offsets, the one freed last at the end (still warm, so handed out first).
    sizes: the keys of `chunks` in order. settled: how many chunks the last merge left; merged_at:
    the allocator's count of frees at that time.
    """

    __slots__ = ("chunks", "kind", "merged_at", "settled", "sizes", "stream", "whole")

    def __init__(self, kind: str = "small", stream: int = 0, whole: int | None = None) -> None:
        self.kind, self.stream, self.whole = kind, stream, whole
        self.chunks: dict[int, list[int]] = {}
        self.sizes: list[int] = []
        self.settled = self.merged_at = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(offset, size) of every free chunk."""
        return ((at, size) for size, held in self.chunks.items() for at in held)

    def put(self, offset: int, size: int) -> None:
        """Keep a chunk."""
        held = self.chunks.get(size)
        if held is None:
            self.chunks[size] = [offset]
            insort(self.sizes, size)
        else:
            held.append(offset)

    def take(self, size: int) -> int | None:
        """The front of the smallest chunk of at least `size` bytes; the rest of it stays here.

        A chunk larger than `whole` serves a smaller request never, and a larger one only if what is
        left over is less than `ROOMY` (PyTorch's max_split_size, AWS's kMaxSplitSizeBytes).
        """
        at = bisect_left(self.sizes, size)
        while at < len(self.sizes):
            found = self.sizes[at]
            kept = self.whole is not None and found > self.whole and found != size
            if kept and (size < (self.whole or 0) or found - size >= ROOMY):
                return None
            if held := self.chunks[found]:
                offset = held.pop()
                if found > size:
                    self.put(offset + size, found - size)
                return offset
            del self.sizes[at], self.chunks[found]
        return None

    def stale(self, frees: int) -> bool:
        """Whether merging, a look at every chunk, pays: half as many were freed as it left."""
        return not 0 <= frees - self.merged_at < self.settled // 2

    def merge(self, starts: Container[int], frees: int) -> None:
        """Join neighbours, but not across the start of a segment. frees: as for `stale`."""
        joined: list[tuple[int, int]] = []
        for offset, size in sorted(self):
            if joined and sum(joined[-1]) == offset and offset not in starts:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((offset, size))
        chunks: dict[int, list[int]] = {}
        for offset, size in joined:
            chunks.setdefault(size, []).append(offset)
        self.chunks, self.sizes, self.settled = chunks, sorted(chunks), len(joined)
        self.merged_at = frees

    def clear(self) -> list[tuple[int, int]]:
        """Let go of every chunk: (offset, size) of each."""
        chunks = list(self)
        self.chunks, self.sizes = {}, []
        return chunks
