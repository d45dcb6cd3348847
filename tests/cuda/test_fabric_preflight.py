"""Finding out by doing which provider a world can use, and deciding together; over the fake driver."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers.cuda_world import fake_kernels, image, settled_fds
from whalez.errors import CapabilityMissing, FabricError, PeerDied, WhalezError
from whalez.fabric.cuda import preflight as module
from whalez.fabric.cuda.driver import Device, Driver, DriverError
from whalez.fabric.cuda.preflight import Agreement, Ballot, Memops, Probe, agree, choose, preflight, suspects
from whalez.fabric.cuda.providers import PROVIDERS
from whalez.hub.local import LocalHub
from whalez.hub.wire import OFFER_BYTES_MAX
from whalez.hub.zmq_hub import ZmqHub
from whalez.rendezvous.effects import Broadcast
from whalez.rendezvous.events import PeerGone
from whalez.rendezvous.messages import Died, Hello, SlabEntry
from whalez.testing.fake_driver import (
    SYNCHRONISING,
    FakeDomain,
    FakeDriver,
    FakeGpu,
    FakeMachine,
    fake_processes,
    real,
    write_word,
)

EVERY = tuple(PROVIDERS)


class Gathering:
    """An allgather between threads. A rank that leaves ends the gathers of all others, as a hub does."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.world = world
        self.left: list[int] = []

    def of(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        count = itertools.count()

        def gather(mine: bytes) -> list[bytes]:
            here = next(count)
            self.rounds.setdefault(here, {})[rank] = mine
            try:
                self.barrier.wait()
            except threading.BrokenBarrierError:
                if not self.left:  # somebody hangs
                    raise
                if len(self.rounds[here]) < self.world:  # else all came to it, and one has left since
                    raise PeerDied(self.left[0], "left") from None
            return [self.rounds[here][each] for each in range(self.world)]

        return gather

    def leave(self, rank: int) -> None:
        self.left.append(rank)
        self.barrier.abort()


def attempt(
    machines: list[FakeMachine], *, arrival_s: float = 5.0, is_left: bool = False, **options: Any
) -> list[list[Ballot] | BaseException]:
    """The preflight of one rank per entry of `machines`; what each of them was told, or how it ended. Nothing is left.

    A rank that ends with an error closes its device once more: a second `close` goes on where the first one failed.
    """
    fakes = [
        FakeDriver(
            machine,
            **{"kernels": fake_kernels()} | {k: v[rank] if isinstance(v, list) else v for k, v in options.items()},
        )
        for rank, machine in enumerate(machines)
    ]
    gathering = Gathering(len(machines))
    ends: dict[int, list[Ballot] | BaseException] = {}

    def one(rank: int) -> None:
        device = None
        try:
            device = Device(Driver(fakes[rank]), 0)
            with device:
                ends[rank] = preflight(
                    device,
                    rank=rank,
                    world=len(machines),
                    host=f"host-{machines.index(machines[rank])}",
                    gather=gathering.of(rank),
                    machine=machines[rank].identity,
                    image=image,
                    arrival_s=arrival_s,
                )
        except BaseException as error:
            ends[rank] = error
            gathering.leave(rank)
            if device is not None:
                device.close()

    with fake_processes(*fakes):
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(machines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(ends) == list(range(len(machines))), "a rank hangs"
        for fake in fakes:
            assert fake.leaks() == {} or is_left, (ends, fake.leaks())
            assert fake.machine.violations == []
            assert is_left or not any(gpu.used for gpu in fake.machine.gpus)
    return [ends[rank] for rank in range(len(machines))]


def run(machines: list[FakeMachine], **options: Any) -> list[list[Ballot]]:
    """The same where every rank gets to the vote."""
    told = []
    for end in attempt(machines, **options):
        if isinstance(end, BaseException):
            raise AssertionError("a rank did not vote") from end
        assert [len(ballot.probes) for ballot in end] == [len(EVERY)] * len(machines)
        told.append(end)
    return told


# ---- doing it -----------------------------------------------------------------------------------------------------
def test_a_good_machine_can_do_everything_and_the_fabric_is_chosen() -> None:
    told = run([FakeMachine()] * 3)
    assert told[0] == told[1] == told[2]
    assert [ballot.rank for ballot in told[0]] == [0, 1, 2]
    for ballot in told[0]:
        assert all(probe == Probe(provider=name) for name, probe in zip(EVERY, ballot.probes, strict=True))
        assert ballot.wait_by == "memop"
    assert str(choose(told[0])) == "slabs: fabric"


def test_memory_operations_are_tried_on_own_and_on_imported_memory() -> None:
    """Refused on imported memory, as reported; the kernel's store through the same mapping works."""
    memops = run([FakeMachine()] * 2)[0][0].memops
    assert memops == Memops(
        write_imported="fabric, peer 1: cuStreamWriteValue64 -> 1 CUDA_ERROR_INVALID_VALUE",
        wait_imported="fabric, peer 1: cuStreamBatchMemOp -> 1 CUDA_ERROR_INVALID_VALUE",
    )
    assert run([FakeMachine()] * 2, imported_memops=True)[0][0].memops == Memops()


# Each provider writes to the own slab, to that of peer 1 and to that of peer 2; and waits, likewise.
@pytest.mark.parametrize(
    ("at", "where"),
    [
        (1, "imported: fabric, peer 1"),
        (2, "imported: fabric, peer 2"),
        (3, "local: posix_fd"),
        (4, "imported: posix_fd, peer 1"),
        (8, "imported: cuda_ipc, peer 2"),
    ],
)
@pytest.mark.parametrize("call", ["cuStreamWriteValue64", "cuStreamBatchMemOp"])
def test_one_refusal_is_said_whoever_is_asked_later(at: int, where: str, call: str) -> None:
    count = itertools.count()
    told = run(
        [FakeMachine()] * 3,
        imported_memops=True,
        refuse=[lambda name, _: 1 * (name == call and next(count) == at), None, None],
    )
    field, place = where.split(": ")
    name = f"{'write' if call == 'cuStreamWriteValue64' else 'wait'}_{field}"
    assert told[1][0].memops == Memops(**{name: f"{place}: {call} -> 1 CUDA_ERROR_INVALID_VALUE"})
    assert told[1][0].wait_by == ("memop" if field == "imported" else "spin")


def test_a_slow_rank_can_still_open_what_a_fast_one_has_made() -> None:
    """Nobody gives up its socket before all have said that they have opened."""

    def slow(name: str, arguments: tuple[Any, ...]) -> int:
        if name == "cuMemImportFromShareableHandle":
            time.sleep(0.1)
        return 0

    told = run([FakeMachine()] * 3, refuse=[None, slow, None])
    assert choose(told[0], "posix_fd").provider == "posix_fd"


def test_without_memory_operations_ranks_wait_by_kernel() -> None:
    told = run([FakeMachine()] * 2, memops=[True, False])
    assert [ballot.wait_by for ballot in told[0]] == ["memop", "spin"]
    assert told[0][1].memops is not None
    assert told[0][1].memops.wait_local == "fabric: cuStreamBatchMemOp -> 801 CUDA_ERROR_NOT_SUPPORTED"
    assert choose(told[0]).provider == "fabric"


def test_a_device_that_takes_waits_and_refuses_writes_is_released_all_the_same() -> None:
    """Rank 1 cannot ring rank 0 but by the last provider, so rank 0's waits for it must be ended."""

    def no_writes(name: str, arguments: tuple[Any, ...]) -> int:
        return 801 * (name == "cuStreamWriteValue64")

    def no_imports(name: str, arguments: tuple[Any, ...]) -> int:
        return name == "cuMemImportFromShareableHandle"

    ballots = run([FakeMachine()] * 2, refuse=[no_writes, no_imports], arrival_s=0.5)[0]
    assert choose(ballots).provider == "cuda_ipc"
    assert ballots[0].probes == tuple(Probe(provider=name) for name in EVERY)
    assert [ballot.wait_by for ballot in ballots] == ["spin", "memop"]


def test_without_imex_it_says_so_and_takes_descriptors() -> None:
    """The attribute says that fabric handles exist; cuMemCreate says 800."""
    ballots = run([FakeMachine(imex=False)] * 2)[0]
    choice = choose(ballots)
    assert choice.provider == "posix_fd"
    assert "fabric unavailable: rank 0 on host-0: " in str(choice)
    assert "cuMemCreate -> 800 CUDA_ERROR_NOT_PERMITTED: this process has no IMEX channel" in str(choice)


def test_what_was_asked_for_by_name_is_never_replaced() -> None:
    ballots = run([FakeMachine(imex=False)] * 2)[0]
    with pytest.raises(CapabilityMissing, match=r"fabric was asked for and is unavailable: rank 0 .* 800"):
        choose(ballots, "fabric")
    assert choose(ballots, "cuda_ipc").provider == "cuda_ipc"
    with pytest.raises(CapabilityMissing, match="expected auto or one of fabric, posix_fd, cuda_ipc"):
        choose(ballots, "nccl")


def test_across_machines_only_the_fabric_is_left() -> None:
    domain = FakeDomain()
    machines = [FakeMachine(domain=domain), FakeMachine(domain=domain)]
    begun = time.monotonic()
    ballots = run([machines[0], machines[0], machines[1]])[0]
    assert time.monotonic() - begun < 5
    assert choose(ballots).provider == "fabric"
    for name in ("posix_fd", "cuda_ipc"):
        with pytest.raises(CapabilityMissing, match="rank 2 is on another machine"):
            choose(ballots, name)


def test_machines_without_a_common_fabric_have_nothing() -> None:
    ballots = run([FakeMachine(), FakeMachine()])[0]
    with pytest.raises(CapabilityMissing) as caught:
        choose(ballots)
    assert all(f"{name}: rank 0 on host-0: peer 1: " in str(caught.value) for name in EVERY)


def test_one_dead_imex_daemon_is_found_among_three_machines() -> None:
    """Importers everywhere are told 801; the machine that all failures share is named."""
    domain = FakeDomain()
    machines = [FakeMachine(domain=domain) for _ in range(3)]

    def dies(name: str, arguments: tuple[Any, ...]) -> int:
        machines[1].imex = machines[1].imex and name != "cuMemImportFromShareableHandle"
        return 0

    ballots = run([machines[0], machines[0], machines[1], machines[2]], refuse=dies)[0]
    assert suspects(ballots, "fabric") == ("host-2",)  # named by its first rank
    with pytest.raises(CapabilityMissing, match=r"more\); look at host-2 first"):
        choose(ballots, "fabric")


def test_a_world_of_one_needs_no_peer() -> None:
    ballots = run([FakeMachine()])[0]
    assert choose(ballots).provider == "fabric"
    assert ballots[0].wait_by == "memop"


def test_a_store_that_does_not_arrive_is_not_taken_for_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Barriers that did nothing have been shipped: here the wait must have blocked, and end by the ring alone."""
    silent = {name: (codes, lambda *_: None) for name, (codes, _) in fake_kernels().items()}
    fakes_kernels = [silent, fake_kernels()]
    original = FakeDriver.__init__

    def init(self: FakeDriver, machine: Any = None, **options: Any) -> None:
        options["kernels"] = fakes_kernels.pop()
        original(self, machine, **options)

    monkeypatch.setattr(FakeDriver, "__init__", init)
    ballots = run([FakeMachine()] * 2, arrival_s=0.2)[0]
    with pytest.raises(CapabilityMissing, match=r"fabric: rank 0 .*a wait for rings that came did not end"):
        choose(ballots)


def test_with_one_hardware_queue_for_all_streams_of_a_priority_everything_still_works() -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1: what rings has another priority, so it does not stand behind what waits."""
    told = run([FakeMachine()] * 3, channels=1, arrival_s=1.0)
    assert str(choose(told[0])) == "slabs: fabric"
    assert all(probe == Probe(provider=probe.provider) for ballot in told[0] for probe in ballot.probes)


def test_a_stream_that_cannot_be_released_is_said_and_nothing_is_unmapped_under_it() -> None:
    """One queue for all: to unmap, free or unload would wait for ever, and so would another provider."""
    calls: list[tuple[str, ...]] = []
    refuse = [lambda name, words: calls.append((name,)) or 0, None]
    begun = time.monotonic()
    ballots = run([FakeMachine()] * 2, channels=1, priority_greatest=0, arrival_s=0.1, is_left=True, refuse=refuse)[0]
    assert time.monotonic() - begun < 4
    with pytest.raises(CapabilityMissing, match=r"no provider works: fabric: rank 0 .* did not end within"):
        choose(ballots)
    for name in EVERY[1:]:
        assert "a stream of this device is blocked for good" in ballots[0].probe(name).words
    names = [name for (name,) in calls]
    armed = names.index("cuStreamBatchMemOp")
    assert not SYNCHRONISING & set(names[armed:]), SYNCHRONISING & set(names[armed:])


@pytest.mark.slow  # it races real time
def test_a_slow_ring_has_the_time_it_is_given(caplog: pytest.LogCaptureFixture) -> None:
    """As when two processes take turns on a device: it is not fast, and it works; how long it took is in the log."""

    def kernels() -> dict[bytes, tuple[str, Any]]:
        codes, store = fake_kernels()[b"doorbell_write_kernel"]
        begun: dict[int, float] = {}

        def slow(grid: Any, block: Any, shared: int, words: list[Any]) -> bool:
            if time.monotonic() - begun.setdefault(words[0], time.monotonic()) < 0.2:
                return False
            store(grid, block, shared, words)
            return True

        return {b"doorbell_write_kernel": (codes, slow)}

    with caplog.at_level("INFO"):
        ballots = run([FakeMachine()] * 2, kernels=[kernels(), kernels()])[0]
        assert choose(ballots).provider == "fabric"
        assert "fabric: a wait for rings that came ended within " in caplog.text
        # On busy cores the stream may count as stuck, too, and then what it may still use stays.
        late = run([FakeMachine()] * 2, kernels=[kernels(), kernels()], arrival_s=0.05, is_left=True)[0]
    assert "did not end within" in " ".join(late[0].probe("fabric").failed.values())


def test_a_ring_that_arrives_changed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the wait, for it is large enough; but it is not what the peer stored."""
    codes, _ = fake_kernels()[b"doorbell_write_kernel"]
    wrong = {b"doorbell_write_kernel": (codes, lambda grid, block, shared, words: write_word(words[0], words[1] + 1))}
    original = FakeDriver.__init__

    def init(self: FakeDriver, machine: Any = None, **options: Any) -> None:
        original(self, machine, **{**options, "kernels": wrong})

    monkeypatch.setattr(FakeDriver, "__init__", init)
    with pytest.raises(CapabilityMissing, match=r"fabric: rank 1 rang 0x5eee, but 0x5eef stands in the slab"):
        choose(run([FakeMachine()] * 2)[0])


def test_a_wait_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import whalez.testing.fake_driver as fake_driver

    monkeypatch.setattr(fake_driver, "is_reached", lambda seen, value: True)
    with pytest.raises(CapabilityMissing, match="was over at once: it does not wait"):
        choose(run([FakeMachine()] * 2)[0])


def test_a_rank_that_cannot_even_load_a_kernel_votes_all_the_same() -> None:
    def refuse(name: str, arguments: tuple[Any, ...]) -> int:
        return 209 * (name == "cuLibraryLoadData")

    ballots = run([FakeMachine()] * 2, refuse=[None, refuse])[1]
    with pytest.raises(CapabilityMissing, match=r"rank 1 on host-0: loading doorbell_write_kernel: .* 209 "):
        choose(ballots)


# ---- every call fails once ------------------------------------------------------------------------------------------
def names_of_a_preflight() -> Counter[str]:
    """How often rank 1 of two makes each driver call."""
    names: Counter[str] = Counter()
    run([FakeMachine()] * 2, imported_memops=True, refuse=[None, lambda name, _: names.update([name])])
    return names


def fail_one(name: str, nth: int, code: int, log: pytest.LogCaptureFixture) -> None:
    """Rank 1's call `name` fails for the `nth` time that it is made; once.

    Nobody hangs, nothing is left, and the driver's words are in the error by which the rank ended; or in the vote; or
    in the log, if it was tried again with success, or all had voted. What does not work is not chosen.
    """
    log.clear()
    counts: Counter[str] = Counter()

    def refuse(each: str, arguments: tuple[Any, ...]) -> int:
        counts[each] += 1
        return code * ((each, counts[each]) == (name, nth))

    fds = len(os.listdir("/proc/self/fd"))
    others, mine = attempt([FakeMachine()] * 2, imported_memops=True, refuse=[None, refuse], arrival_s=0.5)
    assert settled_fds(fds) <= fds
    if counts[name] < nth:
        # A stream is asked until it has run, which is a question of time.
        assert name == "cuStreamQuery"
        return
    words = f"{name} -> {code} {real.CUresult(code).name}"
    if isinstance(mine, BaseException):
        # No device, so no preflight; or the context would not be given back, after the vote. `attempt` tried again.
        assert isinstance(mine, DriverError) and words in str(mine), mine
        assert isinstance(others, PeerDied) == (name != "cuDevicePrimaryCtxRelease"), others
        return
    assert mine == others
    assert words in str(mine[1]) + log.text, (mine[1], log.text)
    assert not any(probe.words for probe in mine[0].probes), mine[0]  # it is not the fault of rank 0
    for probe in (mine[1].probe(each) for each in EVERY):  # and of rank 1 nothing else has failed
        assert probe == Probe(provider=probe.provider) or words in str(probe), probe
    try:
        reasons = list(choose(mine).reasons.values())
    except CapabilityMissing as error:
        reasons = [str(error)]
    assert all(words in why for why in reasons), reasons


CODES = (2, 700, 999)  # the device is full, the context is lost, whatever


def test_each_driver_function_may_fail_one_rank_and_the_vote_says_so_and_nothing_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its first call and one of the later ones; the slow tier has all of them."""
    caplog.set_level("WARNING")
    some = random.Random(8)
    codes = itertools.cycle(CODES)
    for name, count in names_of_a_preflight().items():
        for nth in sorted({1, some.randint(min(2, count), count)}):
            fail_one(name, nth, next(codes), caplog)


@pytest.mark.slow  # more than 200 preflights
@pytest.mark.parametrize("code", CODES)
def test_every_call_of_one_rank_may_fail_and_the_vote_says_so_and_nothing_is_left(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    for name, count in names_of_a_preflight().items():
        for nth in range(1, count + 1):
            fail_one(name, nth, code, caplog)


@pytest.mark.parametrize("code", CODES)
def test_what_will_not_be_unmapped_is_unmapped_before_its_owner_has_freed_it(code: int) -> None:
    """Legacy memory does not live until it is unmapped everywhere: all say that they have, then it is freed."""
    order: list[str] = []
    freed = threading.Event()

    def owner(name: str, arguments: tuple[Any, ...]) -> int:
        if name == "cuMemFree":
            order.append(name)
            freed.set()
        return 0

    def reader(name: str, arguments: tuple[Any, ...]) -> int:
        if name != "cuIpcCloseMemHandle":
            return 0
        if order:  # a moment in which an owner that does not wait for this one would free
            freed.wait(0.1)
        order.append(name)
        return code * (order.count(name) == 1)

    ballots = run([FakeMachine()] * 2, refuse=[owner, reader])[0]
    assert order == ["cuIpcCloseMemHandle", "cuIpcCloseMemHandle", "cuMemFree"]
    assert f"cuIpcCloseMemHandle -> {code} " in ballots[1].probe("cuda_ipc").words


def test_a_kernel_that_will_not_be_unloaded_costs_no_vote(caplog: pytest.LogCaptureFixture) -> None:
    refuse = [None, lambda name, _: 999 * (name == "cuLibraryUnload")]
    told = attempt([FakeMachine()] * 2, refuse=refuse, is_left=True)
    assert isinstance(told[0], list) and told[0] == told[1]
    assert caplog.text.count("kernels: giving back: cuLibraryUnload -> 999 CUDA_ERROR_UNKNOWN") == 2


def test_a_gather_that_fails_leaves_nothing() -> None:
    fake = FakeDriver(kernels=fake_kernels())
    for last in range(3 * len(EVERY) + 1):
        count = itertools.count()

        def gather(mine: bytes, count: Any = count, last: int = last) -> list[bytes]:
            if next(count) == last:
                raise CapabilityMissing("rank 1 died")
            return [mine]

        with fake_processes(fake), Device(Driver(fake), 0) as device:
            with pytest.raises(CapabilityMissing, match="rank 1 died"):
                preflight(device, rank=0, world=1, host="here", gather=gather, image=image)
            assert fake.leaks() == {"contexts": 1}


@pytest.mark.parametrize("last", range(3 * len(EVERY) + 1))
def test_a_peer_that_dies_in_between_leaves_nothing_blocked(last: int) -> None:
    """What is given back waits for the device, so the streams that wait for the peer's rings are released first."""
    machine = FakeMachine()
    fakes = [FakeDriver(machine, kernels=fake_kernels()) for _ in range(2)]
    gathering = Gathering(2)
    said: list[str] = []

    def one(rank: int) -> None:
        count, gather = itertools.count(), gathering.of(rank)

        def dying(mine: bytes) -> Sequence[bytes]:
            if next(count) == last:
                gathering.barrier.wait()  # both are here
                raise CapabilityMissing(f"rank {1 - rank} died")
            return gather(mine)

        try:
            with Device(Driver(fakes[rank]), 0) as device:
                preflight(device, rank=rank, world=2, host="here", gather=dying, machine=machine.identity, image=image)
        except CapabilityMissing as error:
            said.append(str(error))

    with fake_processes(*fakes):
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(said) == ["rank 0 died", "rank 1 died"]
        assert [fake.leaks() for fake in fakes] == [{}, {}]


# ---- the decision ---------------------------------------------------------------------------------------------------
def ballot(rank: int, machine: str, **failed: dict[int, str] | str) -> Ballot:
    probes = []
    for name in EVERY:
        what = failed.get(name, {})
        probes.append(Probe(provider=name, words=what) if isinstance(what, str) else Probe(provider=name, failed=what))
    return Ballot(
        rank=rank,
        host=f"host-{machine}",
        machine=machine.encode(),
        device="x",
        driver_version=13_000,
        probes=tuple(probes),
        memops=Memops(),
    )


def test_one_objection_is_enough() -> None:
    ballots = [ballot(rank, "a") for rank in range(7)] + [ballot(7, "a", fabric="no", posix_fd={3: "EPERM"})]
    choice = choose(ballots)
    assert choice.provider == "cuda_ipc"
    assert choice.reasons == {"fabric": "rank 7 on host-a: no", "posix_fd": "rank 7 on host-a: peer 3: EPERM"}
    for order in itertools.permutations(ballots[5:]):
        assert choose([*ballots[:5], *order]).provider == "cuda_ipc"


def test_a_provider_that_was_not_tried_is_not_chosen() -> None:
    one = ballot(0, "a")
    without = Ballot(rank=1, host="h", machine=b"a", device="x", driver_version=1, probes=one.probes[1:], memops=None)
    assert choose([one, without]).provider == "posix_fd"
    assert without.wait_by == "spin"


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], ()),
        ([(0, 1), (1, 0), (1, 2), (2, 1)], ("host-1",)),
        ([(0, 1), (1, 0), (1, 2)], ()),  # something still crosses its border
        ([(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)], ()),  # all of them: none stands out
    ],
)
def test_the_machine_that_explains_all_failures_is_named(
    pairs: list[tuple[int, int]], expected: tuple[str, ...]
) -> None:
    ballots = [ballot(rank, str(rank), fabric={peer: "801" for one, peer in pairs if one == rank}) for rank in range(3)]
    assert suspects(ballots, "fabric") == expected


def test_by_hand_without_a_driver() -> None:
    """The command says what is missing, at once, and exits non-zero."""
    done = subprocess.run(
        [sys.executable, "-m", "whalez.fabric.cuda.preflight"], capture_output=True, text=True, timeout=60
    )
    if done.returncode == 0:
        pytest.skip("this machine has a GPU: " + done.stdout)
    assert "preflight: " in done.stderr
    assert "Traceback" not in done.stderr


# ---- over the hub ---------------------------------------------------------------------------------------------------
class Quiet:
    """A sequencer with nothing to do: these worlds never run."""

    def step(self, event: Any, now_ns: int, launch: int) -> list[Any]:
        return [Broadcast(Died(rank=event.rank, how=event.how))] if isinstance(event, PeerGone) else []


def hubs_of(kind: str, world: int, folder: Path) -> list[Any]:
    if kind == "local":
        return list(LocalHub.world(world, Quiet()))
    address = f"ipc://{folder}/hub.sock"
    return [ZmqHub(rank, world, address, sequencer=None if rank else Quiet()) for rank in range(world)]


def voted(
    kind: str, folder: Path, machines: list[FakeMachine], asked: str = "auto", quits: int = -1
) -> list[Agreement | Exception]:
    """What every rank gets out of `agree` between the table and the start of a hub; rank `quits` leaves instead."""
    world = len(machines)
    fakes = [FakeDriver(machine, kernels=fake_kernels()) for machine in machines]
    hubs = hubs_of(kind, world, folder)

    def one(rank: int) -> Agreement | Exception:
        hub = hubs[rank]
        entry = SlabEntry(rank=rank, incarnation=f"i{rank}", host="here", pid=1, ticket=b"")
        try:
            hub.start(Hello(entry=entry, world=world, fingerprint={}), 20)
            if rank == quits:
                hub.gather(
                    msgspec.msgpack.encode({"provider": "fabric", "ticket": b""}), 20
                )  # takes part in the first round, and is gone in the second
                hub.close()
            with Device(Driver(fakes[rank]), 0) as device:
                agreement = agree(
                    device, rank=rank, world=world, host=f"host-{rank}", gather=lambda data: hub.gather(data, 20),
                    asked=asked, machine=machines[rank].identity, image=image,
                )  # fmt: skip
            hub.mapped(20)
            return agreement
        except WhalezError as error:
            return error

    with fake_processes(*fakes), ThreadPoolExecutor(world) as pool:
        try:
            got = list(pool.map(one, range(world)))
        finally:
            list(pool.map(lambda hub: hub.close(), hubs))
        assert [fake.leaks() for fake in fakes] == [{}] * world
    return got


over_hubs = pytest.mark.parametrize("kind", ["local", "ipc"])


@over_hubs
def test_the_vote_travels_over_the_hub(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One rank of three has no IMEX: all take descriptors, and log and status say why, in the driver's words."""
    domain = FakeDomain()
    machine = FakeMachine(domain=domain)
    refuse_fabric = FakeMachine(domain=domain, imex=False, identity=machine.identity, legacy=machine.legacy)
    with caplog.at_level("INFO"):
        got = voted(kind, tmp_path, [machine, machine, refuse_fabric])
    assert all(isinstance(each, Agreement) for each in got), got
    words = "fabric unavailable: rank 2 on host-2: fabric: own slab of rank 2"
    for rank, each in enumerate(got):
        assert isinstance(each, Agreement)
        assert each.choice.provider == "posix_fd"
        assert words in str(each) and "800 CUDA_ERROR_NOT_PERMITTED" in str(each)
        imported = f"{'posix_fd' if rank == 2 else 'fabric'}, peer {0 if rank else 1}"
        assert f"waits by memop; wait imported: {imported}: cuStreamBatchMemOp -> 1 CUDA_ERROR_INVALID" in str(each)
        assert f"rank {rank} on Fake H200, driver 13000: slabs: posix_fd; {words}" in caplog.text


@over_hubs
def test_what_was_asked_for_is_refused_on_every_rank(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    got = voted(kind, tmp_path, [FakeMachine(imex=False)] * 2, asked="fabric")
    assert [type(each) for each in got] == [CapabilityMissing] * 2
    assert str(got[0]) == str(got[1])
    assert "fabric was asked for and is unavailable: rank 0" in str(got[0])
    assert caplog.text.count("fabric was asked for and is unavailable") == 2


@over_hubs
def test_a_rank_that_is_gone_in_the_vote_ends_it_for_all(kind: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    got = voted(kind, tmp_path, [FakeMachine()] * 3, quits=2)
    assert [type(each) for each in got[:2]] == [PeerDied, PeerDied]
    assert time.monotonic() - begun < 10


def test_the_ballot_of_a_large_world_fits_into_an_offer() -> None:
    """Every peer of 256 failed in every way, each with a long story."""
    with fake_processes(fake := FakeDriver(kernels=fake_kernels())), Device(Driver(fake), 0) as device:
        layout = module._probe_layout(256)
        probes = []
        for name, provider in PROVIDERS.items():
            slabs = provider(layout, device=device, rank=0, incarnation="x", machine=b"m" * 16)
            attempt = module._Attempt(slabs, None, "w" * 10**5)
            attempt.failed = dict.fromkeys(range(1, 256), f"{name}: " + "x" * 500)
            probes.append(attempt.probe())
    assert len(msgspec.msgpack.encode(probes)) < OFFER_BYTES_MAX - 1000
    assert probes[0].failed[255].startswith("fabric: xxx")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (msgspec.msgpack.encode({"provider": "nccl", "ticket": b""}), "rank 1 tries nccl, this rank fabric"),
        (b"\xc1", "rank 1 sent what is no part"),
    ],
)
def test_what_no_rank_of_this_version_sends_is_refused(part: bytes, said: str) -> None:
    fake = FakeDriver(kernels=fake_kernels())
    with fake_processes(fake), Device(Driver(fake), 0) as device:
        with pytest.raises(FabricError, match=said):
            preflight(device, rank=0, world=2, host="here", gather=lambda mine: [mine, part], image=image)
        assert fake.leaks() == {"contexts": 1}


# ---- bad input, from the outside ------------------------------------------------------------------------------------
def fake_driver(**options: Any) -> Driver:
    return Driver(FakeDriver(kernels=fake_kernels(), **options))


BAD = {
    "no device": (
        partial(fake_driver, machine=FakeMachine(gpus=[])), [],
        "device 0: cuInit -> 100 CUDA_ERROR_NO_DEVICE: no GPU is visible: see `nvidia-smi`",
    ),
    "old driver": (
        partial(fake_driver, version=12_080), [],
        "device 0: cuDriverGetVersion -> 12080: the driver is for CUDA 12.8, whalez needs one for 13.0 or newer",
    ),
    "below sm_80": (
        partial(fake_driver, machine=FakeMachine(gpus=[FakeGpu(capability=(7, 5))])), [],
        "device 0: cuDeviceGetAttribute -> compute capability 7.5 (Fake H200): whalez needs 8.0 or newer",
    ),
    "no such device": (fake_driver, ["3"], "device 3: cuDeviceGetCount -> 1: see `nvidia-smi -L`"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence_and_a_code(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_driver, arguments, said = BAD[what]
    begun = time.monotonic()
    assert module.main(arguments, make_driver=make_driver) == 1
    assert time.monotonic() - begun < 1
    assert f"preflight: {said}" in capsys.readouterr().err


def without_imex() -> Driver:
    return fake_driver(machine=FakeMachine(imex=False))


def full() -> Driver:
    return fake_driver(machine=FakeMachine(gpus=[FakeGpu(total=10**6)]))


@pytest.mark.parametrize(
    ("make_driver", "arguments", "code", "said"),
    [
        (without_imex, [], 0, "slabs: posix_fd; fabric unavailable: rank 0 on this machine: "),
        (
            without_imex,
            ["--slabs", "fabric"],
            1,
            "cuMemCreate -> 800 CUDA_ERROR_NOT_PERMITTED: this process has no IMEX",
        ),
        (full, [], 1, "2097152 bytes do not fit; the default pool had 0 bytes reserved"),
    ],
)
def test_by_hand_between_two_processes(
    make_driver: Any, arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on an H200 without IMEX: it says so, takes descriptors and exits 0; by name it is refused."""
    assert module.main(arguments, make_driver=make_driver, image=image) == code
    out, err = capsys.readouterr()
    assert said in (err if code else out)
