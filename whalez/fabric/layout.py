"""Where everything lies in a slab: the only offset arithmetic of the fabric.

Rule 1: every offset comes from `SlabLayout`; nobody adds to one except by an index of the region's own shape.
Rule 2: no memory is touched here; a layout is equal on all ranks: it is made from the fleet's configuration.

A slab is all that one rank publishes. Its owner writes it, with one exception: the bell lines, the wake counter and the
put counter are written by those who ring. A region starts at a multiple of 4096 bytes, a control word has a 128-byte
line to itself (two cache lines: adjacent-line prefetch), so that no two writers share one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from whalez.errors import ConfigError

MAGIC: Final = int.from_bytes(b"whalezSL", "little")
VERSION: Final = 1
LINE_BYTES: Final = 128
REGION_BYTES: Final = 4096

#: Kinds of doorbell; a kind never serves another.
BELL_LAUNCH: Final = 0
BELL_DISPATCH: Final = 1
BELL_COMBINE: Final = 2
BELL_DATA: Final = 3
BELL_FREE: Final = 4
BELL_KINDS: Final = ("launch", "dispatch", "combine", "data", "free")

#: Copies of the confirmation word: launch n writes word n % WORDS.
WORDS: Final = 4

#: Columns of the region `status`; STATUS_PEER is rank + 1, 0 = waits for nobody.
STATUS_PEER: Final = 0
STATUS_KIND: Final = 1
STATUS_VALUE: Final = 2
STATUS_LAYER: Final = 3
STATUS_WORDS: Final = 8

#: What stands in the first bytes of a slab, written by its owner before it hands out the ticket; `magic` last.
HEADER: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("world", "<u4"),
        ("rank", "<u4"),
        ("line_bytes", "<u4"),
        ("nbytes", "<u8"),
        ("incarnation", "V16"),
        ("spec", "V16"),
    ]
)


class Mapped(Protocol):
    """What a layout needs of a slab to give a view of it."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlabSpec:
    """The numbers a slab is sized by; equal on all ranks. A width of 0 leaves the region empty."""

    world: int  #: ranks
    rows_max: int  #: most rows of one launch of one rank
    hidden: int  #: values of a row
    top_k: int  #: experts of a token; 0 for a model without experts
    segment_rows_max: int  #: most rows of one whale segment
    halo_values: int  #: f32 values of the conv halo: 3 rows of q, k and v before convolution
    package_heads: int  #: KDA heads
    key_dim: int
    value_dim: int
    latent_width: int  #: kv_lora_rank + qk_rope_head_dim

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("world", "rows_max", "hidden") else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{field.name}: expected an integer >= {least}, got {value!r}")

    @classmethod
    def of_bells(cls, world: int) -> SlabSpec:
        """Doorbells, and next to nothing else."""
        return cls(
            world=world,
            rows_max=1,
            hidden=1,
            top_k=0,
            segment_rows_max=0,
            halo_values=0,
            package_heads=0,
            key_dim=0,
            value_dim=0,
            latent_width=0,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """One array of a slab."""

    offset: int  #: bytes from the slab's start
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def _shapes(spec: SlabSpec) -> list[tuple[str, tuple[int, ...], str, int]]:
    """Every region in the order it lies in: name, shape, dtype, alignment in bytes."""
    world, rows = spec.world, spec.rows_max
    heads, key, value = spec.package_heads, spec.key_dim, spec.value_dim
    line, page = LINE_BYTES, REGION_BYTES
    return [
        ("header", (1,), HEADER.str, page),
        ("progress", (1,), "<u8", page),  # raised by the owner after every layer and attention block
        ("launch_count", (1,), "<u8", line),  # launches the owner has begun
        ("wake_counter", (1,), "<u4", line),  # one up per ring to this slab; what sleepers sleep on
        ("sleeper_mark", (1,), "<u4", line),  # owner: 0, or a bit set of what it sleeps for
        ("put_count", (1,), "<u8", line),  # one up per Bells.wake(): something was put into the owner's inbox
        ("status", (STATUS_WORDS,), "<i8", line),  # owner: whom it waits for
        ("words", (WORDS,), "<u8", line),  # owner: confirmation words
        ("bells", (len(BELL_KINDS), world, LINE_BYTES // 8), "<u8", page),  # [kind][sender]; the sender writes word 0
        ("dispatch_count", (1,), "<i8", page),
        ("dispatch_ids", (rows, spec.top_k), "<i4", page),
        ("dispatch_weights", (rows, spec.top_k), "<f4", page),
        ("dispatch_rows", (rows, spec.hidden if spec.top_k else 0), "<f4", page),
        ("combine_offsets", (world + 1,), "<i8", page),
        ("combine_rows", (world * rows, spec.hidden if spec.top_k else 0), "<f4", page),
        ("halo", (spec.halo_values,), "<f4", page),
        ("package_m", (heads, key, key), "<f4", page),
        ("package_d", (heads, key, value), "<f4", page),
        ("latent", (spec.segment_rows_max, spec.latent_width), "<f4", page),
    ]


class SlabLayout:
    """Offsets, shapes and dtypes of one slab.

    nbytes:  size of the slab, a multiple of 4096
    regions: name -> Region, in the order they lie in
    """

    def __init__(self, spec: SlabSpec, regions: Mapping[str, Region], nbytes: int) -> None:
        self.spec = spec
        self.regions: Mapping[str, Region] = MappingProxyType(dict(regions))
        self.nbytes = nbytes

    @classmethod
    def from_spec(cls, spec: SlabSpec) -> SlabLayout:
        """Lay out all regions of `_shapes` one after the other."""
        regions: dict[str, Region] = {}
        end = 0
        for name, shape, code, alignment in _shapes(spec):
            dtype = HEADER if name == "header" else np.dtype(code)
            offset = -(-end // alignment) * alignment
            regions[name] = Region(offset, shape, dtype)
            end = regions[name].end
        nbytes = -(-end // REGION_BYTES) * REGION_BYTES
        if nbytes >= 2**62:
            raise ConfigError(f"slab: expected a size below 2^62 bytes, got {nbytes} from {spec}")
        return cls(spec, regions, nbytes)

    @property
    def world(self) -> int:
        return self.spec.world

    def offset_of(self, name: str) -> int:
        """Bytes from the slab's start to region `name`."""
        return self.regions[name].offset

    def bell_offset(self, kind: int, sender: int) -> int:
        """Bytes from the receiver's slab's start to the u64 that `sender` raises for `kind`."""
        assert 0 <= kind < len(BELL_KINDS), kind
        assert 0 <= sender < self.world, sender
        return self.offset_of("bells") + (kind * self.world + sender) * LINE_BYTES

    def view(self, slab: Mapped, name: str) -> npt.NDArray[Any]:
        """Region `name` of `slab` as an array of its shape and dtype; writes go to the slab."""
        region = self.regions[name]
        return slab.view(region.offset, region.shape, region.dtype)
