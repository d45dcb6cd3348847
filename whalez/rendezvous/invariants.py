"""What must hold between any two steps of a machine, whatever came in: for tests, simulator and post-mortems.

Rule 1: these functions look, they never mend.   Rule 2: they know the machines; no machine knows them.
"""

from __future__ import annotations

from itertools import pairwise

from whalez.rendezvous import member as m
from whalez.rendezvous import sequencer as s


def validate_member(member: m.Member) -> None:
    """Raises AssertionError naming what does not hold."""
    state = member.state
    seqs = [record.seq for record in state.records]
    assert seqs == sorted(set(seqs)), f"records are not in seq order: {seqs}"
    assert all(seq <= state.seq_seen for seq in seqs), f"a record above the highest seq seen, {state.seq_seen}: {seqs}"

    kinds = [record.state for record in state.records]
    assert m.RecordState.UNSEEN not in kinds, "an unseen seq has a record"
    assert m.RecordState.FINISHED not in kinds, "a finished seq has a record"
    assert m.RecordState.RUNNING not in kinds[1:], f"a whale runs before a lower one is over: {kinds}"
    order = {m.RecordState.RUNNING: 0, m.RecordState.COMMITTED: 1}
    ranks = [order.get(kind, 2) for kind in kinds]
    assert ranks == sorted(ranks), f"committed before a lower seq was resolved: {list(zip(seqs, kinds, strict=True))}"
    committed = [record for record in state.records if record.launch is not None]
    assert [record.state in order for record in state.records] == [r.launch is not None for r in state.records]
    for before, after in pairwise(committed):
        assert before.launch is not None
        assert after.launch is not None
        assert after.launch > before.launch + before.supersteps, f"no launch between {before} and {after}"

    has_stop = any(record.is_stop for record in state.records)
    stopping = state.phase in (m.Phase.STOPPING, m.Phase.STOPPED)
    assert has_stop == stopping, f"{state.phase} with{'' if has_stop else 'out'} a Stop record"
    if has_stop:
        assert [record.is_stop for record in state.records].index(True) == len(state.records) - 1, "a whale behind Stop"
    if state.phase is m.Phase.STOPPED:
        assert kinds == [m.RecordState.RUNNING], f"stopped with {kinds}"

    states = [slot.state for slot in state.posts]
    assert all(kind is m.PostState.QUEUED for kind in states[1:]), f"two posts are outstanding: {states}"
    assert m.PostState.QUEUED not in states[:1], "a post is queued while none is outstanding"
    names = [slot.wanted.request_id for slot in state.posts]
    assert len(set(names)) == len(names), f"two posts of one name: {names}"
    owned = [
        record.gather.request_id
        for record in state.records
        if record.gather is not None
        and record.gather.plan.poster == member.rank
        and record.state is not m.RecordState.RUNNING
    ]
    gathered = [slot.wanted.request_id for slot in state.posts if slot.state is m.PostState.GATHERED]
    assert owned == gathered, f"posts {gathered} are gathered, records are for {owned}"
    if state.phase is m.Phase.LEFT:
        assert not state.posts, "left with a post that has not ended"


def validate_sequencer(sequencer: s.Sequencer) -> None:
    """Raises AssertionError naming what does not hold."""
    state = sequencer.state
    seqs = [record.seq for record in state.records]
    assert seqs == sorted(set(seqs)), f"records are not in seq order: {seqs}"
    assert all(0 <= seq < state.seq_next for seq in seqs), (
        f"a record at or above the next seq, {state.seq_next}: {seqs}"
    )

    open_records = [record for record in state.records if record.is_open]
    is_open = [record.is_open for record in state.records]
    assert is_open == sorted(is_open), f"a commit overtook a lower seq: {seqs} open {is_open}"
    if open_records:
        assert open_records[0].state is s.GatherState.GATHERING, "the lowest open whale is ready and not committed"
    for record in state.records:
        answered = [rank for rank, _ in record.counts]
        assert len(set(answered)) == len(answered), f"a Ready counted twice: {record.counts}"
        assert set(answered) <= set(record.plan.gang), f"a Ready of a stranger: {record.counts}"
        is_full = len(answered) == record.plan.width
        assert is_full == (record.state is not s.GatherState.GATHERING), f"{record.state} with {record.counts}"
        assert (record.launch is not None) == (record.state is s.GatherState.COMMITTED)
        assert record.plan.poster == record.post.rank, "the poster is not the last of its gang"
        assert not record.excluded & set(record.plan.gang), "an excluded rank is in the gang"

    committed = [record for record in state.records if record.launch is not None]
    for at, after in enumerate(committed):
        assert after.launch is not None
        assert after.launch <= state.launch_floor, "L is above its floor"
        for before in committed[:at]:
            assert before.launch is not None
            assert before.launch <= after.launch, "L fell"
            if set(before.plan.gang) & set(after.plan.gang):
                assert after.launch > before.launch + before.plan.supersteps, f"no launch between {before} and {after}"

    posters = [record.post.rank for record in open_records] + [post.rank for post in state.waiting]
    assert len(set(posters)) == len(posters), f"two outstanding posts of one rank: {posters}"
    if state.waiting:
        assert len(open_records) >= sequencer.gathers_max, "a post waits though a gather may be opened"
        assert state.phase is s.Phase.SERVING, f"posts wait while {state.phase.value}"
    if state.phase is s.Phase.STOPPED:
        assert not open_records, "Stop is committed over an open whale"
    assert sequencer.slack_min <= state.slack <= sequencer.slack_max, f"slack is {state.slack}"


def validate(machine: m.Member | s.Sequencer) -> None:
    """Raises AssertionError naming what does not hold."""
    if isinstance(machine, m.Member):
        validate_member(machine)
    else:
        validate_sequencer(machine)
