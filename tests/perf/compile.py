"""What compiling a kernel costs: `python -m tests.perf.compile`. Cold: the disk cache is an empty folder."""

import os
import tempfile
import time

os.environ["ADAPTIVE_EAGER_CACHE_DIR"] = tempfile.mkdtemp()

from adaptive_eager.kernels.build import Builder, Val, fn, maximum, row_max, row_sum
from adaptive_eager.kernels.ir import Kernel, Operand, Space
from adaptive_eager.kernels.launch import compile_kernel


def softmax(x: Val) -> Val:
    """Three passes over a row."""
    e = fn("exp", x - row_max(x))
    return e / row_sum(e).to("f32")


KERNELS = {
    "first of a process": lambda x: x + 1.0,
    "relu(x * a + b)": lambda x: maximum(x * 1.3 + 0.1, 0.0),
    "erf-gelu": lambda x: x * 0.5 * (1 + fn("erf", x * 0.70710678)),
    "softmax": softmax,
}


def main() -> None:
    """Milliseconds a kernel."""
    for name, f in KERNELS.items():
        b = Builder()
        b.store(f(b.load(0, "f32")), 1)
        kernel = Kernel(1, (Operand("f32", "unit"),) * 2, (), tuple(b.insts))
        start = time.perf_counter()
        compile_kernel(kernel).bind(Space((2,), 64, 128, ((64, 1), (64, 1))))
        print(f"{name:<20}{1e3 * (time.perf_counter() - start):>8.1f} ms")


if __name__ == "__main__":
    main()
