"""A stream of a GPU: kernels compiled beforehand, waits, copies. The CUDA implementation of ops/device/stream.py.

Rule 1: nothing here compiles, allocates device memory or synchronises once `KernelSet` and `CudaStream` are made.
Rule 2: a stream belongs to one thread; arguments are packed into its own buffers, which the driver copies.
Rule 3: every entry binds the context. What was current a moment ago says nothing: a library may have made another one
        current in this thread, and a thread may have the identity of one that is gone.
Rule 4: no entry blocks the host: of the thousands that a superstep queues, as many stand on the stream as `depth.py`
        lets.
Hot: yes.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from whalez.errors import CapabilityMissing
from whalez.fabric.cuda.depth import Depth
from whalez.fabric.cuda.driver import Device, Teardown, during
from whalez.fabric.cuda.kernels import doorbell_write_kernel
from whalez.ops.device.kernel import Dim, Kernel

_log = logging.getLogger(__name__)

BATCH_MAX: Final = 255  #: operations of one cuStreamBatchMemOp
_NON_BLOCKING: Final = 1  # not ordered against the legacy default stream
_SHARED_BYTES_DEFAULT: Final = 48 * 1024  # what a kernel may take without being told

_CODES: Final = {
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
}


def codes_of(kernel: Kernel) -> str:
    """struct codes of a kernel's arguments; a pointer is an address."""
    return "".join("Q" if hasattr(kind, "dtype") else _CODES[str(kind)] for kind in kernel.signature)


def compiled(capability: tuple[int, int]) -> Callable[[Kernel], bytes]:
    """The image of a kernel for a device of this capability, kept or compiled now: at start-up, not in a loop."""
    from whalez.ops.device.compile import (
        PTX_LAST_RESORT,
        PTX_VERSION,
        architectures_of,
        compile_cubin,
        compile_last_resort,
        image_for,
    )

    def image(kernel: Kernel) -> bytes:
        arch = image_for(capability, architectures_of(kernel))
        if arch == PTX_LAST_RESORT:
            _log.warning(
                "%s: no image for compute capability %d.%d, the driver compiles PTX %s for %s: a slow start, and "
                "not what the kernel report is about",
                kernel.name, *capability, PTX_VERSION, PTX_LAST_RESORT,
            )  # fmt: skip
            return compile_last_resort(kernel).encode() + b"\0"
        return compile_cubin(kernel, arch)

    return image


class Loaded(NamedTuple):
    function: Any  #: CUfunction
    codes: str


class KernelSet:
    """Kernels loaded on one device, by name.

    Owns:      the libraries
    Closed by: whoever made it, after the streams that launch from it; a context manager
    """

    def __init__(
        self, device: Device, kernels: Iterable[Kernel], image: Callable[[Kernel], bytes] | None = None
    ) -> None:
        """Load every kernel. `image` gives its machine code; compiled here and now by default. Raises FabricError."""
        self.device = device
        self.loaded: dict[str, Loaded] = {}
        self._teardown = Teardown()
        image = image or compiled(device.capability)
        try:
            device.bind()
            shared_max = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
            for kernel in kernels:
                with during(f"loading {kernel.name}"):
                    self.loaded[kernel.name] = self._load(kernel, image(kernel), shared_max)
        except BaseException:
            self.close()
            raise

    def _load(self, kernel: Kernel, code: bytes, shared_max: int) -> Loaded:
        driver, api = self.device.driver, self.device.driver.api
        library = driver.cuLibraryLoadData(code, [], [], 0, [], [], 0)
        self._teardown.push(driver.cuLibraryUnload, library)
        count = int(driver.cuLibraryGetKernelCount(library))
        assert count == 1, f"{kernel.name}: {count} kernels in one image"
        (entry,) = driver.cuLibraryEnumerateKernels(1, library)
        if kernel.shared_bytes > _SHARED_BYTES_DEFAULT:
            if kernel.shared_bytes > shared_max:
                raise CapabilityMissing(
                    f"{kernel.name} takes {kernel.shared_bytes} bytes of shared memory, this device has {shared_max}"
                )
            limit = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.cuKernelSetAttribute(limit, kernel.shared_bytes, entry, self.device.handle)
        function = driver.cuKernelGetFunction(entry)  # a handle, no more
        # Into the context now: done at the first launch it would wait for whatever the other streams wait for.
        driver.cuFuncLoad(function)
        return Loaded(function, codes_of(kernel))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unload. Idempotent; after a failure it may be called again."""
        if self._teardown:
            self.device.bind()
            self._teardown.run()


class _Packed:
    """Where one kernel's arguments are put before a launch: 8 bytes each, and the addresses that the driver reads."""

    def __init__(self, loaded: Loaded) -> None:
        self.function = loaded.function
        count = len(loaded.codes)
        self.pack_into = struct.Struct("<" + "".join(f"{c}{8 - struct.calcsize(c)}x" for c in loaded.codes)).pack_into
        self.buffer = ctypes.create_string_buffer(max(8 * count, 8))
        begin = ctypes.addressof(self.buffer)
        self._pointers = (ctypes.c_uint64 * max(count, 1))(*(begin + 8 * i for i in range(count)))
        self.parameters = ctypes.addressof(self._pointers)


class CudaStream:
    """One stream of a device; `Stream` of ops/device.

    Owns:      the stream
    Closed by: whoever made it, before its KernelSet; a context manager. Blocks: no, what is queued runs on
    depth:      how much stands on it, and what waits when that is all it takes
    has_memops: whether the device takes stream memory operations; the preflight's word. Without them `write_value` is a
                kernel and `wait_value` is refused: bounded waits are DeviceBells'.
    """

    def __init__(self, device: Device, kernels: KernelSet, *, priority: int = 0, has_memops: bool = True) -> None:
        driver, api = device.driver, device.driver.api
        self.device = device
        self.has_memops = has_memops
        self._driver = driver
        self._packs = {name: _Packed(loaded) for name, loaded in kernels.loaded.items()}
        kind = api.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_64
        self._waits = [api.CUstreamBatchMemOpParams() for _ in range(BATCH_MAX)]
        self._words = []  # of each: operation, address, value, flags (GEQ is 0), alias
        for wait in self._waits:
            wait.operation = kind
            words = (ctypes.c_uint64 * 6).from_address(wait.getPtr())
            self._words.append(words)
        self._batches = [self._waits[:count] for count in range(BATCH_MAX + 1)]
        self._teardown = Teardown()
        try:
            device.bind()
            self.handle = driver.cuStreamCreateWithPriority(_NON_BLOCKING, priority)
            self._teardown.push(driver.cuStreamDestroy, self.handle)
            self.depth = Depth(device, self.handle, self._teardown)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, entries: int = 1) -> None:
        """First thing in every entry. The context last: what waits for room may make another one current."""
        self.depth.take(entries)
        self.device.bind()

    def launch(self, kernel: Kernel, grid: Dim, block: Dim, shared_bytes: int, *arguments: int | float) -> None:
        """Queue a kernel of the KernelSet; arguments are typed by its signature, pointers are addresses."""
        self._enter()
        pack = self._packs[kernel.name]
        pack.pack_into(pack.buffer, 0, *arguments)
        grid_x, grid_y, grid_z = (grid, 1, 1) if isinstance(grid, int) else grid
        block_x, block_y, block_z = (block, 1, 1) if isinstance(block, int) else block
        self._driver.cuLaunchKernel(
            pack.function,
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            self.handle,
            pack.parameters,
            0,
        )

    def wait_value(self, *pairs: tuple[int, int]) -> None:
        """Queue a wait until every u64 at `address`, of this device, has reached `value`, cyclically."""
        if not self.has_memops:
            raise CapabilityMissing("wait_value: this device refuses stream memory operations; wait by kernel instead")
        for begin in range(0, len(pairs), BATCH_MAX):
            some = pairs[begin : begin + BATCH_MAX]
            self._enter(len(some))
            for words, (address, value) in zip(self._words, some, strict=False):
                words[1] = address
                words[2] = value
            self._driver.cuStreamBatchMemOp(self.handle, len(some), self._batches[len(some)], 0)

    def write_value(self, address: int, value: int) -> None:
        """Queue a store of a u64 to memory of this device, after all that was queued before."""
        if not self.has_memops:
            self.write_by_kernel(address, value)
            return
        self._enter()
        self._driver.cuStreamWriteValue64(self.handle, address, value, 0)

    def write_by_kernel(self, address: int, value: int) -> None:
        """The same where memory operations are refused, or may be."""
        self.launch(doorbell_write_kernel, 1, 1, 0, address, value)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Queue a copy between any two places mapped here."""
        self._enter()
        self._driver.cuMemcpyAsync(dst, src, nbytes, self.handle)

    def zero(self, dst: int, nbytes: int) -> None:
        self._enter()
        self._driver.cuMemsetD8Async(dst, 0, nbytes, self.handle)

    def is_done(self) -> bool:
        """Whether everything queued has run. Raises DriverError if some of it failed. Blocks: no."""
        self.device.bind()
        return self._driver.is_done(self.handle)

    def close(self) -> None:
        """Idempotent; after a failure it may be called again."""
        if self._teardown:
            self.device.bind()
            self._teardown.run()
