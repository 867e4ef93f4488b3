"""Building, running and simulating small kernels in tests."""

import numpy as np
from adaptive_eager.kernels import ir
from adaptive_eager.kernels.build import Builder
from adaptive_eager.kernels.launch import compile_kernel

NP = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "i64": np.int64,
    "i32": np.int32,
    "i16": np.int16,
    "i8": np.int8,
    "u8": np.uint8,
    "bool": np.bool_,
}
W = 32


def kernel(trace, operands, scalars=(), outer=1):
    """A verified kernel from a function that traces into a builder."""
    b = Builder()
    trace(b)
    k = ir.Kernel(outer, tuple(ir.Operand(*o) for o in operands), tuple(scalars), tuple(b.insts))
    ir.verify(k)
    return k


def flat(n):
    """The space of a flat kernel of unit operands."""
    if n <= ir.FLAT_COLS:
        return (1,), n, n
    return (-(-n // ir.FLAT_COLS),), ir.FLAT_COLS, n


def run_flat(k, arrays, scalars=(), threads=1):
    """Run a kernel of unit operands over whole arrays."""
    n = arrays[0].size
    outer, cols, numel = flat(n)
    strides = tuple((cols if outer[0] > 1 else 0, 1) for _ in arrays)
    compile_kernel(k).bind(ir.Space(outer, cols, numel, strides))(
        [a.ctypes.data for a in arrays], scalars, threads
    )


def run_rows(k, arrays, rows, cols, strides, scalars=(), threads=1):
    """Run a kernel over rows with given (row, column) strides."""
    compile_kernel(k).bind(ir.Space((rows,), cols, rows * cols, tuple(strides)))(
        [a.ctypes.data for a in arrays], scalars, threads
    )


def lane_sum(x):
    """Note [Fixed reduction order], in numpy: the exact f64 sum of a row."""
    acc = np.full(W, -0.0)
    for start in range(0, len(x), W):
        part = np.full(W, -0.0)
        part[: len(x[start : start + W])] = x[start : start + W]
        acc = acc + part
    while len(acc) > 1:
        half = len(acc) // 2
        acc = acc[:half] + acc[half:]
    return acc[0]


def to_bf16(x):
    """f32 to bf16 bits, nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    r = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), r)


def from_bf16(u):
    """bf16 bits to f32."""
    return (u.astype(np.uint32) << 16).view(np.float32)
