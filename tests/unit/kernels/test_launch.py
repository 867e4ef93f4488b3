"""Launches: variants, threads, scratch memory, interruption."""

import _thread
import ctypes
import mmap
import os
import threading
import time

import numpy as np
import pytest
from adaptive_eager.kernels import cache, ir, jit, launch, pool, scratch
from adaptive_eager.kernels.build import column_totals, fn, row_max, row_min, row_sum, total
from adaptive_eager.kernels.launch import Compiled, compile_kernel
from adaptive_eager.kernels.schedule import SHORT_W, W

from .harness import NP, kernel, lane_sum, run_flat, run_rows

RNG = np.random.default_rng(6)
OPERANDS = [("f32", "unit")] * 2


def busy(b):
    b.store(fn("tanh", b.load(0, "f32") * 1.5) + fn("exp", b.load(0, "f32")), 1)


def softmax(b):
    e = fn("exp", b.load(0, "f32") - row_max(b.load(0, "f32")))
    b.store(e / row_sum(e).to("f32"), 1)


def statistics(b):
    x = b.load(0, "f32")
    b.store(row_sum(x).to("f32") + row_min(x) * b.inst("prod", (x,), "f64").to("f32"), 1)


@pytest.mark.parametrize("cols", [1, 3, 10, 16])
@pytest.mark.parametrize("trace", [softmax, statistics])
def test_the_variant_for_short_rows_has_the_same_bits(trace, cols):
    """Many short rows run 16 lanes wide, few run 32 wide; a row's result is the same."""
    rows = launch.SHORT_ROWS
    x = RNG.standard_normal((rows, cols)).astype(np.float32)
    x[0], x[1, 0] = -0.0, np.nan
    k = kernel(trace, OPERANDS)
    many, few = np.zeros_like(x), np.zeros_like(x)
    run_rows(k, [x, many], rows, cols, [(cols, 1)] * 2)
    for r in range(rows):
        run_rows(k, [x[r], few[r]], 1, cols, [(cols, 1)] * 2)
    np.testing.assert_array_equal(many.view(np.int32), few.view(np.int32))
    assert set(compile_kernel(k)._code) == {(W, ""), (SHORT_W, "")}


def test_scaling_by_powers_of_two_has_one_result(monkeypatch):
    """Where the processor scales by itself exp has the bits of two multiplications, to the last subnormal."""
    x = np.concatenate([np.linspace(-106, 90, 200_000), RNG.uniform(-105, -86, 100_000)])
    x = x.astype(np.float32)
    k = kernel(lambda b: b.store(fn("exp", b.load(0, "f32")), 1), OPERANDS)
    native, multiplied = np.zeros_like(x), np.zeros_like(x)
    run_flat(k, [x, native])
    monkeypatch.setattr(jit, "features", lambda: "")
    with monkeypatch.context() as m:
        m.setattr(cache, "read", lambda _: None)
        plain = Compiled(k, f"{k} by multiplication")
    space = ir.Space((-(-x.size // 4096),), 4096, x.size, ((4096, 1), (4096, 1)))
    plain.bind(space)([x.ctypes.data, multiplied.ctypes.data], [])
    assert "llvm.ldexp" not in plain.llvm
    np.testing.assert_array_equal(native.view(np.int32), multiplied.view(np.int32))


@pytest.mark.parametrize("threads", [1, 2])
def test_totals_of_rows_and_of_columns_in_one_kernel(threads):
    """Both kinds of total, and arithmetic on them, in the fixed order, whoever ran the tasks."""
    rows, cols = 3000, 37
    x = RNG.standard_normal((rows, cols)).astype(np.float32)
    old = RNG.standard_normal(cols).astype(np.float32)
    one, each = np.zeros(1), np.zeros(cols, np.float32)

    def trace(b):
        whole, column = total(row_sum(b.load(0, "f32"))), column_totals(b.load(0, "f32"))
        b.store(whole * 2, 1)
        b.store((column + whole).to("f32") + b.inst("fload", (), "f32", 3), 2)

    k = kernel(trace, [("f32", "unit"), ("f64", "zero"), ("f32", "unit"), ("f32", "unit")])
    space = ir.Space((rows,), cols, x.size, ((cols, 1), (0, 0), (0, 1), (0, 1)))
    addresses = [a.ctypes.data for a in (x, one, each, old)]
    compile_kernel(k).bind(space)(addresses, [], threads)
    per, whole, column = ir.rows_per_task(rows, cols), -0.0, np.full(cols, -0.0)
    for start in range(0, rows, per):
        part, parts = -0.0, np.full(cols, -0.0)
        for row in x[start : start + per].astype(np.float64):
            part, parts = part + lane_sum(row), parts + row
        whole, column = whole + part, column + parts
    assert one[0] == whole * 2
    np.testing.assert_array_equal(each, (column + whole).astype(np.float32) + old)


def test_python_threads_stand_in_for_openmp(monkeypatch):
    """Without an OpenMP runtime large launches run on Python's threads, with the same bits."""
    x = RNG.standard_normal(500_000).astype(np.float32)
    k = kernel(busy, OPERANDS)
    alone, shared = np.zeros_like(x), np.zeros_like(x)
    run_flat(k, [x, alone])
    monkeypatch.setattr(pool, "_gomp", None)
    monkeypatch.setattr(pool, "_limit", 2)
    assert pool.can_run_parallel(1e-2) and not pool.can_run_parallel(1e-5)
    run_flat(k, [x, shared], threads=2)
    np.testing.assert_array_equal(alone, shared)


def test_an_interrupt_leaves_nothing_running(monkeypatch):
    """Ctrl-C during a launch is raised after all its threads are done, and the next launch works."""
    monkeypatch.setattr(pool, "_gomp", None)
    monkeypatch.setattr(pool, "_limit", 2)
    x = RNG.standard_normal(2_000_000).astype(np.float32)
    k = kernel(busy, OPERANDS)
    y, want = np.zeros_like(x), np.zeros_like(x)
    run_flat(k, [x, want])
    timer = threading.Timer(0.002, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        for _ in range(1000):
            y[:] = 0
            run_flat(k, [x, y], threads=2)
        time.sleep(1)
    held = y.copy()
    time.sleep(0.01)
    np.testing.assert_array_equal(y, held)
    run_flat(k, [x, y], threads=2)
    np.testing.assert_array_equal(y, want)


def test_regions_that_stall_make_launches_serial_for_a_while(monkeypatch):
    """Two OpenMP regions in a row far beyond their estimate: threads rest."""
    monkeypatch.setattr(pool, "_limit", 2)
    monkeypatch.setattr(pool, "_gomp", lambda *_: time.sleep(0.005))
    monkeypatch.setattr(pool, "_serial_until", 0.0)
    monkeypatch.setattr(pool, "_strikes", 0)
    pool.run(0, 0, 2, 1e-5)
    assert pool.can_run_parallel(1)
    pool.run(0, 0, 2, 1e-5)
    assert not pool.can_run_parallel(1)


def test_scratch_memory_is_shared_and_bounded():
    """A thread's launches share one area; one beyond the bound is given back."""
    s = scratch.Scratch()
    first = s.take(1000)
    assert s.take(500) == first and first % 4096 == 0
    s.give()
    assert s.take(1000) == first
    s.take(scratch.KEEP_BYTES * 2)
    s.give()
    assert s.size == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_its_own_scratch_memory():
    """What a child computes in scratch does not reach into the parent's."""
    at = scratch.scratch.take(8)
    word = ctypes.c_int64.from_address(at)
    word.value = 5
    child = os.fork()
    if child == 0:
        word.value = 6
        os._exit(0)
    os.waitpid(child, 0)
    assert word.value == 5


def test_threads_are_for_work_that_pays_for_them():
    """Small launches get one thread; costly instructions need fewer elements for two."""

    def threads(op, n):
        k = kernel(lambda b: b.store(fn(op, b.load(0, "f32")), 1), OPERANDS)
        rows = -(-n // 100)
        space = ir.Space((rows,), 100, rows * 100, ((100, 1), (100, 1)))
        return compile_kernel(k).bind(space).threads(2)

    assert [threads("neg", n) for n in (1000, 20_000, 200_000)] == [1, 1, 2]
    assert [threads("exp", n) for n in (1000, 20_000, 200_000)] == [1, 2, 2]
    assert [threads("atan", n) for n in (100, 20_000)] == [1, 2]


@pytest.mark.parametrize("inner", ["unit", "any"])
def test_rows_touch_nothing_past_their_end(inner):
    """The last row of a matrix, contiguous or strided, ends at a protected page."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    rows, step = 3, 1 if inner == "unit" else 3
    k = kernel(lambda b: b.store(b.load(0, "f32") * 2, 1), [("f32", inner), ("f32", "unit")])
    for cols in (1, 5, 16, 17, 33, 70):
        n = ((rows - 1) * cols + cols - 1) * step + 1
        m = mmap.mmap(-1, 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(m))
        assert libc.mprotect(ctypes.c_void_p(base + page), page, 0) == 0
        y = np.zeros((rows, cols), np.float32)
        space = ir.Space((rows,), cols, rows * cols, ((cols * step, step), (cols, 1)))
        compile_kernel(k).bind(space)([base + page - 4 * n, y.ctypes.data], [])


def test_counts_and_texts():
    """A kernel asked for twice is compiled once; its loop nest and its LLVM can be read."""
    k = kernel(lambda b: b.store(b.load(0, "f32") * 1.2345, 1), OPERANDS)
    compiled, reused = launch.stats.compiled + launch.stats.from_disk, launch.stats.reused
    c = compile_kernel(k)
    assert compile_kernel(k) is c
    c.bind(ir.Space((1,), 8, 8, ((0, 1), (0, 1))))
    c.bind(ir.Space((1,), 9, 9, ((0, 1), (0, 1))))
    assert launch.stats.compiled + launch.stats.from_disk == compiled + 1
    assert launch.stats.reused == reused + 1
    assert "for col in columns" in c.source and '@"body_kernel"' in c.llvm


def test_threads_compile_a_kernel_once():
    """Several threads that ask for one new kernel get the same object."""
    k = kernel(lambda b: b.store(b.load(0, "f32") * 5.4321, 1), OPERANDS)
    out = []
    threads = [threading.Thread(target=lambda: out.append(compile_kernel(k))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(out) == 4 and len(set(map(id, out))) == 1


@pytest.mark.parametrize("memory", ["f32", "bf16", "u8", "f64"])
def test_streaming_stores_have_the_same_bits(memory, monkeypatch):
    """A large result is written past the caches; a view that starts between two lines is written plainly."""
    n = 70_001
    x = RNG.standard_normal(n).astype(np.float32)
    k = kernel(lambda b: b.store(b.load(0, "f32") * 3 + 1, 1), [("f32", "unit"), (memory, "unit")])
    want = np.zeros(n, NP[memory])
    run_flat(k, [x, want])
    monkeypatch.setattr(launch, "STREAM_BYTES", 1)
    space = ir.Space((18,), 4096, n, ((4096, 1), (4096, 1)))
    size = want.itemsize
    got = np.zeros(n + 64, NP[memory])
    start = -got.ctypes.data // size % (64 // size)
    for shift in (0, 3, 0):
        view = got[start + shift : start + shift + n]
        view[...] = 0
        run = compile_kernel(k).bind(space)
        assert run._aligned == ((1, 64 if size > 1 else 32),)
        run([x.ctypes.data, view.ctypes.data], [], 2)
        assert bool(run._aligned) == (shift == 0)
        assert view.tobytes() == want.tobytes()
    in_place = kernel(lambda b: b.store(b.load(0, "f32") + 1, 0), [("f32", "unit")])
    assert compile_kernel(in_place).bind(ir.Space((18,), 4096, n, ((4096, 1),)))._aligned == ()


@pytest.mark.parametrize("cols", [256, 257, 300, 511, 1000, 1003])
@pytest.mark.parametrize("memory", ["f32", "bf16", "f64"])
def test_rows_that_start_anywhere_stream_too(memory, cols, monkeypatch):
    """Blocks begin at each row's first cache line: the bits of plain stores, nothing beside the rows touched, at every offset."""
    monkeypatch.setattr(launch, "SHIFT_COLS", 200)
    rows = 37
    x = RNG.standard_normal((rows, cols)).astype(np.float32)

    def softmax(b):
        v = b.load(0, "f32")
        e = fn("exp", v - row_max(v))
        b.store(e * (1.0 / row_sum(e)).to("f32"), 1)
        b.store(e * (2.0 / row_sum(e)).to("f32"), 2)

    k = kernel(softmax, [("f32", "unit"), (memory, "unit"), (memory, "unit")])
    space = ir.Space((rows,), cols, rows * cols, ((cols, 1),) * 3)
    plain = [np.zeros((rows, cols), NP[memory]) for _ in range(2)]
    compile_kernel(k).bind(space)([x.ctypes.data, *[p.ctypes.data for p in plain]], [], 2)
    monkeypatch.setattr(launch, "STREAM_BYTES", 1)
    size = plain[0].itemsize
    room = [np.full(rows * cols + 200, 7, NP[memory]) for _ in range(2)]
    starts = [-r.ctypes.data // size % (64 // size) for r in room]
    for shift in (0, 1, 5, 64 // size - 1):
        at = [s + shift + 40 for s in starts]
        run = compile_kernel(k).bind(space)
        assert bool(run._shifted) == bool(cols * size % 64) and bool(run._aligned) != bool(
            run._shifted
        )
        run(
            [x.ctypes.data, *[r.ctypes.data + a * size for r, a in zip(room, at, strict=True)]],
            [],
            2,
        )
        for r, a, p in zip(room, at, plain, strict=True):
            assert r[a : a + p.size].tobytes() == p.tobytes()
            assert (r[:a] == 7).all() and (r[a + p.size :] == 7).all()
            r[...] = 7
    uneven = compile_kernel(k).bind(space)
    uneven(
        [
            x.ctypes.data,
            *[r.ctypes.data + (s + n) * size for r, s, n in zip(room, starts, (1, 2), strict=True)],
        ],
        [],
        1,
    )
    assert (
        not uneven._shifted
        and room[0][starts[0] + 1 :][: plain[0].size].tobytes() == plain[0].tobytes()
    )


def test_the_kernel_asked_for_longest_ago_goes_first(monkeypatch):
    """The table of kernels is bounded; what is in use stays."""
    monkeypatch.setattr(launch, "_TABLE", {})
    monkeypatch.setattr(launch, "MAX_KERNELS", 2)
    a, b, c = (
        kernel(lambda b, k=k: b.store(b.load(0, "f32") * k, 1), OPERANDS)
        for k in (1.25, 2.25, 3.25)
    )
    first, second = compile_kernel(a), compile_kernel(b)
    assert compile_kernel(a) is first
    compile_kernel(c)
    assert compile_kernel(a) is first
    assert compile_kernel(b) is not second
