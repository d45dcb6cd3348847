"""A layout small enough to look at, and the table row of a slab."""

from __future__ import annotations

import os

from whalez.fabric.host import HostSlabs
from whalez.fabric.layout import SlabLayout, SlabSpec
from whalez.rendezvous.messages import SlabEntry


def make_layout(world: int) -> SlabLayout:
    return SlabLayout.from_spec(
        SlabSpec(
            world=world,
            rows_max=5,
            hidden=16,
            top_k=2,
            segment_rows_max=7,
            halo_values=9,
            package_heads=2,
            key_dim=4,
            value_dim=4,
            latent_width=6,
        )
    )


def entry_of(slabs: HostSlabs) -> SlabEntry:
    return SlabEntry(rank=slabs.rank, incarnation=slabs.incarnation, host="here", pid=os.getpid(), ticket=slabs.ticket)
