"""From a scheduled kernel to an LLVM module with two functions, `body(context)` and `finish(context)`.

Direct vector IR, not numba source: lanes, masked tails and reduction order are then ours to fix, and a
kernel compiles in some 10-25 ms instead of some 150 (numba's front end is most of that). llvmlite's target
machine and engine are the JIT (jit.py).
"""

from __future__ import annotations

from adaptive_eager.kernels.body import Body
from adaptive_eager.kernels.finish import Finish
from adaptive_eager.kernels.ir import Kernel
from adaptive_eager.kernels.schedule import Schedule
from llvmlite import ir


def generate(
    kernel: Kernel,
    s: Schedule,
    name: str,
    width: int,
    streams: frozenset[int] = frozenset(),
    shifted: bool = False,
) -> ir.Module:
    """The LLVM module of a kernel: functions `body_<name>` and `finish_<name>`, each of one pointer.

    width: lanes of a block (schedule.block_width, or SHORT_W). streams: operands written past the caches.
    shifted: their rows start anywhere, all at the same distance from a cache line's start.
    """
    module = ir.Module("kernel")
    Body(module, kernel, s, f"body_{name}", width, streams, shifted)
    Finish(module, kernel, s, f"finish_{name}", width)
    return module
