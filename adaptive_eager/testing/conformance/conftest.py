"""The device under test, and the ledger."""

from __future__ import annotations

import importlib
from typing import Any

import hypothesis
import pytest
import torch

from adaptive_eager.testing.ledger import Entry, Ledger

LEDGER = pytest.StashKey[Ledger]()


def pytest_configure(config: Any) -> None:
    """Generated programs: no deadline, since a kernel's first run may compile it; the same in every run unless `--hypothesis-seed` says else."""
    if config.getoption("--device-import"):
        importlib.import_module(config.getoption("--device-import"))
    config.stash[LEDGER] = Ledger(config.getoption("--device"))
    hypothesis.settings.register_profile(
        "conformance",
        deadline=None,
        max_examples=config.getoption("--programs"),
        derandomize=config.getoption("hypothesis_seed", None) is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("conformance")


@pytest.fixture(scope="session")
def device(request: Any) -> torch.device:
    """The device of `--device`."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def samples(request: Any) -> int:
    """`--samples`."""
    return int(request.config.getoption("--samples"))


@pytest.fixture(scope="session")
def record(request: Any) -> Any:
    """Add an entry to the ledger."""

    def add(entry: Entry) -> None:
        request.config.stash[LEDGER].entries.append(entry)

    return add


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print the ledger, and save it where asked."""
    ledger = config.stash[LEDGER]
    if ledger.entries:
        terminalreporter.section("ledger")
        terminalreporter.write_line(str(ledger))
    if config.getoption("--ledger"):
        ledger.save(config.getoption("--ledger"))
