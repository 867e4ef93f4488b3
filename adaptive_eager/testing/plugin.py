"""Options of `pytest --pyargs adaptive_eager.testing.conformance`. In any other run this module adds nothing."""

from __future__ import annotations

from typing import Any

PACKAGE = "adaptive_eager.testing"


def pytest_load_initial_conftests(early_config: Any, parser: Any, args: list[str]) -> None:
    """Add them where our tests are asked for: `--device` may be another package's option elsewhere."""
    if not any(PACKAGE in str(a) or PACKAGE.replace(".", "/") in str(a) for a in args):
        return
    group = parser.getgroup("conformance", "conformance of a PyTorch device")
    group.addoption(
        "--device", default="neuron", help="what torch.device takes; default: %(default)s"
    )
    group.addoption(
        "--device-import", default="", help="module whose import makes the device available"
    )
    group.addoption(
        "--samples",
        type=int,
        default=2,
        help="most samples of an op, check and dtype; default: %(default)s",
    )
    group.addoption(
        "--programs", type=int, default=100, help="generated programs a test; default: %(default)s"
    )
    group.addoption("--ledger", default="", help="write what was found to this JSON file")
