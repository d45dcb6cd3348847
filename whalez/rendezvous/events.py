"""What can happen to a rendezvous machine: past facts, handed in one at a time together with `now_ns`.

Rule 1: an event is data; it holds no callback and no clock.
Rule 2: an event says what happened, never what should follow; that is the machines' tables' business.

How the driver of a Member feeds it, once per launch boundary:
  1. drain the inbox, one `Received` per message, in arrival order;
  2. answer every `Reserve` effect with `Reserved` or `CannotReserve`, before 4;
  3. local wishes (`PostWanted`, `WithdrawWanted`, `DrainWanted`, `DrainedHere`), in any order, also between boundaries;
  4. exactly one `LaunchComposing`; its last effect is `Compose`.
"""

from __future__ import annotations

import msgspec

from whalez.rendezvous.messages import Message


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class Received(Event, frozen=True):
    """A message came in.

    message: for a Member from the sequencer, for the Sequencer and the Allgather from a rank
    sender:  the rank it came from; only the Sequencer and the Allgather look at it
    """

    message: Message
    sender: int = -1


# ---- Member only ----------------------------------------------------------------------------------------------
class PostWanted(Event, frozen=True, kw_only=True):
    """A local request wants a whale; slot and cache pages for prompt + max_tokens are reserved already.

    request_id is unique among the posts of this rank that have not ended.
    """

    request_id: str
    tokens: bytes  #: int32 little endian
    prompt_hash: str  #: sha256 of `tokens`, hex
    max_tokens: int


class WithdrawWanted(Event, frozen=True):
    """The client of a post is gone.

    No effect when the post has ended or its superstep has begun: client and whale race.
    """

    request_id: str


class Reserved(Event, frozen=True):
    """The driver has what `Reserve(seq)` asked for."""

    seq: int


class CannotReserve(Event, frozen=True):
    """The driver lacks what `Reserve(seq)` asked for, or is draining."""

    seq: int
    reason: str


class DrainWanted(Event, frozen=True):
    """This rank alone wants to leave (SIGTERM): from now on it helps nobody, its own requests go on."""


class DrainedHere(Event, frozen=True):
    """This rank has nothing left to serve: no request, no post."""


class LaunchComposing(Event, frozen=True):
    """The boundary before launch `launch`, after the inbox was drained.

    launch: rises by one from 0
    words:  confirmation words of launch `launch - words_back` of all ranks, in rank order; zeros if there was none
    """

    launch: int
    words: tuple[int, ...]


# ---- Sequencer (and Allgather) only ---------------------------------------------------------------------------
class Tick(Event, frozen=True):
    """Nothing happened but time: look at the deadlines. Due at `next_deadline_ns`, harmless at any time."""


class PeerGone(Event, frozen=True):
    """A rank's process is gone or its I/O thread silent. `incarnation` "" means the one the world runs with."""

    rank: int
    how: str
    incarnation: str = ""


class StopWanted(Event, frozen=True):
    """Supervisor or admin wants the world to end: at once (None), or after a drain of at most `grace_s`."""

    grace_s: float | None = None
