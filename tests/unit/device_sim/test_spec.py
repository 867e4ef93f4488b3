"""Chip specs refuse what can't work, and say which field and why."""

import dataclasses

import pytest
from adaptive_eager.device_sim.spec import (
    LEAST_PARTITION_BYTES,
    SPECS,
    TRN2,
    TRN2_LNC1,
    TRN3,
    ChipSpec,
    named,
)

SMALL = 128 * LEAST_PARTITION_BYTES


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"partitions": 0}, ValueError, "partitions must be at least 1, got 0"),
        ({"partitions": 100}, ValueError, "partitions must be 32, 64, 96 or 128, got 100"),
        ({"hbm_bytes": -1}, ValueError, "hbm_bytes must be at least 1, got -1"),
        ({"hbm_bytes": 1.5}, TypeError, "hbm_bytes must be an int, got 1.5"),
        ({"hbm_bytes": True}, TypeError, "hbm_bytes must be an int, got True"),
        ({"sbuf_bytes": SMALL + 1}, ValueError, "sbuf_bytes must divide into 128 partitions"),
        ({"sbuf_bytes": SMALL // 2}, ValueError, f"sbuf_bytes must be at least {SMALL}"),
        ({"psum_bytes": 128}, ValueError, "psum_bytes must divide into .* 8 banks, got 128"),
        ({"psum_bytes": 4 << 20}, ValueError, "psum_bytes must be .* 8 banks of 2048 bytes"),
        ({"hbm_bytes_per_ns": -3.0}, ValueError, "hbm_bytes_per_ns must be positive .*-3.0"),
        ({"vector_ghz": 0}, ValueError, "vector_ghz must be positive and finite, got 0"),
        ({"vector_ghz": float("inf")}, ValueError, "vector_ghz must be positive and finite"),
        ({"launch_ns": float("nan")}, ValueError, "launch_ns must be positive and finite"),
        ({"launch_ns": "55"}, TypeError, "launch_ns must be a number, got '55'"),
        ({"dma_bytes_per_ns": 30.0}, ValueError, "must not pass dma_peak_bytes_per_ns, 27.2"),
        ({"lnc": 8}, ValueError, "lnc must be 1 or 2, got 8"),
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


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_documented_geometry(spec):
    """PSUM has eight banks of 2 KiB a partition; a spec survives its TOML form and its name."""
    assert spec.psum_bank_bytes == 2048 and spec.psum_banks == 8
    assert ChipSpec.from_toml(spec.to_toml()) == spec
    assert named(spec.name) is spec


def test_logical_cores():
    """Two physical cores as one have twice the HBM of one; each keeps its own SBUF."""
    assert TRN2.lnc == 2 and TRN2_LNC1.lnc == 1
    assert TRN2.hbm_bytes == 2 * TRN2_LNC1.hbm_bytes
    assert TRN2.sbuf_bytes == TRN2_LNC1.sbuf_bytes


def test_files(tmp_path):
    """A saved spec loads as itself; a file may name a base and give changes; names with quotes survive."""
    path = tmp_path / "mine.toml"
    odd = TRN3.replace(name='a "chip" \\ of\nmine', sbuf_bytes=64 << 20, launch_ns=1.5)
    odd.save(path)
    assert ChipSpec.load(path) == odd == named(str(path))
    path.write_text('base = "TRN3"\nname = "half"\nsbuf_bytes = 16777216\n')
    assert ChipSpec.load(path) == TRN3.replace(name="half", sbuf_bytes=16 << 20)


@pytest.mark.parametrize(
    ("text", "error", "word"),
    [
        ("name = ", ValueError, "not a chip spec in TOML"),
        ('base = "TRN9"', ValueError, "no chip is called 'TRN9'; known are TRN2"),
        ('name = "x"', TypeError, "needs hbm_bytes"),
        ('base = "TRN2"\nsbuf = 3', TypeError, "no field 'sbuf'"),
        ('base = "TRN2"\nlnc = 3', ValueError, "lnc must be 1 or 2"),
    ],
)
def test_files_that_are_no_chip_are_refused(tmp_path, text, error, word):
    """The error names the file, and the field or what is missing."""
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(error, match=f"bad.toml: .*{word}"):
        ChipSpec.load(path)


def test_every_number_is_explained():
    """Each field has a docstring of its own in the source."""
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(ChipSpec)).body[0]
    fields = [f.name for f in dataclasses.fields(ChipSpec)]
    for here, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(here, ast.AnnAssign):
            assert isinstance(after, ast.Expr) and isinstance(after.value.value, str)
            fields.remove(here.target.id)
    assert not fields
