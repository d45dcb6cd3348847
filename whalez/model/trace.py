"""Where the time of a launch went: per layer, by what was done."""

from __future__ import annotations

import time
from enum import IntEnum

import numpy as np


class Part(IntEnum):
    """Columns of a launch's time table."""

    ATTENTION = 0  #: KDA or MLA without waiting
    MLP = 1  #: dense MLP, router, shared experts
    EXPERTS = 2  #: routed experts this rank owns, for all ranks' rows, and the sum of partial rows
    PAIR_WAIT = 3  #: waiting in the paired expert exchange
    GANG_WAIT = 4  #: waiting for a gang window
    OTHER = 5  #: embedding, residual adds, norms


class Stopwatch:
    """Adds the time since the last lap to one cell of [layers, parts]; nanoseconds."""

    def __init__(self, layers: int) -> None:
        self.ns = np.zeros((layers, len(Part)), np.int64)
        self.layer = 0
        self._last = time.perf_counter_ns()

    def start(self) -> None:
        self.ns[:] = 0
        self.layer = 0
        self._last = time.perf_counter_ns()

    def lap(self, part: Part) -> None:
        now = time.perf_counter_ns()
        self.ns[self.layer, part] += now - self._last
        self._last = now
