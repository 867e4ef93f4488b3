"""Random kernels against numpy, bit for bit: strides, ranks, stages and tails that nobody thought of."""

import numpy as np
import pytest
from adaptive_eager.kernels import ir
from adaptive_eager.kernels.build import Builder, fn, maximum, minimum, row_max, row_sum, where
from adaptive_eager.kernels.launch import compile_kernel

from .harness import lane_sum

COLS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 65, 100, 300)
PAIRS = {
    "add": (lambda x, y: x + y, np.add),
    "sub": (lambda x, y: x - y, np.subtract),
    "mul": (lambda x, y: x * y, np.multiply),
    "max": (maximum, np.maximum),
    "min": (minimum, np.minimum),
    "where": (lambda x, y: where(x < y, x, y * 2), lambda u, v: np.where(u < v, u, v * 2)),
    "sqrt": (lambda x, y: fn("sqrt", abs(x)) - y, lambda u, v: np.sqrt(np.abs(u)) - v),
}


def operand(rng, sizes, cols):
    """An f32 operand seen through random strides: its memory, its view, its IR form and its strides."""
    inner = str(rng.choice(["unit", "unit", "any", "zero"]))
    step = {"unit": 1, "any": int(rng.integers(2, 4)), "zero": 0}[inner]
    shape = [n if rng.random() < 0.8 else 1 for n in sizes]
    base = rng.standard_normal((*shape, max(1, cols * step))).astype(np.float32)
    base.flat[:: max(1, base.size // 3)] = -0.0
    strides = [0 if n == 1 else s // 4 for n, s in zip(shape, base.strides, strict=False)]
    strides.append(step)
    view = np.lib.stride_tricks.as_strided(base, (*sizes, cols), [4 * s for s in strides])
    return base, view, ir.Operand("f32", inner), tuple(strides)


def reduced(rng, x, u):
    """A row reduction of a column value, in the kernel and in numpy."""
    rows = u.reshape(-1, u.shape[-1])
    if rng.random() < 0.5:
        v = np.array([lane_sum(r.astype(np.float64)) for r in rows]).astype(np.float32)
        return row_sum(x).to("f32"), v.reshape(*u.shape[:-1], 1) + np.zeros_like(u) * 0
    return row_max(x), np.broadcast_to(rows.max(1).reshape(*u.shape[:-1], 1), u.shape)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_kernel_gives_the_bits_of_numpy(seed):
    """Arithmetic and row reductions over random operands, with more rows than a task has."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 9, int(rng.integers(1, 4)))]
    sizes[0] *= int(rng.choice([1, 30]))
    cols = int(rng.choice(COLS))
    ins = [operand(rng, sizes, cols) for _ in range(3)]
    b = Builder()
    known = [(b.load(k, "f32"), v, o.inner != "zero") for k, (_, v, o, _) in enumerate(ins)]
    for _ in range(int(rng.integers(3, 12))):
        (x, u, wide), (y, v, other) = (known[int(rng.integers(len(known)))] for _ in range(2))
        if wide and rng.random() < 0.25:
            known.append((*reduced(rng, x, u), False))
        else:
            ours, theirs = PAIRS[str(rng.choice(list(PAIRS)))]
            known.append((ours(x, y), theirs(u, v).astype(np.float32), wide or other))
    x, want, _ = known[-1]
    b.store(x, 3)
    out = np.full((*sizes, cols + 1), np.float32(7))
    strides = (*(s // 4 for s in out.strides[:-1]), 1)
    k = ir.Kernel(len(sizes), (*(i[2] for i in ins), ir.Operand("f32", "unit")), (), tuple(b.insts))
    ir.verify(k)
    space = ir.Space(
        tuple(sizes), cols, cols * int(np.prod(sizes)), (*(i[3] for i in ins), strides)
    )
    arrays = [*(i[0] for i in ins), out]
    compile_kernel(k).bind(space)([a.ctypes.data for a in arrays], [])
    np.testing.assert_array_equal(out[..., :-1], want)
    assert (out[..., -1] == 7).all()
