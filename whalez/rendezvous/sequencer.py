"""Who gets a gang, under which seq, and when: the one place of the world that decides about whales.

Rule 1: every legal transition is a row of `PHASES` or `GATHERS`. No row: `LocalProtocolError`, nothing changed; the
        driver turns a peer's message into the peer's error, and ignores an operator's order.
Rule 2: all state is plain data in `SequencerState`, replaced as a whole when a step succeeds.
Rule 3: no clock, socket, thread, log, random number or environment comes in here; time is `now_ns`, the fleet's clock
        is `launch`, the index of the launch rank 0 composes next.

Commits leave in seq order. That is what makes "the lowest-numbered whale I hold a commit for" the same whale for all
members of it sooner or later, and never a lower one afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from enum import Enum
from typing import Any

import msgspec

from whalez.errors import LocalProtocolError
from whalez.planning.plan import GangPlan
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg

#: (length, poster, policy, excluded) -> a GangPlan, or something with a `reason`.
Planner = Callable[[int, int, Any, frozenset[int]], Any]

STORY_COUNT_MAX = 64
TICK_SPACING_NS = 50_000_000  #: a deadline that waits for launches is looked at again this much later
LEAVE_MARGIN_NS = 2_000_000_000  #: after the grace of a drain, for the ranks' Leaves to arrive
LAUNCH_LEAD_MAX = 64  #: a Ready whose count is further ahead of rank 0 than this is nonsense
CALM_COUNT = 8  #: Readys in a row that would do with less slack before it is lowered by one


class Phase(Enum):
    """What the world is up to as a whole."""

    SERVING = "serving"
    DRAINING = "draining"  #: no new gang; waits for every rank's Leave
    STOPPED = "stopped"  #: Stop is committed
    FAILED = "failed"  #: a rank died


class GatherState(Enum):
    UNSEEN = "unseen"
    GATHERING = "gathering"  #: some members have not answered
    READY = "ready"  #: all have; waits for the lower seqs
    COMMITTED = "committed"  #: L is out; can not be cancelled
    FINISHED = "finished"  #: cancelled or long over; no record is kept


class Input(Enum):
    """Kinds of events, as the tables know them."""

    POST = "Post"
    WITHDRAW = "Withdraw"
    READY = "Ready"
    DECLINE = "Decline"
    LEAVE = "Leave"
    DRAIN_ALL = "DrainAll"
    BYE = "Bye"
    TICK = "Tick"
    GONE = "PeerGone"
    STOP = "StopWanted"
    # What follows; no event of their own.
    GATHER = "gang found"
    LAST_READY = "Ready of the last member"
    COMMIT = "every lower seq is resolved"
    EXPIRE = "deadline passed"
    OVER = "its launches are long past"


_P, _G, _I = Phase, GatherState, Input

#: (phase, input) -> phase.
PHASES: dict[tuple[Phase, Input], Phase] = {
    (_P.SERVING, _I.POST): _P.SERVING,
    (_P.SERVING, _I.WITHDRAW): _P.SERVING,
    (_P.SERVING, _I.READY): _P.SERVING,
    (_P.SERVING, _I.DECLINE): _P.SERVING,
    (_P.SERVING, _I.LEAVE): _P.SERVING,
    (_P.SERVING, _I.DRAIN_ALL): _P.DRAINING,
    (_P.SERVING, _I.TICK): _P.SERVING,
    (_P.SERVING, _I.GONE): _P.FAILED,
    (_P.SERVING, _I.STOP): _P.STOPPED,
    (_P.DRAINING, _I.POST): _P.DRAINING,
    (_P.DRAINING, _I.WITHDRAW): _P.DRAINING,
    (_P.DRAINING, _I.READY): _P.DRAINING,
    (_P.DRAINING, _I.DECLINE): _P.DRAINING,
    (_P.DRAINING, _I.LEAVE): _P.DRAINING,
    (_P.DRAINING, _I.DRAIN_ALL): _P.DRAINING,
    (_P.DRAINING, _I.TICK): _P.DRAINING,
    (_P.DRAINING, _I.GONE): _P.FAILED,
    (_P.DRAINING, _I.STOP): _P.STOPPED,
    (_P.STOPPED, _I.POST): _P.STOPPED,
    (_P.STOPPED, _I.WITHDRAW): _P.STOPPED,
    (_P.STOPPED, _I.READY): _P.STOPPED,
    (_P.STOPPED, _I.DECLINE): _P.STOPPED,
    (_P.STOPPED, _I.LEAVE): _P.STOPPED,
    (_P.STOPPED, _I.DRAIN_ALL): _P.STOPPED,
    (_P.STOPPED, _I.BYE): _P.STOPPED,
    (_P.STOPPED, _I.TICK): _P.STOPPED,
    (_P.STOPPED, _I.GONE): _P.FAILED,  # unless some rank has begun Stop: then it is expected
    (_P.STOPPED, _I.STOP): _P.STOPPED,
    (_P.FAILED, _I.POST): _P.FAILED,
    (_P.FAILED, _I.WITHDRAW): _P.FAILED,
    (_P.FAILED, _I.READY): _P.FAILED,
    (_P.FAILED, _I.DECLINE): _P.FAILED,
    (_P.FAILED, _I.LEAVE): _P.FAILED,
    (_P.FAILED, _I.DRAIN_ALL): _P.FAILED,
    (_P.FAILED, _I.BYE): _P.FAILED,
    (_P.FAILED, _I.TICK): _P.FAILED,
    (_P.FAILED, _I.GONE): _P.FAILED,
    (_P.FAILED, _I.STOP): _P.FAILED,
}

#: (state of one seq, input) -> state.
GATHERS: dict[tuple[GatherState, Input], GatherState] = {
    (_G.UNSEEN, _I.GATHER): _G.GATHERING,
    (_G.GATHERING, _I.READY): _G.GATHERING,
    (_G.GATHERING, _I.LAST_READY): _G.READY,
    (_G.GATHERING, _I.DECLINE): _G.FINISHED,
    (_G.GATHERING, _I.WITHDRAW): _G.FINISHED,
    (_G.GATHERING, _I.EXPIRE): _G.FINISHED,
    (_G.GATHERING, _I.STOP): _G.FINISHED,
    (_G.READY, _I.COMMIT): _G.COMMITTED,
    (_G.READY, _I.WITHDRAW): _G.FINISHED,
    (_G.READY, _I.STOP): _G.FINISHED,
    (_G.COMMITTED, _I.WITHDRAW): _G.COMMITTED,  # too late: the gang's agreement is the point, its result is dropped
    (_G.COMMITTED, _I.STOP): _G.COMMITTED,
    (_G.COMMITTED, _I.OVER): _G.FINISHED,
    # Answers that crossed with a Cancel.
    (_G.FINISHED, _I.READY): _G.FINISHED,
    (_G.FINISHED, _I.DECLINE): _G.FINISHED,
}

_INPUTS: dict[type, Input] = {
    msg.Post: Input.POST,
    msg.Withdraw: Input.WITHDRAW,
    msg.Ready: Input.READY,
    msg.Decline: Input.DECLINE,
    msg.Leave: Input.LEAVE,
    msg.DrainAll: Input.DRAIN_ALL,
    msg.Bye: Input.BYE,
    ev.Tick: Input.TICK,
    ev.PeerGone: Input.GONE,
    ev.StopWanted: Input.STOP,
}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One seq, until it is finished.

    post:            of its poster; without the tokens once committed
    excluded:        ranks the plan had to do without
    gathered_ns, gathered_launch:  when the Gather left
    counts:          (rank, count) of the Readys, in order of arrival
    launch:          L, once committed
    """

    seq: int
    state: GatherState
    post: msg.Post
    plan: GangPlan
    excluded: frozenset[int]
    gathered_ns: int
    gathered_launch: int
    counts: tuple[tuple[int, int], ...] = ()
    launch: int | None = None

    @property
    def is_open(self) -> bool:
        """Neither committed nor finished."""
        return self.state in (GatherState.GATHERING, GatherState.READY)


class SequencerState(msgspec.Struct, kw_only=True):
    """All that a Sequencer remembers. Every field is immutable, so a shallow copy is a full one."""

    phase: Phase = Phase.SERVING
    launch: int = 0  #: highest launch count of rank 0 reported
    seq_next: int = 0
    records: tuple[Record, ...] = ()  #: ascending seq, never finished ones
    waiting: tuple[msg.Post, ...] = ()  #: posts without a seq: as many gathers are open as may be
    launch_floor: int = 0  #: L of the last commit; L never falls
    free_from: tuple[int, ...] = ()  #: per rank, the first launch the next whale may occupy
    slack: int = 0
    calm_count: int = 0  #: Readys in a row that would do with less slack
    left: frozenset[int] = frozenset()
    byes: frozenset[int] = frozenset()
    drain_deadline_ns: int | None = None
    ticked_ns: int = 0

    def key(self) -> tuple[object, ...]:
        """Equal for equal states; hashable."""
        return msgspec.structs.astuple(self)


class Sequencer:
    """The sequencing machine, in rank 0's process.

    Args:
        world:         number of ranks
        policy, plan:  `plan(length, poster, policy, excluded)`: planning.plan_whale, or a test's own
        slack_start:   launches between the latest count and L at first; then it follows what Readys show
        slack_min:     None: 2, or 3 with words_back 2: below that every whale slips
        slack_max:     bounds what one late message can cost every later whale
        deadline_ns, deadline_launches:  a gather is cancelled when both have passed
        gathers_max:   gathers open at once; further posts wait here
        words_back:    as the Members'
    """

    def __init__(
        self,
        world: int,
        policy: Any,
        *,
        plan: Planner,
        slack_start: int = 4,
        slack_min: int | None = None,
        slack_max: int = 32,
        deadline_ns: int = 2_000_000_000,
        deadline_launches: int = 64,
        gathers_max: int = 4,
        words_back: int = 1,
    ) -> None:
        assert world >= 1
        assert gathers_max >= 1
        assert words_back in (1, 2)
        self.world = world
        self.slack_min = words_back + 1 if slack_min is None else slack_min
        self.slack_max = max(slack_max, self.slack_min)
        self.deadline_ns = deadline_ns
        self.deadline_launches = deadline_launches
        self.gathers_max = gathers_max
        self.words_back = words_back
        self.state = SequencerState(slack=min(max(slack_start, self.slack_min), self.slack_max), free_from=(0,) * world)
        #: last events, newest last: (now_ns, launch, phase, sender, what); not part of the state
        self.story: deque[tuple[int, int, str, int, str]] = deque(maxlen=STORY_COUNT_MAX)
        self._policy = policy
        self._plan = plan

    def copy(self) -> Sequencer:
        """An independent machine in the same state. Cheap: state is shared until one of them steps."""
        twin = copy(self)
        twin.state = copy(self.state)
        twin.story = self.story.copy()
        return twin

    # ---- what the driver asks ----------------------------------------------------------------------------------
    @property
    def next_deadline_ns(self) -> int | None:
        """When the next `Tick` is due, or None: nothing waits for time, or the world is over."""
        if self.state.phase is Phase.FAILED:
            return None
        due = [r.gathered_ns + self.deadline_ns for r in self.state.records if r.state is GatherState.GATHERING]
        if self.state.phase is Phase.DRAINING and self.state.drain_deadline_ns is not None:
            due.append(self.state.drain_deadline_ns)
        # A deadline that has passed in time but not in launches must not make the driver spin.
        return max(min(due), self.state.ticked_ns + TICK_SPACING_NS) if due else None

    @property
    def records(self) -> tuple[Record, ...]:
        return self.state.records

    @property
    def has_stopped(self) -> bool:
        """Stop is committed."""
        return self.state.phase is Phase.STOPPED

    # ---- step --------------------------------------------------------------------------------------------------
    def step(self, event: ev.Event, now_ns: int, launch: int) -> list[do.Effect]:
        """Take one event; return what the driver must send, in order.

        launch: index of the launch rank 0 composes next, as it reported last
        Raises: LocalProtocolError if a table has no row; the machine is unchanged.
        """
        content = event.message if isinstance(event, ev.Received) else event
        sender = event.sender if isinstance(event, ev.Received) else -1
        what = _INPUTS.get(type(content))
        draft = copy(self.state)
        phase = None if what is None else PHASES.get((draft.phase, what))
        if what is None or phase is None:
            raise self._illegal(f"{type(content).__name__} while {draft.phase.value}", sender)
        if isinstance(event, ev.Received):
            self._check_sender(content, sender)
        draft.launch = max(draft.launch, launch)
        effects: list[do.Effect] = []
        if draft.phase is Phase.FAILED and what is not Input.GONE:
            pass  # the world is over; what still comes in is too late
        else:
            _HANDLERS[what](self, draft, content, now_ns, effects)
            self._advance(draft, now_ns, effects)
        self.state = draft
        if what is not Input.TICK or effects:
            self.story.append((now_ns, draft.launch, draft.phase.value, sender, _describe(content)))
        return effects

    # ---- posts -------------------------------------------------------------------------------------------------
    def _post(self, draft: SequencerState, post: msg.Post, now_ns: int, effects: list[do.Effect]) -> None:
        if draft.phase is not Phase.SERVING:
            effects.append(self._refusal(post, f"the fleet is {draft.phase.value}"))
            return
        if post.rank in draft.left:
            raise self._illegal(f"post {post.request_id!r} of rank {post.rank}, which has left", post.rank)
        if len(post.tokens) % 4:
            raise self._illegal(f"post {post.request_id!r} of {len(post.tokens)} bytes, not int32 tokens", post.rank)
        for other in (*draft.waiting, *(record.post for record in draft.records if record.is_open)):
            if other.rank == post.rank:
                raise self._illegal(
                    f"post {post.request_id!r} of rank {post.rank} while {other.request_id!r} is outstanding", post.rank
                )
        draft.waiting = (*draft.waiting, post)

    def _withdraw(self, draft: SequencerState, wish: msg.Withdraw, now_ns: int, effects: list[do.Effect]) -> None:
        """Cancel a post that is not committed; one that is committed or over has crossed with the wish."""
        for post in draft.waiting:
            if (post.rank, post.request_id) == (wish.rank, wish.request_id):
                draft.waiting = tuple(other for other in draft.waiting if other is not post)
                effects.append(self._refusal(post, "withdrawn"))
        for record in draft.records:
            if (record.post.rank, record.post.request_id) != (wish.rank, wish.request_id):
                continue
            if self._move(draft, record.seq, Input.WITHDRAW, wish.rank) is None:
                self._cancel(record, "withdrawn", "final", effects)

    def _refusal(self, post: msg.Post, reason: str) -> do.SendTo:
        return do.SendTo(post.rank, msg.PostRefused(request_id=post.request_id, reason=reason))

    # ---- answers -----------------------------------------------------------------------------------------------
    def _ready(self, draft: SequencerState, ready: msg.Ready, now_ns: int, effects: list[do.Effect]) -> None:
        record = self._answered(draft, ready)
        if record is None:
            self._move(draft, ready.seq, Input.READY, ready.rank)
            return
        if not 0 <= ready.count <= draft.launch + LAUNCH_LEAD_MAX:
            raise self._illegal(f"{ready} while rank 0 is at launch {draft.launch}", ready.rank)
        counts = (*record.counts, (ready.rank, ready.count))
        what = Input.LAST_READY if len(counts) == record.plan.width else Input.READY
        moved = self._move(draft, ready.seq, what, ready.rank)
        assert moved is not None
        self._put(draft, msgspec.structs.replace(moved, counts=counts))
        self._follow_lag(draft, draft.launch - ready.count)

    def _decline(self, draft: SequencerState, decline: msg.Decline, now_ns: int, effects: list[do.Effect]) -> None:
        record = self._answered(draft, decline)
        self._move(draft, decline.seq, Input.DECLINE, decline.rank)
        if record is None:
            return
        excluded = record.excluded | draft.left | {decline.rank}
        reason = f"rank {decline.rank} declined: {decline.reason}"
        plan: Any = None
        if draft.phase is Phase.SERVING:
            plan = self._plan(len(record.post.tokens) // 4, record.post.rank, self._policy, excluded)
        if isinstance(plan, GangPlan):
            self._cancel(record, reason, "regathered", effects)
            self._gather(draft, record.post, plan, excluded, now_ns, effects)
        else:
            why = f"the fleet is {draft.phase.value}" if plan is None else plan.reason
            self._cancel(record, f"{reason}; {why}", "final", effects)

    def _answered(self, draft: SequencerState, answer: msg.Ready | msg.Decline) -> Record | None:
        """The record an answer is for; None if it is finished. Raises for an answer that nobody asked for."""
        record = self._find(draft, answer.seq)
        if record is None:
            return None
        if answer.rank not in record.plan.gang:
            raise self._illegal(f"{answer} of a rank that is not in the gang {record.plan.gang}", answer.rank)
        if any(rank == answer.rank for rank, _ in record.counts):
            raise self._illegal(f"{answer}, but this rank is ready already", answer.rank)
        return record

    def _follow_lag(self, draft: SequencerState, lag: int) -> None:
        """Let slack follow how many launches a message takes: up at once, down slowly.

        A member composes at most one launch ahead of rank 0, and a commit that comes in the middle of a launch is
        named in the next: so words_back + 1 launches even when a message takes no time at all.
        """
        wanted = min(max(self.slack_min, self.words_back + 1 + max(lag, 0)), self.slack_max)
        if wanted >= draft.slack:
            draft.slack, draft.calm_count = wanted, 0
        elif draft.calm_count + 1 < CALM_COUNT:
            draft.calm_count += 1
        else:
            draft.slack, draft.calm_count = draft.slack - 1, 0

    # ---- leaving and dying -------------------------------------------------------------------------------------
    def _leave(self, draft: SequencerState, leave: msg.Leave, now_ns: int, effects: list[do.Effect]) -> None:
        if draft.phase is Phase.STOPPED:
            return
        if leave.rank in draft.left:
            raise self._illegal(f"rank {leave.rank} leaves twice", leave.rank)
        for post in (*draft.waiting, *(record.post for record in draft.records if record.is_open)):
            if post.rank == leave.rank:
                raise self._illegal(f"rank {leave.rank} leaves with post {post.request_id!r} outstanding", leave.rank)
        draft.left |= {leave.rank}
        if len(draft.left) == self.world:
            self._commit_stop(draft, effects)

    def _drain_all(self, draft: SequencerState, drain: msg.DrainAll, now_ns: int, effects: list[do.Effect]) -> None:
        if draft.phase is Phase.STOPPED:
            return
        if not 0 <= drain.grace_s <= msg.DRAIN_GRACE_S_MAX:
            raise self._illegal(f"DrainAll with a grace of {drain.grace_s} s", -1)
        is_first = draft.phase is Phase.SERVING
        draft.phase = PHASES[draft.phase, Input.DRAIN_ALL]
        deadline_ns = now_ns + int(drain.grace_s * 1e9) + LEAVE_MARGIN_NS
        draft.drain_deadline_ns = min(deadline_ns, draft.drain_deadline_ns or deadline_ns)
        if is_first:
            effects += [self._refusal(post, "the fleet is draining") for post in draft.waiting]
            draft.waiting = ()
            effects.append(do.Broadcast(drain))

    def _stop_wanted(self, draft: SequencerState, wish: ev.StopWanted, now_ns: int, effects: list[do.Effect]) -> None:
        if draft.phase is Phase.STOPPED:
            return
        if wish.grace_s is None:
            self._commit_stop(draft, effects)
        else:
            self._drain_all(draft, msg.DrainAll(grace_s=wish.grace_s), now_ns, effects)

    def _commit_stop(self, draft: SequencerState, effects: list[do.Effect]) -> None:
        """Stop has a seq like a whale, every rank is in its gang, and nobody is asked: what is open ends here."""
        draft.phase = PHASES[draft.phase, Input.STOP]
        for record in draft.records:
            if self._move(draft, record.seq, Input.STOP, -1) is None:
                self._cancel(record, "the fleet is stopping", "final", effects)
        effects += [self._refusal(post, "the fleet is stopping") for post in draft.waiting]
        draft.waiting = ()
        launch = self._launch_for(draft, tuple(range(self.world)), ())
        effects.append(do.Broadcast(msg.Stop(seq=draft.seq_next, launch=launch)))
        draft.seq_next += 1
        draft.launch_floor = launch

    def _bye(self, draft: SequencerState, bye: msg.Bye, now_ns: int, effects: list[do.Effect]) -> None:
        draft.byes |= {bye.rank}
        effects.append(do.Broadcast(bye))

    def _gone(self, draft: SequencerState, gone: ev.PeerGone, now_ns: int, effects: list[do.Effect]) -> None:
        """Fatal, unless some rank has begun Stop: then all begin it at that launch, and who is gone touches no slab."""
        if draft.phase is Phase.STOPPED and draft.byes:
            if gone.rank not in draft.byes:
                self._bye(draft, msg.Bye(rank=gone.rank), now_ns, effects)
            return
        draft.phase = PHASES[draft.phase, Input.GONE]
        draft.waiting = ()  # their posters fail, as everybody does
        effects.append(do.Broadcast(msg.Died(rank=gone.rank, how=gone.how)))

    # ---- time --------------------------------------------------------------------------------------------------
    def _tick(self, draft: SequencerState, tick: ev.Tick, now_ns: int, effects: list[do.Effect]) -> None:
        draft.ticked_ns = now_ns
        for record in draft.records:
            if record.state is not GatherState.GATHERING:
                continue
            waited_ns, waited_launches = now_ns - record.gathered_ns, draft.launch - record.gathered_launch
            if waited_ns > self.deadline_ns and waited_launches > self.deadline_launches:
                answered = {rank for rank, _ in record.counts}
                silent = [rank for rank in record.plan.gang if rank not in answered]
                self._move(draft, record.seq, Input.EXPIRE, -1)
                self._cancel(record, f"ranks {silent} did not answer in {waited_ns / 1e9:.1f} s", "final", effects)
        if draft.phase is Phase.DRAINING and draft.drain_deadline_ns is not None and now_ns >= draft.drain_deadline_ns:
            self._commit_stop(draft, effects)

    def _advance(self, draft: SequencerState, now_ns: int, effects: list[do.Effect]) -> None:
        """Commit what may be committed, in seq order, then gather for the posts that wait."""
        for record in draft.records:
            if record.state is GatherState.GATHERING:
                break
            if record.state is GatherState.READY:
                self._commit(draft, record, effects)
            elif record.launch is not None and draft.launch > record.launch + record.plan.supersteps + LAUNCH_LEAD_MAX:
                self._move(draft, record.seq, Input.OVER, -1)
        while draft.waiting and sum(record.is_open for record in draft.records) < self.gathers_max:
            post, draft.waiting = draft.waiting[0], draft.waiting[1:]
            plan = self._plan(len(post.tokens) // 4, post.rank, self._policy, draft.left)
            if isinstance(plan, GangPlan):
                self._gather(draft, post, plan, draft.left, now_ns, effects)
            else:
                effects.append(self._refusal(post, plan.reason))

    def _gather(
        self,
        draft: SequencerState,
        post: msg.Post,
        plan: GangPlan,
        excluded: frozenset[int],
        now_ns: int,
        effects: list[do.Effect],
    ) -> None:
        assert plan.poster == post.rank
        seq = draft.seq_next
        draft.seq_next += 1
        record = Record(
            seq=seq,
            state=self._row(GatherState.UNSEEN, Input.GATHER, seq, -1),
            post=post,
            plan=plan,
            excluded=excluded,
            gathered_ns=now_ns,
            gathered_launch=draft.launch,
        )
        self._put(draft, record)
        gather = msg.Gather(
            seq=seq,
            request_id=post.request_id,
            plan=plan,
            tokens=post.tokens,
            prompt_hash=post.prompt_hash,
            max_tokens=post.max_tokens,
            excluded=tuple(sorted(excluded)),
        )
        effects += [do.SendTo(rank, gather) for rank in plan.gang]

    def _commit(self, draft: SequencerState, record: Record, effects: list[do.Effect]) -> None:
        gang, supersteps = record.plan.gang, record.plan.supersteps
        launch = self._launch_for(draft, gang, tuple(count for _, count in record.counts))
        moved = self._move(draft, record.seq, Input.COMMIT, -1)
        assert moved is not None
        post = msgspec.structs.replace(record.post, tokens=b"")  # kept for status; the prompt is with its gang now
        self._put(draft, msgspec.structs.replace(moved, launch=launch, post=post))
        draft.launch_floor = launch
        # One launch of its own for every member between this whale and its next.
        after = launch + supersteps + 1
        draft.free_from = tuple(max(free, after) if rank in gang else free for rank, free in enumerate(draft.free_from))
        commit = msg.Commit(seq=record.seq, launch=launch, supersteps=supersteps)
        effects += [do.SendTo(rank, commit) for rank in gang]

    def _launch_for(self, draft: SequencerState, gang: tuple[int, ...], counts: tuple[int, ...]) -> int:
        """L. A hint: late enough that the commit should be named by then; the words decide."""
        wanted = max((*counts, draft.launch + self.words_back)) + draft.slack
        return max(wanted, draft.launch_floor, *(draft.free_from[rank] for rank in gang))

    def _cancel(self, record: Record, reason: str, outcome: str, effects: list[do.Effect]) -> None:
        cancel = msg.Cancel(seq=record.seq, request_id=record.post.request_id, reason=reason, outcome=outcome)
        effects += [do.SendTo(rank, cancel) for rank in record.plan.gang]

    # ---- small change ------------------------------------------------------------------------------------------
    def _find(self, draft: SequencerState, seq: int) -> Record | None:
        return next((record for record in draft.records if record.seq == seq), None)

    def _row(self, state: GatherState, what: Input, seq: int, sender: int) -> GatherState:
        row = GATHERS.get((state, what))
        if row is None:
            raise self._illegal(f"{what.value} of seq {seq}, which is {state.value}", sender)
        return row

    def _move(self, draft: SequencerState, seq: int, what: Input, sender: int) -> Record | None:
        """One row for one record; returns the record as it is now, None if it is finished."""
        record = self._find(draft, seq)
        if record is not None:
            state = record.state
        else:
            state = GatherState.FINISHED if 0 <= seq < draft.seq_next else GatherState.UNSEEN
        state = self._row(state, what, seq, sender)
        if state is GatherState.FINISHED:
            draft.records = tuple(other for other in draft.records if other.seq != seq)
            return None
        assert record is not None
        return self._put(draft, msgspec.structs.replace(record, state=state))

    def _put(self, draft: SequencerState, record: Record) -> Record:
        others = [other for other in draft.records if other.seq != record.seq]
        draft.records = tuple(sorted([*others, record], key=lambda one: one.seq))
        return record

    def _check_sender(self, content: Any, sender: int) -> None:
        if not 0 <= sender < self.world:
            raise self._illegal(f"{type(content).__name__} of rank {sender} in a world of {self.world}", sender)
        speaker = getattr(content, "rank", sender)
        if speaker != sender:
            raise self._illegal(f"{type(content).__name__} in the name of rank {speaker}", sender)

    def _illegal(self, what: str, sender: int) -> LocalProtocolError:
        by = f"rank {sender}: " if sender >= 0 else ""
        return LocalProtocolError(f"sequencer at launch {self.state.launch}: {by}{what}; story={list(self.story)}")


def _describe(content: object) -> str:
    """Short: a story must not keep prompts alive."""
    names = ("rank", "seq", "request_id", "count", "reason", "how", "grace_s")
    parts = [f"{name}={getattr(content, name)}" for name in names if hasattr(content, name)]
    return f"{type(content).__name__}({', '.join(parts)})"


_HANDLERS: dict[Input, Callable[[Sequencer, SequencerState, Any, int, list[do.Effect]], None]] = {
    Input.POST: Sequencer._post,
    Input.WITHDRAW: Sequencer._withdraw,
    Input.READY: Sequencer._ready,
    Input.DECLINE: Sequencer._decline,
    Input.LEAVE: Sequencer._leave,
    Input.DRAIN_ALL: Sequencer._drain_all,
    Input.BYE: Sequencer._bye,
    Input.TICK: Sequencer._tick,
    Input.GONE: Sequencer._gone,
    Input.STOP: Sequencer._stop_wanted,
}
