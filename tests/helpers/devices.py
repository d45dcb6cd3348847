"""Where a kernel test runs: the CPU harness everywhere, unchanged on a GPU, or on a driver that is not there.

A test takes its arrays and streams from here and says when the streams run:

    x = devices.array(values)                 # guarded and poisoned, for the test to look into
    stream = devices.Stream()                 # what ops put their entries on; nothing runs yet
    op(stream, devices.at(x), ...)            # where x is for the device
    devices.run_queues([stream], order=order) # everything runs; a GPU has an order of its own

Rule 1: a test does not ask which of them it got. `use` chooses; modules that are marked with the fixture `device`
        (tests/cuda/conftest.py) run once per device.
Rule 2: what only the harness can show (a mutant, a deadlock, a page fault) is marked `no_gpu`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from whalez.fabric.cuda.driver import DEFAULT_STREAM, Device, Driver
from whalez.fabric.cuda.stream import CudaStream, KernelSet, codes_of
from whalez.ops.device.kernel import KERNELS, Kernel
from whalez.testing import simt
from whalez.testing.fake_driver import FakeDriver, fake_processes
from whalez.testing.simt.memory import POISON

GUARD_BYTES = 4096
BUDGET_FACTOR = 10**5  # 10 us of the harness, where nothing but the kernels takes time, are a second
DRAIN_S = 240.0  # the largest launch of a test takes most of a minute
#: Every driver call that a superstep may make: none of them allocates, frees, compiles, loads or waits.
SUPERSTEP = {
    "cuCtxSetCurrent",
    "cuLaunchKernel",
    "cuStreamBatchMemOp",
    "cuStreamWriteValue64",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuEventRecord",
    "cuEventQuery",
}
_PORTABLE_MAPPED = 3
_ATTACH_GLOBAL = 1


def all_kernels() -> list[Kernel]:
    """Every kernel of whalez."""
    for path in sorted(Path(str(importlib.import_module("whalez").__path__[0])).glob("ops/*/cuda.py")):
        importlib.import_module(f"whalez.ops.{path.parent.name}.cuda")
    importlib.import_module("whalez.fabric.cuda.kernels")
    return list(KERNELS.values())


class Harness:
    """The CPU harness."""

    takes_mutants = True
    empty = staticmethod(simt.empty)
    run_queues = staticmethod(simt.run_queues)

    def at(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)

    def budget_ns(self, simulated: int) -> int:
        return simulated

    def stand_in(self, stream: Any, what: str, function: Callable[[], None], **arrays: Any) -> None:
        stream.stand_in(what, function)

    def stream(self, rank: int) -> Any:
        return simt.SimtStream(rank)

    def sparse(self, path: Any, shape: tuple[int, int], dtype: Any) -> np.ndarray:
        space = np.memmap(path, dtype, "w+", shape=shape)
        path.unlink()
        return space


class QueuedStream:
    """A stream of a Gpu. As in the harness, what it is told is queued and runs in `run_queues`."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.performed: list[tuple[str, tuple[Any, ...]]] = []

    def launch(self, kernel: Kernel, grid: Any, block: Any, shared_bytes: int, *arguments: Any) -> None:
        values = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]
        self.queue.append(("launch", (kernel, grid, block, shared_bytes, *values)))

    def wait_value(self, *pairs: tuple[int, int]) -> None:
        self.queue.append(("wait_value", pairs))

    def write_value(self, address: int, value: int) -> None:
        self.queue.append(("write_value", (address, value)))

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self.queue.append(("copy", (dst, src, nbytes)))

    def zero(self, dst: int, nbytes: int) -> None:
        self.queue.append(("zero", (dst, nbytes)))


@dataclass(eq=False)
class _Array:
    """`nbytes` between guards in page-locked memory at `host`, and in the device's own once `at` asked for it."""

    host: int
    nbytes: int
    device: Any = None  #: CUdeviceptr

    @property
    def size(self) -> int:
        return self.nbytes + 2 * GUARD_BYTES

    @property
    def whole(self) -> np.ndarray:
        return np.frombuffer((ctypes.c_uint8 * self.size).from_address(self.host), np.uint8)


class Gpu:
    """A device behind the driver, with every kernel loaded.

    An array is page-locked host memory, which the device could reach. What a test takes the address of by `at` lies in
    the device's memory, where its kernels find it in practice: all of it is copied there before queues run, and back
    when they have run. Sparse ones are managed memory, whose pages exist once they are touched.

    Owns:      the context, the kernels, some streams, the memory of every array since the last `reset`
    Closed by: `close`
    """

    takes_mutants = False  # a mutant may hang a real device, or take the context of the whole session with it

    def __init__(self, api: Any = None, image: Callable[[Kernel], bytes] | None = None) -> None:
        self._stack = ExitStack()
        self._arrays: list[_Array] = []
        self._spaces: list[tuple[Any, int]] = []  #: managed memory and its bytes
        self._streams: list[CudaStream] = []
        try:
            self.device = self._stack.enter_context(Device(Driver(api), 0))
            self.kernels = self._stack.enter_context(KernelSet(self.device, all_kernels(), image))
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        self.reset()
        for stream in self._streams:
            stream.close()
        self._stack.close()

    def reset(self) -> None:
        """Give back all arrays; nothing may use them any more."""
        self.device.bind()
        while self._arrays:
            each = self._arrays.pop()
            if each.device is not None:
                self.device.driver.cuMemFree(each.device)
            self.device.driver.cuMemFreeHost(each.host)
        while self._spaces:
            self.device.driver.cuMemFree(self._spaces.pop()[0])

    def empty(self, shape: Any, dtype: Any = np.float32, align: int = 1) -> np.ndarray:
        """As `simt.empty`; aligned to 256, and instead of pages that fault there are bytes that are checked."""
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.device.bind()
        address = int(self.device.driver.cuMemHostAlloc(nbytes + 2 * GUARD_BYTES, _PORTABLE_MAPPED))
        self._arrays.append(_Array(address, nbytes))
        whole = self._arrays[-1].whole
        whole[:] = POISON
        return whole[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype).reshape(shape)

    def _owner(self, address: int) -> _Array | None:
        return next((each for each in reversed(self._arrays) if 0 <= address - each.host < each.size), None)

    def at(self, array: np.ndarray) -> int:
        """Where this array, or this part of one, lies in the device's memory; sparse ones lie where they are."""
        address = int(array.ctypes.data)
        owner = self._owner(address)
        if owner is None:
            if any(0 <= address - int(pointer) < nbytes for pointer, nbytes in self._spaces):
                return address
            raise LookupError(f"no array of this device is at {address:#x}")
        if owner.device is None:
            self.device.bind()
            owner.device = self.device.driver.cuMemAlloc(owner.size)
        return int(owner.device) + address - owner.host

    def budget_ns(self, simulated: int) -> int:
        return simulated * BUDGET_FACTOR

    def _to_device(self, address: int, nbytes: int) -> None:
        owner = self._owner(address)
        if owner is not None and owner.device is not None:
            self.device.driver.cuMemcpyHtoD(int(owner.device) + address - owner.host, address, nbytes)
            self.device.driver.cuStreamSynchronize(DEFAULT_STREAM)  # the bytes may be on their way still

    def _from_device(self, address: int, nbytes: int) -> None:
        owner = self._owner(address)
        if owner is not None and owner.device is not None:
            self.device.driver.cuMemcpyDtoH(address, int(owner.device) + address - owner.host, nbytes)

    def sparse(self, path: Any, shape: tuple[int, int], dtype: Any) -> np.ndarray:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.device.bind()
        pointer = self.device.driver.cuMemAllocManaged(nbytes, _ATTACH_GLOBAL)
        self._spaces.append((pointer, nbytes))
        space = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(int(pointer)), dtype)
        return space.reshape(shape)

    def stream(self, rank: int) -> QueuedStream:
        return QueuedStream(rank)

    def stand_in(
        self,
        stream: QueuedStream,
        what: str,
        function: Callable[[], None],
        *,
        reads: Sequence[np.ndarray],
        writes: Sequence[np.ndarray],
    ) -> None:
        stream.queue.append(("stand_in", (function, reads, writes)))

    def _add_stream(self) -> None:
        """Before anything is handed over: a stream is made at start-up."""
        self._streams.append(CudaStream(self.device, self.kernels))

    def run_queues(self, streams: Sequence[QueuedStream], **order: Any) -> None:
        """Hand every queue to a stream of the device, wait for all, look at the guards."""
        self.device.bind()
        while len(self._streams) < len(streams):
            self._add_stream()
        for each in self._arrays:
            self._to_device(each.host, each.size)
        pairs = list(zip(self._streams, streams, strict=False))
        deadline = time.monotonic() + DRAIN_S
        while True:
            for stream, queued in pairs:
                self._hand_over(stream, queued)
            if not any(queued.queue for queued in streams) and all(stream.is_done() for stream, _ in pairs):
                break
            assert time.monotonic() < deadline, f"the streams did not drain within {DRAIN_S:g} s"
            time.sleep(0.0002)
        for each in self._arrays:
            self._from_device(each.host, each.size)
        self.check_guards()

    def _hand_over(self, stream: CudaStream, queued: QueuedStream) -> None:
        """All up to a stand-in whose turn has not come, for what lies before it has to be done; and no more than the
        stream takes. Neither may keep other streams from being handed what this one waits for."""
        while queued.queue and stream.depth.has_room():
            method, arguments = queued.queue[0]
            if method != "stand_in":
                self._put(stream, method, arguments)
            elif stream.is_done():
                self._perform(*arguments)
            else:
                return
            queued.performed.append(queued.queue.popleft())

    def _put(self, stream: CudaStream, method: str, arguments: tuple[Any, ...]) -> None:
        getattr(stream, method)(*arguments)

    def _perform(self, function: Callable[[], None], reads: Sequence[np.ndarray], writes: Sequence[np.ndarray]) -> None:
        for each in reads:
            low, high = byte_bounds(each)
            self._from_device(low, high - low)
        function()
        for each in writes:
            assert each.flags.c_contiguous, "what lies between the rows of a result is not this function's to write"
            self._to_device(each.ctypes.data, each.nbytes)

    def check_guards(self) -> None:
        for each in self._arrays:
            whole, address, nbytes = each.whole, each.host + GUARD_BYTES, each.nbytes
            for begin, end in ((0, GUARD_BYTES), (GUARD_BYTES + nbytes, len(whole))):
                guard = whole[begin:end]
                if not (guard == POISON).all():
                    where = begin + int(np.argmax(guard != POISON)) - GUARD_BYTES
                    guard[:] = POISON
                    raise AssertionError(f"byte {where} of an array of {nbytes} bytes at {address:#x} was written")


class FakeGpu(Gpu):
    """The same over the recording driver, which runs every launched kernel in the CPU harness."""

    def __init__(self, stack: ExitStack) -> None:
        kernels = {_image(kernel): (codes_of(kernel), _in_the_harness(kernel)) for kernel in all_kernels()}
        self.fake = FakeDriver(kernels=kernels)
        stack.enter_context(fake_processes(self.fake))
        super().__init__(self.fake, _image)
        self.launched: set[str] = set()
        self.queueing: list[str] = []  #: driver calls made while queues were handed over

    def _put(self, stream: CudaStream, method: str, arguments: tuple[Any, ...]) -> None:
        begun = len(self.fake.calls)
        super()._put(stream, method, arguments)
        self.queueing += self.fake.names(begun)
        if method == "launch":
            self.launched.add(arguments[0].name)


def _image(kernel: Kernel) -> bytes:
    return kernel.name.encode()


def _in_the_harness(kernel: Kernel) -> Callable[..., None]:
    def run(grid: Any, block: Any, shared_bytes: int, arguments: list[Any]) -> None:
        simt.run([simt.Launch(kernel, grid, block, arguments, shared_bytes)])

    return run


_current: Harness | Gpu = Harness()


@contextlib.contextmanager
def used(device: Harness | Gpu) -> Iterator[None]:
    """Inside of this block tests get their arrays and streams from `device`."""
    global _current
    before, _current = _current, device
    try:
        yield
    finally:
        _current = before


def takes_mutants() -> bool:
    return _current.takes_mutants


def empty(shape: Any, dtype: Any = np.float32, align: int = 1) -> np.ndarray:
    """A poisoned array with guards before and behind; see `simt.empty`."""
    return _current.empty(shape, dtype, align)


def at(array: np.ndarray) -> int:
    """Where an array from here, or a part of it, is for the device: what kernels, copies and tables take."""
    return _current.at(array)


def budget_ns(simulated: int) -> int:
    """What a bounded wait is given that has `simulated` ns in the harness: on a device its peers are still queueing."""
    return _current.budget_ns(simulated)


def array(values: Any, dtype: Any = None, align: int = 1) -> np.ndarray:
    """A guarded copy of `values`."""
    values = np.asarray(values, dtype)
    out = empty(values.shape, values.dtype, align)
    out[...] = values
    return out


def zeros(shape: Any, dtype: Any = np.float32, align: int = 1) -> np.ndarray:
    out = empty(shape, dtype, align)
    out[...] = 0
    return out


def sparse(path: Any, rows: int, stride: int, dtype: Any = np.uint16) -> np.ndarray:
    """[rows, stride] that take no memory until they are touched; `path` is where a file may lie meanwhile."""
    return _current.sparse(path, (rows, stride), dtype)


def Stream(rank: int = 0) -> Any:
    return _current.stream(rank)


def stand_in(
    stream: Any,
    what: str,
    function: Callable[[], None],
    *,
    reads: Sequence[np.ndarray] = (),
    writes: Sequence[np.ndarray] = (),
) -> None:
    """Queue host code in the place of `what`, no kernel of whalez. It may touch what it reads and writes only."""
    _current.stand_in(stream, what, function, reads=reads, writes=writes)


def run_queues(streams: Sequence[Any], **how: Any) -> None:
    """Run all that was queued, and wait; `how` as in `simt.run_queues`."""
    _current.run_queues(streams, **how)
