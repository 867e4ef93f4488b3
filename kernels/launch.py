"""Kernels ready to run, and launches bound to sizes.

`compile_kernel` finds a kernel's code in this process, on disk, or makes it. `Compiled.bind` packs what does not change between
launches; a `Launch` then takes addresses and scalars, and returns when the kernel is done.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from adaptive_eager.kernels import cache, jit, pool
from adaptive_eager.kernels.ir import Kernel, Space, rows_per_task, verify
from adaptive_eager.kernels.listing import listing
from adaptive_eager.kernels.schedule import Schedule, heavy, schedule

PARALLEL_ELEMENTS = 40_000
"""Cheap elements from which a second thread pays; a transcendental counts as 8."""
RELEASE_ELEMENTS = 16_384
"""Elements from which it pays to let other Python threads run during a launch."""
SECONDS_PER_ELEMENT = 2e-10


@dataclass(slots=True)
class LaunchStats:
    """Counts for this process. seconds: time spent compiling."""

    compiled: int = 0
    from_disk: int = 0
    seconds: float = 0.0


stats = LaunchStats()
_TABLE: dict[str, Compiled] = {}
_LOCK = threading.Lock()
MAX_KERNELS = 20_000


class Compiled:
    """A kernel's machine code. from_disk: whether this process loaded it instead of compiling it."""

    def __init__(self, kernel: Kernel, text: str) -> None:
        verify(kernel)
        self.kernel = kernel
        self.schedule: Schedule = schedule(kernel)
        self.heavy = heavy(kernel)
        start = time.perf_counter()
        name = cache.key(text, jit.target())
        code = cache.read(name)
        self.from_disk = code is not None
        if code is None:
            code = jit.compile_module(self._llvm(name[:24]))
            cache.write(name, code)
        self.body, self.finish = jit.load(code, name[:24])
        self.compile_seconds = time.perf_counter() - start
        self._name = name[:24]
        self.call_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.body)
        self.call = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.body)
        self.call_finish = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.finish)

    def _llvm(self, name: str) -> str:
        from adaptive_eager.kernels.codegen import generate

        return str(generate(self.kernel, self.schedule, name))

    @property
    def llvm(self) -> str:
        """The LLVM assembly that the code was made from."""
        return self._llvm(self._name)

    @property
    def source(self) -> str:
        """The loop nest as readable text."""
        return listing(self.kernel, self.schedule)

    def bind(self, space: Space) -> Launch:
        """A launch over given sizes and strides."""
        return Launch(self, space)


def compile_kernel(kernel: Kernel) -> Compiled:
    """The kernel's code: from this process, from disk, or made now (some 20 ms). Thread-safe."""
    text = str(kernel)
    found = _TABLE.get(text)
    if found is not None:
        return found
    with _LOCK:
        found = _TABLE.get(text)
        if found is None:
            found = Compiled(kernel, text)
            if len(_TABLE) >= MAX_KERNELS:
                _TABLE.clear()
            _TABLE[text] = found
            if found.from_disk:
                stats.from_disk += 1
            else:
                stats.compiled += 1
                stats.seconds += found.compile_seconds
    return found


class Launch:
    """A kernel over given sizes. One thread at a time may call it: it owns its context and scratch memory."""

    def __init__(self, compiled: Compiled, space: Space) -> None:
        from adaptive_eager.kernels.ir import ITEMSIZE

        k, s = compiled.kernel, compiled.schedule
        self.compiled, self.space = compiled, space
        rows, cols = space.rows, space.cols
        per = rows_per_task(rows, cols)
        self.tasks = -(-rows // per)
        self.work = space.numel * (1 + 8 * compiled.heavy)
        tile = (cols * 8 + 8 * 32 + 63) & -64
        self._scratch_bytes = tile * len(s.tiles)
        self._scratch: ctypes.Array[ctypes.c_char] | None = None
        self._slots = 0
        self._partials = [
            ctypes.create_string_buffer(8 * self.tasks * (cols if n in s.elem_totals else 1))
            for n in s.totals
        ]
        strides = []
        for o, st in zip(k.operands, space.strides, strict=True):
            strides += [x * ITEMSIZE[o.dtype] for x in st]
        fixed = [
            0,
            self.tasks,
            rows,
            cols,
            space.numel,
            per,
            0,
            0,
            self._scratch_bytes,
            tile,
            *space.outer,
            *strides,
        ]
        formats = "q" * len(k.operands) + "".join("d" if x == "f64" else "q" for x in k.scalars)
        self._context = ctypes.create_string_buffer(
            8 * (len(fixed) + len(formats) + len(self._partials))
        )
        self._address = ctypes.addressof(self._context)
        struct.pack_into(f"{len(fixed)}q", self._context, 0, *fixed)
        self._varying = struct.Struct(formats).pack_into
        self._at = 8 * len(fixed)
        self._counters = struct.Struct("q").pack_into
        end = self._at + 8 * len(formats)
        struct.pack_into(
            f"{len(self._partials)}q",
            self._context,
            end,
            *[ctypes.addressof(p) for p in self._partials],
        )
        self._set_scratch(1)
        self.estimate = self.work * SECONDS_PER_ELEMENT
        self._finishes = bool(s.totals)
        self._call = compiled.call_free if space.numel >= RELEASE_ELEMENTS else compiled.call

    def _set_scratch(self, slots: int) -> None:
        """Scratch areas for this many threads."""
        if self._slots >= slots or not self._scratch_bytes:
            return
        self._scratch = ctypes.create_string_buffer(self._scratch_bytes * slots + 64)
        struct.pack_into("q", self._context, 8 * 7, (ctypes.addressof(self._scratch) + 63) & -64)
        self._slots = slots

    def threads(self, most: int) -> int:
        """How many threads this launch should use."""
        return min(most, self.tasks) if self.work >= PARALLEL_ELEMENTS else 1

    def __call__(self, pointers: Sequence[int], scalars: Sequence[float], threads: int = 1) -> None:
        """Run on the given addresses (of element 0 of each operand) and scalars; wait."""
        context = self._context
        self._varying(context, self._at, *pointers, *scalars)
        self._counters(context, 0, 0)
        self._counters(context, 48, 0)
        if threads > 1 and pool.can_run_parallel():
            self._set_scratch(threads)
            pool.run(self.compiled.body, self._address, threads, self.estimate)
        else:
            self._call(self._address)
        if self._finishes:
            self.compiled.call_finish(self._address)
