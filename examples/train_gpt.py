"""Train a byte-level GPT on the source of Python's standard library.

    python examples/train_gpt.py                    # on the simulated NeuronCore
    python examples/train_gpt.py --device cpu       # the same code on the CPU

Nothing here knows about the device but one `.to(device)` for the model and one for each batch.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

OUT = Path(__file__).parent / "out"


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the run."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    batch: int = 16
    steps: int = 300
    lr: float = 1e-3
    warmup: int = 20
    decay: float = 0.1
    clip: float = 1.0
    seed: int = 0


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library's modules for training, and of every tenth one for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for k, path in enumerate(files):
        parts[k % 10 == 9].append(path.read_bytes())
    train, valid = (torch.frombuffer(bytearray(b"\n".join(p)), dtype=torch.uint8) for p in parts)
    return train, valid


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm and with a residual."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.ln1, self.ln2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.up, self.down = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)
        self.register_buffer(
            "mask", torch.full((c.context, c.context), -math.inf).triu(1), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (
            self.qkv(self.ln1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(w // self.heads) + self.mask[:t, :t]
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(b, t, w)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Byte-level language model."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.context = c.context
        self.bytes, self.places = nn.Embedding(256, c.width), nn.Embedding(c.context, c.width)
        self.blocks = nn.Sequential(*[Block(c) for _ in range(c.layers)])
        self.ln, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, 256, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bytes(x) + self.places.weight[: x.shape[1]]
        return self.head(self.ln(self.blocks(x)))


class Batches:
    """Random windows of a text, drawn on the CPU from a seed of its own."""

    def __init__(self, text: torch.Tensor, c: Config, seed: int) -> None:
        self.text, self.c = text, c
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and the bytes that follow them, int64 [batch, context]."""
        n = self.c.context
        at = torch.randint(
            len(self.text) - n - 1, (self.c.batch,), generator=self.generator, device="cpu"
        )
        rows = torch.stack([self.text[i : i + n + 1] for i in at.tolist()]).long()
        return rows[:, :-1].to(device), rows[:, 1:].to(device)


def schedule(c: Config, step: int) -> float:
    """Learning rate: a linear warm-up, then half a cosine down to a tenth."""
    if step < c.warmup:
        return c.lr * (step + 1) / c.warmup
    t = (step - c.warmup) / max(1, c.steps - c.warmup)
    return c.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * t)))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats a byte."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(
    c: Config, device: str, on_step: Callable[[int, torch.Tensor], None] | None = None
) -> tuple[GPT, list[float]]:
    """Train from scratch; returns the model and the loss of each step.

    Losses are read together at the end: a read in the loop would be a sync point.
    """
    torch.manual_seed(c.seed)
    model = GPT(c)
    model.to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": c.decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95))
    batches = Batches(corpus()[0], c, c.seed)
    losses = []
    for step in range(c.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule(c, step)
        x, y = batches.next(device)
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        losses.append(loss.detach())
        if on_step is not None:
            on_step(step, losses[-1])
    return model, [v.item() for v in losses]


@torch.no_grad()
def validate(model: GPT, c: Config, device: str, batches: int = 10) -> float:
    """Mean loss on held-out files."""
    source = Batches(corpus()[1], c, 1)
    return sum(loss_of(model, *source.next(device)).item() for _ in range(batches)) / batches


@torch.no_grad()
def sample(model: GPT, device: str, prompt: str = "def ", length: int = 200, seed: int = 0) -> str:
    """Continue a prompt, byte by byte, at temperature 0.8."""
    text = list(prompt.encode())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        x = torch.tensor([text[-model.context :]], device=device)
        p = F.softmax(model(x)[0, -1] / 0.8, dim=-1).cpu()
        text.append(int(torch.multinomial(p, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Save loss curves as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(exist_ok=True)
    fig, ax = plt.subplots(figsize=(7, 4))
    for name, losses in curves.items():
        ax.plot(losses, label=name, lw=1.2)
    ax.set(
        xlabel="step",
        ylabel="loss (nats a byte)",
        title="Byte-level GPT on the standard library's source",
    )
    ax.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def main() -> None:
    """Train, validate, sample, plot."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="neuron")
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument(
        "--report-every", type=int, default=10, help="steps between reads of the loss"
    )
    args = parser.parse_args()
    config = Config(steps=args.steps, seed=args.seed)
    with tqdm(total=config.steps, unit="step") as bar:

        def on_step(step: int, loss: torch.Tensor) -> None:
            if (step + 1) % args.report_every == 0 or step + 1 == config.steps:
                bar.set_postfix(loss=f"{loss.item():.3f}")
                bar.update(step + 1 - bar.n)

        start = time.perf_counter()
        model, losses = train(config, args.device, on_step)
        seconds = time.perf_counter() - start
    print(
        f"{config.steps} steps in {seconds:.1f} s; loss {losses[0]:.3f} -> {losses[-1]:.3f}, validation {validate(model, config, args.device):.3f}"
    )
    print("--- sample\n" + sample(model, args.device))
    plot({args.device: losses}, OUT / "train_gpt.png")
    print(f"--- loss curve: {OUT / 'train_gpt.png'}")


if __name__ == "__main__":
    main()
