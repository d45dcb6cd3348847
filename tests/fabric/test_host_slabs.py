"""Shared memory of real files: what is allocated, what a peer's ticket may claim, and that nothing stays."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fabric_world import entry_of, make_layout

from whalez.errors import ConfigError, FabricError, ShapeError
from whalez.fabric.host import SWEEP_AGE_S, HostSlabs, remove_leftovers, sweep
from whalez.rendezvous.messages import SlabEntry

Make = Callable[..., HostSlabs]


@pytest.fixture
def make(fleet_id: str) -> Iterator[Make]:
    made: list[HostSlabs] = []

    def provider(rank: int, world: int = 2, **arguments: object) -> HostSlabs:
        arguments = {"fleet_id": fleet_id, "incarnation": f"i{rank}", **arguments}
        made.append(HostSlabs(make_layout(world), rank=rank, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield provider
    for one in made:
        one.close()


def names(fleet_id: str) -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if fleet_id in name)


def test_what_the_owner_writes_the_peer_reads_in_the_same_place(make: Make) -> None:
    owner, peer = make(0), make(1)
    slabs = [owner.create(), peer.create()]
    entries = [entry_of(owner), entry_of(peer)]
    here, there = owner.open_all(entries)[0], peer.open_all(entries)[0]
    assert here is slabs[0]
    assert here.address != there.address
    for i, name in enumerate(owner.layout.regions):
        if name == "header":
            continue
        mine, theirs = owner.layout.view(here, name), owner.layout.view(there, name)
        assert not mine.any(), name
        mine[...] = np.arange(mine.size).reshape(mine.shape) + i
        assert np.array_equal(mine, theirs), name
        assert mine.flags.c_contiguous


def test_every_byte_is_allocated(make: Make, fleet_id: str) -> None:
    provider = make(0)
    provider.create()
    found = os.stat("/dev/shm" + provider.name)
    assert found.st_blocks * 512 >= provider.layout.nbytes == found.st_size
    assert found.st_mode & 0o777 == 0o600


def test_views_stay_inside(make: Make) -> None:
    slab = make(0).create()
    assert slab.view(slab.nbytes - 8, (1,), np.uint64).shape == (1,)
    for offset, shape in ((slab.nbytes - 7, (1,)), (0, (2**61,)), (-8, (1,)), (0, (-1,)), (4, (1,))):
        with pytest.raises(ShapeError):
            slab.view(offset, shape, np.uint64)


def test_unlink_takes_the_name_and_leaves_the_memory(make: Make, fleet_id: str) -> None:
    owner, peer = make(0), make(1)
    here, there = owner.create(), peer.open(entry_of(owner))
    owner.unlink()
    owner.unlink()
    assert names(fleet_id) == []
    owner.layout.view(here, "halo")[:] = 3
    assert (peer.layout.view(there, "halo") == 3).all()


def test_close_leaves_nothing_and_is_idempotent(make: Make, fleet_id: str) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    owner, peer = make(0), make(1)
    owner.create()
    peer.create()
    peer.open(entry_of(owner))
    for one in (owner, peer, owner):
        one.close()
    assert names(fleet_id) == []
    assert len(os.listdir("/proc/self/fd")) == fds
    with open("/proc/self/maps") as maps:
        assert fleet_id not in maps.read()


def test_a_view_outlives_close(make: Make) -> None:
    owner = make(0)
    view = owner.layout.view(owner.create(), "halo")
    owner.close()
    view[:] = 4
    assert view.sum() == 4 * view.size


def test_a_name_is_never_taken_over(make: Make) -> None:
    make(0).create()
    with pytest.raises(FabricError, match="File exists"):
        make(0).create()


def test_a_signal_that_strikes_as_the_name_is_made_leaves_none(
    make: Make, fleet_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's handler unlinks and exits; Python runs it between any two steps of `create`."""
    provider = make(0)
    really_open = os.open

    def opens_and_is_struck(path: str, *rest: int) -> int:
        fd = really_open(path, *rest)
        provider.unlink()
        os.close(fd)
        raise SystemExit

    monkeypatch.setattr("whalez.fabric.host.os.open", opens_and_is_struck)
    with pytest.raises(SystemExit):
        provider.create()
    assert names(fleet_id) == []


def test_full_tmpfs_says_both_numbers_and_what_to_do(make: Make, fleet_id: str) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    provider = make(1, fallocate=full)
    space = os.statvfs("/dev/shm")
    with pytest.raises(FabricError) as caught:
        provider.create()
    message = str(caught.value)
    assert f"needs {provider.layout.nbytes} bytes" in message
    assert f"{2 * provider.layout.nbytes} bytes together" in message
    free = int(message.split("/dev/shm has ")[1].split()[0])
    assert abs(free - space.f_bavail * space.f_frsize) < 2**33  # others use it too
    assert "--shm-size=17m" in message
    assert names(fleet_id) == []


def test_another_allocation_failure_keeps_its_reason(make: Make, fleet_id: str) -> None:
    def broken(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    with pytest.raises(FabricError, match="File too large"):
        make(0, fallocate=broken).create()
    assert names(fleet_id) == []


def test_a_directory_that_is_not_there(make: Make) -> None:
    with pytest.raises(FabricError, match="No such file"):
        make(0, directory="/dev/shm/none").create()


@pytest.mark.parametrize(
    ("field", "value"),
    [("fleet_id", ""), ("fleet_id", "a/b"), ("fleet_id", "x" * 101), ("incarnation", "a-b"), ("incarnation", "..\0")],
)
def test_names_are_checked(make: Make, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make(0, **{field: value})


def change(entry: SlabEntry, **fields: object) -> SlabEntry:
    return SlabEntry(**{**{name: getattr(entry, name) for name in entry.__struct_fields__}, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claim", "match"),
    [
        ({"ticket": b""}, "ticket: expected"),
        ({"ticket": b"/whalez-x-y-0"}, "ticket: expected"),
        ({"ticket": b"/etc/passwd 4096"}, "ticket: expected"),
        ({"ticket": b"/whalez-../../etc/passwd 4096"}, "ticket: expected"),
        ({"ticket": b"\xff" * 10_000}, "ticket: expected"),
        ({"ticket": b"%s 4096"}, "size of the ticket"),
        ({"ticket": b"/whalez-gone-x-0 NBYTES"}, "No such file"),
        ({"rank": 2}, "rank: expected a new one below 2"),
        ({"incarnation": "older"}, "incarnation: expected older"),
    ],
)
def test_a_ticket_is_not_believed(make: Make, claim: dict[str, object], match: str) -> None:
    owner, peer = make(0), make(1)
    owner.create()
    ticket = claim.get("ticket")
    if isinstance(ticket, bytes):
        nbytes = str(owner.layout.nbytes).encode()
        claim = {**claim, "ticket": ticket.replace(b"%s", owner.name.encode()).replace(b"NBYTES", nbytes)}
    with pytest.raises(FabricError, match=match):
        peer.open(change(entry_of(owner), **claim))


@pytest.mark.parametrize("field", ["magic", "version", "world", "rank", "line_bytes", "nbytes", "incarnation", "spec"])
def test_every_header_field_is_checked(make: Make, field: str) -> None:
    owner, peer = make(0), make(1)
    header = owner.layout.view(owner.create(), "header")
    value = header[field].tobytes()
    header[field] = np.frombuffer(bytes([value[0] ^ 1]) + value[1:], header.dtype[field])
    with pytest.raises(FabricError, match=f"ticket of rank 0 rejected: {field}"):
        peer.open(entry_of(owner))
    with open("/proc/self/maps") as maps:
        assert maps.read().count(owner.name) == 1  # what was rejected is not left mapped


@pytest.mark.parametrize("step", [-1, 4096])
def test_the_files_size_is_checked_not_only_the_claimed_one(make: Make, step: int) -> None:
    owner, peer = make(0), make(1)
    owner.create()
    os.truncate("/dev/shm" + owner.name, owner.layout.nbytes + step)
    with pytest.raises(FabricError, match="size of the file"):
        peer.open(entry_of(owner))


def test_a_link_is_not_followed(make: Make, fleet_id: str) -> None:
    owner, peer = make(0), make(1)
    owner.create()
    os.rename("/dev/shm" + owner.name, "/dev/shm" + owner.name + ".real")
    os.symlink(owner.name[1:] + ".real", "/dev/shm" + owner.name)
    try:
        with pytest.raises(FabricError, match="cannot open"):
            peer.open(entry_of(owner))
    finally:
        os.unlink("/dev/shm" + owner.name + ".real")


@pytest.mark.parametrize("ranks", [[0], [1, 0], [0, 0], [0, 1, 2]])
def test_a_table_must_be_the_world(make: Make, ranks: list[int]) -> None:
    owner = make(0)
    owner.create()
    entry = entry_of(owner)
    with pytest.raises(FabricError, match="slab table"):
        owner.open_all([change(entry, rank=rank) for rank in ranks])


def test_leftovers_of_one_fleet_only(make: Make, fleet_id: str) -> None:
    for rank in (0, 1):
        make(rank).create()
    other = make(0, fleet_id=fleet_id + "-more")
    other.create()
    assert len(remove_leftovers(fleet_id)) == 2
    assert names(fleet_id) == [other.name[1:]]


def test_a_sweep_takes_slabs_without_a_maker_and_nothing_else(make: Make, tmp_path: Path, fleet_id: str) -> None:
    living, peer = (make(rank, directory=str(tmp_path)) for rank in (0, 1))
    living.create()
    peer.open(entry_of(living))
    dead, young, linked = (f"whalez-{fleet_id}-dead-{rank}" for rank in (2, 3, 4))
    for name in (dead, young, "whalez-notes", "else-0-i-0"):
        (tmp_path / name).touch()
    (tmp_path / linked).symlink_to(tmp_path / "whalez-notes")
    old = time.time() - 2 * SWEEP_AGE_S
    for path in tmp_path.iterdir():
        if path.name != young:
            os.utime(path, (old, old), follow_symlinks=False)
    assert sweep(str(tmp_path)) == [dead]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [living.name[1:], young, linked, "whalez-notes", "else-0-i-0"]
    )
