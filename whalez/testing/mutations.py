"""Protocols that are broken on purpose, one rule each: what the simulator and the search must be able to find out.

Rule: a mutation changes one decision of a shipped class, and nothing that looks for it.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from whalez.fabric.doorbell import Bells, Why
from whalez.hub.conductor import Conductor, Out
from whalez.planning.plan import GangPlan
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import member as m
from whalez.rendezvous import messages as msg
from whalez.rendezvous import sequencer as s
from whalez.rendezvous.records import put


class ConfirmsNothing(m.Member):
    """Begins at L, whatever the words say."""

    def _is_confirmed(self, record: m.Record, words: tuple[int, ...]) -> bool:
        return True


class ReadsOwnWordOnly(m.Member):
    def _is_confirmed(self, record: m.Record, words: tuple[int, ...]) -> bool:
        return words[self.rank] == record.seq + 1


class NamesNextDuringSuperstep(m.Member):
    """Names the next whale though it cannot begin it when the word is read."""

    def _word(self, draft: m.MemberState, launch: int, running: m.Record | None) -> int:
        following = self._following(draft)
        return 0 if following is None else following.seq + 1


class NamesHighest(m.Member):
    def _word(self, draft: m.MemberState, launch: int, running: m.Record | None) -> int:
        word = super()._word(draft, launch, running)
        committed = [record.seq for record in draft.records if record.state is m.RecordState.COMMITTED]
        return max(committed) + 1 if word else 0


class SkipsABoundary(m.Member):
    """Odd ranks compose every third launch as if nothing was held."""

    def step(self, event: ev.Event, now_ns: int) -> list[do.Effect]:
        if isinstance(event, ev.LaunchComposing) and event.launch % 3 == 2 and self.rank % 2:
            self.state = copy(self.state)
            self.state.count += 1
            return [do.Compose(launch=event.launch, word=0, kind=do.LaunchKind.ORDINARY)]
        return super().step(event, now_ns)


class PausesBetweenSupersteps(m.Member):
    """Odd ranks make a launch of their own out of the first that a whale of several supersteps should go on in."""

    def step(self, event: ev.Event, now_ns: int) -> list[do.Effect]:
        running = self._running(self.state)
        goes_on = running is not None and running.step + 1 < running.supersteps
        if isinstance(event, ev.LaunchComposing) and goes_on and event.launch % 2 and self.rank % 2:
            self.state = copy(self.state)
            self.state.count += 1
            return [do.Compose(launch=event.launch, word=0, kind=do.LaunchKind.ORDINARY)]
        return super().step(event, now_ns)


class HonoursCancelAfterCommit(m.Member):
    def _row(self, state: m.RecordState, what: m.Input, seq: int) -> m.RecordState:
        if what is m.Input.CANCEL and state is m.RecordState.COMMITTED:
            return m.RecordState.FINISHED
        if what is m.Input.CANCEL and state is m.RecordState.RUNNING:
            return m.RecordState.RUNNING
        return super()._row(state, what, seq)


class CancelsAfterCommit(s.Sequencer):
    def _row(self, state: s.GatherState, what: s.Input, seq: int, sender: int) -> s.GatherState:
        if (state, what) == (s.GatherState.COMMITTED, s.Input.WITHDRAW):
            return s.GatherState.FINISHED
        return super()._row(state, what, seq, sender)


class SleepsThroughAll(m.Member):
    @property
    def may_sleep(self) -> bool:
        return True


class SleepsThroughLaunches(Bells):
    """Wakes for the launch after the one that it is waited for in."""

    def sleep(self, launch: int, timeout_s: float) -> Why:
        return super().sleep(launch + 1, timeout_s)


class RingsOnePeer(Bells):
    def ring(self, kind: int, peers: npt.NDArray[np.int64], value: int) -> None:
        super().ring(kind, peers[:1], value)


class SleepsThroughPuts(Bells):
    """Whoever puts something into an inbox does not wake its rank."""

    def wake(self) -> None:
        pass


class BeginsBeforeL(m.Member):
    """Begins a whale as soon as all name it."""

    def _begin(
        self, draft: m.MemberState, boundary: ev.LaunchComposing, now_ns: int, effects: list[do.Effect]
    ) -> m.Record | None:
        following = self._following(draft)
        if following is not None:
            put(draft, msgspec.structs.replace(following, launch=boundary.launch))
        return super()._begin(draft, boundary, now_ns, effects)


class LosesPosts(m.Member):
    """Does not tell its loop that a post has ended."""

    def step(self, event: ev.Event, now_ns: int) -> list[do.Effect]:
        return [effect for effect in super().step(event, now_ns) if not isinstance(effect, do.PostEnded)]


class KeepsDeathsToItself(s.Sequencer):
    def step(self, event: ev.Event, now_ns: int, launch: int) -> list[do.Effect]:
        return [] if isinstance(event, ev.PeerGone) else super().step(event, now_ns, launch)


class CommitsForThePast(s.Sequencer):
    def _launch_for(self, draft: s.SequencerState, gang: tuple[int, ...], counts: tuple[int, ...]) -> int:
        return max(0, super()._launch_for(draft, gang, counts) - 2)


class TrustingMember(m.Member):
    """Does not notice a commit that overtook another, so that only its consequences can be seen."""

    def _check_commit_order(self, draft: m.MemberState, seq: int) -> None:
        pass


class BeginsInOrderOfL(TrustingMember):
    """Names and begins the whale with the lowest L first, not the one with the lowest seq."""

    def _following(self, draft: m.MemberState) -> m.Record | None:
        committed = [record for record in draft.records if record.state is m.RecordState.COMMITTED]
        return min(committed, key=lambda record: record.launch or 0, default=None)


class ForgetsBusyRanks(s.Sequencer):
    """Commits a whale for launches in which another one has a member of it."""

    def _launch_for(self, draft: s.SequencerState, gang: tuple[int, ...], counts: tuple[int, ...]) -> int:
        idle = msgspec.structs.replace(draft, free_from=(0,) * self.world)
        return super()._launch_for(idle, gang, counts)


class CommitsOutOfOrder(s.Sequencer):
    """Commits what is ready, though a lower seq is still gathered."""

    def _advance(self, draft: s.SequencerState, now_ns: int, effects: list[do.Effect]) -> None:
        for record in draft.records:
            if record.state is s.GatherState.READY:
                self._commit(draft, record, effects)
        super()._advance(draft, now_ns, effects)


class CountsReadyTwice(s.Sequencer):
    """Takes a gang for ready when one member has not answered; its Decline may be on the way."""

    def _advance(self, draft: s.SequencerState, now_ns: int, effects: list[do.Effect]) -> None:
        for record in draft.records:
            if record.state is s.GatherState.GATHERING and len(record.counts) == record.plan.width - 1:
                moved = self._move(draft, record.seq, s.Input.LAST_READY, -1)
                assert moved is not None
                put(draft, msgspec.structs.replace(moved, counts=(*moved.counts, moved.counts[-1])))
        super()._advance(draft, now_ns, effects)


class LeavesRefusedAtHead(s.Sequencer):
    """A post that is refused stays where it is, and those behind it with it."""

    def _advance(self, draft: s.SequencerState, now_ns: int, effects: list[do.Effect]) -> None:
        waiting = draft.waiting
        plans = [self._plan(len(post.tokens) // 4, post.rank, self._policy, draft.left) for post in waiting]
        refused = next((at for at, plan in enumerate(plans) if not isinstance(plan, GangPlan)), len(waiting))
        draft.waiting = waiting[:refused]
        super()._advance(draft, now_ns, effects)
        draft.waiting += waiting[refused:]


class CommitsToHalf(s.Sequencer):
    """Every fifth commit does not reach the last member."""

    def _commit(self, draft: s.SequencerState, record: s.Record, effects: list[do.Effect]) -> None:
        super()._commit(draft, record, effects)
        if record.seq % 5 == 0:
            effects.pop()


class AcceptsStaleIncarnation(Conductor):
    """Believes the rank a frame names, whichever start of its process it comes from."""

    def received(self, incarnation: str, message: msg.Message, now_ns: int, launch: int) -> list[Out]:
        if self.rank_of(incarnation) is None and not isinstance(message, msg.Hello):
            incarnation = self.accepted.get(getattr(message, "rank", -1), incarnation)
        return super().received(incarnation, message, now_ns, launch)


#: Name -> arguments of Simulator.
MUTATIONS: dict[str, dict[str, Any]] = {
    "confirmation ignored": {"member_class": ConfirmsNothing},
    "only the own word is read": {"member_class": ReadsOwnWordOnly},
    "next whale named during a running superstep": {"member_class": NamesNextDuringSuperstep},
    "highest seq is named": {"member_class": NamesHighest},
    "commits out of seq order": {"member_class": TrustingMember, "sequencer_class": CommitsOutOfOrder},
    "word rewritten during its launch": {"rewrite_words": True},
    "too few copies of the words": {"word_copies": 1},
    "cancel after commit honoured": {
        "member_class": HonoursCancelAfterCommit,
        "sequencer_class": CancelsAfterCommit,
    },
    "Ready counted twice with a Decline outstanding": {"sequencer_class": CountsReadyTwice},
    "refused whale left at the head": {"sequencer_class": LeavesRefusedAtHead},
    "member that skips a boundary": {"member_class": SkipsABoundary},
    "commit to half a gang": {"sequencer_class": CommitsToHalf},
    "stale incarnation accepted": {"conductor_class": AcceptsStaleIncarnation},
}
