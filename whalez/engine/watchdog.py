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


class Lookout:
    """What was seen of a loop, look by look. No clock, no thread."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._progress = -1
        self._still_s = self._failed_s = 0.0

    def look(
        self, now_s: float, progress: int, may_rest: bool, stuck_s: float, failure: Exception | None
    ) -> Exception | float | None:
        """Why the process must end: the hub's failure, or the seconds for which the loop has stood; None: it need not.

        A process that was stopped or starved has not watched: of the time between two looks at most 2 * LOOK_S count.
        """
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * LOOK_S), now_s
        self._still_s = self._still_s + passed_s if progress == self._progress and not may_rest else 0.0
        self._progress = progress
        self._failed_s = self._failed_s + passed_s if failure is not None else 0.0
        if failure is not None and self._failed_s > LEAVE_S:
            return failure
        return self._still_s if self._still_s > stuck_s else None


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
        lookout = Lookout(time.monotonic())
        while not self._over.wait(LOOK_S):
            cause = lookout.look(
                time.monotonic(), self._progress(), self._may_rest(), self._stuck_s(), self._hub_failure()
            )
            if cause is not None:
                self._end(cause)
                return
