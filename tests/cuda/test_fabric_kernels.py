"""The doorbell kernels, compiled and run on the CPU; what their PTX says; and two ranks' bells over the harness."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from helpers.cuda_world import make_layout
from helpers.mutate import assert_caught, mutate, seeds
from whalez.errors import ConfigError
from whalez.fabric.cuda.doorbell import DeviceBells, Peers, bell_tables
from whalez.fabric.cuda.kernels import (
    GAVE_UP,
    REPORT_BYTES,
    REPORT_EXPECTED,
    REPORT_PEER,
    REPORT_SEEN,
    REPORT_STATE,
    REPORT_TAG,
    REPORT_WAITED_NS,
    STOPPED,
    WORLD_MAX,
    doorbell_ring_kernel,
    doorbell_wait_kernel,
    doorbell_write_kernel,
)
from whalez.fabric.doorbell import STRIDE, gang_value
from whalez.fabric.layout import BELL_DATA, BELL_FREE, BELL_LAUNCH, LINE_BYTES, SlabLayout, SlabSpec
from whalez.ops.device.compile import compile_ptx
from whalez.testing import simt

pytestmark = pytest.mark.usefixtures("device")  # the harness, and a GPU with -m gpu

LINE_WORDS = LINE_BYTES // 8
KERNELS = [doorbell_ring_kernel, doorbell_wait_kernel, doorbell_write_kernel]


# ---- what the PTX says ---------------------------------------------------------------------------------------------
def accesses(kernel: Any) -> list[str]:
    """Every instruction that touches memory other than parameters, operands cut off."""
    text = compile_ptx(kernel, "sm_80")
    found = re.findall(r"^\s*(?:@\S+\s+)?((?:ld|st|atom|red|fence|membar)\S*)\s", text, re.M)
    return [each for each in found if not each.startswith("ld.param")]


@pytest.mark.no_gpu
def test_a_ring_is_a_release_store_to_the_system_and_nothing_else_is_stored() -> None:
    found = accesses(doorbell_ring_kernel)
    stores = [each for each in found if each.startswith("st")]
    assert stores and set(stores) == {"st.release.sys.global.u64"}
    assert set(found) - set(stores) == {"ld.global.u64"}  # the table of addresses, which nobody writes meanwhile


@pytest.mark.no_gpu
def test_a_write_is_one_release_store() -> None:
    assert accesses(doorbell_write_kernel) == ["st.release.sys.global.u64"]


@pytest.mark.no_gpu
def test_a_wait_acquires_from_the_system_and_reports_state_last() -> None:
    found = accesses(doorbell_wait_kernel)
    assert {each for each in found if each.startswith("ld")} == {"ld.acquire.sys.global.u64", "ld.global.u64"}
    assert [each for each in found if each.startswith("st")] == ["st.volatile.global.u64"] * 5 + [
        "st.release.sys.global.u64"
    ]
    text = compile_ptx(doorbell_wait_kernel, "sm_80")
    assert "nanosleep.u32" in text and "%globaltimer" in text
    # A flag is never looked at by a plain load: those go through addresses read from the table of progress words.
    plain = re.findall(r"ld\.global\.u64\s+(%rd\d+), \[", text)
    acquired = re.findall(r"ld\.acquire\.sys\.global\.u64 %rd\d+, \[(%rd\d+)\]", text)
    assert set(plain) <= set(acquired)


# ---- ring ----------------------------------------------------------------------------------------------------------
def ring(world: int, ranks: list[int], value: int, order: str, kernel: Any = doorbell_ring_kernel) -> np.ndarray:
    """u64 [world, LINE_WORDS]: every peer's line after a ring."""
    lines = devices.zeros((world, LINE_WORDS), np.uint64)
    table = devices.array(lines.ctypes.data + LINE_BYTES * np.arange(world, dtype=np.uint64))
    stream = devices.Stream()
    stream.launch(kernel, 1, 1, 0, table, world, *Peers.of(ranks).masks, value)
    devices.run_queues([stream], order=order)
    return np.array(lines)


def expected_lines(world: int, ranks: list[int], value: int) -> np.ndarray:
    expected = np.zeros((world, LINE_WORDS), np.uint64)
    expected[ranks, 0] = value
    return expected


@simt.orders()
@pytest.mark.parametrize(
    ("world", "ranks"),
    [(1, [0]), (5, [0, 3, 4]), (5, []), (65, [63, 64]), (WORLD_MAX, [0, 63, 64, 130, 191, 192, 255])],
)
def test_a_ring_raises_the_lines_of_its_peers_and_no_other(world: int, ranks: list[int], order: str) -> None:
    value = gang_value(2**40, 7)
    assert np.array_equal(ring(world, ranks, value, order), expected_lines(world, ranks, value))


@pytest.mark.no_gpu
@seeds(doorbell_ring_kernel)
@pytest.mark.parametrize(
    "change",
    [
        {"old": "i_peer >> 6", "new": "i_peer >> 5", "inside": "_is_member_thread"},
        {"old": "word == 3", "new": "word == 4", "inside": "_is_member_thread"},
        {"old": "range(world)", "new": "range(world - 1)"},
        {"old": "g_lines[i_peer]", "new": "g_lines[0]"},
    ],
)
def test_a_mistake_in_the_ring_is_caught(change: dict[str, str]) -> None:
    ranks = [0, 40, 63, 64, 130, 192, 255]
    wrong = mutate(doorbell_ring_kernel, **change)
    try:
        got = ring(256, ranks, 9, "forward", wrong)
    except simt.SimtError:
        return
    assert not np.array_equal(got, expected_lines(256, ranks, 9))


# ---- write -----------------------------------------------------------------------------------------------------------
def check_write(stream: Any) -> None:
    words = devices.zeros(3, np.uint64)
    stream.launch(doorbell_write_kernel, 1, 1, 0, words.ctypes.data + 8, 2**63 + 5)
    devices.run_queues([stream])
    assert words.tolist() == [0, 2**63 + 5, 0]


@pytest.mark.no_gpu
@seeds(doorbell_write_kernel)
@pytest.mark.parametrize(
    "change",
    [{"old": "address, value", "new": "address + u64(8), value"}, {"old": ", value)", "new": ", value >> u64(1))"}],
)
def test_a_mistake_in_the_write_is_caught(change: dict[str, str]) -> None:
    assert_caught(check_write, devices.Stream(), doorbell_write_kernel, simt.SimtError, **change)


# ---- the bounded wait ----------------------------------------------------------------------------------------------
class Waiting:
    """Memory of one rank that waits by kernel."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.lines = simt.zeros((world, LINE_WORDS), np.uint64)
        self.progress = simt.zeros(world, np.uint64)
        self.table = simt.array(self.progress.ctypes.data + 8 * np.arange(world, dtype=np.uint64))
        self.report = simt.zeros(REPORT_BYTES // 8, np.uint64)

    def launch(
        self,
        ranks: list[int],
        value: int,
        *,
        budget_ns: int = 10_000,
        tag: int = 77,
        kernel: Any = None,
        lines: int | None = None,
    ) -> Any:
        return simt.Launch(
            kernel or doorbell_wait_kernel,
            1,
            1,
            (
                self.lines.ctypes.data if lines is None else lines,
                self.world,
                *Peers.of(ranks).masks,
                value,
                budget_ns,
                self.table,
                self.report.ctypes.data,
                tag,
            ),
        )


@pytest.mark.no_gpu
@simt.orders()
def test_a_wait_whose_rings_have_come_passes_and_writes_nothing(order: str) -> None:
    waiting = Waiting(5)
    waiting.lines[[1, 4], 0] = 9, 2**50
    simt.run([waiting.launch([1, 4], 9)], order=order)
    assert not waiting.report.any()


@pytest.mark.no_gpu
@simt.orders()
def test_a_wait_gives_up_after_its_budget_and_says_what_it_saw(order: str) -> None:
    waiting = Waiting(70)
    waiting.lines[[0, 69], 0] = 100, 41
    simt.run([waiting.launch([0, 69], 42, tag=0x1203)], order=order)
    report = waiting.report
    assert report[REPORT_STATE] == GAVE_UP
    assert (report[REPORT_PEER], report[REPORT_TAG]) == (69, 0x1203)
    assert (report[REPORT_EXPECTED], report[REPORT_SEEN]) == (42, 41)
    assert 10_000 <= report[REPORT_WAITED_NS] < 40_000


@pytest.mark.no_gpu
def test_after_one_wait_has_given_up_the_next_ones_end_at_once() -> None:
    waiting = Waiting(2)
    simt.run([waiting.launch([1], 1)])
    first = waiting.report.copy()
    simt.run([waiting.launch([1], 2, budget_ns=2**62)])
    assert np.array_equal(waiting.report, first)  # the first word stays


def wait_without_lines(state: int, kernel: Any = doorbell_wait_kernel) -> None:
    """Wait in a launch whose report says `state`, for lines that lie nowhere: a look at one is a fault."""
    waiting = Waiting(2)
    waiting.report[REPORT_STATE] = state
    simt.run([waiting.launch([1], 2, budget_ns=2**62, kernel=kernel, lines=4096)])
    assert waiting.report.tolist() == [state] + [0] * (REPORT_BYTES // 8 - 1)


@pytest.mark.no_gpu
@pytest.mark.parametrize("state", [GAVE_UP, STOPPED])
def test_a_wait_of_a_launch_that_is_over_does_not_even_look(state: int) -> None:
    """Thousands of waits may stand behind the one that gave up: it drains at once only if none of them spins."""
    wait_without_lines(state)


@pytest.mark.no_gpu
@seeds(doorbell_wait_kernel)
@pytest.mark.parametrize("state", [GAVE_UP, STOPPED])
def test_a_wait_that_looks_at_the_report_later_is_caught(state: int) -> None:
    first = {"old": "if ld_acquire_sys_u64(report) != u64(RUNNING):", "new": "if False:"}
    with pytest.raises(simt.SimtError, match=hex(4096 + LINE_BYTES)):  # the line of rank 1
        wait_without_lines(state, mutate(doorbell_wait_kernel, **first))


@pytest.mark.no_gpu
def test_the_host_can_end_a_wait() -> None:
    waiting = Waiting(2)
    stop = simt.Launch(doorbell_write_kernel, 1, 1, (waiting.report.ctypes.data, STOPPED))
    simt.run([waiting.launch([1], 1, budget_ns=2**62), stop])
    assert waiting.report[REPORT_STATE] == STOPPED


@pytest.mark.no_gpu
def test_the_budget_starts_again_when_somebody_makes_progress() -> None:
    """A long launch is not a stuck one: it ends when the flag comes, far beyond one budget."""
    from whalez.ops.device.kernel import Kernel
    from whalez.ops.device.ptx import nanosleep, st_release_sys_u64
    from whalez.ops.device.types import u64

    def work(progress: Any, flag: Any) -> None:
        for i in range(20):
            nanosleep(4_000)
            st_release_sys_u64(progress, u64(i + 1))
        st_release_sys_u64(flag, u64(5))

    worker = Kernel("work_kernel", work, (u64, u64))
    waiting = Waiting(2)
    flag = waiting.lines[1:].ctypes.data
    simt.run([waiting.launch([1], 5), simt.Launch(worker, 1, 1, (waiting.progress[1:].ctypes.data, flag))])
    assert not waiting.report.any()


@pytest.mark.no_gpu
@pytest.mark.parametrize("seen", [2**63 - 1, 7, 8])
def test_the_comparison_is_cyclic_and_2_63_minus_1_releases(seen: int) -> None:
    waiting = Waiting(1)
    waiting.lines[0, 0] = seen
    simt.run([waiting.launch([0], 7)])
    assert waiting.report[REPORT_STATE] == 0


@pytest.mark.no_gpu
def test_2_64_minus_1_does_not_release() -> None:
    waiting = Waiting(1)
    waiting.lines[0, 0] = 2**64 - 1
    simt.run([waiting.launch([0], 7)])
    assert waiting.report[REPORT_STATE] == GAVE_UP


@pytest.mark.no_gpu
@seeds(doorbell_wait_kernel)
@pytest.mark.parametrize(
    "change",
    [
        {"old": "i_peer * LINE_BYTES", "new": "i_peer * 64"},
        {"old": "now - restarted > budget_ns", "new": "False"},
        {"old": "while i64(seen - value) < 0", "new": "while seen < value - u64(1)"},
        {"old": "st_release_sys_u64(report, u64(GAVE_UP))", "new": "pass"},
    ],
)
def test_a_mistake_in_the_wait_is_caught(change: dict[str, str]) -> None:
    waiting = Waiting(3)
    waiting.lines[2, 0] = 41
    waiting.lines[1, 0] = 42
    try:
        simt.run([waiting.launch([1, 2], 42, kernel=mutate(doorbell_wait_kernel, **change))], cpu_s=2)
    except simt.SimtError:
        return
    report = waiting.report
    assert (report[REPORT_STATE], report[REPORT_PEER], report[REPORT_SEEN]) != (GAVE_UP, 2, 41)


# ---- bells of several ranks over their streams ---------------------------------------------------------------------
class World:
    """Ranks in one address space, each with a slab, a stream and bells.

    Slabs and tables lie in the device's memory: a copy between two places of the host would keep the host in its call
    until the stream has come to it, which is after a wait for ranks that have been handed nothing yet.
    """

    def __init__(self, world: int, wait_by: Any, budgets_ns: Sequence[int] = ()) -> None:
        self.kept: Any = None  # what queued copies read and write
        self.layout = make_layout(world)
        self.memory = [devices.zeros(self.layout.nbytes, np.uint8, align=128) for _ in range(world)]
        addresses = [devices.at(each) for each in self.memory]
        self.streams = [devices.Stream(rank) for rank in range(world)]
        self.reports = [devices.zeros(REPORT_BYTES // 8, np.uint64) for _ in range(world)]
        self.tables = [
            devices.array(np.frombuffer(bell_tables(self.layout, addresses, rank), np.uint64)) for rank in range(world)
        ]
        self.bells = [
            DeviceBells(
                self.streams[rank],
                self.layout,
                addresses,
                rank,
                tables=devices.at(self.tables[rank]),
                report=self.reports[rank].ctypes.data,  # of the host, as in BellMemory
                wait_by=wait_by,
                budget_ns=devices.budget_ns(budgets_ns[rank] if budgets_ns else 200_000),
                steps_per_launch=3,
            )
            for rank in range(world)
        ]

    def region(self, rank: int, name: str) -> np.ndarray:
        region = self.layout.regions[name]
        return self.memory[rank][region.offset :][: region.nbytes].view(region.dtype)


def exchange(world: World, windows: int, *, skip_wait: bool = False, skip_ring: int = -1) -> list[np.ndarray]:
    """Four beats per window: rank 0 publishes its halo, the others copy it. What each got, [windows, values]."""
    n = world.region(0, "halo").size
    sources = [devices.array(np.full(n, window + 1, np.float32)) for window in range(windows)]
    got = [devices.empty((windows, n), np.float32) for _ in world.bells]
    halo = devices.at(world.region(0, "halo"))
    others = Peers.of(range(1, len(world.bells)))
    owner = Peers.of([0])
    for window in range(windows):
        value = gang_value(3, window)
        world.streams[0].copy(halo, devices.at(sources[window]), 4 * n)
        if window != skip_ring:
            world.bells[0].ring(BELL_DATA, others, value)
        world.bells[0].wait(BELL_FREE, others, value, layer=window)
        for rank in others.ranks:
            if not skip_wait:
                world.bells[rank].wait(BELL_DATA, owner, value, layer=window)
            world.streams[rank].copy(devices.at(got[rank][window]), halo, 4 * n)
            world.bells[rank].ring(BELL_FREE, owner, value)
    world.kept = (sources, got)
    return got


def is_right(got: list[np.ndarray]) -> bool:
    expected = np.arange(1, got[1].shape[0] + 1, dtype=np.float32)[:, None]
    return all(np.array_equal(each, np.broadcast_to(expected, each.shape)) for each in got[1:])


def check_pairs(wait_by: str, order: str = "forward") -> None:
    world = World(3, wait_by)
    got = exchange(world, 4)
    devices.run_queues(world.streams, order=order)
    assert is_right(got)
    assert not any(report.any() for report in world.reports)


@simt.orders()
@pytest.mark.parametrize("wait_by", ["memop", "spin"])
def test_rings_and_waits_of_three_ranks_pair(wait_by: str, order: str) -> None:
    check_pairs(wait_by, order)


@pytest.mark.no_gpu
def test_a_beat_is_one_launch_and_one_batch() -> None:
    world = World(3, "memop")
    exchange(world, 1)
    kinds = [type(entry).__name__ for entry in world.streams[0].queue]
    assert kinds == ["CopyEntry", "LaunchEntry", "WaitEntry"]
    assert len(world.streams[0].queue[2].pairs) == 2


@pytest.mark.no_gpu
def test_without_the_wait_the_reader_gets_poison_or_the_past() -> None:
    world = World(3, "memop")
    got = exchange(world, 4, skip_wait=True)
    devices.run_queues(world.streams, order="reverse")
    assert not is_right(got)


@pytest.mark.no_gpu
def test_a_ring_that_is_left_out_is_missed() -> None:
    """The wait is real: without the ring nobody goes on."""
    world = World(2, "memop")
    exchange(world, 3, skip_ring=1)
    with pytest.raises(simt.SimtError) as caught:
        devices.run_queues(world.streams)
    assert f"expected {gang_value(3, 1)} seen {gang_value(3, 0)} (blocked)" in str(caught.value)


@simt.orders()
def test_a_ring_that_is_left_out_ends_the_spin_with_rank_window_expected_and_seen(order: str) -> None:
    # The other rank waits longer: if it went on first, its next ring would end this wait.
    world = World(2, "spin", budgets_ns=(200_000, 20_000))
    exchange(world, 3, skip_ring=1)
    devices.run_queues(world.streams, order=order)  # both ranks drain
    error = world.bells[1].report()
    assert error is not None
    assert (error.peer, error.kind, error.expected, error.seen) == (0, "data", gang_value(3, 1), gang_value(3, 0))
    assert error.where == "seq 3 window 1 layer 1"
    assert "rank 0's data doorbell at seq 3 window 1 layer 1" in str(error)


def test_the_launch_bell_is_one_line_that_any_peer_raises() -> None:
    world = World(4, "memop")
    everybody = Peers.of(range(4))
    world.bells[2].ring(BELL_LAUNCH, everybody, 1)
    for rank in (0, 1, 3):
        world.bells[rank].wait(BELL_LAUNCH, everybody, 1)
        world.bells[rank].ring(BELL_LAUNCH, everybody, 1)
    devices.run_queues(world.streams)
    for rank in range(4):
        lines = world.region(rank, "bells").reshape(5, 4, LINE_WORDS)
        assert lines[BELL_LAUNCH, :, 0].tolist() == [int(each == rank) for each in range(4)]


def test_progress_is_raised_in_the_own_slab() -> None:
    world = World(2, "memop")
    for _ in range(3):
        world.bells[1].raise_progress()
    devices.run_queues(world.streams)
    assert [int(world.region(rank, "progress")[0]) for rank in range(2)] == [0, 3]


@pytest.mark.no_gpu
def test_a_value_that_does_not_rise_is_our_mistake() -> None:
    world = World(3, "memop")
    world.bells[0].ring(BELL_DATA, Peers.of([1]), 5)
    world.bells[0].ring(BELL_DATA, Peers.of([2]), 4)
    world.bells[0].ring(BELL_FREE, Peers.of([1]), 5)
    with pytest.raises(AssertionError, match="data 0x5 at rank 1 after 0x5"):
        world.bells[0].ring(BELL_DATA, Peers.of([1, 2]), 5)
    for value in (0, -1, 2**63):
        with pytest.raises(AssertionError):
            world.bells[0].wait(BELL_DATA, Peers.of([1]), value)


@pytest.mark.no_gpu
def test_an_idle_seq_needs_no_word() -> None:
    """A rank that sat out a whale waits for the next one's values, and an older ring does not satisfy it."""
    world = World(2, "memop")
    world.bells[0].ring(BELL_DATA, Peers.of([1]), gang_value(1, STRIDE - 1))
    world.bells[1].wait(BELL_DATA, Peers.of([0]), gang_value(2, 0))
    with pytest.raises(simt.SimtError, match="blocked"):
        devices.run_queues(world.streams)
    world.bells[0].ring(BELL_DATA, Peers.of([1]), gang_value(2, 0))
    devices.run_queues(world.streams)


@pytest.mark.no_gpu
def test_a_world_that_does_not_fit_the_mask_is_refused_by_name() -> None:
    layout = SlabLayout.from_spec(SlabSpec.of_bells(WORLD_MAX + 1))
    with pytest.raises(ConfigError, match="world: expected at most 256"):
        DeviceBells(devices.Stream(), layout, [0] * layout.world, 0, tables=0, report=0)
