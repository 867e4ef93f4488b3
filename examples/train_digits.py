"""Train a small convolutional network on scikit-learn's handwritten digits to more than 97 % test accuracy.

python examples/train_digits.py [--device cpu]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

OUT = Path(__file__).parent / "out"


class CNN(nn.Module):
    """Three 3x3 convolutions with batch norm and GELU, a pooling, two linear layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.GELU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.GELU(),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Linear(2 * width * 16, 128), nn.GELU(), nn.Dropout(0.3), nn.Linear(128, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images, test images, training labels, test labels; images are f32 [n, 1, 8, 8] in [0, 1]."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    return tuple(train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels))


def train(
    device: str, epochs: int = 12, batch: int = 32, seed: int = 0
) -> tuple[nn.Module, float, list[float]]:
    """(model, test accuracy, mean loss of each epoch)."""
    torch.manual_seed(seed)
    x, x_test, y, y_test = (t.to(device) for t in digits())
    model = CNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    steps = len(x) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * steps)
    order = torch.Generator().manual_seed(seed)
    history = []
    for epoch in range(epochs):
        model.train()
        where = torch.randperm(len(x), generator=order, device="cpu").to(device)
        total = torch.zeros((), device=device)
        for k in range(steps):
            index = where[k * batch : (k + 1) * batch]
            loss = F.cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        history.append(total.item() / steps)
        print(f"\r\033[Kepoch {epoch + 1:2}/{epochs}  loss {history[-1]:.4f}", end="", flush=True)
    print()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(dim=1) == y_test).float().mean().item()
    return model, accuracy, history


def picture(model: nn.Module, device: str, path: Path) -> None:
    """Save some test images with what the model takes them for."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    _, images, _, labels = digits()
    with torch.no_grad():
        said = model(images[:20].to(device)).argmax(dim=1).cpu()
    path.parent.mkdir(exist_ok=True)
    fig, axes = plt.subplots(2, 10, figsize=(10, 2.6))
    for ax, image, guess, truth in zip(axes.flat, images, said, labels, strict=False):
        ax.imshow(image[0], cmap="gray_r")
        ax.set_title(int(guess), color="green" if guess == truth else "red")
        ax.axis("off")
    fig.savefig(path, dpi=120)


def main() -> None:
    """Train, report, save a picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="neuron")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    model, accuracy, _ = train(args.device, args.epochs)
    print(f"test accuracy {100 * accuracy:.2f} %")
    picture(model, args.device, OUT / "digits.png")
    print(f"some predictions: {OUT / 'digits.png'}")


if __name__ == "__main__":
    main()
