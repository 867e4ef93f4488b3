"""Errors and source lines of backward passes: one wrapper around the function that starts them.

What a hook or an op raises inside a pass is kept by `device.NeuronGuard`; the wrapper raises it at the caller.
"""

from __future__ import annotations

import atexit
import functools
import time
from typing import Any

import torch

from adaptive_eager import source
from adaptive_eager.device import ESCAPED

_used = False


def _wrap(run: Any) -> Any:
    @functools.wraps(run)
    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        global _used
        _used = True
        before, source.backward_site = source.backward_site, source.user_site()
        try:
            return run(*args, **kwargs)
        except BaseException:
            if ESCAPED:
                first = ESCAPED[0]
                ESCAPED.clear()
                raise first from None
            raise
        finally:
            source.backward_site = before

    engine_run_backward._adaptive_eager = True  # type: ignore[attr-defined]
    return engine_run_backward


def install() -> None:
    """Wrap the one function through which Python starts a backward pass. Idempotent."""
    from torch.autograd import graph

    if getattr(graph._engine_run_backward, "_adaptive_eager", False):
        return
    wrapped = _wrap(graph._engine_run_backward)
    graph._engine_run_backward = wrapped
    torch.autograd._engine_run_backward = wrapped  # type: ignore[attr-defined]
    atexit.register(_settle)


def _settle() -> None:
    """Let the autograd threads finish with the interpreter before it ends: without this, exit after backward aborts
    now and then."""
    if _used:
        x = torch.zeros(1, requires_grad=True)
        x.sum().backward()
        time.sleep(0.01)
