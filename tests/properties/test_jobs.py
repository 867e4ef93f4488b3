"""Equal kernels side by side run as one launch, and no order that matters is lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_eager import neuron_eager

SHAPES = [(3,), (4, 5), (1,), (70,), (300,), (2, 3, 4), (5000,)]
# Values stay small: the CPU is compared within rounding, and nothing here amplifies it.
ALONE = ["{x}.mul_(0.5).add_(1)", "{x} = {x} * 2 - 1", "{x} = ({x} * {x}).exp().clamp(max=2)",
         "{x} = {x} / (torch.linalg.vector_norm({x}) + 1)", "{x} = {x} - {x}.mean()"]  # fmt: skip
PAIRS = ["{x} = {x} + {y}.mean()", "{x}.add_({y}.amax())", "{y}.copy_({x}.mean() * torch.ones_like({y}))",
         "{x} = {x} * {y}.reshape(-1)[0]"]  # fmt: skip
EVERY = ["torch._foreach_mul_(ts, 0.75)", "ns = torch._foreach_norm(ts); torch._foreach_mul_(ts, 1 / (torch.stack(ns).sum() + 1))",
         "torch._foreach_add_(ts, 0.125)", "torch._foreach_lerp_(ts, [t * 0 + 1 for t in ts], 0.1)"]  # fmt: skip


@st.composite
def sources(draw):
    """A program on tensors t0, t1, ...: ops on one, on two of them, on all."""
    count = draw(st.integers(2, 6))
    names = [f"t{k}" for k in range(count)]
    lines = []
    for _ in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["each", "each", "alone", "pair", "every", "view"]))
        x, y = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        if kind == "each":
            op = draw(st.sampled_from(ALONE))
            lines += [op.format(x=n) for n in draw(st.permutations(names))]
        elif kind == "alone":
            lines.append(draw(st.sampled_from(ALONE)).format(x=x))
        elif kind == "pair":
            lines.append(draw(st.sampled_from(PAIRS)).format(x=x, y=y))
        elif kind == "view":
            lines.append(f"{x} = {y}.view(-1)[: max(1, {y}.numel() // 2)]")
        else:
            lines.append(f"ts = [{', '.join(names)}]; " + draw(st.sampled_from(EVERY)))
    return names, "\n".join(lines), draw(st.lists(st.sampled_from(SHAPES), min_size=6, max_size=6))


def run(names, source, shapes, device):
    g = torch.Generator().manual_seed(1)
    scope = {"torch": torch}
    for n, shape in zip(names, shapes, strict=False):
        scope[n] = torch.randn(shape, generator=g).to(device)
    exec(source, scope)
    return [scope[n].cpu() for n in names]


@given(sources())
def test_tables_of_jobs_keep_every_order(program):
    """One kernel an op, fused, and fused with tables of jobs: the same bits; the CPU's values within rounding."""
    with neuron_eager("blocking", default_device=False):
        want = run(*program, "neuron")
    for options in (dict(), dict(), dict(max_ops=7)):
        with neuron_eager(default_device=False, **options):
            got = run(*program, "neuron")
        for x, y in zip(want, got, strict=True):
            assert x.numpy().tobytes() == y.numpy().tobytes(), program[1]
    for x, y in zip(run(*program, "cpu"), want, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("count", [2, 40, 90])
def test_an_optimizer_step_is_a_few_launches(count):
    """AdamW with clipping launches as often for 90 parameters as for 2."""
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(3 + k % 5, 1 + k % 7).to("neuron")) for k in range(count)]
    optimizer = torch.optim.AdamW(ps, lr=1e-3)
    for p in ps:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        torch.neuron.synchronize()
        with neuron_eager(default_device=False) as s:
            torch.nn.utils.clip_grad_norm_(ps, 1.0)
            optimizer.step()
    assert s.stats.launches <= 10


def test_a_lost_job_leaves_the_others():
    """A job whose input failed is an error where its result is read; the other jobs of the table are right."""
    good = [torch.ones(5).to("neuron") for _ in range(3)]
    places = torch.tensor([0, 9, 1, 2, 3]).to("neuron")
    bad = torch.gather(torch.ones(5).to("neuron"), 0, places)  # 9 is found when it runs
    results = [x * 2 + 1 for x in (good[0], bad, good[1], good[2])]
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.neuron.synchronize()
    for k in (0, 2, 3):
        assert results[k].tolist() == [3.0] * 5
    with pytest.raises(RuntimeError, match="out of bounds"):
        results[1].tolist()
