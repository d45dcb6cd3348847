"""The one place that makes ZeroMQ sockets: every limit and time-out a socket of whalez has is set here.

ZeroMQ facts the choices rest on:
- A ROUTER drops what it cannot route unless ROUTER_MANDATORY is set; then an unknown peer is EHOSTUNREACH and a full
  pipe EAGAIN. All sends here are NOBLOCK, SNDTIMEO = 0 only keeps a forgotten flag from hanging a thread
  (a mandatory send with SNDTIMEO = -1 blocks for ever when the full peer vanishes).
- With IMMEDIATE, frames that came and were not read yet go when their connection ends. Without it, frames are taken
  for a peer that is not there.
- Two connections with one routing id make one of them mute, so nobody sets a routing id. The rank is in the frames.
- A connect without CONNECT_TIMEOUT can sit in SYN_SENT for two minutes.
- ZMTP heartbeats are answered by the I/O thread, so they say nothing about the thread that reads, and a connection
  they cut has lost frames for good. They are therefore lax and only bury half-open connections; whether a peer lives
  is the business of the beats in `liveness.py`, which know when the watcher itself was asleep.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from whalez.errors import HubError
from whalez.hub import wire
from whalez.hub.address import ipc_path, is_ipv6

CONTEXT_IO_THREADS = 1
FRAMES_PER_TURN = 64  #: that a thread reads from a socket before it looks at its others: a flood must not starve beats


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """All options of one socket. Times in ms because ZeroMQ counts so; listed by `status`."""

    hwm_count: int = 256  #: frames per peer and direction, on both sides of a pipe
    message_bytes_max: int = wire.FRAME_BYTES_MAX  #: a larger frame closes the sender's connection
    linger_ms: int = 1000
    send_timeout_ms: int = 0
    connect_timeout_ms: int = 2000
    reconnect_ms: int = 50
    reconnect_ms_max: int = 1000
    handshake_ms: int = 5000  #: a newcomer that has not said by then who it is, is cut
    heartbeat_ms: int = 500
    heartbeat_timeout_ms: int = 10_000


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context of its own per hub or link end, so that closing one never waits for another's traffic."""
    context = zmq.Context(io_threads=CONTEXT_IO_THREADS)
    context.set(zmq.MAX_SOCKETS, 1023)
    return context


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, options: SocketOptions, *, ipv6: bool = False
) -> zmq.Socket[bytes]:
    """A socket with every option set. Owns: the socket. Closed by: the caller, in the thread that uses it."""
    made = context.socket(kind)
    made.set(zmq.LINGER, options.linger_ms)
    made.set(zmq.SNDTIMEO, options.send_timeout_ms)
    made.set(zmq.SNDHWM, options.hwm_count)
    made.set(zmq.RCVHWM, options.hwm_count)
    made.set(zmq.MAXMSGSIZE, options.message_bytes_max)
    made.set(zmq.CONNECT_TIMEOUT, options.connect_timeout_ms)
    made.set(zmq.RECONNECT_IVL, options.reconnect_ms)
    made.set(zmq.RECONNECT_IVL_MAX, options.reconnect_ms_max)
    made.set(zmq.HANDSHAKE_IVL, options.handshake_ms)
    made.set(zmq.HEARTBEAT_IVL, options.heartbeat_ms)
    made.set(zmq.HEARTBEAT_TIMEOUT, options.heartbeat_timeout_ms)
    made.set(zmq.HEARTBEAT_TTL, options.heartbeat_timeout_ms)
    if kind == zmq.ROUTER:
        made.set(zmq.ROUTER_MANDATORY, 1)
    if ipv6:
        made.set(zmq.IPV6, 1)
    return made


def _as_it_is(made: zmq.Socket[bytes]) -> None:
    """No keys and no monitor."""


def bind(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    options: SocketOptions,
    prepare: Callable[[zmq.Socket[bytes]], None] = _as_it_is,
) -> zmq.Socket[bytes]:
    """A ROUTER that listens at `address`; `prepare` is called with it before it does.

    Raises: HubError naming the address if it is taken or not ours.
    """
    path = ipc_path(address)
    if path is not None:
        _refuse_living_listener(address, path)
    router = make_socket(context, zmq.ROUTER, options, ipv6=is_ipv6(address))
    prepare(router)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close(linger=0)
        if error.errno == errno.EADDRINUSE:
            raise HubError(f"{address}: in use by another process; stop it or choose another port") from None
        raise HubError(f"{address}: cannot listen there: {error.strerror}") from None
    return router


def connect(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    options: SocketOptions,
    prepare: Callable[[zmq.Socket[bytes]], None] = _as_it_is,
    *,
    keeps_unread: bool = False,
) -> zmq.Socket[bytes]:
    """A DEALER that keeps trying to reach `address` in the background; `prepare` is called with it before.

    It takes nothing to send before it is connected (EAGAIN), so that what could not be delivered is never queued in
    the dark. With `keeps_unread` it is the other way round, and what a connection brought can be read after its end.
    Raises: HubError for a malformed address.
    """
    dealer = make_socket(context, zmq.DEALER, options, ipv6=is_ipv6(address))
    dealer.set(zmq.IMMEDIATE, int(not keeps_unread))
    prepare(dealer)
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close(linger=0)
        raise HubError(f"{address}: cannot connect: {error.strerror}") from None
    return dealer


def _refuse_living_listener(address: str, path: str) -> None:
    """libzmq unlinks whatever lies at an ipc path before it binds, so it would steal a living listener's name."""
    if not os.path.exists(path):
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.setblocking(False)
    try:
        probe.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return  # left behind by a killed process
    except BlockingIOError:
        pass  # its backlog is full, so it lives
    except OSError as error:
        raise HubError(f"{address}: cannot listen there: {error.strerror}") from None
    finally:
        probe.close()
    raise HubError(f"{address}: in use by another process; stop it or choose another path")
