"""The tensor subclass of the device, and the hot path of recording.

Note [The hot path]
`__torch_dispatch__` is entered once an op, and torch's own part of that (entering Python, making the
wrapper) is the floor; ours must stay well below it. So ops are looked up by id (an OpOverload hashes in Python), a slot costs one `is` test, and the wrapper's
constructor is a functools.partial kept on the meta. `again` is for ops whose arguments are neuron tensors or one Python
number, already seen at this trie position. All else goes to `dispatch.slow`. Operators (`x * y`) come to it without
torch's part (Note [Operators]).

`python -m tests.perf.record` prints what that costs beside an empty dispatch.
"""

from __future__ import annotations

from typing import Any

import torch

from adaptive_eager.memory import Buffer
from adaptive_eager.meta import Meta

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_get_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]

FAST: set[int] = set()
"""ids of the ops that the inlined path may look up: their arguments are tensors and at most one number."""


TAPE: Any = None
LOCK: Any = None
slow: Any = None


def connect(tape: Any, slow_path: Any) -> None:
    """Give the class below its recorder; `dispatch` does so when it is imported, which all ways to a tensor do."""
    global TAPE, LOCK, slow
    TAPE, LOCK, slow = tape, tape.lock, slow_path


class NeuronTensor(torch.Tensor):
    """A tensor on the device `neuron`: a buffer and a meta. Made by `wrap`."""

    __slots__ = ("_buf", "_meta")
    _buf: Buffer
    _meta: Meta

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        try:
            f = id(func)
            if f in FAST and not kwargs and type(args[0]) is NeuronTensor:
                t = again(f, args)
                if t is not None:
                    return t
            if len(types) != 1 and any(not issubclass(t, NeuronTensor) for t in types):
                return (
                    NotImplemented  # theirs: a HostTensor's, or a wrapper's around neuron tensors
                )
            return slow(func, args, kwargs or {})
        except BaseException:
            repair()
            raise

    # -- what torch cannot do for a wrapper --------------------------------------------------

    @property
    def data(self) -> Any:
        """The tensor without its history; setting it makes this tensor share another's buffer."""
        return _get_data(self)

    @data.setter
    def data(self, other: Any) -> None:
        if type(other) is not NeuronTensor:
            if isinstance(other, torch.Tensor):
                raise RuntimeError(
                    f"Attempted to set the data of a neuron:0 tensor to a tensor on {other.device}: move it with .to('neuron') first"
                )
            raise TypeError(f"Variable data has to be a tensor, but got {type(other).__name__}")
        _set_data(self, other)
        self._buf, self._meta = other._buf, other._meta

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        from adaptive_eager.show import tensor_repr

        return tensor_repr(self)

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return self.item().__format__(spec)
        return object.__format__(self, spec)

    def tolist(self) -> Any:
        """The values as nested Python lists. Reads the values, so it cuts."""
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A NumPy array, with force=True only, as for any accelerator.

        Raises:
            TypeError: without force.
        """
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            "can't convert neuron:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("neuron tensors have no memory that DLPack could share; use .cpu() first")

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
            )
        with torch.no_grad():
            new = self.detach().clone(memory_format=torch.preserve_format)
            if isinstance(self, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=self.requires_grad)
            else:
                new.requires_grad_(self.requires_grad)
            if self.grad is not None:
                new.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (self.detach().cpu(), self.requires_grad, isinstance(self, torch.nn.Parameter))
        return (_rebuild, state)

    def storage_key(self) -> int:
        """Identity of the buffer: equal for a tensor and its views."""
        return id(self._buf)


def again(f: int, args: Any) -> Any:
    """Record one of the `FAST` ops on a neuron tensor and one or two more arguments, where it was recorded before.

    None, and nothing recorded, where this position of the trie does not know the call. After an exception
    `Segment.repair` is due.
    """
    with LOCK:
        seg = TAPE.seg
        at = seg.node
        a = args[0]
        ba = a._buf
        n = len(args)
        node = scalar = None
        if n == 2:
            b = args[1]
            kind = type(b)
            if kind is not NeuronTensor and kind is not float and kind is not int:
                return None  # an upload into a fresh buffer must find it without a slot
        if ba.seg is not seg:
            TAPE.slot(ba)
        if n == 2:
            if kind is NeuronTensor:
                bb = b._buf
                if bb.seg is not seg:
                    TAPE.slot(bb)
                node = at.next.get((f, a._meta, ba.slot, b._meta, bb.slot))
            else:
                node = at.next.get((f, a._meta, ba.slot, kind))
                scalar = b
        elif n == 1:
            node = at.next.get((f, a._meta, ba.slot))
        elif n == 3:
            b, c = args[1], args[2]
            if type(b) is NeuronTensor and type(c) is NeuronTensor:
                bb, bc = b._buf, c._buf
                if bb.seg is not seg:
                    TAPE.slot(bb)
                if bc.seg is not seg:
                    TAPE.slot(bc)
                node = at.next.get((f, a._meta, ba.slot, b._meta, bb.slot, c._meta, bc.slot))
        if node is None:
            return None
        if node.make is None:
            if scalar is not None:
                seg.scalars.append(scalar)
            seg.node = node
            if node.full:
                TAPE.after_full(seg, node)
            return a
        out: Any = Buffer.__new__(Buffer)
        out.block = out.owner = out.error = None
        out.nbytes = node.nbytes
        out.seg = seg
        out.slot = at.nbufs
        t = node.make()
        t._buf = out
        t._meta = node.out
        if scalar is not None:
            seg.scalars.append(scalar)
        seg.node = node
        seg.bufs.append(out)
        if node.full:
            out = None
            TAPE.after_full(seg, node)
        return t


def repair() -> None:
    """Drop what an exception left half recorded."""
    with LOCK:
        TAPE.seg.repair()


def _rebuild(host: torch.Tensor, requires_grad: bool, parameter: bool) -> Any:
    t = host.to("neuron")
    return torch.nn.Parameter(t, requires_grad) if parameter else t.requires_grad_(requires_grad)


def wrap(buffer: Buffer, m: Meta) -> NeuronTensor:
    """A tensor over a buffer."""
    t: NeuronTensor = m.new()
    t._buf = buffer
    t._meta = m
    return t


def rebind(t: NeuronTensor, buffer: Buffer, m: Meta) -> None:
    """Make an existing tensor look at another buffer or through another meta (resize_, t_, set_ ...)."""
    _set_data(t, m.new())
    t._buf, t._meta = buffer, m
