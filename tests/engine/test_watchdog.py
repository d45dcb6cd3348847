"""When the watchdog ends a process: a loop that stands, or that outlives the hub's failure; and when it must not."""

from __future__ import annotations

import queue

from whalez.engine.watchdog import LEAVE_S, LOOK_S, Lookout, Watchdog
from whalez.errors import HubError

STUCK_S = 3.0  #: like LOOK_S and LEAVE_S a number of quarters, so that sums are exact


class Watched:
    """A loop that is looked at every LOOK_S of a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lookout = Lookout(self.now_s)
        self.progress = 7
        self.may_rest = False
        self.failure: Exception | None = None

    def look(self, passed_s: float = LOOK_S) -> Exception | float | None:
        self.now_s += passed_s
        return self.lookout.look(self.now_s, self.progress, self.may_rest, STUCK_S, self.failure)

    def end(self, within_s: float) -> tuple[float, Exception | float] | None:
        """Seconds until it must end, and why; None if it need not within so many."""
        begun_s = self.now_s
        while self.now_s - begun_s < within_s:
            if (cause := self.look()) is not None:
                return self.now_s - begun_s, cause
        return None


def test_a_loop_that_stands_ends_after_stuck_s() -> None:
    loop = Watched()
    # The first look learns where the loop stands, and the time counts from there.
    assert loop.end(60) == (STUCK_S + 2 * LOOK_S, STUCK_S + LOOK_S)


def test_a_loop_that_moves_or_may_rest_is_left_alone() -> None:
    loop = Watched()
    for _ in range(20):
        assert loop.end(STUCK_S) is None
        loop.progress += 1
    loop.may_rest = True
    assert loop.end(60) is None
    loop.may_rest = False  # what it rested does not count afterwards
    assert loop.end(STUCK_S) is None
    assert loop.end(60) is not None


def test_time_in_which_nobody_looked_does_not_count() -> None:
    loop = Watched()
    loop.look()
    for _ in range(6):
        assert loop.look(1000.0) is None  # stopped, or starved: no more than 2 * LOOK_S each
    assert loop.end(60) == (LOOK_S, STUCK_S + LOOK_S)


def test_a_loop_that_outlives_the_hubs_failure_ends_with_it_whether_it_moves_or_rests() -> None:
    for may_rest in (False, True):
        loop = Watched()
        loop.may_rest = may_rest
        loop.failure = HubError("gone")
        took_s = 0.0
        while (cause := loop.look()) is None:
            loop.progress += 1
            took_s += LOOK_S
            assert took_s < 60
        assert cause is loop.failure
        assert took_s == LEAVE_S


def test_the_thread_calls_end_once_and_not_after_close() -> None:
    causes: queue.Queue[Exception | float] = queue.Queue()

    def watch(stuck_s: float) -> Watchdog:
        return Watchdog(
            progress=lambda: 1,
            may_rest=lambda: False,
            stuck_s=lambda: stuck_s,
            hub_failure=lambda: None,
            end=causes.put,
        )

    standing, closed = watch(0.1), watch(0.1)
    closed.close()
    cause = causes.get(timeout=10)
    assert isinstance(cause, float)
    assert cause > 0.1
    for each in (standing, closed):
        each._thread.join(10)
        assert not each._thread.is_alive()
    assert causes.empty()
