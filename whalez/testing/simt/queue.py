"""The streams of several ranks on the CPU: one queue of entries per rank, performed in order by `run_queues`.

`SimtStream` has the methods of the stream that ops are written for (ops/device/stream.py); what it is told is queued,
and nothing runs. `run_queues` then performs the queues of all ranks together, as their devices would: each queue in
order, kernels of different ranks side by side, so that kernels that spin on each other's words meet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whalez.testing.simt import emulation
from whalez.testing.simt.errors import SimtError
from whalez.testing.simt.launch import CPU_S_MAX, Launch, start
from whalez.testing.simt.machine import (
    FEED_CLOSED,
    FEED_DID,
    FEED_LAUNCHED,
    CLaunch,
    copy_bytes,
    read_u64,
    write_u64,
    zero_bytes,
)

QUEUE_SPIN_PASSES_MAX = 100_000  #: a stuck world is told within seconds, though each pass visits every rank's threads


def reached(seen: int, value: int) -> bool:
    """GEQ of the stream memory operations: cyclic, (int64)(seen - value) >= 0."""
    return (seen - value) % (1 << 64) < 1 << 63


@dataclass(frozen=True)
class LaunchEntry:
    launch: Launch

    def __str__(self) -> str:
        return f"launch of {self.launch}"


@dataclass(frozen=True)
class WaitEntry:
    pairs: tuple[tuple[int, int], ...]

    def is_over(self) -> bool:
        return all(reached(read_u64(address), value) for address, value in self.pairs)

    def __str__(self) -> str:
        parts = []
        for address, value in self.pairs:
            seen = read_u64(address)
            parts.append(
                f"[{address:#x}] expected {value} seen {seen}" + ("" if reached(seen, value) else " (blocked)")
            )
        return "wait for " + ", ".join(parts)


@dataclass(frozen=True)
class WriteEntry:
    address: int
    value: int

    def perform(self) -> None:
        write_u64(self.address, self.value)

    def __str__(self) -> str:
        return f"write of {self.value} to [{self.address:#x}]"


@dataclass(frozen=True)
class CopyEntry:
    dst: int
    src: int
    nbytes: int

    def perform(self) -> None:
        copy_bytes(self.dst, self.src, self.nbytes)

    def __str__(self) -> str:
        return f"copy of {self.nbytes} bytes from [{self.src:#x}] to [{self.dst:#x}]"


@dataclass(frozen=True)
class ZeroEntry:
    dst: int
    nbytes: int

    def perform(self) -> None:
        zero_bytes(self.dst, self.nbytes)

    def __str__(self) -> str:
        return f"zeroing of {self.nbytes} bytes at [{self.dst:#x}]"


@dataclass(frozen=True)
class StandInEntry:
    """Work of a device that is no kernel of this project, such as a library's matrix product."""

    what: str
    function: Callable[[], None]

    def perform(self) -> None:
        try:
            self.function()
        except Exception as e:
            raise SimtError(f"{self}: {e}") from e

    def __str__(self) -> str:
        return f"stand-in for {self.what}"


Entry = LaunchEntry | WaitEntry | WriteEntry | CopyEntry | ZeroEntry | StandInEntry


def _word(address: int) -> int:
    if address % 8:
        raise SimtError(f"stream memory operation on [{address:#x}], which is not a multiple of 8")
    return address


class SimtStream:
    """The stream of one rank. Every call appends one entry to `queue` and returns; misuse is refused at once."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.queue: deque[Entry] = deque()
        self.performed: list[Entry] = []  #: in order, for a test to look at

    def launch(
        self,
        kernel: Any,
        grid: int | tuple[int, int, int],
        block: int | tuple[int, int, int],
        shared_bytes: int,
        *arguments: Any,
    ) -> None:
        """`arguments` by the kernel's signature: addresses (or numpy arrays), sizes as ints, scalars as floats."""
        self.queue.append(LaunchEntry(Launch(kernel, grid, block, arguments, shared_bytes)))

    def wait_value(self, *pairs: tuple[int, int]) -> None:
        """Go on when every word has reached its value, cyclically; all of one beat in one call."""
        self.queue.append(WaitEntry(tuple((_word(int(a)), int(v) % (1 << 64)) for a, v in pairs)))

    def write_value(self, address: int, value: int) -> None:
        self.queue.append(WriteEntry(_word(int(address)), int(value) % (1 << 64)))

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        dst, src, nbytes = int(dst), int(src), int(nbytes)
        if nbytes < 0 or max(dst, src) < min(dst, src) + nbytes:
            raise SimtError(f"copy of {nbytes} bytes between overlapping [{src:#x}] and [{dst:#x}]")
        self.queue.append(CopyEntry(dst, src, nbytes))

    def zero(self, dst: int, nbytes: int) -> None:
        if nbytes < 0:
            raise SimtError(f"zeroing of {nbytes} bytes")
        self.queue.append(ZeroEntry(int(dst), int(nbytes)))

    def stand_in(self, what: str, function: Callable[[], None]) -> None:
        """Queue host code in the place of `what`, in order with the rest; not part of the ops' `Stream`.

        `function` runs when its turn comes, not now, and must not wait for another rank: nothing else runs meanwhile.
        """
        self.queue.append(StandInEntry(what, function))


class _Feeder:
    """Hands the machine the next launch of each queue, and performs what lies before it."""

    def __init__(self, streams: Sequence[SimtStream], slots: Any, resident: bool, blocks: int) -> None:
        self.streams, self.slots, self.resident, self.blocks = streams, slots, resident, blocks
        self.running: list[Launch | None] = [None] * len(streams)
        self.granted = [0] * len(streams)  #: launches
        self.last = -1  #: whom the last was granted

    def _is_turn_of(self, i: int) -> bool:
        """One kernel at a time: of the ranks that have one, the one that has had the fewest, then the next in line."""
        n = len(self.streams)
        ready = [j for j, s in enumerate(self.streams) if s.queue and isinstance(s.queue[0], LaunchEntry)]
        return not any(self.running) and i == min(ready, key=lambda j: (self.granted[j], (j - self.last - 1) % n))

    def __call__(self, i: int) -> int:
        stream, did = self.streams[i], 0
        if self.running[i]:
            self.running[i], did = None, FEED_DID
            stream.performed.append(stream.queue.popleft())
        while stream.queue:
            head = stream.queue[0]
            if isinstance(head, LaunchEntry):
                if not self.resident and not self._is_turn_of(i):
                    return did
                self.running[i] = head.launch
                self.granted[i] += 1
                self.last = i
                c = self.slots[i]
                head.launch.fill(c)
                c.resident = self.blocks or math.prod(head.launch.grid)
                return did | FEED_LAUNCHED
            if isinstance(head, WaitEntry):
                if not head.is_over():
                    return did
            else:
                head.perform()
            stream.performed.append(stream.queue.popleft())
            did = FEED_DID
        return did | FEED_CLOSED


def _guarded(feed: Callable[[int], int]) -> Callable[[int], int]:
    def call(i: int) -> int:
        try:
            return feed(i)
        except BaseException as e:  # must not cross the C frames; start() raises it
            emulation.pending.append(e)
            return -1

    return call


def _heads(streams: Sequence[SimtStream], running: Sequence[Launch | None]) -> str:
    lines = []
    for stream, launch in zip(streams, running, strict=True):
        try:
            head = f"{stream.queue[0]}{' (running)' if launch else ''}" if stream.queue else "empty"
        except SimtError as e:
            head = str(e)
        more = f", {len(stream.queue) - 1} more behind it" if len(stream.queue) > 1 else ""
        lines.append(f"  rank {stream.rank}, after {len(stream.performed)} entries: {head}{more}")
    return "\n".join(lines)


def run_queues(
    streams: Sequence[SimtStream],
    *,
    resident: bool = True,
    order: str = "forward",
    seed: int = 1,
    blocks: int = 1,
    spin_limit: int = QUEUE_SPIN_PASSES_MAX,
    cpu_s: float = CPU_S_MAX,
) -> None:
    """Perform the queues of all ranks until all are empty.

    Args:
        resident: kernels at the heads of several queues run side by side. False: one kernel at a time in the whole
                  world, which shows that no kernel waits for another one
        order:    of threads, warps, blocks and ranks
        blocks:   of one grid that are live at once; 0 for all
        spin_limit, cpu_s: as in `run`
    Raises: SimtError with the head of every queue (what it waits for, and what it sees) if none can go on, or if a
            kernel or a stand-in fails. The queues stay as they were then.
    """
    slots = (CLaunch * len(streams))()
    for c, stream in zip(slots, streams, strict=True):
        c.rank = stream.rank
    feed = _Feeder(streams, slots, resident, blocks)
    try:
        start(slots, order, seed, spin_limit, cpu_s, _guarded(feed))
    except SimtError as e:
        raise SimtError(f"{e}\nheads of the queues:\n{_heads(streams, feed.running)}") from e
