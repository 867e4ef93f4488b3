"""Operators that record without the dispatcher: the same tape, and nobody who wants to see the op misses it."""

import operator

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_eager import neuron_eager
from adaptive_eager.operators import FORWARD, INPLACE, REFLECTED, UNARY

NUMBERS = (2.5, 3, True, 1 << 70)


@pytest.fixture
def known():
    """Two tensors, and a tape that knows their product and sum at its start."""
    with neuron_eager(default_device=False):
        x = torch.tensor([1.0, -2.0, 3.0]).to("neuron")
        y = torch.tensor([0.5, 4.0, -1.0]).to("neuron")
        for _ in range(3):
            x * y, x * 2.0, x.exp(), 2.0 * x
            torch.neuron.synchronize()
        yield x, y


@pytest.mark.parametrize("name", [*FORWARD, *REFLECTED, *INPLACE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_binary_operators_agree_with_the_cpu(name, dtype):
    """First time, and when the tape knows them: values, dtypes and errors."""
    a, b = torch.tensor([1, 0, 3]).to(dtype), torch.tensor([[1], [2]]).to(dtype)
    others = NUMBERS if name in REFLECTED else (*NUMBERS, b)
    for other in others:
        try:
            want = getattr(a.clone(), name)(other)
        except Exception as e:
            want = e
        for _ in range(3):
            x = a.to("neuron")
            y = other.to("neuron") if isinstance(other, torch.Tensor) else other
            if isinstance(want, Exception):
                with pytest.raises(type(want)):
                    getattr(x, name)(y)
            else:
                got = getattr(x, name)(y)
                assert got.dtype == want.dtype
                torch.testing.assert_close(got.cpu(), want)
            torch.neuron.synchronize()


@pytest.mark.parametrize("name", UNARY)
def test_unary_methods_agree_with_the_cpu(name):
    """Each method is the op of its name."""
    a = torch.tensor([0.5, 1.0, 2.0])
    for _ in range(3):
        torch.testing.assert_close(getattr(a.to("neuron"), name)().cpu(), getattr(a, name)())


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul])
def test_a_plain_tensor_on_the_left_is_torchs_own_case(op):
    """A number in a 0-dim CPU tensor is fine, a longer CPU tensor is PyTorch's error."""
    x = torch.ones(3).to("neuron")
    for _ in range(2):
        torch.testing.assert_close(
            op(torch.tensor(5.0), x).cpu(), op(torch.tensor(5.0), torch.ones(3))
        )
        with pytest.raises(RuntimeError, match="same device"):
            op(torch.ones(3), x)


def test_gradients_are_tracked(known):
    """With a gradient to track the operator is torch's own, on either side."""
    x, y = known
    w = y.clone().requires_grad_()
    for z in (x * w, w * x, w * 2.0, 2.0 * w, w.exp()):
        assert z.requires_grad
    with torch.no_grad():
        assert not (x * w).requires_grad
    (x * w).sum().backward()
    torch.testing.assert_close(w.grad.cpu(), x.cpu())


def test_modes_see_operators(known):
    """A dispatch mode, a function mode and a profiler are told of each."""
    x, y = known
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Dispatch():
        x * y, x.exp(), 2.0 * x
    assert seen == ["aten.mul.Tensor", "aten.exp.default", "aten.mul.Tensor"]
    seen.clear()
    with Function():
        x * y, x.exp()
    assert seen == ["mul", "exp"]
    with torch.device("neuron"), Function():
        x * y
    assert seen == ["mul", "exp", "mul"]
    with torch.profiler.profile() as p:
        x * y
    assert "aten::mul" in {e.key for e in p.key_averages()}


def test_transforms_see_operators(known):
    """vmap, jvp and forward-mode derivatives through captured and mapped tensors."""
    x, y = known
    got = torch.func.vmap(lambda a: a * y + x * y)(torch.stack([x, y]))
    want = torch.stack([x, y]).cpu() * y.cpu() + (x * y).cpu()
    torch.testing.assert_close(got.cpu(), want)
    _, tangent = torch.func.jvp(lambda a: a * y, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent.cpu(), y.cpu())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(dual * y).tangent
        torch.testing.assert_close(tangent.cpu(), y.cpu())


def test_a_trace_holds_operators(known):
    """torch.jit.trace would otherwise keep this call's result as a constant."""
    x, _ = known
    traced = torch.jit.trace(lambda a: a * 2.0, (x,), check_trace=False)
    assert "aten::mul" in str(traced.graph)


def test_an_operator_is_hashable_and_comparable(known):
    """`==` is elementwise and tensors still serve as dict keys."""
    x, _ = known
    assert {x: 1}[x] == 1
    assert (x == x.clone()).all().item()
    assert (x != None) is True  # noqa: E711 - what torch answers


def test_the_default_device_mode_does_not_count(known):
    """Inside `neuron_eager()` operators stay on the short path: nothing reaches the dispatcher."""
    from adaptive_eager.tensor import NeuronTensor

    x, y = known
    calls = []
    plain = NeuronTensor.__torch_dispatch__
    with neuron_eager():
        for _ in range(2):
            x * y
            torch.neuron.synchronize()
        NeuronTensor.__torch_dispatch__ = staticmethod(lambda *a: calls.append(a[0]) or plain(*a))
        try:
            x * y
        finally:
            NeuronTensor.__torch_dispatch__ = staticmethod(plain)
    assert not calls


@pytest.mark.parametrize("name", INPLACE)
def test_writes_in_place_count_versions(name):
    """Each is one version more, on views too; saved values notice; inference tensors stay torch's own case."""
    with neuron_eager(default_device=False):
        for _ in range(3):
            x, y = torch.ones(4).to("neuron"), torch.full((4,), 2.0).to("neuron")
            v, before = x[:2], x._version
            assert getattr(x, name)(y) is x
            getattr(v, name)(2.0)
            assert x._version == v._version == before + 2
            torch.neuron.synchronize()
        w = torch.ones(4).to("neuron").requires_grad_()
        z = w * x
        getattr(x, name)(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            getattr(w, name)(y)
        with torch.inference_mode():
            i = x * 1.0
            getattr(i, name)(2.0)
        with pytest.raises(RuntimeError, match="inference tensor"):
            getattr(i, name)(2.0)
