"""A rank in a process of its own, run by test_doorbell_processes.py. Prints its ticket, then what it saw."""

from __future__ import annotations

import sys
import time

import numpy as np
from fabric_world import entry_of, make_layout

from whalez.fabric.doorbell import BELL_DATA, BELL_FREE, BELL_LAUNCH, Bells
from whalez.fabric.host import HostSlabs
from whalez.rendezvous.messages import SlabEntry

PEER = np.zeros(1, np.int64)  # rank 0, the test
SELF = 1

#: Values of the long test: every step but one is small, one is exactly 2^32.
STEP = 2**32


def rise(value: int, turn: int) -> int:
    return value + (STEP if turn % 1000 == 500 else 1)


#: Nobody is slow for so long. A wake-up that is lost shows only when the slice ends, for then the wait looks again.
LOST_S = 20.0
SLICE_S = 2 * LOST_S


def wait(bells: Bells, kind: int, peer: np.ndarray, value: int) -> None:
    begun = time.monotonic()
    bells.wait(kind, peer, value)
    assert time.monotonic() - begun < LOST_S, f"slept through the ring of {value:#x}"


def ping_pong(bells: Bells, peer: np.ndarray, turns: int, *, begins: bool) -> int:
    """Ring and wait by turns; without spinning every wait sleeps. The last value."""
    value = 0
    for turn in range(turns):
        value = rise(value, turn)
        if begins:
            bells.ring(BELL_DATA, peer, value)
            wait(bells, BELL_FREE, peer, value)
        else:
            wait(bells, BELL_DATA, peer, value)
            bells.ring(BELL_FREE, peer, value)
    return value


def main(mode: str, fleet_id: str, ticket: str, turns: str) -> None:
    layout = make_layout(2)
    with HostSlabs(layout, fleet_id=fleet_id, rank=SELF, incarnation="child") as slabs:
        slabs.create()
        peer = SlabEntry(rank=0, incarnation="parent", host="here", pid=0, ticket=ticket.encode())
        table = slabs.open_all([peer, entry_of(slabs)])
        print(slabs.ticket.decode(), flush=True)
        if mode == "killed-linked":
            sys.stdin.readline()
            raise AssertionError("outlived its kill")
        sys.stdin.readline()  # the barrier: the test has mapped our slab
        slabs.unlink()
        bells = Bells(layout, table, SELF, spin_ns=0, slice_s=SLICE_S, stuck_s=90.0)
        if mode == "ping-pong":
            print(ping_pong(bells, PEER, int(turns), begins=False), flush=True)
        elif mode == "sleep":
            bells.take_wakes()
            bells.ring(BELL_DATA, PEER, 1)  # composed: about to sleep
            print(bells.sleep(0, 60.0), bells.read_words(0), flush=True)
        elif mode == "killed":
            layout.view(table[SELF], "halo")[:] = 7
            bells.ring(BELL_LAUNCH, PEER, 1)
            bells.wait(BELL_DATA, PEER, 1)
        bells.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
