"""What a chip is, as data: the numbers that capacity, cost and clock are computed from.

Each number names its unit and the page of AWS's Neuron documentation that it comes from, or the
published measurement, or says that it is assumed. Where pages disagree both values are noted. Pages:
*arch guide* is nki/guides/architecture/trainium2_arch or trainium3_arch; *bandwidth guide* is
nki/deep-dives/nki-dma-bandwidth-guide; *isa* is the cost table of nki.isa at release 2.26.1, the last
that printed cycles; *product page* is about-neuron/arch/neuron-hardware/trainium2 or trainium3.

A spec is one *logical* core: `lnc` physical cores that share its HBM and split each launch. Sizes and
rates of SBUF, PSUM, engines, DMA and HBM bandwidth are those of one physical core.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ChipSpec:
    """One logical NeuronCore and the HBM that it can use. Times are ns, rates are per ns."""

    name: str
    """How reports and errors call it."""
    hbm_bytes: int
    """Bytes of HBM of the logical core: its share of the chip's 96 GiB (trn2) or 144 GiB (trn3)."""
    sbuf_bytes: int
    """Bytes of SBUF: 28 MiB (trn2), 32 MiB (trn3). Arch guide."""
    psum_bytes: int
    """Bytes of PSUM: 2 MiB. Arch guide."""
    hbm_bytes_per_ns: float
    """Peak bytes/ns of a physical core's eighth of HBM. Product page: 2.9 TB/s (trn2), 4.9 TB/s
    (trn3); the arch guides say 3 and 4.7. The product pages' values are taken."""
    dma_bytes_per_ns: float
    """Bytes/ns that one DMA engine reaches: 23 (trn2), 33 (trn3). Bandwidth guide."""
    dma_peak_bytes_per_ns: float
    """Bytes/ns of one DMA engine in theory: 27.2 (trn2), 38.4 (trn3). nki-dma-overview."""
    vector_ghz: float
    """Clock of the Vector engine: 0.96 (trn2), 1.2 (trn3). Arch guide."""
    lnc: int = 2
    """Physical cores of the logical core, 1 or 2. 2 is trn2's default (logical-neuroncore-config)."""
    partitions: int = 128
    """Partitions of SBUF and of PSUM. Arch guide."""
    psum_banks: int = 8
    """Banks of each PSUM partition, 2 KiB or 512 float32 each. Arch guide."""
    dma_engines: int = 16
    """DMA engines of a physical core; each serves an equal share of the partitions. Arch guide."""
    dma_start_ns: float = 1300.0
    """From semaphore to the first byte of a transfer. Bandwidth guide."""
    dma_issue_ns: float = 600.0
    """Time that a descriptor generation engine needs to issue one transfer. nki-dge."""
    dma_issuers: int = 2
    """Hardware descriptor generation engines of a physical core. nki-dge."""
    dma_run_bytes: int = 256
    """Overhead of each contiguous run, in bytes that could have moved meanwhile: runs below 256 bytes
    spend most of their time in it, those of 2 KiB come near the peak and 4 KiB saturate. Bandwidth
    guide, in words; the number that says so in a formula is ours."""
    tensor_ghz: float = 2.4
    """Clock of the Tensor engine. Arch guide."""
    scalar_ghz: float = 1.2
    """Clock of the Scalar engine. Arch guide."""
    gpsimd_ghz: float = 1.2
    """Clock of the GpSimd engine. Arch guide."""
    scalar_narrow: int = 1
    """Elements of 8 or 16 bits that a lane of the Scalar engine takes a cycle: 1 (trn2), 2 (trn3).
    Arch guide."""
    min_cycles: int = 64
    """Engine cycles between the starts of two instructions, at least (MIN_II). isa."""
    access_cycles: int = 60
    """Engine cycles until an access to on-chip memory starts; an instruction reads, then writes.
    trainium_inferentia2_arch."""
    dependent_cycles: int = 100
    """Engine cycles more for an instruction that waits for the one before it. nki_perf_guide."""
    tensor_stationary: int = 128
    """Rows and columns of the matrix that the Tensor engine holds. tile_size."""
    tensor_moving: int = 512
    """Columns that stream past it in one instruction. tile_size."""
    launch_ns: float = 55_000.0
    """Of one kernel launch beside its work. No page has it: users of the beta measured 55-65 µs for
    each op of eager code (xpu-perf notes). The lower end, for the work itself is counted apart."""
    graph_call_ns: float = 97_500.0
    """Least time from call to call of one compiled graph. Measured by the same users: 95-100 µs."""
    host_bytes_per_ns: float = 32.0
    """Bytes/ns between host and HBM. Assumed, no page has it: PCIe 5.0 with eight lanes."""
    host_start_ns: float = 15_000.0
    """Of one copy between host and HBM beside its bytes. Assumed, no page has it."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"ChipSpec.name must be a name, got {self.name!r}")
        for field in dataclasses.fields(self)[1:]:
            object.__setattr__(self, field.name, _number(field, getattr(self, field.name)))
        _check(self)

    # -- derived ------------------------------------------------------------------------------

    @property
    def sbuf_partition_bytes(self) -> int:
        """Bytes of SBUF in one partition."""
        return self.sbuf_bytes // self.partitions

    @property
    def psum_partition_bytes(self) -> int:
        """Bytes of PSUM in one partition."""
        return self.psum_bytes // self.partitions

    @property
    def psum_bank_bytes(self) -> int:
        """Bytes of one PSUM bank in one partition."""
        return self.psum_partition_bytes // self.psum_banks

    @property
    def stream_bytes_per_ns(self) -> float:
        """Bytes/ns between HBM and SBUF at best: what all DMA engines reach, or HBM's own peak, of
        which a stream is taken to lose as much as a DMA engine loses of its own."""
        reached = self.dma_bytes_per_ns / self.dma_peak_bytes_per_ns
        return min(self.dma_engines * self.dma_bytes_per_ns, self.hbm_bytes_per_ns * reached)

    # -- other specs --------------------------------------------------------------------------

    def replace(self, **changes: object) -> ChipSpec:
        """A copy with other values.

        Raises:
            TypeError: for a name that is no field, or a value of another type, naming the field.
            ValueError: for values that can't work, naming the field.
        """
        _known(changes)
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def to_toml(self) -> str:
        """The spec as a TOML document."""
        rows = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            rows.append(f"{f.name} = {_quoted(value) if isinstance(value, str) else repr(value)}")
        return "\n".join([*rows, ""])

    @classmethod
    def from_toml(cls, text: str) -> ChipSpec:
        """The inverse of `to_toml`. A document may name a known spec as `base` and give changes only.

        Raises:
            ValueError: for text that is no TOML, an unknown base, or values that can't work.
            TypeError: for an unknown or missing field, or a value of another type.
        """
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            raise ValueError(f"not a chip spec in TOML: {e}") from None
        base = values.pop("base", None)
        if base is not None:
            return named(str(base)).replace(**values)
        _known(values)
        missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = [name for name in missing if name not in values]
        if missing:
            raise TypeError(f"a chip spec without `base` needs {', '.join(missing)}")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write `to_toml` to a file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ChipSpec:
        """Read what `save` wrote, or a file with `base` and changes.

        Raises:
            OSError: when the file can't be read.
            TypeError, ValueError: as `from_toml`, naming the file.
        """
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except (TypeError, ValueError) as e:
            raise type(e)(f"{path}: {e}") from None


def _known(values: dict[str, Any] | dict[str, object]) -> None:
    known = [f.name for f in dataclasses.fields(ChipSpec)]
    for name in values:
        if name not in known:
            raise TypeError(f"ChipSpec has no field {name!r}; it has {', '.join(known)}")


def _number(field: dataclasses.Field[Any], value: object) -> int | float:
    """A field's value in its type, positive and finite."""
    where = f"ChipSpec.{field.name}"
    if field.type == "int":
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{where} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{where} must be at least 1, got {value}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{where} must be a number, got {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{where} must be positive and finite, got {value!r}")
    return float(value)


LEAST_PARTITION_BYTES = 4096
"""Bytes of SBUF in a partition that any single op can run in, one element at a time."""


def _check(s: ChipSpec) -> None:
    """What fields must be to each other."""
    if s.lnc not in (1, 2):
        raise ValueError(f"ChipSpec.lnc must be 1 or 2, got {s.lnc}: no chip merges more cores")
    if s.partitions > 128 or s.partitions % 32:
        raise ValueError(
            f"ChipSpec.partitions must be 32, 64, 96 or 128, got {s.partitions}: "
            "engines start at multiples of 32"
        )
    if s.sbuf_bytes % s.partitions:
        raise ValueError(
            f"ChipSpec.sbuf_bytes must divide into {s.partitions} partitions, got {s.sbuf_bytes}"
        )
    if s.sbuf_partition_bytes < LEAST_PARTITION_BYTES:
        raise ValueError(
            f"ChipSpec.sbuf_bytes must be at least {LEAST_PARTITION_BYTES * s.partitions}, "
            f"{LEAST_PARTITION_BYTES} a partition, got {s.sbuf_bytes}"
        )
    if s.psum_bytes % (s.partitions * s.psum_banks):
        raise ValueError(
            f"ChipSpec.psum_bytes must divide into {s.partitions} partitions of "
            f"{s.psum_banks} banks, got {s.psum_bytes}"
        )
    if s.psum_bank_bytes != 4 * s.tensor_moving:
        raise ValueError(
            f"ChipSpec.psum_bytes must be {s.partitions} partitions of {s.psum_banks} banks of "
            f"{4 * s.tensor_moving} bytes, what one matrix instruction writes, got {s.psum_bytes}"
        )
    if s.dma_bytes_per_ns > s.dma_peak_bytes_per_ns:
        raise ValueError(
            f"ChipSpec.dma_bytes_per_ns must not pass dma_peak_bytes_per_ns, "
            f"{s.dma_peak_bytes_per_ns}, got {s.dma_bytes_per_ns}"
        )


def _quoted(text: str) -> str:
    """A TOML basic string."""
    body = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in body) + '"'


GIB, MIB = 1 << 30, 1 << 20
TRN2 = ChipSpec(
    "TRN2",
    hbm_bytes=24 * GIB,
    sbuf_bytes=28 * MIB,
    psum_bytes=2 * MIB,
    hbm_bytes_per_ns=2900 / 8,
    dma_bytes_per_ns=23.0,
    dma_peak_bytes_per_ns=27.2,
    vector_ghz=0.96,
)
"""Trainium2 as users see it: two of the chip's eight physical cores as one, with a quarter of its HBM."""
TRN2_LNC1 = TRN2.replace(name="TRN2-LNC1", lnc=1, hbm_bytes=12 * GIB)
"""Trainium2 with each physical core on its own."""
TRN3 = TRN2.replace(
    name="TRN3",
    hbm_bytes=36 * GIB,
    sbuf_bytes=32 * MIB,
    hbm_bytes_per_ns=4900 / 8,
    dma_bytes_per_ns=33.0,
    dma_peak_bytes_per_ns=38.4,
    vector_ghz=1.2,
    scalar_narrow=2,
)
"""Trainium3: two of eight physical cores as one."""
TRN3_LNC1 = TRN3.replace(name="TRN3-LNC1", lnc=1, hbm_bytes=18 * GIB)
"""Trainium3 with each physical core on its own."""
SPECS = {spec.name: spec for spec in (TRN2, TRN2_LNC1, TRN3, TRN3_LNC1)}


def named(name: str) -> ChipSpec:
    """A known spec by its name, or the one in a `.toml` file.

    Raises:
        ValueError: for a name that is neither; it lists the known ones.
        OSError, TypeError: as `ChipSpec.load`.
    """
    if name.endswith(".toml"):
        return ChipSpec.load(name)
    found = SPECS.get(name.upper())
    if found is None:
        raise ValueError(
            f"no chip is called {name!r}; known are {', '.join(SPECS)}, or give a .toml file"
        )
    return found
