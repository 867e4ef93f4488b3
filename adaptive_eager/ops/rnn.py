"""Cells of LSTM and GRU. For a device PyTorch calls them fused, and has kernels for GPUs only: here each is pointwise ops, which fuse.

Shapes: gates [B, 4H] or [B, 3H], states [B, H], biases [4H] or [3H]. The workspaces are ours to lay out: they go from a cell to its
backward and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch

from adaptive_eager.ops.special import handles

aten = torch.ops.aten
Tensor = torch.Tensor


def _sum(*terms: Tensor | None) -> Tensor:
    first, *rest = [t for t in terms if t is not None]
    for t in rest:
        first = first + t
    return first


@handles("aten._thnn_fused_lstm_cell.default")
def lstm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden and cell state, and the gates for backward."""
    given, hidden, cell, *biases = args
    gates = _sum(given, hidden, *biases)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


@handles("aten._thnn_fused_lstm_cell_backward_impl.default")
def lstm_backward(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Gradients of the gates, the old cell state and a bias. None where nothing flows back."""
    by_hidden, by_cell, cell, new, workspace, has_bias = args
    if by_hidden is None and by_cell is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    t = new.tanh()
    flow = _sum(by_cell, None if by_hidden is None else by_hidden * o * (1 - t * t))
    out = torch.zeros_like(o) if by_hidden is None else by_hidden * t * o * (1 - o)
    parts = [flow * g * i * (1 - i), flow * cell * f * (1 - f), flow * i * (1 - g * g), out]
    gates = torch.cat(parts, 1)
    return gates, flow * f, gates.sum(0) if has_bias else None


@handles("aten._thnn_fused_gru_cell.default")
def gru(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The hidden state, and for backward the gates, the old state and the hidden part of the candidate."""
    given, hidden, state, *biases = args
    ours, theirs = (*biases, None, None)[:2]
    ir, iz, n = _sum(given, ours).chunk(3, 1)
    hr, hz, hn = _sum(hidden, theirs).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (state - n), torch.cat([r, z, n, state, hn], 1)


@handles("aten._thnn_fused_gru_cell_backward.default")
def gru_backward(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Gradients of both gates, the old state and both biases."""
    by_hidden, workspace, has_bias = args
    r, z, n, state, hn = workspace.chunk(5, 1)
    by_n = by_hidden * (1 - z) * (1 - n * n)
    by_r, by_z = by_n * hn * r * (1 - r), by_hidden * (state - n) * z * (1 - z)
    given, hidden = torch.cat([by_r, by_z, by_n], 1), torch.cat([by_r, by_z, by_n * r], 1)
    sums = (given.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return given, hidden, by_hidden * z, *sums
