"""Philox's published vectors, in Python ints, numpy and machine code."""

import numpy as np
import pytest
from adaptive_eager.kernels import ir, philox
from adaptive_eager.kernels.build import Builder, random
from adaptive_eager.kernels.launch import compile_kernel
from adaptive_eager.kernels.numops import random as on_arrays

VECTORS = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
"""Counter, key and result of the authors' kat_vectors."""


@pytest.mark.parametrize(("counter", "key", "want"), VECTORS)
def test_published_vectors(counter, key, want):
    """The four words."""
    c0, c1, c2, c3 = counter
    found = philox.words(c0 | c1 << 32, (c2, c3), philox.keys(key[0] | key[1] << 32, int), int)
    assert " ".join(f"{w:08x}" for w in found) == want


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("draw", [0, 1])
def test_machine_code_draws_what_arrays_do(dtype, draw):
    """Vector blocks, tails and single values; indices past 32 bits; seeds of 63 bits."""
    rows, cols, seed, offset = 3, 101, (1 << 62) + 12345, (1 << 40) + 7
    for first in (0, (1 << 32) - 5):
        b = Builder()
        s, o, start = (b.scalar(k, "i64") for k in range(3))
        index = b.iota("inner") + b.iota(0) * cols + start
        b.store(random(index, s, o, dtype, draw), 0)
        b.store(random(b.iota(0), s, o, dtype, draw), 1)
        k = ir.Kernel(
            1, (ir.Operand(dtype, "unit"), ir.Operand(dtype, "zero")), ("i64",) * 3, tuple(b.insts)
        )
        out = np.empty((rows, cols), "f4" if dtype == "f32" else "f8")
        each = np.empty(rows, out.dtype)
        space = ir.Space((rows,), cols, rows * cols, ((cols, 1), (1, 0)))
        launch = compile_kernel(k).bind(space)
        launch([out.ctypes.data, each.ctypes.data], [seed, offset, first])
        want = on_arrays(
            draw, dtype, np.arange(first, first + rows * cols), np.int64(seed), np.int64(offset)
        )
        assert np.array_equal(out.ravel(), want)
        assert np.array_equal(
            each, on_arrays(draw, dtype, np.arange(rows), np.int64(seed), np.int64(offset))
        )
        assert out.min() >= 0 and out.max() < 1
