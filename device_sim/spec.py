"""What a chip is, as data. Every number names its unit and the page of AWS's Neuron documentation it comes from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChipSpec:
    """One logical NeuronCore."""

    name: str
    hbm_bytes: int
    """Bytes of HBM that one logical core of two physical ones (LNC2) has; user measurements on trn2 give 24 GiB."""
    sbuf_bytes: int
    """Bytes of SBUF of one physical core (NKI, Trainium2/3 architecture)."""
    psum_bytes: int
    """Bytes of PSUM of one physical core (NKI, Trainium2/3 architecture)."""
    partitions: int = 128
    """Partitions of SBUF and PSUM (NKI language guide, `nl.tile_size.pmax`)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"ChipSpec.{field.name} must be at least 1, got {value}")
        for field_name in ("sbuf_bytes", "psum_bytes"):
            if getattr(self, field_name) % self.partitions:
                raise ValueError(
                    f"ChipSpec.{field_name} must divide into {self.partitions} partitions, got {getattr(self, field_name)}"
                )

    def replace(self, **changes: object) -> ChipSpec:
        """A copy with other values.

        Raises:
            TypeError: for a name that is no field.
            ValueError: for values that can't work, naming the field.
        """
        known = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise TypeError(
                    f"ChipSpec has no field {name!r}; it has {', '.join(sorted(known))}"
                )
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


TRN2 = ChipSpec("TRN2", hbm_bytes=24 << 30, sbuf_bytes=28 << 20, psum_bytes=2 << 20)
"""Trainium2: 96 GiB a chip of 8 physical cores (NKI, trainium2_arch)."""
TRN3 = ChipSpec("TRN3", hbm_bytes=36 << 30, sbuf_bytes=32 << 20, psum_bytes=2 << 20)
"""Trainium3: 144 GiB a chip of 8 physical cores (NKI, trainium3_arch)."""
