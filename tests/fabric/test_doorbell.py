"""Doorbells in one process: what a value means, what releases a wait and what does not, and when a wait gives up.

The other ranks act inside `on_slice`, so that no test depends on how fast anything runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalez.errors import DoorbellTimeout, MispairedLaunch
from whalez.fabric import doorbell
from whalez.fabric.doorbell import STRIDE, Bells, Why, gang_value, pairing_value
from whalez.fabric.layout import (
    BELL_COMBINE,
    BELL_DATA,
    BELL_DISPATCH,
    BELL_FREE,
    BELL_KINDS,
    BELL_LAUNCH,
    STATUS_KIND,
    STATUS_PEER,
)

World = Callable[..., list[Bells]]

#: Short enough that a wait that gives up costs little; a wait that is answered never depends on it.
QUICK = {"stuck_s": 0.02, "slice_s": 0.005, "spin_ns": 0}


def ranks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@contextlib.contextmanager
def gives_up(peer: int, kind: int, expected: int, seen: int, root: int | None = None) -> Iterator[None]:
    """`root`: the rank that is blamed; None where the bells have old waits in them."""
    with pytest.raises(DoorbellTimeout) as caught:
        yield
    got = caught.value
    assert (got.peer, got.kind, got.expected, got.seen) == (peer, BELL_KINDS[kind], expected, seen)
    assert root is None or got.root == root


# ---- values ---------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 2)), min_size=1, max_size=30))
def test_values_strictly_rise_over_cancelled_seqs_and_several_supersteps(whales: list[tuple[int, int, int]]) -> None:
    """Each whale: seqs cancelled or sat out before it, windows of a superstep, supersteps. Windows run on."""
    seq, last = -1, 0
    for skipped, windows, supersteps in whales:
        seq += 1 + skipped
        for window in range(windows * supersteps):
            assert gang_value(seq, window) > last
            last = gang_value(seq, window)


def test_values_at_the_ends() -> None:
    assert gang_value(0, 0) == STRIDE
    assert gang_value(6, STRIDE - 1) + 1 == gang_value(7, 0)
    assert [pairing_value(launch, 3, step) for launch in (0, 1) for step in range(3)] == [1, 2, 3, 4, 5, 6]
    for bad in (lambda: gang_value(0, STRIDE), lambda: gang_value(-1, 0), lambda: pairing_value(0, 3, 3)):
        with pytest.raises(AssertionError):
            bad()


def test_whales_that_a_rank_sat_out_need_no_word_with_it(make_world: World) -> None:
    bells = make_world(3, **QUICK)
    # (seq, producer, consumer): 1 and 4 were cancelled; rank 2 sits out two; whale 5 has two supersteps of 2 windows.
    for seq, producer, consumer, windows in ((0, 0, 1, 2), (2, 1, 2, 2), (3, 0, 1, 2), (5, 2, 1, 4), (6, 0, 2, 2)):
        for window in range(windows):
            value = gang_value(seq, window)
            before = bells[consumer].seen(BELL_DATA, producer)
            if window == 0:
                with gives_up(producer, BELL_DATA, value, before):
                    bells[consumer].wait(BELL_DATA, ranks(producer), value)
            bells[producer].ring(BELL_DATA, ranks(consumer), value)
            bells[consumer].wait(BELL_DATA, ranks(producer), value)
            bells[consumer].ring(BELL_FREE, ranks(producer), value)
            bells[producer].wait(BELL_FREE, ranks(consumer), value)


def test_a_value_that_does_not_rise_is_our_mistake_and_rings_nobody(make_world: World) -> None:
    bells = make_world(3)
    bells[0].ring(BELL_DATA, ranks(2), 7)
    for value in (7, 6):
        with pytest.raises(AssertionError, match="rank 0 rings data"):
            bells[0].ring(BELL_DATA, ranks(1, 2), value)
    assert bells[1].seen(BELL_DATA, 0) == 0
    bells[0].ring(BELL_FREE, ranks(2), 7)  # each kind rises by itself
    for value in (0, -1, 2**63):
        with pytest.raises(AssertionError):
            bells[0].ring(BELL_COMBINE, ranks(1), value)


@pytest.mark.parametrize("step", [2**31, 2**32, 2**52, 2**62 - 1])
def test_a_step_of_whole_halves_is_seen(make_world: World, step: int) -> None:
    """Low 32 bits that do not change would hide the ring from a wait that looks at half of the word."""
    bells = make_world(2, **QUICK)
    bells[0].ring(BELL_DATA, ranks(1), 5)
    bells[1].wait(BELL_DATA, ranks(0), 5)
    with gives_up(0, BELL_DATA, 5 + step, 5):
        bells[1].wait(BELL_DATA, ranks(0), 5 + step)
    with gives_up(0, BELL_DATA, 6, 5):  # nor does a wait see what it wants in the other half
        bells[1].wait(BELL_DATA, ranks(0), 6)
    bells[0].ring(BELL_DATA, ranks(1), 5 + step)
    bells[1].wait(BELL_DATA, ranks(0), 5 + step)
    assert bells[1].seen(BELL_DATA, 0) == 5 + step


# ---- waits ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", range(5))
def test_a_skipped_ring_makes_the_wait_fail_and_name_it(make_world: World, kind: int) -> None:
    bells = make_world(3, **QUICK, steps_per_launch=4)
    bells[0].ring(kind, ranks(1), 1)
    bells[2].ring(kind, ranks(1), 2)
    begun = time.monotonic()
    with gives_up(0, kind, 2, 1):
        bells[1].wait(kind, ranks(0, 2), 2, layer=3)
    assert time.monotonic() - begun >= 0.02
    bells[0].ring(kind, ranks(1), 2)
    bells[1].wait(kind, ranks(0, 2), 2)


def test_the_error_says_where(make_world: World) -> None:
    bells = make_world(2, **QUICK, steps_per_launch=4)
    for kind, value, where in (
        (BELL_DATA, gang_value(3, 12), "seq 3 window 12 layer 5"),
        (BELL_DISPATCH, pairing_value(9, 4, 2), "launch 9 step 2 layer 5"),
        (BELL_LAUNCH, 10, "launch 9 layer 5"),
    ):
        with pytest.raises(DoorbellTimeout, match=where):
            bells[0].wait(kind, ranks(1), value, layer=5)


@pytest.mark.parametrize("kind", range(5))
def test_a_kind_never_serves_another(make_world: World, kind: int) -> None:
    bells = make_world(2, **QUICK, steps_per_launch=9)
    for other in range(5):
        if other != kind:
            bells[0].ring(other, ranks(1), 8)
    with gives_up(0, kind, 8, 0):
        bells[1].wait(kind, ranks(0), 8)


def test_a_ring_reaches_whom_it_names_and_nobody_else(make_world: World) -> None:
    bells = make_world(4)
    bells[1].ring(BELL_DATA, ranks(3, 0), 9)
    assert [[b.seen(BELL_DATA, sender) for sender in range(4)] for b in bells] == [
        [0, 9, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 9, 0, 0],
    ]


def test_every_ring_and_put_is_counted_where_it_goes(make_world: World) -> None:
    """The count is what a sleeper sleeps on; a ring that is not counted is lost in a window too small for a test."""
    bells = make_world(3)
    words = [np.frombuffer((b._views or [])[b.rank].base, np.uint32) for b in bells]  # type: ignore[call-overload]
    index = (bells[0]._counter - int(bells[0]._address[0])) // 4
    bells[0].ring(BELL_DATA, ranks(1, 2), 1)
    bells[1].ring(BELL_FREE, ranks(2), 1)
    bells[0].wake()
    assert [int(word[index]) for word in words] == [1, 1, 2]
    words[1][index] = 2**32 - 1
    bells[0].ring(BELL_DATA, ranks(1), 2)
    assert [int(word[index + i]) for word in words[1:2] for i in (0, 1)] == [0, 0]  # wraps, and into nothing else


def test_the_time_restarts_while_the_peer_makes_progress(make_world: World) -> None:
    bells = make_world(2, **QUICK)
    slices = []

    def on_slice() -> None:
        slices.append(time.monotonic())
        if len(slices) < 20:
            bells[1].raise_progress()

    begun = time.monotonic()
    with gives_up(1, BELL_DATA, 5, 0):
        bells[0].wait(BELL_DATA, ranks(1), 5, on_slice=on_slice)
    assert len(slices) >= 20
    assert slices[19] - begun > 2 * 0.02  # it would have given up before
    assert bells[0].progress(1) == 19


def test_only_the_awaited_ranks_progress_counts(make_world: World) -> None:
    bells = make_world(3, **QUICK)
    with gives_up(1, BELL_DATA, 5, 0):
        bells[0].wait(BELL_DATA, ranks(1), 5, on_slice=bells[2].raise_progress)


def test_the_rank_at_the_end_of_the_chain_counts(make_world: World) -> None:
    """0 waits for 1, which waits for 2, which computes for long: nobody is stuck."""
    bells = make_world(3, **QUICK)
    with pytest.raises(DoorbellTimeout):
        bells[1].wait(BELL_DATA, ranks(2), 5)
    assert bells[0].status(1)[:2] == (2, "data")
    slices = 0

    def on_slice() -> None:
        nonlocal slices
        slices += 1
        bells[2].raise_progress()
        if slices == 20:
            bells[1].ring(BELL_COMBINE, ranks(0), 1)

    bells[0].wait(BELL_COMBINE, ranks(1), 1, on_slice=on_slice)
    assert slices == 20
    with pytest.raises(DoorbellTimeout, match=r"rank 1 itself waits for rank 2's data doorbell"):
        bells[0].wait(BELL_COMBINE, ranks(1), 2)


def test_a_cycle_of_waits_is_stuck(make_world: World) -> None:
    bells = make_world(2, **QUICK)
    with pytest.raises(DoorbellTimeout):
        bells[1].wait(BELL_DATA, ranks(0), 5)
    with gives_up(1, BELL_DATA, 5, 0):
        bells[0].wait(BELL_DATA, ranks(1), 5)


@pytest.mark.parametrize(
    ("waits", "root"),
    [
        ({}, 1),
        ({1: 2}, 2),
        ({1: 2, 2: 3}, 3),
        ({1: 2, 2: 0}, 1),  # circles, through the waiting rank and beside it: nobody is at their end
        ({1: 2, 2: 3, 3: 1}, 1),
        ({1: 2, 2: 3, 3: 2}, 1),
        ({2: 3}, 1),  # of no concern
    ],
)
def test_who_is_blamed_is_at_the_end_of_the_chain(make_world: World, waits: dict[int, int], root: int) -> None:
    bells = make_world(4, **QUICK)
    for waiting, awaited in waits.items():
        with pytest.raises(DoorbellTimeout):
            bells[waiting].wait(BELL_DATA, ranks(awaited), 5)
    with gives_up(1, BELL_COMBINE, 9, 0, root):
        bells[0].wait(BELL_COMBINE, ranks(1), 9)


def test_status_is_empty_after_a_wait_that_was_answered(make_world: World) -> None:
    bells = make_world(2, slice_s=0.005)
    seen = []

    def on_slice() -> None:
        seen.append(bells[1].status(0))
        bells[1].ring(BELL_FREE, ranks(0), 77)

    bells[0].wait(BELL_FREE, ranks(1), 77, layer=4, on_slice=on_slice)
    assert seen == [(1, "free", 77, 4)]
    assert bells[1].status(0).peer is None


def test_a_garbled_status_is_nobody(make_world: World) -> None:
    bells = make_world(2)
    view = np.frombuffer((bells[0]._views or [])[1].base, np.int64)
    offset = bells[0]._offset_status // 8
    for peer, kind in ((3, 0), (-5, 0), (1, 9), (1, -1)):
        view[offset + STATUS_PEER], view[offset + STATUS_KIND] = peer, kind
        assert bells[0].status(1).peer is None


def test_on_slice_may_end_the_wait(make_world: World) -> None:
    class Fatal(Exception):
        pass

    def on_slice() -> None:
        raise Fatal

    bells = make_world(2, slice_s=0.005)
    with pytest.raises(Fatal):
        bells[0].wait(BELL_DATA, ranks(1), 5, on_slice=on_slice)


def test_a_signal_ends_the_slice(make_world: World) -> None:
    """Python's handlers run between two njit calls; a sleep of the whole slice would hold them up."""
    bells = make_world(2, slice_s=60.0, stuck_s=600.0)

    class Signalled(Exception):
        pass

    done = threading.Event()

    def handler(number: int, frame: object) -> None:
        if not done.is_set():
            done.set()
            raise Signalled

    before = signal.signal(signal.SIGUSR1, handler)
    mark = (bells[0]._views or [])[0].base
    main = threading.get_ident()

    def interrupt() -> None:
        wait_for_mark(mark, bells[0])
        # The mark comes before the system call, so one signal may come too early: go on until the wait is over.
        while not done.wait(0.01):
            signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(Signalled):
            bells[0].wait(BELL_DATA, ranks(1), 5)
    finally:
        done.set()
        thread.join(10)
        signal.signal(signal.SIGUSR1, before)


def wait_for_mark(base: object, bells: Bells) -> None:
    """Until the rank of `bells` has marked itself as a sleeper; bounded."""
    word = np.frombuffer(base, np.uint32)  # type: ignore[call-overload]
    index = (bells._mark - int(bells._address[bells.rank])) // 4
    end = time.monotonic() + 30
    while not word[index]:
        assert time.monotonic() < end
        os.sched_yield()


@pytest.mark.parametrize("kind", [BELL_DISPATCH, BELL_COMBINE])
def test_a_pairing_bell_more_than_a_launch_ahead_is_mispaired(make_world: World, kind: int) -> None:
    bells = make_world(2, **QUICK, steps_per_launch=4)
    bells[1].ring(kind, ranks(0), pairing_value(8, 4, 1))
    bells[0].wait(kind, ranks(1), pairing_value(7, 4, 1))
    with pytest.raises(MispairedLaunch, match=r"rank 1's .*launch 7 step 0 of rank 0"):
        bells[0].wait(kind, ranks(1), pairing_value(7, 4, 0))


def test_gang_bells_may_be_far_ahead(make_world: World) -> None:
    bells = make_world(2, **QUICK)
    bells[1].ring(BELL_DATA, ranks(0), gang_value(9, 5))
    bells[0].wait(BELL_DATA, ranks(1), gang_value(9, 0))


# ---- the idle rule --------------------------------------------------------------------------------------------
def test_sleep_ends_by_tick(make_world: World) -> None:
    bells = make_world(2)
    bells[1].ring(BELL_LAUNCH, ranks(0), 3)  # launch 2; this rank has run it
    bells[1].ring(BELL_DATA, ranks(0), 99)
    begun = time.monotonic()
    assert bells[0].sleep(3, 0.02) is Why.TICK
    assert time.monotonic() - begun >= 0.02


def test_sleep_does_not_sleep_over_a_launch_that_has_begun(make_world: World) -> None:
    bells = make_world(3)
    bells[2].ring(BELL_LAUNCH, ranks(0), 4)
    assert bells[0].sleep(3, 60) is Why.LAUNCH


def test_a_peer_two_launches_ahead_is_mispaired(make_world: World) -> None:
    bells = make_world(2)
    bells[1].ring(BELL_LAUNCH, ranks(0), 5)
    with pytest.raises(MispairedLaunch, match="rank 1's launch"):
        bells[0].sleep(3, 60)


def test_a_put_between_drain_and_sleep_is_not_slept_over(make_world: World) -> None:
    bells = make_world(2)
    bells[0].take_wakes()
    bells[0].wake()  # after the drain, before the sleep
    assert bells[0].sleep(0, 60) is Why.WAKE
    assert bells[0].sleep(0, 0.001) is Why.TICK  # what came before the last sleep's end is drained after it
    bells[0].wake()
    bells[0].take_wakes()
    assert bells[0].sleep(0, 0.001) is Why.TICK


def sleep_in_thread(bells: Bells, act: Callable[[], None]) -> Why:
    """What `sleep` answers in another thread when `act` is done after it has marked itself."""
    answers: list[Why] = []
    thread = threading.Thread(target=lambda: answers.append(bells.sleep(0, 60)))
    thread.start()
    wait_for_mark((bells._views or [])[bells.rank].base, bells)
    act()
    thread.join(30)
    assert answers, "still asleep"
    return answers[0]


def test_a_sleeper_is_woken_by_a_put(make_world: World) -> None:
    bells = make_world(2)
    assert sleep_in_thread(bells[0], bells[0].wake) is Why.WAKE


def test_a_sleeper_is_woken_by_a_launch_bell_but_not_by_data(make_world: World) -> None:
    bells = make_world(2)

    def act() -> None:
        bells[1].ring(BELL_DATA, ranks(0), 1)
        bells[1].ring(BELL_LAUNCH, ranks(0), 1)

    assert sleep_in_thread(bells[0], act) is Why.LAUNCH


def test_wake_after_close_does_nothing(make_world: World) -> None:
    bells = make_world(2)
    bells[0].close()
    bells[0].close()
    bells[0].wake()
    assert bells[0].progress(1) == 0
    with pytest.raises(AssertionError, match="closed"):
        bells[0].sleep(0, 0)


# ---- words ----------------------------------------------------------------------------------------------------
def test_words_of_four_launches_are_kept(make_world: World) -> None:
    bells = make_world(3)
    for launch in range(9):
        for b in bells:
            b.write_word(launch, launch * 10 + b.rank)
        for back in range(min(launch + 1, 4)):
            expected = tuple((launch - back) * 10 + r for r in range(3))
            assert all(b.read_words(launch - back) == expected for b in bells)
    bells[1].write_word(9, 2**62)
    assert bells[0].read_words(9)[1] == 2**62


def test_counts(make_world: World) -> None:
    bells = make_world(2)
    bells[1].set_launch_count(2**40)
    bells[1].raise_progress()
    bells[1].raise_progress()
    assert (bells[0].launch_count(1), bells[0].launch_count(0)) == (2**40, 0)
    assert (bells[0].progress(1), bells[0].progress(0)) == (2, 0)


def test_warm_compiles_all_that_bells_use(make_world: World) -> None:
    names = ("_ring", "_scan", "_wait", "_sleep", "_wake", "_load", "_store", "_raise", "_load_all")
    kernels = [getattr(doorbell, name) for name in names]
    doorbell.warm()
    before = {kernel.py_func.__name__: len(kernel.signatures) for kernel in kernels}
    assert all(before.values()), before
    bells = make_world(2, **QUICK, steps_per_launch=3)
    bells[0].ring(BELL_LAUNCH, ranks(1), 1)
    bells[1].wait(BELL_LAUNCH, ranks(0), 1, layer=1)
    with pytest.raises(DoorbellTimeout):
        bells[1].wait(BELL_DATA, ranks(0), 2**50)
    bells[1].sleep(1, 0.001)
    bells[1].wake()
    bells[1].write_word(1, 2**40)
    bells[1].read_words(1)
    bells[1].set_launch_count(1)
    bells[1].raise_progress()
    assert {kernel.py_func.__name__: len(kernel.signatures) for kernel in kernels} == before
