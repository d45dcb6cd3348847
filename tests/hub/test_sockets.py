"""No socket of whalez without its limits and time-outs: in the source, and as sockets come into being."""

import ast
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from hub_helpers import TIMEOUT_S, PassOn, hello
from test_link import Rank as LinkRank

import whalez
from helpers.link_client import LinkClient
from whalez.hub.keys import load_keys, make_keys
from whalez.hub.sockets import SocketOptions
from whalez.hub.zmq_hub import ZmqHub

PACKAGE = Path(whalez.__file__).parent
#: Unlike the defaults and each other, so that a mixed-up or missing one shows.
OPTIONS = SocketOptions(
    hwm_count=251,
    message_bytes_max=1_000_003,
    linger_ms=907,
    send_timeout_ms=3,
    connect_timeout_ms=2011,
    reconnect_ms=53,
    reconnect_ms_max=1009,
    handshake_ms=5003,
    heartbeat_ms=503,
    heartbeat_timeout_ms=10_100,  # ZeroMQ keeps it in tenths of a second
)
SET_BY = {
    "hwm_count": (zmq.SNDHWM, zmq.RCVHWM),
    "message_bytes_max": (zmq.MAXMSGSIZE,),
    "linger_ms": (zmq.LINGER,),
    "send_timeout_ms": (zmq.SNDTIMEO,),
    "connect_timeout_ms": (zmq.CONNECT_TIMEOUT,),
    "reconnect_ms": (zmq.RECONNECT_IVL,),
    "reconnect_ms_max": (zmq.RECONNECT_IVL_MAX,),
    "handshake_ms": (zmq.HANDSHAKE_IVL,),
    "heartbeat_ms": (zmq.HEARTBEAT_IVL,),
    "heartbeat_timeout_ms": (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL),
}


def calls(tree):
    """Dotted name of every function called."""
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def is_made_by_zeromq(name):
    last = name.rpartition(".")[2]
    return last in ("Context", "shadow", "instance") or (last == "socket" and name != "socket.socket")


def test_one_file_makes_zeromq_sockets():
    makers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "zmq" in (text := path.read_text()) and any(map(is_made_by_zeromq, calls(ast.parse(text))))
    }
    assert makers == {"hub/sockets.py"}


def test_the_search_finds_what_it_looks_for():
    for line in ("context.socket(zmq.PUB)", "zmq.Context()", "zmq.asyncio.Context.instance()", "self._ctx.socket(k)"):
        assert any(map(is_made_by_zeromq, calls(ast.parse(line)))), line
    assert not any(map(is_made_by_zeromq, calls(ast.parse("socket.socket(socket.AF_UNIX)"))))


@pytest.fixture
def seen(monkeypatch):
    """(address, type, options) of every socket at the moment it binds or connects, in the thread that does."""
    found = []

    def spied(real):
        def call(self, address):
            values = {option: self.get(option) for options in SET_BY.values() for option in options}
            found.append((address, self.type, values))
            return real(self, address)

        return call

    for method in ("bind", "connect"):
        monkeypatch.setattr(zmq.Socket, method, spied(getattr(zmq.Socket, method)))
    return found


def is_of_the_library(address):
    """pyzmq's authenticator talks to ZeroMQ and to its own thread; neither leaves the process."""
    return address == "inproc://zeromq.zap.01" or address.endswith(".inproc")


def test_every_socket_of_hub_and_link_has_every_option(seen, tmp_path):
    assert set(SET_BY) == {each.name for each in dataclasses.fields(SocketOptions)}
    assert len(set(dataclasses.astuple(OPTIONS))) == len(SET_BY)
    make_keys(tmp_path / "keys")
    keys = load_keys(tmp_path / "keys")
    address = f"ipc://{tmp_path}/hub.sock"
    hubs = [
        ZmqHub(rank, 2, address, sequencer=None if rank else PassOn(2), options=OPTIONS, keys=keys) for rank in range(2)
    ]
    link = LinkRank(f"ipc://{tmp_path}/link", options=OPTIONS)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: hubs[rank].start(hello(rank, 2), TIMEOUT_S), range(2)))
        with LinkClient(f"ipc://{tmp_path}/link", options=OPTIONS) as client:
            client.status(TIMEOUT_S)
    finally:
        link.server.close()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda hub: hub.close(), hubs))
    ours = [each for each in seen if not is_of_the_library(each[0])]
    kinds = sorted(kind for _, kind, _ in ours)
    # ROUTERs of hub (bound twice) and link; two DEALERs per rank and the client's; a monitor of each but the beats' and
    # rank 0's own.
    assert kinds.count(zmq.ROUTER) == 3
    assert kinds.count(zmq.DEALER) == 5
    assert kinds.count(zmq.PAIR) == 4
    assert len(kinds) == 12
    for where, kind, values in ours:
        for field, options in SET_BY.items():
            for option in options:
                is_monitor = kind == zmq.PAIR and option == zmq.RCVHWM  # one that is full would stop the I/O thread
                expected = 0 if is_monitor else getattr(OPTIONS, field)
                assert values[option] == expected, (where, zmq.SocketType(kind), zmq.SocketOption(option))
