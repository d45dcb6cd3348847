"""Stories that need a reader's questions answered in code: `helpers.control_fleet.Fleet` holds network and clock.

The stories that can be told by commands alone are in `scenarios/`.
"""

from __future__ import annotations

import pytest

from helpers.control_fleet import SECOND, Fleet
from whalez.errors import PlanDiffers
from whalez.planning import CostModel, PlanPolicy, check_plan, plan_whale
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg
from whalez.rendezvous.member import Member, Phase, PostState
from whalez.rendezvous.sequencer import Phase as WorldPhase
from whalez.rendezvous.sequencer import Sequencer


@pytest.fixture(params=[1, 2], ids=["words of n-1", "words of n-2"])
def words_back(request: pytest.FixtureRequest) -> int:
    return request.param


def test_one_whale(words_back: int) -> None:
    fleet = Fleet(words_back=words_back)
    fleet.launch(3)
    fleet.post(2, "r", 8)
    fleet.run(12)
    # Readys carry count 3; rank 0's count is 3; L = 3 + 1 (2 with a launch in flight) + slack 4.
    launch = 3 + words_back + 4
    assert fleet.begun == {0: dict.fromkeys(range(4), launch)}
    assert fleet.slips == {0: 0}
    assert fleet.kinds(1) == "ooo" + "a" * (launch - 3) + "s" + "o" * (15 - launch - 1)
    assert fleet.members[2].state.posts == ()
    assert all(member.may_sleep for member in fleet.members)
    gather = fleet.all_of(msg.Gather)[0]
    assert isinstance(gather, msg.Gather)
    assert gather.plan.gang == (0, 1, 3, 2)


def test_armed_rank_never_sleeps() -> None:
    fleet = Fleet()
    assert all(member.may_sleep and not member.is_armed for member in fleet.members)
    fleet.post(0, "r")
    assert fleet.members[0].may_sleep  # a mere post needs no launch
    fleet.held.add(1)
    fleet.deliver()
    assert fleet.members[0].is_armed
    assert not fleet.members[0].may_sleep
    assert not fleet.members[0].has_commit
    fleet.held.clear()
    fleet.deliver()
    assert fleet.members[0].has_commit


def test_decline_is_gathered_again_without_the_decliner() -> None:
    fleet = Fleet()
    fleet.refusing.add(1)
    fleet.post(3, "r", 8)
    fleet.run(12)
    (cancel,) = fleet.all_of(msg.Cancel)
    assert isinstance(cancel, msg.Cancel)
    assert (cancel.seq, cancel.outcome) == (0, "regathered")
    assert cancel.reason == "rank 1 declined: no scratch"
    assert set(fleet.begun) == {1}
    assert set(fleet.begun[1]) == {0, 2, 3}
    assert fleet.ended == {}
    assert (0, 0) in fleet.disarmed
    assert (1, 0) not in fleet.disarmed  # the decliner holds nothing
    assert "a" not in fleet.kinds(1)


def test_decline_with_nobody_left_ends_the_post() -> None:
    fleet = Fleet()
    fleet.refusing.add(2)
    fleet.post(3, "r", 9)  # 2 and 3 only
    fleet.run(12)
    assert fleet.begun == {}
    assert fleet.ended == {"r": "rank 2 declined: no scratch; no gang for 9 tokens"}
    assert not any(member.is_armed for member in fleet.members)


def test_decline_of_the_poster_is_final() -> None:
    fleet = Fleet()
    fleet.refusing.add(3)
    fleet.post(3, "r", 8)
    fleet.run(12)
    assert fleet.begun == {}
    assert "rank 3 declined" in fleet.ended["r"]


def test_refused_post_does_not_stop_those_behind_it() -> None:
    fleet = Fleet(gathers_max=1)
    fleet.post(0, "first", 8)
    fleet.post(1, "refused", 13)
    fleet.post(2, "behind", 9)
    fleet.run(24)
    assert fleet.ended == {"refused": "no gang for 13 tokens"}
    assert set(fleet.begun) == {0, 1}
    assert set(fleet.begun[1]) == {2, 3}


def test_deadline_cancels_the_gather_and_those_behind_go_on() -> None:
    fleet = Fleet(deadline_ns=2 * SECOND, deadline_launches=64)
    fleet.post(0, "stuck", 9)  # 0 and 1
    fleet.held.add(1)
    fleet.run(2)
    fleet.post(2, "behind", 9)  # 2 and 3, ready at once, but seq 0 comes first
    fleet.run(10)
    assert fleet.begun == {}
    assert fleet.sequencer.next_deadline_ns == 2 * SECOND
    fleet.now_ns = 3 * SECOND  # time alone is not enough
    fleet.sequence(ev.Tick())
    assert fleet.all_of(msg.Cancel) == []
    assert fleet.sequencer.next_deadline_ns > fleet.now_ns
    fleet.run(64)
    fleet.sequence(ev.Tick())
    fleet.run(8)
    assert fleet.ended == {"stuck": "ranks [1] did not answer in 3.0 s"}
    assert set(fleet.begun) == {1}
    # The late Ready of rank 1 finds a finished seq and is dropped.
    fleet.held.clear()
    fleet.run(3)
    assert not fleet.members[1].is_armed
    assert set(fleet.begun) == {1}


def test_late_commit_slips_and_all_begin_together(words_back: int) -> None:
    fleet = Fleet(words_back=words_back)
    fleet.post(0, "r", 8)
    fleet.deliver_until_ready()
    fleet.held.add(3)
    (commit,) = fleet.all_of(msg.Commit)
    assert isinstance(commit, msg.Commit)
    fleet.run(commit.launch - words_back + 1)  # launches 0 .. L - words_back are composed: one boundary too late
    fleet.held.clear()
    fleet.run(5)
    assert fleet.begun == {0: dict.fromkeys(range(4), commit.launch + 1)}
    assert fleet.slips == {0: 1}


def test_commit_just_in_time_does_not_slip() -> None:
    fleet = Fleet()
    fleet.post(0, "r", 9)
    fleet.deliver()
    (commit,) = fleet.all_of(msg.Commit)
    assert isinstance(commit, msg.Commit)
    fleet.run(commit.launch)
    assert fleet.words[-1] == (1, 1, 0, 0)
    fleet.run(1)
    assert fleet.begun == {0: {0: commit.launch, 1: commit.launch}}


def test_two_whales_from_two_ranks_leave_a_launch_between(words_back: int) -> None:
    fleet = Fleet(words_back=words_back)
    fleet.post(1, "a", 40)  # two supersteps
    fleet.post(2, "b", 8)
    fleet.run(24)
    first, second = fleet.launches_of(0), fleet.launches_of(1)
    assert set(first) == set(second) == {0, 1, 2, 3}
    launch = 0 + words_back + 4
    assert all(launches == [launch, launch + 1] for launches in first.values())
    assert all(launches == [launch + 3] for launches in second.values())
    # The launch between is free although the second whale is committed.
    assert fleet.kinds(0)[launch : launch + 5] == "ssoso"


def test_word_is_zero_while_the_reader_belongs_to_a_superstep_or_is_right_after(words_back: int) -> None:
    fleet = Fleet(words_back=words_back)
    fleet.post(1, "a", 40)
    fleet.post(2, "b", 8)
    fleet.run(24)
    launch = fleet.begun[0][0]
    words = [row[0] for row in fleet.words]
    named_second = words.index(2)
    assert named_second + words_back == launch + 3  # the reader is the first that may begin it
    assert words[launch - 1] == 1
    assert words[launch:named_second] == [0] * (named_second - launch)


def test_slipped_whale_pushes_the_next_one_on() -> None:
    """The second whale's L lies right behind the first's; the slip of the first moves it, nobody overlaps."""
    fleet = Fleet()
    fleet.post(1, "a", 40)
    fleet.post(2, "b", 8)
    fleet.deliver_until_ready()
    commits = fleet.all_of(msg.Commit)
    assert [commit.launch for commit in commits] == [5, 8]
    fleet.held.add(3)
    fleet.run(8)  # launches 0 to 7: rank 3 reads both commits four launches late
    assert fleet.begun == {}
    fleet.held.clear()
    fleet.run(8)
    assert fleet.launches_of(0) == {rank: [9, 10] for rank in range(4)}
    assert fleet.launches_of(1) == {rank: [12] for rank in range(4)}
    assert fleet.slips == {0: 4, 1: 4}


def test_disjoint_gangs_may_share_a_launch() -> None:
    fleet = Fleet()
    fleet.post(0, "a", 9)
    fleet.post(2, "b", 9)
    fleet.run(12)
    assert set(fleet.begun[0]) == {0, 1}
    assert set(fleet.begun[1]) == {2, 3}
    assert set(fleet.begun[0].values()) == set(fleet.begun[1].values()) == {5}


def test_two_posts_of_one_rank_go_one_after_the_other() -> None:
    fleet = Fleet()
    fleet.post(1, "a", 8)
    fleet.post(1, "b", 8)
    assert [slot.state for slot in fleet.members[1].state.posts] == [PostState.OUTSTANDING, PostState.QUEUED]
    fleet.run(4)
    assert len(fleet.all_of(msg.Gather)) == 1
    fleet.run(16)
    assert set(fleet.begun) == {0, 1}
    assert fleet.begun[1][1] > fleet.begun[0][1] + 1
    assert fleet.ended == {}


def test_queued_post_is_sent_when_the_first_is_cancelled() -> None:
    fleet = Fleet()
    fleet.post(1, "a", 8)
    fleet.post(1, "b", 8)
    fleet.member(1, ev.WithdrawWanted("a"))
    fleet.run(12)
    assert fleet.ended == {"a": "withdrawn"}
    assert len(fleet.begun) == 1


def test_withdraw_of_a_queued_post_stays_here() -> None:
    fleet = Fleet()
    fleet.post(1, "a", 8)
    fleet.post(1, "b", 8)
    fleet.member(1, ev.WithdrawWanted("b"))
    assert fleet.ended == {"b": "withdrawn"}
    assert [type(message) for _, message in fleet.to_sequencer] == [msg.Post]


def test_withdraw_after_the_commit_changes_nothing() -> None:
    fleet = Fleet()
    fleet.post(1, "a", 8)
    fleet.deliver()
    assert fleet.all_of(msg.Commit)
    fleet.member(1, ev.WithdrawWanted("a"))
    fleet.run(8)
    assert set(fleet.begun[0]) == {0, 1, 2, 3}
    assert fleet.ended == {}
    fleet.member(1, ev.WithdrawWanted("a"))  # and again when all is over
    assert fleet.to_sequencer == []


def test_stop_ends_queued_posts_and_open_gathers() -> None:
    fleet = Fleet()
    fleet.post(0, "committed", 8)
    fleet.deliver()
    assert len(fleet.all_of(msg.Commit)) == 1
    fleet.held.add(3)
    fleet.post(2, "open", 8)
    fleet.post(2, "queued", 8)
    fleet.deliver()
    fleet.sequence(ev.StopWanted())
    fleet.held.clear()
    fleet.run(1)
    assert fleet.ended == {"open": "the fleet is stopping", "queued": "the fleet is stopping"}
    fleet.post(1, "late", 8)
    assert fleet.ended["late"] == "the fleet is stopping"
    fleet.run(12)
    assert set(fleet.begun) == {0}
    (stop,) = fleet.all_of(msg.Stop)
    assert isinstance(stop, msg.Stop)
    assert fleet.launches_of(stop.seq) == {rank: [stop.launch] for rank in range(4)}
    assert stop.launch > fleet.begun[0][0] + 1
    assert all(member.state.phase is Phase.STOPPED for member in fleet.members)
    assert all(kinds.endswith("S") and "S" not in kinds[:-1] for kinds in map(fleet.kinds, range(4)))


def test_stop_crosses_with_a_post() -> None:
    fleet = Fleet()
    fleet.sequence(ev.StopWanted())
    fleet.post(1, "crossed", 8)  # sent before the Stop is read
    fleet.run(8)
    assert fleet.ended == {"crossed": "the fleet is stopping"}
    assert all(member.state.phase is Phase.STOPPED for member in fleet.members)


def test_world_stops_when_all_have_left() -> None:
    fleet = Fleet()
    fleet.member(2, ev.DrainWanted())
    fleet.post(0, "r", 8)  # rank 2 helps nobody any more
    fleet.run(12)
    assert set(fleet.begun[1]) == {0, 1, 3}
    for rank in range(4):
        fleet.member(rank, ev.DrainedHere())
    assert fleet.members[0].state.phase is Phase.LEFT
    fleet.run(10)
    assert all(member.state.phase is Phase.STOPPED for member in fleet.members)


def test_drain_refuses_posts_and_stops_at_its_deadline_without_the_last_leave() -> None:
    fleet = Fleet()
    fleet.sequence(ev.StopWanted(5.0))
    fleet.run(1)
    assert all(member.state.phase is Phase.DRAINING for member in fleet.members)
    fleet.post(0, "r", 8)
    fleet.run(2)
    assert fleet.ended == {"r": "the fleet is draining"}
    for rank in range(3):
        fleet.member(rank, ev.DrainedHere())
    fleet.run(3)
    assert fleet.sequencer.state.phase is not WorldPhase.STOPPED
    fleet.now_ns = 8 * SECOND
    fleet.sequence(ev.Tick())
    fleet.run(10)
    assert all(member.state.phase is Phase.STOPPED for member in fleet.members)


def test_death_is_fatal_until_stop_has_begun() -> None:
    fleet = Fleet()
    fleet.sequence(ev.PeerGone(2, "killed by signal 9"))
    assert fleet.sent == [msg.Died(rank=2, how="killed by signal 9")]

    fleet = Fleet()
    fleet.sequence(ev.StopWanted())
    fleet.run(8)
    fleet.sequence(ev.Received(msg.Bye(rank=0), 0))
    fleet.sequence(ev.PeerGone(2, "exited 0"))  # before its Bye came through
    fleet.deliver()
    assert all(member.state.byes == {0, 2} for member in fleet.members)
    fleet.sequence(ev.Received(msg.Bye(rank=1), 1))
    fleet.sequence(ev.Received(msg.Bye(rank=3), 3))
    fleet.deliver()
    assert all(member.everyone_said_bye for member in fleet.members)
    assert fleet.all_of(msg.Died) == []


def test_member_that_plans_differently_declines_by_field() -> None:
    def differs(*_: object) -> None:
        raise PlanDiffers("bounds", (0, 4, 8), (0, 3, 8))

    fleet = Fleet(2)
    fleet.members[1] = Member(1, 2, policy=None, check=differs)
    fleet.post(0, "r", 8)
    fleet.run(4)
    assert "rank 1 plans differently: " in fleet.ended["r"]
    assert "bounds" in fleet.ended["r"]


def test_slack_follows_the_lag_of_readys() -> None:
    fleet = Fleet(slack_start=4)
    for number in range(40):  # messages within a launch: slack falls to its least
        fleet.post(0, f"r{number}", 9)
        fleet.run(8)
    assert fleet.sequencer.state.slack == 2
    fleet.post(0, "slow", 9)
    fleet.deliver_inbound()
    fleet.deliver_outbound()
    fleet.launch(6)  # the Readys take six launches
    fleet.deliver()
    assert fleet.sequencer.state.slack == 2 + 6


def test_with_the_real_planner() -> None:
    """The signatures meet, and a member's own plan is the sequencer's, with and without a decliner."""
    policy = PlanPolicy(world=4, node_ranks=4, segment_floor=16, whale_min=32, buckets=(64, 128), cost=CostModel.k3())
    for refusing in (set(), {1}):
        fleet = Fleet()
        fleet.members = [Member(rank, 4, policy=policy, check=check_plan) for rank in range(4)]
        fleet.sequencer = Sequencer(4, policy, plan=plan_whale)
        fleet.refusing = refusing
        fleet.post(2, "whale", 128)
        fleet.post(3, "small", 31)
        fleet.run(16)
        (begun,) = fleet.begun.values()
        assert set(begun) == ({2, 3} if refusing else {0, 1, 2, 3})
        assert "31 tokens" in fleet.ended["small"]
