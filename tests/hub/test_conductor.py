"""The centre without a transport: who speaks for a rank, what is repeated, what is fatal."""

import pytest
from hub_helpers import PassOn, hello

from whalez.errors import PeerDied, PeerProtocolError
from whalez.hub.conductor import Conductor, Out
from whalez.rendezvous.events import Received
from whalez.rendezvous.messages import (
    Bye,
    Died,
    DrainAll,
    Mapped,
    Offer,
    Ready,
    Refused,
    Table,
    Withdraw,
    WorldStarts,
)
from whalez.rendezvous.sequencer import Sequencer


class Centre:
    """A conductor of a world of `world`, with the time left out."""

    def __init__(self, world, sequencer=None):
        self.world = world
        self.conductor = Conductor(world, sequencer or PassOn(world))

    def hello(self, said):
        return self.conductor.received(said.entry.incarnation, said, 0, 0)

    def say(self, said, message):
        return self.conductor.received(said.entry.incarnation, message, 0, 0)

    def gone(self, said, how="gone"):
        return self.conductor.gone(said.entry.incarnation, how, 0, 0)

    def run(self):
        said = [hello(rank, self.world) for rank in range(self.world)]
        for each in said:
            self.hello(each)
        for each in said:
            outs = self.say(each, Mapped(rank=each.entry.rank))
        assert [out.message for out in outs] == [WorldStarts()] * self.world
        return said


@pytest.fixture
def centre():
    return Centre(2)


def kinds(outs):
    return [(out.incarnation, type(out.message)) for out in outs]


def test_a_number_that_is_taken_is_refused_by_name_and_the_first_keeps_it(centre):
    first, second, zero = hello(1, 2), hello(1, 2), hello(0, 2)
    assert centre.hello(first) == []
    (out,) = centre.hello(second)
    assert (out.incarnation, out.is_last, out.message.field) == (second.entry.incarnation, True, "rank")
    assert "rank 1 is taken by process 1 on here" in out.message.reason
    assert "process 1 on here" in centre.conductor.claimed_twice[1]
    outs = centre.hello(zero)
    assert all(out.message == Table(entries=(zero.entry, first.entry)) for out in outs)


def test_the_newest_start_speaks_for_a_rank_whose_process_is_gone_and_an_older_one_never_again(centre):
    old, new, zero = hello(1, 2), hello(1, 2), hello(0, 2)
    assert centre.hello(old) == []
    assert centre.gone(old) == []
    assert centre.hello(new) == []
    (out,) = centre.hello(old)  # delayed, or from a process that still lives
    assert (out.message.field, out.is_last) == ("incarnation", True)
    outs = centre.hello(zero)
    assert all(out.message == Table(entries=(zero.entry, new.entry)) for out in outs)
    (out,) = centre.say(old, Mapped(rank=1))
    assert isinstance(out.message, Refused)
    assert old.entry.incarnation in out.message.reason


def test_a_process_that_ends_before_the_table_only_frees_its_place(centre):
    one, again, zero = hello(1, 2), hello(1, 2), hello(0, 2)
    centre.hello(one)
    assert centre.gone(one) == []
    assert centre.hello(zero) == []
    assert len(centre.hello(again)) == 2
    assert centre.conductor.failure is None


def test_who_repeats_itself_is_told_again(centre):
    zero, one = hello(0, 2), hello(1, 2)
    assert centre.hello(zero) == centre.hello(zero) == []
    centre.hello(one)
    assert kinds(centre.hello(zero)) == [(zero.entry.incarnation, Table)]
    assert centre.say(zero, Mapped(rank=0)) == []
    assert kinds(centre.say(zero, Mapped(rank=0))) == [(zero.entry.incarnation, Table)]
    centre.say(one, Mapped(rank=1))
    assert kinds(centre.say(zero, Mapped(rank=0))) == [
        (zero.entry.incarnation, Table),
        (zero.entry.incarnation, WorldStarts),
    ]


def test_after_the_table_a_restarted_rank_is_refused_and_the_world_goes_on(centre):
    said = centre.run()
    (out,) = centre.hello(hello(1, 2))
    assert out.message.field == "incarnation"
    ready = Ready(rank=1, seq=0, count=0)
    assert centre.say(said[1], ready) == [Out(said[0].entry.incarnation, ready)]


def test_a_frame_before_the_world_starts_is_its_senders_death(centre):
    zero, one = hello(0, 2), hello(1, 2)
    centre.hello(zero)
    centre.hello(one)
    outs = centre.say(one, Ready(rank=1, seq=0, count=0))
    assert [out.message.rank for out in outs] == [1, 1]
    assert isinstance(centre.conductor.failure, PeerProtocolError)


def test_a_lost_process_is_told_to_all_once(centre):
    said = centre.run()
    assert [out.message for out in centre.gone(said[1])] == [Died(rank=1, how="gone")] * 2
    assert isinstance(centre.conductor.failure, PeerDied)
    assert centre.gone(said[0]) == []
    assert centre.say(said[0], Ready(rank=0, seq=0, count=0)) == []


def test_a_loss_during_the_mapping_is_told_too(centre):
    zero, one = hello(0, 2), hello(1, 2)
    centre.hello(zero)
    centre.hello(one)
    assert [out.message for out in centre.gone(one)] == [Died(rank=1, how="gone")] * 2


def test_who_said_bye_may_go(centre):
    said = centre.run()
    assert [out.message for out in centre.say(said[1], Bye(rank=1))] == [Bye(rank=1)] * 2
    assert centre.gone(said[1]) == []
    assert centre.say(said[0], Died(rank=1, how="its process has ended")) == []
    assert centre.conductor.failure is None


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(centre, rank):
    (out,) = centre.hello(hello(rank, 2))
    assert out.message.field == "rank"


@pytest.mark.parametrize(
    "message",
    [
        Mapped(rank=1),
        Ready(rank=1, seq=0, count=3),
        Bye(rank=1),
        Mapped(rank=0),
        Offer(rank=1, turn=0, data=b""),
        Died(rank=0, how="gone"),
    ],
    ids=["Mapped", "Ready", "Bye", "another's Mapped", "Offer", "Died"],
)
def test_who_speaks_before_the_table_is_out_has_another_worlds_and_costs_only_itself(centre, message):
    """A process outlives its world; its socket finds the new rank 0, and an old Hello comes before what it says."""
    stale, new, zero = hello(1, 2), hello(1, 2), hello(0, 2)
    assert centre.hello(stale) == []
    (out,) = centre.say(stale, message)
    assert (out.incarnation, out.is_last, type(out.message)) == (stale.entry.incarnation, True, Refused)
    assert type(message).__name__ in out.message.reason
    assert centre.conductor.failure is None
    (out,) = centre.hello(stale)
    assert isinstance(out.message, Refused)
    # Its place is free: the world comes up with the process that belongs to it.
    assert centre.hello(new) == []
    outs = centre.hello(zero)
    assert all(out.message == Table(entries=(zero.entry, new.entry)) for out in outs)


IMPOSSIBLE = [DrainAll(grace_s=grace_s) for grace_s in (86_401.0, 1e300, -1.0, float("nan"), float("inf"))]


@pytest.mark.parametrize("message", [*IMPOSSIBLE, Ready(rank=1, seq=9, count=0), Withdraw(rank=0, request_id="r")])
def test_what_the_sequencer_has_no_row_for_costs_a_rank_its_life_and_an_operator_nothing(message):
    """The same words: from a rank they are the end of its world, as an order they are ignored, and nothing changed."""
    sequencer = Sequencer(2, None, plan=None)
    centre = Centre(2, sequencer)
    said = centre.run()
    before = sequencer.state.key()
    sender = 7 if isinstance(message, Withdraw) else 1
    assert centre.conductor.order(Received(message, sender), 0, 0) == []
    assert centre.conductor.failure is None
    assert sequencer.state.key() == before
    assert [out.message.rank for out in centre.say(said[1], message)] == [1, 1]
    assert isinstance(centre.conductor.failure, PeerProtocolError)
    assert sequencer.state.key() == before
