"""Inference mode: no autograd key takes composite ops apart on the way, so they arrive whole."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

from adaptive_eager import neuron_eager
from examples.train_gpt import GPT, Config

OPS = [op for op in op_db if torch.float32 in op.dtypes]
RANDOM = "dropout rand multinomial normal bernoulli empty cauchy exponential geometric uniform rrelu fractional_max_pool scaled_dot".split()
LEFT_OUT = {
    "sparse.sampled_addmm": "sparse results are not moved to neuron",
    "sparse.mm.reduce": "sparse results are not moved to neuron",
    "to_sparse": "sparse results are not moved to neuron",
    "tensor_split": "takes its indices on the CPU",
}


def to(x, device):
    if isinstance(x, torch.Tensor):
        return x.detach().to(device)
    if isinstance(x, (list, tuple)):
        return type(x)(to(v, device) for v in x)
    return x


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
def test_ops(op):
    """The CPU's values, or its error."""
    if any(r in op.full_name for r in RANDOM):
        pytest.skip("draws random numbers or reads none")
    if op.full_name in LEFT_OUT:
        pytest.skip(LEFT_OUT[op.full_name])
    samples = [s for s, _ in zip(op.sample_inputs("cpu", torch.float32), range(1), strict=False)]
    for s in samples:
        with torch.inference_mode():
            try:
                want = op(to(s.input, "cpu"), *to(s.args, "cpu"), **s.kwargs)
            except Exception as e:
                with pytest.raises(type(e)):
                    op(to(s.input, "neuron"), *to(s.args, "neuron"), **s.kwargs)
                continue
            kwargs = {k: to(v, "neuron") for k, v in s.kwargs.items()}
            got = op(to(s.input, "neuron"), *to(s.args, "neuron"), **kwargs)
            torch.testing.assert_close(to(got, "cpu"), want, equal_nan=True)


def test_a_gpt_falls_back_nowhere():
    """Forward, loss and attention in inference mode: the bits of no_grad, and no op on the CPU."""
    torch.manual_seed(0)
    model = GPT(Config(width=32, context=16)).to("neuron")
    tokens = torch.randint(0, 32, (2, 16)).to("neuron")
    results = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), neuron_eager(default_device=False) as s:
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            results.append((logits.cpu(), loss.cpu()))
        assert s.fallbacks == {}
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_views_of_parameters_stay_views():
    """A view made in inference mode shares memory and versions with a normal tensor."""
    w = torch.arange(6.0).to("neuron")
    with torch.inference_mode():
        v = w[2:]
        d = w.detach()
        halves = w.split(3)
    assert not v.is_inference() and not d.is_inference() and not halves[0].is_inference()
    before = w._version
    v.mul_(2)
    assert w._version == before + 1 and w[3].item() == 6.0
    with torch.inference_mode():
        new = w * 2
        assert new.is_inference() and new[1:].is_inference()
