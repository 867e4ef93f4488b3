"""Memory that a launch needs only while it runs: tiles of rows, partial totals."""

from __future__ import annotations

import ctypes
import mmap
import threading

KEEP_BYTES = 32 << 20
"""A thread keeps an area of up to this size for its next launch."""
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Python's anonymous mappings are shared with forked children otherwise."""


class Scratch(threading.local):
    """A thread's area. It grows to the largest launch seen, not to the sum over all launches."""

    def __init__(self) -> None:
        self.size, self.address = 0, 0

    def take(self, nbytes: int) -> int:
        """The address of at least so many bytes, page-aligned, until this thread's next `take` or `give`."""
        if self.size < nbytes:
            self.size = (nbytes + (64 << 10)) & -mmap.PAGESIZE
            memory = mmap.mmap(-1, self.size, **_PRIVATE)
            self._view = ctypes.c_char.from_buffer(memory)
            self.address = ctypes.addressof(self._view)
        return self.address

    def give(self) -> None:
        """The launch is done."""
        if self.size > KEEP_BYTES:
            self.size, self._view = 0, ctypes.c_char()


scratch = Scratch()
