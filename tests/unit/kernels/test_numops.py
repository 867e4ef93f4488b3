"""Arithmetic on arrays has one rounding where the loop IR has one."""

import ctypes
import ctypes.util

import numpy as np
from adaptive_eager.kernels.numops import cast, extreme, fma32, narrow, widen
from hypothesis import example, given
from hypothesis import strategies as st

F32 = st.floats(width=32, allow_nan=False)
fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


@given(F32, F32, F32)
@example(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60)  # the f64 sum lies halfway between two f32
@example(1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-60))
@example(2.0**-100, 2.0**-49, 2.0**-149)
@example(3.0e38, 2.0, -3.0e38)
def test_fma_rounds_once(x, y, z):
    """The bits of the C library's fmaf, also where rounding twice would differ."""
    x, y, z = (np.float32(v) for v in (x, y, z))
    with np.errstate(all="ignore"):
        got = fma32(x, y, z)
    want = np.float32(fmaf(x, y, z))
    assert np.isnan(got) and np.isnan(want) or bits(got) == bits(want)


def test_the_example_tells_one_rounding_from_two():
    """Without the step to odd the first example above is off by one."""
    x, z = np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    twice = np.float32(np.float64(x) * np.float64(x) + np.float64(z))
    assert bits(twice) != bits(fma32(x, x, z))


@given(st.floats(width=32))
def test_half_types_survive_a_round_trip(x):
    """What is on the grid of a half type stays where it is."""
    for memory in ("bf16", "f16"):
        once = widen(narrow(np.asarray(x, np.float32), "f32", memory), memory)
        again = widen(narrow(once, "f32", memory), memory)
        assert bits(once) == bits(again) or np.isnan(once)


def test_extremes_order_zeros_and_keep_nan():
    """-0.0 is less than 0.0, NaN wins on either side."""
    x, y = np.float32([0.0, -0.0, np.nan, 1.0]), np.float32([-0.0, 0.0, 1.0, np.nan])
    low, high = extreme("min", x, y, "f32"), extreme("max", x, y, "f32")
    assert np.signbit(low[:2]).all() and not np.signbit(high[:2]).any()
    assert np.isnan(low[2:]).all() and np.isnan(high[2:]).all()


def test_floats_that_no_integer_holds():
    """Give the smallest i64, cut down to the type."""
    x = np.float64([1e30, -1e30, np.nan, np.inf, 3.7])
    assert cast(x, "f64", "i64").tolist() == [-(1 << 63)] * 4 + [3]
    assert cast(x, "f64", "i32").tolist() == [0, 0, 0, 0, 3]
