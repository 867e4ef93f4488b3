"""Python's operators on neuron tensors, recorded without a trip through torch's dispatcher.

Note [Operators]
Of what `x * 1.5` costs on a wrapper, the dispatcher is most: it makes a tensor of the number, looks at each key, and enters
Python. When nothing on the way would do anything, the operator may record the op that would arrive at
`__torch_dispatch__` itself. Each of these would do something, and then the operator is torch's own: a gradient to
track, a dispatch or function mode, a transform of torch.func, a forward-mode level, tracing, a profiler. Autocast leaves
these ops alone. The function mode that makes `neuron` the default device only looks at factories.

An in-place operator counts a version, as autograd's part of the dispatcher does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from adaptive_eager.tensor import NeuronTensor, again, repair

aten = torch.ops.aten

FORWARD = {
    "__add__": aten.add.Tensor,
    "__sub__": aten.sub.Tensor,
    "__mul__": aten.mul.Tensor,
    "__truediv__": aten.div.Tensor,
    "__lt__": (aten.lt.Tensor, aten.lt.Scalar),
    "__le__": (aten.le.Tensor, aten.le.Scalar),
    "__gt__": (aten.gt.Tensor, aten.gt.Scalar),
    "__ge__": (aten.ge.Tensor, aten.ge.Scalar),
    "__eq__": (aten.eq.Tensor, aten.eq.Scalar),
    "__ne__": (aten.ne.Tensor, aten.ne.Scalar),
}
"""The overload that arrives for a tensor, and for a number where that is another one."""
REFLECTED = {"__radd__": aten.add.Tensor, "__rmul__": aten.mul.Tensor, "__rsub__": aten.rsub.Scalar}
"""The same for a number on the left."""
INPLACE = {
    "__iadd__": aten.add_.Tensor,
    "__isub__": aten.sub_.Tensor,
    "__imul__": aten.mul_.Tensor,
    "__itruediv__": aten.div_.Tensor,
    "add_": aten.add_.Tensor,
    "sub_": aten.sub_.Tensor,
    "mul_": aten.mul_.Tensor,
    "div_": aten.div_.Tensor,
}
"""The same for writes in place, of a tensor or a number."""
UNARY = (
    "__neg__",
    "abs",
    "cos",
    "erf",
    "exp",
    "log",
    "neg",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "sin",
    "sqrt",
    "square",
    "tanh",
)
"""Methods without arguments, each the op of its name."""

LEAST, MOST = -(1 << 63), (1 << 63) - 1
"""Python's ints have no end, torch's do."""
FACTORY_MODES: list[type] = [DeviceContext]
"""Function modes that look at factories alone."""

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_function_mode = torch._C._get_function_stack_at
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled
_grad = torch.is_grad_enabled
_count_version = torch._C._increment_version


def _watched() -> bool:
    """Whether something between an operator and `__torch_dispatch__` wants to see the op."""
    if _dispatch_modes() or _transforms() or forward_ad._current_level >= 0 or _profiling():
        return True
    if _tracing() is not None:
        return True
    n = _function_modes()
    return n > 0 and any(type(_function_mode(k)) not in FACTORY_MODES for k in range(n))


def forward(name: str, tensor: int, number: int) -> Any:
    """The method for an operator with a neuron tensor on the left."""
    plain = getattr(torch.Tensor, name)

    def method(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is NeuronTensor:
            known = True
            f = tensor
        else:
            known = kind is float or kind is int and LEAST <= other <= MOST
            f = number
        if (
            known
            and not _watched()
            and not (
                _grad() and (self.requires_grad or (kind is NeuronTensor and other.requires_grad))
            )
        ):
            try:
                t = again(f, (self, other))
            except BaseException:
                repair()
                raise
            if t is not None:
                return t
        return plain(self, other)

    method.__name__, method.__doc__ = name, plain.__doc__
    return method


def reflected(name: str, number: int) -> Any:
    """The method for an operator with a neuron tensor on the right. Python asks it first when a plain tensor is on the left."""
    plain = getattr(torch.Tensor, name)

    def method(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is float or kind is int and LEAST <= other <= MOST:
            if not _watched() and not (_grad() and self.requires_grad):
                try:
                    t = again(number, (self, other))
                except BaseException:
                    repair()
                    raise
                if t is not None:
                    return t
        elif isinstance(other, torch.Tensor):
            return NotImplemented
        return plain(self, other)

    method.__name__, method.__doc__ = name, plain.__doc__
    return method


def inplace(name: str, f: int) -> Any:
    """The method for an operator that writes into its left operand."""
    plain = getattr(torch.Tensor, name)

    def method(self: Any, other: Any, **kwargs: Any) -> Any:
        kind = type(other)
        known = kind is NeuronTensor or kind is float or kind is int and LEAST <= other <= MOST
        if (
            known
            and not kwargs
            and not _watched()
            and not self.is_inference()
            and not (
                _grad() and (self.requires_grad or (kind is NeuronTensor and other.requires_grad))
            )
        ):
            try:
                t = again(f, (self, other))
            except BaseException:
                repair()
                raise
            if t is not None:
                _count_version((self,))
                return self
        return plain(self, other, **kwargs)

    method.__name__, method.__doc__ = name, plain.__doc__
    return method


def unary(name: str) -> Any:
    """A method without arguments."""
    plain = getattr(torch.Tensor, name)
    f = id(getattr(aten, name.strip("_")).default)

    def method(self: Any) -> Any:
        if not _watched() and not (_grad() and self.requires_grad):
            try:
                t = again(f, (self,))
            except BaseException:
                repair()
                raise
            if t is not None:
                return t
        return plain(self)

    method.__name__, method.__doc__ = name, plain.__doc__
    return method


def install() -> None:
    """Give the tensor class its operators."""
    for name, op in FORWARD.items():
        tensor, number = op if isinstance(op, tuple) else (op, op)
        setattr(NeuronTensor, name, forward(name, id(tensor), id(number)))
    for name, one in REFLECTED.items():
        setattr(NeuronTensor, name, reflected(name, id(one)))
    for name, one in INPLACE.items():
        setattr(NeuronTensor, name, inplace(name, id(one)))
    for name in UNARY:
        setattr(NeuronTensor, name, unary(name))
