"""bfloat16 chains round where they must, and NaN stays NaN, for each of the 65,536 values."""

import struct

import pytest
import torch
from adaptive_eager.kernels.build import Builder, fn, maximum, where
from adaptive_eager.kernels.grid import facts
from adaptive_eager.kernels.ir import Kernel, Operand

from adaptive_eager import neuron_eager

EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FFFFFFFFFFFFFFF))[0]
"""A NaN whose f32 form has all bits set: rounding by carry would make it zero."""

CHAINS = {
    "arithmetic": lambda x: ((x * 1.3 + 0.125) * x - 0.5) / x,
    "exact ops": lambda x: torch.relu(-x).abs().maximum(x * 0.5).neg(),
    "select": lambda x: torch.where(x > 0, x, x + 1) * 3,
    "transcendental": lambda x: torch.tanh(x) + torch.exp(x) * torch.log(x.abs()),
    "number NaN": lambda x: (x * ODD_NAN) + 1.0,
    "through float32": lambda x: ((x.float() * 1.001).to(torch.bfloat16) + 1).float(),
    "square root": lambda x: torch.sqrt(x) * torch.rsqrt(x) - x,
}


def same(a, b):
    """Equal bits, any NaN equal to any other."""
    return torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
        a.nan_to_num(0.0), b.nan_to_num(0.0)
    )


@pytest.mark.parametrize("name", CHAINS)
def test_every_value(name):
    """Fused and op by op: the same bits."""
    results = []
    for mode in ("adaptive", "eager"):
        with neuron_eager(mode, default_device=False):
            results.append(CHAINS[name](EVERY.to("neuron")).cpu())
    assert same(*results)


@pytest.mark.parametrize(
    "name", ["arithmetic", "exact ops", "select", "number NaN", "through float32"]
)
def test_every_value_as_on_the_cpu(name):
    """Where the CPU's arithmetic is IEEE's, its bits."""
    with neuron_eager(default_device=False):
        got = CHAINS[name](EVERY.to("neuron")).cpu()
    assert same(got, CHAINS[name](EVERY))


def test_float32_nan_of_any_payload_rounds_to_nan():
    """The one cast whose input may have a NaN that a carry would destroy."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000, 0x7FFF8000], dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    with neuron_eager(default_device=False):
        y = x.to("neuron").to(torch.bfloat16)
        assert torch.isnan(y.cpu()).all() and torch.isnan((y * 2 + 1).cpu()).all()


def test_what_is_known():
    """Loads, rounding, exact ops and constants lie on the grid; sums do not; transcendentals are untidy."""
    b = Builder()
    x = b.load(0, "bf16")
    half, third = b.const(0.5, "f32"), b.const(1 / 3, "f32")
    values = {
        "load": x,
        "sum": x + half,
        "rounded": (x + half).to("bf16"),
        "max": maximum(x, half),
        "max of a value off the grid": maximum(x, third),
        "select": where(x > half, x, half),
        "exp": fn("exp", x),
    }
    k = Kernel(1, (Operand("bf16", "unit"),), (), tuple(b.insts))
    known = {name: facts(k)[v.id] for name, v in values.items()}
    on = {name for name, f in known.items() if "bf16" in f.grids}
    assert on == {"load", "rounded", "max", "select"}
    assert {name for name, f in known.items() if not f.tidy} == {"exp"}
    assert x.to("bf16").id == x.id and maximum(x, half).to("bf16").id == values["max"].id
