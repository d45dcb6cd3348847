"""A fleet on one thread in virtual time: real machines, schedulers and hub centre, everything else made from a seed.

Rule 1: Member, Sequencer, Allgather, Conductor and Scheduler are the shipped ones; what is simulated is what surrounds
        them: processes, launches, words, bells, frames, clients, scratch.
Rule 2: the checker sees only what the machines do to their surroundings, never their state; so a machine that lies to
        itself is still found out.

What is modelled of the data plane: a rank may compose launch n + 1 only when every rank has composed launch n (the
paired exchange; n - 1 with one launch in flight), an idle rank sleeps and is woken by a peer's launch bell, by
whatever is put into its inbox, or by a heartbeat. A rank that is not armed starts operations of several launches,
during which it does not look into its inbox.

What is modelled of the control plane: a connection neither loses nor reorders frames, and they take as long as a launch
or longer, so commits come late. Frames of different peers overtake each other. Hello and Mapped are repeated until they
are answered. A process that is killed takes the newest of its frames with it; the end of its connection comes behind
the others. Whoever hears of a death fails; when all have ended the supervisor starts the world again, and frames that
processes of the world before had not got rid of (one that was stopped and goes on) may still come to the new one.

Each seed draws its own mix (`Weather.draw`). A run has two phases: at first trouble, for safety; then the weather calms
down for good, and everything must come to its end (`pending` says what has not): every request, and the world, in Stop.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from whalez.engine.scheduler import LaunchPlan, Phase, Scheduler
from whalez.errors import PlanDiffers, ProtocolError
from whalez.hub.conductor import Conductor, Out
from whalez.planning.choice import PlanRefused
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
REQUESTS_MAX = 16  #: of a seed; what a longer day would show, more seeds show sooner

CHUNK_TOKENS, ARMED_ROWS, SLOTS, PAGES, PAGE_TOKENS = 24, 6, 3, 24, 8
LENGTHS = (4, 60)  #: of prompts


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
    busy_chance: float = 0.7  #: of a rank without work to launch nevertheless, instead of falling asleep
    decline_chance: float = 0.1
    withdraw_chance: float = 0.2
    whale_chance: float = 0.9  #: of a request to be posted
    late_answer_chance: float = 0.3  #: the driver answers a Reserve at the end of the drain, not at once
    posts_per_rank: int = 3
    posts_within_ns: int = 20_000_000
    deadline_ns: int = 2_000_000_000
    deadline_launches: int = 64
    gathers_max: int = 4
    slack_start: int = 4
    slack_max: int = 32  #: small: L is too early and whales slip
    straggler_chance: float = 0.0  #: of a message to take ten times as long
    slow_rank: int = -1  #: its launches take five times as long
    early_deaths: int = 0  #: while the world comes up
    deaths: int = 0
    zombie_chance: float = 0.0  #: of a process of a world that has ended to send its last frames once more, much later
    ending: str = "quiet"  #: quiet: Stop after the last request | stop: in the middle | drain | leave: rank by rank

    @classmethod
    def draw(cls, seed: int, world: int | None = None) -> Weather:
        """Swarm: each seed has its own kinds of trouble, so that none hides another."""
        rng = random.Random(seed * 2 + 1)
        if world is None:
            world = rng.randint(9, 64) if rng.random() < 0.05 else rng.randint(2, 8)
        launch_ns = rng.choice([50_000, 1_000_000])
        # From a tenth of a launch, where no commit is late, to several launches, where most are.
        message_ns = int(launch_ns * rng.choice([0.1, 1, 3]))
        is_deadly = rng.random() < 0.25
        return cls(
            world=world,
            words_back=rng.choice([1, 1, 2]),
            launch_ns=(launch_ns // 2, launch_ns * rng.choice([1, 3])),
            superstep_ns=(launch_ns, launch_ns * 8),
            message_ns=(message_ns // 4, message_ns * rng.choice([1, 4])),
            supersteps_max=rng.choice([1, 1, 2, 4]),
            operation_chance=rng.choice([0.0, 0.02, 0.15]),
            operation_launches_max=rng.choice([3, 12]),
            busy_chance=rng.choice([0.0, 0.0, 0.5, 1.0]),
            decline_chance=rng.choice([0.0, 0.05, 0.3]),
            withdraw_chance=rng.choice([0.0, 0.1, 0.4]),
            whale_chance=rng.choice([1.0, 0.7]),
            late_answer_chance=rng.choice([0.0, 0.5]),
            posts_per_rank=rng.choice([1, 1, 2, 4]),
            posts_within_ns=rng.choice([0, 10, 20]) * max(launch_ns, message_ns),
            deadline_ns=rng.choice([2_000_000_000, 6 * message_ns]),
            deadline_launches=rng.choice([64, 2]),
            gathers_max=rng.choice([1, 2, 4, 8]),
            slack_start=rng.choice([2, 4]),
            slack_max=rng.choice([2, 4, 32]),
            straggler_chance=rng.choice([0.0, 0.02, 0.1]),
            slow_rank=rng.choice([-1, -1, -1, rng.randrange(world)]),
            early_deaths=rng.choice([0, 1, 2]) if is_deadly else 0,
            deaths=rng.choice([0, 1, 2]) if is_deadly else 0,
            zombie_chance=rng.choice([0.0, 0.3, 1.0]) if is_deadly else 0.0,
            ending=rng.choice(["quiet", "quiet", "stop", "drain", "leave"]),
        )

    def calmed(self) -> Weather:
        """The same world, without trouble."""
        return msgspec.structs.replace(
            self,
            message_ns=(self.message_ns[0], self.message_ns[0] + 1),
            operation_chance=0.0,
            decline_chance=0.0,
            withdraw_chance=0.0,
            straggler_chance=0.0,
        )


class ToyPolicy(msgspec.Struct, frozen=True):
    """Any subset of ranks may be a gang, which meets more overlaps than aligned blocks would."""

    world: int
    supersteps_max: int = 1


def toy_plan(length: int, poster: int, policy: ToyPolicy, excluded: frozenset[int]) -> GangPlan | PlanRefused:
    """A gang that depends on nothing but the arguments. Every seventh length is refused."""
    if length % 7 == 0:
        return PlanRefused(field="length", reason=f"length {length} is refused")
    helpers = sorted(
        (rank for rank in range(policy.world) if rank != poster and rank not in excluded),
        key=lambda rank: (rank * 2_654_435_761 + length * 40_503) % 1_000_003,
    )
    width = (2, 2, 4, policy.world)[length % 4]
    width = min(width, len(helpers) + 1)
    if width < 2 or poster in excluded:
        return PlanRefused(field="excluded", reason="no helper is left")
    gang = (*sorted(helpers[: width - 1]), poster)
    bounds = tuple(length * i // width for i in range(width + 1))
    return GangPlan(gang=gang, bounds=bounds, supersteps=1 + length % policy.supersteps_max)


def toy_check(plan: GangPlan, length: int, poster: int, policy: ToyPolicy, excluded: frozenset[int]) -> None:
    expected = toy_plan(length, poster, policy, excluded)
    if plan != expected:
        raise PlanDiffers("plan", expected, plan)


class _Process:
    """One start of one rank: what its hub and the engine's loop would hold."""

    def __init__(self, rank: int, incarnation: str, member: Member) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.member = member
        self.scheduler = Scheduler(
            slots=SLOTS, pages=PAGES, page_tokens=PAGE_TOKENS, chunk_tokens=CHUNK_TOKENS, armed_rows=ARMED_ROWS
        )
        self.inbox: deque[ev.Event] = deque()
        self.sent: deque[msg.Message] = deque(maxlen=4)
        self.prompts: dict[str, bytes] = {}  #: of requests that are here
        self.left_to_decode: dict[str, int] = {}
        self.is_cancelled: set[str] = set()
        self.is_over = False  #: killed, failed, refused, or stopped and done
        self.has_table = False
        self.has_started = False
        self.is_asleep = False
        self.boundary_due = False  #: a boundary event is scheduled
        self.wake_token = 0
        self.free_at_ns = 0  #: when its last launch has nothing more to do here
        self.operation_left = 0
        self.count = 0  #: index of the launch composed next
        self.composed_ns = 0  #: when it composed last
        self.reserved: set[int] = set()
        self.is_draining = False
        self.has_left = False
        self.stop_launch: int | None = None
        self.has_said_bye = False


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
        self.slips = 0
        self.local_count = 0  #: posts that ended without a superstep

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise SimulationFailed(what)

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


class _Run:
    """One life of the world: from the start of a process of rank 0 to its end."""

    def __init__(self, sequencer: Sequencer, conductor: Conductor, world: int, word_copies: int) -> None:
        self.sequencer = sequencer
        self.conductor = conductor
        self.checker = Checker(world)
        self.processes: dict[int, _Process] = {}  #: by rank, those that launch
        self.word_rows = [[0] * world for _ in range(word_copies)]
        self.composed_by_all = 0  #: launches below it are composed by every rank
        self.behind_count = world  #: ranks that have composed exactly `composed_by_all` launches
        self.sleepers: set[int] = set()
        self.dead: set[int] = set()  #: ranks that were killed, or have failed
        self.has_killed = False
        self.tick_due_ns: int | None = None


class Simulator:
    """One seed. `run()` returns when everything has ended, or raises SimulationFailed.

    Args:
        member_class, sequencer_class, conductor_class, rewrite_words, word_copies:  mutations of the protocol, to show
            that they are found
        validate_machines:  look at the machines' own invariants after each step as well (a quarter of the time)
    """

    def __init__(
        self,
        seed: int,
        weather: Weather | None = None,
        *,
        member_class: type[Member] = Member,
        sequencer_class: type[Sequencer] = Sequencer,
        conductor_class: type[Conductor] = Conductor,
        rewrite_words: bool = False,
        word_copies: int = WORD_COPIES,
        validate_machines: bool = False,
    ) -> None:
        self.seed = seed
        self.weather = self.trouble = weather or Weather.draw(seed)
        self.world = self.weather.world
        self.rng = random.Random(seed)
        self.policy = ToyPolicy(self.world, self.weather.supersteps_max)
        self.member_class = member_class
        self.sequencer_class = sequencer_class
        self.conductor_class = conductor_class
        self.rewrite_words = rewrite_words
        self.word_copies = word_copies
        self.validate_machines = validate_machines
        self.now_ns = 0
        self.steps_count = 0
        self.starts_count = 0
        self.is_stop_wanted = False
        self.is_calm = False
        self.requests: dict[str, str] = {}  #: id -> how it ended, "" before
        self.clients_left = 0  #: requests that are still to come
        self.live: _Run | None = None
        self.runs: list[_Run] = []
        self.processes: list[_Process] = []  #: the newest of each rank
        self.log: deque[tuple[int, object, object]] = deque(maxlen=LOG_COUNT_MAX)
        self._by_incarnation: dict[str, _Process] = {}
        #: by incarnation, of a process that is over: the run it ended in, and when the last of its frames arrives there
        self._cut: dict[str, tuple[_Run | None, int]] = {}
        self._starting: set[int] = set()
        self._calendar: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._calendar_count = 0
        self._last_up: dict[str, int] = {}
        self._last_down: dict[str, int] = {}

    # ---- the run -----------------------------------------------------------------------------------------------
    def run(self, steps_max: int = 200_000) -> Simulator:
        try:
            self._run(steps_max)
        except (ProtocolError, AssertionError) as failure:
            raise SimulationFailed(
                f"seed {self.seed}, {self.now_ns / 1e6:.3f} ms: {type(failure).__name__}: {failure}\n{self.trouble}\n"
                + self.short_log()
            ) from failure
        return self

    def short_log(self, count: int = LOG_COUNT_MAX) -> str:
        """The last entries: time in ms, rank or who else, what it did."""
        return "\n".join(f"{at / 1e6:10.3f} {who!s:>4} {what}" for at, who, what in list(self.log)[-count:])

    def _run(self, steps_max: int) -> None:
        self._plan_clients()
        for rank in range(self.world):
            self.processes.append(self._new_process(rank))
        while self._calendar:
            self.steps_count += 1
            if self.steps_count > steps_max:
                raise SimulationFailed(f"does not end: {self.pending()}")
            self.now_ns, _, what, arguments = heapq.heappop(self._calendar)
            what(*arguments)
            if self.is_calm and all(process.is_over for process in self.processes) and self.pending() is None:
                return
        raise SimulationFailed(f"nothing more happens: {self.pending()}")

    def pending(self) -> str | None:
        """Why the seed is not over, or None."""
        for process in self.processes:
            if not process.is_over:
                heard = sorted(process.member.state.byes)
                return (
                    f"rank {process.rank} at launch {process.count} has not ended: started {process.has_started}, "
                    f"records {process.member.records}, Stop {process.stop_launch}, heard Bye of {heard}"
                )
        if not self.is_stop_wanted:
            return "nobody has stopped the world"
        open_requests = [request_id for request_id, how in self.requests.items() if not how]
        if open_requests:
            return f"requests {open_requests} have not ended"
        for run in self.runs:
            if run.checker.missing and not run.has_killed:
                return f"whales begun by some only: {run.checker.missing}"
        return None

    def _schedule(self, at_ns: int, what: Callable[..., None], *arguments: Any) -> None:
        self._calendar_count += 1
        heapq.heappush(self._calendar, (at_ns, self._calendar_count, what, arguments))

    def _between(self, bounds: tuple[int, int]) -> int:
        return bounds[0] + int((bounds[1] - bounds[0] + 1) * self.rng.random())

    def _note(self, who: object, what: object) -> None:
        self.log.append((self.now_ns, who, what))

    # ---- clients and the supervisor ----------------------------------------------------------------------------
    def _plan_clients(self) -> None:
        w, rng = self.weather, self.rng
        count = min(self.world * w.posts_per_rank, REQUESTS_MAX)
        self.clients_left = count
        within_ns = max(w.posts_within_ns, 20 * w.message_ns[1])
        for number in range(count):
            at_ns = rng.randint(0, w.posts_within_ns) + 12 * w.message_ns[1]
            self._schedule(at_ns, self._ask, rng.randrange(self.world), f"r{number}")
        for _ in range(w.early_deaths):
            self._schedule(rng.randint(0, 8 * w.message_ns[1]), self._kill, rng.randrange(self.world))
        for _ in range(w.deaths):
            self._schedule(rng.randint(0, 3 * within_ns), self._kill, rng.randrange(self.world))
        if w.ending == "stop":
            self._schedule(rng.randint(0, 3 * within_ns), self._stop, None)
        elif w.ending == "drain":
            self._schedule(rng.randint(0, 3 * within_ns), self._stop, 30.0)
        elif w.ending == "leave":
            self._schedule(rng.randint(0, 3 * within_ns), self._leave)
        self._schedule(4 * within_ns, self._calm_down)

    def _calm_down(self) -> None:
        self._note("sim", "the weather calms down")
        self.is_calm = True
        self.weather = self.weather.calmed()

    def _ask(self, rank: int, request_id: str) -> None:
        """A client's request; a rank that is not up, or drains, answers 503."""
        self.clients_left -= 1
        process = self.processes[rank]
        if process.is_over or not process.has_started or process.is_draining or process.stop_launch is not None:
            self.requests[request_id] = "refused"
            self._stop_if_quiet()
            return
        self.requests[request_id] = ""
        length = self.rng.randint(*LENGTHS)
        process.prompts[request_id] = array("i", range(length)).tobytes()
        is_whale = length > ARMED_ROWS and self.rng.random() < self.weather.whale_chance
        tokens_max = self.rng.randint(1, 4)
        process.left_to_decode[request_id] = tokens_max
        process.scheduler.add(request_id, length, tokens_max, whale=is_whale)
        self._wake(process)
        if self.rng.random() < self.weather.withdraw_chance:
            delay_ns = self.rng.randint(0, 6 * (self.weather.message_ns[1] + self.weather.launch_ns[1]))
            self._schedule(self.now_ns + delay_ns, self._withdraw, process, request_id)

    def _withdraw(self, process: _Process, request_id: str) -> None:
        if process.is_over or self.requests[request_id] or request_id in process.is_cancelled:
            return
        process.is_cancelled.add(request_id)
        self._put(process, ev.WithdrawWanted(request_id))

    def _end_request(self, process: _Process, request_id: str, how: str) -> None:
        if self.requests[request_id]:
            raise SimulationFailed(f"{request_id} ends twice: {self.requests[request_id]}, then {how}")
        self.requests[request_id] = how
        del process.prompts[request_id], process.left_to_decode[request_id]
        process.scheduler.remove(request_id)
        self._stop_if_quiet()

    def _stop_if_quiet(self) -> None:
        if self.weather.ending == "quiet" and self.clients_left == 0 and all(self.requests.values()):
            self._schedule(self.now_ns, self._stop, None)

    def _has_healthy_run(self) -> bool:
        run = self.live
        return run is not None and run.conductor.has_started and run.conductor.failure is None

    def _stop(self, grace_s: float | None) -> None:
        run = self.live
        if self.is_stop_wanted:
            return
        if run is None or not self._has_healthy_run():  # not while it comes up
            self._schedule(self.now_ns + 10 * self.weather.message_ns[1], self._stop, grace_s)
            return
        self._note("sim", f"stop the world, grace {grace_s}")
        self.is_stop_wanted = True
        self._perform(run, run.conductor.order(ev.StopWanted(grace_s), self.now_ns, self._count_of_zero()))

    def _leave(self) -> None:
        """Every rank gets its own SIGTERM, one after the other."""
        if not self._has_healthy_run():
            self._schedule(self.now_ns + 10 * self.weather.message_ns[1], self._leave)
            return
        self._note("sim", "all ranks leave")
        self.is_stop_wanted = True
        for process in self.processes:
            at_ns = self.now_ns + self._between((0, 20 * self.weather.message_ns[1]))
            self._schedule(at_ns, self._drain_here, process)

    def _drain_here(self, process: _Process) -> None:
        if not process.is_over:
            process.is_draining = True
            self._put(process, ev.DrainWanted())

    # ---- processes ---------------------------------------------------------------------------------------------
    def _new_process(self, rank: int) -> _Process:
        w = self.weather
        self.starts_count += 1
        member = self.member_class(rank, self.world, policy=self.policy, check=toy_check, words_back=w.words_back)
        process = _Process(rank, f"{rank}.{self.starts_count}", member)
        self._by_incarnation[process.incarnation] = process
        self._note(rank, f"starts as {process.incarnation}")
        if rank == 0:
            sequencer = self.sequencer_class(
                self.world,
                self.policy,
                plan=toy_plan,
                words_back=w.words_back,
                slack_start=w.slack_start,
                slack_max=w.slack_max,
                deadline_ns=w.deadline_ns,
                deadline_launches=w.deadline_launches,
                gathers_max=w.gathers_max,
            )
            self.live = _Run(sequencer, self.conductor_class(self.world, sequencer), self.world, self.word_copies)
            self.runs.append(self.live)
        self._schedule(self.now_ns, self._say_hello, process)
        return process

    def _start(self, rank: int) -> None:
        self._starting.discard(rank)
        if self.processes[rank].is_over and not self.is_stop_wanted:
            self.processes[rank] = self._new_process(rank)

    def _say_hello(self, process: _Process) -> None:
        """Until it is answered."""
        if process.is_over or process.has_table:
            return
        entry = msg.SlabEntry(rank=process.rank, incarnation=process.incarnation, host="h", pid=1, ticket=b"")
        self._send(process, msg.Hello(entry=entry, world=self.world, fingerprint={"model": "toy"}))
        self._schedule(self.now_ns + 3 * self.trouble.message_ns[1], self._say_hello, process)

    def _say_mapped(self, process: _Process) -> None:
        if process.is_over or process.has_started:
            return
        self._send(process, msg.Mapped(rank=process.rank))
        self._schedule(self.now_ns + 3 * self.trouble.message_ns[1], self._say_mapped, process)

    def _kill(self, rank: int) -> None:
        process = self.processes[rank]
        if process.is_over:
            return
        self._note(rank, "is killed")
        for run in self.runs:
            run.has_killed = run.has_killed or run is self.live or run.processes.get(rank) is process
        self._end(process)

    def _fail(self, process: _Process, why: object) -> None:
        self._note(process.rank, f"fails: {why}")
        if self.live is not None and not any(run.has_killed for run in self.runs):
            raise SimulationFailed(f"rank {process.rank} fails though nobody was killed: {why}")
        self._end(process)

    def _end(self, process: _Process) -> None:
        """However a process ends: its requests end with it, its frames up to some moment arrive, then it is gone."""
        process.is_over = True
        for request_id in list(process.prompts):
            self._end_request(process, request_id, "error")
        cut_ns = self.now_ns + self._between((0, self.weather.message_ns[1]))
        self._cut[process.incarnation] = self.live, cut_ns
        run = self.live
        if run is not None:
            run.dead.add(process.rank)
        if self.rng.random() < self.weather.zombie_chance:
            for message in process.sent:
                if isinstance(message, msg.Hello):
                    continue  # a process that had no answer yet is welcome, and alive
                at_ns = self.now_ns + self._between((0, 40 * self.weather.message_ns[1]))
                self._schedule(at_ns, self._arrives_late, process, message)
        if process.rank == 0:
            self.live = None
            for other in self.processes[1:]:
                self._schedule(cut_ns + self._between(self.weather.message_ns), self._lose_centre, other)
        else:
            self._schedule(cut_ns + self._between(self.weather.message_ns), self._is_gone, process)
        self._supervise()

    def _finish(self, process: _Process) -> None:
        """After Stop: nobody waits for this process any more."""
        if not process.is_over:
            self._note(process.rank, "exits")
            process.is_over = True
            for request_id in list(process.prompts):
                self._end_request(process, request_id, "error")

    def _supervise(self) -> None:
        """Start again what has ended: a rank by itself while the world comes up, all together afterwards."""
        if self.is_stop_wanted:
            return
        over = [process.rank for process in self.processes if process.is_over]
        is_up = self.live is not None and self.live.conductor.is_complete
        for rank in over:
            if rank not in self._starting and (not is_up or len(over) == self.world):
                self._starting.add(rank)
                self._schedule(self.now_ns + 4 * self._between(self.weather.message_ns), self._start, rank)

    def _is_gone(self, process: _Process) -> None:
        """Whichever rank 0 it was connected to last."""
        run = self.live
        if run is not None:
            self._perform(run, run.conductor.gone(process.incarnation, "killed", self.now_ns, self._count_of_zero()))

    def _lose_centre(self, process: _Process) -> None:
        """The connection to rank 0 has ended: fatal once the table is out, else the new rank 0 is said hello to."""
        if not process.is_over and process.has_table and not process.has_said_bye:
            self._fail(process, "rank 0 is gone")

    # ---- frames ------------------------------------------------------------------------------------------------
    def _delay_ns(self) -> int:
        delay_ns = self._between(self.weather.message_ns)
        if self.weather.straggler_chance and self.rng.random() < self.weather.straggler_chance:
            delay_ns *= 10
        return delay_ns

    def _send(self, process: _Process, message: msg.Message) -> None:
        """To rank 0. Any delay, but in order per process."""
        process.sent.append(message)
        at_ns = max(self.now_ns + self._delay_ns(), self._last_up.get(process.incarnation, 0) + 1)
        self._last_up[process.incarnation] = at_ns
        self._schedule(at_ns, self._arrives, process, message)

    def _arrives(self, process: _Process, message: msg.Message) -> None:
        run = self.live
        last_run, cut_ns = self._cut.get(process.incarnation, (run, self.now_ns))
        if run is not None and run is last_run and self.now_ns <= cut_ns:
            outs = run.conductor.received(process.incarnation, message, self.now_ns, self._count_of_zero())
            self._perform(run, outs)

    def _arrives_late(self, process: _Process, message: msg.Message) -> None:
        """A process of a world that has ended was only stopped, and goes on."""
        run = self.live
        if run is not None:
            outs = run.conductor.received(process.incarnation, message, self.now_ns, self._count_of_zero())
            self._perform(run, outs)

    def _count_of_zero(self) -> int:
        return self.processes[0].count if self.processes else 0

    def _perform(self, run: _Run, outs: list[Out]) -> None:
        if self.validate_machines:
            validate(run.sequencer)
        last: msg.Message | None = None
        for out in outs:
            message = out.message
            if message is not last:
                last = message
                if isinstance(message, msg.Died):
                    if message.rank not in run.dead:
                        raise SimulationFailed(f"rank {message.rank} is called dead, and lives: {message.how}")
                elif not isinstance(message, msg.Gather):
                    run.checker.sequencer_sent(message, self._count_of_zero())
                self._note("hub", type(message).__name__ if isinstance(message, msg.Gather | msg.Table) else message)
            target = self._by_incarnation.get(out.incarnation)
            if target is not None and not target.is_over:
                at_ns = max(self.now_ns + self._delay_ns(), self._last_down.get(out.incarnation, 0) + 1)
                self._last_down[out.incarnation] = at_ns
                self._schedule(at_ns, self._delivered, target, message, run)
        # A conductor that has failed only listens: its sequencer's deadline passes, and stays.
        due_ns = run.sequencer.next_deadline_ns if run.conductor.failure is None else None
        if due_ns is not None and due_ns != run.tick_due_ns:
            run.tick_due_ns = due_ns
            self._schedule(max(due_ns, self.now_ns), self._tick, run, due_ns)

    def _tick(self, run: _Run, due_ns: int) -> None:
        if due_ns == run.tick_due_ns and run is self.live:
            run.tick_due_ns = None
            self._perform(run, run.conductor.tick(self.now_ns, self._count_of_zero()))

    def _delivered(self, process: _Process, message: msg.Message, run: _Run) -> None:
        if process.is_over or (process.rank and run is not self.live):  # the connection ended with rank 0
            return
        match message:
            case msg.Table():
                if not process.has_table:
                    process.has_table = True
                    self._schedule(self.now_ns + self._between(self.weather.message_ns), self._say_mapped, process)
            case msg.WorldStarts():
                if not process.has_started:
                    process.has_started = True
                    run.processes[process.rank] = process
                    self._offer_boundary(run, process)
            case msg.Refused():
                self._note(process.rank, f"is refused: {message.reason}")
                if self._run_of(process) is not None:
                    raise SimulationFailed(f"rank {process.rank}, which runs, is refused: {message.reason}")
                self._end(process)
            case msg.Died():
                self._fail(process, message)
            case _:
                self._put(process, ev.Received(message))

    def _put(self, process: _Process, event: ev.Event) -> None:
        """Whoever puts something into an inbox wakes the rank."""
        process.inbox.append(event)
        if process.is_asleep:
            self._wake(process)
        elif process.stop_launch is not None:
            self._drain_inbox(process)
            if process.member.everyone_said_bye:
                self._finish(process)

    # ---- launches ----------------------------------------------------------------------------------------------
    def _run_of(self, process: _Process) -> _Run | None:
        """The run that a living process takes part in; None when rank 0 is gone, and with it the run."""
        run = self.live
        return run if run is not None and run.processes.get(process.rank) is process else None

    def _offer_boundary(self, run: _Run, process: _Process) -> None:
        """Schedule the next boundary of a rank if the paired exchange lets it come to one."""
        if process.boundary_due or process.is_asleep or process.stop_launch is not None or process.is_over:
            return
        if process.count + 1 - self.weather.words_back <= run.composed_by_all:
            process.boundary_due = True
            self._schedule(max(process.free_at_ns, self.now_ns), self._boundary, process, False)

    def _boundary(self, process: _Process, is_woken: bool) -> None:
        process.boundary_due = False
        run = self._run_of(process)
        if process.is_over or run is None:
            return
        if process.operation_left > 0:
            process.operation_left -= 1
        else:
            w, member = self.weather, process.member
            if process.inbox:
                self._drain_inbox(process)
            if process.scheduler.waiting_count:
                self._admit(process)
            if process.is_draining and not process.has_left and process.scheduler.is_empty:
                process.has_left = True
                self._step_member(process, ev.DrainedHere())
            if (
                not is_woken
                and not process.scheduler.has_work
                and member.may_sleep
                and self.rng.random() >= w.busy_chance
                and not any(other.count > process.count for other in run.processes.values())
            ):
                self._fall_asleep(run, process)
                return
            if w.operation_chance and not member.is_armed and self.rng.random() < w.operation_chance:
                process.operation_left = self.rng.randint(2, w.operation_launches_max) - 1
        self._compose(run, process)

    def _admit(self, process: _Process) -> None:
        for entry in process.scheduler.admit():
            if entry.phase is Phase.POSTED:
                tokens = process.prompts[entry.request_id]
                wanted = ev.PostWanted(
                    request_id=entry.request_id,
                    tokens=tokens,
                    prompt_hash=hashlib.sha256(tokens).hexdigest(),
                    max_tokens=entry.max_tokens,
                )
                self._step_member(process, wanted)

    def _compose(self, run: _Run, process: _Process) -> None:
        w, rank, launch = self.weather, process.rank, process.count
        row = run.word_rows[(launch - w.words_back) % self.word_copies]
        words = tuple(row) if launch >= w.words_back else (0,) * self.world
        compose = self._step_member(process, ev.LaunchComposing(launch, words))
        assert compose is not None
        process.count, process.composed_ns = launch + 1, self.now_ns
        run.word_rows[launch % self.word_copies][rank] = compose.word
        run.checker.composed(rank, compose)
        if not process.scheduler.is_empty:
            self._run_launch(process, compose, process.scheduler.compose(compose.kind))
        took_ns = self._between(w.superstep_ns if compose.kind is do.LaunchKind.SUPERSTEP else w.launch_ns)
        process.free_at_ns = self.now_ns + (5 * took_ns if rank == w.slow_rank else took_ns)
        if compose.kind is do.LaunchKind.STOP:
            self._note(rank, f"stops at {launch}")
            run.checker.expect(not process.reserved, f"rank {rank} stops with scratch for {process.reserved}")
            process.stop_launch = launch
        for peer in run.sleepers:
            other = run.processes[peer]
            if other.count <= launch:
                self._schedule(self.now_ns + BELL_NS, self._bell, other, other.wake_token)
        if launch == run.composed_by_all:
            run.behind_count -= 1
            if not run.behind_count:
                run.composed_by_all = launch + 1
                run.behind_count = sum(other.count == launch + 1 for other in run.processes.values())
                for other in run.processes.values():
                    self._offer_boundary(run, other)
                self._say_bye(run)
                return
        self._offer_boundary(run, process)

    def _run_launch(self, process: _Process, compose: do.Compose, plan: LaunchPlan) -> None:
        """What becomes of the requests; the rows themselves are nobody's business here."""
        rows = sum(chunk.length for chunk in plan.chunks)
        bound = {do.LaunchKind.ORDINARY: CHUNK_TOKENS, do.LaunchKind.ARMED: ARMED_ROWS}.get(compose.kind, 0)
        if rows > bound:
            raise SimulationFailed(f"rank {process.rank}: {rows} prompt rows in {compose}")
        for chunk in plan.chunks:
            process.scheduler.prefilled(chunk)
        for request_id in plan.decodes:
            process.left_to_decode[request_id] -= 1
            if request_id in process.is_cancelled:
                self._end_request(process, request_id, "cancelled")
            elif process.left_to_decode[request_id] == 0:
                self._end_request(process, request_id, "finished")

    def _fall_asleep(self, run: _Run, process: _Process) -> None:
        process.is_asleep = True
        process.wake_token += 1
        run.sleepers.add(process.rank)
        self._schedule(self.now_ns + HEARTBEAT_NS, self._heartbeat, process, process.wake_token)

    def _bell(self, process: _Process, token: int) -> None:
        if process.is_asleep and process.wake_token == token:
            self._wake(process)

    def _heartbeat(self, process: _Process, token: int) -> None:
        run = self._run_of(process)
        if run is not None and process.is_asleep and process.wake_token == token:
            waiting = [
                rank
                for rank, other in run.processes.items()
                if other.count > process.count and other.composed_ns + BELL_NS < self.now_ns
            ]
            if waiting:
                raise SimulationFailed(f"rank {process.rank} slept until its heartbeat, {waiting} waited for it")
            self._wake(process)

    def _wake(self, process: _Process) -> None:
        run = self._run_of(process)
        if process.is_asleep and run is not None:
            process.is_asleep = False
            run.sleepers.discard(process.rank)
            process.boundary_due = True
            self._schedule(self.now_ns, self._boundary, process, True)

    def _say_bye(self, run: _Run) -> None:
        for process in run.processes.values():
            is_over = process.stop_launch is not None and process.stop_launch < run.composed_by_all
            if is_over and not process.has_said_bye and not process.is_over:
                process.has_said_bye = True
                for request_id in list(process.prompts):
                    self._end_request(process, request_id, "error")
                self._send(process, msg.Bye(rank=process.rank))
                self._schedule(self.now_ns + 2_000_000_000, self._finish, process)

    # ---- a rank's loop -----------------------------------------------------------------------------------------
    def _drain_inbox(self, process: _Process) -> None:
        late: list[ev.Event] = []
        while process.inbox:
            event = process.inbox.popleft()
            if isinstance(event, ev.WithdrawWanted):
                self._cancel(process, event)
                continue
            self._step_member(process, event, late)
            if self.rewrite_words and process.count and isinstance(event, ev.Received):
                self._rewrite_word(process, event.message)
        for answer in late:
            self._step_member(process, answer)

    def _rewrite_word(self, process: _Process, message: msg.Message) -> None:
        run = self._run_of(process)
        if isinstance(message, msg.Commit) and run is not None:
            following = next(record for record in process.member.records if record.launch is not None)
            run.word_rows[(process.count - 1) % self.word_copies][process.rank] = following.seq + 1

    def _cancel(self, process: _Process, wish: ev.WithdrawWanted) -> None:
        """As the loop does: a posted request ends with its post, any other at once."""
        if wish.request_id not in process.scheduler or process.stop_launch is not None:
            return
        if process.scheduler.entry(wish.request_id).phase is Phase.POSTED:
            self._step_member(process, wish)
        else:
            self._end_request(process, wish.request_id, "cancelled")

    def _step_member(self, process: _Process, event: ev.Event, late: list[ev.Event] | None = None) -> do.Compose | None:
        """Step a Member and perform its effects; `late` collects answers to Reserve for the end of a drain."""
        effects = process.member.step(event, self.now_ns)
        if self.validate_machines:
            validate(process.member)
        composing = type(event) is ev.LaunchComposing
        if composing and len(effects) == 1 and type(effects[0]) is do.Compose:
            return effects[0]
        rank, run = process.rank, self._run_of(process)
        assert run is not None
        for at, effect in enumerate(effects):
            if isinstance(effect, do.Compose) != (composing and at == len(effects) - 1):
                raise SimulationFailed(f"{event} gives {effects}")
            match effect:
                case do.Send(message):
                    self._note(rank, message if not isinstance(message, msg.Post) else f"Post {message.request_id}")
                    self._send(process, message)
                case do.Reserve():
                    self._reserve(process, effect, late)
                case do.Disarm(seq, reason):
                    run.checker.expect(seq in process.reserved, f"rank {rank} disarms seq {seq}: {reason}")
                    process.reserved.discard(seq)
                case do.PostEnded(request_id, _):
                    self._note(rank, effect)
                    run.checker.local_count += 1
                    process.scheduler.post_ended(request_id)
                    if request_id in process.is_cancelled:
                        self._end_request(process, request_id, "cancelled")
                case do.WhaleBegun():
                    self._note(rank, f"begins seq {effect.seq} at {process.count}, slipped {effect.slipped}")
                    run.checker.expect(effect.seq in process.reserved, f"rank {rank} begins {effect.seq} unreserved")
                    run.checker.begin(rank, process.count, effect)
                    if effect.gather.plan.poster == rank:
                        process.scheduler.whale_prefilled(effect.gather.request_id)
                case do.WhaleOver(seq):
                    process.reserved.discard(seq)
                case do.DrainBegun():
                    process.is_draining = True
                case do.Compose():
                    return effect
        return None

    def _reserve(self, process: _Process, effect: do.Reserve, late: list[ev.Event] | None) -> None:
        rng = self.rng
        answer: ev.Event = ev.Reserved(effect.seq)
        if not effect.is_owner and (process.is_draining or rng.random() < self.weather.decline_chance):
            answer = ev.CannotReserve(effect.seq, "no scratch")
        else:
            process.reserved.add(effect.seq)
        if late is not None and rng.random() < self.weather.late_answer_chance:
            late.append(answer)
        else:
            self._step_member(process, answer)
