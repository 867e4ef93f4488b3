"""Where the largest or smallest element of each row is: two reductions in one kernel.

The first pass finds the extremum, the second the least index that holds it, as the CPU answers ties; a NaN is the extremum of
its row.
"""

from __future__ import annotations

from typing import Any

import torch

from adaptive_eager.kernels.build import FLOATS, Builder, Val, row_max, row_min, where
from adaptive_eager.lower import Body
from adaptive_eager.ops.pointwise import value_dtype
from adaptive_eager.ops.reduce import Rows, argument, lowers
from adaptive_eager.tape import Recipe


@lowers("argmax.default", "argmin.default", "max.dim", "min.dim")
def extremum(r: Recipe, metas: tuple[torch.Tensor, ...]) -> Body | None:
    """Along the last dim: the index, and for max and min the value before it."""
    m, dim = r.ins[0], argument(r, 1, "dim")
    cd = value_dtype(m.dtype)
    if cd is None or cd == "bool" or not isinstance(dim, int) or not m.shape:
        return None
    d = dim % len(m.shape)
    if any(n != 1 for n in m.shape[d + 1 :]) or any(o.tname is None for o in r.outs):
        return None
    space = Rows(m.shape, len(m.shape) - d)
    x = space.elem(m)
    if x is None:
        return None
    most = "max" in r.name

    def build(b: Builder, v: list[Val | None], s: list[Val]) -> list[Val]:
        assert v[0] is not None
        x = v[0].to(cd)
        best = row_max(x) if most else row_min(x)
        here = x.eq(best)
        if cd in FLOATS:
            here = where(best.ne(best), x.ne(x), here)
        index = row_min(where(here, b.iota("inner"), s[-1]))
        found: list[Any] = [best, index] if len(r.outs) == 2 else [index]
        return [f.to(o.tname or "") for f, o in zip(found, r.outs, strict=True)]

    stores = tuple([(k, space.row(o)) for k, o in enumerate(r.outs)])
    return Body("row", space.dims, (x,), stores, build, (space.cols,))
