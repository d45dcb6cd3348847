"""What the tests of the hubs share."""

import secrets
import threading
import time

from whalez.rendezvous.effects import Broadcast, SendTo
from whalez.rendezvous.events import PeerGone, Received
from whalez.rendezvous.messages import Bye, Died, Hello, Post, Ready, SlabEntry

TIMEOUT_S = 20.0
CALL_S = 0.25  #: far above what a call costs, far below what blocking would


class PassOn:
    """A sequencer that sends every Ready to rank `seq % world` and every Post to all; the rest as the real one."""

    def __init__(self, world):
        self.world = world
        self.launches = []

    def step(self, event, now_ns, launch):
        match event:
            case Received(message=Ready() as ready):
                self.launches.append(launch)
                return [SendTo(ready.seq % self.world, ready)]
            case Received(message=Post() as post):
                return [Broadcast(post)]
            case Received(message=Bye() as bye):
                return [Broadcast(bye)]
            case PeerGone(rank=rank, how=how):
                return [Broadcast(Died(rank=rank, how=how))]
        return []


def assert_none_blocked(took_s, pauses):
    """Calls that may not wait for a peer, and what each took.

    Blocking, they would do so until it is given up, after 2 s, or again and again; a caller that the machine did not
    run for a moment does neither.
    """
    slow = sorted(each for each in took_s if each > CALL_S)
    assert len(slow) <= 2 and max(took_s) < 1.0 + pauses.late_s, slow


def hello(rank, world, **fingerprint):
    entry = SlabEntry(rank=rank, incarnation=secrets.token_hex(8), host="here", pid=1, ticket=b"")
    return Hello(entry=entry, world=world, fingerprint=fingerprint)


def collect(hub, count, timeout_s=TIMEOUT_S):
    """The next `count` messages; woken by the hub, no polling."""
    news = threading.Event()
    hub.set_waker(news.set)
    got = []
    deadline = time.monotonic() + timeout_s
    while len(got) < count:
        news.clear()
        got += hub.drain()
        if len(got) < count:
            assert news.wait(deadline - time.monotonic()), f"{len(got)} of {count} messages came"
    return got


def wait_until_failed(hub):
    """Until a failure is stored; the inbox is left alone."""
    news = threading.Event()
    hub.set_waker(news.set)
    deadline = time.monotonic() + TIMEOUT_S
    while hub.failure is None:
        news.clear()
        assert hub.failure is not None or news.wait(deadline - time.monotonic()), "no failure came"
    return hub.failure
