"""Ops on lists of tensors: the CPU's values, no fallback, and torch's own rules about versions and gradients."""

import pytest
import torch

from adaptive_eager import neuron_eager

CALLS = {
    "mul scalar": lambda x, y: torch._foreach_mul(x, 2.5),
    "mul scalars": lambda x, y: torch._foreach_mul(x, [2.0, 3, 0.5]),
    "mul tensor": lambda x, y: torch._foreach_mul(x, x[0].sum()),
    "mul list": lambda x, y: torch._foreach_mul(x, y),
    "add alpha": lambda x, y: torch._foreach_add(x, y, alpha=0.25),
    "add scalar": lambda x, y: torch._foreach_add(x, 1),
    "sub scalar": lambda x, y: torch._foreach_sub(x, 1.5),
    "div scalars": lambda x, y: torch._foreach_div(x, [2.0, 4.0, 8.0]),
    "addcmul value": lambda x, y: torch._foreach_addcmul(x, y, y, value=0.1),
    "addcmul": lambda x, y: torch._foreach_addcmul(x, y, y),
    "addcdiv scalars": lambda x, y: torch._foreach_addcdiv(x, y, [v.abs() + 1 for v in y], [1.0, 2.0, -1.0]),
    "lerp scalar": lambda x, y: torch._foreach_lerp(x, y, 0.3),
    "lerp list": lambda x, y: torch._foreach_lerp(x, y, [v * 0 + 0.5 for v in y]),
    "sqrt": lambda x, y: torch._foreach_sqrt(torch._foreach_abs(x)),
    "neg": lambda x, y: torch._foreach_neg(x),
    "maximum": lambda x, y: torch._foreach_maximum(x, y),
    "clamp": lambda x, y: torch._foreach_clamp_max(x, 0.5),
    "pow": lambda x, y: torch._foreach_pow(x, 2),
    "norm": lambda x, y: torch._foreach_norm(x),
    "in place": lambda x, y: (torch._foreach_mul_(x, 0.5), torch._foreach_add_(x, y, alpha=2), x)[-1],
    "in place, mixed": lambda x, y: (torch._foreach_addcdiv_(x, y, [v.exp() for v in y], value=-0.1), x)[-1],
    "zero": lambda x, y: (torch._foreach_zero_(x), x)[-1],
    "copy": lambda x, y: (torch._foreach_copy_(x, y), x)[-1],
}  # fmt: skip


def lists(device):
    g = torch.Generator().manual_seed(0)
    shapes = [(3,), (4, 5), ()]
    return [[torch.randn(s, generator=g).to(device) for s in shapes] for _ in range(2)]


@pytest.mark.parametrize("name", CALLS)
def test_list_ops_agree_with_the_cpu(name):
    """Values as on the CPU, in every mode the same bits, and no op goes to the CPU and back."""
    want = CALLS[name](*lists("cpu"))
    results = []
    for mode in ("adaptive", "eager", "blocking"):
        with neuron_eager(mode, default_device=False) as s:
            results.append([v.cpu() for v in CALLS[name](*lists("neuron"))])
        assert s.fallbacks == {}
    for a, b in zip(results[0], want, strict=True):
        torch.testing.assert_close(a, b)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_versions_and_gradients():
    """In-place list ops count as writes; functional ones carry gradients."""
    x = [torch.ones(3).to("neuron").requires_grad_() for _ in range(2)]
    y = torch._foreach_mul(x, 3.0)
    sum(v.sum() for v in y).backward()
    assert all(v.grad.tolist() == [3.0] * 3 for v in x)
    z = [torch.ones(3).to("neuron")]
    before = z[0]._version
    torch._foreach_mul_(z, 2.0)
    assert z[0]._version == before + 1
    w = x[0] * 1
    kept = w * w
    torch._foreach_add_([w], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_optimizers_take_their_list_form():
    """AdamW of neuron parameters records lists: a tenth of the dispatches of its loop over parameters."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    ps = [torch.nn.Parameter(torch.ones(2).to("neuron")) for _ in range(3)]
    assert _default_to_fused_or_foreach(ps, differentiable=False)[1]


@pytest.mark.parametrize("name", CALLS)
def test_strides_of_the_tape_change_nothing(name):
    """Called again and again, under any limits: the bits of the first time, and as many ops on the tape."""
    seen = set()
    for limits in ({}, {"max_ops": 2}, {"byte_budget": 1}):
        for _ in range(4):
            with neuron_eager(default_device=False, **limits) as s:
                got = [v.cpu() for v in CALLS[name](*lists("neuron"))]
            seen.add((tuple(v.numpy().tobytes() for v in got), s.stats.ops))
    assert len(seen) == 1


def test_a_known_list_is_one_step_of_the_tape():
    """The second time, no tensor of the list goes through the recorder by itself; numbers may change."""
    from adaptive_eager.record import TAPE
    from adaptive_eager.tensor import NeuronTensor

    x, y = lists("neuron")
    want = [a + 2.5 * b for a, b in zip(*lists("cpu"), strict=True)]
    calls = []
    plain = NeuronTensor.__torch_dispatch__

    def counted(func, types, args=(), kwargs=None):
        calls.append(str(func))
        return plain(func, types, args, kwargs)

    with neuron_eager(default_device=False):
        for value in (1.5, 2.0):
            torch._foreach_add(x, y, alpha=value)
            torch.neuron.synchronize()
        NeuronTensor.__torch_dispatch__ = staticmethod(counted)
        try:
            got = torch._foreach_add(x, y, alpha=2.5)
        finally:
            NeuronTensor.__torch_dispatch__ = staticmethod(plain)
        assert calls == ["aten._foreach_add.List"]
        assert TAPE.seg.node.depth == 3
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.cpu(), b)


def test_numbers_of_another_kind_are_another_stride():
    """1, 1.0 and a value that drops out (`value=1`) do not share one."""
    for value in (1, 1.0, 0.5, 2, 0.5, 1, True):
        a, b = lists("cpu"), lists("neuron")
        want = torch._foreach_addcmul(*a, a[0], value=value)
        with neuron_eager(default_device=False):
            got = torch._foreach_addcmul(*b, b[0], value=value)
            for p, q in zip(got, want, strict=True):
                torch.testing.assert_close(p.cpu(), q)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_optimizers_in_every_mode(optimizer):
    """Five steps with a learning rate that changes: the same bits in every mode, the CPU's values."""
    final = []
    for mode in ("cpu", "adaptive", "eager", "blocking"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(5, 5) for _ in range(4)])
        x = torch.randn(3, 5)
        device = "cpu" if mode == "cpu" else "neuron"
        model.to(device)
        opt = optimizer(model.parameters(), lr=0.01, weight_decay=0.1)
        for step in range(5):
            opt.param_groups[0]["lr"] = 0.01 / (step + 1)
            if mode == "cpu":
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                continue
            with neuron_eager(mode, default_device=False):
                loss = model(x.to(device)).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        final.append([p.detach().cpu() for p in model.parameters()])
    for got in final[1:]:
        for a, b, c in zip(got, final[1], final[0], strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c)
