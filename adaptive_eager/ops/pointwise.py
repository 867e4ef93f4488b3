"""Pointwise ops: one row each, the arithmetic as plain Python over values.

Every definition computes in PyTorch's opmath dtype (f32 for half types) and rounds once to the result's dtype, so
fused, alone, or on the tile interpreter an op has one set of bits. Formulas are those of PyTorch's CPU kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from adaptive_eager import lower
from adaptive_eager.kernels.build import Builder, Val, fn, maximum, minimum, where
from adaptive_eager.lower import Body, IndexMap
from adaptive_eager.meta import DTYPE_NAMES, Meta, contiguous_meta
from adaptive_eager.tape import Recipe, S, T
from adaptive_eager.tensor import FAST

aten = torch.ops.aten
Promote = Literal["same", "float", "compare", "none"]

_KINDS = {
    "same": KIND.DEFAULT,
    "float": KIND.INT_TO_FLOAT,
    "compare": KIND.ALWAYS_BOOL,
    "none": KIND.NO_OPMATH,
}


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A row of the table. ops: overload names under aten. fn: arithmetic on positional operands (numbers and None as they
    come when literal). promote: how the compute dtype follows from the operands. only: dtypes computed natively."""

    ops: str
    fn: Callable[..., Val]
    promote: Promote = "same"
    only: Literal["any", "float", "int"] = "any"
    skip: tuple[int, ...] = ()
    """Positions that do not take part in promotion (alpha, value, conditions)."""
    literal: bool = False
    """Numbers are part of the definition, not run-time scalars."""
    keywords: tuple[str, ...] = ()
    """Keyword operands, appended after the positional ones."""


def _add(x: Val, y: Val, alpha: Val | None) -> Val:
    if x.dtype == "bool":
        return x | (y if alpha is None else alpha & y)
    return x + (y if alpha is None else alpha * y)


def _exp(x: Val) -> Val:
    return fn("exp", x)


def _sigmoid(x: Val) -> Val:
    return fn("sigmoid", x)


def _pow(x: Val, p: float) -> Val:
    match p:
        case 0.5:
            return fn("sqrt", x)
        case 2:
            return x * x
        case 3:
            return x * x * x
        case -1:
            return 1 / x
        case -0.5:
            return 1 / fn("sqrt", x)
        case -2:
            return 1 / (x * x)
        case 1:
            return x
    raise NotImplementedError


_SQRT1_2 = math.sqrt(0.5)
_2_SQRTPI = 2 / math.sqrt(math.pi)
_KBETA = math.sqrt(2) * _2_SQRTPI * 0.5


def _gelu(x: Val, approximate: str = "none") -> Val:
    if approximate == "tanh":
        inner = _KBETA * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + fn("tanh", inner))
    return x * 0.5 * (1 + fn("erf", x * _SQRT1_2))


def _gelu_backward(g: Val, x: Val, approximate: str = "none") -> Val:
    if approximate == "tanh":
        x2 = x * x
        t = fn("tanh", _KBETA * (x + 0.044715 * (x2 * x)))
        left = 0.5 * x
        right = 1 + t
        return g * (0.5 * right + left * (1 - t * t) * (_KBETA * (1 + 3 * 0.044715 * x2)))
    cdf = 0.5 * (1 + fn("erf", x * _SQRT1_2))
    pdf = _exp(x * x * -0.5) * (_2_SQRTPI * _SQRT1_2 * 0.5)
    return g * (cdf + x * pdf)


def _silu_backward(g: Val, x: Val) -> Val:
    s = _sigmoid(x)
    return g * s * (1 + x * (1 - s))


def _clamp(x: Val, lo: Val | None, hi: Val | None) -> Val:
    if lo is not None:
        x = maximum(x, lo)
    return x if hi is None else minimum(x, hi)


def _softplus(x: Val, beta: Val, threshold: Val) -> Val:
    return where(x * beta > threshold, x, fn("log1p", _exp(x * beta)) / beta)


def _sign(x: Val) -> Val:
    one = x.b.const(1, x.dtype)
    zero = x.b.const(0, x.dtype)
    return where(
        x > zero,
        one,
        where(x < zero, -one if x.dtype != "u8" else zero, where(x.ne(x), zero, zero)),
    )


def _mean_half(x: Val, y: Val, w: Val) -> Val:
    return where(abs(w) < 0.5, x + w * (y - x), y - (y - x) * (1 - w))


def _leaky(x: Val, slope: Val) -> Val:
    return where(x > 0, x, x * slope)


def _elu(x: Val, alpha: Val, scale: Val, input_scale: Val) -> Val:
    return where(x > 0, x * scale, fn("expm1", x * input_scale) * (alpha * scale))


def _hardtanh_backward(g: Val, x: Val, lo: Val, hi: Val) -> Val:
    return where((x <= lo) | (x >= hi), 0, g)


def _logaddexp(x: Val, y: Val) -> Val:
    m = maximum(x, y)
    return where(x.eq(y) & (abs(x)).eq(math.inf), x, m + fn("log1p", _exp(-abs(x - y))))


def _reciprocal_sqrt(x: Val) -> Val:
    return 1 / fn("sqrt", x)


# fmt: off
TABLE: tuple[Pointwise, ...] = (
    Pointwise("add.Tensor add_.Tensor add.Scalar add_.Scalar", _add, skip=(2,), keywords=("alpha",)),
    Pointwise("sub.Tensor sub_.Tensor sub.Scalar sub_.Scalar", lambda x, y, alpha: x - (y if alpha is None else alpha * y), skip=(2,), keywords=("alpha",)),
    Pointwise("rsub.Tensor rsub.Scalar", lambda x, y, alpha: y - (x if alpha is None else alpha * x), skip=(2,), keywords=("alpha",)),
    Pointwise("mul.Tensor mul_.Tensor mul.Scalar mul_.Scalar", lambda x, y: x * y if x.dtype != "bool" else x & y),
    Pointwise("div.Tensor div_.Tensor div.Scalar div_.Scalar", lambda x, y: x / y, "float"),
    Pointwise("maximum.default", maximum),
    Pointwise("minimum.default", minimum),
    Pointwise("eq.Tensor eq.Scalar", lambda x, y: x.eq(y), "compare"),
    Pointwise("ne.Tensor ne.Scalar", lambda x, y: x.ne(y), "compare"),
    Pointwise("lt.Tensor lt.Scalar", lambda x, y: x < y, "compare"),
    Pointwise("le.Tensor le.Scalar", lambda x, y: x <= y, "compare"),
    Pointwise("gt.Tensor gt.Scalar", lambda x, y: x > y, "compare"),
    Pointwise("ge.Tensor ge.Scalar", lambda x, y: x >= y, "compare"),
    Pointwise("logical_and.default logical_and_.default", lambda x, y: x.to("bool") & y.to("bool"), "compare"),
    Pointwise("logical_or.default logical_or_.default", lambda x, y: x.to("bool") | y.to("bool"), "compare"),
    Pointwise("logical_xor.default", lambda x, y: x.to("bool") ^ y.to("bool"), "compare"),
    Pointwise("logical_not.default logical_not_.default", lambda x: ~x.to("bool"), "compare"),
    Pointwise("isnan.default", lambda x: x.ne(x), "compare", "float"),
    Pointwise("bitwise_and.Tensor bitwise_and_.Tensor bitwise_and.Scalar", lambda x, y: x & y, only="int"),
    Pointwise("bitwise_or.Tensor bitwise_or_.Tensor bitwise_or.Scalar", lambda x, y: x | y, only="int"),
    Pointwise("bitwise_xor.Tensor bitwise_xor_.Tensor bitwise_xor.Scalar", lambda x, y: x ^ y, only="int"),
    Pointwise("bitwise_not.default", lambda x: ~x, only="int"),
    Pointwise("neg.default neg_.default", lambda x: -x),
    Pointwise("abs.default abs_.default", lambda x: x if x.dtype == "u8" else abs(x)),
    Pointwise("relu.default relu_.default", lambda x: maximum(x, 0)),
    Pointwise("sqrt.default sqrt_.default", lambda x: fn("sqrt", x), "float"),
    Pointwise("rsqrt.default rsqrt_.default", _reciprocal_sqrt, "float"),
    Pointwise("reciprocal.default reciprocal_.default", lambda x: 1 / x, "float"),
    *(
        Pointwise(f"{name}.default {name}_.default", lambda x, name=name: fn(name, x), "float")
        for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "erf", "sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan")
    ),
    Pointwise("erfc.default", lambda x: fn("erfc", x), "float"),
    Pointwise("atan2.default", lambda x, y: fn("atan2", x, y), "float"),
    *(Pointwise(f"{name}.default {name}_.default", lambda x, name=name: fn(name, x), only="float") for name in ("floor", "ceil", "trunc")),
    Pointwise("round.default round_.default", lambda x: fn("rint", x), only="float"),
    Pointwise("sign.default sgn.default", _sign),
    Pointwise("pow.Tensor_Scalar pow_.Scalar", _pow, only="float", literal=True, skip=(1,)),
    Pointwise("pow.Tensor_Tensor", lambda x, y: fn("pow", x, y), only="float"),
    Pointwise("square.default", lambda x: x * x, only="float"),
    Pointwise("where.self", lambda c, x, y: where(c.to("bool"), x, y), skip=(0,)),
    Pointwise("where.ScalarOther where.ScalarSelf where.Scalar", lambda c, x, y: where(c.to("bool"), x, y), skip=(0,)),
    Pointwise("masked_fill.Scalar masked_fill_.Scalar masked_fill.Tensor masked_fill_.Tensor", lambda x, m, v: where(m, v, x), skip=(1, 2)),
    Pointwise("clamp.default clamp_.default clamp.Tensor clamp_.Tensor", _clamp, keywords=("min", "max")),
    Pointwise("clamp_min.default clamp_min_.default clamp_min.Tensor", maximum),
    Pointwise("clamp_max.default clamp_max_.default clamp_max.Tensor", minimum),
    Pointwise("lerp.Scalar lerp_.Scalar lerp.Tensor lerp_.Tensor", _mean_half, only="float", skip=(2,)),
    Pointwise("addcmul.default addcmul_.default", lambda x, y, z, v: x + (y * z if v is None else v * y * z), skip=(3,), keywords=("value",)),
    Pointwise("addcdiv.default addcdiv_.default", lambda x, y, z, v: x + (y / z if v is None else v * y / z), only="float", skip=(3,), keywords=("value",)),
    Pointwise("gelu.default", _gelu, only="float", keywords=("approximate",)),
    Pointwise("gelu_backward.default", _gelu_backward, only="float", keywords=("approximate",)),
    Pointwise("silu.default silu_.default", lambda x: x / (1 + _exp(-x)), only="float"),
    Pointwise("silu_backward.default", _silu_backward, only="float"),
    Pointwise("tanh_backward.default", lambda g, y: g * (1 - y * y), only="float"),
    Pointwise("sigmoid_backward.default", lambda g, y: g * (1 - y) * y, only="float"),
    Pointwise("threshold_backward.default", lambda g, x, t: where(x <= t, 0, g), skip=(2,)),
    Pointwise("leaky_relu.default leaky_relu_.default", _leaky, only="float", skip=(1,)),
    Pointwise("leaky_relu_backward.default", lambda g, x, slope, _self: where(x > 0, g, g * slope), only="float", skip=(2, 3)),
    Pointwise("softplus.default", _softplus, only="float", skip=(1, 2)),
    Pointwise("elu.default elu_.default", _elu, only="float", skip=(1, 2, 3)),
    Pointwise("hardtanh.default hardtanh_.default", lambda x, lo, hi: minimum(maximum(x, lo), hi), only="float", skip=(1, 2)),
    Pointwise("hardtanh_backward.default", _hardtanh_backward, only="float", skip=(2, 3)),
    Pointwise("logaddexp.default", _logaddexp, only="float"),
    Pointwise("clone.default", lambda x: x, "none"),
    Pointwise("_to_copy.default", lambda x: x, "none"),
    Pointwise("copy_.default copy.default", lambda x, y: y, "none", skip=(0,)),
    Pointwise("fill_.Scalar fill_.Tensor fill.Scalar fill.Tensor", lambda x, v: v, skip=(1,)),
    Pointwise("zero_.default", lambda x: x * 0),
)
# fmt: on

HALF = (torch.bfloat16, torch.float16)
_WRITE_ONLY = frozenset({"copy_", "fill_", "zero_", "copy", "fill"})
"""Ops that do not read what they write over."""
_ROUNDS_NUMBERS = frozenset("add add_ sub sub_ rsub eq ne lt le gt ge".split())
"""Ops that round a number beside a half-precision tensor to its dtype first, as PyTorch does; mul and div take it as float32."""
_IGNORED_KEYWORDS = frozenset(
    {"memory_format", "dtype", "layout", "device", "pin_memory", "non_blocking", "generator"}
)


def value_dtype(dtype: torch.dtype) -> str | None:
    """The value dtype that a torch dtype computes in: f32 for half types, None where kernels can't."""
    name = DTYPE_NAMES.get(dtype)
    return "f32" if name in ("bf16", "f16") else name


def space(
    out: Meta, metas: tuple[Meta | None, ...]
) -> tuple[tuple[int, ...], list[IndexMap | None], IndexMap] | None:
    """Iteration space of a pointwise op: dims ordered by the output's strides, size-1 dims dropped, and each operand's map.

    None where the output overlaps itself (an expanded tensor written in place).
    """
    shape = out.shape
    order = [d for d in range(len(shape)) if shape[d] != 1]
    if any(out.stride[d] == 0 for d in order):
        return None
    order.sort(key=lambda d: -out.stride[d])
    dims = tuple([shape[d] for d in order])

    def lay(m: Meta) -> IndexMap:
        pad = len(shape) - len(m.shape)
        strides = tuple(
            [0 if d < pad or m.shape[d - pad] == 1 else m.stride[d - pad] for d in order]
        )
        return IndexMap("e", m.offset, strides)

    return dims, [None if m is None else lay(m) for m in metas], lay(out)


def lower_pointwise(
    row: Pointwise, name: str, r: Recipe, metas: tuple[torch.Tensor, ...]
) -> Body | None:
    """The loop form of a pointwise call, None where a dtype or argument is beyond the kernels."""
    positional: list[Any] = list(r.args)
    named = {k: v for k, v in r.kwargs.items() if k not in _IGNORED_KEYWORDS}
    schema = r.func._schema.arguments
    positional += [
        named.pop(a.name, a.default_value)
        for a in schema[len(positional) :]
        if a.name not in _IGNORED_KEYWORDS
        and (a.name in named or row.keywords == () or a.name in row.keywords)
    ]
    if name.startswith(("_to_copy", "clone", "copy_", "copy.")):
        positional = positional[: 2 if name.startswith("copy") else 1]
    if named:
        return None
    positional = [
        None if k in row.skip and type(a) is int and a == 1 and row.keywords else a
        for k, a in enumerate(positional)
    ]
    target = r.ins[r.writes[0]] if r.writes else r.outs[0]
    if len(r.outs) + len(r.writes) != 1 or target.tname is None:
        return None
    tensors = [
        metas[a.i] for k, a in enumerate(positional) if isinstance(a, T) and k not in row.skip
    ]
    numbers = [
        r.scalar_types[a.i](1) if isinstance(a, S) else a
        for k, a in enumerate(positional)
        if k not in row.skip and isinstance(a, (S, int, float, bool))
    ]
    base = name.split(".")[0]
    rounded = ""
    if row.promote == "none":
        source = metas[positional[-1].i].dtype if base.startswith("copy") else metas[0].dtype
        cd = value_dtype(source)
    elif base in ("fill_", "fill", "zero_"):
        cd = value_dtype(target.dtype)
    else:
        participants = [*tensors, *numbers]
        compute, common = elementwise_dtypes(*participants, type_promotion_kind=_KINDS[row.promote])
        if row.promote == "compare":
            compute = common = (
                torch.result_type(participants[0], participants[1])
                if len(participants) == 2
                else tensors[0].dtype
            )
        cd = value_dtype(compute)
        if base in _ROUNDS_NUMBERS and common in HALF:
            rounded = DTYPE_NAMES[common]
    if cd is None or any(DTYPE_NAMES.get(m.dtype) is None for m in r.ins):
        return None
    if (
        row.only == "float"
        and cd not in ("f32", "f64")
        or row.only == "int"
        and cd in ("f32", "f64")
    ):
        return None
    unread = {a.i for k, a in enumerate(positional[:1]) if base in _WRITE_ONLY and isinstance(a, T)}
    laid = space(target, tuple([None if k in unread else m for k, m in enumerate(r.ins)]))
    if laid is None:
        return None
    dims, ins, out = laid
    for k, m in enumerate(ins):
        if (
            m is not None
            and r.writes
            and r.ins[k].shape != target.shape
            and len(r.ins[k].shape) > len(target.shape)
        ):
            return None
    if row.literal:
        try:
            row.fn(Builder().const(1.0, cd), *positional[1:])
        except NotImplementedError:
            return None
    spec = tuple(positional)
    convert = frozenset(range(len(spec))) - (
        {0} if base == "where" else {1} if base.startswith("masked_fill") else set()
    )

    def build(b: Builder, values: list[Val | None], scalars: list[Val]) -> list[Val]:
        operands: list[Any] = []
        for k, a in enumerate(spec):
            if isinstance(a, T):
                v = values[a.i]
                if rounded and v is not None and v.dtype != rounded:
                    v = v.to(rounded)
                operands.append(v if v is None or k not in convert else v.to(cd))
            elif isinstance(a, S):
                v = scalars[a.i]
                operands.append((v.to(rounded) if rounded and k not in row.skip else v).to(cd))
            elif isinstance(a, bool) or (isinstance(a, (int, float)) and not row.literal):
                operands.append(b.const(a, cd))
            else:
                operands.append(a)
        if base == "zero_":
            return [b.const(0, cd).to(target.tname or "")]
        return [row.fn(*operands).to(target.tname or "")]

    return Body("map", dims, tuple(ins), ((~r.writes[0] if r.writes else 0, out),), build)


def shape_rule(
    row: Pointwise, name: str, r: Recipe, metas: tuple[torch.Tensor, ...]
) -> Meta | None:
    """The output's meta when all operands are contiguous: shapes broadcast, dtypes promote; None for anything else."""
    if not all(m.contiguous for m in r.ins) or r.kwargs.get("memory_format") is not None:
        return None
    base = name.split(".")[0]
    shape: tuple[int, ...] = ()
    for m in r.ins:
        joined = broadcast(shape, m.shape)
        if joined is None:
            return None
        shape = joined
    if base == "_to_copy":
        return (
            None
            if r.kwargs.keys() - {"dtype"}
            else contiguous_meta(shape, r.kwargs.get("dtype") or r.ins[0].dtype)
        )
    if base == "clone" or base.startswith(("fill", "zero", "copy")):
        return (
            r.ins[0]
            if shape == r.ins[0].shape
            and (base == "clone" or base.endswith("_"))
            and not r.ins[0].offset
            else None
        )
    participants: list[Any] = []
    for k, a in enumerate(r.args):
        if k in row.skip:
            continue
        if isinstance(a, T):
            participants.append(metas[a.i])
        elif isinstance(a, S):
            participants.append(r.scalar_types[a.i](1))
        elif isinstance(a, (bool, int, float)):
            participants.append(a)
    if any(name not in row.keywords or name in ("min", "max") for name in r.kwargs):
        return None
    if not participants or (base == "where" and r.ins[0].dtype is not torch.bool):
        return None
    _, dtype = elementwise_dtypes(*participants, type_promotion_kind=_KINDS[row.promote])
    if (
        dtype.is_complex
        or (row.only == "float" and not dtype.is_floating_point)
        or (row.only == "int" and dtype.is_floating_point)
    ):
        return None
    if r.func._schema.is_mutable:
        target = r.ins[0]
        return target if target.shape == shape and torch.can_cast(dtype, target.dtype) else None
    return contiguous_meta(shape, dtype)


def broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that two shapes broadcast to, or None."""
    if tuple(a) == tuple(b):
        return tuple(a)
    n = max(len(a), len(b))
    x, y = (1,) * (n - len(a)) + tuple(a), (1,) * (n - len(b)) + tuple(b)
    out = tuple([q if p == 1 else p for p, q in zip(x, y, strict=True)])
    return (
        out if all(p in (1, o) and q in (1, o) for p, q, o in zip(x, y, out, strict=True)) else None
    )


def register() -> None:
    """Enter every row into the tables of `lower` and the fast path."""
    for row in TABLE:
        for name in row.ops.split():
            packet, overload = name.split(".")
            op = getattr(getattr(aten, packet, None), overload, None)
            if op is None:
                continue
            f = id(op)
            lower.KEEP.append(op)

            def native(
                r: Recipe,
                metas: tuple[torch.Tensor, ...],
                row: Pointwise = row,
                name: str = name,
            ) -> Body | None:
                return lower_pointwise(row, name, r, metas)

            def rule(
                r: Recipe, metas: tuple[torch.Tensor, ...], row: Pointwise = row, name: str = name
            ) -> Meta | None:
                return shape_rule(row, name, r, metas)

            lower.NATIVE[f] = native
            lower.RULES[f] = rule
            if packet in ("fill_", "zero_"):
                lower.OVERLAP_OK.add(f)
            if row.literal:
                lower.LITERAL_NUMBERS.add(f)
            else:
                lower.RUNTIME_INTS.add(f)
                if name not in ("clamp.default", "clamp_.default"):
                    FAST.add(f)


register()
