"""Keys at work, and strangers at every port: real sockets, and real processes where one of them must end by itself."""

import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from hub_helpers import TIMEOUT_S, PassOn, collect, hello
from test_hub_processes import Rank, leave
from test_link import Rank as LinkRank
from test_link import done, submit

from helpers.link_client import LinkClient
from helpers.machine import Pauses
from helpers.ports import free_ports
from whalez.errors import ConfigError, FleetRefused, HubError
from whalez.hub import sockets, wire
from whalez.hub.connections import listen
from whalez.hub.keys import load_keys, make_keys, secure_client, sender_key
from whalez.hub.requests import Done
from whalez.hub.sockets import SocketOptions
from whalez.hub.zmq_hub import ZmqHub
from whalez.rendezvous.messages import Bye, Mapped, Post, Ready

SLOW = pytest.mark.slow


def make(folder):
    make_keys(folder)
    return folder


@pytest.fixture
def keys(tmp_path):
    return make(tmp_path / "keys")


@pytest.fixture
def tcp_address():
    return f"tcp://127.0.0.1:{free_ports()}"


def wait_for(is_so, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.005)


# ---- processes -----------------------------------------------------------------------------------------------------
@pytest.fixture
def ranks():
    made = []
    yield made
    for each in made:
        each.end()


def _other_rank_key(keys, tmp_path):
    other = make(tmp_path / "other")
    (other / "hub.key").write_bytes((keys / "hub.key").read_bytes())
    (other / "hub.key_secret").unlink()
    return other


def _other_hub_key(keys, tmp_path):
    other = make(tmp_path / "other")
    (other / "rank.key_secret").write_bytes((keys / "rank.key_secret").read_bytes())
    return other


def _none(keys, tmp_path):
    return None


def _hub_has_none(keys, tmp_path):
    return keys


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("bad_keys", "hub_says", "rank_says"),
    [
        pytest.param(_other_rank_key, "its key is not in the allow-list", "does not accept our key", id="wrong-key"),
        pytest.param(_other_hub_key, "socket for another one", "hub.key its key", id="wrong-hub", marks=SLOW),
        pytest.param(_none, "key", "wants a key, and we have none: no --keys were given", id="no-key"),
        pytest.param(_hub_has_none, "keys", "takes no keys, and we have some", id="hub-without", marks=SLOW),
    ],
)
@pytest.mark.parametrize("kind", ["tcp", pytest.param("ipc", marks=SLOW)])
def test_a_rank_that_may_not_join_is_named_at_both_ends_and_both_end(
    ranks, keys, tmp_path, tcp_address, kind, bad_keys, hub_says, rank_says
):
    """The rank ends as soon as it knows, the hub when its start is over; nothing hangs at exit.

    A rank that meets another fleet's hub may yet meet its own: it tries until its own start is over.
    """
    address = tcp_address if kind == "tcp" else f"ipc://{tmp_path}/hub.sock"
    start_s = 3.0
    rank_start_s = 10.0 if bad_keys is _other_hub_key else 60.0
    has_none = bad_keys is _hub_has_none
    folder = bad_keys(keys, tmp_path)
    one = Rank(1, 2, address, **({"keys": folder} if folder else {}), start_s=rank_start_s)
    ranks.append(one)
    one.fact("incarnation")  # it is there, and tries once a second at least, when the hub's time begins
    zero = Rank(0, 2, address, **({} if has_none else {"keys": keys}), start_s=start_s)
    ranks.append(zero)
    zero.fact("incarnation")
    with Pauses() as pauses:
        began = time.monotonic()
        refused = one.fact("error")
        assert rank_says in refused["text"]
        assert address in refused["text"]
        assert refused["error"] == ("HubError" if bad_keys is _other_hub_key else "FleetRefused")
        assert one.process.wait(60) == 3
        told = zero.fact("error")
        assert told["error"] == "HubError"
        assert "rank 1 is missing" in told["text"]
        assert hub_says in told["text"].partition("refused: ")[2]
        assert zero.process.wait(60) == 3
        took_s = time.monotonic() - began
    assert took_s < (rank_start_s if bad_keys is _other_hub_key else start_s) + 3 + pauses.late_s


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "world"), [("tcp", 2), pytest.param("tcp", 8, marks=SLOW), pytest.param("ipc", 4, marks=SLOW)]
)
def test_a_world_with_keys_starts_and_leaves(ranks, keys, tmp_path, tcp_address, kind, world):
    address = tcp_address if kind == "tcp" else f"ipc://{tmp_path}/hub.sock"
    ranks += [Rank(rank, world, address, keys=keys) for rank in range(world)]
    for each in ranks:
        each.fact("started")
    leave(ranks)


# ---- the hub with keys ---------------------------------------------------------------------------------------------
@pytest.fixture
def start(tcp_address):
    """Two hubs at `tcp_address`, or where the caller says; closed by the fixture."""
    hubs = []

    def start_both(keys=None, address=tcp_address, sequencer=PassOn):
        loaded = None if keys is None else load_keys(keys)
        hubs.extend(
            ZmqHub(rank, 2, each, sequencer=None if rank else sequencer(2), keys=loaded)
            for rank, each in enumerate((address, address) if isinstance(address, str) else address)
        )

        def start_one(rank):
            hubs[rank].start(hello(rank, 2), TIMEOUT_S)
            hubs[rank].mapped(TIMEOUT_S)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(start_one, range(2)))
        return hubs

    yield start_both
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda hub: hub.close(), hubs))


@pytest.fixture
def stranger():
    """Make sockets that are not ours; the fixture closes them."""
    context = zmq.Context()
    made = []

    def make_one(kind=zmq.DEALER):
        one = context.socket(kind)
        one.linger = 0
        one.rcvtimeo = one.sndtimeo = int(TIMEOUT_S * 1000)
        made.append(one)
        return one

    yield make_one
    for each in made:
        each.close()
    context.term()


class Bomb:
    def __reduce__(self):
        return (os.kill, (os.getpid(), signal.SIGKILL))


GARBAGE = [
    b"",
    b"WHLZ",
    pickle.dumps(Bomb()),
    bytes(range(256)) * 4,
    wire.encode(Bye(rank=0), "x")[:-1],
    struct.pack("<4sHHI", wire.MAGIC, wire.VERSION, 1, 0xFFFFFFFF) + b"i",
]


def assert_undisturbed(hubs):
    for number in range(3):
        hubs[1].send(Ready(rank=1, seq=2 * number, count=number))
        hubs[0].send(Ready(rank=0, seq=2 * number + 1, count=number))
    assert [each.count for each in collect(hubs[0], 3)] == [0, 1, 2]
    assert [each.count for each in collect(hubs[1], 3)] == [0, 1, 2]
    assert all(hub.failure is None for hub in hubs)


@pytest.mark.parametrize("has", ["no key", "a password", "a key of its own", "the hub's public key only"])
def test_nothing_a_stranger_sends_gets_past_the_door(start, stranger, keys, tcp_address, has):
    """Frames that name a rank and its incarnation rightly, so that nothing but the door can stop them."""
    hubs = start(keys)
    loaded = load_keys(keys)
    one = stranger()
    if has == "a password":
        one.plain_username, one.plain_password = b"admin", b"admin"
    elif has != "no key":
        public, secret = zmq.curve_keypair()
        one.curve_publickey, one.curve_secretkey = public, secret
        one.curve_serverkey = loaded.hub_public if has.startswith("the hub") else zmq.curve_keypair()[0]
    one.connect(tcp_address)
    incarnation = hubs[1]._hello.entry.incarnation
    for data in (wire.encode(Bye(rank=1), incarnation), *GARBAGE):
        one.send(data)
    wait_for(lambda: hubs[0]._router.refusals(), hubs[0].dropped)
    assert hubs[0].dropped()["hub_refused_connections"] >= 1
    assert_undisturbed(hubs)
    told = hubs[0].dropped()
    assert (told["hub_bad_frames"], told["hub_stale_frames"]) == (0, 0)


def test_the_address_of_a_wrong_key_is_logged_once(start, stranger, keys, tcp_address, caplog):
    hubs = start(keys)
    one = stranger()
    one.reconnect_ivl = 10
    one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
    one.curve_serverkey = load_keys(keys).hub_public
    one.connect(tcp_address)
    for count in range(1, 4):  # ZeroMQ does not try again by itself after a refused key
        wait_for(lambda count=count: sum(hubs[0]._router._door.refusals.values()) == count, hubs[0]._router.refusals)
        one.disconnect(tcp_address)
        one.connect(tcp_address)
    told = [each.getMessage() for each in caplog.records if "refused a connection" in each.getMessage()]
    assert len(told) == 1, told
    assert tcp_address in told[0]
    assert "from 127.0.0.1:" in told[0]
    assert "not in the allow-list" in told[0]


class Recorder:
    """Forwards one-way-recorded TCP between a member and the hub: what the member sent, per connection, is kept."""

    def __init__(self, target):
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.sent = []
        self.is_over = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        other, kept = {}, {}
        while not self.is_over:
            for one in select.select([self.listener, *other], [], [], 0.05)[0]:
                if one is self.listener:
                    near, _ = self.listener.accept()
                    try:
                        far = socket.create_connection(self.target)
                    except ConnectionRefusedError:  # the hub does not listen yet; the member tries again
                        near.close()
                        continue
                    other |= {near: far, far: near}
                    kept[near] = bytearray()
                    self.sent.append(kept[near])
                elif one in other:
                    try:
                        data = one.recv(1 << 16)
                        kept.get(one, bytearray()).extend(data)
                        other[one].sendall(data)
                    except OSError:
                        data = b""  # one of the two has closed
                    if not data:
                        for each in (one, other.pop(one)):
                            other.pop(each, None)
                            each.close()
        for each in (self.listener, *other):
            each.close()

    def close(self):
        self.is_over = True
        self.thread.join(TIMEOUT_S)


@pytest.fixture
def recorder(tcp_address):
    made = Recorder(("127.0.0.1", int(tcp_address.rpartition(":")[2])))
    yield made
    made.close()


def replay(address, data):
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
        raw.sendall(data)
        raw.settimeout(TIMEOUT_S)
        try:
            while raw.recv(1 << 16):
                pass  # until the hub has had enough
        except ConnectionResetError:
            pass


def test_what_was_recorded_on_the_wire_is_worthless_with_keys_and_unreadable(recorder, start, keys, tcp_address):
    hubs = start(keys, (tcp_address, recorder.address))
    secret = b"the prompt of a customer" * 10
    hubs[1].send(Post(rank=1, request_id="r", tokens=secret, prompt_hash="", max_tokens=1))
    for hub in hubs:
        assert collect(hub, 1)[0].tokens == secret
    recorded = [bytes(each) for each in recorder.sent]
    assert max(map(len, recorded)) > len(secret)
    assert all(secret[:24] not in each for each in recorded)
    for each in recorded:
        replay(tcp_address, each)
    wait_for(lambda: hubs[0].dropped()["hub_refused_connections"] >= len(recorded), hubs[0].dropped)
    assert_undisturbed(hubs)
    assert hubs[0].drain() == []


def test_frames_sent_again_by_somebody_else_change_nothing_without_keys(recorder, start, stranger, tcp_address):
    """Whoever listens on an open network learns the incarnations; as long as a rank's own connections are open, what
    comes in its name over another one is dropped. (The first of this test's words would otherwise end rank 1.)"""
    hubs = start(None, (tcp_address, recorder.address))
    incarnation = hubs[1]._hello.entry.incarnation
    assert any(incarnation.encode() in each for each in recorder.sent)
    one = stranger()
    one.connect(tcp_address)
    again = [
        Ready(rank=1, seq=0, count=66),
        Bye(rank=1),
        Mapped(rank=1),
        hubs[1]._hello,
        wire.Beat(rank=1),
        wire.Beat(rank=1, on_frames=True),
        wire.Probe(rank=1),
        wire.Echo(rank=1),
    ]
    for message in again:
        one.send(wire.encode(message, incarnation))
    wait_for(lambda: hubs[0].dropped()["hub_stale_frames"] == len(again), hubs[0].dropped)
    assert_undisturbed(hubs)
    for hub in hubs:
        assert hub.drain() == []


def test_the_hub_counts_and_drops_what_is_no_frame(start, stranger, tcp_address):
    hubs = start()
    one = stranger()
    one.connect(tcp_address)
    for each in GARBAGE:
        one.send(each)
    one.send_multipart([b"two", b"parts"])
    one.send(wire.encode(Bye(rank=1), "an-earlier-start"))
    wait_for(lambda: hubs[0].dropped()["hub_bad_frames"] == len(GARBAGE) + 1, hubs[0].dropped)
    wait_for(lambda: hubs[0].dropped()["hub_stale_frames"] == 1, hubs[0].dropped)
    before = hubs[0].dropped()
    for data in (b"GET / HTTP/1.1\r\n\r\n" + bytes(1000), b"\xff" + bytes(8) + b"\x7f\x03" + b"\xff" * 500):
        with socket.create_connection(("127.0.0.1", int(tcp_address.rpartition(":")[2]))) as raw:
            raw.sendall(data)
    wait_for(
        lambda: hubs[0].dropped()["hub_refused_connections"] >= before["hub_refused_connections"] + 2, hubs[0].dropped
    )
    assert_undisturbed(hubs)


@pytest.mark.parametrize("port", ["hub", "link"])
def test_a_frame_beyond_the_cap_costs_its_sender_the_connection(start, stranger, tcp_address, tmp_path, port):
    if port == "hub":
        hubs = start()
        address = tcp_address
        ended = lambda: hubs[0].dropped()["hub_ended_connections"]  # noqa: E731
    else:
        address = f"ipc://{tmp_path}/link"
        link = LinkRank(address)
        ended = lambda: link.server.dropped()["link_ended_connections"]  # noqa: E731
    try:
        one = stranger()
        one.connect(address)
        one.send(bytes(wire.FRAME_BYTES_MAX + 1))
        wait_for(lambda: ended() >= 1, ended)
        if port == "hub":
            assert_undisturbed(hubs)
        else:
            with LinkClient(address) as client:
                assert isinstance(list(client.submit(submit("r", 2)))[-1], Done)
    finally:
        if port == "link":
            link.server.close()


def test_who_says_nothing_is_cut_after_the_handshake_time(tcp_address):
    options = SocketOptions(handshake_ms=200)
    context = sockets.make_context()
    server, door = listen(context, tcp_address, options)
    try:
        with socket.create_connection(("127.0.0.1", int(tcp_address.rpartition(":")[2]))) as silent:
            silent.settimeout(TIMEOUT_S)
            began = time.monotonic()
            while silent.recv(1000):
                pass  # the server's own greeting, then the end
            assert 0.1 < time.monotonic() - began < 5
        wait_for(lambda: door.read() or door.ended_total == 1, lambda: door.ended_total)
        assert door.refused_total == 1
        assert "did not finish in time" in next(iter(door.refusals))
    finally:
        door.close()
        server.close(linger=0)
        context.term()


def test_the_link_counts_and_drops_what_is_no_request(stranger, tmp_path):
    address = f"ipc://{tmp_path}/link"
    rank = LinkRank(address)
    try:
        one = stranger()
        one.connect(address)
        link_garbage = [*GARBAGE, wire.encode(Bye(rank=0), "x"), wire.encode_link(done("r", ()))]
        for each in link_garbage:
            one.send(each)
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(address.removeprefix("ipc://"))
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with LinkClient(address) as client:
            wait_for(lambda: rank.server.dropped()["link_bad_frames"] >= len(link_garbage), rank.server.dropped)
            wait_for(lambda: rank.server.dropped()["link_refused_connections"] >= 1, rank.server.dropped)
            assert isinstance(list(client.submit(submit("r", 2)))[-1], Done)
        assert [each.request_id for _, each in rank.seen] == ["r"]
    finally:
        rank.server.close()


# ---- the rules of keys ---------------------------------------------------------------------------------------------
def test_a_hub_that_others_can_reach_needs_keys_or_the_word(keys):
    for rank, address in ((0, "tcp://0.0.0.0:5000"), (1, "tcp://10.0.0.1:5000")):
        sequencer = PassOn(2) if rank == 0 else None
        with pytest.raises(HubError, match=r"--keys DIR.*--insecure"):
            ZmqHub(rank, 2, address, sequencer=sequencer)
        ZmqHub(rank, 2, address, sequencer=sequencer, insecure=True).close()
        ZmqHub(rank, 2, address, sequencer=sequencer, keys=load_keys(keys)).close()


@pytest.mark.parametrize(("rank", "name"), [(0, "hub"), (1, "rank")])
def test_a_rank_without_its_secret_is_told_which_file(keys, tcp_address, rank, name):
    (keys / f"{name}.key_secret").unlink()
    with pytest.raises(ConfigError, match=rf"{name}\.key_secret: not there"):
        ZmqHub(rank, 2, tcp_address, sequencer=None if rank else PassOn(2), keys=load_keys(keys))


def test_an_empty_list_lets_nobody_in(keys, tcp_address):
    (keys / "ranks" / "rank.key").unlink()
    loaded = load_keys(keys)
    hubs = [ZmqHub(rank, 2, tcp_address, sequencer=None if rank else PassOn(2), keys=loaded) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(hubs[0].start, hello(0, 2), 0.5)
        with pytest.raises(FleetRefused, match="does not accept our key") as caught:
            hubs[1].start(hello(1, 2), TIMEOUT_S)
        assert caught.value.field == "keys"
        with pytest.raises(HubError, match="not in the allow-list"):
            zero.result(TIMEOUT_S)


def test_a_socket_of_another_kind_can_be_secured_and_tells_whose_key_it_was(keys, tmp_path):
    """What an admin socket needs: ranks may look, only admins may change anything."""
    loaded = load_keys(keys)
    address = f"ipc://{tmp_path}/admin.sock"
    contexts = [sockets.make_context() for _ in range(3)]
    server, door = listen(contexts[0], address, SocketOptions(), loaded.pair("rank"), loaded.ranks | loaded.admins)
    rank_public = loaded.pair("rank").public
    clients = []
    try:
        for context, name in zip(contexts[1:], ("rank", "admin"), strict=True):
            client = sockets.connect(
                context,
                address,
                SocketOptions(),
                lambda made, name=name: secure_client(made, loaded.pair(name), rank_public),
            )
            clients.append(client)
            assert client.poll(int(TIMEOUT_S * 1000), zmq.POLLOUT)
            client.send(name.encode(), zmq.NOBLOCK)
            assert server.poll(int(TIMEOUT_S * 1000))
            _, frame = server.recv_multipart(copy=False)
            assert frame.bytes == name.encode()
            assert sender_key(frame) == loaded.pair(name).public
            assert (sender_key(frame) in loaded.admins) == (name == "admin")
    finally:
        door.close()
        for each in (server, *clients):
            each.close(linger=0)
        for context in contexts:
            context.term()


def test_a_taken_address_leaves_no_thread_behind(keys, tcp_address):
    loaded = load_keys(keys)
    before = threading.enumerate()
    with socket.create_server(("127.0.0.1", int(tcp_address.rpartition(":")[2]))):
        hub = ZmqHub(0, 1, tcp_address, sequencer=PassOn(1), keys=loaded)
        with pytest.raises(HubError, match="in use"):
            hub.start(hello(0, 1), TIMEOUT_S)
    assert threading.enumerate() == before
