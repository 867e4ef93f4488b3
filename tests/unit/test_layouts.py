"""Sparse and nested tensors on `neuron`: the CPU's answers, by counted fallbacks, with gradients."""

import copy
import pickle

import pytest
import torch
from torch import nn

from adaptive_eager import neuron_eager

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
X = torch.tensor([[0.0, 1, 2], [3, 0, 0]])


def same(a, b):
    assert a.layout is b.layout and a.device.type == "neuron"
    torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize(
    "f",
    [
        lambda s: s + s,
        lambda s: s * 2,
        lambda s: s.t(),
        lambda s: s.coalesce(),
        lambda s: s.to_dense(),
        lambda s: torch.sparse.sum(s, 0),
        lambda s: torch.sparse.mm(s, torch.ones(3, 2, device=s.device)),
        lambda s: torch.mm(s, torch.ones(3, 2, device=s.device)),
        lambda s: torch.ones(4, 2, device=s.device) @ s.to_dense(),
        lambda s: s.coalesce().indices(),
        lambda s: s.coalesce().values().sum(),
    ],
)
def test_coordinates(f):
    """Ops of COO tensors, made on the device and moved to it."""
    want = f(X.to_sparse())
    same(f(X.to("neuron").to_sparse()), want)
    same(f(X.to_sparse().to("neuron")), want)


def test_rows():
    """CSR tensors made on the device."""
    c = X.to("neuron").to_sparse_csr()
    assert c.is_sparse_csr and c.layout is torch.sparse_csr
    same(c.crow_indices(), X.to_sparse_csr().crow_indices())
    same(c @ torch.ones(3, 2, device="neuron"), X.to_sparse_csr() @ torch.ones(3, 2))


def test_gradients_and_sparse_adam():
    """An embedding's sparse gradient, and the optimizer that takes it."""

    def train(device):
        torch.manual_seed(0)
        e = nn.Embedding(10, 4, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(e.parameters(), lr=0.1)
        for ids in ([1, 2, 2], [3, 1]):
            optimizer.zero_grad()
            e(torch.tensor(ids, device=device)).square().sum().backward()
            assert e.weight.grad.is_sparse
            optimizer.step()
        return e.weight.detach()

    same(train("neuron"), train("cpu"))


def test_a_sparse_leaf():
    """Backward gives a sparse gradient."""
    s = X.to("neuron").to_sparse().requires_grad_()
    torch.sparse.mm(s, torch.ones(3, 2, device="neuron")).sum().backward()
    assert s.grad.is_sparse and s.grad.device.type == "neuron"


def test_copies_and_text():
    """deepcopy, pickle, repr."""
    s = X.to_sparse().to("neuron")
    for other in (copy.deepcopy(s), pickle.loads(pickle.dumps(s))):
        same(other, X.to_sparse())
    assert "device='neuron:0'" in repr(s) and "nnz=3" in repr(s)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(layout):
    """Nested tensors of both layouts."""

    def run(device):
        x = X.to(device)
        n = torch.nested.nested_tensor([x[0], x[1, :2]], layout=layout)
        return [(n * 2).to_padded_tensor(-1.0), *(n + 1).unbind()]

    for a, b in zip(run("neuron"), run("cpu"), strict=True):
        same(a, b)


def test_they_count_as_fallbacks():
    """As any op that the CPU runs."""
    with neuron_eager() as session:
        s = X.to("neuron").to_sparse()
        s + s
    assert session.fallbacks == {"aten._to_sparse.default": 1, "aten.add.Tensor": 1}
