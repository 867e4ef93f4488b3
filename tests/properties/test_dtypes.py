"""Pointwise ops over dtypes, layouts and broadcasts, against the CPU."""

import torch
from hypothesis import given
from hypothesis import strategies as st

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
BINARY = [
    torch.add,
    torch.mul,
    torch.maximum,
    torch.minimum,
    torch.eq,
    torch.lt,
    torch.ge,
    torch.true_divide,
    torch.logical_and,
    torch.sub,
]
LAYOUTS = [
    lambda t: t,
    lambda t: t.t().contiguous().t(),
    lambda t: torch.cat([t, t], 1)[:, ::2] if t.shape[1] > 1 else t,
    lambda t: t[:1].expand(t.shape),
    lambda t: t[:, :1],
]


def make(dtype, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 9, generator=g) * 3
    return (
        x > 0 if dtype is torch.bool else x.abs().to(dtype) if dtype is torch.uint8 else x.to(dtype)
    )


def outcome(f):
    try:
        return f()
    except (RuntimeError, TypeError, NotImplementedError) as e:
        return type(e)


@given(
    st.sampled_from(BINARY),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 3),
)
def test_binary(op, p, q, lay_x, lay_y, seed):
    """Dtype promotion, rounding and strides of results are the CPU's, exactly; so is the refusal of a dtype."""
    x, y = lay_x(make(p, seed)), lay_y(make(q, seed + 9))
    want = outcome(lambda: op(x, y))
    got = outcome(lambda: op(x.to("neuron"), y.to("neuron")))
    if isinstance(want, type):
        assert got is want
        return
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.equal(got.cpu(), want) or torch.equal(got.cpu().isnan(), want.isnan())


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 3))
def test_casts(p, q, seed):
    """`.to(dtype)` between any two dtypes is exact."""
    x = make(p, seed)
    assert torch.equal(x.to("neuron").to(q).cpu(), x.to(q))


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([2, 2.5, True, -3]),
    st.sampled_from(["add", "mul", "sub", "gt", "eq"]),
    st.integers(0, 3),
)
def test_numbers(dtype, number, name, seed):
    """Python numbers promote by kind: 1, 1.0 and True are different."""
    x = make(dtype, seed)
    want = outcome(lambda: getattr(x, name)(number))
    got = outcome(lambda: getattr(x.to("neuron"), name)(number))
    if isinstance(want, type):
        assert got is want
    else:
        assert got.dtype == want.dtype
        assert torch.equal(got.cpu(), want)


@given(
    st.sampled_from([torch.sum, torch.mean, torch.amax, torch.var]),
    st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]),
    st.booleans(),
    st.sampled_from([(2, 3, 40), (1, 1, 5), (4, 1, 33), (3, 5, 1)]),
)
def test_reductions(op, dims, keep, shape):
    """Reductions over any dims, contiguous and transposed, are within rounding of float64's."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for t in (x, x.transpose(0, 2).contiguous().transpose(0, 2)):
        got = op(t.to("neuron"), dims, keepdim=keep)
        want = op(x.double(), dims, keepdim=keep).float()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
