"""Frames between one rank and the hub that are lost, repeated, late or cut in the middle.

What starts the world is said again until it is answered, so it may get lost or come twice; what is late costs time.
A message of the running world that gets lost or comes twice, and from the table on a connection that is cut, ends the
world within seconds, with an error that names the rank and why. Nothing changes an answer, and no request waits for
ever.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.faults import STUCK_S, assert_clean, failure_of
from helpers.proxy import FrameProxy
from helpers.small import SETTINGS
from whalez.errors import PeerDied, WhalezError, WireError
from whalez.fleet import Fleet, Generated, rank_command
from whalez.hub import wire

#: `make test` has the same faults between two hubs without ranks, in tests/hub/test_counted_frames.py.
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = list(range(200)) * 2
#: Message and whether it goes to the hub.
FRAMES = [
    ("Hello", True),
    ("Table", False),
    ("Mapped", True),
    ("WorldStarts", False),
    ("Post", True),
    ("Gather", False),
    ("Ready", True),
    ("Commit", False),
]
START = ("Hello", "Table", "Mapped", "WorldStarts")
#: From the fault to the end of the world, s.
SOON_S = 5.0
ACTIONS = ("drop", "twice", 1.0, "cut")
CASES = [(*frame, action) for frame in FRAMES for action in ACTIONS]
#: How the machines refuse a message that comes again, if that is before the next beat.
REPEATED = dict.fromkeys(START, "nothing") | {
    "Post": "broke the protocol: .*: post .* is outstanding",
    "Gather": "Gather 0 after seq 0: seqs must rise",
    "Ready": "broke the protocol: .*: Ready.*, but this rank is ready",
    "Commit": "Commit of seq 0, which is running",
}


def ends_the_world(kind: str, action: str | float) -> bool:
    if action == "cut":
        return kind != "Hello"  # who has said nothing yet has lost nothing
    return kind not in START and action != 1.0


def at(kind: str, to_hub: bool, action: str | float) -> tuple[Callable[[bool, bytes], str | float], list[float]]:
    """What to do with the first frame of this kind; the list says when it came by."""
    done: list[float] = []

    def decide(is_to_hub: bool, body: bytes) -> str | float:
        if done or is_to_hub != to_hub:
            return "pass"
        try:
            message = wire.decode(body).message
        except WireError:
            return "pass"
        if type(message).__name__ != kind:
            return "pass"
        done.append(time.monotonic())
        return action

    return decide, done


def whale(fleet: Fleet, poster: int) -> Generated:
    return fleet.generate(PROMPT, max_tokens=4, poster=poster, lane="whale", stop_tokens=(), timeout_s=30)


def through(port: int, proxy: FrameProxy) -> Callable[[Fleet, int], list[str]]:
    """Ranks of one fleet; rank 1 speaks to the hub through the proxy."""

    def command(fleet: Fleet, rank: int) -> list[str]:
        words = rank_command(fleet, rank)
        words[words.index("--hub") + 1] = f"tcp://127.0.0.1:{proxy.port if rank == 1 else port}"
        return words

    return command


@pytest.mark.parametrize(
    ("kind", "to_hub", "action"),
    CASES,
)
def test_a_frame_that_is_not_passed_on_as_it_should(
    tiny: Path, tmp_path: Path, kind: str, to_hub: bool, action: str | float
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    decide, done = at(kind, to_hub, action)
    proxy = FrameProxy(port, decide)
    fleet = Fleet(
        tiny,
        3,
        run_dir=tmp_path / "run",
        command=through(port, proxy),
        stuck_s=STUCK_S,
        start_s=30.0,
        **SETTINGS,  # type: ignore[arg-type]
    )
    cause = f"its connection to the hub lost or repeated frames: |{REPEATED[kind]}"
    if action == "cut":
        cause = "its connection to the hub was cut"
    named = re.compile(f"rank 1.*({cause})")
    # Rank 1 refuses such a message by itself: the fleet reads its last words, the others may only see it end.
    told = re.compile(f"{named.pattern}|rank 1 died: its process has ended") if action == "twice" else named
    try:
        if kind in START and ends_the_world(kind, action):
            with pytest.raises(PeerDied, match=named):
                fleet.start()
            assert time.monotonic() - done[0] < SOON_S
            return
        fleet.start()
        expected = fleet.generate(PROMPT, max_tokens=4, poster=0, lane="local", stop_tokens=()).tokens
        errors: list[WhalezError] = []
        for poster in (1, 0, 2):
            try:
                assert whale(fleet, poster).tokens == expected
            except WhalezError as error:
                errors.append(error)
        assert done, f"no {kind} came by"
        if ends_the_world(kind, action):
            assert named.search(str(failure_of(fleet, SOON_S))), fleet.failure
            assert all(told.search(str(each)) for each in errors), list(map(str, errors))
            assert time.monotonic() - done[0] < SOON_S
        else:
            assert not errors
            assert fleet.failure is None
    finally:
        fleet.stop()
        proxy.close()
        assert_clean(fleet)
