"""What happens when an op has no kernel on the device and goes to the CPU and back: nothing but a count, a warning, or an error.

`ADAPTIVE_EAGER_FALLBACK` is `allow` (the default), `warn` (once an op) or `error`.
"""

from __future__ import annotations

import os
import warnings

from adaptive_eager.source import user_site

CHOICES = ("allow", "warn", "error")


class FallbackWarning(UserWarning):
    """An op ran on the CPU."""


class FallbackError(RuntimeError):
    """An op would have run on the CPU."""


def _chosen() -> str:
    word = os.environ.get("ADAPTIVE_EAGER_FALLBACK", "").strip().lower() or "allow"
    if word not in CHOICES:
        warnings.warn(
            f"ADAPTIVE_EAGER_FALLBACK={word!r} is none of {', '.join(CHOICES)}: allow", stacklevel=2
        )
        return "allow"
    return word


on_fallback = _chosen()
_warned: set[str] = set()


def falls_back(name: str) -> None:
    """An op is about to be a CPU round trip.

    Raises:
        FallbackError: where the user wants none. Nothing is recorded or lost.
    """
    if on_fallback == "allow":
        return
    what = f"{name} has no kernel on neuron and runs on the CPU, at {user_site()}"
    if on_fallback == "error":
        raise FallbackError(
            f"{what}; ADAPTIVE_EAGER_FALLBACK=error forbids it: move its inputs with .cpu() where that is meant"
        )
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"{what} (said once an op)", FallbackWarning, stacklevel=2)
