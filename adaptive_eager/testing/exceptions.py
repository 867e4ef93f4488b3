"""What the conformance run leaves out on `neuron` and on any device, and why."""

from __future__ import annotations

from dataclasses import dataclass

CODES = {
    "inner-view": "the op is one op on the device: its result is no view of a temporary that nothing else can reach",
    "device": "the bad call can't be made of tensors on a device",
}
"""Reason codes of skipped entries."""


@dataclass(frozen=True, slots=True)
class Row:
    """Ops whose name starts with `op`; `check` empty for all."""

    op: str
    code: str
    check: str = ""


RANDOM = (
    "dropout",
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "uniform",
    "exponential",
    "geometric",
    "cauchy",
    "rrelu",
    "fractional_max_pool",
    "multi_head_attention_forward",
    "svd_lowrank",
    "pca_lowrank",
)
"""Parts of names of ops that draw, samples of which do."""
UNINITIALISED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "resize_as_",
)

TABLE: tuple[Row, ...] = (Row("nn.functional.max_pool1d", "inner-view", "views"),)


def reason(op: str, check: str) -> str:
    """The code of why an op's check is skipped; empty where it is not."""
    for row in TABLE:
        if op.startswith(row.op) and row.check in ("", check):
            return row.code
    return ""


def without_values(op: str) -> str:
    """The code of why only shape, dtype and device of an op's results are compared; empty where values are too."""
    if op in UNINITIALISED:
        return "uninitialised"
    return "random" if any(r in op for r in RANDOM) else ""
