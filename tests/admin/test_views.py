"""Canned answers -> what an operator reads; how a fleet is found; exit codes for wrong words."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from whalez.admin import commands, views, whales
from whalez.admin.asking import Reply
from whalez.cli import main
from whalez.errors import ConfigError, OutputError, Unavailable
from whalez.hub import admin, wire
from whalez.hub.keys import Keys, load_keys, make_keys
from whalez.hub.requests import Status
from whalez.hub.zmq_admin import AdminServer
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


def rank_status(rank: int, **changes: Any) -> admin.RankStatus:
    health = {
        "query_id": "", "rank": rank, "world": 2, "incarnation": "0123456789abcdef", "pid": 12345, "state": "serving",
        "launch": 7, "launch_age_s": 0.1, "healthy": True, "trouble": "", "running": 0, "waiting": 0, "cache_used": 0,
        "cache_total": 128, "max_ctx": 64, "vocab_size": 256, "model": "m",
    }  # fmt: skip
    told = {
        "query_id": "", "rank": rank, "device": "cpu", "transport": "host shm", "hub": "", "host": "here",
        "launches_with_sleep": 41, "slips_total": 3, "records": (), "endpoints": ("", ""), "sockets": {},
    }  # fmt: skip
    told["health"] = Status(**(health | {key: changes[key] for key in changes if key in health or key == "dropped"}))
    return admin.RankStatus(**(told | {key: changes[key] for key in changes if key in told}))


class Rank:
    """An admin socket that answers status and perhaps prompts, or whatever is asked with `other`."""

    def __init__(
        self,
        address: str,
        rank: int,
        other: admin.AdminAnswer | None = None,
        prompts: admin.Prompts | None = None,
        keys: Keys | None = None,
        **changes: Any,
    ) -> None:
        def answer(query: admin.AdminQuery) -> admin.AdminAnswer:
            told: admin.AdminAnswer = other or admin.NotDone(
                query_id="", rank=rank, reason=f"no {type(query).__name__}"
            )
            if isinstance(query, admin.AskStatus) and other is None:
                told = rank_status(rank, **changes)
            if isinstance(query, admin.AskPrompts) and prompts is not None:
                told = prompts
            return msgspec.structs.replace(told, query_id=query.query_id)

        self.address = address
        self.server = AdminServer(address, rank, answer, keys=keys)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A run folder of two ranks with these changes."""
    ranks: list[Rank] = []

    def begin(*changes: dict[str, Any]) -> Path:
        for rank, change in enumerate(changes):
            ranks.append(Rank(f"ipc://{tmp_path}/rank-{rank}.admin", **({"rank": rank} | change)))
        addresses = tuple(each.address for each in ranks)
        told = Endpoints(fleet_id="f", world=len(ranks), model="m", hub="h", launcher_pid=1, admin=addresses)
        write_endpoints(tmp_path, told)
        return tmp_path

    yield begin
    for each in ranks:
        each.server.close()


def test_an_answer_counts_only_if_it_is_this_rank_s_and_to_this_query(
    fleet: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fleet({}, {"rank": 5}, {"other": admin.Ordered(query_id="", rank=2, what="done")})
    assert commands.main(["status", "--run", str(run), "--timeout", "10"]) == 3
    told = capsys.readouterr()
    assert told.out.count("no answer") == 2
    assert "rank 1 did not answer" in told.err and "rank 5 is what answers there" in told.err
    assert "it answers a AskStatus with a Ordered" in told.err
    assert commands.main(["status", "--run", str(run), "--timeout", "10", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["silent"] == [1, 2]


def test_who_is_not_let_in_is_told_why_by_rank(
    fleet: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    run = fleet({"keys": load_keys(tmp_path / "keys")}, {})
    assert commands.main(["status", "--run", str(run), "--timeout", "10"]) == 3
    told = capsys.readouterr()
    assert "serving" in told.out
    lines = told.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"whalez: rank 0 did not answer (ipc://{run}/rank-0.admin): it ")
    assert lines[0].endswith(": no --keys were given")
    with pytest.raises(Unavailable, match=r"no rank answers at .*rank-0\.admin: it .*no --keys were given"):
        commands.main(["status", "--endpoint", f"ipc://{run}/rank-0.admin", "--timeout", "10"])
    words = ["status", "--run", str(run), "--timeout", "10", "--keys", str(tmp_path / "keys"), "--json"]
    assert commands.main(words) == 3
    told = capsys.readouterr()
    assert json.loads(told.out)["silent"] == [1]
    assert f"ours are in {tmp_path / 'keys'}" in told.err


def test_a_rank_that_has_not_been_told_of_the_others_leads_to_exit_3(
    fleet: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fleet({"state": "starting"}, {})
    words = ["status", "--endpoint", f"ipc://{run}/rank-0.admin", "--timeout", "10"]
    assert commands.main(words) == 3
    assert "rank 1 did not answer: its address is not known before the world is complete" in capsys.readouterr().err


def test_status_shows_what_is_collected_and_trouble_in_lines_of_its_own(
    fleet: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = {"hub_bad_frames": 0, "admin_refused_connections": 2, "link_ended_connections": 9}
    trouble = "rank 1: no progress for 5.0 s in launch 12, waiting for rank 0's dispatch doorbell 0x61, layer 1"
    run = fleet({"dropped": dropped}, {"trouble": trouble})
    assert commands.main(["status", "--run", str(run), "--timeout", "10"]) == 0
    head, zero, _, *lines = capsys.readouterr().out.splitlines()
    row = dict(zip(head.split(), zero.split(), strict=False))
    assert (row["slips"], row["slept"]) == ("3", "41")
    assert lines == [f"rank 1: {trouble}", "rank 0 dropped: admin_refused_connections 2"]


def test_watch_on_a_narrow_terminal_cuts_no_trouble(
    fleet: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    trouble = "no progress for 5.0 s in launch 12, waiting for rank 0's dispatch doorbell 0x61, layer 1 THE END"
    run = fleet({}, {"trouble": trouble})
    assert commands.main(["watch", "--run", str(run), "--times", "2", "--interval", "0.1", "--timeout", "10"]) == 0
    out = capsys.readouterr().out
    assert "THE END" in out
    assert max(map(len, out.splitlines())) <= 80


def test_prompts_that_are_refused_are_named_and_not_called_done(
    fleet: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A rank's key only, and prompts beyond what a frame may have."""
    big = admin.Prompts(query_id="", rank=1, prompts={"r": bytes(wire.ADMIN_BYTES_MAX)})
    run = fleet({}, {"prompts": big})
    plain, asked = tmp_path / "plain.tar.gz", tmp_path / "asked.tar.gz"
    asked.write_bytes(b"")
    asked.chmod(0o644)
    assert commands.main(["dump", "--run", str(run), "--out", str(plain), "--timeout", "10"]) == 0
    assert capsys.readouterr().err == ""
    words = ["dump", "--with-prompts", "--run", str(run), "--out", str(asked), "--timeout", "10"]
    assert commands.main(words) == 1
    said = capsys.readouterr().err
    assert "rank 0: no AskPrompts" in said and "rank 1: WireError: Prompts: 8388" in said
    for path in (plain, asked):
        assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(asked) as bundle:
        (name,) = [each for each in bundle.getnames() if each.endswith("prompts.json")]
        told = json.load(bundle.extractfile(name))  # type: ignore[arg-type]
    assert told["0"] == "no AskPrompts" and "an admin frame may have" in told["1"]


@pytest.mark.parametrize("where", ["no/such/x.tar.gz", "rank-0.admin/x.tar.gz"])
def test_a_dump_that_cannot_be_written_is_no_bug_and_leaves_nothing(fleet: Callable[..., Path], where: str) -> None:
    run = fleet({}, {})
    before = sorted(run.iterdir())
    with pytest.raises(OutputError, match="cannot be written"):
        commands.main(["dump", "--run", str(run), "--out", str(run / where), "--timeout", "10"])
    with pytest.raises(click.UsageError, match="is a directory"):
        commands.main(["dump", "--run", str(run), "--out", str(run), "--timeout", "10"])
    assert sorted(run.iterdir()) == before


def test_a_dump_has_what_worlds_left_that_failed_before(fleet: Callable[..., Path], tmp_path: Path) -> None:
    run = fleet({})
    for name in ("post-mortem-0.json", "world-1/post-mortem-0.json", "world-1/rank-0.log", "world-2/trace-0.jsonl"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("{}")
    out = tmp_path / "x.tar.gz"
    assert commands.main(["dump", "--run", str(run), "--out", str(out), "--timeout", "10"]) == 0
    with tarfile.open(out) as bundle:
        names = {name.partition("/")[2] for name in bundle.getnames()}
    assert {"run/post-mortem-0.json", "run/world-1/post-mortem-0.json", "run/world-1/rank-0.log"} <= names
    assert "run/world-2/trace-0.jsonl" in names


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
    for addresses, world in (((), 0), ((), 2), (("ipc:///a",), 4), (("ipc:///a", ""), 2), (("ipc:///a",) * 3, 2)):
        write_endpoints(tmp_path, msgspec.structs.replace(told, world=world, admin=addresses))
        with pytest.raises(ConfigError, match=r"fleet\.json: (admin|world): expected"):
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
