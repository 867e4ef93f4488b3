"""PyTorch's operator database on a device: `python -m adaptive_eager.testing.opinfo --device neuron [--samples N] [--json FILE]`.

Each op, check (`checks.CHECKS`) and dtype makes one entry of a ledger. The work is done in child processes, so that an op that kills its
process costs itself and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from adaptive_eager.testing import checks as _checks
from adaptive_eager.testing.checks import CHECKS, Left, Trial
from adaptive_eager.testing.exceptions import CODES, reason
from adaptive_eager.testing.ledger import FAILED, PASSED, SKIPPED, UPSTREAM, Entry, Ledger

DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "complex64",
    "int64",
    "int32",
    "uint8",
    "bool",
)
SECONDS = 60
"""For one op, check and dtype."""


class TooLong(Exception):  # noqa: N818 - reported as a failure
    """An entry took more than its time."""


def database() -> list[Any]:
    """PyTorch's operators, in its order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def dtypes_of(op: Any, check: str, wanted: Sequence[torch.dtype]) -> list[torch.dtype]:
    """In which dtypes a check of an op is run."""
    c = CHECKS[check]
    if not c.applies(op):
        return []
    supported = op.supported_dtypes("cpu")
    have = [d for d in wanted if d in supported]
    if c.dtypes is None:
        return have
    mine = [d for d in c.dtypes if d in supported and d in wanted]
    if mine or check in ("gradients", "gradcheck"):
        return mine
    return have[:1]


def samples_of(op: Any, check: str, dtype: torch.dtype, most: int) -> Iterator[Any]:
    """Up to `most` samples on the CPU, the same in each run."""
    torch.manual_seed(0)
    random.seed(0)
    if check == "errors":
        found = (e.sample_input for e in op.error_inputs("cpu"))
    else:
        found = op.sample_inputs("cpu", dtype, requires_grad=check in ("gradients", "gradcheck"))
    return itertools.islice(found, most)


def run(op: Any, check: str, dtype: torch.dtype, device: torch.device, most: int = 2) -> Entry:
    """One entry: passed if a sample passed and none failed."""
    name = f"{dtype}".removeprefix("torch.")
    code = reason(op.name, check) if device.type == "neuron" else ""
    if code:
        return Entry(op.formatted_name, check, name, SKIPPED, code)
    if CHECKS[check].left_upstream(op, dtype):
        return Entry(
            op.formatted_name, check, name, UPSTREAM, "", "PyTorch's own test leaves it out"
        )
    left: Left | None = None
    passed = 0
    try:
        samples = iter(samples_of(op, check, dtype, most))
        for k in itertools.count():
            try:
                sample = next(samples)
            except StopIteration:
                break
            except Exception as e:  # noqa: BLE001 - PyTorch's own generator fails
                left = Left("upstream", f"no sample: {type(e).__name__}")
                break
            try:
                CHECKS[check].run(Trial(op, sample, device))
                passed += 1
            except Left as e:
                left = e
            except TooLong:
                raise
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    raise
                first = (str(e).strip().splitlines() or [""])[0]
                detail = f"sample {k}: {type(e).__name__}: {first}"[:300]
                return Entry(op.formatted_name, check, name, FAILED, "", detail, passed)
    except TooLong:
        return Entry(op.formatted_name, check, name, FAILED, "", f"over {SECONDS} s", passed)
    if passed:
        return Entry(op.formatted_name, check, name, PASSED, samples=passed)
    if left is not None and left.code in CODES:
        return Entry(op.formatted_name, check, name, SKIPPED, left.code, str(left))
    return Entry(op.formatted_name, check, name, UPSTREAM, "", str(left or "no samples"))


def entries(
    ops: Iterable[Any],
    checks: Sequence[str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    most: int,
) -> Iterator[list[Entry]]:
    """The entries of each op."""
    for op in ops:
        found = []
        for check in checks:
            for dtype in dtypes_of(op, check, dtypes):
                signal.alarm(SECONDS)
                try:
                    found.append(run(op, check, dtype, device, most))
                finally:
                    signal.alarm(0)
        yield found


def _child(todo: Sequence[int], options: argparse.Namespace) -> None:
    """Do the ops of these numbers; a line of JSON for each."""

    def too_long(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, too_long)
    _checks.quiet()
    ops = database()
    given = [getattr(torch, d) for d in options.dtypes.split(",")]
    device = torch.device(options.device)
    one_by_one = ((k, [ops[k]]) for k in todo)
    for k, op in one_by_one:
        for found in entries(op, options.checks.split(","), given, device, options.samples):
            sys.stdout.write(json.dumps({"op": k, "entries": [asdict(e) for e in found]}) + "\n")
            sys.stdout.flush()
    os._exit(0)


def _shard(todo: list[int], argv: Sequence[str], names: Sequence[str], show: Any) -> list[Entry]:
    """Entries of these ops, by child processes, one after the other."""
    out: list[Entry] = []
    while todo:
        command = [sys.executable, "-m", "adaptive_eager.testing.opinfo", *argv]
        command += ["--child", json.dumps(todo)]
        # This module again; its errors go to the bin, the ledger has what matters.
        pipe, waste = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, text=True, stdout=pipe, stderr=waste) as p:  # noqa: S603
            assert p.stdout is not None
            done = []
            for line in p.stdout:
                if not line.startswith('{"op": '):
                    continue
                found = json.loads(line)
                done.append(found["op"])
                out += [Entry(**e) for e in found["entries"]]
                show(1)
            code = p.wait()
        left = [k for k in todo if k not in set(done)]
        if left and code == 0:
            raise RuntimeError("a child process ended early")
        if left:
            out.append(
                Entry(names[left[0]], "crash", "", FAILED, "", f"the process died, exit {code}")
            )
            left = left[1:]
        todo = left
    return out


def sweep(argv: Sequence[str], options: argparse.Namespace) -> Ledger:
    """The ledger of a run over several processes."""
    names = [op.formatted_name for op in database()]
    wanted = options.ops.split(",")
    todo = [k for k, n in enumerate(names) if any(w in n for w in wanted)]
    shards = [todo[k :: options.jobs] for k in range(options.jobs)]
    begin, count = time.monotonic(), 0

    def show(n: int) -> None:
        nonlocal count
        count += n
        if sys.stderr.isatty() or count % 50 == 0:
            sys.stderr.write(f"\r{count}/{len(todo)} ops, {time.monotonic() - begin:.0f} s")

    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda s: _shard(s, argv, names, show), shards))
    sys.stderr.write("\n")
    return Ledger(options.device, [e for part in found for e in part])


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the ledger; 1 if something failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m adaptive_eager.testing.opinfo", description=__doc__
    )
    parser.add_argument("--device", default="neuron")
    parser.add_argument(
        "--samples", type=int, default=2, help="most samples of an op, check and dtype"
    )
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--checks", default=",".join(CHECKS))
    parser.add_argument("--ops", default="", help="only ops whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)))
    parser.add_argument("--json", default="", help="write the ledger here")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        _child(json.loads(options.child), options)
    ledger = sweep(argv, options)
    if options.json:
        ledger.save(options.json)
    print(ledger)  # noqa: T201 - a command that prints a table
    return 1 if ledger.of(FAILED) else 0


if __name__ == "__main__":
    sys.exit(main())
