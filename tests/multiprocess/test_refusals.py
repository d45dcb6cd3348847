"""Ten thousand requests that come to nothing: slots, descriptors and memory stay flat, the next one is on time."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from helpers.faults import wait_until
from helpers.link_client import LinkClient
from helpers.small import SETTINGS
from whalez.fleet import Fleet
from whalez.hub.requests import Done, Failed, Response, Submit
from whalez.serve.completions import pack_tokens

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(300)]

COUNT = 10_000
PROMPT = list(range(200)) * 2
ROUND = 40


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bad(kind: int) -> Submit:
    """One request of each way to come to nothing; the last two are good and are cancelled."""
    tokens, changes = pack_tokens(PROMPT), {}
    match kind:
        case 0:
            tokens = pack_tokens([])
        case 1:
            tokens = pack_tokens([1, 2, 10**6])
        case 2:
            tokens = pack_tokens([1] * 5000)
        case 3:
            changes = {"max_tokens": 0}
        case 4:
            changes = {"lane": "sideways"}
        case 5:
            changes = {"temperature": -1.0}
        case 6:
            changes = {"lane": "whale", "max_tokens": 1000}
        case 7:
            changes = {"lane": "local", "max_tokens": 1000}
    return Submit(
        request_id=secrets.token_hex(8),
        tokens=tokens,
        **({"max_tokens": 4, "stop_tokens": ()} | changes),  # type: ignore[arg-type]
    )


def last_of(responses: Iterable[Response]) -> Response:
    *_, last = responses
    return last


def test_ten_thousand_refusals_and_cancels_leave_nothing(tiny: Path, tmp_path: Path) -> None:
    with Fleet(tiny, 2, run_dir=tmp_path / "run", **SETTINGS) as fleet:  # type: ignore[arg-type]

        def latency() -> float:
            begun = time.monotonic()
            fleet.generate(PROMPT, max_tokens=4, poster=0, lane="whale", stop_tokens=())
            return time.monotonic() - begun

        links = [LinkClient(address) for address in fleet.links]
        pids = [fleet.pids()[f"rank {rank}"] for rank in range(2)]

        def storm(count: int) -> None:
            for first in range(0, count, ROUND):
                open_ = []
                for number in range(first, first + ROUND):
                    link, request = links[number % 2], bad(number // 2 % 8)
                    open_.append(link.submit(request))
                    if number // 2 % 8 >= 6:
                        link.cancel(request.request_id)
                for each in open_:
                    last = last_of(each)
                    assert isinstance(last, Failed), last

        storm(400)  # buffers and pools have their size
        latency()
        usual = sorted(latency() for _ in range(9))
        before = [(descriptors(pid), resident_bytes(pid)) for pid in pids]
        storm(COUNT)
        wait_until(
            lambda: all(s is not None and not (s.running or s.waiting or s.cache_used) for s in fleet.status()),
            10,
            fleet.status,
        )
        after = [(descriptors(pid), resident_bytes(pid)) for pid in pids]
        for (fds, memory), (fds_now, memory_now) in zip(before, after, strict=True):
            assert fds_now <= fds
            assert memory_now - memory < 8 * 2**20, (memory, memory_now)
        again = sorted(latency() for _ in range(9))
        assert again[4] < 2 * usual[4] + 0.05, (usual, again)
        done = last_of(links[1].submit(Submit(request_id="good", tokens=pack_tokens(PROMPT), max_tokens=4)))
        assert isinstance(done, Done)
        for link in links:
            link.close()
