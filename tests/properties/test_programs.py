"""Generated programs: every mode has the same bits, and they are the CPU's within rounding."""

import math

import pytest
import torch
from adaptive_eager.device_sim.spec import TRN2
from hypothesis import given
from hypothesis import strategies as st

from adaptive_eager import neuron_eager

from .programs import SHAPES, programs, run

TINY = TRN2.replace(name="tiny", sbuf_bytes=128 * 4096)
MODES = (
    dict(mode="blocking"),
    dict(mode="eager"),
    dict(),
    dict(byte_budget=1),
    dict(max_ops=3),
    dict(spec=TINY),
)


def inputs(shape, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g)


def on_cpu(source, a, b):
    """The CPU's results, or the type of its error: a generated program may break autograd's rules."""
    try:
        return run(source, a, b, "cpu")
    except RuntimeError as e:
        return type(e)


def same_bits(x, y):
    if isinstance(x, torch.Tensor):
        return (
            x.dtype == y.dtype
            and x.shape == y.shape
            and x.stride() == y.stride()
            and x.contiguous().numpy().tobytes() == y.contiguous().numpy().tobytes()
        )
    return x == y or (math.isnan(x) and math.isnan(y))


@given(programs(random=True), st.sampled_from(SHAPES), st.integers(0, 5))
def test_modes_agree_bit_for_bit(source, shape, seed):
    """blocking, eager, adaptive, adaptive again (warm), byte budget 1, segments of three ops and
    a chip with little SBUF give identical bits."""
    a, b = inputs(shape, seed)
    if on_cpu(source, a, b) is RuntimeError:
        return
    want = None
    for options in (*MODES, dict()):
        with neuron_eager(default_device=False, **options):
            got = run(source, a, b, "neuron")
        if want is None:
            want = got
        for x, y in zip(want, got, strict=True):
            assert same_bits(x, y), f"{options}\n{source}\n{x}\n{y}"


@given(programs(), st.sampled_from(SHAPES), st.integers(0, 5))
def test_programs_agree_with_the_cpu(source, shape, seed):
    """Values, shapes, dtypes and gradients are the CPU's within float32 rounding."""
    a, b = inputs(shape, seed)
    cpu = on_cpu(source, a, b)
    if cpu is RuntimeError:
        with pytest.raises(RuntimeError):
            run(source, a, b, "neuron")
        return
    neuron = run(source, a, b, "neuron")
    for x, y in zip(cpu, neuron, strict=True):
        if isinstance(x, torch.Tensor):
            rough = "bfloat16" in source or "int32" in source
            torch.testing.assert_close(
                y,
                x,
                rtol=2e-2 if rough else 2e-4,
                atol=2e-2 if rough else 2e-4,
                equal_nan=True,
                msg=lambda m: f"{m}\n{source}",
            )
        else:
            assert math.isclose(
                x,
                y,
                rel_tol=1e-2 if "bfloat16" in source or "int32" in source else 1e-3,
                abs_tol=1e-2,
            ) or (math.isnan(x) and math.isnan(y)), source
