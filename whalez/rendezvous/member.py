"""What one rank does about whales: the tables of its phase, its posts and its records, and nothing else.

Rule 1: a legal transition is a row of `PHASES`, `POSTS` or `RECORDS`. No row: `LocalProtocolError`, nothing changed.
Rule 2: all state is plain data in `MemberState`, replaced as a whole when a step succeeds; so a machine can be copied,
        compared, hashed and searched over.
Rule 3: no clock, socket, thread, log, random number or environment comes in here; time is `now_ns`.

Why all members of a whale begin it at the same launch, without waiting for each other: a rank may compose launch n
only when every rank has composed launch n-1, so at that boundary the words of n-1 are fixed and all read the same.
A whale begins at the first launch n >= L for which the words of n-1 of all its members name it. L and the words are the
same for all, so is the answer. A commit that comes late is named late: it costs a launch, never the unanimity.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from copy import copy
from enum import Enum
from typing import Any

import msgspec

from whalez.errors import LocalProtocolError, PeerProtocolError, PlanDiffers
from whalez.planning.plan import GangPlan
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg
from whalez.rendezvous.records import STORY_COUNT_MAX, describe, drop, find, put

#: Recomputes a plan and raises PlanDiffers by field, as planning.check_plan: (plan, length, poster, policy, excluded).
PlanCheck = Callable[[GangPlan, int, int, Any, frozenset[int]], object]


class Phase(Enum):
    """What this rank is up to as a whole."""

    SERVING = "serving"
    DRAINING = "draining"  #: helps nobody any more; its own requests go on
    LEFT = "left"  #: nothing left to serve; launches with zero rows until Stop
    STOPPING = "stopping"  #: holds the commit of Stop
    STOPPED = "stopped"  #: has begun Stop; composes nothing more


class PostState(Enum):
    UNKNOWN = "unknown"  #: never wanted, or ended
    QUEUED = "queued"  #: waits here until the outstanding one has begun or ended
    OUTSTANDING = "outstanding"  #: sent; the sequencer has not called a gang, or calls another
    GATHERED = "gathered"  #: a record of this rank carries it


class RecordState(Enum):
    UNSEEN = "unseen"  #: a seq above all that came before
    RESERVING = "reserving"  #: the driver was asked for room
    ARMED = "armed"  #: Ready is sent: no operation of several launches may start here
    DECLINED = "declined"  #: Decline is sent; the Cancel is on its way
    COMMITTED = "committed"  #: L is known; named in this rank's words; can not be cancelled
    RUNNING = "running"  #: this launch or the one composed last is a superstep of it
    FINISHED = "finished"  #: cancelled or over; no record is kept


class Input(Enum):
    """Kinds of events, as the tables know them."""

    POST = "PostWanted"
    WITHDRAW = "WithdrawWanted"
    DRAIN = "DrainWanted"
    DRAINED = "DrainedHere"
    RESERVED = "Reserved"
    CANNOT_RESERVE = "CannotReserve"
    COMPOSE = "LaunchComposing"
    GATHER = "Gather"
    COMMIT = "Commit"
    CANCEL = "Cancel"
    POST_REFUSED = "PostRefused"
    DRAIN_ALL = "DrainAll"
    STOP = "Stop"
    BYE = "Bye"
    # What follows from a boundary or from what a Gather says; no event of their own.
    UNFIT = "gather that this rank declines by itself"
    BEGIN = "first superstep"
    SUPERSTEP = "another superstep"
    OVER = "boundary after the last superstep"
    SEND = "first of the queue"
    REGATHER = "cancel that keeps the post"


_P, _Q, _R, _I = Phase, PostState, RecordState, Input

#: (phase, input) -> phase. An input that has no row in a phase is illegal in it.
PHASES: dict[tuple[Phase, Input], Phase] = {
    (_P.SERVING, _I.POST): _P.SERVING,
    (_P.SERVING, _I.WITHDRAW): _P.SERVING,
    (_P.SERVING, _I.DRAIN): _P.DRAINING,
    (_P.SERVING, _I.DRAINED): _P.LEFT,
    (_P.SERVING, _I.RESERVED): _P.SERVING,
    (_P.SERVING, _I.CANNOT_RESERVE): _P.SERVING,
    (_P.SERVING, _I.COMPOSE): _P.SERVING,
    (_P.SERVING, _I.GATHER): _P.SERVING,
    (_P.SERVING, _I.COMMIT): _P.SERVING,
    (_P.SERVING, _I.CANCEL): _P.SERVING,
    (_P.SERVING, _I.POST_REFUSED): _P.SERVING,
    (_P.SERVING, _I.DRAIN_ALL): _P.DRAINING,
    (_P.SERVING, _I.STOP): _P.STOPPING,
    (_P.DRAINING, _I.POST): _P.DRAINING,
    (_P.DRAINING, _I.WITHDRAW): _P.DRAINING,
    (_P.DRAINING, _I.DRAIN): _P.DRAINING,
    (_P.DRAINING, _I.DRAINED): _P.LEFT,
    (_P.DRAINING, _I.RESERVED): _P.DRAINING,
    (_P.DRAINING, _I.CANNOT_RESERVE): _P.DRAINING,
    (_P.DRAINING, _I.COMPOSE): _P.DRAINING,
    (_P.DRAINING, _I.GATHER): _P.DRAINING,
    (_P.DRAINING, _I.COMMIT): _P.DRAINING,
    (_P.DRAINING, _I.CANCEL): _P.DRAINING,
    (_P.DRAINING, _I.POST_REFUSED): _P.DRAINING,
    (_P.DRAINING, _I.DRAIN_ALL): _P.DRAINING,
    (_P.DRAINING, _I.STOP): _P.STOPPING,
    (_P.LEFT, _I.WITHDRAW): _P.LEFT,
    (_P.LEFT, _I.DRAIN): _P.LEFT,
    (_P.LEFT, _I.RESERVED): _P.LEFT,
    (_P.LEFT, _I.CANNOT_RESERVE): _P.LEFT,
    (_P.LEFT, _I.COMPOSE): _P.LEFT,
    (_P.LEFT, _I.GATHER): _P.LEFT,
    (_P.LEFT, _I.COMMIT): _P.LEFT,
    (_P.LEFT, _I.CANCEL): _P.LEFT,
    (_P.LEFT, _I.DRAIN_ALL): _P.LEFT,
    (_P.LEFT, _I.STOP): _P.STOPPING,
    # Posts behind Stop end at once, here and at the sequencer; its answers to those on their way cross with the Stop.
    (_P.STOPPING, _I.POST): _P.STOPPING,
    (_P.STOPPING, _I.WITHDRAW): _P.STOPPING,
    (_P.STOPPING, _I.DRAIN): _P.STOPPING,
    (_P.STOPPING, _I.DRAINED): _P.STOPPING,
    (_P.STOPPING, _I.RESERVED): _P.STOPPING,
    (_P.STOPPING, _I.CANNOT_RESERVE): _P.STOPPING,
    (_P.STOPPING, _I.COMPOSE): _P.STOPPING,
    (_P.STOPPING, _I.BEGIN): _P.STOPPED,
    (_P.STOPPING, _I.POST_REFUSED): _P.STOPPING,
    (_P.STOPPING, _I.BYE): _P.STOPPING,
    (_P.STOPPED, _I.POST): _P.STOPPED,
    (_P.STOPPED, _I.WITHDRAW): _P.STOPPED,
    (_P.STOPPED, _I.DRAIN): _P.STOPPED,
    (_P.STOPPED, _I.DRAINED): _P.STOPPED,
    (_P.STOPPED, _I.POST_REFUSED): _P.STOPPED,
    (_P.STOPPED, _I.BYE): _P.STOPPED,
}

#: (state of one post of this rank, input) -> state.
POSTS: dict[tuple[PostState, Input], PostState] = {
    (_Q.UNKNOWN, _I.POST): _Q.QUEUED,
    (_Q.UNKNOWN, _I.WITHDRAW): _Q.UNKNOWN,
    (_Q.QUEUED, _I.SEND): _Q.OUTSTANDING,
    (_Q.QUEUED, _I.WITHDRAW): _Q.UNKNOWN,
    (_Q.QUEUED, _I.STOP): _Q.UNKNOWN,
    (_Q.OUTSTANDING, _I.WITHDRAW): _Q.OUTSTANDING,
    (_Q.OUTSTANDING, _I.GATHER): _Q.GATHERED,
    (_Q.OUTSTANDING, _I.POST_REFUSED): _Q.UNKNOWN,
    (_Q.OUTSTANDING, _I.STOP): _Q.UNKNOWN,
    (_Q.GATHERED, _I.WITHDRAW): _Q.GATHERED,
    (_Q.GATHERED, _I.REGATHER): _Q.OUTSTANDING,
    (_Q.GATHERED, _I.CANCEL): _Q.UNKNOWN,
    (_Q.GATHERED, _I.BEGIN): _Q.UNKNOWN,
    (_Q.GATHERED, _I.STOP): _Q.GATHERED,  # committed before Stop was
}

#: (state of one seq at this rank, input) -> state.
RECORDS: dict[tuple[RecordState, Input], RecordState] = {
    (_R.UNSEEN, _I.GATHER): _R.RESERVING,
    (_R.UNSEEN, _I.UNFIT): _R.DECLINED,
    (_R.UNSEEN, _I.STOP): _R.COMMITTED,
    (_R.RESERVING, _I.RESERVED): _R.ARMED,
    (_R.RESERVING, _I.CANNOT_RESERVE): _R.DECLINED,
    (_R.RESERVING, _I.CANCEL): _R.FINISHED,
    (_R.ARMED, _I.COMMIT): _R.COMMITTED,
    (_R.ARMED, _I.CANCEL): _R.FINISHED,
    (_R.DECLINED, _I.CANCEL): _R.FINISHED,
    (_R.COMMITTED, _I.BEGIN): _R.RUNNING,
    (_R.RUNNING, _I.SUPERSTEP): _R.RUNNING,
    (_R.RUNNING, _I.OVER): _R.FINISHED,
    # The driver's answer and the Cancel have crossed; what was reserved is released again.
    (_R.FINISHED, _I.RESERVED): _R.FINISHED,
    (_R.FINISHED, _I.CANNOT_RESERVE): _R.FINISHED,
    (_R.FINISHED, _I.CANCEL): _R.FINISHED,
}

_INPUTS: dict[type, Input] = {
    ev.PostWanted: Input.POST,
    ev.WithdrawWanted: Input.WITHDRAW,
    ev.DrainWanted: Input.DRAIN,
    ev.DrainedHere: Input.DRAINED,
    ev.Reserved: Input.RESERVED,
    ev.CannotReserve: Input.CANNOT_RESERVE,
    ev.LaunchComposing: Input.COMPOSE,
    msg.Gather: Input.GATHER,
    msg.Commit: Input.COMMIT,
    msg.Cancel: Input.CANCEL,
    msg.PostRefused: Input.POST_REFUSED,
    msg.DrainAll: Input.DRAIN_ALL,
    msg.Stop: Input.STOP,
    msg.Bye: Input.BYE,
}

_ARMED_STATES = (RecordState.ARMED, RecordState.COMMITTED, RecordState.RUNNING)
_LIVE_STATES = (RecordState.RESERVING, *_ARMED_STATES)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One seq at this rank, until it is finished.

    gather:         None for Stop, which every rank of the world is a member of
    gang:           the ranks whose words must name it
    launch:         L, once committed
    supersteps:     launches it occupies, once committed
    step:           index of the superstep composed last, while running
    slipping_since: (launch, now_ns) of the first boundary at or after L where it was next and not confirmed
    """

    seq: int
    state: RecordState
    gather: msg.Gather | None
    gang: tuple[int, ...]
    launch: int | None = None
    supersteps: int = 1
    step: int = 0
    slipping_since: tuple[int, int] | None = None

    @property
    def is_stop(self) -> bool:
        return self.gather is None


class PostSlot(msgspec.Struct, frozen=True, kw_only=True):
    """One post of this rank that has not ended. Only the first of the slots is ever more than queued."""

    wanted: ev.PostWanted
    state: PostState = PostState.QUEUED
    withdrawn: bool = False


class MemberState(msgspec.Struct, kw_only=True):
    """All that a Member remembers. Every field is immutable, so a shallow copy is a full one."""

    phase: Phase = Phase.SERVING
    count: int = 0  #: index of the launch composed next
    seq_seen: int = -1  #: highest seq of a Gather or Stop seen
    records: tuple[Record, ...] = ()  #: ascending seq, never finished ones
    posts: tuple[PostSlot, ...] = ()  #: in the order they were wanted
    byes: frozenset[int] = frozenset()  #: ranks that touch no slab any more

    def key(self) -> tuple[object, ...]:
        """Equal for equal states; hashable."""
        return msgspec.structs.astuple(self)


class Member:
    """The rendezvous machine of one rank.

    Args:
        rank, world:       this rank, and the number of ranks
        policy, check:     `check(plan, length, poster, policy, excluded)`: planning.check_plan, or a test's own
        slip_max_ns, slip_max_launches:  a committed whale that is not begun this long after it could be is fatal
                           (both must have passed)
        words_back:        1: the words of launch n-1 decide about launch n; 2 for a loop with one launch in flight
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        policy: Any,
        check: PlanCheck,
        slip_max_ns: int = 2_000_000_000,
        slip_max_launches: int = 64,
        words_back: int = 1,
    ) -> None:
        assert 0 <= rank < world
        assert words_back in (1, 2)
        self.rank = rank
        self.world = world
        self.slip_max_ns = slip_max_ns
        self.slip_max_launches = slip_max_launches
        self.words_back = words_back
        self.state = MemberState()
        #: last events, newest last: (now_ns, count, phase, what); for status and exceptions, not part of the state
        self.story: deque[tuple[int, int, str, str]] = deque(maxlen=STORY_COUNT_MAX)
        self._policy = policy
        self._check = check
        self._everyone = tuple(range(world))

    def copy(self) -> Member:
        """An independent machine in the same state. Cheap: state is shared until one of them steps."""
        twin = copy(self)
        twin.state = copy(self.state)
        twin.story = self.story.copy()
        return twin

    # ---- what the loop asks ------------------------------------------------------------------------------------
    @property
    def is_armed(self) -> bool:
        """True while a whale or Stop is armed, committed or running here: start nothing that takes several launches."""
        return any(record.state in _ARMED_STATES for record in self.state.records)

    @property
    def has_commit(self) -> bool:
        return any(record.state in (RecordState.COMMITTED, RecordState.RUNNING) for record in self.state.records)

    @property
    def may_sleep(self) -> bool:
        """True if nothing here needs the next launch to come by itself. A mere outstanding post does not."""
        return not any(record.state in _LIVE_STATES for record in self.state.records)

    @property
    def next_deadline_ns(self) -> int | None:
        """When a slipping whale may become fatal; only looked at in a boundary."""
        slips = [record.slipping_since[1] for record in self.state.records if record.slipping_since is not None]
        return min(slips) + self.slip_max_ns if slips else None

    @property
    def records(self) -> tuple[Record, ...]:
        return self.state.records

    @property
    def everyone_said_bye(self) -> bool:
        return len(self.state.byes) == self.world

    # ---- step --------------------------------------------------------------------------------------------------
    def step(self, event: ev.Event, now_ns: int) -> list[do.Effect]:
        """Take one event; return what the driver must do, in order.

        Raises: LocalProtocolError if a table has no row; PeerProtocolError if a committed whale slipped beyond the
            bound (names a member that does not confirm it). The machine is unchanged in both cases.
        """
        content = event.message if isinstance(event, ev.Received) else event
        what = _INPUTS.get(type(content))
        draft = copy(self.state)
        phase = None if what is None else PHASES.get((draft.phase, what))
        if what is None or phase is None:
            raise self._illegal(f"{type(content).__name__} while {draft.phase.value}")
        draft.phase = phase
        effects = _HANDLERS[what](self, draft, content, now_ns)
        self.state = draft
        if what is not Input.COMPOSE or len(effects) > 1:
            self.story.append((now_ns, draft.count, draft.phase.value, describe(content)))
        return effects

    # ---- posts -------------------------------------------------------------------------------------------------
    def _post(self, draft: MemberState, wanted: ev.PostWanted, now_ns: int) -> list[do.Effect]:
        if draft.phase in (Phase.STOPPING, Phase.STOPPED):
            return [do.PostEnded(wanted.request_id, "the fleet is stopping")]
        slot, _ = self._slot(draft, wanted.request_id)
        state = self._post_row(slot, Input.POST, wanted.request_id)
        draft.posts = (*draft.posts, PostSlot(wanted=wanted, state=state))
        return self._send_next(draft)

    def _withdraw(self, draft: MemberState, event: ev.WithdrawWanted, now_ns: int) -> list[do.Effect]:
        slot, at = self._slot(draft, event.request_id)
        state = self._post_row(slot, Input.WITHDRAW, event.request_id)
        if slot is None or slot.withdrawn:
            return []
        if state is PostState.UNKNOWN:
            draft.posts = draft.posts[:at] + draft.posts[at + 1 :]
            return [do.PostEnded(event.request_id, "withdrawn")]
        slot = msgspec.structs.replace(slot, withdrawn=True)
        draft.posts = (*draft.posts[:at], slot, *draft.posts[at + 1 :])
        if draft.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        return [do.Send(msg.Withdraw(rank=self.rank, request_id=event.request_id))]

    def _post_refused(self, draft: MemberState, refused: msg.PostRefused, now_ns: int) -> list[do.Effect]:
        slot, _ = self._slot(draft, refused.request_id)
        if slot is None and draft.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        return self._end_post(draft, refused.request_id, Input.POST_REFUSED, refused.reason)

    def _slot(self, draft: MemberState, request_id: str) -> tuple[PostSlot | None, int]:
        for at, slot in enumerate(draft.posts):
            if slot.wanted.request_id == request_id:
                return slot, at
        return None, -1

    def _post_row(self, slot: PostSlot | None, what: Input, request_id: str) -> PostState:
        state = PostState.UNKNOWN if slot is None else slot.state
        row = POSTS.get((state, what))
        if row is None:
            raise self._illegal(f"{what.value} of post {request_id!r}, which is {state.value}")
        return row

    def _move_post(self, draft: MemberState, request_id: str, what: Input) -> None:
        """One row for one post; a slot that becomes unknown goes."""
        slot, at = self._slot(draft, request_id)
        state = self._post_row(slot, what, request_id)
        assert slot is not None
        kept = () if state is PostState.UNKNOWN else (msgspec.structs.replace(slot, state=state),)
        draft.posts = draft.posts[:at] + kept + draft.posts[at + 1 :]

    def _end_post(self, draft: MemberState, request_id: str, what: Input, reason: str) -> list[do.Effect]:
        self._move_post(draft, request_id, what)
        return [do.PostEnded(request_id, reason), *self._send_next(draft)]

    def _send_next(self, draft: MemberState) -> list[do.Effect]:
        """Send the first of the queue if none is outstanding."""
        if not draft.posts or draft.posts[0].state is not PostState.QUEUED:
            return []
        wanted = draft.posts[0].wanted
        self._move_post(draft, wanted.request_id, Input.SEND)
        post = msg.Post(
            rank=self.rank,
            request_id=wanted.request_id,
            tokens=wanted.tokens,
            prompt_hash=wanted.prompt_hash,
            max_tokens=wanted.max_tokens,
        )
        return [do.Send(post)]

    # ---- records -----------------------------------------------------------------------------------------------
    def _gather(self, draft: MemberState, gather: msg.Gather, now_ns: int) -> list[do.Effect]:
        seq, plan = gather.seq, gather.plan
        self._check_unseen(draft, seq, "Gather")
        if self.rank not in plan.gang:
            raise self._illegal(f"Gather {seq} for the gang {plan.gang}, which this rank is not in")
        if len(set(plan.gang)) != plan.width or not set(plan.gang) <= set(self._everyone):
            raise self._illegal(f"Gather {seq}: {plan.gang} is not a set of ranks of a world of {self.world}")
        if (got := hashlib.sha256(gather.tokens).hexdigest()) != gather.prompt_hash:
            raise self._illegal(f"Gather {seq}: tokens hash to {got}, the descriptor says {gather.prompt_hash}")
        is_owner = plan.poster == self.rank
        if is_owner:
            self._move_post(draft, gather.request_id, Input.GATHER)
        reason = self._unfit(draft, gather, is_owner)
        state = self._row(RecordState.UNSEEN, Input.UNFIT if reason else Input.GATHER, seq)
        put(draft, Record(seq=seq, state=state, gather=gather, gang=plan.gang))
        draft.seq_seen = seq
        if reason:
            return [do.Send(msg.Decline(rank=self.rank, seq=seq, reason=reason))]
        return [
            do.Reserve(
                seq=seq,
                request_id=gather.request_id,
                plan=plan,
                tokens=gather.tokens,
                max_tokens=gather.max_tokens,
                is_owner=is_owner,
            )
        ]

    def _unfit(self, draft: MemberState, gather: msg.Gather, is_owner: bool) -> str:
        """Why this rank declines by itself, or ""."""
        if draft.phase is not Phase.SERVING and not is_owner:
            return f"rank {self.rank} is {draft.phase.value}"
        try:
            length = len(gather.tokens) // 4
            self._check(gather.plan, length, gather.plan.poster, self._policy, frozenset(gather.excluded))
        except PlanDiffers as difference:
            return f"rank {self.rank} plans differently: {difference}"
        return ""

    def _reserved(self, draft: MemberState, event: ev.Reserved, now_ns: int) -> list[do.Effect]:
        record = self._move(draft, event.seq, Input.RESERVED)
        if record is None:
            return [do.Disarm(event.seq, "cancelled while it was being reserved")]
        return [do.Send(msg.Ready(rank=self.rank, seq=event.seq, count=draft.count))]

    def _cannot_reserve(self, draft: MemberState, event: ev.CannotReserve, now_ns: int) -> list[do.Effect]:
        if self._move(draft, event.seq, Input.CANNOT_RESERVE) is None:
            return []
        return [do.Send(msg.Decline(rank=self.rank, seq=event.seq, reason=event.reason))]

    def _commit(self, draft: MemberState, commit: msg.Commit, now_ns: int) -> list[do.Effect]:
        self._check_commit_order(draft, commit.seq)
        record = self._move(draft, commit.seq, Input.COMMIT)
        assert record is not None
        assert record.gather is not None
        if commit.supersteps != record.gather.plan.supersteps or commit.launch < 0:
            raise self._illegal(f"Commit {commit.seq} is {commit}, its plan {record.gather.plan}")
        put(draft, msgspec.structs.replace(record, launch=commit.launch, supersteps=commit.supersteps))
        return []

    def _check_commit_order(self, draft: MemberState, seq: int) -> None:
        for other in draft.records:
            if other.seq > seq and other.state in (RecordState.COMMITTED, RecordState.RUNNING):
                raise self._illegal(f"Commit {seq} after the commit of {other.seq}")

    def _cancel(self, draft: MemberState, cancel: msg.Cancel, now_ns: int) -> list[do.Effect]:
        if cancel.outcome not in ("regathered", "final"):
            raise self._illegal(f"Cancel {cancel.seq} with outcome {cancel.outcome!r}")
        before = find(draft, cancel.seq)
        self._move(draft, cancel.seq, Input.CANCEL)
        if before is None:
            return []
        assert before.gather is not None
        effects: list[do.Effect] = []
        if before.state in _ARMED_STATES:
            effects.append(do.Disarm(cancel.seq, cancel.reason))
        if before.gather.plan.poster == self.rank:
            request_id = before.gather.request_id
            if cancel.outcome == "regathered":
                self._move_post(draft, request_id, Input.REGATHER)
            else:
                effects += self._end_post(draft, request_id, Input.CANCEL, cancel.reason)
        return effects

    # ---- leaving -----------------------------------------------------------------------------------------------
    def _drain(self, draft: MemberState, event: ev.DrainWanted, now_ns: int) -> list[do.Effect]:
        return []

    def _drain_all(self, draft: MemberState, message: msg.DrainAll, now_ns: int) -> list[do.Effect]:
        return [do.DrainBegun(message.grace_s)]

    def _drained(self, draft: MemberState, event: ev.DrainedHere, now_ns: int) -> list[do.Effect]:
        if draft.phase in (Phase.STOPPING, Phase.STOPPED):
            return []
        if draft.posts:
            raise self._illegal(f"DrainedHere with {len(draft.posts)} posts that have not ended")
        return [do.Send(msg.Leave(rank=self.rank))]

    def _stop(self, draft: MemberState, stop: msg.Stop, now_ns: int) -> list[do.Effect]:
        self._check_unseen(draft, stop.seq, "Stop")
        for other in draft.records:
            if other.state not in (RecordState.COMMITTED, RecordState.RUNNING):
                raise self._illegal(f"Stop {stop.seq} before seq {other.seq} was committed or cancelled")
        state = self._row(RecordState.UNSEEN, Input.STOP, stop.seq)
        put(draft, Record(seq=stop.seq, state=state, gather=None, gang=self._everyone, launch=stop.launch))
        draft.seq_seen = stop.seq
        effects: list[do.Effect] = []
        for slot in draft.posts:
            request_id = slot.wanted.request_id
            self._move_post(draft, request_id, Input.STOP)
            if slot.state is not PostState.GATHERED:
                effects.append(do.PostEnded(request_id, "the fleet is stopping"))
        return effects

    def _bye(self, draft: MemberState, bye: msg.Bye, now_ns: int) -> list[do.Effect]:
        draft.byes |= {bye.rank}
        return []

    # ---- the boundary ------------------------------------------------------------------------------------------
    def _compose(self, draft: MemberState, boundary: ev.LaunchComposing, now_ns: int) -> list[do.Effect]:
        launch = boundary.launch
        if launch != draft.count:
            raise self._illegal(f"launch {launch} composed, {draft.count} expected: a boundary was not consulted")
        if len(boundary.words) != self.world:
            raise self._illegal(f"{len(boundary.words)} words for a world of {self.world}")
        draft.count = launch + 1
        if not draft.records:
            return [do.Compose(launch=launch, word=0, kind=do.LaunchKind.ORDINARY)]
        for record in draft.records:
            if record.state is RecordState.RESERVING:
                raise self._illegal(f"launch {launch} composed before Reserve({record.seq}) was answered")

        effects: list[do.Effect] = []
        running = self._running(draft)
        is_right_after = False
        if running is not None:
            is_right_after = running.step + 1 == running.supersteps
            running = self._move(draft, running.seq, Input.OVER if is_right_after else Input.SUPERSTEP)
            if running is None:
                effects.append(do.WhaleOver(_running_seq(self.state)))
            else:
                running = put(draft, msgspec.structs.replace(running, step=running.step + 1))
        if running is None:
            running = self._begin(draft, boundary, now_ns, effects)

        word = self._word(draft, launch, running)
        if running is None:
            armed = any(record.state in _ARMED_STATES for record in draft.records)
            # The launch right after a superstep is free even when the next whale is committed, so that a waiting
            # local prompt never waits for more than one whale.
            kind = do.LaunchKind.ARMED if armed and not is_right_after else do.LaunchKind.ORDINARY
            effects.append(do.Compose(launch=launch, word=word, kind=kind))
        else:
            kind = do.LaunchKind.STOP if running.is_stop else do.LaunchKind.SUPERSTEP
            effects.append(do.Compose(launch=launch, word=word, kind=kind, seq=running.seq, step=running.step))
        return effects

    def _begin(
        self, draft: MemberState, boundary: ev.LaunchComposing, now_ns: int, effects: list[do.Effect]
    ) -> Record | None:
        """Begin the whale that is next if this is its launch; otherwise count how long it slips."""
        following = self._following(draft)
        if following is None:
            return None
        assert following.launch is not None
        if boundary.launch < following.launch:
            return None
        if not self._is_confirmed(following, boundary.words):
            self._slip(draft, following, boundary, now_ns)
            return None
        record = self._move(draft, following.seq, Input.BEGIN)
        assert record is not None
        record = put(draft, msgspec.structs.replace(record, slipping_since=None))
        if record.gather is None:
            assert draft.phase is Phase.STOPPING
            draft.phase = PHASES[draft.phase, Input.BEGIN]
            return record
        slipped = boundary.launch - following.launch
        effects.append(do.WhaleBegun(seq=record.seq, gather=record.gather, slipped=slipped))
        if record.gather.plan.poster == self.rank:
            self._move_post(draft, record.gather.request_id, Input.BEGIN)
            effects += self._send_next(draft)
        return record

    def _is_confirmed(self, record: Record, words: tuple[int, ...]) -> bool:
        """Did every member name it? Every member reads the same words, so every member gets the same answer."""
        return all(words[rank] == record.seq + 1 for rank in record.gang)

    def _slip(self, draft: MemberState, record: Record, boundary: ev.LaunchComposing, now_ns: int) -> None:
        if record.slipping_since is None:
            put(draft, msgspec.structs.replace(record, slipping_since=(boundary.launch, now_ns)))
            return
        launch, since_ns = record.slipping_since
        if boundary.launch - launch > self.slip_max_launches and now_ns - since_ns > self.slip_max_ns:
            silent = [rank for rank in record.gang if boundary.words[rank] != record.seq + 1]
            raise PeerProtocolError(
                silent[0],
                f"seq {record.seq} is committed for launch {record.launch}; at launch {boundary.launch}, "
                f"{(now_ns - since_ns) / 1e9:.1f} s late, ranks {silent} do not confirm it",
                self.story,
            )

    def _word(self, draft: MemberState, launch: int, running: Record | None) -> int:
        """The confirmation word of this launch: seq + 1 of the whale this rank could begin when the word is read, or 0.

        The launch that reads it is `launch + words_back`. If that one is a superstep of this rank or the one right
        after, this rank can begin nothing there, and must not let others believe it can.
        """
        following = self._following(draft)
        if following is None:
            return 0
        if running is not None:
            last_superstep = launch + running.supersteps - 1 - running.step
            if launch + self.words_back <= last_superstep + 1:
                return 0
        return following.seq + 1

    # ---- small change ------------------------------------------------------------------------------------------
    def _following(self, draft: MemberState) -> Record | None:
        """The lowest-numbered whale that is committed and has not begun."""
        return next((record for record in draft.records if record.state is RecordState.COMMITTED), None)

    def _running(self, draft: MemberState) -> Record | None:
        return next((record for record in draft.records if record.state is RecordState.RUNNING), None)

    def _check_unseen(self, draft: MemberState, seq: int, what: str) -> None:
        if seq <= draft.seq_seen:
            raise self._illegal(f"{what} {seq} after seq {draft.seq_seen}: seqs must rise")

    def _row(self, state: RecordState, what: Input, seq: int) -> RecordState:
        row = RECORDS.get((state, what))
        if row is None:
            raise self._illegal(f"{what.value} of seq {seq}, which is {state.value}")
        return row

    def _move(self, draft: MemberState, seq: int, what: Input) -> Record | None:
        """One row for one record; returns the record as it is now, None if it is finished."""
        record = find(draft, seq)
        if record is not None:
            state = record.state
        else:
            state = RecordState.UNSEEN if seq > draft.seq_seen else RecordState.FINISHED
        state = self._row(state, what, seq)
        if state is RecordState.FINISHED:
            drop(draft, seq)
            return None
        assert record is not None
        return put(draft, msgspec.structs.replace(record, state=state))

    def _illegal(self, what: str) -> LocalProtocolError:
        return LocalProtocolError(f"rank {self.rank} at launch {self.state.count}: {what}; story={list(self.story)}")


def _running_seq(state: MemberState) -> int:
    return next(record.seq for record in state.records if record.state is RecordState.RUNNING)


_HANDLERS: dict[Input, Callable[[Member, MemberState, Any, int], list[do.Effect]]] = {
    Input.POST: Member._post,
    Input.WITHDRAW: Member._withdraw,
    Input.DRAIN: Member._drain,
    Input.DRAINED: Member._drained,
    Input.RESERVED: Member._reserved,
    Input.CANNOT_RESERVE: Member._cannot_reserve,
    Input.COMPOSE: Member._compose,
    Input.GATHER: Member._gather,
    Input.COMMIT: Member._commit,
    Input.CANCEL: Member._cancel,
    Input.POST_REFUSED: Member._post_refused,
    Input.DRAIN_ALL: Member._drain_all,
    Input.STOP: Member._stop,
    Input.BYE: Member._bye,
}
