"""What only a hub on real sockets can suffer: strangers, cut connections, prompts of megabytes beside heartbeats."""

import os
import pickle
import selectors
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from hub_helpers import TIMEOUT_S, PassOn, collect, hello, wait_until_failed

from helpers.ports import free_ports
from whalez.errors import HubError, PeerDied
from whalez.hub import wire
from whalez.hub.interface import HubLimits
from whalez.hub.sockets import SocketOptions
from whalez.hub.zmq_hub import ZmqHub
from whalez.rendezvous.events import Received
from whalez.rendezvous.messages import Bye, Mapped, Post, Ready, Refused


@pytest.fixture
def start():
    """Start the hubs at one address each; the fixture closes them."""
    hubs = []

    def start_all(addresses, sequencer=PassOn):
        world = len(addresses)
        hubs.extend(
            ZmqHub(rank, world, address, sequencer=None if rank else sequencer(world))
            for rank, address in enumerate(addresses)
        )

        def start_one(rank):
            hubs[rank].start(hello(rank, world), TIMEOUT_S)
            hubs[rank].mapped(TIMEOUT_S)

        with ThreadPoolExecutor(world) as pool:
            list(pool.map(start_one, range(world)))
        return hubs

    yield start_all
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda hub: hub.close(), hubs))


class Bomb:
    def __reduce__(self):
        return (os.kill, (os.getpid(), signal.SIGKILL))


def test_strangers_are_counted_refused_and_do_no_harm(start):
    address = f"tcp://127.0.0.1:{free_ports()}"
    hubs = start([address, address])
    garbage = [b"", b"WHLZ", pickle.dumps(Bomb()), os.urandom(500), wire.encode(Bye(rank=0), "x")[:-1]]
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 1000
    stranger.rcvtimeo = int(TIMEOUT_S * 1000)
    stranger.connect(address)
    try:
        for each in garbage:
            stranger.send(each)
        stranger.send_multipart([b"two", b"parts"])
        for message in (Mapped(rank=1), Bye(rank=1), Ready(rank=0, seq=0, count=0)):
            stranger.send(wire.encode(message, "an-earlier-start"))
            refused = wire.decode(stranger.recv()).message
            assert isinstance(refused, Refused)
            assert "an-earlier-start" in refused.reason
        late = hello(1, 2)
        stranger.send(wire.encode(late, late.entry.incarnation))
        assert wire.decode(stranger.recv()).message.field == "incarnation"
    finally:
        stranger.close()
        context.term()
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1000))
    hubs[1].send(Ready(rank=1, seq=0, count=7))
    assert collect(hubs[0], 1) == [Ready(rank=1, seq=0, count=7)]
    told = hubs[0].dropped()
    assert told["hub_bad_frames"] >= len(garbage) + 1  # libzmq takes raw bytes for frames of its first version
    assert told["hub_stale_frames"] == 4


class Proxy:
    """Forwards TCP between a member and the hub until `cut`, which closes every connection, then forwards new ones."""

    def __init__(self, target_port):
        self.target_port = target_port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.other = {}
        self.orders, self.order_out = socket.socketpair()
        self.selector.register(self.order_out, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    near, _ = self.listener.accept()
                    try:
                        far = socket.create_connection(("127.0.0.1", self.target_port))
                    except ConnectionRefusedError:  # the hub does not listen yet; the member tries again
                        near.close()
                        continue
                    for one, two in ((near, far), (far, near)):
                        self.other[one] = two
                        self.selector.register(one, selectors.EVENT_READ)
                elif key.fileobj is self.order_out:
                    order = self.order_out.recv(1)
                    for each in list(self.other):
                        self.drop(each)
                    if order == b"q":
                        return
                elif key.fileobj in self.other:
                    try:
                        data = key.fileobj.recv(1 << 16)
                        if data:
                            self.other[key.fileobj].sendall(data)
                            continue
                    except OSError:
                        pass
                    self.drop(key.fileobj)

    def drop(self, one):
        for each in (one, self.other.get(one)):
            if each in self.other:
                self.selector.unregister(each)
                del self.other[each]
                each.close()

    def cut(self):
        self.orders.send(b"c")

    def close(self):
        self.orders.send(b"q")
        self.thread.join(TIMEOUT_S)
        for each in (self.listener, self.orders, self.order_out):
            each.close()
        self.selector.close()


def test_a_cut_connection_ends_the_fleet_instead_of_losing_frames(start):
    """ZeroMQ would reconnect and go on as if nothing had been on its way."""
    port = free_ports()
    proxy = Proxy(port)
    try:
        hubs = start([f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{proxy.port}", f"tcp://127.0.0.1:{port}"])
        proxy.cut()
        for hub in hubs:
            failure = wait_until_failed(hub)
            assert isinstance(failure, PeerDied)
            assert failure.rank == 1
            assert "connection" in failure.how
    finally:
        proxy.close()


def test_prompts_of_16_megabytes_starve_nobody(start, tmp_path):
    address = f"ipc://{tmp_path}/hub.sock"
    hubs = start([address] * 3)
    tokens = bytes(wire.TOKENS_BYTES_MAX)
    for number in range(6):
        rank = number % 3
        hubs[rank].send(Post(rank=rank, request_id=str(number), tokens=tokens, prompt_hash="", max_tokens=1))
    for hub in hubs:
        assert sorted(each.request_id for each in collect(hub, 6)) == list("012345")
        assert hub.failure is None


def test_a_member_that_does_not_read_is_named_and_the_others_are_served(tmp_path):
    """A member made by hand, which says what a member says and then never looks at its socket again."""
    address = f"ipc://{tmp_path}/hub.sock"
    hub = ZmqHub(
        0, 2, address, sequencer=PassOn(2), limits=HubLimits(peer_count=16), options=SocketOptions(hwm_count=2)
    )
    deaf = hello(1, 2)
    context = zmq.Context()
    member = context.socket(zmq.DEALER)
    member.linger = 0
    member.rcvhwm = 2
    member.rcvtimeo = int(TIMEOUT_S * 1000)
    try:
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(hub.start, hello(0, 2), TIMEOUT_S)
            member.connect(address)
            member.send(wire.encode(deaf, deaf.entry.incarnation))
            started.result(TIMEOUT_S)
            member.send(wire.encode(Mapped(rank=1), deaf.entry.incarnation))
            hub.mapped(TIMEOUT_S)
        for number in range(40):
            if hub.failure is None:
                hub.send(Post(rank=0, request_id=str(number), tokens=bytes(1 << 16), prompt_hash="", max_tokens=1))
        failure = wait_until_failed(hub)
        assert (failure.rank, "does not read" in failure.how) == (1, True), failure
        got = [each.request_id for each in hub.drain()]
        assert len(got) > 16
        assert got == [str(number) for number in range(len(got))]
    finally:
        hub.close()
        member.close()
        context.term()


class Broken(PassOn):
    def step(self, event, now_ns, launch):
        if isinstance(event, Received) and isinstance(event.message, Ready):
            raise KeyError("a bug")
        return super().step(event, now_ns, launch)


def test_a_bug_in_the_sequencer_reaches_every_rank_as_the_loss_of_rank_0(start, tmp_path):
    hubs = start([f"ipc://{tmp_path}/hub.sock"] * 3, Broken)
    hubs[1].send(Ready(rank=1, seq=0, count=0))
    for hub in hubs:
        failure = wait_until_failed(hub)
        assert isinstance(failure, PeerDied)
        assert failure.rank == 0
        assert "a bug" in failure.how


def test_a_hub_closed_before_it_starts_opens_nothing(tmp_path):
    """A signal may close while another thread is about to start."""
    threads = threading.enumerate()
    hub = ZmqHub(0, 1, f"ipc://{tmp_path}/hub.sock", sequencer=PassOn(1))
    hub.close()
    with pytest.raises(HubError, match="closed"):
        hub.start(hello(0, 1), TIMEOUT_S)
    assert threading.enumerate() == threads
