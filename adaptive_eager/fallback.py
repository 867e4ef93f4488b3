"""Running an op on the CPU: at once, because its result is needed or its output is unknown; or as a recorded node.

Note [Host views]
HBM of the simulated chip is host memory, so a CPU kernel can run on it in place: each neuron argument becomes a CPU
tensor over the same bytes with the same strides. Writes and overlaps then mean what they mean on the CPU. On the
simulated chip this is a round trip, and it is counted as one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from adaptive_eager import policy
from adaptive_eager.layouts import HostTensor, hold, is_other
from adaptive_eager.memory import Buffer, memory
from adaptive_eager.meta import Meta, meta_of
from adaptive_eager.record import TAPE, device_mismatch, upload
from adaptive_eager.simulate import SIMULATOR
from adaptive_eager.source import user_site
from adaptive_eager.stats import COUNTERS
from adaptive_eager.tensor import NeuronTensor, wrap
from adaptive_eager.views import reshape

CPU_ARGUMENTS_OK = frozenset(
    {
        "aten.index.Tensor",
        "aten.index_put.default",
        "aten.index_put_.default",
        "aten._index_put_impl_.default",
        "aten._unsafe_index.Tensor",
    }
)
"""Ops that take CPU index tensors on any device, as PyTorch does for accelerators."""

READS_VALUE = frozenset(
    {"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default"}
)


def immediate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cut, run the op on host views now, and give its results buffers."""
    name = str(func)
    cause = "value-read" if name in READS_VALUE else "data-dependent"
    if cause != "value-read":
        policy.falls_back(name)
    hosts: dict[int, NeuronTensor | HostTensor] = {}
    buffers: dict[int, Buffer] = {}

    def to_host(a: Any) -> Any:
        if type(a) is HostTensor:
            hosts[id(a._host)] = a
            return a._host
        if type(a) is NeuronTensor:
            TAPE.value(a._buf, cause)
            h = memory().host(a._buf, a._meta)
            hosts[id(h)] = a
            keep.append(h)
            assert a._buf.block is not None
            buffers[a._buf.block.address] = a._buf
            return h
        if (
            isinstance(a, torch.Tensor)
            and a.dim()
            and a.device.type == "cpu"
            and name not in CPU_ARGUMENTS_OK
        ):
            device_mismatch(a)
        if isinstance(a, torch.device):
            return torch.device("cpu") if a.type == "neuron" else a
        return a

    keep: list[torch.Tensor] = []
    device = kwargs.get("device")
    stays = device is not None and torch.device(device).type != "neuron"
    TAPE.synchronize(cause)
    host_args, host_kwargs = tree_map(to_host, args), tree_map(to_host, kwargs)
    result = seeded(func, host_args, host_kwargs, None)
    down = sum(a._meta.numel * a._meta.itemsize for a in hosts.values() if type(a) is NeuronTensor)
    if cause != "value-read":
        COUNTERS.fallback(name)
        fresh = [
            r
            for r in tree_leaves(result)
            if isinstance(r, torch.Tensor) and id(r) not in hosts and not is_other(r)
        ]
        up = 0 if stays else sum(r.numel() * r.element_size() for r in fresh)
        SIMULATOR.copied("fallback", name, user_site, TAPE.limits.spec, up, down)
    else:
        COUNTERS.downloaded(down)
        SIMULATOR.copied("download", name, user_site, TAPE.limits.spec, 0, down)

    def from_host(r: Any) -> Any:
        if not isinstance(r, torch.Tensor):
            return r
        if id(r) in hosts:
            return hosts[id(r)]
        if stays:
            return r.clone() if in_arena(r) else r
        if is_other(r):
            return hold(r)
        r = resolved(r)
        if in_arena(r):
            return upload(r)
        return adopted(r)

    return tree_map(from_host, result)


def in_arena(t: torch.Tensor) -> bool:
    """Whether a CPU tensor lies in HBM."""
    return not is_other(t) and memory().owns(t)


def resolved(t: torch.Tensor) -> torch.Tensor:
    """The tensor with its values in its bytes: no conj or neg flag."""
    return t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t


def adopted(t: torch.Tensor) -> NeuronTensor:
    """A neuron tensor that owns a CPU result's memory, or a copy where the result is a slice of something larger."""
    m = meta_of(t)
    size = t.untyped_storage().nbytes()
    if m.offset or size > m.span * m.itemsize + 64:
        return upload(t)
    buffer = Buffer(size)
    memory().adopt(buffer, t, ("a CPU fallback", user_site()))
    return wrap(buffer, m)


FLAGS = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.Negative
)


def seeing_flags() -> Any:
    """Inside dispatch torch hides the keys that resolve conj and neg flags: a CPU op that sets one on its way would read its bytes as
    they are. A guard that shows them."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), hidden - FLAGS
    )


def seeded(func: Any, args: Any, kwargs: Any, draw: tuple[int, int] | None) -> Any:
    """Call a CPU op; a random one with numbers of the device's own generator."""
    with seeing_flags():
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        from adaptive_eager.random import GENERATOR

        return GENERATOR.call(func, args, kwargs, draw)


def out_variant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """op(..., out=x): the functional result, resized into and copied to `out`, as PyTorch defines it.

    The functional overload is looked up by its schema. Without one, and where a result has another dtype than its `out`, which some ops
    cast and some refuse, the CPU's own out= form runs at once.
    """
    names = [a.name for a in func._schema.arguments if a.is_out]
    given = [kwargs[n] for n in names if n in kwargs]
    outs = tree_leaves(given)
    rest = {k: v for k, v in kwargs.items() if k not in names}
    for t in outs:
        if type(t) is not NeuronTensor:
            device_mismatch(t)
    functional = functional_of(func)
    if functional is not None and len(given) == len(names):
        named = rest
        if not any(isinstance(a, torch.Tensor) for a in tree_leaves((args, rest))):
            named = rest | {"dtype": outs[0].dtype, "device": torch.device("cpu")}  # a factory: eye
        try:
            results = tree_leaves(functional(*args, **named))
        except TypeError:  # no dtype among a factory's arguments
            results = []
        if [r.dtype for r in results] == [t.dtype for t in outs]:
            for out, r in zip(outs, results, strict=True):
                put(out, r)
            return _returned(func, given)
    return _out_now(func, args, kwargs, names)


def _returned(func: Any, given: list[Any]) -> Any:
    if not func._schema.returns:  # split_with_sizes_copy
        return None
    return given[0] if len(given) == 1 else tuple(given)


def put(out: NeuronTensor, r: torch.Tensor, warn: bool = True) -> None:
    """A result to where the caller wants it, resized as PyTorch does."""
    if out.shape != r.shape:
        if warn and out.numel():
            _warn_resize(out, r)
        reshape(out, _resized(out, r))
    torch.ops.aten.copy_.default(out, r)


def _out_now(func: Any, args: Any, kwargs: dict[str, Any], names: list[str]) -> Any:
    """The CPU's out= form, on host views and on fresh tensors like the given ones, copied to those."""
    given = [kwargs[n] for n in names if n in kwargs]
    policy.falls_back(str(func))
    TAPE.synchronize("data-dependent")

    def to_host(a: Any) -> Any:
        if type(a) is NeuronTensor:
            TAPE.value(a._buf, "data-dependent")
            return memory().host(a._buf, a._meta)
        if isinstance(a, torch.device):
            return torch.device("cpu")
        return a

    def fresh(a: Any) -> Any:
        m = a._meta
        return torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="cpu")

    rest = {k: v for k, v in kwargs.items() if k not in names}
    hosts = {n: tree_map(fresh, kwargs[n]) for n in names if n in kwargs}
    seeded(func, tree_map(to_host, args), tree_map(to_host, rest) | hosts, None)
    COUNTERS.fallback(str(func))
    tensors = [a for a in tree_leaves((args, rest)) if type(a) is NeuronTensor]
    down = sum(a._meta.numel * a._meta.itemsize for a in tensors)
    results = tree_leaves(list(hosts.values()))
    up = sum(r.numel() * r.element_size() for r in results)
    SIMULATOR.copied("fallback", str(func), user_site, TAPE.limits.spec, up, down)
    for out, r in zip(tree_leaves(given), results, strict=True):
        put(out, upload(r), warn=False)  # the CPU did
    return _returned(func, given)


def _warn_resize(out: torch.Tensor, r: torch.Tensor) -> None:
    import warnings

    warnings.warn(
        f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not match the "
        f"required output shape {list(r.shape)}. This behavior is deprecated.",
        stacklevel=4,
    )


def _resized(out: NeuronTensor, r: torch.Tensor) -> Meta:
    from adaptive_eager.meta import meta

    return meta(r.shape, r.stride(), out.dtype, 0)


_FUNCTIONAL: dict[int, Any] = {}


def functional_of(func: Any) -> Any:
    """The overload without out= whose other arguments are the same, or None."""
    if id(func) in _FUNCTIONAL:
        return _FUNCTIONAL[id(func)]
    want = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    packet = func.overloadpacket
    found = None
    for name in packet.overloads():
        candidate = getattr(packet, name)
        schema = candidate._schema
        if schema.is_mutable:
            continue
        have = [(a.name, str(a.type)) for a in schema.arguments]
        extra = [a for a in schema.arguments if (a.name, str(a.type)) not in want]
        if [h for h in have if h in want] == want and all(
            a.name in ("dtype", "layout", "device", "pin_memory") for a in extra
        ):
            found = candidate
            break
    _FUNCTIONAL[id(func)] = found
    return found
