"""Six small models, one training step each: which of their ops the chip would not run, and how far the result is from the CPU's."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

from adaptive_eager import neuron_eager

Tensor = torch.Tensor


class Block(nn.Module):
    """A pre-norm transformer block. mlp: what follows attention."""

    def __init__(self, d: int, heads: int, causal: bool, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = mlp or nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] to [B, T, d]."""
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class Language(nn.Module):
    """Tokens, any body, a head. The loss of the next token."""

    def __init__(self, body: nn.Module, d: int = 64, words: int = 101) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, d), nn.Embedding(32, d)
        self.body, self.norm, self.head = body, nn.LayerNorm(d), nn.Linear(d, words)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] ids to a loss."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.body(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Vision(nn.Module):
    """A ViT on 16x16 images: patches of 4."""

    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.places = nn.Parameter(torch.randn(1, 17, d) * 0.02)
        self.body = nn.Sequential(*(Block(d, 4, False) for _ in range(2)))
        self.head = nn.Linear(d, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """[B, 3, 16, 16] images and [B] labels to a loss."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        return F.cross_entropy(self.head(self.body(x)[:, 0]), labels)


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(i, o, 3, stride, 1, bias=False),
            nn.Conv2d(o, o, 3, 1, 1, bias=False),
        )
        self.na, self.nb = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
        self.skip = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        """[B, i, H, W] to [B, o, H / stride, W / stride]."""
        y = self.nb(self.b(F.relu(self.na(self.a(x)))))
        return F.relu(y + self.skip(x))


class ResNet(nn.Module):
    """A stem, two stages, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.body = nn.Sequential(Residual(16, 32, 1), Residual(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """[B, 3, H, W] images and [B] labels to a loss."""
        x = F.adaptive_avg_pool2d(self.body(self.stem(images)), 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


class Recurrent(nn.Module):
    """Two layers of an LSTM."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d, d, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] to [B, T, d]."""
        return self.lstm(x)[0]


class Selective(nn.Module):
    """A selective state space, after Mamba: a short causal convolution, steps chosen by the input, a scan over time, a gate."""

    def __init__(self, d: int, states: int = 8) -> None:
        super().__init__()
        self.inner, self.conv = nn.Linear(d, 2 * d), nn.Conv1d(d, d, 4, padding=3, groups=d)
        self.steps, self.maps = nn.Linear(d, d), nn.Linear(d, 2 * states)
        self.rates = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(d, 1))
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] to [B, T, d]."""
        u, gate = self.inner(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step = F.softplus(self.steps(u))
        into, out = self.maps(u).chunk(2, -1)
        decay = torch.exp(step[..., None] * -torch.exp(self.rates))
        drive = (step * u)[..., None] * into[:, :, None]
        h, ys = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + drive[:, t]
            ys.append((h * out[:, t, None]).sum(-1))
        return x + self.out(torch.stack(ys, 1) * F.silu(gate))


class Experts(nn.Module):
    """A mixture: each token goes to its two best experts, picked by boolean masks."""

    def __init__(self, d: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(d, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] to [B, T, d]."""
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        y = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            token, place = torch.where(chosen == k)
            y = y.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return y.view_as(x)


def zoo() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Models and their inputs on the CPU, the same in each run."""
    torch.manual_seed(0)
    d = 64
    ids = torch.randint(101, (4, 24))
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    return {
        "GPT": (Language(nn.Sequential(Block(d, 4, True), Block(d, 4, True))), (ids,)),
        "ViT": (Vision(), (images, labels)),
        "ResNet": (ResNet(), (images, labels)),
        "LSTM": (Language(Recurrent(d)), (ids,)),
        "Mamba-like": (Language(nn.Sequential(Selective(d), Selective(d))), (ids,)),
        "MoE": (
            Language(nn.Sequential(*(Block(d, 4, True, Experts(d)) for _ in range(2)))),
            (ids,),
        ),
    }


def step(device: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one training step; the optimizer runs too."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(*(x.to(device) for x in inputs))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def main() -> int:
    """A row for each model; 1 if one is far from the CPU."""
    print(f"{'model':<12}{'loss':>9}{'gradients':>12}{'launches':>10}  fallbacks")
    far = False
    host, ours = zoo(), zoo()
    for name, (model, inputs) in ours.items():
        loss, gradients = step("cpu", *host[name])
        with neuron_eager(default_device=False) as session:
            mine, found = step("neuron", model, inputs)
        off = max(float((a - b).abs().max()) for a, b in zip(gradients, found, strict=True))
        far |= off > 1e-4 or abs(loss - mine) > 1e-4
        fell = ", ".join(f"{op.removeprefix('aten.')} x{n}" for op, n in session.fallbacks.items())
        print(f"{name:<12}{mine:>9.4f}{off:>12.1e}{session.stats.launches:>10}  {fell or 'none'}")
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
