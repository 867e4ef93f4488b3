"""Every instruction of the loop IR against numpy."""

import numpy as np
import pytest
from adaptive_eager.kernels import build, ir
from adaptive_eager.kernels.build import fn

from .harness import NP, from_bf16, kernel, run_flat, run_rows, to_bf16

SIZES = (1, 15, 16, 17, 31, 32, 33, 100, 4096, 4097, 10_000)
RNG = np.random.default_rng(0)


def values(dtype, n):
    if dtype in ("f32", "f64"):
        x = RNG.standard_normal(n).astype(NP[dtype]) * 3
        if n > 20:
            x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
        return x
    if dtype == "bool":
        return RNG.integers(0, 2, n).astype(bool)
    info = np.iinfo(NP[dtype])
    return RNG.integers(max(info.min, -1000), min(info.max, 1000), n, endpoint=True).astype(
        NP[dtype]
    )


def check(trace, dtype, out_dtype, expected, arity, n):
    k = kernel(trace, [(dtype, "unit")] * arity + [(out_dtype, "unit")])
    xs = [values(dtype, n) for _ in range(arity)]
    y = np.zeros(n, NP[out_dtype])
    run_flat(k, [*xs, y])
    with np.errstate(all="ignore"):
        want = expected(*xs).astype(NP[out_dtype])
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "min", "max"])
def test_float_arithmetic_is_ieee(op, n):
    """Arithmetic on f32 gives numpy's bits, special values included, at every tail length."""
    f = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "min": np.minimum,
        "max": np.maximum,
    }[op]
    check(lambda b: b.store(fn(op, b.load(0, "f32"), b.load(1, "f32")), 2), "f32", "f32", f, 2, n)


@pytest.mark.parametrize("dtype", ["f64", "i64", "i32", "i16", "i8", "u8"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "min", "max"])
def test_arithmetic_wraps_in_its_own_dtype(op, dtype):
    """Integers wrap at their own width; f64 is IEEE."""
    f = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }[op]
    check(lambda b: b.store(fn(op, b.load(0, dtype), b.load(1, dtype)), 2), dtype, dtype, f, 2, 101)


@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32", "u8", "bool"])
@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(op, dtype):
    """Comparisons are ordered, except that ne is true for NaN."""
    f = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }[op]
    check(
        lambda b: b.store(b.inst(op, (b.load(0, dtype), b.load(1, dtype)), "bool"), 2),
        dtype,
        "bool",
        f,
        2,
        77,
    )


@pytest.mark.parametrize("op", ["neg", "abs", "sqrt", "rint", "floor", "ceil", "trunc"])
def test_unary_float(op):
    """Exact unary functions."""
    f = {"neg": np.negative, "abs": np.abs}.get(op) or getattr(np, op)
    check(lambda b: b.store(fn(op, b.load(0, "f32")), 1), "f32", "f32", f, 1, 133)


@pytest.mark.parametrize("to", ["f64", "i64", "i32", "i16", "u8", "bool"])
@pytest.mark.parametrize("source", ["f32", "i64", "i16", "u8", "bool"])
def test_casts(source, to):
    """Casts between dtypes; floats truncate toward zero."""
    k = kernel(lambda b: b.store(b.load(0, source).to(to), 1), [(source, "unit"), (to, "unit")])
    x = values(source, 70)
    if source == "f32":
        x = np.nan_to_num(x, posinf=5, neginf=-5)
    y = np.zeros(70, NP[to])
    run_flat(k, [x, y])
    want = (
        x.astype(np.int64).astype(NP[to])
        if source == "f32" and to not in ("f64", "bool")
        else x.astype(NP[to])
    )
    np.testing.assert_array_equal(y, want)


def test_cast_of_what_an_integer_cannot_hold():
    """NaN and infinities become the smallest i64, never anything undefined."""
    k = kernel(lambda b: b.store(b.load(0, "f32").to("i64"), 1), [("f32", "unit"), ("i64", "unit")])
    y = np.zeros(4, np.int64)
    run_flat(k, [np.array([np.nan, np.inf, -np.inf, 1e30], np.float32), y])
    assert (y == np.iinfo(np.int64).min).all()


@pytest.mark.parametrize("n", [1, 31, 33, 5000])
def test_bf16_rounds_to_nearest_even(n):
    """bf16 is loaded exactly, computed in f32 and rounded once; `round` in registers gives the same bits."""
    x, y = to_bf16(RNG.standard_normal(n)), to_bf16(RNG.standard_normal(n))

    def through_memory(b):
        b.store(b.load(0, "bf16") * b.load(1, "bf16") + b.load(0, "bf16"), 2)

    def in_registers(b):
        b.store((b.load(0, "bf16") * b.load(1, "bf16") + b.load(0, "bf16")).to("bf16"), 2)

    out = []
    for trace in (through_memory, in_registers):
        z = np.zeros(n, np.uint16)
        run_flat(kernel(trace, [("bf16", "unit")] * 3), [x, y, z])
        out.append(z)
    want = to_bf16(from_bf16(x) * from_bf16(y) + from_bf16(x))
    np.testing.assert_array_equal(out[0], want)
    np.testing.assert_array_equal(out[1], want)


def test_f16_round_trip():
    """f16 loads and stores are numpy's."""
    x = np.array([1, 1 / 3, 65504, 1e-7, np.inf, np.nan, -2.5], np.float16)
    y = np.zeros(7, np.float16)
    run_flat(
        kernel(lambda b: b.store(b.load(0, "f16") * 2, 1), [("f16", "unit"), ("f16", "unit")]),
        [x, y],
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, (x.astype(np.float32) * 2).astype(np.float16))


def test_scalars_iota_and_select():
    """Run-time scalars, the column index and a choice between values."""

    def trace(b):
        j = b.iota("inner")
        b.store(
            build.where(
                (j.to("f32") < b.scalar(0, "f64").to("f32")),
                b.load(0, "f32"),
                b.scalar(1, "i64").to("f32"),
            ),
            1,
        )

    x = RNG.standard_normal(90).astype(np.float32)
    y = np.zeros(90, np.float32)
    run_flat(kernel(trace, [("f32", "unit")] * 2, ["f64", "i64"]), [x, y], [40.0, 7])
    np.testing.assert_array_equal(y, np.where(np.arange(90) < 40, x, np.float32(7)))


def test_strided_and_broadcast_operands():
    """Operands with any inner stride, or one value a row, read and write the right elements."""
    rows, cols = 7, 45
    x = RNG.standard_normal((cols, rows)).astype(np.float32)
    r = RNG.standard_normal(rows).astype(np.float32)
    y = np.zeros((rows, cols * 2), np.float32)
    k = kernel(
        lambda b: b.store(b.load(0, "f32") + b.load(1, "f32"), 2),
        [("f32", "any"), ("f32", "zero"), ("f32", "any")],
    )
    run_rows(k, [x, r, y], rows, cols, [(1, rows), (1, 0), (cols * 2, 2)])
    np.testing.assert_array_equal(y[:, ::2], x.T + r[:, None])
    assert (y[:, 1::2] == 0).all()


def test_several_outer_dims():
    """Outer indices are decomposed in row-major order."""
    k = kernel(
        lambda b: b.store(b.load(0, "f32") * b.load(1, "f32"), 2), [("f32", "unit")] * 3, outer=3
    )
    a = RNG.standard_normal((4, 1, 3, 33)).astype(np.float32)
    c = RNG.standard_normal((1, 5, 3, 33)).astype(np.float32)
    y = np.zeros((4, 5, 3, 33), np.float32)
    from adaptive_eager.kernels.launch import compile_kernel

    space = ir.Space((4, 5, 3), 33, y.size, ((99, 0, 33, 1), (0, 99, 33, 1), (495, 99, 33, 1)))
    compile_kernel(k).bind(space)([a.ctypes.data, c.ctypes.data, y.ctypes.data], [])
    np.testing.assert_array_equal(y, a * c)


@pytest.mark.parametrize("bad", ["order", "dtype", "levels"])
def test_verify_names_the_instruction(bad):
    """A kernel that breaks a rule is refused with the instruction and the rule."""
    insts = {
        "order": (ir.Inst("neg", (0,), "f32"),),
        "dtype": (ir.Inst("load", (), "bf16", 0),),
        "levels": (
            ir.Inst("load", (), "f32", 0),
            ir.Inst("total", (0,), "f64"),
            ir.Inst("cast", (1,), "f32"),
            ir.Inst("add", (0, 2), "f32"),
        ),
    }[bad]
    with pytest.raises(ir.InvalidKernel, match="%"):
        ir.verify(ir.Kernel(1, (ir.Operand("f32", "unit"),), (), insts))
