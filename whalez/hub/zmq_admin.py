"""The admin socket: a rank answers an operator's queries on a socket and a thread of its own, whatever its loop does.

It is neither the hub's thread nor the link's: a flood of queries must delay no commit and no prompt, and an operator
must be heard while a prompt of megabytes crosses the link. An answer is sent at once or not at all; who did not hear
it asks again. The asking side is one call with one deadline for all ranks, so a stopped rank delays nobody's answer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator

from whalez.clock import now_ns
from whalez.errors import WireError
from whalez.hub import sockets, wire
from whalez.hub.address import check_bind, is_of_this_machine
from whalez.hub.admin import AdminAnswer, AdminQuery, GuardedQuery, NotDone
from whalez.hub.keys import Keys, secure_client, secure_server, sender_key
from whalez.hub.processes import Wake
from whalez.hub.sockets import SocketOptions

_log = logging.getLogger(__name__)
_FRAMES_PER_TURN = 64
ADMIN_OPTIONS = SocketOptions(message_bytes_max=wire.ADMIN_BYTES_MAX, linger_ms=100)


def refusal(query: AdminQuery, address: str, keys: Keys | None = None, sender: bytes | None = None) -> str:
    """Why a query that came in at `address` is not answered, or "". The one place that decides who may do what.

    With keys, what is guarded is taken from an admin's key only. A socket without keys knows nobody, so there it is
    taken only where the machine's own users are trusted.
    """
    if not isinstance(query, GuardedQuery):
        return ""
    if keys is not None:
        return "" if sender in keys.admins else f"{type(query).__name__} needs a key of {keys.folder / 'admins'}"
    if not is_of_this_machine(address):
        return f"{type(query).__name__} is taken on ipc or loopback only, this is {address}"
    return ""


class AdminServer:
    """A rank's end. Owns: a thread and the socket at `address`. Closed by: `close`, which blocks at most 1 s."""

    def __init__(
        self,
        address: str,
        rank: int,
        answer: Callable[[AdminQuery], AdminAnswer],
        *,
        keys: Keys | None = None,
        options: SocketOptions = ADMIN_OPTIONS,
    ) -> None:
        """Listens when this returns.

        answer: called in the server's thread, also while the loop is stuck; must not block. What it raises is told to
            the asker.
        keys: only those who hold a rank's or an admin's key get an answer at all.
        Raises: HubError naming the address if it is taken or impossible.
        """
        check_bind(address, peers_elsewhere=False, may_be_reached=True)  # `refusal` guards what changes anything
        self._address = address
        self._rank = rank
        self._answer = answer
        self._keys = keys
        self._gate: ThreadAuthenticator | None = None
        self._context = sockets.make_context()
        try:
            self._router = sockets.bind(self._context, address, options, self._secure)
        except BaseException:
            self._stop_gate()
            self._context.destroy(linger=0)
            raise
        self._wake = Wake()
        self._is_closing = False
        self.bad_frames_total = 0  #: frames that were no query of this protocol; counted and dropped
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake.set()
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._stop_gate()
            self._context.destroy()
            self._wake.close()

    def _secure(self, router: zmq.Socket[bytes]) -> None:
        if self._keys is not None:
            pair = self._keys.pair("rank")
            self._gate = secure_server(router, pair, {pair.public} | self._keys.ranks | self._keys.admins)

    def _stop_gate(self) -> None:
        if self._gate is not None:
            self._gate.stop()

    # ---- the thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        try:
            while not self._is_closing:
                ready = dict(poller.poll())
                if self._wake.fd in ready:
                    self._wake.clear()
                if self._router in ready:
                    self._read()
        except Exception:
            _log.exception("the admin socket at %s ended", self._address)  # operators see it fall silent
        finally:
            self._router.close()

    def _read(self) -> None:
        for _ in range(_FRAMES_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise WireError(f"{len(frames)} parts")
                query = wire.decode_admin(frames[1].bytes)
            except WireError:
                self.bad_frames_total += 1
                continue
            if isinstance(query, AdminQuery):
                self._reply(frames[0].bytes, query, sender_key(frames[1]))
            else:
                self.bad_frames_total += 1  # an answer, which only a server sends

    def _reply(self, client: bytes, query: AdminQuery, sender: bytes | None) -> None:
        try:
            reason = refusal(query, self._address, self._keys, sender)
            answer = NotDone(query_id=query.query_id, rank=self._rank, reason=reason) if reason else self._answer(query)
            data = wire.encode_admin(answer)
        except Exception as error:  # one query that cannot be answered must not silence the rank
            _log.exception("%s was not answered", type(query).__name__)
            reason = f"{type(error).__name__}: {error}"[:2000]
            data = wire.encode_admin(NotDone(query_id=query.query_id, rank=self._rank, reason=reason))
        with contextlib.suppress(zmq.ZMQError):  # the asker is gone, or does not read
            self._router.send_multipart((client, data), zmq.NOBLOCK)


def ask_all(
    questions: Sequence[tuple[str, AdminQuery]], timeout_s: float, keys: Keys | None = None
) -> list[AdminAnswer | None]:
    """Ask every address its query at once; the answers in the same order, None for those that gave none in time.

    keys: of a fleet that has some; asked with the admin's key where it is here, else with a rank's.

    Blocks: at most `timeout_s`, all together. Raises: HubError for a malformed address, WireError for a query that does
    not travel.
    """
    deadline = now_ns() + int(timeout_s * 1e9)
    frames = [wire.encode_admin(query) for _, query in questions]
    answers: list[AdminAnswer | None] = [None] * len(questions)

    def prepare(dealer: zmq.Socket[bytes]) -> None:
        if keys is not None:
            secure_client(dealer, keys.pairs.get("admin") or keys.pair("rank"), keys.rank_public)

    context = sockets.make_context()
    asked: dict[zmq.Socket[bytes], int] = {}
    try:
        poller = zmq.Poller()
        for i, (address, _) in enumerate(questions):
            dealer = sockets.connect(context, address, ADMIN_OPTIONS, prepare)
            asked[dealer] = i
            poller.register(dealer, zmq.POLLIN | zmq.POLLOUT)
        waiting = len(questions)
        while waiting and (left_ns := deadline - now_ns()) > 0:
            for dealer, event in poller.poll(-(-left_ns // 1_000_000)):
                i = asked[dealer]
                if event & zmq.POLLOUT:
                    with contextlib.suppress(zmq.Again):  # the connection is gone again; it is retried until the end
                        dealer.send(frames[i], zmq.NOBLOCK)
                        poller.modify(dealer, zmq.POLLIN)
                if event & zmq.POLLIN and (answer := _answer_of(dealer, questions[i][1])) is not None:
                    answers[i] = answer
                    poller.unregister(dealer)
                    waiting -= 1
    finally:
        for dealer in asked:
            dealer.close(linger=0)
        context.destroy(linger=0)
    return answers


def _answer_of(dealer: zmq.Socket[bytes], query: AdminQuery) -> AdminAnswer | None:
    """The answer to `query` if that is what came in; a rank that sends anything else has not answered."""
    try:
        message = wire.decode_admin(dealer.recv(zmq.NOBLOCK))
    except (WireError, zmq.Again):
        return None
    return message if isinstance(message, AdminAnswer) and message.query_id == query.query_id else None
