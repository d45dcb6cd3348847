"""One rank of the control-plane bench: the shipped hub and member, boundaries driven by an empty loop, no model.

`python -m bench.control_rank RANK WORLD ADDRESS POSTS` prints one JSON line; rank WORLD-1 posts. After every post, rank
0 measures a round trip of pyzmq alone. Both begin right after a boundary, milliseconds after the last frame, between
processes that wake every `BOUNDARY_S`: the cores are as awake for the one as for the other.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import sys
import threading

import zmq

from whalez.clock import now_ns
from whalez.hub.address import host_identity
from whalez.hub.zmq_hub import ZmqHub
from whalez.planning import CostModel, PlanPolicy, check_plan
from whalez.rendezvous.effects import Compose, LaunchKind, PostEnded, Reserve, Send, WhaleOver
from whalez.rendezvous.events import LaunchComposing, PostWanted, Received, Reserved
from whalez.rendezvous.member import Member
from whalez.rendezvous.messages import Bye, Commit, Hello, SlabEntry

START_S = 120.0
FLOOR = 16
TOKENS_PER_RANK = 64
BOUNDARY_S = 0.002  # a launch without rows lasts at most so long; a message ends it
WORD_COPIES = 4
GAP_LAUNCHES = 3  # between a whale and the next post: rank 0's round trip falls into the first, which ends with it


class Paired:
    """What slabs would carry, in a file all ranks map: launches composed and confirmation words, 8 bytes each."""

    def __init__(self, path: str, rank: int, world: int) -> None:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(8 * world * (1 + WORD_COPIES))
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._rank, self._world = rank, world

    def publish(self, launch: int, word: int) -> None:
        self._cells[(1 + launch % WORD_COPIES) * self._world + self._rank] = word
        self._cells[self._rank] = launch + 1

    def all_composed(self, launch: int) -> bool:
        return min(self._cells[: self._world]) > launch

    def words(self, launch: int) -> tuple[int, ...]:
        first = (1 + launch % WORD_COPIES) * self._world
        return tuple(self._cells[first : first + self._world])


class Rank:
    def __init__(self, rank: int, world: int, address: str) -> None:
        self.rank, self.world = rank, world
        policy = PlanPolicy(
            world=world,
            node_ranks=world,
            segment_floor=FLOOR,
            whale_min=2 * FLOOR,
            buckets=(TOKENS_PER_RANK,),
            cost=CostModel.k3(),
        )
        self.hub = ZmqHub(rank, world, address, policy)
        self.member = Member(rank, world, policy=policy, check=check_plan)
        self.wake = threading.Event()
        self.paired = Paired(f"{address.removeprefix('ipc://')}.paired", rank, world)
        self.launch = 0
        self.over = 0
        self.kind = LaunchKind.ORDINARY
        self.committed_at = 0

    def start(self) -> tuple[int, int]:
        """When this rank began to say hello, and when the world stood."""
        entry = SlabEntry(
            rank=self.rank, incarnation=secrets.token_hex(8), host=host_identity(), pid=os.getpid(), ticket=b""
        )
        began = now_ns()
        self.hub.start(Hello(entry=entry, world=self.world, fingerprint={}), START_S)
        self.hub.mapped(START_S)
        self.hub.set_waker(self.wake.set)
        return began, now_ns()

    def perform(self, event: object) -> None:
        effects = list(self.member.step(event, now_ns()))
        while effects:
            match effects.pop(0):
                case Send(message=message):
                    self.hub.send(message)
                case Reserve(seq=seq):
                    effects += self.member.step(Reserved(seq), now_ns())
                case WhaleOver():
                    self.over += 1
                case PostEnded(reason=reason):
                    raise SystemExit(f"a post ended without a superstep: {reason}")
                case Compose(word=word, kind=kind):
                    self.paired.publish(self.launch, word)
                    self.kind = kind

    def boundary(self) -> None:
        """One launch, once every rank has composed the one before."""
        while True:
            self.wake.wait(BOUNDARY_S)
            self.wake.clear()
            for message in self.hub.drain():
                if isinstance(message, Commit):
                    self.committed_at = now_ns()
                self.perform(Received(message))
            if self.launch == 0 or self.paired.all_composed(self.launch - 1):
                break
        self.perform(LaunchComposing(self.launch, self.paired.words(self.launch - 1)))
        self.launch += 1
        self.hub.report_launch(self.launch)

    def post(self, number: int) -> int:
        """ns from the post to the commit in this rank's hands."""
        tokens = number.to_bytes(4, "little") * (TOKENS_PER_RANK * self.world)
        before, self.committed_at = self.over, 0
        began = now_ns()
        self.perform(
            PostWanted(
                request_id=str(number), tokens=tokens, prompt_hash=hashlib.sha256(tokens).hexdigest(), max_tokens=1
            )
        )
        while self.over == before:
            self.boundary()
        return self.committed_at - began

    def leave(self) -> None:
        """Stop as the world does: rank 0 asks, all begin it, say Bye and hear the others'."""
        if self.rank == 0:
            self.hub.stop_world()
        while self.kind is not LaunchKind.STOP:
            self.boundary()
        bye = Bye(rank=self.rank)
        self.hub.send(bye)
        self.perform(Received(bye))
        while not self.member.everyone_said_bye:
            self.wake.wait(0.01)
            for message in self.hub.drain():
                self.perform(Received(message))
        self.hub.close()


class Bare:
    """Frames of pyzmq alone between the same processes: from rank 0 to all others, whose echo threads send them back.

    Owns:      its context, its socket and, at all ranks but 0, its thread
    Closed by: `close`; blocks until rank 0 has closed, too
    """

    def __init__(self, rank: int, world: int, address: str) -> None:
        self._context = zmq.Context()
        if rank == 0:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.bind(address)
            self._peers = [self._router.recv_multipart()[0] for _ in range(world - 1)]
            return
        self._echo = threading.Thread(target=self._send_back, args=(address,))
        self._echo.start()

    def _send_back(self, address: str) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(address)
        dealer.send(b"here")
        while frame := dealer.recv():
            dealer.send(frame)
        dealer.close(linger=0)

    def round_trip(self) -> int:
        """ns until all have answered; at rank 0."""
        began = now_ns()
        for peer in self._peers:
            self._router.send_multipart([peer, b"x" * 256])
        for _ in self._peers:
            self._router.recv_multipart()
        return now_ns() - began

    def close(self, rank: int) -> None:
        if rank:
            self._echo.join()
        else:
            for peer in self._peers:
                self._router.send_multipart([peer, b""])
            self._router.close(linger=1000)
        self._context.term()


def main() -> None:
    rank, world, address, posts = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    one = Rank(rank, world, address)
    began, stood = one.start()
    took: list[int] = []
    trips: list[int] = []
    if posts:
        bare = Bare(rank, world, f"{address}.bare")
        for number in range(posts):
            if rank == world - 1:
                took.append(one.post(number))
                for _ in range(GAP_LAUNCHES):
                    one.boundary()
                continue
            while one.over == number:
                one.boundary()
            if rank == 0:
                trips.append(bare.round_trip())
    one.leave()
    if posts:
        bare.close(rank)
    print(json.dumps({"began": began, "stood": stood, "took": took, "bare": trips}))


main()
