"""Real Members and a real Sequencer around a network and a clock that the test holds in its hand.

`Fleet` keeps one queue per direction and rank; `deliver()` empties them, `hold(rank)` keeps what is sent to a rank,
`launch()` takes every rank through one boundary. Every machine is validated after every step.
"""

from __future__ import annotations

import hashlib
from array import array

from whalez.planning.plan import GangPlan
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg
from whalez.rendezvous.invariants import validate
from whalez.rendezvous.member import Member, Phase
from whalez.rendezvous.sequencer import Sequencer
from whalez.testing.simulator import ToyPolicy

SECOND = 1_000_000_000


class Refusal(Exception):
    def __init__(self, reason: str) -> None:
        self.reason = reason


def plan(length: int, poster: int, policy: ToyPolicy, excluded: frozenset[int]) -> GangPlan | Refusal:
    """Even lengths: everybody. Odd ones: poster and neighbour (0 and 1, 2 and 3). 13: refused. 40: two supersteps."""
    wanted = range(policy.world) if length % 2 == 0 else [poster ^ 1]
    helpers = [rank for rank in wanted if rank != poster and rank not in excluded]
    if length == 13 or not helpers or poster in excluded:
        return Refusal(f"no gang for {length} tokens")
    gang = (*helpers, poster)
    bounds = tuple(length * i // len(gang) for i in range(len(gang) + 1))
    return GangPlan(gang=gang, bounds=bounds, supersteps=2 if length == 40 else 1)


def check(*_: object) -> None:
    """Members agree."""


def in_short(message: msg.Message) -> str:
    """The kind of a message and what a reader wants to know of it."""
    names = ("request_id", "seq", "count", "launch", "reason", "outcome", "grace_s", "how")
    parts = [f"{name} {getattr(message, name)}" for name in names if hasattr(message, name)]
    if isinstance(message, msg.Gather):
        parts.append(f"gang {' '.join(map(str, message.plan.gang))}")
    return ", ".join([type(message).__name__, *parts])


class Fleet:
    def __init__(self, world: int = 4, words_back: int = 1, **more: int) -> None:
        self.world, self.words_back = world, words_back
        policy = ToyPolicy(world)
        self.members = [Member(r, world, policy=policy, check=check, words_back=words_back) for r in range(world)]
        self.sequencer = Sequencer(world, policy, plan=plan, words_back=words_back, **more)
        self.now_ns = 0
        self.words: list[tuple[int, ...]] = []
        self.to_rank: list[list[msg.Message]] = [[] for _ in range(world)]
        self.to_sequencer: list[tuple[int, msg.Message]] = []
        self.held: set[int] = set()
        self.refusing: set[int] = set()  #: ranks that cannot reserve
        self.composed: list[list[do.Compose]] = [[] for _ in range(world)]
        self.ended: dict[str, str] = {}
        self.disarmed: list[tuple[int, int]] = []
        self.begun: dict[int, dict[int, int]] = {}  #: seq -> rank -> launch
        self.slips: dict[int, int] = {}
        self.sent: list[msg.Message] = []  #: by the sequencer, in order
        self.told: list[str] = []  #: what happened, one line each

    def member(self, rank: int, event: ev.Event) -> None:
        effects = self.members[rank].step(event, self.now_ns)
        validate(self.members[rank])
        for effect in effects:
            match effect:
                case do.Send(message):
                    self.told.append(f"{rank} to the sequencer: {in_short(message)}")
                    self.to_sequencer.append((rank, message))
                case do.Reserve(seq=seq):
                    ok = rank not in self.refusing
                    self.member(rank, ev.Reserved(seq) if ok else ev.CannotReserve(seq, "no scratch"))
                case do.PostEnded(request_id, reason):
                    self.told.append(f"{rank}: post {request_id} ends without a superstep: {reason}")
                    self.ended[request_id] = reason
                case do.Disarm(seq, _):
                    self.told.append(f"{rank}: disarms seq {seq}")
                    self.disarmed.append((rank, seq))
                case do.WhaleBegun(seq=seq, slipped=slipped):
                    self.begun.setdefault(seq, {})[rank] = self.members[rank].state.count - 1
                    self.slips[seq] = slipped
                    launch = self.members[rank].state.count - 1
                    self.told.append(f"{rank}: begins seq {seq} at launch {launch}, slipped by {slipped}")
                case do.Compose():
                    self.composed[rank].append(effect)

    def sequence(self, event: ev.Event) -> None:
        effects = self.sequencer.step(event, self.now_ns, self.members[0].state.count)
        validate(self.sequencer)
        for effect in effects:
            assert isinstance(effect, do.SendTo | do.Broadcast)
            self.sent.append(effect.message)
            targets = [effect.rank] if isinstance(effect, do.SendTo) else range(self.world)
            to = effect.rank if isinstance(effect, do.SendTo) else "all"
            self.told.append(f"the sequencer to {to}: {in_short(effect.message)}")
            for rank in targets:
                self.to_rank[rank].append(effect.message)

    def post(self, rank: int, request_id: str, length: int = 8) -> None:
        tokens = array("i", range(length)).tobytes()
        digest = hashlib.sha256(tokens).hexdigest()
        self.member(rank, ev.PostWanted(request_id=request_id, tokens=tokens, prompt_hash=digest, max_tokens=1))

    def deliver_inbound(self) -> bool:
        inbound, self.to_sequencer = self.to_sequencer, []
        for rank, message in inbound:
            self.sequence(ev.Received(message, rank))
        return bool(inbound)

    def deliver_outbound(self) -> bool:
        moved = False
        for rank in set(range(self.world)) - self.held:
            messages, self.to_rank[rank] = self.to_rank[rank], []
            moved = moved or bool(messages)
            for message in messages:
                self.member(rank, ev.Received(message))
        return moved

    def deliver(self) -> None:
        """Empty every queue that is not held, until nothing moves."""
        while self.deliver_inbound() | self.deliver_outbound():
            pass

    def deliver_until_ready(self) -> None:
        """Post and Gather out, Readys in: the commits, if any, lie in the queues to the ranks."""
        self.deliver_inbound()
        self.deliver_outbound()
        self.deliver_inbound()

    def launch(self, count: int = 1) -> None:
        for _ in range(count):
            at = len(self.words) - self.words_back
            words = self.words[at] if at >= 0 else (0,) * self.world
            for rank in range(self.world):
                if self.members[rank].state.phase is not Phase.STOPPED:
                    self.member(rank, ev.LaunchComposing(len(self.words), words))
            self.words.append(tuple(composed[-1].word for composed in self.composed))
            launch = len(self.words) - 1
            kinds = [composed[-1].kind if composed[-1].launch == launch else "-" for composed in self.composed]
            if set(kinds) != {"-"}:
                self.told.append(f"launch {launch}: {' '.join(kinds)}; words {' '.join(map(str, self.words[-1]))}")

    def run(self, launches: int) -> None:
        for _ in range(launches):
            self.deliver()
            self.launch()

    def launches_of(self, seq: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank, composed in enumerate(self.composed):
            for compose in composed:
                if compose.seq == seq:
                    found.setdefault(rank, []).append(compose.launch)
        return found

    def all_of(self, kind: type[msg.Message]) -> list[msg.Message]:
        seen = []
        for message in self.sent:
            if isinstance(message, kind) and message not in seen:
                seen.append(message)
        return seen

    def kinds(self, rank: int) -> str:
        """One letter per launch: o a s S."""
        letters = {"ordinary": "o", "armed": "a", "superstep": "s", "stop": "S"}
        return "".join(letters[compose.kind] for compose in self.composed[rank])
