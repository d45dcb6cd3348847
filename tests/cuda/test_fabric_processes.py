"""Two sibling processes that share device memory: over the fake driver everywhere, unchanged on a GPU with `-m gpu`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers.cuda_world import Member, PeerProcess
from whalez.errors import CapabilityMissing, DoorbellTimeout, FabricError
from whalez.fabric.cuda.driver import Device, Driver, DriverError
from whalez.fabric.cuda.preflight import main
from whalez.fabric.cuda.providers import PROVIDERS

MACHINE = bytes(range(16))
DRIVERS = ["fake", pytest.param("gpu", marks=pytest.mark.gpu)]


class Pair(NamedTuple):
    here: Member
    there: PeerProcess
    name: str
    is_fake: bool


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(PROVIDERS))
def pair(request: pytest.FixtureRequest, driver: str) -> Iterator[Pair]:
    """Rank 0 here, rank 1 in a process of its own, unrelated to this one but by descent."""
    is_fake = driver == "fake"
    try:
        here = Member(request.param, 0, is_fake=is_fake, machine=MACHINE)
    except CapabilityMissing as error:
        pytest.skip(f"no GPU to run on: {error}")
    there = PeerProcess(request.param, is_fake=is_fake, machine=MACHINE)
    try:
        yield Pair(here, there, request.param, is_fake)
    finally:
        there.kill()
        assert here.close() == {}


def share(pair: Pair) -> None:
    """Both make their slab and map the other's."""
    try:
        mine = pair.here.create()
    except DriverError as error:
        if pair.is_fake or pair.name != "fabric":
            raise
        pytest.skip(f"no fabric here: {error.words}")
    theirs = pair.there("create")
    pair.here.open(theirs)
    pair.there("open", mine)


def part(pair: Pair) -> None:
    """Peers are unmapped everywhere before anybody frees."""
    pair.here.close_peers()
    pair.there("close_peers")
    assert pair.there("close") == {}


def test_what_one_writes_the_other_reads(pair: Pair) -> None:
    """No process needs any right over the other one: a descriptor goes through a socket."""
    share(pair)
    for rank, other in ((0, 1), (1, 0)):
        pair.here.write(rank, 8192, b"from rank 0 in slab %d" % rank)
        assert pair.there("read", rank, 8192, 21) == b"from rank 0 in slab %d" % rank
        pair.there("write", other, 4096, b"from rank 1 in slab %d" % other)
        assert pair.here.read(other, 4096, 21) == b"from rank 1 in slab %d" % other
    part(pair)


@pytest.mark.parametrize("wait_by", ["memop", "spin"])
def test_a_ring_wakes_the_waiting_stream_and_the_payload_is_there(pair: Pair, wait_by: str) -> None:
    share(pair)
    pair.here.arm(wait_by)
    pair.there("arm", wait_by)
    for value in (1, 2, 2**20 + 3):
        pair.there("wait", value)
        pair.here.publish(value)
        pair.here.join()
        assert pair.there("consume") == value.to_bytes(4, "little") * 9
        pair.here.wait(value)
        pair.there("publish", value)
        assert pair.here.consume() == value.to_bytes(4, "little") * 9
    part(pair)


@pytest.mark.parametrize("wait_by", ["memop", "spin"])
def test_a_peer_killed_before_it_rings_is_named_within_the_bound(pair: Pair, wait_by: str) -> None:
    """The stream drains, the survivor says for what it waited, and its device works on."""
    share(pair)
    pair.here.arm(wait_by)
    pair.there("arm", wait_by)
    pair.there("publish", 4)
    pair.there("join")
    pair.here.wait(4)
    pair.here.wait(5)
    pair.here.wait(6)  # what stands behind drains as well
    pair.there.kill()
    begun = time.monotonic()
    with pytest.raises(FabricError) as caught:
        pair.here.join(stuck_s=0.5)
    assert time.monotonic() - begun < 5
    if pair.is_fake or isinstance(caught.value, DoorbellTimeout):
        assert isinstance(caught.value, DoorbellTimeout)
        assert (caught.value.peer, caught.value.kind) == (1, "data")
        assert (caught.value.expected, caught.value.seen) == (5, 4)
        assert caught.value.where == "seq -1 window 5 layer 2"
        pair.here.stream.zero(pair.here.opened[0].address + 4096, 8)
        pair.here.watchdog.bells.failed = None
        deadline = time.monotonic() + 5
        while not pair.here.stream.is_done():
            assert time.monotonic() < deadline
    else:  # legacy handles may die with their owner: then the context is lost, and that is said
        assert isinstance(caught.value, DriverError) or isinstance(caught.value.__cause__, DoorbellTimeout)
        assert pair.name == "cuda_ipc"


def test_the_handle_of_a_process_that_was_killed(pair: Pair) -> None:
    try:
        ticket = pair.there("create")
    except RuntimeError as error:
        if pair.is_fake or pair.name != "fabric":
            raise
        pytest.skip(f"no fabric here: {error}")
    pair.there.kill()
    begun = time.monotonic()
    with pytest.raises(FabricError, match=rf"{pair.name}: .*(process is gone|-> [0-9]+ CUDA_ERROR_)"):
        pair.here.open(ticket)
    assert time.monotonic() - begun < 1


def test_two_processes_find_out_what_they_can_use(driver: str) -> None:
    is_fake = driver == "fake"
    try:
        here = Member("posix_fd", 0, is_fake=is_fake, machine=MACHINE)
    except CapabilityMissing as error:
        pytest.skip(f"no GPU to run on: {error}")
    there = PeerProcess("posix_fd", is_fake=is_fake, machine=MACHINE)
    try:
        there.ask("preflight")
        mine = here.preflight(there.gather)
        assert mine == there.answer()
        assert mine == ("fabric", "memop") if is_fake else mine[0] in PROVIDERS
        assert there("close") == {}
    finally:
        there.kill()
        assert here.close() == {}


@pytest.mark.gpu
def test_by_hand_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, the choice by name, and the driver's words for what is not used."""
    try:
        Device(Driver(), 0).close()
    except CapabilityMissing as error:
        pytest.skip(f"no GPU to run on: {error}")
    assert main() == 0
    said: Any = capsys.readouterr().out
    assert "slabs: " in said
    assert "slabs: fabric" in said or "fabric unavailable: rank 0 on this machine: " in said
