"""Three readers of one kernel agree: code generation, the tile interpreter, and the cost model."""

import contextlib

import numpy as np
import pytest
from adaptive_eager.device_sim.spec import TRN2, TRN3
from adaptive_eager.device_sim.work import cost
from adaptive_eager.kernels import launch
from adaptive_eager.kernels.build import Builder, column_totals, row_sum
from adaptive_eager.kernels.cost import work_of
from adaptive_eager.kernels.interpret import interpret
from adaptive_eager.kernels.ir import ITEMSIZE, Kernel, Operand, Space
from adaptive_eager.kernels.launch import compile_kernel
from adaptive_eager.kernels.numops import MEMORY
from adaptive_eager.kernels.tiling import tile_plan
from hypothesis import given
from hypothesis import strategies as st

from adaptive_eager import neuron_eager
from adaptive_eager.testing import programs

from .kernels import Case, bytes_at, cases, same, values

KIB = 1 << 10
CHIPS = (
    TRN2,
    TRN3,
    TRN2.replace(sbuf_bytes=128 * 4 * KIB),
    TRN2.replace(sbuf_bytes=128 * 6 * KIB, lnc=1),
    TRN2.replace(sbuf_bytes=128 * 4 * KIB, psum_bytes=128 * 2 * KIB, psum_banks=1),
    TRN2.replace(partitions=32, sbuf_bytes=32 * 16 * KIB, psum_bytes=32 * 16 * KIB),
)


def check(case, spec):
    """Run a case both ways and compare bits, bytes and footprints."""
    plan = tile_plan(case.kernel, case.space, spec)
    work = work_of(plan)
    compiled, interpreted = ([a.copy() for a in case.arrays] for _ in range(2))
    compile_kernel(case.kernel).bind(case.space)(case.pointers(compiled), case.scalars)
    counts = interpret(plan, case.pointers(interpreted), case.scalars)
    for k in sorted(case.stored):
        dtype = case.kernel.operands[k].dtype
        assert same(compiled[k], interpreted[k], dtype), f"operand {k}\n{case}"
    assert (counts.read, counts.written) == (work.read, work.written), case
    assert (counts.sbuf, counts.psum) == (work.sbuf, work.psum), case
    assert counts.sbuf <= spec.sbuf_partition_bytes
    assert counts.psum <= spec.psum_partition_bytes
    assert cost(work, spec).ns >= spec.launch_ns


@given(cases(), st.sampled_from(CHIPS))
def test_generated_kernels(case, spec):
    """Same bits as generated code; bytes and footprint as the cost model says; nothing past the SBUF."""
    check(case, spec)


@pytest.mark.parametrize("reduces", [False, True])
def test_totals_of_very_wide_rows_spill(reduces):
    """Totals of more columns than the chip's memories hold go to HBM and back, counted, same bits."""
    b = Builder()
    x = b.load(0, "f32")
    y = x * row_sum(x).to("f32") if reduces else x * 2
    b.store(column_totals(y).to("f32"), 1)
    kernel = Kernel(1, (Operand("f32", "unit"), Operand("f32", "unit")), (), tuple(b.insts))
    cols = 40_000
    space = Space((3,), cols, 3 * cols, ((cols, 1), (0, 1)))
    rng = np.random.default_rng(0)
    arrays = [values(rng, "f32", 3 * cols), np.zeros(cols, np.float32)]
    small = CHIPS[-2]
    assert tile_plan(kernel, space, small).totals_at == "hbm"
    check(Case(kernel, space, arrays, [], {1}), small)


@pytest.fixture
def audited(monkeypatch):
    """Lets the tile interpreter check every launch that the product makes."""
    seen = set()
    original = launch.Launch.__call__

    def call(self, pointers, scalars, threads=1):
        k, space = self.compiled.kernel, self.space
        key = (self.compiled.text, space)
        if key in seen:
            original(self, pointers, scalars, threads)
            return
        sizes = []
        for o, s in zip(k.operands, space.strides, strict=True):
            reach = sum((n - 1) * x for n, x in zip(space.outer, s, strict=False))
            sizes.append((reach + (space.cols - 1) * s[-1] + 1) * ITEMSIZE[o.dtype])
        before = [
            np.frombuffer(bytes_at(p, n), np.uint8).copy()
            for p, n in zip(pointers, sizes, strict=True)
        ]
        original(self, pointers, scalars, threads)
        plan = tile_plan(k, space, TRN2)
        counts = interpret(plan, [b.ctypes.data for b in before], scalars)
        work = work_of(plan)
        what = f"{k}\n{space}"
        assert (counts.read, counts.written) == (work.read, work.written), what
        assert (counts.sbuf, counts.psum) == (work.sbuf, work.psum), what
        for i in k.insts:
            if i.op == "store":
                dtype = k.operands[i.attr].dtype
                got = np.frombuffer(bytes_at(pointers[i.attr], sizes[i.attr]), MEMORY[dtype])
                assert same(got, before[i.attr].view(MEMORY[dtype]), dtype), what
        seen.add(key)

    monkeypatch.setattr(launch.Launch, "__call__", call)
    return seen


def test_generated_programs(audited):
    """Every kernel that generated programs run agrees with the tile interpreter."""

    @given(programs())
    def each(program):
        with (
            neuron_eager(default_device=False),
            contextlib.suppress(RuntimeError),
        ):  # autograd's own rules
            program.run("neuron")

    each()
    assert audited
