"""Ops with a handler of their own: copies across devices, reads of one value, fresh tensors, changes of storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adaptive_eager import fallback, views
from adaptive_eager.memory import Buffer
from adaptive_eager.meta import meta_of, on_meta_device
from adaptive_eager.record import download, empty, upload, write_now
from adaptive_eager.tensor import NeuronTensor, rebind

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {
    "aten.detach.default": views.alias,
    "aten.alias.default": views.alias,
    "aten._unsafe_view.default": views.view,
}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Enter a handler under full op names."""

    def enter(f: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, f))
        return f

    return enter


def _node(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from adaptive_eager.dispatch import node

    return node(func, args, kwargs)


@handles("aten._to_copy.default")
def to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To another device: a download, then the CPU does the rest. Else a copy on the device."""
    device = kwargs.get("device")
    if device is not None and device.type != "neuron":
        if device.type == "meta":
            return func(on_meta_device(args[0]._meta), **kwargs)
        host = download(args[0])
        rest = {k: v for k, v in kwargs.items() if v is not None}
        return (
            func(host, **rest)
            if set(rest) - {"device", "non_blocking"} or device.type != "cpu"
            else host
        )
    kept = {
        k: v
        for k, v in kwargs.items()
        if v is not None and k not in ("device", "non_blocking", "pin_memory", "layout")
    }
    return _node(func, args, kept)


@handles("aten.copy_.default")
def copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """dst.copy_(src) in any direction. The host side is read or written before this returns."""
    dst, src = args[0], args[1]
    if type(dst) is not NeuronTensor:
        dst.copy_(download(src))
        return dst
    if type(src) is not NeuronTensor:
        if src.device.type == "meta" or src.layout is not torch.strided:
            raise NotImplementedError(f"copy_ from {src.device} {src.layout} to neuron:0")
        b = dst._buf
        fresh = b.block is None and b.seg is None and b.error is None
        if fresh and dst.shape == src.shape and dst._meta.numel * dst._meta.itemsize == b.nbytes:
            write_now(b, dst._meta, src)
            return dst
        return _node(func, (dst, upload(src.detach())), {})
    return _node(func, (dst, src), {})


@handles("aten._local_scalar_dense.default")
def item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """item(): the one read that most programs do."""
    return download(args[0]).item()


@handles(
    "aten.empty_like.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
)
def empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fresh tensor by the example of another: only metadata is looked at."""
    device = kwargs.get("device")
    x = args[0]
    like = on_meta_device(x._meta) if type(x) is NeuronTensor else x
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    if device is not None and torch.device(device).type != "neuron":
        return func(like, *args[1:], **rest, device=device)
    m = func(like, *args[1:], **rest, device="meta")
    return empty(m.shape, m.dtype, m.stride())


def _filled(value: Any) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rest = args[1:]
        fill = rest[-1] if value is None else value
        keep = rest[:-1] if value is None else rest
        base = aten.new_empty.default if ".new_" in str(func) else aten.empty_like.default
        out = empty_like(base, (args[0], *keep), kwargs)
        return out.fill_(fill)

    return handler


HANDLERS["aten.zeros_like.default"] = _filled(0)
HANDLERS["aten.ones_like.default"] = _filled(1)
HANDLERS["aten.full_like.default"] = _filled(None)
HANDLERS["aten.new_zeros.default"] = _filled(0)
HANDLERS["aten.new_ones.default"] = _filled(1)
HANDLERS["aten.new_full.default"] = _filled(None)


@handles("aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default")
def unsafe_split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views as split makes them; autograd does not know them as such."""
    safe = {"unsafe_split": aten.split.Tensor}.get(
        func.overloadpacket.__name__, aten.split_with_sizes.default
    )
    return views.view(safe, args, kwargs)


@handles("aten.addbmm_.default")
def addbmm_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one in-place op that resizes what it is added to."""
    fallback.put(args[0], aten.addbmm.default(*args, **kwargs), warn=False)
    return args[0]


@handles("aten.lift_fresh.default", "aten.lift.default")
def lift(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing to lift."""
    return args[0]


@handles("aten.is_pinned.default")
def is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Device memory is never pinned."""
    return False


@handles("aten.record_stream.default")
def record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One queue: nothing to record."""


@handles("aten._has_compatible_shallow_copy_type.default")
def compatible(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """What `x.data = y` asks first: any neuron tensor can take another's metadata."""
    return type(args[0]) is type(args[1]) is NeuronTensor


@handles("aten.set_.source_Tensor", "aten.set_.source_Tensor_storage_offset")
def set_source(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.set_(y, ...): x looks at y's buffer from now on."""
    x, source = args[0], args[1]
    if type(source) is not NeuronTensor:
        source = upload(source)
    m = source._meta
    if len(args) > 2:
        base = on_meta_device(m, source._buf.nbytes)
        m = meta_of(
            torch.as_strided(
                base,
                args[3],
                args[4] if len(args) > 4 else torch.empty(args[3], device="meta").stride(),
                args[2],
            )
        )
    rebind(x, source._buf, m)
    return x


@handles("aten.set_.default")
def set_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.set_(): an empty tensor of the same dtype."""
    from adaptive_eager.meta import contiguous_meta

    rebind(args[0], Buffer(0), contiguous_meta((0,), args[0].dtype))
    return args[0]


@handles("aten._efficientzerotensor.default")
def zero_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros that are stored."""
    return torch.zeros(args[0], dtype=kwargs.get("dtype"), device="neuron")
