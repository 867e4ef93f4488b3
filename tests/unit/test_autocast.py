"""`torch.autocast("neuron")` follows PyTorch's lists: op by op as its header says, and dtype by dtype as on another device."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from adaptive_eager import autocast

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def macro(name):
    """Ops of a list in torch's header, as `name.overload`."""
    text = HEADER.read_text()
    body = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*\n)", text)[1]
    return {", ".join(m.split()).replace(",", "").replace(" ", ".") for m in re.findall(r"_\(([\w, ]+)\)", body)}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (autocast.LOWER, "LOWER_PRECISION_FP"),
        (autocast.FLOAT32, "FP32"),
        (autocast.FLOAT32_RESULT, "FP32_SET_OPT_DTYPE"),
        (autocast.WIDEST, "PROMOTE"),
    ],
)
def test_lists_are_torchs(ours, theirs):
    """A new torch may move an op from one list to another."""
    if not HEADER.exists():
        pytest.skip("torch without headers")
    assert set(ours.split()) == macro(theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_result_dtypes(dtype):
    """Each policy in turn; float64 is left alone."""
    x = torch.ones(4, 4, device="neuron")
    h = x.to(dtype)
    with torch.autocast("neuron", dtype=dtype):
        assert (x @ x).dtype is dtype
        assert nn.functional.linear(x, x, x[0]).dtype is dtype
        assert h.exp().dtype is torch.float32
        assert h.sum().dtype is torch.float32 and h.sum(0, dtype=dtype).dtype is dtype
        assert h.softmax(-1).dtype is torch.float32
        assert torch.ops.aten.norm.Scalar(h).dtype is torch.float32
        assert torch.ops.aten.norm.ScalarOpt_dim(h, 2, [0]).dtype is torch.float32
        assert torch.addcmul(h, x, h).dtype is torch.float32
        assert torch.addcmul(h, h, h).dtype is dtype
        assert (h + h).dtype is dtype and (x + h).dtype is torch.float32
        assert (x.double() @ x.double()).dtype is torch.float64
        with torch.autocast("neuron", enabled=False):
            assert (x @ x).dtype is torch.float32
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            nn.functional.binary_cross_entropy(x, x)
    assert (x @ x).dtype is torch.float32


def test_a_parameter_is_cast_once():
    """Its copy is made at the first use, again after it was written, and dropped when the outermost autocast ends."""
    w = nn.Parameter(torch.ones(4, 4, device="neuron"))
    with torch.autocast("neuron", dtype=torch.bfloat16):
        with torch.autocast("neuron", dtype=torch.bfloat16):
            (w @ w).sum().backward()
        first = autocast.cast(w, torch.bfloat16)
        assert first is autocast.cast(w, torch.bfloat16)
        with torch.no_grad():
            w.add_(1)
        second = autocast.cast(w, torch.bfloat16)
        assert second is not first and second.float().mean().item() == 2
    assert not autocast.CACHE._copies
    assert w.grad.dtype is torch.float32 and w.grad.eq(8).all()


def test_no_grad_copies_are_not_used_with_grad():
    """A copy made without a graph would lose the parameter's gradient."""
    w = nn.Parameter(torch.ones(4, 4, device="neuron"))
    with torch.autocast("neuron", dtype=torch.bfloat16):
        with torch.no_grad():
            w @ w
        (w @ w).sum().backward()
    assert w.grad is not None


def step(device, scaler):
    """Losses and weights of three steps of a small model in float16 with a loss scaler."""
    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.randn(16, 3)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


def test_training_with_a_scaler_is_the_cpus():
    """GradScaler, clipping and AdamW under autocast, against the CPU's autocast."""
    a, w = step("cpu", torch.amp.GradScaler("cpu"))
    b, v = step("neuron", torch.amp.GradScaler("neuron"))
    torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)
    for p, q in zip(w, v, strict=True):
        torch.testing.assert_close(q, p, rtol=5e-2, atol=5e-2)


def test_a_scaler_skips_a_step_with_infinite_gradients():
    """And halves its scale."""
    w = nn.Parameter(torch.ones(3, device="neuron"))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = torch.amp.GradScaler("neuron", init_scale=4.0)
    w.grad = torch.tensor([1.0, float("inf"), 1.0], device="neuron")
    scaler.scale(torch.zeros((), device="neuron"))
    scaler.step(optimizer)
    scaler.update()
    assert w.detach().cpu().tolist() == [1, 1, 1] and scaler.get_scale() == 2.0


class Half(torch.autograd.Function):
    """Halves its input in float32."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="neuron", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert x.dtype is torch.float32 and not torch.is_autocast_enabled("neuron")
        return x * 0.5

    @staticmethod
    @torch.amp.custom_bwd(device_type="neuron")
    def backward(ctx, g):
        return g * 0.5


def test_custom_functions():
    """custom_fwd casts and leaves autocast, custom_bwd enters what forward had."""
    x = torch.ones(3, device="neuron", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("neuron", dtype=torch.bfloat16):
        Half.apply(x).sum().backward()
    assert x.grad.cpu().tolist() == [0.5] * 3
