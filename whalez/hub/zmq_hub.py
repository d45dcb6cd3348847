"""A rank's end of the control plane over ZeroMQ: one thread that owns two DEALERs, an outbox and an inbox.

The loop never touches a socket: `send` appends to the outbox and writes an eventfd, `drain` empties the inbox.
The thread watches the peers of this machine by pidfd and rank 0 by its beats; rank 0's own process also runs the
sequencer's thread (`zmq_router.py`), which watches everybody.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from whalez.clock import now_ns
from whalez.errors import ConfigError, FleetRefused, HubError, PeerDied, WhalezError, WireError
from whalez.hub import sockets, wire
from whalez.hub.address import bind_address, check_connect
from whalez.hub.conductor import Conductor
from whalez.hub.connections import Knock
from whalez.hub.inbox import Inbox, message_bytes
from whalez.hub.interface import BEAT_NS, BYE_GRACE_NS, HubLimits, SequencerLike
from whalez.hub.keys import Keys, secure_client
from whalez.hub.liveness import Liveness
from whalez.hub.processes import PeerWatch, Wake
from whalez.hub.sockets import SocketOptions
from whalez.hub.zmq_router import INPROC, RouterThread
from whalez.planning.choice import plan_whale
from whalez.planning.policy import PlanPolicy
from whalez.rendezvous.events import Received, StopWanted
from whalez.rendezvous.messages import (
    Bye,
    Died,
    Hello,
    Mapped,
    Message,
    Offer,
    Offers,
    Refused,
    SlabEntry,
    Table,
    Withdraw,
    WorldStarts,
)
from whalez.rendezvous.sequencer import Sequencer

_RETRY_NS = 20_000_000
_CLOSE_NS = 1_000_000_000


class ZmqHub:
    """One rank's end of the control plane. See `interface.Hub` for every method.

    Owns: a ZeroMQ context, its sockets, one thread (two on rank 0), an eventfd, pidfds. Closed by: `close`.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        address: str,
        policy: PlanPolicy | None = None,
        *,
        node_ranks: int | None = None,
        sequencer: SequencerLike | None = None,
        limits: HubLimits | None = None,
        options: SocketOptions | None = None,
        keys: Keys | None = None,
        insecure: bool = False,
    ) -> None:
        """No socket is opened before `start`.

        Args:
            address:    where rank 0 listens: tcp://HOST:PORT or ipc:///path (one machine only)
            policy:     needed on rank 0 unless `sequencer` is given: what its Sequencer plans with
            node_ranks: ranks per machine; below `world` means that peers are elsewhere. None = all are here
            sequencer:  rank 0 only, instead of the one made from `policy`
            keys:       who may join, and what this rank shows; needed where other machines can reach the hub
            insecure:   do without there

        Raises: HubError for an address that can not work, within a second; ConfigError for keys that lack ours.
        """
        if not 0 <= rank < world:
            raise ConfigError(f"rank: expected 0 to {world - 1}, got {rank}")
        peers_elsewhere = node_ranks is not None and node_ranks < world
        if rank == 0:
            address = bind_address(
                address, peers_elsewhere=peers_elsewhere, may_be_reached=keys is not None or insecure
            )
            if sequencer is None:
                assert policy is not None, "rank 0 needs a policy for its sequencer"
                sequencer = Sequencer(world, policy, plan=plan_whale)
        else:
            assert node_ranks is None or node_ranks > 0
            zero_is_here = node_ranks is not None and rank < node_ranks
            check_connect(
                address,
                peers_elsewhere=peers_elsewhere and not zero_is_here,
                may_be_reached=keys is not None or insecure,
            )
        if keys is not None:
            keys.pair("rank" if rank else "hub")  # a key that is not here is told now
        self._rank = rank
        self._world = world
        self._address = address
        self._sequencer = sequencer
        self._limits = limits or HubLimits()
        self.options = options or SocketOptions()  #: of every socket of this end
        self._keys = keys
        self._inbox = Inbox(self._limits)
        self._launch = 0
        self._lifecycle = threading.RLock()  # opening and closing; a signal may close while this thread opens
        self._lock = threading.Lock()  # guards the outbox and the phase
        self._changed = threading.Condition(self._lock)
        self._outbox: deque[Message] = deque()
        self._outbox_bytes = 0
        self._hello: Hello | None = None
        self._table: tuple[SlabEntry, ...] | None = None
        self._turn = 0
        self._gathered: Offers | None = None
        self._is_mapped = False
        self._world_started = False
        self._said_bye = False
        self._is_closing = False
        self._heard_hub = False
        self._knock: Knock | None = None  # of a rank that comes in from outside rank 0's process
        self._wake = Wake()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: RouterThread | None = None
        self._thread: threading.Thread | None = None

    # ---- the loop's side ---------------------------------------------------------------------------------------
    def start(self, hello: Hello, timeout_s: float) -> tuple[SlabEntry, ...]:
        assert self._hello is None, "start is called once"
        assert (hello.entry.rank, hello.world) == (self._rank, self._world)
        wire.encode(hello, hello.entry.incarnation)  # an entry that can not travel is refused here, by name
        self._hello = hello
        try:
            with self._lifecycle:
                self._inbox.raise_failure()  # closed by another thread already
                self._open(hello)
            self._wait(lambda: self._table is not None, timeout_s, "the slab table")
        except BaseException:
            self.close()
            raise
        assert self._table is not None
        return self._table

    def _open(self, hello: Hello) -> None:
        self._context = sockets.make_context()
        if self._rank == 0:
            assert self._sequencer is not None
            conductor = Conductor(self._world, self._sequencer, hello.fingerprint)
            self._router = RouterThread(
                self._context,
                self._address,
                conductor,
                hello,
                lambda: self._launch,
                self._limits,
                self.options,
                self._keys,
            )
        where = INPROC if self._rank == 0 else self._address
        frames = sockets.connect(self._context, where, self.options, self._prepare_frames)
        beats = sockets.connect(self._context, where, self.options, self._prepare)
        thread = threading.Thread(
            target=_MemberThread(self, frames, beats, hello).run, name=f"hub-{self._rank}", daemon=True
        )
        thread.start()
        self._thread = thread

    def _prepare_frames(self, frames: zmq.Socket[bytes]) -> None:
        self._prepare(frames)
        if self._rank != 0:
            self._knock = Knock(frames, self.options, has_keys=self._keys is not None)

    def _prepare(self, dealer: zmq.Socket[bytes]) -> None:
        if self._rank != 0 and self._keys is not None:
            secure_client(dealer, self._keys.pair("rank"), self._keys.hub_public)

    def gather(self, data: bytes, timeout_s: float) -> tuple[bytes, ...]:
        assert self._table is not None and not self._is_mapped, "between start and mapped"
        self.send(Offer(rank=self._rank, turn=self._turn, data=data))
        self._wait(lambda: self._gathered is not None, timeout_s, "all ranks to take part in a gather")
        assert self._gathered is not None and self._gathered.turn == self._turn
        parts, self._gathered = self._gathered.parts, None
        self._turn += 1
        return parts

    def mapped(self, timeout_s: float) -> None:
        assert self._table is not None, "start comes first"
        with self._lock:
            self._is_mapped = True
        self._wake.set()
        self._wait(lambda: self._world_started, timeout_s, "all ranks to map the slabs")

    def send(self, message: Message) -> None:
        wire.check(message)
        with self._lock:
            self._inbox.raise_failure()
            if len(self._outbox) >= self._limits.outbox_count or self._outbox_bytes >= self._limits.outbox_bytes:
                failure = HubError(f"{len(self._outbox)} messages wait to be sent: the hub at {self._address} stalls")
                self._inbox.fail(failure)
                raise failure
            self._outbox.append(message)
            self._outbox_bytes += message_bytes(message)
            self._said_bye |= isinstance(message, Bye)
        self._wake.set()

    def drain(self) -> list[Message]:
        return self._inbox.drain()

    @property
    def failure(self) -> Exception | None:
        return self._inbox.failure

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._inbox.set_waker(wake)

    def report_launch(self, launch: int) -> None:
        self._launch = launch

    def stop_world(self, grace_s: float | None = None) -> None:
        """Rank 0 only: tell the sequencer that the world ends, now or after a drain of at most `grace_s`."""
        assert self._router is not None, "the sequencer lives with rank 0"
        self._router.order(StopWanted(grace_s))

    def withdraw(self, rank: int, request_id: str) -> None:
        """Rank 0 only: have the sequencer cancel a rank's post, as if that rank had withdrawn it."""
        assert self._router is not None, "the sequencer lives with rank 0"
        self._router.order(Received(Withdraw(rank=rank, request_id=request_id), rank))

    def dropped(self) -> dict[str, int]:
        """Rank 0: what came to the hub and was not let through, by kind. Empty on other ranks, which do not listen.

        hub_bad_frames: that were none of this protocol, whoever sent them; hub_stale_frames: of processes that do not
        belong to this world, answered with a refusal.
        """
        router = self._router
        if router is None:
            return {}
        return {
            "hub_bad_frames": router.bad_frames_total,
            "hub_stale_frames": router.stale_frames_total,
            "hub_refused_connections": router.refused_connections_total,
            "hub_ended_connections": router.ended_connections_total,
        }

    def close(self) -> None:
        with self._lifecycle:
            if self._is_closing:
                return
            self._is_closing = True
            self._wake.set()
            ended = True
            if self._thread is not None:
                self._thread.join(_CLOSE_NS / 1e9 + 2.0)
                ended = not self._thread.is_alive()
            if self._router is not None:
                ended = self._router.close() and ended
            self._inbox.close()
            with self._changed:
                self._changed.notify_all()
            if ended:
                if self._context is not None:
                    self._context.destroy()  # waits at most for the sockets' linger
                self._wake.close()

    def _wait(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not is_done():
                self._inbox.raise_failure()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise HubError(f"waited {timeout_s:g} s for {what}: {self._reason()}")
                self._changed.wait(min(left_s, 0.5))

    def _reason(self) -> str:
        if self._router is not None and (missing := self._router.missing()):
            refused = self._router.refusals()
            why = f"; refused: {'; '.join(refused)}" if refused else ""
            twice = "".join(
                f"; rank {rank} was claimed twice: {who}" for rank, who in self._router.claimed_twice().items()
            )
            some = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
            return f"{some} missing at {self._address}{twice}{why}"
        if not self._heard_hub and self._knock is not None and self._knock.closed_total:
            why = ""
            if self._keys is not None:
                why = f"; is {self._keys.folder / 'hub.key'} its key, and {self._keys.folder} a folder of this fleet?"
            return f"the hub at {self._address} closes the connection during the handshake{why}"
        if not self._heard_hub:
            return f"no hub answers at {self._address}"
        return f"the hub at {self._address} answers, but not all ranks are there yet"


class _MemberThread:
    """The hub thread of one rank. Everything here runs in that thread, except the constructor."""

    def __init__(self, hub: ZmqHub, frames: zmq.Socket[bytes], beats: zmq.Socket[bytes], hello: Hello) -> None:
        self._hub = hub
        self._frames = frames
        self._beats = beats
        self._own = hello.entry
        self._inbox = hub._inbox
        self._hello = wire.encode(hello, self._own.incarnation)
        self._unsent: bytes | None = None
        self._sent_count = self._received_count = 0  # see wire.Beat
        self._watch = PeerWatch()
        self._liveness: Liveness[str] = Liveness()
        self._ranks: dict[str, int] = {}
        self._suspects: dict[str, int] = {}
        self._left: set[int] = set()
        self._told_death = False
        self._told_mapped = False
        self._heard_echo = False
        self._hub_has_ended = False  # the process of it
        self._repeat_due = 0
        self._poller = zmq.Poller()
        self._poller.register(frames, zmq.POLLIN)
        self._poller.register(beats, zmq.POLLIN)
        self._beat_due = 0
        self._let_in = 0  # how often the frames' connection was made
        self._knock = hub._knock
        if self._knock is not None:
            self._poller.register(self._knock.events, zmq.POLLIN)
        self._poller.register(hub._wake.fd, zmq.POLLIN)

    def run(self) -> None:
        try:
            self._serve()
            self._finish()
        except Exception as error:
            self._fail(HubError(f"the hub thread failed: {type(error).__name__}: {error}"))
        finally:
            self._watch.close()
            if self._knock is not None:
                self._knock.close()
            self._frames.close()  # their linger applies when the context is terminated
            self._beats.close()

    def _serve(self) -> None:
        hub = self._hub
        while not hub._is_closing:
            now = now_ns()
            wait_until = min(self._beat_due, *self._suspects.values(), now + BEAT_NS)
            if self._has_unsent() and now < self._beat_due:
                wait_until = min(wait_until, now + _RETRY_NS)
            if hub._table is None:
                wait_until = min(wait_until, self._repeat_due)
            ready = dict(self._poller.poll(max(0, -(-(wait_until - now) // 1_000_000))))
            if hub._wake.fd in ready:
                hub._wake.clear()
            if self._knock is not None and self._knock.events in ready:
                self._look_at_door(self._knock)
            if self._beats in ready:
                self._read(self._beats)
            if self._frames in ready:
                self._read(self._frames)
            for fd in ready:
                if isinstance(fd, int) and fd != hub._wake.fd:
                    self._ended(fd)
            now = now_ns()
            self._look_for_the_lost(now)
            if now >= self._beat_due:
                self._beat_due = now + BEAT_NS
                self._beat()
            self._say_what_starts(now)
            self._send_waiting()

    def _look_at_door(self, knock: Knock) -> None:
        why = knock.read()
        if knock.let_in_total > self._let_in:
            # The sequencer takes a cut connection for our death. It must hear from the new one before it says so, or
            # this rank is not told, and blames those that leave because of it.
            self._let_in = knock.let_in_total
            self._beat_due = 0
        if why is not None:
            keys = self._hub._keys
            what = "no --keys were given" if keys is None else f"ours are in {keys.folder}"
            self._fail(FleetRefused(f"the hub at {self._hub._address} {why}: {what}", "keys"))

    def _has_unsent(self) -> bool:
        return self._unsent is not None or bool(self._hub._outbox)

    # ---- receiving ---------------------------------------------------------------------------------------------
    def _read(self, source: zmq.Socket[bytes]) -> None:
        for _ in range(sockets.FRAMES_PER_TURN):
            try:
                parts = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(parts) != 1:
                    raise WireError(f"{len(parts)} parts")
                frame = wire.decode(parts[0])
            except WireError as error:
                # Only our own hub is at the other end of a DEALER, so this is no stranger's garbage.
                self._fail(HubError(f"the hub at {self._hub._address} sent an impossible frame: {error}"))
                return
            self._take(frame)

    def _take(self, frame: wire.Frame) -> None:
        hub = self._hub
        hub._heard_hub = True
        table = hub._table
        if table is not None and frame.incarnation != table[0].incarnation:
            self._fail(
                PeerDied(0, f"another process ({frame.incarnation}) answers at {hub._address}: it was restarted")
            )
            return
        if table is not None:
            self._liveness.heard(table[0].incarnation, now_ns())
        self._received_count += wire.is_counted(frame.message)
        match frame.message:
            case wire.Beat(on_frames=True, count=count) if count != self._received_count:
                how = f"its connection to the hub lost or repeated frames: {count} sent, {self._received_count} arrived"
                self._fail(HubError(f"rank {self._own.rank}: {how}"))
                self._put_on_wire(wire.encode(Died(rank=self._own.rank, how=how), self._own.incarnation))
            case wire.Beat() | Hello() | Mapped():
                pass
            case Table() as message:
                if table is None:
                    self._begin(message)
            case wire.Probe():
                self._put_on_wire(wire.encode(wire.Echo(rank=self._own.rank), self._own.incarnation))
            case wire.Echo():
                self._heard_echo = True
            case Offers() as message:
                self._advance("_gathered", message)
            case WorldStarts():
                self._advance("_world_started", True)
            case Refused() as message:
                self._fail(FleetRefused(message.reason, message.field))
            case Died() as message:
                self._told_death = True
                self._fail(PeerDied(message.rank, message.how))
            case Bye() as message:
                if message.rank != self._own.rank:
                    self._leave(message.rank)
            case message:
                self._put(message)

    def _begin(self, table: Table) -> None:
        """The table is complete: from now on every peer is watched."""
        for entry in table.entries:
            self._ranks[entry.incarnation] = entry.rank
        self._advance("_table", table.entries)
        if self._own.rank != 0:
            self._liveness.heard(table.entries[0].incarnation, now_ns())
        for entry in table.entries:
            if entry.host != self._own.host or entry.pid == self._own.pid:
                continue
            try:
                fd = self._watch.add(entry.incarnation, entry.pid)
            except ProcessLookupError:
                self._suspects[entry.incarnation] = now_ns()
                continue
            if fd is not None:
                self._poller.register(fd, zmq.POLLIN)

    def _advance(self, field: str, value: object) -> None:
        with self._hub._changed:
            setattr(self._hub, field, value)
            self._hub._changed.notify_all()

    def _leave(self, rank: int) -> None:
        """This rank's exit is expected, and it touches no slab any more. The loop hears of it once."""
        if rank not in self._left:
            self._left.add(rank)
            if rank == 0:
                self._liveness.forget(next(each for each, known in self._ranks.items() if known == 0))
            self._put(Bye(rank=rank))

    def _put(self, message: Message) -> None:
        if self._inbox.put(message) or self._inbox.failure is not None:
            return
        how = f"its loop does not drain: {self._hub._limits.inbox_count} messages wait"
        self._fail(HubError(how))
        self._put_on_wire(wire.encode(Died(rank=self._own.rank, how=how), self._own.incarnation))

    # ---- death -------------------------------------------------------------------------------------------------
    def _ended(self, fd: int) -> None:
        self._poller.unregister(fd)
        incarnation = self._watch.take(fd)
        if incarnation is not None:
            self._suspects[incarnation] = now_ns() + BYE_GRACE_NS
            self._hub_has_ended |= self._ranks[incarnation] == 0

    def _look_for_the_lost(self, now: int) -> None:
        due = [each for each, at in self._suspects.items() if now >= at]
        # Several ends seen in one turn: the others may have followed rank 0, whose death nobody can have told us of.
        for incarnation in sorted(due, key=lambda each: self._ranks[each]):
            del self._suspects[incarnation]
            self._lost(self._ranks[incarnation], "its process has ended")
        for incarnation, silence_ns in self._liveness.silent(now, self._watch.is_starved):
            self._liveness.forget(incarnation)
            self._lost(self._ranks[incarnation], f"silent for {silence_ns / 1e9:.1f} s")

    def _lost(self, rank: int, how: str) -> None:
        if self._hub._said_bye:
            self._leave(rank)
        elif rank not in self._left:
            self._fail(PeerDied(rank, how))

    def _fail(self, failure: WhalezError) -> None:
        if not self._inbox.fail(failure):
            return
        if isinstance(failure, PeerDied) and failure.rank != 0 and not self._told_death:
            # Say why before this rank ends too, so that the others name the first that died and not us.
            self._put_on_wire(wire.encode(Died(rank=failure.rank, how=failure.how[:2000]), self._own.incarnation))
        with self._hub._changed:
            self._hub._changed.notify_all()

    # ---- sending -----------------------------------------------------------------------------------------------
    def _beat(self) -> None:
        beat = wire.encode(wire.Beat(rank=self._own.rank), self._own.incarnation)
        with contextlib.suppress(zmq.Again):
            self._beats.send(beat, zmq.NOBLOCK)
        if not self._has_unsent():
            counted = wire.Beat(rank=self._own.rank, on_frames=True, count=self._sent_count)
            self._put_on_wire(wire.encode(counted, self._own.incarnation))

    def _say_what_starts(self, now: int) -> None:
        """Hello until there is a table, Mapped until the world starts; repeated, because a frame that gets lost
        before the world starts does no harm, nor does a connection that is cut before there is a table."""
        hub = self._hub
        if hub._table is None:
            data = self._hello
        elif hub._is_mapped and not hub._world_started:
            data = wire.encode(Mapped(rank=self._own.rank), self._own.incarnation)
            if not self._told_mapped:
                self._told_mapped = True
                self._repeat_due = now
        else:
            return
        if now >= self._repeat_due:
            self._repeat_due = now + (BEAT_NS if self._put_on_wire(data) else _RETRY_NS)

    def _put_on_wire(self, data: bytes) -> bool:
        try:
            self._frames.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_waiting(self) -> None:
        """As much of the outbox as the pipe takes; a message leaves the outbox only when ZeroMQ has it."""
        hub = self._hub
        while True:
            if self._unsent is None:
                with hub._lock:
                    if not hub._outbox:
                        return
                    message = hub._outbox.popleft()
                    hub._outbox_bytes -= message_bytes(message)
                self._unsent = wire.encode(message, self._own.incarnation)
                self._sent_count += wire.is_counted(message)
            if not self._put_on_wire(self._unsent):
                return
            self._unsent = None

    def _finish(self) -> None:
        """Send what waits, and stay until the hub has read it; at most 1 s, and not for a hub that is no more."""
        failure = self._inbox.failure
        if self._hub._table is None or (isinstance(failure, PeerDied) and failure.rank == 0):
            return
        probe = wire.encode(wire.Probe(rank=self._own.rank), self._own.incarnation)
        has_probed = False
        # Rank 0 said Bye: it may have closed already, which only its silence can tell.
        deadline = now_ns() + (_CLOSE_NS // 4 if 0 in self._left else _CLOSE_NS)
        hub = self._hub._table[0].incarnation
        while not self._heard_echo and now_ns() < deadline:
            if self._hub_has_ended or self._watch.has_ended(hub):  # of the same loss as we, and sooner
                return
            self._send_waiting()
            has_probed = has_probed or (not self._has_unsent() and self._put_on_wire(probe))
            self._frames.poll(20, zmq.POLLIN if has_probed else zmq.POLLIN | zmq.POLLOUT)
            self._read(self._frames)
