"""From nothing to the tenth training step of a small GPT, imports apart: `python -m tests.perf.cold [--inductor]`.

Each candidate has a process of its own: the CPU, `neuron` with an empty folder for compiled kernels, `neuron` with that folder as the run
before it left it, and, if asked for, the CPU under `torch.compile` with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def child(device: str, compiled: bool) -> None:
    """Ten steps; prints seconds until the end of each, and kernels compiled."""
    import torch
    from adaptive_eager.kernels.launch import stats
    from torch import nn

    from examples.train_gpt import GPT, Batches, Config, corpus, loss_of

    c = Config()
    torch.manual_seed(0)
    text = corpus()[0]
    start = time.perf_counter()
    model = GPT(c).to(device)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(text, c, 0)
    marks = []
    for _ in range(10):
        loss = loss_of(run, *batches.next(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        marks.append(time.perf_counter() - start)
    print(json.dumps({"marks": marks, "compiled": stats.compiled, "disk": stats.from_disk}))


def main() -> None:
    """Print one row a candidate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--child", nargs=2)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], args.child[1] == "compiled")
        return
    rows = [("CPU eager", "cpu", "plain"), ("neuron, empty cache", "neuron", "plain")]
    rows += [("neuron, warm cache", "neuron", "plain")]
    if args.inductor:
        rows.append(("CPU Inductor, empty cache", "cpu", "compiled"))
    print(f"{'':<28}{'first step s':>14}{'tenth step s':>14}{'compiled':>10}{'from disk':>11}")
    with tempfile.TemporaryDirectory() as kernels, tempfile.TemporaryDirectory() as inductor:
        env = os.environ | {
            "ADAPTIVE_EAGER_CACHE_DIR": kernels,
            "TORCHINDUCTOR_CACHE_DIR": inductor,
        }
        for name, device, how in rows:
            command = [sys.executable, "-m", "tests.perf.cold", "--child", device, how]
            out = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            got = json.loads(out.stdout.splitlines()[-1])
            print(
                f"{name:<28}{got['marks'][0]:>14.2f}{got['marks'][9]:>14.2f}"
                f"{got['compiled']:>10}{got['disk']:>11}"
            )


if __name__ == "__main__":
    main()
