"""Tensors of layouts that the chip does not have: sparse, mkldnn and nested ones.

A `HostTensor` says it is on `neuron` and holds a CPU tensor. Each op on one runs on the CPU at once, counted as a fallback; what comes
out strided is a neuron tensor again. So embeddings with sparse gradients, SparseAdam and sparse matrices work here, as slowly as on any
device without them. Nested tensors of the layout `torch.jagged` need none of this: PyTorch makes them of ordinary tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from adaptive_eager.tensor import NeuronTensor

KEYS = {torch.sparse_coo: DispatchKeySet(DispatchKey.Sparse)}
"""What makes C++ see the layout of a tensor that is not of its own class."""


NESTED = DispatchKeySet(DispatchKey.NestedTensor).add(DispatchKey.AutogradNestedTensor)


class HostTensor(torch.Tensor):
    """A tensor on `neuron` whose values are a CPU tensor of another layout. Made by `hold`."""

    _host: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.prim.layout.default:
            return args[0]._host.layout
        if any(not issubclass(t, (HostTensor, NeuronTensor)) for t in types):
            return NotImplemented
        from adaptive_eager.fallback import immediate

        return immediate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self._host!r}".removesuffix(")") + ", device='neuron:0')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_rebuild, (self._host.detach(), self.requires_grad))

    def __deepcopy__(self, memo: Any) -> Any:
        with torch.no_grad():
            new = hold(self._host.detach().clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = new
        return new


def _rebuild(host: torch.Tensor, requires_grad: bool) -> Any:
    return hold(host).requires_grad_(requires_grad)


def hold(host: torch.Tensor) -> HostTensor:
    """A CPU tensor of any layout as a tensor on `neuron`."""
    nested = host.is_nested
    t: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        HostTensor,
        (0,) if nested else host.shape,
        dtype=host.dtype,
        layout=host.layout,
        device=torch.device("neuron:0"),
        requires_grad=False,
        dispatch_layout=not nested and host.layout is not torch.sparse_coo,
        _extra_dispatch_keys=NESTED if nested else KEYS.get(host.layout),
    )
    t._host = host
    return t  # type: ignore[no-any-return]


def is_other(t: torch.Tensor) -> bool:
    """Whether a CPU tensor has a layout that neuron tensors do not have."""
    return t.layout is not torch.strided or t.is_nested
