"""Generated eager programs, for any device.

A program is source text over two leaf tensors `a` and `b` of one 2-D shape: views, in-place writes through any alias, overlapping
reads, dead results, branches on values, reads at random points, autocast, random numbers, backward. A failing one shrinks to a few
lines, and `str(program)` is a script that runs on its own.

The grammar is data: each row is an expression with holes `{x}`, `{y}` for variables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

SHAPES = ((1, 1), (1, 7), (5, 1), (3, 4), (4, 4), (6, 33), (2, 70))
"""Shapes of the leaves: broadcasting and empty tails, squares, rows longer than a vector register."""

UNARY = (
    "{x} * 1.5",
    "{x} + 0.25",
    "torch.relu({x})",
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "{x}.exp().clamp(max=9.0)",
    "F.gelu({x})",
    "F.gelu({x}, approximate='tanh')",
    "F.silu({x})",
    "{x}.abs().sqrt()",
    "torch.rsqrt({x} * {x} + 1)",
    "-{x}",
    "{x} * {x}",
    "torch.where({x} > 0, {x}, {x} * 0.1)",
    "{x}.clamp(-1, 1)",
    "({x} > 0.5).to({x}.dtype)",
    "{x}.to(torch.float64).to({x}.dtype)",
    "{x}.to(torch.bfloat16).to({x}.dtype)",
    "({x} * 7).to(torch.int32).to({x}.dtype)",
    "F.softmax({x}, -1)",
    "F.log_softmax({x}, -1)",
    "F.layer_norm({x}, {x}.shape[-1:])",
    "{x} - {x}.mean(-1, keepdim=True)",
    "{x} / (1 + {x}.amax(-1, keepdim=True).abs())",
    "{x} * {x}.sum(0)",
    "{x} + {x}.mean()",
    "{x} - {x}.var(-1, keepdim=True, unbiased=False)",
    "torch.sin({x}) * torch.cos({x})",
    "torch.log1p({x}.abs())",
    "{x}.pow(2)",
    "{x}.clone()",
    "{x}.cumsum(0)",
    "torch.cat([{x}, {x} * 2])[: {x}.shape[0]]",
    "{x}.flip(0)",
    "{x}.detach() * 0.5 + {x}",
    "{x} * {x}.argmax(-1, keepdim=True)",
    "{x} - {x}.max(-1, keepdim=True)[0]",
    "{x} + {x}.detach().min(-1, keepdim=True)[1]",
    "(1.25 * {x}.detach() - 0.5) / 2",
    "torch._foreach_mul([{x}, {x} + 1], 0.5)[1]",
    "F.scaled_dot_product_attention({x}[None, None], {x}[None, None], {x}[None, None])[0, 0]",
    "F.scaled_dot_product_attention({x}[None, None], {x}[None, None], {x}[None, None], is_causal=True)[0, 0]",
    "{x}.to(torch.bfloat16).mul(1.7).add(0.3).relu().to({x}.dtype)",
    "{x}.sort(-1)[0]",
    "{x}.index_select(0, torch.arange({x}.shape[0] - 1, -1, -1, device={x}.device))",
    "F.pad({x}, (1, 0))[:, 1:] + {x}",
)
"""One tensor to one tensor of its shape and dtype."""
RANDOM = (
    "F.dropout({x}, 0.3)",
    "torch.rand_like({x}) * {x}",
    "{x} + torch.randn_like({x})",
    "{x} * torch.empty_like({x}).uniform_(-1, 1)",
    "{x} * torch.bernoulli(torch.full_like({x}, 0.4))",
    "{x} + torch.empty_like({x}.t()).normal_(0.5, 2).t()",
    "{x} * torch.empty({x}.shape, dtype=torch.bool, device={x}.device).bernoulli_(0.7)",
    "{x} + torch.randperm({x}.shape[-1], device={x}.device)",
)
"""The same with draws: equal between modes of a device, not between devices."""
BINARY = (
    "{x} + {y}",
    "{x} * {y}",
    "{x} - {y} * 0.5",
    "torch.maximum({x}, {y})",
    "{x} / ({y}.abs() + 1)",
    "torch.where({x} < {y}, {x}, {y})",
    "torch.lerp({x}, {y}, 0.3)",
    "torch.addcmul({x}, {y}, {y}, value=0.1)",
)
"""Two tensors of one shape."""
VIEWS = (
    "{x}.t()",
    "{x}[1:]",
    "{x}[:, ::2]",
    "{x}[-1:]",
    "{x}.view(-1)[: {x}.shape[-1]].unsqueeze(0)",
    "{x}[:, :1].expand({x}.shape)",
    "{x}.narrow(0, 0, 1)",
    "{x}.unsqueeze(1).squeeze(1)",
)
"""Views; one that a shape or stride forbids raises, on every device alike."""
INPLACE = (
    "{x}.add_(0.5)",
    "{x}.mul_(0.75)",
    "{x}.relu_()",
    "{x}.tanh_()",
    "{x}[0].add_(1)",
    "{x}[:, -1].mul_(0.5)",
    "{x}.t().sub_(0.125)",
    "{x}.copy_({x} * 0.5 + 1)",
    "{x}.sub_({x}.detach().mean())",
    "{x}.div_({x}.detach().abs().amax(-1, keepdim=True) + 1)",
    "{x}[0].fill_(0.3)",
    "{x}.clamp_(-2, 2)",
    "torch._foreach_mul_([{x}, {x}.t()], 0.5)",
    "{x}.detach().add_(0.25)",
    "{x}.masked_fill_({x}.detach() > 1, 0.5)",
    "torch.mul({x}.detach(), 2, out={x}.detach())",
    "{x}.detach()[0].copy_({x}.detach()[-1])",
)
"""Writes, through the tensor or a view of it."""
EXACT_UNARY = (
    "{x} * 1.5",
    "{x} + 0.25",
    "0.3 - {x}",
    "{x} / 3",
    "-{x}",
    "{x}.abs().sign() - 1",
    "{x} * {x}",
    "torch.relu({x})",
    "torch.where({x} > 0, {x}, {x} * 0.1)",
    "{x}.clamp(-1, 1)",
    "({x} > 0.5).to({x}.dtype)",
    "{x}.to(torch.bfloat16).to({x}.dtype)",
    "{x}.to(torch.float16).to({x}.dtype)",
    "{x}.to(torch.bfloat16).mul(1.7).add(0.3).to({x}.dtype)",
    "({x} * 7).to(torch.int32).to({x}.dtype)",
    "{x}.floor() + {x}.round()",
    "{x}.clone()",
    "{x}.flip(0)",
    "torch.cat([{x}, {x} * 2])[: {x}.shape[0]]",
    "{x} - {x}.amax(-1, keepdim=True)",
    "{x} + {x}.argmax(-1, keepdim=True)",
    "{x}.sort(-1)[0]",
    "torch._foreach_mul([{x}, {x} + 1], 0.5)[1]",
)
EXACT_BINARY = (
    "{x} + {y}",
    "{x} * {y}",
    "{x} - {y}",
    "{x} / ({y}.abs() + 1)",
    "torch.maximum({x}, {y})",
    "torch.where({x} < {y}, {x}, {y})",
    "torch.cat([{x}, {y}], 1)[:, : {x}.shape[1]]",
)
EXACT_INPLACE = tuple(r for r in INPLACE if "tanh" not in r and "mean" not in r)
"""Ops whose results IEEE 754 and PyTorch's rule of rounding after each op leave no choice in: they have the CPU's bits. Not sqrt: PyTorch's
own on x86 rounds one in five wrong."""
DTYPES = ("float32", "bfloat16", "float16", "float64")

KINDS = ("unary",) * 5 + ("binary",) * 3 + ("view",) * 3 + ("inplace",) + ("write",) * 2 + (
    "drop",
    "read",
    "branch",
    "mm",
)  # fmt: skip
"""What a line may be, by weight."""


@dataclass(frozen=True)
class Program:
    """Source text, the shape of its leaves and the seed that their values are drawn with.

    lines: statements over `torch`, `F`, `a`, `b` and a list `out` of tensors and numbers that it fills.
    """

    lines: tuple[str, ...]
    shape: tuple[int, int] = (3, 4)
    seed: int = 0
    random: bool = False
    """Whether it draws: then its values are not another device's."""
    dtype: str = "float32"
    exact: bool = False
    """Whether its results are the CPU's bit for bit."""

    @property
    def source(self) -> str:
        """The statements."""
        return "\n".join(self.lines)

    def __str__(self) -> str:
        """A script that runs the program on the device named by its first argument."""
        return textwrap.dedent("""\
            import sys
            import torch
            import torch.nn.functional as F

            device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
            g = torch.Generator().manual_seed({seed})
            a = torch.randn({shape}, generator=g).to(torch.{dtype}).to(device).requires_grad_()
            b = torch.randn({shape}, generator=g).to(torch.{dtype}).to(device).requires_grad_()
            torch.manual_seed(0)
            {source}
            for v in out:
                print(v)
            """).format(seed=self.seed, shape=self.shape, dtype=self.dtype, source=self.source)  # fmt: skip

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of `a` and `b` on the CPU."""
        g = torch.Generator().manual_seed(self.seed)
        a, b = (torch.randn(self.shape, generator=g) for _ in range(2))
        dtype = getattr(torch, self.dtype)
        return a.to(dtype), b.to(dtype)

    def run(self, device: Any) -> list[Any]:
        """Its results on a device, tensors copied to the CPU.

        Raises:
            RuntimeError: what PyTorch raises for it: a generated program may break autograd's rules.
        """
        a, b = (x.to(device).requires_grad_() for x in self.leaves())
        scope: dict[str, Any] = {"torch": torch, "F": F, "a": a, "b": b}
        torch.manual_seed(0)
        exec(self.source, scope)  # noqa: S102 - text of our own grammar
        return [v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in scope["out"]]


@dataclass(frozen=True)
class _Rows:
    unary: tuple[str, ...] = UNARY
    binary: tuple[str, ...] = BINARY
    view: tuple[str, ...] = VIEWS
    inplace: tuple[str, ...] = INPLACE
    random: tuple[str, ...] = RANDOM


EXACT = _Rows(EXACT_UNARY, EXACT_BINARY, VIEWS, EXACT_INPLACE)


def _line(draw: Callable[..., Any], rows: _Rows, kind: str, new: str, x: str, y: str) -> list[str]:
    """The statements of one line that makes a variable, or writes to one."""

    def one(rows: tuple[str, ...], x: str = x) -> str:
        return str(draw(st.sampled_from(rows))).format(x=x, y=y)

    match kind:
        case "unary":
            return [f"{new} = {one(rows.unary)}"]
        case "random":
            return [f"{new} = {one(rows.random)}"]
        case "binary":
            return [f"{new} = {one(rows.binary)} if {x}.shape == {y}.shape else {x} * {y}[:1, :1]"]
        case "view":
            return [f"{new} = {one(rows.view)}"]
        case "mm":
            return [f"{new} = {x} @ {x}.t() * 0.1"]
        case "inplace":
            return [f"{new} = {x}.contiguous() * 1", one(rows.inplace, new)]
        case "write":
            return [one(rows.inplace)]
        case "autocast":
            return [
                f"with torch.autocast({x}.device.type, dtype=torch.bfloat16):",
                f"    {new} = ({x} @ {x}.t()).float()",
            ]
        case _:
            return [f"{new} = {x} * 2 if {x}.detach().abs().amax().item() > 0.5 else {x} - 1"]


@st.composite
def programs(
    draw: Callable[..., Any],
    *,
    backward: bool = True,
    random: bool = False,
    autocast: bool = False,
    exact: bool = False,
    max_lines: int = 9,
) -> Program:
    """Programs of up to `max_lines` lines.

    backward: half of them end with gradients of all that is left; the others run without autograd and write to their leaves too.
    random: draw random numbers on the device. autocast: products under bfloat16 autocast. Both make results that are a device's own:
    compare modes with them, not devices. exact: only ops whose results are the CPU's bit for bit, in float32, bfloat16, float16 or
    float64, without backward.
    """
    rows = EXACT if exact else _Rows()
    dtype = draw(st.sampled_from(DTYPES)) if exact else "float32"
    backward = backward and not exact and draw(st.booleans())
    kinds = KINDS + ("random",) * (2 * random) + ("autocast",) * autocast
    if exact:
        kinds = tuple(k for k in kinds if k != "mm")
    lines = (
        ["out = []"] if backward else ["out = []", "a, b = a.detach().clone(), b.detach().clone()"]
    )
    names = ["a", "b"]
    leaves = {"a", "b"} if backward else set()  # and views of them: autograd forbids writes
    for k in range(draw(st.integers(2, max_lines))):
        kind = draw(st.sampled_from(kinds))
        x, y = draw(st.sampled_from(names[-4:])), draw(st.sampled_from(names[-4:]))
        if kind == "drop" and len(names) > 3:
            lines.append(f"del {names.pop(draw(st.integers(2, len(names) - 1)))}")
        elif kind == "read":
            lines.append(f"out.append({x}.{'amax' if exact else 'sum'}().item())")
        elif kind == "write" and x not in leaves:
            lines += _line(draw, rows, kind, "", x, y)
        else:
            kind = "inplace" if kind == "write" else kind
            lines += _line(draw, rows, kind, f"v{k}", x, y)
            names.append(f"v{k}")
            if kind == "view" and x in leaves:
                leaves.add(f"v{k}")
    lines.append(f"out += [{', '.join(names)}]")
    if backward:
        left = f"[v for v in [{', '.join(names)}] if v.requires_grad and v.numel()]"
        lines.append(f"loss = sum(v.float().square().mean() for v in {left})")
        lines.append(
            "out += [g for g in torch.autograd.grad(loss, [a, b], allow_unused=True) if g is not None]"
        )
    shape, seed = draw(st.sampled_from(SHAPES)), draw(st.integers(0, 5))
    return Program(tuple(lines), shape, seed, random or autocast, dtype, exact)
