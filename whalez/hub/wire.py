"""Bytes to messages and back, and nothing else: every frame of whalez is made and judged here.

Rule 1: any bytes give a value or WireError, never another exception, and never execute anything.
Rule 2: what passes is safe to hand on: caps on every length, finite numbers, none negative between ranks.

    hub frame   b"WHLZ"  u16 version  u16 incarnation bytes  u32 body bytes  incarnation (ASCII)  body
    link frame  b"WHLK"  u16 version  u16 0                  u32 body bytes                       body
    admin frame b"WHLA"  as a link frame, at most ADMIN_BYTES_MAX

All integers little endian; the body is msgpack of a tagged struct.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from whalez.errors import WireError
from whalez.hub import admin, requests
from whalez.rendezvous import messages

MAGIC = b"WHLZ"
LINK_MAGIC = b"WHLK"
ADMIN_MAGIC = b"WHLA"
VERSION = 1
PROMPT_TOKENS_MAX = 1 << 22
TOKENS_BYTES_MAX = 4 * PROMPT_TOKENS_MAX
INCARNATION_BYTES_MAX = 64
OFFER_BYTES_MAX = 1 << 16  #: one rank's part of a gather; those of 256 ranks fit into a frame
TEXT_CHARS_MAX = 1 << 16  #: of one text
MAP_ENTRIES_MAX = 1 << 16
ITEMS_MAX = 1 << 22  #: entries of one list; Done returns its tokens as one
INT_MAX = (1 << 63) - 1
#: A prompt at the cap and what stands around it.
FRAME_BYTES_MAX = TOKENS_BYTES_MAX + (1 << 20)
ADMIN_BYTES_MAX = 1 << 23  #: the lives of a hundred whales, or all doorbells of a large world

_HEADER = struct.Struct("<4sHHI")


class Beat(messages.Message, frozen=True):
    """Hub thread <-> sequencer's thread: I am running. Says nothing else, is never handed to the loop.

    Travels on a connection of its own, so that a prompt of megabytes does not stand in front of it, and now and then
    on the frames' connection too (`on_frames`), which shows the sequencer if that was cut and made anew. There it says
    how many messages (see `is_counted`) have gone before it, so that one that got lost or came twice on the way is
    noticed by the next beat.
    """

    rank: int
    on_frames: bool = False
    count: int = 0


class Probe(messages.Message, frozen=True):
    """Either end of a frames' connection, before it closes: say `Echo` once you have read up to here.

    A socket that is closed while frames come in may take with it what it has sent (TCP resets the connection), so only
    an answer tells that the last words have arrived.
    """

    rank: int


class Echo(messages.Message, frozen=True):
    """The answer to a Probe."""

    rank: int


#: Repeated by who says them until they are answered, or of no consequence when they get lost.
_UNCOUNTED = (
    messages.Hello,
    messages.Table,
    messages.Mapped,
    messages.WorldStarts,
    messages.Refused,
    messages.Died,
    Beat,
    Probe,
    Echo,
)


def is_counted(message: messages.Message) -> bool:
    """Whether both ends of a frames' connection count it: all that is said once and must arrive once."""
    return not isinstance(message, _UNCOUNTED)


HubMessage = (
    messages.Hello
    | messages.Table
    | messages.Offer
    | messages.Offers
    | messages.Mapped
    | messages.WorldStarts
    | messages.Refused
    | messages.Post
    | messages.Withdraw
    | messages.Gather
    | messages.Ready
    | messages.Decline
    | messages.Commit
    | messages.Cancel
    | messages.PostRefused
    | messages.Leave
    | messages.DrainAll
    | messages.Stop
    | messages.Bye
    | messages.Died
    | Beat
    | Probe
    | Echo
)
LinkAny = requests.Request | requests.Response
AdminAny = admin.Query | admin.Answer

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_hub_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(HubMessage)
_link_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(LinkAny)
_admin_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AdminAny)


@dataclass(frozen=True, slots=True)
class Frame:
    """A hub message and the process start it comes from; the sequencer speaks under that of rank 0."""

    incarnation: str
    message: messages.Message


def encode(message: messages.Message, incarnation: str) -> bytes:
    """One hub frame. Raises WireError for a message no receiver would accept, e.g. a prompt above the cap."""
    name = _incarnation_bytes(incarnation)
    body = _body(message, 0)
    return b"".join((_HEADER.pack(MAGIC, VERSION, len(name), len(body)), name, body))


def decode(data: bytes | memoryview) -> Frame:
    """The frame in `data`, all of it. Raises WireError for anything that `encode` would not have made."""
    name, body = _split(data, MAGIC)
    try:
        incarnation = bytes(name).decode("ascii")
    except UnicodeDecodeError:
        raise WireError("incarnation is not ASCII") from None
    return Frame(incarnation, _decoded(_hub_decoder, body, 0))


def encode_link(message: requests.LinkMessage) -> bytes:
    """One link frame. Raises WireError like `encode`."""
    body = _body(message, -INT_MAX)
    return b"".join((_HEADER.pack(LINK_MAGIC, VERSION, 0, len(body)), body))


def decode_link(data: bytes | memoryview) -> requests.Request | requests.Response:
    """The link message in `data`. Raises WireError like `decode`."""
    name, body = _split(data, LINK_MAGIC)
    if len(name):
        raise WireError("a link frame carries no incarnation")
    message: requests.Request | requests.Response = _decoded(_link_decoder, body, -INT_MAX)
    return message


def encode_admin(message: admin.AdminMessage) -> bytes:
    """One admin frame. Raises WireError like `encode`, and above ADMIN_BYTES_MAX."""
    body = _body(message, -INT_MAX)
    if len(body) > ADMIN_BYTES_MAX - _HEADER.size:
        raise WireError(f"{type(message).__name__}: {len(body)} bytes, an admin frame may have {ADMIN_BYTES_MAX}")
    return b"".join((_HEADER.pack(ADMIN_MAGIC, VERSION, 0, len(body)), body))


def decode_admin(data: bytes | memoryview) -> admin.Query | admin.Answer:
    """The admin message in `data`. Raises WireError like `decode`."""
    if len(data) > ADMIN_BYTES_MAX:
        raise WireError(f"admin frame of {len(data)} bytes, at most {ADMIN_BYTES_MAX} allowed")
    name, body = _split(data, ADMIN_MAGIC)
    if len(name):
        raise WireError("an admin frame carries no incarnation")
    message: admin.Query | admin.Answer = _decoded(_admin_decoder, body, -INT_MAX)
    return message


def check(message: messages.Message | requests.LinkMessage) -> None:
    """Raise the WireError that encoding would, without making the bytes."""
    _check(message, type(message).__name__, 0 if isinstance(message, messages.Message) else -INT_MAX)


def _incarnation_bytes(incarnation: str) -> bytes:
    try:
        name = incarnation.encode("ascii")
    except UnicodeEncodeError:
        raise WireError("incarnation is not ASCII") from None
    if not 0 < len(name) <= INCARNATION_BYTES_MAX:
        raise WireError(f"incarnation of {len(name)} bytes, expected 1 to {INCARNATION_BYTES_MAX}")
    return name


def _body(message: Any, least: int) -> bytes:
    _check(message, type(message).__name__, least)
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX - _HEADER.size - INCARNATION_BYTES_MAX:
        raise WireError(f"{type(message).__name__}: {len(body)} bytes, a frame may have {FRAME_BYTES_MAX}")
    return body


def _split(data: bytes | memoryview, magic: bytes) -> tuple[memoryview, memoryview]:
    """Incarnation and body of a frame whose every length adds up."""
    view = memoryview(data)
    if len(view) > FRAME_BYTES_MAX:
        raise WireError(f"frame of {len(view)} bytes, at most {FRAME_BYTES_MAX} allowed")
    if len(view) < _HEADER.size:
        raise WireError(f"frame of {len(view)} bytes, shorter than its header")
    got_magic, version, name_bytes, body_bytes = _HEADER.unpack_from(view)
    if got_magic != magic:
        raise WireError(f"magic {got_magic!r}, expected {magic!r}")
    if version != VERSION:
        raise WireError(f"protocol version {version}, this is version {VERSION}")
    if name_bytes > INCARNATION_BYTES_MAX or (magic == MAGIC and name_bytes == 0):
        raise WireError(f"incarnation of {name_bytes} bytes, expected 1 to {INCARNATION_BYTES_MAX}")
    if _HEADER.size + name_bytes + body_bytes != len(view):
        raise WireError(f"frame of {len(view)} bytes, its header says {_HEADER.size + name_bytes + body_bytes}")
    return view[_HEADER.size : _HEADER.size + name_bytes], view[_HEADER.size + name_bytes :]


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: memoryview, least: int) -> _T:
    try:
        message = decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"body: {error}") from None
    _check(message, type(message).__name__, least)
    return message


def _check(value: Any, where: str, least: int) -> None:
    """Caps that the types can not express. Recursion is bounded by the nesting of the message types.

    `least`: the smallest number that may travel. Ranks only count; a client may send nonsense, which the engine
    refuses with a reason.
    """
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        if not least <= value <= INT_MAX:
            raise WireError(f"{where}: {value} is out of range")
    elif isinstance(value, float):
        if not math.isfinite(value) or value < least:
            raise WireError(f"{where}: {value} is out of range or not finite")
    elif isinstance(value, str):
        if len(value) > TEXT_CHARS_MAX:
            raise WireError(f"{where}: text of {len(value)} characters, at most {TEXT_CHARS_MAX} allowed")
    elif isinstance(value, bytes):
        limit = OFFER_BYTES_MAX if where in ("Offer.data", "Offers.parts") else TOKENS_BYTES_MAX
        if len(value) > limit:
            raise WireError(f"{where}: {len(value)} bytes, at most {limit} allowed")
        if where.endswith((".tokens", ".prompts")) and len(value) % 4:
            raise WireError(f"{where}: {len(value)} bytes are no list of int32")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check(getattr(value, name), f"{where}.{name}", least)
    elif isinstance(value, tuple | list):
        if len(value) > ITEMS_MAX:
            raise WireError(f"{where}: {len(value)} entries, at most {ITEMS_MAX} allowed")
        for item in value:
            _check(item, where, least)
    elif isinstance(value, dict):
        if len(value) > MAP_ENTRIES_MAX:
            raise WireError(f"{where}: {len(value)} entries, at most {MAP_ENTRIES_MAX} allowed")
        for key, item in value.items():
            _check(key, where, least)
            _check(item, where, least)
    else:
        raise WireError(f"{where}: a {type(value).__name__} does not travel")
