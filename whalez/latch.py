"""What a main thread may wait for while Ctrl-C can strike at any point.

`threading.Event` and `concurrent.futures.Future` take a lock in Python code. A signal's exception between the taking
and the `with` block leaves it taken for ever, and whoever settles the wait then hangs. Here every step is
one call into C.
"""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Generic, TypeVar, cast

from whalez.signals import raise_again

SLICE_S = 0.2  #: a signal that lands just before a lock is taken is raised only when the wait for that lock ends

_T = TypeVar("_T")


class Latch:
    """Set once, or again after `clear`, from any thread; a second waiter sees it at most `SLICE_S` later."""

    def __init__(self) -> None:
        self.is_set = False
        self._words: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self.is_set = True
        self._words.put(None)

    def clear(self) -> None:
        self.is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Is it set, after at most that time. Raises: Signalled, at most `SLICE_S` late."""
        began = time.monotonic()
        while not self.is_set:
            raise_again()
            left_s = SLICE_S if timeout_s is None else min(SLICE_S, began + timeout_s - time.monotonic())
            if left_s <= 0:
                break
            with contextlib.suppress(queue.Empty):
                self._words.get(timeout=left_s)
        return self.is_set


class Outcome(Generic[_T]):
    """A value or an error that another thread finds; only the first one counts."""

    def __init__(self) -> None:
        self.latch = Latch()
        self._value: _T | None = None
        self._error: BaseException | None = None

    @property
    def is_known(self) -> bool:
        return self.latch.is_set

    def settle(self, value: _T) -> None:
        if not self.is_known:
            self._value = value
            self.latch.set()

    def fail(self, error: BaseException) -> None:
        if not self.is_known:
            self._error = error
            self.latch.set()

    def take(self, timeout_s: float | None = None) -> _T:
        """Wait for it. Raises: the error; TimeoutError."""
        if not self.latch.wait(timeout_s):
            raise TimeoutError(f"no outcome after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return cast("_T", self._value)
