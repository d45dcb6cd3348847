"""Fleets with one rank that can be held at a chosen place, and what must be true once such a fleet has failed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from whalez.errors import HubError, WhalezError
from whalez.fleet import Fleet, Pending, rank_command
from whalez.hub.admin import AskDoorbells, Doorbells
from whalez.hub.zmq_admin import ask_all
from whalez.serve.links import admin_address
from whalez.serve.process import bind, parse_listen
from whalez.testing.faults import fault_arguments

STUCK_S = 3.0


class Victim:
    """The rank of a fleet that `whalez.testing.faults` runs. Hand `command` to Fleet."""

    def __init__(self, rank: int, place: str, mark: Path, *, slow_s: float | None = None) -> None:
        self.rank, self.place, self.mark, self.slow_s = rank, place, mark, slow_s

    def command(self, fleet: Fleet, rank: int) -> list[str]:
        real = rank_command(fleet, rank)
        if rank != self.rank:
            return real
        return [*fault_arguments(self.place, self.mark, slow_s=self.slow_s), "--", *real[real.index("-m") + 2 :]]

    def allow(self) -> None:
        """From now on the rank stays when it comes by."""
        Path(f"{self.mark}.on").touch()

    def release(self) -> None:
        Path(f"{self.mark}.go").touch()

    def wait_held(self, timeout_s: float = 60.0) -> None:
        wait_until(self.mark.exists, timeout_s, f"rank {self.rank} never came to {self.place}")


def wait_until(is_so: Callable[[], object], timeout_s: float, what: object) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.01)


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that name this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in text:
                found.append(text)
    return found


def assert_clean(fleet: Fleet) -> None:
    """Soon after `stop`: no process, no shared memory, no socket and no listening port of the fleet."""
    wait_until(lambda: not processes_of(fleet.run_dir), 5.0, lambda: processes_of(fleet.run_dir))
    assert not list(Path("/dev/shm").glob(f"whalez-{fleet.fleet_id}-*"))
    assert [path.name for path in fleet.run_dir.iterdir() if path.is_socket()] == []
    if fleet.listen is not None:
        host, port = parse_listen(fleet.listen)
        for offset in range(fleet.world + 1):
            wait_until(lambda at=f"{host}:{port + offset}": _is_free(at), 5.0, f"port {port + offset} is in use")


def _is_free(address: str) -> bool:
    """A dying process loses its command line before its sockets."""
    try:
        bind(address).close()
    except HubError:
        return False
    return True


Waits = dict[int, tuple[int, str, int]]  #: by who waits: for whom, the kind of doorbell, the value


def waits_on(fleet: Fleet, victim: int) -> Waits:
    """Whom every other rank waits for by its slab, once all do and none gets on: the victim is held in a launch."""
    waits: Waits = {}
    before: Waits | None = None
    endpoint = admin_address(fleet.run_dir, (victim + 1) % fleet.world)

    def stands() -> bool:
        nonlocal waits, before
        (told,) = ask_all([(endpoint, AskDoorbells(query_id=secrets.token_hex(4)))], 10.0)
        assert isinstance(told, Doorbells), told
        before, waits = waits, {line.rank: (line.peer, line.kind, line.expected) for line in told.waits}
        return waits == before and set(waits) == set(range(fleet.world)) - {victim}

    wait_until(stands, 30.0, lambda: f"not all wait for rank {victim}: {waits}")
    return waits


def strike(fleet: Fleet, victim: Victim, fault: str) -> float:
    """Apply "kill" or "stop" to a rank ("wedge": since it is held); the wall-clock time of it."""
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if fault == "wedge":
        return victim.mark.stat().st_mtime
    os.kill(fleet.pids()[f"rank {victim.rank}"], numbers[fault])
    return time.time()


def failure_of(fleet: Fleet, timeout_s: float) -> WhalezError:
    """Wait until the fleet has failed by itself; the bound is the test's, the failure the fleet's."""
    wait_until(lambda: fleet.failure is not None and fleet._over.is_set, timeout_s, "the fleet has not failed")
    assert fleet.failure is not None
    return fleet.failure


def error_of(pending: Pending) -> WhalezError:
    try:
        result = pending.result(10)
    except WhalezError as error:
        return error
    raise AssertionError(f"{pending.request_id} ended well: {result}")


def post_mortems(fleet: Fleet) -> dict[int, dict[str, Any]]:
    """Rank -> its post-mortem, with `written`, when."""
    found = {}
    for path in fleet.run_dir.glob("post-mortem-*.json"):
        record = json.loads(path.read_text())
        found[int(record["rank"])] = record | {"written": path.stat().st_mtime}
    return found


def check_survivors(fleet: Fleet, victim: int, waits: Waits, bound_s: float, struck: float) -> float:
    """Every other rank says whom it lost and whom it waited for, and left with 1. Returns the latest detection, s."""
    found = post_mortems(fleet)
    ends = {process.rank: process.how for process in fleet._processes if process.rank is not None}
    for rank in range(fleet.world):
        if rank == victim:
            continue
        assert rank in found, (rank, ends, sorted(found))
        record = found[rank]
        assert f"rank {victim}" in record["message"], record["message"]
        assert ends[rank] == "exited with 1", ends
        said = [line for line in (fleet.run_dir / f"rank-{rank}.log").read_text().splitlines() if "whalez: " in line]
        assert f"rank {victim}" in said[-1], said
        waited = record["waited_for"]
        assert waited is not None and {"rank", "kind", "expected", "seen", "where"} == set(waited), (rank, waited)
        assert (waited["rank"], waited["kind"], waited["expected"]) == waits[rank]
        assert waited["seen"] < waited["expected"]
        bell = f"for rank {waited['rank']}'s {waited['kind']} doorbell at {waited['where']}"
        values = f"expected >= {waited['expected']:#x}, seen {waited['seen']:#x}"
        assert bell in said[-1] and values in said[-1], (bell, values, said[-1])
    took = max(found[rank]["written"] for rank in found if rank != victim) - struck
    assert took < bound_s, f"noticed after {took:.1f} s"
    return took


@contextlib.contextmanager
def starting(fleet: Fleet) -> Iterator[list[BaseException]]:
    """Start a fleet whose start is going to fail, on another thread; the list holds the error afterwards."""
    errors: list[BaseException] = []

    def start() -> None:
        try:
            fleet.start()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        thread.join(30)
        assert not thread.is_alive(), "the start neither fails nor ends"
