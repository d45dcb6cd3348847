"""Every interleaving of small fleets keeps every property; and a broken protocol is found, by the right name.

Takes about 45 s of one core: it is a search over more than a million states.
"""

from __future__ import annotations

import pytest

from whalez.fabric.doorbell import Bells
from whalez.rendezvous.member import Member
from whalez.rendezvous.sequencer import Sequencer
from whalez.testing import mutations as broken
from whalez.testing.explore import PROPERTIES, Explorer, Whale, World, deep_worlds, first_worlds, worlds


@pytest.mark.parametrize("world", worlds(), ids=lambda world: world.name)
def test_every_interleaving_keeps_the_properties(world: World) -> None:
    result = Explorer(world).run()
    print(f"{result.states_count} states, {result.moves_count} moves")
    assert result.broken is None, "\n  ".join([result.what, *result.trace])
    assert result.is_complete
    # A search that meets nothing proves nothing: each whale is begun at several launches, on time and late.
    assert result.begun_count >= (5 if world.lateness else 2) * len(world.whales)


FIRST_MOVES = 10


@pytest.mark.parametrize("world", first_worlds(), ids=lambda world: world.name)
def test_every_beginning_of_two_whales_and_a_trouble(world: World) -> None:
    """All orders of the first ten moves, from each of which everything must end well by itself."""
    result = Explorer(world).run(depth_max=FIRST_MOVES)
    print(f"{result.states_count} states, {result.moves_count} moves, {result.depth} deep, then calmly to the end")
    assert result.broken is None, "\n  ".join([result.what, *result.trace])
    assert result.depth == FIRST_MOVES
    assert not result.is_complete
    assert result.begun_count >= 3 * len(world.whales)


def test_a_search_that_is_cut_off_still_looks_at_every_ending() -> None:
    """One move deep no post could have ended; that a withdrawn one never does is seen on the calm way."""
    result = Explorer(WITHDRAWN, member_class=broken.LosesPosts, validate_machines=False).run(depth_max=1)
    assert result.broken == "posts end", result.what


def test_disjoint_gangs_share_a_launch() -> None:
    """The first of the four ranks' states are enough to see it; the rest is for tools/explore.py."""
    four = World(name="four ranks, two gangs", ranks=4, whales=(Whale(gang=(0, 1)), Whale(gang=(2, 3))), lateness=0)
    result = Explorer(four).run(states_max=60_000)
    assert result.broken is None, result.what
    assert result.shared_count > 0


def test_deep_worlds_are_other_worlds() -> None:
    names = [world.name for world in (*worlds(), *deep_worlds())]
    assert len(set(names)) == len(names)
    assert set(first_worlds()) <= set(deep_worlds())


PAIR, BACK = Whale(gang=(0, 1)), Whale(gang=(1, 0))
ONE = World(name="one", ranks=2, whales=(PAIR,))
TWO = World(name="two", ranks=2, whales=(PAIR, BACK))
TWO_PROMPT = World(name="two, prompt", ranks=2, whales=(PAIR, BACK), lateness=0)
WITHDRAWN = World(name="withdrawn", ranks=2, whales=(PAIR,), withdraws=1)
DECLINED = World(name="declined", ranks=2, whales=(PAIR,), declines=1)
STOPPED = World(name="stopped", ranks=2, whales=(), stops=1)
DEADLY = World(name="deadly", ranks=2, whales=(PAIR,), deaths=1)
TRIO = World(name="trio", ranks=3, whales=(PAIR, Whale(gang=(1, 2))))
PROMPT = World(name="prompt", ranks=3, whales=(PAIR, Whale(gang=(1, 2))), lateness=0)
LONG = (Whale(gang=(0, 1), supersteps=2), Whale(gang=(1, 2), supersteps=2))
#: No commit is late, so that nothing but what is broken goes wrong.
SLACK = World(name="slack", ranks=3, whales=LONG, lateness=0, slack=3)
IDLE = World(name="one is idle", ranks=3, whales=(PAIR,))

CASES: dict[str, tuple[World, type[Member], type[Sequencer], str]] = {
    "confirmation ignored": (ONE, broken.ConfirmsNothing, Sequencer, "together"),
    "only the own word is read": (ONE, broken.ReadsOwnWordOnly, Sequencer, "together"),
    "next whale named during a superstep": (TWO, broken.NamesNextDuringSuperstep, Sequencer, "a launch between"),
    "highest seq is named": (TWO_PROMPT, broken.NamesHighest, Sequencer, "armed ends"),
    "commits out of seq order": (TRIO, Member, broken.CommitsOutOfOrder, "legal"),
    "cancel after commit": (
        WITHDRAWN, broken.HonoursCancelAfterCommit, broken.CancelsAfterCommit, "cancelled",
    ),
    "Ready counted twice": (DECLINED, Member, broken.CountsReadyTwice, "legal"),
    "a boundary skipped": (TWO, broken.SkipsABoundary, Sequencer, "one launch"),
    "L is not awaited": (SLACK, broken.BeginsBeforeL, Sequencer, "one launch"),
    "supersteps do not follow each other": (SLACK, broken.PausesBetweenSupersteps, Sequencer, "one launch"),
    "commits and entries out of seq order": (PROMPT, broken.BeginsInOrderOfL, broken.CommitsOutOfOrder, "apart"),
    "two whales of a rank overlap": (SLACK, broken.ConfirmsNothing, broken.ForgetsBusyRanks, "apart"),
    "commit to half a gang": (ONE, Member, broken.CommitsToHalf, "armed ends"),
    "Stop at L, whatever the words say": (STOPPED, broken.ConfirmsNothing, Sequencer, "stop"),
    "armed ranks sleep": (ONE, broken.SleepsThroughAll, Sequencer, "armed ends"),
    "a post is lost": (WITHDRAWN, broken.LosesPosts, Sequencer, "posts end"),
    "a death is kept quiet": (DEADLY, Member, broken.KeepsDeathsToItself, "death is heard"),
    "L is past": (ONE, Member, broken.CommitsForThePast, "L is ahead"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_broken_protocol_is_found(name: str) -> None:
    world, member_class, sequencer_class, expected = CASES[name]
    explorer = Explorer(world, member_class=member_class, sequencer_class=sequencer_class, validate_machines=False)
    result = explorer.run()
    assert result.broken == expected, result.what
    assert result.trace


BELL_CASES: dict[str, tuple[type[Bells], str]] = {
    "a launch bell wakes nobody in time": (broken.SleepsThroughLaunches, "awake"),
    "only one peer is rung": (broken.RingsOnePeer, "awake"),
    "a put wakes nobody": (broken.SleepsThroughPuts, "posts end"),
}


@pytest.mark.parametrize("name", BELL_CASES)
def test_broken_bells_are_found(name: str) -> None:
    bells_class, expected = BELL_CASES[name]
    result = Explorer(IDLE, bells_class=bells_class).run()
    assert result.broken == expected, result.what
    assert result.trace


def test_every_property_can_fail() -> None:
    assert {expected for *_, expected in (*CASES.values(), *BELL_CASES.values())} == set(PROPERTIES)


@pytest.mark.parametrize("world", [TWO_PROMPT, PROMPT, SLACK, IDLE], ids=lambda world: world.name)
def test_worlds_of_the_cases_are_sound(world: World) -> None:
    """The shipped protocol keeps every property in them, so it is the mutation that is found."""
    result = Explorer(world).run()
    assert result.broken is None, result.what
    assert result.is_complete
