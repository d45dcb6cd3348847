"""The file by which an operator finds the ranks of a fleet: RUN/fleet.json, written by whoever starts them.

Rule: light; the launcher and the admin tool import it, and neither imports an engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from whalez.errors import ConfigError

FILE = "fleet.json"
_SOCKET = re.compile(r"rank-(\d+)\.admin")


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the file."""

    fleet_id: str
    world: int
    model: str
    hub: str
    launcher_pid: int
    admin: tuple[str, ...]  #: in rank order, one per rank


def write_endpoints(run_dir: Path, endpoints: Endpoints) -> None:
    """Readers never see half a file."""
    part = run_dir / f"{FILE}.part"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(endpoints)) + b"\n")
    part.rename(run_dir / FILE)


def read_endpoints(run_dir: Path) -> dict[int, str]:
    """Admin address of every rank, from the file or, for ranks that no launcher started, from the sockets there are.

    Raises: ConfigError naming the folder or file.
    """
    path = run_dir / FILE
    try:
        told = msgspec.json.decode(path.read_bytes(), type=Endpoints)
    except FileNotFoundError:
        found = {int(match[1]): f"ipc://{run_dir}/{match[0]}" for match in _sockets(run_dir)}
        if not found:
            raise ConfigError(f"run: expected the run folder of a fleet, {run_dir} has no {FILE}") from None
        return dict(sorted(found.items()))
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"run: {path}: {error}") from None
    if len(told.admin) != told.world or not all(told.admin):
        raise ConfigError(f"run: {path}: admin: expected the addresses of {told.world} ranks, got {list(told.admin)}")
    if not told.admin:
        raise ConfigError(f"run: {path}: world: expected 1 or more ranks, got {told.world}")
    return dict(enumerate(told.admin))


def _sockets(run_dir: Path) -> Sequence[re.Match[str]]:
    return [match for path in run_dir.glob("rank-*.admin") if (match := _SOCKET.fullmatch(path.name))]
