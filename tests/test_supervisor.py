"""What a fleet decides before and between worlds, without a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from whalez import fleet as module
from whalez.errors import ConfigError, PeerDied, WhalezError
from whalez.fleet import RESTARTS_MAX, STEADY_S, Fleet
from whalez.latch import Latch
from whalez.model.presets import make_checkpoint


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "kimi-linear", "tiny", 0, "f32")
    return folder


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s


class Pauses(Latch):
    """A wait on this clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        self.clock.slept.append(timeout_s)
        self.clock.now_s += timeout_s
        return self.is_set


class Failing(Fleet):
    """A fleet whose worlds serve for so many seconds each and then fail; None: it does not come up at all."""

    def __init__(self, model: Path, clock: Clock, lives: list[float | None]) -> None:
        self.said: list[str] = []
        super().__init__(model, 2, keep_front=True, progress=self.said.append)
        self.clock, self.lives = clock, lives
        self._stopping = Pauses(clock)
        self.worlds = 0
        self.restarts = 0

    def wait(self) -> None:
        if self.failure is None and (life := self.lives[self.worlds]) is not None:
            self.clock.now_s += life
            self.failure = PeerDied(1, f"in world {self.worlds}")
        assert self.failure is not None
        self.worlds += 1
        raise self.failure

    def restart(self) -> None:
        self.restarts += 1
        self.failure = None
        if self.lives[self.worlds] is None:
            self.failure = WhalezError("rank 0 is late")
            raise self.failure


@pytest.fixture
def failing(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Failing]:
    def make(*lives: float | None) -> Failing:
        clock = Clock()
        monkeypatch.setattr(module, "time", clock)
        return Failing(tiny_dir, clock, list(lives))

    return make


@pytest.mark.parametrize("life", [1.0, STEADY_S, None])
def test_the_supervisor_gives_up_after_failures_in_a_row(failing: Callable[..., Failing], life: float | None) -> None:
    fleet = failing(STEADY_S + 1.0, *[life] * 20)
    with pytest.raises(WhalezError) as caught:
        fleet.serve_on()
    assert caught.value is fleet.failure
    assert ("in world 5" if life else "rank 0 is late") in str(caught.value)
    assert fleet.restarts == RESTARTS_MAX == 5
    assert fleet.clock.slept == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert [line.rpartition("; ")[2] for line in fleet.said] == [
        f"starting again in {pause_s:g} s, {number} of 5 in a row"
        for number, pause_s in enumerate(fleet.clock.slept, start=1)
    ]


def test_a_world_that_served_for_long_ends_the_row(failing: Callable[..., Failing]) -> None:
    short, long = 1.0, STEADY_S + 1.0
    fleet = failing(short, *[short] * 4, long, *[short] * 5)
    with pytest.raises(WhalezError, match="in world 10"):
        fleet.serve_on()
    assert fleet.clock.slept == [0.5, 1.0, 2.0, 4.0, 8.0, 0.5, 1.0, 2.0, 4.0, 8.0]


def test_a_fleet_that_is_stopped_in_a_pause_starts_nothing(failing: Callable[..., Failing]) -> None:
    fleet = failing(1.0)
    fleet._stopping.set()
    fleet.serve_on()
    assert fleet.restarts == 0


def test_ranks_that_are_held_and_a_world_that_starts_again_exclude_each_other(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="hold_on_failure: not with keep_front"):
        Fleet(tiny_dir, 2, keep_front=True, hold_on_failure=True)
