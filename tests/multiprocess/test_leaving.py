"""How a world ends on purpose: one rank drains while the others serve on, all have drained, a second signal."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SETTINGS  # type: ignore[attr-defined]

from helpers.by_hand import ByHand
from helpers.faults import processes_of, wait_until
from whalez.errors import RequestError

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
    wait_until(lambda: not processes_of(made.folder), 2.0, "processes are left")
    assert not list(Path("/dev/shm").glob(f"whalez-{made.fleet_id}-*"))


def state_of(world: ByHand, rank: int) -> str:
    link = world.link(rank)
    try:
        return link.status(2.0).state
    finally:
        link.close()


@pytest.mark.parametrize("last", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_rank_that_leaves_finishes_its_own_and_the_others_serve_until_all_leave(world: ByHand, last: int) -> None:
    expected = world.generate(2, "local")
    own: list[int] = []
    caller = threading.Thread(target=lambda: own.append(len(world.generate(1, "local", max_tokens=800))))
    caller.start()
    wait_until(lambda: world.running(1), 10, "never ran")
    world.processes[1].send_signal(signal.SIGTERM)
    wait_until(lambda: state_of(world, 1) == "draining", 10, "does not drain")
    with pytest.raises(RequestError, match="rank 1 is draining"):
        world.generate(1, "local")
    for _ in range(3):
        assert world.generate(0, "local") == expected
        assert world.generate(2, "whale") == expected  # without rank 1, which declines, or in the local lane
    caller.join(30)
    assert own == [800]
    assert world.generate(0, "whale") == expected
    assert all(process.poll() is None for process in world.processes.values())
    for rank in (0, 2):
        world.processes[rank].send_signal(last)
    assert [process.wait(10) for process in world.processes.values()] == [0, 0, 0]
    assert not list(world.folder.glob("post-mortem-*.json"))


def test_a_second_signal_leaves_at_once_and_is_a_death_to_the_others(world: ByHand) -> None:
    caller = threading.Thread(target=world.refused, args=(1, "local", 3000), daemon=True)
    caller.start()
    wait_until(lambda: world.running(1), 10, "never ran")
    world.processes[1].send_signal(signal.SIGTERM)
    wait_until(lambda: state_of(world, 1) == "draining", 10, "does not drain")
    begun = time.monotonic()
    world.processes[1].send_signal(signal.SIGTERM)
    assert world.processes[1].wait(5) == 128 + signal.SIGTERM
    for rank in (0, 2):
        assert world.processes[rank].wait(5) == 1
        assert "rank 1 died" in world.log(rank)
    assert time.monotonic() - begun < 5
