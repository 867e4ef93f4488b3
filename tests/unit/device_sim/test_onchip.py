"""On-chip memory refuses what hardware refuses; planned places never overlap."""

import numpy as np
import pytest
from adaptive_eager.device_sim.onchip import OnChipError, Places, check_partitions, psum, sbuf
from adaptive_eager.device_sim.spec import TRN2
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(-2, 140), st.integers(-2, 140))
def test_start_partition_rule(start, count):
    """More than 64 partitions start at 0, more than 32 at 0 or 64, others at a multiple of 32."""
    legal = {n: {0} for n in range(65, 129)}
    legal |= {n: {0, 64} for n in range(33, 65)} | {n: {0, 32, 64, 96} for n in range(1, 33)}
    if start in legal.get(count, ()):
        check_partitions(start, count)
    else:
        with pytest.raises(OnChipError):
            check_partitions(start, count)


def test_tiles_share_the_memory_and_nothing_else():
    """A tile's bytes are the memory's; fresh ones are NaN; a place in use is refused, a freed one is not."""
    memory = sbuf(TRN2)
    x = memory.place(64, 256, 128)
    assert np.isnan(x.view(np.float32, 64)).all()
    x.view(np.float32, 64)[...] = 1.5
    assert memory.data[3, 64:68].view(np.float32)[0] == 1.5
    with pytest.raises(OnChipError, match="SBUF: 4 bytes at 300: 256 at 64 are in use"):
        memory.place(300, 4, 32)
    memory.free(x)
    assert np.isnan(memory.place(300, 4, 32).view(np.float32, 1)).all()
    assert memory.peak == 320


def test_other_partitions_are_free():
    """Tiles in different partitions may have the same bytes."""
    memory = sbuf(TRN2)
    memory.place(0, 100, 32, start=0)
    memory.place(0, 100, 32, start=32)
    with pytest.raises(OnChipError, match="in use"):
        memory.place(0, 100, 128)


@pytest.mark.parametrize(
    ("offset", "nbytes", "word"),
    [(TRN2.sbuf_partition_bytes, 1, "of 229376 in a partition"), (-4, 4, "bytes at -4")],
)
def test_tiles_past_the_end_are_refused(offset, nbytes, word):
    """The error names the memory and the size of a partition."""
    with pytest.raises(OnChipError, match=word):
        sbuf(TRN2).place(offset, nbytes, 128)


def test_psum_tiles_stay_in_a_bank():
    """A bank holds 512 float32; a tile across two is refused."""
    memory = psum(TRN2)
    memory.place(0, 2048, 128)
    memory.place(2048, 2048, 128)
    with pytest.raises(OnChipError, match="cross a bank of 2048"):
        memory.place(6000, 300, 128)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_places(trace):
    """Places of tiles that live at the same time never overlap, and `high` is the end of the highest."""
    places, live, high = Places(96), {}, 96
    for take, n in trace:
        if take or not live:
            at = places.take(n)
            assert at >= 96 and at % Places.ALIGN == 0
            assert all(at + max(n, 1) <= o or o + max(m, 1) <= at for o, m in live.items())
            live[at] = n
            high = max(high, at + n)
        else:
            at = sorted(live)[n % len(live)]
            places.give(at, live.pop(at))
    assert places.high == high
