"""Kernels ready to run, and launches bound to sizes.

`compile_kernel` finds a kernel's code in this process, on disk, or makes it. `Compiled.bind` packs what
does not change between launches; a `Launch` then takes addresses and scalars, and returns when the kernel
is done.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from adaptive_eager.kernels import cache, jit, pool
from adaptive_eager.kernels.context import MAX_SHARES, Word
from adaptive_eager.kernels.ir import ITEMSIZE, Kernel, Space, rows_per_task, verify
from adaptive_eager.kernels.listing import listing
from adaptive_eager.kernels.schedule import (
    SHORT_W,
    TURN,
    Schedule,
    W,
    block_width,
    schedule,
    seconds_per_element,
    stream_align,
    turned,
)
from adaptive_eager.kernels.scratch import scratch

PARALLEL_SECONDS = 5e-6
"""Work from which a second thread pays: an OpenMP region costs about 1.2 µs."""
RELEASE_ELEMENTS = 16_384
"""Elements from which it pays to let other Python threads run during a launch."""
SHORT_ROWS = 128
"""Rows of at most `SHORT_W` columns from which the variant for them pays its compile time: rows of 10
take 0.6 of the time."""
STREAM_BYTES = 16 << 20
"""Bytes of a result from which it is written past the caches: what they hold of it is gone before the
next reader comes."""
EVEN_TASKS = 16
"""Tasks of a launch, where it has rows for so many: two threads end within a sixteenth of each other."""
SHIFT_COLS = 256
"""Columns from which rows that start anywhere are written past the caches: each has two cache lines that are not."""
MAX_KERNELS = 20_000
"""Kernels that this process remembers."""


@dataclass(slots=True)
class LaunchStats:
    """Counts for this process. reused: kernels asked for again. compile_seconds: spent on `compiled`."""

    compiled: int = 0
    reused: int = 0
    from_disk: int = 0
    compile_seconds: float = 0.0


stats = LaunchStats()
_TABLE: dict[str, Compiled] = {}
_DRIVER: Code | None = None
_LOCK = threading.RLock()


class Code:
    """Machine code for blocks of `width` lanes: from disk, where `text` is its key, or made now. body, finish: addresses. call*: the same as functions,
    `call_free` one that lets other Python threads run."""

    def __init__(self, assembly: Callable[[str, int], str], text: str, width: int) -> None:
        begin = time.perf_counter()
        key = cache.key(f"{width} lanes\n{text}", jit.target())
        code = cache.read(key)
        self.from_disk = code is not None
        if code is None:
            code = jit.compile_module(assembly(key[:24], width))
            cache.write(key, code)
        self.name = key[:24]
        self.body, self.finish = jit.load(code, self.name)
        self.seconds = time.perf_counter() - begin
        signature = (None, ctypes.c_void_p)
        self.call_free = ctypes.CFUNCTYPE(*signature)(self.body)
        self.call = ctypes.PYFUNCTYPE(*signature)(self.body)
        self.call_finish = ctypes.PYFUNCTYPE(*signature)(self.finish)
        if self.from_disk:
            stats.from_disk += 1
        else:
            stats.compiled += 1
            stats.compile_seconds += self.seconds


class Compiled:
    """A kernel and its machine code.

    text: the kernel as text. fresh: operands that are written whole and not read.
    """

    def __init__(self, kernel: Kernel, text: str) -> None:
        verify(kernel)
        self.kernel, self.text = kernel, text
        self.schedule: Schedule = schedule(kernel)
        self.seconds_per_element = seconds_per_element(kernel)
        loaded = {i.attr for i in kernel.insts if i.op in ("load", "fload")}
        wide = {n for loop in self.schedule.loops for n in loop.stores}
        fresh: set[int] = set()
        for n in wide:
            o = kernel.insts[n].attr
            assert isinstance(o, int)
            if kernel.operands[o].inner == "unit" and o not in loaded:
                fresh.add(o)
        self.fresh = frozenset(fresh)
        self.width = block_width(kernel)
        self._code: dict[tuple[int, str], Code] = {}
        sizes = {ITEMSIZE[kernel.operands[o].dtype] for o in fresh}
        last = [loop for loop in self.schedule.loops if loop.stores]
        self.may_shift = len(sizes) == 1 and all(not x.reduces and not x.totals for x in last)

    def code(self, width: int, stream: str = "") -> Code:
        """Machine code for blocks of so many lanes, made when it is first asked for. stream: "aligned" or
        "shifted": operands that are only written go past the caches."""
        with _LOCK:
            found = self._code.get((width, stream))
            if found is None:
                text = f"{stream} {sorted(self.fresh)}\n{self.text}" if stream else self.text
                make = partial(self.assembly, stream=stream)
                found = self._code[width, stream] = Code(make, text, width)
            return found

    def assembly(self, name: str, width: int, stream: str = "") -> str:
        """LLVM assembly of functions called `body_<name>` and `finish_<name>`."""
        from adaptive_eager.kernels.codegen import generate

        streams: frozenset[int] = self.fresh if stream else frozenset()
        shifted = stream == "shifted"
        return str(generate(self.kernel, self.schedule, name, width, streams, shifted))

    @property
    def llvm(self) -> str:
        """The LLVM assembly of the plain form."""
        return self.assembly("kernel", W)

    @property
    def source(self) -> str:
        """The loop nest as readable text."""
        return listing(self.kernel, self.schedule)

    def bind(self, space: Space) -> Launch:
        """A launch over given sizes and strides."""
        return Launch(self, space)


def jobs_assembly(name: str, width: int) -> str:
    """LLVM assembly of `body_<name>(table)`: for each (body, context) of a table, body(context).

    The table is 64-bit words: the number of jobs, at least one, then two addresses for each. Threads
    that run it at once share each job's tasks, since every body takes its tasks from a counter.
    """
    return f"""
define void @body_{name}(ptr %table) {{
entry:
  %count = load i64, ptr %table
  br label %each
each:
  %k = phi i64 [0, %entry], [%next, %each]
  %twice = shl i64 %k, 1
  %first = add i64 %twice, 1
  %second = add i64 %twice, 2
  %at1 = getelementptr i64, ptr %table, i64 %first
  %at2 = getelementptr i64, ptr %table, i64 %second
  %body = load ptr, ptr %at1
  %context = load ptr, ptr %at2
  call void %body(ptr %context)
  %next = add i64 %k, 1
  %more = icmp ult i64 %next, %count
  br i1 %more, label %each, label %done
done:
  ret void
}}
define void @finish_{name}(ptr %table) {{
entry:
  ret void
}}
"""


def compile_kernel(kernel: Kernel) -> Compiled:
    """The kernel, known to this process or new. Thread-safe. Its code is found on disk, or made in 10 to 25 ms, when
    a launch is bound."""
    text = str(kernel)
    with _LOCK:
        found = _TABLE.pop(text, None)
        if found is None:
            found = Compiled(kernel, text)
            if len(_TABLE) >= MAX_KERNELS:
                del _TABLE[next(iter(_TABLE))]
        else:
            stats.reused += 1
        _TABLE[text] = found  # the last of those asked for; the first goes when there are too many
    return found


_NOTHING_TAKEN = (0,) * (1 + MAX_SHARES)
"""Words of a context before a launch: nobody has arrived, no share is begun."""


class Launch:
    """A kernel over given sizes. One thread at a time may call it: it owns its context.

    tasks: shares of the work that threads take. cost: seconds it should take on one thread.
    """

    def __init__(self, compiled: Compiled, space: Space) -> None:
        k, s = compiled.kernel, compiled.schedule
        self.compiled, self.space = compiled, space
        rows, cols = space.rows, space.cols
        short = cols <= SHORT_W and rows >= SHORT_ROWS
        self._aligned: tuple[tuple[int, int], ...] = ()
        self._shifted: tuple[int, ...] = ()
        if not short:
            self._streams()
        self._width = SHORT_W if short else compiled.width
        stream = "aligned" if self._aligned else "shifted" if self._shifted else ""
        self._code = compiled.code(self._width, stream)
        per = rows_per_task(rows, cols)
        blocks = turned(k)
        if not s.totals:  # no sum depends on what a task is: enough of them to share evenly
            per = max(1, min(per, rows // EVEN_TASKS))
            if blocks:
                per = -(-per // TURN) * TURN
        self.tasks = -(-rows // per)
        self.cost = space.numel * compiled.seconds_per_element
        tile = (cols * 8 + 8 * self._width + 63) & -64
        self._tiles_bytes = tile * (len(s.tiles) + len(s.elem_totals) + TURN * len(blocks))
        sizes = [8 * (cols if n in s.elem_totals else self.tasks) for n in s.totals]
        self._partials = [sum(sizes[:n]) for n in range(len(sizes))]
        self._partial_bytes = (sum(sizes) + 63) & -64
        strides = [
            x * ITEMSIZE[o.dtype]
            for o, of in zip(k.operands, space.strides, strict=True)
            for x in of
        ]
        shares = 1 if s.elem_totals else min(MAX_SHARES, os.cpu_count() or 1)
        fixed = [0] * (1 + MAX_SHARES) + [shares, self.tasks, rows, cols, space.numel, per]
        fixed += [tile, self._tiles_bytes, 0, 0, 0]
        fixed += [*space.outer, *strides]
        varying = "q" * len(k.operands) + "".join("d" if x == "f64" else "q" for x in k.scalars)
        self._varying = struct.Struct(varying).pack_into
        self._at = 8 * len(fixed)
        self._totals_at = self._at + struct.calcsize(varying)
        self._context = ctypes.create_string_buffer(self._totals_at + 8 * len(sizes))
        self._address = ctypes.addressof(self._context)
        struct.pack_into(f"{len(fixed)}q", self._context, 0, *fixed)
        self._begin = struct.Struct(f"{1 + MAX_SHARES}q").pack_into
        self._placed = 0
        self._scratches = bool(self._tiles_bytes or sizes)
        self._finishes = bool(sizes)
        release = space.numel >= RELEASE_ELEMENTS
        self._call = self._code.call_free if release else self._code.call

    def _streams(self) -> None:
        """Which operands are written past the caches, where that pays: rows that start with a cache line, or all at the same
        distance from one."""
        k, space = self.compiled.kernel, self.space
        aligned: list[tuple[int, int]] = []
        starts: set[tuple[int, ...]] = set()
        for o in sorted(self.compiled.fresh):
            dtype = k.operands[o].dtype
            size, align = ITEMSIZE[dtype], stream_align(dtype)
            if space.numel * size < STREAM_BYTES:
                return
            pairs = zip(space.outer, space.strides[o], strict=False)
            steps = tuple([s * size if n > 1 else 0 for n, s in pairs])
            starts.add(tuple([x % 64 for x in steps]))
            if not any(x % align for x in steps):
                aligned.append((o, align))
        if len(aligned) == len(self.compiled.fresh):
            self._aligned = tuple(aligned)
        elif self.compiled.may_shift and len(starts) == 1 and space.cols >= SHIFT_COLS:
            self._shifted = tuple(sorted(self.compiled.fresh))

    def threads(self, most: int) -> int:
        """How many threads this launch should use."""
        return min(most, self.tasks) if self.cost >= PARALLEL_SECONDS else 1

    def room(self, threads: int) -> int:
        """Bytes of memory for partial totals and each thread's tiles; 0 where there are none."""
        return self._partial_bytes + threads * self._tiles_bytes if self._scratches else 0

    def _place(self, at: int) -> None:
        """Use the memory at an address for them."""
        struct.pack_into("3q", self._context, 8 * Word.SCRATCH, at + self._partial_bytes, 0, 0)
        if at != self._placed:
            self._placed = at
            addresses = [at + x for x in self._partials]
            struct.pack_into(f"{len(addresses)}q", self._context, self._totals_at, *addresses)

    def pack(self, pointers: Sequence[int], scalars: Sequence[float]) -> None:
        """Set addresses (of element 0 of each operand) and scalars for the next run."""
        self._varying(self._context, self._at, *pointers, *scalars)
        self._begin(self._context, 0, *_NOTHING_TAKEN)
        if (self._aligned and any(pointers[o] % align for o, align in self._aligned)) or (
            self._shifted and len({pointers[o] % 64 for o in self._shifted}) > 1
        ):
            self._aligned = self._shifted = ()  # a view: from now on the plain form
            self._code = self.compiled.code(self._width)
            self._call = self._code.call_free

    def __call__(self, pointers: Sequence[int], scalars: Sequence[float], threads: int = 1) -> None:
        """Run on the given addresses and scalars; wait."""
        self.pack(pointers, scalars)
        parallel = threads > 1 and pool.can_run_parallel(self.cost)
        if self._scratches:
            self._place(scratch.take(self.room(threads if parallel else 1)))
        if parallel:
            pool.run(self._code.body, self._address, threads, self.cost)
        else:
            self._call(self._address)
        if self._finishes:
            self._code.call_finish(self._address)
        if self._scratches:
            scratch.give()


def _driver() -> Code:
    """The function that runs a table of jobs."""
    global _DRIVER
    with _LOCK:
        if _DRIVER is None:
            _DRIVER = Code(jobs_assembly, jobs_assembly("jobs", W), W)
        return _DRIVER


def run_together(launches: Sequence[Launch], threads: int = 1) -> None:
    """Run packed launches that do not depend on each other as one region of threads; wait."""
    cost = sum([x.cost for x in launches])
    parallel = threads > 1 and pool.can_run_parallel(cost)
    each = [x.room(threads if parallel else 1) for x in launches]
    at = scratch.take(sum(each)) if any(each) else 0
    table = [len(launches)]
    for x, room in zip(launches, each, strict=True):
        if room:
            x._place(at)
            at += room
        table += (x._code.body, x._address)
    words = (ctypes.c_int64 * len(table))(*table)
    if parallel:
        pool.run(_driver().body, ctypes.addressof(words), threads, cost)
    else:
        _driver().call_free(ctypes.addressof(words))
    for x in launches:
        if x._finishes:
            x._code.call_finish(x._address)
    if any(each):
        scratch.give()


def _in_child() -> None:
    """A thread of the parent may have held the lock when it forked."""
    global _LOCK
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
