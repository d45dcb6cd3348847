"""The life of each whale as one machine saw it: what happened, when, at which launch. For status and post-mortems.

Rule 1: a life follows from the events and effects of a machine alone; the machine neither knows of it nor needs it.
Rule 2: `lives` is replaced as a whole, so another thread may read it at any time, and it holds no token of a prompt.
Rule 3: this is the one place that remembers whales that are over; it remembers the last `LIVES_MAX`.

The sequencer sees posts, gathers, answers, commits and cancels; a member sees what reached it and what it ran. Whoever
wants the whole story puts the lives of all machines together.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg

LIVES_MAX = 128
_POSTS_MAX = 64


class What(StrEnum):
    """What can happen to a whale, in the order in which it mostly does."""

    POSTED = "posted"
    GATHERED = "gathered"
    READY = "ready"
    DECLINED = "declined"
    COMMITTED = "committed"
    BEGUN = "begun"
    DONE = "done"
    CANCELLED = "cancelled"


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to a whale, as the machine that tells it saw it."""

    at_ns: int  #: monotonic clock of the machine's host
    launch: int  #: that the machine's rank composed next
    what: What
    rank: int  #: whose doing or answer; -1: the sequencer's
    detail: str = ""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One seq. A Stop is one without a poster."""

    seq: int
    request_id: str
    poster: int | None
    gang: tuple[int, ...]
    tokens: int
    launch: int | None = None  #: L, once committed
    slips: int = 0  #: launches between L and the one it was begun at
    moments: tuple[Moment, ...] = ()


class WhaleLives:
    """The lives one machine has seen, oldest first. Written by the machine's driver, read by any thread."""

    def __init__(self) -> None:
        self.lives: tuple[Life, ...] = ()
        self._posted: dict[str, Moment] = {}  # of posts that have no seq yet

    def sequencer_saw(self, event: ev.Event, effects: Sequence[do.Effect], now_ns: int, launch: int) -> None:
        """Call after every step of the Sequencer."""

        def moment(what: What, rank: int = -1, detail: str = "") -> Moment:
            return Moment(at_ns=now_ns, launch=launch, what=what, rank=rank, detail=detail)

        match event:
            case ev.Received(message=msg.Post() as post):
                self._post(post.request_id, moment(What.POSTED, post.rank))
            case ev.Received(message=msg.Ready() as ready):
                self._add(ready.seq, moment(What.READY, ready.rank, f"at launch {ready.count}"))
            case ev.Received(message=msg.Decline() as decline):
                self._add(decline.seq, moment(What.DECLINED, decline.rank, decline.reason))
        told: set[tuple[type, int]] = set()  # a Gather goes to every member, its moment is one
        for effect in effects:
            message = getattr(effect, "message", None)
            key = (type(message), getattr(message, "seq", -1))
            if key in told:
                continue
            told.add(key)
            match message:
                case msg.Gather():
                    self._begin(message, moment(What.GATHERED))
                case msg.Commit():
                    self._add(message.seq, moment(What.COMMITTED), launch=message.launch)
                case msg.Cancel():
                    self._add(message.seq, moment(What.CANCELLED, -1, f"{message.reason} ({message.outcome})"))
                case msg.Stop():
                    self._stop(message, moment(What.COMMITTED))
                case msg.PostRefused():
                    self._posted.pop(message.request_id, None)

    def member_saw(self, rank: int, event: ev.Event, effects: Sequence[do.Effect], now_ns: int, launch: int) -> None:
        """Call after every step of the Member of `rank`."""
        if len(effects) == 1 and isinstance(event, ev.LaunchComposing):
            return  # nearly every launch

        def moment(what: What, by: int, detail: str = "") -> Moment:
            return Moment(at_ns=now_ns, launch=launch, what=what, rank=by, detail=detail)

        match event:
            case ev.PostWanted():
                self._post(event.request_id, moment(What.POSTED, rank))
            case ev.Received(message=msg.Gather() as gather):
                self._begin(gather, moment(What.GATHERED, -1))
            case ev.Received(message=msg.Commit() as commit):
                self._add(commit.seq, moment(What.COMMITTED, -1), launch=commit.launch)
            case ev.Received(message=msg.Cancel() as cancel):
                self._add(cancel.seq, moment(What.CANCELLED, -1, f"{cancel.reason} ({cancel.outcome})"))
            case ev.Received(message=msg.Stop() as stop):
                self._stop(stop, moment(What.COMMITTED, -1))
            case ev.Received(message=msg.PostRefused() as refused):
                self._posted.pop(refused.request_id, None)
        for effect in effects:
            match effect:
                case do.Send(message=msg.Ready() as ready):
                    self._add(ready.seq, moment(What.READY, rank, f"at launch {ready.count}"))
                case do.Send(message=msg.Decline() as decline):
                    self._add(decline.seq, moment(What.DECLINED, rank, decline.reason))
                case do.WhaleBegun():
                    self._add(effect.seq, moment(What.BEGUN, rank), slips=effect.slipped)
                case do.WhaleOver():
                    self._add(effect.seq, moment(What.DONE, rank))

    def _post(self, request_id: str, moment: Moment) -> None:
        self._posted[request_id] = moment
        if len(self._posted) > _POSTS_MAX:
            del self._posted[next(iter(self._posted))]

    def _begin(self, gather: msg.Gather, moment: Moment) -> None:
        # Kept for a regathered post, whose next seq has the same beginning; dropped with the oldest of _POSTS_MAX.
        posted = self._posted.get(gather.request_id)
        life = Life(
            seq=gather.seq,
            request_id=gather.request_id,
            poster=gather.plan.poster,
            gang=gather.plan.gang,
            tokens=len(gather.tokens) // 4,
            moments=(moment,) if posted is None else (posted, moment),
        )
        self.lives = (*self.lives[-(LIVES_MAX - 1) :], life)

    def _stop(self, stop: msg.Stop, moment: Moment) -> None:
        life = Life(seq=stop.seq, request_id="", poster=None, gang=(), tokens=0, launch=stop.launch, moments=(moment,))
        self.lives = (*self.lives[-(LIVES_MAX - 1) :], life)

    def _add(self, seq: int, moment: Moment, **changes: Any) -> None:
        """One more moment of a life; nothing for one that has been forgotten."""
        self.lives = tuple(
            msgspec.structs.replace(life, moments=(*life.moments, moment), **changes) if life.seq == seq else life
            for life in self.lives
        )


class WatchedSequencer:
    """A Sequencer whose whales' lives are kept; what the hub drives in rank 0's process."""

    def __init__(self, sequencer: Any) -> None:
        self.sequencer = sequencer
        self.whales = WhaleLives()

    def step(self, event: Any, now_ns: int, launch: int) -> list[do.Effect]:
        """As the Sequencer's own."""
        effects: list[do.Effect] = self.sequencer.step(event, now_ns, launch)
        self.whales.sequencer_saw(event, effects, now_ns, launch)
        return effects
