"""`neuron_eager`: modes, nesting, threads, and what a session tells."""

import threading

import pytest
import torch

from adaptive_eager import neuron_eager
from adaptive_eager.segment import SegmentText


def test_factories_follow_the_scope():
    """Inside, factories without a device make neuron tensors; an explicit device wins; outside all is as before."""
    with neuron_eager():
        assert torch.ones(2).device.type == "neuron"
        assert torch.tensor([1, 2]).device.type == "neuron"
        assert torch.arange(3).device.type == "neuron"
        assert torch.ones(2, device="cpu").device.type == "cpu"
        with neuron_eager(default_device=False):
            pass
        assert torch.zeros(1).device.type == "neuron"
    assert torch.ones(2).device.type == "cpu"
    with neuron_eager(default_device=False):
        assert torch.ones(2).device.type == "cpu"


def test_scopes_nest():
    """The inner scope's mode holds inside it; the outer one's afterwards; both count."""
    x = torch.ones(10, device="neuron")
    with neuron_eager("eager") as outer:
        x + 1
        with neuron_eager("adaptive") as inner:
            y = (x + 1) * 2
            assert inner.stats.launches == 0
        x + 1
        del y
    assert inner.stats.ops == 2
    assert outer.stats.ops == 4


def test_looking_at_metadata_does_not_flush():
    """Shape, strides, dtype and device of a pending tensor are known; printing its values is a read."""
    with neuron_eager() as session:
        y = torch.ones(3, 4) * 2
        assert (y.shape, y.dtype, y.device.type, y.stride()) == (
            (3, 4),
            torch.float32,
            "neuron",
            (4, 1),
        )
        assert session.stats.segments == 0
        text = repr(y)
        assert session.stats.cuts == {"value-read": 1}
    assert (
        text
        == "tensor([[2., 2., 2., 2.],\n        [2., 2., 2., 2.],\n        [2., 2., 2., 2.]], device='neuron:0')"
    )


def test_repr_tells_what_torch_tells():
    """dtype, requires_grad, grad_fn and emptiness appear as for any device."""
    assert "dtype=torch.float64" in repr(torch.ones(1, dtype=torch.float64, device="neuron"))
    x = torch.ones(1, device="neuron", requires_grad=True)
    assert "requires_grad=True" in repr(x)
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    assert repr(torch.ones(0, 3, device="neuron")) == "tensor([], device='neuron:0', size=(0, 3))"


def test_cuts_name_cause_and_line():
    """Each cut has its cause and the user's file and line."""
    x = torch.ones(4, device="neuron")
    with neuron_eager() as session:
        (x + 1).sum().item()
        y = x + 2
        torch.neuron.synchronize()
        z = x + 3
    causes = [c.cause for c in session.cuts]
    assert causes == ["value-read", "synchronize", "session"]
    assert all("test_session.py:" in c.where for c in session.cuts)
    del y, z


def test_fallbacks_are_counted():
    """An op without a kernel runs on the CPU, as a node of the tape, counted by name."""
    x = torch.rand(8, 8).to("neuron")
    with neuron_eager() as session:
        y = torch.linalg.matrix_exp(x * 0.1) + 1
        assert session.stats.segments == 0
        y.sum().item()
    assert session.fallbacks == {"aten.linalg_matrix_exp.default": 1}
    assert session.stats.fallbacks == 1


def test_segments_print_and_parse():
    """A segment's text parses back to the same segment."""
    with neuron_eager() as session:
        x = torch.ones(4, 6)
        y = torch.softmax(x.t() * 2, dim=-1)
        y.add_(1.5, alpha=2)
        torch.cat([y, y]).sum([0], keepdim=True).cpu()
    for segment in session.segments:
        assert SegmentText.parse(str(segment)) == segment


def test_kernels_show_their_source():
    """A kernel keeps its loop IR and a readable loop nest."""
    x = torch.ones(100, device="neuron")
    with neuron_eager() as session:
        torch.relu(x * 2).sum().item()
    (kernel,) = session.kernels
    assert "for row in rows" in kernel.source and "p0[row, col]" in kernel.source
    assert "mul" in str(kernel.kernel)


def test_threads_share_the_device():
    """Eight threads compute at once and get their own right results."""
    results = {}

    def work(k):
        torch.manual_seed(k)
        x = torch.full((50, 50), float(k), device="neuron")
        for _ in range(20):
            x = torch.tanh(x * 0.5) + k
        results[k] = x.mean().item()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(8):
        x = torch.tensor(float(k))
        for _ in range(20):
            x = torch.tanh(x * 0.5) + k
        assert results[k] == pytest.approx(x.item(), rel=1e-5)


def test_seeds_do_not_depend_on_the_mode():
    """The same seed gives the same numbers in every mode, and leaves the CPU's generator alone."""
    before = torch.get_rng_state()
    out = []
    for mode in ("adaptive", "eager", "blocking"):
        torch.neuron.manual_seed(7)
        with neuron_eager(mode):
            a = torch.rand(100)
            torch.randn(10)  # never read
            b = torch.nn.functional.dropout(torch.ones(100), 0.5)
            out.append((a.cpu(), b.cpu()))
    assert all(torch.equal(out[0][0], a) and torch.equal(out[0][1], b) for a, b in out)
    assert torch.equal(before, torch.get_rng_state())
    assert 0.3 < out[0][1].count_nonzero() / 100 < 0.7


def test_memory_statistics():
    """allocated counts live tensors; freeing gives back; the peak stays until it is reset."""
    torch.neuron.synchronize()
    base = torch.neuron.memory_allocated()
    x = torch.ones(1 << 20, device="neuron")
    torch.neuron.synchronize()
    assert torch.neuron.memory_allocated() - base == 4 << 20
    del x
    assert torch.neuron.memory_allocated() == base
    assert torch.neuron.max_memory_allocated() >= base + (4 << 20)
    torch.neuron.reset_peak_memory_stats()
    assert torch.neuron.max_memory_allocated() == base
    free, total = torch.neuron.mem_get_info()
    assert 0 < free <= total
