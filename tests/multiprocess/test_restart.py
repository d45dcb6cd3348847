"""A world that failed comes back: behind the same URL, with right answers, and without anything of the world before."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from helpers.by_hand import PROMPT, ByHand
from helpers.faults import assert_clean, wait_until
from helpers.ports import free_ports
from helpers.small import SETTINGS
from whalez.fleet import Fleet
from whalez.testing.faults import fault_arguments

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


def ask(port: int) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_front_says_who_died_until_the_world_is_back(tiny: Path, tmp_path: Path, times: int) -> None:
    """Every request meanwhile is answered: a 503 that names the rank and when to come again, or the right tokens."""
    port = free_ports(3)
    lines: list[str] = []
    fleet = Fleet(
        tiny,
        2,
        listen=f"127.0.0.1:{port}",
        run_dir=tmp_path / "run",
        keep_front=True,
        progress=lines.append,
        **SETTINGS,  # type: ignore[arg-type]
    )
    try:
        fleet.start()
        serving = threading.Thread(target=fleet.serve_on)
        serving.start()
        expected = ask(port).json()["whalez"]["tokens"]
        for number in range(times):
            victim = number % 2
            pids = fleet.pids()
            os.kill(pids[f"rank {victim}"], signal.SIGKILL)
            refused = 0
            deadline = time.monotonic() + 40
            while True:
                assert time.monotonic() < deadline, lines
                answer = ask(port)
                if answer.status_code == 200:
                    assert answer.json()["whalez"]["tokens"] == expected
                    if fleet.pids()[f"rank {victim}"] != pids[f"rank {victim}"]:
                        break
                    continue
                assert answer.status_code == 503, answer.text
                assert f"rank {victim}" in answer.json()["error"]["message"], answer.text
                assert int(answer.headers["retry-after"]) > 0
                refused += 1
            assert refused > 0
            wait_until(lambda: fleet.failure is None and all(fleet._statuses), 20, lines)
            whale = fleet.generate(PROMPT, max_tokens=4, poster=1, lane="whale", stop_tokens=())
            assert whale.report.gang == (0, 1)
            assert list(whale.tokens) == expected
            assert fleet.pids()["front"] == pids["front"]
            assert any(f"rank {victim} died: was killed by SIGKILL" in each for each in lines)
            kept = tmp_path / "run" / f"world-{number + 1}"
            assert (kept / f"post-mortem-{1 - victim}.json").exists() and (kept / "rank-0.log").exists()
    finally:
        fleet.stop()
    serving.join(10)
    assert not serving.is_alive()
    assert_clean(fleet)
    assert not (tmp_path / "run" / "away").exists()


@pytest.fixture
def worlds() -> Iterator[list[ByHand]]:
    made: list[ByHand] = []
    yield made
    for world in made:
        world.end()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "place"), [(1, "data"), (0, "data"), (1, "dispatch"), (1, "free")])
def test_a_rank_that_was_stopped_harms_no_later_world(
    tiny: Path, tmp_path: Path, worlds: list[ByHand], victim: int, place: str
) -> None:
    """Stopped before a store, its world dies and another starts; resumed, it stores into slabs nobody looks at, learns
    that its world is over and leaves. A stopped rank 0 keeps the hub's address, so there the next world takes another.
    """
    before = ByHand(tiny, tmp_path / "before", f"ipc://{tmp_path}/hub.sock", f"late-{secrets.token_hex(4)}", SETTINGS)
    worlds.append(before)
    poster = victim if place == "free" else 1 - victim
    mark = tmp_path / "mark"
    for rank in range(2):
        before.start(rank, 2, fault_arguments(place, mark) if rank == victim else None)
    before.wait_serving()
    expected = before.generate(0, "local")
    Path(f"{mark}.on").touch()
    caller = threading.Thread(target=before.refused, args=(poster, "whale"), daemon=True)
    caller.start()
    wait_until(mark.exists, 20, "never came by")
    stopped, other = before.processes[victim], before.processes[1 - victim]
    os.kill(stopped.pid, signal.SIGSTOP)
    assert other.wait(10) == 1
    assert f"rank {victim} died: silent for" in before.log(1 - victim)

    again = ByHand(
        tiny, tmp_path / "again", f"ipc://{tmp_path}/hub{'' if victim else '-2'}.sock", before.fleet_id, SETTINGS
    )
    worlds.append(again)
    for rank in range(2):
        again.start(rank, 2)
    again.wait_serving()
    assert again.generate(poster, "whale") == expected
    Path(f"{mark}.go").touch()  # what it did not ring, it rings now
    os.kill(stopped.pid, signal.SIGCONT)
    resumed = time.monotonic()
    while stopped.poll() is None:
        assert time.monotonic() - resumed < 10, before.log(victim)
        assert again.generate(poster, "whale") == expected
    assert stopped.returncode == 1, before.log(victim)
    assert f"rank {1 - victim} died" in before.log(victim)
    for rank in (0, 1):
        assert again.generate(rank, "whale") == expected


@pytest.mark.slow
def test_a_wedged_rank_without_a_supervisor_leaves_by_itself(tiny: Path, tmp_path: Path, worlds: list[ByHand]) -> None:
    world = ByHand(tiny, tmp_path / "run", f"ipc://{tmp_path}/hub.sock", f"wedged-{secrets.token_hex(4)}", SETTINGS)
    worlds.append(world)
    mark = tmp_path / "mark"
    for rank in range(3):
        world.start(rank, 3, fault_arguments("idle", mark) if rank == 1 else None)
    world.wait_serving()
    Path(f"{mark}.on").touch()
    for process in world.processes.values():
        assert process.wait(15) == 1
    for rank in range(3):
        assert "rank 1 died: stuck:" in world.log(rank).splitlines()[-1]
