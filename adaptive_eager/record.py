"""Recording: from an aten call to a trie node and fresh, empty buffers. The hot path is `tensor.NeuronTensor`'s
dispatch; what it does not know comes here.

Note [Cuts by content]
A limit alone would cut a loop that never reads at another place each time, and no plan would ever be found again. Past
the soft limit a segment goes on until the recipe comes by at which the last such cut was made, so that segments of a loop become whole
numbers of its turns. Four times the length, or more live bytes than the budget, cuts in any case.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any, NoReturn

import torch

from adaptive_eager import lower, policy
from adaptive_eager.memory import Buffer, default_spec, memory
from adaptive_eager.meta import Meta, meta, row_major
from adaptive_eager.random import GENERATOR
from adaptive_eager.runtime import Runtime, to_raise
from adaptive_eager.simulate import SIMULATOR
from adaptive_eager.source import user_site
from adaptive_eager.stats import COUNTERS
from adaptive_eager.tape import Limits, Node, Recipe, Segment, Stride, span_bytes
from adaptive_eager.tensor import FAST, NeuronTensor, wrap

MAX_RECIPES = 50_000
"""Recipes and trie nodes are dropped together past this many: a bound on a program that never repeats itself."""


class Tape:
    """The device's tape. One for all threads: backward runs on another thread than its caller."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.limits = Limits(spec=default_spec())
        self.roots: dict[Limits, Node] = {}
        self.recipes: dict[Any, Recipe] = {}
        self.nodes = 0
        self.anchor: Any = None
        self.runtime = Runtime()
        self.listeners: list[Any] = []
        self.root = Node()
        self.roots[self.limits] = self.root
        self.seg = self._segment()
        if hasattr(
            os, "register_at_fork"
        ):  # after the runtime's: its lock is taken inside this one
            os.register_at_fork(
                before=self.lock.acquire,
                after_in_parent=self.lock.release,
                after_in_child=self.lock.release,
            )

    def _segment(self) -> Segment:
        return Segment(self.root, self.limits.spec)

    # -- cuts ---------------------------------------------------------------------------------

    def cut(self, cause: str) -> None:
        """End the segment and queue it. What it made is pending until `runtime.drain`."""
        with self.lock:
            seg = self.seg
            if seg.node.parent is None:
                if seg.ext:
                    self.seg = self._segment()
                return
            # walking frames costs as much as a small kernel: only where somebody listens
            seg.close(cause, user_site() if self.listeners else "")
            seg.order = SIMULATOR.next()
            self.seg = self._segment()
            COUNTERS.cut(cause, seg.node.depth)
            for listen in self.listeners:
                listen(seg)
            self.runtime.submit(seg)

    def synchronize(self, cause: str) -> None:
        """Run everything recorded so far, on this thread, and raise the earliest pending error."""
        self.cut(cause)
        runtime = self.runtime
        runtime.drain()
        if runtime.errors:
            runtime.raise_pending()

    def value(self, buffer: Buffer, cause: str) -> None:
        """Make sure the buffer's contents exist, because somebody wants to look at them."""
        self.synchronize(cause)
        if buffer.block is None:
            if buffer.error is not None:
                raise to_raise(buffer.error)
            memory().allocate(buffer, ("aten.empty", user_site()))

    def set_limits(self, limits: Limits) -> None:
        """Change mode or budget; ends the current segment."""
        with self.lock:
            if limits != self.limits:
                self.cut("mode")
                self.runtime.drain()  # what is queued runs in the memory it was recorded for
                self.limits = limits
                self.root = self.roots.setdefault(limits, Node())
                self.seg = self._segment()
                memory().use(limits.spec)

    def after_full(self, seg: Segment, node: Node) -> None:
        """A node past a limit: cut where the rules say so (Note [Cuts by content]). Lock held."""
        limits = self.limits
        if limits.mode != "adaptive":
            self.cut(limits.mode)
            if limits.mode == "blocking":
                self.runtime.drain()
                self.runtime.raise_pending()
            else:
                self.runtime.wake()
            return
        if node.depth < seg.next_check:
            return
        here = node.recipe
        over = node.depth > 4 * limits.ops or (
            node.bytes > limits.bytes and self._held(seg) > limits.bytes
        )
        if node.bytes > limits.bytes and not over:
            seg.next_check = node.depth + max(8, node.depth // 8)
        if over or (node.depth >= limits.ops and here is self.anchor):
            self.anchor = here
            self.cut("length" if node.depth >= limits.ops else "bytes")
            self.runtime.wake()

    def _held(self, seg: Segment) -> int:
        """Bytes that the segment's live results and the inputs it alone keeps alive amount to."""
        rc = sys.getrefcount
        pending = sum([b.nbytes for b in seg.bufs if rc(b) > 3])
        return pending + sum([b.nbytes for b in seg.ext if rc(b) == 3])

    # -- recording ----------------------------------------------------------------------------

    def slot(self, buffer: Buffer) -> int:
        """The buffer's slot in the open segment; gives it one at first touch. Lock held."""
        seg = self.seg
        if buffer.seg is not seg:
            seg.ext.append(buffer)
            buffer.slot = ~(len(seg.ext) - 1)
            buffer.seg = seg
        return buffer.slot

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record any op with known output metadata; the result tensors are pending.

        Raises what PyTorch raises for a bad call, before anything is recorded.
        """
        with self.lock:
            seg, at = self.seg, self.seg.node
            tensors: list[Any] = []
            scalars: list[float] = []
            key = self.call_key(id(func), args, kwargs, tensors, scalars)
            if key is not None:
                node = at.next.get(key)
                if node is not None:
                    if id(func) in lower.SEEDED:
                        scalars += GENERATOR.draw()
                    return self.follow(node, tensors, scalars)
            result = self.record_new(func, args, kwargs)
            if key is not None and result is not NotImplemented and seg.node.parent is at:
                at.next[key] = seg.node
            return result

    def call_key(
        self, f: int, args: Any, kwargs: dict[str, Any], tensors: list[Any], scalars: list[float]
    ) -> tuple[Any, ...] | None:
        """What tells a call from others at one place of the tape, slots of its operands included; None where it is too unusual to
        be known by it. Collects its tensors and its run-time scalars, as `lower.Call` does. Lock held."""
        seg = self.seg
        key: list[Any] = [f]
        values: Any = args
        if kwargs:
            key += kwargs
            values = (*args, *kwargs.values())
        for a in values:
            kind = type(a)
            if kind is NeuronTensor:
                b = a._buf
                if b.seg is not seg:
                    self.slot(b)
                key += (a._meta, b.slot)
                tensors.append(a)
            elif kind is float:
                key.append(kind)
                if f in lower.LITERAL_NUMBERS:
                    key.append(a.hex())
                else:
                    scalars.append(a)
            elif kind is int:
                key.append(kind)
                if f in lower.RUNTIME_INTS and -(1 << 63) <= a < 1 << 63:
                    scalars.append(a)
                else:
                    key.append(a)
            elif a is None or kind is bool or kind is str or kind is torch.dtype:
                key += (kind, a)
            elif kind is list or kind is tuple:
                for x in a:
                    if type(x) is not int and type(x) is not bool:
                        return None
                key += (kind, *a, len(a))
            else:
                return None
        return tuple(key)

    def follow(self, node: Node, tensors: list[Any], scalars: list[float]) -> Any:
        """Go along a known edge of the trie. Lock held."""
        seg = self.seg
        slot, recipe = seg.node.nbufs, node.recipe
        made, fresh = [], []
        for m in recipe.outs:
            b = Buffer(node.nbytes if node.make is not None else span_bytes(m))
            b.seg, b.slot = seg, slot
            slot += 1
            fresh.append(b)
            made.append(wrap(b, m))
        seg.scalars += scalars
        seg.node = node
        seg.bufs += fresh
        b = None  # type: ignore[assignment]
        del fresh
        found = [None if k is None else made[k] if k >= 0 else tensors[~k] for k in recipe.returns]
        if node.full:
            self.after_full(seg, node)
        return found[0] if recipe.single else tuple(found)

    def record_new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an op that this place of the tape has not seen. Lock held."""
        try:
            call = lower.Call(func, args, kwargs)
        except lower.Unsupported:
            return NotImplemented
        recipe = self.recipes.get(call.key)
        if recipe is None:
            recipe = lower.make_recipe(call)
            if recipe is None:
                return NotImplemented
            if len(self.recipes) > MAX_RECIPES:
                self.forget()
            self.recipes[call.key] = recipe
        if not recipe.native:
            policy.falls_back(f"aten.{recipe.name}")
        return self.append(recipe, call)

    def append(self, recipe: Recipe, call: lower.Call) -> Any:
        """Walk one edge of the trie. Lock held."""
        seg = self.seg
        try:
            ins = tuple([self.slot(t._buf) for t in call.tensors])
            at = seg.node
            node = at.next.get((id(recipe), ins))
            if node is None:
                node = self.grow(seg, recipe, ins, call)
            sizes = [span_bytes(m) for m in recipe.outs] if node.make is None else (node.nbytes,)
            fresh = [Buffer(n) for n in sizes]
            slot = at.nbufs
            for b in fresh:
                b.seg, b.slot = seg, slot
                slot += 1
            tensors = [wrap(b, m) for b, m in zip(fresh, recipe.outs, strict=True)]
            seg.scalars.extend(call.scalars)
            seg.node = node
            seg.bufs.extend(fresh)
        except BaseException:
            seg.repair()
            raise
        del fresh[:]
        # a reference would keep a dead result alive in a cut
        b = None  # type: ignore[assignment]
        result: Any
        if recipe.single:
            k = recipe.returns[0]
            result = None if k is None else tensors[k] if k >= 0 else call.tensors[~k]
        else:
            result = tuple(
                [
                    None if k is None else tensors[k] if k >= 0 else call.tensors[~k]
                    for k in recipe.returns
                ]
            )
        if node.full:
            self.after_full(seg, node)
        return result

    def grow(self, seg: Segment, recipe: Recipe, ins: tuple[int, ...], call: lower.Call) -> Node:
        """Make the trie node after the current one."""
        at = seg.node
        node = Node()
        node.parent, node.recipe, node.ins = at, recipe, ins
        node.depth = at.depth + 1
        node.nbufs = at.nbufs + len(recipe.outs)
        node.scalar0 = at.nscalars
        node.nscalars = at.nscalars + len(call.scalars)
        node.bytes = at.bytes + sum(map(span_bytes, recipe.outs))
        node.bytes += sum(span_bytes(recipe.ins[k]) for k, s in enumerate(ins) if s < 0)
        wrote = {~ins[k] for k in recipe.writes if ins[k] < 0}
        node.written = tuple(sorted({*at.written, *wrote})) if wrote else at.written
        if recipe.single and recipe.returns == (0,):
            node.out, node.make = recipe.outs[0], recipe.outs[0].new
            node.nbytes = span_bytes(recipe.outs[0])
        node.where = user_site()
        limits = self.limits
        node.full = (
            limits.mode != "adaptive" or node.depth >= limits.ops or node.bytes > limits.bytes
        )
        at.next[id(recipe), ins] = node
        f = id(call.func)
        if f in FAST and not call.kwargs and (node.make is not None or recipe.returns == (-1,)):
            quick: list[Any] = [f]
            for a in call.args:
                if type(a) is NeuronTensor:
                    quick += (a._meta, a._buf.slot)
                else:
                    quick.append(type(a))
            rest = [type(a) for a in call.args[1:]]
            if rest in ([], [float], [int]) or (len(rest) < 3 and set(rest) == {NeuronTensor}):
                at.next[tuple(quick)] = node
        self.nodes += 1
        return node

    def may_stride(self, s: Stride) -> bool:
        """Whether going past all its nodes at once cuts where going one by one would: nowhere. Lock held."""
        last, limits = s.last, self.limits
        if not last.full:
            return True
        return (
            limits.mode == "adaptive"
            and last.bytes <= limits.bytes
            and last.depth <= 4 * limits.ops
            and self.anchor not in s.recipes
        )

    def stride(self, s: Stride, first: list[Any], scalars: list[float]) -> list[Any]:
        """Go past its nodes. first: what each op returns where it writes in place. Lock held."""
        seg = self.seg
        out = first
        if s.outs is not None:
            slot, out, fresh = seg.node.nbufs, [], []
            for m in s.outs:
                b = Buffer(span_bytes(m))
                b.seg, b.slot = seg, slot
                slot += 1
                fresh.append(b)
                out.append(wrap(b, m))
            b = None  # type: ignore[assignment]
            seg.bufs.extend(fresh)
        seg.scalars.extend(scalars)
        seg.node = s.last
        return out

    def learn(self, at: Node, key: Any, count: int, nscalars: int) -> None:
        """Remember the `count` nodes that were recorded since `at` as a stride, where they are one. Lock held."""
        node: Node | None = self.seg.node
        nodes: list[Node] = []
        while node is not None and node is not at and len(nodes) < count:
            nodes.append(node)
            node = node.parent
        last = self.seg.node
        if node is not at or len(nodes) != count or last.nscalars - at.nscalars != nscalars:
            return
        outs: tuple[Meta, ...] | None = None
        if all(n.make is not None for n in nodes):
            outs = tuple([n.recipe.outs[0] for n in reversed(nodes)])
        elif any(n.recipe.outs or n.recipe.returns != (-1,) for n in nodes):
            return
        if at.strides is None:
            at.strides = {}
        at.strides[key] = Stride(last, frozenset([n.recipe for n in nodes]), outs)

    def forget(self) -> None:
        """Drop every trie and recipe. Plans of queued segments live on with their segments. Lock held."""
        self.cut("cache-full")
        self.roots.clear()
        self.recipes.clear()
        self.nodes = 0
        self.root = self.roots[self.limits] = Node()
        self.seg = self._segment()


def empty(shape: Any, dtype: torch.dtype, stride: Any = None) -> NeuronTensor:
    """A neuron tensor whose buffer holds nothing yet; HBM is taken when something is written."""
    m = meta(shape, row_major(shape) if stride is None else stride, dtype)
    return wrap(Buffer(span_bytes(m)), m)


def upload(t: torch.Tensor) -> NeuronTensor:
    """A neuron tensor with a CPU tensor's values, strides kept where they are dense. Copies at once."""
    like = torch.empty_like(t, device="meta")
    out = empty(like.shape, t.dtype, like.stride())
    write_now(out._buf, out._meta, t)
    return out


def write_now(buffer: Buffer, m: Meta, source: torch.Tensor) -> None:
    """Copy a CPU tensor into a buffer that no recorded op has touched. Needs no cut."""
    if buffer.block is None:
        allocate_now(buffer)
    memory().host(buffer, m).copy_(source)
    nbytes = m.numel * m.itemsize
    COUNTERS.uploaded(nbytes)
    SIMULATOR.copied("upload", "aten.copy_", user_site, TAPE.limits.spec, nbytes, 0)


def allocate_now(buffer: Buffer) -> None:
    """HBM for a buffer, on the calling thread. When HBM is full, pending work may free some: run it and try again."""
    site = ("aten.copy_", user_site())
    try:
        memory().allocate(buffer, site)
    except torch.OutOfMemoryError:
        TAPE.cut("out-of-memory")
        TAPE.runtime.drain()
        gc.collect()
        memory().allocate(buffer, site)


def download(t: NeuronTensor, cause: str = "value-read") -> torch.Tensor:
    """A CPU copy of a neuron tensor, same strides. Cuts the tape."""
    buffer, m = t._buf, t._meta
    if m.numel == 0:
        return torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="cpu")
    TAPE.value(buffer, cause)
    nbytes = m.numel * m.itemsize
    COUNTERS.downloaded(nbytes)
    SIMULATOR.copied("download", "aten.copy_", user_site, TAPE.limits.spec, 0, nbytes)
    return (
        torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="cpu").copy_(
            memory().host(buffer, m)
        )
        if dense(m)
        else memory().host(buffer, m).clone()
    )


def dense(m: Meta) -> bool:
    """No two indices reach one element and there are no holes: strides a fresh tensor may have."""
    return m.span - m.offset == m.numel


def device_mismatch(t: torch.Tensor) -> NoReturn:
    """PyTorch's error for mixed devices."""
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, neuron:0 and {t.device}!"
    )


TAPE = Tape()
