"""The host memory behind HBM, asked of the system and given back to it."""

from __future__ import annotations

import mmap
import sys
import warnings
from contextlib import suppress

LEAST_ARENA = 1 << 20
"""Bytes below which a refusal of the system is final."""
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Map more than memory and swap hold. The module names it from Python 3.13 on."""


def map_memory(capacity: int) -> mmap.mmap:
    """Anonymous private memory, committed page by page as it is touched.

    Where the system refuses it, half as much, and so on, with a warning.
    """
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    if flags:
        flags |= NORESERVE
    size = capacity
    while True:
        try:
            buffer = mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)
            break
        except (OSError, OverflowError):
            if size // 2 < LEAST_ARENA:
                raise
            size //= 2
    if size < capacity:
        warnings.warn(
            f"the system refused {capacity} bytes of address space: HBM has {size}", stacklevel=3
        )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def forget(buffer: mmap.mmap, offset: int, size: int) -> None:
    """Give the pages that lie wholly inside a range back; neighbours may share its edges."""
    first, end = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, offset + size
    whole = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0 and hasattr(mmap, "MADV_DONTNEED"):
        buffer.madvise(mmap.MADV_DONTNEED, first, whole)
