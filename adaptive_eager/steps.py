"""A plan's steps: launches of fused kernels and library calls, with the memory each takes and gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adaptive_eager import plan as planning
from adaptive_eager.costs import library_work
from adaptive_eager.device_sim.blocks import Site
from adaptive_eager.device_sim.spec import ChipSpec
from adaptive_eager.emit import GUARD, Emitted, Emitter, dtype_of_writes
from adaptive_eager.fallback import in_arena, resolved, seeded
from adaptive_eager.kernels import pool
from adaptive_eager.kernels.cost import planned
from adaptive_eager.kernels.launch import PARALLEL_SECONDS, compile_kernel, run_together
from adaptive_eager.kernels.launch import stats as kernel_stats
from adaptive_eager.lower import LIBRARY, SEEDED, fill
from adaptive_eager.memory import Buffer, memory
from adaptive_eager.meta import Meta, meta_of
from adaptive_eager.runtime import detach_frames
from adaptive_eager.simulate import Happening, Item
from adaptive_eager.stats import COUNTERS
from adaptive_eager.tape import T

if TYPE_CHECKING:
    from adaptive_eager.tape import Node, Segment


def _share_threads() -> None:
    """Let kernels run on the OpenMP pool that torch brought: a second one would fight it for the cores."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        if pool.use_gomp(str(path)):
            return


_share_threads()


@dataclass(slots=True)
class Plan:
    """How a segment runs. read, written: bytes of HBM. happening: the same on the simulated chip.
    groups, stored: for reports."""

    steps: list[Any]
    launches: int
    read: int
    written: int
    happening: Happening
    groups: list[planning.Group] = field(default_factory=list)
    stored: frozenset[int] = frozenset()


def site_of(node: Node) -> Site:
    """An op and the line that called it."""
    return f"aten.{node.recipe.name}", node.where


class Step:
    """Common to all steps: outputs to allocate before (and for whom), slots to release after, and what an error does."""

    __slots__ = ("allocs", "frees", "ins", "node", "outs")

    allocs: list[tuple[int, Site]]
    frees: list[int]
    ins: list[int]
    outs: list[int]
    node: Node

    def prepare(self, seg: Segment) -> None:
        """Check inputs for errors that came before, and take HBM for outputs."""
        bufs, ext = seg.bufs, seg.ext
        for s in self.ins:
            b = bufs[s] if s >= 0 else ext[~s]
            if b.block is None:
                if b.error is not None:
                    raise Inherited(b.error)
                memory().allocate(b, site_of(self.node))
        for s, site in self.allocs:
            b = bufs[s] if s >= 0 else ext[~s]
            if b.block is None:
                memory().allocate(b, site)

    def release(self, seg: Segment) -> None:
        """Give back what nobody reads any more."""
        for s in self.frees:
            seg.bufs[s].block = seg.bufs[s].owner = None

    def fail(self, seg: Segment, error: Exception, errors: list[BaseException]) -> None:
        """Keep the error on what this step would have made; the segment goes on without it."""
        detach_frames(error)
        lost = self.outs
        if isinstance(error, Inherited):
            error = error.of  # type: ignore[assignment]
        else:
            node, lost = self.node, self.outs
            if isinstance(error, Faulty):
                error, node, lost = error.of, error.node, error.lost  # type: ignore[assignment]
            error.add_note(f"aten.{node.recipe.name}, recorded at {node.where}")
            errors.append(error)
            if lost is not self.outs:
                self.release(seg)
        for s in lost:
            b = seg.bufs[s] if s >= 0 else seg.ext[~s]
            if s >= 0 or b.block is None:
                b.error, b.block, b.owner = error, None, None


class Inherited(Exception):  # noqa: N818
    """An input could not be made; `of` says why."""

    def __init__(self, of: BaseException) -> None:
        super().__init__(str(of))
        self.of = of


class Faulty(Exception):  # noqa: N818
    """A fused kernel found a bad value; `of` is the error, `node` the op, `lost` the slots that depend on it."""

    def __init__(self, of: BaseException, node: Node, nodes: list[Node]) -> None:
        super().__init__(str(of))
        self.of, self.node = of, node
        lost = set(planning.write_slots(node))
        for later in nodes[nodes.index(node) + 1 :]:
            if lost & set(planning.read_slots(later)):
                lost |= set(planning.write_slots(later))
        self.lost = sorted(lost)


class KernelStep(Step):
    """One launch of a fused kernel."""

    __slots__ = (
        "compiled",
        "emitted",
        "guards",
        "launch",
        "nodes",
        "scalars",
        "threads",
        "where",
    )

    def __init__(self, emitted: Any, nodes: list[Node]) -> None:
        self.nodes, self.node = nodes, nodes[0]
        self.emitted = emitted
        before = kernel_stats.compiled
        self.compiled = compile_kernel(emitted.kernel)
        self.launch = self.compiled.bind(emitted.space)  # narrow rows compile a variant here
        fresh = kernel_stats.compiled - before
        COUNTERS.kernels_compiled += fresh
        COUNTERS.kernels_reused += fresh == 0
        self.where = tuple(zip(emitted.slots, emitted.offsets, strict=True))
        self.scalars = emitted.scalars
        self.guards = [
            (*g, torch.zeros(1, dtype=torch.int64, device="cpu")) for g in emitted.guards
        ]
        self.threads = self.launch.threads(torch.get_num_threads())

    def run(self, seg: Segment) -> None:
        """Launch on this thread and wait."""
        self.prepare(seg)
        pointers, scalars = self.arguments(seg)
        self.launch(pointers, scalars, self.threads)
        if self.guards:
            self.check(seg)
        bufs = seg.bufs
        for s in self.frees:
            b = bufs[s]
            b.block = b.owner = None

    def arguments(self, seg: Segment) -> tuple[list[int], list[float]]:
        """Addresses of the operands, and scalars."""
        bufs, ext = seg.bufs, seg.ext
        if self.guards:
            words = [g[-1].data_ptr() for g in self.guards]
            pointers = [
                words[s - GUARD]
                if s >= GUARD
                else (bufs[s] if s >= 0 else ext[~s]).block.address + off  # type: ignore[union-attr]
                for s, off in self.where
            ]
        else:
            pointers = [
                (bufs[s] if s >= 0 else ext[~s]).block.address + off  # type: ignore[union-attr]
                for s, off in self.where
            ]
        given = seg.scalars
        return pointers, [given[i] if type(i) is int else i[1] for i in self.scalars]  # type: ignore[index]

    def check(self, seg: Segment) -> None:
        """After the launch: raise for a fault that the kernel found."""
        for _, slot, m, error, node, word in self.guards:
            if word[0]:
                raise Faulty(
                    error(memory().host(seg.bufs[slot] if slot >= 0 else seg.ext[~slot], m)),
                    node,
                    self.nodes,
                )


class JobsStep(Step):
    """Launches of one kernel that do not depend on each other, as one over a table of jobs."""

    __slots__ = ("jobs", "threads")

    def __init__(self, jobs: list[KernelStep]) -> None:
        self.jobs, self.node = jobs, jobs[0].node
        self.ins = list(dict.fromkeys([s for j in jobs for s in j.ins]))
        self.outs = sorted({s for j in jobs for s in j.outs})
        cost = sum([j.launch.cost for j in jobs])
        self.threads = torch.get_num_threads() if cost >= PARALLEL_SECONDS else 1

    def run(self, seg: Segment) -> None:
        """Launch on this thread and wait. A job whose inputs are lost leaves the others alone."""
        lost: list[tuple[KernelStep, Exception]] = []
        ready: list[KernelStep] = []
        for job in self.jobs:
            try:
                job.prepare(seg)
                job.launch.pack(*job.arguments(seg))
            except Exception as e:  # noqa: BLE001 - kept on what the job would have made
                lost.append((job, e))
            else:
                ready.append(job)
        if ready:
            run_together([j.launch for j in ready], self.threads)
        self.release(seg)
        if lost:
            raise JobErrors(lost)

    def fail(self, seg: Segment, error: Exception, errors: list[BaseException]) -> None:
        """Keep each job's error on what it would have made."""
        if not isinstance(error, JobErrors):
            super().fail(seg, error, errors)
            return
        for job, e in error.lost:
            job.fail(seg, e, errors)


class JobErrors(Exception):  # noqa: N818
    """Jobs of a table that could not run, with the error of each."""

    def __init__(self, lost: list[tuple[KernelStep, Exception]]) -> None:
        super().__init__(lost)
        self.lost = lost


class LibraryStep(Step):
    """A kernel that torch ships, run on host views (Note [Host views] in fallback.py)."""

    __slots__ = (
        "args",
        "first_out",
        "func",
        "kwargs",
        "metas",
        "operands",
        "out_of",
        "scalar0",
        "seeded",
    )

    def __init__(self, node: Node) -> None:
        r = node.recipe
        self.node = node
        self.func = r.func
        self.kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in r.kwargs.items()}
        self.args = r.args
        self.seeded = id(r.func) in SEEDED
        self.scalar0 = node.scalar0
        self.first_out = node.first_out
        self.metas = list(r.outs)
        out = LIBRARY.get(id(r.func))
        direct = (
            out is not None
            and len(r.outs) == 1
            and r.outs[0].contiguous
            and not self.kwargs.keys() - {"beta", "alpha"}
        )
        self.out_of = out if direct else None
        self.operands = list(zip(node.ins, r.ins, strict=True))
        if direct:
            self.operands.append((self.first_out, r.outs[0]))

    def hosts(self, seg: Segment) -> list[torch.Tensor]:
        """CPU tensors over the operands, the direct result's last."""
        bufs, ext, view = seg.bufs, seg.ext, memory().view
        return [view(bufs[s] if s >= 0 else ext[~s], m) for s, m in self.operands]

    def run(self, seg: Segment) -> None:
        """Call the CPU kernel; its results go straight to HBM where it has an out= form, else their memory is adopted."""
        self.prepare(seg)
        node = self.node
        tensors = self.hosts(seg)
        scalars = seg.scalars[self.scalar0 : node.nscalars]
        draw = None
        if self.seeded:
            draw = (int(scalars[-2]), int(scalars[-1]))
        args = [tensors[a.i] if type(a) is T else fill(a, tensors, scalars) for a in self.args]
        kwargs = {k: fill(v, tensors, scalars) for k, v in self.kwargs.items()}
        if self.out_of is not None:
            self.out_of(*args, **kwargs, out=tensors[-1])  # operands and result have no flags
        else:
            result = seeded(self.func, args, kwargs, draw)
            for k, value in enumerate(self._new(result)):
                self._keep(seg.bufs[self.first_out + k], self.metas[k], value)
        if not node.recipe.native:
            COUNTERS.fallback(str(self.func))
        self.release(seg)

    def _new(self, result: Any) -> list[torch.Tensor]:
        many = result if isinstance(result, (tuple, list)) else (result,)
        return [
            v
            for v, k in zip(many, self.node.recipe.returns, strict=True)
            if k is not None and k >= 0
        ]

    def _keep(self, buffer: Buffer, m: Meta, value: torch.Tensor) -> None:
        """Make a CPU result the contents of a buffer, with the strides that were promised."""
        value = resolved(value)
        if value.shape != m.shape or value.dtype != m.dtype:
            raise RuntimeError(
                f"{self.func}: the CPU kernel gave {value.dtype} {tuple(value.shape)}, its meta kernel promised {m.dtype} {tuple(m.shape)}"
            )
        nbytes = value.untyped_storage().nbytes()
        if (
            meta_of(value) is m
            and not in_arena(value)
            and buffer.nbytes <= nbytes <= buffer.nbytes + 64
        ):
            memory().adopt(buffer, value, site_of(self.node))
            return
        memory().allocate(buffer, site_of(self.node))
        memory().host(buffer, m).copy_(value)


def plan_for(seg: Segment) -> Plan:
    """The segment's plan, from its node's table or made now."""
    key = (seg.live, seg.live_ext)
    plan = seg.node.plans.get(key)
    if plan is None:
        plan = seg.node.plans[key] = make_plan(seg.node, seg.live, seg.live_ext, seg.spec)
    else:
        COUNTERS.kernels_reused += len(plan.steps)
    return plan


@dataclass(slots=True)
class Part:
    """A launch: a library call, or a kernel, or several jobs of one kernel. groups: of each job.
    emitted: their kernels; empty for a library call. item: what it does on the chip."""

    groups: list[planning.Group]
    emitted: list[Emitted]
    item: Item

    def takes(self, other: Part) -> bool:
        """Whether the other one's kernel is the same, so that it may be a job of this launch."""
        if not self.emitted or not other.emitted:
            return False
        a, b = self.emitted[0], other.emitted[0]
        return a.kernel == b.kernel and not a.guards and not b.guards

    def add(self, other: Part) -> None:
        """Take the other one's jobs."""
        self.groups += other.groups
        self.emitted += other.emitted
        self.item = Item(
            "kernel", self.item.ops + other.item.ops, self.item.works + other.item.works
        )


@dataclass(slots=True)
class Arrangement:
    """A segment's launches in order. alive: slots that outlive it. stored: slots that need HBM."""

    parts: list[Part]
    alive: set[int]
    stored: set[int]


def arrange(
    end: Node, live: tuple[bool, ...], live_ext: tuple[bool, ...], spec: ChipSpec
) -> Arrangement:
    """Plan the segment that ends at a trie node, for one pattern of surviving buffers, on a chip.

    Groups that have no whole tile plan in its SBUF are split until each has one or is a single op.
    """
    nodes = end.path()
    alive = {s for s, yes in enumerate(live) if yes}
    alive |= {~k for k, yes in zip(end.written, live_ext, strict=True) if yes}
    groups = planning.grouped([n for n in planning.needed(nodes, alive) if not is_empty(n)])
    while True:
        stored = planning.stored_slots(groups, alive)
        parts: list[Part] = []
        smaller: list[planning.Group] = []
        for g in groups:
            if g.library is not None:
                parts.append(Part([g], [], _library_item(g.library, spec)))
                smaller.append(g)
                continue
            emitted = Emitter(g, stored, dtype_of_writes([i.node for i in g.items])).finish()
            if not any(i.op == "store" for i in emitted.kernel.insts):
                smaller.append(g)
                continue
            fits, work = planned(emitted.kernel, emitted.space, spec)
            if len(g.items) > 1 and not fits:
                smaller += planning.halves(g)
                continue
            sites = tuple([site_of(i.node) for i in g.items])
            parts.append(Part([g], [emitted], Item("kernel", sites, (work,))))
            smaller.append(g)
        if len(smaller) == len(groups):
            return Arrangement(_bundled(parts), alive, stored)
        groups = smaller


def _bundled(parts: list[Part]) -> list[Part]:
    """Equal kernels side by side as one launch each, such as an optimizer's, one for each parameter:
    a part joins an earlier one of its kernel if it may run before all that lies between."""
    out: list[Part] = []
    for part in parts:
        for k in range(len(out) - 1, max(-1, len(out) - 1 - planning.LOOK_BACK), -1):
            if out[k].takes(part):
                between = [g for p in out[k:] for g in p.groups]
                if planning.movable(part.groups[0], between):
                    out[k].add(part)
                    break
        else:
            out.append(part)
    return out


def _library_item(node: Node, spec: ChipSpec) -> Item:
    """A library call on the chip, or a round trip to the CPU."""
    r = node.recipe
    sites = (site_of(node),)
    if r.native:
        return Item("library", sites, library_work(r, spec))
    down = sum(m.numel * m.itemsize for m in r.ins)
    up = sum(m.numel * m.itemsize for m in (*r.outs, *[r.ins[k] for k in r.writes]))
    return Item("fallback", sites, (), up, down)


def _library_step(node: Node) -> LibraryStep:
    step = LibraryStep(node)
    fresh = set(range(node.first_out, node.nbufs))
    step.ins = list(dict.fromkeys(node.ins))
    step.outs = sorted({*fresh, *[node.ins[k] for k in node.recipe.writes]})
    step.allocs = [(s, site_of(node)) for s in sorted(fresh)] if step.out_of is not None else []
    return step


def _kernel_step(g: planning.Group, emitted: Emitted, stored: set[int]) -> KernelStep:
    step = KernelStep(emitted, [i.node for i in g.items])
    own = set(g.writes)
    new = {s: i.node for i in g.items for s in range(i.node.first_out, i.node.nbufs)}
    step.ins = [s for s in dict.fromkeys(emitted.slots) if s < GUARD and s not in own]
    step.ins += [s for s in own if s in stored and s not in new and s not in step.ins]
    step.outs = sorted(own)
    step.allocs = [(s, site_of(new[s])) for s in own if s in stored and s in new]
    step.frees = []
    return step


def make_plan(
    end: Node, live: tuple[bool, ...], live_ext: tuple[bool, ...], spec: ChipSpec
) -> Plan:
    """The steps of a segment, kernels compiled."""
    made = arrange(end, live, live_ext, spec)
    steps: list[Step] = []
    for part in made.parts:
        if part.groups[0].library is not None:
            steps.append(_library_step(part.groups[0].library))
            continue
        jobs = [
            _kernel_step(g, e, made.stored) for g, e in zip(part.groups, part.emitted, strict=True)
        ]
        steps.append(jobs[0] if len(jobs) == 1 else JobsStep(jobs))
    _releases(steps, made.alive)
    happening = Happening(
        tuple([p.item for p in made.parts]),
        spec,
        lambda other: tuple([p.item for p in arrange(end, live, live_ext, other).parts]),
    )
    works = [w for p in made.parts for w in p.item.works]
    return Plan(
        steps,
        sum([p.item.kind != "fallback" for p in made.parts]),
        sum([w.read for w in works]),
        sum([w.written for w in works]),
        happening,
        [g for p in made.parts for g in p.groups],
        frozenset(made.stored),
    )


def is_empty(node: Node) -> bool:
    """A node that makes and writes nothing: all its results have no elements."""
    r = node.recipe
    return r.native and r.body is None and id(r.func) not in LIBRARY


def _releases(steps: list[Step], alive: set[int]) -> None:
    """Give each step the slots that are dead after it."""
    last: dict[int, Step] = {}
    for step in steps:
        step.frees = []
        for s in (*step.ins, *step.outs):
            if s >= 0 and s not in alive:
                last[s] = step
    for s, step in last.items():
        step.frees.append(s)
