"""How costs grow: `python -m tests.perf.growth [--steps N]`.

New sequence lengths, longer programs, larger tensors, loops that never read, and memory over many steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from adaptive_eager.kernels.launch import stats
from torch import nn

from adaptive_eager import neuron_eager


def lengths() -> None:
    """Kernels compiled for 30 sequence lengths of a small transformer layer, forward and backward."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).to("neuron")
    compiled = []
    for k in (0, *range(30)):  # the second step adds to gradients that the first one made
        before = stats.compiled + stats.from_disk
        with neuron_eager(default_device=False):
            x = torch.randn(2, 20 + 7 * k, 64).to("neuron")
            layer(x).square().mean().backward()
            layer.weight_sum = sum(p.grad.sum() for p in layer.parameters()).item()
        compiled.append(stats.compiled + stats.from_disk - before)
    print(
        f"30 sequence lengths: {sum(compiled[:2])} kernels compiled or loaded for the first, {sum(compiled[2:])} for the 29 others"
    )


def median(f: Callable[[], object], repeats: int = 15) -> float:
    """ms of a call, synchronized."""
    times = []
    for r in range(repeats + 5):
        start = time.perf_counter()
        keep = f()
        torch.neuron.synchronize()
        if r >= 5:
            times.append(1e3 * (time.perf_counter() - start))
        del keep
    return statistics.median(times)


def longer() -> None:
    """A chain of ten times the ops, tensors of ten times the elements."""

    def chain(x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = torch.relu(x * 1.01 + 0.01)
        return x

    x = torch.randn(1000).to("neuron")
    few, many = median(lambda: chain(x, 10)), median(lambda: chain(x, 100))
    print(f"30 ops {few:.3f} ms, 300 ops {many:.3f} ms: {many / few:.1f} times")
    for n in (1_000_000, 10_000_000):
        y = torch.randn(n).to("neuron")
        took = median(lambda y=y: F.gelu(y * 2 + 1))
        print(f"{n:>12,} elements {took:.3f} ms")


def endless(turns: int = 4000) -> None:
    """Loops that never read a value: how many plans their segments need."""
    for ops in (3, 7):
        with neuron_eager(default_device=False) as s:
            x = torch.zeros(100).to("neuron")
            for _ in range(turns):
                for _ in range(ops):
                    x = x * 0.5 + 1
        seen = [id(seg.node) for _, seg in s._segments]
        last = seen[len(seen) // 2 : -1]  # the scope's end cuts where the loop happens to be
        print(
            f"a loop of {2 * ops} ops, {turns} turns: {len(seen)} segments, "
            f"{len(set(last))} different in the second half"
        )


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def flat(steps: int) -> None:
    """Memory over many small training steps."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to("neuron")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 16).to("neuron")
    marks = []
    for k in range(steps + 1):
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        if k % (steps // 4) == 0:
            gc.collect()
            marks.append(f"{k:,}: {resident():.0f}")
    print(f"MiB of the process after steps {', '.join(marks)}")


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    lengths()
    longer()
    endless()
    flat(steps)


if __name__ == "__main__":
    main()
