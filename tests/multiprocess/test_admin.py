"""The admin tool on a running fleet of four: every rank answers for itself, also while another one is stopped.

A rank may be stopped for less than 2 s before the others take it for dead, so whatever is asked meanwhile has a short
deadline; everything else has a long one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from helpers.machine import Pauses
from helpers.ports import free_ports
from whalez.admin import commands, launches, postmortem, whales
from whalez.admin.asking import Ranks
from whalez.errors import PeerDied, RequestError, Unavailable, WhalezError
from whalez.fleet import Fleet, Pending
from whalez.hub.admin import AskStatus, AskWhales, RankStatus
from whalez.serve.links import admin_address

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

Tool = Callable[..., tuple[int, Any]]
T = TypeVar("T")

GUARD_S = 1.5  #: after so long a stopped rank goes on, whatever has become of the test
LONG = ("--timeout", "10")


def prompt_of(tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


@pytest.fixture
def tool(four: Fleet, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Run a command on the fleet, with that time-out or the default one; exit code and what it printed as JSON."""

    def run(*words: str, timeout: Sequence[str] = LONG) -> tuple[int, Any]:
        code = commands.main([*words, *timeout, "--run", str(four.run_dir), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def while_stopped(fleet: Fleet, rank: int, act: Callable[[], T], is_met: Callable[[T], bool] = lambda _: True) -> T:
    """What `act` says of a fleet in which one rank is stopped.

    It is repeated, a few times, when the machine did not run all the while, when the guard had to let the rank go on,
    and when `is_met` says that what the test needs was not there yet.
    """
    pid = fleet.pids()[f"rank {rank}"]
    told: Any = None
    for _ in range(5):
        command = ["sh", "-c", f"sleep {GUARD_S}; kill -CONT {pid}"]
        guard = subprocess.Popen(command, start_new_session=True)
        with Pauses() as pauses:
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED)
            try:
                told = act()
            except WhalezError:
                if guard.poll() is None:
                    raise
            finally:
                stood = guard.poll() is None
                os.kill(pid, signal.SIGCONT)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(guard.pid, signal.SIGKILL)
                guard.wait()
        if stood and pauses.late_s < 0.1 and is_met(told):
            break
        fleet.generate(prompt_of(20, 1), max_tokens=1, lane="local")  # all have gone on
    assert stood, f"rank {rank} was to be stopped for less than {GUARD_S} s"
    return told


def whale(fleet: Fleet, tool: Tool, request_id: str) -> dict[str, Any]:
    _, told = tool("whales")
    (found,) = [each for each in told["whales"] if each["request_id"] == request_id]
    return found


def test_status_has_a_row_for_every_rank(four: Fleet, tool: Tool) -> None:
    code, told = tool("status")
    assert code == 0
    assert told["silent"] == []
    pids = four.pids()
    for rank, row in enumerate(told["ranks"]):
        health = row["answer"]["health"]
        assert (row["rank"], health["rank"], health["pid"]) == (rank, rank, pids[f"rank {rank}"])
        assert health["state"] == "serving"
        assert row["answer"]["records"] == []
        assert row["answer"]["sockets"]["hub"]["linger_ms"] == 1000
    assert len({row["answer"]["health"]["incarnation"] for row in told["ranks"]}) == 4


def test_any_rank_leads_to_all(four: Fleet) -> None:
    ranks = Ranks(None, admin_address(four.run_dir, 2), 10.0)
    replies = ranks.ask(lambda query_id: AskStatus(query_id=query_id))
    assert [reply.rank for reply in replies if isinstance(reply.answer, RankStatus)] == [0, 1, 2, 3]


def test_an_endpoint_where_nobody_listens_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    with Pauses() as pauses:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"no rank answers at ipc://.*nobody"):
            Ranks(None, f"ipc://{tmp_path}/nobody", 0.2)
        took_s = time.monotonic() - began
    assert took_s < 1.0 + pauses.late_s


@pytest.mark.parametrize("rank", [0, 3])
def test_status_within_a_second_names_the_stopped_rank(four: Fleet, tool: Tool, rank: int) -> None:
    def ask() -> tuple[int, Any, float]:
        began = time.monotonic()
        code, told = tool("status", timeout=())
        return code, told, time.monotonic() - began

    code, told, took_s = while_stopped(four, rank, ask)
    assert took_s < 1.0
    assert code == 3
    assert told["silent"] == [rank]
    assert [row["rank"] for row in told["ranks"] if row["answer"] is None] == [rank]
    four.generate(prompt_of(20, 1), max_tokens=1, lane="local")  # a fleet that survived the stop


def test_a_whale_s_life_is_told_by_sequencer_and_members(four: Fleet, tool: Tool) -> None:
    before = time.time()
    result = four.generate(prompt_of(700, 2), max_tokens=2, poster=1, lane="whale", stop_tokens=())
    for _ in range(10):
        life = whale(four, tool, result.request_id)
        times = [before, life["posted"], life["gathered"], *sorted(life["ready"].values()), life["committed"]]
        times += [*sorted(life["begun"].values()), time.time()]
        # Each rank dates by its own reading of two clocks, a moment apart: a long one is read once more.
        if all(later - earlier > -0.005 for earlier, later in itertools.pairwise(times)):
            break
    else:
        pytest.fail(f"not in order: {times}")
    assert life["seq"] == result.report.seq
    assert (life["poster"], life["gang"], life["tokens"]) == (1, [0, 2, 3, 1], 700)
    assert life["begun_launch"] == result.report.entry_launch == life["launch"] + life["slips"]
    assert set(life["ready"]) == set(life["begun"]) == {"0", "1", "2", "3"}
    assert set(life["done"]) <= set(life["begun"])  # the boundary after the superstep may be yet to come
    assert (life["cancelled"], life["declined"]) == (None, {})


def test_slabs_are_mapped_by_all(tool: Tool) -> None:
    code, told = tool("slabs")
    assert code == 0
    for row in told["ranks"]:
        answer = row["answer"]
        assert answer["mapped"] == [0, 1, 2, 3]
        end = max(region["offset"] + region["nbytes"] for region in answer["regions"])
        assert answer["nbytes"] == -(-end // 4096) * 4096


def test_doorbells_name_whom_a_hanging_fleet_waits_for(four: Fleet, tool: Tool) -> None:
    def all_wait(answer: tuple[int, Any]) -> bool:
        return {0, 1, 3} <= {wait["rank"] for wait in answer[1]["waits"]} and answer[1]["silent"] == [2]

    def ask() -> tuple[int, Any]:
        deadline = time.monotonic() + GUARD_S - 0.3
        while True:  # the others launch at their next tick
            answer = tool("doorbells", timeout=("--timeout", "0.25"))
            if all_wait(answer) or time.monotonic() > deadline:
                return answer

    code, told = while_stopped(four, 2, ask, all_wait)
    waits = {wait["rank"]: wait for wait in told["waits"]}
    assert code == 3
    assert told["silent"] == [2]
    assert told["blocked_on"] == [2]
    for rank in (0, 1, 3):
        wait = waits[rank]
        assert wait["peer"] == 2
        assert wait["seen"] < wait["expected"]
        assert wait["place"].startswith("launch ")
        (answer,) = [row["answer"] for row in told["ranks"] if row["rank"] == rank]
        (line,) = [each for each in answer["lines"] if each["kind"] == wait["kind"] and each["peer"] == 2]
        assert line["expected"] == wait["expected"]


def test_a_gathered_whale_is_cancelled_with_its_request(four: Fleet, tool: Tool) -> None:
    """While rank 2 is stopped a gather cannot become a commit."""
    four.generate(prompt_of(20, 9), max_tokens=1, poster=1, lane="local")  # nobody is in a launch when rank 2 stops
    ranks = Ranks(four.run_dir, None, 0.8)

    def cancel() -> tuple[Pending, list[whales.Story], int | None, Any]:
        deadline = time.monotonic() + 1.0
        pending = four.submit(prompt_of(700, 3), max_tokens=2, poster=1, lane="whale", stop_tokens=())
        while True:
            ranks.renew()
            told = whales.stories(ranks.ask(lambda query_id: AskWhales(query_id=query_id), {0, 1, 3}))
            found = [story for story in told if story.request_id == pending.request_id]
            if found:
                return pending, found, *tool("cancel", str(found[0].seq), timeout=("--timeout", "0.4"))
            if time.monotonic() > deadline:
                pending.cancel()
                return pending, [], None, None

    pending, found, code, answers = while_stopped(four, 2, cancel, lambda told: told[2] == 0)
    assert [story.state for story in found] == ["gathering"]
    assert code == 0
    assert [row["answer"]["type"] for row in answers["ranks"]] == ["Ordered", "Ordered"]
    with pytest.raises(Unavailable, match=f"whale {found[0].seq} was cancelled by an operator"):
        pending.result(60)
    life = whale(four, tool, pending.request_id)
    assert (life["state"], life["why"], life["begun"]) == ("cancelled", "withdrawn (final)", {})
    with pytest.raises(RequestError, match="is cancelled already"):
        tool("cancel", str(found[0].seq))
    with pytest.raises(RequestError, match="no whale 9999"):
        tool("cancel", "9999")
    after = four.generate(prompt_of(700, 4), max_tokens=2, poster=1, lane="whale", stop_tokens=())
    assert after.report.gang == (0, 2, 3, 1)


def test_a_dump_has_prompts_only_when_asked(four: Fleet, tool: Tool, tmp_path: Path) -> None:
    prompt = prompt_of(300, 5)
    pending = four.submit(prompt, max_tokens=3000, poster=1, lane="local", stop_tokens=())
    next(iter(pending))  # it is being served
    packed = struct.pack("<8i", *prompt[:8])
    as_text = [number.encode() for number in map(str, prompt[:8])]
    for words, is_in in (([], False), (["--with-prompts"], True)):
        out = tmp_path / f"dump{is_in}.tar.gz"
        code, told = tool("dump", "--out", str(out), *words)
        assert (code, told["silent"]) == (0, [])
        with tarfile.open(out) as bundle:
            files = {member.name.split("/", 1)[1]: bundle.extractfile(member).read() for member in bundle}  # type: ignore[union-attr]
        assert {"status.json", "whales.json", "doorbells.json", "run/rank-3.log", "run/trace-0.jsonl"} <= set(files)
        numbers = {name: data.translate(None, b" \n\t[]").split(b",") for name, data in files.items()}
        holders = [name for name, found in numbers.items() if _has_run(found, as_text)]
        assert holders == (["prompts.json"] if is_in else [])
        assert not any(packed in data for data in files.values())
    pending.cancel()


def _has_run(found: list[bytes], wanted: list[bytes]) -> bool:
    """Whether the numbers after the first stand in a row; the first may have a name in front."""
    return any(found[i : i + len(wanted) - 1] == wanted[1:] for i in range(len(found)))


def test_trace_has_one_row_for_a_superstep_of_four(four: Fleet, tool: Tool) -> None:
    result = four.generate(prompt_of(640, 6), max_tokens=1, poster=0, lane="whale", stop_tokens=())
    code, told = tool_trace(four, result.request_id)
    assert code == 0
    assert [line["rank"] for line in told] == [0, 1, 2, 3]
    assert {line["launch"] for line in told} == {result.report.entry_launch}


def tool_trace(fleet: Fleet, request_id: str) -> tuple[int, list[dict[str, Any]]]:
    """Its lines are written after the token is out, so they are waited for."""
    deadline = time.monotonic() + 60
    while True:
        lines = [line for line in launches.read_traces(fleet.run_dir).lines if line["request_id"] == request_id]
        if len(lines) == 4 or time.monotonic() > deadline:
            return commands.main(["trace", "--run", str(fleet.run_dir), "--request", request_id]), lines


def test_watch_tells_again_and_again(four: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["watch", "--run", str(four.run_dir), *LONG]
    deadline = time.monotonic() + 60
    while True:
        assert commands.main([*words, "--json", "--times", "2", "--interval", "0.3"]) == 0
        first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        launches = [[row["answer"]["health"]["launch"] for row in told["ranks"]] for told in (first, second)]
        assert all(a <= b for a, b in zip(*launches, strict=True))
        if all(a < b for a, b in zip(*launches, strict=True)):  # an idle rank launches every 0.25 s, if it is let
            break
        assert time.monotonic() < deadline, launches
    commands.main([*words, "--times", "1"])
    assert "serving" in capsys.readouterr().out


def test_drain_all_ends_the_fleet_without_a_failure(
    tiny: Path, start: Callable[..., Fleet], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet of its own, for it ends."""
    monkeypatch.setattr("whalez.fleet.OWN_LEAVE_S", 8.0)  # as in test_leaving: who is killed here is one who hangs
    fleet = start(tiny, 2)
    running = fleet.submit(prompt_of(30, 7), max_tokens=40, poster=1, lane="local", stop_tokens=())
    next(iter(running))
    assert commands.main(["drain", "all", "--grace", "60", "--run", str(fleet.run_dir), "--json", *LONG]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["answer"]["type"] for row in told["ranks"]] == ["Ordered"] * 2
    assert len(running.result(60).tokens) == 40
    fleet.wait()  # raises if the fleet failed
    assert [process.how for process in fleet._processes] == ["exited with 0"] * 2
    with pytest.raises(Unavailable):
        fleet.generate(prompt_of(30, 8), max_tokens=1)


@pytest.mark.slow
def test_held_ranks_stay_for_a_debugger_and_leave_when_the_fleet_is_stopped(
    tiny: Path, start: Callable[..., Fleet]
) -> None:
    """A fleet of its own, for it fails: rank 1 is killed, rank 0 notices, writes why, and stays."""
    lines: list[str] = []
    fleet = start(tiny, 2, hold_on_failure=True, progress=lines.append)
    pids = fleet.pids()
    os.kill(pids["rank 1"], signal.SIGKILL)
    attach = f"rank 0 is held for a debugger until SIGTERM: pid {pids['rank 0']}; attach with `gdb -p {pids['rank 0']}`"
    deadline = time.monotonic() + 60
    while not any(line.startswith(attach) for line in lines):
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)
    path = fleet.run_dir / "post-mortem-0.json"
    assert json.loads(path.read_text())["blames"] == 1
    assert postmortem.first_cause(postmortem.read_files(fleet.run_dir).files).ranks == (1,)
    state = Path(f"/proc/{pids['rank 0']}/stat").read_text().rsplit(")", 1)[1].split()[0]
    assert state in "SR"
    ranks = Ranks(fleet.run_dir, None, 10.0)
    zero = ranks.ask(lambda query_id: AskStatus(query_id=query_id), {0})[0].answer
    assert isinstance(zero, RankStatus)
    assert zero.health.state == "failed"
    with Pauses() as pauses:
        began = time.monotonic()
        fleet.stop()
        took_s = time.monotonic() - began
    assert took_s < 4 + pauses.late_s
    assert isinstance(fleet.failure, PeerDied) and fleet.failure.rank == 1
    held = next(process for process in fleet._processes if process.rank == 0)
    assert held.how == "exited with 1"  # it left by itself, and was not killed


@pytest.mark.slow
def test_whalez_fleet_exits_with_0_when_it_was_drained(tiny: Path, tmp_path: Path) -> None:
    """Also with --restart: a fleet that was sent away does not come back, and its front goes with it."""
    port = free_ports(3)
    words = ["fleet", "--model", str(tiny), "--world", "2", "--listen", f"127.0.0.1:{port}", "--run", str(tmp_path)]
    command = [sys.executable, "-m", "whalez.cli", *words, "--max-ctx", "2048", "--restart"]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert launcher.stderr is not None
        assert any("all ranks: http" in line for line in launcher.stderr)
        tool = [sys.executable, "-m", "whalez.admin"]
        begun = subprocess.run([*tool, "drain", "all", "--run", str(tmp_path)], capture_output=True, text=True)
        assert begun.returncode == 0, begun.stderr
        assert launcher.wait(60) == 0
        assert "the fleet was drained and has left" in launcher.stderr.read()
        after = subprocess.run([*tool, "status", "--run", str(tmp_path)], capture_output=True, text=True)
        assert after.returncode == 3
        assert list(tmp_path.glob("post-mortem-*.json")) == []
    finally:
        launcher.kill()
        launcher.communicate()
