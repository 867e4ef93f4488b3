"""How many launches a program needs and how many bytes it moves: fusion, counted."""

import pytest
import torch
import torch.nn.functional as F

from adaptive_eager import neuron_eager

N = 1_000_000


def on_device(*shape):
    x = torch.randn(*shape).to("neuron")
    torch.neuron.synchronize()
    return x


def measure(f, *args, **options):
    """(stats, result on the CPU) of f run in a session of its own."""
    with neuron_eager(default_device=False, **options) as session:
        y = f(*args)
        torch.neuron.synchronize()
    return session.stats, y


def test_nothing_runs_before_the_read():
    """x*a+b → gelu → *c → sum records no launch before `.item()` and then takes one."""
    x = on_device(N)
    with neuron_eager(default_device=False) as session:
        y = (F.gelu(x * 1.5 + 0.5) * 2.0).sum()
        assert session.stats.launches == 0
        y.item()
        assert session.stats.launches <= 2
    assert session.stats.hbm_read == 4 * N


def test_norm_gelu_residual_keeps_everything_on_chip():
    """LayerNorm + GELU + residual reads its inputs once, writes its result once, and nothing else."""
    x, w, b = on_device(512, 256), on_device(256), on_device(256)
    stats, _ = measure(lambda: F.gelu(F.layer_norm(x, (256,), w, b)) + x)
    assert stats.launches == 1
    assert stats.hbm_read == x.nbytes + w.nbytes + b.nbytes
    assert stats.hbm_written == x.nbytes


def test_eager_mode_pays_for_every_intermediate():
    """One kernel an op: each intermediate is written and read again."""
    x = on_device(1000)
    stats, _ = measure(lambda: ((x + 1) * 2).exp(), mode="eager")
    assert stats.launches == 3
    assert stats.hbm_read == stats.hbm_written == 3 * x.nbytes


PROGRAMS = {
    "softmax": (lambda x: F.softmax(x * 0.5, -1), 1),
    "log_softmax": (lambda x: F.log_softmax(x, -1), 1),
    "rms norm": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), 1),
    "layer norm by hand": (
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
        1,
    ),
    "two chains that meet": (lambda x: (x * 2).exp() + (x * 3).tanh(), 1),
    "bias by columns": (lambda x: (x * 2).sum(0), 1),
    "sum then scale": (lambda x: x.sum() / 7 + 1, 1),
    "transposed": (lambda x: x.t() + 1, 1),
    "in place": (lambda x: x.clone().mul_(2).add_(1), 1),
    "views of views": (lambda x: (x.view(-1)[: 64 * 32].view(64, 32) * 2).t().exp(), 1),
    "casts": (lambda x: (x.bfloat16() * 2).float(), 1),
    "where": (lambda x: torch.where(x > 0, x, x * 0.1), 1),
    "matmul with epilogue": (lambda x: torch.relu(x @ x.t()) * 2, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_launch_counts(name):
    """Each program takes exactly the launches its fusion allows, and no fallback."""
    f, launches = PROGRAMS[name]
    x = on_device(96, 64)
    stats, y = measure(f, x)
    assert stats.launches == launches
    assert stats.fallbacks == 0
    torch.testing.assert_close(y.cpu(), f(x.cpu()), rtol=1e-5, atol=1e-5)


def test_cross_entropy_forward_and_backward():
    """Cross entropy is one kernel forward and one backward."""
    x, t = on_device(64, 100).requires_grad_(), torch.randint(0, 100, (64,)).to("neuron")
    stats, loss = measure(lambda: F.cross_entropy(x, t))
    assert stats.launches == 1
    stats, _ = measure(loss.backward)
    assert stats.launches <= 2
    y = x.detach().cpu().requires_grad_()
    F.cross_entropy(y, t.cpu()).backward()
    torch.testing.assert_close(x.grad.cpu(), y.grad)


def test_layer_norm_backward_is_one_kernel():
    """Row sums for x and column sums for weight and bias come from one pass."""
    x, w, b = (on_device(*s).requires_grad_() for s in ((300, 64), (64,), (64,)))
    g = on_device(300, 64)
    y = F.layer_norm(x, (64,), w, b)
    torch.neuron.synchronize()
    stats, _ = measure(lambda: y.backward(g))
    assert stats.launches == 1


def test_a_loop_compiles_once():
    """Equal steps share kernels and plans; a scalar that changes is an argument."""
    x = on_device(1000)

    def step(k):
        return (x * (0.1 * k) + 1).exp().sum().item()

    step(1)
    with neuron_eager(default_device=False) as session:
        for k in range(20):
            step(k)
    assert session.stats.kernels_compiled == 0
    assert session.stats.launches == 20


def test_new_shapes_compile_nothing():
    """Kernels take sizes at run time: 30 lengths after the first compile no kernel."""

    def f(n):
        x = torch.ones(n, 48, device="neuron")
        return F.softmax(F.layer_norm(x * 2, (48,)), -1).sum().item()

    f(64)
    f(65)
    with neuron_eager(default_device=False) as session:
        for n in range(100, 130):
            f(n)
    assert session.stats.kernels_compiled == 0


def test_a_loop_that_never_reads_aligns_with_itself():
    """Cuts by length fall at the same place of a loop, so its plans are found again."""
    from adaptive_eager.record import TAPE

    x = on_device(64)
    with neuron_eager(default_device=False, max_ops=50) as session:
        y = x
        for k in range(400):
            y = torch.tanh(y * 1.1 + 0.3)
            y = y - y.mean()
            if k == 200:
                nodes = TAPE.nodes
        torch.neuron.synchronize()
        later = TAPE.nodes - nodes
    assert session.stats.cuts["length"] >= 20
    assert later < 60, "the second half of the loop should walk known trie nodes"


def test_dead_results_never_touch_memory():
    """A result nobody keeps is neither stored nor allocated."""
    x = on_device(1000)
    before = torch.neuron.memory_stats()["allocation.all.allocated"]
    stats, _ = measure(lambda: [(x * 2).exp() for _ in range(5)] and None)
    assert stats.launches == 0
    assert torch.neuron.memory_stats()["allocation.all.allocated"] == before


def test_integer_indices_are_recorded():
    """x[i] with integer tensors cuts nothing and goes to no CPU; a mask, whose result's size it decides, does both."""
    x, i = torch.randn(6, 5), torch.tensor([[0, 3], [-1, 2]])
    a, j = x.to("neuron"), i.to("neuron")
    with neuron_eager(default_device=False) as s:
        results = [a[j], a[:, j.clamp(0, 4)], a[j, j.clamp(0, 4)]]
        assert s.stats.segments == 0
        for got, want in zip(
            results, [x[i], x[:, i.clamp(0, 4)], x[i, i.clamp(0, 4)]], strict=True
        ):
            assert torch.equal(got.cpu(), want)
        assert s.fallbacks == {}
        assert torch.equal(a[a > 0].cpu(), x[x > 0])
        assert s.fallbacks == {"aten.index.Tensor": 1}
    bad = a[torch.tensor([9]).to("neuron")]
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        bad.cpu()


def test_transposed_operands_are_read_in_blocks():
    """Of x.t() and y one lies across the rows: the kernel turns it. Small ones, and written ones, are read as they lie."""
    x, y = torch.randn(40, 50).to("neuron"), torch.randn(50, 40).to("neuron")
    with neuron_eager(default_device=False) as s:
        z = x.t() * 2 + y
        torch.neuron.synchronize()
    assert sorted(o.inner for o in s.kernels[-1].kernel.operands) == ["turn", "unit", "unit"]
    with neuron_eager(default_device=False) as s:
        w = x[:9].t() * 2
        v = x.t().mul_(2)
        torch.neuron.synchronize()
    assert all(o.inner != "turn" for k in s.kernels for o in k.kernel.operands)
    assert z is not None and w is not None and v is not None


def test_kernels_hold_nothing_in_vain():
    """A reduction whose result is dead is not computed for the sake of the rest of its group."""
    x = torch.randn(8, 64).to("neuron")
    with neuron_eager(default_device=False) as s:
        y = x * 2
        dead = y.sum() + y.sum(-1).amax()
        del dead
        torch.neuron.synchronize()
    (kernel,) = [k.kernel for k in s.kernels]
    assert {i.op for i in kernel.insts} <= {"load", "store", "mul", "scalar", "cast", "const"}
    assert y is not None


def test_host_views_are_found_again():
    """A library kernel that runs on the same memory again uses the tensors it used before."""
    from adaptive_eager.memory import memory

    x = torch.randn(8, 8).to("neuron")
    torch.neuron.synchronize()
    first = memory().view(x._buf, x._meta)
    assert memory().view(x._buf, x._meta) is first and first.data_ptr() == x._buf.block.address
    assert memory().view(x._buf, x.t()._meta) is not first
