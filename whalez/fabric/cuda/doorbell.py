"""Doorbells between devices: what a rank puts on its stream to ring its peers and to wait for them.

Rule 1: everything is an entry of a stream; the host neither rings nor waits, and knows no more than what it queued.
Rule 2: values are those of whalez.fabric.doorbell, and rise. The launch bell has one line per receiver, its own: all
        peers store the same value there, because a stream waits for all of several words, never for one of them.
Hot: yes; two of each paired exchange.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from whalez.errors import ConfigError, DoorbellTimeout, FabricError
from whalez.fabric.cuda.driver import Device, Teardown
from whalez.fabric.cuda.kernels import (
    GAVE_UP,
    REPORT_BYTES,
    REPORT_EXPECTED,
    REPORT_PEER,
    REPORT_SEEN,
    REPORT_STATE,
    REPORT_TAG,
    REPORT_WAITED_NS,
    RUNNING,
    STOPPED,
    WORLD_MAX,
    doorbell_ring_kernel,
    doorbell_wait_kernel,
)
from whalez.fabric.doorbell import place_of
from whalez.fabric.layout import BELL_KINDS, BELL_LAUNCH, SlabLayout
from whalez.ops.device.stream import Stream

#: What a watchdog raises an awaited line to. The comparison is cyclic, (int64)(seen - value) >= 0: this is at or above
#: every value a bell can have, while 2^64 - 1 is -1 and below them all.
RELEASED: Final = 2**63 - 1

_VALUE_END: Final = 2**63
_PORTABLE_MAPPED: Final = 3


def is_reached(seen: int, value: int) -> bool:
    """Whether a wait for `value` is over: the comparison of CU_STREAM_WAIT_VALUE_GEQ."""
    return (seen - value) % 2**64 < 2**63


class Peers(NamedTuple):
    """A set of ranks, made once and used for every beat it takes part in."""

    ranks: tuple[int, ...]
    masks: tuple[int, int, int, int]

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Peers:
        bits = sum(1 << rank for rank in set(ranks))
        assert 0 <= bits < 1 << WORLD_MAX, ranks
        words = [bits >> 64 * i & 2**64 - 1 for i in range(4)]
        return cls(tuple(sorted(set(ranks))), (words[0], words[1], words[2], words[3]))


class Wait(NamedTuple):
    """A wait that was queued."""

    kind: int
    peers: Peers
    value: int
    layer: int


def bell_tables(layout: SlabLayout, addresses: Sequence[int], rank: int) -> bytes:
    """u64 [kinds + 1, world]: where `rank` rings, per kind and peer; then where every rank's progress word lies."""
    table = np.zeros((len(BELL_KINDS) + 1, layout.world), np.uint64)
    for peer, address in enumerate(addresses):
        for kind in range(len(BELL_KINDS)):
            sender = peer if kind == BELL_LAUNCH else rank
            table[kind, peer] = address + layout.bell_offset(kind, sender)
        table[-1, peer] = address + layout.offset_of("progress")
    return table.tobytes()


class DeviceBells:
    """This rank's doorbells, over any Stream.

    layout, addresses: the world's slabs in rank order, as mapped here
    tables:            address of `bell_tables` in device memory
    report:            address of REPORT_BYTES zeros that device and host see at one address
    wait_by:           "memop", or "spin" where the device refuses memory operations
    budget_ns:         of a spin
    steps_per_launch:  paired exchanges of a launch, for the words of errors
    """

    def __init__(
        self,
        stream: Stream,
        layout: SlabLayout,
        addresses: Sequence[int],
        rank: int,
        *,
        tables: int,
        report: int,
        wait_by: Literal["memop", "spin"] = "memop",
        budget_ns: int = 60 * 10**9,
        steps_per_launch: int = 1,
    ) -> None:
        world = layout.world
        if world > WORLD_MAX:
            raise ConfigError(f"world: expected at most {WORLD_MAX} ranks on devices, got {world}")
        assert len(addresses) == world and 0 <= rank < world, (addresses, rank)
        self.stream = stream
        self.rank = rank
        self.world = world
        self.addresses = tuple(addresses)
        self.layout = layout
        self.wait_by = wait_by
        self.budget_ns = budget_ns
        self.steps_per_launch = steps_per_launch
        self.everybody = Peers.of(range(world))
        self.waits: list[Wait] = []  #: queued since `begin_launch`, in order
        self.failed: FabricError | None = None  #: why this launch's results are worth nothing
        self._rows = [tables + 8 * world * kind for kind in range(len(BELL_KINDS) + 1)]
        own = addresses[rank]
        self._lines = [own + layout.bell_offset(kind, 0) for kind in range(len(BELL_KINDS))]
        self._progress = own + layout.offset_of("progress")
        self._progress_count = 0
        self._report = report
        self._rung = [[0] * world for _ in BELL_KINDS]

    def line(self, kind: int, peer: int) -> int:
        """Address of the word that `peer` raises here; for the launch bell the one that all raise."""
        return self.addresses[self.rank] + self.layout.bell_offset(kind, self.rank if kind == BELL_LAUNCH else peer)

    def begin_launch(self) -> None:
        """The launch before has drained: what was queued for it is forgotten."""
        assert self.failed is None, f"the launch before failed: {self.failed}"
        self.waits.clear()

    def ring(self, kind: int, peers: Peers, value: int) -> None:
        """Queue: raise this rank's line of `kind` at all `peers` to `value`. One launch of one thread.

        Order: what was queued before is visible to a peer whose wait for `value` is over
        """
        assert 0 < value < _VALUE_END, value
        assert self.failed is None, self.failed
        rung = self._rung[kind]
        for peer in peers.ranks:
            assert value > rung[peer], f"{BELL_KINDS[kind]} {value:#x} at rank {peer} after {rung[peer]:#x}"
            rung[peer] = value
        self.stream.launch(doorbell_ring_kernel, 1, 1, 0, self._rows[kind], self.world, *peers.masks, value)

    def wait(self, kind: int, peers: Peers, value: int, *, layer: int = -1) -> None:
        """Queue: go on when all `peers` have rung `kind` with `value` or more. One batch of memory operations.

        For the launch bell it is enough that one of them has.
        """
        assert 0 < value < _VALUE_END, value
        assert self.failed is None, self.failed
        if kind == BELL_LAUNCH:
            peers = Peers.of([self.rank])  # the one line
        self.waits.append(Wait(kind, peers, value, layer))
        if self.wait_by == "memop":
            self.stream.wait_value(*[(self.line(kind, peer), value) for peer in peers.ranks])
        else:
            tag = kind | layer + 1 << 8
            self.stream.launch(
                doorbell_wait_kernel,
                1,
                1,
                0,
                self._lines[kind],
                self.world,
                *peers.masks,
                value,
                self.budget_ns,
                self._rows[-1],
                self._report,
                tag,
            )

    def raise_progress(self) -> None:
        """Queue: this rank got on. After every layer and every attention block."""
        self._progress_count += 1
        self.stream.write_value(self._progress, self._progress_count)

    # ---- what the host is told ------------------------------------------------------------------------------------
    def _word(self, i: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(self._report + 8 * i)

    def stop_spinning(self) -> None:
        """End every spin of this launch; what a wait that gave up has written stays."""
        if self._word(REPORT_STATE).value == RUNNING:
            self._word(REPORT_STATE).value = STOPPED

    def report(self) -> DoorbellTimeout | None:
        """What a spin that gave up has written, once the stream has drained."""
        if self._word(REPORT_STATE).value != GAVE_UP:
            return None
        peer, tag, expected, seen, waited_ns = (
            int(self._word(i).value) for i in (REPORT_PEER, REPORT_TAG, REPORT_EXPECTED, REPORT_SEEN, REPORT_WAITED_NS)
        )
        return self.timeout(Wait(tag & 255, Peers.of([peer]), expected, (tag >> 8) - 1), peer, seen, waited_ns / 1e9)

    def timeout(self, wait: Wait, peer: int, seen: int, waited_s: float) -> DoorbellTimeout:
        """The error for a wait that was given up: rank, window, expected, seen."""
        where = place_of(wait.kind, wait.value, wait.layer, self.steps_per_launch)
        return DoorbellTimeout(peer, BELL_KINDS[wait.kind], wait.value, seen, waited_s, where)


class BellMemory:
    """The tables and the report of one rank's bells.

    Owns:      one device and one host allocation
    Closed by: whoever made it, after the stream has drained
    """

    def __init__(self, device: Device, layout: SlabLayout, addresses: Sequence[int], rank: int) -> None:
        self._device = device
        self._teardown = Teardown()
        driver = device.driver
        content = bell_tables(layout, addresses, rank)
        try:
            device.bind()
            tables = driver.cuMemAlloc(len(content))
            self._teardown.push(driver.cuMemFree, tables)
            device.upload(int(tables), content)
            report = driver.cuMemHostAlloc(REPORT_BYTES, _PORTABLE_MAPPED)
            self._teardown.push(driver.cuMemFreeHost, report)
        except BaseException:
            self.close()
            raise
        self.tables = int(tables)
        self.report = int(report)  # with unified addressing the device sees it at the same address
        ctypes.memset(self.report, 0, REPORT_BYTES)

    def close(self) -> None:
        """Idempotent; after a failure it may be called again."""
        if self._teardown:
            self._device.bind()
            self._teardown.run()
