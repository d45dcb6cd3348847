"""A fleet on one thread in virtual time: real Members and a real Sequencer, everything else made up from a seed.

Rule 1: the machines are the shipped ones; what is simulated is what surrounds them: launches, words, bells, messages,
        clients, scratch.
Rule 2: the checker sees only what the machines do to their surroundings, never their state; so a machine that lies to
        itself is still found out.

What is modelled of the data plane: a rank may compose launch n + 1 only when every rank has composed launch n (the
paired exchange; n - 1 with one launch in flight), an idle rank sleeps and is woken by a peer's launch bell, by
whatever is put into its inbox, or by a heartbeat. Messages keep their order per peer and take as long as a launch or
longer, so commits come late. A rank that is not armed starts operations of several launches, during which it does not
look into its inbox.

Each seed draws its own mix (`Weather.draw`). A run ends in Stop; a run that does not end says why (`pending`).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections import deque
from typing import Any

import msgspec

from whalez.errors import PlanDiffers, ProtocolError
from whalez.planning.plan import GangPlan
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg
from whalez.rendezvous.invariants import validate
from whalez.rendezvous.member import Member
from whalez.rendezvous.sequencer import Sequencer

WORD_COPIES = 4
HEARTBEAT_NS = 250_000_000
BELL_NS = 2_000
LOG_COUNT_MAX = 400

SEQUENCER = -1  #: address of the sequencer among the ranks


class SimulationFailed(AssertionError):
    """A property does not hold, or the run does not end."""


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """What one seed is like. Times are drawn uniformly between the two bounds."""

    world: int = 8
    words_back: int = 1
    launch_ns: tuple[int, int] = (100_000, 400_000)
    superstep_ns: tuple[int, int] = (500_000, 3_000_000)
    message_ns: tuple[int, int] = (50_000, 400_000)
    supersteps_max: int = 3
    operation_chance: float = 0.1  #: of an unarmed rank to start an operation of several launches at a boundary
    operation_launches_max: int = 6
    busy_chance: float = 0.7  #: of a rank to have local work at a boundary, so that it does not sleep
    decline_chance: float = 0.1
    withdraw_chance: float = 0.2
    late_answer_chance: float = 0.3  #: the driver answers a Reserve at the end of the drain, not at once
    posts_per_rank: int = 3
    posts_within_ns: int = 20_000_000
    deadline_ns: int = 2_000_000_000
    deadline_launches: int = 64
    gathers_max: int = 4
    slack_start: int = 4
    slack_max: int = 32  #: small: L is too early and whales slip
    straggler_chance: float = 0.0  #: of a message to take ten times as long
    ending: str = "quiet"  #: quiet: Stop after the last post | stop: in the middle | drain | leave: each rank by itself

    @classmethod
    def draw(cls, seed: int, world: int = 8) -> Weather:
        """Swarm: each seed has its own kinds of trouble, so that none hides another."""
        rng = random.Random(seed * 2 + 1)
        launch_ns = rng.choice([50_000, 1_000_000])
        # From a tenth of a launch, where no commit is late, to several launches, where most are.
        message_ns = int(launch_ns * rng.choice([0.1, 1, 3]))
        return cls(
            world=world,
            words_back=rng.choice([1, 1, 2]),
            launch_ns=(launch_ns // 2, launch_ns * rng.choice([1, 3])),
            superstep_ns=(launch_ns, launch_ns * 8),
            message_ns=(message_ns // 4, message_ns * rng.choice([1, 4])),
            supersteps_max=rng.choice([1, 1, 2, 4]),
            operation_chance=rng.choice([0.0, 0.02, 0.15]),
            operation_launches_max=rng.choice([3, 12]),
            busy_chance=rng.choice([0.0, 0.5, 1.0]),
            decline_chance=rng.choice([0.0, 0.05, 0.3]),
            withdraw_chance=rng.choice([0.0, 0.1, 0.4]),
            late_answer_chance=rng.choice([0.0, 0.5]),
            posts_per_rank=rng.choice([1, 2, 4]),
            posts_within_ns=rng.choice([0, 10, 40]) * max(launch_ns, message_ns),
            deadline_ns=rng.choice([2_000_000_000, 6 * message_ns]),
            deadline_launches=rng.choice([64, 2]),
            gathers_max=rng.choice([1, 2, 4, 8]),
            slack_start=rng.choice([2, 4]),
            slack_max=rng.choice([2, 4, 32]),
            straggler_chance=rng.choice([0.0, 0.02, 0.1]),
            ending=rng.choice(["quiet", "quiet", "stop", "drain", "leave"]),
        )


class _Refusal(msgspec.Struct, frozen=True):
    reason: str


class ToyPolicy(msgspec.Struct, frozen=True):
    """Any subset of ranks may be a gang, which meets more overlaps than aligned blocks would."""

    world: int
    supersteps_max: int = 1


def toy_plan(length: int, poster: int, policy: ToyPolicy, excluded: frozenset[int]) -> GangPlan | _Refusal:
    """A gang that depends on nothing but the arguments. Every seventh length is refused."""
    if length % 7 == 0:
        return _Refusal(f"length {length} is refused")
    helpers = sorted(
        (rank for rank in range(policy.world) if rank != poster and rank not in excluded),
        key=lambda rank: (rank * 2_654_435_761 + length * 40_503) % 1_000_003,
    )
    width = (2, 2, 4, policy.world)[length % 4]
    width = min(width, len(helpers) + 1)
    if width < 2 or poster in excluded:
        return _Refusal("no helper is left")
    gang = (*sorted(helpers[: width - 1]), poster)
    bounds = tuple(length * i // width for i in range(width + 1))
    return GangPlan(gang=gang, bounds=bounds, supersteps=1 + length % policy.supersteps_max)


def toy_check(plan: GangPlan, length: int, poster: int, policy: ToyPolicy, excluded: frozenset[int]) -> None:
    expected = toy_plan(length, poster, policy, excluded)
    if plan != expected:
        raise PlanDiffers("plan", expected, plan)


class _Rank:
    """One rank's surroundings: what the engine's loop would hold."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.inbox: deque[ev.Event] = deque()
        self.is_asleep = False
        self.boundary_due = False  #: a boundary event is scheduled
        self.wake_token = 0
        self.free_at_ns = 0  #: when its last launch has nothing more to do here
        self.operation_left = 0
        self.reserved: set[int] = set()
        self.is_draining = False
        self.has_left = False
        self.stop_launch: int | None = None
        self.has_said_bye = False

    @property
    def count(self) -> int:
        return self.member.state.count


class Checker:
    """The properties, stated on what left the machines."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.begun: dict[int, int] = {}  #: seq -> launch
        self.gangs: dict[int, tuple[int, ...]] = {}
        self.missing: dict[int, set[int]] = {}  #: seq -> members that have not begun it yet
        self.roles: dict[int, set[int]] = {}  #: seq -> CP ranks taken
        self.cancelled: set[int] = set()
        self.last_seq = [-1] * world
        self.last_superstep = [-2] * world
        self.commit_launch: dict[int, int] = {}
        self.last_commit = (-1, -1)  #: (seq, L)
        self.stops: dict[int, int] = {}  #: rank -> launch
        self.posts: dict[str, str] = {}  #: request id -> how it ended, "" before
        self.slips = 0

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise SimulationFailed(what)

    def post_wanted(self, request_id: str) -> None:
        self.posts[request_id] = ""

    def post_ended(self, request_id: str, how: str) -> None:
        self.expect(not self.posts[request_id], f"post {request_id} ended twice: {self.posts[request_id]}, {how}")
        self.posts[request_id] = how

    def sequencer_sent(self, message: msg.Message, rank0_count: int) -> None:
        if isinstance(message, msg.Cancel):
            self.cancelled.add(message.seq)
            self.expect(message.seq not in self.begun, f"seq {message.seq} is cancelled after it was begun")
        elif isinstance(message, msg.Commit | msg.Stop) and message.seq not in self.commit_launch:
            self.commit_launch[message.seq] = message.launch
            self.expect(message.launch > rank0_count, f"{message} is past when sent, rank 0 is at {rank0_count}")
            self.expect(message.launch >= self.last_commit[1], f"L fell from {self.last_commit} to {message}")
            self.last_commit = (message.seq, message.launch)

    def begin(self, rank: int, launch: int, begun: do.WhaleBegun) -> None:
        seq, gang = begun.seq, begun.gather.plan.gang
        self.expect(seq not in self.cancelled, f"rank {rank} begins seq {seq}, which was cancelled")
        self.expect(seq > self.last_seq[rank], f"rank {rank} begins seq {seq} after {self.last_seq[rank]}")
        self.last_seq[rank] = seq
        if seq not in self.begun:
            self.expect(len(set(gang)) == len(gang), f"seq {seq}: gang {gang}")
            self.begun[seq], self.gangs[seq] = launch, gang
            self.missing[seq], self.roles[seq] = set(gang), set(range(len(gang)))
            self.slips += begun.slipped
        self.expect(gang == self.gangs[seq], f"seq {seq}: gangs {gang} and {self.gangs[seq]}")
        self.expect(
            self.begun[seq] == launch, f"seq {seq}: rank {rank} begins at {launch}, others at {self.begun[seq]}"
        )
        self.expect(launch - begun.slipped == self.commit_launch[seq], f"seq {seq}: slip {begun.slipped} at {launch}")
        self.missing[seq].discard(rank)
        self.roles[seq].discard(gang.index(rank))
        if not self.missing[seq]:
            self.expect(not self.roles.pop(seq), f"seq {seq}: CP ranks of {gang} are not a permutation")
            del self.missing[seq]

    def composed(self, rank: int, compose: do.Compose) -> None:
        launch = compose.launch
        for seq, missing in self.missing.items():
            self.expect(
                rank not in missing or launch < self.begun[seq],
                f"rank {rank} passes launch {launch}, where seq {seq} began without it",
            )
        if compose.kind is do.LaunchKind.SUPERSTEP:
            assert compose.seq is not None
            self.expect(compose.seq == self.last_seq[rank], f"rank {rank} runs {compose}, begun {self.last_seq[rank]}")
            self.expect(launch == self.begun[compose.seq] + compose.step, f"rank {rank} at step of {compose}")
            if compose.step == 0:
                gap = launch - self.last_superstep[rank]
                self.expect(gap >= 2, f"rank {rank}: no launch between {compose} and the superstep before")
            self.last_superstep[rank] = launch
        elif compose.kind is do.LaunchKind.STOP:
            self.stops[rank] = launch
            self.expect(len(set(self.stops.values())) == 1, f"Stop is begun at {self.stops}")
            self.expect(not any(rank in missing for missing in self.missing.values()), f"rank {rank} stops half run")
        elif launch == self.last_superstep[rank] + 1:
            self.expect(compose.kind is do.LaunchKind.ORDINARY, f"{compose} right after a superstep is restricted")
        self.expect(not self.stops or launch <= min(self.stops.values()), f"rank {rank} passes Stop with {compose}")


class Simulator:
    """One run. `run()` returns when every rank has stopped, or raises SimulationFailed.

    Args:
        member_class, sequencer_class, rewrite_words, word_copies:  mutations of the protocol, to show they are found
        validate_machines:  look at the machines' own invariants after each step as well
    """

    def __init__(
        self,
        seed: int,
        weather: Weather | None = None,
        *,
        member_class: type[Member] = Member,
        sequencer_class: type[Sequencer] = Sequencer,
        rewrite_words: bool = False,
        word_copies: int = WORD_COPIES,
        validate_machines: bool = True,
    ) -> None:
        self.seed = seed
        self.weather = w = weather or Weather.draw(seed)
        self.rng = random.Random(seed)
        self.policy = ToyPolicy(w.world, w.supersteps_max)
        self.ranks = [
            _Rank(member_class(r, w.world, policy=self.policy, check=toy_check, words_back=w.words_back))
            for r in range(w.world)
        ]
        self.sequencer = sequencer_class(
            w.world,
            self.policy,
            plan=toy_plan,
            words_back=w.words_back,
            slack_start=w.slack_start,
            slack_max=w.slack_max,
            deadline_ns=w.deadline_ns,
            deadline_launches=w.deadline_launches,
            gathers_max=w.gathers_max,
        )
        self.checker = Checker(w.world)
        self.rewrite_words = rewrite_words
        self.word_copies = word_copies
        self.validate_machines = validate_machines
        self.words = [[0] * word_copies for _ in range(w.world)]
        self.now_ns = 0
        self.steps_count = 0
        self.is_stop_wanted = False
        self.log: deque[str] = deque(maxlen=LOG_COUNT_MAX)
        self._calendar: list[tuple[int, int, str, tuple[Any, ...]]] = []
        self._calendar_count = 0
        self._last_delivery: dict[tuple[int, int], int] = {}
        self._tick_due_ns: int | None = None
        self._composed_by_all = 0  #: launches below it are composed by every rank

    # ---- the run -----------------------------------------------------------------------------------------------
    def run(self, steps_max: int = 200_000) -> Checker:
        try:
            self._run(steps_max)
        except (ProtocolError, AssertionError) as failure:
            log = "\n".join(self.log)
            raise SimulationFailed(
                f"seed {self.seed}, launch {self._composed_by_all}, {self.now_ns / 1e6:.3f} ms: "
                f"{type(failure).__name__}: {failure}\n{self.weather}\n{log}"
            ) from failure
        return self.checker

    def _run(self, steps_max: int) -> None:
        self._plan_clients()
        for rank in range(self.weather.world):
            self._offer_boundary(rank)
        while self._calendar and self.pending() is not None:
            self.steps_count += 1
            if self.steps_count > steps_max:
                raise SimulationFailed(f"does not end: {self.pending()}")
            self.now_ns, _, what, arguments = heapq.heappop(self._calendar)
            getattr(self, "_on_" + what)(*arguments)
        reason = self.pending()
        if reason is not None:
            raise SimulationFailed(f"nothing more happens: {reason}")

    def pending(self) -> str | None:
        """Why the run is not over, or None: the fleet is quiet and everything has ended."""
        for rank, one in enumerate(self.ranks):
            if one.stop_launch is None:
                return f"rank {rank} has not begun Stop; records {one.member.records}"
            if one.reserved:
                return f"rank {rank} holds scratch for {one.reserved}"
            if not one.member.everyone_said_bye:
                return f"rank {rank} has heard Bye of {sorted(one.member.state.byes)} only"
        for request_id, how in self.checker.posts.items():
            if not how:
                return f"post {request_id} has not ended"
        if self.checker.missing:
            return f"whales begun by some only: {self.checker.missing}"
        return None

    def _schedule(self, at_ns: int, what: str, *arguments: Any) -> None:
        self._calendar_count += 1
        heapq.heappush(self._calendar, (max(at_ns, self.now_ns), self._calendar_count, what, arguments))

    def _between(self, bounds: tuple[int, int]) -> int:
        return self.rng.randint(*bounds)

    def _note(self, who: object, what: object) -> None:
        self.log.append(f"{self.now_ns / 1e6:10.3f} {who!s:>4} {what}")

    # ---- clients -----------------------------------------------------------------------------------------------
    def _plan_clients(self) -> None:
        w, rng = self.weather, self.rng
        for number in range(w.world * w.posts_per_rank):
            self._schedule(rng.randint(0, w.posts_within_ns), "post", rng.randrange(w.world), f"r{number}")
        end_ns = w.posts_within_ns
        if w.ending == "stop":
            self._schedule(rng.randint(0, 2 * end_ns), "stop", None)
        elif w.ending == "drain":
            self._schedule(rng.randint(0, 2 * end_ns), "stop", 30.0)
        elif w.ending == "leave":
            for rank in range(w.world):
                self._schedule(rng.randint(0, 3 * end_ns), "drain_here", rank)

    def _on_post(self, rank: int, request_id: str) -> None:
        one = self.ranks[rank]
        if one.is_draining or one.stop_launch is not None:
            return  # its endpoint answers 503
        length = self.rng.randint(8, 60)
        tokens = array("i", range(length)).tobytes()
        digest = hashlib.sha256(tokens).hexdigest()
        self.checker.post_wanted(request_id)
        self._put(rank, ev.PostWanted(request_id=request_id, tokens=tokens, prompt_hash=digest, max_tokens=4))
        if self.rng.random() < self.weather.withdraw_chance:
            delay_ns = self.rng.randint(0, 6 * (self.weather.message_ns[1] + self.weather.launch_ns[1]))
            self._schedule(self.now_ns + delay_ns, "withdraw", rank, request_id)

    def _on_withdraw(self, rank: int, request_id: str) -> None:
        if not self.checker.posts[request_id]:
            self._put(rank, ev.WithdrawWanted(request_id))

    def _on_stop(self, grace_s: float | None) -> None:
        self.is_stop_wanted = True
        self._step_sequencer(ev.StopWanted(grace_s))

    def _on_drain_here(self, rank: int) -> None:
        self.is_stop_wanted = True
        self.ranks[rank].is_draining = True
        self._put(rank, ev.DrainWanted())

    def _clients_are_done(self) -> bool:
        expected = self.weather.world * self.weather.posts_per_rank
        return len(self.checker.posts) == expected and all(self.checker.posts.values())

    # ---- messages ----------------------------------------------------------------------------------------------
    def _send(self, source: int, target: int, message: msg.Message) -> None:
        """Any delay, but in order per pair."""
        delay_ns = self._between(self.weather.message_ns)
        if self.rng.random() < self.weather.straggler_chance:
            delay_ns *= 10
        at_ns = self.now_ns + delay_ns
        at_ns = max(at_ns, self._last_delivery.get((source, target), 0) + 1)
        self._last_delivery[source, target] = at_ns
        self._schedule(at_ns, "delivery", source, target, message)

    def _on_delivery(self, source: int, target: int, message: msg.Message) -> None:
        if target == SEQUENCER:
            self._step_sequencer(ev.Received(message, source))
        else:
            self._put(target, ev.Received(message))

    def _put(self, rank: int, event: ev.Event) -> None:
        """Whoever puts something into an inbox wakes the rank."""
        one = self.ranks[rank]
        one.inbox.append(event)
        if one.is_asleep:
            self._wake(rank)
        elif one.stop_launch is not None:
            self._drain_inbox(rank)

    def _step_sequencer(self, event: ev.Event) -> None:
        effects = self.sequencer.step(event, self.now_ns, self.ranks[0].count)
        if self.validate_machines:
            validate(self.sequencer)
        for effect in effects:
            assert isinstance(effect, do.SendTo | do.Broadcast)
            targets = [effect.rank] if isinstance(effect, do.SendTo) else range(self.weather.world)
            self.checker.sequencer_sent(effect.message, self.ranks[0].count)
            if not isinstance(effect.message, msg.Gather):
                self._note("seq", f"{effect.message} to {list(targets)}")
            for target in targets:
                self._send(SEQUENCER, target, effect.message)
        due_ns = self.sequencer.next_deadline_ns
        if due_ns is not None and due_ns != self._tick_due_ns:
            self._tick_due_ns = due_ns
            self._schedule(due_ns, "tick", due_ns)

    def _on_tick(self, due_ns: int) -> None:
        if due_ns == self._tick_due_ns:
            self._tick_due_ns = None
            self._step_sequencer(ev.Tick())

    # ---- launches ----------------------------------------------------------------------------------------------
    def _offer_boundary(self, rank: int) -> None:
        """Schedule the next boundary of a rank if the paired exchange lets it come to one."""
        one = self.ranks[rank]
        if one.boundary_due or one.is_asleep or one.stop_launch is not None:
            return
        if one.count + 1 - self.weather.words_back <= self._composed_by_all:
            one.boundary_due = True
            self._schedule(one.free_at_ns, "boundary", rank, False)

    def _on_boundary(self, rank: int, is_woken: bool) -> None:
        one, w = self.ranks[rank], self.weather
        one.boundary_due = False
        if one.operation_left > 0:
            one.operation_left -= 1
        else:
            self._drain_inbox(rank)
            self._say_drained(rank)
            a_peer_is_ahead = any(other.count > one.count for other in self.ranks)
            is_idle = one.member.may_sleep and self.rng.random() >= w.busy_chance
            if is_idle and not a_peer_is_ahead and not is_woken:
                self._fall_asleep(rank)
                return
            if not one.member.is_armed and self.rng.random() < w.operation_chance:
                one.operation_left = self.rng.randint(2, w.operation_launches_max) - 1
        self._compose(rank)

    def _compose(self, rank: int) -> None:
        one, w = self.ranks[rank], self.weather
        launch = one.count
        slot = (launch - w.words_back) % self.word_copies
        words = tuple(copies[slot] for copies in self.words) if launch >= w.words_back else (0,) * w.world
        compose = self._step_member(rank, ev.LaunchComposing(launch, words))
        assert compose is not None
        self.words[rank][launch % self.word_copies] = compose.word
        self.checker.composed(rank, compose)
        is_long = compose.kind is do.LaunchKind.SUPERSTEP
        one.free_at_ns = self.now_ns + self._between(w.superstep_ns if is_long else w.launch_ns)
        if compose.kind is do.LaunchKind.STOP:
            self._note(rank, f"stops at {launch}")
            self.checker.expect(not one.reserved, f"rank {rank} stops with scratch for {one.reserved}")
            one.stop_launch = launch
        for peer, other in enumerate(self.ranks):
            if other.is_asleep and other.count <= launch:
                self._schedule(self.now_ns + BELL_NS, "bell", peer, other.wake_token)
        composed_by_all = min(other.count for other in self.ranks)
        if composed_by_all > self._composed_by_all:
            self._composed_by_all = composed_by_all
            for peer in range(w.world):
                self._offer_boundary(peer)
            self._say_bye()
            if w.ending == "quiet" and not self.is_stop_wanted and self._clients_are_done():
                self._on_stop(None)
        else:
            self._offer_boundary(rank)

    def _fall_asleep(self, rank: int) -> None:
        one = self.ranks[rank]
        one.is_asleep = True
        one.wake_token += 1
        self._schedule(self.now_ns + HEARTBEAT_NS, "heartbeat", rank, one.wake_token)

    def _on_bell(self, rank: int, token: int) -> None:
        if self.ranks[rank].is_asleep and self.ranks[rank].wake_token == token:
            self._wake(rank)

    def _on_heartbeat(self, rank: int, token: int) -> None:
        one = self.ranks[rank]
        if one.is_asleep and one.wake_token == token:
            waiting = [peer for peer, other in enumerate(self.ranks) if other.count > one.count]
            self.checker.expect(not waiting, f"rank {rank} slept until its heartbeat while {waiting} waited for it")
            self._wake(rank)

    def _wake(self, rank: int) -> None:
        one = self.ranks[rank]
        one.is_asleep = False
        one.boundary_due = True
        self._schedule(self.now_ns, "boundary", rank, True)

    # ---- a rank's loop -----------------------------------------------------------------------------------------
    def _drain_inbox(self, rank: int) -> None:
        one = self.ranks[rank]
        late: list[ev.Event] = []
        while one.inbox:
            event = one.inbox.popleft()
            self._step_member(rank, event, late)
            is_commit = isinstance(event, ev.Received) and isinstance(event.message, msg.Commit)
            if is_commit and self.rewrite_words and one.count:
                following = next(r for r in one.member.records if r.launch is not None)
                self.words[rank][(one.count - 1) % self.word_copies] = following.seq + 1
        for answer in late:
            self._step_member(rank, answer)

    def _say_drained(self, rank: int) -> None:
        one = self.ranks[rank]
        if one.is_draining and not one.has_left and not one.member.state.posts:
            one.has_left = True
            self._step_member(rank, ev.DrainedHere())

    def _say_bye(self) -> None:
        for rank, one in enumerate(self.ranks):
            if one.stop_launch is not None and not one.has_said_bye and one.stop_launch < self._composed_by_all:
                one.has_said_bye = True
                self._send(rank, SEQUENCER, msg.Bye(rank=rank))

    def _step_member(self, rank: int, event: ev.Event, late: list[ev.Event] | None = None) -> do.Compose | None:
        """Step a Member and perform its effects; `late` collects answers to Reserve for the end of a drain."""
        one = self.ranks[rank]
        effects = one.member.step(event, self.now_ns)
        if self.validate_machines:
            validate(one.member)
        composing = isinstance(event, ev.LaunchComposing)
        for at, effect in enumerate(effects):
            self.checker.expect(
                isinstance(effect, do.Compose) == (composing and at == len(effects) - 1), f"{event} gives {effects}"
            )
            match effect:
                case do.Send(message):
                    self._note(rank, type(message).__name__ if isinstance(message, msg.Post) else message)
                    self._send(rank, SEQUENCER, message)
                case do.Reserve():
                    self._reserve(rank, effect, late)
                case do.Disarm(seq, reason):
                    self.checker.expect(seq in one.reserved, f"rank {rank} disarms seq {seq}: {reason}")
                    one.reserved.discard(seq)
                case do.PostEnded(request_id, reason):
                    self._note(rank, effect)
                    self.checker.post_ended(request_id, reason)
                case do.WhaleBegun():
                    self._note(rank, f"begins seq {effect.seq} at {one.count - 1}, slipped {effect.slipped}")
                    self.checker.expect(effect.seq in one.reserved, f"rank {rank} begins seq {effect.seq} unreserved")
                    self.checker.begin(rank, one.count - 1, effect)
                    if effect.gather.plan.poster == rank:
                        self.checker.post_ended(effect.gather.request_id, "superstep")
                case do.WhaleOver(seq):
                    one.reserved.discard(seq)
                case do.DrainBegun():
                    one.is_draining = True
                case do.Compose():
                    return effect
        return None

    def _reserve(self, rank: int, effect: do.Reserve, late: list[ev.Event] | None) -> None:
        one, rng = self.ranks[rank], self.rng
        answer: ev.Event = ev.Reserved(effect.seq)
        if not effect.is_owner and (one.is_draining or rng.random() < self.weather.decline_chance):
            answer = ev.CannotReserve(effect.seq, "no scratch")
        else:
            one.reserved.add(effect.seq)
        if late is not None and rng.random() < self.weather.late_answer_chance:
            late.append(answer)
        else:
            self._step_member(rank, answer)
