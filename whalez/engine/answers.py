"""What a rank answers to an operator. Runs in the admin socket's thread and reads what the loop publishes.

Rule 1: nothing here waits for the loop or makes it wait: numbers are read as they stand, machine states and lives are
values that the loop replaces as a whole, doorbells lie in shared memory.
Rule 2: a wish that changes something goes into the loop's inbox, or to the sequencer's thread, and is obeyed there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whalez.clock import now_on_both
from whalez.engine.health import Health
from whalez.engine.loop import Loop
from whalez.fabric.doorbell import BELL_KINDS, place_of
from whalez.fabric.layout import SlabLayout
from whalez.hub import admin
from whalez.rendezvous.lives import WatchedSequencer
from whalez.rendezvous.messages import DRAIN_GRACE_S_MAX, SlabEntry
from whalez.rendezvous.sequencer import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What does not change while a rank runs."""

    rank: int
    device: str
    transport: str
    hub: str
    host: str
    sockets: dict[str, dict[str, int]]  #: options by socket


class Answers:
    """Answers every query of `hub.admin`. The attributes are set once, as the rank comes up; None until then."""

    def __init__(self, facts: RankFacts, health: Health, layout: SlabLayout, endpoint: str) -> None:
        self._facts = facts
        self._health = health
        self._layout = layout
        self._endpoint = endpoint
        self.table: tuple[SlabEntry, ...] | None = None  #: once every rank has said hello
        self.mapped: tuple[int, ...] = ()  #: ranks whose slab is mapped here
        self.sequencer: WatchedSequencer | None = None  #: rank 0 only
        self.withdraw: Callable[[int, str], None] | None = None  #: rank 0 only: cancel a post at the sequencer

    def answer(self, query: admin.AdminQuery) -> admin.AdminAnswer:
        """Raises nothing a query can provoke: what cannot be answered is a NotDone."""
        match query:
            case admin.AskStatus():
                return self._status(query.query_id)
            case admin.AskWhales():
                return self._whales(query.query_id)
            case admin.AskSlabs():
                return self._slabs(query.query_id)
            case admin.AskDoorbells():
                return self._doorbells(query.query_id)
            case admin.AskPrompts():
                return self._prompts(query.query_id)
            case admin.CancelWhale():
                return self._cancel(query)
            case admin.DrainFleet():
                return self._drain(query)
        return self._not_done(query.query_id, f"no answer to a {type(query).__name__}")

    def _status(self, query_id: str) -> admin.RankStatus:
        loop, facts = self._health.loop, self._facts
        return admin.RankStatus(
            query_id=query_id,
            rank=facts.rank,
            health=self._health.status(),
            device=facts.device,
            transport=facts.transport,
            hub=facts.hub,
            host=facts.host,
            launches_with_sleep=0 if loop is None else loop.sleeps_total,
            slips_total=0 if loop is None else loop.slips_total,
            records=()
            if loop is None
            else tuple(
                admin.RecordLine(
                    seq=record.seq,
                    state="stop" if record.is_stop else record.state.value,
                    launch=record.launch,
                    gang=record.gang,
                )
                for record in loop.member.records
            ),
            endpoints=self._endpoints(),
            sockets=facts.sockets,
        )

    def _endpoints(self) -> tuple[str, ...]:
        if self.table is not None:
            return tuple(entry.admin for entry in self.table)
        return tuple(self._endpoint if rank == self._facts.rank else "" for rank in range(self._layout.world))

    def _whales(self, query_id: str) -> admin.Whales:
        loop, watched = self._health.loop, self.sequencer
        line = None
        if watched is not None:
            state = watched.sequencer.state
            line = admin.SequencerLine(
                phase=state.phase.value,
                launch=state.launch,
                slack=state.slack,
                waiting=len(state.waiting),
                left=tuple(sorted(state.left)),
            )
        at_ns, wall_s = now_on_both()
        return admin.Whales(
            query_id=query_id,
            rank=self._facts.rank,
            at_ns=at_ns,
            wall_s=wall_s,
            seen=() if loop is None else loop.whales.lives,
            sequenced=() if watched is None else watched.whales.lives,
            sequencer=line,
        )

    def _slabs(self, query_id: str) -> admin.Slabs:
        return admin.Slabs(
            query_id=query_id,
            rank=self._facts.rank,
            nbytes=self._layout.nbytes,
            regions=tuple(
                admin.RegionLine(
                    name=name,
                    offset=region.offset,
                    shape=region.shape,
                    dtype=region.dtype.str,
                    nbytes=region.nbytes,
                )
                for name, region in self._layout.regions.items()
            ),
            mapped=self.mapped,
            host=self._facts.host,
            pid=os.getpid(),
        )

    def _doorbells(self, query_id: str) -> admin.AdminAnswer:
        loop = self._health.loop
        if loop is None:
            return self._not_done(query_id, "the rank is starting")
        bells, own, world = loop.bells, self._facts.rank, self._layout.world
        waits = [line for rank in range(world) if (line := self._wait(bells, rank)) is not None]
        awaited = {(line.kind, line.peer): line.expected for line in waits if line.rank == own}
        return admin.Doorbells(
            query_id=query_id,
            rank=own,
            lines=tuple(
                admin.BellLine(
                    kind=name,
                    peer=peer,
                    expected=awaited.get((name, peer)),
                    seen=bells.seen(kind, peer),
                    rung=bells.rung(kind, peer),
                )
                for kind, name in enumerate(BELL_KINDS)
                for peer in range(world)
                if peer != own
            ),
            peers=tuple(
                admin.PeerLine(
                    rank=peer,
                    launch_count=(count := bells.launch_count(peer)),
                    progress=bells.progress(peer),
                    word=bells.word(peer, max(0, count - 1)),
                )
                for peer in range(world)
            ),
            waits=tuple(waits),
        )

    def _wait(self, bells: Any, rank: int) -> admin.WaitLine | None:
        wait = bells.status(rank)
        if wait.peer is None:
            return None
        kind = BELL_KINDS.index(wait.kind)
        return admin.WaitLine(
            rank=rank,
            peer=wait.peer,
            kind=wait.kind,
            expected=wait.value,
            seen=bells.seen(kind, wait.peer) if rank == self._facts.rank else None,
            place=place_of(kind, wait.value, wait.layer, bells.steps_per_launch),
        )

    def _prompts(self, query_id: str) -> admin.Prompts:
        loop = self._health.loop
        prompts = {} if loop is None else loop.prompts()
        return admin.Prompts(query_id=query_id, rank=self._facts.rank, prompts=prompts)

    def _cancel(self, query: admin.CancelWhale) -> admin.AdminAnswer:
        """The sequencer calls the gang off at once if it is not committed; the poster's loop ends the request."""
        own, world = self._facts.rank, self._layout.world
        if not 0 <= query.poster < world:
            return self._not_done(query.query_id, f"poster: expected 0 to {world - 1}, got {query.poster}")
        loop = self._health.loop
        if reason := self._obeys_nothing(loop):
            return self._not_done(query.query_id, reason)
        assert loop is not None
        done, why = [], []
        if self.withdraw is not None and self.sequencer is not None:
            if reason := _why_not_withdrawn(self.sequencer.sequencer.records, query):
                why.append(reason)
            else:
                self.withdraw(query.poster, query.request_id)
                done.append(f"the sequencer calls whale {query.seq} off")
        if query.poster == own:
            if any(life.seq == query.seq and life.request_id != query.request_id for life in loop.whales.lives):
                why.append(f"whale {query.seq} is for another request than {query.request_id[:80]!r}")
            elif not loop.serves(query.request_id):
                why.append(f"rank {own} serves no request {query.request_id[:80]!r}")
            else:
                loop.order(query)
                done.append(f"request {query.request_id[:80]} ends at this rank's next boundary")
        if not done:
            why = why or [f"rank {own} is neither its poster nor rank 0"]
            return self._not_done(query.query_id, ", ".join(why))
        return admin.Ordered(query_id=query.query_id, rank=own, what=", ".join((*done, *why)))

    def _drain(self, query: admin.DrainFleet) -> admin.AdminAnswer:
        loop = self._health.loop
        if not 0 <= query.grace_s <= DRAIN_GRACE_S_MAX:
            reason = f"grace_s: expected 0 to {DRAIN_GRACE_S_MAX:g} seconds, got {query.grace_s:g}"
            return self._not_done(query.query_id, reason)
        if reason := self._obeys_nothing(loop):
            return self._not_done(query.query_id, reason)
        assert loop is not None
        loop.order(query)
        return admin.Ordered(
            query_id=query.query_id, rank=self._facts.rank, what=f"the fleet drains, {query.grace_s:g} s at most"
        )

    def _obeys_nothing(self, loop: Loop | None) -> str:
        """Why nothing follows from an order to this rank's loop, or ""."""
        if loop is None:
            return "the rank is starting"
        if self._health.failure:
            return f"rank {self._facts.rank} has failed and launches no more"
        if loop.state == "stopping":
            return f"rank {self._facts.rank} has run the world's last launch and leaves"
        return ""

    def _not_done(self, query_id: str, reason: str) -> admin.NotDone:
        return admin.NotDone(query_id=query_id, rank=self._facts.rank, reason=reason)


def _why_not_withdrawn(records: tuple[Record, ...], query: admin.CancelWhale) -> str:
    """Why the sequencer has nothing to call off, or ""."""
    record = next((each for each in records if each.seq == query.seq), None)
    if record is None:
        return f"whale {query.seq} is over, or never was"
    if (record.post.rank, record.post.request_id) != (query.poster, query.request_id):
        return f"whale {query.seq} is for another request than {query.request_id[:80]!r} of rank {query.poster}"
    if not record.is_open:
        return f"whale {query.seq} is committed and runs to its end, for nobody"
    return ""


def as_dict(options: Any) -> dict[str, int]:
    """A dataclass of numbers, for `RankFacts.sockets`."""
    return {name: getattr(options, name) for name in options.__dataclass_fields__}
