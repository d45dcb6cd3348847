"""How a world ends on purpose: one rank drains while the others serve on, all have drained, a second signal."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.by_hand import PROMPT, ByHand
from helpers.faults import assert_clean, processes_of, wait_until
from helpers.machine import Pauses
from helpers.small import SETTINGS
from whalez.errors import RequestError, Unavailable
from whalez.fleet import Fleet

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


@pytest.fixture
def world(tiny: Path, tmp_path: Path) -> Iterator[ByHand]:
    made = ByHand(tiny, tmp_path / "run", f"ipc://{tmp_path}/hub.sock", f"leaving-{secrets.token_hex(4)}", SETTINGS)
    try:
        for rank in range(3):
            made.start(rank, 3)
        made.wait_serving()
        yield made
    finally:
        made.end()
    wait_until(lambda: not processes_of(made.folder), 5.0, "processes are left")
    assert not list(Path("/dev/shm").glob(f"whalez-{made.fleet_id}-*"))


def state_of(world: ByHand, rank: int) -> str:
    link = world.link(rank)
    try:
        return link.status(10.0).state
    finally:
        link.close()


@pytest.mark.parametrize("last", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_rank_that_leaves_finishes_its_own_and_the_others_serve_until_all_leave(world: ByHand, last: int) -> None:
    expected = world.generate(2, "local")
    own: list[int] = []
    caller = threading.Thread(target=lambda: own.append(len(world.generate(1, "local", max_tokens=800))))
    caller.start()
    wait_until(lambda: world.running(1), 60, "never ran")
    world.processes[1].send_signal(signal.SIGTERM)
    wait_until(lambda: state_of(world, 1) == "draining", 60, "does not drain")
    with pytest.raises(RequestError, match="rank 1 is draining"):
        world.generate(1, "local")
    for _ in range(3):
        assert world.generate(0, "local") == expected
        assert world.generate(2, "whale") == expected  # without rank 1, which declines, or in the local lane
    caller.join(100)
    assert own == [800]
    assert world.generate(0, "whale") == expected
    assert all(process.poll() is None for process in world.processes.values())
    for rank in (0, 2):
        world.processes[rank].send_signal(last)
    assert [process.wait(60) for process in world.processes.values()] == [0, 0, 0]
    assert not list(world.folder.glob("post-mortem-*.json"))


def test_a_second_signal_leaves_at_once_and_is_a_death_to_the_others(world: ByHand) -> None:
    caller = threading.Thread(target=world.refused, args=(1, "local", 3000), daemon=True)
    caller.start()
    wait_until(lambda: world.running(1), 60, "never ran")
    world.processes[1].send_signal(signal.SIGTERM)
    wait_until(lambda: state_of(world, 1) == "draining", 60, "does not drain")
    with Pauses() as pauses:
        begun = time.monotonic()
        world.processes[1].send_signal(signal.SIGTERM)
        ends = [world.processes[rank].wait(60) for rank in (1, 0, 2)]
        took = time.monotonic() - begun
    assert ends == [128 + signal.SIGTERM, 1, 1]
    for rank in (0, 2):
        assert "rank 1 died" in world.log(rank)
    assert took < 5 + pauses.late_s


def test_under_a_supervisor_one_rank_drains_and_a_stop_while_another_does_is_orderly(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """No `--grace` is given: SIGTERM has the default one, the supervisor's stop none. All this as under nohup."""
    request.addfinalizer(functools.partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN)))
    for name in ("LEAVE_S", "OWN_LEAVE_S"):
        monkeypatch.setattr(f"whalez.fleet.{name}", 8.0)  # on a busy machine too, who is killed here is one who hangs
    with Fleet(tiny, 3, run_dir=tmp_path / "run", **SETTINGS) as fleet:  # type: ignore[arg-type]
        pids = fleet.pids()

        def drain(rank: int) -> None:
            os.kill(pids[f"rank {rank}"], signal.SIGTERM)
            wait_until(lambda: (told := fleet.status()[rank]) and told.state == "draining", 60, "does not drain")

        first = fleet.submit(PROMPT, max_tokens=300, poster=1, lane="local", stop_tokens=())
        next(iter(first))
        drain(1)
        with pytest.raises(Unavailable, match="rank 1 is draining"):
            fleet.generate(PROMPT, poster=1)
        assert len(fleet.generate(PROMPT, max_tokens=4, poster=0, stop_tokens=()).tokens) == 4
        assert len(first.result(60).tokens) == 300
        second = fleet.submit(PROMPT, max_tokens=3000, poster=2, lane="local", stop_tokens=())
        next(iter(second))
        drain(2)
        fleet.stop()
        with pytest.raises(Unavailable, match="stopping"):
            second.result(0)
    assert {process.name: process.how for process in fleet._processes} == dict.fromkeys(pids, "exited with 0")
    assert not list(fleet.run_dir.glob("post-mortem-*.json"))
    assert_clean(fleet)
