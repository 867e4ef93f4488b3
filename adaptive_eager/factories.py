"""Kernels of the PrivateUse1 key: calls that reach it without passing through a neuron tensor's dispatch."""

from __future__ import annotations

from typing import Any

import torch

from adaptive_eager import dispatch as _dispatch  # noqa: F401 - connects tensors to the recorder
from adaptive_eager.ops import batchnorm as _batchnorm  # noqa: F401
from adaptive_eager.ops import library as _library  # noqa: F401 - fills the op tables
from adaptive_eager.ops import pointwise as _pointwise  # noqa: F401
from adaptive_eager.ops import random as _random  # noqa: F401
from adaptive_eager.ops import reduce as _reduce  # noqa: F401
from adaptive_eager.ops import rnn as _rnn  # noqa: F401
from adaptive_eager.ops import search as _search  # noqa: F401
from adaptive_eager.ops import special
from adaptive_eager.record import download, empty, upload
from adaptive_eager.tensor import NeuronTensor

aten = torch.ops.aten


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    m = aten.empty.memory_format(
        size, dtype=dtype, layout=layout, device="meta", memory_format=memory_format
    )
    return empty(m.shape, m.dtype, m.stride())


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    return empty(tuple(size), dtype or torch.get_default_dtype(), tuple(stride))


def _host_made(op: Any) -> Any:
    """A factory whose values are made on the CPU and copied: it has no tensor input and runs once."""

    def kernel(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Any:
        return upload(op(*args, device="cpu", **kwargs))

    return kernel


def _copy_from(src: Any, dst: Any, non_blocking: bool = False) -> Any:
    if type(src) is NeuronTensor and type(dst) is not NeuronTensor:
        dst.copy_(download(src))
        return dst
    return special.copy(aten.copy_.default, (dst, src), {})  # the Python key may be excluded here


def _zeros(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return torch.zeros(size, dtype=dtype, device="neuron")


def _resize_output(t: Any, size: Any, device: Any) -> Any:
    return aten.resize_.default(t, size)


KERNELS: dict[str, Any] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "arange.start_step": _host_made(aten.arange.start_step),
    "arange.start": _host_made(aten.arange.start),
    "arange": _host_made(aten.arange.default),
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "_resize_output_": _resize_output,
    "_efficientzerotensor": _zeros,
    "tril_indices": _host_made(aten.tril_indices.default),
    "triu_indices": _host_made(aten.triu_indices.default),
}
