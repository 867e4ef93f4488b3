"""What one launch does on a core, and what that costs.

Note [Time of a launch]
A launch runs in *passes* over tiles: its transfers bring a tile's operands into SBUF, its instructions
work on them, its results go back. Physical cores of a logical one share the passes. With two buffers
for everything that DMA touches, the next tile comes in and the last one goes out while instructions
run; a pass then takes the longer of the two. Values between instructions have one buffer, so compute of
one pass ends before that of the next begins. That is what published chains of small ops show, too
(fidelity.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from adaptive_eager.device_sim.engines import Instruction, span
from adaptive_eager.device_sim.spec import ChipSpec


@dataclass(frozen=True, slots=True)
class Transfer:
    """One operand's way between HBM and SBUF, over all passes.

    nbytes: in all. run: contiguous bytes, in one partition, that a descriptor moves. partitions: that
    one pass reaches. out: from SBUF to HBM. times: passes that move it; 1 for what stays in SBUF.
    """

    nbytes: int
    run: int
    partitions: int
    out: bool
    times: int

    def ns(self, spec: ChipSpec) -> float:
        """Time of all its bytes on one physical core, starts apart."""
        share = max(1, spec.partitions // spec.dma_engines)
        engines = max(1, min(spec.dma_engines, -(-self.partitions // share)))
        rate = min(engines * spec.dma_bytes_per_ns, spec.stream_bytes_per_ns)
        rate *= self.run / (self.run + spec.dma_run_bytes)
        return self.nbytes / rate


@dataclass(frozen=True, slots=True)
class Work:
    """One launch, free of a chip's speed. passes: tiles in all. body: instructions of a pass, tail:
    those that follow the last one. double: whether transfers overlap with instructions.
    sbuf, psum: bytes of a partition in use at the same time, at most."""

    passes: int
    transfers: tuple[Transfer, ...]
    body: tuple[Instruction, ...]
    tail: tuple[Instruction, ...] = ()
    double: bool = True
    sbuf: int = 0
    psum: int = 0

    @property
    def read(self) -> int:
        """Bytes from HBM."""
        return sum([t.nbytes for t in self.transfers if not t.out])

    @property
    def written(self) -> int:
        """Bytes to HBM."""
        return sum([t.nbytes for t in self.transfers if t.out])


@dataclass(frozen=True, slots=True)
class Cost:
    """What a launch takes on a spec. ns: from its start to its end, launch overhead included.
    dma_ns, engine_ns: work, of one physical core. read, written: bytes of HBM."""

    ns: float
    launch_ns: float
    dma_ns: float
    engine_ns: dict[str, float] = field(default_factory=dict)
    read: int = 0
    written: int = 0
    sbuf: int = 0


def cost(work: Work, spec: ChipSpec) -> Cost:
    """The cost of a launch (Note [Time of a launch])."""
    cores = min(spec.lnc, max(1, work.passes))
    passes = -(-work.passes // cores)
    compute, busy = span(work.body, spec)
    after, more = span(work.tail, spec) if work.tail else (0.0, {})
    load, store = _pass_ns(work, spec, cores)
    start = spec.dma_start_ns + spec.dma_issue_ns
    first = (start + load) if load else 0.0
    last = (start + store) if store else 0.0
    if work.double:
        device = first + (passes - 1) * max(compute, load + store) + compute + after + last
    else:
        device = passes * (first + compute + last) + after
    dma = sum([t.ns(spec) for t in work.transfers]) / cores
    engines = {e: passes * ns + more.get(e, 0.0) for e, ns in busy.items()}
    return Cost(
        spec.launch_ns + device, spec.launch_ns, dma, engines, work.read, work.written, work.sbuf
    )


def _pass_ns(work: Work, spec: ChipSpec, cores: int) -> tuple[float, float]:
    """(load, store) ns of one pass on one core: its bytes, or the issue of its transfers if longer."""
    totals, counts = [0.0, 0.0], [0.0, 0.0]
    passes = max(1, -(-work.passes // cores))
    for t in work.transfers:
        if t.nbytes:
            totals[t.out] += t.ns(spec) / cores / passes
            counts[t.out] += t.times / max(1, work.passes)
    issue = spec.dma_issue_ns / spec.dma_issuers
    return max(totals[0], counts[0] * issue), max(totals[1], counts[1] * issue)


def copy_ns(nbytes: int, spec: ChipSpec) -> float:
    """A copy between host and HBM."""
    return spec.host_start_ns + nbytes / spec.host_bytes_per_ns


def matmul(m: int, n: int, k: int, batch: int, itemsize: int, spec: ChipSpec) -> Work:
    """`batch` products of (m, k) and (k, n): tiles of one PSUM bank, accumulated over k.

    The left operand's rows stay in SBUF, in blocks that leave room for two panels of the right one,
    which is read once for each such block.
    """
    rows, columns = spec.tensor_stationary, min(n, spec.tensor_moving) or 1
    deep = -(-k // spec.partitions) or 1
    tiles = batch * -(-m // rows) * -(-n // columns)
    panel = 2 * deep * columns * itemsize + 2 * columns * itemsize
    room = max(0, spec.sbuf_partition_bytes - panel)
    held = max(1, min(-(-m // rows), room // max(1, deep * rows * itemsize)))
    again = max(1, -(-m // (rows * held * spec.lnc)))
    per_partition = min(k, spec.partitions) or 1
    transfers = (
        Transfer(batch * m * k * itemsize, itemsize * max(1, min(k, 2048)), per_partition, False, tiles),
        Transfer(
            batch * k * n * itemsize * again, itemsize * columns, per_partition, False, tiles
        ),
        Transfer(batch * m * n * itemsize, itemsize * columns, min(m, rows) or 1, True, tiles),
    )  # fmt: skip
    body = (
        Instruction("matmul", columns, itemsize, times=deep),
        Instruction("tensor_copy", columns, 4, after=(0,)),
    )
    sbuf = min(spec.sbuf_partition_bytes, panel + held * deep * rows * itemsize)
    return Work(max(1, tiles), transfers, body, sbuf=sbuf, psum=4 * columns)


def stream(
    read: int, written: int, elements: int, itemsize: int, spec: ChipSpec, kind: str = "tensor_copy"
) -> Work:
    """Bytes in and out, and one instruction of a kind on each element, in tiles of 4 KiB a partition."""
    free = max(1, min(4096 // itemsize, -(-elements // spec.partitions)))
    passes = max(1, -(-elements // (spec.partitions * free)))
    run = free * itemsize
    used = max(1, min(spec.partitions, -(-elements // free)))
    transfers = (
        Transfer(read, run, used, False, passes),
        Transfer(written, run, used, True, passes),
    )
    return Work(passes, transfers, (Instruction(kind, free, itemsize),), sbuf=4 * run)
