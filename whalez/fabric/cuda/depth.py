"""How much stands on a stream that has not run: never so much that the driver makes the host wait for it.

A driver takes about a thousand entries of a stream. The call behind them blocks, in C, until one has run; and if what
stands there is a wait for a peer that died, that is for ever, for who would release it is the thread that is blocked.
So an event is recorded behind every ENTRIES_PER_MARK entries, and with all events under way the host waits here, where
it can look around: `when_full` is the watchdog's.

Rule 1: an event is asked, never waited for: nothing here blocks or synchronises.
Hot: yes; two additions for an entry, two calls for ENTRIES_PER_MARK of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from whalez.clock import now_ns
from whalez.errors import FabricError
from whalez.fabric.cuda.driver import Device, Teardown

ENTRIES_PER_MARK: Final = 256
MARKS: Final = 2
#: What may stand on a stream, marks too. The driver's own limit is not documented; about 1000 launches were reported.
ENTRIES_MAX: Final = (MARKS + 1) * ENTRIES_PER_MARK + MARKS

FULL_S: Final = 60.0  #: how long `wait_for_room` goes on while nothing runs
_PAUSE_S: Final = 0.0005
_DISABLE_TIMING: Final = 2

#: Waits until the function it is given, which says whether there is room, answers True; or raises.
WhenFull = Callable[[Callable[[], bool]], None]


def wait_for_room(has_room: Callable[[], bool]) -> None:
    """For a stream that nobody watches. Raises: FabricError after FULL_S."""
    deadline = now_ns() + FULL_S * 1e9
    while not has_room():
        if now_ns() > deadline:
            raise FabricError(f"the queue of a stream is full, and for {FULL_S:g} s nothing of it has run")
        time.sleep(_PAUSE_S)


class Depth:
    """The entries of one stream.

    Owns:      MARKS events
    Closed by: whoever runs `teardown`
    when_full: what waits for room. What it raises, the entry that found no room raises; that entry was not queued
    """

    def __init__(self, device: Device, stream: Any, teardown: Teardown) -> None:
        self.when_full: WhenFull = wait_for_room
        self._device = device
        self._stream = stream
        self._entries = 0  # since the newest mark
        self._recorded: deque[Any] = deque()  # events, oldest first
        self._free: list[Any] = []
        device.bind()
        for _ in range(MARKS):
            self._free.append(device.driver.cuEventCreate(_DISABLE_TIMING))
            teardown.push(device.driver.cuEventDestroy, self._free[-1])

    def has_room(self) -> bool:
        """Whether ENTRIES_PER_MARK entries go on at once. Raises DriverError if something that was queued failed."""
        if not self._free:
            self._device.bind()
            if self._device.driver.is_reached(self._recorded[0]):
                self._free.append(self._recorded.popleft())
        return bool(self._free)

    def take(self, entries: int = 1) -> None:
        """Make room for so many entries, at most ENTRIES_PER_MARK: before each call that queues them."""
        assert 0 < entries <= ENTRIES_PER_MARK, entries
        if self._entries + entries > ENTRIES_PER_MARK:
            if not self.has_room():
                self.when_full(self.has_room)
            self._device.bind()
            self._device.driver.cuEventRecord(self._free[-1], self._stream)
            self._recorded.append(self._free.pop())
            self._entries = 0
        self._entries += entries
