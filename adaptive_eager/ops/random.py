"""Ops that draw, as loops: each element's numbers are a function of its index, the op's offset and the seed (`kernels.philox`).

So dropout fuses with what is around it, draws do not depend on mode, fusion, strides or threads, and nothing is drawn on the CPU.
Ops without a loop form here draw on the CPU with a generator of their own (`random`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from adaptive_eager import lower
from adaptive_eager.kernels.build import Builder, Val, fn, random, where
from adaptive_eager.lower import Body
from adaptive_eager.meta import contiguous_meta
from adaptive_eager.ops.pointwise import space
from adaptive_eager.ops.special import handles
from adaptive_eager.tape import Recipe, S, T

aten = torch.ops.aten

Draw = Callable[[Builder, "list[Val | None]", "list[Val]", "Draws", str], "list[Val]"]
"""builder, operands, numbers (f64), where draws come from, the result's dtype -> values of the stores."""
STEPS = {"bf16": 256.0, "f16": 2048.0}
"""How many numbers in [0, 1) a half type's uniform draw tells apart: as many as it has digits."""


class Draws:
    """One op's source of random numbers at each point."""

    def __init__(self, index: Val, seed: Val, offset: Val) -> None:
        self.index, self.seed, self.offset = index, seed, offset

    def uniform(self, dtype: str, draw: int = 0) -> Val:
        """In [0, 1): f64, or f32 for all others."""
        return random(self.index, self.seed, self.offset, "f64" if dtype == "f64" else "f32", draw)


def _uniform(b: Builder, x: list[Val | None], n: list[Val], d: Draws, to: str) -> list[Val]:
    u = d.uniform(to)
    if to in STEPS:
        u = fn("floor", u * STEPS[to]) * (1 / STEPS[to])
    low, high = n[0].to(u.dtype), n[1].to(u.dtype)
    return [u * (high - low) + low]


def _normal(b: Builder, x: list[Val | None], n: list[Val], d: Draws, to: str) -> list[Val]:
    """Box and Muller's pair, of which one is used."""
    u, v = d.uniform(to, 0), d.uniform(to, 1)
    r = fn("sqrt", fn("log", 1.0 - u) * -2.0)
    return [r * fn("cos", v * (2 * math.pi)) * n[1].to(u.dtype) + n[0].to(u.dtype)]


def _bernoulli_number(
    b: Builder, x: list[Val | None], n: list[Val], d: Draws, to: str
) -> list[Val]:
    return [where(d.uniform("f64") < n[0], b.const(1, "f32"), 0.0)]


def _bernoulli_tensor(
    b: Builder, x: list[Val | None], n: list[Val], d: Draws, to: str
) -> list[Val]:
    p = x[0]
    assert p is not None
    return [where(d.uniform(p.dtype) < p, b.const(1, p.dtype), 0.0)]


def _dropout(b: Builder, x: list[Val | None], n: list[Val], d: Draws, to: str) -> list[Val]:
    v = x[0]
    assert v is not None
    kept = 1.0 - n[0]
    keep = d.uniform("f32") < kept.to("f32")
    scale = where(kept.eq(0.0), 0.0, 1.0 / kept)
    one = where(keep, b.const(1, v.dtype), 0.0)
    return [v * one * scale.to(v.dtype), keep]


TABLE: dict[str, tuple[Draw, tuple[float, ...]]] = {
    "uniform_.default": (_uniform, (0.0, 1.0)),
    "normal_.default": (_normal, (0.0, 1.0)),
    "bernoulli_.float": (_bernoulli_number, (0.5,)),
    "bernoulli.default": (_bernoulli_tensor, ()),
    "native_dropout.default": (_dropout, (0.5,)),
}
"""The loop form, and the numbers that a call may leave out."""
FLOATS = ("f64", "f32", "f16", "bf16")


def lower_draw(name: str, r: Recipe) -> Body | None:
    """The loop form of a drawing op; None where a dtype or an argument is beyond it."""
    draw, defaults = TABLE[name]
    target = r.ins[0]
    operands, *rest = r.args
    if not isinstance(operands, T) or r.kwargs.get("generator") is not None:
        return None
    numbers: list[Any] = [a for a in rest if not isinstance(a, bool)]
    numbers += [
        r.kwargs.get(k, v)
        for k, v in zip(_names(r)[len(numbers) :], defaults[len(numbers) :], strict=False)
    ]
    if name == "native_dropout.default" and False in (*rest, r.kwargs.get("train")):
        return None
    unread = bool(r.writes)
    floating = name != "bernoulli_.float"
    if target.tname is None or (floating and target.tname not in FLOATS):
        return None
    index = contiguous_meta(target.shape, torch.int64)
    out = target if r.writes else r.outs[0]
    laid = space(out, (None if unread else target, index))
    if laid is None or any(m.stride != out.stride for m in r.outs[1:]):
        return None
    dims, (source, position), store = laid
    stores = [(~0 if r.writes else 0, store)]
    dtypes = [out.tname]
    for k, m in enumerate(r.outs[1:], 1):
        stores.append((k, store))
        dtypes.append(m.tname)

    def build(b: Builder, values: list[Val | None], scalars: list[Val]) -> list[Val]:
        *own, where_at = values
        *given, seed, offset = scalars
        assert where_at is not None
        x = [None if v is None else v for v in own]
        n = [
            given[a.i].to("f64") if isinstance(a, S) else b.const(float(a), "f64") for a in numbers
        ]
        results = draw(b, x, n, Draws(where_at, seed, offset), target.tname or "f32")
        return [v.to(t or "f32") for v, t in zip(results, dtypes, strict=True)]

    return Body("map", dims, (source,), tuple(stores), build, position=position)


def _names(r: Recipe) -> list[str]:
    """Names of an op's numbers."""
    return [a.name for a in r.func._schema.arguments[1:] if str(a.type) == "float"]


def _checked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Numbers that the CPU refuses are refused here, by the CPU: they are run-time scalars of a recipe that may be known."""
    from adaptive_eager.dispatch import node

    numbers = [a for a in (*args[1:], *kwargs.values()) if type(a) in (float, int)]
    name = func._schema.name
    odd = any(not math.isfinite(a) for a in numbers)
    if "bernoulli" in name or "dropout" in name:
        odd = odd or any(not 0 <= a <= 1 for a in numbers)
    elif "normal" in name:
        odd = odd or any(a < 0 for a in numbers)
    else:
        odd = odd or len(numbers) < 2 or not numbers[0] <= numbers[1]
    if odd and numbers:
        one = torch.ones(1, dtype=args[0].dtype, device="cpu")
        func(one, *args[1:], **{k: v for k, v in kwargs.items() if k != "generator"})
    return node(func, args, kwargs)


def register() -> None:
    """Enter the table."""
    for name in TABLE:
        packet, overload = name.split(".")
        op = getattr(getattr(aten, packet), overload)
        lower.KEEP.append(op)

        def native(r: Recipe, metas: Any, name: str = name) -> Body | None:
            return lower_draw(name, r)

        lower.NATIVE[id(op)] = native
        handles(f"aten.{name}")(_checked)


register()
