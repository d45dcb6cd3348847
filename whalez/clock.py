"""The one place that reads time; everything below the loop is handed `now_ns`."""

import time


def now_ns() -> int:
    """Monotonic nanoseconds; comparable within one process only."""
    return time.monotonic_ns()


def now_on_both() -> tuple[int, float]:
    """`now_ns` and the wall clock's seconds of one moment: a thread may be put aside between two looks, not at each."""
    looks = []
    for _ in range(3):
        before = time.monotonic_ns()
        wall_s = time.time()
        looks.append((time.monotonic_ns() - before, before, wall_s))
    _, at_ns, wall_s = min(looks)
    return at_ns, wall_s
