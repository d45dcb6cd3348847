"""Which provider this world can use, found out by doing, and decided by all ranks together.

What a device claims in its attributes is not what it does: every rank makes a small slab in each way, maps those of its
peers, rings them with the kernel, and the owner sees the rings arrive in a wait that was blocked before. Then all vote.

Rule 1: every rank takes part in the same gathers, three for each provider and one for the vote, whatever failed on it:
        nobody waits for one that gave up.
Rule 2: providers are tried one after another. A stream that will not be released spoils the device: nothing of it is
        given back any more, for that may wait for ever, and this rank votes against all.
Rule 3: `choose` and `suspects` are pure. A provider that was asked for by name is used or refused, never replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, Final, Literal

import msgspec

from whalez.clock import now_ns
from whalez.config import device_connections_warning
from whalez.errors import CapabilityMissing, FabricError
from whalez.fabric.cuda.doorbell import RELEASED
from whalez.fabric.cuda.driver import Device, Driver, DriverError
from whalez.fabric.cuda.kernels import doorbell_write_kernel
from whalez.fabric.cuda.providers import PROVIDERS, CudaSlab, CudaSlabs
from whalez.fabric.cuda.stream import CudaStream, KernelSet
from whalez.fabric.cuda.ticket import this_machine
from whalez.fabric.layout import BELL_DATA, BELL_FREE, SlabLayout, SlabSpec
from whalez.ops.device.kernel import Kernel
from whalez.rendezvous.messages import SlabEntry

#: Collective: hands in this rank's bytes and returns those of all, in rank order.
Gather = Callable[[bytes], Sequence[bytes]]

_log = logging.getLogger(__name__)

#: What a ring may take to end a wait. It is microseconds when both contexts run at once. Two processes of one device
#: take turns of milliseconds, more of them longer; and a context that has run nothing yet may need a second or two.
ARRIVAL_S: Final = 5.0
_WORDS_MAX, _PEERS_WORDS_MAX = 2000, 16_000  # characters of one provider: a ballot has to fit into an offer of the hub
_RUNG: Final = 0x5EED


class Memops(msgspec.Struct, frozen=True, kw_only=True):
    """What stream memory operations do here: "" where the driver took all of them; else its words of the first that it
    refused, behind the provider and, for imported memory, the peer. Kernels ring in any case."""

    wait_local: str = ""
    write_local: str = ""
    wait_imported: str = ""
    write_imported: str = ""

    def with_more(self, **words: str) -> Memops:
        """The same, and of what was taken so far, what else was found."""
        return msgspec.structs.replace(self, **{name: getattr(self, name) or more for name, more in words.items()})


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How one provider did on one rank."""

    provider: str
    words: str = ""  #: why it is unusable here; "" if it works
    failed: dict[int, str] = {}  #: peers that could not be mapped or rung, and why


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found."""

    rank: int
    host: str
    machine: bytes
    device: str
    driver_version: int
    probes: tuple[Probe, ...]
    memops: Memops | None  #: None if no slab could be made

    def probe(self, provider: str) -> Probe:
        for probe in self.probes:
            if probe.provider == provider:
                return probe
        return Probe(provider=provider, words="was not tried")

    @property
    def wait_by(self) -> Literal["memop", "spin"]:
        """How this rank waits: by memory operations if its device takes both of them on its own memory.

        A stream that waits by them writes by them too.
        """
        memops = self.memops
        return "spin" if memops is None or memops.wait_local or memops.write_local else "memop"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What the world uses, and why not another; for the log."""

    provider: str
    reasons: dict[str, str]  #: provider -> why it is not used

    def __str__(self) -> str:
        return "; ".join(
            [f"slabs: {self.provider}", *(f"{name} unavailable: {why}" for name, why in self.reasons.items())]
        )


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a preflight, equal on all ranks but for the last two fields; its text is what the log says."""

    choice: Choice
    wait_by: Literal["memop", "spin"]  #: how this rank waits
    memops: Memops | None  #: the driver's words on this rank

    def __str__(self) -> str:
        refused = [] if self.memops is None else [(n, w) for n, w in msgspec.structs.asdict(self.memops).items() if w]
        words = "".join(f"; {name.replace('_', ' ')}: {words}" for name, words in refused)
        return f"{self.choice}; waits by {self.wait_by}{words}"


# ---- the decision, pure ---------------------------------------------------------------------------------------------
def objection(ballots: Sequence[Ballot], provider: str) -> str:
    """Why the world cannot use a provider; "" if all ranks can."""
    own = [(ballot, ballot.probe(provider).words) for ballot in ballots]
    of_peers = [
        (ballot, f"peer {peer}: {why}") for ballot in ballots for peer, why in ballot.probe(provider).failed.items()
    ]
    # What a rank says of itself comes first: what others say of it may only be the consequence.
    against = [f"rank {ballot.rank} on {ballot.host}: {words}" for ballot, words in [*own, *of_peers] if words]
    if not against:
        return ""
    text = against[0] if len(against) == 1 else f"{against[0]} (and {len(against) - 1} more)"
    sick = suspects(ballots, provider)
    return f"{text}; look at {', '.join(sick)} first" if sick else text


def suspects(ballots: Sequence[Ballot], provider: str) -> tuple[str, ...]:
    """Machines that explain every failed import: all that crosses their border fails, and nothing else does.

    An importer is told that something is wrong in the domain, not where: a dead nvidia-imex breaks imports everywhere.
    """
    machines = {ballot.rank: ballot.machine for ballot in ballots}
    hosts = {ballot.machine: ballot.host for ballot in ballots}
    crossing = [
        (machines[ballot.rank], machines[peer], peer in ballot.probe(provider).failed)
        for ballot in ballots
        for peer in machines
        if machines[ballot.rank] != machines[peer]
    ]
    if len(hosts) < 3:  # of two, either explains everything
        return ()
    failed = [(one, other) for one, other, is_failed in crossing if is_failed]
    worked = [(one, other) for one, other, is_failed in crossing if not is_failed]
    sick = [m for m in hosts if any(m in pair for pair in failed) and not any(m in pair for pair in worked)]
    explained = all(one in sick or other in sick for one, other in failed)
    return tuple(hosts[machine] for machine in sick) if sick and explained and len(sick) < len(hosts) else ()


def choose(ballots: Sequence[Ballot], asked: str = "auto") -> Choice:
    """The first provider that works on all ranks; or the one asked for, if it does. Equal on all ranks.

    Raises: CapabilityMissing with the driver's words
    """
    assert ballots, "nobody voted"
    if asked != "auto":
        if asked not in PROVIDERS:
            raise CapabilityMissing(f"slabs: expected auto or one of {', '.join(PROVIDERS)}, got {asked!r}")
        if against := objection(ballots, asked):
            raise CapabilityMissing(f"slabs: {asked} was asked for and is unavailable: {against}")
        return Choice(provider=asked, reasons={})
    reasons: dict[str, str] = {}
    for provider in PROVIDERS:
        reasons[provider] = objection(ballots, provider)
        if not reasons[provider]:
            del reasons[provider]
            return Choice(provider=provider, reasons=reasons)
    raise CapabilityMissing("slabs: no provider works: " + "; ".join(f"{n}: {why}" for n, why in reasons.items()))


# ---- doing it ------------------------------------------------------------------------------------------------------
def _probe_layout(world: int) -> SlabLayout:
    return SlabLayout.from_spec(SlabSpec.of_bells(world))


class _Attempt:
    """One provider on one rank: its slab, its peers', the rings between them.

    While a stream is blocked nothing may be made, mapped or given back: such calls wait for the device.

    Owns:      the slabs and two streams
    Closed by: `close`, on all ranks after the last gather
    """

    def __init__(self, slabs: CudaSlabs, kernels: KernelSet | None, words: str, arrival_s: float = ARRIVAL_S) -> None:
        self.name = slabs.name
        self.words = words
        self.failed: dict[int, str] = {}
        self.memops: Memops | None = None
        self.is_stuck = False  #: a stream stands in a wait that nothing has ended
        self._is_drained = False
        self._arrival_s = arrival_s
        self._slabs = slabs
        self._kernels = kernels
        self._opened: dict[int, CudaSlab] = {}
        self._own: CudaSlab
        self._streams: list[CudaStream] = []  #: one that blocks, one that rings
        self._peers = [peer for peer in range(slabs.layout.world) if peer != slabs.rank]

    @contextlib.contextmanager
    def _noted(self, peer: int | None = None) -> Iterator[None]:
        """What fails in this block is remembered, of a peer or of this rank; the first word counts."""
        try:
            yield
        except FabricError as error:
            if peer is not None:
                self.failed.setdefault(peer, str(error))
            else:
                self.words = self.words or str(error)

    def _line(self, slab: CudaSlab, kind: int, sender: int) -> int:
        return slab.address + self._slabs.layout.bell_offset(kind, sender)

    def create(self) -> bytes:
        """Make slab and streams. The ticket, empty if it did not work."""
        if self._kernels is None or self.words:
            return b""
        with self._noted():
            self._own = self._slabs.create()
            # Another priority has another hardware queue: what rings does not stand behind what waits.
            _, greatest = self._slabs.device.driver.cuCtxGetStreamPriorityRange()
            for priority in (0, int(greatest)):
                self._streams.append(CudaStream(self._slabs.device, self._kernels, priority=priority))
            return self._slabs.ticket
        return b""

    def open(self, entries: Sequence[SlabEntry]) -> None:
        """Map every peer that made a slab. Others may still open the own one: it is unlinked by `close`."""
        if self.words:
            return
        for peer in self._peers:
            if not entries[peer].ticket:
                self.failed[peer] = "made no slab"
                continue
            with self._noted(peer):
                self._opened[peer] = self._slabs.open(entries[peer])

    def arm(self) -> None:
        """Block a stream in a wait for the rings of all peers, when all that is made has been made."""
        if not self.words:
            with self._noted():
                self._arm()

    def _arm(self) -> None:
        blocked, ringing = self._streams
        local = self._line(self._own, BELL_FREE, self._slabs.rank)
        write = _words_of(self.name, lambda: ringing.write_value(local, 1))
        pairs = [(self._line(self._own, BELL_DATA, peer), _RUNG + peer) for peer in self._peers]
        wait = _words_of(self.name, lambda: blocked.wait_value(*(pairs or [(local, 0)])))
        self.memops = Memops(wait_local=wait, write_local=write)
        if pairs and not wait and blocked.is_done():
            raise FabricError(f"{self.name}: a wait for rings that nobody rang was over at once: it does not wait")

    def ring(self) -> None:
        """Ring every peer that was mapped, by kernel; try memory operations on the same mapping."""
        if self.words:
            return
        _, ringing = self._streams
        deadline = now_ns() + int(self._arrival_s * 1e9)  # of all of them
        for peer, theirs in self._opened.items():
            with self._noted(peer):
                line = self._line(theirs, BELL_DATA, self._slabs.rank)
                ringing.write_by_kernel(line, _RUNG + self._slabs.rank)
                assert self.memops is not None
                beside = self._line(theirs, BELL_FREE, self._slabs.rank)
                where = f"{self.name}, peer {peer}"
                write = _words_of(where, lambda at=beside: ringing.write_value(at, 1))  # type: ignore[misc]
                wait = _words_of(where, lambda at=beside: ringing.wait_value((at, 0)))  # type: ignore[misc]
                self.memops = self.memops.with_more(write_imported=write, wait_imported=wait)
                self._finish(ringing, f"ringing rank {peer}", deadline)

    def verify(self, rung_by: Sequence[int]) -> None:
        """See the rings of `rung_by` arrive, in the blocked wait and in memory."""
        if not self._streams or self.memops is None:
            return
        with self._noted():
            self._release([peer for peer in self._peers if peer not in rung_by])
            begun = now_ns()
            self._finish(self._streams[0], "a wait for rings that came")
            _log.info("%s: a wait for rings that came ended within %.1f ms", self.name, (now_ns() - begun) / 1e6)
        with self._noted():
            for peer in rung_by:
                seen = self._seen(peer)
                if seen != _RUNG + peer:
                    raise FabricError(
                        f"{self.name}: rank {peer} rang {_RUNG + peer:#x}, but {seen:#x} stands in the slab"
                    )

    def _finish(self, stream: CudaStream, what: str, deadline: int = 0) -> None:
        """Wait until a stream has run all of its entries, until `deadline` in ns, or for as long as a ring may take."""
        begun = now_ns()
        deadline = deadline or begun + int(self._arrival_s * 1e9)
        while not stream.is_done():
            if now_ns() > deadline:
                waited_s = (now_ns() - begun) / 1e9
                raise FabricError(f"{self.name}: {what} did not end within {waited_s:.1f} s of {self._arrival_s:g}")
            time.sleep(0.0005)

    def unmap(self) -> None:
        """Not while a stream is blocked: the call would wait for it. What fails is tried once more, for the owners are
        about to free what is mapped here."""
        if not self.is_stuck:
            for _ in range(2):
                with self._noted():
                    self._slabs.close_peers()

    def _seen(self, peer: int) -> int:
        data = self._own.read(self._slabs.layout.bell_offset(BELL_DATA, peer), 8)
        return int.from_bytes(data, sys.byteorder)

    def _release(self, peers: Sequence[int]) -> None:
        """End the waits for these peers, who will not ring. No ring can be lost by it: they are not under way."""
        assert self.memops is not None
        blocked, ringing = self._streams
        if not blocked.is_done():
            store = ringing.write_by_kernel if self.memops.write_local else ringing.write_value
            for peer in peers:
                store(self._line(self._own, BELL_DATA, peer), RELEASED)
            self._finish(ringing, "releasing a wait")

    def unblock(self) -> None:
        """Whatever happened, no stream of this rank stands in a wait any more."""
        if not self._streams or self.memops is None or self.is_stuck or self._is_drained:
            return
        for _ in range(2):  # a call may fail once
            with self._noted():
                self._release(self._peers)
                for stream in self._streams:
                    self._finish(stream, "a wait that was released")
                self._is_drained = True
                return
        self.is_stuck = True

    def close(self) -> None:
        """Give everything back; what fails is tried once more. A device with a blocked stream keeps what it has."""
        if self.is_stuck:
            _log.error("%s: a stream is still blocked; it and its slabs stay until this process exits", self.name)
            return
        for give_back in (*(stream.close for stream in self._streams), self._slabs.close):
            for _ in range(2):
                with self._noted(), _logged(self.name):  # the vote may be over
                    give_back()

    def probe(self) -> Probe:
        each = max(60, _PEERS_WORDS_MAX // max(1, len(self.failed)))
        return Probe(
            provider=self.name,
            words=self.words[:_WORDS_MAX],
            failed={peer: words[:each] for peer, words in self.failed.items()},
        )


def _words_of(where: str, call: Callable[[], Any]) -> str:
    try:
        call()
    except DriverError as error:
        return f"{where}: {error.words}"
    return ""


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """What is given back in this block: if that fails, it is in the log."""
    try:
        yield
    except FabricError as error:
        _log.warning("%s: giving back: %s", what, error)
        raise


def _memops_of(attempts: Sequence[_Attempt]) -> Memops | None:
    """What all attempts found; None if none got that far."""
    found = [attempt.memops for attempt in attempts if attempt.memops is not None]
    return reduce(lambda all_, more: all_.with_more(**msgspec.structs.asdict(more)), found) if found else None


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has of one provider."""

    provider: str
    ticket: bytes  #: empty if no slab could be made


def preflight(
    device: Device,
    *,
    rank: int,
    world: int,
    host: str,
    gather: Gather,
    providers: Sequence[str] = tuple(PROVIDERS),
    machine: bytes | None = None,
    image: Callable[[Kernel], bytes] | None = None,
    arrival_s: float = ARRIVAL_S,
) -> list[Ballot]:
    """Try every provider with all peers. Collective: yes, three gathers for each provider, and one.

    Args:
        host:       for people; `machine` says which ranks share one
        gather:     may raise, as when a peer has died; everything is given back then. A rank may come to one five times
                    `arrival_s` after another
        image:      machine code of a kernel, compiled now by default
        arrival_s:  what a ring may take to end a wait
    Returns: the ballots of all ranks, in rank order and equal on all: for `choose`
    """
    layout = _probe_layout(world)
    machine = this_machine() if machine is None else machine
    attempts: list[_Attempt] = []
    words, kernels = "", None
    try:
        try:
            kernels = KernelSet(device, [doorbell_write_kernel], image)
        except FabricError as error:
            words = str(error)
        for name in providers:
            slabs = PROVIDERS[name](layout, device=device, rank=rank, incarnation="preflight", machine=machine)
            attempts.append(_Attempt(slabs, kernels, words, arrival_s))
            _try(attempts, rank, world, gather)
            if attempts[-1].is_stuck:
                words = f"{name}: a stream of this device is blocked for good: {attempts[-1].words}"
        for attempt in attempts:  # what has worked before cannot be used on this device either
            attempt.words = attempt.words or (words if any(each.is_stuck for each in attempts) else "")
        ballot = Ballot(
            rank=rank,
            host=host,
            machine=machine,
            device=device.name,
            driver_version=device.driver_version,
            probes=tuple(attempt.probe() for attempt in attempts),
            memops=_memops_of(attempts),
        )
        return _gather(gather, ballot, Ballot)  # all have unmapped; now what is mapped nowhere may go
    finally:
        for attempt in attempts:
            attempt.unblock()
        is_stuck = any(attempt.is_stuck for attempt in attempts)
        for attempt in attempts:
            if is_stuck:
                attempt.is_stuck = True
            attempt.close()
        if kernels is not None and not is_stuck:
            for _ in range(2):
                with contextlib.suppress(FabricError), _logged("kernels"):
                    kernels.close()


def _try(attempts: Sequence[_Attempt], rank: int, world: int, gather: Gather) -> None:
    """One provider: the newest attempt. Of those before it, what was unmapped everywhere is given back."""
    attempt = attempts[-1]
    made = _gather(gather, _Made(provider=attempt.name, ticket=attempt.create()), _Made)
    for peer, each in enumerate(made):
        if each.provider != attempt.name:
            raise FabricError(f"preflight: rank {peer} tries {each.provider}, this rank {attempt.name}")
    if not any(each.is_stuck for each in attempts):
        for before in attempts[:-1]:
            before.close()
    attempt.open([_entry(peer, each.ticket) for peer, each in enumerate(made)])
    attempt.arm()
    _gather(gather, None, Any)  # everybody's streams are blocked now
    attempt.ring()
    rung = _gather(gather, attempt.probe(), Probe)
    attempt.verify([p for p in range(world) if p != rank and not rung[p].words and rank not in rung[p].failed])
    attempt.unblock()
    attempt.unmap()


def agree(
    device: Device, *, rank: int, world: int, host: str, gather: Gather, asked: str = "auto", **how: Any
) -> Agreement:
    """The preflight, the vote and the log. Collective: yes, as `preflight`, whose arguments `how` may give.

    Args:
        gather:  of a hub, between its table and its start: `lambda data: hub.gather(data, timeout_s)`
        asked:   "auto", or the provider that the user named: used by all or refused by all
    Raises: CapabilityMissing with the driver's words, on every rank; what `gather` raises
    """
    ballots = preflight(device, rank=rank, world=world, host=host, gather=gather, **how)
    mine = ballots[rank]
    try:
        choice = choose(ballots, asked)
    except CapabilityMissing as error:
        _log.error("rank %d: %s", rank, error)
        raise
    agreement = Agreement(choice=choice, wait_by=mine.wait_by, memops=mine.memops)
    if warning := device_connections_warning(os.environ):
        _log.warning("rank %d: %s", rank, warning)
    _log.info("rank %d on %s, driver %d: %s", rank, mine.device, mine.driver_version, agreement)
    return agreement


def _entry(peer: int, ticket: bytes) -> SlabEntry:
    return SlabEntry(rank=peer, incarnation="preflight", host=f"rank {peer}'s machine", pid=0, ticket=ticket)


def _gather(gather: Gather, mine: Any, kind: Any) -> list[Any]:
    """What all ranks handed in. Raises FabricError for what no rank of this version sends."""
    parts = []
    for rank, data in enumerate(gather(msgspec.msgpack.encode(mine))):
        try:
            part = msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise FabricError(f"preflight: rank {rank} sent what is no part of it: {error}") from None
        parts.append(part)
    return parts


# ---- by hand -------------------------------------------------------------------------------------------------------
MakeDriver = Callable[[], Driver]
Image = Callable[[Kernel], bytes] | None


def _second(pipe: Any, ordinal: int, make_driver: MakeDriver, image: Image) -> None:
    """Rank 1 of the world of two that `main` makes."""

    def gather(mine: bytes) -> list[bytes]:
        pipe.send_bytes(mine)
        return [pipe.recv_bytes(), mine]

    with contextlib.suppress(FabricError, EOFError), Device(make_driver(), ordinal) as device:
        preflight(device, rank=1, world=2, host="this machine", gather=gather, image=image)


def main(argv: Sequence[str] = (), *, make_driver: MakeDriver = Driver, image: Image = None) -> int:
    """Try the providers between two processes on one device, and say what came of it. 0 if one works.

    make_driver, image:  another driver and its machine code, for tests
    """
    import multiprocessing

    parser = argparse.ArgumentParser(prog="python -m whalez.fabric.cuda.preflight", description=main.__doc__)
    parser.add_argument("ordinal", type=int, nargs="?", default=0, help="of the device")
    parser.add_argument("--slabs", default="auto", help=f"auto, or one of {', '.join(PROVIDERS)}: that one or none")
    options = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    second = context.Process(target=_second, args=(theirs, options.ordinal, make_driver, image), daemon=True)

    def gather(mine: bytes) -> list[bytes]:
        if not pipe.poll(60):
            raise FabricError("preflight: the second process does not answer")
        other: bytes = pipe.recv_bytes()
        pipe.send_bytes(mine)
        return [mine, other]

    if warning := device_connections_warning(os.environ):
        print(f"preflight: {warning}", file=sys.stderr)
    try:
        with Device(make_driver(), options.ordinal) as device:
            second.start()
            theirs.close()
            agreement = agree(
                device, rank=0, world=2, host="this machine", gather=gather, asked=options.slabs, image=image
            )
            print(f"{device.name}, driver {device.driver_version}; {agreement}")
    except (FabricError, EOFError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 1
    finally:
        if second.pid is not None:
            second.join(10)
            second.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
