"""The admin socket: one deadline for all, who may ask what, garbage."""

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.machine import Pauses
from helpers.ports import free_ports
from whalez.errors import ConfigError, HubError, WireError
from whalez.hub import admin, wire
from whalez.hub.keys import load_keys, make_keys
from whalez.hub.zmq_admin import AdminServer, NoAnswer, ask_all, refusal
from whalez.rendezvous.lives import Life, Moment, What

QUESTION = admin.AskStatus(query_id="q")
LIFE = Life(
    seq=3,
    request_id="r",
    poster=1,
    gang=(0, 1),
    tokens=9,
    launch=7,
    moments=(Moment(at_ns=5, launch=2, what=What.GATHERED, rank=-1),),
)


def answer(query):
    if isinstance(query, admin.AskSlabs):
        raise ValueError("a bug")
    return admin.Ordered(query_id=query.query_id, rank=2, what=type(query).__name__)


@pytest.fixture
def server(tmp_path):
    made = AdminServer(f"ipc://{tmp_path}/a", 2, answer)
    yield made
    made.close()


def test_every_message_travels(server):
    whales = admin.Whales(query_id="q", rank=0, at_ns=1, wall_s=2.0, seen=(LIFE,))
    for message in (QUESTION, whales, admin.Prompts(query_id="q", rank=0, prompts={"r": b"\1\0\0\0"})):
        assert wire.decode_admin(wire.encode_admin(message)) == message
    with pytest.raises(WireError, match="magic"):
        wire.decode_link(wire.encode_admin(QUESTION))


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_any_body_gives_a_message_or_wire_error(body):
    whole = wire.encode_admin(QUESTION)
    header = whole[:8] + len(body).to_bytes(4, "little")
    for data in (body, header + body, whole[: len(body) % len(whole)]):
        with contextlib.suppress(WireError):
            assert isinstance(wire.decode_admin(data), admin.AdminMessage)


def test_an_answer_above_the_cap_is_refused():
    prompts = {"r": bytes(wire.ADMIN_BYTES_MAX)}
    with pytest.raises(WireError, match="admin frame"):
        wire.encode_admin(admin.Prompts(query_id="q", rank=0, prompts=prompts))


def test_who_is_silent_delays_nobody_beyond_the_deadline(server, tmp_path):
    """A listener that is stopped takes connections and says nothing; where nobody listens there is not even that."""
    code = (
        "import sys\nfrom whalez.hub.zmq_admin import AdminServer\n"
        "AdminServer(sys.argv[1], 0, None)\nprint('up', flush=True)\nsys.stdin.read()"
    )
    there = f"ipc://{tmp_path}/stopped"
    child = subprocess.Popen(
        [sys.executable, "-c", code, there], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "up\n"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        questions = [(each, QUESTION) for each in (there, server._address, f"ipc://{tmp_path}/nobody")]
        with Pauses() as pauses:
            began = time.monotonic()
            answers = ask_all(questions, 1.0)
            took_s = time.monotonic() - began
        assert 0.95 < took_s < 1.7 + pauses.late_s  # not once for each
        assert answers == [NoAnswer(), admin.Ordered(query_id="q", rank=2, what="AskStatus"), NoAnswer()]
    finally:
        child.kill()
        child.communicate()


def test_all_answered_is_not_waited_for(server):
    began = time.monotonic()
    assert NoAnswer() not in ask_all([(server._address, QUESTION)] * 3, 20.0)
    assert time.monotonic() - began < 5.0


def test_an_answer_that_fails_is_told_and_the_next_is_given(server):
    asked = admin.AskSlabs(query_id="bad")
    (failed,) = ask_all([(server._address, asked)], 5.0)
    assert failed == admin.NotDone(query_id="bad", rank=2, reason="ValueError: a bug")
    assert ask_all([(server._address, QUESTION)], 5.0) != [NoAnswer()]


GUARDED = [
    admin.CancelWhale(query_id="q", seq=1, request_id="r", poster=0),
    admin.DrainFleet(query_id="q", grace_s=1.0),
    admin.AskPrompts(query_id="q"),
]
OPEN = [admin.AskStatus, admin.AskWhales, admin.AskSlabs, admin.AskDoorbells]


def test_every_query_is_either_open_or_guarded():
    queries = set(admin.Query.__args__)
    assert queries == {*OPEN, *map(type, GUARDED)}


@pytest.mark.parametrize("query", GUARDED)
def test_what_is_guarded_is_taken_on_this_machine_only(query):
    for address in ("ipc:///run/x", "tcp://127.0.0.1:9", "tcp://[::1]:9"):
        assert refusal(query, address) == ""
    for address in ("tcp://0.0.0.0:9", "tcp://10.0.0.1:9", "tcp://[::]:9", "tcp://192.0.2.1:9"):
        assert "ipc or loopback only" in refusal(query, address)


@pytest.mark.parametrize("kind", OPEN)
def test_looking_is_open_everywhere(kind):
    assert refusal(kind(query_id="q"), "tcp://10.0.0.1:9") == ""


def test_a_server_that_others_reach_refuses_and_does_not_obey():
    obeyed = []
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
    server = AdminServer(f"tcp://0.0.0.0:{port}", 2, obeyed.append)
    try:
        (told,) = ask_all([(f"tcp://127.0.0.1:{port}", GUARDED[1])], 5.0)
    finally:
        server.close()
    assert isinstance(told, admin.NotDone)
    assert obeyed == []


def test_garbage_is_counted_and_dropped(server):
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(server._address)
        answers = wire.encode_admin(admin.NotDone(query_id="q", rank=0, reason="no"))
        garbage = [b"", b"\x00" * 40, pickle.dumps(QUESTION.query_id), answers]
        for data in garbage:
            dealer.send(data)
        dealer.send_multipart([b"one", b"two"])
        dealer.send(wire.encode_admin(QUESTION))
        assert dealer.poll(5000)
        assert wire.decode_admin(dealer.recv()).what == "AskStatus"
        assert server.dropped()["admin_bad_frames"] == len(garbage) + 1
    finally:
        dealer.close(linger=0)
        context.term()


def test_a_taken_or_malformed_address_is_named(server):
    with pytest.raises(HubError, match="in use"):
        AdminServer(server._address, 0, answer)
    with pytest.raises(HubError, match="not a hub address"):
        AdminServer("udp://x", 0, answer)


@pytest.fixture
def keys(tmp_path):
    """Of a fleet's machine with ranks only, of its operator, and of another fleet."""
    for name in ("fleet", "foreign"):
        make_keys(tmp_path / name)
    everybody = load_keys(tmp_path / "fleet")
    (tmp_path / "fleet" / "admin.key_secret").unlink()
    return {"ranks": load_keys(tmp_path / "fleet"), "admin": everybody, "foreign": load_keys(tmp_path / "foreign")}


@pytest.fixture(params=["ipc", "tcp"])
def where(request, tmp_path):
    if request.param == "ipc":
        return f"ipc://{tmp_path}/guarded"
    return f"tcp://127.0.0.1:{free_ports()}"


def test_with_keys_a_rank_may_look_and_an_admin_may_order(keys, where):
    with contextlib.closing(AdminServer(where, 2, answer, keys=keys["ranks"])):
        (looked,) = ask_all([(where, QUESTION)], 5.0, keys["ranks"])
        assert isinstance(looked, admin.Ordered)
        for order in GUARDED:
            (refused,) = ask_all([(where, order)], 5.0, keys["ranks"])
            assert "needs a key of" in refused.reason
            (done,) = ask_all([(where, order)], 5.0, keys["admin"])
            assert isinstance(done, admin.Ordered)


@pytest.mark.parametrize(
    ("server_has", "asker_has", "asker_hears", "server_says"),
    [
        ("ranks", None, ("wants a key, and we have none", "closes the connection during the handshake"), "key"),
        ("ranks", "foreign", ("closes the connection during the handshake",), "takes this socket for another one"),
        (None, "admin", ("takes no keys, and we have some", "closes the connection during the handshake"), "keys"),
    ],
    ids=["no key", "another fleet's key", "a key where none is taken"],
)
def test_who_is_not_let_in_hears_why_and_is_counted_and_logged(
    keys, where, caplog, server_has, asker_has, asker_hears, server_says
):
    """Which end names the reason depends on who is first to see it; the asker hears at least that it was the door."""
    ours = keys.get(asker_has)
    server = AdminServer(where, 2, answer, keys=keys.get(server_has))
    with contextlib.closing(server):
        (told,) = ask_all([(where, QUESTION)], 3.0, ours)
        assert isinstance(told, NoAnswer)
        assert any(text in told.why for text in asker_hears), told
        assert ("no --keys were given" if ours is None else str(ours.folder)) in told.why
        deadline = time.monotonic() + 60
        while not (server.dropped()["admin_refused_connections"] and "refused a connection" in caplog.text):
            assert time.monotonic() < deadline, server.dropped()
            time.sleep(0.01)
        assert server_says in caplog.text
        assert where in caplog.text


def test_a_key_that_is_not_on_the_list_is_named_at_once(keys, where):
    """The right server, another fleet's key: no try can succeed, so nobody waits for the deadline."""
    stranger = keys["foreign"].pairs["admin"]
    foreign = dataclasses.replace(keys["ranks"], pairs={"admin": stranger, "rank": keys["ranks"].pairs["rank"]})
    with contextlib.closing(AdminServer(where, 2, answer, keys=keys["ranks"])):
        began = time.monotonic()
        (told,) = ask_all([(where, QUESTION)], 20.0, foreign)
        assert time.monotonic() - began < 10
        assert "does not accept our key" in told.why


def test_a_key_folder_from_which_nobody_can_ask_is_named(keys, where):
    neither = dataclasses.replace(keys["ranks"], pairs={})
    with pytest.raises(ConfigError, match=r"neither .*admin\.key_secret nor .*rank\.key_secret is there"):
        ask_all([(where, QUESTION)], 0.1, neither)
