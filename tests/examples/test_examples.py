"""The examples, in small: the same curves as on the CPU, and the notebook runs."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


def test_gpt_follows_the_cpus_curve():
    """50 steps of the GPT on `neuron` give the CPU's losses to 1e-4 relative, without a fallback."""
    from train_gpt import Config, train

    from adaptive_eager import neuron_eager

    config = Config(layers=2, width=64, batch=8, steps=50)
    _, cpu = train(config, "cpu")
    with neuron_eager(default_device=False) as session:
        _, neuron = train(config, "neuron")
    assert max(abs(a - b) / abs(a) for a, b in zip(cpu, neuron, strict=True)) < 1e-4
    assert session.fallbacks == {}


def test_gpt_has_the_same_bits_in_every_mode():
    """Losses and final weights are identical in each mode, with segments of any length, byte budget 1 and little SBUF."""
    from train_gpt import Config, train

    from adaptive_eager import TRN2, neuron_eager

    config = Config(layers=1, width=32, heads=2, batch=4, context=32, steps=4)
    results = []
    for options in (
        dict(mode="blocking"),
        dict(mode="eager"),
        {},
        {},
        dict(byte_budget=1),
        dict(max_ops=20),
        dict(spec=TRN2.replace(name="tiny", sbuf_bytes=128 * 4096)),
    ):
        with neuron_eager(default_device=False, **options):
            model, losses = train(config, "neuron")
            results.append((losses, [p.detach().cpu() for p in model.parameters()]))
    losses, weights = results[0]
    for other_losses, other_weights in results[1:]:
        assert losses == other_losses
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_gpt_bits_do_not_depend_on_the_disk_cache(tmp_path):
    """A process with an empty kernel cache and one that finds it filled give the same losses and weights."""
    import os
    import subprocess

    code = (
        "import hashlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "from train_gpt import Config, train\n"
        "m, losses = train(Config(layers=1, width=32, heads=2, batch=4, context=32, steps=3), 'neuron')\n"
        "h = hashlib.sha256(b''.join(p.detach().cpu().numpy().tobytes() for p in m.parameters())).hexdigest()\n"
        "from adaptive_eager.kernels import launch\n"
        "print(losses, h); print(launch.stats.compiled)"
    )
    env = {**os.environ, "ADAPTIVE_EAGER_CACHE_DIR": str(tmp_path)}
    cold, warm = (
        subprocess.run(
            [sys.executable, "-c", code, str(EXAMPLES)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for _ in range(2)
    )
    assert cold[0] == warm[0]
    assert int(cold[1]) > 0 and warm[1] == "0"


def test_digits_learn():
    """Two epochs of the digits model run on the device and the loss falls."""
    from train_digits import train

    _, accuracy, history = train("neuron", epochs=2)
    assert history[-1] < history[0] and accuracy > 0.1


def test_the_tour_runs():
    """Every cell of the notebook runs."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(EXAMPLES)}},
    ).execute()


def test_what_if_prints_other_chips():
    """The what-if example runs, fused and op by op give one result, and a chip with less SBUF moves more bytes."""
    import re
    import subprocess

    out = subprocess.run(
        [sys.executable, str(EXAMPLES / "what_if.py")], capture_output=True, text=True, check=True
    ).stdout
    eager, adaptive = re.findall(r"mean (\S+)", out)
    assert eager == adaptive
    moved = dict(re.findall(r"^  (\S.*?) +[\d,]+ µs +\d+ launches +([\d,]+) MB", out, re.MULTILINE))
    moved = {chip: int(mb.replace(",", "")) for chip, mb in moved.items()}
    assert moved["TRN2, a quarter of the SBUF"] > moved["TRN2"] >= moved["TRN3"]
