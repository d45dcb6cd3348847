import contextlib
import socket
import time

import pytest

from whalez.errors import HubError
from whalez.hub import address
from whalez.hub.address import bind_address, check_connect


@pytest.fixture
def names(monkeypatch):
    """A resolver that knows a few names and takes its time for a third."""

    def look_up(host, port, **kwargs):
        known = {
            "node0": ["127.0.1.1"],
            "far": ["10.0.0.9"],
            "localhost": ["127.0.0.1"],
            "both": ["127.0.1.1", "fd00::5", "10.0.0.8"],
            "six": ["fd00::6"],
        }
        if host == "slow":
            time.sleep(1.2)
        if host not in known:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in known[host]]

    monkeypatch.setattr(address.socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    ("text", "peers_elsewhere", "reason"),
    [
        ("tcp://node0:5000", True, r"'node0' is a name.*127\.0\.1\.1.*no other machine can reach"),
        ("tcp://nowhere:5000", True, "does not resolve"),
        ("tcp://*:5000", False, "is a name"),
        ("tcp://127.0.0.1:5000", True, "is loopback"),
        ("tcp://127.0.1.1:5000", True, "is loopback"),
        ("tcp://[::1]:5000", True, "is loopback"),
        ("tcp://[::ffff:127.0.0.1]:5000", True, "is loopback"),
        ("ipc:///tmp/x.sock", True, "only this machine"),
        ("ipc:///no/such/folder/x.sock", False, "folder /no/such/folder does not exist"),
        ("ipc:///tmp/" + "x" * 110, False, "107"),
        ("ipc://", False, "no path"),
        ("ipc://@whalez", False, "no file whose mode keeps others out"),
        ("tcp://10.0.0.1", False, "no host and port"),
        ("tcp://10.0.0.1:0", False, "no host and port"),
        ("tcp://10.0.0.1:99999", False, "no host and port"),
        ("tcp://::1:5000", False, "brackets"),
        ("10.0.0.1:5000", False, "not a hub address"),
        ("udp://10.0.0.1:5000", False, "not a hub address"),
    ],
)
def test_bind_is_refused_with_the_reason(names, text, peers_elsewhere, reason):
    with pytest.raises(HubError, match=reason):
        bind_address(text, peers_elsewhere=peers_elsewhere, may_be_reached=True)


@pytest.mark.parametrize(
    ("text", "peers_elsewhere", "bound"),
    [
        ("tcp://far:5000", True, "tcp://10.0.0.9:5000"),
        ("tcp://both:5000", True, "tcp://10.0.0.8:5000"),  # not loopback, and IPv4, which members look for
        ("tcp://six:5000", True, "tcp://[fd00::6]:5000"),
        ("tcp://node0:5000", False, "tcp://127.0.1.1:5000"),
        ("tcp://localhost:5000", False, "tcp://127.0.0.1:5000"),
    ],
)
def test_a_name_stands_for_an_ip_that_the_members_reach(names, text, peers_elsewhere, bound):
    assert bind_address(text, peers_elsewhere=peers_elsewhere, may_be_reached=True) == bound
    with pytest.raises(HubError, match="--insecure") if peers_elsewhere else contextlib.nullcontext():
        bind_address(text, peers_elsewhere=peers_elsewhere, may_be_reached=False)


@pytest.mark.parametrize(
    ("text", "peers_elsewhere"),
    [
        ("tcp://127.0.0.1:5000", False),
        ("tcp://10.0.0.1:5000", True),
        ("tcp://0.0.0.0:5000", True),
        ("tcp://[fd00::1]:5000", True),
        ("ipc:///tmp/x.sock", False),
    ],
)
def test_bind_is_allowed(names, text, peers_elsewhere):
    assert bind_address(text, peers_elsewhere=peers_elsewhere, may_be_reached=True) == text


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("tcp://10.0.0.1:5000", True),
        ("tcp://0.0.0.0:5000", True),
        ("tcp://[::]:5000", True),
        ("tcp://[fd00::1]:5000", True),
        ("tcp://[::ffff:10.0.0.1]:5000", True),
        ("tcp://127.0.0.1:5000", False),
        ("tcp://127.9.9.9:5000", False),
        ("tcp://[::1]:5000", False),
        ("tcp://[::ffff:127.0.0.1]:5000", False),
        ("ipc:///tmp/x.sock", False),
    ],
)
def test_where_other_machines_can_reach_keys_are_needed(names, text, is_refused):
    if not is_refused:
        bind_address(text, peers_elsewhere=False, may_be_reached=False)
        check_connect(text, peers_elsewhere=False, may_be_reached=False)
        return
    with pytest.raises(HubError, match=r"--keys DIR.*--insecure"):
        bind_address(text, peers_elsewhere=False, may_be_reached=False)
    if "0.0.0.0" not in text and "[::]" not in text:
        with pytest.raises(HubError, match=r"--keys DIR.*--insecure"):
            check_connect(text, peers_elsewhere=False, may_be_reached=False)


@pytest.mark.parametrize(("host", "is_refused"), [("far", True), ("nowhere", True), ("localhost", False)])
def test_a_name_that_leads_over_the_network_needs_keys_too(names, host, is_refused):
    with pytest.raises(HubError, match="--insecure") if is_refused else contextlib.nullcontext():
        check_connect(f"tcp://{host}:5000", peers_elsewhere=False, may_be_reached=False)


def test_connect(names):
    check_connect("tcp://far:5000", peers_elsewhere=True, may_be_reached=True)
    check_connect("tcp://nowhere:5000", peers_elsewhere=True, may_be_reached=True)  # its name may yet appear
    check_connect("tcp://localhost:5000", peers_elsewhere=False, may_be_reached=True)
    with pytest.raises(HubError, match=r"node0 \(it resolves to 127\.0\.1\.1\) is loopback"):
        check_connect("tcp://node0:5000", peers_elsewhere=True, may_be_reached=True)
    with pytest.raises(HubError, match="where to listen"):
        check_connect("tcp://0.0.0.0:5000", peers_elsewhere=False, may_be_reached=True)


def test_a_dead_name_server_costs_less_than_a_second(names):
    begin = time.monotonic()
    with pytest.raises(HubError, match="'slow' is a name"):
        bind_address("tcp://slow:5000", peers_elsewhere=True, may_be_reached=True)
    assert time.monotonic() - begin < 1.0


def test_host_identity_is_stable():
    assert address.host_identity() == address.host_identity()
    assert socket.gethostname() in address.host_identity()
