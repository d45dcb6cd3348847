"""Fleets whose ranks are `fake_rank.py`, and whether anything of them is left. Light, as child processes import it."""

import contextlib
import time
from collections.abc import Collection
from pathlib import Path

from whalez.fleet import Fleet, rank_command

FAKE_RANK = str(Path(__file__).with_name("fake_rank.py"))


def fake_command(fleet: Fleet, rank: int) -> list[str]:
    """The real command line with another program in front."""
    real = rank_command(fleet, rank)
    at = real.index("-m")
    return [*real[:at], FAKE_RANK, *real[at + 2 :]]


def group_lives(pgid: int) -> bool:
    """A member that is not a zombie: one whose parent died waits for init to collect it, and holds nothing."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rsplit(")", 1)[1].split()[:3]
            if int(group) == pgid and state != "Z":
                return True
    return False


def wait_gone(pgids: Collection[int]) -> None:
    """Until nothing of these groups lives. What was killed is gone once the machine has run it, not at once."""
    deadline = time.monotonic() + 5.0
    while left := [pgid for pgid in pgids if group_lives(pgid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
