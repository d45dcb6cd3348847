"""Where a kernel test runs: the CPU harness everywhere, unchanged on a GPU, or on a driver that is not there.

A test takes its arrays and streams from here and says when the streams run:

    x = devices.array(values)                 # guarded and poisoned; the address is the same for host and device
    stream = devices.Stream()                 # what ops put their entries on; nothing runs yet
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
from pathlib import Path
from typing import Any

import numpy as np

from whalez.fabric.cuda.driver import Device, Driver
from whalez.fabric.cuda.stream import CudaStream, KernelSet, codes_of
from whalez.ops.device.kernel import KERNELS, Kernel
from whalez.testing import simt
from whalez.testing.fake_driver import FakeDriver, fake_processes
from whalez.testing.simt.memory import POISON

GUARD_BYTES = 4096
DRAIN_S = 240.0  # the largest launch of a test takes most of a minute
#: Every driver call that a superstep may make: none of them allocates, frees, compiles, loads or waits.
SUPERSTEP = {
    "cuCtxSetCurrent",
    "cuLaunchKernel",
    "cuStreamBatchMemOp",
    "cuStreamWriteValue64",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
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


class Gpu:
    """A device behind the driver, with every kernel loaded.

    Arrays are page-locked host memory: one address for host and device, and stream memory operations take it. Sparse
    ones are managed memory, whose pages exist once they are touched.

    Owns:      the context, the kernels, some streams, the memory of every array since the last `reset`
    Closed by: `close`
    """

    takes_mutants = False  # a mutant may hang a real device, or take the context of the whole session with it

    def __init__(self, api: Any = None, image: Callable[[Kernel], bytes] | None = None) -> None:
        self._stack = ExitStack()
        self._arrays: list[tuple[np.ndarray, int, int]] = []  #: whole allocation, its address, bytes asked for
        self._spaces: list[Any] = []
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
            self.device.driver.cuMemFreeHost(self._arrays.pop()[1])
        while self._spaces:
            self.device.driver.cuMemFree(self._spaces.pop())

    def empty(self, shape: Any, dtype: Any = np.float32, align: int = 1) -> np.ndarray:
        """As `simt.empty`; aligned to 256, and instead of pages that fault there are bytes that are checked."""
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.device.bind()
        address = int(self.device.driver.cuMemHostAlloc(nbytes + 2 * GUARD_BYTES, _PORTABLE_MAPPED))
        whole = np.frombuffer((ctypes.c_uint8 * (nbytes + 2 * GUARD_BYTES)).from_address(address), np.uint8)
        whole[:] = POISON
        self._arrays.append((whole, address, nbytes))
        return whole[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype).reshape(shape)

    def sparse(self, path: Any, shape: tuple[int, int], dtype: Any) -> np.ndarray:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.device.bind()
        pointer = self.device.driver.cuMemAllocManaged(nbytes, _ATTACH_GLOBAL)
        self._spaces.append(pointer)
        space = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(int(pointer)), dtype)
        return space.reshape(shape)

    def stream(self, rank: int) -> QueuedStream:
        return QueuedStream(rank)

    def run_queues(self, streams: Sequence[QueuedStream], **order: Any) -> None:
        """Hand every queue to a stream of the device, wait for all, look at the guards."""
        while len(self._streams) < len(streams):
            self._streams.append(CudaStream(self.device, self.kernels))
        for stream, queued in zip(self._streams, streams, strict=False):
            while queued.queue:
                method, arguments = queued.queue.popleft()
                getattr(stream, method)(*arguments)
                queued.performed.append((method, arguments))
        deadline = time.monotonic() + DRAIN_S
        while not all(stream.is_done() for stream in self._streams):
            assert time.monotonic() < deadline, f"the streams did not drain within {DRAIN_S:g} s"
            time.sleep(0.0002)
        self.check_guards()

    def check_guards(self) -> None:
        for whole, address, nbytes in self._arrays:
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
        self._streams.append(CudaStream(self.device, self.kernels))  # before anything is recorded, as at start-up

    def run_queues(self, streams: Sequence[QueuedStream], **order: Any) -> None:
        assert len(streams) == 1
        self.launched |= {entry[1][0].name for entry in streams[0].queue if entry[0] == "launch"}
        begun = len(self.fake.calls)
        entries = len(streams[0].queue)
        super().run_queues(streams)
        self.queueing += self.fake.names(begun)[: 2 * entries]  # each binds the context and is one more call


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


def run_queues(streams: Sequence[Any], **how: Any) -> None:
    """Run all that was queued, and wait; `how` as in `simt.run_queues`."""
    _current.run_queues(streams, **how)
