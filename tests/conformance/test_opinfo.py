"""PyTorch's own operator database on `neuron`: forward values, shapes, dtypes and gradients against the CPU.

A slice of it runs by default (every op, its first samples); `AE_OPINFO_SAMPLES` takes more.
"""

import os
import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map_only

SAMPLES = int(os.environ.get("AE_OPINFO_SAMPLES", "2"))
RANDOM = (
    "dropout",
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "uniform",
    "exponential",
    "geometric",
    "cauchy",
    "rrelu",
    "empty",
    "fractional_max_pool",
    "multi_head_attention_forward",
)
EXCEPTIONS = {
    "to_sparse": "sparse layouts stay on the CPU",
}
"""Ops that differ, each with the reason."""


def moved(x, grad):
    def move(t):
        if t.layout is not torch.strided:
            pytest.skip("layout")
        y = t.detach().to("neuron")
        return y.requires_grad_() if grad and t.requires_grad else y

    return tree_map_only(torch.Tensor, move, x)


def compare(got, want, values):
    gs, ws = tree_flatten(got)[0], tree_flatten(want)[0]
    assert len(gs) == len(ws)
    for g, w in zip(gs, ws, strict=True):
        if isinstance(w, torch.Tensor):
            assert g.device.type == "neuron" and g.dtype == w.dtype and g.shape == w.shape
            if values:
                torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("op", op_db, ids=lambda o: o.formatted_name)
def test_op(op):
    """Each sample's result and gradients are the CPU's."""
    if op.name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[op.name])
    if torch.float32 not in op.supported_dtypes("cpu"):
        pytest.skip("no float32")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    grad = op.supports_autograd
    for k, s in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=grad)):
        if k >= SAMPLES:
            break
        tensors = [
            v for v in tree_flatten((s.input, s.args, s.kwargs))[0] if isinstance(v, torch.Tensor)
        ]
        if not tensors and "device" not in s.kwargs:
            continue
        if op.name == "to" and any(
            isinstance(v, (str, torch.device)) for v in (*s.args, *s.kwargs.values())
        ):
            continue
        d = moved((s.input, s.args, s.kwargs), grad)
        if op.name == "tensor_split":
            d = (d[0], s.args, s.kwargs)
        if s.kwargs.get("device") is not None:
            d[2]["device"] = "neuron"
        c = tree_map_only(
            torch.Tensor,
            lambda t: t.detach().clone().requires_grad_(grad and t.requires_grad),
            (s.input, s.args, s.kwargs),
        )
        try:
            want = op(c[0], *c[1], **c[2])
        except Exception:
            continue
        got = op(d[0], *d[1], **d[2])
        random = any(r in op.name for r in RANDOM) or s.kwargs.get("dropout_p", 0) > 0
        compare(got, want, not random)
        fw = [t for t in tree_flatten(want)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        fg = [t for t in tree_flatten(got)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        if (
            not grad
            or not fw
            or random
            or any(t.is_complex() and t.abs().grad_fn is None for t in fw)
        ):
            continue
        total = lambda ts: [t.abs().sum() if t.is_complex() else t.float().sum() for t in ts]
        ci = [t for t in tree_flatten(c)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        di = [t for t in tree_flatten(d)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        gw = torch.autograd.grad(total(fw), ci, allow_unused=True)
        gg = torch.autograd.grad(total(fg), di, allow_unused=True)
        compare([g for g in gg if g is not None], [g for g in gw if g is not None], True)
