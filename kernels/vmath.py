"""Transcendental functions as straight-line arithmetic, for vectors and for scalars with the same bits.

Written against `Num`: anything with float arithmetic and the few functions of `Ops`. Code generation
gives LLVM values; a tile interpreter can give numpy arrays. Only operations with one correctly rounded
result are used (add, mul, fma, division, scaling by powers of two, integer bit operations), so a
definition has one set of bits wherever it runs.

f32 only; f64 goes to libm. Errors are the largest seen over some million points each (test_vmath.py):
exp 1.0 ULP, exp2 1.0, expm1 1.3, log 0.8, log1p 1.5, tanh 2.3, sigmoid 2.2, erf 1.4, sin and cos 1.5.

Note [Underflow]
An instruction whose result is subnormal, or rounds to zero from there, is handled by microcode, slowly.
So lanes that come to zero in any case, as attention masks make half of them do, compute something else
on the way.

Sources: Cody & Waite's range reductions; exp and erf by minimax polynomials (Lawson iterations, then
coefficients rounded to f32 one after the other); log by the Cephes polynomial (Moshier).
"""

from __future__ import annotations

from typing import Any, Protocol

Num = Any
"""A float or int32 value, or a vector of them, with +, -, *, /, unary - and comparisons."""


class Ops(Protocol):
    """What the definitions need beyond operators. Constants take the shape of their first argument."""

    def fma(self, x: Num, y: Num, z: Num) -> Num:
        """x * y + z, rounded once."""

    def select(self, c: Num, x: Num, y: Num) -> Num:
        """x where c, else y."""

    def bits(self, x: Num) -> Num:
        """f32 as int32."""

    def float_of_bits(self, i: Num) -> Num:
        """int32 as f32."""

    def to_float(self, i: Num) -> Num:
        """int32 to f32, by value."""

    def abs(self, x: Num) -> Num:
        """Magnitude."""

    def copysign(self, x: Num, y: Num) -> Num:
        """Magnitude of x, sign of y."""

    def ldexp(self, x: Num, n: Num) -> Num:
        """x * 2**n for int32 n in [-151, 129], rounded once: `ldexp` below, or the processor's own."""

    def const(self, like: Num, v: float) -> Num:
        """An f32 constant shaped like `like`."""

    def iconst(self, like: Num, v: int) -> Num:
        """An int32 constant shaped like `like`."""

    def wide(self, name: str, *args: Num) -> Num:
        """libm's function in f64, rounded to f32."""


LOG2E, LN2_HI, LN2_LO = 1.44269504, 0.693145751953125, 1.42860677e-06
MAGIC = 12582912.0
"""1.5 * 2**23: adding it rounds to an integer, which then stands in the low bits."""
MAGIC_BITS = 0x4B400000
EXP = (1.9845925271e-4, 1.3940684730e-3, 8.3333896473e-3, 4.1666358709e-2, 1.6666665673e-1, 0.5)
"""(exp(r) - 1 - r) / r² on |r| <= ln(2)/2, highest power first."""


def _horner(o: Ops, x: Num, coefficients: tuple[float, ...]) -> Num:
    p = o.const(x, coefficients[0])
    for c in coefficients[1:]:
        p = o.fma(p, x, o.const(x, c))
    return p


def _reduce_exp(o: Ops, x: Num) -> tuple[Num, Num, Num]:
    """((exp(r) - 1 - r) / r, r, shifted n) with x = n ln2 + r."""
    t = o.fma(x, o.const(x, LOG2E), o.const(x, MAGIC))
    n = t - o.const(x, MAGIC)
    r = o.fma(n, o.const(x, -LN2_HI), x)
    r = o.fma(n, o.const(x, -LN2_LO), r)
    p = _horner(o, r, EXP)
    return p * r, r, t


def _scale(o: Ops, n: Num) -> Num:
    """2**n for int32 n in [-126, 127]."""
    return o.float_of_bits((n + o.iconst(n, 127)) << 23)


def ldexp(o: Ops, x: Num, n: Num) -> Num:
    """x * 2**n for x about 1 in two multiplications, of which the first is exact."""
    half = n >> 1
    return x * _scale(o, half) * _scale(o, n - half)


def exp(o: Ops, x: Num) -> Num:
    """e**x over the whole range, subnormal results included."""
    hi, zero = o.const(x, 88.8), o.const(x, 0.0)
    y = o.select(x > hi, hi, x)
    gone = x < o.const(x, -104.0)  # such as a mask's -inf; Note [Underflow]
    y = o.select(gone, zero, y)
    w, r, t = _reduce_exp(o, y)
    p = o.fma(w, r, r) + o.const(x, 1.0)
    n = o.bits(t) - o.iconst(o.bits(t), MAGIC_BITS)
    return o.select(gone, zero, o.ldexp(p, n))


EXP2 = (1.53293106e-4, 1.33909704e-3, 9.61849932e-3, 5.55035956e-2, 0.240226477, 0.693147182, 1.0)
"""2**f in f, for |f| <= 1/2, highest power first."""


def exp2(o: Ops, x: Num) -> Num:
    """2**x over the whole range, subnormal results included."""
    hi, zero = o.const(x, 129.0), o.const(x, 0.0)
    y = o.select(x > hi, hi, x)
    gone = x < o.const(x, -150.5)
    y = o.select(gone, zero, y)
    t = y + o.const(x, MAGIC)
    p = _horner(o, y - (t - o.const(x, MAGIC)), EXP2)
    r = o.ldexp(p, o.bits(t) - o.iconst(o.bits(t), MAGIC_BITS))
    return o.select(gone, zero, r)


def expm1(o: Ops, x: Num) -> Num:
    """e**x - 1, exact near 0."""
    hi, lo = o.const(x, 88.8), o.const(x, -20.0)
    y = o.select(x > hi, hi, x)
    y = o.select(y < lo, lo, y)
    w, r, t = _reduce_exp(o, y)
    n = o.bits(t) - o.iconst(o.bits(t), MAGIC_BITS)
    half = n >> 1
    a, b = _scale(o, half), _scale(o, n - half)
    s = a * b
    big = (o.fma(w, r, r) + o.const(x, 1.0)) * a * b - o.const(x, 1.0)
    small = o.fma(s * r, w, o.fma(s, r, s - o.const(x, 1.0)))
    r = o.select(n > o.iconst(n, 30), big, small)
    return o.select(x == o.const(x, 0.0), x, r)


def sigmoid(o: Ops, x: Num) -> Num:
    """1 / (1 + exp(-x))."""
    one = o.const(x, 1.0)
    return one / (one + exp(o, -x))


def tanh(o: Ops, x: Num) -> Num:
    """expm1(2|x|) / (expm1(2|x|) + 2), with x's sign."""
    y = o.abs(x)
    top = o.const(x, 9.02)
    y = o.select(y > top, top, y)
    w, r, t = _reduce_exp(o, y + y)
    n = o.bits(t) - o.iconst(o.bits(t), MAGIC_BITS)
    s = _scale(o, n)
    em = o.fma(s * r, w, o.fma(s, r, s - o.const(x, 1.0)))
    return o.copysign(em / (em + o.const(x, 2.0)), x)


ERF_SPLIT = 0.9
ERF_SMALL = (-6.04836678e-4, 5.00404974e-3, -2.67737042e-2, 0.112820007, -0.376125097, 0.128379151)
"""(erf(x) - x) / x in x², highest power first, for |x| <= ERF_SPLIT."""
ERF_LARGE = (3.09599593e-4, -4.64547472e-3, 3.30465138e-2, -0.151896968, -0.917120218, -1.62811017)
"""log2(erfc(t)) / t in t, for ERF_SPLIT < t <= 3.93, where f32 has reached 1."""
ERF_EXP2 = (1.32708973e-3, 9.67136119e-3, 5.55070788e-2, 0.240222454, 0.693147004, 1.0)
"""2**f in f, for |f| <= 1/2, as exactly as the large branch needs."""


def erf(o: Ops, x: Num) -> Num:
    """x + x P(x²), or 1 - 2**(t Q(t)) with x's sign: one Horner scheme over the coefficients of either."""
    t, top = o.abs(x), o.const(x, 3.93)
    t = o.select(t > top, top, t)
    large = t > o.const(x, ERF_SPLIT)
    v = o.select(large, t, x * x)
    pick = [
        o.select(large, o.const(x, b), o.const(x, a))
        for a, b in zip(ERF_SMALL, ERF_LARGE, strict=True)
    ]
    h = pick[0]
    for c in pick[1:]:
        h = o.fma(h, v, c)
    y = h * t
    n = y + o.const(x, MAGIC)
    f = y - (n - o.const(x, MAGIC))
    e = o.float_of_bits(o.bits(_horner(o, f, ERF_EXP2)) + (o.bits(n) << 23))
    return o.select(large, o.copysign(o.const(x, 1.0) - e, x), o.fma(h, x, x))


LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
       2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip


def log(o: Ops, x: Num) -> Num:
    """Natural logarithm; -inf at 0, NaN below."""
    tiny = x < o.const(x, 1.17549435e-38)
    y = o.select(tiny, x * o.const(x, 8388608.0), x)
    bias = o.select(tiny, o.const(x, -23.0), o.const(x, 0.0))
    i = o.bits(y) - o.iconst(o.bits(y), 0x3F3504F3)
    e = o.to_float(i >> 23) + bias
    m = o.float_of_bits((i & o.iconst(i, 0x7FFFFF)) + o.iconst(i, 0x3F3504F3)) - o.const(x, 1.0)
    z = m * m
    p = _horner(o, m, LOG) * m * z
    p = o.fma(e, o.const(x, -2.12194440e-4), p)
    p = o.fma(o.const(x, -0.5), z, p)
    r = o.fma(e, o.const(x, 0.693359375), m + p)
    inf = o.const(x, float("inf"))
    r = o.select(x < inf, r, x)
    r = o.select(x == o.const(x, 0.0), -inf, r)
    return o.select(x < o.const(x, 0.0), o.const(x, float("nan")), r)


def log1p(o: Ops, x: Num) -> Num:
    """log(1 + x), with the rounding error of 1 + x put back."""
    one = o.const(x, 1.0)
    u = one + x
    d = u - one
    plain = log(o, u)
    r = plain + (x - d) / u
    r = o.select(d == o.const(x, 0.0), x, r)
    r = o.select(u < o.const(x, float("inf")), r, plain)
    return o.select(u > o.const(x, 0.0), r, plain)  # -inf at -1, NaN below and for NaN


def sincos(o: Ops, x: Num, quarter: int) -> Num:
    """sin(x), or sin(x + pi/2) for quarter 1, for |x| < PERIODIC_LIMIT, by reduction to [-pi/4, pi/4].

    sin is computed for |x|, so that it is odd down to the sign of zero.
    """
    y = o.abs(x)
    t = o.fma(y, o.const(x, 0.636619772), o.const(x, MAGIC))
    q = o.bits(t) + o.iconst(o.bits(t), quarter)
    n = t - o.const(x, MAGIC)
    r = o.fma(n, o.const(x, -1.57079625), y)
    r = o.fma(n, o.const(x, -7.5497894e-08), r)
    r = o.fma(n, o.const(x, -5.3903025e-15), r)
    z = r * r
    s = _horner(o, z, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
    s = o.fma(s * z, r, r)
    c = _horner(o, z, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))
    c = o.fma(c * z, z, o.fma(o.const(x, -0.5), z, o.const(x, 1.0)))
    odd = (q & o.iconst(q, 1)) != o.iconst(q, 0)
    v = o.select(odd, c, s)
    flip = (q & o.iconst(q, 2)) << 30
    if quarter == 0:
        flip = flip ^ (o.bits(x) & o.iconst(q, -(1 << 31)))
    return o.float_of_bits(o.bits(v) ^ flip)


NARROW = {
    "exp": exp,
    "exp2": exp2,
    "expm1": expm1,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
    "log": log,
    "log1p": log1p,
}
"""f32 functions by IR name."""
PERIODIC = {"sin": 0, "cos": 1}
"""Functions with a fast range; the rest of it goes through f64, lane by lane (`Ops.wide`)."""
PERIODIC_LIMIT = 1e4
