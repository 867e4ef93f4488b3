"""Random ops: right distributions, and draws that depend on nothing but seed and program order."""

import math

import pytest
import torch
import torch.nn.functional as F

from adaptive_eager import neuron_eager

N = 200_000
DRAWS = {
    "rand": lambda d: torch.rand(N, device=d),
    "rand f64": lambda d: torch.rand(N, device=d, dtype=torch.float64),
    "rand bf16": lambda d: torch.rand(N, device=d, dtype=torch.bfloat16),
    "randn": lambda d: torch.randn(N, device=d),
    "randn f64": lambda d: torch.randn(N // 8, device=d, dtype=torch.float64),
    "uniform_": lambda d: torch.empty(N, device=d).uniform_(-3.0, 5.0),
    "normal_": lambda d: torch.empty(N, device=d).normal_(2.0, 3.0),
    "bernoulli_": lambda d: torch.empty(N, device=d).bernoulli_(0.3),
    "bernoulli_ bool": lambda d: torch.empty(N, device=d, dtype=torch.bool).bernoulli_(0.3),
    "bernoulli_ int": lambda d: torch.empty(N, device=d, dtype=torch.int32).bernoulli_(0.3),
    "bernoulli": lambda d: torch.bernoulli(torch.full((N,), 0.3, device=d)),
    "dropout": lambda d: F.dropout(torch.ones(N, device=d), 0.3),
    "transposed": lambda d: torch.empty(400, 500, device=d).t().uniform_(),
    "randint": lambda d: torch.randint(0, 10, (N,), device=d),
}


@pytest.mark.parametrize("name", DRAWS)
def test_distributions(name):
    """Mean, deviation and range as the CPU's, within five standard errors; two draws are independent."""
    with neuron_eager(default_device=False):
        torch.neuron.manual_seed(0)
        a, b = (DRAWS[name]("neuron").cpu().double().ravel() for _ in range(2))
    torch.manual_seed(0)
    want = DRAWS[name]("cpu").double().ravel()
    n, sigma = a.numel(), want.std().item()
    assert abs(a.mean().item() - want.mean().item()) < 5 * sigma * math.sqrt(2 / n)
    assert a.std().item() == pytest.approx(sigma, rel=0.02)
    assert a.min() >= want.min() - sigma and a.max() <= want.max() + sigma
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 5 / math.sqrt(n)
    assert abs(torch.corrcoef(torch.stack([a[1:], a[:-1]]))[0, 1].item()) < 5 / math.sqrt(n)


def test_uniform_and_normal_quantiles():
    """Kolmogorov and Smirnov's distance from the exact distribution, at a level of one in a million."""
    with neuron_eager(default_device=False):
        torch.neuron.manual_seed(1)
        u, z = torch.rand(N, device="neuron").cpu(), torch.randn(N, device="neuron").cpu()
    for p in (u.double(), torch.special.ndtr(z.double())):
        p = p.sort().values
        steps = torch.arange(1, N + 1, dtype=torch.float64) / N
        distance = torch.maximum((steps - p).max(), (p - steps + 1 / N).max()).item()
        assert distance < math.sqrt(-0.5 * math.log(1e-6 / 2) / N)


def test_half_uniforms_stay_below_one():
    """Rounding never reaches the upper end."""
    with neuron_eager(default_device=False):
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.rand(N, device="neuron", dtype=dtype).cpu()
            assert x.max() < 1 and x.min() >= 0


@pytest.mark.parametrize("name", DRAWS)
def test_draws_do_not_depend_on_mode_or_fusion(name):
    """The same numbers in every mode, alone or with neighbours, and on any number of threads."""
    results = []
    threads = torch.get_num_threads()
    for mode, count, fused in (
        ("adaptive", 1, False),
        ("adaptive", 2, True),
        ("eager", 2, True),
        ("blocking", 1, True),
    ):
        torch.set_num_threads(count)
        try:
            with neuron_eager(mode, default_device=False):
                torch.neuron.manual_seed(3)
                torch.rand(3, device="neuron")
                x = DRAWS[name]("neuron")
                results.append((x + 1 if fused else x).cpu() + (0 if fused else 1))
        finally:
            torch.set_num_threads(threads)
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_a_transposed_tensor_draws_by_index():
    """What an element gets depends on its place in the tensor, not in memory."""
    with neuron_eager(default_device=False):
        torch.neuron.manual_seed(0)
        a = torch.empty(40, 50, device="neuron").uniform_().cpu()
        torch.neuron.manual_seed(0)
        b = torch.empty(50, 40, device="neuron").t().uniform_().cpu()
    assert torch.equal(a, b)


def test_dropout_fuses_with_its_neighbours():
    """Linear's bias, GELU, dropout and the residual are one launch, and nothing falls back."""
    x, r, b = (torch.randn(64, 128).to("neuron") for _ in range(3))
    with neuron_eager(default_device=False) as s:
        y = F.dropout(F.gelu(x + b), 0.1) + r
        torch.neuron.synchronize()
    assert s.stats.launches == 1 and s.fallbacks == {}
    assert s.stats.hbm_read == 3 * 64 * 128 * 4
    del y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_values_and_gradient(dtype):
    """Kept elements are scaled as on the CPU; the gradient passes where they were kept."""
    h = torch.randn(1000).to(dtype)
    with neuron_eager(default_device=False):
        x = h.to("neuron").requires_grad_()
        y = F.dropout(x, 0.25)
        y.sum().backward()
        y, g = y.detach().cpu(), x.grad.cpu()
    scale = torch.tensor(1 / 0.75, dtype=torch.float32)
    kept = g != 0
    assert torch.equal(
        y, torch.where(kept, (h.float() * scale).to(dtype), torch.zeros((), dtype=dtype))
    )
    assert torch.equal(g[kept], scale.to(dtype).expand(int(kept.sum())))
    assert 0.7 < kept.float().mean() < 0.8


def test_ends_of_the_range():
    """p of 0 and 1, and evaluation."""
    with neuron_eager(default_device=False):
        x = torch.ones(100).to("neuron")
        assert F.dropout(x, 0.0).cpu().eq(1).all() and F.dropout(x, 1.0).cpu().eq(0).all()
        assert F.dropout(x, 0.5, training=False).cpu().eq(1).all()
        out, mask = torch.native_dropout(x, 1.0, True)
        assert not mask.cpu().any() and out.cpu().eq(0).all()
        assert (
            x.clone().bernoulli_(0.0).cpu().eq(0).all()
            and x.clone().bernoulli_(1.0).cpu().eq(1).all()
        )


@pytest.mark.parametrize(
    "bad",
    [
        lambda x: x.bernoulli_(1.5),
        lambda x: x.uniform_(2.0, 1.0),
        lambda x: x.normal_(0.0, -1.0),
        lambda x: x.bernoulli_(-0.1),
        lambda x: torch.native_dropout(x, 2.0, True),
    ],
)
def test_bad_numbers_are_refused_at_the_call(bad):
    """Also where the same call with good numbers is known."""
    for _ in range(2):
        with pytest.raises(RuntimeError) as want:
            bad(torch.ones(3))
        x = torch.ones(3).to("neuron")
        (
            x.bernoulli_(0.5),
            x.uniform_(0.0, 1.0),
            x.normal_(0.0, 1.0),
            torch.native_dropout(x, 0.5, True),
        )
        with pytest.raises(RuntimeError) as got:
            bad(x)
        assert str(got.value).splitlines()[0] == str(want.value).splitlines()[0]


def test_other_lengths_compile_nothing():
    """Sizes are run-time values of random kernels too."""
    with neuron_eager(default_device=False):
        for n in (5000, 6000):
            (
                F.dropout(torch.ones(n, 3).to("neuron"), 0.1).cpu(),
                torch.rand(n, device="neuron").cpu(),
            )
        with neuron_eager(default_device=False) as s:
            for n in range(7000, 7010):
                (
                    F.dropout(torch.ones(n, 3).to("neuron"), 0.2).cpu(),
                    torch.rand(n, device="neuron").cpu(),
                )
        assert s.stats.kernels_compiled == 0
