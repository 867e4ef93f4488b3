"""What the conformance run leaves out on `neuron` and on any device, and why."""

from __future__ import annotations

from dataclasses import dataclass

CODES = {
    "random": "draws come from the device's own generator: shape, dtype and device are compared, values are not",
    "uninitialised": "the result's values are whatever was in memory",
    "sparse": "sparse and other layouts stay on the CPU",
    "device": "the sample says on which device it runs",
    "cpu-differs": "the CPU's own result is not unique: signs of vectors, order of ties",
    "own-error": "the device has an error of its own for it",
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

TABLE: tuple[Row, ...] = (
    Row("to_sparse", "sparse"),
    Row("sparse.", "sparse"),
)


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
