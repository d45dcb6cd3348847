import contextlib
import pickle
import struct
import tracemalloc

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
    wire.Beat(rank=1, on_frames=True, count=70_000),
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


ALL = [(wire.encode(each, "i-1"), wire.decode) for each in HUB_MESSAGES]
ALL += [(wire.encode_link(each), wire.decode_link) for each in LINK_MESSAGES]
EVERY = pytest.mark.parametrize(
    ("data", "decode"), ALL, ids=[*map(name, HUB_MESSAGES), *(f"link-{name(each)}" for each in LINK_MESSAGES)]
)


@EVERY
def test_cut_at_every_byte_and_one_too_many(data, decode):
    """Also with the length in the header made to fit, so that the cut is in the body's own structure."""
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:end])
    with pytest.raises(WireError, match="header says"):
        decode(data + b"\0")
    magic, version, name_bytes, body_bytes = struct.unpack_from("<4sHHI", data)
    start = 12 + name_bytes
    for cut in range(body_bytes):
        with pytest.raises(WireError, match="body"):
            decode(struct.pack("<4sHHI", magic, version, name_bytes, cut) + data[12 : start + cut])
    with pytest.raises(WireError, match="body"):
        decode(struct.pack("<4sHHI", magic, version, name_bytes, body_bytes + 1) + data[12:] + b"\0")


@EVERY
def test_every_byte_changed_in_every_way_gives_a_message_or_wire_error(data, decode):
    """What passes is again what `encode` would make: it survives a second trip."""
    for at in range(len(data)):
        frame = bytearray(data)
        for value in range(256):
            frame[at] = value
            try:
                got = decode(bytes(frame))
            except WireError:
                continue
            if decode is wire.decode:
                assert frame[12 : 12 + len(got.incarnation)] == got.incarnation.encode()
                assert wire.decode(wire.encode(got.message, got.incarnation)) == got
            else:
                assert wire.decode_link(wire.encode_link(got)) == got


@settings(max_examples=300)
@given(st.sampled_from(ALL), st.data())
def test_pieces_of_two_messages_give_a_message_or_wire_error(first, data):
    """Splices of well-formed bodies get deeper into the decoder than noise does."""
    frame, decode = first
    other = data.draw(st.sampled_from(ALL))[0]
    name_bytes = struct.unpack_from("<4sHHI", frame)[2]
    cut, resume = data.draw(st.integers(12 + name_bytes, len(frame))), data.draw(st.integers(12, len(other)))
    body = frame[12 + name_bytes : cut] + other[resume:]
    header = struct.pack("<4sHHI", frame[:4], wire.VERSION, name_bytes, len(body))
    with contextlib.suppress(WireError):
        decode(header + frame[12 : 12 + name_bytes] + body)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_frame_or_wire_error(data):
    for decode in (wire.decode, wire.decode_link):
        with contextlib.suppress(WireError):
            decode(data)


@settings(max_examples=300)
@given(st.binary(max_size=120))
def test_any_body_behind_a_right_header_gives_a_frame_or_wire_error(body):
    for magic, incarnation in ((wire.MAGIC, b"i"), (wire.LINK_MAGIC, b"")):
        data = struct.pack("<4sHHI", magic, wire.VERSION, len(incarnation), len(body)) + incarnation + body
        with contextlib.suppress(WireError):
            (wire.decode if magic == wire.MAGIC else wire.decode_link)(data)


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


KNOWN = b"\x82\xa4type\xa7Refused"  # the rest is the value of one more key
HUB, LINK = (wire.MAGIC, b"i", wire.decode), (wire.LINK_MAGIC, b"", wire.decode_link)


@pytest.mark.parametrize(("magic", "incarnation", "decode"), [HUB, LINK], ids=["hub", "link"])
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa0", b"\x81\xa4type", b"\xdc\x00\x01", b"\xc7\x01\x05"])
@pytest.mark.parametrize("before", [b"", KNOWN + b"\xa1x", KNOWN + b"\xa6reason"])
def test_deep_nesting_is_refused(magic, incarnation, decode, level, before):
    """As the body, as a field nobody knows, in place of a text."""
    for depth in (50, 1000, 1_000_000):
        body = before + level * depth + b"\xc0"
        with pytest.raises(WireError):
            decode(struct.pack("<4sHHI", magic, wire.VERSION, len(incarnation), len(body)) + incarnation + body)


@pytest.mark.parametrize(("magic", "incarnation", "decode"), [HUB, LINK], ids=["hub", "link"])
@pytest.mark.parametrize(
    "head", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"], ids=["array", "map", "bin", "str", "ext"]
)
@pytest.mark.parametrize("before", [b"", KNOWN + b"\xa1x", KNOWN + b"\xa6reason"])
def test_a_length_that_the_bytes_do_not_have_takes_no_memory(magic, incarnation, decode, head, before):
    """4,294,967,295 entries announced in a frame of a few bytes."""
    body = before + head + b"\xff\xff\xff\xff"
    frame = struct.pack("<4sHHI", magic, wire.VERSION, len(incarnation), len(body)) + incarnation + body
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("magic", "decode"), [(wire.MAGIC, wire.decode), (wire.LINK_MAGIC, wire.decode_link)])
@pytest.mark.parametrize(("names", "bodies"), [(0xFFFF, 0), (0, 0xFFFFFFFF), (65, 0), (0xFFFF, 0xFFFFFFFF)])
def test_lengths_of_the_header_are_never_believed(magic, decode, names, bodies):
    with pytest.raises(WireError):
        decode(struct.pack("<4sHHI", magic, wire.VERSION, names, bodies) + bytes(100))


@pytest.mark.parametrize(
    "make",
    [
        lambda: msg.Refused(reason="x" * (wire.TEXT_CHARS_MAX + 1), field=None),
        lambda: msg.Hello(entry=ENTRY, world=4, fingerprint={str(i): "" for i in range(wire.MAP_ENTRIES_MAX + 1)}),
        lambda: msg.Hello(entry=ENTRY, world=4, fingerprint={"x" * (wire.TEXT_CHARS_MAX + 1): ""}),
        lambda: msg.Gather(
            seq=5,
            request_id="r",
            plan=GangPlan(gang=(0,) * (wire.ITEMS_MAX + 1), bounds=(0,)),
            tokens=TOKENS,
            prompt_hash="",
            max_tokens=4,
        ),
    ],
    ids=["text", "map entries", "map key", "list entries"],
)
def test_what_is_too_long_is_refused_on_both_sides(make):
    message = make()
    with pytest.raises(WireError, match="at most"):
        wire.encode(message, "i")
    body = msgspec.msgpack.encode(message)
    with pytest.raises(WireError, match="at most"):
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
        msg.Died(rank=0, how="x" * (wire.TEXT_CHARS_MAX + 1)),
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
