"""Slabs in device memory over the fake driver: the contract of SlabProvider, every failure of every call, the end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers.cuda_world import Rank, entry_of, fake_world, make_layout, settled_fds
from whalez.errors import CapabilityMissing, FabricError, ShapeError
from whalez.fabric.cuda import fds
from whalez.fabric.cuda.driver import Device, Driver, DriverError
from whalez.fabric.cuda.providers import PROVIDERS, CudaSlabs
from whalez.fabric.cuda.ticket import TICKET_BYTES
from whalez.fabric.header import make_header
from whalez.fabric.host import HostSlabs
from whalez.fabric.layout import HEADER
from whalez.fabric.provider import Slab, ViewableSlab
from whalez.testing.fake_driver import (
    GRANULARITY,
    FakeDomain,
    FakeDriver,
    FakeGpu,
    FakeMachine,
    fake_processes,
)

CUDA = list(PROVIDERS)
UNMAPPING = {"cuMemUnmap", "cuIpcCloseMemHandle", "cuMemFree"}
every_provider = pytest.mark.parametrize("name", CUDA)


#: On a device both ranks of the contract are in one process, which cannot open a legacy handle of its own.
ON_A_GPU = [pytest.param(f"gpu-{name}", marks=pytest.mark.gpu) for name in ("fabric", "posix_fd")]


@contextlib.contextmanager
def gpu_pair(name: str) -> Iterator[list[CudaSlabs]]:
    layout = make_layout(2)
    with contextlib.ExitStack() as stack:
        try:
            device = stack.enter_context(Device(Driver(), 0))
        except FabricError as error:
            pytest.skip(f"no GPU to run on: {error}")
        make = PROVIDERS[name]
        try:
            with make(make_layout(1), device=device, rank=0, incarnation="i0") as alone:
                alone.create()
        except DriverError as error:
            pytest.skip(f"no {name} here: {error.words}")
        slabs = [stack.enter_context(make(layout, device=device, rank=r, incarnation=f"i{r}")) for r in range(2)]
        yield slabs
        for one in slabs:
            one.close_peers()


@pytest.fixture(params=["host", *CUDA, *ON_A_GPU])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Two providers of a world of two, none created."""
    if request.param == "host":
        layout = make_layout(2)
        fleet = f"contract-{os.getpid()}"
        slabs = [HostSlabs(layout, fleet_id=fleet, rank=r, incarnation=f"i{r}") for r in range(2)]
        yield slabs
        for one in slabs:
            one.close()
        assert not [name for name in os.listdir("/dev/shm") if fleet in name]
    elif request.param.startswith("gpu-"):
        with gpu_pair(request.param.removeprefix("gpu-")) as made:
            yield made
    else:
        with fake_world(request.param) as ranks:
            yield [rank.slabs for rank in ranks]


def read(slabs: Any, slab: Any, name: str) -> bytes:
    region = slabs.layout.regions[name]
    if isinstance(slabs, CudaSlabs):
        return bytes(slab.read(region.offset, region.nbytes))
    return bytes(slab.view(region.offset, (region.nbytes,), np.uint8).tobytes())


def write(slabs: Any, slab: Any, name: str, data: bytes) -> None:
    region = slabs.layout.regions[name]
    assert len(data) == region.nbytes
    if isinstance(slabs, CudaSlabs):
        slab.write(region.offset, data)
    else:
        slab.view(region.offset, (region.nbytes,), np.uint8)[:] = np.frombuffer(data, np.uint8)


# ---- the contract --------------------------------------------------------------------------------------------------
def test_what_the_owner_writes_the_peer_reads_in_the_same_place(pair: list[Any]) -> None:
    owner, peer = pair
    own = [each.create() for each in pair]
    entries = [entry_of(each) for each in pair]
    here, there = owner.open_all(entries)[0], peer.open_all(entries)[0]
    assert here is own[0]
    assert here.address != there.address
    assert [slab.rank for slab in (here, there)] == [0, 0]
    for i, name in enumerate(owner.layout.regions):
        if name == "header":
            continue
        assert not any(read(owner, here, name)), name
        data = np.random.default_rng(i).bytes(owner.layout.regions[name].nbytes)
        write(owner, here, name, data)
        assert read(peer, there, name) == data, name
    write(peer, there, "bells", b"\7" * owner.layout.regions["bells"].nbytes)  # and the other way, as a ring does
    assert set(read(owner, here, "bells")) == {7}
    assert read(owner, here, "halo") == np.random.default_rng(list(owner.layout.regions).index("halo")).bytes(36), (
        "a ring touched its neighbour"
    )


def test_the_header_is_there_and_all_else_is_zero(pair: list[Any]) -> None:
    owner, _ = pair
    slab = owner.create()
    assert slab.nbytes == owner.layout.nbytes
    assert slab.address % 4096 == 0
    header = np.frombuffer(read(owner, slab, "header"), HEADER)
    assert header == make_header(owner.layout, 0, "i0")


def test_mappings_outlive_unlink(pair: list[Any]) -> None:
    owner, peer = pair
    here = owner.create()
    there = peer.open(entry_of(owner))
    owner.unlink()
    owner.unlink()
    write(owner, here, "words", b"\5" * 32)
    assert read(peer, there, "words") == b"\5" * 32


def test_close_is_idempotent_and_an_unused_provider_closes(pair: list[Any]) -> None:
    owner, peer = pair
    owner.create()
    peer.open(entry_of(owner))
    for one in (peer, owner, peer):
        one.close()


def test_only_host_memory_has_a_view(pair: list[Any]) -> None:
    slab = pair[0].create()
    assert isinstance(slab, Slab)
    assert isinstance(slab, ViewableSlab) == isinstance(pair[0], HostSlabs)


def test_after_a_failure_peers_still_go_first_and_the_owner_keeps_its_memory(pair: list[Any]) -> None:
    owner, peer = pair
    here, own = owner.create(), peer.create()
    with pytest.raises(FabricError, match="rejected"):
        peer.open(entry_of(owner, incarnation="older"))
    there = peer.open(entry_of(owner))
    addresses = [there.address, own.address]
    if isinstance(peer, CudaSlabs) and isinstance(peer.device.driver.api, FakeDriver):
        fake = peer.device.driver.api
        begun = len(fake.calls)
        fake.refuse = lambda call, _: 999 * (call in {"cuMemUnmap", "cuIpcCloseMemHandle"} and len(fake.calls) % 2)
        for _ in range(4):
            with contextlib.suppress(FabricError):
                peer.close()
        fake.refuse = None
        peer.close()
        gone = [int(call.arguments[0]) for call in fake.calls[begun:] if call.name in UNMAPPING]
        assert [gone.index(each) for each in addresses] == sorted(gone.index(each) for each in addresses)
        assert fake.leaks() == {"contexts": 1}
    else:
        peer.close()
    peer.close()
    write(owner, here, "words", b"\5" * 32)
    assert read(owner, here, "words") == b"\5" * 32


@pytest.mark.parametrize("ranks", [[0], [1, 0], [0, 0], [0, 1, 2]])
def test_a_table_must_be_the_world(pair: list[Any], ranks: list[int]) -> None:
    owner, _ = pair
    owner.create()
    with pytest.raises(FabricError, match="slab table"):
        owner.open_all([entry_of(owner, rank=rank) for rank in ranks])


@pytest.mark.parametrize("field", ["magic", "version", "world", "rank", "line_bytes", "nbytes", "incarnation", "spec"])
def test_every_header_field_is_checked(pair: list[Any], field: str) -> None:
    owner, peer = pair
    slab = owner.create()
    header = make_header(owner.layout, 0, "i0")
    value = header[field].tobytes()
    header[field] = np.frombuffer(bytes([value[0] ^ 1]) + value[1:], header.dtype[field])
    write(owner, slab, "header", header.tobytes())
    with pytest.raises(FabricError, match=f"ticket of rank 0 rejected: {field}"):
        peer.open(entry_of(owner))
    write(owner, slab, "header", make_header(owner.layout, 0, "i0").tobytes())
    peer.open(entry_of(owner))  # what was refused left nothing behind


@pytest.mark.parametrize("claim", [{"rank": 2}, {"ticket": b""}, {"ticket": b"x" * 10_000}, {"incarnation": "older"}])
def test_a_claim_is_not_believed(pair: list[Any], claim: dict[str, Any]) -> None:
    owner, peer = pair
    owner.create()
    with pytest.raises(FabricError, match="rejected"):
        peer.open(entry_of(owner, **claim))


# ---- tickets of device memory --------------------------------------------------------------------------------------
@every_provider
@pytest.mark.parametrize(
    ("at", "data", "match"),
    [
        (0, b"X", "ticket: expected"),
        (8, b"host\0", "provider: expected"),
        (40, b"\1", "size of the ticket"),
        (48, b"\xff" * 64, "posix_fd: rank 0 does not answer|-> 1 CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_every_field_of_a_ticket_is_checked(name: str, at: int, data: bytes, match: str) -> None:
    with fake_world(name) as (owner, peer):
        owner.slabs.create()
        good = owner.slabs.ticket
        assert len(good) == TICKET_BYTES
        with pytest.raises(FabricError, match=match):
            peer.slabs.open(entry_of(owner.slabs, ticket=good[:at] + data + good[at + len(data) :]))
        peer.slabs.open(entry_of(owner.slabs))


@every_provider
def test_a_ticket_of_another_provider_is_refused_by_name(name: str) -> None:
    other = CUDA[CUDA.index(name) - 1]
    with fake_world(name) as (owner, _):
        owner.slabs.create()
        with (
            fake_world(other) as (_, peer),
            pytest.raises(FabricError, match=f"provider: expected {other}, got {name}"),
        ):
            peer.slabs.open(entry_of(owner.slabs))


def test_a_slab_has_no_host_view_and_stays_inside() -> None:
    with fake_world("fabric") as (owner, _):
        slab = owner.slabs.create()
        assert not hasattr(slab, "view")
        for offset, nbytes in ((-1, 2), (slab.nbytes - 1, 2), (0, -1)):
            with pytest.raises(ShapeError):
                slab.read(offset, nbytes)


@every_provider
def test_two_regions_of_a_slab_take_one_import_and_one_mapping(name: str) -> None:
    """A handle per slab, so no region can miss its own and fall back to something slow."""
    with fake_world(name) as (owner, peer):
        owner.slabs.create()
        begun = len(peer.fake.calls)
        there = peer.slabs.open(entry_of(owner.slabs))
        names = peer.fake.names(begun)
        imports = ("cuMemImportFromShareableHandle", "cuIpcOpenMemHandle")
        assert sum(names.count(each) for each in imports) == 1
        regions = owner.slabs.layout.regions.values()
        assert all(peer.fake.is_imported(there.address + each.offset, max(each.nbytes, 1)) for each in regions)


@pytest.mark.parametrize("name", ["fabric", "posix_fd"])
def test_a_slab_is_a_whole_number_of_recommended_granules(name: str) -> None:
    """The least granularity would do for cuMemCreate, with small pages that the device translates one by one."""
    with fake_world(name) as (owner, _):
        owner.slabs.create()
        (size,) = (call.arguments[0] for call in owner.fake.calls if call.name == "cuMemCreate")
        assert size == owner.slabs.nbytes >= owner.slabs.layout.nbytes
        assert size % GRANULARITY == 0


@pytest.mark.parametrize("name", ["fabric", "posix_fd"])
def test_a_mapping_is_opened_to_its_own_device_to_read_and_write(name: str) -> None:
    machine = FakeMachine(gpus=[FakeGpu(), FakeGpu()])
    with fake_world(name, machines=lambda _: machine) as (owner, peer):
        owner.slabs.create()
        peer.slabs.open(entry_of(owner.slabs))
        for rank in (owner, peer):
            (mapping,) = rank.fake._mapped.values()
            assert mapping.access == {0: 3}


@every_provider
def test_all_is_in_memory_when_create_returns(name: str) -> None:
    """A peer looks with a stream that is not ordered against ours: what is still queued then comes too late."""
    with fake_world(name) as (owner, _):
        slab = owner.slabs.create()
        assert owner.fake._default == deque()
        seen = np.frombuffer(ctypes.string_at(slab.address, HEADER.itemsize), HEADER)
        assert seen == make_header(owner.slabs.layout, 0, "i0")
        assert not any(ctypes.string_at(slab.address + HEADER.itemsize, slab.nbytes - HEADER.itemsize))


# ---- the likeness of the fake ------------------------------------------------------------------------------------
def test_the_fake_keeps_stores_from_what_may_only_be_read() -> None:
    with fake_world("fabric") as (owner, _):
        slab = owner.slabs.create()
        driver, real = owner.device.driver, owner.device.driver.api
        access = real.CUmemAccessDesc()
        access.location.type = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.flags = real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        driver.cuMemSetAccess(slab.address, owner.slabs.nbytes, [access], 1)
        assert slab.read(0, 8)
        with pytest.raises(DriverError, match="cuMemcpyHtoD -> 700"):
            slab.write(0, b"x")
        with pytest.raises(DriverError, match="cuMemsetD8 -> 700"):
            driver.cuMemsetD8(slab.address, 0, 8)
        access.location.id = 7
        with pytest.raises(DriverError, match="cuMemSetAccess -> 101"):
            driver.cuMemSetAccess(slab.address, owner.slabs.nbytes, [access], 1)


def test_the_fake_runs_a_memset_when_somebody_waits_for_it() -> None:
    with fake_world("cuda_ipc") as (owner, _):
        slab, driver = owner.slabs.create(), owner.device.driver
        driver.cuMemsetD8(slab.address, 7, 8)
        assert ctypes.string_at(slab.address, 8) != b"\7" * 8
        driver.cuCtxSynchronize()
        assert ctypes.string_at(slab.address, 8) == b"\7" * 8


# ---- every call fails once -----------------------------------------------------------------------------------------
def live(name: str, fake: FakeDriver, owner: Rank) -> None:
    """A rank's whole life over a driver that may fail anywhere. What it took is given back, whatever happened."""
    device = Device(Driver(fake), 0)
    slabs = PROVIDERS[name](owner.slabs.layout, device=device, rank=1, incarnation="i1", machine=fake.machine.identity)
    try:
        slabs.create()
        slabs.open_all([entry_of(owner.slabs), entry_of(slabs)])
        slabs.unlink()
        slabs.close_peers()
        slabs.close()
        device.close()
    except FabricError:
        slabs.close()
        device.close()
        raise


def count_calls(name: str) -> list[str]:
    with fake_world(name) as (owner, peer):
        owner.slabs.create()
        fake = FakeDriver(peer.fake.machine)
        with fake_processes(fake):
            live(name, fake, owner)
        return fake.names()


@every_provider
@pytest.mark.parametrize("code", [2, 400, 700, 999])
def test_an_error_at_any_call_is_named_and_leaves_nothing(name: str, code: int) -> None:
    names = count_calls(name)
    assert len(names) > 20
    with fake_world(name) as (owner, peer):
        owner.slabs.create()
        gc.collect()
        fds_before = len(os.listdir("/proc/self/fd"))
        for at, call in enumerate(names):
            fake = FakeDriver(peer.fake.machine)
            fake.fail_at, fake.fail_code = at, code
            with fake_processes(fake):
                if code == 2 and call in {
                    "cuMemCreate",
                    "cuMemAlloc",
                    "cuMemAddressReserve",
                    "cuMemMap",
                    "cuMemSetAccess",
                }:
                    with pytest.raises(DriverError) if at > len(names) // 2 else _nothing():
                        live(name, fake, owner)  # the own slab is tried again after trimming, an import is not
                else:
                    with pytest.raises(DriverError) as caught:
                        live(name, fake, owner)
                    assert (caught.value.call, caught.value.code) == (call, code), at
                    assert f"{call} -> {code} CUDA_ERROR_" in str(caught.value)
                assert fake.leaks() == {}, (at, call, fake.leaks())
            assert owner.fake.machine.gpus[0].used == owner.slabs.nbytes, (at, call)
            assert settled_fds(fds_before) <= fds_before, (at, call)
            assert not [each for each in threading.enumerate() if each.name == "whalez-fds"][
                1 if name == "posix_fd" else 0 :
            ]


class _nothing:
    """A context in which nothing is expected."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_no_free_of_the_own_slab_is_missed_because_a_peer_will_not_unmap() -> None:
    with fake_world("fabric", 3) as ranks:
        for rank in ranks:
            rank.slabs.create()
        table = [entry_of(rank.slabs) for rank in ranks]
        first = ranks[0]
        slabs = first.slabs.open_all(table)
        broken = {slabs[1].address}
        first.fake.refuse = lambda call, args: 999 * (call == "cuMemUnmap" and int(args[0]) in broken)
        begun = len(first.fake.calls)
        with pytest.raises(DriverError, match="unmapping peers at rank 0: cuMemUnmap -> 999"):
            first.slabs.close()
        unmapped = [int(call.arguments[0]) for call in first.fake.calls[begun:] if call.name == "cuMemUnmap"]
        assert len(unmapped) == 3  # two peers, and then the own one
        assert first.fake.leaks() == {"handles": 1, "address ranges": 1, "mappings": 1, "contexts": 1}
        broken.clear()
        first.slabs.close()
        assert first.fake.leaks() == {"contexts": 1}


@every_provider
def test_peers_are_unmapped_before_the_own_memory_goes(name: str) -> None:
    with fake_world(name, 3) as ranks:
        own = [rank.slabs.create().address for rank in ranks]
        table = [entry_of(rank.slabs) for rank in ranks]
        first = ranks[0]
        first.slabs.open_all(table)
        begun = len(first.fake.calls)
        first.slabs.close()
        freed = [int(call.arguments[0]) for call in first.fake.calls[begun:] if call.name in UNMAPPING]
        assert freed.index(own[0]) == len(freed) - 1 == 2


def test_a_fleet_closes_peers_first_and_then_frees() -> None:
    with fake_world("cuda_ipc", 3) as ranks:
        for rank in ranks:
            rank.slabs.create()
        table = [entry_of(rank.slabs) for rank in ranks]
        for rank in ranks:
            rank.slabs.open_all(table)
        for rank in ranks:
            rank.slabs.close_peers()
        for rank in ranks:
            rank.slabs.close()
        assert ranks[0].fake.machine.violations == []


def test_the_fake_tells_an_owner_that_frees_too_early() -> None:
    with fake_world("cuda_ipc") as (owner, peer):
        owner.slabs.create()
        peer.slabs.open(entry_of(owner.slabs))
        owner.slabs.close()
        (violation,) = owner.fake.machine.violations
        assert "while another process has it open" in violation
        owner.fake.machine.violations.clear()


# ---- contexts ------------------------------------------------------------------------------------------------------
@every_provider
def test_every_entry_works_in_a_thread_that_never_saw_the_context(name: str) -> None:
    with fake_world(name) as (owner, peer):
        slabs: list[Any] = []

        def in_a_thread(work: Callable[[], Any]) -> None:
            errors: list[BaseException] = []

            def run() -> None:
                try:
                    slabs.append(work())
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join(10)
            assert not errors, errors

        in_a_thread(owner.slabs.create)
        in_a_thread(lambda: peer.slabs.open(entry_of(owner.slabs)))
        in_a_thread(lambda: slabs[1].write(0, b"x"))
        in_a_thread(lambda: slabs[0].read(0, 1))
        assert slabs[-1] == b"x"
        in_a_thread(peer.slabs.close_peers)
        in_a_thread(owner.slabs.close)


# ---- memory is full ------------------------------------------------------------------------------------------------
@every_provider
def test_what_the_pool_hoards_is_given_back_and_the_slab_fits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(total=8 * GRANULARITY, pool_reserved=8 * GRANULARITY, pool_used=GRANULARITY)
    machine = FakeMachine(gpus=[gpu])
    with fake_world(name, machines=lambda _: machine) as (owner, _), caplog.at_level(logging.WARNING):
        owner.slabs.create()
        assert owner.fake.names().count("cuMemPoolTrimTo") == 1
        assert gpu.pool_reserved == GRANULARITY
    assert f"{8 * GRANULARITY} bytes reserved and {GRANULARITY} used" in caplog.text
    assert f"{7 * GRANULARITY} free of {8 * GRANULARITY}" in caplog.text


@every_provider
def test_a_slab_larger_than_free_memory_fails_once_with_all_numbers(name: str) -> None:
    machine = FakeMachine(gpus=[FakeGpu(total=GRANULARITY, used=1)])
    with fake_world_of_full(name, machine) as owner:
        begun = time.monotonic()
        with pytest.raises(DriverError) as caught:
            owner.slabs.create()
        assert time.monotonic() - begun < 1
        message = str(caught.value)
        call = "cuMemAlloc" if name == "cuda_ipc" else "cuMemCreate"
        assert f"{call} -> 2 CUDA_ERROR_OUT_OF_MEMORY: free device memory" in message
        assert f"{name}: slab of rank 0: {GRANULARITY} bytes do not fit" in message
        assert f"{GRANULARITY - 1} free of {GRANULARITY}" in message
        assert owner.fake.names().count(call) == 2
        assert owner.fake.leaks() == {"contexts": 1}


class fake_world_of_full:
    """One rank on a device that others have filled."""

    def __init__(self, name: str, machine: FakeMachine) -> None:
        self.fake = FakeDriver(machine)
        self.rank = Rank(make_layout(1), name, 0, self.fake)

    def __enter__(self) -> Rank:
        return self.rank

    def __exit__(self, *_: object) -> None:
        self.rank.close()


# ---- other machines, dead processes --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["posix_fd", "cuda_ipc"])
def test_a_peer_on_another_machine_is_refused_before_anything_is_tried(name: str) -> None:
    """Once, at once, with memory as before: not after a socket's time-out, and not again for the next layer."""
    with fake_world(name, machines=lambda _: FakeMachine()) as (owner, peer):
        owner.slabs.create()
        used, threads, begun = peer.fake.leaks(), threading.active_count(), time.monotonic()
        count = len(peer.fake.calls)
        with pytest.raises(CapabilityMissing, match=f"{name}: rank 0 is on another machine \\(far\\).*fabric"):
            peer.slabs.open(entry_of(owner.slabs, host="far"))
        assert time.monotonic() - begun < 1
        assert set(peer.fake.names(count)) <= {"cuCtxSetCurrent", "cuMemGetAllocationGranularity"}
        assert (peer.fake.leaks(), threading.active_count()) == (used, threads)


def test_a_host_name_does_not_make_another_machine() -> None:
    with fake_world("posix_fd") as (owner, peer):
        owner.slabs.create()
        peer.slabs.open(entry_of(owner.slabs, host="the-other-container"))


def test_fabric_goes_across_machines() -> None:
    domain = FakeDomain()
    with fake_world("fabric", machines=lambda _: FakeMachine(domain=domain)) as (owner, peer):
        here = owner.slabs.create()
        there = peer.slabs.open(entry_of(owner.slabs, host="far"))
        there.write(4096, b"hello")
        assert here.read(4096, 5) == b"hello"


@every_provider
def test_the_handle_of_a_dead_process(name: str) -> None:
    with fake_world(name) as (owner, peer):
        owner.slabs.create()
        entry = entry_of(owner.slabs)
        owner.slabs.unlink()  # as its end does: no socket of a process outlives it
        owner.fake.die()
        begun, held = time.monotonic(), peer.fake.leaks()
        with pytest.raises(FabricError) as caught:
            peer.slabs.open(entry)
        assert time.monotonic() - begun < 1
        expected = "its process is gone" if name == "posix_fd" else "400 CUDA_ERROR_INVALID_HANDLE: the handle is of"
        assert f"{name}: " in str(caught.value) and expected in str(caught.value)
        assert peer.fake.leaks() == held
        owner.slabs._teardowns.clear()  # they went with the process
        owner.device._teardown = type(owner.device._teardown)()


def test_no_imex_here_says_so_at_cumemcreate() -> None:
    """The attribute says yes, cuMemCreate says 800: only doing it tells."""
    machine = FakeMachine(imex=False)
    with fake_world("fabric", machines=lambda _: machine) as (owner, _):
        with pytest.raises(DriverError, match="cuMemCreate -> 800 CUDA_ERROR_NOT_PERMITTED: this process has no IMEX"):
            owner.slabs.create()
        assert owner.fake.leaks() == {"contexts": 1}


def test_no_imex_on_the_other_machine_is_told_to_the_importer() -> None:
    domain = FakeDomain()
    machines = [FakeMachine(domain=domain), FakeMachine(domain=domain)]
    with fake_world("fabric", machines=machines.__getitem__) as (owner, peer):
        owner.slabs.create()
        machines[0].imex = False
        with pytest.raises(DriverError, match=r"-> 801 .* on some machine of the domain, not necessarily on this one"):
            peer.slabs.open(entry_of(owner.slabs))
        assert peer.fake.leaks() == {"contexts": 1}


def test_a_descriptor_needs_no_right_over_the_other_process() -> None:
    """Two siblings of one unprivileged user that nobody may trace: pidfd_getfd is refused, the socket hands it over."""
    script = """
import ctypes, os, signal, sys
from whalez.fabric.cuda import fds
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE: as ptrace_scope would, for siblings
if sys.argv[1] == "owner":
    fd = os.memfd_create("slab"); os.write(fd, b"payload")
    server = fds.FdServer(fd)
    print(os.getpid(), fd, server.handle.hex(), flush=True)
    sys.stdin.read()
    server.close()
else:
    pid, fd, handle = int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
    taken = libc.syscall(438, os.pidfd_open(pid), fd, 0)  # pidfd_getfd
    assert taken == -1, "pidfd_getfd worked, so this test shows nothing"
    print(os.pread(fds.fetch(handle, 0), 7, 0).decode(), flush=True)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen([*command, "owner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        told = owner.stdout.readline().split()
        done = subprocess.run([*command, "peer", *told], capture_output=True, text=True, timeout=30)
        owner.stdin.close()
    assert (done.stdout, done.returncode) == ("payload\n", 0), done.stderr


# ---- descriptors ---------------------------------------------------------------------------------------------------
def ask(handle: bytes, token: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(5)
        peer.connect(fds._address(handle[:16]))
        peer.sendall(token)
        data, got, _, _ = socket.recv_fds(peer, 10, 4)
        for fd in got:
            os.close(fd)
        return data


def test_a_descriptor_goes_to_who_knows_the_token_only() -> None:
    fd = os.memfd_create("x")
    server = fds.FdServer(fd)
    try:
        assert ask(server.handle, server.handle[16:]) == b"+"
        assert ask(server.handle, bytes(16)) == b""
        with pytest.raises(FabricError, match="refused to hand over"):
            fds.fetch(server.handle[:16] + bytes(16), 7)
        assert server.refused_count == 2
        got = fds.fetch(server.handle, 7)
        assert os.fstat(got).st_ino == os.fstat(fd).st_ino
        assert not os.get_inheritable(got)
        os.close(got)
    finally:
        server.close()
        os.close(fd)


def test_a_descriptor_goes_to_the_same_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("x")
    server = fds.FdServer(fd)
    try:
        monkeypatch.setattr(fds.os, "geteuid", lambda: 12345)
        with pytest.raises(FabricError, match="another user's"):
            fds.fetch(server.handle, 7)
    finally:
        server.close()
        os.close(fd)


def test_a_silent_client_holds_nobody_up_for_long() -> None:
    fd = os.memfd_create("x")
    server = fds.FdServer(fd)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(fds._address(server.handle[:16]))
            os.close(fds.fetch(server.handle, 7))
    finally:
        server.close()
        os.close(fd)
