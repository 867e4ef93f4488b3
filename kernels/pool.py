"""Running a kernel's body on several threads: torch's own OpenMP pool, found by its path.

Note [Stalls]
An OpenMP region ends when its last thread does. When another process holds a core that takes milliseconds, whoever's pool
it is. Two regions in a row that took far longer than their work is worth make the launches after them serial for a while;
one alone may have been a page fault.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

_gomp: Callable[[int, int, int, int], None] | None = None
_serial_until = 0.0
_strikes = 0
_forked = False
STALL_SECONDS = 0.003
"""A region this much over its estimate counts as stalled."""
REST_SECONDS = 0.25
"""How long launches stay serial after a stall."""


def use_gomp(path: str) -> bool:
    """Use the OpenMP runtime at this path, torch's; False where it has no `GOMP_parallel`."""
    global _gomp
    try:
        f = ctypes.CDLL(path).GOMP_parallel
    except (OSError, AttributeError):
        return False
    f.restype = None
    f.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    _gomp = f
    return True


def can_run_parallel() -> bool:
    """Whether a launch may use threads now."""
    return _gomp is not None and not _forked and time.perf_counter() >= _serial_until


def run(body: int, context: int, threads: int, estimate: float) -> None:
    """Run `body(context)` on `threads` threads. estimate: seconds the work should take on one."""
    global _serial_until, _strikes
    assert _gomp is not None
    start = time.perf_counter()
    _gomp(body, context, threads, 0)
    end = time.perf_counter()
    if end - start <= 10 * estimate + STALL_SECONDS:
        _strikes = 0
        return
    _strikes += 1
    if _strikes == 2:
        _strikes = 0
        _serial_until = end + REST_SECONDS


def _in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
