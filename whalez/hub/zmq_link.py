"""The request link: how a client (front process, script) reaches the loop of one rank and hears its tokens.

Both ends are a thread with one socket, an outbox and an eventfd, so the loop and an event loop touch no socket.
Status is answered by the server's thread, whatever the loop does; a client therefore knows a rank as gone when its end
of the link is closed or answers no status.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec
import zmq

from whalez.clock import now_ns
from whalez.errors import RequestError, Unavailable, WireError
from whalez.hub import sockets, wire
from whalez.hub.connections import Monitor, listen
from whalez.hub.processes import Wake
from whalez.hub.requests import CancelRequest, Done, Failed, LinkMessage, Response, Status, StatusQuery, Submit
from whalez.hub.sockets import SocketOptions

_log = logging.getLogger(__name__)

_RETRY_NS = 5_000_000  # a full ROUTER pipe, or a DEALER that is not connected, can not be polled for
_CLOSE_NS = 1_000_000_000
_BEGUN = zmq.EVENT_HANDSHAKE_SUCCEEDED
_ENDED = zmq.EVENT_CONNECT_RETRIED  # behind the last frame of a connection, unlike DISCONNECTED; also of vain tries
_PING_NS = 1_000_000_000
_IDLE_NS = 500_000_000
#: Responses that may wait for one client: a client that lets so many pile up does not read.
CLIENT_QUEUE_MAX = 65_536


class LinkServer:
    """The loop's end. Owns: a thread and the socket at `address`. Closed by: `close`, which blocks at most 4 s."""

    def __init__(
        self,
        address: str,
        on_request: Callable[[bytes, Submit | CancelRequest], None],
        status_provider: Callable[[], Status],
        *,
        options: SocketOptions | None = None,
        client_queue_max: int = CLIENT_QUEUE_MAX,
    ) -> None:
        """Listens when this returns.

        Args:
            on_request: called in the link's thread with (client, request); must not block. A client that vanished
                yields a CancelRequest for each of its open requests. Unavailable is answered as
                such, whatever else it raises as Failed("internal").
            status_provider: called in the link's thread, also while the loop is stuck; must not block. Its
                query_id is overwritten with the one asked for.

        Raises: HubError naming the address if it is taken or impossible.
        """
        self._address = address
        self._on_request = on_request
        self._status_provider = status_provider
        self._client_queue_max = client_queue_max
        self.options = options or SocketOptions()
        self._context = sockets.make_context()
        try:
            self._router, self._door = listen(self._context, address, self.options)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake = Wake()
        self._lock = threading.Lock()
        self._replies: deque[tuple[bytes, Response]] = deque()
        self._queues: dict[bytes, deque[bytes]] = {}  # what the pipe of a client did not take yet
        self._open: dict[bytes, set[str]] = {}  # request ids of each client that have not ended
        self._is_closing = False
        self._bad_frames = 0
        self._clients_dropped = 0
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def reply(self, client: bytes, response: Response) -> None:
        """Queue a response. Any thread; never blocks.

        A client that does not read is dropped and its requests are cancelled, so that memory stays bounded.
        """
        with self._lock:
            self._replies.append((client, response))
        self._wake.set()

    def dropped(self) -> dict[str, int]:
        """What came to the link and was not let through, by kind.

        link_bad_frames: that were no request of this protocol; link_clients_dropped: who went away, or did not read,
        with requests open.
        """
        return {
            "link_bad_frames": self._bad_frames,
            "link_refused_connections": self._door.refused_total,
            "link_ended_connections": self._door.ended_total,
            "link_clients_dropped": self._clients_dropped,
        }

    def close(self) -> None:
        """Flush what was replied (at most 1 s), end the thread, let the socket linger (at most 1 s). Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake.set()
        self._thread.join(_CLOSE_NS / 1e9 + 2.0)
        if not self._thread.is_alive():
            self._context.destroy()
            self._wake.close()

    # ---- the thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._door.events, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        try:
            while not self._is_closing:
                has_unsent = any(self._queues.values())
                ready = dict(poller.poll(_RETRY_NS // 1_000_000 if has_unsent else None))
                if self._wake.fd in ready:
                    self._wake.clear()
                if self._door.events in ready:
                    self._door.read()
                if self._router in ready:
                    self._read()
                self._take_replies()
                self._flush()
            deadline = now_ns() + _CLOSE_NS
            self._take_replies()
            self._flush()
            while any(self._queues.values()) and now_ns() < deadline:
                poller.poll(_RETRY_NS // 1_000_000)
                self._flush()
        except Exception:
            _log.exception("the request link at %s ended", self._address)  # clients see it fall silent
        finally:
            self._door.close()
            self._router.close()

    def _read(self) -> None:
        for _ in range(sockets.FRAMES_PER_TURN):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(parts) != 2:
                    raise WireError(f"{len(parts)} parts")
                request = wire.decode_link(parts[1])
            except WireError:
                self._bad_frames += 1
                continue
            self._take(parts[0], request)

    def _take(self, client: bytes, request: LinkMessage) -> None:
        match request:
            case StatusQuery():
                status = msgspec.structs.replace(self._status_provider(), query_id=request.query_id)
                self._enqueue(client, status)
            case Submit():
                self._open.setdefault(client, set()).add(request.request_id)
                self._call(client, request)
            case CancelRequest():
                self._call(client, request)
            case _:
                self._bad_frames += 1  # a response, which only a server sends

    def _call(self, client: bytes, request: Submit | CancelRequest) -> None:
        try:
            self._on_request(client, request)
        except Unavailable as error:
            self._refuse(client, request, "unavailable", str(error))
        except Exception as error:
            _log.exception("request %s was not taken", request.request_id)
            self._refuse(client, request, "internal", f"{type(error).__name__}: {error}")

    def _refuse(self, client: bytes, request: Submit | CancelRequest, kind: str, reason: str) -> None:
        self._end(client, request.request_id)
        self._enqueue(client, Failed(request_id=request.request_id, kind=kind, reason=reason))

    def _take_replies(self) -> None:
        while True:
            with self._lock:
                if not self._replies:
                    return
                client, response = self._replies.popleft()
            if isinstance(response, Done | Failed):
                self._end(client, response.request_id)
            self._enqueue(client, response)

    def _end(self, client: bytes, request_id: str) -> None:
        known = self._open.get(client)
        if known is not None:
            known.discard(request_id)
            if not known:
                del self._open[client]

    def _enqueue(self, client: bytes, response: Response) -> None:
        waiting = self._queues.setdefault(client, deque())
        try:
            waiting.append(wire.encode_link(response))
        except WireError as error:
            request_id = getattr(response, "request_id", "")
            _log.error("response to %s does not travel: %s", request_id, error)
            if isinstance(response, Done | Failed):
                failed = Failed(request_id=request_id, kind="internal", reason="the result does not fit in a frame")
                waiting.append(wire.encode_link(failed))

    def _flush(self) -> None:
        for client, waiting in list(self._queues.items()):
            try:
                while waiting:
                    self._router.send_multipart((client, waiting[0]), zmq.NOBLOCK)
                    waiting.popleft()
                del self._queues[client]
            except zmq.Again:
                if len(waiting) > self._client_queue_max:
                    self._drop(client)
            except zmq.ZMQError:
                self._drop(client)

    def _drop(self, client: bytes) -> None:
        """The client is gone or does not read: nobody wants its open requests."""
        self._queues.pop(client, None)
        request_ids = self._open.pop(client, set())
        if request_ids:
            self._clients_dropped += 1
        for request_id in sorted(request_ids):
            try:
                self._on_request(client, CancelRequest(request_id=request_id))
            except Exception:
                _log.exception("cancelling %s failed", request_id)


Sink = Callable[[Response], None]


class ClientThread:
    """A client's thread: the socket, sinks by request id, and the watch over the rank.

    A sink is called in this thread, in order, and for the last time with Done or Failed.
    """

    def __init__(self, address: str, connect_timeout_s: float, silence_s: float, options: SocketOptions | None) -> None:
        self._address = address
        self._connect_ns = int(connect_timeout_s * 1e9)
        self._silence_ns = int(silence_s * 1e9)
        self._lock = threading.Lock()  # guards the four below
        self._sinks: dict[str, Sink] = {}
        self._queries: dict[str, Callable[[Status | None], None]] = {}
        self._outbox: deque[tuple[int, LinkMessage]] = deque()  # (give up at, message)
        self._is_closing = False
        self._ping_number = itertools.count()
        self._unsent: tuple[int, LinkMessage, bytes] | None = None
        self._options = options or SocketOptions()
        self._context = sockets.make_context()
        self._poller = zmq.Poller()
        try:
            self._connect()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="link-client", daemon=True)
        self._thread.start()

    # ---- any thread --------------------------------------------------------------------------------------------
    def submit(self, request: Submit, sink: Sink) -> None:
        self._check(request)
        with self._lock:
            if self._is_closing:
                raise Unavailable(f"the link to {self._address} is closed")
            if request.request_id in self._sinks:
                raise RequestError(f"request {request.request_id!r} is open already", "request_id")
            self._sinks[request.request_id] = sink
            self._outbox.append((now_ns() + self._connect_ns, request))
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if self._is_closing or request_id not in self._sinks:
                return
            self._outbox.append((now_ns() + self._connect_ns, CancelRequest(request_id=request_id)))
        self._wake.set()

    def ask(self, answer: Callable[[Status | None], None], timeout_s: float) -> str:
        """`answer` is called once in this thread: with the status, or None on `close`. Withdraw it by `forget`."""
        query_id = secrets.token_hex(8)
        with self._lock:
            if self._is_closing:
                raise Unavailable(f"the link to {self._address} is closed")
            self._queries[query_id] = answer
            self._outbox.append((now_ns() + int(timeout_s * 1e9), StatusQuery(query_id=query_id)))
        self._wake.set()
        return query_id

    def forget(self, query_id: str) -> None:
        with self._lock:
            self._queries.pop(query_id, None)

    def close(self) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        self._wake.set()
        self._thread.join(_CLOSE_NS / 1e9 + 2.0)
        if not self._thread.is_alive():
            self._context.destroy()
            self._wake.close()

    def _check(self, request: Submit) -> None:
        try:
            wire.check(request)
        except WireError as error:
            raise RequestError(str(error)) from None

    def _connect(self) -> None:
        monitors: list[Monitor] = []
        dealer = sockets.connect(
            self._context,
            self._address,
            self._options,
            lambda made: monitors.append(Monitor(made, self._options, _BEGUN | _ENDED)),
            keeps_unread=True,
        )
        self._dealer, self._monitor = dealer, monitors[0]
        self._is_connected = False
        self._heard_ns = now_ns()
        self._asked_ns: int | None = None  # oldest ping without any answer since
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor.events, zmq.POLLIN)

    # ---- the thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._poller.register(self._wake.fd, zmq.POLLIN)
        reason = f"the link to {self._address} is closed"
        try:
            while not self._is_closing:
                ready = dict(self._poller.poll(self._wait_ms()))
                if self._wake.fd in ready:
                    self._wake.clear()
                if self._dealer in ready:
                    self._read()
                if self._monitor.events in ready:
                    self._look_at_connection()
                self._watch()
                self._send_waiting()
            self._send_waiting()
        except Exception as error:
            reason = f"the link to {self._address} broke: {type(error).__name__}: {error}"
            with self._lock:
                self._is_closing = True
        finally:
            self._fail_all(reason)
            self._disconnect(self._dealer, self._monitor)

    def _wait_ms(self) -> int | None:
        with self._lock:
            if self._unsent is not None or self._outbox:
                return _RETRY_NS // 1_000_000
            return _IDLE_NS // 1_000_000 if self._sinks else None

    def _read(self) -> bool:
        """False when all that has come is read."""
        for _ in range(sockets.FRAMES_PER_TURN):
            try:
                data = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                response = wire.decode_link(data)
            except WireError as error:
                self._fail_all(f"{self._address} does not speak this protocol: {error}")
                continue
            self._heard_ns = now_ns()
            self._asked_ns = None
            self._deliver(response)
        return True

    def _look_at_connection(self) -> None:
        for event, _ in self._monitor.read():
            if event == _ENDED and self._is_connected:
                self._end_connection()
                return
            self._is_connected |= event == _BEGUN

    def _end_connection(self) -> None:
        """The rank is gone: first what it still said, then the end of all it was sent, then a socket that has none."""
        while self._read():
            pass
        with self._lock:
            messages = [message for _, message in self._outbox] + ([self._unsent[1]] if self._unsent else [])
            unsent = {message.request_id for message in messages if isinstance(message, Submit)}
            sent = [request_id for request_id in self._sinks if request_id not in unsent]
        for request_id in sent:
            self._fail(request_id, "it has closed the link", kind="gone")
        dealer, monitor = self._dealer, self._monitor
        self._connect()
        self._disconnect(dealer, monitor, linger_ms=0)

    def _disconnect(self, dealer: zmq.Socket[bytes], monitor: Monitor, linger_ms: int | None = None) -> None:
        self._poller.unregister(monitor.events)
        self._poller.unregister(dealer)
        monitor.close()
        dealer.close(linger=linger_ms)

    def _deliver(self, response: LinkMessage) -> None:
        match response:
            case Status():
                with self._lock:
                    answer = self._queries.pop(response.query_id, None)
                if answer is not None:
                    answer(response)
            case Done() | Failed():
                with self._lock:
                    sink = self._sinks.pop(response.request_id, None)
                if sink is not None:
                    sink(response)
            case _:
                with self._lock:
                    sink = self._sinks.get(getattr(response, "request_id", ""))
                if sink is not None:
                    sink(response)  # type: ignore[arg-type]

    def _watch(self) -> None:
        """While requests are open, a quiet rank is asked for its status, which it answers even if its loop is stuck."""
        now = now_ns()
        with self._lock:
            is_waiting = bool(self._sinks)
        if not is_waiting:
            self._asked_ns = None
            return
        if self._asked_ns is None:
            if now - self._heard_ns > _PING_NS:
                self._asked_ns = now
                self._ping()
        elif now - self._asked_ns > self._silence_ns:
            self._asked_ns = None
            self._heard_ns = now
            self._fail_all(f"the rank at {self._address} has not answered for {self._silence_ns / 1e9:g} s")

    def _ping(self) -> None:
        with self._lock:
            self._outbox.append((now_ns() + _PING_NS, StatusQuery(query_id=f"ping-{next(self._ping_number)}")))

    def _send_waiting(self) -> None:
        while True:
            if self._unsent is None:
                with self._lock:
                    if not self._outbox:
                        return
                    give_up_ns, message = self._outbox.popleft()
                self._unsent = (give_up_ns, message, wire.encode_link(message))
            give_up_ns, message, data = self._unsent
            if not self._put_on_wire(data):
                if now_ns() < give_up_ns:
                    return
                if isinstance(message, Submit):
                    self._fail(message.request_id, f"no rank answers at {self._address}")
            self._unsent = None

    def _put_on_wire(self, data: bytes) -> bool:
        """Not before there is a connection: nothing is queued in the dark."""
        if not self._is_connected:
            return False
        try:
            self._dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _fail(self, request_id: str, reason: str, *, kind: str = "unavailable") -> None:
        with self._lock:
            sink = self._sinks.pop(request_id, None)
        if sink is not None:
            sink(Failed(request_id=request_id, kind=kind, reason=reason))

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            request_ids = list(self._sinks)
            queries = list(self._queries.values()) if self._is_closing else []
        for request_id in request_ids:
            self._fail(request_id, reason)
        for answer in queries:
            answer(None)


class AsyncLinkClient:
    """A client's end for asyncio; make it inside a running loop. Owns: a thread and a socket. Closed by: `close`, or
    leaving the `async with` block."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 5.0,
        silence_s: float = 5.0,
        options: SocketOptions | None = None,
    ) -> None:
        """Connects in the background.

        Args:
            connect_timeout_s: how long a request waits for a rank that is not there (yet)
            silence_s: a rank that answers nothing, not even status, for so long is gone: all open requests fail

        Raises: HubError for a malformed address.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = ClientThread(address, connect_timeout_s, silence_s, options)
        self._address = address

    def submit(self, request: Submit) -> AsyncIterator[Response]:
        """Send now (not at the first `anext`); iterate over TokenOut..., ended by one Done or Failed, which is yielded.

        A rank that is silent ends it with Failed(kind="unavailable"), one that is gone with "gone", as soon as that is
        seen and after all that it had sent before. Leaving the iterator early (`aclose`) cancels the request.
        Raises: RequestError for a request that can not travel; Unavailable after `close`.
        """
        responses: asyncio.Queue[Response] = asyncio.Queue()
        self._thread.submit(request, lambda response: self._call_soon(responses.put_nowait, response))
        return self._stream(request.request_id, responses)

    async def _stream(self, request_id: str, responses: asyncio.Queue[Response]) -> AsyncIterator[Response]:
        try:
            while True:
                response = await responses.get()
                yield response
                if isinstance(response, Done | Failed):
                    return
        finally:
            self._thread.cancel(request_id)

    async def cancel(self, request_id: str) -> None:
        """Lose interest; the stream still ends with Done or Failed."""
        self._thread.cancel(request_id)

    async def status(self, timeout_s: float = 2.0) -> Status:
        """Ask the rank's link thread. Raises Unavailable if nothing comes back in time."""
        answered: asyncio.Future[Status | None] = self._loop.create_future()

        def answer(status: Status | None) -> None:
            if not answered.done():
                answered.set_result(status)

        query_id = self._thread.ask(lambda status: self._call_soon(answer, status), timeout_s)
        try:
            status = await asyncio.wait_for(answered, timeout_s)
        except TimeoutError:
            status = None
        finally:
            self._thread.forget(query_id)
        if status is None:
            raise Unavailable(f"no status from {self._address} within {timeout_s:g} s")
        return status

    async def close(self) -> None:
        """Open streams end with Failed("unavailable"). Idempotent."""
        try:
            await asyncio.to_thread(self._thread.close)
        except RuntimeError:  # the interpreter is ending and its executors take no more work
            self._thread.close()

    async def __aenter__(self) -> AsyncLinkClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _call_soon(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *args)
