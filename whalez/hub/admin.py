"""What an operator asks a rank, and what the rank answers from a thread that is not its loop.

Rule 1: only data; the bytes and sockets are the hub's.   Rule 2: no token of a prompt but in `Prompts`.
Rule 3: whatever changes the fleet, or gives prompts away, is a `GuardedQuery`; `zmq_admin.py` decides who may ask one.
"""

from __future__ import annotations

import msgspec

from whalez.hub.requests import Status
from whalez.rendezvous.lives import Life


class AdminMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of everything that crosses an admin socket."""


# ---- queries ------------------------------------------------------------------------------------------------------
class AdminQuery(AdminMessage, frozen=True, kw_only=True):
    """Base of all queries; the answer carries the same id."""

    query_id: str


class GuardedQuery(AdminQuery, frozen=True, kw_only=True):
    """Base of what not everybody may ask."""


class AskStatus(AdminQuery, frozen=True):
    """-> RankStatus"""


class AskWhales(AdminQuery, frozen=True):
    """-> Whales"""


class AskSlabs(AdminQuery, frozen=True):
    """-> Slabs"""


class AskDoorbells(AdminQuery, frozen=True):
    """-> Doorbells, else NotDone"""


class AskPrompts(GuardedQuery, frozen=True):
    """-> Prompts, else NotDone"""


class CancelWhale(GuardedQuery, frozen=True):
    """End this whale and the request it is for. -> Ordered, from the rank that serves the request and, while the whale
    is not committed, from rank 0; else NotDone"""

    seq: int
    request_id: str
    poster: int


class DrainFleet(GuardedQuery, frozen=True):
    """No new requests, at most `grace_s` for those that run, then all ranks leave. -> Ordered, else NotDone"""

    grace_s: float  #: 0 to DRAIN_GRACE_S_MAX


# ---- answers ------------------------------------------------------------------------------------------------------
class AdminAnswer(AdminMessage, frozen=True, kw_only=True):
    """Base of all answers."""

    query_id: str
    rank: int


class NotDone(AdminAnswer, frozen=True):
    """Why there is no other answer."""

    reason: str


class Ordered(AdminAnswer, frozen=True):
    """Something follows: the wish is in the loop's inbox, which it looks into at its next launch boundary, or in the
    sequencer's."""

    what: str


class RecordLine(msgspec.Struct, frozen=True, kw_only=True):
    """One seq that this rank's Member has not finished."""

    seq: int
    state: str
    launch: int | None  #: L, once committed
    gang: tuple[int, ...]


class RankStatus(AdminAnswer, frozen=True):
    """One rank."""

    health: Status
    device: str
    transport: str  #: of the data plane
    hub: str  #: address of the control plane
    host: str
    launches_with_sleep: int  #: launches before which the rank slept
    slips_total: int  #: launches that late commits have cost
    records: tuple[RecordLine, ...]
    endpoints: tuple[str, ...]  #: admin sockets in rank order; "" for one that has not been told
    sockets: dict[str, dict[str, int]]  #: options by socket, as configured


class SequencerLine(msgspec.Struct, frozen=True, kw_only=True):
    """The Sequencer as it stands."""

    phase: str
    launch: int
    slack: int
    waiting: int  #: posts without a seq
    left: tuple[int, ...]  #: ranks that have drained


class Whales(AdminAnswer, frozen=True):
    """Lives as this rank's Member saw them; rank 0 adds the Sequencer's view."""

    at_ns: int  #: monotonic clock now, for the moments' times
    wall_s: float  #: the same instant, seconds since 1970
    seen: tuple[Life, ...]
    sequenced: tuple[Life, ...] = ()
    sequencer: SequencerLine | None = None


class RegionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One array of every slab."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Slabs(AdminAnswer, frozen=True):
    """The layout, equal on all ranks, and whose slabs this rank has mapped."""

    nbytes: int  #: of this rank's own slab
    regions: tuple[RegionLine, ...]
    mapped: tuple[int, ...]
    host: str
    pid: int


class WaitLine(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a rank waits for, as it last wrote it into its slab."""

    rank: int  #: who waits
    peer: int
    kind: str
    expected: int
    seen: int | None  #: value that has come; None in the word of another rank, whose lines only it can read
    place: str  #: launch and step, or seq and window, in words


class BellLine(msgspec.Struct, frozen=True, kw_only=True):
    """One doorbell line of the answering rank. In the pairing kinds a peer that is level has seen == rung."""

    kind: str
    peer: int
    expected: int | None  #: what this rank waits for now; None: not for this line
    seen: int
    rung: int  #: the last value this rank rang at the peer


class PeerLine(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in one rank's slab, as the answering rank reads it there."""

    rank: int
    launch_count: int
    progress: int
    word: int  #: confirmation word of its last launch


class Doorbells(AdminAnswer, frozen=True):
    """Every line of this rank, and whom all ranks wait for by what stands in their slabs."""

    lines: tuple[BellLine, ...]
    peers: tuple[PeerLine, ...]
    waits: tuple[WaitLine, ...]


class Prompts(AdminAnswer, frozen=True):
    """Token ids of the requests being served, by request id; int32 little endian."""

    prompts: dict[str, bytes]


Query = AskStatus | AskWhales | AskSlabs | AskDoorbells | AskPrompts | CancelWhale | DrainFleet
Answer = NotDone | Ordered | RankStatus | Whales | Slabs | Doorbells | Prompts

#: What answers a query, if not a NotDone does.
ANSWERS: dict[type[AdminQuery], type[AdminAnswer]] = {
    AskStatus: RankStatus,
    AskWhales: Whales,
    AskSlabs: Slabs,
    AskDoorbells: Doorbells,
    AskPrompts: Prompts,
    CancelWhale: Ordered,
    DrainFleet: Ordered,
}
