"""What recording an op costs: `python -m tests.perf.record [--json]`.

Three columns from one interleaved run on 64x64 tensors: recording on `neuron` (the timed region holds the ops alone;
segments are cut outside it), an empty `__torch_dispatch__` that only makes the wrapper, and PyTorch's whole op on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

OPS = 200
ROUNDS = 60


class Empty(torch.Tensor):
    """The floor: enter Python, make the wrapper, leave."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func._schema.name.endswith("_") else MAKE()


MAKE = functools.partial(
    torch.Tensor._make_wrapper_subclass,
    Empty,
    torch.Size((64, 64)),
    strides=(64, 1),
    dtype=torch.float32,
    device="cpu",
)

CASES: dict[str, Callable[[Any, Any], Any]] = {
    "tensor * tensor": lambda x, y: x * y,
    "tensor * number": lambda x, y: x * 1.5,
    "unary exp": lambda x, y: x.exp(),
    "in-place add_": lambda x, y: x.add_(y),
    "view t()": lambda x, y: x.t(),
    "detach": lambda x, y: x.detach(),
}


def one_round(f: Callable[[Any, Any], Any], x: Any, y: Any) -> float:
    """Microseconds an op."""
    start = time.perf_counter()
    for _ in range(OPS):
        f(x, y)
    return (time.perf_counter() - start) / OPS * 1e6


def measure() -> dict[str, dict[str, float]]:
    """Medians by case and column, microseconds."""
    cpu = torch.randn(64, 64), torch.zeros(64, 64)
    neuron = cpu[0].to("neuron"), cpu[1].to("neuron")
    empty = MAKE(), MAKE()
    out: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for name, f in CASES.items():
            columns: dict[str, list[float]] = {"neuron": [], "empty dispatch": [], "cpu eager": []}
            for r in range(ROUNDS + 10):
                got = {}
                got["neuron"] = one_round(f, *neuron)
                torch.neuron.synchronize()
                got["empty dispatch"] = one_round(f, *empty)
                got["cpu eager"] = one_round(f, *cpu)
                if r >= 10:
                    for k, v in got.items():
                        columns[k].append(v)
            out[name] = {k: statistics.median(v) for k, v in columns.items()}
    return out


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure()
    if args.json:
        print(json.dumps(rows))
        return
    print(
        f"{'us an op (median)':<18}{'neuron':>10}{'empty dispatch':>16}{'ratio':>8}{'cpu eager':>12}"
    )
    for name, c in rows.items():
        print(
            f"{name:<18}{c['neuron']:>10.2f}{c['empty dispatch']:>16.2f}{c['neuron'] / c['empty dispatch']:>8.2f}{c['cpu eager']:>12.2f}"
        )


if __name__ == "__main__":
    main()
