"""A session's simulated chip: traffic, time, what-if, capacity, and that none of it touches a bit."""

import os
import pickle
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from adaptive_eager.device_sim.spec import TRN2, TRN3
from torch import nn

from adaptive_eager import neuron_eager, simulate
from adaptive_eager.simulate import Happening, Item, Record

N = 512
TINY = TRN2.replace(name="tiny", sbuf_bytes=128 * 4096)
MIB = 1 << 20


def chain(x, b):
    """Two inputs, one result, four ops."""
    return F.gelu(x * 2 + b) - x


def training_step():
    """Losses and gradients of a small model with every kind of kernel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 1500), nn.LayerNorm(1500), nn.GELU(), nn.Linear(1500, 10))
    model.to("neuron")
    x = torch.randn(64, 40).to("neuron")
    loss = F.cross_entropy(model(x), torch.arange(64).to("neuron") % 10)
    loss.backward()
    return [loss.item(), *[p.grad.cpu() for p in model.parameters()]]


def test_fused_traffic_is_inputs_and_outputs():
    """A fused program reads X bytes and writes Y: X + Y is counted, not one byte more."""
    x, b = torch.randn(N, N).to("neuron"), torch.randn(N, N).to("neuron")
    torch.neuron.synchronize()
    with neuron_eager(default_device=False) as s:
        y = chain(x, b)
        torch.neuron.synchronize()
    each = N * N * 4
    assert (s.simulated.hbm_read, s.simulated.hbm_written) == (2 * each, each)
    assert (s.stats.hbm_read, s.stats.hbm_written) == (2 * each, each)
    assert s.simulated.launches == 1 and y is not None


def test_eager_traffic_counts_every_intermediate():
    """One kernel an op writes each result to HBM and reads it again."""
    x, b = torch.randn(N, N).to("neuron"), torch.randn(N, N).to("neuron")
    with neuron_eager("eager", default_device=False) as s:
        chain(x, b)
        torch.neuron.synchronize()
    each = N * N * 4
    # x*2: 1 in 1 out; +b: 2 in 1 out; gelu: 1 in 1 out; -x: 2 in 1 out
    assert (s.simulated.hbm_read, s.simulated.hbm_written) == (6 * each, 4 * each)
    assert s.simulated.launches == 4


@pytest.mark.parametrize("mode", ["adaptive", "eager"])
@pytest.mark.parametrize("other", [TRN3, TINY, TRN2.replace(lnc=1, hbm_bytes_per_ns=50.0)])
def test_retime_equals_a_run_on_the_other_chip(mode, other):
    """What-if gives the time, traffic, launches and footprint that a run on that chip has."""
    results = []
    for spec in (TRN2, other):
        with neuron_eager(mode, default_device=False, spec=spec) as s:
            training_step()
        results.append(s)
    here, there = results
    predicted, real = here.retime(other), there.simulated
    assert predicted.ns == pytest.approx(real.ns)
    assert predicted.engine_ns == pytest.approx(real.engine_ns)
    for name in ("launches", "hbm_read", "hbm_written", "uploaded", "downloaded", "sbuf"):
        assert getattr(predicted, name) == getattr(real, name), name
    assert here.simulated.ns != real.ns
    assert [x.item.kind for x in here.timeline(other)] == [x.item.kind for x in there.timeline()]


def test_sbuf_decides_fusion_and_no_bit():
    """Each halving of SBUF gives as many kernels or more, at last one an op, and the same bits."""
    launches, results = [], []
    x = torch.randn(64, 6000)

    def program():
        y = x.to("neuron")
        z = F.layer_norm(F.gelu(y * 2 + 1), (6000,)) + y
        w = F.softmax(z * y, -1) * 3
        return [z.cpu(), w.cpu(), w.sum(0).cpu()]

    size = 64 * MIB
    while size >= TINY.sbuf_bytes:
        with neuron_eager(default_device=False, spec=TRN2.replace(sbuf_bytes=size)) as s:
            results.append(program())
        launches.append(s.stats.launches)
        assert s.simulated.sbuf <= size // 128
        size //= 2
    assert launches == sorted(launches)
    assert launches[0] < launches[-1]
    half = [n for n, m in zip(launches, launches[1:], strict=False) if m > n]
    assert half, launches
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_small_hbm_raises_and_names_the_largest_blocks():
    """A big model does not fit into 64 MiB: the error names the largest live blocks with their lines."""
    with neuron_eager(spec=TRN2.replace(hbm_bytes=64 * MIB)):
        with pytest.raises(torch.OutOfMemoryError) as e:
            model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])  # this line
            model(torch.ones(4, 2048)).sum().item()
        text = str(e.value)
        model = e = None
        assert torch.ones(3).sum().item() == 3
    assert "TRN2 has 64.00 MiB of HBM" in text
    found = re.search(r"(\d) x 16.00 MiB by (\S+) at (\S+):(\d+)", text)
    assert found and found[3] == __file__
    with open(__file__) as f:
        assert "# this line" in f.readlines()[int(found[4]) - 1]


def test_the_timeline_names_ops_and_lines():
    """Launches and copies follow each other without gaps; each knows its ops, lines and instructions."""
    with neuron_eager(default_device=False) as s:
        x = torch.randn(N, N).to("neuron")
        y = torch.sort(x @ x)[0].exp()
        y.sum().item()
    spans = s.timeline()
    assert spans[0].item.kind == "upload" and spans[-1].item.kind == "download"
    assert all(
        a.start + a.ns == pytest.approx(b.start) for a, b in zip(spans, spans[1:], strict=False)
    )
    assert spans[-1].start + spans[-1].ns == pytest.approx(s.simulated.ns)
    ops = [op for x in spans for op, _ in x.item.ops]
    assert {"aten.mm", "aten.sort", "aten.exp"} <= set(ops)
    for x in spans:
        assert all(where.startswith(__file__) for _, where in x.item.ops)
        assert bool(x.item.works) == (x.item.kind in ("kernel", "library"))
        assert all(w.transfers for w in x.item.works)


def test_fallbacks_are_round_trips():
    """An op that runs on the CPU costs two copies, of what it reads and of what it makes."""
    x = torch.randn(64, 64).to("neuron")
    with neuron_eager(default_device=False) as s:
        torch.linalg.inv(x)
        torch.neuron.synchronize()
    (trip,) = [x.item for x in s.timeline() if x.item.kind == "fallback"][:1]
    assert trip.downloaded == 64 * 64 * 4 and trip.uploaded >= 64 * 64 * 4
    assert s.simulated.fallbacks == s.stats.fallbacks >= 1
    assert s.simulated.copy_ns >= 2 * TRN2.host_start_ns


def test_chips_are_chosen_by_scope():
    """Scopes nest, an inner one without a chip keeps the outer one's, and the outer one's is back after it."""
    with neuron_eager(spec="TRN3") as outer:
        assert torch.neuron.get_device_name().startswith("TRN3")
        with neuron_eager() as inner:
            assert inner.spec == TRN3
        with neuron_eager(spec=TINY) as other:
            assert other.spec.name == "tiny"
        assert torch.neuron.mem_get_info()[1] == TRN3.hbm_bytes
    assert outer.spec == TRN3
    assert torch.neuron.get_device_name().startswith("TRN2")
    assert torch.neuron.mem_get_info()[1] == TRN2.hbm_bytes


@pytest.mark.parametrize(
    ("spec", "error", "word"),
    [("TRN9", ValueError, "no chip is called 'TRN9'; known are TRN2"), (3, TypeError, "got 3")],
)
def test_unknown_chips_are_refused(spec, error, word):
    """By the scope and by retime, before anything runs."""
    with pytest.raises(error, match=word):
        neuron_eager(spec=spec)
    with neuron_eager() as s, pytest.raises(error, match=word):
        s.retime(spec)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("TRN3", "TRN3 (simulated)"),
        ("TRN7", "ADAPTIVE_EAGER_SPEC=TRN7: no chip is called 'TRN7'"),
        ("/nowhere/x.toml", "ADAPTIVE_EAGER_SPEC=/nowhere/x.toml"),
    ],
)
def test_the_environment_names_a_chip(value, word):
    """`ADAPTIVE_EAGER_SPEC` sets the default; one that can't be used is named in the error."""
    run = subprocess.run(
        [sys.executable, "-c", "import torch, adaptive_eager; print(torch.neuron.get_device_name())"],
        env=os.environ | {"ADAPTIVE_EAGER_SPEC": value}, capture_output=True, text=True,
    )  # fmt: skip
    assert word in run.stdout + run.stderr


def test_poison_shows_memory_that_nobody_wrote():
    """With ADAPTIVE_EAGER_POISON=1 fresh memory reads as NaN."""
    code = "import torch; print(torch.empty(5, device='neuron').isnan().all().item())"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"ADAPTIVE_EAGER_POISON": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.strip() == "True", run.stderr


def test_the_environment_limits_splits():
    """`ADAPTIVE_EAGER_MAX_SPLIT_BYTES` reaches the allocator; what can't work is refused by name."""
    code = "from adaptive_eager.memory import memory; print(memory().hbm.max_split_bytes)"
    for value, word in (("4194304", "4194304"), ("5", "max_split_bytes must be at least")):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"ADAPTIVE_EAGER_MAX_SPLIT_BYTES": value}, capture_output=True, text=True,
        )  # fmt: skip
        assert word in run.stdout + run.stderr


def test_without_a_record_nothing_is_kept():
    """simulate=False leaves the record empty, and the results the same."""
    with neuron_eager(default_device=False, simulate=False) as s:
        off = training_step()
    with neuron_eager(default_device=False) as t:
        on = training_step()
    assert s.simulated.ns == 0 and t.simulated.ns > 0
    assert off[0] == on[0] and all(torch.equal(a, b) for a, b in zip(off[1:], on[1:], strict=True))


def test_the_record_is_bounded(monkeypatch):
    """Past its bounds totals stay right, the timeline keeps the newest, and a cut run says so."""
    monkeypatch.setattr(simulate, "MAX_LOG", 100)
    monkeypatch.setattr(simulate, "MAX_HAPPENINGS", 3)
    happenings = [Happening((Item("upload", (), (), 1 << k, 0),), TRN2) for k in range(3)]
    record = Record()
    for k in range(1000):
        record.add(happenings[k % 3], k)
    total = record.on(TRN2)
    assert total.uploaded == 334 * 1 + 333 * 2 + 333 * 4 and total.complete
    newest = [x.item.uploaded for x in record.spans(TRN2)]
    assert len(newest) <= 101 and newest[-1] == 1 << (999 % 3)
    record.add(Happening((Item("upload", (), (), 9, 0),), TRN2), 1000)
    assert not record.on(TRN2).complete


def test_engines_have_pytorchs_activations():
    """gelu, silu and their derivatives are one Scalar instruction each, as on the chip."""
    x = torch.randn(N, N, requires_grad=True)
    for f in (F.gelu, F.silu, lambda v: F.gelu(v, approximate="tanh")):
        with neuron_eager(default_device=False) as s:
            y = f(x.detach().to("neuron"))
            torch.neuron.synchronize()
        (work,) = [w for t in s.timeline() for w in t.item.works]
        assert [i.kind for i in work.body] == ["activation"], (f, y)


def test_snapshots_know_the_lines(tmp_path):
    """`torch.neuron.memory` names the op and line of a living tensor, in a file PyTorch's tools read."""
    memory = torch.neuron.memory
    memory._record_memory_history(max_entries=1000)
    try:
        x = torch.randn(300, 1000).to("neuron") * 2
        torch.neuron.synchronize()
        memory._dump_snapshot(tmp_path / "hbm.pickle")
    finally:
        memory._record_memory_history(None)
    shot = pickle.loads((tmp_path / "hbm.pickle").read_bytes())
    frames = [f for s in shot["segments"] for b in s["blocks"] for f in b["frames"]]
    assert any(f["name"] == "aten.mul" and f["filename"] == __file__ for f in frames)
    assert any(e["action"] == "alloc" for e in shot["device_traces"][0])
    assert x is not None and torch.neuron.memory_snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory._snapshot()
