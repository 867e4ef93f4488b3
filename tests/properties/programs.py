"""Generated eager programs: source text with views, in-place writes, aliases, dead results, reads and backward.

A program works on variables `a`, `b` (leaves, 2-D, requiring grad) and what it makes of them. It is text, so that a
failing one can be read and run by itself.
"""

from __future__ import annotations

from hypothesis import strategies as st

SHAPES = [(1, 1), (1, 7), (5, 1), (3, 4), (4, 4), (6, 33), (2, 70)]

UNARY = ["{x} * 1.5", "{x} + 0.25", "torch.relu({x})", "torch.tanh({x})", "torch.sigmoid({x})", "{x}.exp().clamp(max=9.0)", "F.gelu({x})",
         "F.gelu({x}, approximate='tanh')", "F.silu({x})", "{x}.abs().sqrt()", "torch.rsqrt({x} * {x} + 1)", "-{x}", "{x} * {x}",
         "torch.where({x} > 0, {x}, {x} * 0.1)", "{x}.clamp(-1, 1)", "({x} > 0.5).to({x}.dtype)", "{x}.to(torch.float64).to({x}.dtype)",
         "{x}.to(torch.bfloat16).to({x}.dtype)", "({x} * 7).to(torch.int32).to({x}.dtype)", "F.softmax({x}, -1)", "F.log_softmax({x}, -1)",
         "F.layer_norm({x}, {x}.shape[-1:])", "{x} - {x}.mean(-1, keepdim=True)", "{x} / (1 + {x}.amax(-1, keepdim=True).abs())",
         "{x} * {x}.sum(0)", "{x} + {x}.mean()", "{x} - {x}.var(-1, keepdim=True, unbiased=False)", "torch.sin({x}) * torch.cos({x})",
         "torch.log1p({x}.abs())", "{x}.pow(2)", "{x}.clone()", "{x}.cumsum(0)", "torch.cat([{x}, {x} * 2])[: {x}.shape[0]]", "{x}.flip(0)",
         "{x}.detach() * 0.5 + {x}", "{x} * {x}.argmax(-1, keepdim=True)", "{x} - {x}.max(-1, keepdim=True)[0]",
         "{x} + {x}.detach().min(-1, keepdim=True)[1]", "(1.25 * {x}.detach() - 0.5) / 2", "torch._foreach_mul([{x}, {x} + 1], 0.5)[1]",
         "F.scaled_dot_product_attention({x}[None, None], {x}[None, None], {x}[None, None])[0, 0]",
         "F.scaled_dot_product_attention({x}[None, None], {x}[None, None], {x}[None, None], is_causal=True)[0, 0]",
         "{x}.to(torch.bfloat16).mul(1.7).add(0.3).relu().to({x}.dtype)"]  # fmt: skip
RANDOM = ["F.dropout({x}, 0.3)", "torch.rand_like({x}) * {x}", "{x} + torch.randn_like({x})", "{x} * torch.empty_like({x}).uniform_(-1, 1)",
          "{x} * torch.bernoulli(torch.full_like({x}, 0.4))", "{x} + torch.empty_like({x}.t()).normal_(0.5, 2).t()",
          "{x} * torch.empty({x}.shape, dtype=torch.bool, device={x}.device).bernoulli_(0.7)"]  # fmt: skip
"""Only their own bits are theirs: not for comparing with the CPU."""
BINARY = ["{x} + {y}", "{x} * {y}", "{x} - {y} * 0.5", "torch.maximum({x}, {y})", "{x} / ({y}.abs() + 1)", "torch.where({x} < {y}, {x}, {y})",
          "torch.lerp({x}, {y}, 0.3)", "torch.addcmul({x}, {y}, {y}, value=0.1)"]  # fmt: skip
VIEWS = ["{x}.t()", "{x}[1:]", "{x}[:, ::2]", "{x}[-1:]", "{x}.view(-1)[: {x}.shape[-1]].unsqueeze(0)", "{x}[:, :1].expand({x}.shape)",
         "{x}.narrow(0, 0, 1)", "{x}.unsqueeze(1).squeeze(1)"]  # fmt: skip
INPLACE = ["{x}.add_(0.5)", "{x}.mul_(0.75)", "{x}.relu_()", "{x}.tanh_()", "{x}[0].add_(1)", "{x}[:, -1].mul_(0.5)", "{x}.t().sub_(0.125)",
           "{x}.copy_({x} * 0.5 + 1)", "{x}.sub_({x}.detach().mean())", "{x}.div_({x}.detach().abs().amax(-1, keepdim=True) + 1)", "{x}[0].fill_(0.3)",
           "{x}.clamp_(-2, 2)", "torch._foreach_mul_([{x}, {x}.t()], 0.5)", "{x}.detach().add_(0.25)"]  # fmt: skip


@st.composite
def programs(draw, backward=True, random=False):
    """Source of a program; runs with torch, F, a, b defined; ends with a list `out` of tensors and numbers."""
    lines = ["out = []"]
    names = ["a", "b"]
    fresh = {"a": False, "b": False}
    for k in range(draw(st.integers(2, 9))):
        kind = draw(
            st.sampled_from(
                ["unary"] * 5
                + ["binary"] * 3
                + ["view"] * 2
                + ["inplace"] * 2
                + ["drop", "read", "branch", "mm"]
                + ["random"] * (2 * random)
            )
        )
        x = draw(st.sampled_from(names[-4:]))
        y = draw(st.sampled_from(names[-4:]))
        new = f"v{k}"
        if kind == "unary":
            lines.append(f"{new} = {draw(st.sampled_from(UNARY)).format(x=x)}")
        elif kind == "random":
            lines.append(f"{new} = {draw(st.sampled_from(RANDOM)).format(x=x)}")
        elif kind == "binary":
            lines.append(
                f"{new} = ({draw(st.sampled_from(BINARY)).format(x=x, y=y)}) if {x}.shape == {y}.shape else {x} * {y}.mean()"
            )
        elif kind == "view":
            lines.append(f"{new} = {draw(st.sampled_from(VIEWS)).format(x=x)}")
        elif kind == "mm":
            lines.append(f"{new} = {x} @ {x}.t() * 0.1")
        elif kind == "inplace":
            lines.append(f"{new} = {x}.contiguous() * 1 if {x}.requires_grad or True else {x}")
            lines.append(draw(st.sampled_from(INPLACE)).format(x=new))
        elif kind == "drop" and len(names) > 3:
            gone = names.pop(draw(st.integers(2, len(names) - 1)))
            lines.append(f"del {gone}")
            continue
        elif kind == "read":
            lines.append(f"out.append({x}.sum().item())")
            continue
        else:
            lines.append(f"{new} = {x} * 2 if {x}.abs().mean().item() > 0.5 else {x} - 1")
        names.append(new)
        fresh[new] = True
    lines.append(f"out += [{', '.join(names)}]")
    if backward:
        lines.append(
            f"loss = sum(v.float().square().mean() for v in [{', '.join(names)}] if v.requires_grad and v.numel())"
        )
        lines.append("g = torch.autograd.grad(loss, [a, b], allow_unused=True)")
        lines.append("out += [v for v in g if v is not None]")
    return "\n".join(lines)


def run(source, a, b, device):
    """Execute a program on a device; tensors come back on the CPU."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    scope = {
        "torch": torch,
        "F": F,
        "a": a.to(device).requires_grad_(),
        "b": b.to(device).requires_grad_(),
    }
    exec(source, scope)
    return [v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in scope["out"]]
