"""What `import torch` runs: the `neuron` device is registered, nothing else is imported.

The entry-point group `torch.backends` names `autoload`. It must stay cheap (no numba, no planner): the first neuron
tensor imports the rest, through the factory kernels registered here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY: torch.library.Library | None = None
"""Registrations live as long as this object."""

FACTORIES = (
    "empty.memory_format",
    "empty_strided",
    "arange.start_step",
    "arange.start",
    "arange",
    "_copy_from",
    "_copy_from_and_resize",
    "_resize_output_",
    "_efficientzerotensor",
    "tril_indices",
    "triu_indices",
)
"""Ops that reach the PrivateUse1 key with no neuron tensor among their arguments, or from inside C++."""


def autoload() -> None:
    """Register the device, its module `torch.neuron`, its guard and its factories. Idempotent."""
    global _LIBRARY
    if _LIBRARY is not None:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from adaptive_eager.device import NeuronGuard, NeuronModule

    _LIBRARY = torch.library.Library("aten", "IMPL")
    _setup_privateuseone_for_python_backend(
        "neuron", backend_module=NeuronModule("torch.neuron"), device_guard=NeuronGuard()
    )
    for name in FACTORIES:
        _LIBRARY.impl(name, _late(name), "PrivateUse1")
    _LIBRARY.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for name in ("out", "out_tol_tensor", "atol_rtol_float_out", "atol_rtol_tensor_out"):
        _LIBRARY.impl(f"linalg_matrix_rank.{name}", _rank_out(name), "AutogradPrivateUse1")


def _attention(*args: Any, **kwargs: Any) -> Any:
    from adaptive_eager.attention import attention

    return attention(*args, **kwargs)


def _rank_out(overload: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        from adaptive_eager.patches import rank_out

        return rank_out(overload, *args, **kwargs)

    return kernel


def _late(name: str) -> Callable[..., Any]:
    """A kernel that imports its implementation when it is first called."""

    @functools.wraps(_late)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        from adaptive_eager.factories import KERNELS

        return KERNELS[name](*args, **kwargs)

    return kernel
