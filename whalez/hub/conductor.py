"""What the control plane's centre does with each frame, for every transport: first the allgather, then the sequencer.

Pure apart from the machines it drives. The caller (the sequencer's thread, or `LocalHub` under its lock) hands in what
happened and performs the returned `Out`s in order. Processes are addressed by incarnation, because before the table is
complete two of them may claim one rank.

The conductor itself speaks only about death and leaving: it spreads Died and Bye, which no machine needs to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whalez.errors import HubError, PeerDied, PeerProtocolError, ProtocolError
from whalez.hub.interface import SequencerLike
from whalez.rendezvous.allgather import Allgather
from whalez.rendezvous.effects import Broadcast, Refuse, SendTo
from whalez.rendezvous.events import PeerGone, Received, Tick
from whalez.rendezvous.messages import Bye, Died, Hello, Mapped, Message, Refused, Table, WorldStarts


@dataclass(frozen=True, slots=True)
class Out:
    """Send `message` to one process. `is_last`: it is refused, hear no more of it."""

    incarnation: str
    message: Message
    is_last: bool = False


class Conductor:
    """Allgather until all have mapped, then the sequencer. Not thread-safe."""

    def __init__(self, world: int, sequencer: SequencerLike) -> None:
        self._world = world
        self._allgather = Allgather(world)
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
        self._refused: set[str] = set()

    def rank_of(self, incarnation: str) -> int | None:
        """The rank this process speaks for, None if it does not (yet, or any more)."""
        return next((rank for rank, known in self.accepted.items() if known == incarnation), None)

    def hello(self, hello: Hello, now_ns: int, launch: int) -> list[Out]:
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
            if before is None:
                del self.accepted[entry.rank]
            else:
                self.accepted[entry.rank] = before
        return outs

    def received(self, incarnation: str, message: Message, now_ns: int, launch: int) -> list[Out]:
        """A frame of a process that has said hello before."""
        if isinstance(message, Hello):
            if message.entry.incarnation != incarnation:
                reason = f"frame of incarnation {incarnation} carries a hello of {message.entry.incarnation}"
                return [Out(incarnation, Refused(reason=reason, field="incarnation"), is_last=True)]
            return self.hello(message, now_ns, launch)
        rank = self.rank_of(incarnation)
        if rank is None:
            reason = f"incarnation {incarnation} is none of this world: an earlier start, or never said hello"
            return [Out(incarnation, Refused(reason=reason, field="incarnation"), is_last=True)]
        if self.failure is not None:
            return []
        if isinstance(message, Died):
            return self._spread_death(message.rank, message.how)
        claimed = getattr(message, "rank", rank)
        if claimed != rank:
            return self._impossible(rank, f"sent a {type(message).__name__} in the name of rank {claimed}")
        if isinstance(message, Mapped) and self.has_started:
            return self._again(rank)
        if isinstance(message, Bye):
            return self._bye(rank, now_ns, launch)
        try:
            if isinstance(message, Mapped):
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
        """An event of rank 0's own process for the sequencer, e.g. StopWanted. Ignored before the world runs."""
        if not self.has_started or self.failure is not None:
            return []
        return self._run(self._sequencer.step(event, now_ns, launch))

    def gone(self, incarnation: str, how: str, now_ns: int, launch: int) -> list[Out]:
        """A process has ended or is silent. Expected after its Bye; before the table it only frees its place."""
        rank = self.rank_of(incarnation)
        if rank is None or self.failure is not None:
            return []
        if not self.is_complete:
            del self.accepted[rank]
            self._refused.add(incarnation)
            return self._run(self._allgather.step(PeerGone(rank, how, incarnation), now_ns))
        if rank in self.left:
            return []
        outs: list[Out] = []
        if self.has_started:
            outs = self._run(self._sequencer.step(PeerGone(rank, how), now_ns, launch))
        return outs + self._spread_death(rank, how)

    def missing(self) -> tuple[int, ...]:
        """Ranks that have not said hello."""
        return tuple(rank for rank in range(self._world) if rank not in self.accepted)

    def fail(self, failure: Exception) -> list[Out]:
        """The centre itself broke: tell all that rank 0 is lost."""
        if self.failure is not None:
            return []
        self.failure = failure
        died = Died(rank=0, how=f"its sequencer failed: {failure}"[:2000])
        return [Out(incarnation, died) for incarnation in self.accepted.values()]

    # ---- inside ------------------------------------------------------------------------------------------------
    def _again(self, rank: int) -> list[Out]:
        """Repeat what a process must have missed when it repeats itself."""
        outs: list[Out] = []
        if self.is_complete:
            outs.append(Out(self.accepted[rank], self._table))
        if self.has_started:
            outs.append(Out(self.accepted[rank], WorldStarts()))
        return outs

    def _bye(self, rank: int, now_ns: int, launch: int) -> list[Out]:
        if rank in self.left:
            return []
        self.left.add(rank)
        return [Out(incarnation, Bye(rank=rank)) for other, incarnation in self.accepted.items() if other != rank]

    def _impossible(self, rank: int, what: str) -> list[Out]:
        return self._spread_death(rank, what, PeerProtocolError(rank, what))

    def _spread_death(self, rank: int, how: str, failure: Exception | None = None) -> list[Out]:
        if rank in self.left and failure is None:
            return []
        self.failure = failure or PeerDied(rank, how)
        died = Died(rank=rank, how=how[:2000])
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
                    outs += [Out(self.accepted[rank], effect.message) for rank in sorted(self.accepted)]
                case Refuse():
                    self._refused.add(effect.incarnation)
                    outs.append(Out(effect.incarnation, effect.message, is_last=True))
                case _:
                    raise HubError(f"unknown effect {effect!r}")
        return outs
