"""`torch.autocast("neuron")`: PyTorch's cast policies, as kernels of the key AutocastPrivateUse1.

PyTorch keeps its lists as macros in C++ (ATen/autocast_mode.h) and leaves it to an out-of-tree device to register them. A kernel casts
the arguments and calls the op again without the key; casts are ordinary ops that autograd differentiates. The bfloat16 or float16 copy
of a float32 parameter is kept until the outermost autocast ends, as on other devices.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_C: Any = torch._C
KEY = torch._C.DispatchKeySet(_C.DispatchKey.AutocastPrivateUse1)

LOWER = """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention"""
"""Run in the autocast dtype."""
FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
upsample_bicubic2d _upsample_bicubic2d_aa"""
"""Run in float32."""
FLOAT32_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList"""
"""Take a dtype argument, which becomes float32 where it is left open."""
NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Become the overload that takes a dtype, with float32."""
WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)
"""Run in the widest dtype among their arguments."""
REFUSED = "binary_cross_entropy"
"""Not safe in float16: its gradient overflows."""


def eligible(a: Any) -> bool:
    """Whether autocast may cast an argument: floating, on the device, not float64."""
    return (
        isinstance(a, torch.Tensor)
        and a.device.type == "neuron"
        and a.is_floating_point()
        and a.dtype is not torch.float64
    )


class Cache:
    """Copies of parameters in the autocast dtype, by parameter. Guarded by the interpreter's lock: single dict operations."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], tuple[Any, int, torch.Tensor]] = {}

    def get(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The copy, made now if there is none of this version of the parameter."""
        key = (id(t), dtype)
        found = self._copies.get(key)
        if (
            found is not None
            and found[0]() is t
            and found[1] == t._version
            and (found[2].requires_grad or not torch.is_grad_enabled())
        ):
            return found[2]
        copy = t.to(dtype)
        self._copies[key] = (weakref.ref(t), t._version, copy)
        return copy

    def clear(self) -> None:
        """Forget all copies."""
        self._copies.clear()


CACHE = Cache()


def cast(a: Any, dtype: torch.dtype) -> Any:
    """An argument in a dtype, if it is eligible and has another."""
    if not eligible(a) or a.dtype is dtype:
        return a
    kept = (
        a.requires_grad
        and a.is_leaf
        and a.dtype is torch.float32
        and dtype is torch.get_autocast_dtype("neuron")
        and not a._is_view()
        and torch.is_autocast_cache_enabled()
    )
    return CACHE.get(a, dtype) if kept else a.to(dtype)


def _to(op: Any, dtype: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(KEY):
            to = dtype((args, kwargs))
            args, kwargs = tree_map(lambda a: cast(a, to), (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _widest(given: Any) -> torch.dtype:
    found = torch.get_autocast_dtype("neuron")
    for a in tree_leaves(given):
        if eligible(a):
            found = torch.promote_types(found, a.dtype)
    return found


def _with_dtype(op: Any) -> Callable[..., Any]:
    place = [a.name for a in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(KEY):
            given = args[place] if place < len(args) else kwargs.get("dtype")
            if given is None and eligible(args[0]):
                if place < len(args):
                    args = (*args[:place], torch.float32, *args[place + 1 :])
                else:
                    kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _norm(op: Any, typed: Any) -> Callable[..., Any]:
    defaults = [a.default_value for a in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(KEY):
            if not eligible(args[0]):
                return op(*args, **kwargs)
            return typed(*args, *defaults[len(args) :], **kwargs, dtype=torch.float32)

    return kernel


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is not safe under autocast: use binary_cross_entropy_with_logits, or leave autocast around it"
    )


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def install() -> None:
    """Register the kernels; what has none goes on without the key."""
    _LIBRARIES.append(torch.library.Library("_", "IMPL", "AutocastPrivateUse1"))
    _LIBRARIES[-1].fallback(torch.library.fallthrough_kernel)
    aten = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    _LIBRARIES.append(aten)
    policies: tuple[tuple[str, Callable[[Any], torch.dtype]], ...] = (
        (LOWER, lambda _: torch.get_autocast_dtype("neuron")),
        (FLOAT32, lambda _: torch.float32),
        (WIDEST, _widest),
    )
    for names, dtype in policies:
        for name in names.split():
            aten.impl(name, _to(_overload(name), dtype))
    for name in FLOAT32_RESULT.split():
        aten.impl(name, _with_dtype(_overload(name)))
    for name, typed in NORMS.items():
        aten.impl(name, _norm(_overload(name), _overload(typed)))
    aten.impl(REFUSED, _refuse)


_LIBRARIES: list[torch.library.Library] = []
