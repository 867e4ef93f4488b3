"""The user's source line: the innermost frame outside torch, this package and the standard library's plumbing.

Walking frames costs microseconds, so it happens where it is rare: when a trie node is made and when a segment is cut.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_SKIP = (str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__)

backward_site = ""
"""Where the running `backward()` was called: ops of a backward pass have no user frame on their own thread."""


def user_site() -> str:
    """`file:line` of the user's code that is running now."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIP) and not name.startswith("<frozen"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return f"{backward_site} (backward)" if backward_site else "<unknown>"
