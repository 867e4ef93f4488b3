"""Chains of eager ops, end to end: `python -m tests.perf.chains [--quick] [--json] [--only NAME,NAME] [--dtype bfloat16]`.

Each candidate runs the same Python function on the same values and ends with its result computed. Candidates take turns (A B C A B C
...) of one call, or of a few where calls are short; ratios are taken within a round, medians and quartiles over rounds. Baselines: PyTorch eager as it comes, PyTorch eager with glibc's
malloc told to keep memory (the honest one: large temporaries stop costing page faults), and Inductor under the same malloc.
The malloc setting is for the whole process, so the first baseline has a process of its own. Geometric means are over the cases of a
size; `bandwidth` is what the neuron run moves at least (inputs once, result once) as a share of a copy's rate in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

SIZES = (10_000, 100_000, 1_000_000, 16_000_000)
ROW = 1000
SMALL = 1_000_000
TURN = 9
"""Calls of a turn up to `SMALL` elements, of which the last two thirds count: Inductor's threads are not PyTorch's, and spin on for a
while after its turn on the cores that the next one needs."""
WARM = 4
"""Rounds before the first that counts."""


def affine(x: Any) -> Any:
    """Eight pointwise ops."""
    return torch.relu(((x * 1.3 + 0.1) * x - 0.5) * 0.7 + x) * 1.1


def gelu(x: Any) -> Any:
    """tanh-GELU from primitives: nine ops."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


def swiglu(x: Any, y: Any) -> Any:
    """silu(x) * y."""
    return F.silu(x) * y


def explog(x: Any) -> Any:
    """exp and log, twice."""
    return torch.log(torch.exp(torch.log(torch.exp(x * 0.5) + 1.0)) + 1.0)


def rms(x: Any) -> Any:
    """RMS norm from primitives over rows of 1000."""
    h = x.view(-1, ROW)
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)


def softmax(x: Any) -> Any:
    """Scale and softmax over rows of 1000."""
    return torch.softmax(x.view(-1, ROW) * 0.125, dim=-1)


def layer(x: Any, w: Any, b: Any) -> Any:
    """Layer norm with weight and bias over rows of 1000."""
    return F.layer_norm(x.view(-1, ROW), (ROW,), w, b)


def adamw(p: Any, g: Any, m: Any, v: Any) -> Any:
    """An AdamW update, in place."""
    p.mul_(1 - 1e-5)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, (v.sqrt() / 0.03).add_(1e-8), value=-0.01)
    return p


def residual(x: Any, b: Any, r: Any, keep: Any) -> Any:
    """Bias, GELU, a dropout mask, a residual, over rows of 1000."""
    return F.gelu(x.view(-1, ROW) + b) * keep.view(-1, ROW) * 1.1 + r.view(-1, ROW)


def summed(x: Any) -> Any:
    """A chain that ends in a sum."""
    return (torch.relu(x * 1.3 + 0.1) * 0.7).sum()


def transposed(x: Any, y: Any) -> Any:
    """A transposed operand and a plain one."""
    return x.t() * 2 + y


def outer(x: Any, y: Any) -> Any:
    """[B, 1, D] * [1, T, D]."""
    return x * y + 1


def square(n: int) -> tuple[int, int]:
    """Two sizes of which the product is n and that are nearly equal."""
    a = 1 << round(math.log2(n) / 2)
    while n % a:
        a -= 1
    return a, n // a


@dataclass(frozen=True)
class Case:
    """A function, the shapes of its operands for n elements, and whether it writes them."""

    f: Callable[..., Any]
    shapes: Callable[[int], list[tuple[int, ...]]]
    inplace: bool = False


def rows(n: int) -> list[tuple[int, ...]]:
    """A vector of n."""
    return [(n,)]


CASES: dict[str, Case] = {
    "affine": Case(affine, rows),
    "gelu": Case(gelu, rows),
    "swiglu": Case(swiglu, lambda n: [(n,), (n,)]),
    "explog": Case(explog, rows),
    "rms": Case(rms, rows),
    "softmax": Case(softmax, rows),
    "layer": Case(layer, lambda n: [(n,), (ROW,), (ROW,)]),
    "adamw": Case(adamw, lambda n: [(n,)] * 4, inplace=True),
    "residual": Case(residual, lambda n: [(n,), (ROW,), (n,), (n,)]),
    "summed": Case(summed, rows),
    "transposed": Case(transposed, lambda n: [square(n), square(n)[::-1]]),
    "outer": Case(outer, lambda n: [(n // 100 // 50, 1, 100), (1, 50, 100)]),
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


def run_neuron(f: Callable[..., Any], *x: Any) -> Any:
    """One result on neuron, computed."""
    y = f(*x)
    torch.neuron.synchronize()
    return y


def seconds(f: Callable[[], Any]) -> float:
    """Time of one call, its result alive until the end."""
    start = time.perf_counter()
    keep = f()
    end = time.perf_counter()
    del keep
    return end - start


def copy_rate(n: int) -> float:
    """Bytes a second, read and written, of a warm copy of n float32."""
    a, b = torch.ones(n), torch.ones(n)
    return 8 * n / statistics.median([seconds(lambda: b.copy_(a)) for _ in range(9)])


def compare(
    n: int, repeats: int, inductor: bool, names: list[str], dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """For each case: us of each candidate and its ratio to neuron's (quartiles)."""
    out: dict[str, dict[str, Any]] = {}
    torch.manual_seed(0)
    for name in names:
        case = CASES[name]
        host = [torch.rand(s).to(dtype) for s in case.shapes(n)]
        device = [x.to("neuron") for x in host]
        own = [[x.clone() for x in host] if case.inplace else host for _ in range(2)]
        candidates: dict[str, Callable[[], Any]] = {
            "neuron": lambda f=case.f, x=device: run_neuron(f, *x),
            "eager": lambda f=case.f, x=own[0]: f(*x),
        }
        if inductor:
            torch._dynamo.reset()
            compiled = torch.compile(case.f, dynamic=False)
            candidates["inductor"] = lambda f=compiled, x=own[1]: f(*x)
        got: dict[str, list[float]] = {k: [] for k in candidates}
        calls = TURN if n <= SMALL else 1
        for r in range(repeats + WARM):
            for k, c in candidates.items():
                times = [seconds(c) for _ in range(calls)]
                if r >= WARM:
                    got[k].append(statistics.median(times[calls // 3 :]))
        row: dict[str, Any] = {k: statistics.median(v) * 1e6 for k, v in got.items()}
        result = case.f(*host)
        moved = sum(x.numel() * x.element_size() for x in [*host, result])
        moved += sum(x.numel() * x.element_size() for x in host[2:]) if case.inplace else 0
        row["bandwidth"] = moved / statistics.median(got["neuron"]) / copy_rate(n)
        for k, times in got.items():
            if k != "neuron":
                ratios = [a / b for a, b in zip(times, got["neuron"], strict=True)]
                row[f"{k} / neuron"] = statistics.quantiles(ratios, n=4)
        out[name] = row
    return out


def geomean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def break_even(ratios: dict[int, float]) -> str:
    """The size from which on a candidate's time / neuron's stays above 1, between two sizes by a line in logarithms."""
    sizes = sorted(ratios)
    losing = [n for n in sizes if ratios[n] < 1]
    if not losing:
        return f"below {sizes[0]:,}"
    if losing[-1] == sizes[-1]:
        return f"beyond {sizes[-1]:,}"
    a, b = losing[-1], sizes[sizes.index(losing[-1]) + 1]
    part = -math.log(ratios[a]) / (math.log(ratios[b]) - math.log(ratios[a]))
    return f"{float(f'{a * (b / a) ** part:.2g}'):,.0f}"


def main() -> None:
    """Print one table for each size, and the sizes from which neuron wins."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no 16M")
    parser.add_argument("--only", default=",".join(CASES), help="cases, by name")
    parser.add_argument("--sizes", default="", help="numbers of elements")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    sizes = tuple(map(int, args.sizes.split(","))) if args.sizes else SIZES
    sizes = sizes[:3] if args.quick and not args.sizes else sizes
    repeats = 5 if args.quick else 15
    names, dtype = args.only.split(","), getattr(torch, args.dtype)
    if args.child:
        print(json.dumps({n: compare(n, repeats, False, names, dtype) for n in sizes}))
        return
    command = [sys.executable, "-m", "tests.perf.chains", "--child", "default", *sys.argv[1:]]
    plain = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    tuned = tune_malloc()
    inductor = not args.no_inductor and bool(shutil.which("g++") or shutil.which("c++"))
    tables = {str(n): compare(n, repeats, inductor, names, dtype) for n in sizes}
    if args.json:
        print(json.dumps({"default": plain, "tuned": tables, "threads": torch.get_num_threads()}))
        return
    print(
        f"{args.dtype}, {torch.get_num_threads()} threads; malloc tuned: {tuned}; x = that candidate's time / neuron's, "
        "median [quartiles]; above 1 neuron is faster"
    )
    for n in sizes:
        show(n, plain[str(n)], tables[str(n)])
    print("\nElements from which neuron is faster than eager with a tuned malloc")
    for name in names:
        at = {n: tables[str(n)][name]["eager / neuron"][1] for n in sizes}
        print(f"{name:<20}{break_even(at):>20}")


def show(n: int, plain: dict[str, Any], table: dict[str, Any]) -> None:
    """Print one size."""
    heads = ("eager, default malloc", "eager, tuned malloc", "Inductor")
    print(
        f"\n{n:,} elements{'':>6}{'neuron us':>12}{'bandwidth':>11}"
        + "".join(f"{h:>26}" for h in heads)
    )
    means: list[list[float]] = [[], [], []]
    for name, row in table.items():
        cells = [
            plain[name]["eager / neuron"],
            row["eager / neuron"],
            row.get("inductor / neuron"),
        ]
        for mean, q in zip(means, cells, strict=True):
            if q is not None:
                mean.append(q[1])
        texts = ["-" if q is None else f"{q[1]:.2f}x [{q[0]:.2f}, {q[2]:.2f}]" for q in cells]
        print(
            f"{name:<20}{row['neuron']:>12.0f}{row['bandwidth']:>11.2f}"
            + "".join(f"{t:>26}" for t in texts)
        )
    print(f"{'geometric mean':<43}" + "".join(f"{geomean(m):>25.2f}x" for m in means))


if __name__ == "__main__":
    main()
