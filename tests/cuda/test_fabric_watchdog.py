"""Launches that will not end, over the fake driver: what is reported, the stream drains, the device lives on."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers.cuda_world import Rank, entry_of, fake_world, harness_kernels, image
from whalez.errors import DoorbellTimeout, FabricError
from whalez.fabric.cuda.depth import wait_for_room
from whalez.fabric.cuda.doorbell import RELEASED, BellMemory, DeviceBells, Peers, is_reached
from whalez.fabric.cuda.driver import DriverError
from whalez.fabric.cuda.kernels import (
    GAVE_UP,
    REPORT_STATE,
    STOPPED,
    doorbell_ring_kernel,
    doorbell_wait_kernel,
    doorbell_write_kernel,
)
from whalez.fabric.cuda.stream import CudaStream, KernelSet
from whalez.fabric.cuda.watchdog import Watchdog
from whalez.fabric.doorbell import gang_value
from whalez.fabric.layout import BELL_DATA, BELL_DISPATCH, BELL_FREE
from whalez.testing.fake_driver import read_word, write_word
from whalez.testing.simt.machine import CLOCK

KERNELS = [doorbell_ring_kernel, doorbell_wait_kernel, doorbell_write_kernel]


class Armed:
    """A rank with bells and a watchdog."""

    def __init__(self, stack: ExitStack, rank: Rank, addresses: list[int], **options: Any) -> None:
        self.rank, self.fake, device = rank, rank.fake, rank.device
        kernels = stack.enter_context(KernelSet(device, KERNELS, image))
        memory = BellMemory(device, rank.slabs.layout, addresses, rank.slabs.rank)
        stack.callback(memory.close)
        self.stream = stack.enter_context(CudaStream(device, kernels, has_memops=rank.fake.memops))
        self.bells = DeviceBells(
            self.stream,
            rank.slabs.layout,
            addresses,
            rank.slabs.rank,
            tables=memory.tables,
            report=memory.report,
            wait_by="memop" if rank.fake.memops else "spin",
            steps_per_launch=4,
            **options,
        )
        self.watchdog = Watchdog(device, kernels, self.bells, self.stream, stuck_s=5)
        stack.callback(self.watchdog.close)
        self.owned = (kernels, memory, self.stream, self.watchdog)

    def close(self) -> None:
        for each in reversed(self.owned):
            each.close()

    def join(self, **how: Any) -> None:
        """`how`: what of the watchdog is changed before."""
        for name, value in how.items():
            setattr(self.watchdog, name, value)
        self.watchdog.join()


@pytest.fixture(params=["memop", "spin"])
def world(request: pytest.FixtureRequest) -> Iterator[list[Armed]]:
    with make(3, memops=request.param == "memop") as world:
        yield world


@contextmanager
def make(world: int, *, memops: bool = True, budget_ns: int = 2 * 10**8, **options: Any) -> Iterator[list[Armed]]:
    with fake_world("fabric", world, memops=memops, **options) as ranks, ExitStack() as stack:
        for rank in ranks:
            rank.slabs.create()
        table = [entry_of(rank.slabs) for rank in ranks]
        slabs = [rank.slabs.open_all(table) for rank in ranks]
        yield [
            Armed(stack, rank, [slab.address for slab in mine], budget_ns=budget_ns)
            for rank, mine in zip(ranks, slabs, strict=True)
        ]


def test_a_launch_that_ends_is_joined(world: list[Armed]) -> None:
    first, second, third = world
    peers = Peers.of([1, 2])
    first.bells.wait(BELL_DATA, peers, 7)
    for other in (second, third):
        other.bells.ring(BELL_DATA, Peers.of([0]), 7)
    first.join(stuck_s=5)
    first.bells.begin_launch()
    assert first.bells.waits == []


def test_a_peer_that_never_rings_is_named_with_window_expected_and_seen(world: list[Armed]) -> None:
    """As when a rank is killed between publishing and ringing: every survivor says so and returns within the bound."""
    first, second, third = world
    old, new = gang_value(4, 11), gang_value(4, 12)
    first.bells.ring(BELL_DATA, Peers.of([1]), new)
    second.bells.ring(BELL_DATA, Peers.of([0]), new)
    for survivor in (first, second):
        others = Peers.of({0, 1} - {survivor.rank.slabs.rank})
        third.bells.ring(BELL_DATA, Peers.of([survivor.rank.slabs.rank]), old)
        survivor.bells.wait(BELL_DATA, others, new, layer=6)
        survivor.bells.wait(BELL_DATA, Peers.of([2]), new, layer=6)
        survivor.bells.wait(BELL_FREE, Peers.of([2]), new, layer=6)  # there is more behind it, and all of it drains
        survivor.bells.wait(BELL_DATA, Peers.of([2]), new + 1, layer=7)
    third.fake.calls.clear()  # it does nothing any more
    for survivor in (first, second):
        begun = time.monotonic()
        with pytest.raises(DoorbellTimeout) as caught:
            survivor.join(stuck_s=0.2, slice_s=0.02)
        assert time.monotonic() - begun < 2
        error = caught.value
        assert (error.peer, error.kind, error.expected, error.seen) == (2, "data", new, old)
        assert error.where == "seq 4 window 12 layer 6"
        assert survivor.stream.is_done()
        assert survivor.bells.failed is error
        with pytest.raises(AssertionError):  # nothing more is queued on a launch that failed
            survivor.bells.ring(BELL_DATA, Peers.of([2]), new + 9)
        with pytest.raises(AssertionError, match="the launch before failed"):
            survivor.bells.begin_launch()
        survivor.stream.zero(survivor.rank.slabs._slabs[0].address + 8192, 8)  # the device works
        assert survivor.stream.is_done()
    assert third.fake.calls == []


def test_every_awaited_line_is_released_from_another_stream_and_no_other_line() -> None:
    with make(3) as world:
        first = world[0]
        first.bells.wait(BELL_DATA, Peers.of([1]), 5)
        first.bells.wait(BELL_DISPATCH, Peers.of([2]), 9)
        begun = len(first.fake.calls)
        assert first.watchdog.release()
        writes = [call for call in first.fake.calls[begun:] if call.name == "cuStreamWriteValue64"]
        lines = {first.bells.line(BELL_DATA, 1), first.bells.line(BELL_DISPATCH, 2)}
        assert {(call.arguments[1], call.arguments[2]) for call in writes} == {(line, RELEASED) for line in lines}
        assert all(call.arguments[0] != first.stream.handle for call in writes)
        assert [read_word(first.bells.line(BELL_DATA, peer)) for peer in range(3)] == [0, RELEASED, 0]


def test_a_late_ring_that_lowers_a_released_line_does_not_block_the_drain() -> None:
    with make(2) as world:
        first = world[0]
        line = first.bells.line(BELL_DATA, 1)
        first.bells.wait(BELL_DATA, Peers.of([1]), 5)
        first.bells.wait(BELL_DATA, Peers.of([1]), 6)
        lowered: list[int] = []

        def lower(name: str, arguments: tuple[Any, ...]) -> int:
            if name == "cuStreamQuery" and read_word(line) == RELEASED and not lowered:
                lowered.append(1)
                first.fake._streams[first.stream.handle].queue.append(
                    ("wait again", lambda: is_reached(read_word(line), 7))
                )
                write_word(line, 4)
            return 0

        first.fake.refuse = lower
        assert first.watchdog.release()
        assert lowered


def test_the_released_value_ends_every_wait_and_the_largest_one_would_not() -> None:
    for value in (1, 5, gang_value(2**42, 2**20 - 1), 2**63 - 1):
        assert is_reached(RELEASED, value)
        assert not is_reached(2**64 - 1, value)
    assert is_reached(5, 5) and is_reached(6, 5) and not is_reached(4, 5)


def test_a_launch_is_not_stuck_while_somebody_in_the_world_gets_on() -> None:
    with make(3) as world:
        first, second, third = world
        first.bells.wait(BELL_DATA, Peers.of([1]), 5)
        stop = threading.Event()
        seen: list[float] = []

        def work() -> None:
            for _ in range(12):
                stop.wait(0.05)
                third.bells.raise_progress()  # not even the rank that is waited for
            second.bells.ring(BELL_DATA, Peers.of([0]), 5)

        worker = threading.Thread(target=work)
        worker.start()
        begun = time.monotonic()
        first.join(stuck_s=0.3, slice_s=0.02, on_slice=lambda: seen.append(time.monotonic()))
        assert time.monotonic() - begun > 0.4
        assert len(seen) > 5
        worker.join()


@pytest.mark.parametrize("error", [FabricError("rank 1 died: killed"), KeyboardInterrupt()], ids=["died", "interrupt"])
def test_a_launch_that_is_left_by_an_error_is_failed_and_released(error: BaseException) -> None:
    with make(2) as world:
        first = world[0]
        first.bells.wait(BELL_DATA, Peers.of([1]), 5)

        def leave() -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            first.join(stuck_s=60, slice_s=0.01, on_slice=leave)
        assert caught.value is error
        assert first.stream.is_done()
        assert str(error) in str(first.bells.failed)


def stuck(world: list[Armed]) -> Armed:
    """Rank 0, in a wait for two that do not ring, and one behind it."""
    first = world[0]
    first.bells.wait(BELL_DATA, Peers.of([1, 2]), 5)
    first.bells.wait(BELL_FREE, Peers.of([1]), 6)
    return first


def calls_of_a_release(memops: bool) -> list[str]:
    with make(3, memops=memops) as world:
        first, begun = stuck(world), []
        release = first.watchdog.release
        first.watchdog.release = lambda: begun.append(len(first.fake.calls)) or release()  # type: ignore[method-assign, func-returns-value]
        with pytest.raises(DoorbellTimeout):
            first.join(stuck_s=0.02, slice_s=0.01)
        return first.fake.names(begun[0])


@pytest.mark.parametrize("memops", [True, False], ids=["memop", "spin"])
def test_a_failing_call_of_the_release_stops_no_other(memops: bool) -> None:
    """Every call after a launch was given up fails once: the stream drains and the report is that of the launch."""
    names = calls_of_a_release(memops)
    assert {"cuStreamQuery", "cuStreamWriteValue64" if memops else "cuLaunchKernel"} <= set(names)
    for at, call in enumerate(names):
        with make(3, memops=memops) as world:
            first = stuck(world)
            release = first.watchdog.release

            def failing(first: Any = first, at: int = at, release: Any = release) -> bool:
                assert isinstance(first.bells.failed, DoorbellTimeout), "marked before anything can fail"
                first.fake.fail_at = len(first.fake.calls) + at
                return bool(release())

            first.watchdog.release = failing  # type: ignore[method-assign]
            with pytest.raises(DoorbellTimeout) as caught:
                first.join(stuck_s=0.02, slice_s=0.01)
            assert first.fake.calls[first.fake.fail_at or 0].name == call
            assert first.bells.failed is caught.value
            assert first.stream.is_done(), (at, call)
            assert first.fake.stuck() == []


def test_a_line_whose_write_is_refused_is_raised_by_a_kernel(caplog: pytest.LogCaptureFixture) -> None:
    with make(3) as world:
        first = stuck(world)
        lines = [first.bells.line(BELL_DATA, 1), first.bells.line(BELL_FREE, 1)]
        first.fake.refuse = lambda name, words: int(name == "cuStreamWriteValue64" and words[1] in lines)
        with pytest.raises(DoorbellTimeout, match="rank 1's data doorbell"):
            first.join(stuck_s=0.02, slice_s=0.01)
        assert first.stream.is_done()
        assert [read_word(line) for line in lines] == [RELEASED] * 2
        assert caplog.text.count("cuStreamWriteValue64 -> 1 ") == 1  # not once for each line and round
        first.fake.refuse = None


def test_a_context_that_is_lost_in_the_release_does_not_hide_why_it_was_needed() -> None:
    with make(3) as world:
        first = stuck(world)
        first.fake.refuse = lambda name, _: 719 * (name == "cuStreamWriteValue64")
        with pytest.raises(
            FabricError, match=r"is lost: cuStreamWriteValue64 -> 719 .*: waited .* rank 1's data"
        ) as told:
            first.join(stuck_s=0.02, slice_s=0.01)
        assert isinstance(told.value.__cause__, DoorbellTimeout)
        assert first.bells.failed is told.value.__cause__
        first.fake.refuse = None
        assert first.watchdog.release()


def test_a_stream_that_does_not_drain_is_told_and_joins_within_the_bound() -> None:
    with make(2) as world:
        first = world[0]
        queue = first.fake._streams[first.stream.handle].queue
        queue.append(("a kernel that does not end", lambda: False))
        begun = time.monotonic()
        with pytest.raises(FabricError, match=r"did not drain within 0.1 s.*a kernel does not end"):
            first.join(stuck_s=0.1, slice_s=0.02, drain_s=0.1)
        assert time.monotonic() - begun < 2
        assert first.bells.failed is not None
        queue.clear()


def test_a_kernel_that_failed_is_a_driver_error() -> None:
    with make(2) as world:
        first = world[0]
        first.fake.refuse = lambda name, _: 700 * (name == "cuStreamQuery")
        with pytest.raises(DriverError, match="cuStreamQuery -> 700 CUDA_ERROR_ILLEGAL_ADDRESS: a kernel"):
            first.join(stuck_s=1)
        first.fake.refuse = None


def test_a_peers_memory_that_cannot_be_read_any_more_does_not_stop_the_report() -> None:
    with make(2) as world:
        first = world[0]
        theirs = first.bells.addresses[1]
        size = first.rank.slabs.layout.nbytes

        def gone(name: str, arguments: tuple[Any, ...]) -> int:
            return 1 * (name == "cuMemcpyDtoHAsync" and theirs <= arguments[1] < theirs + size)

        first.fake.refuse = gone
        first.bells.wait(BELL_DATA, Peers.of([1]), 5, layer=3)
        with pytest.raises(DoorbellTimeout, match="rank 1's data doorbell"):
            first.join(stuck_s=0.1, slice_s=0.02)
        first.fake.refuse = None


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuStreamQuery"])
@pytest.mark.parametrize("code", [214, 220, 226, 700, 709, 719, 810, 911])
def test_a_context_that_is_lost_while_looking_is_not_a_time_out(call: str, code: int) -> None:
    """Nobody failed to ring: this rank is broken, and must not be told as the fault of a peer."""
    with make(2) as world:
        first = world[0]
        other = first.watchdog._other.handle
        first.bells.wait(BELL_DATA, Peers.of([1]), 5)
        first.fake.refuse = lambda name, words: code * (name == call and words[-1] == other)
        with pytest.raises(DriverError, match=rf"{call} -> {code} CUDA_ERROR_") as caught:
            first.join(stuck_s=0.1, slice_s=0.02)
        assert caught.value.advice
        first.fake.refuse = None
        assert first.watchdog.release()


# ---- with the kernel that spins -------------------------------------------------------------------------------------
@contextmanager
def spinning(budget_ns: int) -> Iterator[Armed]:
    """Rank 0 of three, with two waits on its stream by the kernel itself: rank 1 has rung for both, rank 2 for none.

    budget_ns: of the harness's time, of which a spin takes some tenths of a microsecond for each look
    """
    old, new = gang_value(4, 11), gang_value(4, 12)
    with (
        ThreadPoolExecutor(1) as pool,
        make(3, memops=False, budget_ns=budget_ns, kernels=harness_kernels(pool)) as world,
    ):
        for peer, value in ((1, new), (1, new + 1), (2, old)):
            world[peer].bells.ring(BELL_DATA, Peers.of([0]), value)
            world[peer].bells.raise_progress()
            world[peer].join()
        for value in (new, new + 1):
            world[0].bells.wait(BELL_DATA, Peers.of([1, 2]), value, layer=6)
        yield world[0]
        world[0].rank.device.driver.cuCtxSynchronize()  # lines that are still being raised lie in the slab


def check_spinning(first: Armed, error: DoorbellTimeout) -> None:
    assert (error.peer, error.kind) == (2, "data")
    assert (error.expected, error.seen) == (gang_value(4, 12), gang_value(4, 11))
    assert error.where == "seq 4 window 12 layer 6"
    assert first.bells.failed is error
    assert first.stream.is_done()


def test_the_watchdog_ends_a_kernel_that_spins_for_a_bell_that_never_comes() -> None:
    """By the report's state word: the kernels that raise the lines do not begin before the one that spins has ended."""
    looks: list[int] = []
    with spinning(budget_ns=2**62) as first:
        with pytest.raises(DoorbellTimeout) as caught:
            first.join(stuck_s=0.1, slice_s=0.02, on_slice=lambda: looks.append(read_word(CLOCK)))
        check_spinning(first, caught.value)
        assert caught.value.waited_s >= 0.1
        assert len(set(looks)) == len(looks) > 3, "it spun until it was given up"
        assert read_word(first.bells._report + 8 * REPORT_STATE) == STOPPED
        assert first.bells.report() is None  # the kernel has nothing to say: it was told


def test_a_kernel_whose_budget_runs_out_ends_by_itself_and_its_report_is_what_join_raises() -> None:
    with spinning(budget_ns=100_000) as first:
        with pytest.raises(DoorbellTimeout) as caught:
            first.join(stuck_s=60, slice_s=0.001)
        check_spinning(first, caught.value)
        assert 200e-6 <= caught.value.waited_s < 300e-6  # of the harness: two budgets, for others had made progress
        assert read_word(first.bells._report + 8 * REPORT_STATE) == GAVE_UP
        assert read_word(first.bells.line(BELL_DATA, 2)) == gang_value(4, 11)  # nobody had to raise it


def superstep(first: Armed) -> None:
    """Thousands of entries, the first of them a wait for a peer that does not ring."""
    slab = first.bells.addresses[0] + first.rank.slabs.layout.offset_of("latent")
    for layer in range(1000):
        first.bells.wait(BELL_DATA, Peers.of([1]), layer + 5, layer=layer)
        first.stream.zero(slab, 8)
        first.bells.raise_progress()
    first.join()


def test_a_peer_that_dies_while_the_queue_is_full_ends_the_launch(world: list[Armed]) -> None:
    """The host never stands in a call of the driver (the fake would say so), so it sees that nothing moves."""
    first = world[0]
    first.watchdog.stuck_s, first.watchdog.slice_s = 0.1, 0.02
    begun = time.monotonic()
    with pytest.raises(DoorbellTimeout) as caught:
        superstep(first)
    assert time.monotonic() - begun < 3
    assert (caught.value.peer, caught.value.kind, caught.value.expected, caught.value.seen) == (1, "data", 5, 0)
    assert first.bells.failed is caught.value
    assert first.stream.is_done()


def test_what_on_slice_raises_while_the_queue_is_full_comes_through() -> None:
    with make(2) as world:
        first = world[0]

        def fatal() -> None:
            raise FabricError("rank 1 died: killed")

        first.watchdog.on_slice, first.watchdog.slice_s = fatal, 0.01
        with pytest.raises(FabricError, match="rank 1 died"):
            superstep(first)
        assert first.stream.is_done()


def test_a_superstep_that_is_longer_than_the_queue_goes_on_as_its_peer_does() -> None:
    with make(2) as world:
        first, second = world
        first.watchdog.slice_s, first.watchdog.on_slice = 0.001, lambda: ring(3000)
        rung = 4

        def ring(upto: int) -> None:
            nonlocal rung
            for value in range(rung + 1, min(rung + 100, upto) + 1):
                second.bells.ring(BELL_DATA, Peers.of([0]), value)
            assert second.stream.is_done()
            rung = min(rung + 100, upto)

        superstep(first)
        assert first.bells.failed is None
        assert rung >= 1004


def test_a_stream_outlives_its_watchdog() -> None:
    with make(2) as world:
        first = world[0]
        assert first.stream.depth.when_full == first.watchdog._wait
        first.watchdog.close()
        assert first.stream.depth.when_full is wait_for_room


def test_more_lines_than_a_stream_takes_are_raised_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whalez.fabric.cuda.watchdog._ROUND", 2)
    with make(4) as world:
        first = world[0]
        for peer in (1, 2, 3):
            first.bells.wait(BELL_DATA, Peers.of([peer]), 5)
        first.bells.wait(BELL_FREE, Peers.of([1, 2]), 5)
        assert first.watchdog.release()
        raised = {first.bells.line(BELL_DATA, peer) for peer in (1, 2, 3)}
        assert all(read_word(line) == RELEASED for line in raised)


def test_no_copy_is_queued_behind_one_that_did_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(2) as world:
        first = world[0]
        queue = first.fake._streams[first.watchdog._other.handle].queue
        queue.append(("a copy that does not end", lambda: False))
        begun = len(first.fake.calls)
        assert not first.watchdog._fetch(0, first.bells.addresses[0], 8, bound_s=0.01)
        first.watchdog._state()
        assert "cuMemcpyDtoHAsync" not in first.fake.names(begun)
        queue.clear()
        assert first.watchdog._fetch(0, first.bells.addresses[0], 8)
        slow = threading.Event()
        original = first.fake._enqueue
        monkeypatch.setattr(first.fake, "_enqueue", lambda s, label, work: original(s, label, slow.is_set))
        begun = len(first.fake.calls)
        assert not first.watchdog._fetch(0, first.bells.addresses[0], 8, bound_s=0.01)
        assert not first.watchdog._fetch(0, first.bells.addresses[0], 8, bound_s=0.01)
        assert first.fake.names(begun).count("cuMemcpyDtoHAsync") == 1
        slow.set()


def test_watching_neither_allocates_nor_synchronises_nor_touches_the_blocked_stream() -> None:
    """A call that waits for the device would wait for the very stream that is to be released."""
    with make(2) as world:
        first = world[0]
        first.bells.wait(BELL_DATA, Peers.of([1]), 5)
        begun = len(first.fake.calls)
        with pytest.raises(DoorbellTimeout):
            first.join(stuck_s=0.1, slice_s=0.02)
        names = set(first.fake.names(begun))
        assert names == {"cuCtxSetCurrent", "cuStreamQuery", "cuMemcpyDtoHAsync", "cuStreamWriteValue64"}
        created = [call for call in first.fake.calls if call.name == "cuStreamCreateWithPriority"]
        assert [call.arguments[1] for call in created] == [0, -5]  # its own hardware queue


def test_an_error_at_any_call_of_arming_and_disarming_leaves_nothing() -> None:
    with fake_world("fabric", 2) as ranks:
        for rank in ranks:
            rank.slabs.create()
        addresses = [slab.address for slab in ranks[0].slabs.open_all([entry_of(rank.slabs) for rank in ranks])]
        held, fds = ranks[0].fake.leaks(), len(os.listdir("/proc/self/fd"))
        begun = len(ranks[0].fake.calls)
        with ExitStack() as stack:
            Armed(stack, ranks[0], addresses)
        names = ranks[0].fake.names(begun)
        assert {"cuStreamDestroy", "cuMemFreeHost", "cuMemFree", "cuLibraryUnload"} <= set(names)
        for (at, call), code in itertools.product(enumerate(names), (2, 700, 999)):
            ranks[0].fake.fail_at, ranks[0].fake.fail_code = len(ranks[0].fake.calls) + at, code
            made: list[Armed] = []
            with pytest.raises(DriverError) as caught, ExitStack() as stack:
                made.append(Armed(stack, ranks[0], addresses))
            assert (caught.value.call, caught.value.code) == (call, code)
            for each in made:
                each.close()  # goes on where it failed; what was given back, is
            assert ranks[0].fake.leaks() == held, (at, call)
        assert len(os.listdir("/proc/self/fd")) == fds
