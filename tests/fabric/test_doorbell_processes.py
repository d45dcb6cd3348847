"""Doorbells between real processes: who sleeps is woken, no ring is lost, and a killed rank leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fabric_child import SLICE_S, ping_pong
from fabric_world import entry_of, make_layout

from whalez.errors import DoorbellTimeout
from whalez.fabric.doorbell import BELL_DATA, BELL_FREE, BELL_LAUNCH, Bells
from whalez.fabric.host import HostSlabs, remove_leftovers
from whalez.rendezvous.messages import SlabEntry

pytestmark = pytest.mark.multiprocess

CHILD = Path(__file__).with_name("fabric_child.py")
PEER = np.ones(1, np.int64)


class Pair:
    """This process is rank 0; rank 1 is a child that has passed the barrier unless it is to die before."""

    def __init__(self, slabs: HostSlabs, child: subprocess.Popen[str], **arguments: float) -> None:
        assert child.stdout is not None
        self.slabs = slabs
        self.child = child
        ticket = child.stdout.readline().strip().encode()
        entry = SlabEntry(rank=1, incarnation="child", host="here", pid=child.pid, ticket=ticket)
        self.table = slabs.open_all([entry_of(slabs), entry])
        self.bells = Bells(slabs.layout, self.table, 0, **arguments)  # type: ignore[arg-type]

    def let_go(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def last_line(self) -> str:
        out, _ = self.child.communicate(timeout=60)
        assert self.child.returncode == 0
        return out.strip()


@contextlib.contextmanager
def pair(mode: str, fleet_id: str, turns: int = 0, **arguments: float) -> Iterator[Pair]:
    slabs = HostSlabs(make_layout(2), fleet_id=fleet_id, rank=0, incarnation="parent")
    with slabs:
        slabs.create()
        command = [sys.executable, str(CHILD), mode, fleet_id, slabs.ticket.decode(), str(turns)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            yield Pair(slabs, child, **arguments)
        finally:
            child.kill()
            child.communicate()


def names(fleet_id: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if fleet_id in name]


def test_no_wake_up_is_lost_in_20000_rings(fleet_id: str) -> None:
    with pair("ping-pong", fleet_id, 10_000, spin_ns=0, slice_s=SLICE_S, stuck_s=90.0) as two:
        two.let_go()
        value = ping_pong(two.bells, PEER, 10_000, begins=True)
        assert value > 10 * 2**32  # ten of the steps left the low half of the word as it was
        assert two.last_line() == str(value)


def test_a_sleeping_process_is_woken_by_the_launch_bell(fleet_id: str) -> None:
    with pair("sleep", fleet_id) as two:
        two.let_go()
        two.bells.wait(BELL_DATA, PEER, 1)
        two.bells.ring(BELL_FREE, PEER, 5)  # no reason to get up
        two.bells.write_word(0, 42)
        begun = time.monotonic()
        two.bells.ring(BELL_LAUNCH, PEER, 1)
        assert two.last_line() == "launch (42, 0)"
        assert time.monotonic() - begun < 30  # it would have slept for 60 s


def test_a_rank_killed_after_the_barrier_leaves_nothing(fleet_id: str) -> None:
    with pair("killed", fleet_id, stuck_s=0.05, slice_s=0.01) as two:
        two.let_go()
        two.slabs.unlink()
        while True:  # its start, numba and all, is no progress either
            with contextlib.suppress(DoorbellTimeout):
                two.bells.wait(BELL_LAUNCH, PEER, 1)
                break
        assert names(fleet_id) == []
        two.child.send_signal(signal.SIGKILL)
        two.child.wait(30)
        with pytest.raises(DoorbellTimeout, match="rank 1's combine"):
            two.bells.wait(2, PEER, 1)
        two.bells.ring(BELL_DATA, PEER, 1)  # its memory is there as long as we are
        assert (two.slabs.layout.view(two.table[1], "halo") == 7).all()


def test_a_rank_killed_before_the_barrier_leaves_a_name_that_the_launcher_removes(fleet_id: str) -> None:
    with pair("killed-linked", fleet_id) as two:
        two.child.send_signal(signal.SIGKILL)
        two.child.wait(30)
        two.slabs.unlink()
        assert remove_leftovers(fleet_id) == [f"whalez-{fleet_id}-child-1"]
        assert names(fleet_id) == []
