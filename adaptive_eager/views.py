"""Views: no node on the tape, only another meta over the same buffer.

A third of the dispatches of a training step are views, so the result meta is cached by (op, meta, arguments).
The common ones have rules of their own; PyTorch's meta kernels answer for the rest and for every bad call, whose
error is then PyTorch's.

Note [Views in inference mode]
A view of a normal tensor shares its version counter, also inside `torch.inference_mode()`, where everything that is made anew has none.
"""

from __future__ import annotations

from typing import Any

import torch

from adaptive_eager.memory import Buffer, memory
from adaptive_eager.meta import Meta, meta, meta_of, on_meta_device
from adaptive_eager.tensor import NeuronTensor, rebind, wrap

_CACHE: dict[Any, Meta | tuple[Meta, ...]] = {}
MAX_CACHED = 100_000


def freeze(a: Any) -> Any:
    """An argument as a part of a key; numbers with their type (1 == 1.0 == True in Python)."""
    kind = type(a)
    if kind is list or kind is tuple or kind is torch.Size:
        return (kind is list, *map(freeze, a))
    if kind is int or kind is str or a is None:
        return a
    return (kind, a)


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any op whose result shares its first tensor's memory."""
    x = args[0]
    if type(x) is not NeuronTensor:
        raise NotImplementedError(f"{func}: a view of {type(x).__name__}")
    key: Any = (id(func), x._meta, *map(freeze, args[1:]))
    if kwargs:
        key = (*key, *((k, freeze(v)) for k, v in kwargs.items()))
    found = _CACHE.get(key)
    if found is None:
        found = _derive(func, x, args, kwargs)
        if len(_CACHE) > MAX_CACHED:
            _CACHE.clear()
        if found is None:
            return materialised(func, args, kwargs)
        _CACHE[key] = found
    buffer = x._buf
    if _inference() and not x.is_inference():
        with torch.inference_mode(False):  # Note [Views in inference mode]
            return _over(buffer, found)
    return _over(buffer, found)


def _over(buffer: Buffer, found: Meta | tuple[Meta, ...]) -> Any:
    if type(found) is tuple:
        return [wrap(buffer, m) for m in found]
    t = found.new()  # type: ignore[union-attr]
    t._buf = buffer
    t._meta = found
    return t


_inference = torch.is_inference_mode_enabled


def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """detach and alias: the same buffer and meta. Autograd asks for one at each saved output."""
    x = args[0]
    m = x._meta
    if _inference() and not x.is_inference():
        with torch.inference_mode(False):  # Note [Views in inference mode]
            return _over(x._buf, m)
    t = m.new()
    t._buf = x._buf
    t._meta = m
    return t


def _derive(
    func: Any, x: NeuronTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Meta | tuple[Meta, ...] | None:
    base = on_meta_device(x._meta, x._buf.nbytes)
    result = func(base, *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        return None if flagged(result) or result.dtype.itemsize > 16 else meta_of(result)
    if any(flagged(r) for r in result):
        return None
    return tuple(map(meta_of, result))


def flagged(t: torch.Tensor) -> bool:
    """Whether a result's bytes are not its values (lazy conjugation or negation)."""
    return t.is_conj() or t.is_neg()


def materialised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A conj or neg view as a copy: our buffers hold values, never flags."""
    from adaptive_eager import fallback

    return fallback.immediate(func, args, kwargs)


def inplace_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """t_, squeeze_, resize_ ...: the same tensor object gets another meta, and a larger buffer where it needs one."""
    x = args[0]
    base = on_meta_device(x._meta, x._buf.nbytes)
    others = [
        on_meta_device(a._meta, a._buf.nbytes) if type(a) is NeuronTensor else a for a in args[1:]
    ]
    func(base, *others, **kwargs)
    reshape(x, meta_of(base))
    return x


def reshape(x: NeuronTensor, m: Meta) -> None:
    """Give a tensor another meta in place; its storage grows where the meta reaches past it."""
    need = m.span * m.itemsize
    if need > x._buf.nbytes:
        grow(x._buf, need)
    rebind(x, x._buf, m)


def grow(buffer: Buffer, nbytes: int) -> None:
    """Enlarge a buffer in place, contents kept: storages grow under all their views."""
    from adaptive_eager.record import TAPE, allocate_now

    old = buffer.nbytes
    if buffer.block is None and buffer.seg is None or old == 0:
        buffer.block, buffer.nbytes = None, nbytes
        return
    TAPE.value(buffer, "resize")
    bytes_meta = meta((old,), (1,), torch.uint8)
    kept = memory().host(buffer, bytes_meta).clone()
    buffer.block = buffer.owner = None
    buffer.nbytes = nbytes
    allocate_now(buffer)
    memory().host(buffer, bytes_meta).copy_(kept)
