"""Frames between a rank and the hub that get lost or come twice, and a connection that is cut and made anew.

The next beat says how many messages went before it, and over which connection.
"""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hub_helpers import TIMEOUT_S, PassOn, collect, hello, wait_until_failed

from helpers.proxy import FrameProxy
from whalez.errors import HubError, PeerDied, WhalezError
from whalez.hub import wire
from whalez.hub.sockets import SocketOptions
from whalez.hub.zmq_hub import ZmqHub
from whalez.rendezvous.messages import Ready


class Frames:
    """What the proxy before rank 1 does with the frames of one kind in one direction."""

    def __init__(self, kind, to_hub):
        self.kind, self.to_hub = kind, to_hub
        self.todo = []
        self.passed = threading.Semaphore(0)

    def decide(self, to_hub, body):
        message = wire.decode(body).message
        if to_hub != self.to_hub or not isinstance(message, self.kind):
            return "pass"
        self.passed.release()
        return self.todo.pop() if self.todo else "pass"


@pytest.fixture
def two(request, tmp_path):
    """Two hubs, rank 1 through a proxy: (hubs, frames). A third parameter is its wait before it connects again, ms."""
    frames = Frames(*request.param[:2])
    options = SocketOptions(reconnect_ms=request.param[2]) if request.param[2:] else None
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    proxy = FrameProxy(port, frames.decide)
    hubs = [
        ZmqHub(0, 2, f"tcp://127.0.0.1:{port}", sequencer=PassOn(2)),
        ZmqHub(1, 2, f"tcp://127.0.0.1:{proxy.port}", options=options),
    ]

    def start(rank):
        hubs[rank].start(hello(rank, 2), TIMEOUT_S)
        hubs[rank].mapped(TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, range(2)))
    yield hubs, frames
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ZmqHub.close, hubs))
    proxy.close()


def send(hubs, sender, count):
    """Ready from `sender`; PassOn hands an even seq to rank 0 and an odd one to rank 1."""
    for number in range(count):
        hubs[sender].send(Ready(rank=sender, seq=1 - sender, count=number))


@pytest.mark.parametrize("two", [(Ready, True), (Ready, False)], indirect=True, ids=["to hub", "from hub"])
@pytest.mark.parametrize(("action", "change"), [("drop", -1), ("twice", 1)])
def test_a_frame_lost_or_repeated_ends_the_world_by_name(two, action, change):
    hubs, frames = two
    sender = 1 if frames.to_hub else 0
    send(hubs, sender, 3)
    collect(hubs[1 - sender], 3)
    frames.todo.append(action)
    send(hubs, sender, 2)
    for hub in hubs:
        wait_until_failed(hub)
    why = f"its connection to the hub lost or repeated frames: 5 sent, {5 + change} arrived"
    for hub in hubs:
        assert why in str(hub.failure)
        assert "rank 1" in str(hub.failure)
    assert isinstance(hubs[0].failure, PeerDied)
    assert isinstance(hubs[1].failure, PeerDied if frames.to_hub else HubError)


@pytest.mark.parametrize("two", [(wire.Beat, True), (wire.Beat, False)], indirect=True, ids=["to hub", "from hub"])
@pytest.mark.parametrize("action", ["drop", "twice"])
def test_a_beat_lost_or_repeated_harms_nobody(two, action):
    hubs, frames = two
    send(hubs, 1, 3)
    collect(hubs[0], 3)
    while frames.passed.acquire(blocking=False):
        pass  # of beats before
    frames.todo += [action] * 2
    for _ in range(6):  # those two and some more that agree
        assert frames.passed.acquire(timeout=TIMEOUT_S)
    assert not frames.todo
    send(hubs, 0, 3)
    collect(hubs[1], 3)
    assert [hub.failure for hub in hubs] == [None, None]


@pytest.mark.parametrize(
    "two",
    [(Ready, True), (Ready, False), (Ready, True, 400)],
    indirect=True,
    ids=["to hub", "from hub", "slow to come back"],
)
@pytest.mark.parametrize("after_beat_s", [0.0, 0.15])  # of a rank's beats, two a second
def test_a_cut_connection_is_told_to_the_rank_that_lost_it(two, after_beat_s):
    """While others go on sending to it, which is how the hub may notice first that nobody is there."""
    hubs, frames = two
    send(hubs, 1 if frames.to_hub else 0, 1)
    assert frames.passed.acquire(timeout=TIMEOUT_S)
    time.sleep(after_beat_s)
    frames.todo.append("cut")
    send(hubs, 1 if frames.to_hub else 0, 1)
    assert frames.passed.acquire(timeout=TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while hubs[0].failure is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(WhalezError):  # it failed meanwhile
            send(hubs, 0, 1)
        time.sleep(0.01)
    wait_until_failed(hubs[1])
    for hub in hubs:
        assert isinstance(hub.failure, PeerDied)
        assert (hub.failure.rank, hub.failure.how) == (1, "its connection to the hub was cut")
