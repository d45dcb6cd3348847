"""What a client of a rank says to its loop and what it hears back.

Rule 1: only data; the bytes and sockets are the hub's.   Rule 2: a response always names the request it answers.
"""

from __future__ import annotations

import msgspec


class LinkMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of everything that crosses the link."""


class Submit(LinkMessage, frozen=True):
    """Generate from these tokens."""

    request_id: str
    tokens: bytes  #: int32 little endian
    max_tokens: int
    temperature: float = 0.0  #: 0 = greedy
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()  #: generation ends at one of these, which is not returned
    lane: str = "auto"  #: "auto" | "whale" | "local"


class CancelRequest(LinkMessage, frozen=True):
    """The client is gone or lost interest."""

    request_id: str


class StatusQuery(LinkMessage, frozen=True):
    """Answered from the link's thread, whatever the loop does."""

    query_id: str


class TokenOut(LinkMessage, frozen=True):
    """One generated token, in order."""

    request_id: str
    index: int
    token: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a request was served; what `generate --json` writes."""

    lane: str  #: "whale" | "local"
    why: str  #: why this lane
    poster: int
    seq: int | None = None
    gang: tuple[int, ...] = ()
    segments: tuple[tuple[int, int], ...] = ()  #: (first token, length) per gang member in CP order
    entry_launch: int | None = None
    slips: int = 0  #: launches between the committed and the entered one
    submit_launch: int = 0  #: launch that was composed next when the request came in
    first_token_launch: int = 0  #: launch that gave the first token
    ttft_s: float = 0.0
    queue_s: float = 0.0  #: submit -> first launch that works on it
    rendezvous_s: float = 0.0  #: post -> superstep entered (whale lane)
    prefill_s: float = 0.0  #: superstep, or all local chunks
    phases: dict[str, float] = {}  #: seconds of the superstep on this rank: kda, mla, moe, dense, exchange_wait, other


class Done(LinkMessage, frozen=True):
    """The request ended well."""

    request_id: str
    finish_reason: str  #: "stop" | "length"
    tokens: tuple[int, ...]
    prompt_tokens: int
    report: Report


class Failed(LinkMessage, frozen=True):
    """The request ended without a result."""

    request_id: str
    #: "invalid" (client's fault) | "unavailable" | "internal" | "cancelled"; of the client's own end: "gone" (the rank)
    kind: str
    reason: str
    param: str | None = None


class Status(LinkMessage, frozen=True):
    """One rank as seen by its own link thread."""

    query_id: str
    rank: int
    world: int
    incarnation: str
    pid: int
    state: str  #: "starting" | "serving" | "draining" | "stopping" | "failed"
    launch: int
    launch_age_s: float  #: since the progress word last moved
    healthy: bool
    trouble: str  #: empty, or what is wrong: names rank, window, layer
    running: int
    waiting: int
    cache_used: int  #: pages
    cache_total: int
    max_ctx: int
    vocab_size: int
    model: str
    eos_tokens: tuple[int, ...] = ()
    dropped: dict[str, int] = {}  #: frames and connections that were refused at this rank's ports, by kind
    slabs: str = ""  #: which memory the ranks share


Request = Submit | CancelRequest | StatusQuery
Response = TokenOut | Done | Failed | Status
