"""What a slab is to those who use it, whoever made the memory.

Rule 1: `engine`, `parallel` and `model` see these types and never a concrete provider.
Rule 2: a ticket is opaque bytes to all but the provider that made it, and is not trusted by the one that opens it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from whalez.rendezvous.messages import SlabEntry


@runtime_checkable
class Slab(Protocol):
    """One rank's slab, mapped here, in whatever memory. Owns: the mapping. Closed by: the provider that made it."""

    rank: int  #: whose slab it is
    address: int  #: of its first byte in this process; page aligned; dangles after close
    nbytes: int


@runtime_checkable
class ViewableSlab(Slab, Protocol):
    """A slab that this process can look at: host memory. One on a device is used by its address, in kernels."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A C-contiguous array over [offset, offset + size) of the slab. Raises ShapeError when it does not fit."""
        ...


class SlabProvider(Protocol):
    """Makes this rank's slab and maps the peers'.

    Owns:      the own slab's memory and name, and the mapping of every slab
    Closed by: whoever made the provider
    Order:     create, hand out `ticket`, open the peers', barrier, unlink, ..., Bells.close, close
    """

    def create(self) -> Slab:
        """Allocate this rank's slab, zeroed, all of it backed by memory now. Raises FabricError. Collective: no."""
        ...

    @property
    def ticket(self) -> bytes:
        """What lets a peer map the own slab; valid from `create` to `unlink`."""
        ...

    def open(self, entry: SlabEntry) -> Slab:
        """Map a peer's slab from its row of the table; every claim of the ticket is checked. Raises FabricError."""
        ...

    def open_all(self, entries: Sequence[SlabEntry]) -> list[Slab]:
        """Map the whole table; the result is in rank order and holds the own slab at this rank's place."""
        ...

    def unlink(self) -> None:
        """Remove the own slab's name, after the barrier: all have mapped it, and mappings live on. Idempotent."""
        ...

    def close(self) -> None:
        """Unmap everything, unlink if that was not done. Idempotent. Blocks: no."""
        ...
