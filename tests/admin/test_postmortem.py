"""Canned post-mortem files of known failures: the page names what came first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whalez.admin import commands, postmortem
from whalez.errors import ConfigError


def left(rank: int, at: float, error: str, message: str, blames: int | None, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "world": 4,
        "fleet_id": "now",
        "at_wall_s": 1_800_000_000 + at,
        "error": error,
        "message": message,
        "blames": blames,
        "traceback": f"Traceback of rank {rank}",
        **more,
    }


def died(rank: int, at: float, whom: int, how: str = "its process has ended") -> dict[str, Any]:
    return left(rank, at, "PeerDied", f"rank {whom} died: {how}", whom)


def timed_out(rank: int, at: float, whom: int) -> dict[str, Any]:
    text = f"waited 60.0 s for rank {whom}'s data doorbell at seq 0 window 3: expected >= 0x100003, seen 0x100002"
    wait = {"peer": whom, "kind": "data", "value": 0x100003, "layer": 1}
    return left(rank, at, "DoorbellTimeout", text, whom, waiting_for=wait)


def write(folder: Path, files: list[dict[str, Any]]) -> None:
    for each in files:
        (folder / f"post-mortem-{each['rank']}.json").write_text(json.dumps(each))


CASES = {
    "a rank that was killed left no file": (
        [died(0, 0.2, 2), died(1, 0.1, 2), died(3, 0.3, 1)],
        (2,),
        "rank 2 left no post-mortem: it was killed, or stopped, or its machine is gone (rank 2 died",
    ),
    "a rank that failed by itself is named by its own error": (
        [left(1, 0.0, "MemoryError", "no room", None), died(0, 0.2, 1), died(2, 0.3, 0), died(3, 0.3, 1)],
        (1,),
        "rank 1 failed by itself: MemoryError: no room",
    ),
    "an error of its own that came after the others ended is none of the cause": (
        [timed_out(0, 0.0, 2), died(1, 0.1, 0), left(3, 0.2, "HubError", "the hub thread failed", None)],
        (2,),
        "rank 2 left no post-mortem",
    ),
    "waits are followed to the rank that did not get on": (
        [timed_out(0, 0.0, 1), timed_out(1, 0.1, 2), died(2, 0.4, 0), died(3, 0.2, 0)],
        (2,),
        "rank 2 did not get on; it is waited for, and heard only that rank 0 had ended",
    ),
    "ranks that wait for each other are named as a circle": (
        [timed_out(0, 0.0, 1), timed_out(1, 0.1, 3), timed_out(3, 0.1, 1), died(2, 0.2, 0)],
        (1, 3),
        "ranks 1 -> 3 -> 1 wait for each other in a circle",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_cause(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, ranks, text = CASES[case]
    write(tmp_path, files)
    assert commands.main(["postmortem", str(tmp_path), "--json"]) == 0
    cause = json.loads(capsys.readouterr().out)["cause"]
    assert tuple(cause["ranks"]) == ranks
    assert cause["text"].startswith(text)
    assert commands.main(["postmortem", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert f"**First cause: {text}" in page
    for each in files:
        assert each["message"] in page


def test_files_of_an_earlier_start_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [died(0, 0, 3), died(1, 0, 3), left(2, -99, "MemoryError", "old", None, fleet_id="before")])
    files, stale = postmortem.read_files(tmp_path)
    assert (sorted(files), stale) == ([0, 1], [2])
    page = "\n".join(postmortem.page(tmp_path, files, stale))
    assert "of an earlier start: rank 2" in page
    assert "MemoryError" not in page


def test_the_page_has_open_whales_and_the_log_of_who_left_no_file(tmp_path: Path) -> None:
    def life(seq: int, *what: str) -> dict[str, Any]:
        return {"seq": seq, "request_id": f"r{seq}", "launch": 7, "moments": [{"what": each} for each in what]}

    lives = [life(4, "gathered", "begun", "done"), life(5, "gathered", "begun"), life(6, "gathered", "cancelled")]
    write(tmp_path, [died(0, 0, 3) | {"whales": lives}, died(1, 0, 3), died(2, 0, 3)])
    (tmp_path / "rank-3.log").write_text("loading\nfatal: out of memory\n")
    page = "\n".join(postmortem.page(tmp_path, *postmortem.read_files(tmp_path)))
    assert "r5" in page and "r4" not in page and "r6" not in page
    assert "fatal: out of memory" in page


@pytest.mark.parametrize("content", ["{", "[]", '{"rank": "x"}'])
def test_what_is_no_post_mortem_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "post-mortem-0.json").write_text(content)
    with pytest.raises(ConfigError, match=r"post-mortem-0\.json: not a post-mortem"):
        postmortem.read_files(tmp_path)


def test_a_folder_without_any(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no post-mortem"):
        postmortem.read_files(tmp_path)
