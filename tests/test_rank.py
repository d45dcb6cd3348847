"""What the composition root of a rank hands to its parts, and what it leaves when it fails."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whalez.config import FleetConfig, RankConfig
from whalez.engine.records import write_post_mortem
from whalez.engine.sizing import plan_policy
from whalez.errors import ConfigError, PeerDied
from whalez.model.config import KimiLinearConfig
from whalez.model.presets import PRESETS
from whalez.rank import RankProcess, make_sequencer


def test_the_gather_deadline_of_the_settings_reaches_the_sequencer() -> None:
    fleet = FleetConfig(world=4, node_ranks=4, gather_deadline_s=7.5)
    policy = plan_policy(KimiLinearConfig.from_json(PRESETS["tiny"]), fleet)
    assert make_sequencer(fleet, policy).deadline_ns == 7_500_000_000


def test_our_own_mistake_ends_the_requests_and_leaves_a_post_mortem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error that is none of ours by name would otherwise end the process without a word to its clients."""
    rank = RankConfig(rank=0, hub="ipc://nowhere", model_dir=tmp_path, run_dir=tmp_path / "run")
    process = RankProcess(rank, FleetConfig(world=1, node_ranks=1), cores=1)
    closed = []

    def start() -> None:
        process._closers.append(lambda: closed.append(True))
        raise AssertionError("cannot be")

    monkeypatch.setattr(process, "_start", start)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert process.run() == 1
    assert closed == [True]
    record = json.loads((tmp_path / "run" / "post-mortem-0.json").read_text())
    assert (record["error"], record["message"]) == ("AssertionError", "cannot be")
    last_words = capfd.readouterr().err.splitlines()[-1]
    assert last_words == "whalez: rank 0: AssertionError: cannot be"


def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path) -> None:
    """A wedged loop that comes back fails of what its own watchdog has done to the world."""
    rank = RankConfig(rank=0, hub="ipc://nowhere", model_dir=tmp_path, run_dir=tmp_path)
    (tmp_path / "post-mortem-0.json").write_text("of an earlier process")
    process = RankProcess(rank, FleetConfig(world=1, node_ranks=1), 1)
    assert (
        process._fail("rank 0 died: stuck", PeerDied(0, "stuck"), "the stack of the stuck place")
        == "rank 0 died: stuck"
    )
    assert process._fail("rank 1 died: gone", PeerDied(1, "gone")) == "rank 0 died: stuck"
    record = json.loads((tmp_path / "post-mortem-0.json").read_text())
    assert (record["blames"], record["message"]) == (0, "rank 0 died: stuck")
    assert record["traceback"] == "the stack of the stuck place"


def test_a_post_mortem_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Path.write_text

    def full(path: Path, text: str) -> None:
        written(path, text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_post_mortem(tmp_path, 3, {"rank": 3})
    assert list(tmp_path.glob("*.json")) == []
    monkeypatch.undo()
    assert json.loads(write_post_mortem(tmp_path, 3, {"rank": 3}).read_text()) == {"rank": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["post-mortem-3.json"]


def test_a_closer_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = RankConfig(rank=0, hub="ipc://nowhere", model_dir=tmp_path, run_dir=tmp_path / "run")
    process = RankProcess(rank, FleetConfig(world=1, node_ranks=1), cores=1)
    closed = []

    def fail() -> None:
        raise OSError("gone")

    def start() -> None:
        process._closers += [lambda: closed.append("first"), fail]
        raise ConfigError("field: expected a, got b")

    monkeypatch.setattr(process, "_start", start)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert process.run() == 1
    assert closed == ["first"]
    assert "gone" in capfd.readouterr().err


class Exited(Exception):
    """Instead of the end of this process."""


@pytest.mark.parametrize(
    ("signals", "graces", "code"),
    [
        ("TERM", [7.0], None),
        ("INT TERM", [7.0], 128 + signal.SIGTERM),
        ("HUP", [0.0], None),
        ("TERM HUP", [7.0, 0.0], None),  # told to drain, then the supervisor stops all
        ("HUP INT", [0.0, 7.0], None),
        ("HUP HUP", [0.0], 128 + signal.SIGHUP),
        ("TERM HUP TERM", [7.0, 0.0], 128 + signal.SIGTERM),
    ],
)
def test_the_supervisors_stop_is_nobodys_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: str, graces: list[float], code: int | None
) -> None:
    rank = RankConfig(rank=0, hub="ipc://nowhere", model_dir=tmp_path, run_dir=tmp_path, grace_s=7.0)
    process = RankProcess(rank, FleetConfig(world=1, node_ranks=1), 1)
    wanted: list[float] = []
    loop: Any = SimpleNamespace(drain=wanted.append)
    process.loop = loop

    def end(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", end)
    ended: int | None = None
    try:
        for name in signals.split():
            process._on_signal(signal.Signals[f"SIG{name}"], None)
    except Exited as exited:
        ended = exited.args[0]
    assert (wanted, ended) == (graces, code)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_rank_under_nohup_outlives_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: signal.Handlers
) -> None:
    process = RankProcess(
        RankConfig(rank=0, hub="ipc://nowhere", model_dir=tmp_path, run_dir=tmp_path),
        FleetConfig(world=1, node_ranks=1),
        1,
    )
    taken = []

    def start() -> None:
        raise ConfigError("field: expected a, got b")

    monkeypatch.setattr(process, "_start", start)
    monkeypatch.setattr(signal, "getsignal", lambda number: before)
    monkeypatch.setattr(signal, "signal", lambda number, handler: taken.append(number))
    assert process.run() == 1
    assert (signal.SIGHUP in taken) == (before is signal.SIG_DFL)
