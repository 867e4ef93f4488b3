"""Whether a program gives one result: in every mode of a device bit for bit, and the reference's within rounding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from adaptive_eager.testing.grammar import Program

Modes = Mapping[str, Callable[[], AbstractContextManager[Any]]]

TOLERANCE = 2e-4
"""Relative and absolute, of float32 results: a chain of ten ops, each within a few units in the last place, some of them sums."""
ROUGH = 2e-2
"""The same where a program rounds to bfloat16 or to ints on its way."""
READ_TOLERANCE = 1e-2
"""Of numbers that a program reads: sums of tensors that may cancel."""


def modes(device: Any) -> Modes:
    """The ways in which a device may run a program; each must have the same bits.

    `neuron`: op by op and waited for, op by op on the worker, fused, fused again from what was learned, everything learned forgotten,
    cut by bytes, cut every three ops, on a chip with little SBUF. Other devices: twice.
    """
    if torch.device(device).type != "neuron":
        return {"once": contextlib.nullcontext, "again": contextlib.nullcontext}
    from adaptive_eager.device_sim.spec import TRN2
    from adaptive_eager.record import TAPE
    from adaptive_eager.session import neuron_eager

    tiny = TRN2.replace(name="tiny", sbuf_bytes=128 * 4096)

    def way(**options: Any) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: neuron_eager(default_device=False, **options)

    def cold() -> AbstractContextManager[Any]:
        with TAPE.lock:
            TAPE.forget()
        return neuron_eager(default_device=False)

    return {
        "blocking": way(mode="blocking"),
        "eager": way(mode="eager"),
        "adaptive": way(),
        "warm": way(),
        "cold": cold,
        "budget 1": way(byte_budget=1),
        "3 ops": way(max_ops=3),
        "tiny SBUF": way(spec=tiny),
    }


def same_bits(x: Any, y: Any) -> bool:
    """Equal dtypes, shapes, strides and bytes; equal numbers, two NaN among them."""
    if isinstance(x, torch.Tensor):
        return (
            x.dtype == y.dtype
            and x.shape == y.shape
            and x.stride() == y.stride()
            and torch.equal(_bytes(x), _bytes(y))
        )
    return bool(x == y or (math.isnan(x) and math.isnan(y)))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _outcome(program: Program, device: Any) -> list[Any] | type:
    """Its results, or the type of the error that it is: a generated program may break PyTorch's rules."""
    try:
        return program.run(device)
    except Exception as e:  # noqa: BLE001 - the other device has to raise the same
        return type(e)


def assert_same_program(
    program: Program,
    device: Any,
    reference: Any = "cpu",
    modes: Modes | None = None,
) -> None:
    """A program has the same bits in all modes, and the reference's results.

    device, reference: what `torch.device` takes; reference None compares modes only, as does a program that draws. modes: context
    managers by name, by default `testing.modes(device)`.

    Raises:
        AssertionError: with the modes that differ, both values, and the program as a script.
    """
    ways = globals()["modes"](device) if modes is None else modes
    want: list[Any] | type | None = None
    if reference is not None:
        want = _outcome(program, reference)
    first_name, first = "", None
    for name, way in ways.items():
        with way():
            got = _outcome(program, device)
        if first is None:
            first_name, first = name, got
            continue
        _compare(program, f"{device}, {name}", got, f"{device}, {first_name}", first, same_bits)
    comparable = isinstance(want, type) or isinstance(first, type) or not program.random
    if want is not None and first is not None and comparable:
        _compare(program, f"{device}", first, f"{reference}", want, _close(program))


def same_values(x: Any, y: Any) -> bool:
    """As `same_bits`, where any NaN is as good as another, a zero has no sign and strides are free.

    PyTorch's own maximum(0.0, -0.0) has another sign in a row's last elements than before them.
    """
    if isinstance(x, torch.Tensor):
        if x.dtype != y.dtype or x.shape != y.shape or not torch.equal(x.isnan(), y.isnan()):
            return False
        plain = (_bytes(torch.where(v.isnan() | (v == 0), torch.zeros_like(v), v)) for v in (x, y))
        return torch.equal(*plain)
    return bool(x == y or (math.isnan(x) and math.isnan(y)))


def _close(program: Program) -> Callable[[Any, Any], bool]:
    if program.exact:
        return same_values
    rough = any(word in program.source for word in ("bfloat16", "int32"))
    tolerance = ROUGH if rough else TOLERANCE

    def close(x: Any, y: Any) -> bool:
        if not isinstance(x, torch.Tensor):
            return math.isclose(x, y, rel_tol=READ_TOLERANCE, abs_tol=READ_TOLERANCE) or (
                math.isnan(x) and math.isnan(y)
            )
        try:
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError:
            return False
        return True

    return close


def _compare(
    program: Program,
    name: str,
    got: list[Any] | type,
    other: str,
    want: list[Any] | type,
    same: Callable[[Any, Any], bool],
) -> None:
    def fail(what: str) -> AssertionError:
        return AssertionError(f"{name} differs from {other}: {what}\n\n{program}")

    if isinstance(got, type) or isinstance(want, type):
        if got is not want:
            raise fail(
                f"{got if isinstance(got, type) else 'results'}, {want if isinstance(want, type) else 'results'}"
            )
        return
    if len(got) != len(want):
        raise fail(f"{len(got)} results, {len(want)} results")
    for k, (x, y) in enumerate(zip(got, want, strict=True)):
        if not same(x, y):
            raise fail(f"result {k} is\n{x}\nnot\n{y}")
