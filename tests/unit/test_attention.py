"""Scaled dot-product attention: the CPU's bits where it takes flash attention, its values and errors elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaptive_eager import neuron_eager

CASES = {
    "plain": dict(),
    "causal": dict(is_causal=True),
    "scale": dict(scale=0.5),
    "cross": dict(keys=23),
    "mask": dict(mask="float"),
    "bool mask": dict(mask="bool"),
    "2-D bool mask": dict(mask="2d"),
    "mask for each head": dict(mask="heads"),
    "a row sees nothing": dict(mask="empty row"),
    "gqa": dict(kv_heads=2, enable_gqa=True),
    "gqa causal": dict(kv_heads=1, enable_gqa=True, is_causal=True),
    "bfloat16": dict(dtype=torch.bfloat16, is_causal=True),
    "float64": dict(dtype=torch.float64),
    "no batch dim (composite)": dict(dims=3),
    "other value width (composite)": dict(value_width=8),
    "mask with gradient (composite)": dict(mask="learned"),
}


def inputs(keys=17, kv_heads=4, dtype=torch.float32, mask=None, dims=4, value_width=16, **rest):
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=g).to(dtype)
    q, k, v = make(2, 4, 17, 16), make(2, kv_heads, keys, 16), make(2, kv_heads, keys, value_width)
    if dims == 3:
        q, k, v = q[0], k[0], v[0]
    masks = {
        None: None,
        "float": make(17, keys),
        "bool": make(2, 1, 17, keys) > -0.5,
        "2d": make(17, keys) > -0.5,
        "heads": make(2, 4, 17, keys),
        "empty row": torch.arange(17)[:, None].ne(3).expand(17, keys).clone(),
        "learned": make(17, keys).requires_grad_(),
    }
    return (q, k, v, masks[mask]), rest


def run(name, device, **scope):
    (q, k, v, m), kwargs = inputs(**CASES[name])

    def there(t):
        return None if t is None else t.detach().to(device).requires_grad_(t.requires_grad)

    x = [t.to(device).requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*x, attn_mask=there(m), **kwargs)
    weight = torch.arange(out.numel(), dtype=torch.float32).view(out.shape).sin().to(out.dtype)
    (out * weight.to(device)).sum().backward()
    return [out.detach().cpu(), *[t.grad.cpu() for t in x]]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    """Equal to the CPU's, bit for bit where one kernel does it, and in all modes."""
    want = run(name, "cpu")
    results = []
    for mode in ("adaptive", "eager", "blocking"):
        with neuron_eager(mode, default_device=False) as s:
            results.append(run(name, "neuron"))
        assert s.fallbacks == {}
    for got in results:
        for a, b, c in zip(got, want, results[0], strict=True):
            assert torch.equal(a, c) or torch.isnan(a).any()
            torch.testing.assert_close(a, b, equal_nan=True)
            if "composite" not in name:
                assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_one_launch(grad):
    """One op on the tape and one launch; no score reaches HBM."""
    q, k, v = (torch.randn(1, 2, 256, 16).to("neuron") for _ in range(3))
    with grad(), neuron_eager(default_device=False) as s:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.neuron.synchronize()
    assert s.stats.launches == 1 and s.fallbacks == {}
    assert out.shape == q.shape
    assert s.stats.hbm_read + s.stats.hbm_written < 256 * 256 * 4


def test_settings_are_obeyed():
    """`sdpa_kernel(MATH)` gives the composite, dropout too."""
    q = torch.randn(1, 2, 8, 4)
    with neuron_eager(default_device=False) as s, sdpa_kernel(SDPBackend.MATH):
        x = q.to("neuron")
        got = F.scaled_dot_product_attention(x, x, x).cpu()
    assert s.stats.ops > 3
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q, q))
    with neuron_eager(default_device=False):
        x = q.to("neuron")
        dropped = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).cpu()
    assert not torch.equal(dropped, got)


def test_transforms():
    """vmap, jvp and gradients of gradients go through the composite."""
    q = torch.randn(3, 1, 2, 5, 4)
    f = lambda x: F.scaled_dot_product_attention(x, x, x)
    with neuron_eager(default_device=False):
        got = torch.func.vmap(f)(q.to("neuron")).cpu()
        torch.testing.assert_close(got, torch.stack([f(x) for x in q]))
        _, tangent = torch.func.jvp(f, (q[0].to("neuron"),), (torch.ones_like(q[0]).to("neuron"),))
        with sdpa_kernel(SDPBackend.MATH):
            want = torch.func.jvp(f, (q[0],), (torch.ones_like(q[0]),))[1]
        torch.testing.assert_close(tangent.cpu(), want)


@pytest.mark.parametrize(
    "bad",
    [
        lambda q: F.scaled_dot_product_attention(q, q[..., :3], q),
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=q[0, 0, :, :3] > 0),
        lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1].repeat(1, 3, 1, 1)),
        lambda q: F.scaled_dot_product_attention(q, q.double(), q),
        lambda q: F.scaled_dot_product_attention(
            q, q, q, attn_mask=torch.ones(3, 7, device=q.device)
        ),
    ],
)
def test_errors_are_pytorchs(bad):
    """The CPU's exception type, at the call."""
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(Exception) as want:
        bad(q)
    with neuron_eager(default_device=False), pytest.raises(want.type):
        bad(q.to("neuron"))
