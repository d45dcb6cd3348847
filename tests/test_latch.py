"""Latch and Outcome: what a thread waits for while a signal may strike at any step of the wait."""

from __future__ import annotations

import queue
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from whalez.latch import Latch, Outcome


def at_step(step: int, act: Callable[[], None]) -> Callable[..., Any]:
    """A trace function that runs `act`, as a signal's handler would, at that line or return of the wait."""
    left = step

    def trace(frame: types.FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("threading.py", "whalez/latch.py")):
            return None
        if event in ("line", "return"):
            left -= 1
            if left == -1:
                act()
        return trace

    return trace


@pytest.mark.parametrize("step", range(30))
def test_a_handler_may_set_what_its_own_thread_waits_for(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr("whalez.latch.SLICE_S", 0.01)
    latch, ended = Latch(), queue.SimpleQueue[bool]()

    def wait() -> None:
        sys.settrace(at_step(step, latch.set))
        ended.put(latch.wait(60))

    threading.Thread(target=wait, daemon=True).start()
    assert ended.get(timeout=60)


def test_wait_ends_at_its_time_and_at_the_word_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its time: not at the end of a slice, which is long here."""
    monkeypatch.setattr("whalez.latch.SLICE_S", slice_s := 5.0)
    latch = Latch()
    began = time.monotonic()
    assert not latch.wait(0.01) and not latch.wait(0)
    assert 0.01 <= time.monotonic() - began < slice_s
    threading.Timer(0.05, latch.set).start()
    assert latch.wait(60) and latch.wait(0)
    latch.clear()
    assert not latch.wait(0.01)  # a word left from before is no answer
    latch.set()
    assert latch.wait()


def test_several_waiters_all_end() -> None:
    latch, ended = Latch(), queue.SimpleQueue[bool]()
    for _ in range(3):
        threading.Thread(target=lambda: ended.put(latch.wait(60)), daemon=True).start()
    latch.set()
    assert [ended.get(timeout=60) for _ in range(3)] == [True] * 3


def test_only_the_first_outcome_counts() -> None:
    value, error = Outcome[int](), Outcome[int]()
    with pytest.raises(TimeoutError):
        value.take(0)
    assert not value.is_known
    value.settle(1)
    value.settle(2)
    value.fail(KeyError())
    assert value.take() == 1 and value.is_known
    error.fail(KeyError("first"))
    error.settle(1)
    for _ in range(2):
        with pytest.raises(KeyError, match="first"):
            error.take()
