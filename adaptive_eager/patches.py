"""What torch has to be told about neuron tensors, since no hook exists for it. Each patch has its reason, and a test that
says when it is no longer needed (tests/upstream).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from adaptive_eager.tensor import NeuronTensor


def install() -> None:
    """Apply all. Idempotent."""
    _foreach()
    _autocast_cache()


def _autocast_cache() -> None:
    """The outermost autocast clears its cache on leaving, through a function of the module `torch`; ours has no other way to know."""
    from adaptive_eager.autocast import CACHE

    theirs = torch.clear_autocast_cache
    if hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def clear_autocast_cache() -> None:
        CACHE.clear()
        theirs()

    torch.clear_autocast_cache = clear_autocast_cache


def _foreach() -> None:
    """Optimizers and gradient clipping take their list-at-a-time form only for parameters of exactly torch's own types,
    though the device is on their list. For neuron tensors it saves most of an optimizer step's recording."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        known = getattr(module, "_foreach_supported_types", None)
        if isinstance(known, list) and NeuronTensor not in known:
            known.append(NeuronTensor)


def rank_out(overload: str, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.linalg.matrix_rank(..., out=)`. For subclasses the C++ composite rebinds its reference instead of writing to `out`.

    Raises:
        RuntimeError: PyTorch's own, also for an `out` that can't hold an int64.
    """
    from adaptive_eager.fallback import put

    functional = overload.removesuffix("_out").removeprefix("out_")
    f = getattr(torch.ops.aten.linalg_matrix_rank, "default" if functional == "out" else functional)
    one = torch.zeros(1, 1, device="cpu")
    torch.linalg.matrix_rank(one, out=torch.empty((), dtype=out.dtype, device="cpu"))
    put(out, f(*args, **kwargs))  # type: ignore[arg-type]
    return out
