"""What library ops cost on the simulated chip: a table from op names to the work they are there.

Ops that are fused kernels have a tile plan and need no row. A row says which engine does the op; ops
without one are taken for a stream: what they read and write moves once, and Vector touches each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptive_eager.device_sim.spec import ChipSpec
from adaptive_eager.device_sim.work import Work, matmul, stream

if TYPE_CHECKING:
    from adaptive_eager.meta import Meta
    from adaptive_eager.tape import Recipe

Rule = Callable[["Recipe", ChipSpec], tuple[Work, ...]]


@dataclass(frozen=True, slots=True)
class Row:
    """How an op's work is found, and why so."""

    rule: Rule
    why: str


def _nbytes(metas: tuple[Meta, ...]) -> int:
    return sum([m.numel * m.itemsize for m in metas])


def _product(r: Recipe, spec: ChipSpec) -> tuple[Work, ...]:
    """The product of the last two operands."""
    a, b = r.ins[-2:]
    k = a.shape[-1] if a.shape else 1
    m = a.shape[-2] if len(a.shape) > 1 else 1
    n = b.shape[-1] if len(b.shape) > 1 else 1
    batch = math.prod(a.shape[:-2])
    return (matmul(m, n, k, batch, min(4, a.itemsize), spec),)


def _convolution(r: Recipe, spec: ChipSpec) -> tuple[Work, ...]:
    """Rows of unfolded input times filters, group by group."""
    return (_unfolded(r.outs[0].shape, r.ins[1].shape, r.ins[0].shape[1], r.ins[0].itemsize, spec),)


def _convolution_backward(r: Recipe, spec: ChipSpec) -> tuple[Work, ...]:
    """One product for the input's gradient, one for the filters'."""
    out, x, filters = r.ins[:3]
    one = _unfolded(out.shape, filters.shape, x.shape[1], x.itemsize, spec)
    return (one,) * max(1, min(2, len(r.outs)))


def _unfolded(
    out: tuple[int, ...], filters: tuple[int, ...], channels: int, itemsize: int, spec: ChipSpec
) -> Work:
    groups = max(1, channels // max(1, filters[1]))
    m = out[0] * math.prod(out[2:])
    k = math.prod(filters[1:])
    return matmul(m, filters[0] // groups, k, groups, min(4, itemsize), spec)


def _one_pass(kind: str) -> Rule:
    def rule(r: Recipe, spec: ChipSpec) -> tuple[Work, ...]:
        writes = tuple([r.ins[k] for k in r.writes])
        metas = (*r.ins, *r.outs)
        most = max([m.numel for m in metas], default=0)
        itemsize = max([min(4, m.itemsize) for m in metas], default=4)
        read, written = _nbytes(r.ins), _nbytes((*r.outs, *writes))
        return (stream(read, written, max(1, most), itemsize, spec, kind),)

    return rule


PRODUCT = Row(_product, "the Tensor engine, tiles of a PSUM bank accumulated over the inner size")
STREAM = Row(_one_pass("tensor_copy"), "DMA, and one pass of Vector")
GATHER = Row(_one_pass("integer"), "GpSimd gathers or scatters element by element")
SEARCH = Row(_one_pass("select"), "Vector compares and keeps, two cycles an element")
TABLE: dict[str, Row] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"), PRODUCT),
    "convolution": Row(_convolution, "a product of unfolded rows and filters"),
    "convolution_backward": Row(_convolution_backward, "a product for each gradient"),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "index", "index_put"), GATHER),
    **dict.fromkeys(("index_put_", "_unsafe_index_put", "index_add"), GATHER),
    **dict.fromkeys(("cumsum", "argmax", "argmin", "topk", "sort"), SEARCH),
}


def library_work(r: Recipe, spec: ChipSpec) -> tuple[Work, ...]:
    """The launches' work of an op that runs on a library kernel."""
    return TABLE.get(r.name, STREAM).rule(r, spec)
