"""Accuracy of the vector math: largest error in ULP against float64."""

import numpy as np
import pytest
from adaptive_eager.kernels.build import fn

from .harness import kernel, run_flat

RANGES = {
    "exp": (-103, 88.7, 1.5), "expm1": (-20, 88, 1.5), "log": (1e-38, 1e30, 1.5), "log1p": (-0.999, 1e6, 1.5),
    "tanh": (-10, 10, 2.6), "sigmoid": (-87, 87, 2.6), "erf": (-5, 5, 1.5), "sin": (-1e4, 1e4, 1.6), "cos": (-1e4, 1e4, 1.6),
    "atan": (-50, 50, 1), "log2": (1e-30, 1e30, 1), "exp2": (-120, 120, 1),
}  # fmt: skip


def reference(name, x):
    if name == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if name == "erf":
        import math

        return np.vectorize(math.erf)(x)
    return {"atan": np.arctan}.get(name, getattr(np, name, None))(x)


def apply(name, x):
    y = np.zeros_like(x)
    run_flat(
        kernel(lambda b: b.store(fn(name, b.load(0, "f32")), 1), [("f32", "unit")] * 2), [x, y]
    )
    return y


@pytest.mark.parametrize("name", RANGES)
def test_ulp(name):
    """The error stays within the function's stated bound over its range, near zero included."""
    lo, hi, bound = RANGES[name]
    rng = np.random.default_rng(2)
    n = 200_000
    x = rng.uniform(lo, hi, n)
    if lo > 0:
        x = np.exp(rng.uniform(np.log(lo), np.log(hi), n))
    else:
        x[: n // 4] = rng.uniform(max(lo, -1), 1, n // 4) ** 3
    x = x.astype(np.float32)
    y = apply(name, x).astype(np.float64)
    want = reference(name, x.astype(np.float64))
    ulp = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    worst = np.max(np.abs(y - want) / ulp)
    print(f"{name:8} {worst:.2f} ULP")
    assert worst <= bound, f"{name}: {worst} ULP at {x[np.argmax(np.abs(y - want) / ulp)]!r}"


@pytest.mark.parametrize(
    "name", ["exp", "exp2", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "sin", "cos"]
)
def test_special_values(name):
    """Zeros, infinities, NaN, subnormals and huge arguments give what float64 gives, rounded."""
    x = np.array(
        [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            1e-45,
            -1e-45,
            3e38,
            -3e38,
            1e5,
            -1e7,
            -1.0,
            -2.0,
            1.0,
        ],
        np.float32,
    )
    with np.errstate(all="ignore"):
        want = reference(name, x.astype(np.float64)).astype(np.float32)
    got = apply(name, x)
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=1e-45)
    exact = (want == 0) | ~np.isfinite(want)
    np.testing.assert_array_equal(
        np.signbit(got[exact & ~np.isnan(want)]), np.signbit(want[exact & ~np.isnan(want)])
    )


def test_a_vector_lane_and_a_scalar_agree():
    """A function has the same bits in a row value (one scalar) as in the lanes of a block."""
    from .harness import run_rows

    x = np.random.default_rng(3).standard_normal(40).astype(np.float32)
    for name in ("exp", "log", "tanh", "erf", "sigmoid", "sin"):
        y = np.zeros((40, 3), np.float32)
        k = kernel(
            lambda b, f=name: b.store(fn(f, b.load(0, "f32")), 1),
            [("f32", "zero"), ("f32", "unit")],
        )
        run_rows(k, [x, y], 40, 3, [(1, 0), (3, 1)])
        np.testing.assert_array_equal(y[:, 1], apply(name, x))


def test_a_lane_does_not_depend_on_its_neighbours():
    """A huge argument beside it, which takes the slow path, leaves a small one's bits alone."""
    small = np.random.default_rng(4).uniform(-20, 20, 320).astype(np.float32)
    for name in ("sin", "cos"):
        mixed = small.copy()
        mixed[::7] = 1e6
        alone, beside = apply(name, small), apply(name, mixed)
        keep = np.arange(320) % 7 != 0
        np.testing.assert_array_equal(alone[keep], beside[keep])
        np.testing.assert_allclose(beside[::7], reference(name, np.float64(1e6)), rtol=1e-6)


def test_known_arguments_change_nothing():
    """pow with an exponent that the compiler can see has the bits of one that it cannot."""
    x = np.abs(np.random.default_rng(5).standard_normal(200)).astype(np.float32)
    for p in (2.0, 0.5, 3.0, -1.0):
        e = np.full(200, p, np.float32)
        loaded, known = np.zeros_like(x), np.zeros_like(x)
        operands = [("f32", "unit")] * 3
        run_flat(
            kernel(lambda b: b.store(fn("pow", b.load(0, "f32"), b.load(1, "f32")), 2), operands),
            [x, e, loaded],
        )
        run_flat(
            kernel(
                lambda b, p=p: b.store(fn("pow", b.load(0, "f32"), b.const(p, "f32")), 1),
                operands[:2],
            ),
            [x, known],
        )
        np.testing.assert_array_equal(loaded, known)
