"""Every interleaving of a small fleet: a search over the states of the shipped Member and Sequencer.

Rule 1: the machines are the shipped ones; their states are data, so a node of the search is a tuple of states, queues
        and words, and a step of a machine is made once per (state, event) and remembered.
Rule 2: a property is stated on what the machines do to their surroundings, and has a name in `PROPERTIES`.
Rule 3: whether a rank sleeps and what wakes it is not decided here: `Member.may_sleep` and the shipped `Bells` say so.

What may happen in a node (`moves`): the head of a queue to the sequencer arrives; a rank comes to its boundary, having
found any prefix of its inbox there, and composes (the paired exchange permitting: launch n when everybody has composed
n - words_back); a client withdraws; a helper declines; the gather deadline passes; the world is told to stop or to
drain; a rank dies. Queues are FIFO per peer; a message may arrive at any moment up to `lateness` launches of its rank
after it was sent, so an operation of several launches is a rank that finds nothing in its inbox. How often each trouble
may strike is the `World`'s. Every chain of moves ends, so the search is complete if the horizon is not reached.

Where nothing more happens by itself (all that was sent has arrived, and every rank that may sleep sleeps; the heartbeat
does not count) everything must have ended; so nobody is left armed, waiting or asleep for ever.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whalez.errors import PlanDiffers, ProtocolError
from whalez.fabric.doorbell import BELL_LAUNCH, Bells, Why
from whalez.fabric.layout import SlabLayout, SlabSpec
from whalez.fabric.private import PrivateSlab
from whalez.planning.choice import PlanRefused
from whalez.planning.plan import GangPlan
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg
from whalez.rendezvous.invariants import validate
from whalez.rendezvous.member import Member, MemberState, RecordState
from whalez.rendezvous.sequencer import Sequencer, SequencerState

CALM_LAUNCHES_MAX = 40  #: beyond the horizon, for everything to end
#: A fleet in which every rank could sleep launches by itself up to here only: later would show the same, a launch on.
IDLE_LAUNCHES = 1

#: Name of each property -> what it says.
PROPERTIES: dict[str, str] = {
    "together": "nobody enters a whale alone: who is in its gang holds the commit and begins it, or has died",
    "one launch": "all that hold the commit of a whale begin it at the same launch, no earlier than L",
    "apart": "two whales that share a rank never share or overlap launches, and are entered in seq order",
    "a launch between": "between two whales a rank has at least one launch of its own, and it is unrestricted",
    "armed ends": "no member is armed for ever",
    "cancelled": "a cancelled whale is entered by nobody",
    "posts end": "every post ends once: in a superstep, in a local prefill, or in an error",
    "awake": "no rank sleeps while a peer waits for it in the next launch",
    "L is ahead": "L is not past, at any member, when the commit is sent, and never falls",
    "stop": "Stop is begun by all at one launch, with nothing armed, committed or half run, and all hear all Byes",
    "death is heard": "who is left after a death fails, or stops as agreed; only the dead are called dead",
    "legal": "no machine is handed a step that its tables do not have, and its invariants hold after each step",
}


class PropertyBroken(AssertionError):
    """A property does not hold. `name` is its key in PROPERTIES."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        assert name in PROPERTIES
        self.name = name


class Whale(msgspec.Struct, frozen=True, kw_only=True):
    """A post of the world; `gang` ends with its poster."""

    gang: tuple[int, ...]
    supersteps: int = 1


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What is explored. The numbers say how often a trouble may strike."""

    name: str
    ranks: int
    whales: tuple[Whale, ...]
    lateness: int = 1  #: launches of its rank that a message outlives at most, on its way; any order within that
    slack: int = 0  #: the sequencer's; so small that a commit comes late whenever it is late at all
    launches: int = 30  #: the horizon: no rank composes more; far away, for lateness bounds how long things take
    words_back: int = 1
    declines: int = 0
    withdraws: int = 0
    deadlines: int = 0
    deaths: int = 0
    stops: int = 0
    drains: int = 0


class Env(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of the troubles, and what has become of the processes (sets of ranks)."""

    declines: int
    withdraws: int
    deadlines: int
    deaths: int
    stops: int
    drains: int
    ticks: int = 0
    stop_wanted: bool = False
    dead: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    draining: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    bye: frozenset[int] = frozenset()


class Begun(NamedTuple):
    """A whale that some member has begun, at launch `first`; its last superstep is launch `end` - 1."""

    seq: int
    first: int
    end: int
    gang: tuple[int, ...]
    ranks: frozenset[int]  #: that have begun it


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the properties remember.

    begun:      ascending seq
    last:       per rank, (seq, launch) of its last superstep
    ended:      per whale of the world, whether its post has ended
    commits:    (seq, L), in the order they were sent
    """

    last: tuple[tuple[int, int], ...]
    ended: tuple[bool, ...]
    begun: tuple[Begun, ...] = ()
    cancelled: frozenset[int] = frozenset()
    commits: tuple[tuple[int, int], ...] = ()
    stops: tuple[tuple[int, int], ...] = ()


#: (id of a message, the launch of its rank that it precedes at the latest), in order
Queue = tuple[tuple[int, int], ...]
#: members, sequencer (ids of states), queues to the sequencer, queues to the ranks, newest words of each rank (newest
#: last), id of Env, id of Facts
Node = tuple[tuple[int, ...], int, tuple[Queue, ...], tuple[Queue, ...], tuple[Any, ...], int, int]
Move = tuple[Any, ...]


class _Ids:
    """Small numbers for equal things, so that nodes are tuples of ints."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._ids: dict[Any, int] = {}

    def of(self, thing: Any, key: Any = None) -> int:
        key = thing if key is None else key
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.things)
            self.things.append(thing)
        return found


class _Draft:
    """A node while a move is made."""

    __slots__ = ("downs", "env", "facts", "members", "sequencer", "ups", "words")

    def __init__(self, node: Node) -> None:
        members, self.sequencer, ups, downs, words, self.env, self.facts = node
        self.members, self.ups, self.downs, self.words = list(members), list(ups), list(downs), list(words)

    def node(self) -> Node:
        return (
            tuple(self.members),
            self.sequencer,
            tuple(self.ups),
            tuple(self.downs),
            tuple(self.words),
            self.env,
            self.facts,
        )


class Result(msgspec.Struct, kw_only=True):
    """What a search has seen. `broken` is None if every property holds."""

    world: str
    states_count: int = 0
    moves_count: int = 0
    calm_states_count: int = 0
    is_complete: bool = True  #: False: the search ended at `states_max` or `depth_max`
    depth: int = 0  #: every chain of so many moves was followed; the longest there is, if complete
    begun_count: int = 0  #: distinct (whale, launch) begun somewhere
    shared_count: int = 0  #: distinct launches in which two whales ran
    broken: str | None = None
    what: str = ""
    trace: list[str] = msgspec.field(default_factory=list)


class Explorer:
    """Breadth-first search of one World.

    Args:
        member_class, sequencer_class, bells_class:  mutations of the protocol, to show that they are found
        validate_machines:              look at the machines' own invariants, too
    """

    def __init__(
        self,
        world: World,
        *,
        member_class: type[Member] = Member,
        sequencer_class: type[Sequencer] = Sequencer,
        bells_class: type[Bells] = Bells,
        validate_machines: bool = True,
    ) -> None:
        self.world = world
        self.validate_machines = validate_machines
        self.members = [
            member_class(
                rank,
                world.ranks,
                policy=None,
                check=self._check,
                words_back=world.words_back,
                slip_max_launches=10 * CALM_LAUNCHES_MAX,
            )
            for rank in range(world.ranks)
        ]
        self.sequencer = sequencer_class(
            world.ranks,
            None,
            plan=self._plan,
            words_back=world.words_back,
            slack_start=world.slack,
            slack_min=world.slack,
            slack_max=world.slack,
            deadline_ns=0,
            deadline_launches=0,
        )
        self._bells_class = bells_class
        self._wakings: dict[tuple[int, tuple[int, ...], bool], bool] = {}
        self._member_states = _Ids()
        self._sequencer_states = _Ids()
        self._messages = _Ids()
        self._envs = _Ids()
        self._facts = _Ids()
        self._member_steps: dict[tuple[int, int, Any], tuple[int, tuple[do.Effect, ...]]] = {}
        self._sequencer_steps: dict[tuple[int, Any, int, int], tuple[int, tuple[do.Effect, ...]]] = {}
        self._calm: set[Node] = set()
        self._begun: set[tuple[int, int]] = set()
        self._shared: set[int] = set()

    # ---- the search --------------------------------------------------------------------------------------------
    def run(self, states_max: int = 10_000_000, depth_max: int = 1_000_000) -> Result:
        """Search until the horizon, or a property is broken, or `states_max` states are known, or `depth_max` moves.

        A search that ends before all is seen takes the calm way from each of its last states.
        """
        result = Result(world=self.world.name)
        root = self._root()
        parents: dict[Node, tuple[Node, Move] | None] = {root: None}
        level = [root]
        node, move = root, ("the calm way",)
        try:
            while level and result.is_complete:
                following: list[Node] = []
                for node in level:
                    for move in self._moves(node):
                        after = self._make(node, move)
                        result.moves_count += 1
                        if after not in parents:
                            parents[after] = (node, move)
                            following.append(after)
                    move = ("the calm way",)
                    self._check_calm(node)
                level = following
                result.depth += bool(level)
                result.is_complete = not level or (len(parents) <= states_max and result.depth < depth_max)
            for node in level:  # none, if the search is complete
                self._follow_calm(node)
        except PropertyBroken as broken:
            result.broken, result.what = broken.name, str(broken)
            result.trace = self._trace(parents, node, move)
        result.states_count, result.calm_states_count = len(parents), len(self._calm)
        result.begun_count, result.shared_count = len(self._begun), len(self._shared)
        return result

    def _trace(self, parents: dict[Node, tuple[Node, Move] | None], node: Node, move: Move) -> list[str]:
        moves = [move]
        at: Node | None = node
        while at is not None:
            before = parents[at]
            if before is not None:
                moves.append(before[1])
            at = None if before is None else before[0]
        return [" ".join(map(str, one)) for one in reversed(moves)]

    def _root(self) -> Node:
        w = self.world
        draft = _Draft(
            (
                tuple(self._member_id(rank, self.members[rank].state) for rank in range(w.ranks)),
                self._sequencer_states.of(self.sequencer.state, self.sequencer.state.key()),
                ((),) * w.ranks,
                ((),) * w.ranks,
                ((),) * w.ranks,
                self._envs.of(
                    Env(
                        declines=w.declines,
                        withdraws=w.withdraws,
                        deadlines=w.deadlines,
                        deaths=w.deaths,
                        stops=w.stops,
                        drains=w.drains,
                    )
                ),
                self._facts.of(Facts(last=((-1, -9),) * w.ranks, ended=(False,) * len(w.whales))),
            )
        )
        # Wanted at once; how long a post takes to the sequencer is the queue's.
        for at, whale in enumerate(w.whales):
            tokens = array("i", range(at + 1)).tobytes()
            digest = hashlib.sha256(tokens).hexdigest()
            wanted = ev.PostWanted(request_id=f"r{at}", tokens=tokens, prompt_hash=digest, max_tokens=1)
            self._step_member(draft, whale.gang[-1], wanted)
        return draft.node()

    def _plan(self, length: int, poster: int, policy: Any, excluded: frozenset[int]) -> GangPlan | PlanRefused:
        """The length of a prompt tells which whale it is."""
        whale = self.world.whales[length - 1]
        gang = tuple(rank for rank in whale.gang if rank not in excluded)
        if poster in excluded or len(gang) < 2:
            return PlanRefused(field="excluded", reason="no helper is left")
        bounds = tuple(length * i // len(gang) for i in range(len(gang) + 1))
        return GangPlan(gang=gang, bounds=bounds, supersteps=whale.supersteps)

    def _check(self, plan: GangPlan, length: int, poster: int, policy: Any, excluded: frozenset[int]) -> None:
        expected = self._plan(length, poster, policy, excluded)
        if plan != expected:
            raise PlanDiffers("plan", expected, plan)

    # ---- moves -------------------------------------------------------------------------------------------------
    def _moves(self, node: Node) -> list[Move]:
        members, _, ups, downs, _, env_id, facts_id = node
        env: Env = self._envs.things[env_id]
        facts: Facts = self._facts.things[facts_id]
        w = self.world
        moves: list[Move] = []
        sequencer_lives = 0 not in env.dead and 0 not in env.failed
        is_quiet = not any(downs) and all(self._may_sleep(members, rank) for rank in range(w.ranks))
        if sequencer_lives:
            moves += [("arrives", rank) for rank in range(w.ranks) if ups[rank]]
        for rank in range(w.ranks):
            if rank in env.dead or rank in env.failed:
                continue
            state = self._state(members, rank)
            if self._is_stopped(state):
                moves += [("hears", rank, taken) for taken in range(1, len(downs[rank]) + 1)]
            elif self._may_compose(members, rank) and state.count < (IDLE_LAUNCHES if is_quiet else w.launches):
                if ups[rank] and ups[rank][0][1] <= state.count:
                    continue
                overdue = sum(due <= state.count for _, due in downs[rank])
                for taken in range(overdue, len(downs[rank]) + 1):
                    moves.append(("launch", rank, taken, -1))
                    if env.declines:
                        gathers = self._gathers_in(rank, downs[rank][:taken])
                        moves += [("launch", rank, taken, seq) for seq in gathers]
            moves += self._quiet_moves(members, rank, env)
            if env.deaths:
                moves.append(("dies", rank))
        if env.withdraws:
            for at, ended in enumerate(facts.ended):
                poster = w.whales[at].gang[-1]
                if not ended and poster not in env.dead and poster not in env.failed:
                    moves.append(("withdraws", at))
        if env.deadlines and sequencer_lives:
            moves.append(("deadline",))
        if sequencer_lives and not env.stop_wanted:
            if env.stops:
                moves.append(("stop",))
            if env.drains:
                moves.append(("drain",))
        return moves

    def _quiet_moves(self, members: tuple[int, ...], rank: int, env: Env) -> list[Move]:
        """What a loop does by itself as soon as it can: say DrainedHere, say Bye."""
        state = self._state(members, rank)
        if rank in env.draining and rank not in env.left and not state.posts:
            return [("drained", rank)]
        # The Stop launch is over when everybody has composed it.
        is_over = min(self._count(members, other) for other in range(self.world.ranks)) >= state.count
        if self._is_stopped(state) and is_over and rank not in env.bye:
            return [("bye", rank)]
        return []

    def _make(self, node: Node, move: Move) -> Node:
        draft = _Draft(node)
        try:
            getattr(self, "_make_" + move[0])(draft, *move[1:])
        except ProtocolError as error:
            raise PropertyBroken("legal", f"{move}: {error}") from error
        return draft.node()

    def _make_arrives(self, draft: _Draft, rank: int) -> None:
        message = self._messages.things[draft.ups[rank][0][0]]
        draft.ups[rank] = draft.ups[rank][1:]
        event = message if isinstance(message, ev.PeerGone) else ev.Received(message, rank)
        self._step_sequencer(draft, event)

    def _make_launch(self, draft: _Draft, rank: int, taken: int, declined: int) -> None:
        self._take(draft, rank, taken, declined)
        env: Env = self._envs.things[draft.env]
        if rank in env.failed:
            return
        state = self._state(draft.members, rank)
        launch, back = state.count, self.world.words_back
        words = (0,) * self.world.ranks
        if launch >= back:
            words = tuple(
                draft.words[other][launch - back - self._count(draft.members, other)]
                for other in range(self.world.ranks)
            )
        self._step_member(draft, rank, ev.LaunchComposing(launch, words))

    def _make_hears(self, draft: _Draft, rank: int, taken: int) -> None:
        self._take(draft, rank, taken, -1)

    def _take(self, draft: _Draft, rank: int, taken: int, declined: int) -> None:
        inbox = draft.downs[rank]
        draft.downs[rank] = inbox[taken:]
        for message_id, _ in inbox[:taken]:
            message = self._messages.things[message_id]
            if isinstance(message, msg.Died):
                self._fail(draft, rank, message)
                return
            self._step_member(draft, rank, ev.Received(message), declined)

    def _make_withdraws(self, draft: _Draft, at: int) -> None:
        self._change(draft, withdraws=self._env(draft).withdraws - 1)
        self._step_member(draft, self.world.whales[at].gang[-1], ev.WithdrawWanted(f"r{at}"))

    def _make_deadline(self, draft: _Draft) -> None:
        env = self._env(draft)
        self._change(draft, deadlines=env.deadlines - 1, ticks=env.ticks + 1)
        self._step_sequencer(draft, ev.Tick())

    def _make_stop(self, draft: _Draft) -> None:
        self._change(draft, stops=self._env(draft).stops - 1, stop_wanted=True)
        self._step_sequencer(draft, ev.StopWanted())

    def _make_drain(self, draft: _Draft) -> None:
        self._change(draft, drains=self._env(draft).drains - 1, stop_wanted=True)
        self._step_sequencer(draft, ev.StopWanted(msg.DRAIN_GRACE_S_MAX))

    def _make_drained(self, draft: _Draft, rank: int) -> None:
        self._change(draft, left=self._env(draft).left | {rank})
        self._step_member(draft, rank, ev.DrainedHere())

    def _make_bye(self, draft: _Draft, rank: int) -> None:
        self._change(draft, bye=self._env(draft).bye | {rank})
        bye = msg.Bye(rank=rank)
        self._send_up(draft, rank, bye)

    def _make_dies(self, draft: _Draft, rank: int) -> None:
        """What it sent still arrives, then the end of the connection; the sequencer dies with rank 0."""
        env = self._env(draft)
        self._change(draft, deaths=env.deaths - 1, dead=env.dead | {rank})
        for at, whale in enumerate(self.world.whales):
            if whale.gang[-1] == rank and not self._facts.things[draft.facts].ended[at]:
                self._end_post(draft, f"r{at}")
        if rank:
            draft.downs[rank] = ()
            self._send_up(draft, rank, ev.PeerGone(rank, "killed"))
            return
        draft.ups = [()] * self.world.ranks
        draft.downs[0] = ()
        for other in range(1, self.world.ranks):
            if other not in env.dead:
                self._send_down(draft, other, msg.Died(rank=0, how="killed"))

    def _fail(self, draft: _Draft, rank: int, died: msg.Died) -> None:
        env = self._env(draft)
        if died.rank not in env.dead:
            raise PropertyBroken("death is heard", f"rank {rank} hears that {died.rank} has died, which lives")
        self._change(draft, failed=env.failed | {rank})
        draft.downs[rank] = ()
        for at, whale in enumerate(self.world.whales):
            if whale.gang[-1] == rank and not self._facts.things[draft.facts].ended[at]:
                self._end_post(draft, f"r{at}")

    # ---- the calm way ------------------------------------------------------------------------------------------
    def _check_calm(self, node: Node) -> None:
        """A calm move leads to a node that the search visits as well; only beyond its end it must be followed."""
        move = self._calm_move(node)
        if move is None:
            self._check_settled(node)
        elif move[0] == "launch" and self._count(node[0], move[1]) >= self.world.launches:
            self._follow_calm(node)

    def _follow_calm(self, node: Node) -> None:
        way: list[Node] = []
        at = node
        while at not in self._calm:
            way.append(at)
            move = self._calm_move(at)
            if move is None:
                self._check_settled(at)
                break
            if self._count(at[0], 0) > self.world.launches + CALM_LAUNCHES_MAX:
                raise PropertyBroken("armed ends", f"after {CALM_LAUNCHES_MAX} calm launches: {self._open(at)}")
            at = self._make(at, move)
        self._calm.update(way)

    def _calm_move(self, node: Node) -> Move | None:
        members, _, ups, downs, _, env_id, _ = node
        env: Env = self._envs.things[env_id]
        ranks = range(self.world.ranks)
        if 0 not in env.dead and 0 not in env.failed:
            for rank in ranks:
                if ups[rank]:
                    return ("arrives", rank)
        alive = [rank for rank in ranks if rank not in env.dead and rank not in env.failed]
        for rank in alive:
            if self._is_stopped(self._state(members, rank)):
                if downs[rank]:
                    return ("hears", rank, len(downs[rank]))
            elif self._has_died_in(downs[rank]) or (
                self._may_compose(members, rank)
                and (not self._may_sleep(members, rank) or self._is_woken(members, rank, bool(downs[rank])))
            ):
                return ("launch", rank, len(downs[rank]), -1)
        for rank in alive:
            moves = self._quiet_moves(members, rank, env)
            if moves:
                return moves[0]
        return None

    def _check_settled(self, node: Node) -> None:
        """Nothing more happens by itself: has everything ended?"""
        members, env_id, facts_id = node[0], node[5], node[6]
        env: Env = self._envs.things[env_id]
        facts: Facts = self._facts.things[facts_id]
        alive = [r for r in range(self.world.ranks) if r not in env.dead and r not in env.failed]
        for rank in alive:  # first, for whoever is waited for is why a peer stays armed
            state = self._state(members, rank)
            waiting = [peer for peer in alive if self._count(members, peer) > state.count]
            if waiting and not self._is_stopped(state):
                raise PropertyBroken("awake", f"rank {rank} sleeps before launch {state.count}, {waiting} wait for it")
        for rank in alive:
            state = self._state(members, rank)
            if state.records and not self._is_stopped(state):
                raise PropertyBroken("armed ends", f"rank {rank} holds {self._open(node)}")
            if env.stop_wanted or env.dead:
                everyone = len(state.byes) == self.world.ranks or state.byes >= set(alive) | env.dead
                if env.dead and not self._is_stopped(state):
                    raise PropertyBroken("death is heard", f"rank {rank} has not heard of the death of {set(env.dead)}")
                if not (self._is_stopped(state) and everyone):
                    raise PropertyBroken("stop", f"rank {rank} is {state.phase.value}, has heard Bye of {state.byes}")
        if not all(facts.ended):
            raise PropertyBroken("posts end", f"ended: {facts.ended}")
        for whale in facts.begun:
            missing = set(whale.gang) - whale.ranks - env.dead - env.failed
            if missing:
                raise PropertyBroken("together", f"seq {whale.seq} began at {whale.first} without {missing}")

    def _open(self, node: Node) -> str:
        states = [self._state(node[0], rank) for rank in range(self.world.ranks)]
        return str([[(r.seq, r.state.value, r.launch) for r in state.records] for state in states])

    # ---- machines ----------------------------------------------------------------------------------------------
    def _step_member(self, draft: _Draft, rank: int, event: ev.Event, declined: int = -1) -> None:
        key = (rank, draft.members[rank], event if not isinstance(event, ev.Received) else id(event.message))
        known = self._member_steps.get(key)
        if known is None:
            member = self.members[rank]
            member.state = self._state(draft.members, rank)
            effects = tuple(member.step(event, 0))
            if self.validate_machines:
                self._validate(member)
            known = self._member_steps[key] = (self._member_id(rank, member.state), effects)
        draft.members[rank], effects = known
        for effect in effects:
            match effect:
                case do.Compose():
                    self._composed(draft, rank, effect)
                case do.Send(message):
                    self._send_up(draft, rank, message)
                case do.Reserve(seq=seq):
                    if seq == declined:
                        self._change(draft, declines=self._env(draft).declines - 1)
                        self._step_member(draft, rank, ev.CannotReserve(seq, "no scratch"))
                    else:
                        self._step_member(draft, rank, ev.Reserved(seq))
                case do.PostEnded(request_id, _):
                    self._end_post(draft, request_id)
                case do.WhaleBegun():
                    self._begin(draft, rank, effect)
                case do.DrainBegun():
                    self._change(draft, draining=self._env(draft).draining | {rank})

    def _step_sequencer(self, draft: _Draft, event: ev.Event) -> None:
        count, ticks = self._count(draft.members, 0), self._env(draft).ticks
        key = (draft.sequencer, event, count, ticks)
        known = self._sequencer_steps.get(key)
        if known is None:
            self.sequencer.state = self._sequencer_states.things[draft.sequencer]
            effects = tuple(self.sequencer.step(event, ticks, count))
            if self.validate_machines:
                self._validate(self.sequencer)
            state: SequencerState = self.sequencer.state
            known = self._sequencer_steps[key] = (self._sequencer_states.of(state, state.key()), effects)
        draft.sequencer, effects = known
        dead = self._env(draft).dead
        for effect in effects:
            assert isinstance(effect, do.SendTo | do.Broadcast)
            self._sent(draft, effect.message)
            targets = (effect.rank,) if isinstance(effect, do.SendTo) else range(self.world.ranks)
            for rank in targets:
                if rank not in dead:
                    self._send_down(draft, rank, effect.message)

    def _validate(self, machine: Member | Sequencer) -> None:
        try:
            validate(machine)
        except AssertionError as failure:
            raise PropertyBroken("legal", str(failure)) from failure

    def _send_up(self, draft: _Draft, rank: int, message: Any) -> None:
        if 0 not in self._env(draft).dead:
            due = self._count(draft.members, rank) + self.world.lateness
            draft.ups[rank] = (*draft.ups[rank], (self._messages.of(message), due))

    def _send_down(self, draft: _Draft, rank: int, message: msg.Message) -> None:
        due = self._count(draft.members, rank) + self.world.lateness
        draft.downs[rank] = (*draft.downs[rank], (self._messages.of(message), due))

    def _member_id(self, rank: int, state: MemberState) -> int:
        return self._member_states.of(state, (rank, state.key()))

    def _state(self, members: Any, rank: int) -> MemberState:
        found: MemberState = self._member_states.things[members[rank]]
        return found

    def _count(self, members: Any, rank: int) -> int:
        found: int = self._member_states.things[members[rank]].count
        return found

    def _is_stopped(self, state: MemberState) -> bool:
        return state.phase.value == "stopped"

    def _may_sleep(self, members: Any, rank: int) -> bool:
        self.members[rank].state = self._state(members, rank)
        return self.members[rank].may_sleep

    def _is_woken(self, members: Any, rank: int, has_put: bool) -> bool:
        """Does anything but the heartbeat end the sleep of this rank? `has_put`: there is something in its inbox."""
        counts = tuple(self._count(members, peer) for peer in range(self.world.ranks))
        known = self._wakings.get((rank, counts, has_put))
        if known is None:
            known = self._wakings[rank, counts, has_put] = self._ask_bells(rank, counts, has_put)
        return known

    def _ask_bells(self, rank: int, counts: tuple[int, ...], has_put: bool) -> bool:
        """Ring every launch bell as the loops of ranks at these counts have, put, and let this rank fall asleep."""
        world = self.world.ranks
        layout = SlabLayout.from_spec(SlabSpec.of_bells(world))
        slabs = [PrivateSlab(owner, layout.nbytes) for owner in range(world)]
        bells = [self._bells_class(layout, slabs, owner) for owner in range(world)]
        for peer, count in enumerate(counts):
            others = np.array([other for other in range(world) if other != peer], np.int64)
            # With the words of n-2 a launch is composed while the one before is in flight; it begins when that is over.
            for launch in range(min(count, min(counts) + 1)):
                bells[peer].ring(BELL_LAUNCH, others, launch + 1)
        if has_put:
            bells[rank].wake()
        return bells[rank].sleep(counts[rank], 0.0) is not Why.TICK

    def _may_compose(self, members: Any, rank: int) -> bool:
        """The paired exchange: launch n - words_back of everybody is composed."""
        count = self._count(members, rank) + 1 - self.world.words_back
        return all(self._count(members, other) >= count for other in range(self.world.ranks))

    def _gathers_in(self, rank: int, inbox: Queue) -> list[int]:
        """Seqs of the whales among these messages that this rank may decline: those it helps with."""
        messages = [self._messages.things[at] for at, _ in inbox]
        return [m.seq for m in messages if isinstance(m, msg.Gather) and m.plan.poster != rank]

    def _has_died_in(self, inbox: Queue) -> bool:
        """A stored failure is found in the middle of a launch, too, by whoever waits for a peer there."""
        return any(isinstance(self._messages.things[at], msg.Died) for at, _ in inbox)

    def _env(self, draft: _Draft) -> Env:
        found: Env = self._envs.things[draft.env]
        return found

    def _change(self, draft: _Draft, **fields: Any) -> None:
        draft.env = self._envs.of(msgspec.structs.replace(self._env(draft), **fields))

    # ---- properties --------------------------------------------------------------------------------------------
    def _note(self, draft: _Draft, **fields: Any) -> None:
        draft.facts = self._facts.of(msgspec.structs.replace(self._facts.things[draft.facts], **fields))

    def _end_post(self, draft: _Draft, request_id: str) -> None:
        ended = list(self._facts.things[draft.facts].ended)
        at = int(request_id[1:])
        if ended[at]:
            raise PropertyBroken("posts end", f"{request_id} ends twice")
        ended[at] = True
        self._note(draft, ended=tuple(ended))

    def _sent(self, draft: _Draft, message: msg.Message) -> None:
        """By the sequencer."""
        facts: Facts = self._facts.things[draft.facts]
        if isinstance(message, msg.Cancel):
            if any(message.seq == whale.seq for whale in facts.begun):
                raise PropertyBroken("cancelled", f"{message} after the whale was begun")
            self._note(draft, cancelled=facts.cancelled | {message.seq})
        elif isinstance(message, msg.Commit | msg.Stop) and (message.seq, message.launch) not in facts.commits:
            counts = [self._count(draft.members, rank) for rank in range(self.world.ranks)]
            if message.launch < max(counts):
                raise PropertyBroken("L is ahead", f"{message} is past when sent, the ranks are at {counts}")
            if facts.commits and message.launch < facts.commits[-1][1]:
                raise PropertyBroken("L is ahead", f"L fell from {facts.commits[-1]} to {message}")
            self._note(draft, commits=(*facts.commits, (message.seq, message.launch)))

    def _begin(self, draft: _Draft, rank: int, begun: do.WhaleBegun) -> None:
        facts: Facts = self._facts.things[draft.facts]
        seq, gang, launch = begun.seq, begun.gather.plan.gang, self._count(draft.members, rank) - 1
        self._begun.add((seq, launch))
        if seq in facts.cancelled:
            raise PropertyBroken("cancelled", f"rank {rank} begins seq {seq}, which was cancelled")
        if launch < dict(facts.commits)[seq]:
            raise PropertyBroken("one launch", f"rank {rank} begins seq {seq} at {launch}, before its L")
        end = launch + begun.gather.plan.supersteps
        last_seq, last_launch = facts.last[rank]
        if seq < last_seq:
            raise PropertyBroken("apart", f"rank {rank} begins seq {seq} at {launch} after {facts.last[rank]}")
        others = frozenset[int]()
        for other in facts.begun:
            if other.seq == seq:
                others = other.ranks
            elif other.first < end and launch < other.end:
                self._shared.add(launch)
                if set(gang) & set(other.gang):
                    raise PropertyBroken("apart", f"seqs {seq} and {other.seq} share launch {launch}: {gang}")
        if launch - last_launch < 2:
            raise PropertyBroken("a launch between", f"rank {rank} begins seq {seq} at {launch}: {facts.last[rank]}")
        for member in gang:
            if member not in others and member != rank and self._count(draft.members, member) > launch:
                self._passes(draft, member, seq, launch)
        entry = Begun(seq, launch, end, gang, others | {rank})
        kept = [other for other in facts.begun if other.seq != seq]
        self._note(draft, begun=tuple(sorted([*kept, entry])))
        if gang[-1] == rank:
            self._end_post(draft, begun.gather.request_id)

    def _passes(self, draft: _Draft, rank: int, seq: int, launch: int) -> None:
        """A member has composed the launch at which others begin the whale, and has not begun it."""
        records = self._state(draft.members, rank).records
        holds_commit = any(one.seq == seq and one.state is RecordState.COMMITTED for one in records)
        name = "one launch" if holds_commit else "together"
        raise PropertyBroken(name, f"rank {rank} passes launch {launch}, where seq {seq} begins, without beginning it")

    def _composed(self, draft: _Draft, rank: int, compose: do.Compose) -> None:
        facts: Facts = self._facts.things[draft.facts]
        launch = compose.launch
        draft.words[rank] = (*draft.words[rank], compose.word)[-2 * self.world.words_back :]
        for whale in facts.begun:
            if rank in whale.gang and rank not in whale.ranks and launch >= whale.first:
                self._passes(draft, rank, whale.seq, whale.first)
        last_seq, last_launch = facts.last[rank]
        if facts.stops and launch > facts.stops[0][1]:
            raise PropertyBroken("stop", f"rank {rank} passes Stop with {compose}")
        if compose.kind is do.LaunchKind.SUPERSTEP:
            assert compose.seq is not None
            began = next((whale.first for whale in facts.begun if whale.seq == compose.seq), -1)
            if launch != began + compose.step:
                raise PropertyBroken("one launch", f"rank {rank} runs {compose}, begun at {began}")
            last = list(facts.last)
            last[rank] = (compose.seq, launch)
            self._note(draft, last=tuple(last))
        elif compose.kind is do.LaunchKind.STOP:
            stops = (*facts.stops, (rank, launch))
            if len({at for _, at in stops}) > 1:
                raise PropertyBroken("stop", f"Stop is begun at {stops}")
            if len(self._state(draft.members, rank).records) != 1:
                raise PropertyBroken("stop", f"rank {rank} stops with {self._state(draft.members, rank).records}")
            if any(self._count(draft.members, other) > launch + 1 for other in range(self.world.ranks)):
                raise PropertyBroken("stop", f"rank {rank} stops at {launch}, which others have passed")
            self._note(draft, stops=tuple(sorted(stops)))
        elif launch == last_launch + 1 and compose.kind is not do.LaunchKind.ORDINARY:
            raise PropertyBroken("a launch between", f"rank {rank}: {compose} right after seq {last_seq}")


#: Troubles that a world may have one of, and how it is called.
TROUBLES = ("declines", "withdraws", "deadlines", "deaths", "stops", "drains")


def _pair(count: int, name: str, **more: Any) -> World:
    """One or two whales of ranks 0 and 1, the second the other way round."""
    return World(name=f"a pair, {name}", ranks=2, whales=(Whale(gang=(0, 1)), Whale(gang=(1, 0)))[:count], **more)


def worlds() -> tuple[World, ...]:
    """What `make test` explores completely. A message may be a launch late; with two whales and a trouble none is."""
    troubles = [
        _pair(1, f"one whale, {trouble}, words of n-{back}", words_back=back, **{trouble: 1})
        for back in (1, 2)
        for trouble in TROUBLES
        if (back, trouble) != (2, "drains")
    ]
    long = World(name="two ranks, a whale of two supersteps", ranks=2, whales=(Whale(gang=(0, 1), supersteps=2),))
    trio = World(name="three ranks, one whale", ranks=3, whales=(Whale(gang=(0, 2, 1)),))
    part = World(name="three ranks, a whale of two of them", ranks=3, whales=(Whale(gang=(2, 1)),))
    pairs = (_pair(2, "two whales"), _pair(2, "two whales and a decline", declines=1))
    return (*pairs, long, trio, part, *troubles, *_two_whales_and_a_trouble(lateness=0))


def _two_whales_and_a_trouble(lateness: int) -> list[World]:
    how = f"two whales, messages {lateness} late"
    pairs = [
        _pair(2, f"{how}, {trouble}, words of n-{back}", words_back=back, lateness=lateness, **{trouble: 1})
        for back in (1, 2)
        for trouble in TROUBLES
    ]
    gangs = (Whale(gang=(0, 1)), Whale(gang=(1, 2)))
    return [*pairs, World(name=f"three ranks, {how}", ranks=3, whales=gangs, lateness=lateness)]


def first_worlds() -> tuple[World, ...]:
    """What `make test` explores the beginning of: two whales, a trouble, and messages that may come a launch late."""
    chosen = ("withdraws", "deadlines", "deaths")
    return tuple(
        world
        for world in _two_whales_and_a_trouble(lateness=1)
        if world.words_back == 1 and any(getattr(world, trouble) for trouble in chosen)
    )


def deep_worlds(lateness: int = 1) -> tuple[World, ...]:
    """What `tools/explore.py` explores beyond that: two whales and a trouble, three ranks; minutes to hours each."""
    more: dict[str, Any] = {"lateness": lateness}
    all_four = {"declines": 1, "withdraws": 1, "deadlines": 1, "deaths": 1}
    both = _pair(1, "one whale, decline, withdraw, deadline and death", **all_four, **more)
    apart = World(name="four ranks, two gangs", ranks=4, whales=(Whale(gang=(0, 1)), Whale(gang=(2, 3))), **more)
    drain = _pair(1, "one whale, drains, words of n-2", words_back=2, drains=1, **more)
    late = _pair(2, "two whales, words of n-2", words_back=2, **more)
    return (late, *_two_whales_and_a_trouble(lateness), both, apart, drain)
