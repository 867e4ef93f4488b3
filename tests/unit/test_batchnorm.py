"""Batch norm in evaluation: the CPU's values in any layout, one launch with what follows it."""

import pytest
import torch
import torch.nn.functional as F

from adaptive_eager import neuron_eager


@pytest.mark.parametrize("shape", [(8, 5), (4, 3, 7), (2, 6, 5, 4), (2, 3, 2, 3, 2), (1, 4, 1, 1)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values(shape, affine, layout):
    """Every rank, with and without weights."""
    if layout is torch.channels_last and len(shape) != 4:
        pytest.skip("a layout of four dims")
    torch.manual_seed(0)
    x = torch.randn(shape).to(memory_format=layout)
    c = shape[1]
    mean, var = torch.randn(c), torch.rand(c)
    w, b = (torch.randn(c), torch.randn(c)) if affine else (None, None)
    want = F.batch_norm(x, mean, var, w, b, eps=1e-3)
    with neuron_eager(default_device=False) as s:
        there = [t if t is None else t.to("neuron") for t in (x, mean, var, w, b)]
        got = F.batch_norm(*there, eps=1e-3)
        torch.neuron.synchronize()
    assert s.stats.launches == 1 and s.fallbacks == {}
    steps = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (got, want)]
    assert steps[0] == steps[1]
    torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_and_gradient(dtype):
    """Half types with their own or float32 statistics; the gradient through an evaluated norm."""
    torch.manual_seed(0)
    x, stats = torch.randn(3, 4, 5).to(dtype), [torch.rand(4).to(dtype) for _ in range(4)]
    grads = []
    for device in ("cpu", "neuron"):
        y = x.to(device).detach().requires_grad_()
        out = F.batch_norm(y, *[t.to(device) for t in stats])
        out.float().square().sum().backward()
        grads.append((out.detach().cpu(), y.grad.cpu()))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_training_updates_statistics_as_before():
    """Training is the library's."""
    net, x = torch.nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)
    want = net(x)
    other = torch.nn.BatchNorm2d(3).to("neuron")
    torch.testing.assert_close(other(x.to("neuron")).cpu(), want)
    torch.testing.assert_close(other.running_var.cpu(), net.running_var)


def test_norm_relu_and_residual_are_one_launch():
    """The tail of a residual block."""
    net = torch.nn.BatchNorm2d(16).eval().to("neuron")
    x, r = (torch.randn(2, 16, 8, 8).to("neuron") for _ in range(2))
    with torch.no_grad(), neuron_eager(default_device=False) as s:
        y = F.relu(net(x) + r)
        torch.neuron.synchronize()
    assert s.stats.launches == 1
    del y
