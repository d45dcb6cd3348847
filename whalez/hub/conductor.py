"""What the control plane's centre does with each frame, for every transport: first the allgather, then the sequencer.

Pure apart from the machines it drives. The caller (the sequencer's thread, or `LocalHub` under its lock) hands in what
happened and performs the returned `Out`s in order. Processes are addressed by incarnation, because before the table is
complete two of them may claim one rank.

What a rank may do, who is refused and whether a loss is fatal is the machines' decision; the conductor only remembers
which process speaks for which rank, repeats what a process must have missed, and turns a broken protocol into the
death of the rank that broke it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whalez.errors import HubError, PeerDied, PeerProtocolError, ProtocolError
from whalez.hub.interface import SequencerLike
from whalez.rendezvous.allgather import Allgather
from whalez.rendezvous.effects import Broadcast, Refuse, SendTo
from whalez.rendezvous.events import PeerGone, Received, Tick
from whalez.rendezvous.messages import (
    Bye,
    Died,
    Hello,
    Mapped,
    Message,
    Offer,
    Offers,
    Refused,
    Table,
    WorldStarts,
)

_log = logging.getLogger(__name__)
_REFUSED_MAX = 4096


@dataclass(frozen=True, slots=True)
class Out:
    """Send `message` to one process. `is_last`: it is refused, hear no more of it."""

    incarnation: str
    message: Message
    is_last: bool = False


class Conductor:
    """Allgather until all have mapped, then the sequencer. Not thread-safe."""

    def __init__(self, world: int, sequencer: SequencerLike, fingerprint: dict[str, str] | None = None) -> None:
        """`fingerprint`: rank 0's, which all others must equal; None: that of the first hello counts."""
        self._world = world
        self._allgather = Allgather(world, fingerprint)
        self._sequencer = sequencer
        #: rank -> incarnation that speaks for it
        self.accepted: dict[int, str] = {}
        #: ranks that said Bye: their exit is expected
        self.left: set[int] = set()
        #: the table was sent: from now on a lost process is a lost fleet
        self.is_complete = False
        #: all have mapped: the sequencer is in charge
        self.has_started = False
        self.failure: Exception | None = None
        #: what was refused because a living process has the number, by rank
        self.claimed_twice: dict[int, str] = {}
        self._refused: dict[str, None] = {}  # in order; only the last ones, for strangers may come without end
        self._mapped: set[int] = set()
        self._turn = 0  # of the gather that is under way
        self._offers: dict[int, bytes] = {}  # by rank, of this turn
        self._table = Table(entries=())

    def rank_of(self, incarnation: str) -> int | None:
        """The rank this process speaks for, None if it does not (yet, or any more)."""
        return next((rank for rank, known in self.accepted.items() if known == incarnation), None)

    def received(self, incarnation: str, message: Message, now_ns: int, launch: int) -> list[Out]:
        """A frame of any process; one that never said hello is refused by name."""
        if isinstance(message, Hello):
            if message.entry.incarnation != incarnation:
                reason = f"frame of incarnation {incarnation} carries a hello of {message.entry.incarnation}"
                return [Out(incarnation, Refused(reason=reason, field="incarnation"), is_last=True)]
            return self._hello(message, now_ns)
        rank = self.rank_of(incarnation)
        if rank is None:
            reason = f"incarnation {incarnation} is none of this world: an earlier start, or never said hello"
            return [Out(incarnation, Refused(reason=reason, field="incarnation"), is_last=True)]
        if self.failure is not None:
            return []
        if not self.is_complete:
            return self._speaks_early(rank, incarnation, message, now_ns)
        if isinstance(message, Died):
            return self._lost(message.rank, message.how, now_ns, launch)
        claimed = getattr(message, "rank", rank)
        if claimed != rank:
            return self._impossible(rank, f"sent a {type(message).__name__} in the name of rank {claimed}")
        if isinstance(message, Mapped) and rank in self._mapped:
            return self._again(rank)
        if isinstance(message, Offer):
            return self._offered(rank, message)
        try:
            if isinstance(message, Mapped):
                self._mapped.add(rank)
                return self._run(self._allgather.step(Received(message, rank), now_ns))
            if not self.has_started:
                return self._impossible(rank, f"sent a {type(message).__name__} before the world started")
            return self._run(self._sequencer.step(Received(message, rank), now_ns, launch))
        except ProtocolError as error:
            return self._impossible(rank, str(error))

    def tick(self, now_ns: int, launch: int) -> list[Out]:
        if not self.has_started or self.failure is not None:
            return []
        return self._run(self._sequencer.step(Tick(), now_ns, launch))

    def order(self, event: Any, now_ns: int, launch: int) -> list[Out]:
        """An event of rank 0's own process for the sequencer, e.g. StopWanted. Ignored before the world runs, and if it
        is one that the machine has no row for: no order may cost a world, whoever gave it."""
        if not self.has_started or self.failure is not None:
            return []
        try:
            return self._run(self._sequencer.step(event, now_ns, launch))
        except ProtocolError as error:
            _log.error("an order was ignored: %s", error)
            return []

    def gone(self, incarnation: str, how: str, now_ns: int, launch: int) -> list[Out]:
        """A process has ended or is silent. Before the table is complete that only frees its place."""
        rank = self.rank_of(incarnation)
        if rank is None or self.failure is not None:
            return []
        if not self.is_complete:
            del self.accepted[rank]
            self._remember_refused(incarnation)
            return self._run(self._allgather.step(PeerGone(rank, how, incarnation), now_ns))
        return self._lost(rank, how, now_ns, launch)

    def missing(self) -> tuple[int, ...]:
        """Ranks that are waited for: without a hello, an offer of a gather that is under way, or a Mapped."""
        if self._offers:
            return tuple(rank for rank in range(self._world) if rank not in self._offers)
        return self._allgather.missing

    def fail(self, failure: Exception) -> list[Out]:
        """The centre itself broke: tell all that rank 0 is lost."""
        if self.failure is not None:
            return []
        self.failure = failure
        died = Died(rank=0, how=f"its sequencer failed: {failure}"[:2000])
        return [Out(incarnation, died) for incarnation in self.accepted.values()]

    # ---- inside ------------------------------------------------------------------------------------------------
    def _hello(self, hello: Hello, now_ns: int) -> list[Out]:
        """Also a repeated one: a process says hello until it has heard from us."""
        entry = hello.entry
        if entry.incarnation in self._refused:
            reason = f"incarnation {entry.incarnation} of rank {entry.rank} was refused or replaced by a newer one"
            return [Out(entry.incarnation, Refused(reason=reason, field="incarnation"), is_last=True)]
        if not 0 <= entry.rank < self._world:
            reason = f"rank {entry.rank} in a world of {self._world}"
            return [Out(entry.incarnation, Refused(reason=reason, field="rank"), is_last=True)]
        if self.accepted.get(entry.rank) == entry.incarnation:
            return self._again(entry.rank)
        before = self.accepted.get(entry.rank)
        if not self.is_complete:
            self.accepted[entry.rank] = entry.incarnation  # taken back below if the allgather refuses it
        outs = self._run(self._allgather.step(Received(hello, entry.rank), now_ns))
        if entry.incarnation in self._refused and not self.is_complete:
            if before is not None:
                self.claimed_twice[entry.rank] = f"by process {entry.pid} on {entry.host} too, which was refused"
            if before is None:
                del self.accepted[entry.rank]
            else:
                self.accepted[entry.rank] = before
        return outs

    def _speaks_early(self, rank: int, incarnation: str, message: Message, now_ns: int) -> list[Out]:
        """A process that talks as if it had our table has another's: it outlived the world before, and its socket has
        found the new rank 0 by itself. That ends this process, and costs the others nothing."""
        what = f"sent a {type(message).__name__} before the table was out: its world was an earlier one"
        outs = self.gone(incarnation, what, now_ns, 0)
        reason = f"incarnation {incarnation} of rank {rank} {what}"
        return [*outs, Out(incarnation, Refused(reason=reason, field="incarnation"), is_last=True)]

    def _offered(self, rank: int, offer: Offer) -> list[Out]:
        """Nobody can be a turn ahead: it would have to have seen an answer to which some rank has not contributed."""
        if rank in self._mapped:
            return self._impossible(rank, "sent an Offer after its Mapped")
        if offer.turn != self._turn or rank in self._offers:
            return self._impossible(rank, f"sent an Offer for gather {offer.turn} during gather {self._turn}")
        self._offers[rank] = offer.data
        if len(self._offers) < self._world:
            return []
        answer = Offers(turn=self._turn, parts=tuple(self._offers[each] for each in range(self._world)))
        self._turn += 1
        self._offers = {}
        return [Out(self.accepted[each], answer) for each in sorted(self.accepted)]

    def _remember_refused(self, incarnation: str) -> None:
        self._refused[incarnation] = None
        if len(self._refused) > _REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def _again(self, rank: int) -> list[Out]:
        """Repeat what a process must have missed when it repeats itself."""
        outs: list[Out] = []
        if self.is_complete:
            outs.append(Out(self.accepted[rank], self._table))
        if self.has_started:
            outs.append(Out(self.accepted[rank], WorldStarts()))
        return outs

    def _lost(self, rank: int, how: str, now_ns: int, launch: int) -> list[Out]:
        """The machine in charge decides whether that is fatal (Died) or was expected (Bye, or nothing)."""
        if rank in self.left or not 0 <= rank < self._world:
            return []
        gone = PeerGone(rank, how[:2000])
        if self.has_started:
            return self._run(self._sequencer.step(gone, now_ns, launch))
        return self._run(self._allgather.step(gone, now_ns))

    def _impossible(self, rank: int, what: str) -> list[Out]:
        self.failure = PeerProtocolError(rank, what)
        died = Died(rank=rank, how=f"broke the protocol: {what}"[:2000])
        return [Out(incarnation, died) for incarnation in self.accepted.values()]

    def _run(self, effects: Sequence[Any]) -> list[Out]:
        outs: list[Out] = []
        for effect in effects:
            match effect:
                case SendTo():
                    incarnation = self.accepted.get(effect.rank)
                    if incarnation is None:
                        raise HubError(f"a machine wants to send to rank {effect.rank}, which is not here")
                    outs.append(Out(incarnation, effect.message))
                case Broadcast():
                    if isinstance(effect.message, Table):
                        self.is_complete = True
                        self._table = effect.message
                    elif isinstance(effect.message, WorldStarts):
                        self.has_started = True
                    elif isinstance(effect.message, Bye):
                        self.left.add(effect.message.rank)
                    elif isinstance(effect.message, Died):
                        self.failure = PeerDied(effect.message.rank, effect.message.how)
                    outs += [Out(self.accepted[rank], effect.message) for rank in sorted(self.accepted)]
                case Refuse():
                    self._remember_refused(effect.incarnation)
                    outs.append(Out(effect.incarnation, effect.message, is_last=True))
                case _:
                    raise HubError(f"unknown effect {effect!r}")
        return outs
