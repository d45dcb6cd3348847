"""The sequencer's thread in rank 0's process: the one owner of the ROUTER, through which all ranks speak.

No send here can block. What a rank's pipe does not take waits in that rank's queue; a queue beyond its limit, a pipe
that is gone, a silence or an ended process makes the rank lost, and a lost rank is a lost fleet.
Frames and beats come over two connections per rank, told apart by what first came over them (see `wire.Beat`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from whalez.clock import now_ns
from whalez.errors import HubError, WireError
from whalez.hub import sockets, wire
from whalez.hub.conductor import Conductor, Out
from whalez.hub.connections import listen
from whalez.hub.interface import BEAT_NS, BYE_GRACE_NS, CUT_GRACE_NS, SILENCE_LIMIT_NS, HubLimits
from whalez.hub.keys import Keys
from whalez.hub.liveness import Liveness
from whalez.hub.processes import PeerWatch, Wake
from whalez.hub.sockets import SocketOptions
from whalez.rendezvous.messages import Hello, Message

INPROC = "inproc://hub"
_TICK_NS = 100_000_000
_RETRY_NS = 5_000_000  # a full ROUTER pipe can not be polled for
_CLOSE_NS = 1_000_000_000
_QUIET_MS = 20


@dataclass(slots=True)
class _Peer:
    """One process that said hello."""

    frames_id: bytes  #: the ROUTER's name of the connection its frames come over
    beats_id: bytes | None = None  #: the same for its beats, once there was one
    queue: deque[bytes] = field(default_factory=deque)
    queued_bytes: int = 0
    sent_count: int = 0  #: see wire.Beat
    received_count: int = 0
    heard_ns: int = 0  #: the last frame or beat
    claimed_ns: int | None = None  #: since when it waits for a number that another process has


class RouterThread:
    """Owns: ROUTER, its door and thread, with keys a second thread. Closed by: `close`, which flushes at most 1 s."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        conductor: Conductor,
        own_hello: Hello,
        read_launch: Callable[[], int],
        limits: HubLimits,
        options: SocketOptions,
        keys: Keys | None,
    ) -> None:
        """Listens when this returns; with `keys` only to who has one of `keys.ranks`.

        Raises: HubError for an address that is taken, ConfigError for keys that are not the hub's.
        """
        self._conductor = conductor
        self._own = own_hello.entry
        self._read_launch = read_launch
        self._limits = limits
        self._has_keys = keys is not None
        pair = None if keys is None else keys.pair("hub")
        allow = () if keys is None else keys.ranks
        self._router, self._door = listen(context, address, options, pair, allow)
        self._router.bind(INPROC)  # no keys are asked for within a process
        self._wake = Wake()
        self._watch = PeerWatch()
        self._liveness: Liveness[str] = Liveness()
        self._peers: dict[str, _Peer] = {}
        self._suspects: dict[str, int] = {}  # incarnation whose process ended -> when to believe that no Bye comes
        self._orders: deque[Any] = deque()
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._has_unsent = False
        self._unanswered: set[str] = set()  # who has not answered the last probe
        self._is_closing = False
        self._is_watching = False
        self.bad_frames_total = 0
        self.stale_frames_total = 0
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._door.events, zmq.POLLIN)
        self._poller.register(self._wake.fd, zmq.POLLIN)
        conductor.received(
            self._own.incarnation, own_hello, now_ns(), 0
        )  # first of all, so that differences are told against rank 0
        self._thread = threading.Thread(target=self._run, name="sequencer", daemon=True)
        self._thread.start()

    def order(self, event: Any) -> None:
        """Hand the sequencer an event of this process, e.g. StopWanted. Any thread; never blocks."""
        self._orders.append(event)
        self._wake.set()

    @property
    def refused_connections_total(self) -> int:
        return self._door.refused_total

    @property
    def ended_connections_total(self) -> int:
        return self._door.ended_total

    def refusals(self) -> list[str]:
        """Who was refused in the handshake and why, with how often."""
        return [f"{what} ({count} times)" for what, count in self._door.refusals.copy().items()]

    def missing(self) -> tuple[int, ...]:
        return self._conductor.missing()

    def claimed_twice(self) -> dict[int, str]:
        """Ranks whose number a second process asked for while the first lived, and who that was."""
        return self._conductor.claimed_twice.copy()

    def close(self) -> bool:
        """True when the thread has ended and the socket is closed."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(4.0)
        if self._thread.is_alive():
            return False
        self._wake.close()
        return True

    # ---- the thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            try:
                self._serve()
            except Exception as error:
                # All ranks must hear it, so serve on: a conductor that has failed only listens.
                self._perform(self._conductor.fail(HubError(f"{type(error).__name__}: {error}")))
                self._serve()
            self._finish()
        finally:
            self._watch.close()
            self._door.close()
            self._router.close()  # its linger applies when the context is terminated

    def _serve(self) -> None:
        beat_due = tick_due = now_ns()
        while not self._is_closing:
            now = now_ns()
            wait_until = min(beat_due, tick_due, *self._suspects.values(), now + _TICK_NS)
            if self._has_unsent:
                wait_until = min(wait_until, now + _RETRY_NS)
            ready = dict(self._poller.poll(max(0, -(-(wait_until - now) // 1_000_000))))
            if self._wake.fd in ready:
                self._wake.clear()
                while self._orders:
                    self._perform(self._conductor.order(self._orders.popleft(), now_ns(), self._read_launch()))
            if self._door.events in ready:
                self._door.read()
            if self._router in ready:
                self._read()
            for fd in ready:
                if isinstance(fd, int) and fd != self._wake.fd:
                    self._ended(fd)
            now = now_ns()
            self._look_for_the_lost(now)
            if now >= tick_due:
                tick_due = now + _TICK_NS
                self._perform(self._conductor.tick(now, self._read_launch()))
            if now >= beat_due:
                beat_due = now + BEAT_NS
                self._beat()
            if self._has_unsent:
                self._flush()

    def _finish(self) -> None:
        """Pass on what is on its way, and stay until every rank has read it or is gone; at most 1 s."""
        deadline = now_ns() + _CLOSE_NS
        while self._router.poll(_QUIET_MS) and now_ns() < deadline:
            self._read()
        if not self._conductor.is_complete:
            return
        probe = wire.encode(wire.Probe(rank=0), self._own.incarnation)
        self._unanswered = {each for each in self._peers if each != self._own.incarnation}
        for incarnation in self._unanswered:
            self._peers[incarnation].queue.append(probe)
            self._peers[incarnation].queued_bytes += len(probe)
        self._flush()
        while self._unanswered and now_ns() < deadline:
            if self._router.poll(_RETRY_NS // 1_000_000):
                self._read()
            self._flush()

    def _read(self) -> None:
        for _ in range(sockets.FRAMES_PER_TURN):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 2:
                self.bad_frames_total += 1
                continue
            connection, data = parts
            try:
                frame = wire.decode(data)
            except WireError:
                self.bad_frames_total += 1
                continue
            self._accept(connection, frame.incarnation, frame.message)

    def _accept(self, connection: bytes, incarnation: str, message: Message) -> None:
        now = now_ns()
        peer = self._peers.get(incarnation)
        if isinstance(message, wire.Beat) and not message.on_frames:
            if peer is not None and not self._is_foreign(peer.beats_id, connection):
                peer.beats_id = connection
                peer.heard_ns = now
                self._heard(incarnation, now)
            return
        if peer is None:
            if isinstance(message, wire.Beat | wire.Probe | wire.Echo):
                return
            peer = self._peers[incarnation] = _Peer(connection)
        elif peer.frames_id != connection:
            if self._conductor.is_complete and self._is_foreign(peer.frames_id, connection):
                return
            peer.frames_id = connection
            if self._conductor.is_complete:
                # Frames may be lost between the old connection and the new one, and nothing is repaired half-way.
                self._lost(incarnation, "its connection to the hub was cut")
                return
        peer.heard_ns = now
        self._heard(incarnation, now)
        peer.received_count += wire.is_counted(message)
        match message:
            case wire.Beat(count=count):
                if self._conductor.is_complete and count != peer.received_count:
                    got = f"{count} sent, {peer.received_count} arrived"
                    self._lost(incarnation, f"its connection to the hub lost or repeated frames: {got}")
                return
            case wire.Probe():
                self._perform([Out(incarnation, wire.Echo(rank=0))])
                return
            case wire.Echo():
                self._unanswered.discard(incarnation)
                return
        if isinstance(message, Hello) and not self._conductor.is_complete and not self._is_settled(peer, message, now):
            return  # it says hello again
        self._perform(self._conductor.received(incarnation, message, now, self._read_launch()))
        if self._conductor.rank_of(incarnation) is None:
            self._peers.pop(incarnation, None)  # a stranger, or refused: it has got its answer
            self.stale_frames_total += 1
        elif isinstance(message, Hello):
            self._watch_process(incarnation, message)
        if self._conductor.is_complete and not self._is_watching:
            self._is_watching = True
            for each in self._conductor.accepted.values():
                self._heard(each, now)

    def _is_settled(self, peer: _Peer, hello: Hello, now: int) -> bool:
        """Whether it is known if the process that has this hello's number lives. One that is gone loses it here.

        Of a process of this machine the pidfd tells at once; another one's next beat, or its silence, has to.
        """
        holder = self._conductor.accepted.get(hello.entry.rank)
        if holder is None or holder in (hello.entry.incarnation, self._own.incarnation):
            return True
        has_ended = self._watch.has_ended(holder)
        if has_ended is None:
            heard_ns = self._peers[holder].heard_ns if holder in self._peers else 0
            if peer.claimed_ns is None:
                peer.claimed_ns = now
            if heard_ns <= peer.claimed_ns and now - peer.claimed_ns <= SILENCE_LIMIT_NS:
                return False
            has_ended = heard_ns <= peer.claimed_ns
        if has_ended:
            self._lost(holder, "its process has ended")
        return True

    def _is_foreign(self, own: bytes | None, connection: bytes) -> bool:
        """Whether a frame came over another connection than its sender's `own`, which is still open.

        A rank has one connection for frames and one for beats: somebody else repeats what he has seen. Counted.
        With keys nobody can, and who came anew has lost the old connection, whether or not that is known here.
        """
        if own is None or own == connection or self._has_keys:
            return False
        self._router.get(zmq.EVENTS)  # takes note of connections that have closed, which a send may put off
        try:
            self._router.send_multipart((own, wire.encode(wire.Beat(rank=0), self._own.incarnation)), zmq.NOBLOCK)
        except zmq.Again:
            pass  # full, so open
        except zmq.ZMQError:
            return False
        self.stale_frames_total += 1
        return True

    def _heard(self, incarnation: str, now: int) -> None:
        if self._is_watching and incarnation != self._own.incarnation:
            rank = self._conductor.rank_of(incarnation)
            if rank is not None and rank not in self._conductor.left:
                self._liveness.heard(incarnation, now)

    def _watch_process(self, incarnation: str, hello: Hello) -> None:
        if hello.entry.host != self._own.host or hello.entry.pid == self._own.pid:
            return
        try:
            fd = self._watch.add(incarnation, hello.entry.pid)
        except ProcessLookupError:
            self._lost(incarnation, f"process {hello.entry.pid} is gone")
            return
        if fd is not None:
            self._poller.register(fd, zmq.POLLIN)

    def _ended(self, fd: int) -> None:
        self._poller.unregister(fd)
        incarnation = self._watch.take(fd)
        if incarnation is not None:
            grace_ns = BYE_GRACE_NS if self._conductor.is_complete else 0
            self._suspects[incarnation] = now_ns() + grace_ns

    def _look_for_the_lost(self, now: int) -> None:
        for incarnation in [each for each, due in self._suspects.items() if now >= due]:
            del self._suspects[incarnation]
            self._lost(incarnation, "its process has ended or closed its connection")
        for incarnation, silence_ns in self._liveness.silent(now, self._watch.is_starved):
            self._lost(incarnation, f"silent for {silence_ns / 1e9:.1f} s")

    def _lost(self, incarnation: str, how: str) -> None:
        self._liveness.forget(incarnation)
        outs = self._conductor.gone(incarnation, how, now_ns(), self._read_launch())
        if not self._conductor.is_complete or not outs:
            self._peers.pop(incarnation, None)
        self._perform(outs)

    def _beat(self) -> None:
        data = wire.encode(wire.Beat(rank=0), self._own.incarnation)
        for incarnation, peer in self._peers.items():
            if peer.beats_id is not None:
                try:
                    self._router.send_multipart((peer.beats_id, data), zmq.NOBLOCK)
                except zmq.ZMQError:
                    peer.beats_id = None  # it will beat again if it lives
            if peer.queue:
                continue
            counted = wire.Beat(rank=0, on_frames=True, count=peer.sent_count)
            try:  # a ROUTER hears of a closed connection only when it sends
                self._router.send_multipart((peer.frames_id, wire.encode(counted, self._own.incarnation)), zmq.NOBLOCK)
            except zmq.Again:
                pass
            except zmq.ZMQError:
                self._suspects.setdefault(incarnation, now_ns() + CUT_GRACE_NS)

    # ---- sending -----------------------------------------------------------------------------------------------
    def _perform(self, outs: list[Out]) -> None:
        for out in outs:
            peer = self._peers.get(out.incarnation)
            if peer is None:
                continue
            data = self._bytes_of(out.message)
            peer.queue.append(data)
            peer.queued_bytes += len(data)
            peer.sent_count += wire.is_counted(out.message)
        self._encoded = (None, b"")
        if outs:
            self._flush()
        for out in outs:
            if out.is_last:
                self._peers.pop(out.incarnation, None)

    def _bytes_of(self, message: Message) -> bytes:
        """A broadcast is encoded once; a prompt is megabytes."""
        if self._encoded[0] is not message:
            self._encoded = (message, wire.encode(message, self._own.incarnation))
        return self._encoded[1]

    def _flush(self) -> None:
        self._has_unsent = False
        lost: list[tuple[str, str]] = []  # found in the loop, performed after it: performing changes `_peers`
        # The own rank last: its threads wait for this interpreter's lock and would take it from the frames of others.
        for incarnation, peer in sorted(self._peers.items(), key=lambda each: each[0] == self._own.incarnation):
            while peer.queue:
                try:
                    self._router.send_multipart((peer.frames_id, peer.queue[0]), zmq.NOBLOCK)
                except zmq.Again:
                    self._has_unsent = True
                    if len(peer.queue) > self._limits.peer_count or peer.queued_bytes > self._limits.peer_bytes:
                        lost.append((incarnation, f"does not read: {len(peer.queue)} frames wait for it"))
                        peer.queue.clear()
                        peer.queued_bytes = 0
                    break
                except zmq.ZMQError:
                    peer.queue.clear()
                    peer.queued_bytes = 0
                    self._unanswered.discard(incarnation)
                    # Nobody is there to hear it. Whether that is a death its last words may tell, unread as yet, or its
                    # next connection.
                    self._suspects.setdefault(incarnation, now_ns() + CUT_GRACE_NS)
                    break
                peer.queued_bytes -= len(peer.queue.popleft())
        for incarnation, how in lost:
            if self._conductor.is_complete:
                self._lost(incarnation, how)
