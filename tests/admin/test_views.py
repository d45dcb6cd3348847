"""Canned answers -> what an operator reads; how a fleet is found; exit codes for wrong words."""

from __future__ import annotations

from pathlib import Path

import pytest

from whalez.admin import views, whales
from whalez.admin.asking import Reply
from whalez.cli import main
from whalez.errors import ConfigError
from whalez.hub import admin
from whalez.rendezvous.lives import Life, Moment, What
from whalez.serve.endpoints import Endpoints, read_endpoints, write_endpoints


def wait(rank: int, peer: int, seen: int | None = None) -> admin.WaitLine:
    return admin.WaitLine(
        rank=rank, peer=peer, kind="data", expected=0x100003, seen=seen, place="seq 0 window 3 layer 1"
    )


def bells(rank: int, *waits: admin.WaitLine) -> Reply:
    line = admin.BellLine(kind="dispatch", peer=1 - min(rank, 1), expected=None, seen=5, rung=5)
    behind = admin.BellLine(kind="combine", peer=1 - min(rank, 1), expected=None, seen=4, rung=5)
    peers = tuple(admin.PeerLine(rank=r, launch_count=9, progress=7, word=0) for r in range(3))
    return Reply(rank, "", admin.Doorbells(query_id="", rank=rank, lines=(line, behind), peers=peers, waits=waits))


def test_a_hanging_whale_names_rank_and_window() -> None:
    """0 waits for 1, 1 for 2; 2 is silent and waits for nobody. 0's own word counts, of 1 only what 0 read there."""
    replies = [bells(0, wait(0, 1, seen=0x100002), wait(1, 2)), Reply(1, "", None), Reply(2, "", None)]
    lines = views.doorbell_lines(replies, show_all=False)
    assert lines[:3] == [
        "rank 0 waits for rank 1: data doorbell at seq 0 window 3 layer 1, expected 0x100003, seen 0x100002",
        "rank 1 waits for rank 2: data doorbell at seq 0 window 3 layer 1, expected 0x100003",
        "waited for, and waiting for nobody: rank 2",
    ]
    text = "\n".join(lines)
    assert "combine" in text and "dispatch" not in text  # who is level is shown with --all only
    assert "dispatch" in "\n".join(views.doorbell_lines(replies, show_all=True))


def test_a_rank_s_own_word_counts_more_than_what_others_read() -> None:
    replies = [bells(0, wait(1, 2)), bells(1)]
    assert views.waits(replies) == []


def test_a_life_is_put_together_from_all_that_was_seen() -> None:
    def life(*moments: Moment, slips: int = 0, launch: int | None = None) -> Life:
        return Life(seq=1, request_id="r", poster=0, gang=(1, 0), tokens=8, launch=launch, slips=slips, moments=moments)

    def at(ns: int, what: What, rank: int, launch: int = 0) -> Moment:
        return Moment(at_ns=ns * 10**9, launch=launch, what=what, rank=rank)

    sequenced = life(
        at(1, What.POSTED, 0), at(2, What.GATHERED, -1), at(4, What.READY, 1), at(5, What.READY, 0),
        at(6, What.COMMITTED, -1), launch=9,
    )  # fmt: skip
    zero = admin.Whales(query_id="", rank=0, at_ns=0, wall_s=100.0, seen=(), sequenced=(sequenced,))
    seen = life(at(13, What.READY, 1), at(17, What.BEGUN, 1, 10), at(18, What.DONE, 1, 11), slips=1, launch=9)
    one = admin.Whales(query_id="", rank=1, at_ns=10 * 10**9, wall_s=100.0, seen=(seen,))
    (story,) = whales.stories([Reply(0, "", zero), Reply(1, "", one), Reply(2, "", None)])
    assert (story.posted, story.gathered, story.committed) == (101.0, 102.0, 106.0)
    assert story.ready == {1: 103.0, 0: 105.0}  # rank 1's own clock says it was ready before the sequencer heard
    assert (story.begun, story.done, story.begun_launch, story.slips) == ({1: 107.0}, {1: 108.0}, 10, 1)
    assert story.state == "done"
    row = dict(zip(whales.HEAD, whales.rows([story])[0], strict=True))
    assert (row["ready"], row["committed"], row["begun"]) == (
        "1+2000.0ms 0+4000.0ms",
        "+5000.0ms L=9",
        "+6000.0ms at 10",
    )


def test_socket_options_that_differ_get_lines_of_their_own() -> None:
    assert views.ranks_text([0, 1, 2]) == "0-2"
    assert views.ranks_text([0, 2]) == "0, 2"


def test_a_fleet_is_found_by_its_file_or_by_its_sockets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no fleet\.json"):
        read_endpoints(tmp_path)
    for rank in (1, 0):
        (tmp_path / f"rank-{rank}.admin").touch()
    assert read_endpoints(tmp_path) == {rank: f"ipc://{tmp_path}/rank-{rank}.admin" for rank in (0, 1)}
    told = Endpoints(fleet_id="f", world=2, model="m", hub="h", launcher_pid=1, admin=("ipc:///a", "tcp://1.2.3.4:5"))
    write_endpoints(tmp_path, told)
    assert read_endpoints(tmp_path) == {0: "ipc:///a", 1: "tcp://1.2.3.4:5"}
    (tmp_path / "fleet.json").write_text("{")
    with pytest.raises(ConfigError, match=r"fleet\.json"):
        read_endpoints(tmp_path)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["status"], 2),
        (["status", "--run", "x", "--endpoint", "y"], 2),
        (["nonsense"], 2),
        (["cancel", "minus", "--run", "x"], 2),
        (["status", "--run", "no-such-folder"], 1),
        (["postmortem", "no-such-folder"], 2),
    ],
)
def test_exit_codes(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["admin", *words])
    assert ended.value.code == code
    told = capsys.readouterr()
    if code == 0:
        assert "3 some rank did not answer" in " ".join(told.out.split())


def test_nobody_answering_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.admin").touch()
    with pytest.raises(SystemExit) as ended:
        main(["admin", "status", "--run", str(tmp_path), "--timeout", "0.1"])
    assert ended.value.code == 3
    assert "rank 0 did not answer" in capsys.readouterr().err
