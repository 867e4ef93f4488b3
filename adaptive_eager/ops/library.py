"""Ops that run on kernels which torch ships: BLAS, oneDNN, and the CPU's indexing and sorting kernels, on device memory.

With an out= overload the result goes straight to HBM; with None its memory is adopted. Neither copies, and neither
counts as a fallback: on a Trainium these are the Tensor engine's and the DMA's work.
"""

from __future__ import annotations

import torch

from adaptive_eager import lower
from adaptive_eager.tensor import FAST

aten = torch.ops.aten

TABLE: dict[str, str | None] = {
    "mm.default": "mm.out",
    "bmm.default": "bmm.out",
    "addmm.default": "addmm.out",
    "baddbmm.default": "baddbmm.out",
    "addbmm.default": "addbmm.out",
    "addmv.default": "addmv.out",
    "mv.default": "mv.out",
    "dot.default": "dot.out",
    "convolution.default": None,
    "convolution_backward.default": None,
    "embedding.default": None,
    "embedding_dense_backward.default": None,
    "index_select.default": "index_select.out",
    "gather.default": "gather.out",
    "scatter.src": "scatter.src_out",
    "scatter.value": "scatter.value_out",
    "scatter_add.default": "scatter_add.out",
    "index.Tensor": None,
    "index_put.default": None,
    "index_put_.default": None,
    "_unsafe_index_put.default": None,
    "index_add.default": "index_add.out",
    "select_backward.default": None,
    "slice_backward.default": None,
    "cat.default": "cat.out",
    "stack.default": "stack.out",
    "tril.default": "tril.out",
    "triu.default": "triu.out",
    "flip.default": None,
    "roll.default": None,
    "constant_pad_nd.default": None,
    "cumsum.default": "cumsum.out",
    "argmax.default": "argmax.out",
    "argmin.default": "argmin.out",
    "topk.default": None,
    "sort.default": None,
    "sum.dim_IntList": None,
    "sum.default": None,
    "mean.dim": None,
    "mean.default": None,
    "amax.default": "amax.out",
    "amin.default": "amin.out",
    "max.default": None,
    "min.default": None,
    "max.dim": None,
    "min.dim": None,
    "any.default": None,
    "all.default": None,
    "any.dim": None,
    "all.dim": None,
    "linalg_vector_norm.default": None,
    "var.correction": None,
    "var_mean.correction": None,
    "_softmax.default": None,
    "_log_softmax.default": None,
    "_safe_softmax.default": None,
    "_softmax_backward_data.default": None,
    "_log_softmax_backward_data.default": None,
    "native_layer_norm.default": None,
    "native_layer_norm_backward.default": None,
    "native_group_norm.default": None,
    "native_group_norm_backward.default": None,
    "native_batch_norm.default": None,
    "_native_batch_norm_legit.default": None,
    "native_batch_norm_backward.default": None,
    "nll_loss_forward.default": None,
    "nll_loss_backward.default": None,
    "nll_loss2d_forward.default": None,
    "nll_loss2d_backward.default": None,
    "mse_loss.default": None,
    "mse_loss_backward.default": None,
    "max_pool2d_with_indices.default": None,
    "max_pool2d_with_indices_backward.default": None,
    "avg_pool2d.default": None,
    "avg_pool2d_backward.default": None,
    "_adaptive_avg_pool2d.default": None,
    "_adaptive_avg_pool2d_backward.default": None,
    "_scaled_dot_product_flash_attention_for_cpu.default": None,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": None,
    "native_dropout.default": None,
    "native_dropout_backward.default": None,
    "normal_.default": None,
    "uniform_.default": None,
    "bernoulli_.float": None,
    "random_.default": None,
    "random_.from": None,
    "random_.to": None,
    "bernoulli.default": None,
    "clone.default": None,
    "copy_.default": None,
    "_to_copy.default": None,
    "fill_.Scalar": None,
    "zero_.default": None,
}


TENSORS_ONLY = frozenset(
    {"mm.default", "bmm.default", "mv.default", "dot.default", "addmm.default", "baddbmm.default"}
)
"""Ops that the inlined path may look up: called with tensors alone they are nodes like pointwise ones."""


UNCHECKED = ("index_add.default", "random_.from", "random_.to", "random_.default")
"""Ops whose meta kernels accept calls that their CPU kernels refuse."""


def register() -> None:
    """Enter the table."""
    for name, out in TABLE.items():
        packet, overload = name.split(".")
        op = getattr(getattr(aten, packet, None), overload, None)
        if op is None:
            continue
        lower.KEEP.append(op)
        target = None
        if out is not None:
            p, o = out.split(".")
            target = getattr(getattr(aten, p), o)
        lower.LIBRARY[id(op)] = target
        if name in TENSORS_ONLY:
            FAST.add(id(op))
        if name in UNCHECKED:
            lower.TRIED.add(id(op))


register()
