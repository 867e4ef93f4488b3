"""The HBM allocator against a straightforward reference, on generated traces."""

import gc
import threading

import pytest
from adaptive_eager.device_sim.hbm import GRAIN, HBM, OutOfHBM, size_class
from adaptive_eager.device_sim.spec import TRN2
from hypothesis import given
from hypothesis import strategies as st

MIB = 1 << 20
SIZES = st.one_of(
    st.integers(0, 5000),
    st.integers(0, 3 * MIB),
    st.sampled_from([MIB, MIB - 1, 16 * MIB, 16 * MIB + 7, 40 * MIB]),
)


@given(st.lists(st.tuples(SIZES, st.integers(0, 30), st.booleans()), max_size=60))
def test_traces(trace):
    """No two live blocks overlap, all are aligned, and the counters are the sums over live blocks."""
    hbm = HBM(1 << 30)
    live = []
    peak = 0
    for size, where, free in trace:
        if free and live:
            live.pop(where % len(live))
        else:
            live.append(hbm.alloc(size))
        held = sum(b.size for b in live)
        peak = max(peak, held)
        stats = hbm.stats()
        assert stats["allocated_bytes.all.current"] == held
        assert stats["requested_bytes.all.current"] == sum(b.asked for b in live)
        assert stats["allocation.all.current"] == len(live)
        assert stats["reserved_bytes.all.current"] >= held
    assert hbm.stats()["allocated_bytes.all.peak"] >= peak
    spans = sorted((b.offset, b.offset + b.size) for b in live)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert all(
        b.offset % GRAIN == 0 and b.size >= b.asked and b.address == hbm.base + b.offset
        for b in live
    )
    del live
    hbm.empty_cache()
    assert hbm.stats()["reserved_bytes.all.current"] == 0
    assert hbm.stats()["allocated_bytes.all.freed"] == hbm.stats()["allocated_bytes.all.allocated"]
    hbm.alloc(1 << 29)


def test_freed_memory_is_reused_warm():
    """The block freed last is the first handed out again."""
    hbm = HBM(64 * MIB)
    a = hbm.alloc(100_000)
    first = a.address
    del a
    assert hbm.alloc(100_000).address == first


def test_out_of_memory_tells_and_recovers():
    """The error carries what was asked, free and held; after freeing, the same request succeeds."""
    hbm = HBM(64 * MIB)
    held = [hbm.alloc(20 * MIB), hbm.alloc(20 * MIB)]
    with pytest.raises(OutOfHBM) as e:
        hbm.alloc(40 * MIB)
    assert e.value.asked == 40 * MIB and e.value.held == 40 * MIB and e.value.free == 24 * MIB
    del e
    held.pop()
    assert hbm.alloc(40 * MIB).size == 40 * MIB
    assert hbm.stats()["num_ooms"] == 1


def test_fragments_merge():
    """Small free neighbours become one large block when nothing else fits."""
    hbm = HBM(4 * MIB)
    parts = [hbm.alloc(MIB // 2) for _ in range(8)]
    del parts
    assert hbm.alloc(2 * MIB).size == 2 * MIB


def test_a_block_may_be_freed_by_the_collector_inside_alloc():
    """A finalizer takes no lock: garbage collected during `alloc` cannot deadlock it."""
    hbm = HBM(64 * MIB)

    class Cycle:
        pass

    old = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            c = Cycle()
            c.me, c.block = c, hbm.alloc(1000)
    finally:
        gc.set_threshold(*old)
    gc.collect()
    del c
    gc.collect()
    assert hbm.stats()["allocation.all.current"] == 0


def test_threads():
    """Threads allocate and free at once; nothing is lost."""
    hbm = HBM(256 * MIB)

    def work():
        for k in range(500):
            hbm.alloc(1000 + k)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    stats = hbm.stats()
    assert stats["allocation.all.current"] == 0 and stats["allocation.all.allocated"] == 2000


def test_size_classes():
    """Below 16 MiB sizes are rounded to a class, above only to the alignment."""
    assert size_class(1) == GRAIN and size_class(GRAIN + 1) == 2 * GRAIN
    assert size_class(MIB + 1) == MIB + (1 << 17)
    assert size_class(16 * MIB + 1) == 16 * MIB + GRAIN


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"partitions": 0}, "partitions"),
        ({"hbm_bytes": -1}, "hbm_bytes"),
        ({"psum_bytes": 129}, "psum_bytes"),
    ],
)
def test_specs_that_cannot_work_are_refused(change, word):
    """The error names the field."""
    with pytest.raises(ValueError, match=word):
        TRN2.replace(**change)


def test_unknown_spec_fields_are_refused():
    """A misspelt field is named, with those that exist."""
    with pytest.raises(TypeError, match="sbuf_byte'.*sbuf_bytes"):
        TRN2.replace(sbuf_byte=1)
