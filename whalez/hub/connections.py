"""What ZeroMQ tells of the connections of one socket: who came, who was refused in the handshake, and why.

ZeroMQ drops whoever does not shake hands as the socket wants it and tries again for ever at the other end, both without
a word; only the socket's monitor knows. Which of the two ends names the reason depends on who is first to see it: the
other one finds the connection closed.
"""

from __future__ import annotations

import itertools
import logging
import socket
import struct
from collections.abc import Collection

import zmq

from whalez.errors import HubError
from whalez.hub import sockets
from whalez.hub.keys import KeyPair, secure_server
from whalez.hub.sockets import SocketOptions

_log = logging.getLogger(__name__)
_numbers = itertools.count()
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_COMING_AND_GOING = _FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_TOLD_MAX = 64  #: different refusals that are logged; a flood of strangers must not fill a disk
_EVENTS_PER_TURN = 256


class Monitor:
    """Events of one socket. Used by the socket's thread; poll `events`. Owns: a PAIR. Closed by: `close`, before the
    socket."""

    def __init__(self, watched: zmq.Socket[bytes], options: SocketOptions, kinds: int = _COMING_AND_GOING) -> None:
        address = f"inproc://monitor-{next(_numbers)}"
        watched.monitor(address, kinds)
        self._watched = watched
        self.events = sockets.make_socket(watched.context, zmq.PAIR, options)
        self.events.set(zmq.RCVHWM, 0)  # a full pipe would block the I/O thread, and with it every connection
        self.events.connect(address)

    def read(self) -> list[tuple[int, int]]:
        """(event, value) of what happened since the last call, the oldest first; not all of a flood at once."""
        told = []
        for _ in range(_EVENTS_PER_TURN):
            try:
                parts = self.events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            told.append(struct.unpack("=Hi", parts[0]))
        return told

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.monitor(None, 0)
        self.events.close(linger=0)


class Door:
    """Who comes in through a socket that is about to listen, and who does not and why.

    Used by the socket's thread; the totals may be read by any. Owns: a Monitor, with keys a thread. Closed by: `close`,
    before the socket.
    """

    def __init__(
        self,
        watched: zmq.Socket[bytes],
        address: str,
        options: SocketOptions,
        pair: KeyPair | None = None,
        allow: Collection[bytes] = (),
    ) -> None:
        """With `pair` only clients with a key in `allow` come in, without it everybody."""
        self._address = address
        self._has_keys = pair is not None
        self._gate = None if pair is None else secure_server(watched, pair, allow)
        self._monitor = Monitor(watched, options)
        self.events = self._monitor.events  #: poll this, then `read`
        self._peers: dict[int, str] = {}  # descriptor of a connection -> who is at its other end
        self._failed = ""  # why the connection that ends next was refused
        self._accepted = 0
        self._let_in = 0
        self.ended_total = 0  #: connections that ended, refused ones included
        self.refusals: dict[str, int] = {}  #: "HOST: why" -> how often; the first 64 different ones

    @property
    def refused_total(self) -> int:
        """Connections that never shook hands with ZeroMQ: no key, a wrong one, another protocol. (One that is shaking
        hands right now counts until it has.)"""
        return max(0, self._accepted - self._let_in)

    def read(self) -> None:
        for event, value in self._monitor.read():
            if event == zmq.EVENT_ACCEPTED:
                self._accepted += 1
                self._peers[value] = _peer_of(value)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._let_in += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self.ended_total += 1
                peer = self._peers.pop(value, "an unknown peer")
                if self._failed:
                    self._refused(peer, self._failed)
                self._failed = ""
            else:
                if self._failed:
                    self._refused("an unknown peer", self._failed)
                # Its DISCONNECTED is the next event, or soon comes: a refused key is told before the end.
                self._failed = _why_refused(event, value, self._has_keys)

    def _refused(self, peer: str, why: str) -> None:
        host = peer.rpartition(":")[0] or peer
        what = f"{host}: {why}"
        if what not in self.refusals:
            if len(self.refusals) >= _TOLD_MAX:
                return
            _log.warning("%s: refused a connection from %s: %s", self._address, peer, why)
        self.refusals[what] = self.refusals.get(what, 0) + 1

    def close(self) -> None:
        self._monitor.close()
        if self._gate is not None:
            self._gate.stop()


def listen(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    options: SocketOptions,
    pair: KeyPair | None = None,
    allow: Collection[bytes] = (),
) -> tuple[zmq.Socket[bytes], Door]:
    """A ROUTER that listens at `address`, and its door; see `Door` for `pair` and `allow`, which allow one such ROUTER
    per context.

    Raises: HubError naming the address if it is taken or not ours; nothing is left then.
    """
    doors: list[Door] = []
    try:
        router = sockets.bind(
            context, address, options, lambda made: doors.append(Door(made, address, options, pair, allow))
        )
    except HubError:
        for door in doors:
            door.close()
        raise
    return router, doors[0]


class Knock:
    """Why a connecting socket is not let in. Used by its thread. Owns: a Monitor. Closed by: `close`, before the
    socket."""

    def __init__(self, watched: zmq.Socket[bytes], options: SocketOptions, *, has_keys: bool) -> None:
        self._has_keys = has_keys
        self._monitor = Monitor(watched, options)
        self.events = self._monitor.events  #: poll this, then `read`
        #: handshakes in which the other end closed without a reason, since the last that went well
        self.closed_total = 0
        self.let_in_total = 0  #: handshakes that went well; more than one: the connection was made anew

    def read(self) -> str | None:
        """Why no further try can succeed, None while one may."""
        for event, value in self._monitor.read():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.closed_total = 0
                self.let_in_total += 1
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return "does not accept our key"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return "takes no keys, and we have some" if self._has_keys else "wants a key, and we have none"
            elif event & _FAILED:
                self.closed_total += 1
        return None

    def close(self) -> None:
        self._monitor.close()


def _why_refused(event: int, value: int, has_keys: bool) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "its key is not in the allow-list"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "it shows no key" if has_keys else "it wants keys, and this end has none"
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "it takes this socket for another one (hub.key or, at an admin socket, the rank's key differs)"
        return f"it does not speak the protocol ({value:#x})"
    perhaps = "it shows no key" if has_keys else "it wants keys, and this end has none"
    return f"it left during the handshake or did not finish in time; perhaps {perhaps}"


def _peer_of(descriptor: int) -> str:
    """HOST:PORT at the other end of a connection of ZeroMQ's, which may have closed it by now."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:
        return "a peer that is gone"
    try:
        name = borrowed.getpeername()
    except OSError:
        return "a peer that is gone"
    finally:
        borrowed.detach()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a process of this machine"
