"""A rank in a process of its own, run by test_doorbell_processes.py. Prints its ticket, then what it saw."""

from __future__ import annotations

import sys

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


def lost() -> None:
    # Nobody is slow for a whole slice here; the ring came and nobody woke us.
    raise AssertionError("slept through a ring")


def ping_pong(bells: Bells, peer: np.ndarray, turns: int, *, begins: bool) -> int:
    """Ring and wait by turns; every wait sleeps, and a slice that ends is a lost wake-up. The last value."""
    value = 0
    for turn in range(turns):
        value = rise(value, turn)
        if begins:
            bells.ring(BELL_DATA, peer, value)
            bells.wait(BELL_FREE, peer, value, on_slice=lost)
        else:
            bells.wait(BELL_DATA, peer, value, on_slice=lost)
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
        bells = Bells(layout, table, SELF, spin_ns=0, slice_s=20.0)
        if mode == "ping-pong":
            print(ping_pong(bells, PEER, int(turns), begins=False), flush=True)
        elif mode == "sleep":
            bells.take_wakes()
            bells.ring(BELL_DATA, PEER, 1)  # composed: about to sleep
            print(bells.sleep(0, 60.0), bells.read_words(0), flush=True)
        elif mode == "killed":
            layout.view(table[SELF], "halo")[:] = 7
            bells.ring(BELL_LAUNCH, PEER, 1)
            bells.wait(BELL_DATA, PEER, 1, on_slice=lost)
        bells.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
