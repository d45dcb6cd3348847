"""The request link: submit, stream, cancel, status; clients and ranks that vanish; garbage."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq
from hub_helpers import TIMEOUT_S, assert_none_blocked

from helpers.link_client import LinkClient
from helpers.machine import Pauses
from helpers.ports import free_ports
from whalez.errors import HubError, RequestError, Unavailable
from whalez.hub import wire
from whalez.hub.requests import CancelRequest, Done, Failed, Report, Status, Submit, TokenOut
from whalez.hub.zmq_link import AsyncLinkClient, LinkServer

STATUS = Status(
    query_id="",
    rank=3,
    world=4,
    incarnation="first",
    pid=1,
    state="serving",
    launch=1,
    launch_age_s=0.0,
    healthy=True,
    trouble="",
    running=0,
    waiting=0,
    cache_used=0,
    cache_total=1,
    max_ctx=10,
    vocab_size=10,
    model="m",
)
REPORT = Report(lane="local", why="short", poster=3)


def submit(request_id, max_tokens=3, tokens=b"\1\0\0\0"):
    return Submit(request_id=request_id, tokens=tokens, max_tokens=max_tokens)


def done(request_id, tokens):
    return Done(request_id=request_id, finish_reason="length", tokens=tokens, prompt_tokens=1, report=REPORT)


class Rank:
    """Answers each Submit with max_tokens tokens; max_tokens 0 is never answered, negative raises."""

    def __init__(self, address, **kwargs):
        self.seen = []
        self.news = threading.Condition()
        self.status = STATUS
        self.asked_count = 0
        self.server = LinkServer(address, self.on_request, self.give_status, **kwargs)

    def give_status(self):
        with self.news:
            self.asked_count += 1
            self.news.notify_all()
        return self.status

    def on_request(self, client, request):
        with self.news:
            self.seen.append((client, request))
            self.news.notify_all()
        if isinstance(request, CancelRequest):
            self.server.reply(client, Failed(request_id=request.request_id, kind="cancelled", reason="asked to"))
            return
        if request.max_tokens < 0:
            raise ValueError("no such request")
        if request.request_id == "early":
            raise Unavailable("the rank is starting")
        if request.max_tokens == 0:
            return
        for index in range(request.max_tokens):
            self.server.reply(client, TokenOut(request_id=request.request_id, index=index, token=index * index))
        self.server.reply(client, done(request.request_id, tuple(i * i for i in range(request.max_tokens))))

    def wait_seen(self, wanted, timeout_s=TIMEOUT_S):
        with self.news:
            assert self.news.wait_for(lambda: any(wanted(each) for _, each in self.seen), timeout_s), self.seen
            return next((client, each) for client, each in self.seen if wanted(each))


@pytest.fixture(params=["ipc", "tcp"])
def address(request, tmp_path):
    if request.param == "ipc":
        return f"ipc://{tmp_path}/rank-3.sock"
    return f"tcp://127.0.0.1:{free_ports()}"


@pytest.fixture
def ipc(tmp_path):
    return f"ipc://{tmp_path}/rank-3.sock"


@pytest.fixture
def closing():
    made = []
    yield lambda thing: made.append(thing) or thing
    for thing in reversed(made):
        getattr(thing, "server", thing).close()


def test_submit_streams_in_order_and_ends(address, closing):
    closing(Rank(address))
    client = closing(LinkClient(address))
    responses = list(client.submit(submit("r", 50)))
    assert [each.token for each in responses[:-1]] == [i * i for i in range(50)]
    assert [each.index for each in responses[:-1]] == list(range(50))
    assert responses[-1] == done("r", tuple(i * i for i in range(50)))


def test_many_requests_at_once_from_many_threads(ipc, closing):
    closing(Rank(ipc))
    client = closing(LinkClient(ipc))
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(lambda i: list(client.submit(submit(f"r{i}", i + 1)))[-1], range(40)))
    assert [end.request_id for end in ends] == [f"r{i}" for i in range(40)]
    assert [len(end.tokens) for end in ends] == [i + 1 for i in range(40)]


def test_a_prompt_of_4_million_tokens(ipc, closing):
    rank = closing(Rank(ipc))
    client = closing(LinkClient(ipc))
    tokens = os.urandom(1 << 20) * 16
    assert isinstance(list(client.submit(submit("r", 1, tokens)))[-1], Done)
    _, seen = rank.wait_seen(lambda each: each.request_id == "r")
    assert seen.tokens == tokens
    with pytest.raises(RequestError, match="tokens"):
        client.submit(submit("long", 1, tokens + b"\0\0\0\0"))


def test_cancel_and_leaving_the_iterator(ipc, closing):
    rank = closing(Rank(ipc))
    client = closing(LinkClient(ipc))
    stream = client.submit(submit("a", 0))
    rank.wait_seen(lambda each: each.request_id == "a")
    client.cancel("a")
    assert [(each.kind, each.request_id) for each in stream] == [("cancelled", "a")]
    with_tokens = client.submit(submit("b", 0))
    owner, _ = rank.wait_seen(lambda each: each.request_id == "b")
    rank.server.reply(owner, TokenOut(request_id="b", index=0, token=1))
    assert next(with_tokens).token == 1
    with_tokens.close()
    rank.wait_seen(lambda each: each == CancelRequest(request_id="b"))


def test_status_is_answered_while_the_loop_is_stuck(ipc, closing):
    """Nobody replies to the request, as when the loop hangs; the link's thread still answers."""
    rank = closing(Rank(ipc))
    client = closing(LinkClient(ipc, silence_s=0.5))
    stream = client.submit(submit("r", 0))
    owner, _ = rank.wait_seen(lambda each: each.request_id == "r")
    rank.status = msgspec.structs.replace(STATUS, healthy=False, trouble="rank 2 stalled at window 7")
    status = client.status(TIMEOUT_S)
    assert (status.rank, status.healthy, status.trouble) == (3, False, "rank 2 stalled at window 7")
    with rank.news:  # the client's own questions, the first more than a second later: answered, so nothing fails
        assert rank.news.wait_for(lambda: rank.asked_count >= 3, TIMEOUT_S)
    rank.server.reply(owner, done("r", ()))
    assert list(stream) == [done("r", ())]


def test_what_on_request_raises_is_answered(ipc, closing):
    closing(Rank(ipc))
    client = closing(LinkClient(ipc))
    (failed,) = client.submit(submit("r", -1))
    assert (failed.kind, failed.reason) == ("internal", "ValueError: no such request")
    (failed,) = client.submit(submit("early", 1))
    assert (failed.kind, failed.reason) == ("unavailable", "the rank is starting")
    assert isinstance(list(client.submit(submit("s", 1)))[-1], Done)


def test_garbage_is_counted_and_dropped_and_the_link_still_serves(address, closing):
    rank = closing(Rank(address))
    client = closing(LinkClient(address))

    class Bomb:
        def __reduce__(self):
            return (os.kill, (os.getpid(), signal.SIGKILL))

    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 1000
    stranger.connect(address)
    garbage = [b"", b"x" * 5, pickle.dumps(Bomb()), wire.encode_link(done("r", ())), wire.encode_link(STATUS)[:-1]]
    for each in garbage:
        stranger.send(each)
    stranger.send_multipart([b"a", b"b"])
    stranger.close()
    context.term()  # everything was handed over
    if address.startswith("tcp"):
        host, port = address[len("tcp://") :].split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1000))
    deadline = time.monotonic() + TIMEOUT_S
    while rank.server.dropped()["link_bad_frames"] < len(garbage) + 1:
        assert time.monotonic() < deadline, rank.server.dropped()["link_bad_frames"]
        client.status(TIMEOUT_S)  # a turn of the link's thread
    assert isinstance(list(client.submit(submit("r", 2)))[-1], Done)
    assert [each.request_id for _, each in rank.seen] == ["r"]


VANISHING_CLIENT = """
import sys
from helpers.link_client import LinkClient
from whalez.hub.requests import Submit
client = LinkClient(sys.argv[1])
for name in "ab":
    client.submit(Submit(request_id=name, tokens=bytes(4), max_tokens=0))
input()
"""


@pytest.mark.multiprocess
def test_requests_of_a_killed_client_are_cancelled(ipc, closing):
    rank = closing(Rank(ipc))
    child = subprocess.Popen(
        [sys.executable, "-c", VANISHING_CLIENT, ipc],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        owner, _ = rank.wait_seen(lambda each: each.request_id == "b")
    finally:
        child.kill()
        child.wait(10)
        child.stdin.close()
    deadline = time.monotonic() + TIMEOUT_S
    index = 0
    while rank.server.dropped()["link_clients_dropped"] == 0:
        rank.server.reply(owner, TokenOut(request_id="a", index=index, token=0))
        index += 1
        assert time.monotonic() < deadline
        with rank.news:  # a rank makes tokens; only by sending one does it learn that nobody is there
            rank.news.wait(0.01)
    for name in "ab":
        rank.wait_seen(lambda each, name=name: each == CancelRequest(request_id=name))


def test_a_client_that_does_not_read_is_dropped(ipc, closing):
    from whalez.hub.sockets import SocketOptions

    rank = closing(Rank(ipc, client_queue_max=50, options=SocketOptions(hwm_count=4)))
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.rcvhwm = 4
    deaf.linger = 0
    deaf.connect(ipc)
    try:
        deaf.send(wire.encode_link(submit("r", 0)))
        owner, _ = rank.wait_seen(lambda each: each.request_id == "r")
        took = []
        big = tuple(range(20_000))
        with Pauses() as pauses:
            for _ in range(300):
                begin = time.monotonic()
                rank.server.reply(owner, done("x", big))
                took.append(time.monotonic() - begin)
        rank.wait_seen(lambda each: each == CancelRequest(request_id="r"))
        assert_none_blocked(took, pauses)
        assert rank.server.dropped()["link_clients_dropped"] == 1
    finally:
        deaf.close()
        context.term()


def test_no_rank_there(ipc, closing):
    client = closing(LinkClient(ipc, connect_timeout_s=0.2))
    (failed,) = client.submit(submit("r"))
    assert failed.kind == "unavailable"
    assert ipc in failed.reason
    with pytest.raises(Unavailable, match="no status"):
        client.status(0.2)


def test_a_rank_that_comes_later_is_waited_for(ipc, closing):
    client = closing(LinkClient(ipc, connect_timeout_s=TIMEOUT_S))
    stream = client.submit(submit("r", 1))
    closing(Rank(ipc))
    assert isinstance(list(stream)[-1], Done)


def test_a_silent_rank_fails_the_open_requests(tmp_path, closing):
    """Somebody accepts and shakes hands, and then says nothing."""
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as mute:
        mute.bind(f"ipc://{tmp_path}/mute")
        client = closing(LinkClient(f"ipc://{tmp_path}/mute", silence_s=0.3))
        (failed,) = client.submit(submit("r", 0))
        client.close()
    assert failed.kind == "unavailable"
    assert "has not answered" in failed.reason


@pytest.mark.parametrize("tokens", [0, 3, 5000])
def test_the_last_words_of_a_rank_come_before_its_end(ipc, closing, tokens):
    """It has sent all of them when it is gone; what it did not answer ends at once, not after a time of silence."""
    rank = Rank(ipc)
    client = closing(LinkClient(ipc, silence_s=TIMEOUT_S))
    said = client.submit(submit("said", tokens))
    unsaid = client.submit(submit("unsaid", 0))
    rank.wait_seen(lambda each: each.request_id == "unsaid")
    rank.server.close()
    if tokens:
        assert [each.token for each in said if isinstance(each, TokenOut)] == [i * i for i in range(tokens)]
    began = time.monotonic()
    (failed,) = unsaid
    assert (failed.kind, failed.reason) == ("gone", "it has closed the link")
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_a_restarted_rank_gets_what_the_earlier_one_never_got(ipc, closing):
    rank = Rank(ipc)
    client = closing(LinkClient(ipc, connect_timeout_s=TIMEOUT_S))
    old = client.submit(submit("old", 0))
    rank.wait_seen(lambda each: each.request_id == "old")
    rank.server.close()
    (failed,) = old
    assert failed.kind == "gone"
    new = client.submit(submit("new", 1))
    closing(Rank(ipc))
    assert isinstance(list(new)[-1], Done)


def test_close_ends_what_waits(ipc, closing):
    rank = closing(Rank(ipc))
    client = LinkClient(ipc)
    stream = client.submit(submit("r", 0))
    with pytest.raises(RequestError, match="open already"):
        client.submit(submit("r", 0))
    rank.wait_seen(lambda each: each.request_id == "r")
    client.close()
    client.close()
    (failed,) = stream
    assert failed.kind == "unavailable"
    with pytest.raises(Unavailable):
        client.submit(submit("s"))


def test_address_in_use_is_named(address, closing):
    closing(Rank(address))
    with pytest.raises(HubError, match="in use"):
        Rank(address)


def test_async_client(ipc, closing):
    rank = closing(Rank(ipc))

    async def talk():
        async with AsyncLinkClient(ipc) as client:

            async def one(name, count):
                return [each async for each in client.submit(submit(name, count))]

            streams = await asyncio.gather(*(one(f"r{i}", i + 1) for i in range(10)))
            assert [len(each) for each in streams] == [i + 2 for i in range(10)]
            assert all(isinstance(each[-1], Done) for each in streams)
            assert (await client.status(TIMEOUT_S)).rank == 3
            stream = client.submit(submit("c", 0))
            await asyncio.to_thread(rank.wait_seen, lambda each: each.request_id == "c")
            await client.cancel("c")
            assert [each.kind async for each in stream] == ["cancelled"]
            left = client.submit(submit("d", 0))
            waiting = asyncio.ensure_future(anext(left))
            await asyncio.to_thread(rank.wait_seen, lambda each: each.request_id == "d")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.to_thread(rank.wait_seen, lambda each: each == CancelRequest(request_id="d"))
            open_one = client.submit(submit("e", 0))
        assert [each.kind async for each in open_one] == ["unavailable"]
        with pytest.raises(Unavailable):
            await client.status(0.1)

    asyncio.run(asyncio.wait_for(talk(), TIMEOUT_S))
