"""The HBM allocator against a straightforward reference, on generated traces, and where it could go wrong."""

import copy
import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref

import pytest
from adaptive_eager.device_sim.hbm import GRAIN, HBM, LARGE, UNROUNDED, OutOfHBM, size_class
from hypothesis import given
from hypothesis import strategies as st

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.one_of(
    st.integers(0, 5000),
    st.integers(0, 3 * MIB),
    st.sampled_from([MIB, MIB - 1, 10 * MIB, 16 * MIB, 16 * MIB + 7, 40 * MIB]),
)
STEPS = st.one_of(
    st.tuples(st.just("alloc"), SIZES),
    st.tuples(st.just("adopt"), SIZES),
    st.tuples(st.just("free"), st.integers(0, 50)),
    st.tuples(st.just("empty_cache"), st.none()),
    st.tuples(st.just("reset"), st.none()),
)
# Not a multiple of any segment, and less than some traces ask for.
CAPACITY = 96 * MIB + 3 * KIB


class Reference:
    """What the counters must say, and what each live block holds."""

    def __init__(self):
        self.live = []
        self.peak = 0
        self.allocated = self.freed = 0

    def add(self, block):
        mark = (len(self.live) * 37 + block.size) % 251 + 1
        self.live.append((block, mark))
        self.allocated += block.size
        self.peak = max(self.peak, self.held)

    def remove(self, at):
        block, _ = self.live.pop(at)
        self.freed += block.size

    @property
    def held(self):
        return sum(b.size for b, _ in self.live)

    def check(self, hbm):
        stats = hbm.stats()
        blocks = [b for b, _ in self.live]
        assert stats["allocated_bytes.all.current"] == self.held
        assert stats["allocated_bytes.all.peak"] == self.peak
        assert stats["allocated_bytes.all.allocated"] == self.allocated
        assert stats["allocated_bytes.all.freed"] == self.freed
        assert stats["requested_bytes.all.current"] == sum(b.asked for b in blocks)
        assert stats["allocation.all.current"] == len(blocks)
        reserved = stats["reserved_bytes.all.current"]
        assert hbm.capacity >= reserved >= self.held >= stats["active_bytes.all.current"]
        spans = sorted((b.offset, b.offset + b.size) for b in blocks)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        assert not spans or (spans[0][0] >= 0 and spans[-1][1] <= hbm.capacity)
        for b in blocks:
            assert b.offset % GRAIN == 0 and b.address % 64 == 0
            assert b.address == hbm.base + b.offset and b.size == size_class(b.asked)


@given(st.lists(STEPS, max_size=60))
def test_traces(trace):
    """No two live blocks overlap, none loses its bytes, all are aligned, and the counters are the sums over live blocks;
    a request fails only if no free range has room for it."""
    hbm = HBM(CAPACITY)
    reference = Reference()
    for step, n in trace:
        if step in {"alloc", "adopt"}:
            try:
                block = getattr(hbm, step)(n)
            except OutOfHBM as e:
                assert largest_gap(hbm, reference) == e.largest < size_class(n)
                assert e.free == hbm.capacity - reference.held and e.held == reference.held
                continue
            reference.add(block)
            if step == "alloc":  # both ends carry a mark
                ctypes.memset(block.address, reference.live[-1][1], 64)
                ctypes.memset(block.address + block.size - 64, reference.live[-1][1], 64)
            else:
                reference.live[-1] = (block, None)
            del block
        elif step == "free" and reference.live:
            reference.remove(n % len(reference.live))
        elif step == "empty_cache":
            hbm.empty_cache()
        elif step == "reset":
            hbm.reset_peak_stats()
            hbm.reset_accumulated_stats()
            reference.peak, reference.allocated, reference.freed = reference.held, 0, 0
        reference.check(hbm)
    for block, mark in reference.live:
        if mark:
            assert ctypes.string_at(block.address, 1)[0] == mark
            assert ctypes.string_at(block.address + block.size - 1, 1)[0] == mark
    block = None
    reference.live.clear()
    hbm.empty_cache()
    assert hbm.stats()["reserved_bytes.all.current"] == 0
    assert hbm.stats()["segment.all.current"] == 0
    assert hbm.alloc(CAPACITY).size == CAPACITY  # one range again


def largest_gap(hbm, reference):
    """Bytes of the largest range that no live block covers."""
    spans = sorted((b.offset, b.offset + b.size) for b, _ in reference.live)
    edges = [(0, 0), *spans, (hbm.capacity, hbm.capacity)]
    return max(b[0] - a[1] for a, b in zip(edges, edges[1:], strict=False))


@pytest.mark.parametrize("nbytes", [1, 100_000, 3 * MIB, 40 * MIB])
def test_freed_memory_is_reused_warm(nbytes):
    """The block of a size that was freed last is the first handed out again."""
    hbm = HBM(256 * MIB)
    a, b = hbm.alloc(nbytes), hbm.alloc(nbytes)
    first, second = a.address, b.address
    del b
    del a
    assert hbm.alloc(nbytes).address == first
    c, d = hbm.alloc(nbytes), hbm.alloc(nbytes)
    assert (c.address, d.address) == (first, second)


def test_adopted_memory_takes_no_warm_block():
    """Adopting counts and reserves, but leaves the block that was freed last to the next allocation."""
    hbm = HBM(256 * MIB)
    a = hbm.alloc(100_000)
    first = a.address
    del a
    foreign = hbm.adopt(100_000)
    assert foreign.address != first and hbm.alloc(100_000).address == first
    foreign.address = 12345
    assert hbm.stats()["allocated_bytes.all.current"] == foreign.size
    del foreign
    assert hbm.stats()["allocated_bytes.all.current"] == 0


def test_out_of_memory_tells_and_recovers():
    """The error carries what was asked, free, held; after freeing, the same request succeeds."""
    hbm = HBM(64 * MIB)
    held = [hbm.alloc(20 * MIB), hbm.alloc(20 * MIB)]
    with pytest.raises(OutOfHBM, match=f"asked for {40 * MIB} bytes") as e:
        hbm.alloc(40 * MIB)
    error = e.value
    assert isinstance(error, MemoryError)
    assert (error.asked, error.held, error.capacity) == (40 * MIB, 40 * MIB, 64 * MIB)
    assert error.free == error.largest == 24 * MIB
    del e, error
    held.pop()
    assert hbm.alloc(40 * MIB).size == 40 * MIB
    stats = hbm.stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 2)


def test_the_error_can_be_pickled():
    """An error raised in another process arrives with its numbers."""
    error = copy.copy(OutOfHBM(1, 2, 3, 4, 5))
    assert (error.asked, error.free, error.largest, error.held, error.capacity) == (1, 2, 3, 4, 5)


def test_a_full_pool_leaves_room_to_the_other():
    """What one pool has reserved and does not use serves a request of the other."""
    hbm = HBM(32 * MIB)
    large = hbm.alloc(MIB)  # its segment takes all
    assert hbm.alloc(KIB).size == KIB
    assert hbm.alloc(8 * MIB).size == 8 * MIB
    del large
    assert hbm.alloc(32 * MIB).size == 32 * MIB


def test_fragments_merge():
    """Small free neighbours become one large block when nothing else fits."""
    hbm = HBM(4 * MIB)
    parts = [hbm.alloc(MIB // 2) for _ in range(8)]
    del parts
    assert hbm.alloc(2 * MIB).size == 2 * MIB


def test_empty_cache_leaves_live_neighbours_alone():
    """Pages that a free range shares with a live block keep their bytes."""
    hbm = HBM(2 * MIB + 2 * mmap.PAGESIZE)
    fill = [hbm.alloc(MIB), hbm.alloc(MIB)]
    blocks = [hbm.alloc(GRAIN) for _ in range(10)]
    for b in blocks:
        ctypes.memset(b.address, 7, GRAIN)
    del blocks[::3]
    hbm.empty_cache()
    assert all(ctypes.string_at(b.address, GRAIN) == b"\7" * GRAIN for b in blocks)
    assert len(fill) == 2


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="counts resident pages")
def test_only_touched_pages_cost_memory():
    """A large arena costs nothing until it is written, and `empty_cache` gives pages back."""

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * mmap.PAGESIZE

    before = resident()
    hbm = HBM(1 << 34)
    block = hbm.alloc(1 << 33)
    assert resident() - before < 32 * MIB
    ctypes.memset(block.address, 1, 64 * MIB)
    assert resident() - before > 60 * MIB
    del block
    hbm.empty_cache()
    assert resident() - before < 32 * MIB


def test_blocks_keep_the_arena_alive():
    """A block may outlive the allocator; its bytes stay mapped."""
    hbm = HBM(4 * MIB)
    block, known = hbm.alloc(1000), weakref.ref(hbm)
    del hbm
    gc.collect()
    assert known() is None
    ctypes.memset(block.address, 5, 1000)
    assert ctypes.string_at(block.address, 1) == b"\5"


def test_blocks_cannot_be_copied():
    """A copy would free the range twice."""
    with pytest.raises(TypeError, match="owns its range"):
        copy.copy(HBM(4 * MIB).alloc(1))


def test_a_block_may_be_freed_by_the_collector_inside_alloc():
    """A finalizer takes no lock: garbage collected during `alloc` cannot deadlock it."""
    hbm = HBM(64 * MIB)

    class Cycle:
        pass

    old = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for k in range(500):
            c = Cycle()
            c.me, c.block = c, hbm.alloc(1000 + k * 64)
    finally:
        gc.set_threshold(*old)
    del c
    gc.collect()
    assert hbm.stats()["allocation.all.current"] == 0


def test_a_finalizer_that_interrupts_the_allocator_gets_an_error(monkeypatch):
    """Asking for HBM inside the allocator, on its own thread, raises instead of waiting for ever; the interrupted request
    goes on."""
    hbm = HBM(64 * MIB)
    seen = []
    find = hbm._find

    def interrupted(*args):
        for call in (lambda: hbm.alloc(1), lambda: hbm.adopt(1)):
            with pytest.raises(RuntimeError, match="interrupted the allocator"):
                call()
        hbm.empty_cache()
        seen.append(hbm.stats()["allocation.all.current"])
        return find(*args)

    monkeypatch.setattr(hbm, "_find", interrupted)
    block = hbm.alloc(1000)
    assert seen == [0] and block.size == 1024


def test_an_interrupted_request_leaves_the_allocator_usable(monkeypatch):
    """Ctrl-C inside `alloc` comes out of it, and the next request is served."""
    hbm = HBM(64 * MIB)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hbm, "_find", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hbm.alloc(1000)
    assert hbm.alloc(1000).size == 1024
    assert hbm.stats()["allocation.all.allocated"] == 1


def test_an_interrupt_while_giving_back_loses_no_range(monkeypatch):
    """Ctrl-C inside `empty_cache` leaves the chunks it had not reached where they were."""
    hbm = HBM(64 * MIB)
    blocks = [hbm.alloc(10 * MIB) for _ in range(4)]
    del blocks
    cut_out, left = hbm._cut_out, [1]

    def interrupt(*args):
        if not left:
            raise KeyboardInterrupt
        cut_out(*args)
        left.pop()

    with monkeypatch.context() as patch:
        patch.setattr(hbm, "_cut_out", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hbm.empty_cache()
    hbm.empty_cache()
    assert hbm.stats()["reserved_bytes.all.current"] <= 10 * MIB  # the one in hand


def test_threads():
    """Threads allocate, write and free at once; nobody sees another's bytes and nothing is lost."""
    hbm = HBM(256 * MIB)
    failures = []

    def work(mark):
        live = []
        for k in range(1500):
            block = hbm.alloc(1000 + k * 512 % 70_000)
            ctypes.memset(block.address, mark, block.size)
            live.append(block)
            if len(live) > 20:
                old = live.pop(k % 20)
                if ctypes.string_at(old.address, old.size) != bytes([mark]) * old.size:
                    failures.append(old)
            if k % 500 == 0:
                hbm.empty_cache()

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(k + 1,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(old)
    assert not failures
    stats = hbm.stats()
    assert stats["allocation.all.current"] == 0 and stats["allocation.all.allocated"] == 6000


FORK = """
import os, threading
from adaptive_eager.device_sim.hbm import HBM
hbm, stop = HBM(64 << 20), []
def work():
    while not stop:
        hbm.alloc(1000); hbm.empty_cache()
thread = threading.Thread(target=work); thread.start()
for _ in range(30):
    child = os.fork()
    if not child:
        hbm.empty_cache()
        os._exit(0 if hbm.alloc(1 << 20).size == 1 << 20 else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.append(1); thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_may_go_on():
    """Forking while another thread is inside the allocator leaves the child a free lock and whole lists."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=60)


REFUSED = """
import resource, warnings
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from adaptive_eager.device_sim.hbm import HBM
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    hbm = HBM(24 << 30)
assert hbm.capacity < (4 << 30) and hbm.alloc(1 << 20).size == 1 << 20
assert "refused" in str(seen[0].message), seen
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_less_hbm_where_the_system_refuses():
    """Under a limit of address space the arena is smaller, and a warning says so."""
    subprocess.run([sys.executable, "-c", REFUSED], check=True, timeout=60)


def test_size_classes():
    """Below 16 MiB sizes are rounded to a class, above only to the alignment."""
    assert size_class(0) == size_class(1) == GRAIN and size_class(GRAIN + 1) == 2 * GRAIN
    assert size_class(LARGE + 1) == LARGE + (1 << 17)
    assert size_class(UNROUNDED + 1) == UNROUNDED + GRAIN


def test_negative_sizes_are_refused():
    """A negative size is an error of the caller, not an allocation."""
    with pytest.raises(ValueError, match="-1 bytes"):
        HBM(MIB).alloc(-1)
