"""What a chip is, as data.

Every number names its unit and the page of AWS's Neuron documentation that it comes from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChipSpec:
    """One NeuronCore and the HBM that it can use."""

    name: str
    """How reports and errors call it."""
    hbm_bytes: int
    """Bytes of HBM of one logical core of two physical ones, the default (LNC=2): a quarter of the
    chip's (NKI architecture guides, trainium2_arch and trainium3_arch)."""
    sbuf_bytes: int
    """Bytes of SBUF of one physical core (trainium2_arch, trainium3_arch)."""
    psum_bytes: int
    """Bytes of PSUM of one physical core (trainium2_arch, trainium3_arch)."""
    psum_banks: int = 8
    """Banks of each PSUM partition, 2 KiB or 512 float32 each (trainium2_arch, trainium3_arch)."""
    partitions: int = 128
    """Partitions of SBUF and of PSUM (trainium2_arch, trainium3_arch)."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"ChipSpec.name must be a name, got {self.name!r}")
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"ChipSpec.{field.name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"ChipSpec.{field.name} must be at least 1, got {value}")
        if self.sbuf_bytes % self.partitions:
            raise ValueError(
                f"ChipSpec.sbuf_bytes must divide into {self.partitions} partitions, "
                f"got {self.sbuf_bytes}"
            )
        if self.psum_bytes % (self.partitions * self.psum_banks):
            raise ValueError(
                f"ChipSpec.psum_bytes must divide into {self.partitions} partitions of "
                f"{self.psum_banks} banks, got {self.psum_bytes}"
            )

    def replace(self, **changes: object) -> ChipSpec:
        """A copy with other values.

        Raises:
            TypeError: for a name that is no field, or a value of another type, naming the field.
            ValueError: for values that can't work, naming the field.
        """
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise TypeError(f"ChipSpec has no field {name!r}; it has {', '.join(known)}")
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


TRN2 = ChipSpec("TRN2", hbm_bytes=24 << 30, sbuf_bytes=28 << 20, psum_bytes=2 << 20)
"""Trainium2: a chip has 96 GiB and 8 physical cores."""
TRN3 = ChipSpec("TRN3", hbm_bytes=36 << 30, sbuf_bytes=32 << 20, psum_bytes=2 << 20)
"""Trainium3: a chip has 144 GiB and 8 physical cores."""
