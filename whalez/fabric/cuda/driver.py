"""The one thin, checked layer over the CUDA driver: every call of the fabric goes through it.

Rule 1: nobody else calls `cuda.bindings.driver`; a call that fails is an error with its name, code and what to do.
Rule 2: no policy. What is allocated, mapped or retried is decided by the callers.
Rule 3: the driver is named by this file only; a test hands `Driver` a fake with the same functions.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self

from whalez.errors import CapabilityMissing, FabricError

_log = logging.getLogger(__name__)

#: Every driver function that the fabric and its tests use; a fake has these and no others.
CALLS: Final = (
    # start
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuCtxGetStreamPriorityRange",
    # memory
    "cuMemGetInfo",
    "cuDeviceGetDefaultMemPool",
    "cuMemPoolGetAttribute",
    "cuMemPoolTrimTo",
    "cuMemAlloc",
    "cuMemAllocManaged",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8",
    "cuMemcpyDtoH",
    "cuMemcpyHtoD",
    # sharing
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle",
    "cuIpcCloseMemHandle",
    # streams
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamBatchMemOp",
    "cuStreamWriteValue64",
    "cuMemcpyAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemsetD8Async",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    # kernels
    "cuLibraryLoadData",
    "cuLibraryUnload",
    "cuLibraryGetKernelCount",
    "cuLibraryEnumerateKernels",
    "cuKernelGetFunction",
    "cuKernelSetAttribute",
    "cuFuncLoad",
    "cuLaunchKernel",
)

#: The kernels are made by the tools of CUDA 13, and an older driver does not load their images. The calls need 12.4.
DRIVER_VERSION_MIN: Final = 13_000

#: Compute capability below which no kernel of whalez runs.
CAPABILITY_MIN: Final = (8, 0)

DEFAULT_STREAM: Final = 0

OUT_OF_MEMORY: Final = 2
NOT_READY: Final = 600

_IMEX_HERE: Final = (
    "this process has no IMEX channel: is nvidia-imex running, is /dev/nvidia-caps-imex-channels/channel0 there and "
    "readable by this user, and does the container get it? On one machine --slabs posix_fd needs none"
)
_IMEX_THERE: Final = (
    "nvidia-imex is down or unreachable on some machine of the domain, not necessarily on this one: run "
    "`nvidia-imex-ctl -N` on each; on one machine --slabs posix_fd needs none"
)
_CONTEXT_LOST: Final = (
    "a kernel of this process failed and its context is lost: nothing on this device works until it exits"
)

#: Codes after which the context is lost: every later call answers the same until the process exits.
CONTEXT_LOST: Final = frozenset((700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
#: And those that have advice of their own: memory errors of the device, a link or a peer; MPS; what is no GPU.
STICKY: Final = CONTEXT_LOST | {214, 220, 226, 810, 911}

#: (call, code) -> what to do; "*" stands for every call. What drivers and operators have reported.
ADVICE: Final[dict[tuple[str, int], str]] = {
    (
        "cuMemCreate",
        1,
    ): "the driver knows no such handle type on this device, or the size is not a multiple of the granularity",
    ("cuMemCreate", 800): _IMEX_HERE,
    ("cuMemCreate", 801): "this device or driver cannot make memory with this kind of handle",
    ("cuMemExportToShareableHandle", 800): _IMEX_HERE,
    ("cuMemImportFromShareableHandle", 1): "the handle is of a process that has exited, or was damaged on its way",
    ("cuMemImportFromShareableHandle", 400): "the handle is of a process that has exited",
    ("cuMemImportFromShareableHandle", 600): _IMEX_THERE,
    (
        "cuMemImportFromShareableHandle",
        800,
    ): "exporter and importer are on different IMEX channels or of different users",
    ("cuMemImportFromShareableHandle", 801): _IMEX_THERE,
    ("cuMemImportFromShareableHandle", 999): _IMEX_THERE,
    ("cuMemSetAccess", 1): "this device cannot reach the memory of the other one: see `nvidia-smi topo -p2p r`",
    ("cuMemSetAccess", 101): "this device cannot reach the memory of the other one: see `nvidia-smi topo -p2p r`",
    ("cuMemSetAccess", 217): "this device cannot reach the memory of the other one: see `nvidia-smi topo -p2p r`",
    ("cuIpcGetMemHandle", 1): "memory made by cuMemCreate (expandable segments too) has no legacy handle",
    (
        "cuIpcGetMemHandle",
        801,
    ): "legacy IPC handles do not exist on this platform (Tegra, or a MIG slice): --slabs posix_fd",
    ("cuIpcOpenMemHandle", 1): "the handle is of a process that has exited, or of this very process",
    ("cuIpcOpenMemHandle", 201): "a process cannot open a handle of its own",
    (
        "cuIpcOpenMemHandle",
        400,
    ): "the handle is of another machine, of a process that has exited, or of another container",
    ("cuIpcOpenMemHandle", 205): "the two devices cannot reach each other: see `nvidia-smi topo -p2p r`",
    ("cuIpcOpenMemHandle", 217): "the two devices cannot reach each other: see `nvidia-smi topo -p2p r`",
    ("cuStreamBatchMemOp", 1): "stream memory operations take memory of this device only, not imported memory",
    ("cuStreamBatchMemOp", 801): "stream memory operations are switched off; the spin kernel waits instead",
    ("cuStreamWriteValue64", 1): "stream memory operations take memory of this device only, not imported memory",
    ("cuStreamWriteValue64", 801): "stream memory operations are switched off; the spin kernel waits instead",
    (
        "cuLibraryLoadData",
        200,
    ): "the kernel image is not for this driver: it may be older than the toolkit that made the image",
    ("cuLibraryLoadData", 209): "no image fits this device: compile the kernels for its architecture",
    ("cuLibraryLoadData", 222): "the driver is older than the toolkit that made the kernels: update it",
    ("*", 2): "free device memory: fewer or smaller chunks, a shorter --max-ctx, or another process off this device",
    ("*", 3): "the driver is shutting down or was not initialised",
    ("*", 34): "libcuda.so is a stub library: install the driver",
    ("*", 46): "another process holds the device in exclusive mode: see `nvidia-smi -q -d COMPUTE`",
    ("*", 100): "no GPU is visible: see `nvidia-smi` and CUDA_VISIBLE_DEVICES; a container needs --gpus",
    ("*", 101): "there is no such device: see `nvidia-smi -L`",
    ("*", 201): "no context of this device is current in this thread; this is a bug of whalez",
    ("*", 214): "an uncorrectable memory error: see `nvidia-smi -q -d ECC`, reset the device",
    ("*", 401): "the fabric manager is not in order: is nvidia-fabricmanager running in the driver's version?",
    ("*", 220): "an uncorrectable error of an NVLink: see `nvidia-smi nvlink -e` and dmesg",
    (
        "*",
        226,
    ): "an access to a peer's memory failed, as when its process or machine is gone, or a device did: see dmesg (Xid); "
    "nothing on this device works until this process exits",
    **{("*", code): _CONTEXT_LOST for code in sorted(CONTEXT_LOST)},
    ("*", 802): "the NVSwitch fabric is not up yet: is nvidia-fabricmanager running?",
    ("*", 803): "libcuda.so and the kernel module differ in version: reboot, or mount the host's libraries",
    ("*", 804): "the compatibility libcuda.so does not work on this device: use the driver's own",
    ("*", 810): "the MPS server ended this client: see its log; nothing works until this process exits",
    ("*", 911): "a device that is no GPU signalled an error: see dmesg; nothing works until this process exits",
    ("*", 999): "see `dmesg` for the reason (Xid)",
}


class DriverError(FabricError):
    """A driver call failed. call, code and name say which and how; `during` says for what."""

    def __init__(self, call: str, code: int, name: str, during: str = "") -> None:
        super().__init__()
        self.call = call
        self.code = code
        self.name = name
        self.during = during

    @property
    def words(self) -> str:
        """The driver's words alone: `cuMemCreate -> 800 CUDA_ERROR_NOT_PERMITTED`."""
        return f"{self.call} -> {self.code} {self.name}"

    @property
    def is_sticky(self) -> bool:
        """Whether nothing on this device works any more until the process exits."""
        return self.code in STICKY

    @property
    def advice(self) -> str:
        return ADVICE.get((self.call, self.code)) or ADVICE.get(("*", self.code), "")

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.during, self.words, self.advice)))


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Say for what the calls in this block were made, if one fails."""
    try:
        yield
    except DriverError as error:
        error.during = error.during or what
        raise


def _name_of(result: Any) -> tuple[int, str]:
    return int(result), getattr(result, "name", "unknown")


class Driver:
    """The functions of CALLS: each returns what the driver function returns after its code, and raises DriverError.

    api: cuda.bindings.driver by default, or what has its functions
    """

    def __init__(self, api: Any = None) -> None:
        if api is None:
            try:
                api = importlib.import_module("cuda.bindings.driver")
            except ImportError as error:
                raise CapabilityMissing(f"CUDA needs the Python packages of whalez[cuda]: {error}") from error
        self.api = api

    def __getattr__(self, call: str) -> Callable[..., Any]:
        if call not in CALLS:
            raise AttributeError(call)
        function = self._function(call)

        def checked(*arguments: Any) -> Any:
            code, *rest = self._ask(call, function, arguments)
            if code != 0:
                raise DriverError(call, *_name_of(code))
            return rest[0] if len(rest) == 1 else tuple(rest) or None

        setattr(self, call, checked)
        return checked

    def _function(self, call: str) -> Callable[..., Any]:
        try:
            function: Callable[..., Any] = getattr(self.api, call)
        except AttributeError:
            raise CapabilityMissing(f"{call}: cuda-bindings is too old, update it") from None
        return function

    @staticmethod
    def _ask(call: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # cuda.bindings could not load the library, or not find the function in it
            if "LibNotFound" in type(error).__name__:
                reason = "no NVIDIA driver (libcuda.so.1) is installed"
            elif "not found" in str(error):
                reason = "the NVIDIA driver is too old, it lacks this function: update it"
            else:
                raise
            raise CapabilityMissing(f"{call}: {reason} ({error})") from error
        except ValueError as error:  # a code newer than cuda.bindings
            raise DriverError(call, -1, f"unknown code: {error}") from error

    def _is_ready(self, call: str, handle: Any) -> bool:
        code, *_ = self._ask(call, self._function(call), (handle,))
        if int(code) not in (0, NOT_READY):
            raise DriverError(call, *_name_of(code))
        return int(code) == 0

    def is_done(self, stream: Any) -> bool:
        """Whether all that was put on `stream` has run. Raises DriverError if some of it failed. Blocks: no."""
        return self._is_ready("cuStreamQuery", stream)

    def is_reached(self, event: Any) -> bool:
        """Whether all that stood before `event` when it was recorded has run. Raises and blocks as `is_done`."""
        return self._is_ready("cuEventQuery", event)


class Teardown:
    """What must be undone for one resource, newest first. A step that fails stays, and those under it wait for it.

    Owns:      what its steps undo
    Closed by: `run`, until it is empty
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def push(self, undo: Callable[..., object], *arguments: Any) -> None:
        self._steps.append(lambda: undo(*arguments))

    def run(self) -> None:
        """Undo everything. Raises what the first failing step raises; running it again goes on from there."""
        while self._steps:
            self._steps[-1]()
            self._steps.pop()


def run_all(teardowns: list[Teardown]) -> None:
    """Run each, whatever becomes of the others; then raise the first error."""
    first: FabricError | None = None
    for teardown in teardowns:
        try:
            teardown.run()
        except FabricError as error:
            if first is not None:
                _log.warning("on the way out: %s", error)
            first = first or error
    if first is not None:
        raise first


class Device:
    """One GPU, with its primary context retained.

    Owns:      one reference to the primary context
    Closed by: whoever opened it, after everything that was made on it; a context manager
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """Take the device, checked: driver, its version, a device of that number, its architecture.

        Raises: CapabilityMissing or DriverError, nothing retained
        """
        self.driver = driver
        self.ordinal = ordinal
        self._teardown = Teardown()
        with during(f"device {ordinal}"):
            driver.cuInit(0)
            self.driver_version = int(driver.cuDriverGetVersion())
            if self.driver_version < DRIVER_VERSION_MIN:
                have, least = (f"{v // 1000}.{v % 1000 // 10}" for v in (self.driver_version, DRIVER_VERSION_MIN))
                raise CapabilityMissing(
                    f"device {ordinal}: cuDriverGetVersion -> {self.driver_version}: the driver is for CUDA {have}, "
                    f"whalez needs one for {least} or newer: update it"
                )
            count = int(driver.cuDeviceGetCount())
            if not 0 <= ordinal < count:
                raise CapabilityMissing(
                    f"device {ordinal}: cuDeviceGetCount -> {count}: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES"
                )
            self.handle = driver.cuDeviceGet(ordinal)
            self.name = driver.cuDeviceGetName(128, self.handle).split(b"\0")[0].decode(errors="replace")
            self.capability = (self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR"))
            if self.capability < CAPABILITY_MIN:
                major, minor = self.capability
                raise CapabilityMissing(
                    f"device {ordinal}: cuDeviceGetAttribute -> compute capability {major}.{minor} ({self.name}): "
                    f"whalez needs {CAPABILITY_MIN[0]}.{CAPABILITY_MIN[1]} or newer (Ampere): choose another device"
                )
            self.context = driver.cuDevicePrimaryCtxRetain(self.handle)
            self._teardown.push(driver.cuDevicePrimaryCtxRelease, self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def attribute(self, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_<name>: what the driver says, which is not yet what it does."""
        attributes = self.driver.api.CUdevice_attribute
        return int(self.driver.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), self.handle))

    def bind(self) -> None:
        """Make this device's context current in the calling thread: first thing in every entry.

        Weights are loaded by threads that never saw the context, and a library may have made another one current.
        """
        self.driver.cuCtxSetCurrent(self.context)

    def upload(self, address: int, data: bytes) -> None:
        """Copy to device memory; every other process and stream sees it. Blocks: for the copy, not for our streams.

        The copying call returns when the bytes are taken, and may leave them on their way: streams that are not ordered
        against the default one, and peers, would see what was there before. A memset before it is done as well.
        """
        self.bind()
        self.driver.cuMemcpyHtoD(address, data, len(data))
        self.driver.cuStreamSynchronize(DEFAULT_STREAM)

    def close(self) -> None:
        """Give the context back. Idempotent; after a failure it may be called again."""
        self._teardown.run()


def _pool_state(device: Device) -> tuple[Any, int, int]:
    driver, names = device.driver, device.driver.api.CUmemPool_attribute
    pool = driver.cuDeviceGetDefaultMemPool(device.handle)
    reserved = int(driver.cuMemPoolGetAttribute(pool, names.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT))
    used = int(driver.cuMemPoolGetAttribute(pool, names.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
    return pool, reserved, used


def with_trim(device: Device, what: str, nbytes: int, allocate: Callable[[], Any]) -> Any:
    """`allocate()`; if the device is full, give back what its default memory pool hoards and try once more.

    The stream-ordered pool keeps what was freed to it, and cuMemCreate and cuMemAlloc cannot see that.
    Raises: DriverError with the numbers of the pool and of the device
    """
    try:
        return allocate()
    except DriverError as error:
        if error.code != OUT_OF_MEMORY:
            raise
        words = error.words
    driver = device.driver
    driver.cuCtxSynchronize()  # a block whose free has not run yet is not given back
    pool, reserved, used = _pool_state(device)
    driver.cuMemPoolTrimTo(pool, 0)
    _, left, _ = _pool_state(device)
    free, total = (int(value) for value in driver.cuMemGetInfo())
    numbers = (
        f"{what}: {nbytes} bytes do not fit; the default pool had {reserved} bytes reserved and {used} used, "
        f"and has {left} after trimming; the device has {free} free of {total}"
    )
    _log.warning("%s: %s; trying once more", words, numbers)
    with during(numbers):
        return allocate()
