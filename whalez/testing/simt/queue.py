"""The order of a device's streams on the CPU: one queue of entries per rank, performed in order by `run_queues`.

`SimtStream` is the stream of one rank: what it is told is queued, nothing runs. `run_queues` performs the queues of all
ranks together. A wait blocks its own queue until the word is there; kernels at the heads of several queues run
together, so kernels that spin on each other's words meet.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whalez.testing.simt._core import Launch, SimtError, jit, run

U64 = 1 << 64


def _read(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def reached(seen: int, value: int) -> bool:
    """GEQ of the stream memory operations: cyclic, (int64)(seen - value) >= 0."""
    return (seen - value) % U64 < 1 << 63


@dataclass(frozen=True)
class LaunchEntry:
    name: str
    launch: Launch

    def __str__(self) -> str:
        return f"launch {self.name} grid {self.launch.grid} block {self.launch.block}"


@dataclass(frozen=True)
class WaitEntry:
    pairs: tuple[tuple[int, int], ...]

    def is_over(self) -> bool:
        return all(reached(_read(a), v) for a, v in self.pairs)

    def __str__(self) -> str:
        return "wait " + ", ".join(
            f"[{a:#x}] expected {v} seen {_read(a)}" + ("" if reached(_read(a), v) else " <- blocked")
            for a, v in self.pairs
        )


@dataclass(frozen=True)
class WriteEntry:
    address: int
    value: int

    def perform(self) -> None:
        ctypes.c_uint64.from_address(self.address).value = self.value

    def __str__(self) -> str:
        return f"write [{self.address:#x}] = {self.value}"


@dataclass(frozen=True)
class CopyEntry:
    dst: int
    src: int
    nbytes: int

    def perform(self) -> None:
        ctypes.memmove(self.dst, self.src, self.nbytes)

    def __str__(self) -> str:
        return f"copy [{self.dst:#x}] <- [{self.src:#x}], {self.nbytes} bytes"


@dataclass(frozen=True)
class ZeroEntry:
    dst: int
    nbytes: int

    def perform(self) -> None:
        ctypes.memset(self.dst, 0, self.nbytes)

    def __str__(self) -> str:
        return f"zero [{self.dst:#x}], {self.nbytes} bytes"


Entry = LaunchEntry | WaitEntry | WriteEntry | CopyEntry | ZeroEntry


class SimtStream:
    """The stream of one rank; every call appends one entry to `queue` and returns."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.queue: deque[Entry] = deque()

    def launch(self, kernel: Any, grid: Any, block: Any, shared_bytes: int, *args: Any) -> None:
        self.queue.append(LaunchEntry(kernel.name, Launch(jit(kernel), grid, block, args, shared_bytes)))

    def wait_value(self, *pairs: tuple[int, int]) -> None:
        self.queue.append(WaitEntry(tuple((int(a), int(v) % U64) for a, v in pairs)))

    def write_value(self, address: int, value: int) -> None:
        self.queue.append(WriteEntry(int(address), int(value) % U64))

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self.queue.append(CopyEntry(int(dst), int(src), int(nbytes)))

    def zero(self, dst: int, nbytes: int) -> None:
        self.queue.append(ZeroEntry(int(dst), int(nbytes)))


def run_queues(streams: Sequence[SimtStream], *, resident: bool = True, order: str = "forward", **limits: Any) -> int:
    """Perform the queues of all ranks until all are empty; returns the number of entries performed.

    Raises: SimtError, with the head of every queue, if none can go on.
    """
    performed = 0
    while any(s.queue for s in streams):
        before = performed
        for s in streams:
            while s.queue:
                head = s.queue[0]
                if isinstance(head, LaunchEntry) or (isinstance(head, WaitEntry) and not head.is_over()):
                    break
                if not isinstance(head, WaitEntry):
                    head.perform()
                s.queue.popleft()
                performed += 1
        ready = [s for s in streams if s.queue and isinstance(s.queue[0], LaunchEntry)]
        groups = [ready] if resident else [[s] for s in ready]
        for group in groups:
            if not group:
                continue
            launches = [s.queue[0].launch for s in group]  # type: ignore[union-attr]
            try:
                run(launches, order=order, **limits)
            except SimtError as e:
                heads = "\n".join(f"  rank {s.rank}: {s.queue[0] if s.queue else 'empty'}" for s in streams)
                raise SimtError(f"{e}\nheads of the queues:\n{heads}") from e
            for s in group:
                s.queue.popleft()
                performed += 1
        if performed == before:
            heads = "\n".join(f"  rank {s.rank}: {s.queue[0] if s.queue else 'empty'}" for s in streams)
            raise SimtError(f"deadlock: no queue can go on\n{heads}")
    return performed
