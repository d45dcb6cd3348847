"""What every hub must do, whatever carries its words."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hub_helpers import CALL_S, TIMEOUT_S, PassOn, assert_none_blocked, collect, hello, wait_until_failed

from helpers.machine import Pauses
from helpers.ports import free_ports
from whalez.errors import FleetRefused, HubError, PeerDied, WireError
from whalez.hub.interface import Hub, HubLimits
from whalez.hub.local import LocalHub
from whalez.hub.sockets import SocketOptions
from whalez.hub.zmq_hub import ZmqHub
from whalez.rendezvous.messages import Bye, Died, Offer, Post, Ready


@pytest.fixture(params=["local", "ipc", "tcp"])
def kind(request):
    return request.param


class World:
    """Makes hubs of one kind and closes them."""

    def __init__(self, kind, folder):
        self.kind = kind
        self.folder = folder
        self.hubs = []
        self.sequencer = None

    def make(self, world, limits=None, options=None):
        self.sequencer = PassOn(world)
        if self.kind == "local":
            self.hubs = list(LocalHub.world(world, self.sequencer, limits=limits))
            return self.hubs
        if self.kind == "ipc":
            address = f"ipc://{self.folder}/hub.sock"
        else:
            address = f"tcp://127.0.0.1:{free_ports()}"
        self.hubs = [
            ZmqHub(rank, world, address, sequencer=None if rank else self.sequencer, limits=limits, options=options)
            for rank in range(world)
        ]
        return self.hubs

    def start(self, world, **kwargs):
        hubs = self.make(world, **kwargs)

        def start_one(rank):
            table = hubs[rank].start(hello(rank, world), TIMEOUT_S)
            hubs[rank].mapped(TIMEOUT_S)
            return table

        with ThreadPoolExecutor(world) as pool:
            tables = list(pool.map(start_one, range(world)))
        assert all(table == tables[0] for table in tables)
        assert [entry.rank for entry in tables[0]] == list(range(world))
        return hubs

    def close(self):
        with ThreadPoolExecutor(max(1, len(self.hubs))) as pool:
            list(pool.map(lambda hub: hub.close(), self.hubs))


@pytest.fixture
def world(kind, tmp_path):
    threads = set(threading.enumerate())
    made = World(kind, tmp_path)
    yield made
    made.close()
    left = [thread for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads left behind: {left}"


def test_is_a_hub(world):
    assert all(isinstance(hub, Hub) for hub in world.make(1))


def test_a_world_of_one(world):
    (hub,) = world.start(1)
    hub.send(Ready(rank=0, seq=0, count=1))
    assert collect(hub, 1) == [Ready(rank=0, seq=0, count=1)]


def assembled(world, count):
    """Hubs whose table is complete; nobody has said Mapped."""
    hubs = world.make(count)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda rank: hubs[rank].start(hello(rank, count), TIMEOUT_S), range(count)))
    return hubs


def test_gathers_come_back_in_rank_order(world):
    hubs = assembled(world, 4)

    def several(rank):
        return [hubs[rank].gather(b"%d of %d" % (turn, rank) * turn, TIMEOUT_S) for turn in range(6)]

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(several, range(4)))
        list(pool.map(lambda hub: hub.mapped(TIMEOUT_S), hubs))
    wanted = [tuple(b"%d of %d" % (turn, rank) * turn for rank in range(4)) for turn in range(6)]
    assert got == [wanted] * 4
    assert all(hub.drain() == [] for hub in hubs)


def test_a_rank_that_takes_no_part_is_named(world):
    hubs = assembled(world, 3)

    def late(rank):
        with pytest.raises(HubError, match=r"a gather.*(\b2\b|not all ranks)") as caught:
            hubs[rank].gather(b"x", CALL_S)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(late, range(2)))
    assert "2" in said[0].split("gather")[1]  # rank 0 has the centre, so it can name who is missing


def test_a_rank_that_dies_in_a_gather_is_told_to_all(world):
    hubs = assembled(world, 3)

    def bereaved(rank):
        with pytest.raises(PeerDied, match="rank 2"):
            hubs[rank].gather(b"x", TIMEOUT_S)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(bereaved, rank) for rank in range(2)]
        hubs[2].close()
        for each in waiting:
            each.result(TIMEOUT_S)


def test_an_offer_has_a_bound_and_a_place(world):
    hubs = assembled(world, 1)
    with pytest.raises(WireError, match="65537 bytes, at most 65536"):
        hubs[0].gather(bytes(65537), TIMEOUT_S)
    assert hubs[0].gather(bytes(65536), TIMEOUT_S) == (bytes(65536),)
    hubs[0].mapped(TIMEOUT_S)
    hubs[0].send(Offer(rank=0, turn=1, data=b""))
    assert "sent an Offer after its Mapped" in str(wait_until_failed(hubs[0]))


def test_order_per_peer_and_nothing_lost(world):
    hubs = world.start(3)
    for count in range(200):
        for rank, hub in enumerate(hubs):
            hub.send(Ready(rank=rank, seq=1, count=count))
    got = collect(hubs[1], 600)
    for rank in range(3):
        assert [each.count for each in got if each.rank == rank] == list(range(200))
    assert hubs[0].drain() == []


def test_big_prompts_pass_and_stay_in_order(world):
    hubs = world.start(2)
    tokens = bytes(range(256)) * (1 << 14)  # 4 MiB
    for number in range(3):
        hubs[1].send(Post(rank=1, request_id=str(number), tokens=tokens, prompt_hash="", max_tokens=1))
        hubs[1].send(Ready(rank=1, seq=0, count=number))
    got = collect(hubs[0], 6)
    assert [type(each).__name__ for each in got] == ["Post", "Ready"] * 3
    assert all(each.tokens == tokens for each in got[::2])
    assert len(collect(hubs[1], 3)) == 3


def test_a_message_that_can_not_travel_is_refused_at_once(world):
    hubs = world.start(1)
    with pytest.raises(WireError, match="seq"):
        hubs[0].send(Ready(rank=0, seq=-1, count=0))
    assert hubs[0].failure is None


def test_launch_is_reported_to_the_sequencer(world):
    hubs = world.start(2)
    hubs[0].report_launch(77)
    hubs[1].report_launch(99)
    hubs[1].send(Ready(rank=1, seq=1, count=0))
    collect(hubs[1], 1)
    assert world.sequencer.launches == [77]


def test_waker_is_called_for_what_waits_already(world):
    hubs = world.start(1)
    hubs[0].send(Ready(rank=0, seq=0, count=0))
    collect(hubs[0], 1)
    calls = []
    hubs[0].set_waker(lambda: calls.append(1))
    assert calls == []
    hubs[0].send(Ready(rank=0, seq=0, count=1))
    collect(hubs[0], 1)
    hubs[0].close()
    hubs[0].set_waker(lambda: calls.append(1))
    assert len(calls) >= 1


def test_send_never_blocks_with_a_stalled_peer_and_nothing_is_lost_silently(world):
    """Rank 1 does not drain: the fleet learns it by name, and what rank 1 finds in the end has no gap."""
    hubs = world.start(2, limits=HubLimits(inbox_count=20), options=SocketOptions(hwm_count=2))
    took = []
    with Pauses() as pauses:
        for count in range(60):
            begin = time.monotonic()
            with contextlib.suppress(PeerDied):
                hubs[0].send(Ready(rank=0, seq=1, count=count))
            took.append(time.monotonic() - begin)
    failure = wait_until_failed(hubs[0])
    assert isinstance(failure, PeerDied)
    assert failure.rank == 1
    assert "does not drain: 20 messages wait" in failure.how
    assert_none_blocked(took, pauses)
    assert [each.count for each in hubs[1].drain()] == list(range(20))
    for _ in range(2):
        with pytest.raises(HubError, match="does not drain"):
            hubs[1].drain()


def test_a_slow_reader_loses_nothing(world):
    """Pipes of two frames: what they do not take waits in order where it is."""
    hubs = world.start(2, options=SocketOptions(hwm_count=2))
    for count in range(150):
        hubs[0].send(Ready(rank=0, seq=1, count=count))
    assert [each.count for each in collect(hubs[1], 150)] == list(range(150))
    assert hubs[0].failure is None


def test_outbox_overflow_is_an_error_and_is_stored(tmp_path):
    """A hub that takes nothing: its address answers nobody any more."""
    address = f"ipc://{tmp_path}/hub.sock"
    hub = ZmqHub(0, 1, address, sequencer=PassOn(1), limits=HubLimits(outbox_count=0))
    try:
        hub.start(hello(0, 1), TIMEOUT_S)
        with pytest.raises(HubError, match="stalls"):
            hub.send(Ready(rank=0, seq=0, count=0))
        for _ in range(2):
            with pytest.raises(HubError, match="stalls"):
                hub.drain()
    finally:
        hub.close()


def test_what_came_before_a_failure_is_handed_out_and_every_later_call_reports_it(world):
    hubs = world.start(3)
    hubs[2].send(Ready(rank=2, seq=1, count=5))
    hubs[2].send(Died(rank=2, how="out of memory"))
    for rank in (0, 1):
        wait_until_failed(hubs[rank])
        if rank == 1:
            assert hubs[1].drain() == [Ready(rank=2, seq=1, count=5)]
        for _ in range(3):
            with pytest.raises(PeerDied, match="rank 2 died: out of memory") as caught:
                hubs[rank].drain()
            assert caught.value.rank == 2
            with pytest.raises(PeerDied):
                hubs[rank].send(Ready(rank=rank, seq=1, count=0))


def test_a_message_in_anothers_name_is_the_senders_death(world):
    hubs = world.start(2)
    hubs[1].send(Ready(rank=0, seq=0, count=0))
    failure = wait_until_failed(hubs[0])
    assert isinstance(failure, PeerDied)
    assert failure.rank == 1
    assert "in the name of rank 0" in failure.how


@pytest.mark.parametrize("closing", [0, 1])
def test_close_with_traffic(world, closing):
    """What was sent before close arrives; close is bounded; nobody is blamed who said Bye."""
    hubs = world.start(3, options=SocketOptions(hwm_count=2))
    tokens = bytes(1 << 20)
    hubs[closing].send(Post(rank=closing, request_id="r", tokens=tokens, prompt_hash="", max_tokens=1))
    for count in range(50):
        hubs[closing].send(Ready(rank=closing, seq=2, count=count))
    hubs[closing].send(Bye(rank=closing))
    with Pauses() as pauses:
        begin = time.monotonic()
        hubs[closing].close()
        hubs[closing].close()
        took_s = time.monotonic() - begin
    assert took_s < 3.0 + pauses.late_s
    got = collect(hubs[2], 52)
    assert [each.count for each in got if isinstance(each, Ready)] == list(range(50))
    assert got[-1] == Bye(rank=closing)
    assert Bye(rank=closing) in collect(hubs[1 - closing], 2)
    assert hubs[2].failure is None
    with pytest.raises(HubError):
        hubs[closing].send(Ready(rank=closing, seq=2, count=0))
    with pytest.raises(HubError):  # the first may still hand out what it got before
        hubs[closing].drain(), hubs[closing].drain()


def test_every_rank_hears_every_bye_once_and_not_its_own(world):
    hubs = world.start(3)
    for rank, hub in enumerate(hubs):
        hub.send(Bye(rank=rank))
    for rank, hub in enumerate(hubs):
        got = collect(hub, 2)
        assert sorted(each.rank for each in got) == [other for other in range(3) if other != rank]


def test_a_rank_that_closes_without_a_word_is_dead(world):
    hubs = world.start(3)
    hubs[2].close()
    for hub in hubs[:2]:
        failure = wait_until_failed(hub)
        assert isinstance(failure, PeerDied)
        assert failure.rank == 2


def test_start_names_who_is_missing(world):
    hubs = world.make(3)
    with Pauses() as pauses:
        begin = time.monotonic()
        with pytest.raises(HubError, match="1, 2"):
            hubs[0].start(hello(0, 3), 0.3)
        took_s = time.monotonic() - begin
    assert took_s < 3.0 + pauses.late_s


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (hello(1, 2, dtype="bf16", chunk="64"), "dtype"),
        (hello(1, 2, dtype="f32"), "chunk"),
        (hello(1, 2, dtype="f32", chunk="64", extra="1"), "extra"),
    ],
    ids=["differs", "lacks", "has more"],
)
def test_another_fingerprint_is_refused_by_field(world, other, field):
    hubs = world.make(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(hubs[0].start, hello(0, 2, dtype="f32", chunk="64"), TIMEOUT_S)
        if world.kind == "local":  # where there is no process of rank 0 to be first
            with hubs[0]._centre.changed:
                assert hubs[0]._centre.changed.wait_for(lambda: hubs[0]._centre.ends, TIMEOUT_S)
        refused = pool.submit(hubs[1].start, other, TIMEOUT_S)
        with pytest.raises(FleetRefused, match=field) as caught:
            refused.result(TIMEOUT_S)
        assert caught.value.field == field
        hubs[0].close()
        with pytest.raises(HubError, match="closed"):
            first.result(TIMEOUT_S)
