"""Doorbells on the host: how a rank tells its peers that something is there, and how it waits or sleeps for that.

Rule 1: the sleeper protocol lives in the kernels of this file; README.md argues why no ring is lost.
Rule 2: no meaning. Which window or step a value stands for is the caller's; here values rise, and that is all.
Hot: yes; `Bells.ring` and `Bells.wait` are two of each paired exchange.

One thread of a rank (the loop) rings, waits and sleeps. `wake`, `progress` and `status` may come from any thread or a
signal handler.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from whalez.clock import now_ns
from whalez.errors import DoorbellTimeout, FabricError, MispairedLaunch
from whalez.fabric.atomics import (
    cpu_relax,
    fetch_add_seqcst_u32,
    fetch_add_seqcst_u64,
    load_acquire_u64,
    load_seqcst_u32,
    store_release_u64,
    store_seqcst_u32,
)
from whalez.fabric.futex import EAGAIN, EINTR, ETIMEDOUT, futex_wait, futex_wake, monotonic_ns
from whalez.fabric.layout import (
    BELL_COMBINE,
    BELL_DATA,
    BELL_DISPATCH,
    BELL_FREE,
    BELL_KINDS,
    BELL_LAUNCH,
    LINE_BYTES,
    STATUS_KIND,
    STATUS_LAYER,
    STATUS_PEER,
    STATUS_VALUE,
    WORDS,
    SlabLayout,
    SlabSpec,
)
from whalez.fabric.private import PrivateSlab
from whalez.fabric.provider import ViewableSlab

__all__ = [
    "BELL_COMBINE",
    "BELL_DATA",
    "BELL_DISPATCH",
    "BELL_FREE",
    "BELL_LAUNCH",
    "STRIDE",
    "Bells",
    "Why",
    "gang_value",
    "pairing_value",
    "place_of",
    "warm",
]

#: Windows a whale may use; the value of its first window is (seq + 1) * STRIDE.
STRIDE: Final = 2**20

_VALUE_END: Final = 2**63
_EVERYBODY: Final = 2**31 - 1
_WAKE_BIT: Final = 1 << len(BELL_KINDS)  # in the sleeper's mark, beside one bit per kind of bell
_NO_BOUND: Final = 2**62

# What a kernel answers: code + 8 * detail.
_DONE: Final = 0
_MISSING: Final = 1  # detail: index into peers of the first that has not rung
_AHEAD: Final = 2  # detail: index into peers of one that ran ahead
_FAILED: Final = 3  # detail: errno
_WOKEN: Final = 4
_TICKED: Final = 5


class Why(StrEnum):
    """Why `Bells.sleep` came back."""

    LAUNCH = "launch"  #: a peer has begun the launch this rank composes next
    WAKE = "wake"  #: `wake` was called since the last `take_wakes`, or a signal came
    TICK = "tick"  #: the time is over


class Awaited(NamedTuple):
    """What a rank waits for, or waited for when its wait was broken off."""

    rank: int
    kind: str
    where: str
    expected: int
    seen: int

    def __str__(self) -> str:
        bell = f"rank {self.rank}'s {self.kind} doorbell at {self.where}"
        return f"waited for {bell}: expected >= {self.expected:#x}, seen {self.seen:#x}"


class WaitStatus(NamedTuple):
    """Whom a rank waits for now; `peer` is None if for nobody."""

    peer: int | None
    kind: str
    value: int
    layer: int


def gang_value(seq: int, window: int) -> int:
    """Value of the data and free doorbells for `window` of whale `seq`; rises over windows and over seqs."""
    assert seq >= 0, seq
    assert 0 <= window < STRIDE, window
    return (seq + 1) * STRIDE + window


def pairing_value(launch: int, steps_per_launch: int, step: int) -> int:
    """Value of the dispatch and combine doorbells for paired exchange `step` of `launch`; never 0."""
    assert launch >= 0, launch
    assert 0 <= step < steps_per_launch, (step, steps_per_launch)
    return launch * steps_per_launch + step + 1


def place_of(kind: int, value: int, layer: int, steps_per_launch: int) -> str:
    """What a doorbell value stands for, in words; `layer` below 0 is left out."""
    if kind in (BELL_DATA, BELL_FREE):
        place = f"seq {value // STRIDE - 1} window {value % STRIDE}"
    elif kind == BELL_LAUNCH:
        place = f"launch {value - 1}"
    else:
        launch, step = divmod(value - 1, steps_per_launch)
        place = f"launch {launch} step {step}"
    return place if layer < 0 else f"{place} layer {layer}"


# ---- kernels --------------------------------------------------------------------------------------------------
@njit(cache=True, nogil=True)
def _poke(counter: Any, mark: Any, bit: Any) -> None:
    """The ringer's half after its store: count the ring, then look whether somebody sleeps for this kind."""
    fetch_add_seqcst_u32(counter, 1)
    if load_seqcst_u32(mark) & bit:
        futex_wake(counter, _EVERYBODY)


@njit(cache=True)  # keeps the GIL: it runs a microsecond, and taking the GIL back can cost a switch interval of 5 ms
def _ring(table: Any, rung: Any, kind: Any, kind_bytes: Any, peers: Any, value: Any) -> Any:
    """Raise this rank's line of `kind` at every peer. -1, or the first peer whose line would not rise."""
    for i in range(peers.size):
        if value <= rung[kind, peers[i]]:
            return peers[i]
    for i in range(peers.size):
        rung[kind, peers[i]] = value
        store_release_u64(table[peers[i], 0] + kind * kind_bytes, value)
    for i in range(peers.size):
        _poke(table[peers[i], 1], table[peers[i], 2], 1 << kind)
    return -1


@njit(cache=True)  # keeps the GIL, as above
def _scan(lines: Any, peers: Any, start: Any, value: Any, ahead_max: Any) -> Any:
    """Look at the lines of peers[start:] until one has not reached `value` or is more than `ahead_max` beyond it."""
    for i in range(start, peers.size):
        seen = load_acquire_u64(lines + peers[i] * LINE_BYTES)
        if seen < value:
            return _MISSING + 8 * i
        if seen - value > ahead_max:
            return _AHEAD + 8 * i
    return _DONE


@njit(cache=True, nogil=True)
def _wait(
    lines: Any,
    peers: Any,
    start: Any,
    value: Any,
    ahead_max: Any,
    counter: Any,
    mark: Any,
    kind: Any,
    status: Any,
    layer: Any,
    spin_ns: Any,
    slice_ns: Any,
) -> Any:
    """Spin, then sleep, until peers[start:] have all rung or `slice_ns` is over or a signal came."""
    begun = monotonic_ns()
    result = _scan(lines, peers, start, value, ahead_max)
    while result & 7 == _MISSING and monotonic_ns() - begun < spin_ns:
        cpu_relax()
        result = _scan(lines, peers, result >> 3, value, ahead_max)
    if result & 7 != _MISSING:
        store_release_u64(status + 8 * STATUS_PEER, 0)  # an earlier slice of this wait may have set it
        return result
    store_release_u64(status + 8 * STATUS_KIND, kind)
    store_release_u64(status + 8 * STATUS_VALUE, value)
    store_release_u64(status + 8 * STATUS_LAYER, layer)
    while True:
        # Mark, count, look, sleep: this order, and both sides sequentially consistent (README.md).
        store_seqcst_u32(mark, 1 << kind)
        count = load_seqcst_u32(counter)
        result = _scan(lines, peers, result >> 3, value, ahead_max)
        if result & 7 != _MISSING:
            break
        store_release_u64(status + 8 * STATUS_PEER, peers[result >> 3] + 1)
        remaining_ns = begun + slice_ns - monotonic_ns()
        if remaining_ns <= 0:
            break
        answer = futex_wait(counter, count, remaining_ns)
        if answer == -EINTR:
            break
        if answer != 0 and answer != -EAGAIN and answer != -ETIMEDOUT:
            result = _FAILED - 8 * answer
            break
    store_seqcst_u32(mark, 0)
    if result & 7 == _DONE:  # otherwise the status stays for whoever reads the post-mortem
        store_release_u64(status + 8 * STATUS_PEER, 0)
    return result


@njit(cache=True, nogil=True)
def _sleep(
    lines: Any, world: Any, launch: Any, counter: Any, mark: Any, bits: Any, puts: Any, taken: Any, timeout_ns: Any
) -> Any:
    """The idle rule: sleep until a peer has begun `launch`, a put came that was not taken, or the time is over."""
    begun = monotonic_ns()
    result = _TICKED
    while True:
        store_seqcst_u32(mark, bits)
        count = load_seqcst_u32(counter)
        for peer in range(world):
            seen = load_acquire_u64(lines + peer * LINE_BYTES)
            if seen > launch + 1:
                result = _AHEAD + 8 * peer
                break
            if seen > launch:
                result = _DONE
        if result == _TICKED and load_acquire_u64(puts) != taken:
            result = _WOKEN
        remaining_ns = begun + timeout_ns - monotonic_ns()
        if result != _TICKED or remaining_ns <= 0:
            break
        answer = futex_wait(counter, count, remaining_ns)
        if answer == -EINTR:
            result = _WOKEN
            break
        if answer != 0 and answer != -EAGAIN and answer != -ETIMEDOUT:
            result = _FAILED - 8 * answer
            break
    store_seqcst_u32(mark, 0)
    return result


@njit(cache=True)
def _wake(puts: Any, counter: Any, mark: Any) -> None:
    fetch_add_seqcst_u64(puts, 1)
    _poke(counter, mark, _WAKE_BIT)


@njit(cache=True)
def _load(address: Any) -> Any:
    return load_acquire_u64(address)


@njit(cache=True)
def _store(address: Any, value: Any) -> None:
    store_release_u64(address, value)


@njit(cache=True)
def _raise(address: Any) -> None:
    store_release_u64(address, load_acquire_u64(address) + 1)  # one writer, so no atomic add


@njit(cache=True)
def _load_all(addresses: Any, offset: Any, out: Any) -> None:
    for i in range(addresses.size):
        out[i] = load_acquire_u64(addresses[i] + offset)


# ---- the object -----------------------------------------------------------------------------------------------
class Bells:
    """This rank's doorbells: the own slab's lines to wait on, the peers' lines to ring.

    Owns:      nothing but the right to touch the slabs; it keeps them mapped while it is open
    Closed by: the loop, after its last ring and before the provider; `wake` from another thread is then a no-op

    layout, slabs:     the world's, slabs in rank order
    stuck_s:           a wait gives up when no awaited rank has made progress for so long; may be changed at any time
    steps_per_launch:  paired exchanges of a launch; how far a pairing bell may be ahead before the launch is mispaired
    spin_ns:           how long a wait looks before it sleeps; short, for there are more ranks than cores
    slice_s:           how often a wait calls `on_slice`
    """

    def __init__(
        self,
        layout: SlabLayout,
        slabs: Sequence[ViewableSlab],
        rank: int,
        *,
        stuck_s: float = 60.0,
        steps_per_launch: int = 1,
        spin_ns: int = 3000,
        slice_s: float = 0.1,
    ) -> None:
        world = layout.world
        assert [slab.rank for slab in slabs] == list(range(world)), "slabs must be in rank order"
        assert 0 <= rank < world, rank
        assert steps_per_launch >= 1, steps_per_launch
        self.rank = rank
        self.world = world
        self.stuck_s = stuck_s
        self.steps_per_launch = steps_per_launch
        self.spin_ns = spin_ns
        self.slice_s = slice_s
        self._kind_bytes = world * LINE_BYTES
        self._address = np.array([slab.address for slab in slabs], np.int64)
        counter, mark = layout.offset_of("wake_counter"), layout.offset_of("sleeper_mark")
        # [world, 3]: where this rank's launch line, the wake counter and the mark lie in each peer's slab.
        self._table = self._address[:, None] + np.array([layout.bell_offset(0, rank), counter, mark], np.int64)
        self._rung = np.zeros((len(BELL_KINDS), world), np.int64)
        own = int(self._address[rank])
        self._lines = [own + layout.bell_offset(kind, 0) for kind in range(len(BELL_KINDS))]
        self._counter = own + counter
        self._mark = own + mark
        self._puts = own + layout.offset_of("put_count")
        self._status = own + layout.offset_of("status")
        self._progress = own + layout.offset_of("progress")
        self._offset_words = layout.offset_of("words")
        self._offset_progress = layout.offset_of("progress")
        self._offset_status = layout.offset_of("status")
        self._offset_launch = layout.offset_of("launch_count")
        # Data and free bells have no bound: the peer may be whole windows further.
        self._ahead_max = [1, steps_per_launch, steps_per_launch, _NO_BOUND, _NO_BOUND]
        self._scratch = np.zeros(world, np.int64)
        self._taken = 0
        # Close against wake, progress and status from other threads; re-entrant, for a signal handler may call wake.
        self._lock = threading.RLock()
        # A raw address does not keep memory mapped, a view does.
        self._views: list[npt.NDArray[Any]] | None = [slab.view(0, (1,), np.uint8) for slab in slabs]

    def close(self) -> None:
        """Let go of the slabs. Idempotent. Blocks: no."""
        with self._lock:
            self._views = None

    # ---- ring and wait ----------------------------------------------------------------------------------------
    def ring(self, kind: int, peers: npt.NDArray[np.int64], value: int) -> None:
        """Raise this rank's line of `kind` at every rank of `peers` to `value`.

        Args:
            peers:  i64 [n]  ranks, contiguous and writable (another kind of array would compile another kernel)
            value:  above every value rung to these peers for this kind before, below 2^63
        Order:    all this thread read and wrote before is done when a peer's `wait` returns
        Cost:     one store, one atomic add and one load per peer; a system call for each that sleeps for this kind
        """
        assert peers.dtype == np.int64, peers.dtype
        assert 0 < value < _VALUE_END, value
        assert self._views is not None, "closed"
        late = _ring(self._table, self._rung, kind, self._kind_bytes, peers, value)
        assert late < 0, (
            f"rank {self.rank} rings {BELL_KINDS[kind]} {value:#x} at rank {late} after {self._rung[kind, late]:#x}"
        )

    def wait(
        self,
        kind: int,
        peers: npt.NDArray[np.int64],
        value: int,
        *,
        layer: int = -1,
        on_slice: Callable[[], None] | None = None,
    ) -> None:
        """Wait until every rank of `peers` has rung `kind` with `value` or more.

        Args:
            peers:     i64 [n]  ranks, as for `ring`
            layer:     for status and errors only
            on_slice:  called about every `slice_s` while waiting, and after a signal; may raise. Must not raise the
                       own progress word.
        Order:    what the peers did before their ring is visible after it
        Raises:   DoorbellTimeout, when for `stuck_s` neither an awaited rank nor one that it waits for in turn has
                  moved its progress word; MispairedLaunch, when a pairing bell is more than a launch ahead; FabricError
        """
        assert peers.dtype == np.int64, peers.dtype
        assert 0 < value < _VALUE_END, value
        assert self._views is not None, "closed"
        result = _scan(self._lines[kind], peers, 0, value, self._ahead_max[kind])
        if result != _DONE:
            self._wait_slowly(kind, peers, value, layer, on_slice, result)

    def _wait_slowly(
        self,
        kind: int,
        peers: npt.NDArray[np.int64],
        value: int,
        layer: int,
        on_slice: Callable[[], None] | None,
        result: int,
    ) -> None:
        begun_ns = moved_ns = now_ns()
        progress_last: dict[int, int] | None = None
        while True:
            if result & 7 == _MISSING:
                slice_ns = int(min(self.slice_s, self.stuck_s / 2) * 1e9) + 1
                result = _wait(
                    self._lines[kind],
                    peers,
                    result >> 3,
                    value,
                    self._ahead_max[kind],
                    self._counter,
                    self._mark,
                    kind,
                    self._status,
                    layer,
                    self.spin_ns,
                    slice_ns,
                )
            code, detail = result & 7, result >> 3
            if code == _DONE:
                return
            if code == _AHEAD:
                raise self._mispaired(kind, int(peers[detail]), value)
            if code == _FAILED:
                raise FabricError(f"futex wait of rank {self.rank}: {os.strerror(detail)}")
            if on_slice is not None:
                on_slice()
            progress = self._progress_of_awaited(kind, peers[detail:], value)
            now = now_ns()
            if progress != progress_last:
                progress_last, moved_ns = progress, now
            elif now - moved_ns >= self.stuck_s * 1e9:
                raise self._timeout(kind, int(peers[detail]), value, layer, (now - begun_ns) / 1e9)

    def _progress_of_awaited(self, kind: int, peers: npt.NDArray[np.int64], value: int) -> dict[int, int]:
        """Progress words of the ranks that have not rung, of those that these wait for, and so on.

        A rank that waits makes no progress itself, so following the chain is what tells a long launch of the rank at
        its end from a deadlock: in a cycle no word moves.
        """
        todo = [int(peer) for peer in peers if self.seen(kind, int(peer)) < value]
        progress: dict[int, int] = {}
        while todo:
            peer = todo.pop()
            if peer not in progress:
                progress[peer] = self.progress(peer)
                further = self.status(peer).peer
                if further is not None:
                    todo.append(further)
        return progress

    def _where(self, kind: int, value: int, layer: int) -> str:
        return place_of(kind, value, layer, self.steps_per_launch)

    def _timeout(self, kind: int, peer: int, value: int, layer: int, waited_s: float) -> DoorbellTimeout:
        where = self._where(kind, value, layer)
        chain = [peer]
        while (further := self.status(chain[-1])).peer is not None:
            where += f" (rank {chain[-1]} itself waits for rank {further.peer}'s {further.kind} doorbell)"
            if further.peer in (self.rank, *chain):
                chain = [peer]  # a circle has no end
                break
            chain.append(further.peer)
        return DoorbellTimeout(peer, BELL_KINDS[kind], value, self.seen(kind, peer), waited_s, where, chain[-1])

    def _mispaired(self, kind: int, peer: int, value: int) -> MispairedLaunch:
        return MispairedLaunch(
            f"rank {peer}'s {BELL_KINDS[kind]} doorbell is at {self.seen(kind, peer):#x}, more than one launch "
            f"ahead of {value:#x} ({self._where(kind, value, -1)} of rank {self.rank})"
        )

    def awaited(self) -> Awaited | None:
        """The wait of this rank that has not ended well: under way, or broken off by an error. From any thread."""
        wait = self.status(self.rank)
        if wait.peer is None:
            return None
        kind = BELL_KINDS.index(wait.kind)
        where = self._where(kind, wait.value, wait.layer)
        return Awaited(wait.peer, wait.kind, where, wait.value, self.seen(kind, wait.peer))

    def seen(self, kind: int, peer: int) -> int:
        """The last value of `kind` that `peer` has rung here; acquires what came before it. From any thread."""
        assert 0 <= peer < self.world, peer
        with self._lock:
            if self._views is None:
                return 0
            return int(_load(self._lines[kind] + peer * LINE_BYTES))

    def rung(self, kind: int, peer: int) -> int:
        """The last value of `kind` that this rank has rung at `peer`. From any thread."""
        return int(self._rung[kind, peer])

    # ---- the idle rule ----------------------------------------------------------------------------------------
    def take_wakes(self) -> None:
        """Call before draining the inbox: whatever is put in after this keeps the next `sleep` from sleeping."""
        self._taken = int(_load(self._puts))

    def sleep(self, launch: int, timeout_s: float) -> Why:
        """Sleep until a peer begins launch `launch`, the one this rank composes next; or a wake; or `timeout_s`.

        A wake since the last `take_wakes` (or the last `sleep`, if later) returns at once, so nothing put into the
        inbox between draining it and sleeping is slept over. Drain the inbox after it, whatever it answers.

        Raises: MispairedLaunch, when a peer has begun the launch after that one, which it cannot without this rank
        """
        assert launch >= 0, launch
        assert self._views is not None, "closed"
        bits = _WAKE_BIT | 1 << BELL_LAUNCH
        result = _sleep(
            self._lines[BELL_LAUNCH],
            self.world,
            launch,
            self._counter,
            self._mark,
            bits,
            self._puts,
            self._taken,
            int(timeout_s * 1e9),
        )
        self.take_wakes()
        code, detail = result & 7, result >> 3
        if code == _AHEAD:
            raise self._mispaired(BELL_LAUNCH, detail, launch + 1)
        if code == _FAILED:
            raise FabricError(f"futex wait of rank {self.rank}: {os.strerror(detail)}")
        return {_DONE: Why.LAUNCH, _WOKEN: Why.WAKE, _TICKED: Why.TICK}[code]

    def wake(self) -> None:
        """Something was put into this rank's inbox: end or forbid its sleep. From any thread; nothing after close."""
        with self._lock:
            if self._views is not None:
                _wake(self._puts, self._counter, self._mark)

    # ---- words ------------------------------------------------------------------------------------------------
    def write_word(self, launch: int, value: int) -> None:
        """Publish this rank's confirmation word of `launch`: before its launch bell, once, never rewritten."""
        assert 0 <= value < _VALUE_END, value
        _store(int(self._address[self.rank]) + self._offset_words + launch % WORDS * 8, value)

    def read_words(self, launch: int) -> tuple[int, ...]:
        """The confirmation words of `launch` of all ranks, own included; after its first paired exchange."""
        _load_all(self._address, self._offset_words + launch % WORDS * 8, self._scratch)
        return tuple(self._scratch.tolist())

    def word(self, peer: int, launch: int) -> int:
        """What stands in `peer`'s slab for the word of `launch` now; says nothing about who may rely on it."""
        return self._read(peer, self._offset_words + launch % WORDS * 8)

    def set_launch_count(self, count: int) -> None:
        """Publish how many launches this rank has begun."""
        _store(int(self._address[self.rank]) + self._offset_launch, count)

    def launch_count(self, peer: int) -> int:
        return self._read(peer, self._offset_launch)

    def raise_progress(self) -> None:
        """This rank is alive and got on: after every layer and every attention block. By the loop only."""
        _raise(self._progress)

    def progress(self, peer: int) -> int:
        """A rank's progress word. From any thread."""
        return self._read(peer, self._offset_progress)

    def status(self, peer: int) -> WaitStatus:
        """Whom `peer` waits for, as it last said. From any thread; the fields may be of two successive waits."""
        offset = self._offset_status
        awaited = self._read(peer, offset + 8 * STATUS_PEER) - 1
        kind = self._read(peer, offset + 8 * STATUS_KIND)
        is_waiting = 0 <= awaited < self.world and 0 <= kind < len(BELL_KINDS)
        return WaitStatus(
            awaited if is_waiting else None,
            BELL_KINDS[kind] if is_waiting else "",
            self._read(peer, offset + 8 * STATUS_VALUE),
            self._read(peer, offset + 8 * STATUS_LAYER),
        )

    def _read(self, peer: int, offset: int) -> int:
        assert 0 <= peer < self.world, peer
        with self._lock:
            if self._views is None:
                return 0
            return int(_load(int(self._address[peer]) + offset))


def warm() -> None:
    """Compile every kernel of this file, or load it from numba's cache, before the first launch."""
    spec = SlabSpec.of_bells(1)
    layout = SlabLayout.from_spec(spec)
    bells = Bells(layout, [PrivateSlab(0, layout.nbytes)], 0, spin_ns=0, slice_s=1e-6)
    self_only = np.zeros(1, np.int64)

    def ring() -> None:
        bells.ring(BELL_DATA, self_only, 1)

    bells.wait(BELL_DATA, self_only, 1, on_slice=ring)
    bells.write_word(0, 0)
    bells.read_words(0)
    bells.raise_progress()
    bells.wake()
    bells.sleep(0, 0.0)
    bells.close()
