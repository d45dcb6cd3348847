"""The demo's progress where nobody looks at a terminal."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", Path(__file__).parent.parent / "tools" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_progress_into_a_pipe_is_plain_lines(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each is there as soon as it is said, not more often than told, and none comes after the work."""
    monkeypatch.setattr(demo, "LINE_S", 0.2)
    assert not sys.stdout.isatty()
    lines: list[str] = []
    began = time.monotonic()
    with demo.working("prefilling 7 tokens"):
        while len(lines) < 3:
            lines += capfd.readouterr().out.splitlines()
            assert time.monotonic() - began < 10
            time.sleep(0.01)
        assert time.monotonic() - began >= 2 * 0.2
    assert lines[0] == "  prefilling 7 tokens"
    assert all(re.fullmatch(r"  prefilling 7 tokens: \d s", line) for line in lines[1:]), lines
    capfd.readouterr()  # one more may have come just before the end
    time.sleep(0.3)
    assert capfd.readouterr().out == ""
    with pytest.raises(ZeroDivisionError), demo.working("failing"):
        raise ZeroDivisionError
