"""Fleet over real processes that play ranks: it comes up whole or not at all, and leaves nothing behind."""

import asyncio
import contextlib
import gc
import inspect
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_fleet import fake_command, group_lives, wait_gone

import whalez
from helpers.faults import wait_until
from helpers.machine import Pauses
from helpers.ports import free_ports
from whalez.errors import (
    CheckpointError,
    ConfigError,
    HubError,
    OutputError,
    PeerDied,
    RequestError,
    Unavailable,
    WhalezError,
)
from whalez.fleet import Fleet, Pending
from whalez.serve.process import STOP

pytestmark = pytest.mark.multiprocess

HANG_S = 60.0  #: no time that is promised: who takes so long hangs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "behave.json").write_text("{}")
    return folder


@pytest.fixture
def start(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    """Start fleets; when the test is over, nothing of any of them may be left.

    What a rank has to leave is cut here; test_cli shows that the real bound is kept.
    """
    for name in ("LEAVE_S", "OWN_LEAVE_S"):
        monkeypatch.setattr(f"whalez.fleet.{name}", 0.3)
    fleets: list[Fleet] = []

    def begin(world: int = 2, behave: dict[int, str] | None = None, **options: Any) -> Fleet:
        (model / "behave.json").write_text(json.dumps(behave or {}))
        fleet = Fleet(model, world, command=fake_command, **options)
        fleets.append(fleet)
        fleet.start()
        return fleet

    yield begin
    for fleet in fleets:
        pids = fleet.pids()
        fleet.stop()
        wait_leftovers(fleet, pids, [])


def leftovers(fleet: Fleet, pids: dict[str, int]) -> list[str]:
    """Processes of the fleet's groups, names of shared memory, the temporary folder."""
    found = [name for name, pid in pids.items() if group_lives(pid)]
    found += [str(path) for path in Path("/dev/shm").glob(f"whalez-{fleet.fleet_id}*")]
    if fleet.run_dir.name.startswith("whalez-") and fleet.run_dir.exists():
        found.append(str(fleet.run_dir))
    return found


def wait_leftovers(fleet: Fleet, pids: dict[str, int], wanted: list[str]) -> None:
    """What was killed is gone once the machine has run it, not at once."""
    wait_until(lambda: leftovers(fleet, pids) == wanted, 5.0, lambda: leftovers(fleet, pids))


def sockets_of(fleet: Fleet) -> list[str]:
    return sorted(path.name for path in fleet.run_dir.iterdir() if path.is_socket())


# ---- a fleet that works ---------------------------------------------------------------------------------------
def test_generate_submit_status(start: Callable[..., Fleet]) -> None:
    fleet = start(world=2, segment_floor=64)
    assert all(os.getpgid(pid) == pid for pid in fleet.pids().values())  # a terminal's Ctrl-C passes them by
    result = fleet.generate([1, 2, 3], max_tokens=4, poster=1)
    assert result.tokens == (2, 3, 4, 2)
    assert (result.finish_reason, result.prompt_tokens, result.report.poster) == ("length", 3, 1)
    assert fleet.generate("ab", max_tokens=2).text == "bc"
    several = [fleet.submit([i], max_tokens=3, poster=i % 2) for i in range(6)]
    assert [each.result(HANG_S).tokens for each in several] == [(i + 1,) * 3 for i in range(6)]
    streamed = fleet.submit([7], max_tokens=5)
    assert list(streamed) == [8] * 5
    assert list(streamed) == []
    assert [status.rank for status in fleet.status(HANG_S) if status] == [0, 1]
    assert "'--segment-floor', '64'" in (fleet.run_dir / "rank-1.log").read_text()
    for bad in ([], [256], [-1], [1] * 100_000):
        with pytest.raises(RequestError, match="prompt"):
            fleet.submit(bad)
    with pytest.raises(RequestError, match="max_tokens"):
        fleet.submit([1], max_tokens=0)
    for name, value in (("temperature", -1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5)):
        with pytest.raises(RequestError, match=name):
            fleet.submit([1], **{name: value})
    for name, value in (("max_tokens", 1.5), ("max_tokens", "3"), ("seed", 0.5), ("stop_tokens", ["a"])):
        with pytest.raises(TypeError):  # sent off, it would be dropped as unreadable and never answered
            fleet.submit([1], **{name: value})
    with pytest.raises(ConfigError, match="poster"):
        fleet.submit([1], poster=2)
    endless = fleet.submit([1], max_tokens=90_000)
    assert next(iter(endless)) == 2
    endless.cancel()
    with pytest.raises(Unavailable, match="cancelled"):
        endless.result(HANG_S)
    with pytest.raises(TimeoutError):
        fleet.generate([1], max_tokens=90_000, timeout_s=0.01)
    waiting = fleet.submit([1], max_tokens=90_000)
    fleet.stop()
    with pytest.raises(Unavailable, match="stopping"):
        waiting.result(0)
    with pytest.raises(Unavailable):
        fleet.submit([1])
    with pytest.raises(WhalezError, match="make another"):
        fleet.start()


def test_a_request_that_meets_the_stop_half_way_is_refused(start: Callable[..., Fleet]) -> None:
    fleet = start(world=1)

    class Stops:
        """The tokenizer runs between the look at the fleet and the hand-over."""

        def encode(self, text: str) -> list[int]:
            fleet.stop()
            return [1]

    fleet.tokenizer = Stops()  # type: ignore[assignment]
    with pytest.raises(Unavailable):
        fleet.submit("a")
    with pytest.raises(Unavailable):
        fleet.status()


def test_callers_that_race_a_stop_all_end_with_a_named_error(start: Callable[..., Fleet]) -> None:
    fleet = start(world=1)
    begun = threading.Barrier(9)
    ends: list[BaseException] = []

    def call(what: Callable[[], object]) -> None:
        begun.wait(HANG_S)
        try:
            while True:
                what()
        except BaseException as error:
            ends.append(error)

    def cancel() -> None:
        pending = fleet.submit([1], max_tokens=90_000)
        pending.cancel()
        with contextlib.suppress(Unavailable):
            pending.result()

    work = [lambda: fleet.generate([1], max_tokens=2), fleet.status, cancel, lambda: fleet.submit([1])]
    callers = [threading.Thread(target=call, args=(each,), daemon=True) for each in 2 * work]
    for caller in callers:
        caller.start()
    begun.wait(HANG_S)
    fleet.stop()
    deadline = time.monotonic() + HANG_S
    for caller in callers:
        caller.join(max(0.0, deadline - time.monotonic()))
    assert [caller for caller in callers if caller.is_alive()] == []
    assert [error for error in ends if not isinstance(error, Unavailable)] == []


def test_work_that_comes_too_late_for_the_loop_is_closed(model: Path) -> None:
    """Handed over just before the loop ended and never begun, it would warn when it is collected."""
    fleet = Fleet(model)
    loop: Any = types.SimpleNamespace(call_soon_threadsafe=lambda *_: None)
    fleet._loop, fleet._thread = loop, threading.Thread()
    work = fleet._ask_all(1.0)
    with pytest.raises(Unavailable, match="not running"):
        fleet._call(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


def test_one_url_for_all_ranks(start: Callable[..., Fleet]) -> None:
    port = free_ports(3)
    fleet = start(world=2, listen=f"127.0.0.1:{port}")
    pids = fleet.pids()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:
        health = client.get("/health").json()
        assert [row["rank"] for row in health["ranks"]] == [0, 1]
        posters = set()
        for _ in range(2):
            got = client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3}).json()
            assert got["choices"][0]["text"] == "bcb"
            posters.add(got["whalez"]["poster"])
        assert posters == {0, 1}
        body = {"prompt": [1], "max_tokens": 90_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:  # a stream in flight delays no stop
            assert next(stream.iter_lines()).startswith("data: ")
            with Pauses() as pauses:
                began = time.monotonic()
                fleet.stop()
                took = time.monotonic() - began
            assert took < 2 + pauses.late_s
    wait_leftovers(fleet, pids, [])  # they hold the ports
    taken = socket.socket()
    with taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past the rests of connections to this fleet
        taken.bind(("127.0.0.1", port + 2))
        taken.listen()
        with pytest.raises(HubError, match=str(port + 2)):
            start(world=2, listen=f"127.0.0.1:{port}")


def test_a_url_that_is_shown_takes_requests(start: Callable[..., Fleet]) -> None:
    """Rank 1's front is a second late; that of all ranks has not heard of any by itself when it begins to listen."""
    port = free_ports(3)
    start(world=2, behave={1: "later"}, listen=f"127.0.0.1:{port}")
    for offset in (2, 1, 0):
        url = f"http://127.0.0.1:{port + offset}/v1/completions"
        answer = httpx.post(url, json={"prompt": "ab", "max_tokens": 3}, timeout=HANG_S)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "bcb")


def test_a_front_knows_no_arrays() -> None:
    code = (
        "import sys, whalez.serve.front, whalez.hub.zmq_link\n"
        "print([name for name in ('numpy', 'numba') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# ---- a fleet that fails ---------------------------------------------------------------------------------------
def test_a_rank_that_dies_at_start_fails_the_start(start: Callable[..., Fleet]) -> None:
    began = time.monotonic()
    start(world=3).stop()
    healthy_s = time.monotonic() - began
    began = time.monotonic()
    with pytest.raises(
        PeerDied, match=r"^rank 1 died: exited with 3; its last words: model\.safetensors: tensor lm_head is cut short$"
    ) as caught:
        start(world=3, behave={1: "dies", 2: "stubborn"})
    assert caught.value.rank == 1
    # It may take what its Pythons take to come up, and then two seconds, however long a start may take.
    assert time.monotonic() - began < 2 * healthy_s + 2


def test_a_world_that_does_not_come_up_is_named(start: Callable[..., Fleet]) -> None:
    began = time.monotonic()
    start(world=2).stop()
    start_s = 2 + math.ceil(3 * (time.monotonic() - began))  # so that rank 0 serves by then and rank 1 has said a word
    with pytest.raises(WhalezError, match=rf"not serving after {start_s} s: rank 1; last words: rank 1 up"):
        start(world=2, behave={1: "mute"}, start_s=start_s)


def test_what_came_up_in_the_last_moment_is_not_late(model: Path) -> None:
    async def came_up() -> None:
        pass

    asyncio.run(Fleet(model)._unless_failed({"rank 0": came_up()}, began=-math.inf))


def test_when_one_cannot_come_up_nobody_waits_for_the_others_any_more(model: Path) -> None:
    """Of a world that is to start again they would go on asking beside those of the next."""
    ended = []

    async def fails() -> None:
        raise WhalezError("its front has ended")

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("rank 1")

    async def start() -> list[str]:
        with pytest.raises(WhalezError, match="its front has ended"):
            await Fleet(model)._unless_failed({"rank 0": fails(), "rank 1": waits()}, began=time.monotonic())
        return list(ended)

    assert asyncio.run(start()) == ["rank 1"]


def test_a_front_that_cannot_start_is_named(start: Callable[..., Fleet]) -> None:
    port = free_ports(3)
    with pytest.raises(WhalezError, match=r"^the front of rank 1 has ended: front: cannot listen on 192\.0\.2\.7:1"):
        start(world=2, behave={1: "barred"}, listen=f"127.0.0.1:{port}")


def test_a_rank_that_is_stopped_at_its_start_is_named_soon(
    start: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No peer knows it yet, so nobody but the launcher can tell."""
    monkeypatch.setattr("whalez.fleet.STOPPED_S", 0.5)
    with pytest.raises(PeerDied, match=r"^rank 1 died: stopped for 0.5 s while the world came up") as caught:
        start(world=2, behave={1: "stops"}, start_s=HANG_S)
    assert caught.value.rank == 1


def test_the_end_of_a_link_is_told_even_if_its_rank_lives(
    start: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a death nobody else ends the request."""
    monkeypatch.setattr("whalez.fleet.BLAME_S", 0.2)
    fleet = start(world=1, behave={0: "closes"})
    with pytest.raises(Unavailable, match=r"^rank 0: it has closed the link$"):
        fleet.submit([1]).result(HANG_S)
    assert fleet.pids()


def test_a_progress_that_nobody_reads_ends_nothing(start: Callable[..., Fleet]) -> None:
    def progress(line: str) -> None:
        raise BrokenPipeError

    fleet = start(world=1, progress=progress)
    os.kill(fleet.pids()["rank 0"], STOP)  # it leaves with 0, as of a drain
    fleet.wait()


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "noticed by rank 0")]
)
def test_a_dead_rank_fails_its_requests_and_the_fleet(
    start: Callable[..., Fleet], tmp_path: Path, number: int, how: str
) -> None:
    """Rank 0 notices and leaves at once with a word of its own; the error names the dead one all the same."""
    fleet = start(world=3, behave={0: "tells", 2: "stubborn"}, run_dir=tmp_path / "run")
    waiting = fleet.submit([1], max_tokens=90_000, poster=2)
    next(iter(waiting))
    pids = fleet.pids()
    (tmp_path / "run" / "peers.json").write_text(json.dumps({"1": pids["rank 1"]}))
    with Pauses() as pauses:
        began = time.monotonic()
        os.kill(pids["rank 1"], number)
        with pytest.raises(PeerDied, match=f"^rank 1 died: {how}"):
            fleet.wait()
        took = time.monotonic() - began
    assert took < 3 + pauses.late_s
    with pytest.raises(PeerDied, match="rank 1"):
        waiting.result(0)
    with pytest.raises(PeerDied, match="rank 1"):
        fleet.generate([1])
    wait_leftovers(fleet, pids, [f"/dev/shm/whalez-{fleet.fleet_id}-fake-2"])  # swept by stop
    assert (tmp_path / "run" / "rank-0.log").exists()
    assert "rank-2.link" in sockets_of(fleet)  # a killed rank cannot remove it
    fleet.stop()
    assert sockets_of(fleet) == []


def test_a_restart_puts_away_what_the_failed_world_wrote(start: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = start(world=1, run_dir=tmp_path / "run")
    for name in ("trace-0.jsonl", "post-mortem-0.json"):
        (fleet.run_dir / name).write_text("of the first world")
    os.kill(fleet.pids()["rank 0"], signal.SIGKILL)
    with pytest.raises(PeerDied):
        fleet.wait()
    fleet.restart()
    for name in ("trace-0.jsonl", "post-mortem-0.json"):
        assert not (fleet.run_dir / name).exists()
        assert (fleet.run_dir / "world-1" / name).read_text() == "of the first world"
    assert "up, argv" in (fleet.run_dir / "world-1" / "rank-0.log").read_text()


def test_ranks_that_are_to_be_held_outlive_the_front(start: Callable[..., Fleet]) -> None:
    lines: list[str] = []
    fleet = start(world=2, listen=f"127.0.0.1:{free_ports(3)}", hold_on_failure=True, progress=lines.append)
    os.kill(fleet.pids()["front"], signal.SIGKILL)
    told = "the ranks serve on until this fleet is stopped"
    deadline = time.monotonic() + HANG_S
    while not lines[-1].endswith(told):
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)
    assert lines[-1].startswith("front was killed by SIGKILL")
    assert fleet.generate([1, 2], max_tokens=2, timeout_s=HANG_S).tokens == (2, 3)
    fleet.stop()
    assert fleet.failure is None


def test_post_mortems_of_a_fleet_that_served_are_kept(start: Callable[..., Fleet]) -> None:
    """One that never served leaves nothing: a rank that dies at its start writes one here, and `start` looks for it."""
    lines: list[str] = []
    fleet = start(world=1, progress=lines.append)
    (fleet.run_dir / "post-mortem-0.json").write_text("{}")
    os.kill(fleet.pids()["rank 0"], signal.SIGKILL)
    with pytest.raises(PeerDied):
        fleet.wait()
    fleet.stop()
    assert lines[-1] == f"logs and post-mortems are in {fleet.run_dir}"
    shutil.rmtree(fleet.run_dir)


def test_run_dir_in_use_or_too_deep(start: Callable[..., Fleet], tmp_path: Path) -> None:
    start(world=1, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="another fleet"):
        start(world=1, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="socket path"):
        start(world=1, run_dir=tmp_path / ("x" * 100))
    with pytest.raises(OutputError, match=r"^/proc/fleet\.lock: cannot be written"):  # where nobody may
        start(world=1, run_dir="/proc")


def test_settings_are_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Fleet(tmp_path)
    with pytest.raises(ConfigError, match="segment_flor"):
        Fleet(model, segment_flor=3)
    with pytest.raises(ConfigError, match="whale_min"):
        Fleet(model, segment_floor=100, whale_min=50)
    with pytest.raises(ConfigError, match="page_tokens"):  # no flag hands it to a rank
        Fleet(model, page_tokens=7)
    with pytest.raises(ConfigError, match="max_ctx: expected a whole number"):
        Fleet(model, max_ctx="7")
    with pytest.raises(ConfigError, match="listen"):
        Fleet(model, listen="127.0.0.1:65535")


# ---- the launcher dies ----------------------------------------------------------------------------------------
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # not so by itself in what a shell runs in the background
sys.path.insert(0, {here!r})
from fake_fleet import fake_command
from whalez.fleet import Fleet
fleet = Fleet({model!r}, 2, command=fake_command)
with fleet:
    print(*fleet.pids().values(), fleet.run_dir, flush=True)
    fleet.wait()
"""


@pytest.fixture
def launcher(model: Path) -> Iterator[Callable[..., tuple[subprocess.Popen, list[int], Path]]]:
    begun: list[subprocess.Popen] = []

    def begin(behave: dict[int, str]) -> tuple[subprocess.Popen, list[int], Path]:
        (model / "behave.json").write_text(json.dumps(behave))
        code = SCRIPT.format(here=str(Path(__file__).parent), model=str(model))
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        begun.append(process)
        assert process.stdout is not None
        *pids, run_dir = process.stdout.readline().split()
        return process, [int(pid) for pid in pids], Path(run_dir)

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def test_ranks_die_with_a_killed_launcher(launcher: Callable[..., Any]) -> None:
    process, pids, run_dir = launcher({})
    process.kill()
    process.wait()
    with Pauses() as pauses:
        began = time.monotonic()
        while any(group_lives(pid) for pid in pids):
            assert time.monotonic() - began < 2 + pauses.late_s
            time.sleep(0.01)
    for path in run_dir.iterdir():
        path.unlink()
    run_dir.rmdir()


def test_ctrl_c_in_a_script_ends_everything(launcher: Callable[..., Any]) -> None:
    process, pids, run_dir = launcher({})
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)  # how soon, test_cli measures
    assert "KeyboardInterrupt" in err
    wait_gone(pids)
    assert not run_dir.exists()


class Strike:
    """A profile function that raises KeyboardInterrupt at step `at` of what a thread runs to wait.

    Steps are where the interpreter looks for signals: the entry of a Python function and the end of a call into C.
    """

    FILES = ("threading.py", "concurrent/futures/_base.py", "whalez/fleet.py", "whalez/latch.py")

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: types.FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return", "c_exception") and frame.f_code.co_filename.endswith(self.FILES):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:coroutine")  # struck before it was handed over
@pytest.mark.parametrize("call", ["wait", "status", "result"])
def test_ctrl_c_at_any_step_of_a_wait_leaves_nothing_locked(
    start: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("whalez.latch.SLICE_S", 0.02)
    fleet = start(world=1)
    for at in range(20):
        pending = fleet.submit([1], max_tokens=90_000)
        waits = {"wait": fleet.wait, "status": fleet.status, "result": pending.result}[call]
        sys.setprofile(Strike(at))
        try:
            waits()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)

        def goes_on(pending: Pending = pending) -> None:
            pending.cancel()
            with contextlib.suppress(Unavailable):
                pending.result(HANG_S)
            fleet.status()

        after = threading.Thread(target=goes_on, daemon=True)
        after.start()
        after.join(HANG_S)
        assert not after.is_alive(), f"stuck after a strike at step {at}"
    gc.collect()  # of a coroutine that was struck, while the warning about it is expected
    stop = threading.Thread(target=fleet.stop, daemon=True)
    stop.start()
    stop.join(HANG_S)
    assert not stop.is_alive()


def test_no_finalizer_runs_in_a_thread_that_waits(start: Callable[..., Fleet]) -> None:
    """Python drops what the handler of a signal raises there, and Ctrl-C would be lost."""
    fleet = start(world=1)
    ran: list[str] = []

    def look(frame: types.FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and (
            code.co_name == "__del__" or code.co_filename.endswith(("weakref.py", "weakrefset.py"))
        ):
            ran.append(f"{code.co_filename}:{code.co_name}")

    gc.disable()  # may collect in any thread, and seldom does
    sys.setprofile(look)
    try:
        for _ in range(20):
            fleet.status()
            fleet.generate([1], max_tokens=1)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert ran == []


def test_a_script_that_never_stops_its_fleet_ends_quietly(model: Path) -> None:
    code = SCRIPT.replace("with fleet:", "fleet.start()\nif True:").replace("    fleet.wait()\n", "")
    code = code.format(here=str(Path(__file__).parent), model=str(model))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    *pids, run_dir = ended.stdout.split()
    assert ended.stderr == ""
    wait_gone([int(pid) for pid in pids])
    assert not Path(run_dir).exists()


def test_fleet_is_exported_lazily() -> None:
    code = "import sys, whalez; print('asyncio' in sys.modules, whalez.Fleet.__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "Fleet"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", whalez.__version__)
