"""A launch's context: the 64-bit words through which Python and machine code speak.

Note [Shares]
The tasks of a launch are cut into a share for each processor. A thread takes its own share's tasks in order, then what is left of the
others': so a part of a tensor tends to meet the same processor, and its second-level cache, in one kernel after the other (a GELU of
100,000 elements on two threads: three quarters of the time). Column totals are merged in the order of tasks and have one share.
"""

from __future__ import annotations

import enum

from adaptive_eager.kernels.ir import Kernel


class Word(enum.IntEnum):
    """Fixed words of the context."""

    ARRIVED = 0
    NEXT_TASK = 1
    """The next task of each share, `MAX_SHARES` words."""
    SHARES = 9
    TASKS = 10
    ROWS = 11
    COLS = 12
    NUMEL = 13
    ROWS_PER_TASK = 14
    TILE_BYTES = 15
    SCRATCH_BYTES = 16
    SCRATCH = 17
    NEXT_SCRATCH = 18
    MERGED = 19
    COUNT = 20


MAX_SHARES = 8


class Layout:
    """Word numbers of a kernel's context."""

    def __init__(self, k: Kernel, totals: int) -> None:
        self.sizes = int(Word.COUNT)
        self.strides = self.sizes + k.outer
        self.pointers = self.strides + len(k.operands) * (k.outer + 1)
        self.scalars = self.pointers + len(k.operands)
        self.totals = self.scalars + len(k.scalars)
        self.words = self.totals + totals
