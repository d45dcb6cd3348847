"""The one place that reads time."""

from __future__ import annotations

import types

import pytest

from whalez import clock


@pytest.mark.parametrize("put_aside_at_look", range(6))
def test_both_clocks_are_of_one_moment(monkeypatch: pytest.MonkeyPatch, put_aside_at_look: int) -> None:
    """A thread that is put aside for a minute between two looks must not say that a minute ago is now."""
    now_ns, looks = 0, 0

    def look() -> int:
        nonlocal now_ns, looks
        now_ns += 60_000_000_000 if looks == put_aside_at_look else 100
        looks += 1
        return now_ns

    fake = types.SimpleNamespace(monotonic_ns=look, time=lambda: 1000.0 + look() / 1e9)
    monkeypatch.setattr(clock, "time", fake)
    at_ns, wall_s = clock.now_on_both()
    assert abs((wall_s - 1000.0) * 1e9 - at_ns) < 1000
