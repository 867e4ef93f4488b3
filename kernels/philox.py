"""Philox4x32-10: random bits as a function of a counter and a key, so that draws need no state and no order.

The counter is an element's index in its tensor (64 bits) and the op's offset (64 bits), the key is the seed. Written with +, *, &, ^ and >> on
64-bit ints, each word in the low half of one: code generation gives LLVM values, the tile interpreter numpy arrays.

Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ROUNDS = 10
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF

Int = Any
Const = Callable[[int], Int]


def keys(seed: Int, const: Const) -> list[tuple[Int, Int]]:
    """The key of each round."""
    mask = const(MASK)
    k0, k1 = seed & mask, (seed >> 32) & mask
    out = [(k0, k1)]
    for _ in range(ROUNDS - 1):
        k0, k1 = (k0 + const(W0)) & mask, (k1 + const(W1)) & mask
        out.append((k0, k1))
    return out


def words(
    index: Int, offset: tuple[Int, Int], rounds: list[tuple[Int, Int]], const: Const
) -> tuple[Int, Int, Int, Int]:
    """Four random words of 32 bits. offset: its low and its high word. rounds: from `keys`."""
    mask = const(MASK)
    c0, c1, c2, c3 = index & mask, (index >> 32) & mask, *offset
    for k0, k1 in rounds:
        p0, p1 = c0 * const(M0), c2 * const(M1)
        c0, c1, c2, c3 = (
            ((p1 >> 32) & mask) ^ c1 ^ k0,
            p1 & mask,
            ((p0 >> 32) & mask) ^ c3 ^ k1,
            p0 & mask,
        )
    return c0, c1, c2, c3
