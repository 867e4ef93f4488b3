"""What the HBM allocator tells and how it can be told to behave: against a straightforward reference."""

import ctypes
import pickle

import pytest
from adaptive_eager.device_sim.hbm import HBM, LARGE, POISON, OutOfHBM, size_class
from adaptive_eager.device_sim.snapshot import snapshot
from hypothesis import given
from hypothesis import strategies as st

KIB, MIB = 1 << 10, 1 << 20
CAPACITY = 128 * MIB
SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(0, 3 * MIB),
    st.sampled_from([MIB, 5 * MIB, 16 * MIB, 40 * MIB]),
)
STREAMS = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("alloc"), SIZES, STREAMS),
    st.tuples(st.just("alloc"), SIZES, STREAMS),
    st.tuples(st.just("free"), st.integers(0, 50), STREAMS),
    st.tuples(st.just("use"), st.integers(0, 50), STREAMS),
    st.tuples(st.just("reach"), st.integers(0, 6), STREAMS),
    st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
)


def contents(block):
    """Some of a block's bytes: both ends."""
    head = ctypes.string_at(block.address, min(block.size, 64))
    return head + ctypes.string_at(block.address + block.size - 64, 64)


class Model:
    """Who holds what: (offset, size) -> site of blocks in use; blocks that wait for a stream."""

    def __init__(self):
        self.held = []  # (block, site, stream, uses, mark)
        self.waiting = []  # (offset, size, site, stream, uses)
        self.reached = {}
        self.peak = self.active_peak = 0

    def passed(self, uses):
        return all(self.reached.get(s, t - 1) >= t for s, t in uses)

    def settle(self):
        self.waiting = [w for w in self.waiting if not self.passed(w[4])]

    def spans(self):
        out = {b.offset: (b.size, site, stream) for b, site, stream, _, _ in self.held}
        return out | {at: (size, site, stream) for at, size, site, stream, _ in self.waiting}


@given(st.lists(STEPS, max_size=50), st.sampled_from([None, 2 * MIB]), st.booleans())
def test_traces_with_streams(trace, split, poison):
    """Blocks in use or waited for never overlap, keep their bytes, and are what live(), the snapshot, the history
    and the counters say; a stream gets back its own blocks only; fresh memory is poisoned."""
    hbm = HBM(CAPACITY, poison=poison, max_split_bytes=split)
    hbm.record_history()
    model = Model()
    for k, (step, n, stream) in enumerate(trace):
        if step == "alloc":
            site = (f"op{k}", f"file.py:{k}")
            try:
                block = hbm.alloc(n, site=site, stream=stream)
            except OutOfHBM:
                assert n > 8 * MIB
                continue
            if poison:
                assert set(contents(block)) == {POISON}
            mark = k % 250 + 1
            ctypes.memset(block.address, mark, block.size)
            model.held.append((block, site, stream, [], mark))
        elif step == "free" and model.held:
            block, site, stream, uses, _ = model.held.pop(n % len(model.held))
            if not model.passed(uses):
                model.waiting.append((block.offset, block.size, site, stream, uses))
            del block
        elif step == "use" and model.held:
            block, _, own, uses, _ = model.held[n % len(model.held)]
            if stream != own:
                hbm.record_stream(block, stream, n)
                uses.append((stream, n))
        elif step == "reach":
            hbm.stream_reached(stream, n)
            model.reached[stream] = max(n, model.reached.get(stream, n))
            model.settle()
        elif step == "empty_cache":
            hbm.empty_cache()
        check(hbm, model)


def check(hbm, model):
    """The allocator against the model."""
    spans = model.spans()
    ends = sorted((at, at + size) for at, (size, _, _) in spans.items())
    assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))
    assert {b.offset: (b.size, b.site, b.stream) for b in hbm.live()} == spans
    for block, _, _, _, mark in model.held:
        assert set(contents(block)) == {mark}
    stats = hbm.stats()
    allocated = sum(size for size, _, _ in spans.values())
    waits = sum(size for _, size, _, _, _ in model.waiting)
    assert stats["allocated_bytes.all.current"] == allocated
    assert stats["active_bytes.all.current"] == allocated - waits
    assert stats["reserved_bytes.all.current"] >= allocated >= stats["active_bytes.all.current"]
    model.peak = max(model.peak, allocated)
    model.active_peak = max(model.active_peak, allocated - waits)
    assert stats["allocated_bytes.all.peak"] == model.peak
    assert stats["active_bytes.all.peak"] == model.active_peak
    replayed = {}
    for e in hbm.history():
        if e.action == "alloc":
            assert e.address not in replayed
            replayed[e.address] = e.size
        elif e.action == "free_completed":
            assert replayed.pop(e.address) == e.size
    assert replayed == {hbm.base + at: size for at, (size, _, _) in spans.items()}
    shot = snapshot(hbm)
    assert sum(s["total_size"] for s in shot["segments"]) == stats["reserved_bytes.all.current"]
    assert sum(s["allocated_size"] for s in shot["segments"]) == allocated
    assert sum(s["active_size"] for s in shot["segments"]) == allocated - waits
    for s in shot["segments"]:
        at = s["address"]
        for b in s["blocks"]:
            assert b["address"] == at
            at += b["size"]
        assert at == s["address"] + s["total_size"]


def test_pytorchs_own_tools_read_a_snapshot():
    """`torch.cuda._memory_viz` summarises, traces and plots it; it pickles as plain data."""
    from torch.cuda import _memory_viz as viz

    hbm = HBM(CAPACITY)
    hbm.record_history(100)
    kept = [hbm.alloc(n, site=("aten.mm", "train.py:12 (backward)")) for n in (700, 3 * MIB)]
    hbm.alloc(40 * MIB, site=("aten.add", "train.py:13"))
    with pytest.raises(OutOfHBM):
        hbm.alloc(1 << 40)
    shot = pickle.loads(pickle.dumps(snapshot(hbm)))
    assert "total_allocated: 3.0MiB" in viz.segsum(shot)
    assert "OutOfMemoryError # 1.0TiB requested" in viz.trace(shot)
    assert viz.trace_plot(shot) and viz.segment_plot(shot)
    frames = shot["segments"][0]["blocks"][0]["frames"]
    assert frames == [{"name": "aten.mm", "filename": "train.py", "line": 12}]
    assert len(kept) == 2


def test_history_is_bounded_and_can_stop():
    """The newest events are kept; switched off, nothing is."""
    hbm = HBM(CAPACITY)
    hbm.record_history(3)
    for _ in range(5):
        hbm.alloc(100)
    assert len(hbm.history()) == 3
    hbm.record_history(on=False)
    hbm.alloc(100)
    assert hbm.history() == []
    with pytest.raises(ValueError, match="at least 1 event, got 0"):
        hbm.record_history(0)


def test_out_of_memory_names_what_holds_most():
    """Equal blocks of one site are counted together; the error pickles with them."""
    hbm = HBM(CAPACITY)
    hbm.set_limit(64 * MIB)
    held = [hbm.alloc(8 * MIB, site=("aten.uniform_", "model.py:7")) for _ in range(6)]
    held += [hbm.alloc(9 * MIB, site=("aten.mm", "model.py:9")), hbm.alloc(500)]
    with pytest.raises(OutOfHBM) as e:
        hbm.alloc(20 * MIB)
    first, second = e.value.blocks[:2]
    assert (first.count, first.site) == (6, ("aten.uniform_", "model.py:7"))
    assert second.site == ("aten.mm", "model.py:9")
    assert "6 x 8.00 MiB by aten.uniform_ at model.py:7" in str(e.value)
    assert e.value.capacity == 64 * MIB
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    assert held


def test_a_stream_gets_only_its_own_blocks_back():
    """A freed block goes to the next request of its stream, never to another's."""
    hbm = HBM(CAPACITY)
    first = hbm.alloc(5000, stream=1).offset
    other = hbm.alloc(5000)
    assert other.offset != first
    assert hbm.alloc(5000, stream=1).offset == first


def test_large_ranges_are_kept_whole():
    """Past max_split_bytes a free range serves no small request; without the limit it does."""
    for split, reused in ((None, True), (4 * MIB, False)):
        hbm = HBM(CAPACITY, max_split_bytes=split)
        big = hbm.alloc(16 * MIB).offset
        small = hbm.alloc(2 * MIB)
        assert (big <= small.offset < big + 16 * MIB) == reused
    with pytest.raises(ValueError, match=f"max_split_bytes must be at least {LARGE}, got 5"):
        HBM(CAPACITY, max_split_bytes=5)


def test_a_limit_is_the_capacity():
    """Segments never pass it, those kept from before included; raised, there is room again."""
    hbm = HBM(CAPACITY)
    kept = hbm.alloc(MIB)
    hbm.alloc(60 * MIB)
    hbm.set_limit(10 * MIB)
    with pytest.raises(OutOfHBM):
        hbm.alloc(11 * MIB)
    block = hbm.alloc(8 * MIB)
    assert hbm.stats()["reserved_bytes.all.current"] <= 10 * MIB
    hbm.set_limit(1)
    assert hbm.stats()["allocated_bytes.all.current"] == kept.size + block.size
    with pytest.raises(OutOfHBM):
        hbm.alloc(1)
    hbm.set_limit(CAPACITY)
    assert hbm.alloc(100 * MIB).size == size_class(100 * MIB)
