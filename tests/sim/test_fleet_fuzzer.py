"""The fleet fuzzer: random fleets of real machines keep the properties, and a broken protocol is found out.

Goal: no seed breaks unanimous entry, order, spacing, cancellation, the fate of posts, or Stop.
Method: `whalez.testing.simulator`; then mutations of the protocol, each of which some seed must find from the outside
(the machines' own invariants are not looked at there).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from whalez.rendezvous import member as m
from whalez.rendezvous import sequencer as s
from whalez.testing.simulator import SimulationFailed, Simulator, Weather

pytestmark = pytest.mark.sim

SEEDS = range(64)
MUTATION_SEEDS = 60


def test_seeds_keep_the_properties() -> None:
    begun = slips = local = launches = 0
    endings = set()
    for seed in SEEDS:
        simulator = Simulator(seed)
        checker = simulator.run()
        endings.add(simulator.weather.ending)
        begun += len(checker.begun)
        slips += checker.slips
        local += sum(how != "superstep" for how in checker.posts.values())
        launches += simulator.ranks[0].count
    # A fuzzer that meets nothing proves nothing.
    assert endings == {"quiet", "stop", "drain", "leave"}
    assert begun > 200
    assert slips > 200
    assert local > 100
    assert launches > 2_000


@pytest.mark.parametrize("world", [2, 3, 5, 16])
def test_other_worlds(world: int) -> None:
    for seed in range(4):
        Simulator(seed, Weather.draw(seed, world)).run()


def test_same_seed_same_run() -> None:
    runs = []
    for _ in range(2):
        simulator = Simulator(5)
        checker = simulator.run()
        runs.append((simulator.now_ns, simulator.steps_count, checker.begun, checker.posts))
    assert runs[0] == runs[1]


class ConfirmsNothing(m.Member):
    def _is_confirmed(self, record: m.Record, words: tuple[int, ...]) -> bool:
        return True


class ReadsOwnWordOnly(m.Member):
    def _is_confirmed(self, record: m.Record, words: tuple[int, ...]) -> bool:
        return words[self.rank] == record.seq + 1


class NamesNextDuringSuperstep(m.Member):
    def _word(self, draft: m.MemberState, launch: int, running: m.Record | None) -> int:
        following = self._following(draft)
        return 0 if following is None else following.seq + 1


class NamesHighest(m.Member):
    def _word(self, draft: m.MemberState, launch: int, running: m.Record | None) -> int:
        word = super()._word(draft, launch, running)
        committed = [r.seq for r in draft.records if r.state is m.RecordState.COMMITTED]
        return max(committed) + 1 if word else 0


class CommitsOutOfOrder(s.Sequencer):
    def _advance(self, draft: s.SequencerState, now_ns: int, effects: list) -> None:
        for record in draft.records:
            if record.state is s.GatherState.READY:
                self._commit(draft, record, effects)
        super()._advance(draft, now_ns, effects)


class TrustingMember(m.Member):
    """Does not notice a commit that overtook another, so that only its consequences can be seen."""

    def _check_commit_order(self, draft: m.MemberState, seq: int) -> None:
        pass


class LeavesRefusedAtHead(s.Sequencer):
    def _advance(self, draft: s.SequencerState, now_ns: int, effects: list) -> None:
        waiting = draft.waiting
        if waiting and len(waiting[0].tokens) // 4 % 7 == 0:  # what toy_plan refuses
            draft.waiting = ()
        super()._advance(draft, now_ns, effects)
        if draft.waiting != waiting and waiting and len(waiting[0].tokens) // 4 % 7 == 0:
            draft.waiting = waiting


class CommitsToHalf(s.Sequencer):
    def _commit(self, draft: s.SequencerState, record: s.Record, effects: list) -> None:
        super()._commit(draft, record, effects)
        if record.seq % 5 == 4:
            effects.pop()


def finding_seed(**mutation: object) -> int:
    for seed in range(MUTATION_SEEDS):
        try:
            Simulator(seed, validate_machines=False, **mutation).run(steps_max=15_000)  # type: ignore[arg-type]
        except SimulationFailed:
            return seed
    pytest.fail(f"{mutation} was not found in {MUTATION_SEEDS} seeds")


MUTATIONS: dict[str, dict[str, object]] = {
    "confirmation ignored": {"member_class": ConfirmsNothing},
    "only the own word is read": {"member_class": ReadsOwnWordOnly},
    "no 0 during a superstep": {"member_class": NamesNextDuringSuperstep},
    "highest seq is named": {"member_class": NamesHighest},
    "commits out of seq order": {"member_class": TrustingMember, "sequencer_class": CommitsOutOfOrder},
    "word is rewritten": {"rewrite_words": True},
    "too few copies of the words": {"word_copies": 1},
    "refused post stays at the head": {"sequencer_class": LeavesRefusedAtHead},
    "commit to part of a gang": {"sequencer_class": CommitsToHalf},
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(name: str) -> None:
    finding_seed(**MUTATIONS[name])


def test_cancel_after_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(m.RECORDS, (m.RecordState.COMMITTED, m.Input.CANCEL), m.RecordState.FINISHED)
    monkeypatch.setitem(m.RECORDS, (m.RecordState.RUNNING, m.Input.CANCEL), m.RecordState.RUNNING)
    monkeypatch.setitem(s.GATHERS, (s.GatherState.COMMITTED, s.Input.WITHDRAW), s.GatherState.FINISHED)
    finding_seed()


def test_tables_of_the_simulator_are_the_shipped_ones() -> None:
    """The mutation above must not leak: the row it adds is illegal."""
    assert (m.RecordState.COMMITTED, m.Input.CANCEL) not in m.RECORDS


def _first_failure(run: Callable[[], object]) -> str:
    with pytest.raises(SimulationFailed) as caught:
        run()
    return str(caught.value)


def test_failure_names_seed_and_reason() -> None:
    seed = finding_seed(**MUTATIONS["confirmation ignored"])
    text = _first_failure(lambda: Simulator(seed, member_class=ConfirmsNothing, validate_machines=False).run())
    assert f"seed {seed}," in text
    assert "Weather(" in text
