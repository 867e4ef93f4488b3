"""Conformance tests for PyTorch devices: generated programs and PyTorch's own operator database.

    from hypothesis import given
    from adaptive_eager.testing import assert_same_program, programs

    @given(programs())
    def test_programs(program):
        assert_same_program(program, device="cuda")

On any device, from the command line:

    pytest --pyargs adaptive_eager.testing.conformance --device=mps
    python -m adaptive_eager.testing.opinfo --device mps --json ledger.json

`tensors()` and `metas()` are strategies for values and metadata, `programs()` for whole eager programs; `modes()` names the ways in which
`neuron` may run one. Needs hypothesis, and expecttest for the operator database.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptive_eager.testing.grammar import Program, programs
    from adaptive_eager.testing.ledger import Entry, Ledger
    from adaptive_eager.testing.same import assert_same_program, modes, same_bits
    from adaptive_eager.testing.strategies import TensorMeta, metas, tensors

__all__ = [
    "Entry",
    "Ledger",
    "Program",
    "TensorMeta",
    "assert_same_program",
    "metas",
    "modes",
    "programs",
    "same_bits",
    "tensors",
]

_HOMES = {
    "Entry": "ledger",
    "Ledger": "ledger",
    "Program": "grammar",
    "programs": "grammar",
    "assert_same_program": "same",
    "modes": "same",
    "same_bits": "same",
    "TensorMeta": "strategies",
    "metas": "strategies",
    "tensors": "strategies",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: pytest loads `testing.plugin` in every run of an environment."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"adaptive_eager.testing.{home}"), name)
