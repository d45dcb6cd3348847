"""tools/simulate.py says what it found, keeps it, and fails; and says how fast it was when it found nothing."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from whalez.testing.mutations import MUTATIONS

pytestmark = pytest.mark.sim

TOOL = Path(__file__).parent.parent.parent / "tools" / "simulate.py"
OLD = "4711 abc1234 why\n"
AT = r"commit (?:[0-9a-f]{7,}\+?|unknown)"  #: unknown: not of a checkout


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool with a corpus of its own."""
    spec = importlib.util.spec_from_file_location("simulate", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(OLD)
    monkeypatch.setattr(module, "CORPUS", corpus)
    return module


def hunt(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["simulate.py", *arguments])
    status: int = tool.main()
    return status


def test_a_clean_hunt_says_how_fast_it_was(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hunt(tool, monkeypatch, "--seeds", "4", "--start", "20") == 0
    printed = capsys.readouterr().out
    assert re.match(f"{AT}: seeds 20 to 23, 0 failed; [1-9][0-9]* seeds/s .[1-9][0-9]* per core second", printed)
    assert tool.CORPUS.read_text() == OLD


def test_a_failing_seed_is_printed_kept_once_and_fails_the_hunt(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = functools.partial(tool.Simulator, **MUTATIONS["commit to half a gang"])
    monkeypatch.setattr(tool, "Simulator", broken)
    assert hunt(tool, monkeypatch, "--seeds", "60", "--log", "5") == 1
    printed = capsys.readouterr().out
    found = re.match(f"FAILED at {AT}: seed ([0-9]+), ", printed)
    assert found is not None, printed
    seed = found[1]
    assert "Weather(" in printed
    log = [line for line in printed.splitlines() if re.match(r" +\d+\.\d{3} +\d+ ", line)]
    assert 0 < len(log) <= 5, printed
    assert f"seeds 0 to {seed}, 1 failed" in printed  # and it ends there
    kept = tool.CORPUS.read_text()
    assert kept.startswith(f"{OLD}{seed} {tool.commit()} seed {seed}, ")
    assert kept.count("\n") == 2

    assert hunt(tool, monkeypatch, "--seeds", "1", "--start", seed) == 1
    assert tool.CORPUS.read_text() == kept


def test_a_hunt_that_keeps_going_counts_every_failure(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "Simulator", functools.partial(tool.Simulator, **MUTATIONS["commit to half a gang"]))
    assert hunt(tool, monkeypatch, "--seeds", "6", "--keep-going") == 1
    printed = capsys.readouterr().out
    failed = printed.count("FAILED at commit")
    assert failed > 1
    assert f"seeds 0 to 5, {failed} failed" in printed
    assert len(tool.CORPUS.read_text().splitlines()) == 1 + failed
