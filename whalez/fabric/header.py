"""The first bytes of every slab: what the owner claims, and what a peer checks before it believes a ticket.

Rule 1: no memory of a slab is touched here; a provider reads and writes the bytes in its own way.
Rule 2: the same header stands in host and in device memory.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from whalez.errors import FabricError
from whalez.fabric.layout import HEADER, LINE_BYTES, MAGIC, VERSION, SlabLayout
from whalez.rendezvous.messages import SlabEntry


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def make_header(layout: SlabLayout, rank: int, incarnation: str) -> npt.NDArray[Any]:
    """HEADER [1] of the slab of `rank`."""
    header = np.zeros(1, HEADER)
    header["magic"] = MAGIC
    header["version"] = VERSION
    header["world"] = layout.world
    header["rank"] = rank
    header["line_bytes"] = LINE_BYTES
    header["nbytes"] = layout.nbytes
    header["incarnation"] = np.void(_digest(incarnation))
    header["spec"] = np.void(_digest(repr(layout.spec)))
    return header


def check_header(layout: SlabLayout, entry: SlabEntry, header: npt.NDArray[Any]) -> None:
    """Compare HEADER [1], as read from a slab, with the table row that led there. Raises FabricError by field."""
    expected = make_header(layout, entry.rank, entry.incarnation)
    for field in ("magic", "version", "world", "rank", "line_bytes", "nbytes"):
        if header[field][0] != expected[field][0]:
            raise rejected(entry, field, int(expected[field][0]), int(header[field][0]))
    if header["incarnation"].tobytes() != expected["incarnation"].tobytes():
        raise rejected(entry, "incarnation", entry.incarnation, "another")
    if header["spec"].tobytes() != expected["spec"].tobytes():
        raise rejected(entry, "spec", layout.spec, "another of the same size")


def rejected(entry: SlabEntry, field: str, expected: object, got: object) -> FabricError:
    """The error for a claim of a ticket that does not hold."""
    return FabricError(f"ticket of rank {entry.rank} rejected: {field}: expected {expected}, got {got}")
