"""adaptive-eager: a `neuron` device for PyTorch made of nothing but Python.

import torch
from adaptive_eager import neuron_eager

with neuron_eager() as session:
    x = torch.randn(1000, 1000)
    y = torch.softmax(x * 2 + 1, dim=-1)
    print(y.sum().item())
print(session.stats)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# pytest loads `testing.plugin` in every run of an environment: that must not import torch. Whoever does gets the device by the entry point.
_BY_PYTEST = "_pytest.config" in sys.modules and "torch" not in sys.modules
if not _BY_PYTEST:
    import torch as _torch  # noqa: F401 - first of all: torch loads this package's entry point while it is imported itself

if TYPE_CHECKING:
    from adaptive_eager.device_sim.spec import TRN2, TRN3, ChipSpec
    from adaptive_eager.policy import FallbackError, FallbackWarning
    from adaptive_eager.session import Session, neuron_eager
    from adaptive_eager.simulate import Simulated
    from adaptive_eager.stats import Stats

__version__ = "0.1.0"
__all__ = [
    "TRN2",
    "TRN3",
    "ChipSpec",
    "FallbackError",
    "FallbackWarning",
    "Session",
    "Simulated",
    "Stats",
    "__version__",
    "neuron_eager",
]

_HOMES = {
    "neuron_eager": "session",
    "Session": "session",
    "Simulated": "simulate",
    "Stats": "stats",
    "ChipSpec": "device_sim.spec",
    "FallbackError": "policy",
    "FallbackWarning": "policy",
    "TRN2": "device_sim.spec",
    "TRN3": "device_sim.spec",
}

if not _BY_PYTEST:
    from adaptive_eager.autoload import autoload as _autoload

    _autoload()


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `import torch` loads this package for its autoload entry."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for first in ("torch", "adaptive_eager.autoload"):  # torch first: see above
        importlib.import_module(first)
    sys.modules["adaptive_eager.autoload"].autoload()
    return getattr(importlib.import_module(f"adaptive_eager.{home}"), name)
