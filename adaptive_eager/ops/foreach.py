"""Ops on lists of tensors, as optimizers call them: each is its op, tensor by tensor.

torch has such loops of its own, in C++, but their ops come back through its whole dispatcher. The common ones go
straight to the recorder instead; equal kernels side by side then become one launch (`steps`).
Autograd counts a write for each element's op, not for the list's: here it is told of the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adaptive_eager.tensor import NeuronTensor

aten = torch.ops.aten
LOOP = torch._C.DispatchKey.CompositeExplicitAutograd

BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
UNARY = ("sqrt", "neg", "exp", "abs", "reciprocal", "rsqrt", "log", "sigmoid", "tanh", "zero")
FUSED = ("addcmul", "addcdiv")


def overload(name: str, which: str) -> Any:
    """The overload of aten that one element of a list op is, or None where torch's own loop has to do."""
    base = name.removesuffix("_")
    if base in BINARY:
        tensor = "default" if base in ("maximum", "minimum") else "Tensor"
        if base in ("maximum", "minimum") and which != "List":
            return None
        return getattr(getattr(aten, name, None), tensor, None)
    if base in UNARY and which == "default":
        return getattr(getattr(aten, name, None), "default", None)
    if base in FUSED and which in ("Scalar", "ScalarList"):
        return getattr(getattr(aten, name, None), "default", None)
    if base == "lerp" and which in ("Scalar", "List"):
        return getattr(getattr(aten, name), "Scalar" if which == "Scalar" else "Tensor")
    return None


def handler(func: Any) -> Callable[..., Any] | None:
    """What runs a list op: calls of the recorder, torch's loop, or None where torch has none."""
    schema = func._schema
    name = schema.name.removeprefix("aten::_foreach_")
    which = schema.overload_name or "default"
    one = overload(name, which)
    if one is not None:
        fused = name.removesuffix("_") in FUSED
        return lambda f, args, kwargs: each(one, name.endswith("_"), fused, args, kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), LOOP):
        return lambda f, args, kwargs: f._op_dk(LOOP, *args, **kwargs)
    return None


def each(one: Any, inplace: bool, fused: bool, args: Any, kwargs: dict[str, Any]) -> Any:
    """The op on each tensor; lists among the operands go along, other operands are the same for all."""
    dispatch = NeuronTensor.__torch_dispatch__
    count = len(args[0])
    operands, named = list(args), dict(kwargs)
    if fused:  # (self, tensor1, tensor2, value)
        value = operands.pop() if len(operands) > 3 else named.pop("value", 1)
        named["value"] = value
    columns = [list(a) if isinstance(a, (list, tuple)) else [a] * count for a in operands]
    wide = {k: v for k, v in named.items() if isinstance(v, (list, tuple))}
    out = []
    for k, row in enumerate(zip(*columns, strict=True)):
        own = {**named, **{n: v[k] for n, v in wide.items()}} if wide else named
        if own.get("value") in (1, None) and fused:
            own = {}
        out.append(dispatch(one, (), row, own))
    if inplace:
        torch.autograd.graph.increment_version(args[0])
        return None
    return out
