"""Ranks that a test starts by itself, without the launcher."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import wait_until
from helpers.link_client import LinkClient
from whalez.config import setting_flags
from whalez.errors import RequestError, Unavailable
from whalez.hub.requests import Done, Failed, Submit
from whalez.serve.completions import pack_tokens
from whalez.serve.links import link_address
from whalez.warm import kernel_environment

PROMPT = list(range(200)) * 2


class ByHand:
    """A world of ranks without a supervisor, as Slurm or systemd would start them."""

    def __init__(self, model: Path, folder: Path, hub: str, fleet_id: str, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.model, self.folder, self.hub, self.fleet_id = model, folder, hub, fleet_id
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, world: int, before: list[str] | None = None) -> None:
        command = [*(before or [sys.executable, "-m", "whalez.rank"]), *(["--"] if before else [])]
        command += ["--rank", str(rank), "--world", str(world), "--hub", self.hub, "--model", str(self.model)]
        command += ["--run", str(self.folder), "--fleet-id", self.fleet_id, "--start-timeout", "60", "--grace", "100"]
        command += setting_flags({"stuck_s": 3.0, **self.settings})
        command += ["--threads", "1"]
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / f"rank-{rank}.log", "wb") as log:
            env = {**os.environ, **kernel_environment(os.environ)}
            self.processes[rank] = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def link(self, rank: int) -> LinkClient:
        return LinkClient(link_address(self.folder, rank))

    def wait_serving(self) -> None:
        for rank in self.processes:
            link = self.link(rank)
            try:

                def serves(link: LinkClient = link) -> bool:
                    try:
                        return link.status(2.0).state == "serving"
                    except Unavailable:
                        return False

                wait_until(serves, 60, lambda rank=rank: (self.folder / f"rank-{rank}.log").read_text())
            finally:
                link.close()

    def running(self, rank: int) -> int:
        link = self.link(rank)
        try:
            return link.status(10.0).running
        finally:
            link.close()

    def generate(self, rank: int, lane: str, max_tokens: int = 4) -> tuple[int, ...]:
        link = self.link(rank)
        submit = Submit(
            request_id=secrets.token_hex(8),
            tokens=pack_tokens(PROMPT),
            max_tokens=max_tokens,
            temperature=0.0,
            top_p=1.0,
            seed=0,
            stop_tokens=(),
            lane=lane,
        )
        try:
            for response in link.submit(submit):
                if isinstance(response, Done):
                    return response.tokens
                if isinstance(response, Failed):
                    raise RequestError(response.reason)
        finally:
            link.close()
        raise AssertionError("the link closed")

    def refused(self, rank: int, lane: str, max_tokens: int = 4) -> None:
        """Generate what cannot end well."""
        with pytest.raises(RequestError):
            self.generate(rank, lane, max_tokens)

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
