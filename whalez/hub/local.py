"""The hub inside one process: the contract of `interface.py` without a byte on a wire. For tests.

Every call runs the centre (`conductor.py`) at once, in the caller's thread and under one lock, so nothing is in flight
when it returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from whalez.clock import now_ns
from whalez.errors import FleetRefused, HubError, PeerDied
from whalez.hub import wire
from whalez.hub.conductor import Conductor, Out
from whalez.hub.inbox import Inbox
from whalez.hub.interface import HubLimits, SequencerLike
from whalez.planning.choice import plan_whale
from whalez.planning.policy import PlanPolicy
from whalez.rendezvous.events import StopWanted
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
    WorldStarts,
)
from whalez.rendezvous.sequencer import Sequencer


class _Centre:
    """What the hubs of one world share. Every attribute is guarded by `lock`."""

    def __init__(self, world: int, sequencer: SequencerLike, limits: HubLimits) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.conductor = Conductor(world, sequencer)
        self.limits = limits
        self.ends: dict[str, LocalHub] = {}  # by incarnation, once it has said hello

    def perform(self, outs: list[Out]) -> None:
        pending = deque(outs)
        while pending:
            out = pending.popleft()
            end = self.ends.get(out.incarnation)
            if end is not None and not end._take(out.message):
                how = f"its loop does not drain: {self.limits.inbox_count} messages wait"
                end._inbox.fail(HubError(how))
                pending.extend(self.conductor.gone(out.incarnation, how, now_ns(), self.launch()))
        self.changed.notify_all()

    def launch(self) -> int:
        zero = self.ends.get(self.conductor.accepted.get(0, ""))
        return zero._launch if zero is not None else 0


class LocalHub:
    """One rank's end of an in-process control plane. See `interface.Hub` for every method."""

    def __init__(self, rank: int, centre: _Centre) -> None:
        """Made by `world`."""
        self._rank = rank
        self._centre = centre
        self._inbox = Inbox(centre.limits)
        self._launch = 0
        self._incarnation = ""
        self._table: tuple[SlabEntry, ...] | None = None
        self._turn = 0
        self._gathered: Offers | None = None
        self._has_started = False
        self._is_closed = False
        self._said_bye = False

    @classmethod
    def world(
        cls,
        world: int,
        sequencer: SequencerLike | None = None,
        *,
        policy: PlanPolicy | None = None,
        limits: HubLimits | None = None,
    ) -> list[LocalHub]:
        """`world` joined hubs in rank order, for `sequencer` or one made from `policy`.

        Each may be used by a thread of its own.
        """
        made: SequencerLike | None = sequencer
        if made is None:
            assert policy is not None, "a world needs a sequencer or the policy for one"
            made = Sequencer(world, policy, plan=plan_whale)
        centre = _Centre(world, made, limits or HubLimits())
        return [cls(rank, centre) for rank in range(world)]

    def start(self, hello: Hello, timeout_s: float) -> tuple[SlabEntry, ...]:
        assert not self._incarnation, "start is called once"
        self._incarnation = hello.entry.incarnation
        centre = self._centre
        with centre.lock:
            centre.ends[self._incarnation] = self
            centre.perform(centre.conductor.received(self._incarnation, hello, now_ns(), centre.launch()))
        self._wait(lambda: self._table is not None, timeout_s, "the slab table")
        assert self._table is not None
        return self._table

    def gather(self, data: bytes, timeout_s: float) -> tuple[bytes, ...]:
        offer = Offer(rank=self._rank, turn=self._turn, data=data)
        wire.check(offer)
        self._to_centre(offer)
        self._wait(lambda: self._gathered is not None, timeout_s, "all ranks to take part in a gather")
        assert self._gathered is not None and self._gathered.turn == self._turn
        parts, self._gathered = self._gathered.parts, None
        self._turn += 1
        return parts

    def mapped(self, timeout_s: float) -> None:
        self._to_centre(Mapped(rank=self._rank))
        self._wait(lambda: self._has_started, timeout_s, "all ranks to map the slabs")

    def send(self, message: Message) -> None:
        wire.check(message)
        self._inbox.raise_failure()
        self._said_bye |= isinstance(message, Bye)
        self._to_centre(message)

    def drain(self) -> list[Message]:
        centre = self._centre
        if self._rank == 0:
            with centre.lock:
                centre.perform(centre.conductor.tick(now_ns(), self._launch))
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
        assert self._rank == 0, "the sequencer lives with rank 0"
        centre = self._centre
        with centre.lock:
            centre.perform(centre.conductor.order(StopWanted(grace_s), now_ns(), self._launch))

    def kill(self, how: str = "killed") -> None:
        """Die without a word, as SIGKILL would; every other hub of the world sees PeerDied."""
        centre = self._centre
        with centre.lock:
            centre.ends.pop(self._incarnation, None)
            self._inbox.close()
            centre.perform(centre.conductor.gone(self._incarnation, how, now_ns(), centre.launch()))

    def close(self) -> None:
        """A rank that closes without Bye is dead to the others."""
        if not self._is_closed:
            self._is_closed = True
            self.kill("its process has ended")

    def _to_centre(self, message: Message) -> None:
        centre = self._centre
        with centre.lock:
            centre.perform(centre.conductor.received(self._incarnation, message, now_ns(), centre.launch()))

    def _take(self, message: Message) -> bool:
        """Called under the centre's lock. False if there is no room, while nothing has failed yet."""
        match message:
            case Table():
                self._table = message.entries
            case Offers():
                self._gathered = message
            case WorldStarts():
                self._has_started = True
            case Refused():
                self._inbox.fail(FleetRefused(message.reason, message.field))
            case Died():
                self._inbox.fail(PeerDied(message.rank, message.how))
            case Bye() if message.rank == self._rank:
                pass  # sequencers broadcast it; the loop knows
            case _:
                return self._inbox.put(message) or self._inbox.failure is not None
        return True

    def _wait(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        centre = self._centre
        with centre.changed:
            while not is_done():
                self._inbox.raise_failure()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    missing = ", ".join(map(str, centre.conductor.missing()))
                    raise HubError(f"waited {timeout_s:g} s for {what}; not here: {missing or 'nobody'}")
                centre.changed.wait(left_s)
