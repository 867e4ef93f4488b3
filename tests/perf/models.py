"""Training steps of small models: `python -m tests.perf.models [--repeats N]`.

Each model trains on the CPU with PyTorch eager (its malloc told to keep memory), and on `neuron` in adaptive mode, step by step in
turns; then on `neuron` in eager and in adaptive mode. Medians; x = that candidate's time / adaptive's. An adaptive step's time again by
what takes it: `record` until its loss is read, then `library` for PyTorch's own kernels (matrix products mostly), `kernels` for fused ones.
Simulated times are of TRN2 and have nothing to do with the wall time beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from adaptive_eager import neuron_eager
from adaptive_eager.steps import JobsStep, KernelStep, LibraryStep
from examples.train_gpt import GPT, Batches, Config, corpus, loss_of
from tests.perf.chains import tune_malloc

Step = Callable[[], torch.Tensor]


def gpt(width: int, context: int, batch: int) -> Callable[[str], Step]:
    """A GPT of four layers with AdamW and clipping."""

    def make(device: str) -> Step:
        c = Config(width=width, context=context, batch=batch)
        torch.manual_seed(0)
        model = GPT(c).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = Batches(corpus()[0], c, 0)

        def step() -> torch.Tensor:
            loss = loss_of(model, *batches.next(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return step

    return make


def many(device: str) -> Step:
    """An MLP of a hundred small layers: 200 parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(100)])
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 32).to(device)

    def step() -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def optimizer_alone(device: str) -> Step:
    """AdamW on the parameters of the d256 GPT."""
    torch.manual_seed(0)
    model = GPT(Config(width=256, context=128)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    first = next(model.parameters())

    def step() -> torch.Tensor:
        optimizer.step()
        return first.flatten()[0]

    return step


MODELS: dict[str, Callable[[str], Step]] = {
    "GPT d64 T64 B16": gpt(64, 64, 16),
    "GPT d128 T64 B16": gpt(128, 64, 16),
    "GPT d256 T128 B8": gpt(256, 128, 8),
    "MLP, 200 parameters": many,
    "AdamW of GPT d256": optimizer_alone,
}


def timed(step: Step) -> tuple[float, float]:
    """(ms until the loss is asked for, ms in all)."""
    start = time.perf_counter()
    loss = step()
    recorded = time.perf_counter()
    loss.item()
    return 1e3 * (recorded - start), 1e3 * (time.perf_counter() - start)


@contextmanager
def watched(spent: dict[str, float]) -> Iterator[None]:
    """Add up the ms that library calls and kernel launches take inside."""
    own = {kind: kind.run for kind in (KernelStep, JobsStep, LibraryStep)}

    def timing(kind: Any, name: str) -> Any:
        def run(self: Any, seg: Any) -> None:
            start = time.perf_counter()
            own[kind](self, seg)
            spent[name] += 1e3 * (time.perf_counter() - start)

        return run

    try:
        for kind in own:
            kind.run = timing(kind, "library" if kind is LibraryStep else "kernels")  # type: ignore[method-assign]
        yield
    finally:
        for kind, run in own.items():
            kind.run = run  # type: ignore[method-assign]


def profile(step: Step, steps: int) -> dict[str, float]:
    """ms a step by what takes it, of steps on their own."""
    spent = {"record": 0.0, "library": 0.0, "kernels": 0.0, "all": 0.0}
    with neuron_eager(default_device=False), watched(spent):
        for _ in range(steps):
            recorded, total = timed(step)
            spent["record"] += recorded
            spent["all"] += total
    return {k: v / steps for k, v in spent.items()}


def main() -> None:
    """Print one row a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    tuned = tune_malloc()
    print(f"{torch.get_num_threads()} threads; malloc tuned: {tuned}")
    print(
        f"{'step of':<22}{'cpu ms':>9}{'adaptive':>10}{'eager':>8}{'cpu x':>7}{'eager x':>9}"
        f"{'launches':>10}{'of eager':>9}{'TRN2 ms':>9}{'of eager':>9}"
        f"{'record':>8}{'library':>9}{'kernels':>9}{'all':>7}"
    )
    for name, make in MODELS.items():
        kept: dict[str, Any] = {}
        total, ratio = {}, {}
        # Eager mode runs on a worker, whose OpenMP threads would go on spinning beside the others: a round of its own.
        for rival in ("cpu", "eager"):
            steps = {rival: make("cpu" if rival == "cpu" else "neuron"), "adaptive": make("neuron")}
            times: dict[str, list[tuple[float, float]]] = {k: [] for k in steps}
            for r in range(repeats + 4):
                for mode, step in steps.items():
                    if mode == "cpu":
                        row = timed(step)
                    else:
                        with neuron_eager(mode, default_device=False) as kept[mode]:
                            row = timed(step)
                    if r >= 4:
                        times[mode].append(row)
            total[rival] = statistics.median([t for _, t in times[rival]])
            pairs = zip(times[rival], times["adaptive"], strict=True)
            ratio[rival] = statistics.median([a[1] / b[1] for a, b in pairs])
            if rival == "cpu":
                total["adaptive"] = statistics.median([t for _, t in times["adaptive"]])
                spent = profile(steps["adaptive"], repeats)
        a, e = kept["adaptive"], kept["eager"]
        print(
            f"{name:<22}{total['cpu']:>9.1f}{total['adaptive']:>10.1f}{total['eager']:>8.1f}"
            f"{ratio['cpu']:>7.2f}{ratio['eager']:>9.2f}{a.stats.launches:>10}{e.stats.launches:>9}"
            f"{a.simulated.ns / 1e6:>9.2f}{e.simulated.ns / 1e6:>9.2f}"
            f"{spent['record']:>8.1f}{spent['library']:>9.1f}{spent['kernels']:>9.1f}{spent['all']:>7.1f}"
        )


if __name__ == "__main__":
    main()
