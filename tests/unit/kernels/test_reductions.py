"""Reductions: the fixed order, several stages, totals, and independence of threads."""

import numpy as np
import pytest
from adaptive_eager.kernels import ir
from adaptive_eager.kernels.build import column_totals, fn, row_max, row_min, row_sum, total
from adaptive_eager.kernels.launch import compile_kernel

from .harness import kernel, lane_sum, run_flat, run_rows

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("cols", [1, 2, 16, 17, 31, 32, 33, 64, 100, 1000])
def test_row_sum_has_the_documented_order(cols):
    """A row's sum is, bit for bit, the lanes-and-tree order of Note [Fixed reduction order]."""
    rows = 5
    x = (RNG.standard_normal((rows, cols)) * 10.0 ** RNG.integers(-8, 8, (rows, cols))).astype(
        np.float32
    )
    y = np.zeros(rows)
    run_rows(
        kernel(lambda b: b.store(row_sum(b.load(0, "f32")), 1), [("f32", "unit"), ("f64", "zero")]),
        [x, y],
        rows,
        cols,
        [(cols, 1), (1, 0)],
    )
    np.testing.assert_array_equal(y, [lane_sum(r.astype(np.float64)) for r in x])


@pytest.mark.parametrize("cols", [1, 31, 32, 95])
def test_extrema_keep_nan(cols):
    """Row maxima and minima; one NaN makes the row's result NaN."""
    x = RNG.standard_normal((4, cols)).astype(np.float32)
    x[2, cols // 2] = np.nan
    hi, lo = np.zeros(4, np.float32), np.zeros(4, np.float32)

    def trace(b):
        v = b.load(0, "f32")
        b.store(row_max(v), 1)
        b.store(row_min(v), 2)

    run_rows(
        kernel(trace, [("f32", "unit"), ("f32", "zero"), ("f32", "zero")]),
        [x, hi, lo],
        4,
        cols,
        [(cols, 1), (1, 0), (1, 0)],
    )
    np.testing.assert_array_equal(hi, x.max(1))
    np.testing.assert_array_equal(lo, x.min(1))


@pytest.mark.parametrize("cols", [1, 10, 32, 100, 257])
def test_softmax_in_one_kernel(cols):
    """Three passes over a row, transcendentals kept in a tile: softmax to a few ULP."""
    x = RNG.standard_normal((9, cols)).astype(np.float32) * 4
    y = np.zeros_like(x)

    def trace(b):
        e = fn("exp", b.load(0, "f32") - row_max(b.load(0, "f32")))
        b.store(e / row_sum(e).to("f32"), 1)

    run_rows(kernel(trace, [("f32", "unit")] * 2), [x, y], 9, cols, [(cols, 1)] * 2)
    e = np.exp((x - x.max(1, keepdims=True)).astype(np.float64))
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-6)


def test_in_place_over_several_stages():
    """An operand both read and written is written in the last pass only."""
    x = RNG.standard_normal((6, 70)).astype(np.float32)
    want = (
        x - np.array([lane_sum(r.astype(np.float64)) / 70 for r in x]).astype(np.float32)[:, None]
    )

    def trace(b):
        v = b.load(0, "f32")
        b.store(v - (row_sum(v) / 70).to("f32"), 0)

    run_rows(kernel(trace, [("f32", "unit")]), [x], 6, 70, [(70, 1)])
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("n", [1, 40, 4096, 4097, 100_000])
def test_full_sum(n):
    """A flat sum: rows of 4096, tasks of rows, then tasks in order; as exact as f64 allows."""
    x = RNG.standard_normal(n).astype(np.float32)
    y = np.zeros(1)
    k = kernel(
        lambda b: b.store(total(row_sum(b.load(0, "f32"))), 1), [("f32", "unit"), ("f64", "zero")]
    )
    outer, cols, numel = ((-(-n // 4096),), 4096, n) if n > 4096 else ((1,), n, n)
    compile_kernel(k).bind(ir.Space(outer, cols, numel, ((cols, 1), (0, 0))))(
        [x.ctypes.data, y.ctypes.data], []
    )
    np.testing.assert_allclose(y[0], x.sum(dtype=np.float64), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 5), (3, 33), (700, 100), (5000, 7), (64, 20_000), (300, 9000)]
)
def test_column_totals_in_order(rows, cols, threads):
    """Column sums add the rows of a task in order, then the tasks; the number of threads changes nothing."""
    x = (RNG.standard_normal((rows, cols)) * 10.0 ** RNG.integers(-6, 6, (rows, cols))).astype(
        np.float32
    )
    y = np.zeros(cols)
    k = kernel(
        lambda b: b.store(column_totals(b.load(0, "f32")), 1), [("f32", "unit"), ("f64", "unit")]
    )
    compile_kernel(k).bind(ir.Space((rows,), cols, rows * cols, ((cols, 1), (0, 1))))(
        [x.ctypes.data, y.ctypes.data], [], threads
    )
    per = ir.rows_per_task(rows, cols)
    want = np.full(cols, -0.0)
    for start in range(0, rows, per):
        part = np.full(cols, -0.0)
        for r in x[start : start + per]:
            part = part + r.astype(np.float64)
        want = want + part
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("numel", [1, 40, 99, 100, 250, 300])
def test_column_totals_of_short_rows(numel):
    """The last row may be short, also where it is the only one of its task."""
    x = RNG.standard_normal(numel).astype(np.float32)
    cols = 100
    rows = -(-numel // cols)
    y = np.full(cols, 5.0)
    k = kernel(
        lambda b: b.store(column_totals(b.load(0, "f32")), 1), [("f32", "unit"), ("f64", "unit")]
    )
    compile_kernel(k).bind(ir.Space((rows,), cols, numel, ((cols, 1), (0, 1))))(
        [x.ctypes.data, y.ctypes.data], []
    )
    full = np.zeros(rows * cols)
    full[:numel] = x
    want = np.zeros(cols)
    for row in full.reshape(rows, cols):
        want = want + row
    np.testing.assert_array_equal(y, want)


def test_no_rows_add_up_to_nothing():
    """Totals over no rows at all are zero."""
    one, each = np.full(1, 5.0), np.full(3, 5.0)

    def trace(b):
        b.store(total(row_sum(b.load(0, "f32"))), 1)
        b.store(column_totals(b.load(0, "f32")), 2)

    k = kernel(trace, [("f32", "unit"), ("f64", "zero"), ("f64", "unit")])
    space = ir.Space((0,), 3, 0, ((3, 1), (0, 0), (0, 1)))
    compile_kernel(k).bind(space)([one.ctypes.data, one.ctypes.data, each.ctypes.data], [])
    assert one[0] == 0 and (each == 0).all()


def test_threads_change_no_bit():
    """A large fused kernel gives the same bits on one thread and on two."""
    x = RNG.standard_normal(300_000).astype(np.float32)
    k = kernel(
        lambda b: b.store(fn("tanh", b.load(0, "f32") * 1.5) + fn("exp", b.load(0, "f32")), 1),
        [("f32", "unit")] * 2,
    )
    out = []
    for threads in (1, 2):
        y = np.zeros_like(x)
        run_flat(k, [x, y], threads=threads)
        out.append(y)
    np.testing.assert_array_equal(out[0], out[1])


def test_nothing_is_touched_past_the_end():
    """Loads and stores stop at the last element: the page behind each buffer is protected."""
    import ctypes
    import mmap

    libc = ctypes.CDLL(None)
    page = mmap.PAGESIZE

    def at_the_edge(nbytes):
        m = mmap.mmap(-1, 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(m))
        assert libc.mprotect(ctypes.c_void_p(base + page), page, 0) == 0
        return m, base + page - nbytes

    for dtype, size in (("f32", 4), ("bf16", 2), ("bool", 1), ("f64", 8)):
        k = kernel(lambda b, d=dtype: b.store(b.load(0, d), 1), [(dtype, "unit")] * 2)
        for n in (1, 3, 31, 33, 100):
            a, pa = at_the_edge(n * size)
            c, pc = at_the_edge(n * size)
            compile_kernel(k).bind(ir.Space((1,), n, n, ((0, 1), (0, 1))))([pa, pc], [])
            del a, c
