"""The words of the control plane: what ranks and the sequencer say to each other.

Rule 1: only data lives here; bytes are the wire codec's, meaning is the machines'.
Rule 2: every message names its sender or its seq, so that a stale or stray one can be refused by name.
"""

from __future__ import annotations

import msgspec

from whalez.planning.plan import GangPlan

DRAIN_GRACE_S_MAX = 86_400.0


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all frames' contents."""


class SlabEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's row of the slab table."""

    rank: int
    incarnation: str
    host: str
    pid: int
    ticket: bytes  #: what lets a peer map the slab (host: the shared-memory name)
    admin: str = ""  #: where it answers an operator's queries


# ---- start-up -------------------------------------------------------------------------------------------------
class Hello(Message, frozen=True):
    """Member -> hub, first frame of an incarnation."""

    entry: SlabEntry
    world: int
    fingerprint: dict[str, str]  #: field -> value of the fleet configuration; a difference is refused by field


class Table(Message, frozen=True):
    """Hub -> members: every rank has said hello; the slab table in rank order."""

    entries: tuple[SlabEntry, ...]


class Offer(Message, frozen=True):
    """Member -> hub, between Table and Mapped: my part of the gather number `turn`, counted from 0."""

    rank: int
    turn: int
    data: bytes


class Offers(Message, frozen=True):
    """Hub -> members: every rank has offered; the parts of gather `turn` in rank order."""

    turn: int
    parts: tuple[bytes, ...]


class Mapped(Message, frozen=True):
    """Member -> hub: I have mapped every slab of the table."""

    rank: int


class WorldStarts(Message, frozen=True):
    """Hub -> members: all have mapped; unlink your slab's name and launch."""


class Refused(Message, frozen=True):
    """Hub -> member: you may not take part, and why."""

    reason: str
    field: str | None = None


# ---- a whale --------------------------------------------------------------------------------------------------
class Post(Message, frozen=True):
    """Poster -> sequencer: please gather a gang for this prompt."""

    rank: int
    request_id: str
    tokens: bytes  #: int32 little endian
    prompt_hash: str  #: sha256 of `tokens`, hex
    max_tokens: int


class Withdraw(Message, frozen=True):
    """Poster -> sequencer: the client of my outstanding post is gone; cancel it if it is not committed."""

    rank: int
    request_id: str


class Gather(Message, frozen=True):
    """Sequencer -> members of the gang."""

    seq: int
    request_id: str
    plan: GangPlan
    tokens: bytes
    prompt_hash: str
    max_tokens: int
    excluded: tuple[int, ...] = ()  #: ranks the plan had to do without (they declined or left), ascending


class Ready(Message, frozen=True):
    """Member -> sequencer: I am armed; `count` is the index of the launch I compose next."""

    rank: int
    seq: int
    count: int


class Decline(Message, frozen=True):
    """Member -> sequencer instead of Ready."""

    rank: int
    seq: int
    reason: str


class Commit(Message, frozen=True):
    """Sequencer -> members: the superstep is launch `launch` or the first later one that all words confirm."""

    seq: int
    launch: int
    supersteps: int


class Cancel(Message, frozen=True):
    """Sequencer -> members: disarm seq. `outcome` tells the poster whether its post lives on."""

    seq: int
    request_id: str
    reason: str
    outcome: str  #: "regathered" | "final"


class PostRefused(Message, frozen=True):
    """Sequencer -> poster: no gang for this post (never had a seq); prefill locally."""

    request_id: str
    reason: str


# ---- leaving and dying ----------------------------------------------------------------------------------------
class Leave(Message, frozen=True):
    """Member -> sequencer: I have drained."""

    rank: int


class DrainAll(Message, frozen=True):
    """Anyone -> sequencer -> members: stop taking requests, finish what runs, then leave."""

    grace_s: float  #: 0 to DRAIN_GRACE_S_MAX


class Stop(Message, frozen=True):
    """Sequencer -> members: a whale-like commit whose single launch is the last of the world."""

    seq: int
    launch: int


class Bye(Message, frozen=True):
    """Member -> sequencer -> members: I began Stop and touch no peer's slab any more."""

    rank: int


class Died(Message, frozen=True):
    """Sequencer -> members, or local watcher -> own inbox: this rank is dead; fail-stop."""

    rank: int
    how: str
