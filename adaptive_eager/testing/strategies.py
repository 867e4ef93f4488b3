"""Hypothesis strategies for the metadata and the values of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)

SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    -1e-40,
    65504.0,
    1e30,
    3.0,
    -2.5,
)
"""Values at which definitions differ: signs of zero, subnormals, the largest half, ties of rounding."""


@dataclass(frozen=True)
class TensorMeta:
    """What a tensor looks like: shape, strides and offset in elements, dtype. Strides may overlap (0: expanded) and have gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def storage(self) -> int:
        """Elements that its storage has to hold."""
        if not self.numel:
            return self.offset
        return (
            self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        )


@st.composite
def metas(
    draw: Callable[..., Any],
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    max_dims: int = 4,
    max_side: int = 9,
    min_side: int = 0,
) -> TensorMeta:
    """Shapes of up to `max_dims` dims of `min_side` to `max_side`; row-major, permuted, expanded, with gaps, at an offset."""
    shape = tuple(draw(st.lists(st.integers(min_side, max_side), max_size=max_dims)))
    order = draw(st.permutations(range(len(shape))))
    stride = [0] * len(shape)
    step = 1
    for d in reversed(order):
        kind = draw(st.sampled_from(["dense"] * 6 + ["gap", "expanded"]))
        if kind == "expanded":
            continue
        step *= 1 + (kind == "gap")
        stride[d] = step
        step *= max(1, shape[d])
    return TensorMeta(
        shape,
        tuple(stride),
        draw(st.sampled_from([0, 0, 1, 5])),
        draw(st.sampled_from(list(dtypes))),
    )


@st.composite
def tensors(
    draw: Callable[..., Any],
    meta: st.SearchStrategy[TensorMeta] | None = None,
    *,
    special: bool = True,
) -> torch.Tensor:
    """CPU tensors of such metadata, with normal values and, where `special`, some of `SPECIAL` among those of floats."""
    m = draw(metas() if meta is None else meta)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    n = m.storage
    if m.dtype is torch.bool:
        flat = torch.randint(0, 2, (n,), generator=g).bool()
    elif m.dtype.is_floating_point:
        flat = torch.randn(n, generator=g, dtype=torch.float64)
        if special and n:
            for v in draw(st.lists(st.sampled_from(SPECIAL), max_size=6)):
                flat[draw(st.integers(0, n - 1))] = v
        flat = flat.to(m.dtype)
    else:
        low = 0 if m.dtype is torch.uint8 else -100
        flat = torch.randint(low, 100, (n,), generator=g, dtype=m.dtype)
    return flat.as_strided(m.shape, m.stride, m.offset)
