"""A real fleet with keys, strangers at every port of it, and starts that keys forbid."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import zmq
from click.testing import CliRunner

from helpers.ports import free_ports
from whalez.cli import whalez
from whalez.errors import ConfigError
from whalez.fleet import Fleet
from whalez.hub import wire
from whalez.hub.requests import CancelRequest, Status
from whalez.rendezvous.messages import Bye, Died
from whalez.warm import kernel_environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

TOKENS = [7 * i % 250 for i in range(300)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security") / "keys"
    made = CliRunner().invoke(whalez, ["keys", str(folder)])
    assert made.exit_code == 0, made.output
    assert made.output.count("secret") >= 3
    return folder


class Bomb:
    """Ends the process that loads it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.kill, (os.getppid(), signal.SIGKILL)


GARBAGE = [
    b"",
    pickle.dumps(Bomb()),
    bytes(range(256)) * 40,
    wire.encode(Bye(rank=1), "somebody"),
    wire.encode(Died(rank=0, how="says a stranger"), "somebody"),
    wire.encode_link(CancelRequest(request_id="unheard-of"))[:-1],
]


def attack(address: str) -> None:
    """As ZeroMQ without and with keys, and as bytes that are no ZeroMQ at all."""
    context = zmq.Context()
    try:
        for has_keys in (False, True):
            one = context.socket(zmq.DEALER)
            one.linger = 500
            if has_keys:
                one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
                one.curve_serverkey = zmq.curve_keypair()[0]
            one.connect(address)
            for data in GARBAGE:
                one.send(data)
            one.send_multipart([b"a", b"b", b"c"])
            one.close()
        big = context.socket(zmq.DEALER)
        big.linger = 500
        big.connect(address)
        big.send(bytes(wire.FRAME_BYTES_MAX + 1))
        big.close()
    finally:
        context.term()
    for data in GARBAGE[1:]:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(address.removeprefix("ipc://"))
            raw.sendall(data)


def dropped(fleet: Fleet, rank: int) -> dict[str, int]:
    status = fleet.status()[rank]
    assert isinstance(status, Status)
    return status.dropped


@pytest.mark.slow  # once in many runs the stranger's own context does not end (libzmq keeps reconnecting in `term`)
def test_strangers_at_every_port_are_counted_and_change_nothing(
    tiny: Path, start: Callable[..., Fleet], keys: Path, tmp_path: Path
) -> None:
    port = free_ports(3)
    fleet = start(tiny, 2, keys=keys, run_dir=tmp_path / "run", listen=f"127.0.0.1:{port}")
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
    before = [fleet.generate(TOKENS, max_tokens=4, lane=lane).tokens for lane in ("local", "whale")]
    pids = fleet.pids()
    for address in (fleet.hub_address, *fleet.links):
        attack(address)
    for offset in range(3):
        for data in GARBAGE[1:]:
            with socket.create_connection(("127.0.0.1", port + offset)) as raw:
                raw.sendall(data)
    deadline = time.monotonic() + 20
    while not (
        dropped(fleet, 0)["hub_refused_connections"] >= 5
        and all(dropped(fleet, rank)["link_bad_frames"] >= len(GARBAGE) + 1 for rank in range(2))
        and all(dropped(fleet, rank)["link_refused_connections"] >= 1 for rank in range(2))
        and all(dropped(fleet, rank)["link_ended_connections"] >= 3 for rank in range(2))
    ):
        assert time.monotonic() < deadline, [dropped(fleet, rank) for rank in range(2)]
        time.sleep(0.02)
    assert dropped(fleet, 0)["hub_bad_frames"] == dropped(fleet, 0)["hub_stale_frames"] == 0  # none got so far
    assert not any(name.startswith("hub") for name in dropped(fleet, 1))
    assert [fleet.generate(TOKENS, max_tokens=4, lane=lane).tokens for lane in ("local", "whale")] == before
    assert fleet.pids() == pids
    health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=10)
    assert health.status_code == 200
    assert health.json()["ranks"][0]["dropped"]["hub_refused_connections"] >= 5
    status = fleet.status()[0]
    assert status is not None


def rank_words(model: Path, run_dir: Path, *more: str, **env: str) -> tuple[int, str]:
    """Exit code and stderr of a rank that must not start."""
    words = [sys.executable, "-m", "whalez.rank", "--rank", "0", "--world", "2", "--model", str(model)]
    words += ["--run", str(run_dir), "--segment-floor", "64", "--start-timeout", "30", *more]
    environment = {**os.environ, **kernel_environment(os.environ), **env}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stderr


@pytest.mark.slow  # two starts of a rank; the rule itself is tested with the hub
def test_a_hub_for_other_machines_needs_keys(tiny: Path, tmp_path: Path) -> None:
    hub = ("--hub", f"tcp://0.0.0.0:{free_ports(1)}")
    code, said = rank_words(tiny, tmp_path / "run", *hub)
    assert code == 1
    assert "--keys DIR" in said
    assert "--insecure" in said
    code, said = rank_words(tiny, tmp_path / "run", *hub, "--insecure", "--start-timeout", "0.2")
    assert code == 1
    assert "rank 1 is missing" in said  # it listened


def test_loose_files_are_refused_by_name_before_anything_starts(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert CliRunner().invoke(whalez, ["keys", str(folder)]).exit_code == 0
    (folder / "rank.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match=r"rank\.key_secret: mode 0640"):
        Fleet(tiny, 2, keys=folder, run_dir=tmp_path / "run", segment_floor=64).start()
    assert not (tmp_path / "run").exists()
    code, said = rank_words(tiny, tmp_path / "run", "--hub", f"ipc://{tmp_path}/hub", WHALEZ_KEYS=str(folder))
    assert code == 1
    assert "rank.key_secret: mode 0640" in said
    again = CliRunner().invoke(whalez, ["keys", str(folder)])
    assert isinstance(again.exception, ConfigError)
    assert "exists already" in str(again.exception)
