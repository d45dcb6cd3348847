"""Real rank processes that import the hub and nothing else: coming up in any order, dying, leaving."""

import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_child import EchoSequencer
from hub_helpers import assert_none_blocked, collect, hello

from helpers.machine import Pauses
from helpers.ports import free_ports
from whalez.errors import HubError, PeerDied
from whalez.hub.interface import HubLimits
from whalez.hub.sockets import SocketOptions
from whalez.hub.zmq_hub import ZmqHub
from whalez.planning.policy import CostModel, PlanPolicy
from whalez.rendezvous.messages import Post, PostRefused, Ready

pytestmark = pytest.mark.multiprocess

CHILD = Path(__file__).with_name("hub_child.py")
TIMEOUT_S = 60.0


class Rank:
    """One child process; `fact(key)` is the next line it printed that has the key."""

    def __init__(self, rank, world, address, delay_s=0.0, **settings):
        self.rank = rank
        arguments = [str(rank), str(world), address, str(delay_s), *(f"{key}={val}" for key, val in settings.items())]
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.facts = []
        self._rest = b""

    def fact(self, key, timeout_s=TIMEOUT_S):
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                for known in self.facts:
                    if key in known:
                        return known
                assert selector.select(deadline - time.monotonic()), f"rank {self.rank}: no {key!r}; got {self.facts}"
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, f"rank {self.rank} ended without {key!r}; got {self.facts}"
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.facts += [json.loads(line) for line in lines]

    def tell(self, command):
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def kill(self, sig=signal.SIGKILL):
        self.process.send_signal(sig)

    def end(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def address(request, tmp_path):
    if request.param == "ipc":
        return f"ipc://{tmp_path}/hub.sock"
    return f"tcp://127.0.0.1:{free_ports()}"


@pytest.fixture
def ipc_address(tmp_path):
    return f"ipc://{tmp_path}/hub.sock"


@pytest.fixture
def ranks():
    made = []
    yield made
    for each in made:
        each.end()


def start_world(ranks, world, address, delay_s_max=0.0, seed=0):
    rng = random.Random(seed)
    order = list(range(world))
    rng.shuffle(order)
    by_rank = {rank: Rank(rank, world, address, rng.uniform(0, delay_s_max)) for rank in order}
    ranks += by_rank.values()
    incarnations = [by_rank[rank].fact("incarnation")["incarnation"] for rank in range(world)]
    for rank in range(world):
        assert by_rank[rank].fact("table")["table"] == incarnations
        assert by_rank[rank].fact("started")["heavy"] == []
    return [by_rank[rank] for rank in range(world)]


def leave(fleet):
    for each in fleet:
        each.tell("bye")
    for each in fleet:
        assert each.fact("left")
        assert each.process.wait(TIMEOUT_S) == 0


SLOW = pytest.mark.slow
WORLDS = [
    ("tcp", 2),
    ("ipc", 3),
    ("tcp", 4),
    ("ipc", 8),
    pytest.param("tcp", 8, marks=SLOW),
    pytest.param("ipc", 16, marks=SLOW),
    pytest.param("tcp", 16, marks=SLOW),
]


@pytest.mark.parametrize(("address", "world"), WORLDS, indirect=["address"])
def test_comes_up_in_any_order_and_leaves(ranks, address, world):
    leave(start_world(ranks, world, address, delay_s_max=0.3, seed=world))


@pytest.mark.parametrize(("address", "times"), [("tcp", 4), pytest.param("ipc", 50, marks=SLOW)], indirect=["address"])
def test_killed_and_restarted_before_the_table_is_complete(ranks, address, times):
    """The newest incarnation of a rank is in the table, whatever was left of the older ones."""
    world = 3
    zero = Rank(0, world, address)
    ranks.append(zero)
    zero.fact("incarnation")
    for number in range(times):
        victim = Rank(1, world, address)
        ranks.append(victim)
        victim.fact("incarnation")
        if number % 2:  # sometimes before its hello can have arrived, sometimes after
            time.sleep(0.15)  # no event tells when a hello has arrived; both orders are wanted
        victim.kill()
        victim.process.wait(TIMEOUT_S)
    last, two = Rank(1, world, address), Rank(2, world, address)
    ranks.extend((last, two))
    table = [each.fact("incarnation")["incarnation"] for each in (zero, last, two)]
    for each in (zero, last, two):
        assert each.fact("table")["table"] == table
        each.fact("started")
    leave([zero, last, two])


def first_to_end(ranks):
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        for each in ranks:
            if each.process.poll() is not None:
                return each
        assert time.monotonic() < deadline, "nobody was refused"
        time.sleep(0.01)


def test_two_ranks_with_one_number_and_a_late_one(ranks, ipc_address):
    """Whose hello is the first to arrive keeps the number."""
    both = [Rank(1, 3, ipc_address), Rank(1, 3, ipc_address)]
    zero = Rank(0, 3, ipc_address)
    ranks += [*both, zero]
    second = first_to_end(both)
    first = both[1 - both.index(second)]
    refused = second.fact("error")
    assert (refused["error"], refused["field"]) == ("FleetRefused", "rank")
    assert f"rank 1 is taken by process {first.process.pid} on " in refused["text"]
    two = Rank(2, 3, ipc_address)
    ranks.append(two)
    fleet = [zero, first, two]
    for each in fleet:
        each.fact("started")
    late = Rank(2, 3, ipc_address)
    ranks.append(late)
    refused = late.fact("error")
    assert refused["error"] == "FleetRefused"
    assert refused["field"] == "incarnation"
    assert "world" in refused["text"]
    leave(fleet)


def test_wrong_world_and_wrong_fingerprint_are_refused_by_name(ranks, ipc_address):
    ranks += [
        Rank(0, 2, ipc_address),
        Rank(1, 3, ipc_address),
        Rank(1, 2, ipc_address, chunk="128"),
    ]
    assert ranks[1].fact("error")["field"] == "world"
    assert ranks[2].fact("error")["field"] == "chunk"
    ranks.append(Rank(1, 2, ipc_address))
    ranks[0].fact("started")
    ranks[3].fact("started")


def expect_death(fleet, victim, strike, how):
    """Named by all others within 5 s; what the machine paused meanwhile comes on top."""
    with Pauses() as pauses:
        begin = time.monotonic()
        strike()
        others = [each for each in fleet if each is not victim]
        told = [each.fact("error") for each in others]
    for each, died in zip(others, told, strict=True):
        assert (died["error"], died["rank"]) == ("PeerDied", victim.rank), died
        assert how in died["text"]
        assert died["at"] - begin < 5.0 + pauses.late_s
        assert each.process.wait(TIMEOUT_S) == 5


@pytest.mark.parametrize(
    ("address", "sig", "victim"),
    [
        ("ipc", signal.SIGKILL, 0),
        ("tcp", signal.SIGKILL, 2),
        ("tcp", signal.SIGSTOP, 0),
        ("ipc", signal.SIGSTOP, 2),
    ],
    indirect=["address"],
)
def test_a_dead_rank_is_named_by_all_within_5_s(ranks, address, sig, victim):
    fleet = start_world(ranks, 3, address)
    how = "its process has ended" if sig == signal.SIGKILL else "silent for"
    expect_death(fleet, fleet[victim], lambda: fleet[victim].kill(sig), how)


def test_exit_without_bye_is_a_death(ranks, ipc_address):
    fleet = start_world(ranks, 3, ipc_address)
    expect_death(fleet, fleet[1], lambda: fleet[1].tell("exit"), "its process has ended")


@pytest.mark.parametrize("address", ["ipc", "tcp"], indirect=True)
def test_port_in_use_is_named(ranks, address):
    zero = Rank(0, 2, address)
    ranks.append(zero)
    one = Rank(1, 2, address)
    ranks.append(one)
    zero.fact("started")
    again = Rank(0, 2, address)
    ranks.append(again)
    refused = again.fact("error")
    assert refused["error"] == "HubError"
    assert address in refused["text"]
    assert "in use" in refused["text"]
    leave([zero, one])


def test_nobody_there_is_said_with_the_address(ipc_address):
    hub = ZmqHub(1, 2, ipc_address)
    with pytest.raises(HubError, match=f"no hub answers at {ipc_address}"):
        hub.start(hello(1, 2), 0.3)


def test_rank_0_makes_a_real_sequencer(ipc_address):
    policy = PlanPolicy(world=1, node_ranks=1, segment_floor=64, whale_min=128, buckets=(64, 128), cost=CostModel.k3())
    hub = ZmqHub(0, 1, ipc_address, policy, limits=HubLimits())
    try:
        hub.start(hello(0, 1), 10.0)
        hub.mapped(10.0)
        hub.send(Post(rank=0, request_id="r", tokens=bytes(4), prompt_hash="", max_tokens=1))
        (refused,) = collect(hub, 1)
        assert isinstance(refused, PostRefused)
    finally:
        hub.close()


@pytest.mark.parametrize("then", [signal.SIGSTOP, signal.SIGKILL])
def test_no_send_blocks_while_the_pipe_of_a_dead_peer_is_full(ranks, ipc_address, then):
    """Rank 0 fills the pipes of a stopped rank, which is then killed (or stays stopped), and goes on sending."""
    hub = ZmqHub(0, 2, ipc_address, sequencer=EchoSequencer(2), options=SocketOptions(hwm_count=2), limits=HubLimits())
    child = Rank(1, 2, ipc_address)
    ranks.append(child)
    try:
        hub.start(hello(0, 2, dtype="f32"), TIMEOUT_S)
        hub.mapped(TIMEOUT_S)
        child.fact("started")
        child.kill(signal.SIGSTOP)
        took, failure = [], None
        with Pauses() as pauses:
            begun = time.monotonic()
            while failure is None:
                assert time.monotonic() - begun < 5.0 + pauses.late_s, "nobody has noticed"
                if len(took) == 1000:
                    child.kill(then)
                each = time.monotonic()
                try:
                    if len(took) < 2000:  # far more than its pipes take; then only look
                        hub.send(Ready(rank=0, seq=1, count=len(took)))
                    hub.drain()
                    hub.report_launch(len(took))
                except PeerDied as died:
                    failure = died
                took.append(time.monotonic() - each)
                if len(took) > 1000:  # the pipes are full long before the peer has been silent for too long
                    time.sleep(0.0005)  # an iteration of a loop
        assert failure.rank == 1
        assert ("silent for" if then == signal.SIGSTOP else "its process has ended") in failure.how
        assert_none_blocked(took, pauses)
    finally:
        with Pauses() as pauses:
            begun = time.monotonic()
            hub.close()
            closed_s = time.monotonic() - begun
    assert closed_s < 3.0 + pauses.late_s
