"""How a neuron tensor prints. Values are copied to the host first, so that printing costs one read and no kernels."""

from __future__ import annotations

from typing import Any

import torch


def tensor_repr(t: Any) -> str:
    """PyTorch's text for a tensor on an accelerator. Reads the values, so it cuts."""
    host = t.detach().cpu()
    prefix = "Parameter containing:\n" if isinstance(t, torch.nn.Parameter) else ""
    body = (
        torch._tensor_str._tensor_str(host, len("tensor(")) if host.numel() else _empty_text(host)
    )
    suffixes = [f"device='{t.device}'"]
    if not host.numel() and host.dim() != 1:
        suffixes.append(f"size={tuple(host.shape)}")
    if t.dtype not in (torch.get_default_dtype(), torch.int64, torch.bool, torch.complex64):
        suffixes.append(f"dtype={t.dtype}")
    if t.grad_fn is not None:
        suffixes.append(f"grad_fn=<{t.grad_fn.name().split('::')[-1].removesuffix('>')}>")
    elif t.requires_grad:
        suffixes.append("requires_grad=True")
    return f"{prefix}tensor({body}, {', '.join(suffixes)})"


def _empty_text(host: torch.Tensor) -> str:
    return "[]"
