"""Room on a stream, the end of a launch, and the way out of one that will not end.

A stream that is blocked in a wait cannot be cancelled.
So the awaited lines are raised from another stream to a value that ends every wait. The stream drains, over data
that is worth nothing: the launch is marked failed, nobody reads its results, and the rank reports and exits.

Rule 1: a launch has time as long as somebody in the world makes progress; then it is given up. Every wait here ends.
Rule 2: however a launch is left, it is marked failed first and its stream is released; a call that fails on that way
        stands in no other's way.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from whalez.clock import now_ns
from whalez.errors import FabricError
from whalez.fabric.cuda.depth import wait_for_room
from whalez.fabric.cuda.doorbell import RELEASED, DeviceBells, Wait, is_reached
from whalez.fabric.cuda.driver import Device, DriverError, Teardown
from whalez.fabric.cuda.stream import CudaStream, KernelSet
from whalez.fabric.layout import BELL_KINDS, LINE_BYTES

_log = logging.getLogger(__name__)

_PAUSE_S_MAX: Final = 0.002
_PORTABLE: Final = 1
_ROUND: Final = 200  # lines raised at a time: the stream takes twice as many entries, so there is always room


class Watchdog:
    """Waits on the host for the end of a launch, and before it for room on its stream.

    stuck_s:   give up when for so long nobody in the world made progress and no awaited line rose
    slice_s:   how often that is looked at, and `on_slice` called, which may raise
    drain_s:   how long a released stream may take
    Owns:      a stream of the highest priority (another priority has another hardware queue, so that the blocked stream
               does not stand before it) and some page-locked memory
    Closed by: whoever made it, after its last `join`
    """

    def __init__(
        self,
        device: Device,
        kernels: KernelSet,
        bells: DeviceBells,
        stream: CudaStream,
        *,
        stuck_s: float,
        slice_s: float = 0.1,
        drain_s: float = 5.0,
        on_slice: Callable[[], None] | None = None,
    ) -> None:
        self.stuck_s, self.slice_s, self.drain_s, self.on_slice = stuck_s, slice_s, drain_s, on_slice
        self.device = device
        self.bells = bells
        self.stream = stream
        self._told: set[str] = set()  # failures of a release that are in the log
        self._teardown = Teardown()
        driver = device.driver
        layout = bells.layout
        self._bells_at = bells.addresses[bells.rank] + layout.offset_of("bells")
        self._bells_bytes = len(BELL_KINDS) * layout.world * LINE_BYTES
        self._progress_at = [address + layout.offset_of("progress") for address in bells.addresses]
        try:
            device.bind()
            _, greatest = driver.cuCtxGetStreamPriorityRange()
            self._other = CudaStream(device, kernels, priority=int(greatest), has_memops=stream.has_memops)
            self._teardown.push(self._other.close)
            self._seen = int(driver.cuMemHostAlloc(self._bells_bytes + 8 * layout.world, _PORTABLE))
            self._teardown.push(driver.cuMemFreeHost, self._seen)
            ctypes.memset(self._seen, 0, self._bells_bytes + 8 * layout.world)
            stream.depth.when_full = self._wait
        except BaseException:
            self.close()
            raise

    def join(self) -> None:
        """Wait until the stream has run everything queued.

        Raises: DoorbellTimeout with rank, window, expected and seen; DriverError if a kernel failed or the context is
                lost; what `on_slice` raises. Whichever it is, the launch is marked failed and the stream drained.
                FabricError if it does not even drain
        """
        self._wait(self.stream.is_done)
        if (reported := self.bells.report()) is not None:
            self.bells.failed = reported
            raise reported

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Until the launch is over, or there is room for more of it; raises as `join`."""
        try:
            self._watch(is_over)
        except BaseException as error:
            self._give_up(error)
            raise

    def _watch(self, is_over: Callable[[], bool]) -> None:
        begun = moved = looked = now_ns()
        state: Any = None
        pause_s = 0.0
        while not is_over():
            now = now_ns()
            if now - looked >= self.slice_s * 1e9:
                looked = now
                if self.on_slice is not None:
                    self.on_slice()
                state_now = self._state()
                if state_now != state:
                    state, moved = state_now, now
                elif now - moved >= self.stuck_s * 1e9:
                    raise self._stuck((now - begun) / 1e9)
            time.sleep(pause_s)
            pause_s = min(pause_s + 0.0001, _PAUSE_S_MAX, self.slice_s)

    # ---- looking --------------------------------------------------------------------------------------------------
    def _fetch(self, at: int, source: int, nbytes: int, bound_s: float = 2.0) -> bool:
        """Copy to the page-locked memory; False if the source cannot be read, as when its owner is gone.

        A copy that has not ended in time may still write where it was told to, so no other one is queued behind it.
        Raises: DriverError if the context is lost
        """
        try:
            if not self._other.is_done():
                return False
            self.device.driver.cuMemcpyDtoHAsync(self._seen + at, source, nbytes, self._other.handle)
            deadline = now_ns() + bound_s * 1e9
            while not self._other.is_done():
                if now_ns() > deadline:
                    return False
                time.sleep(0.0001)
        except DriverError as error:
            if error.is_sticky:
                raise
            return False
        return True

    def _state(self) -> tuple[bytes, tuple[int, ...]]:
        """What moves when somebody gets on: awaited lines and progress words."""
        self.device.bind()
        progress = []
        for peer, source in enumerate(self._progress_at):
            at = self._bells_bytes + 8 * peer
            if self._fetch(at, source, 8):
                progress.append(int(ctypes.c_uint64.from_address(self._seen + at).value))
        self._fetch(0, self._bells_at, self._bells_bytes)
        return ctypes.string_at(self._seen, self._bells_bytes), tuple(progress)

    def _seen_at(self, line: int) -> int:
        return int(ctypes.c_uint64.from_address(self._seen + line - self._bells_at).value)

    def awaited(self) -> tuple[Wait, int, int] | None:
        """The wait at which the stream stands, the rank it waits for and what its line shows, as last fetched."""
        for wait in self.bells.waits:
            for peer in wait.peers.ranks:
                seen = self._seen_at(self.bells.line(wait.kind, peer))
                if not is_reached(seen, wait.value):
                    return wait, peer, seen
        return None

    # ---- giving up ------------------------------------------------------------------------------------------------
    def _stuck(self, waited_s: float) -> FabricError:
        """What a launch stands at, of which nothing has moved for too long."""
        if (stands_at := self.awaited()) is not None:
            return self.bells.timeout(*stands_at, waited_s)
        return FabricError(
            f"the launch of rank {self.bells.rank} made no progress for {waited_s:.1f} s, though all it waits for "
            f"has come: a kernel does not end; see `nvidia-smi` and dmesg"
        )

    def _give_up(self, why: BaseException) -> None:
        """Mark the launch failed, then release its stream. Raises: FabricError if it did not drain."""
        self.bells.failed = why if isinstance(why, FabricError) else FabricError(f"the launch was left: {why!r}")
        if isinstance(why, DriverError) and why.is_sticky:
            return  # nothing runs on this device any more
        try:
            words = "" if self.release() else f"did not drain within {self.drain_s:g} s"
        except DriverError as error:
            words = f"is lost: {error}"
        if words:
            raise FabricError(
                f"the stream of rank {self.bells.rank} {words}: {self.bells.failed}"
            ) from self.bells.failed

    def release(self) -> bool:
        """End every wait that was queued, until the stream has drained; False if it has not after `drain_s`.

        Again and again: a ring that was still under way may lower a line after it was raised, and a call may fail.
        Raises: DriverError if the context is lost
        """
        lines = sorted({self.bells.line(wait.kind, peer) for wait in self.bells.waits for peer in wait.peers.ranks})
        rounds = itertools.cycle([lines[begin : begin + _ROUND] for begin in range(0, len(lines), _ROUND)] or [[]])
        self.bells.stop_spinning()
        deadline = now_ns() + self.drain_s * 1e9
        while True:
            with self._noted():
                if self._other.is_done():  # never more than one round of stores under way
                    for line in next(rounds):
                        self._raise(line)
            with self._noted():
                if self.stream.is_done():
                    return True
            if now_ns() > deadline:
                return False
            time.sleep(_PAUSE_S_MAX)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """A call in this block may fail, and the release goes on. Raises: DriverError if the context is lost."""
        try:
            yield
        except DriverError as error:
            if error.is_sticky:
                raise
            if str(error) not in self._told:
                self._told.add(str(error))
                _log.warning("releasing the stream of rank %d: %s", self.bells.rank, error)

    def _raise(self, line: int) -> None:
        """Queue a store of RELEASED; by a kernel if the memory operation is refused."""
        for store in (self._other.write_value, self._other.write_by_kernel):
            with self._noted():
                store(line, RELEASED)
                return

    def close(self) -> None:
        """Idempotent; after a failure it may be called again. Blocks: no."""
        self.stream.depth.when_full = wait_for_room
        if self._teardown:
            self.device.bind()
            self._teardown.run()
