"""Indices of extrema: the CPU's, ties, NaN and infinities included, in one launch."""

import math

import pytest
import torch

from adaptive_eager import neuron_eager

OPS = {
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1, keepdim=True),
    "max": lambda x: x.max(-1),
    "min": lambda x: x.min(-1, keepdim=True),
}
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
)


def rows(dtype, cols):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (40, cols), generator=g).to(dtype)
    if dtype.is_floating_point:
        x[1::7, cols // 2] = math.nan
        x[2::7] = math.nan
        x[3::7, -1] = math.inf
        x[4::7] = -math.inf
        x[5::7, ::2], x[5::7, 1::2] = 0.0, -0.0
    return x


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 2, 31, 33, 100])
def test_extrema(name, dtype, cols):
    """Values and first indices."""
    x = rows(dtype, cols)
    want = OPS[name](x)
    with neuron_eager(default_device=False) as s:
        y = x.to("neuron")
        got = OPS[name](y)
        torch.neuron.synchronize()
    assert s.stats.launches == 1 and s.fallbacks == {}
    for a, b in zip(
        [got] if isinstance(got, torch.Tensor) else got,
        [want] if isinstance(want, torch.Tensor) else want,
        strict=True,
    ):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0))


def test_it_fuses_with_what_makes_the_row():
    """Softmax and argmax of logits are one launch: the index is found where the row is."""
    x = torch.randn(64, 100)
    with neuron_eager(default_device=False) as s:
        y = torch.softmax(x.to("neuron") * 3, -1).argmax(-1)
        torch.neuron.synchronize()
    assert s.stats.launches == 1
    assert torch.equal(y.cpu(), torch.softmax(x * 3, -1).argmax(-1))
