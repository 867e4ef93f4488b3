"""Ops on lists of tensors, as optimizers call them: each is its op, tensor by tensor.

torch has such loops of its own, in C++, but their ops come back through its whole dispatcher. The common ones go
straight to the recorder instead; equal kernels side by side then become one launch (`steps`).
Autograd counts a write for each element's op, not for the list's: here it is told of the list.

Note [Strides of the tape]
An optimizer records thousands of ops in a dozen calls, the same each step. Where the tape has been through a list's ops before, at
the same place and on the same slots, one look-up takes it past them all (`tape.Stride`): 0.3 µs a tensor in place of 5 to 8.
It is as if they had been recorded one by one: the nodes are the same, and so are the plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adaptive_eager import lower
from adaptive_eager.record import TAPE
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
    if name == "norm" and which == "Scalar":
        return norms
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), LOOP):
        return lambda f, args, kwargs: f._op_dk(LOOP, *args, **kwargs)
    return None


def each(one: Any, inplace: bool, fused: bool, args: Any, kwargs: dict[str, Any]) -> Any:
    """The op on each tensor; lists among the operands go along, other operands are the same for all."""
    count = len(args[0])
    operands, named = list(args), dict(kwargs)
    if fused:  # (self, tensor1, tensor2, value)
        value = operands.pop() if len(operands) > 3 else named.pop("value", 1)
        named["value"] = value
    columns = [list(a) if isinstance(a, (list, tuple)) else [a] * count for a in operands]
    wide = {k: v for k, v in named.items() if isinstance(v, (list, tuple))}
    calls: list[tuple[Any, dict[str, Any]]] = []
    for k, row in enumerate(zip(*columns, strict=True)):
        own = {**named, **{n: v[k] for n, v in wide.items()}} if wide else named
        if fused and own["value"] in (1, None):
            own = {}
        calls.append((row, own))
    out = recorded(one, calls)
    if inplace:
        torch.autograd.graph.increment_version(args[0])
        return None
    return out


def norms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The norm of each tensor."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    if any(type(x) is not NeuronTensor or x._meta.numel == 0 for x in args[0]):
        return func._op_dk(LOOP, *args, **kwargs)
    named = {} if dtype is None else {"dtype": dtype}
    return recorded(aten.linalg_vector_norm.default, [((x, order), named) for x in args[0]])


def recorded(one: Any, calls: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """The results of one op on each row of arguments (Note [Strides of the tape])."""
    with TAPE.lock:
        seg, at = TAPE.seg, TAPE.seg.node
        scalars: list[float] = []
        key = stride_key(one, calls, scalars)
        if key is not None:
            found = None if at.strides is None else at.strides.get(key)
            if found is not None and TAPE.may_stride(found):
                return TAPE.stride(found, [row[0] for row, _ in calls], scalars)
        dispatch = NeuronTensor.__torch_dispatch__
        out = [dispatch(one, (), row, own) for row, own in calls]
        if key is not None and TAPE.seg is seg:
            TAPE.learn(at, key, len(calls), len(scalars))
        return out


def small(a: float) -> bool:
    """Whether a number is a run-time scalar; larger ints are part of a recipe."""
    return type(a) is float or -(1 << 63) <= a < 1 << 63


def stride_key(
    one: Any, calls: list[tuple[Any, dict[str, Any]]], scalars: list[float]
) -> tuple[Any, ...] | None:
    """What tells these calls from others at one place of the tape, or None; collects their run-time scalars in the order in
    which recording one by one would. Gives their tensors slots in that order too."""
    f = id(one)
    numbers: tuple[type, ...] = (float, int) if f in lower.RUNTIME_INTS else (float,)
    if f in lower.LITERAL_NUMBERS:
        numbers = ()
    seg, slot = TAPE.seg, TAPE.slot
    key: list[Any] = [f]
    for row, own in calls:
        for a in row:
            kind = type(a)
            if kind is NeuronTensor:
                b = a._buf
                if b.seg is not seg:
                    slot(b)
                key += (a._meta, b.slot)
            elif kind in numbers and small(a):
                key.append(kind)
                scalars.append(a)
            elif kind in (float, int, bool):
                key += (kind, repr(a))
            else:
                return None
        for name, v in own.items():
            kind = type(v)
            if kind in numbers and small(v):
                key += (name, kind)
                scalars.append(v)
            elif kind in (float, int, bool, torch.dtype):
                key += (name, kind, repr(v))
            else:
                return None
        key.append(None)
    return tuple(key)
