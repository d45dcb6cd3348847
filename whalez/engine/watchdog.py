"""Ends a rank whose own loop does not come back: the loop cannot say so itself.

Rule: it only reads, until it ends the process. What the others see of a wedged rank is the doorbell's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_S = 0.25
#: After the hub has failed: what the loop has to notice it by itself, for it does so at its next wait or boundary.
LEAVE_S = 2.5


class Watchdog:
    """A thread that calls `end` once: the loop has not moved for so many seconds, or outlives the hub's failure.

    Owns:      its thread
    Closed by: `close`, first of all when the loop is over, whatever ended it
    Blocks:    no

    progress:  the loop's progress word
    may_rest:  the loop waits for a peer, whose delay is not its own, or is leaving
    """

    def __init__(
        self,
        *,
        progress: Callable[[], int],
        may_rest: Callable[[], bool],
        stuck_s: Callable[[], float],
        hub_failure: Callable[[], Exception | None],
        end: Callable[[Exception | float], None],
    ) -> None:
        self._progress, self._may_rest, self._stuck_s, self._hub_failure = progress, may_rest, stuck_s, hub_failure
        self._end = end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        last, still_s, failed_s = -1, 0.0, 0.0
        looked = time.monotonic()
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            # A process that was stopped or starved has not watched, so that time does not count.
            passed_s, looked = min(now - looked, 2 * LOOK_S), now
            progress = self._progress()
            still_s = still_s + passed_s if progress == last and not self._may_rest() else 0.0
            last = progress
            failure = self._hub_failure()
            failed_s = failed_s + passed_s if failure is not None else 0.0
            if failure is not None and failed_s > LEAVE_S:
                self._end(failure)
                return
            if still_s > self._stuck_s():
                self._end(still_s)
                return
