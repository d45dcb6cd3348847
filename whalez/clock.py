"""The one place that reads time; everything below the loop is handed `now_ns`."""

import time


def now_ns() -> int:
    """Monotonic nanoseconds; comparable within one process only."""
    return time.monotonic_ns()
