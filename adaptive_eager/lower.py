"""From an aten call to its recipe: what it makes, what it writes, and its loop form where it has one.

A recipe is made once for an op on given metas and literal arguments. PyTorch's own meta kernel is run then: it
says what comes out and raises PyTorch's error for a bad call, at the user's line, before anything is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adaptive_eager.kernels.build import Builder, Val
from adaptive_eager.meta import Meta, contiguous_meta, meta, meta_of, on_meta_device
from adaptive_eager.tape import Recipe, S, T
from adaptive_eager.tensor import NeuronTensor

Build = Callable[[Builder, "list[Val | None]", "list[Val]"], "list[Val]"]


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Where an operand lies in an iteration space: offset and strides over its dims, in elements.

    level: "e" one element for each point, "r" one for each row, "c" one for each column and "f" a single one, both
    known after all rows.
    """

    level: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """An op's loop form.

    kind: "map" pointwise; "row" reduces the last dim; "col" reduces all but the last; "all" reduces everything.
    dims: the iteration space, without size-1 dims except a reduction's last. ins: a map for each tensor operand, None where
    its old values are not read. stores: (index of a new buffer, or ~operand for a write in place, map). build: traces
    the arithmetic: values of `ins` and scalars in, values of `stores` out. sizes: plan-time numbers handed to build as
    further scalars.
    """

    kind: str
    dims: tuple[int, ...]
    ins: tuple[IndexMap | None, ...]
    stores: tuple[tuple[int, IndexMap], ...]
    build: Build
    sizes: tuple[int, ...] = ()
    guard: tuple[int, Callable[[torch.Tensor], BaseException]] | None = None
    """(operand, error of its host values): build returns one more value, a count of faults in the operand, as i64 at
    finish level; when it is not 0 the launch raises."""
    position: IndexMap | None = None
    """Where a point lies in its tensor, counted row by row: build gets it as one more value, after those of `ins`."""


class Call:
    """A call taken apart: its recipe key, its tensors and its run-time scalars."""

    __slots__ = ("args", "func", "key", "kwargs", "literal", "scalars", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Any] = []
        self.scalars: list[float] = []
        f = id(func)
        if f not in SEEN:
            seen(func)
        self.literal = f not in RUNTIME_INTS
        encode = self.encode if f not in LITERAL_NUMBERS else self.encode_literal
        parts = [f, *map(encode, args)]
        if kwargs:
            for k, v in kwargs.items():
                if v is not None:
                    parts += (k, encode(v))
        if f in SEEDED:
            from adaptive_eager.random import GENERATOR

            self.scalars.extend(GENERATOR.draw())
        self.key = tuple(parts)

    def encode(self, a: Any) -> Any:
        kind = type(a)
        if kind is NeuronTensor:
            self.tensors.append(a)
            return a._meta
        if kind is float:
            self.scalars.append(a)
            return float
        if kind is int:
            if self.literal or not -(1 << 63) <= a < 1 << 63:
                return (int, a)
            self.scalars.append(a)
            return int
        if a is None or kind is str:
            return a
        if kind is list or kind is tuple or kind is torch.Size:
            return ("[", *map(self.encode, a))
        if isinstance(a, torch.Tensor):
            t = bring(self.func, a)
            self.tensors.append(t)
            return t._meta
        if kind is complex:
            return (complex, repr(a))
        if kind is torch.Generator:
            return (id(a), object())
        return (kind, a)

    def encode_literal(self, a: Any) -> Any:
        return (float, a.hex()) if type(a) is float else self.encode(a)


RUNTIME_INTS: set[int] = set()
"""ids of ops whose int arguments are numbers to compute with, not dims or sizes."""
LITERAL_NUMBERS: set[int] = set()
"""ids of ops whose loop form depends on a number's value (pow with exponent 2)."""
NATIVE: dict[int, Callable[[Recipe, tuple[torch.Tensor, ...]], Body | None]] = {}
"""Loop form of an op by id: (recipe, its inputs as meta tensors) → Body or None."""
LIBRARY: dict[int, Any] = {}
"""Ops run by a library kernel that torch ships, by id: its out= overload, or None where the result's memory is adopted."""
SEEDED: set[int] = set()
"""ids of ops that draw random numbers."""
TRIED: set[int] = set()
"""ids of library ops whose meta kernels accept what their CPU kernels refuse."""
SEEN: set[int] = set()
KEEP: list[Any] = []
"""Overloads whose ids stand in the tables above."""


def seen(func: Any) -> None:
    """Note an op's first call. One that draws on the CPU has its numbers in its key: each is tried before it is recorded."""
    KEEP.append(func)
    SEEN.add(id(func))
    if torch.Tag.nondeterministic_seeded in func.tags:
        SEEDED.add(id(func))
        if id(func) not in NATIVE:
            LITERAL_NUMBERS.add(id(func))


def bring(func: Any, a: torch.Tensor) -> Any:
    """A CPU tensor among the arguments: 0-dim ones and CPU indices are copied to the device, others are PyTorch's error."""
    from adaptive_eager.fallback import CPU_ARGUMENTS_OK
    from adaptive_eager.record import device_mismatch, upload

    if (
        type(a) is not torch.Tensor
        and type(a) is not torch.nn.Parameter
        or a.layout is not torch.strided
    ):
        raise Unsupported
    if a.device.type == "cpu" and (a.dim() == 0 or str(func) in CPU_ARGUMENTS_OK):
        return upload(a)
    device_mismatch(a)
    return None


class Unsupported(Exception):  # noqa: N818
    """The call cannot be recorded; it runs at once instead."""


def template(a: Any, at: list[int], literal: bool, numbers_literal: bool) -> Any:
    """An argument with placeholders for tensors and run-time scalars, numbered as `Call.encode` meets them."""
    kind = type(a)
    if isinstance(a, torch.Tensor):
        at[0] += 1
        return T(at[0] - 1)
    if (kind is float and not numbers_literal) or (
        kind is int and not literal and -(1 << 63) <= a < 1 << 63
    ):
        at[1] += 1
        return S(at[1] - 1)
    if kind is list or kind is tuple or kind is torch.Size:
        items = [template(x, at, literal, numbers_literal) for x in a]
        return items if kind is list else tuple(items)
    return a


def fill(a: Any, tensors: Any, scalars: Any) -> Any:
    """The inverse of `template`."""
    kind = type(a)
    if kind is T:
        return tensors[a.i]
    if kind is S:
        return scalars[a.i]
    if kind is list:
        return [fill(x, tensors, scalars) for x in a]
    if kind is tuple:
        return tuple([fill(x, tensors, scalars) for x in a])
    return a


def make_recipe(call: Call) -> Recipe | None:
    """The recipe of a call, or None where its result can't be foreseen.

    Raises:
        Exception: PyTorch's own, for bad input to an op with a loop form.
    """
    func = call.func
    f = id(func)
    native = NATIVE.get(f)
    at = [0, 0]
    literal, numbers = call.literal, f in LITERAL_NUMBERS
    r = Recipe()
    r.func, r.name = func, str(func).removeprefix("aten.").rsplit(".", 1)[0]
    r.args = tuple([template(a, at, literal, numbers) for a in call.args])
    r.kwargs = {
        k: template(v, at, literal, numbers) for k, v in call.kwargs.items() if v is not None
    }
    r.ins = tuple([t._meta for t in call.tensors])
    r.scalar_types = tuple(map(type, call.scalars))
    metas = tuple([on_meta_device(t._meta, t._buf.nbytes) for t in call.tensors])
    kwargs = fill(list(r.kwargs.values()), metas, call.scalars)
    named = dict(zip(r.kwargs, kwargs, strict=True))
    if "device" in named:
        named["device"] = torch.device("meta")
    if isinstance(named.get("generator"), torch.Generator) or str(func) in WRONG_META:
        return None
    for a in func._schema.arguments:
        if a.alias_info is not None and a.alias_info.is_write and f not in OVERLAP_OK:
            _no_overlap(r)
            break
    rule = RULES.get(f)
    out = rule(r, metas) if rule is not None else None
    if out is not None and not _dtypes_agree(r, out):
        out = None
    if out is not None:
        r.single, r.writes = True, (0,) if func._schema.is_mutable else ()
        r.outs, r.returns = ((), (-1,)) if r.writes else ((out,), (0,))
    else:
        try:
            result = func(*fill(list(r.args), metas, call.scalars), **named)
        except Exception:
            if native is None:
                return None
            _raise_as_cpu(r, call.scalars)
            return None
        if not _describe(r, result, metas):
            return None
        if rule is not None and not _dtypes_agree(r, r.outs[0] if r.outs else r.ins[r.writes[0]]):
            return None
    library = f in LIBRARY
    r.body = None
    if native is not None and all(m.numel for m in (*r.ins, *r.outs[:1])):
        r.body = native(r, metas)
        if r.body is None and rule is not None:
            _raise_as_cpu(r, call.scalars, one_element=True)
    r.native = (
        r.body is not None
        or library
        or not any(m.numel for m in (*r.outs, *[r.ins[k] for k in r.writes]))
    )
    unsure = not r.native or (library and r.body is None and (f in SEEDED or f in TRIED))
    if unsure and not _trial(r, call.scalars):
        return None
    r.can_fail = (r.body is not None and r.body.guard is not None) or (
        r.body is None and (not library or any(not m.dtype.is_floating_point for m in r.ins))
    )
    return r


OVERLAP_OK: set[int] = set()
"""ids of in-place ops that may write one element several times (fill_, zero_)."""
RULES: dict[int, Callable[[Recipe, tuple[torch.Tensor, ...]], Meta | None]] = {}
"""Shape rules by id: the output's meta of a common call, None where PyTorch's meta kernel must say."""
TRIAL_ELEMENTS = 1 << 16
"""Inputs of more elements than this are not tried."""
_AGREED: dict[Any, torch.dtype] = {}


def _dtypes_agree(r: Recipe, out: Meta) -> bool:
    """Whether the CPU gives our shape rule's dtype: asked once for each op and dtypes, on tensors of one element.

    Raises:
        Exception: the CPU's own, where it refuses the dtypes.
    """
    dims = tuple([len(m.shape) > 0 for m in r.ins])
    key = (
        id(r.func),
        tuple([m.dtype for m in r.ins]),
        dims,
        r.scalar_types,
        repr((r.args, r.kwargs)),
    )
    dtype = _AGREED.get(key)
    if dtype is None:
        tensors = [
            torch.ones((1,) if d else (), dtype=m.dtype, device="cpu")
            for m, d in zip(r.ins, dims, strict=True)
        ]
        numbers = [t(1) for t in r.scalar_types]
        dtype = _AGREED[key] = _call_on_cpu(r, tensors, numbers, any_shape=True).dtype
    return dtype == out.dtype


def _no_overlap(r: Recipe) -> None:
    """PyTorch's error for a write in place to a tensor that holds one element at several indices."""
    first = r.args[0] if r.args else None
    if isinstance(first, T) and r.func._schema.name.endswith("_"):
        m = r.ins[first.i]
        if any(n > 1 and s == 0 for n, s in zip(m.shape, m.stride, strict=True)):
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
                "Please clone() the tensor before performing the operation."
            )


def _call_on_cpu(
    r: Recipe, tensors: list[torch.Tensor], scalars: list[float], any_shape: bool = False
) -> Any:
    """The recipe's op on CPU tensors in place of its own; `any_shape` where they have other shapes. Draws leave the CPU's generator alone."""
    named = {
        k: torch.device("cpu") if k == "device" else fill(v, tensors, scalars)
        for k, v in r.kwargs.items()
        if not (any_shape and k == "memory_format")
    }
    args = fill(list(r.args), tensors, scalars)
    if id(r.func) not in SEEDED:
        return r.func(*args, **named)
    from adaptive_eager.random import GENERATOR

    return GENERATOR.call(r.func, args, named, (0, 0))


def _raise_as_cpu(r: Recipe, scalars: list[float], one_element: bool = False) -> None:
    """Run the op on CPU tensors of zeros, for the error it raises there; its result is thrown away."""
    shapes = [(1,) * len(m.shape) if one_element else m.shape for m in r.ins]
    zeros = [
        torch.zeros(n, dtype=m.dtype, device="cpu") for n, m in zip(shapes, r.ins, strict=True)
    ]
    _call_on_cpu(r, zeros, scalars, any_shape=one_element)


def _filled(m: Meta, values: Any) -> torch.Tensor:
    """A CPU tensor of this meta: random floats and ones, or zeros."""
    n = max(m.span, 1)
    if m.dtype.is_floating_point and m.dtype.itemsize > 1:
        base = values(
            n,
            dtype=torch.float32,
            device="cpu",
            **({"generator": _TRIAL} if values is torch.rand else {}),
        ).to(m.dtype)
    else:
        base = torch.full((n,), values is torch.rand, dtype=torch.bool, device="cpu").to(m.dtype)
    return torch.as_strided(base, m.shape, m.stride, m.offset)


_TRIAL = torch.Generator(device="cpu")
"""Trials draw from a generator of their own: the CPU's default one is left alone."""


def _trial(r: Recipe, scalars: list[float]) -> bool:
    """Whether an op without a loop form gives on the CPU what its meta kernel promised: tried once, on small random values and on zeros.

    Takes over the CPU's strides where those differ. False sends the op to the immediate path, where its error or its
    unexpected result shows at the user's line.
    """
    if sum(m.numel for m in r.ins) > TRIAL_ELEMENTS:
        return True
    result = None
    for values in (torch.rand, torch.zeros):
        tensors = [_filled(m, values) for m in r.ins]
        try:
            result = _call_on_cpu(r, tensors, scalars)
            break
        except Exception:  # noqa: S112 - the next values may suit the op
            continue
    else:
        return False
    many = result if isinstance(result, (tuple, list)) else (result,)
    outs = list(r.outs)
    for k, v in zip(r.returns, many, strict=True):
        if k is not None and k >= 0:
            if v.shape != outs[k].shape or v.dtype != outs[k].dtype:
                return False
            outs[k] = meta(v.shape, v.stride(), v.dtype)
    r.outs = tuple(outs)
    return True


def _as_is(r: Recipe, outs: list[Meta]) -> list[Meta]:
    return outs


def _no_saved_statistics(r: Recipe, outs: list[Meta]) -> list[Meta]:
    """In evaluation the CPU's batch norm saves nothing; its meta kernel says otherwise."""
    training = r.args[5] if len(r.args) > 5 else r.kwargs.get("training")
    return _statistics_dtype(
        r, outs if training else [outs[0], *[contiguous_meta((0,), m.dtype) for m in outs[1:]]]
    )


def _statistics_dtype(r: Recipe, outs: list[Meta]) -> list[Meta]:
    """Where all operands have one dtype, the CPU's norms give their statistics that dtype; meta kernels say float32."""
    dtypes = {m.dtype for m in r.ins}
    if len(dtypes) > 1:
        return outs
    (dtype,) = dtypes
    return [outs[0], *[meta(m.shape, m.stride, dtype) for m in outs[1:]]]


ONEDNN = frozenset({torch.float32, torch.bfloat16})
"""What the CPU's convolutions leave to oneDNN: the others have no channels_last in three dims."""


def _channels_last(r: Recipe, outs: list[Meta]) -> list[Meta]:
    """The CPU's convolutions keep channels_last of their input or weight; the meta kernel says row-major."""
    (out,) = outs
    if len(out.shape) == 5 and out.dtype not in ONEDNN:
        return outs
    for m in r.ins[:2]:
        if len(m.shape) == len(out.shape):
            kept = torch._prims_common.suggest_memory_format(on_meta_device(m))
            if kept is not torch.contiguous_format:
                return [_formatted(out, kept)]
    return outs


def _row_major_backward(r: Recipe, outs: list[Meta]) -> list[Meta]:
    """The gradients of three dims outside oneDNN are row-major; the meta kernel keeps channels_last."""
    if r.ins[0].dtype in ONEDNN:
        return outs
    return [_formatted(m, torch.contiguous_format) if len(m.shape) == 5 else m for m in outs]


def _formatted(m: Meta, kept: torch.memory_format) -> Meta:
    return meta_of(torch.empty(m.shape, dtype=m.dtype, device="meta", memory_format=kept))


META_FIXES: dict[str, Callable[[Recipe, list[Meta]], list[Meta]]] = {
    "aten.convolution.default": _channels_last,
    "aten.convolution_backward.default": _row_major_backward,
    "aten.native_batch_norm.default": _no_saved_statistics,
    "aten._native_batch_norm_legit.default": _no_saved_statistics,
    "aten.native_layer_norm.default": _statistics_dtype,
}
"""Ops whose meta kernel promises other outputs than their CPU kernel gives."""

WRONG_META = frozenset({"aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"})
"""Ops whose meta kernel can't be trusted: they run at once."""


def _describe(r: Recipe, result: Any, metas: tuple[torch.Tensor, ...]) -> bool:
    """Fill in outs, writes and returns from the schema and what the meta kernel returned."""
    schema = r.func._schema
    position = {id(t): k for k, t in enumerate(metas)}
    r.single = not isinstance(result, (tuple, list))
    written: list[int] = []
    names = [a.name for a in schema.arguments]
    for k, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = r.args[k] if k < len(r.args) else r.kwargs.get(names[k])
            written += [
                v.i for v in (value if isinstance(value, list) else [value]) if isinstance(v, T)
            ]
    r.writes = tuple(written)
    outs: list[Meta] = []
    returns: list[int | None] = []
    for value in [result] if r.single else result:
        if value is None:
            returns.append(None)
        elif not isinstance(value, torch.Tensor):
            return False
        elif id(value) in position:
            returns.append(~position[id(value)])
        else:
            if value.layout is not torch.strided or value.device.type != "meta":
                return False
            m = meta_of(value)
            if m.offset:
                return False
            returns.append(len(outs))
            outs.append(m)
    outs = META_FIXES.get(str(r.func), _as_is)(r, outs)
    for k in r.writes:
        if metas[k].shape != r.ins[k].shape or meta_of(metas[k]) is not r.ins[k]:
            return False
    r.outs, r.returns = tuple(outs), tuple(returns)
    return True
