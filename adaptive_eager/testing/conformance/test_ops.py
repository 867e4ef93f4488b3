"""PyTorch's operator database: each op, in each check that applies to it."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch

from adaptive_eager.testing import checks
from adaptive_eager.testing.exceptions import CODES
from adaptive_eager.testing.ledger import FAILED, PASSED, SKIPPED
from adaptive_eager.testing.opinfo import DTYPES, SECONDS, TooLong, database, dtypes_of, run

CASES = [(op, check) for op in database() for check, c in checks.CHECKS.items() if c.applies(op)]


def _too_long(*_: Any) -> None:
    raise TooLong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("op", "check"), CASES, ids=[f"{op.formatted_name}-{c}" for op, c in CASES]
)
def test_op(op: Any, check: str, device: torch.device, samples: int, record: Any) -> None:
    """The op does what it does on the CPU, in each dtype."""
    alarm = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, _too_long) if alarm else None
    entries = []
    try:
        for dtype in dtypes_of(op, check, [getattr(torch, d) for d in DTYPES]):
            if alarm:
                signal.alarm(SECONDS)
            entries.append(run(op, check, dtype, device, samples))
    finally:
        if alarm:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    for e in entries:
        record(e)
    failed = [f"{e.dtype}: {e.detail}" for e in entries if e.status == FAILED]
    assert not failed, "\n".join(failed)
    if not any(e.status == PASSED for e in entries):
        ours = [CODES[e.reason] for e in entries if e.status == SKIPPED]
        pytest.skip(ours[0] if ours else entries[0].detail if entries else "no dtype")
