"""Generated programs: one result in every mode of the device, and the CPU's."""

from __future__ import annotations

import torch
from hypothesis import given

from adaptive_eager.testing import Program, assert_same_program, programs


@given(programs())
def test_programs_agree_with_the_cpu(device: torch.device, program: Program) -> None:
    """All modes have the same bits, and the CPU's values, shapes, dtypes, strides of gradients and errors."""
    assert_same_program(program, device)


@given(programs(random=True, autocast=True))
def test_programs_that_draw(device: torch.device, program: Program) -> None:
    """Draws depend on the program alone, not on the mode it runs in."""
    assert_same_program(program, device)


@given(programs(exact=True))
def test_exact_programs(device: torch.device, program: Program) -> None:
    """Where arithmetic leaves no choice, float32, float64, bfloat16 and float16 results have the CPU's bits."""
    assert_same_program(program, device)
