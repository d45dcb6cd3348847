"""What is remembered of whales, from real machines' events and effects."""

import hashlib

from whalez.planning.plan import GangPlan
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg
from whalez.rendezvous.lives import LIVES_MAX, WatchedSequencer, WhaleLives
from whalez.rendezvous.member import Member
from whalez.rendezvous.sequencer import Sequencer

TOKENS = bytes(4 * 6)
HASH = hashlib.sha256(TOKENS).hexdigest()


def plan(length, poster, policy, excluded):
    helpers = tuple(rank for rank in range(3) if rank != poster and rank not in excluded)
    gang = (*helpers, poster)
    return GangPlan(gang=gang, bounds=tuple(length * i // len(gang) for i in range(len(gang) + 1)))


def post(rank, name):
    return msg.Post(rank=rank, request_id=name, tokens=TOKENS, prompt_hash=HASH, max_tokens=1)


def moments(life):
    return [(str(moment.what), moment.rank, moment.detail) for moment in life.moments]


def sequencer():
    return WatchedSequencer(Sequencer(3, None, plan=plan))


def test_the_sequencer_tells_answers_commit_and_times():
    watched = sequencer()
    watched.step(ev.Received(post(1, "r"), 1), 10, 4)
    for rank in (2, 0, 1):
        watched.step(ev.Received(msg.Ready(rank=rank, seq=0, count=5 + rank), rank), 20 + rank, 6)
    (life,) = watched.whales.lives
    assert (life.seq, life.request_id, life.poster, life.gang, life.tokens) == (0, "r", 1, (0, 2, 1), 6)
    assert moments(life) == [
        ("posted", 1, ""),
        ("gathered", -1, ""),
        ("ready", 2, "at launch 7"),
        ("ready", 0, "at launch 5"),
        ("ready", 1, "at launch 6"),
        ("committed", -1, ""),
    ]
    assert [moment.at_ns for moment in life.moments] == [10, 10, 22, 20, 21, 21]
    assert life.launch == watched.sequencer.records[0].launch


def test_a_decline_is_told_and_the_next_seq_has_the_same_beginning():
    watched = sequencer()
    watched.step(ev.Received(post(1, "r"), 1), 10, 0)
    watched.step(ev.Received(msg.Decline(rank=2, seq=0, reason="full"), 2), 20, 0)
    first, second = watched.whales.lives
    assert moments(first)[2:] == [("declined", 2, "full"), ("cancelled", -1, "rank 2 declined: full (regathered)")]
    assert (second.seq, second.gang, moments(second)) == (1, (0, 1), [("posted", 1, ""), ("gathered", -1, "")])


def test_a_stop_is_a_life_without_a_poster():
    watched = sequencer()
    watched.step(ev.StopWanted(), 10, 3)
    (life,) = watched.whales.lives
    assert (life.poster, life.launch) == (None, watched.sequencer.state.launch_floor)


def test_a_member_tells_what_reached_it_and_what_it_ran():
    member, lives = Member(0, 3, policy=None, check=lambda *_: None), WhaleLives()
    at = 0

    def step(event):
        nonlocal at
        at += 1
        effects = member.step(event, at)
        lives.member_saw(0, event, effects, at, member.state.count)
        return effects

    gather = msg.Gather(seq=4, request_id="r", plan=plan(6, 1, None, ()), tokens=TOKENS, prompt_hash=HASH, max_tokens=1)
    step(ev.Received(gather))
    step(ev.Reserved(4))
    step(ev.Received(msg.Commit(seq=4, launch=1, supersteps=1)))
    for launch, words in enumerate([(0, 0, 0), (0, 0, 0), (5, 5, 5), (0, 0, 0)]):
        step(ev.LaunchComposing(launch, words))
    (life,) = lives.lives
    assert moments(life) == [
        ("gathered", -1, ""),
        ("ready", 0, "at launch 0"),
        ("committed", -1, ""),
        ("begun", 0, ""),
        ("done", 0, ""),
    ]
    assert (life.launch, life.slips) == (1, 1)  # confirmed one launch late


def test_the_ring_is_bounded_and_holds_no_tokens():
    lives = WhaleLives()
    for seq in range(LIVES_MAX + 10):
        gather = msg.Gather(
            seq=seq, request_id=f"r{seq}", plan=plan(6, 1, None, ()), tokens=TOKENS, prompt_hash=HASH, max_tokens=1
        )
        lives.sequencer_saw(ev.Tick(), [do.SendTo(0, gather), do.SendTo(1, gather)], seq, 0)
        lives.sequencer_saw(ev.Received(post(1, f"p{seq}"), 1), [], seq, 0)
    assert [life.seq for life in lives.lives] == list(range(10, LIVES_MAX + 10))
    assert all(len(life.moments) == 1 for life in lives.lives)
    assert len(lives._posted) <= 64
    lives.member_saw(0, ev.Received(msg.Commit(seq=3, launch=9, supersteps=1)), [], 0, 0)  # forgotten: nothing happens
    assert [life.seq for life in lives.lives] == list(range(10, LIVES_MAX + 10))


def test_what_was_read_does_not_change():
    lives = WhaleLives()
    gather = msg.Gather(seq=0, request_id="r", plan=plan(6, 1, None, ()), tokens=TOKENS, prompt_hash=HASH, max_tokens=1)
    lives.sequencer_saw(ev.Tick(), [do.SendTo(0, gather)], 1, 0)
    read = lives.lives
    lives.sequencer_saw(ev.Received(msg.Ready(rank=0, seq=0, count=0), 0), [], 2, 0)
    assert len(read[0].moments) == 1
    assert len(lives.lives[0].moments) == 2
