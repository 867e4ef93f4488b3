"""Running a kernel's body on several threads: torch's own OpenMP pool, found by its path, or Python's threads.

Note [Stalls]
An OpenMP region ends when its last thread does. When another process holds a core that takes
milliseconds, whoever's pool it is. Two regions in a row that took far longer than their work is worth
make the launches after them serial for a while; one alone may have been a page fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

_gomp: Callable[[int, int, int, int], None] | None = None
_python: ThreadPoolExecutor | None = None
_limit = os.cpu_count() or 1
_serial_until = 0.0
_strikes = 0
_forked = False
STALL_SECONDS = 0.003
"""A region this much over its estimate counts as stalled."""
REST_SECONDS = 0.25
"""How long launches stay serial after a stall."""
PYTHON_SECONDS = 3e-4
"""Work from which Python's threads pay: handing over to one costs 20-40 µs, against OpenMP's 1."""


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


def set_threads(n: int) -> None:
    """The most threads that a launch gets, whatever it asks for; at first the number of processors."""
    global _limit
    _limit = max(1, n)


def can_run_parallel(seconds: float) -> bool:
    """Whether a launch of so much work may use threads now."""
    if _limit == 1 or _forked or (_gomp is None and seconds < PYTHON_SECONDS):
        return False
    return time.perf_counter() >= _serial_until


def run(body: int, context: int, threads: int, seconds: float) -> None:
    """Run `body(context)` on up to `threads` threads. seconds: what the work should take on one."""
    global _serial_until, _strikes
    threads = min(threads, _limit)
    start = time.perf_counter()
    if _gomp is not None:
        _gomp(body, context, threads, 0)
    else:
        _run_python(body, context, threads)
    end = time.perf_counter()
    if end - start <= 10 * seconds + STALL_SECONDS:
        _strikes = 0
        return
    _strikes += 1
    if _strikes == 2:
        _strikes = 0
        _serial_until = end + REST_SECONDS


def _run_python(body: int, context: int, threads: int) -> None:
    """The same on Python's threads: each call gives up the interpreter's lock."""
    global _python
    if _python is None:
        _python = ThreadPoolExecutor(_limit, "adaptive-eager-kernel")
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)
    with _interrupts_later():
        others = [_python.submit(call, context) for _ in range(threads - 1)]
        call(context)
        for f in others:
            if not f.cancel():
                f.result()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C is answered at the end: the memory that other threads work on must outlive their work."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    seen: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *at: seen.append(at))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen and callable(before):
        before(*seen[0])


def _in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
