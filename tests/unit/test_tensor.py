"""NeuronTensor as a tensor: copies, views, data, pickling, modules."""

import copy
import io
import pickle

import torch

from adaptive_eager import neuron_eager

DEV = "neuron"


def test_plain_import_is_enough():
    """`import torch` alone makes the device; the module has what PyTorch asks for."""
    assert (
        torch.neuron.is_available()
        and torch.neuron.device_count() == 1
        and torch.neuron.current_device() == 0
    )
    assert torch.accelerator.current_accelerator().type == "neuron"
    assert torch.ones(3, device="neuron").neuron().device == torch.device("neuron", 0)


def test_there_and_back():
    """Values, strides and dtypes survive the way to the device and back."""
    for t in (
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.arange(5),
        torch.tensor(True),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.ones(0, 3),
    ):
        n = t.to(DEV)
        assert n.stride() == t.stride()
        assert torch.equal(n.cpu(), t)


def test_the_host_source_may_change_after_the_copy():
    """An upload copies at once: later writes to the source don't show."""
    t = torch.ones(1000)
    n = t.to(DEV)
    y = n + 1
    t.zero_()
    assert y.sum().item() == 2000


def test_data_shares_the_other_buffer():
    """x.data = y swaps values as well as metadata."""
    x, y = torch.zeros(3, device=DEV), torch.ones(2, 2, device=DEV)
    x.data = y
    assert x.shape == (2, 2) and x.tolist() == [[1, 1], [1, 1]]
    y.add_(1)
    assert x.tolist() == [[2, 2], [2, 2]]


def test_views_see_writes_in_order():
    """A write through any alias is seen by later reads of all, not by earlier ones."""
    base = torch.zeros(4, 4, device=DEV)
    row, col, flat = base[1], base[:, 2], base.view(-1)
    before = base + 0
    row.add_(1)
    col.mul_(5)
    flat[15] = 9
    want = torch.zeros(4, 4)
    want[1] += 1
    want[:, 2] *= 5
    want.view(-1)[15] = 9
    assert torch.equal(base.cpu(), want)
    assert before.sum().item() == 0


def test_in_place_view_ops():
    """t_, squeeze_, unsqueeze_, resize_ change the same tensor object."""
    x = torch.arange(6.0, device=DEV).view(2, 3)
    assert x.t_().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert x.unsqueeze_(0).shape == (1, 3, 2)
    y = torch.arange(4.0, device=DEV)
    y.resize_(6)
    assert y.shape == (6,) and y[:4].tolist() == [0, 1, 2, 3]


def test_out_arguments():
    """out= writes to the tensor given, resizing an empty one."""
    x = torch.arange(4.0, device=DEV)
    out = torch.empty(0, device=DEV)
    torch.add(x, 1, out=out)
    assert out.tolist() == [1, 2, 3, 4]
    whole = torch.zeros(2, 4, device=DEV)
    torch.mul(x, 2, out=whole[1])
    assert whole.tolist() == [[0, 0, 0, 0], [0, 2, 4, 6]]


def test_copies():
    """deepcopy, pickle and torch.save keep values and flags, views with an offset included."""
    x = torch.arange(6.0, device=DEV)[2:].requires_grad_()
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert y.tolist() == [2, 3, 4, 5] and y.requires_grad and y.device.type == DEV
    buffer = io.BytesIO()
    torch.save({"x": x.detach().cpu()}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["x"].tolist() == [2, 3, 4, 5]


def test_modules_move():
    """Module.to, parameters() and an optimizer step work; parameters stay Parameters."""
    m = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(DEV)
    assert all(isinstance(p, torch.nn.Parameter) and p.device.type == DEV for p in m.parameters())
    before = m[0].weight.detach().clone()
    opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    m(torch.randn(8, 4).to(DEV)).square().sum().backward()
    opt.step()
    assert not torch.equal(before.cpu(), m[0].weight.detach().cpu())
    m.eval()
    assert m(torch.randn(2, 4).to(DEV)).shape == (2, 3)
    m.to("cpu")
    assert m(torch.randn(2, 4)).device.type == "cpu"


def test_control_flow_and_python_protocols():
    """bool, int, float, len, iteration, format, indexing with masks."""
    x = torch.tensor([3.0, -1.0, 2.0], device=DEV)
    assert bool(x[0] > 0) and int(x[2]) == 2 and len(x) == 3
    assert [v.item() for v in x] == [3, -1, 2]
    assert f"{x.sum():.2f}" == "4.00"
    assert x[x > 0].tolist() == [3, 2]
    x[x < 0] = 7
    assert x.tolist() == [3, 7, 2]
    assert torch.nonzero(x > 2).flatten().tolist() == [0, 1]


def test_functorch():
    """grad, vmap and jvp from torch.func."""
    f = lambda v: (v.sin() * v).sum()
    x = torch.randn(5)
    torch.testing.assert_close(torch.func.grad(f)(x.to(DEV)).cpu(), torch.func.grad(f)(x))
    m = torch.randn(4, 5)
    torch.testing.assert_close(torch.func.vmap(f)(m.to(DEV)).cpu(), torch.func.vmap(f)(m))
    got = torch.func.jvp(f, (x.to(DEV),), (torch.ones(5, device=DEV),))[1]
    torch.testing.assert_close(got.cpu(), torch.func.jvp(f, (x,), (torch.ones(5),))[1])


def test_double_backward_and_checkpoint():
    """Second derivatives and activation checkpointing give the CPU's gradients."""
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(6)

    def second(v):
        v = v.detach().requires_grad_()
        (g,) = torch.autograd.grad((v.exp() * v).sum(), v, create_graph=True)
        return torch.autograd.grad(g.square().sum(), v)[0]

    def checked(v):
        v = v.detach().requires_grad_()
        checkpoint(lambda t: (t.tanh() * t).exp(), v, use_reentrant=False).sum().backward()
        return v.grad

    for f in (second, checked):
        torch.testing.assert_close(f(x.to(DEV)).cpu(), f(x), rtol=1e-5, atol=1e-5)


def test_an_upload_is_no_op():
    """Bytes go straight to the buffer: nothing is recorded, launched or moved twice."""
    with neuron_eager(default_device=False) as s:
        x = torch.ones(2, 3).to("neuron")
        y = torch.empty(2, 3, device="neuron").copy_(torch.zeros(2, 3))
        torch.neuron.synchronize()
    assert s.stats.ops == s.stats.launches == s.stats.hbm_written == 0
    assert s.stats.uploaded == 48
    assert (x + y).sum().item() == 6
