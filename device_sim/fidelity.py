"""The model against published measurements: `python -m adaptive_eager.device_sim.fidelity`.

Predicted, published, ratio, one row a measurement. Two of the rows set a constant and say so; all other
numbers of a spec come from documents. Sources: users of TorchNeuron's closed beta on trn2 (xpu-perf
notes, XScript pre-training log) and pages of AWS's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adaptive_eager.device_sim.engines import Instruction, span
from adaptive_eager.device_sim.spec import TRN2, ChipSpec
from adaptive_eager.device_sim.work import Transfer, Work, cost, matmul

WITHIN = 0.15
"""Distance of the ratio from 1 above which a row has to say why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. predict: the model's figure in the unit. note: why it is off, or that it set a
    constant."""

    what: str
    source: str
    predict: Callable[[ChipSpec], float]
    published: float
    note: str = ""
    unit: str = "µs"


def elementwise(
    n: int, itemsize: int, ins: int, body: tuple[Instruction, ...], free: int = 1024
) -> Work:
    """A kernel over n elements of `ins` inputs and one output, in tiles of 128 x `free`."""
    free = min(free, max(1, -(-n // 128)))
    passes = max(1, -(-n // (128 * free)))
    used = min(128, -(-n // free))
    run = free * itemsize
    transfers = [Transfer(n * itemsize, run, used, False, passes)] * ins
    transfers.append(Transfer(n * itemsize, run, used, True, passes))
    return Work(passes, tuple(transfers), body)


def add(n: int, itemsize: int, free: int = 1024) -> Work:
    """x + y."""
    free = min(free, max(1, -(-n // 128)))
    return elementwise(n, itemsize, 2, (Instruction("tensor_tensor", free, itemsize),), free)


def silu(n: int, itemsize: int, free: int = 1024) -> Work:
    """silu(x)."""
    return elementwise(n, itemsize, 1, (Instruction("activation", free, itemsize),), free)


def pairs(count: int, n: int, itemsize: int, free: int = 1024) -> Work:
    """silu(x + b), `count` times over, as one kernel of which x and b come in once."""
    body: list[Instruction] = []
    for _ in range(count):
        at = len(body)
        body.append(Instruction("tensor_tensor", free, itemsize, (at - 1,) if at else ()))
        body.append(Instruction("activation", free, itemsize, (at,)))
    return elementwise(n, itemsize, 2, tuple(body), free)


SQUARE = 1024 * 1024
BF16, FP32 = 2, 4
ADDED_BYTES = 21.3e-3 * 0.58e12
"""Bytes of the gradient adds, from the log's own floor of 21.3 ms at the 0.58 TB/s that it saw."""


def _us(work: Work, spec: ChipSpec) -> float:
    return cost(work, spec).ns / 1e3


def _eager_chain(count: int) -> Callable[[ChipSpec], float]:
    return lambda spec: count * (_us(add(SQUARE, BF16), spec) + _us(silu(SQUARE, BF16), spec))


def _compiled(work: Callable[[ChipSpec], Work]) -> Callable[[ChipSpec], float]:
    """A graph called in a loop: the host issues the next while the device runs the last."""
    return lambda spec: max(spec.graph_call_ns / 1e3, _us(work(spec), spec))


def _compiled_chain(count: int) -> Callable[[ChipSpec], float]:
    return _compiled(lambda spec: pairs(count, SQUARE, BF16))


def _gemm(spec: ChipSpec) -> Work:
    return matmul(1024, 4096, 4096, 1, BF16, spec)


def _gradient_adds(spec: ChipSpec) -> float:
    return 147 * _us(add(round(ADDED_BYTES / 147 / 3 / FP32), FP32), spec)


def _stream(spec: ChipSpec) -> float:
    """TB/s that adding two GiB reaches, launch apart."""
    work = add(1 << 28, FP32)
    return (work.read + work.written) / (_us(work, spec) - spec.launch_ns / 1e3) / 1e6


def _one_transfer(spec: ChipSpec) -> float:
    return Transfer(32 << 10, 32 << 10, 8, False, 1).ns(spec) / 1e3


def _chained(spec: ChipSpec) -> float:
    """µs from one dependent one-element instruction to the next, at trn1's 1.4 GHz."""
    slow = spec.replace(scalar_ghz=1.4)
    chain = [Instruction("activation", 1, FP32, (k - 1,) if k else ()) for k in range(100)]
    return (span(chain, slow)[0] - span(chain[:50], slow)[0]) / 50 / 1e3


FLOOR = "sets launch_ns, to the lower end of the range"
CALL = "sets graph_call_ns, to the middle of the range"
ONE_OP = (
    "the floor of a call is published as 95-100 µs for graphs and 73-80 µs for graphs of one op; "
    "the model has one number, for graphs"
)
XPU, LOG = "xpu-perf, trn2", "XScript, trn2"
ROWS: tuple[Row, ...] = (
    Row("dispatch floor of an eager op", XPU, lambda s: _us(add(1, BF16), s), 60.0, FLOOR),
    Row("call floor of a compiled graph", XPU, lambda s: s.graph_call_ns / 1e3, 97.5, CALL),
    *(
        Row(f"silu(x+b) x {k}, 1024², bf16, eager", XPU, _eager_chain(k), us)
        for k, us in ((1, 140.0), (4, 512.0), (16, 2035.0), (64, 8236.0))
    ),
    *(
        Row(f"silu(x+b) x {k}, 1024², bf16, one kernel", XPU, _compiled_chain(k), us)
        for k, us in ((1, 103.0), (4, 97.0), (16, 206.0), (64, 707.0))
    ),
    Row("small add, eager", XPU, lambda s: _us(add(1024, BF16), s), 52.5),
    Row("small add, compiled", XPU, _compiled(lambda s: add(1024, BF16)), 75.5, ONE_OP),
    Row("GEMM 1024x4096x4096 bf16, eager", XPU, lambda s: _us(_gemm(s), s), 283.0),
    Row("GEMM 1024x4096x4096 bf16, compiled", XPU, _compiled(_gemm), 290.0),
    Row("147 gradient adds, float32, eager", LOG, _gradient_adds, 32_000.0),
    Row("HBM stream of a logical core", LOG, _stream, 0.58, unit="TB/s"),
    Row("32 KiB by one DMA engine", "nki-dma-overview", _one_transfer, 1.416),
    Row("chained 1-element Scalar instructions", "nki_perf_guide, trn1", _chained, 0.189),
)


def table(spec: ChipSpec = TRN2) -> list[tuple[Row, float, float]]:
    """(row, predicted, predicted / published) for each measurement."""
    out = []
    for row in ROWS:
        predicted = row.predict(spec)
        out.append((row, predicted, predicted / row.published))
    return out


def main() -> None:
    """Print the table, and below it what rows have to say."""
    notes = list(dict.fromkeys(row.note for row in ROWS if row.note))
    print(f"{'measurement':44} {'predicted':>10} {'published':>10} {'unit':4} {'ratio':>6}  source")
    for row, predicted, ratio in table():
        mark = f" [{notes.index(row.note) + 1}]" if row.note else ""
        print(
            f"{row.what:44} {predicted:10.4g} {row.published:10.4g} {row.unit:4} {ratio:6.2f}  "
            f"{row.source}{mark}"
        )
    for k, note in enumerate(notes, 1):
        print(f"[{k}] {note}")


if __name__ == "__main__":
    main()
