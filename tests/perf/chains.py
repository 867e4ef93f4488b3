"""Chains of eager ops, end to end: `python -m tests.perf.chains [--quick] [--json]`.

Each candidate runs the same Python function on the same values and ends with its result computed. Candidates take turns (A B C A B C
...), ratios are taken within a round, medians and quartiles over rounds. Baselines: PyTorch eager as it comes, PyTorch eager with glibc's
malloc told to keep memory (the honest one: large temporaries stop costing page faults), and Inductor under the same malloc.
The malloc setting is for the whole process, so the first baseline has a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

SIZES = (10_000, 100_000, 1_000_000, 16_000_000)


def eight(x: Any) -> Any:
    """Eight pointwise ops."""
    return torch.relu(((x * 1.3 + 0.1) * x - 0.5) * 0.7 + x) * 1.1


def gelu(x: Any) -> Any:
    """tanh-GELU from primitives: nine ops."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


def swiglu(x: Any) -> Any:
    """silu(x) * y."""
    return F.silu(x) * x


def softmax(x: Any) -> Any:
    """Scale and softmax over rows of 1000."""
    return torch.softmax(x.view(-1, 1000) * 0.125, dim=-1)


def rms(x: Any) -> Any:
    """RMS norm from primitives over rows of 1000."""
    h = x.view(-1, 1000)
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)


def layer(x: Any) -> Any:
    """Layer norm, GELU and a residual over rows of 1000."""
    h = x.view(-1, 1000)
    return F.gelu(F.layer_norm(h, (1000,))) + h


def summed(x: Any) -> Any:
    """A chain that ends in a sum."""
    return (torch.relu(x * 1.3 + 0.1) * 0.7).sum()


CHAINS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f for f in (eight, gelu, swiglu, softmax, rms, layer, summed)
}


def tune_malloc() -> bool:
    """Keep freed memory in the process: M_MMAP_MAX 0, M_TRIM_THRESHOLD and M_TOP_PAD large."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(
            libc.mallopt(-4, 0) and libc.mallopt(-1, 2**31 - 1) and libc.mallopt(-2, 256 << 20)
        )
    except (OSError, AttributeError):
        return False


def run_neuron(f: Callable[[Any], Any], x: Any) -> Any:
    """One result on neuron, computed."""
    y = f(x)
    torch.neuron.synchronize()
    return y


def seconds(f: Callable[[], Any]) -> float:
    """Time of one call, its result alive until the end."""
    start = time.perf_counter()
    keep = f()
    end = time.perf_counter()
    del keep
    return end - start


def compare(n: int, repeats: int, tuned: bool, inductor: bool) -> dict[str, dict[str, Any]]:
    """For each chain: us of each candidate and its ratio to neuron's (quartiles)."""
    out: dict[str, dict[str, Any]] = {}
    x = torch.randn(n)
    xn = x.to("neuron")
    for name, f in CHAINS.items():
        candidates: dict[str, Callable[[], Any]] = {
            "neuron": lambda: run_neuron(f, xn),
            "eager": lambda: f(x),
        }
        if inductor:
            compiled = torch.compile(f)
            candidates["inductor"] = lambda: compiled(x)
        got: dict[str, list[float]] = {k: [] for k in candidates}
        for r in range(repeats + 3):
            for k, c in candidates.items():
                t = seconds(c)
                if r >= 3:
                    got[k].append(t)
        row: dict[str, Any] = {k: statistics.median(v) * 1e6 for k, v in got.items()}
        for k, times in got.items():
            if k != "neuron":
                ratios = [a / b for a, b in zip(times, got["neuron"], strict=True)]
                row[f"{k} / neuron"] = statistics.quantiles(ratios, n=4)
        out[name] = row
    return out


def main() -> None:
    """Print one table for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no 16M")
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    sizes = SIZES[:3] if args.quick else SIZES
    repeats = 5 if args.quick else 15
    if args.child:
        print(json.dumps({n: compare(n, repeats, False, False) for n in sizes}))
        return
    command = [
        sys.executable,
        "-m",
        "tests.perf.chains",
        "--child",
        "default",
        *(["--quick"] if args.quick else []),
    ]
    plain = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    tuned = tune_malloc()
    inductor = shutil.which("g++") is not None or shutil.which("c++") is not None
    rows = {str(n): compare(n, repeats, tuned, inductor) for n in sizes}
    if args.json:
        print(json.dumps({"default": plain, "tuned": rows, "threads": torch.get_num_threads()}))
        return
    print(
        f"{torch.get_num_threads()} threads; malloc tuned: {tuned}; x = that candidate's time / neuron's, median [quartiles]; above 1 neuron is faster"
    )
    if not inductor:
        print("Inductor left out: no C++ compiler")
    for n in sizes:
        print(
            f"\n{n:,} elements{'':>6}{'neuron us':>12}{'eager, default malloc':>26}{'eager, tuned malloc':>26}{'Inductor':>26}"
        )
        for name, row in rows[str(n)].items():
            cells = [
                plain[str(n)][name]["eager / neuron"],
                row["eager / neuron"],
                row.get("inductor / neuron"),
            ]
            texts = ["-" if q is None else f"{q[1]:.2f}x [{q[0]:.2f}, {q[2]:.2f}]" for q in cells]
            print(f"{name:<20}{row['neuron']:>12.0f}" + "".join(f"{t:>26}" for t in texts))


if __name__ == "__main__":
    main()
