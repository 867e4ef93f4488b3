"""What the simulator costs: a GPT training step with it, and without.

    python -m tests.perf.simulator [steps]

Blocks of five steps, on and off by turns in one process, medians of a step. "Off" records nothing and leaves the clock
alone. Tile plans cannot be off, for they decide what is fused: they are made once a plan, and their share of the first
step is a row of its own.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import contextmanager

import torch

from adaptive_eager import neuron_eager
from adaptive_eager import steps as planning
from adaptive_eager.simulate import SIMULATOR
from examples.train_gpt import GPT, Batches, Config, corpus, loss_of

BLOCK = 5


@contextmanager
def scope(simulated):
    """A session with the simulator on or off."""
    kept = SIMULATOR.happened
    if not simulated:
        SIMULATOR.happened = lambda h, order: None
    try:
        with neuron_eager(default_device=False, simulate=simulated) as session:
            yield session
    finally:
        SIMULATOR.happened = kept


def main(steps: int = 100) -> None:
    """Print the table."""
    c = Config()
    torch.manual_seed(0)
    model = GPT(c).to("neuron")
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr)
    batches = Batches(corpus()[0], c, 0)

    def step():
        x, y = batches.next("neuron")
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        return loss.item()

    tiling = [0.0]

    def timed(f):
        def call(*args):
            begin = time.perf_counter()
            try:
                return f(*args)
            finally:
                tiling[0] += time.perf_counter() - begin

        return call

    planning.planned, planning.Happening = timed(planning.planned), timed(planning.Happening)
    begin = time.perf_counter()
    with scope(True):
        step()
    first = time.perf_counter() - begin
    for _ in range(3):
        with scope(True):
            step()
    times: dict[bool, list[float]] = {True: [], False: []}
    for k in range(max(2, steps // BLOCK)):
        with scope(k % 2 == 0) as session:
            for _ in range(BLOCK):
                begin = time.perf_counter()
                step()
                times[k % 2 == 0].append(1e3 * (time.perf_counter() - begin))
        if k == 0:
            table = session.simulated
    on, off = (statistics.median(times[x]) for x in (True, False))
    print(f"{c.layers}-layer GPT, median of {len(times[True])} and {len(times[False])} steps")
    print(f"step, simulator on    {on:8.2f} ms")
    print(f"step, simulator off   {off:8.2f} ms")
    print(f"simulator             {100 * (on - off) / off:+8.2f} %")
    print(
        f"first step            {1e3 * first:8.0f} ms, of which tile plans {1e3 * tiling[0]:.0f} ms"
    )
    print(f"simulated, {BLOCK} steps\n{table}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
