"""What each kind of aten op becomes: a view, a recorded node, an immediate run, or a handler of its own.

The kind is read off the op's schema and tags once and kept by id. `HANDLERS` holds the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adaptive_eager import autocast, backward, fallback, lower, operators, patches, views
from adaptive_eager.attention import attention
from adaptive_eager.ops import foreach
from adaptive_eager.ops.special import HANDLERS
from adaptive_eager.record import TAPE
from adaptive_eager.tensor import NeuronTensor, connect

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_KINDS: dict[int, Handler] = {}
_KEEP: list[Any] = []
"""Overloads whose ids are keys somewhere: an id is only unique while its object lives."""


def slow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an op that the inlined path did not."""
    handler = _KINDS.get(id(func))
    if handler is None:
        handler = _KINDS[id(func)] = classify(func)
        _KEEP.append(func)
    return handler(func, args, kwargs)


def classify(func: Any) -> Handler:
    """The handler of an op, by its name, tags and schema.

    An op whose returns alias its arguments without writing is a view; one whose output shape or host result depends
    on values runs at once; all others are recorded.
    """
    special = HANDLERS.get(str(func))
    if special is not None:
        return special
    if (
        func._schema.name in ("aten::index", "aten::_unsafe_index")
        and len(func._schema.arguments) == 2
    ):
        return index
    if func._schema.name.startswith("aten::_foreach_"):
        loop = foreach.handler(func)
        if loop is not None:
            return loop
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE)
    if composite and id(func) not in lower.NATIVE and id(func) not in lower.LIBRARY:
        return decompose
    schema = func._schema
    if any(a.is_out for a in schema.arguments):
        return out_node
    tags = func.tags
    if torch.Tag.inplace_view in tags:
        return views.inplace_view
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return fallback.immediate
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return views.view
    if any("Tensor" not in str(r.type) for r in schema.returns):
        return fallback.immediate
    return node


COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op that is other ops. In inference mode there is no autograd key on the way here to take it apart."""
    if func is aten.scaled_dot_product_attention.default:
        return attention(*args, **kwargs)
    return func._op_dk(COMPOSITE, *args, **kwargs)


def node(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record; where output metadata cannot be known beforehand, run at once."""
    if kwargs and elsewhere(kwargs):
        return fallback.immediate(func, args, kwargs)
    result = TAPE.record(func, args, kwargs)
    if result is NotImplemented:
        return fallback.immediate(func, args, kwargs)
    return result


MASKS = (torch.bool, torch.uint8)


def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[i, j, ...]: of known shape, unless a mask is among the indices."""
    known = [i is None or (type(i) is NeuronTensor and i._meta.dtype not in MASKS) for i in args[1]]
    if type(args[0]) is NeuronTensor and all(known):
        return node(func, args, kwargs)
    return fallback.immediate(func, args, kwargs)


def out_node(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for an op that writes into a tensor it is given."""
    if elsewhere(kwargs):
        return fallback.immediate(func, args, kwargs)
    return fallback.out_variant(func, args, kwargs)


def elsewhere(kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for its result on another device."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "neuron"


backward.install()
patches.install()
autocast.install()
operators.install()
connect(TAPE, slow)
