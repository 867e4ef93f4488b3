"""Running segments: steps in order, memory taken and given back around them, errors kept for the next sync.

Note [Who runs a segment]
Queued segments run in order under one lock, by whoever holds it: the worker thread, or a thread that waits for a value
(a hand-off costs more than a small kernel). A thread that drains the queue first waits for the worker's current segment.

The worker ends when it has had nothing to do for a while. Its OpenMP threads end with it: as long as they live, the process
has more threads than cores, and OpenMP puts all of them to sleep between two regions, PyTorch's own on the CPU included, which
then take three times as long where regions are short.

Note [Ctrl-C]
A segment is never left half done: while the main thread runs one, SIGINT only sets a flag, looked at between two
steps. The segment then stays at the head of the queue with its position, and goes on at the next drain.

Note [Kept errors]
A buffer that will never exist keeps the error that says why. An error's traceback holds frames, a frame the frames that called
it, a user's frame tensors, their graphs, in C++ where no garbage collector looks, other buffers with this error: a model that ran out of
memory once would stay in memory for good. So a kept error has no frames, and what is raised is a copy.
"""

from __future__ import annotations

import atexit
import collections
import copy
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from adaptive_eager.simulate import SIMULATOR
from adaptive_eager.stats import COUNTERS

try:  # the C module: signal.signal spends microseconds on enums
    import _signal as signal  # type: ignore[import-not-found]
except ImportError:
    import signal  # type: ignore[no-redef]

if TYPE_CHECKING:
    from adaptive_eager.steps import Plan
    from adaptive_eager.tape import Segment


IDLE_SECONDS = 0.02
"""How long the worker waits for more before it ends; to start another costs 0.1 ms."""


class Runtime:
    """The queue of cut segments and the threads that run them."""

    def __init__(self) -> None:
        self.queue: collections.deque[Segment] = collections.deque()
        self.lock = threading.RLock()
        self.errors: list[BaseException] = []
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._hiring = threading.Lock()
        atexit.register(self._shutdown)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_fork,
                after_in_child=self._in_child,
            )

    def submit(self, seg: Segment) -> None:
        """Queue a segment. Call with the tape's lock held, so that queue order is tape order."""
        self.queue.append(seg)

    def wake(self) -> None:
        """Let the worker run the queue while the caller goes on."""
        with self._hiring:
            self._tokens.put(True)
            if self._worker is None:
                self._worker = threading.Thread(
                    target=self._work, name="neuron-worker", daemon=True
                )
                self._worker.start()

    def drain(self) -> None:
        """Run all queued segments on this thread; returns when they are done.

        Raises:
            KeyboardInterrupt: on Ctrl-C, with the rest of the queue intact.
        """
        if not self.queue and self.lock.acquire(blocking=False):
            self.lock.release()
            return
        with Interruptible() as interrupted, self.lock:
            self._run_queue(interrupted)

    def raise_pending(self) -> None:
        """Raise the earliest error of the segments run since the last call."""
        if self.errors:
            error = self.errors[0]
            self.errors.clear()
            raise to_raise(error)

    def _run_queue(self, interrupted: Any) -> None:
        while self.queue:
            seg = self.queue[0]
            if not run_segment(seg, self.errors, interrupted):
                return
            self.queue.popleft()
            seg.release()

    def _work(self) -> None:
        while self._more():
            while self.queue:
                with self.lock:
                    if self.queue and run_segment(self.queue[0], self.errors, None):
                        self.queue.popleft().release()

    def _more(self) -> bool:
        """Wait for a call of `wake`; False when the worker is to end."""
        try:
            return self._tokens.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            with self._hiring:
                if not self._tokens.empty():
                    return True
                self._worker = None
                return False

    # -- the process's own events --------------------------------------------------------------

    def _shutdown(self) -> None:
        self.queue.clear()
        worker = self._worker
        if worker is not None:
            self._tokens.put(False)
            worker.join(timeout=5)

    def _before_fork(self) -> None:
        self.lock.acquire()
        self._hiring.acquire()

    def _after_fork(self) -> None:
        self._hiring.release()
        self.lock.release()

    def _in_child(self) -> None:
        """The child has no worker, and libgomp's threads are gone: it runs everything on its own thread."""
        import torch

        self.lock = threading.RLock()
        self._hiring = threading.Lock()
        self._worker = None
        self._tokens = queue.SimpleQueue()
        torch.set_num_threads(1)


def detach_frames(error: BaseException) -> None:
    """Let go of the frames that an error came through (Note [Kept errors])."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        e = todo.pop()
        if e is not None and id(e) not in seen:
            seen.add(id(e))
            e.__traceback__ = None
            todo += [e.__context__, e.__cause__]


def to_raise(error: BaseException) -> BaseException:
    """A kept error for its reader: a copy, as buffers go on keeping the original (Note [Kept errors])."""
    try:
        new = copy.copy(error)
    except Exception:  # noqa: BLE001 - an exception class with arguments of its own
        return error
    if type(new) is not type(error):
        return error
    new.__cause__ = error.__cause__
    new.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        new.__notes__ = list(error.__notes__)
    return new


_MAIN = threading.main_thread().ident


class Interruptible:
    """Defers SIGINT while the main thread is inside; calls the handler when it leaves."""

    def __init__(self) -> None:
        self.hit = False
        self._old: Any = None

    def __enter__(self) -> Interruptible:
        if threading.get_ident() == _MAIN:
            old = signal.getsignal(signal.SIGINT)
            if callable(old):
                signal.signal(signal.SIGINT, self._note)
                self._old = old
        return self

    def _note(self, signum: int, frame: Any) -> None:
        self.hit = True

    def __exit__(self, *exc: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)
            if self.hit:
                self._old(signal.SIGINT, None)


def _plan_for(seg: Segment) -> Plan:
    """The planner, imported when there is something to plan."""
    global _plan_for
    from adaptive_eager.steps import plan_for

    _plan_for = plan_for
    return plan_for(seg)


def run_segment(
    seg: Segment, errors: list[BaseException], interrupted: Interruptible | None
) -> bool:
    """Run a segment from where it stands; False when interrupted between two steps."""
    plan = seg.plan
    if plan is None:
        try:
            plan = seg.plan = _plan_for(seg)
        except Exception as e:  # noqa: BLE001 - kept for the next sync
            detach_frames(e)
            seg.error = e
            e.add_note(f"while planning the segment cut after {seg.where or seg.node.where}")
            errors.append(e)
            for b in (*seg.bufs, *[seg.ext[k] for k in seg.node.written]):
                b.error = e
            return True
    steps = plan.steps
    while seg.pc < len(steps):
        if interrupted is not None and interrupted.hit:
            return False
        step = steps[seg.pc]
        seg.pc += 1
        try:
            step.run(seg)
        except Exception as e:  # noqa: BLE001 - kept for the next sync
            step.fail(seg, e, errors)
    COUNTERS.launches += plan.launches
    COUNTERS.hbm_read += plan.read
    COUNTERS.hbm_written += plan.written
    SIMULATOR.happened(plan.happening, seg.order)
    return True
