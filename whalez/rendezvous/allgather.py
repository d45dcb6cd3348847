"""How a world comes up: who has said hello, who may not take part, and when all have mapped the slab table.

Rule 1: every legal transition is a row of `STEPS`. No row: `LocalProtocolError`, nothing changed.
Rule 2: nobody waits for anybody in here; an answer is sent when the last hello, or the last Mapped, comes in.

Before the table is complete a rank's number is free again when its process is gone (`PeerGone`), so one that was killed
and started again takes its place; while the first lives, a second process with its number is refused by name. Whether
it lives the driver finds out, before it hands in the second hello. Once the table is out, peers have mapped that very
incarnation's slab, so a restarted rank is refused and the world restarts as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from enum import Enum
from typing import Any

import msgspec

from whalez.errors import LocalProtocolError
from whalez.rendezvous import effects as do
from whalez.rendezvous import events as ev
from whalez.rendezvous import messages as msg


class Stage(Enum):
    GATHERING = "gathering"  #: hellos are missing
    MAPPING = "mapping"  #: the table is out; Mappeds are missing
    STARTED = "started"  #: the world runs; the Sequencer takes over
    FAILED = "failed"  #: a rank of the table died before the world ran


class Input(Enum):
    HELLO = "Hello"
    MAPPED = "Mapped"
    GONE = "PeerGone"
    # What follows; no event of their own.
    LAST_HELLO = "Hello of the last rank"
    LAST_MAPPED = "Mapped of the last rank"


_S, _I = Stage, Input

#: (stage, input) -> stage.
STEPS: dict[tuple[Stage, Input], Stage] = {
    (_S.GATHERING, _I.HELLO): _S.GATHERING,
    (_S.GATHERING, _I.LAST_HELLO): _S.MAPPING,
    (_S.GATHERING, _I.GONE): _S.GATHERING,
    (_S.MAPPING, _I.HELLO): _S.MAPPING,  # refused
    (_S.MAPPING, _I.MAPPED): _S.MAPPING,
    (_S.MAPPING, _I.LAST_MAPPED): _S.STARTED,
    (_S.MAPPING, _I.GONE): _S.FAILED,
    (_S.STARTED, _I.HELLO): _S.STARTED,  # refused
    (_S.FAILED, _I.HELLO): _S.FAILED,  # refused
    (_S.FAILED, _I.MAPPED): _S.FAILED,
    (_S.FAILED, _I.GONE): _S.FAILED,
}

_INPUTS: dict[type, Input] = {msg.Hello: Input.HELLO, msg.Mapped: Input.MAPPED, ev.PeerGone: Input.GONE}


class AllgatherState(msgspec.Struct, kw_only=True):
    """All that an Allgather remembers. Every field is immutable, so a shallow copy is a full one."""

    stage: Stage = Stage.GATHERING
    entries: tuple[msg.SlabEntry | None, ...] = ()  #: in rank order; None: no hello yet
    fingerprint: tuple[tuple[str, str], ...] | None = None  #: what every hello is compared with, sorted by field
    mapped: frozenset[int] = frozenset()

    def key(self) -> tuple[object, ...]:
        """Equal for equal states; hashable."""
        return msgspec.structs.astuple(self)


class Allgather:
    """The start-up machine, in rank 0's process, until its stage is STARTED.

    Args:
        world:        number of ranks
        fingerprint:  rank 0's own; None: that of the first hello counts
    """

    def __init__(self, world: int, fingerprint: dict[str, str] | None = None) -> None:
        assert world >= 1
        self.world = world
        own = None if fingerprint is None else tuple(sorted(fingerprint.items()))
        self.state = AllgatherState(entries=(None,) * world, fingerprint=own)

    def copy(self) -> Allgather:
        """An independent machine in the same state."""
        twin = copy(self)
        twin.state = copy(self.state)
        return twin

    @property
    def has_started(self) -> bool:
        return self.state.stage is Stage.STARTED

    @property
    def has_failed(self) -> bool:
        return self.state.stage is Stage.FAILED

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are waited for: without a hello, or without a Mapped."""
        if self.state.stage is Stage.GATHERING:
            return tuple(rank for rank, entry in enumerate(self.state.entries) if entry is None)
        return tuple(rank for rank in range(self.world) if rank not in self.state.mapped)

    def step(self, event: ev.Event, now_ns: int) -> list[do.Effect]:
        """Take one event; return what the driver must send, in order.

        Raises: LocalProtocolError if the table has no row; the machine is unchanged.
        """
        content = event.message if isinstance(event, ev.Received) else event
        what = _INPUTS.get(type(content))
        draft = copy(self.state)
        stage = None if what is None else STEPS.get((draft.stage, what))
        if what is None or stage is None:
            raise LocalProtocolError(f"{type(content).__name__} while the allgather is {draft.stage.value}")
        draft.stage = stage
        effects = _HANDLERS[what](self, draft, content)
        self.state = draft
        return effects

    def _hello(self, draft: AllgatherState, hello: msg.Hello) -> list[do.Effect]:
        entry = hello.entry
        refusal = self._why_refused(draft, hello)
        if refusal is not None:
            return [do.Refuse(entry.rank, entry.incarnation, refusal)]
        effects: list[do.Effect] = []
        draft.entries = (*draft.entries[: entry.rank], entry, *draft.entries[entry.rank + 1 :])
        if draft.fingerprint is None:
            draft.fingerprint = tuple(sorted(hello.fingerprint.items()))
        if all(draft.entries):
            draft.stage = STEPS[draft.stage, Input.LAST_HELLO]
            entries = tuple(entry for entry in draft.entries if entry is not None)
            effects.append(do.Broadcast(msg.Table(entries=entries)))
        return effects

    def _why_refused(self, draft: AllgatherState, hello: msg.Hello) -> msg.Refused | None:
        entry = hello.entry
        if draft.stage is not Stage.GATHERING:
            reason = f"this world is {draft.stage.value} already; rank {entry.rank} can only join when all start again"
            return msg.Refused(reason=reason, field="incarnation")
        if hello.world != self.world:
            return msg.Refused(reason=f"world: expected {self.world}, got {hello.world}", field="world")
        if not 0 <= entry.rank < self.world:
            reason = f"rank: expected 0 to {self.world - 1}, got {entry.rank}"
            return msg.Refused(reason=reason, field="rank")
        holder = draft.entries[entry.rank]
        if holder is not None and holder.incarnation != entry.incarnation:
            reason = f"rank {entry.rank} is taken by process {holder.pid} on {holder.host}"
            return msg.Refused(reason=reason, field="rank")
        if draft.fingerprint is None:
            return None
        expected = dict(draft.fingerprint)
        for field in sorted(expected.keys() | hello.fingerprint.keys()):
            want, got = expected.get(field, "nothing"), hello.fingerprint.get(field, "nothing")
            if want != got:
                reason = f"{field}: the fleet runs with {want}, rank {entry.rank} with {got}"
                return msg.Refused(reason=reason, field=field)
        return None

    def _mapped(self, draft: AllgatherState, mapped: msg.Mapped) -> list[do.Effect]:
        if not 0 <= mapped.rank < self.world:
            raise LocalProtocolError(f"{mapped} in a world of {self.world}")
        if mapped.rank in draft.mapped:
            raise LocalProtocolError(f"rank {mapped.rank} has mapped the table twice")
        draft.mapped |= {mapped.rank}
        if draft.stage is Stage.FAILED or len(draft.mapped) < self.world:
            return []
        draft.stage = STEPS[draft.stage, Input.LAST_MAPPED]
        return [do.Broadcast(msg.WorldStarts())]

    def _gone(self, draft: AllgatherState, gone: ev.PeerGone) -> list[do.Effect]:
        entry = draft.entries[gone.rank] if 0 <= gone.rank < self.world else None
        if entry is None or (gone.incarnation and gone.incarnation != entry.incarnation):
            draft.stage = self.state.stage  # an incarnation that does not count any more
            return []
        if draft.stage is Stage.GATHERING:
            draft.entries = (*draft.entries[: gone.rank], None, *draft.entries[gone.rank + 1 :])
            return []
        return [do.Broadcast(msg.Died(rank=gone.rank, how=gone.how))]


_HANDLERS: dict[Input, Callable[[Allgather, AllgatherState, Any], list[do.Effect]]] = {
    Input.HELLO: Allgather._hello,
    Input.MAPPED: Allgather._mapped,
    Input.GONE: Allgather._gone,
}
