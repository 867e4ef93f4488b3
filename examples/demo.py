"""Train a small GPT in every mode and print one table; `make demo` runs this.

The same training loop runs on the CPU and on the simulated NeuronCore in its three modes. Losses and final weights
of the three must be the same bits: if they are not, this exits with status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time

import torch
from tqdm import tqdm
from train_gpt import GPT, OUT, Config, plot, train

from adaptive_eager import Session, neuron_eager


def digest(model: GPT) -> str:
    """A fingerprint of all weights, bit for bit."""
    parts = [p.detach().cpu().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def timed(config: Config, device: str, label: str) -> tuple[list[float], str, float]:
    """(losses, weights' digest, median ms a step). The loss is read each step, so that steps can be timed."""
    marks: list[float] = []
    with tqdm(total=config.steps, desc=f"{label:10}", unit="step") as bar:

        def on_step(step: int, loss: torch.Tensor) -> None:
            value = loss.item()
            marks.append(time.perf_counter())
            bar.set_postfix(loss=f"{value:.3f}")
            bar.update()

        model, losses = train(config, device, on_step)
    steps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    return losses, digest(model), 1e3 * statistics.median(steps or [0.0])


def row(name: str, losses: list[float], ms: float, session: Session | None, steps: int) -> str:
    """One line of the table. The last column is simulated device time, the one before it wall time here."""
    if session is None:
        return (
            f"{name:<10}{losses[-1]:>12.6f}{'-':>14}{'-':>14}{'-':>10}{'-':>11}{ms:>10.1f}{'-':>14}"
        )
    stats, chip = session.stats, session.simulated
    moved = (stats.hbm_read + stats.hbm_written) / steps / 1e6
    return (
        f"{name:<10}{losses[-1]:>12.6f}{stats.launches / steps:>14.0f}{moved:>14.1f}"
        f"{stats.kernels_compiled:>10}{stats.fallbacks:>11}{ms:>10.1f}{chip.ns / steps / 1e6:>14.1f}"
    )


def main() -> int:
    """Run all modes, print the table, compare bits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=Config.lr)
    args = parser.parse_args()
    config = Config(steps=args.steps, lr=args.lr)
    curves: dict[str, list[float]] = {}
    rows, digests = [], {}
    losses, _, ms = timed(config, "cpu", "cpu")
    curves["cpu"] = losses
    rows.append(row("cpu", losses, ms, None, config.steps))
    for mode in ("blocking", "eager", "adaptive"):
        with neuron_eager(mode, default_device=False) as session:
            losses, digests[mode], ms = timed(config, "neuron", mode)
        curves[mode] = losses
        rows.append(row(mode, losses, ms, session, config.steps))
    same = (
        len(set(digests.values())) == 1
        and curves["blocking"] == curves["eager"] == curves["adaptive"]
    )
    worst = max(abs(a - b) / abs(b) for a, b in zip(curves["adaptive"], curves["cpu"], strict=True))
    print(
        f"\nGPT, {config.layers} layers, width {config.width}, {config.steps} steps of {config.batch} x {config.context} bytes\n"
    )
    print(
        f"{'mode':<10}{'final loss':>12}{'launches/step':>14}{'HBM MB/step':>14}{'compiled':>10}{'fallbacks':>11}"
        f"{'ms/step':>10}{'TRN2 ms/step':>14}"
    )
    print("\n".join(rows))
    print(
        f"\nlosses and final weights in the three modes: {'the same bits' if same else 'DIFFERENT BITS'}"
    )
    print(f"largest relative difference from the CPU's loss curve: {worst:.1e}")
    plot(curves, OUT / "demo.png")
    print(f"loss curves: {OUT / 'demo.png'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
