"""Interned metadata: two tensors of one shape, strides, dtype and offset share one `Meta`.

Interning makes a trie key a tuple of object identities, and gives each meta a place to keep what is derived from
it once: the prebuilt constructor of its wrapper, its element count, whether it is contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

DEVICE = torch.device("neuron", 0)

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
"""The dtypes that kernels work on, by their name in the loop IR. All others go to library ops."""


class Meta:
    """Shape, strides and offset in elements, and dtype. Made by `meta()` only; compare by identity."""

    __slots__ = (
        "contiguous",
        "dtype",
        "itemsize",
        "new",
        "numel",
        "offset",
        "shape",
        "span",
        "stride",
        "tname",
    )

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int
    itemsize: int
    span: int
    """Elements from the start of the buffer to just past the last one reached."""
    contiguous: bool
    new: Callable[[], Any]
    """Makes a wrapper tensor with this metadata."""
    tname: str | None
    """The dtype's name in the loop IR, None where kernels don't know it."""

    def __str__(self) -> str:
        name = self.tname or str(self.dtype).removeprefix("torch.")
        text = f"{name}[{','.join(map(str, self.shape))}]"
        if not self.contiguous:
            text += f"({','.join(map(str, self.stride))})"
        return f"{text}+{self.offset}" if self.offset else text

    __repr__ = __str__


_TABLE: dict[tuple[Any, ...], Meta] = {}


def meta(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Meta:
    """The one Meta with these values."""
    key = (tuple(shape), tuple(stride), dtype, offset)
    found = _TABLE.get(key)
    return found if found is not None else _intern(key)


def contiguous_meta(shape: Sequence[int], dtype: torch.dtype) -> Meta:
    """The Meta of a fresh row-major tensor."""
    return meta(shape, row_major(shape), dtype)


def meta_of(t: torch.Tensor) -> Meta:
    """The Meta of any strided tensor, neuron or not."""
    return meta(t.shape, t.stride(), t.dtype, int(t.storage_offset()))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """PyTorch's contiguous strides: a size-0 dim counts as 1."""
    out: list[int] = []
    step = 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def _intern(key: tuple[Any, ...]) -> Meta:
    from adaptive_eager.tensor import NeuronTensor

    shape, stride, dtype, offset = key
    m = Meta()
    m.shape, m.stride, m.dtype, m.offset = torch.Size(shape), stride, dtype, offset
    m.numel = m.shape.numel()
    m.itemsize = dtype.itemsize
    reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if m.numel else 0
    m.span = offset + reach
    m.contiguous = (
        all(s == r for n, s, r in zip(shape, stride, row_major(shape), strict=True) if n != 1)
        or not m.numel
    )
    extra = {"storage_offset": offset} if offset else {}
    m.new = functools.partial(
        torch.Tensor._make_wrapper_subclass,
        NeuronTensor,
        m.shape,
        strides=stride,
        dtype=dtype,
        device=DEVICE,
        **extra,
    )
    m.tname = DTYPE_NAMES.get(dtype)
    return _TABLE.setdefault(key, m)


def on_meta_device(m: Meta, nbytes: int = 0) -> torch.Tensor:
    """A tensor of PyTorch's `meta` device with this metadata, over a storage of at least `nbytes`.

    Used off the hot path only: what PyTorch's own meta kernels say is our oracle and our source of error messages.
    """
    elements = max(m.span, -(-nbytes // m.itemsize))
    return torch.empty(elements, dtype=m.dtype, device="meta").as_strided(
        m.shape, m.stride, m.offset
    )
