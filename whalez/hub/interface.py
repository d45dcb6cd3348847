"""What a rank's loop knows of the control plane: a box to post into and a box to empty.

Rule 1: the loop never waits for the hub. Only `start`, `gather` and `mapped` block, and only before the first launch.
Rule 2: a failure is stored once and reported by every later `drain` and `send`; no call may miss it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from whalez.rendezvous.messages import Hello, Message, SlabEntry

#: A process whose hub thread is silent for so long is dead. Counted only while the watcher itself was running.
SILENCE_LIMIT_NS = 2_000_000_000
#: The same for a process of this machine that is neither gone nor stopped: it is starved of CPU, not dead, so it
#: gets as long as the promise "named within 5 s" allows.
STARVED_LIMIT_NS = 4_000_000_000
BEAT_NS = 500_000_000
#: A watcher that was itself away for so long knows nothing about the silence of others and starts their clocks anew.
OVERSLEPT_NS = 1_000_000_000


#: A vanished process may have said Bye a moment before, by way of rank 0; the word may arrive after the news.
BYE_GRACE_NS = 200_000_000
#: Who is no longer connected has this long to come back and be told that its connection was cut, which is not a death.
CUT_GRACE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HubLimits:
    """How much may wait where; far above what the protocol can need, so a box that is full is a failure, named as such.

    To stop reading instead would only move the wait into sockets, whose heartbeats then cut the connection.
    """

    inbox_count: int = 1024
    inbox_bytes: int = 1 << 28
    outbox_count: int = 4096  #: this rank to the sequencer
    outbox_bytes: int = 1 << 28
    peer_count: int = 4096  #: the sequencer to one rank
    peer_bytes: int = 1 << 28


@runtime_checkable
class Hub(Protocol):
    """One rank's end of the control plane. Used by one thread (the loop), except where said otherwise."""

    def start(self, hello: Hello, timeout_s: float) -> tuple[SlabEntry, ...]:
        """Say hello, wait until every rank has; return the slab table in rank order.

        Collective: yes, all ranks of the world. Blocks: up to `timeout_s`, retrying the connection all that time.

        Raises:
            FleetRefused: the fleet does not want this process; `field` names what differs or is taken.
            HubError: bad or occupied address, no hub there, or the table is not complete in time.
            PeerDied: a rank was lost after it had said hello.
        """
        ...

    def gather(self, data: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Hand in this rank's bytes, at most 64 KiB; return those of all ranks in rank order.

        For what must be decided together before the slabs are mapped. Only between `start` and `mapped`, any number
        of times. Collective and blocking like `start`; raises like it, and WireError for too many bytes.
        """
        ...

    def mapped(self, timeout_s: float) -> None:
        """Say that this rank has mapped every slab, wait until all have. Collective and blocking like `start`."""
        ...

    def send(self, message: Message) -> None:
        """Queue a message to the sequencer. Never blocks, never touches a socket.

        Raises the stored failure, or HubError when so much is queued that the sequencer must be stalled: what was
        accepted is then still in order, and the failure is stored. Nothing is dropped silently.
        """
        ...

    def drain(self) -> list[Message]:
        """Everything that arrived since the last call, in order of arrival. Never blocks.

        Once a failure is stored (PeerDied, HubError, ...) what came before it is still handed out, and every later
        call raises it again.
        """
        ...

    @property
    def failure(self) -> Exception | None:
        """The stored failure. Any thread may look, e.g. in a slice of a doorbell wait."""
        ...

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the hub's thread after anything was put into the inbox or a failure was stored.

        It must neither block nor call the hub. It is called once right away if something waits already.
        """
        ...

    def report_launch(self, launch: int) -> None:
        """This rank composes `launch` next. Cheap, call it at every boundary; rank 0's value dates the commits."""
        ...

    def close(self) -> None:
        """Flush what was sent (at most 1 s), end the threads, free address and sockets. Idempotent.

        A thread that waits in `start` or `mapped` gets HubError. Without a Bye before, this rank is dead to the others.
        """
        ...


class SequencerLike(Protocol):
    """What the hub needs of `rendezvous.sequencer.Sequencer`."""

    def step(self, event: Any, now_ns: int, launch: int) -> Sequence[Any]:
        """Take one event (Received, Tick, PeerGone, StopWanted); return SendTo and Broadcast effects in order."""
        ...
