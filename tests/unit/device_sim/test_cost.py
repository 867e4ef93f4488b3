"""Costs follow the rules they are made of, and published measurements."""

import subprocess
import sys

import pytest
from adaptive_eager.device_sim.clock import Clock
from adaptive_eager.device_sim.engines import ENGINES, KINDS, Instruction, span
from adaptive_eager.device_sim.fidelity import CALL, FLOOR, WITHIN, pairs, table
from adaptive_eager.device_sim.spec import TRN2, TRN2_LNC1, TRN3
from adaptive_eager.device_sim.work import Transfer, Work, copy_ns, cost, matmul, stream
from hypothesis import given
from hypothesis import strategies as st

SEQUENCES = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 3000), st.sampled_from([1, 2, 4]),
              st.integers(0, 3), st.integers(1, 4)),
    min_size=1, max_size=12,
).map(lambda rows: [
    Instruction(kind, n, size, tuple({k - back} if back and k >= back else ()), times)
    for k, (kind, n, size, back, times) in enumerate(rows)
])  # fmt: skip


@given(SEQUENCES)
def test_a_sequence_takes_as_long_as_its_busiest_engine_or_its_chains(sequence):
    """No engine works longer than the whole takes, and the whole no longer than one after another."""
    ns, busy = span(sequence, TRN2)
    assert max(busy.values()) <= ns
    alone = sum(
        span([Instruction(i.kind, i.n, i.itemsize, (), i.times)], TRN2)[0] for i in sequence
    )
    waits = TRN2.dependent_cycles / TRN2.vector_ghz * len(sequence)
    assert ns <= alone + waits + 1e-6


def test_independent_instructions_overlap_and_dependent_ones_wait():
    """Two engines work side by side; a chain pays for the access and the wait at each step."""
    vector, scalar = Instruction("tensor_copy", 900, 4), Instruction("activation", 900, 4)
    together, _ = span([vector, scalar], TRN2)
    chain, _ = span([vector, Instruction("activation", 900, 4, (0,))], TRN2)
    assert together == max(span([vector], TRN2)[0], span([scalar], TRN2)[0])
    assert chain > span([vector], TRN2)[0] + span([scalar], TRN2)[0]


def test_kinds_name_engines_and_reasons():
    """Every kind of instruction has an engine that a spec gives a clock, and says where its cycles come from."""
    for kind in KINDS.values():
        assert kind.engine in ENGINES and kind.why


@given(st.integers(1, 1 << 22), st.sampled_from([2, 4]))
def test_more_bytes_or_slower_memory_never_take_less(n, size):
    """Time grows with bytes, and with every rate that a spec lowers."""
    work, more = (stream(m * size, m * size, m, size, TRN2) for m in (n, 2 * n))
    ns = cost(work, TRN2).ns
    assert cost(more, TRN2).ns >= ns * 0.999
    assert cost(work, TRN2.replace(hbm_bytes_per_ns=30.0)).ns >= ns
    assert cost(work, TRN2.replace(dma_start_ns=9000.0)).ns >= ns
    assert cost(work, TRN2.replace(launch_ns=90_000.0)).ns == pytest.approx(ns + 35_000)
    assert cost(work, TRN3).ns <= ns
    assert work.read == work.written == n * size


def test_two_buffers_hide_the_shorter_of_transfer_and_compute():
    """With one buffer they follow each other."""
    work = pairs(8, 1 << 20, 2)
    single = Work(work.passes, work.transfers, work.body, double=False)
    assert cost(single, TRN2).ns > cost(work, TRN2).ns


def test_logical_cores_share_the_tiles():
    """Two cores take about half as long beside the launch, one tile takes as long as ever."""
    many, one = pairs(8, 1 << 22, 2), pairs(8, 1 << 10, 2)
    two, alone = (cost(many, s).ns - s.launch_ns for s in (TRN2, TRN2_LNC1))
    assert 1.8 < alone / two < 2.2
    assert cost(one, TRN2).ns == cost(one, TRN2_LNC1).ns


def test_short_runs_cost_bandwidth():
    """Runs of 4 KiB saturate, 256 bytes reach half, 4 bytes next to nothing; few partitions use few engines."""

    def rate(run, partitions=128):
        return (1 << 20) / Transfer(1 << 20, run, partitions, False, 1).ns(TRN2)

    best = TRN2.stream_bytes_per_ns
    assert rate(4096) > 0.9 * best and rate(2048) > 0.85 * best
    assert rate(256) == pytest.approx(best / 2) and rate(4) < 0.02 * best
    assert rate(4096, 8) == pytest.approx(23 * 4096 / 4352)


def test_a_product_is_bound_by_the_tensor_engine():
    """A large bf16 product reaches most of the documented 79 TFLOPS a core; float32 a quarter of it."""
    for size, peak in ((2, 78.6e12), (4, 78.6e12 / 4)):
        work = matmul(4096, 4096, 4096, 1, size, TRN2_LNC1)
        seconds = (cost(work, TRN2_LNC1).ns - TRN2.launch_ns) / 1e9
        assert 0.8 < 2 * 4096**3 / seconds / peak <= 1.0


def test_copies_to_the_host_have_a_start_and_a_rate():
    """Two copies cost one start more than one of the same bytes."""
    assert 2 * copy_ns(1 << 20, TRN2) - copy_ns(2 << 20, TRN2) == pytest.approx(TRN2.host_start_ns)


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0].what)
def test_published_measurements(row):
    """Within 15 % of what was published, or the row says why not."""
    what, _, ratio = row
    assert abs(ratio - 1) <= WITHIN or what.note, what


def test_at_most_two_measurements_set_constants():
    """All other rows are predictions, and only one of them is off."""
    notes = [row.note for row, _, _ in table()]
    assert sum(note in (FLOOR, CALL) for note in notes) == 2
    assert sum(abs(ratio - 1) > WITHIN for _, _, ratio in table()) <= 1


def test_the_table_prints():
    """`python -m adaptive_eager.device_sim.fidelity` has a line for each measurement."""
    out = subprocess.run(
        [sys.executable, "-m", "adaptive_eager.device_sim.fidelity"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert [line[:20].strip() for line in out[1:]][: len(table())] == [
        row.what[:20].strip() for row, _, _ in table()
    ]


def test_the_clock_orders_streams_by_events():
    """Streams share one queue; an event is a moment of its stream, and waiting for it moves another."""
    clock = Clock()
    assert clock.run(100) == 0
    begin = clock.record()
    assert clock.run(50, stream=1) == 100
    done = clock.record(1)
    assert clock.record(0).ns == 100 and done.ns == 150
    assert begin.elapsed(done) == pytest.approx(50e-6)
    clock.wait(done, stream=2)
    assert clock.record(2).ns == 150 and clock.synchronize() == 150
