"""Every rank, killed, stopped and wedged at every phase of its life: the others name it, end and leave nothing.

One cell per phase belongs to `make test`; the whole matrix runs in the slow tier and, with WHALEZ_FAULTS=FILE in the
environment, appends a line per cell to that file, from which the table of docs/reliability.md is made.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.faults import (
    STUCK_S,
    Victim,
    assert_clean,
    check_survivors,
    error_of,
    failure_of,
    post_mortems,
    starting,
    strike,
    wait_until,
    waits_on,
)
from helpers.machine import Pauses
from helpers.ports import free_ports
from helpers.small import SETTINGS
from whalez.errors import PeerDied
from whalez.fleet import Fleet, Pending
from whalez.testing.faults import PLACES

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

DEAD_S = 5.0  #: and what the machine paused meanwhile, as for every bound here
#: A rank that is wedged before the world runs has no loop yet whose stand could be seen: the start's time-out names it.
START_S = 12.0
#: In cells that are not about a time-out: no time that is promised, who takes so long hangs.
HANG_S = 60.0
#: What writing a post-mortem may take on a busy machine, and the slice of a wait.
SLACK_S = 2.0

WORLD = 4
QUICK = [  # the long waits first
    ("idle", 0, "stop"),
    ("combine", 1, "wedge"),
    ("hello", 1, "kill"),
    ("allgather", 0, "kill"),
    ("gathering", 1, "kill"),
    ("armed", 0, "kill"),
    ("committed", 1, "kill"),
    ("dispatch", 0, "kill"),
    ("data", 0, "kill"),
    ("free", 1, "kill"),
    ("decoding", 1, "kill"),
]
#: Place of the victim -> the doorbell of its that somebody waits for: of the launch it does not begin or get on with.
AWAITED = dict.fromkeys(("idle", "gathering", "armed", "committed", "dispatch", "decoding"), "dispatch")
AWAITED |= {place: place for place in ("combine", "data", "free")}
SLOW = [(place, rank, fault) for place in PLACES for rank in range(WORLD) for fault in ("kill", "stop")]
SLOW += [(place, number % WORLD, "wedge") for number, place in enumerate(PLACES)]


def note(place: str, rank: int, fault: str, world: int, took_s: float) -> None:
    if path := os.environ.get("WHALEZ_FAULTS"):
        line = {"place": place, "rank": rank, "fault": fault, "world": world, "took_s": round(took_s, 3)}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def cell(model: Path, folder: Path, world: int, place: str, rank: int, fault: str) -> None:
    victim = Victim(rank, place, folder / "mark")
    at_start, wedges = place in ("hello", "allgather"), fault == "wedge"
    fleet = Fleet(
        model,
        world,
        run_dir=folder / "run",
        listen=f"127.0.0.1:{free_ports(world + 1)}" if place == "data" else None,
        command=victim.command,
        stuck_s=STUCK_S if wedges else HANG_S,  # else a slow machine's rank is stuck before it is struck
        start_s=START_S if wedges and at_start else HANG_S,
        **SETTINGS,  # type: ignore[arg-type]
    )
    try:
        if at_start:
            took = dies_at_start(fleet, victim, fault)
        else:
            took = dies_while_serving(fleet, victim, fault)
    finally:
        fleet.stop()
    assert_clean(fleet)
    note(place, rank, fault, world, took)


def dies_at_start(fleet: Fleet, victim: Victim, fault: str) -> float:
    victim.allow()
    began = time.monotonic()
    with Pauses() as pauses:
        with starting(fleet) as errors:
            victim.wait_held()
            struck = strike(fleet, victim, fault)
        took = time.time() - struck
    (error,) = errors
    assert f"rank {victim.rank}" in str(error), error
    if fault != "wedge":
        assert isinstance(error, PeerDied) and error.rank == victim.rank, error
        assert took < DEAD_S + SLACK_S + pauses.late_s
    else:
        assert time.monotonic() - began < START_S + SLACK_S + 2.0 + pauses.late_s
    return took


def dies_while_serving(fleet: Fleet, victim: Victim, fault: str) -> float:
    fleet.start()
    rank, world = victim.rank, fleet.world
    running = []
    if victim.place != "idle":
        other = (rank + 1) % world
        running.append(fleet.submit([1, 2, 3], max_tokens=3000, poster=other, lane="local", stop_tokens=()))
        if victim.place == "decoding":
            running.append(fleet.submit([1, 2, 3], max_tokens=3000, poster=rank, lane="local", stop_tokens=()))
        for pending in running:
            next(iter(pending))
    with Pauses() as pauses:
        victim.allow()
        if victim.place not in ("idle", "decoding"):
            running.append(whale_past(fleet, victim))
        victim.wait_held()
        waits = waits_on(fleet, rank)
        # Who does not wait for the victim itself waits for one who does: of a gang, not all share its window.
        assert AWAITED[victim.place] in {kind for peer, kind, _ in waits.values() if peer == rank}, waits
        struck = strike(fleet, victim, fault)
        failure = failure_of(fleet, HANG_S)
    assert f"rank {rank} " in str(failure), failure
    assert isinstance(failure, PeerDied) and failure.rank == rank, failure
    bound_s = DEAD_S if fault != "wedge" else STUCK_S + SLACK_S
    took = check_survivors(fleet, rank, waits, bound_s + pauses.late_s, struck)
    for pending in running:
        assert f"rank {rank}" in str(error_of(pending))
    return took


def whale_past(fleet: Fleet, victim: Victim) -> Pending:
    """Its poster is the gang's last: it rings free at all others, and they ring data at it."""
    poster = victim.rank if victim.place == "free" else (victim.rank + 1) % fleet.world
    return fleet.submit(list(range(200)) * fleet.world, max_tokens=4, poster=poster, lane="whale", stop_tokens=())


@pytest.fixture(autouse=True)
def survivors_leave_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too; when they noticed is in their post-mortems."""
    monkeypatch.setattr("whalez.fleet.OWN_LEAVE_S", 8.0)


@pytest.mark.timeout(600)  # of eleven fleets
def test_one_cell_of_every_phase(tiny: Path, tmp_path: Path) -> None:
    """Three fleets at a time, for most of a cell is waiting."""

    def try_cell(each: tuple[str, int, str]) -> None:
        folder = tmp_path / each[0]
        folder.mkdir()
        try:
            cell(tiny, folder, 2, *each)
        except BaseException as error:
            error.add_note(f"in the cell {each}")
            raise

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(try_cell, QUICK))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "rank", "fault"), SLOW)
def test_every_cell(tiny: Path, tmp_path: Path, place: str, rank: int, fault: str) -> None:
    cell(tiny, tmp_path, WORLD, place, rank, fault)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "slow_s"), [("gathering", 8.0), ("dispatch", 8.0), ("data", 60.0)])
def test_an_operation_longer_than_stuck_s_that_gets_on_disturbs_nobody(
    tiny: Path, tmp_path: Path, place: str, slow_s: float
) -> None:
    """A long time in one operation with a moving progress word, where three seconds without would end the fleet."""
    victim = Victim(0, place, tmp_path / "mark", slow_s=slow_s)
    prompt = list(range(200)) * 2
    with Fleet(tiny, 2, run_dir=tmp_path / "run", command=victim.command, stuck_s=STUCK_S, **SETTINGS) as fleet:  # type: ignore[arg-type]
        expected = fleet.generate(prompt, max_tokens=6, poster=1, lane="local", stop_tokens=()).tokens
        victim.allow()
        begun = time.monotonic()
        late = fleet.submit(prompt, max_tokens=6, poster=1, lane="whale", stop_tokens=())
        wait_until(victim.mark.exists, 20, "never came by")
        assert late.result(slow_s + 30).tokens == expected
        assert time.monotonic() - begun > slow_s
        assert fleet.failure is None


@pytest.mark.slow
def test_a_wedged_rank_can_be_held_for_a_debugger(tiny: Path, tmp_path: Path) -> None:
    """The wedged rank's watchdog holds it; it still leaves when the fleet is stopped, as do those that wait for it."""
    victim = Victim(1, "data", tmp_path / "mark")
    lines: list[str] = []
    fleet = Fleet(
        tiny,
        2,
        run_dir=tmp_path / "run",
        command=victim.command,
        stuck_s=STUCK_S,
        hold_on_failure=True,
        progress=lines.append,
        **SETTINGS,  # type: ignore[arg-type]
    )
    try:
        fleet.start()
        victim.allow()
        whale = fleet.submit(list(range(200)) * 2, max_tokens=4, poster=0, lane="whale", stop_tokens=())
        victim.wait_held()
        for rank in range(2):
            held = f"rank {rank} is held for a debugger until SIGTERM: pid {fleet.pids()[f'rank {rank}']}"
            wait_until(lambda held=held: any(line.startswith(held) for line in lines), 2 * STUCK_S + SLACK_S, lines)
        assert "rank 1 died: stuck: " in str(
            error_of(whale)
        )  # its watchdog and who waits for it count the same seconds
        told = post_mortems(fleet)
        assert {rank: record["blames"] for rank, record in told.items()} == {0: 1, 1: 1}
        assert "pass_by" in told[1]["traceback"]
        victim.release()  # the operation returns: its rank fails once more, and what it has told stays
        log = fleet.run_dir / "rank-1.log"
        wait_until(lambda: log.read_text().count("held for a debugger") == 2, 10, log.read_text)
        assert post_mortems(fleet) == told
        begun = time.monotonic()
    finally:
        fleet.stop()
    assert time.monotonic() - begun < 4
    assert {process.how for process in fleet._processes} == {"exited with 1"}
    assert_clean(fleet)
