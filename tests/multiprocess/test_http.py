"""A real fleet behind one URL: answers, streams, refuses bad requests, and stays undisturbed by them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from helpers.machine import Pauses
from helpers.ports import free_ports
from whalez.errors import PeerDied
from whalez.fleet import Fleet

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def served(tiny: Path, start: Callable[..., Fleet]) -> tuple[Fleet, int]:
    port = free_ports(3)
    return start(tiny, 2, listen=f"127.0.0.1:{port}"), port


def post(port: int, **body: object) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"temperature": 0, **body}, timeout=30)


def test_text_ids_and_stream_give_the_same_answer_at_every_endpoint(served: tuple[Fleet, int]) -> None:
    fleet, port = served
    text = "Call me Ishmael. " * 20
    expected = fleet.generate(text, max_tokens=6, lane="local")
    for at in (port, port + 1, port + 2):
        whole = post(at, prompt=text, max_tokens=6).json()
        assert whole["choices"][0]["text"] == expected.text
        assert whole["usage"] == {"prompt_tokens": len(text), "completion_tokens": 6, "total_tokens": len(text) + 6}
        assert post(at, prompt=list(text.encode()), max_tokens=6).json()["choices"][0]["text"] == expected.text
        pieces = []
        body = {"prompt": text, "max_tokens": 6, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"http://127.0.0.1:{at}/v1/completions", json=body, timeout=30) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        pieces = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
        assert "".join(pieces) == expected.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [0, 512]}, "prompt"),  # out of vocabulary
        ({"prompt": [0, -1]}, "prompt"),
        ({"prompt": [1] * 4096}, "prompt"),  # no room for a token
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -3}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({}, "prompt"),
    ],
)
def test_a_bad_request_is_a_400_that_names_the_field(
    served: tuple[Fleet, int], body: dict[str, object], param: str
) -> None:
    fleet, port = served
    before = fleet.pids()
    answer = post(port, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert fleet.pids() == before
    assert len(fleet.generate("still here", max_tokens=2, stop_tokens=()).tokens) == 2


def test_health_names_every_rank(served: tuple[Fleet, int]) -> None:
    _, port = served
    answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()["ranks"]) == 2


def test_a_client_that_leaves_frees_its_slot(served: tuple[Fleet, int]) -> None:
    fleet, port = served
    body = {"prompt": "a", "max_tokens": 3000, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"http://127.0.0.1:{port + 1}/v1/completions", json=body, timeout=30) as stream:
        next(stream.iter_lines())
    deadline = time.monotonic() + 60
    while any(status is None or status.running for status in fleet.status()):
        assert time.monotonic() < deadline, "the request is still running"
        time.sleep(0.05)


def test_a_front_that_has_ended_is_told_by_its_rank(tiny: Path, start: Callable[..., Fleet]) -> None:
    """The rank serves on, and whoever looks after the fleet hears that one of its URLs is dead."""
    port = free_ports(2)
    fleet = start(tiny, 1, listen=f"127.0.0.1:{port}")
    (rank,) = (pid for name, pid in fleet.pids().items() if name == "rank 0")
    (front,) = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
    os.kill(int(front), signal.SIGKILL)
    deadline = time.monotonic() + 60
    told = "rank 0: its front has ended with -9"
    while (health := httpx.get(f"http://127.0.0.1:{port}/health", timeout=30)).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert told in health.json()["trouble"]
    assert [status.trouble for status in fleet.status() if status is not None] == [told]


def last_words(port: int, stream: bool, begun: list[int]) -> tuple[int, str, float]:
    """Of a request that does not end by itself: status, error message, and when it came. Streams note their begin."""
    body = {"prompt": "a", "max_tokens": 4000, "stream": stream, "temperature": 0}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=90) as answer:
        lines = []
        for line in answer.iter_lines():
            if line and not lines and stream:
                begun.append(port)
            if line:
                lines.append(line.removeprefix("data: "))
    last = lines[-1] if lines else "nothing"
    message = json.loads(last)["error"]["message"] if last.startswith("{") else f"port {port}: {last}"
    return answer.status_code, message, time.monotonic()


def test_every_client_hears_which_rank_was_killed(tiny: Path, tmp_path: Path, start: Callable[..., Fleet]) -> None:
    """Behind the fleet's front and behind each rank's own, whole and streamed, on the killed rank and beside it."""
    world, victim = 3, 1
    port = free_ports(1 + world)
    fleet = start(tiny, world, listen=f"127.0.0.1:{port}", run_dir=tmp_path, max_ctx=4096, cache_tokens=4 * 4096)
    both = (False, True)
    behind_one = [(port, stream) for stream in both for _ in range(world)]  # the least loaded rank takes the next
    behind_own = [(port + 1 + rank, stream) for rank in range(world) for stream in both]
    begun: list[int] = []

    def until_running(total: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            running = [status.running for status in fleet.status() if status is not None]
            if sum(running) == total and min(running) > 0:
                return
            assert time.monotonic() < deadline, running
            assert [answer.result() for answer in answers if answer.done()] == []
            time.sleep(0.02)

    answers: list[Future[tuple[int, str, float]]] = []
    with ThreadPoolExecutor(len(behind_one) + len(behind_own)) as pool:
        answers += [pool.submit(last_words, *each, begun) for each in behind_one]
        until_running(2 * world)
        answers += [pool.submit(last_words, *each, begun) for each in behind_own]
        until_running(4 * world)
        while len(begun) < 2 * world:
            time.sleep(0.02)
        with Pauses() as pauses:
            killed = time.monotonic()
            os.kill(fleet.pids()[f"rank {victim}"], signal.SIGKILL)
            told = [answer.result() for answer in answers]
    for (_, stream), (status, message, at) in zip(behind_one + behind_own, told, strict=True):
        assert status == (200 if stream else 503), (message, told)
        assert f"rank {victim}" in message
        assert at - killed < 5 + pauses.late_s
    with pytest.raises(PeerDied, match=f"rank {victim} died: was killed by SIGKILL"):
        fleet.wait()


def test_clients_of_a_rank_that_does_not_leave_hear_of_the_stop(
    tiny: Path, tmp_path: Path, start: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a rank is in a long launch; a stopped process stands for that, it leaves as little."""
    monkeypatch.setattr("whalez.fleet.FRONT_LEAVE_S", 5.0)  # in which a busy machine, too, lets them tell
    port = free_ports(3)
    fleet = start(tiny, 2, listen=f"127.0.0.1:{port}", run_dir=tmp_path, max_ctx=4096, cache_tokens=4 * 4096)
    begun: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(last_words, each, stream, begun) for each in (port, port + 2) for stream in (False, True)
        ]
        deadline = time.monotonic() + 60
        while sum(status.running for status in fleet.status() if status is not None) < 4 or len(begun) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for rank in range(2):
            os.kill(fleet.pids()[f"rank {rank}"], signal.SIGSTOP)
        fleet.stop()
        told = [answer.result() for answer in answers]
    for stream, (status, message, _) in zip((False, True) * 2, told, strict=True):
        assert status == (200 if stream else 503), message
        assert "its process has ended" in message
    for log in tmp_path.glob("*.log"):
        assert "Traceback" not in log.read_text(), log
