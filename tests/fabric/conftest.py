"""Slabs of a small world in this process, and the check that none outlives its test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from fabric_world import entry_of, make_layout

from whalez.fabric.doorbell import Bells
from whalez.fabric.host import HostSlabs

_fleets = itertools.count()


@pytest.fixture
def fleet_id() -> Iterator[str]:
    name = f"test-{os.getpid()}-{next(_fleets)}"
    yield name
    left = [entry for entry in os.listdir("/dev/shm") if name in entry]
    for entry in left:
        os.unlink(f"/dev/shm/{entry}")
    assert not left, f"left in /dev/shm: {left}"


@pytest.fixture
def make_world(fleet_id: str) -> Iterator[Callable[..., list[Bells]]]:
    """make_world(world, **bells_arguments) -> the Bells of every rank, over real shared memory."""
    providers: list[HostSlabs] = []
    opened: list[Bells] = []

    def make(world: int, **arguments: float) -> list[Bells]:
        layout = make_layout(world)
        members = [HostSlabs(layout, fleet_id=fleet_id, rank=r, incarnation=f"i{r}") for r in range(world)]
        providers.extend(members)
        for member in members:
            member.create()
        entries = [entry_of(member) for member in members]
        bells = [Bells(layout, m.open_all(entries), m.rank, **arguments) for m in members]  # type: ignore[arg-type]
        for member in members:
            member.unlink()
        opened.extend(bells)
        return bells

    yield make
    for bells in opened:
        bells.close()
    for provider in providers:
        provider.close()
