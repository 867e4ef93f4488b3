"""What a conformance run found: one entry for each op, check and dtype, as a table or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

PASSED = "passed"
UPSTREAM = "upstream"
SKIPPED = "skipped"
FAILED = "failed"
STATUSES = (PASSED, UPSTREAM, SKIPPED, FAILED)
"""passed; PyTorch's database or its CPU device does not have it; skipped by us, with a reason code; failed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One check of one op in one dtype. reason: a code of `exceptions.CODES` where it was skipped. detail: the sample and what was wrong.
    samples: how many were run."""

    op: str
    check: str
    dtype: str
    status: str
    reason: str = ""
    detail: str = ""
    samples: int = 0


class Ledger:
    """Entries, and counts of them."""

    def __init__(self, device: str, entries: Iterable[Entry] = ()) -> None:
        self.device = device
        self.entries = list(entries)

    def of(self, status: str) -> list[Entry]:
        """The entries of a status."""
        return [e for e in self.entries if e.status == status]

    @property
    def rate(self) -> float:
        """Passed, as a share of what PyTorch enables: all but `upstream`. 1.0 where that is nothing."""
        counts = Counter(e.status for e in self.entries)
        enabled = len(self.entries) - counts[UPSTREAM]
        return counts[PASSED] / enabled if enabled else 1.0

    def save(self, path: str | Path) -> None:
        """Write JSON: the device, the rate, and all entries."""
        found = {
            "device": self.device,
            "rate": self.rate,
            "entries": [asdict(e) for e in self.entries],
        }
        Path(path).write_text(json.dumps(found, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Ledger:
        """The inverse of `save`."""
        found = json.loads(Path(path).read_text())
        return cls(found["device"], [Entry(**e) for e in found["entries"]])

    def __str__(self) -> str:
        """A row for each check, the reasons of skips, and what failed."""
        checks = list(dict.fromkeys(e.check for e in self.entries))
        rows = [f"{'check':<15}" + "".join(f"{s:>10}" for s in STATUSES) + f"{'samples':>10}"]
        for check in [*checks, "all"]:
            mine = [e for e in self.entries if check in ("all", e.check)]
            counts = Counter(e.status for e in mine)
            cells = "".join(f"{counts[s]:>10,}" for s in STATUSES)
            rows.append(f"{check:<15}{cells}{sum(e.samples for e in mine):>10,}")
        rows.append(f"\n{self.device}: {100 * self.rate:.2f} % of what PyTorch enables")
        reasons = Counter(e.reason for e in self.of(SKIPPED))
        if reasons:
            rows.append("skipped: " + ", ".join(f"{n} {r}" for r, n in reasons.most_common()))
        rows += [f"FAILED {e.op} {e.check} {e.dtype}: {e.detail}" for e in self.of(FAILED)]
        return "\n".join(rows)
