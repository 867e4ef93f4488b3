"""Chip specs refuse what can't work, and say which field and why."""

import pytest
from adaptive_eager.device_sim.spec import TRN2, TRN3, ChipSpec


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"partitions": 0}, ValueError, "partitions must be at least 1, got 0"),
        ({"hbm_bytes": -1}, ValueError, "hbm_bytes must be at least 1, got -1"),
        ({"hbm_bytes": 1.5}, TypeError, "hbm_bytes must be an int, got 1.5"),
        ({"hbm_bytes": True}, TypeError, "hbm_bytes must be an int, got True"),
        ({"sbuf_bytes": 129}, ValueError, "sbuf_bytes must divide into 128 partitions, got 129"),
        ({"psum_bytes": 128}, ValueError, "psum_bytes must divide into .* 8 banks, got 128"),
        ({"name": ""}, TypeError, "name must be a name, got ''"),
        ({"sbuf_byte": 1}, TypeError, "no field 'sbuf_byte'.*sbuf_bytes"),
    ],
)
def test_specs_that_cannot_work_are_refused(change, error, word):
    """The error names the field and the reason."""
    with pytest.raises(error, match=word):
        TRN2.replace(**change)


def test_replace_leaves_the_original():
    """A changed copy differs in the named field only."""
    small = TRN2.replace(hbm_bytes=1 << 20)
    assert isinstance(small, ChipSpec) and small != TRN2
    assert small.replace(hbm_bytes=TRN2.hbm_bytes) == TRN2


@pytest.mark.parametrize("spec", [TRN2, TRN3], ids=lambda spec: spec.name)
def test_documented_geometry(spec):
    """PSUM has eight banks of 2 KiB a partition, on both chips."""
    assert spec.psum_bytes // spec.partitions // spec.psum_banks == 2048
