"""A CUDA driver that is not there: records every call, keeps device memory in memfds, fails wherever a test says.

`FakeDriver` has the functions of `whalez.fabric.cuda.driver.CALLS` with the signatures of cuda.bindings.driver, whose
structs and enums it hands on. One FakeDriver is one process's view; processes of one `FakeMachine` share its GPUs, and
machines with the same `domain` share fabric handles. Handles also work between real processes, through /proc.

What it models: address ranges, mappings and access rights per device (real ones, a wrong touch is SIGSEGV), contexts
per thread, streams that block in waits and queue what comes after, until a call would block the host, events, channels
that streams share, a default stream whose work has not run when the call returns, kernels that are loaded late, memory
operations that refuse imported memory, a hoarding memory pool, IMEX, legacy handles. What it does not: time, caches,
memory order, kernels other than those it is given. It asserts the arguments that whalez has no choice in.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import mmap
import os
import secrets
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from whalez.fabric.cuda.driver import CALLS

real: Any = importlib.import_module("cuda.bindings.driver")  # structs and enums only

GRANULARITY: Final = 2 * 2**20  #: recommended
GRANULARITY_MIN: Final = 64 * 2**10
FOREVER_S: Final = 5.0  #: a call that waits for the device has waited too long for a blocked stream
SHARED_BYTES_MAX: Final = 232_448  #: of a block that was told so, dynamic; of an H200
SHARED_BYTES_DEFAULT: Final = 48 * 2**10  #: of one that was not
GRID_MAX: Final = (2**31 - 1, 65_535, 65_535)
BLOCK_MAX: Final = (1024, 1024, 64)
THREADS_MAX: Final = 1024  #: of a block
QUEUE_MAX: Final = 1000  #: entries that a stream takes before its calls block the host
_MACHINE_LOCK = threading.RLock()  # one for all: tests run several "processes" in threads

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED, _PROT_NONE, _PROT_RW = 0x10, 0, mmap.PROT_READ | mmap.PROT_WRITE
_POISON: Final = b"\xa5" * (1 << 16)  # new memory is never zero by luck

_NO_CONTEXT_NEEDED: Final = {
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceGetDefaultMemPool",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxSetCurrent",
}


#: Calls that wait, or may wait, until the device has run everything queued on it. The fake always waits.
SYNCHRONISING: Final = {
    "cuMemAlloc",
    "cuMemAllocManaged",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuIpcOpenMemHandle",
    "cuIpcCloseMemHandle",
    "cuLibraryLoadData",
    "cuLibraryUnload",
    "cuKernelGetFunction",
    "cuFuncLoad",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
}


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address or None, nbytes, protection, flags, fd, 0)
    assert got not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(got)


def _munmap(address: int, nbytes: int) -> None:
    assert _libc.munmap(address, nbytes) == 0, os.strerror(ctypes.get_errno())


class Failed(Exception):
    """A fake function answers with this code."""

    def __init__(self, code: int) -> None:
        self.code = code


class Call(NamedTuple):
    """One recorded call."""

    name: str
    arguments: tuple[Any, ...]


@dataclass
class FakeGpu:
    """Memory of one device, shared by all processes of its machine."""

    total: int = 2**40
    used: int = 0
    pool_reserved: int = 0
    pool_used: int = 0
    capability: tuple[int, int] = (9, 0)
    name: str = "Fake H200"

    @property
    def free(self) -> int:
        return self.total - self.used - self.pool_reserved


class Memory:
    """A piece of device memory; lives as long as a handle or a mapping of it does."""

    def __init__(self, gpu: FakeGpu | None, nbytes: int, fd: int | None = None) -> None:
        if gpu is not None and nbytes > gpu.free:
            raise Failed(2)
        self.gpu, self.nbytes, self.references = gpu, nbytes, 0
        self.fd = fd if fd is not None else os.memfd_create("whalez-fake", os.MFD_CLOEXEC)
        if fd is None:
            os.ftruncate(self.fd, nbytes)
        if gpu is not None:
            gpu.used += nbytes

    def take(self) -> Memory:
        self.references += 1
        return self

    def drop(self) -> None:
        self.references -= 1
        if self.references == 0:
            os.close(self.fd)
            if self.gpu is not None:
                self.gpu.used -= self.nbytes


@dataclass
class FakeDomain:
    """Machines that one fabric connects: whose fabric handles are known where."""

    handles: dict[bytes, tuple[FakeMachine, Memory]] = field(default_factory=dict)


@dataclass
class FakeMachine:
    """What the processes of one machine share."""

    gpus: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    domain: FakeDomain = field(default_factory=FakeDomain)
    imex: bool = True
    identity: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    legacy: dict[bytes, tuple[FakeDriver, int]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)  #: what a real driver calls undefined behaviour


@dataclass
class _Mapping:
    memory: Memory
    nbytes: int
    is_imported: bool
    access: dict[int, int] = field(default_factory=dict)  # device -> bits of PROT_READ and PROT_WRITE


@dataclass
class _Stream:
    flags: int
    priority: int
    context: int
    channel: tuple[int, int]  #: streams of one channel run in the order in which their entries were queued
    queue: deque[tuple[str, Callable[[], bool]]] = field(default_factory=deque)
    serials: deque[int] = field(default_factory=deque)  #: of the entries of `queue`


#: Runs a launched kernel: (grid, block, shared bytes, arguments) -> False while it is still running.
Runner = Callable[[tuple[int, int, int], tuple[int, int, int], int, list[Any]], Any]


class FakeDriver:
    """One process's driver.

    machine:  what it shares with other processes
    version:  of the driver
    kernels:  image -> (struct codes of the arguments, Runner); another image loads, and launching it does nothing
    memops:   whether stream memory operations work at all; on imported memory they never do unless `imported_memops`
    channels: of each priority, as CUDA_DEVICE_MAX_CONNECTIONS; streams beyond them share one, and what is queued behind
              a blocked entry of another stream waits with it. 0: every stream has its own
    priority_greatest:  0 on a device where all streams have one priority
    refuse:   (call, arguments) -> code to answer with, 0 to go on
    """

    def __init__(
        self,
        machine: FakeMachine | None = None,
        *,
        version: int = 13_000,
        kernels: Mapping[bytes, tuple[str, Runner]] | None = None,
        memops: bool = True,
        imported_memops: bool = False,
        channels: int = 0,
        priority_greatest: int = -5,
        refuse: Callable[[str, tuple[Any, ...]], int] | None = None,
    ) -> None:
        self.machine = machine or FakeMachine()
        self.version = version
        self.kernels = dict(kernels or {})
        self.memops = memops
        self.imported_memops = imported_memops
        self.channels = channels
        self.priority_greatest = priority_greatest
        self.refuse = refuse
        self.calls: list[Call] = []
        self.fail_at: int | None = None  #: index of the call that fails next
        self.fail_code = 999
        self._next = 0x1000
        self._handles: dict[int, Memory] = {}
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, _Mapping] = {}  # by address
        self._allocations: dict[int, Memory] = {}
        self._opened: dict[int, tuple[Memory, FakeDriver | None, int]] = {}
        self._imported: set[int] = set()  # handles
        self._host: dict[int, tuple[Any, int]] = {}
        self._contexts: dict[int, int] = {}  # device -> references
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, int] = {}  # -> entries it was recorded in that have not run
        self._serial = 0
        self._libraries: dict[int, bytes] = {}
        self._kernels: dict[int, bytes] = {}
        self._shared_bytes: dict[tuple[int, int], int] = {}  # kernel, device -> dynamic bytes that a launch may ask for
        self._loaded: set[int] = set()  # functions; one that is not is loaded by its first launch, which synchronises
        self._default: deque[Callable[[], Any]] = deque()  # what the default stream has not run yet
        self._priced: set[tuple[Any, ...]] = set()  # properties whose granularity was asked for
        self._current = threading.local()
        for name in CALLS:
            setattr(self, name, self._recorded(name, getattr(self, f"_{name}")))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(real, name)
        raise AttributeError(name)

    # ---- recording --------------------------------------------------------------------------------------------
    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if name in SYNCHRONISING - {"cuStreamSynchronize"}:
                self._drain(list(self._streams.values()), name)
            with _MACHINE_LOCK:
                if name in SYNCHRONISING - {"cuStreamSynchronize"}:
                    self._run_default()
                index = len(self.calls)
                self.calls.append(Call(name, arguments))
                code = self.refuse(name, arguments) if self.refuse is not None else 0
                if index == self.fail_at:
                    code = self.fail_code
                if not code and name not in _NO_CONTEXT_NEEDED and getattr(self._current, "context", None) is None:
                    code = 201
                if code:
                    return (real.CUresult(code), None)
                try:
                    answer = function(*arguments)
                except Failed as failed:
                    return (real.CUresult(failed.code), None)
                self.pump()
            if callable(answer):  # a blocking function: it must not hold the lock
                answer = answer()
            return (real.CUresult(0), *(answer if isinstance(answer, tuple) else () if answer is None else (answer,)))

        return call

    def names(self, since: int = 0) -> list[str]:
        """Names of the calls from index `since` on."""
        return [call.name for call in self.calls[since:]]

    def leaks(self) -> dict[str, int]:
        """What is held now, by kind; empty when all was given back."""
        held = {
            "handles": len(self._handles),
            "address ranges": len(self._reserved),
            "mappings": len(self._mapped),
            "allocations": len(self._allocations),
            "opened legacy handles": len(self._opened),
            "host allocations": len(self._host),
            "contexts": sum(self._contexts.values()),
            "streams": len(self._streams),
            "events": len(self._events),
            "libraries": len(self._libraries),
        }
        return {kind: count for kind, count in held.items() if count}

    def die(self) -> None:
        """The process exits: the kernel gives back all it held, and its handles mean nothing any more."""
        with _MACHINE_LOCK:
            mine = set(self._handles.values())
            domain = self.machine.domain.handles
            for key in [key for key, (_, memory) in domain.items() if memory in mine]:
                del domain[key]
            for key in [key for key, (owner, _) in self.machine.legacy.items() if owner is self]:
                del self.machine.legacy[key]
            for address, mapping in self._mapped.items():
                _munmap(address, mapping.nbytes)
                mapping.memory.drop()
            for address, nbytes in self._reserved.items():
                if address not in self._mapped:
                    _munmap(address, nbytes)
            for address, memory in [*self._allocations.items(), *((a, m) for a, (m, _, _) in self._opened.items())]:
                _munmap(address, memory.nbytes)
                memory.drop()
            for memory in self._handles.values():
                memory.drop()
            for each in (self._handles, self._reserved, self._mapped, self._allocations, self._opened, self._host):
                each.clear()
            for more in (
                self._contexts,
                self._streams,
                self._events,
                self._libraries,
                self._kernels,
                self._loaded,
                self._default,
            ):
                more.clear()

    def _new(self) -> int:
        self._next += 0x10
        return self._next

    @property
    def _gpu(self) -> FakeGpu:
        return self.machine.gpus[self._current.context - 1]

    # ---- memory access ----------------------------------------------------------------------------------------
    def _pieces(self) -> Iterator[tuple[int, int, bool, int]]:
        """Address, bytes, whether it was imported and how the current device may touch it, of all that it may touch."""
        for address, mapping in self._mapped.items():
            if access := mapping.access.get(self._current.context - 1):
                yield address, mapping.nbytes, mapping.is_imported, access
        for address, memory in self._allocations.items():
            yield address, memory.nbytes, False, _PROT_RW
        for address, (memory, _, _) in self._opened.items():
            yield address, memory.nbytes, True, _PROT_RW
        for address, (_, nbytes) in self._host.items():
            yield address, nbytes, False, _PROT_RW

    def is_imported(self, address: Any, nbytes: int = 8) -> bool:
        """Whether [address, address + nbytes) is another process's memory. Answers 1 when it is nobody's."""
        return self._piece(address, nbytes)[2]

    def _piece(self, address: Any, nbytes: int) -> tuple[int, int, bool, int]:
        for piece in self._pieces():
            if piece[0] <= int(address) and int(address) + nbytes <= piece[0] + piece[1]:
                return piece
        raise Failed(1)

    def _check_write(self, address: Any, nbytes: int) -> None:
        """Answers 1 for what is nobody's, 700 for what this device may read only."""
        if self._piece(address, nbytes)[3] != _PROT_RW:
            raise Failed(700)

    def _run_default(self) -> None:
        while self._default:
            self._default.popleft()()

    def pump(self) -> None:
        """Let every stream run until it blocks."""
        moved = True
        while moved:
            moved = False
            for stream in self._streams.values():
                while stream.queue and self._is_first(stream) and stream.queue[0][1]():
                    stream.queue.popleft()
                    if stream.serials:
                        stream.serials.popleft()
                    moved = True

    def _is_first(self, stream: _Stream) -> bool:
        """Whether nothing of another stream stands before this one's next entry in their channel."""
        others = (each for each in self._streams.values() if each.channel == stream.channel and each is not stream)
        return not stream.serials or all(stream.serials[0] < each.serials[0] for each in others if each.serials)

    def stuck(self) -> list[str]:
        """What the streams that cannot go on stand at."""
        with _MACHINE_LOCK:
            self.pump()
            return [stream.queue[0][0] for stream in self._streams.values() if stream.queue]

    def _enqueue(self, stream: Any, label: str, work: Callable[[], Any]) -> None:
        if int(stream) not in self._streams or self._streams[int(stream)].context != self._current.context:
            raise Failed(400)
        queue = self._streams[int(stream)].queue
        if len(queue) >= QUEUE_MAX:
            self.pump()
        assert len(queue) < QUEUE_MAX, f"{label}: the call blocks the host: {QUEUE_MAX} entries stand at {queue[0][0]}"
        self._serial += 1
        self._streams[int(stream)].serials.append(self._serial)
        self._streams[int(stream)].queue.append((label, lambda: work() is not False))

    # ---- start ------------------------------------------------------------------------------------------------
    def _cuInit(self, Flags: int) -> None:
        if not self.machine.gpus:
            raise Failed(100)

    def _cuDriverGetVersion(self) -> int:
        return self.version

    def _cuDeviceGetCount(self) -> int:
        return len(self.machine.gpus)

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetName(self, length: int, dev: int) -> bytes:
        return self.machine.gpus[dev].name.encode().ljust(length, b"\0")

    def _cuDeviceGetAttribute(self, attrib: Any, dev: int) -> int:
        attributes = real.CUdevice_attribute
        return {
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.machine.gpus[dev].capability[0],
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.machine.gpus[dev].capability[1],
            attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: SHARED_BYTES_MAX,
        }[attrib]

    def _cuDevicePrimaryCtxRetain(self, dev: int) -> int:
        self._contexts[dev] = self._contexts.get(dev, 0) + 1
        return dev + 1

    def _cuDevicePrimaryCtxRelease(self, dev: int) -> None:
        if not self._contexts.get(dev):
            raise Failed(201)
        self._contexts[dev] -= 1

    def _cuCtxSetCurrent(self, ctx: int) -> None:
        if not self._contexts.get(ctx - 1):
            raise Failed(201)
        self._current.context = ctx

    def _cuCtxSynchronize(self) -> None:
        return None

    def _cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return 0, self.priority_greatest

    # ---- memory -----------------------------------------------------------------------------------------------
    def _cuMemGetInfo(self) -> tuple[int, int]:
        return self._gpu.free, self._gpu.total

    def _cuDeviceGetDefaultMemPool(self, dev: int) -> int:
        return dev + 1

    def _cuMemPoolGetAttribute(self, pool: int, attr: Any) -> int:
        gpu = self.machine.gpus[pool - 1]
        if attr == real.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
            return gpu.pool_reserved
        assert attr == real.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT, attr
        return gpu.pool_used

    def _cuMemPoolTrimTo(self, pool: int, minBytesToKeep: int) -> None:
        gpu = self.machine.gpus[pool - 1]
        gpu.pool_reserved = max(gpu.pool_used, minBytesToKeep)

    def _cuMemAlloc(self, bytesize: int) -> Any:
        memory = Memory(self._gpu, bytesize).take()
        address = _mmap(0, bytesize, _PROT_RW, mmap.MAP_SHARED, memory.fd)
        ctypes.memmove(address, _POISON, min(bytesize, len(_POISON)))
        self._allocations[address] = memory
        return real.CUdeviceptr(address)

    def _cuMemAllocManaged(self, bytesize: int, flags: int) -> Any:
        memory = Memory(self._gpu, bytesize).take()  # sparse: a page takes memory when it is touched
        address = _mmap(0, bytesize, _PROT_RW, mmap.MAP_SHARED, memory.fd)
        self._allocations[address] = memory
        return real.CUdeviceptr(address)

    def _cuMemFree(self, dptr: Any) -> None:
        memory = self._allocations.pop(int(dptr), None)
        if memory is None:
            raise Failed(1)
        if memory.references > 1:
            self.machine.violations.append(f"cuMemFree of {int(dptr):#x} while another process has it open")
        for key in [k for k, (owner, address) in self.machine.legacy.items() if (owner, address) == (self, int(dptr))]:
            del self.machine.legacy[key]
        _munmap(int(dptr), memory.nbytes)
        memory.drop()

    def _cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        buffer = ctypes.create_string_buffer(bytesize + 4096)
        address = -(-ctypes.addressof(buffer) // 4096) * 4096
        self._host[address] = (buffer, bytesize)
        return address

    def _cuMemFreeHost(self, p: int) -> None:
        if self._host.pop(int(p), None) is None:
            raise Failed(1)

    def _cuMemsetD8(self, dstDevice: Any, uc: int, N: int) -> None:
        self._check_write(dstDevice, N)
        self._default.append(lambda: ctypes.memset(int(dstDevice), uc, N))

    def _cuMemcpyDtoH(self, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
        self.is_imported(srcDevice, ByteCount)
        self._run_default()
        ctypes.memmove(dstHost, int(srcDevice), ByteCount)

    def _cuMemcpyHtoD(self, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
        """The bytes are taken now; they may be on their way when this returns."""
        self._check_write(dstDevice, ByteCount)
        self._run_default()
        taken = ctypes.string_at(srcHost, ByteCount)
        self._default.append(lambda: ctypes.memmove(int(dstDevice), taken, ByteCount))

    # ---- sharing ----------------------------------------------------------------------------------------------
    def _priced_as(self, prop: Any) -> tuple[Any, ...]:
        """What memory this is, of the device whose context is current."""
        assert prop.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, prop.type
        assert prop.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, prop.location.type
        assert prop.location.id == self._current.context - 1, prop.location.id
        return prop.type, prop.requestedHandleTypes, prop.location.type, prop.location.id

    def _cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._priced.add(self._priced_as(prop))
        recommended = real.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return GRANULARITY if option == recommended else GRANULARITY_MIN

    def _is_fabric(self, kind: Any) -> bool:
        return bool(kind == real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)

    def _cuMemCreate(self, size: int, prop: Any, flags: int) -> int:
        assert flags == 0, flags
        if size % GRANULARITY_MIN or size <= 0 or self._priced_as(prop) not in self._priced:
            raise Failed(1)
        if self._is_fabric(prop.requestedHandleTypes) and not self.machine.imex:
            raise Failed(800)
        handle = self._new()
        self._handles[handle] = memory = Memory(self.machine.gpus[prop.location.id], size).take()
        os.pwrite(memory.fd, _POISON[:size], 0)
        return handle

    def _cuMemRelease(self, handle: int) -> None:
        memory = self._handles.pop(int(handle), None)
        if memory is None:
            raise Failed(400)
        self._imported.discard(int(handle))
        if memory.references == 1:  # nobody maps it: an exported handle of it dies with it
            domain = self.machine.domain.handles
            for key in [key for key, (_, each) in domain.items() if each is memory]:
                del domain[key]
        memory.drop()

    def _cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Any:
        assert (alignment, addr, flags) == (0, 0, 0), (alignment, addr, flags)
        address = _mmap(0, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._reserved[address] = size
        return real.CUdeviceptr(address)

    def _cuMemAddressFree(self, ptr: Any, size: int) -> None:
        if self._reserved.get(int(ptr)) != size or int(ptr) in self._mapped:
            raise Failed(1)
        del self._reserved[int(ptr)]
        _munmap(int(ptr), size)

    def _cuMemMap(self, ptr: Any, size: int, offset: int, handle: int, flags: int) -> None:
        assert (offset, flags) == (0, 0), (offset, flags)
        memory = self._handles.get(int(handle))
        if memory is None or self._reserved.get(int(ptr)) != size or int(ptr) in self._mapped:
            raise Failed(1)
        if size > memory.nbytes:
            raise Failed(1)
        _mmap(int(ptr), size, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, memory.fd)
        self._mapped[int(ptr)] = _Mapping(memory.take(), size, int(handle) in self._imported)

    def _cuMemUnmap(self, ptr: Any, size: int) -> None:
        if int(ptr) not in self._mapped or self._mapped[int(ptr)].nbytes != size:
            raise Failed(1)
        memory = self._mapped.pop(int(ptr)).memory
        _mmap(int(ptr), size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
        memory.drop()

    def _cuMemSetAccess(self, ptr: Any, size: int, desc: list[Any], count: int) -> None:
        mapping = self._mapped.get(int(ptr))
        if mapping is None or size != mapping.nbytes or count != len(desc):
            raise Failed(1)
        for each in desc:
            assert each.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, each.location.type
            if not 0 <= each.location.id < len(self.machine.gpus):
                raise Failed(101)
            mapping.access[each.location.id] = int(each.flags)  # PROT_READ is 1, PROT_READWRITE 3: those of mprotect
        assert _libc.mprotect(int(ptr), size, max(mapping.access.values())) == 0

    def _far(self, kind: bytes, memory: Memory) -> bytes:
        """A handle that a real other process can follow: /proc/<pid>/fd/<fd>."""
        return struct.pack("<4sIiQ16s", kind, os.getpid(), memory.fd, memory.nbytes, secrets.token_bytes(16)).ljust(
            64, b"\0"
        )

    @staticmethod
    def _follow(handle: bytes) -> Memory:
        _, pid, fd, nbytes, _ = struct.unpack("<4sIiQ16s", handle[:36])
        try:
            if pid == os.getpid():
                raise Failed(400)  # exported here, and since given back
            return Memory(None, nbytes, os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            raise Failed(400) from None

    def _cuMemExportToShareableHandle(self, handle: int, handleType: Any, flags: int) -> Any:
        assert flags == 0, flags
        memory = self._handles.get(int(handle))
        if memory is None:
            raise Failed(400)
        if not self._is_fabric(handleType):
            return os.dup(memory.fd)
        made = real.CUmemFabricHandle()
        made.data = self._far(b"FABR", memory)
        self.machine.domain.handles[bytes(made.data)] = (self.machine, memory)
        return made

    def _cuMemImportFromShareableHandle(self, osHandle: Any, shHandleType: Any) -> int:
        if self._is_fabric(shHandleType):
            key = ctypes.string_at(osHandle, 64)
            if key[:4] != b"FABR":
                raise Failed(1)
            found = self.machine.domain.handles.get(key)
            if not self.machine.imex:
                raise Failed(800)
            if found is not None and found[0] is not self.machine and not found[0].imex:
                raise Failed(801)
            memory = found[1] if found is not None else self._follow(key)
        else:
            try:
                status = os.fstat(int(osHandle))
            except OSError:
                raise Failed(1) from None
            mine = [each for each in self._all_memory() if os.fstat(each.fd).st_ino == status.st_ino]
            memory = mine[0] if mine else Memory(None, status.st_size, os.dup(int(osHandle)))
        handle = self._new()
        self._handles[handle] = memory.take()
        self._imported.add(handle)
        return handle

    def _all_memory(self) -> list[Memory]:
        """Of all fake processes in this one: an import must find the piece that its owner counts."""
        return [memory for each in _everyone for memory in each._handles.values()]

    def _cuIpcGetMemHandle(self, dptr: Any) -> Any:
        memory = self._allocations.get(int(dptr))
        if memory is None:
            raise Failed(1)
        made = real.CUipcMemHandle()
        key = self._far(b"LEGA", memory)
        ctypes.memmove(made.getPtr(), key, 64)
        self.machine.legacy[key] = (self, int(dptr))
        return made

    def _cuIpcOpenMemHandle(self, handle: Any, Flags: int) -> Any:
        key = ctypes.string_at(handle.getPtr(), 64)
        if key[:4] != b"LEGA":
            raise Failed(1)
        found = self.machine.legacy.get(key)
        if found is not None and found[0] is self:
            raise Failed(201)
        memory = found[0]._allocations[found[1]] if found is not None else self._follow(key)
        address = _mmap(0, memory.nbytes, _PROT_RW, mmap.MAP_SHARED, memory.fd)
        self._opened[address] = (memory.take(), *(found or (None, 0)))
        return real.CUdeviceptr(address)

    def _cuIpcCloseMemHandle(self, dptr: Any) -> None:
        if int(dptr) not in self._opened:
            raise Failed(1)
        memory, _, _ = self._opened.pop(int(dptr))
        _munmap(int(dptr), memory.nbytes)
        memory.drop()

    # ---- streams ----------------------------------------------------------------------------------------------
    def _cuStreamCreateWithPriority(self, flags: int, priority: int) -> int:
        if not int(flags) & 1:
            self.machine.violations.append("a stream that synchronises with the legacy default stream")
        stream = self._new()
        priority = max(int(priority), self.priority_greatest)  # clamped
        i_channel = sum(each.priority == priority for each in self._streams.values())
        channel = (priority, i_channel % self.channels if self.channels else stream)
        self._streams[stream] = _Stream(int(flags), priority, self._current.context, channel)
        return stream

    def _cuStreamDestroy(self, hStream: int) -> None:
        if self._streams.pop(int(hStream), None) is None:
            raise Failed(400)

    def _cuStreamQuery(self, hStream: int) -> None:
        if int(hStream) not in self._streams:
            raise Failed(400)
        self.pump()
        if self._streams[int(hStream)].queue:
            raise Failed(600)

    def _cuStreamSynchronize(self, hStream: int) -> Callable[[], None] | None:
        if int(hStream) == 0:  # the default stream waits for none that is not ordered against it
            self._run_default()
            return None
        if int(hStream) not in self._streams:
            raise Failed(400)
        return lambda: self._drain([self._streams[int(hStream)]], "cuStreamSynchronize")

    def _drain(self, streams: list[_Stream], call: str) -> None:
        deadline = time.monotonic() + FOREVER_S
        while True:
            with _MACHINE_LOCK:
                self.pump()
                heads = [stream.queue[0][0] for stream in streams if stream.queue]
            if not heads:
                return
            assert time.monotonic() < deadline, f"{call} would wait for ever, for a stream that is blocked: {heads}"
            time.sleep(0.001)

    def _word(self, address: Any, *, is_written: bool = False) -> int:
        if int(address) % 8 or (self.is_imported(address) and not self.imported_memops):
            raise Failed(1)
        if is_written:
            self._check_write(address, 8)
        return int(address)

    def _cuStreamBatchMemOp(self, stream: int, count: int, paramArray: list[Any], flags: int) -> None:
        if not self.memops:
            raise Failed(801)
        assert flags == 0, flags
        if count >= 256 or count != len(paramArray):
            raise Failed(1)
        kinds = real.CUstreamBatchMemOpType
        for each in paramArray:
            if each.operation == kinds.CU_STREAM_MEM_OP_WAIT_VALUE_64:
                address, value = self._word(each.waitValue.address), int(each.waitValue.value64)
                assert int(each.waitValue.flags) == 0, each.waitValue.flags  # GEQ, and no flush
                label = f"wait [{address:#x}] >= {value:#x}"
                self._enqueue(stream, label, lambda a=address, v=value: is_reached(read_word(a), v))  # type: ignore[misc]
            elif each.operation == kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64:
                assert int(each.writeValue.flags) == 0, each.writeValue.flags  # behind a barrier
                address, value = self._word(each.writeValue.address, is_written=True), int(each.writeValue.value64)
                self._enqueue(stream, f"write [{address:#x}]", lambda a=address, v=value: write_word(a, v))  # type: ignore[misc]
            else:
                raise Failed(1)

    def _cuStreamWriteValue64(self, stream: int, addr: Any, value: int, flags: int) -> None:
        if not self.memops:
            raise Failed(801)
        assert flags == 0, flags  # 1 would leave out the barrier before the store
        address = self._word(addr, is_written=True)
        self._enqueue(stream, f"write [{address:#x}]", lambda: write_word(address, int(value)))

    def _is_host(self, address: Any) -> bool:
        return any(begin <= int(address) < begin + nbytes for begin, (_, nbytes) in self._host.items())

    def _cuMemcpyAsync(self, dst: Any, src: Any, ByteCount: int, hStream: int) -> Callable[[], None] | None:
        self._check_write(dst, ByteCount)
        self.is_imported(src, ByteCount)
        self._enqueue(hStream, "copy", lambda: ctypes.memmove(int(dst), int(src), ByteCount))
        if self._is_host(dst) and self._is_host(src):  # "fully synchronous with respect to the host"
            return lambda: self._drain([self._streams[int(hStream)]], "cuMemcpyAsync between two places of the host")
        return None

    def _cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: int, ByteCount: int, hStream: int) -> None:
        self._cuMemcpyAsync(dstDevice, srcHost, ByteCount, hStream)

    def _cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: Any, ByteCount: int, hStream: int) -> None:
        self._cuMemcpyAsync(dstHost, srcDevice, ByteCount, hStream)

    def _cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: int) -> None:
        self._check_write(dstDevice, N)
        self._enqueue(hStream, "zero", lambda: ctypes.memset(int(dstDevice), uc, N))

    def _cuEventCreate(self, Flags: int) -> int:
        assert Flags == 2, Flags  # no timing
        event = self._new()
        self._events[event] = 0
        return event

    def _cuEventDestroy(self, hEvent: int) -> None:
        if self._events.pop(int(hEvent), None) is None:
            raise Failed(400)

    def _cuEventRecord(self, hEvent: int, hStream: int) -> None:
        if int(hEvent) not in self._events:
            raise Failed(400)

        def reach() -> None:
            if int(hEvent) in self._events:
                self._events[int(hEvent)] -= 1

        self._enqueue(hStream, "event", reach)
        self._events[int(hEvent)] += 1

    def _cuEventQuery(self, hEvent: int) -> None:
        if int(hEvent) not in self._events:
            raise Failed(400)
        self.pump()
        if self._events[int(hEvent)]:
            raise Failed(600)

    # ---- kernels ----------------------------------------------------------------------------------------------
    def _cuLibraryLoadData(
        self,
        code: bytes,
        jitOptions: Any,
        jitOptionsValues: Any,
        numJitOptions: int,
        libraryOptions: Any,
        libraryOptionValues: Any,
        numLibraryOptions: int,
    ) -> int:
        library = self._new()
        self._libraries[library] = code
        return library

    def _cuLibraryUnload(self, library: int) -> None:
        if self._libraries.pop(int(library), None) is None:
            raise Failed(400)

    def _cuLibraryGetKernelCount(self, lib: int) -> int:
        return 1

    def _cuLibraryEnumerateKernels(self, numKernels: int, lib: int) -> list[int]:
        kernel = self._new()
        self._kernels[kernel] = self._libraries[int(lib)]
        return [kernel]

    def _cuKernelGetFunction(self, kernel: int) -> int:
        return kernel

    def _cuFuncLoad(self, function: int) -> None:
        if int(function) not in self._kernels:
            raise Failed(400)
        self._loaded.add(int(function))

    def _cuKernelSetAttribute(self, attrib: Any, val: int, kernel: int, dev: int) -> None:
        assert attrib == real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, attrib
        if int(kernel) not in self._kernels:
            raise Failed(400)
        if not 0 <= val <= SHARED_BYTES_MAX:
            raise Failed(1)
        self._shared_bytes[int(kernel), dev] = val

    def _check_launch(self, function: int, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int) -> None:
        """Answers 1 for what no device, or not this kernel, takes."""
        taken = zip((*grid, *block), (*GRID_MAX, *BLOCK_MAX), strict=True)
        may_share = max(self._shared_bytes.get((int(function), self._current.context - 1), 0), SHARED_BYTES_DEFAULT)
        if not all(1 <= size <= most for size, most in taken) or math.prod(block) > THREADS_MAX:
            raise Failed(1)
        if not 0 <= shared_bytes <= may_share:
            raise Failed(1)

    def _cuLaunchKernel(
        self,
        f: int,
        gridDimX: int,
        gridDimY: int,
        gridDimZ: int,
        blockDimX: int,
        blockDimY: int,
        blockDimZ: int,
        sharedMemBytes: int,
        hStream: int,
        kernelParams: int,
        extra: int,
    ) -> Callable[[], None] | None:
        image = self._kernels.get(int(f))
        if image is None:
            raise Failed(400)
        grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
        self._check_launch(f, grid, block, sharedMemBytes)
        if int(f) not in self._loaded:
            return lambda: self._load_late(
                f,
                gridDimX,
                gridDimY,
                gridDimZ,
                blockDimX,
                blockDimY,
                blockDimZ,
                sharedMemBytes,
                hStream,
                kernelParams,
                extra,
            )
        if image not in self.kernels:
            self._enqueue(hStream, "kernel", lambda: None)
            return None
        codes, runner = self.kernels[image]
        pointers = (ctypes.c_uint64 * len(codes)).from_address(int(kernelParams))
        arguments = [
            struct.unpack("<" + code, ctypes.string_at(at, struct.calcsize(code)))[0]
            for code, at in zip(codes, pointers, strict=True)
        ]
        self._enqueue(hStream, image.decode(errors="replace"), lambda: runner(grid, block, sharedMemBytes, arguments))
        return None

    def _load_late(self, function: int, *launch: Any) -> None:
        """The first launch of a function that nobody loaded waits for the whole device."""
        self._drain(list(self._streams.values()), "cuLaunchKernel of a function that is not loaded")
        with _MACHINE_LOCK:
            self._loaded.add(int(function))
            self._cuLaunchKernel(function, *launch)
            self.pump()


_everyone: list[FakeDriver] = []


@contextlib.contextmanager
def fake_processes(*drivers: FakeDriver) -> Iterator[None]:
    """These are the processes of this test; a descriptor of one is known to the others, and all end with the block."""
    _everyone.extend(drivers)
    try:
        yield
    finally:
        for driver in drivers:
            _everyone.remove(driver)
            driver.die()


def read_word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def write_word(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def is_reached(seen: int, value: int) -> bool:
    """CU_STREAM_WAIT_VALUE_GEQ: cyclic, (int64)(seen - value) >= 0."""
    return (seen - value) % 2**64 < 2**63


def count_names(calls: list[Call]) -> Counter[str]:
    return Counter(call.name for call in calls)
