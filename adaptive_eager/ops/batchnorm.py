"""Batch norm in evaluation: a scale and a shift for each channel, pointwise, so that it fuses with what follows it.

In training it is a library op.
"""

from __future__ import annotations

import torch

from adaptive_eager.kernels.build import Builder, Val, fn
from adaptive_eager.lower import Body
from adaptive_eager.meta import Meta, meta
from adaptive_eager.ops.pointwise import space, value_dtype
from adaptive_eager.ops.reduce import argument, lowers
from adaptive_eager.tape import Recipe, T

PARAMETERS = ("input", "weight", "bias", "running_mean", "running_var")


@lowers("native_batch_norm.default")
def evaluated(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """x * a + (bias - mean * a), a = weight / sqrt(var + eps), as the CPU computes it."""
    given = [argument(r, k, name) for k, name in enumerate(PARAMETERS)]
    training, eps = argument(r, 5, "training"), argument(r, 7, "eps")
    x = r.ins[0]
    if training is not False or len(x.shape) < 2 or any(a is None for a in given[3:]):
        return None
    cd = value_dtype(x.dtype)
    if cd not in ("f32", "f64") or any(m.tname is None for m in (*r.ins, r.outs[0])):
        return None
    tail = len(x.shape) - 2

    def over_channels(m: Meta) -> Meta:
        return meta((m.shape[0], *[1] * tail), (m.stride[0], *[0] * tail), m.dtype, m.offset)

    laid = space(r.outs[0], (x, *[over_channels(m) for m in r.ins[1:]]))
    if laid is None:
        return None
    dims, ins, out = laid

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        def operand(a: object) -> Val | None:
            found = v[a.i] if isinstance(a, T) else None
            return None if found is None else found.to(cd)

        x, weight, bias, mean, var = map(operand, given)
        assert x is not None
        assert mean is not None
        assert var is not None
        small = s[eps.i] if hasattr(eps, "i") else b.const(float(eps), cd)
        a = 1.0 / fn("sqrt", var + small.to(cd))
        a = a if weight is None else a * weight
        shift = -(mean * a) if bias is None else bias - mean * a
        return [(x * a + shift).to(r.outs[0].tname or "")]

    return Body("map", dims, tuple(ins), ((0, out),), build)
