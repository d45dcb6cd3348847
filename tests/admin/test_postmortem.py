"""Canned post-mortem files of known failures: the page names what came first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whalez.admin import commands, postmortem
from whalez.engine.records import write_post_mortem
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
    assert_two_is_left_out(tmp_path)


def assert_two_is_left_out(folder: Path) -> None:
    found = postmortem.read_files(folder)
    assert (sorted(found.files), sorted(found.stale)) == ([0, 1], [2])
    assert postmortem.first_cause(found.files).ranks == (3,)
    page = "\n".join(postmortem.page(folder, found))
    assert "of another failure than the last one: rank 2 (20" in page
    assert "MemoryError" not in page


def of(*incarnations: str) -> dict[str, Any]:
    """Of the world of these; the first is the rank's own."""
    return {"incarnation": incarnations[0], "incarnations": sorted(incarnations)}


def test_of_starts_by_hand_the_incarnations_tell_failures_apart(tmp_path: Path) -> None:
    """They share their fleet's id, and the second may fail a minute after the first."""
    new = [died(0, 0, 3) | of("a", "b", "c", "d"), died(1, 0, 3) | of("b", "a", "c", "d")]
    write(tmp_path, [*new, left(2, -60, "MemoryError", "old", None) | of("y", "x")])
    assert_two_is_left_out(tmp_path)
    # Of the old world there was one that failed before it had heard of the others.
    write(tmp_path, [left(2, -60, "MemoryError", "old", None, incarnation="y", incarnations=[])])
    assert_two_is_left_out(tmp_path)
    # Two days ago, and a clock that is behind, make no difference to ranks that name each other.
    write(tmp_path, [left(2, -172_800, "MemoryError", "mine", None) | of("c", "a", "b", "d")])
    assert sorted(postmortem.read_files(tmp_path).files) == [0, 1, 2]


@pytest.mark.parametrize(("seconds", "is_one"), [(10, True), (300, True), (86_400, False)])
def test_ranks_that_failed_in_their_start_belong_together_if_little_time_lies_between(
    tmp_path: Path, seconds: float, is_one: bool
) -> None:
    late = [left(rank, 0, "HubError", "rank 3 is missing", None, incarnations=[]) for rank in (0, 1)]
    write(tmp_path, [*late, left(2, -seconds, "MemoryError", "no room", None, incarnations=[])])
    found = postmortem.read_files(tmp_path)
    assert sorted(found.stale) == ([] if is_one else [2])
    assert postmortem.first_cause(found.files).ranks == ((2,) if is_one else (0,))


def test_a_rank_that_blames_itself_is_the_cause(tmp_path: Path) -> None:
    write(tmp_path, [died(1, 0, 1, "stuck: its loop has not moved for 60.0 s"), died(0, 0.1, 1), died(2, 0.1, 1)])
    cause = postmortem.first_cause(postmortem.read_files(tmp_path).files)
    assert cause.ranks == (1,)
    assert cause.text.startswith("rank 1 failed by itself: PeerDied: rank 1 died: stuck")


def test_the_page_has_open_whales_and_the_log_of_who_left_no_file(tmp_path: Path) -> None:
    def life(seq: int, *what: str) -> dict[str, Any]:
        return {"seq": seq, "request_id": f"r{seq}", "launch": 7, "moments": [{"what": each} for each in what]}

    lives = [life(4, "gathered", "begun", "done"), life(5, "gathered", "begun"), life(6, "gathered", "cancelled")]
    write(tmp_path, [died(0, 0, 3) | {"whales": lives}, died(1, 0, 3), died(2, 0, 3)])
    (tmp_path / "rank-3.log").write_text("loading\nfatal: out of memory\n")
    page = "\n".join(postmortem.page(tmp_path, postmortem.read_files(tmp_path)))
    assert "r5" in page and "r4" not in page and "r6" not in page
    assert "fatal: out of memory" in page


def odd(**changes: Any) -> str:
    return json.dumps(died(1, 0, 3) | changes)


ODD = {
    "empty": "",
    "cut off": json.dumps(died(1, 0, 3))[:-40],
    "no object": "[]",
    "rank is text": odd(rank="x"),
    "another rank's": odd(rank=2),
    "below 0": odd(rank=-1),
    "no message": json.dumps({k: v for k, v in died(1, 0, 3).items() if k != "message"}),
    "no error": json.dumps({k: v for k, v in died(1, 0, 3).items() if k != "error"}),
    "blames text": odd(blames="rank 3"),
    "blames a list": odd(blames=[3]),
    "a time of text": odd(at_wall_s="noon"),
    "a time beyond any": odd(at_wall_s=1e300),
    "a time that is none": odd(at_wall_s=float("nan")),
    "a world beyond any": odd(world=10**9),
    "a wait of numbers": odd(waiting_for=[1, 2]),
    "a wait for text": odd(waiting_for={"peer": 1, "kind": "data", "value": "x"}),
    "lives without seq": odd(whales=[{}]),
    "lives that are none": odd(whales=[3]),
    "a story of numbers": odd(story=[1]),
    "nested deeply": "[" * 100_000,
    "nested deeply in a field": odd(story=[])[:-1] + ', "peers": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "not UTF-8": odd(message="x").replace("x", "\udcff"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_file_that_cannot_be_read_hides_no_other_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    (tmp_path / "post-mortem-1.json").write_bytes(ODD[case].encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"post-mortem-1\.json: not a post-mortem"):
        postmortem.read_files(tmp_path)
    write(tmp_path, [died(0, 0, 1)])
    assert commands.main(["postmortem", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (list(told["broken"]), list(told["files"])) == (["post-mortem-1.json"], ["0"])
    assert commands.main(["postmortem", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert "First cause: rank 1 left a post-mortem that cannot be read (rank 1 died" in page
    assert "post-mortem-1.json cannot be read: " in page


def test_a_file_of_the_least_is_enough(tmp_path: Path) -> None:
    (tmp_path / "post-mortem-0.json").write_text(
        '{"rank": 0, "error": "E", "message": "m", "waiting_for": {"peer": 2}}'
    )
    page = "\n".join(postmortem.page(tmp_path, postmortem.read_files(tmp_path)))
    assert "rank 0 failed by itself: E: m" in page
    assert "unknown time" in page


def test_a_rank_s_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    class Unprintable:
        def __str__(self) -> str:
            assert list(tmp_path.glob("post-mortem-*.json")) == [path]
            assert json.loads(path.read_bytes()) == {"rank": 0}
            return "now"

    path = write_post_mortem(tmp_path, 0, {"rank": 0})
    assert write_post_mortem(tmp_path, 0, {"rank": Unprintable()}) == path
    assert json.loads(path.read_bytes()) == {"rank": "now"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_without_any_names_those_of_worlds_that_failed_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no post-mortem-<rank>\.json in it$"):
        postmortem.read_files(tmp_path)
    for number in (10, 2):
        (tmp_path / f"world-{number}").mkdir()
        write(tmp_path / f"world-{number}", [died(0, 0, 1)])
    with pytest.raises(ConfigError, match=r"left theirs in .*/world-2, .*/world-10$"):
        postmortem.read_files(tmp_path)
