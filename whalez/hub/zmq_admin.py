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
from dataclasses import dataclass

import zmq

from whalez.clock import now_ns
from whalez.errors import WireError
from whalez.hub import sockets, wire
from whalez.hub.address import bind_address, is_of_this_machine
from whalez.hub.admin import AdminAnswer, AdminQuery, GuardedQuery, NotDone
from whalez.hub.connections import Knock, listen
from whalez.hub.keys import Keys, secure_client, sender_key
from whalez.hub.processes import Wake
from whalez.hub.sockets import SocketOptions

_log = logging.getLogger(__name__)
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
    """A rank's end. Owns: a thread, the socket at `address`, its door. Closed by: `close`, which blocks at most 1 s."""

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
        # `refusal` guards what changes anything.
        address = bind_address(address, peers_elsewhere=False, may_be_reached=True)
        self._address = address
        self._rank = rank
        self._answer = answer
        self._keys = keys
        pair = None if keys is None else keys.pair("rank")
        allow = frozenset() if keys is None or pair is None else {pair.public} | keys.ranks | keys.admins
        self._context = sockets.make_context()
        try:
            self._router, self._door = listen(self._context, address, options, pair, allow)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake = Wake()
        self._is_closing = False
        self._bad_frames = 0
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)
        self._thread.start()

    def dropped(self) -> dict[str, int]:
        """What came to the socket and was not let through, by kind."""
        return {
            "admin_bad_frames": self._bad_frames,
            "admin_refused_connections": self._door.refused_total,
            "admin_ended_connections": self._door.ended_total,
        }

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake.set()
        self._thread.join(1.0)
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
                ready = dict(poller.poll())
                if self._wake.fd in ready:
                    self._wake.clear()
                if self._door.events in ready:
                    self._door.read()
                if self._router in ready:
                    self._read()
        except Exception:
            _log.exception("the admin socket at %s ended", self._address)  # operators see it fall silent
        finally:
            self._door.close()
            self._router.close()

    def _read(self) -> None:
        for _ in range(sockets.FRAMES_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise WireError(f"{len(frames)} parts")
                query = wire.decode_admin(frames[1].bytes)
            except WireError:
                self._bad_frames += 1
                continue
            if isinstance(query, AdminQuery):
                self._reply(frames[0].bytes, query, sender_key(frames[1]))
            else:
                self._bad_frames += 1  # an answer, which only a server sends

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


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """What stands where an address gave none."""

    why: str = ""  #: as far as can be known; "": silence


def ask_all(
    questions: Sequence[tuple[str, AdminQuery]], timeout_s: float, keys: Keys | None = None
) -> list[AdminAnswer | NoAnswer]:
    """Ask every address its query at once; the answers in the same order, NoAnswer for those that gave none in time.

    keys: of a fleet that has some; asked with the admin's key where it is here, else with a rank's.

    Blocks: at most `timeout_s`, all together; not for an address that does not let us in. Raises: HubError for a
    malformed address, WireError for a query that does not travel, ConfigError for keys of which none can ask.
    """
    deadline = now_ns() + int(timeout_s * 1e9)
    frames = [wire.encode_admin(query) for _, query in questions]
    answers: list[AdminAnswer | NoAnswer] = [NoAnswer()] * len(questions)
    knocks: list[Knock] = []

    def prepare(dealer: zmq.Socket[bytes]) -> None:
        if keys is not None:
            secure_client(dealer, keys.asking_pair, keys.rank_public)
        knocks.append(Knock(dealer, ADMIN_OPTIONS, has_keys=keys is not None))

    context = sockets.make_context()
    dealers: list[zmq.Socket[bytes]] = []
    places: dict[zmq.Socket[bytes], int] = {}  # of every socket that is polled
    try:
        poller = zmq.Poller()
        for i, (address, _) in enumerate(questions):
            dealers.append(sockets.connect(context, address, ADMIN_OPTIONS, prepare))
            places[dealers[i]] = places[knocks[i].events] = i
            poller.register(dealers[i], zmq.POLLIN | zmq.POLLOUT)
            poller.register(knocks[i].events, zmq.POLLIN)
        waiting = set(range(len(questions)))
        while waiting and (left_ns := deadline - now_ns()) > 0:
            for ready, event in poller.poll(-(-left_ns // 1_000_000)):
                i = places[ready]
                if i not in waiting:
                    continue  # its answer was read in this turn
                told: AdminAnswer | NoAnswer | None
                if ready is knocks[i].events:
                    reason = knocks[i].read()
                    told = NoAnswer(f"it {reason}: {_our_keys(keys)}") if reason is not None else None
                else:
                    if event & zmq.POLLOUT:
                        with contextlib.suppress(zmq.Again):  # the connection is gone again; it is retried
                            dealers[i].send(frames[i], zmq.NOBLOCK)
                            poller.modify(dealers[i], zmq.POLLIN)
                    told = _answer_of(dealers[i], questions[i][1]) if event & zmq.POLLIN else None
                if told is not None:
                    answers[i] = told
                    poller.unregister(dealers[i])
                    poller.unregister(knocks[i].events)
                    waiting.remove(i)
        for i in waiting:
            if knocks[i].closed_total:  # and no handshake went well since
                answers[i] = NoAnswer(f"it closes the connection during the handshake: {_our_keys(keys)}")
    finally:
        for knock in knocks:
            knock.close()
        for dealer in dealers:
            dealer.close(linger=0)
        context.destroy(linger=0)
    return answers


def _our_keys(keys: Keys | None) -> str:
    return "no --keys were given" if keys is None else f"ours are in {keys.folder}; are they this fleet's?"


def _answer_of(dealer: zmq.Socket[bytes], query: AdminQuery) -> AdminAnswer | None:
    """The answer to `query` if that is what came in; a rank that sends anything else has not answered."""
    try:
        message = wire.decode_admin(dealer.recv(zmq.NOBLOCK))
    except (WireError, zmq.Again):
        return None
    return message if isinstance(message, AdminAnswer) and message.query_id == query.query_id else None
