"""Segments of small programs as text: what is recorded, what survives, why it was cut."""

import re
import textwrap

import pytest
import torch
import torch.nn.functional as F

from adaptive_eager import neuron_eager
from adaptive_eager.segment import SegmentText


def texts(f):
    with neuron_eager() as session:
        keep = f()
        torch.neuron.synchronize()
        del keep
    out = []
    for s in session.segments:
        out.append(re.sub(r" at \S*?([^/\s]+\.py):\d+", r" at \1", str(s)))
    return "\n".join(out)


def chain():
    x = torch.ones(4, 8)
    y = torch.relu(x * 2 + 1)
    return x, y.sum()


def rows():
    x = torch.ones(2, 3)
    m = x.mean(-1, keepdim=True)
    return (x - m) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


def alias():
    x = torch.zeros(4, 4)
    x[1].add_(1)
    return x.t() * 2


def read():
    x = torch.ones(3)
    if x.sum().item() > 2:
        x = x * 2
    return x


def loss():
    p = F.log_softmax(torch.ones(2, 5), -1)
    return F.nll_loss(p, torch.tensor([1, 2]))


GOLDEN = {
    chain: """
        segment s0 (cut: synchronize at test_segments.py) {
          %0 = input f32[4,8]
          fill_ %0, 1.0 : %0 live
          %1 = mul %0, 2 : f32[4,8]
          %2 = add %1, 1 : f32[4,8]
          %3 = relu %2 : f32[4,8]
          %4 = sum %3 : f32[] live
        }""",
    rows: """
        segment s0 (cut: synchronize at test_segments.py) {
          %0 = input f32[2,3]
          fill_ %0, 1.0 : %0
          %1 = mean %0, [-1], True : f32[2,1]
          %2 = sub %0, %1 : f32[2,3]
          %3 = var %0, [-1], correction=1, keepdim=True : f32[2,1]
          %4 = add %3, 1e-05 : f32[2,1]
          %5 = sqrt %4 : f32[2,1]
          %6 = div %2, %5 : f32[2,3] live
        }""",
    alias: """
        segment s0 (cut: synchronize at test_segments.py) {
          %0 = input f32[4,4]
          zero_ %0 : %0
          add_ %0, 1 : %0
          %1 = mul %0, 2 : f32[4,4](1,4) live
        }""",
    read: """
        segment s0 (cut: value-read at test_segments.py) {
          %0 = input f32[3]
          fill_ %0, 1.0 : %0 live
          %1 = sum %0 : f32[] live
        }
        segment s1 (cut: synchronize at test_segments.py) {
          %0 = input f32[3]
          %1 = mul %0, 2 : f32[3] live
        }""",
    loss: """
        segment s0 (cut: synchronize at test_segments.py) {
          %0 = input f32[2,5]
          fill_ %0, 1.0 : %0
          %1 = _log_softmax %0, -1, False : f32[2,5]
          %2 = input i64[2]
          %3, %4 = nll_loss_forward %1, %2, None, 1, -100 : f32[], f32[] live
        }""",
}


@pytest.mark.parametrize("f", GOLDEN, ids=lambda f: f.__name__)
def test_segment_text(f):
    """The program's segments print as written here, and parse back."""
    got = texts(f)
    assert got == textwrap.dedent(GOLDEN[f]).strip()
    for part in re.findall(r"segment .*?\n\}", got, re.S):
        assert str(SegmentText.parse(part)) == part


@pytest.mark.parametrize("bad", ["", "segment s0 {", "segment s0 (cut: a at b) {\n  nonsense\n}"])
def test_what_is_no_segment_is_refused(bad):
    """Text that is not a segment raises ValueError."""
    with pytest.raises((ValueError, IndexError)):
        SegmentText.parse(bad)
