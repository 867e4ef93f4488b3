"""What library ops cost on the simulated chip: a table from op names to the work they are there.

Ops that are fused kernels have a tile plan and need no row. A row says which engine does the op; ops
without one are taken for a stream: what they read and write moves once, and Vector touches each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptive_eager.device_sim.engines import Instruction
from adaptive_eager.device_sim.spec import ChipSpec
from adaptive_eager.device_sim.work import Transfer, Work, matmul, stream

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


def _attention(products: int) -> Rule:
    """Blocks of 128 queries and 512 keys. Scores stay in PSUM and SBUF; queries, keys, values and results move once."""

    def rule(r: Recipe, spec: ChipSpec) -> tuple[Work, ...]:
        q, k = [m for m in r.ins if len(m.shape) == 4][-3 if products == 2 else 1 :][:2]
        batch, rows, width, keys = math.prod(q.shape[:2]), q.shape[2], q.shape[3], k.shape[2]
        itemsize = min(4, q.itemsize)
        high, wide = spec.tensor_stationary, min(keys, spec.tensor_moving)
        tiles = batch * -(-rows // high) * -(-keys // wide)
        if True in r.args:  # causal: tiles above the diagonal are skipped
            tiles = max(batch, (tiles + batch * -(-rows // high)) // 2)
        used = min(width, spec.partitions)
        deep, across = -(-width // spec.partitions), -(-wide // spec.partitions)
        body = (
            Instruction("matmul", wide, itemsize, times=deep),
            Instruction("reduce", wide, 4, after=(0,)),
            Instruction("activation", wide, 4, after=(1,)),
            Instruction("matmul", high, itemsize, after=(2,), times=across),  # transposes
            Instruction("tensor_copy", wide, itemsize, after=(3,)),
            Instruction("matmul", width, itemsize, after=(4,), times=across * (products - 1)),
            Instruction("tensor_scalar", width, 4, after=(5,), times=products - 1),
        )
        run = itemsize * max(1, min(rows, 2048))
        transfers = (
            Transfer(_nbytes(r.ins), run, used, False, tiles),
            Transfer(_nbytes(r.outs), run, used, True, tiles),
        )
        sbuf = min(spec.sbuf_partition_bytes, itemsize * (2 * keys * deep + 4 * wide))
        return (Work(tiles, transfers, body, sbuf=sbuf, psum=4 * wide),)

    return rule


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
    "_scaled_dot_product_flash_attention_for_cpu": Row(
        _attention(2), "blocks of scores on the chip: two products a block"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Row(
        _attention(5), "the same, scores made again: five products a block"
    ),
    "convolution": Row(_convolution, "a product of unfolded rows and filters"),
    "convolution_backward": Row(_convolution_backward, "a product for each gradient"),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "index", "index_put"), GATHER),
    **dict.fromkeys(("index_put_", "_unsafe_index_put", "index_add"), GATHER),
    **dict.fromkeys(("cumsum", "argmax", "argmin", "topk", "sort"), SEARCH),
}


def library_work(r: Recipe, spec: ChipSpec) -> tuple[Work, ...]:
    """The launches' work of an op that runs on a library kernel."""
    return TABLE.get(r.name, STREAM).rule(r, spec)
