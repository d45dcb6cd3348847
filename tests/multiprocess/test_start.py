"""Starts that must fail: by name, soon, with nothing left behind; and what an idle fleet costs."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from helpers.faults import wait_until
from whalez.doctor import Finding
from whalez.errors import WhalezError
from whalez.fleet import START_S, Fleet, sweep_leftovers
from whalez.model.checkpoint import read_tensors, write_checkpoint
from whalez.warm import kernel_environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


def copy_of(model: Path, folder: Path, **config: object) -> Path:
    keys = json.loads((model / "config.json").read_text()) | config
    write_checkpoint(folder, keys, read_tensors(model))
    return folder


def truncated(model: Path, folder: Path) -> Path:
    copy_of(model, folder)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    return folder


def unknown(model: Path, folder: Path) -> Path:
    return copy_of(model, folder, architectures=["LlamaForCausalLM"])


def contradicting(model: Path, folder: Path) -> Path:
    return copy_of(model, folder, intermediate_size=300)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncated, ("model.safetensors", "model.")),
        (unknown, ("config.json", "architectures", "LlamaForCausalLM")),
        (contradicting, ("wrong shape", "model.layers.0.mlp")),
    ],
)
def test_a_bad_checkpoint_is_named_and_nothing_is_left(
    tiny: Path, tmp_path: Path, spoil: Callable[[Path, Path], Path], words: tuple[str, ...]
) -> None:
    model = spoil(tiny, tmp_path / "bad")
    began = time.monotonic()
    fleet = Fleet(model, 2, run_dir=tmp_path / "run", segment_floor=64)
    with pytest.raises(WhalezError) as caught:
        fleet.start()
    for word in words:
        assert word in str(caught.value)
    assert time.monotonic() - began < START_S / 5  # by its own word, not by the start's time-out
    wait_until(lambda: not _ours(tmp_path), 5.0, lambda: _ours(tmp_path))
    assert not list(Path("/dev/shm").glob(f"whalez-{fleet.fleet_id}-*"))


def _ours(run_dir: Path) -> dict[int, str]:
    """Processes that still name this test's folder: pid -> command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in text:
            found[int(path.parent.name)] = text
    return found


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def test_what_the_machine_lacks_is_told_at_the_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = Finding("warn", "cores", "1 for 2 ranks", "ranks share cores")
    monkeypatch.setattr("whalez.doctor.probe_cores", lambda *_: lacks)
    lines: list[str] = []
    Fleet(tiny, 2, progress=lines.append)._prepare()
    assert "cores: 1 for 2 ranks; ranks share cores" in lines


def test_a_port_in_use_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WhalezError, match=f"127.0.0.1:{port}"):
            Fleet(tiny, 2, listen=f"127.0.0.1:{port}", run_dir=tmp_path / "run").start()
    wait_until(lambda: not _ours(tmp_path / "run"), 5.0, lambda: _ours(tmp_path / "run"))


def test_two_ranks_with_one_number_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    """Who came first keeps the number while it lives; the other one is told whose it is, and goes."""
    command = [sys.executable, "-m", "whalez.rank", "--rank", "1", "--world", "3", "--model", str(tiny)]
    command += ["--hub", f"ipc://{tmp_path}/hub.sock", "--segment-floor", "64", "--start-timeout", "60"]
    command += ["--fleet-id", fleet_id := f"numbers-{secrets.token_hex(4)}"]
    env = {**os.environ, **kernel_environment(os.environ)}
    zero = [*command[:4], "0", *command[5:], "--run", str(tmp_path / "zero")]
    ranks = [subprocess.Popen(zero, env=env, stderr=subprocess.PIPE, text=True)]
    try:
        for name in ("first", "second"):
            words = [*command, "--run", str(tmp_path / name)]
            ranks.append(subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True))
        deadline = time.monotonic() + 60
        while all(rank.poll() is None for rank in ranks[1:]):
            assert time.monotonic() < deadline, "nobody was refused"
            time.sleep(0.05)
        refused = next(rank for rank in ranks[1:] if rank.poll() is not None)
        assert refused.returncode == 1
        holder = next(rank for rank in ranks[1:] if rank is not refused)
        assert f"rank 1 is taken by process {holder.pid}" in refused.communicate(timeout=60)[1]
        assert holder.poll() is None and ranks[0].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for name in Path("/dev/shm").glob(f"whalez-{fleet_id}-*"):
        name.unlink()  # the ones that were killed before the barrier


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_fleet_sleeps_and_wakes(four: Fleet) -> None:
    """An idle rank takes less than 5 % of a core, still launches a few times a second, and serves at once.

    What a busy machine does to it can only add to its time, or take launches away: the best of three looks counts.
    """
    four.generate("wake up", max_tokens=2, stop_tokens=())
    time.sleep(0.5)  # let the last launches of the request pass
    pids = [pid for name, pid in four.pids().items() if name.startswith("rank")]
    for _ in range(3):
        began = time.monotonic()
        before = [cpu_seconds(pid) for pid in pids]
        first = [status.launch for status in four.status(10) if status is not None]
        time.sleep(3.0)
        spent = [cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)]
        last = [status.launch for status in four.status(10) if status is not None]
        seconds = time.monotonic() - began
        ticks = [b - a for a, b in zip(first, last, strict=True)]
        if max(spent) < 0.05 * seconds and min(ticks) >= 2 * seconds:
            break
    assert max(spent) < 0.05 * seconds, spent
    assert all(2 * seconds <= count <= 13 * seconds for count in ticks), ticks  # every 250 ms, plus a few
    assert len(four.generate("and again", max_tokens=2, stop_tokens=()).tokens) == 2


def test_a_signal_before_the_world_is_complete_leaves_no_shared_memory(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whalez.rank", "--rank", "0", "--world", "2", "--model", str(tiny)]
    name = f"alone-{secrets.token_hex(4)}"
    command += ["--hub", f"ipc://{tmp_path}/hub.sock", "--run", str(tmp_path / "run"), "--fleet-id", name]
    rank = subprocess.Popen(command, env={**os.environ, **kernel_environment(os.environ)})
    try:
        deadline = time.monotonic() + 60
        while not (slabs := list(Path("/dev/shm").glob(f"whalez-{name}-*"))):
            assert time.monotonic() < deadline, "no slab was made"
            assert rank.poll() is None
            time.sleep(0.01)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(60) == 128 + signal.SIGTERM
        assert not any(slab.exists() for slab in slabs)
    finally:
        rank.kill()
        rank.wait()
        for slab in Path("/dev/shm").glob(f"whalez-{name}-*"):
            slab.unlink()


#: A launcher whose rank 1 never comes, so that rank 0 waits at the barrier with its slab still named.
HALF_A_FLEET = """
import sys
from whalez.fleet import Fleet, rank_command
def command(fleet, rank):
    return rank_command(fleet, rank) if rank == 0 else ["/bin/sleep", "100"]
fleet = Fleet({model!r}, 2, command=command, segment_floor=64)
print(fleet.fleet_id, flush=True)
fleet.start()
"""


@pytest.fixture
def half_a_fleet(tiny: Path, tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Path, Path]]]:
    """Start one: its launcher, its slab, its run folder."""
    begun: list[subprocess.Popen[str]] = []
    fleets: list[str] = []

    def begin() -> tuple[subprocess.Popen[str], Path, Path]:
        before = set(tmp_path.glob("whalez-*"))
        launcher = subprocess.Popen(
            [sys.executable, "-c", HALF_A_FLEET.format(model=str(tiny))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        begun.append(launcher)
        assert launcher.stdout is not None
        fleets.append(fleet_id := launcher.stdout.readline().strip())
        deadline = time.monotonic() + 60
        while not (slabs := list(Path("/dev/shm").glob(f"whalez-{fleet_id}-*"))):
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.01)
        (folder,) = set(tmp_path.glob("whalez-*")) - before
        return launcher, slabs[0], folder

    yield begin
    for launcher in begun:
        launcher.kill()
        launcher.communicate()
    wait_until(lambda: not _ours(tmp_path), 5.0, lambda: _ours(tmp_path))
    for fleet_id in fleets:  # a killed rank cannot take its slab's name away
        for slab in Path("/dev/shm").glob(f"whalez-{fleet_id}-*"):
            slab.unlink()


def test_what_a_killed_launcher_left_goes_at_the_next_start_and_nothing_of_a_living_fleet(
    tiny: Path, tmp_path: Path, half_a_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "whalez-notes").mkdir()  # somebody's own
    (tmp_path / "whalez-notes" / "fleet.lock").touch()
    dead, dead_slab, dead_folder = half_a_fleet()
    _, slab, folder = half_a_fleet()
    dead.send_signal(signal.SIGSTOP)  # else it would clean up after its rank, and the rank, told politely, after itself
    os.waitpid(dead.pid, os.WUNTRACED)
    for pid in _ours(dead_folder):
        os.kill(pid, signal.SIGKILL)
    dead.kill()
    dead.wait()
    assert dead_slab.exists() and dead_folder.exists()  # what this test is about
    for path in (dead_slab, dead_folder / "temporary.lock", slab, folder / "temporary.lock"):
        os.utime(path, (0, 0))
    with dead_slab.open() as file:  # a dying process loses its command line first and its locks later
        deadline = time.monotonic() + 60
        while _is_locked(file):
            assert time.monotonic() < deadline, _ours(dead_folder)
            time.sleep(0.01)
    with Fleet(tiny, 1, segment_floor=64):
        pass
    assert not dead_slab.exists() and not dead_folder.exists()
    assert slab.exists() and folder.exists() and (tmp_path / "whalez-notes" / "fleet.lock").exists()
    assert str(dead_folder) not in sweep_leftovers()
