"""What instructions cost on the engines of a NeuronCore, and how long a sequence of them takes.

Source of the cycles: the cost table of nki.isa at release 2.26.1 (*isa*), and the arch guides where
they say how a chip differs. n is elements per partition: the 128 partitions work side by side, and how
many of them are used costs nothing.

Note [Time of a sequence]
Each engine takes its instructions in order and starts one every max(MIN_II, cycles). An instruction
reads and writes on-chip memory, and either access takes `access_cycles` to start; one that waits for
another's result starts `dependent_cycles` after it is there. So instructions that do not depend on each
other overlap, on one engine and between engines, and a chain of short ones costs latency alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaptive_eager.device_sim.spec import ChipSpec

ENGINES = ("tensor", "vector", "scalar", "gpsimd")


@dataclass(frozen=True, slots=True)
class Kind:
    """An instruction's engine and its cycles for n elements per partition of `itemsize` bytes."""

    engine: str
    cycles: Callable[[int, int, ChipSpec], float]
    why: str


def _each(n: int, itemsize: int, spec: ChipSpec) -> float:
    return n


def _twice(n: int, itemsize: int, spec: ChipSpec) -> float:
    return 2 * n


def _pairs(n: int, itemsize: int, spec: ChipSpec) -> float:
    return n if itemsize <= 2 else 2 * n


def _quarter(n: int, itemsize: int, spec: ChipSpec) -> float:
    return n / 4 if itemsize <= 2 else n


def _half(n: int, itemsize: int, spec: ChipSpec) -> float:
    return n / 2 if itemsize <= 2 else n


def _activation(n: int, itemsize: int, spec: ChipSpec) -> float:
    return n / spec.scalar_narrow if itemsize <= 2 else n


def _matmul(n: int, itemsize: int, spec: ChipSpec) -> float:
    rows = max(min(spec.min_cycles, spec.tensor_stationary), n)
    return rows if itemsize <= 2 else 4 * rows


KINDS: dict[str, Kind] = {
    "tensor_tensor": Kind("vector", _pairs, "isa: n if both are 16-bit in SBUF, else 2n"),
    "tensor_scalar": Kind(
        "vector", _quarter, "isa: n; arch guide: four times as fast if all is 16-bit in SBUF"
    ),
    "tensor_copy": Kind("vector", _quarter, "as tensor_scalar"),
    "select": Kind("vector", _twice, "isa, tensor_copy_predicated: 2n from SBUF"),
    "reduce": Kind("vector", _half, "isa, tensor_reduce: n/2 in bf16, else n"),
    "activation": Kind("scalar", _activation, "isa: n; trn3 takes two 16-bit elements a cycle"),
    "integer": Kind("gpsimd", _each, "arch guide: 128 lanes; Vector computes in float32"),
    "iota": Kind("gpsimd", lambda n, itemsize, spec: 150 + n, "isa: 150 + n"),
    "rng": Kind(
        "vector",
        _each,
        "isa, rng: a generator of its own on Vector; ours here has Philox's numbers",
    ),
    "matmul": Kind("tensor", _matmul, "isa: max(min(64, stationary), moving), four times in fp32"),
    "partition_sum": Kind("tensor", _matmul, "a matmul with a column of ones, into PSUM"),
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One engine instruction on a tile.

    kind: a key of KINDS. n: elements per partition. itemsize: bytes of its widest operand. after:
    positions, in the sequence, of the instructions whose results it reads. times: how often it is
    issued in a row, each with n elements, none waiting for the one before it.
    """

    kind: str
    n: int
    itemsize: int
    after: tuple[int, ...] = ()
    times: int = 1

    def cycles(self, spec: ChipSpec) -> float:
        """Engine cycles that it keeps its engine busy."""
        each = KINDS[self.kind].cycles(self.n, self.itemsize, spec)
        return self.times * max(float(spec.min_cycles), each)


def clock(engine: str, spec: ChipSpec) -> float:
    """Cycles per ns of an engine."""
    ghz: float = getattr(spec, f"{engine}_ghz")
    return ghz


def span(sequence: Sequence[Instruction], spec: ChipSpec) -> tuple[float, dict[str, float]]:
    """(ns until the last result is there, ns of work by engine). Note [Time of a sequence]."""
    free = dict.fromkeys(ENGINES, 0.0)
    busy = dict.fromkeys(ENGINES, 0.0)
    ready: list[float] = []
    for i in sequence:
        engine = KINDS[i.kind].engine
        ghz = clock(engine, spec)
        work = i.cycles(spec) / ghz
        start = free[engine]
        if i.after:
            waits = max([ready[k] for k in i.after]) + spec.dependent_cycles / ghz
            if waits > start:
                start = waits
        free[engine] = start + work
        busy[engine] += work
        ready.append(start + work + 2 * spec.access_cycles / ghz)
    return max(ready, default=0.0), busy
