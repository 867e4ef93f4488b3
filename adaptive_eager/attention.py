"""Scaled dot-product attention as one op, as PyTorch's devices have it: no matrix of scores in HBM.

`scaled_dot_product_attention` picks among fused kernels by device, in C++, and knows none for ours. So the op itself has a kernel here,
for the autograd key: where the CPU would take its flash attention, so do we (its forward and backward are ops, recorded as any other,
on the kernels that torch ships); everything else, errors included, is PyTorch's own composite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention for neuron tensors.

    query [B, H, L, E], key [B, H, S, E], value [B, H, S, E] -> [B, H, L, E]; with enable_gqa key and value may have fewer heads.
    """
    if not fused(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        return aten.scaled_dot_product_attention.default._op_dk(
            COMPOSITE,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if key.shape[1] != query.shape[1]:
        key, value = (_repeated(t, query.shape[1]) for t in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, float("-inf"))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    return flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _repeated(t: torch.Tensor, heads: int) -> torch.Tensor:
    """Each head as many times as queries share it."""
    b, own, s, e = t.shape
    return t.unsqueeze(2).expand(b, own, heads // own, s, e).reshape(b, heads, s, e)


def fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    gqa: bool,
) -> bool:
    """Whether the CPU would take its flash attention (torch's `use_flash_attention_cpp`)."""
    if dropout > 0.0 or not torch.backends.cuda.flash_sdp_enabled():
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype in DTYPES):
        return False
    if any(t.device != q.device or t.stride(-1) != 1 or 0 in t.shape for t in (q, k, v)):
        return False
    b, h, _, e = q.shape
    heads, s = k.shape[1:3]
    if k.shape[0] != b or v.shape[:3] != k.shape[:3] or k.shape[3] != e or v.shape[3] != e:
        return False
    if h != heads and not (gqa and h % heads == 0):
        return False
    return mask is None or (not causal and _mask_fits(mask, (b, h, q.shape[2], s), q.dtype))


def _mask_fits(mask: torch.Tensor, scores: tuple[int, ...], dtype: torch.dtype) -> bool:
    if mask.requires_grad or mask.device.type != "neuron" or mask.dim() not in (2, 4):
        return False
    if mask.dtype not in (torch.bool, dtype):
        return False
    wanted = scores[-mask.dim() :]
    if mask.dim() == 2:
        return (
            tuple(mask.shape) == wanted
            or mask.shape[0] in (1, wanted[0])
            and mask.shape[1] in (1, wanted[1])
        )
    return all(n in (1, w) for n, w in zip(mask.shape, wanted, strict=True))
