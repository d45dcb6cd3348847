"""What a rendezvous machine wants done: imperatives, performed by a driver.

Order contract, for every machine: perform the list in order, completely, before the next event is handed in;
messages to one receiver leave in the order of their effects (the hub keeps it per peer).

Order within one list of a Member:
  - `Disarm` comes before the `PostEnded` of the same whale: what was reserved is free before it is used again.
  - `PostEnded` comes before the `Send(Post)` that takes the freed place.
  - After `LaunchComposing`: `WhaleOver`, then `WhaleBegun`, then the next `Send(Post)`, and exactly one `Compose` last.
    The word in `Compose` must stand in the slab before the bell of that launch rings, and is never rewritten.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from whalez.planning.plan import GangPlan
from whalez.rendezvous.messages import Gather, Message, Refused


class LaunchKind(StrEnum):
    """What a launch may contain."""

    ORDINARY = "ordinary"  #: decode and full prefill chunks
    ARMED = "armed"  #: decode and at most `armed_rows` prefill rows: a superstep is near, launches stay short
    SUPERSTEP = "superstep"  #: this rank's segment of a whale
    STOP = "stop"  #: the last launch of the world; zero rows are fine


class Effect(msgspec.Struct, frozen=True):
    """Base of all effects."""


# ---- Member ---------------------------------------------------------------------------------------------------
class Send(Effect, frozen=True):
    """Send to the sequencer."""

    message: Message


class Reserve(Effect, frozen=True, kw_only=True):
    """Reserve what this whale needs here, and answer `Reserved(seq)` or `CannotReserve(seq, reason)`.

    A helper reserves scratch for its segment; the owner (`is_owner`) reserved slot and pages at post and just answers.
    The answer must come before the next `LaunchComposing`. Released by `Disarm(seq)` or after `WhaleOver(seq)`.
    """

    seq: int
    request_id: str
    plan: GangPlan
    tokens: bytes
    max_tokens: int
    is_owner: bool


class Disarm(Effect, frozen=True):
    """Release what was reserved for seq; the whale will not be entered."""

    seq: int
    reason: str


class PostEnded(Effect, frozen=True):
    """A post of this rank ended without a superstep (cancelled for good, refused, withdrawn, stopping).

    The request prefills locally, or is dropped if its client is gone.
    """

    request_id: str
    reason: str


class WhaleBegun(Effect, frozen=True, kw_only=True):
    """The launch of the `Compose` that follows is the first superstep of this whale.

    slipped: launches between the committed and this one (`slack_slips_total` counts them)
    """

    seq: int
    gather: Gather
    slipped: int


class WhaleOver(Effect, frozen=True):
    """The last superstep of this whale was the launch before the one of the `Compose` that follows."""

    seq: int


class DrainBegun(Effect, frozen=True):
    """The whole fleet drains: take no new requests, finish what runs within grace_s, then say `DrainedHere`."""

    grace_s: float


class Compose(Effect, frozen=True, kw_only=True):
    """Compose launch `launch`. Always the last effect of `LaunchComposing`, exactly one.

    word: what to publish as this rank's confirmation word of this launch, before its bell rings
    seq:  of the whale of a superstep, or of the Stop; otherwise None
    step: index of the superstep within the whale
    """

    launch: int
    word: int
    kind: LaunchKind
    seq: int | None = None
    step: int = 0


# ---- Sequencer and Allgather ----------------------------------------------------------------------------------
class SendTo(Effect, frozen=True):
    """Send to one rank."""

    rank: int
    message: Message


class Broadcast(Effect, frozen=True):
    """Send to every rank of the world, rank 0 included."""

    message: Message


class Refuse(Effect, frozen=True):
    """Send to this incarnation of this rank only, and read nothing more from it."""

    rank: int
    incarnation: str
    message: Refused
