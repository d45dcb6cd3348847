"""The tables of the three machines: every row works, everything else raises and leaves the machine as it was."""

from __future__ import annotations

import hashlib
from itertools import product

import msgspec
import pytest

from whalez.errors import LocalProtocolError, PeerProtocolError
from whalez.planning.plan import GangPlan
from whalez.rendezvous import allgather as a
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import member as m
from whalez.rendezvous import messages as msg
from whalez.rendezvous import sequencer as s
from whalez.rendezvous.invariants import validate

TOKENS = bytes(4 * 8)
HASH = hashlib.sha256(TOKENS).hexdigest()
WORLD = 3
OWNER = 2
PLAN = GangPlan(gang=(0, 1, 2), bounds=(0, 3, 6, 8))
SEQ = 5


def accept(*_: object) -> None:
    """A plan check that finds no difference."""


def new_member(rank: int = 0, **more: int) -> m.Member:
    return m.Member(rank, WORLD, policy=None, check=accept, **more)


def wanted(request_id: str = "r0") -> ev.PostWanted:
    return ev.PostWanted(request_id=request_id, tokens=TOKENS, prompt_hash=HASH, max_tokens=1)


def gather(seq: int = SEQ, request_id: str = "r0", plan: GangPlan = PLAN) -> msg.Gather:
    return msg.Gather(
        seq=seq, request_id=request_id, plan=plan, tokens=TOKENS, prompt_hash=HASH, max_tokens=1, excluded=()
    )


def cancel(seq: int = SEQ, outcome: str = "final") -> msg.Cancel:
    return msg.Cancel(seq=seq, request_id="r0", reason="test", outcome=outcome)


def feed(member: m.Member, *events: ev.Event | msg.Message) -> list[do.Effect]:
    effects: list[do.Effect] = []
    for event in events:
        effects += member.step(ev.Received(event) if isinstance(event, msg.Message) else event, 0)
        validate(member)
    return effects


def boundary(member: m.Member, word: int = 0) -> ev.LaunchComposing:
    return ev.LaunchComposing(member.state.count, (word,) * WORLD)


def member_in_phase(phase: m.Phase) -> m.Member:
    member = new_member(OWNER)
    feed(member, boundary(member))
    stop = msg.Stop(seq=SEQ, launch=2)
    match phase:
        case m.Phase.SERVING:
            pass
        case m.Phase.DRAINING:
            feed(member, msg.DrainAll(grace_s=1.0))
        case m.Phase.LEFT:
            feed(member, ev.DrainedHere())
        case m.Phase.STOPPING:
            feed(member, stop)
        case m.Phase.STOPPED:
            feed(member, stop, boundary(member))
            feed(member, boundary(member, SEQ + 1))
    assert member.state.phase is phase
    return member


def unchanged(machine: m.Member | s.Sequencer | a.Allgather, step: object) -> None:
    before, story = machine.state.key(), list(getattr(machine, "story", ()))
    with pytest.raises(LocalProtocolError):
        step()  # type: ignore[operator]
    assert machine.state.key() == before
    assert list(getattr(machine, "story", ())) == story


def dummy(what: m.Input, member: m.Member) -> ev.Event:
    match what:
        case m.Input.POST:
            return wanted()
        case m.Input.WITHDRAW:
            return ev.WithdrawWanted("r0")
        case m.Input.DRAIN:
            return ev.DrainWanted()
        case m.Input.DRAINED:
            return ev.DrainedHere()
        case m.Input.RESERVED:
            return ev.Reserved(SEQ)
        case m.Input.CANNOT_RESERVE:
            return ev.CannotReserve(SEQ, "no room")
        case m.Input.COMPOSE:
            return boundary(member)
        case m.Input.GATHER:
            return ev.Received(gather())
        case m.Input.COMMIT:
            return ev.Received(msg.Commit(seq=SEQ, launch=9, supersteps=1))
        case m.Input.CANCEL:
            return ev.Received(cancel())
        case m.Input.POST_REFUSED:
            return ev.Received(msg.PostRefused(request_id="r0", reason="test"))
        case m.Input.DRAIN_ALL:
            return ev.Received(msg.DrainAll(grace_s=1.0))
        case m.Input.STOP:
            return ev.Received(msg.Stop(seq=SEQ, launch=9))
        case m.Input.BYE:
            return ev.Received(msg.Bye(rank=1))
    raise AssertionError(what)


FED = [what for what in m.Input if what in m._INPUTS.values()]
ABSENT_PHASE_ROWS = [pair for pair in product(m.Phase, FED) if pair not in m.PHASES]


@pytest.mark.parametrize(("phase", "what"), ABSENT_PHASE_ROWS, ids=lambda x: x.name)
def test_no_row_in_phase_raises_and_changes_nothing(phase: m.Phase, what: m.Input) -> None:
    member = member_in_phase(phase)
    unchanged(member, lambda: member.step(dummy(what, member), 1))


def member_in_record_state(state: m.RecordState) -> m.Member:
    """A helper (rank 0) whose record SEQ is in this state."""
    member = new_member()
    commit = msg.Commit(seq=SEQ, launch=1, supersteps=1)
    match state:
        case m.RecordState.UNSEEN:
            pass
        case m.RecordState.RESERVING:
            feed(member, gather())
        case m.RecordState.ARMED:
            feed(member, gather(), ev.Reserved(SEQ))
        case m.RecordState.DECLINED:
            feed(member, gather(), ev.CannotReserve(SEQ, "no room"))
        case m.RecordState.COMMITTED:
            feed(member, gather(), ev.Reserved(SEQ), commit)
        case m.RecordState.RUNNING:
            feed(member, gather(), ev.Reserved(SEQ), commit, boundary(member))
            feed(member, boundary(member, SEQ + 1))
        case m.RecordState.FINISHED:
            feed(member, gather(), cancel())
    found = [record.state for record in member.records]
    assert found == ([] if state in (m.RecordState.UNSEEN, m.RecordState.FINISHED) else [state])
    return member


RECORD_INPUTS = [
    m.Input.GATHER,
    m.Input.RESERVED,
    m.Input.CANNOT_RESERVE,
    m.Input.COMMIT,
    m.Input.CANCEL,
    m.Input.STOP,
]


@pytest.mark.parametrize(("state", "what"), [*product(m.RecordState, RECORD_INPUTS)], ids=lambda x: x.name)
def test_records_follow_their_table(state: m.RecordState, what: m.Input) -> None:
    member = member_in_record_state(state)
    after = m.RECORDS.get((state, what))
    if after is None:
        unchanged(member, lambda: member.step(dummy(what, member), 1))
        return
    feed(member, dummy(what, member))
    found = [record.state for record in member.records]
    assert found == ([] if after is m.RecordState.FINISHED else [after])


POST_INPUTS = [m.Input.POST, m.Input.WITHDRAW, m.Input.POST_REFUSED]


@pytest.mark.parametrize(("state", "what"), [*product(m.PostState, POST_INPUTS)], ids=lambda x: x.name)
def test_posts_follow_their_table(state: m.PostState, what: m.Input) -> None:
    member = new_member(OWNER)
    if state is m.PostState.QUEUED:
        feed(member, wanted("other"), wanted())
    elif state is not m.PostState.UNKNOWN:
        feed(member, wanted())
    if state is m.PostState.GATHERED:
        feed(member, gather())
    if (state, what) not in m.POSTS:
        unchanged(member, lambda: member.step(dummy(what, member), 1))
        return
    feed(member, dummy(what, member))


@pytest.mark.parametrize(
    "broken",
    [
        gather(plan=GangPlan(gang=(1, 2), bounds=(0, 4, 8))),
        gather(plan=GangPlan(gang=(0, 0, 2), bounds=(0, 3, 6, 8))),
        gather(plan=GangPlan(gang=(0, 3), bounds=(0, 4, 8))),
        msgspec.structs.replace(gather(), prompt_hash="0" * 64),
        cancel(outcome="perhaps"),
        msg.Table(entries=()),
        msg.Leave(rank=1),
    ],
    ids=["stranger", "twice", "outside", "hash", "outcome", "table", "leave"],
)
def test_broken_message_raises_and_changes_nothing(broken: msg.Message) -> None:
    member = new_member()
    unchanged(member, lambda: member.step(ev.Received(broken), 1))


def test_gather_to_owner_without_post_raises() -> None:
    member = new_member(OWNER)
    unchanged(member, lambda: member.step(ev.Received(gather()), 1))


def test_seqs_rise() -> None:
    member = new_member()
    feed(member, gather(), cancel())
    unchanged(member, lambda: member.step(ev.Received(gather(SEQ - 1)), 1))
    unchanged(member, lambda: member.step(ev.Received(msg.Stop(seq=SEQ, launch=3)), 1))


def test_commits_come_in_seq_order() -> None:
    member = new_member()
    feed(member, gather(1), ev.Reserved(1), gather(2), ev.Reserved(2))
    feed(member, msg.Commit(seq=1, launch=3, supersteps=1))
    other = new_member()
    feed(other, gather(1), ev.Reserved(1), gather(2), ev.Reserved(2))
    other.step(ev.Received(msg.Commit(seq=2, launch=3, supersteps=1)), 0)
    unchanged(other, lambda: other.step(ev.Received(msg.Commit(seq=1, launch=5, supersteps=1)), 1))


def test_commit_that_contradicts_its_plan_raises() -> None:
    member = new_member()
    feed(member, gather(), ev.Reserved(SEQ))
    unchanged(member, lambda: member.step(ev.Received(msg.Commit(seq=SEQ, launch=3, supersteps=2)), 1))


def test_stop_over_an_open_whale_raises() -> None:
    member = new_member()
    feed(member, gather(), ev.Reserved(SEQ))
    unchanged(member, lambda: member.step(ev.Received(msg.Stop(seq=SEQ + 1, launch=3)), 1))


def test_skipped_boundary_raises() -> None:
    member = new_member()
    unchanged(member, lambda: member.step(ev.LaunchComposing(1, (0, 0, 0)), 1))
    unchanged(member, lambda: member.step(ev.LaunchComposing(0, (0, 0)), 1))


def test_boundary_before_the_reserve_is_answered_raises() -> None:
    member = new_member()
    feed(member, gather())
    unchanged(member, lambda: member.step(boundary(member), 1))


def test_drained_with_a_post_raises() -> None:
    member = new_member()
    feed(member, wanted())
    unchanged(member, lambda: member.step(ev.DrainedHere(), 1))


def test_slip_is_fatal_only_when_both_bounds_have_passed() -> None:
    member = new_member(slip_max_ns=1_000, slip_max_launches=3)
    feed(member, gather(), ev.Reserved(SEQ), msg.Commit(seq=SEQ, launch=0, supersteps=1))
    words = (SEQ + 1, 0, SEQ + 1)
    for launch in range(10):  # many launches, no time
        member.step(ev.LaunchComposing(launch, words), 0)
    assert member.next_deadline_ns == 1_000
    before = member.state.key()
    with pytest.raises(PeerProtocolError, match=r"rank 1: seq 5 .* ranks \[1\] do not confirm it"):
        member.step(ev.LaunchComposing(10, words), 1_001)
    assert member.state.key() == before

    slow = new_member(slip_max_ns=1_000, slip_max_launches=3)
    feed(slow, gather(), ev.Reserved(SEQ), msg.Commit(seq=SEQ, launch=0, supersteps=1))
    for launch in range(4):  # much time, few launches
        slow.step(ev.LaunchComposing(launch, words), launch * 10_000)
    with pytest.raises(PeerProtocolError):
        slow.step(ev.LaunchComposing(4, words), 40_000)


def test_copy_is_independent_and_equal() -> None:
    member = member_in_record_state(m.RecordState.ARMED)
    twin = member.copy()
    assert hash(twin.state.key()) == hash(member.state.key())
    feed(twin, boundary(twin))
    assert twin.state.key() != member.state.key()
    assert len(twin.story) >= len(member.story)
    sequencer = sequencer_in(s.GatherState.GATHERING)
    other = sequencer.copy()
    other.step(ev.Tick(), 5, 100)
    assert other.state.key() != sequencer.state.key()
    assert hash(sequencer.state.key()) == hash(sequencer.copy().state.key())


# ---- sequencer ------------------------------------------------------------------------------------------------
class Refusal(msgspec.Struct, frozen=True):
    reason: str


def plan_all(length: int, poster: int, policy: object, excluded: frozenset[int]) -> GangPlan | Refusal:
    gang = (*(r for r in range(WORLD) if r != poster and r not in excluded), poster)
    if len(gang) < 2 or poster in excluded:
        return Refusal("nobody is left")
    return GangPlan(gang=gang, bounds=tuple(length * i // len(gang) for i in range(len(gang) + 1)))


def new_sequencer(**more: int) -> s.Sequencer:
    return s.Sequencer(WORLD, None, plan=plan_all, **more)


def post(rank: int = OWNER, request_id: str = "r0") -> msg.Post:
    return msg.Post(rank=rank, request_id=request_id, tokens=TOKENS, prompt_hash=HASH, max_tokens=1)


def tell(sequencer: s.Sequencer, *contents: ev.Event | msg.Message, launch: int = 0) -> list[do.Effect]:
    effects: list[do.Effect] = []
    for content in contents:
        event = ev.Received(content, getattr(content, "rank", 0)) if isinstance(content, msg.Message) else content
        effects += sequencer.step(event, 0, launch)
        validate(sequencer)
    return effects


def ready(rank: int, seq: int = 0, count: int = 0) -> msg.Ready:
    return msg.Ready(rank=rank, seq=seq, count=count)


def sequencer_in(state: s.GatherState) -> s.Sequencer:
    """A sequencer whose seq 1 is in this state; seq 0, of rank 1, is gathering in front of READY."""
    sequencer = new_sequencer()
    tell(sequencer, post(1, "front"))
    if state is s.GatherState.UNSEEN:
        return sequencer
    tell(sequencer, post(OWNER, "r0"))
    all_ready = [ready(rank, 1) for rank in range(WORLD)]
    match state:
        case s.GatherState.READY:
            tell(sequencer, *all_ready)
        case s.GatherState.COMMITTED:
            tell(sequencer, *(ready(rank, 0) for rank in range(WORLD)), *all_ready)
        case s.GatherState.FINISHED:
            tell(sequencer, msg.Withdraw(rank=OWNER, request_id="r0"))
    found = [record.state for record in sequencer.records if record.seq == 1]
    assert found == ([] if state is s.GatherState.FINISHED else [state])
    return sequencer


def sequencer_in_phase(phase: s.Phase) -> s.Sequencer:
    sequencer = new_sequencer()
    match phase:
        case s.Phase.DRAINING:
            tell(sequencer, msg.DrainAll(grace_s=1.0))
        case s.Phase.STOPPED:
            tell(sequencer, ev.StopWanted())
        case s.Phase.FAILED:
            tell(sequencer, ev.PeerGone(1, "killed"))
    assert sequencer.state.phase is phase
    return sequencer


SEQUENCER_DUMMIES: dict[s.Input, ev.Event | msg.Message] = {
    s.Input.POST: post(),
    s.Input.WITHDRAW: msg.Withdraw(rank=OWNER, request_id="r0"),
    s.Input.READY: ready(0),
    s.Input.DECLINE: msg.Decline(rank=0, seq=0, reason="test"),
    s.Input.LEAVE: msg.Leave(rank=1),
    s.Input.DRAIN_ALL: msg.DrainAll(grace_s=1.0),
    s.Input.BYE: msg.Bye(rank=1),
    s.Input.TICK: ev.Tick(),
    s.Input.GONE: ev.PeerGone(1, "killed"),
    s.Input.STOP: ev.StopWanted(),
}


def test_dummies_are_complete() -> None:
    assert set(SEQUENCER_DUMMIES) == set(s._INPUTS.values())


@pytest.mark.parametrize(("phase", "what"), [*product(s.Phase, SEQUENCER_DUMMIES)], ids=lambda x: x.name)
def test_sequencer_phases_follow_their_table(phase: s.Phase, what: s.Input) -> None:
    sequencer = sequencer_in_phase(phase)
    content = SEQUENCER_DUMMIES[what]
    # A Ready or Decline of a seq that never was is refused by the other table.
    if (phase, what) not in s.PHASES or (what in (s.Input.READY, s.Input.DECLINE) and phase is not s.Phase.FAILED):
        if phase is s.Phase.STOPPED and what in (s.Input.READY, s.Input.DECLINE):
            tell(sequencer, content)  # seq 0 was Stop's: finished
            return
        unchanged(sequencer, lambda: tell(sequencer, content))
        return
    tell(sequencer, content)
    assert sequencer.state.phase is s.PHASES[phase, what]


@pytest.mark.parametrize(
    ("state", "what"),
    [*product(s.GatherState, [s.Input.READY, s.Input.DECLINE])],
    ids=lambda x: x.name,
)
def test_answers_follow_the_table(state: s.GatherState, what: s.Input) -> None:
    sequencer = sequencer_in(state)
    answer = ready(0, 1) if what is s.Input.READY else msg.Decline(rank=0, seq=1, reason="test")
    if (state, what) not in s.GATHERS:
        unchanged(sequencer, lambda: tell(sequencer, answer))
    else:
        tell(sequencer, answer)


def test_second_ready_raises() -> None:
    sequencer = new_sequencer()
    tell(sequencer, post(), ready(0))
    unchanged(sequencer, lambda: tell(sequencer, ready(0)))
    unchanged(sequencer, lambda: tell(sequencer, msg.Decline(rank=0, seq=0, reason="changed my mind")))


@pytest.mark.parametrize(
    "event",
    [
        ev.Received(post(rank=1), 0),
        ev.Received(post(rank=9), 9),
        ev.Received(ready(0, 0, 1_000), 0),
        ev.Received(ready(0, 0, -1), 0),
        ev.Received(post(OWNER, "second"), OWNER),
        ev.Received(msg.Leave(rank=OWNER), OWNER),
        ev.Received(msgspec.structs.replace(post(1, "odd"), tokens=b"123"), 1),
        ev.Received(msg.WorldStarts(), 1),
    ],
    ids=["impostor", "outside", "far", "negative", "second post", "leaves with a post", "bytes", "kind"],
)
def test_what_peers_may_not_say(event: ev.Event) -> None:
    sequencer = new_sequencer()
    tell(sequencer, post())
    unchanged(sequencer, lambda: sequencer.step(event, 1, 7))  # not even the launch is taken over


def test_a_failed_world_waits_for_nothing() -> None:
    """A deadline that nobody will look at again would keep its driver spinning."""
    sequencer = new_sequencer(gathers_max=1)
    tell(sequencer, post(OWNER, "gathered"), post(0, "waits"))
    assert sequencer.next_deadline_ns is not None
    assert sequencer.state.waiting
    tell(sequencer, ev.PeerGone(1, "killed"))
    assert sequencer.next_deadline_ns is None
    assert not sequencer.state.waiting
    tell(sequencer, ev.Tick())
    assert sequencer.next_deadline_ns is None


def test_leaving_twice_and_posting_after_leaving() -> None:
    sequencer = new_sequencer()
    tell(sequencer, msg.Leave(rank=1))
    unchanged(sequencer, lambda: tell(sequencer, msg.Leave(rank=1)))
    unchanged(sequencer, lambda: tell(sequencer, post(1)))


# ---- allgather ------------------------------------------------------------------------------------------------
def hello(rank: int, incarnation: str = "a", world: int = 2, **fingerprint: str) -> msg.Hello:
    entry = msg.SlabEntry(rank=rank, incarnation=f"{rank}{incarnation}", host="h", pid=1, ticket=b"t")
    return msg.Hello(entry=entry, world=world, fingerprint={"chunk_tokens": "256"} | fingerprint)


def ask(machine: a.Allgather, *contents: ev.Event | msg.Message) -> list[do.Effect]:
    effects: list[do.Effect] = []
    for content in contents:
        effects += machine.step(ev.Received(content) if isinstance(content, msg.Message) else content, 0)
    return effects


def test_world_comes_up() -> None:
    machine = a.Allgather(2)
    assert ask(machine, hello(1)) == []
    assert machine.missing == (0,)
    table = ask(machine, hello(0))
    assert table == [do.Broadcast(msg.Table(entries=(hello(0).entry, hello(1).entry)))]
    assert ask(machine, msg.Mapped(rank=1)) == []
    assert machine.missing == (0,)
    assert ask(machine, msg.Mapped(rank=0)) == [do.Broadcast(msg.WorldStarts())]
    assert machine.has_started
    (refusal,) = ask(machine, hello(1, "b"))
    assert isinstance(refusal, do.Refuse)
    assert (refusal.rank, refusal.incarnation) == (1, "1b")
    assert "started already" in refusal.message.reason


@pytest.mark.parametrize(
    ("newcomer", "field"),
    [
        (hello(1, world=4), "world"),
        (hello(2), "rank"),
        (hello(1, chunk_tokens="512"), "chunk_tokens"),
        (hello(1, dtype="f32"), "dtype"),
    ],
    ids=["world", "rank", "value", "missing"],
)
def test_hello_is_refused_by_field(newcomer: msg.Hello, field: str) -> None:
    machine = a.Allgather(2)
    ask(machine, hello(0))
    before = machine.state.key()
    (refusal,) = ask(machine, newcomer)
    assert isinstance(refusal, do.Refuse)
    assert refusal.message.field == field
    assert machine.state.key() == before


def test_a_number_is_refused_by_name_until_its_process_is_gone() -> None:
    machine = a.Allgather(2)
    (refusal,) = ask(machine, hello(1), hello(1, "b"))
    assert isinstance(refusal, do.Refuse)
    assert refusal.incarnation == "1b"
    assert "rank 1 is taken by process" in refusal.message.reason
    assert ask(machine, ev.PeerGone(1, "killed", "1a"), hello(1, "b")) == []
    ask(machine, ev.PeerGone(1, "killed", "1a"))  # the older one's end again: nothing to us
    (table,) = ask(machine, hello(0))
    assert isinstance(table, do.Broadcast)
    assert isinstance(table.message, msg.Table)
    assert table.message.entries[1].incarnation == "1b"


def test_death_before_and_after_the_table() -> None:
    machine = a.Allgather(2)
    ask(machine, hello(1), ev.PeerGone(1, "killed"))
    assert machine.missing == (0, 1)
    ask(machine, hello(0), hello(1, "b"))
    assert ask(machine, ev.PeerGone(0, "killed")) == [do.Broadcast(msg.Died(rank=0, how="killed"))]
    assert machine.has_failed
    assert ask(machine, msg.Mapped(rank=0), msg.Mapped(rank=1)) == []


ALLGATHER_INPUTS: dict[a.Input, ev.Event | msg.Message] = {
    a.Input.HELLO: hello(1, "z"),
    a.Input.MAPPED: msg.Mapped(rank=1),
    a.Input.GONE: ev.PeerGone(1, "killed"),
}


@pytest.mark.parametrize(("stage", "what"), [*product(a.Stage, ALLGATHER_INPUTS)], ids=lambda x: x.name)
def test_allgather_follows_its_table(stage: a.Stage, what: a.Input) -> None:
    machine = a.Allgather(2)
    match stage:
        case a.Stage.MAPPING:
            ask(machine, hello(0), hello(1))
        case a.Stage.STARTED:
            ask(machine, hello(0), hello(1), msg.Mapped(rank=0), msg.Mapped(rank=1))
        case a.Stage.FAILED:
            ask(machine, hello(0), hello(1), ev.PeerGone(0, "killed"))
    assert machine.state.stage is stage
    if (stage, what) not in a.STEPS:
        unchanged(machine, lambda: ask(machine, ALLGATHER_INPUTS[what]))
    else:
        ask(machine, ALLGATHER_INPUTS[what])


def test_second_mapped_raises() -> None:
    machine = a.Allgather(2)
    ask(machine, hello(0), hello(1), msg.Mapped(rank=1))
    unchanged(machine, lambda: ask(machine, msg.Mapped(rank=1)))
