import contextlib
import pickle
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalez.errors import WireError
from whalez.hub import requests as req
from whalez.hub import wire
from whalez.planning.plan import GangPlan
from whalez.rendezvous import messages as msg

ENTRY = msg.SlabEntry(rank=1, incarnation="abc", host="h", pid=7, ticket=b"\x00\xff")
PLAN = GangPlan(gang=(2, 3, 1), bounds=(0, 10, 20, 30))
TOKENS = struct.pack("<3i", 1, 2, 3)
HUB_MESSAGES = [
    msg.Hello(entry=ENTRY, world=4, fingerprint={"dtype": "f32"}),
    msg.Table(entries=(ENTRY, ENTRY)),
    msg.Offer(rank=1, turn=2, data=b"\x00\xff"),
    msg.Offers(turn=2, parts=(b"", b"\xff")),
    msg.Mapped(rank=1),
    msg.WorldStarts(),
    msg.Refused(reason="no", field="dtype"),
    msg.Post(rank=1, request_id="r", tokens=TOKENS, prompt_hash="00", max_tokens=4),
    msg.Withdraw(rank=1, request_id="r"),
    msg.Gather(seq=5, request_id="r", plan=PLAN, tokens=TOKENS, prompt_hash="00", max_tokens=4),
    msg.Ready(rank=1, seq=5, count=9),
    msg.Decline(rank=1, seq=5, reason="full"),
    msg.Commit(seq=5, launch=13, supersteps=1),
    msg.Cancel(seq=5, request_id="r", reason="late", outcome="final"),
    msg.PostRefused(request_id="r", reason="short"),
    msg.Leave(rank=1),
    msg.DrainAll(grace_s=1.5),
    msg.Stop(seq=6, launch=20),
    msg.Bye(rank=1),
    msg.Died(rank=1, how="gone"),
    wire.Beat(rank=1),
    wire.Probe(rank=1),
    wire.Echo(rank=1),
]
STATUS = req.Status(
    query_id="q",
    rank=0,
    world=2,
    incarnation="abc",
    pid=7,
    state="serving",
    launch=3,
    launch_age_s=0.5,
    healthy=True,
    trouble="",
    running=1,
    waiting=0,
    cache_used=1,
    cache_total=2,
    max_ctx=100,
    vocab_size=10,
    model="m",
)
LINK_MESSAGES = [
    req.Submit(request_id="r", tokens=TOKENS, max_tokens=-3, temperature=-1.0),
    req.CancelRequest(request_id="r"),
    req.StatusQuery(query_id="q"),
    req.TokenOut(request_id="r", index=0, token=5),
    req.Done(
        request_id="r",
        finish_reason="stop",
        tokens=(5,),
        prompt_tokens=3,
        report=req.Report(lane="whale", why="long", poster=1, segments=((0, 2), (2, 1)), phases={"kda": 0.1}),
    ),
    req.Failed(request_id="r", kind="invalid", reason="empty"),
    STATUS,
]


def name(message):
    return type(message).__name__


def test_every_message_type_is_covered():
    assert {type(each) for each in HUB_MESSAGES} == set(wire.HubMessage.__args__)
    assert {type(each) for each in LINK_MESSAGES} == set(wire.LinkAny.__args__)


@pytest.mark.parametrize("message", HUB_MESSAGES, ids=name)
def test_hub_round_trip(message):
    assert wire.decode(wire.encode(message, "i-1")) == wire.Frame("i-1", message)


@pytest.mark.parametrize("message", LINK_MESSAGES, ids=name)
def test_link_round_trip(message):
    assert wire.decode_link(wire.encode_link(message)) == message


def test_golden_bytes():
    """What another version must still understand, or refuse by its version number."""
    golden = (
        "57484c5a"  # WHLZ
        "0100"  # version 1
        "0300"  # incarnation bytes
        "20000000"  # body bytes
        "616263"  # "abc"
        "84a474797065a55265616479a472616e6b01a373657105a5636f756e74cd0100"
    )
    assert wire.encode(msg.Ready(rank=1, seq=5, count=256), "abc").hex() == golden


def test_cut_at_every_byte_and_one_too_many():
    data = wire.encode(HUB_MESSAGES[7], "i")
    for end in range(len(data)):
        with pytest.raises(WireError):
            wire.decode(data[:end])
    with pytest.raises(WireError, match="header says"):
        wire.decode(data + b"\0")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_frame_or_wire_error(data):
    for decode in (wire.decode, wire.decode_link):
        with contextlib.suppress(WireError):
            decode(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120))
def test_any_body_behind_a_right_header_gives_a_frame_or_wire_error(body):
    for magic, incarnation in ((wire.MAGIC, b"i"), (wire.LINK_MAGIC, b"")):
        data = struct.pack("<4sHHI", magic, wire.VERSION, len(incarnation), len(body)) + incarnation + body
        with contextlib.suppress(WireError):
            (wire.decode if magic == wire.MAGIC else wire.decode_link)(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(HUB_MESSAGES), st.data())
def test_a_changed_byte_gives_a_frame_or_wire_error(message, data):
    frame = bytearray(wire.encode(message, "i"))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        wire.decode(bytes(frame))


class Bomb:
    exploded = False

    def __reduce__(self):
        return (setattr, (Bomb, "exploded", True))


def test_pickle_is_bytes_like_any_other():
    data = pickle.dumps(Bomb())
    header = struct.pack("<4sHHI", wire.MAGIC, wire.VERSION, 1, len(data)) + b"i"
    for each in (data, header + data):
        with pytest.raises(WireError):
            wire.decode(each)
    assert not Bomb.exploded


def test_deep_nesting_is_refused():
    body = b"\x83\xa4type\xa7Refused\xa6reason\xa0\xa1x" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(WireError):
        wire.decode(struct.pack("<4sHHI", wire.MAGIC, wire.VERSION, 1, len(body)) + b"i" + body)


def test_prompt_at_the_cap_travels_and_above_is_refused():
    post = msg.Post(rank=0, request_id="r", tokens=bytes(wire.TOKENS_BYTES_MAX), prompt_hash="0" * 64, max_tokens=1)
    data = wire.encode(post, "i")
    assert len(data) <= wire.FRAME_BYTES_MAX
    assert wire.decode(data).message == post
    with pytest.raises(WireError, match="tokens"):
        wire.encode(msgspec.structs.replace(post, tokens=bytes(wire.TOKENS_BYTES_MAX + 4)), "i")
    with pytest.raises(WireError, match="at most"):
        wire.decode(bytes(wire.FRAME_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "message",
    [
        msg.Ready(rank=-1, seq=0, count=0),
        msg.Ready(rank=0, seq=1 << 63, count=0),
        msg.DrainAll(grace_s=float("nan")),
        msg.DrainAll(grace_s=float("inf")),
        msg.DrainAll(grace_s=-1.0),
        msg.Died(rank=0, how="x" * (wire.TEXT_BYTES_MAX + 1)),
        msg.Post(rank=0, request_id="r", tokens=b"123", prompt_hash="", max_tokens=1),
    ],
    ids=repr,
)
def test_values_no_rank_means_are_refused_on_both_sides(message):
    with pytest.raises(WireError):
        wire.encode(message, "i")
    body = msgspec.msgpack.encode(message)
    with pytest.raises(WireError):
        wire.decode(struct.pack("<4sHHI", wire.MAGIC, wire.VERSION, 1, len(body)) + b"i" + body)


def test_other_magic_version_and_kind_are_named():
    data = wire.encode(msg.Bye(rank=0), "i")
    with pytest.raises(WireError, match="magic"):
        wire.decode(b"X" + data[1:])
    with pytest.raises(WireError, match="version 9"):
        wire.decode(data[:4] + b"\x09\0" + data[6:])
    with pytest.raises(WireError, match="magic"):
        wire.decode_link(data)
    for bad in ("", "é", "x" * 65):
        with pytest.raises(WireError, match="incarnation"):
            wire.encode(msg.Bye(rank=0), bad)
