"""Slabs in device memory, in the three ways another process can map them.

fabric    cuMemCreate with a fabric handle: 64 bytes that work in every process of the NVLink domain, on any machine
posix_fd  cuMemCreate with a file descriptor, handed over a unix socket: one machine
cuda_ipc  cuMemAlloc and its legacy 64-byte handle: one machine

Rule 1: which of them is used is the preflight's choice; a provider never turns into another one.
Rule 2: whatever is taken is on a Teardown before the next call, so that a failure anywhere leaves nothing.
Rule 3: peers are unmapped before the own memory is freed, and one failure on the way out does not stop the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import numpy as np

from whalez.errors import CapabilityMissing, FabricError, ShapeError
from whalez.fabric.cuda.driver import Device, Teardown, during, run_all, with_trim
from whalez.fabric.cuda.fds import FdServer, fetch
from whalez.fabric.cuda.ticket import HANDLE_BYTES, Ticket, decode, this_machine
from whalez.fabric.header import check_header, make_header, rejected
from whalez.fabric.layout import HEADER, SlabLayout
from whalez.rendezvous.messages import SlabEntry

_IPC_GRANULARITY: Final = 2 * 2**20  # a smaller cuMemAlloc may share its block, and the handle is the block's
_LAZY_PEER_ACCESS: Final = 1


class CudaSlab:
    """One rank's slab, mapped into this device's address space. Owns: nothing; the provider has its Teardown."""

    def __init__(self, device: Device, rank: int, address: int, nbytes: int) -> None:
        self.rank = rank
        self.address = address
        self.nbytes = nbytes
        self._device = device

    def _check(self, offset: int, nbytes: int) -> None:
        if min(offset, nbytes) < 0 or offset + nbytes > self.nbytes:
            raise ShapeError(f"slab of rank {self.rank}: bytes {offset} to {offset + nbytes} of {self.nbytes}")
        assert self.address, "slab is closed"

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy from the slab. For start-up and post-mortems. Blocks: for the copy, not for any of our streams."""
        self._check(offset, nbytes)
        self._device.bind()
        buffer = ctypes.create_string_buffer(nbytes)
        self._device.driver.cuMemcpyDtoH(ctypes.addressof(buffer), self.address + offset, nbytes)
        return buffer.raw

    def write(self, offset: int, data: bytes) -> None:
        """Copy into the slab; peers see it. For start-up. Blocks: as `read`."""
        self._check(offset, len(data))
        self._device.upload(self.address + offset, data)


class CudaSlabs:
    """SlabProvider over device memory; the subclasses say how memory is made, exported and imported.

    Owns:      the own slab's memory, the mapping of every slab, what the export needs until `unlink`
    Closed by: whoever made it, before the Device; a context manager
    Order:     as SlabProvider. A peer still maps the own memory until its `close_peers`, so a fleet calls that on all
               ranks, waits until all have said so or are gone, and then calls `close`.
    Collective: no call is
    """

    name: ClassVar[str]
    is_local: ClassVar[bool] = True  #: whether peers must be on this machine

    def __init__(
        self, layout: SlabLayout, *, device: Device, rank: int, incarnation: str, machine: bytes | None = None
    ) -> None:
        assert 0 <= rank < layout.world, rank
        self.layout = layout
        self.device = device
        self.rank = rank
        self.incarnation = incarnation
        self.machine = this_machine() if machine is None else machine
        self._slabs: dict[int, CudaSlab] = {}
        self._teardowns: dict[int, Teardown] = {}
        self._export = Teardown()
        self._handle: bytes | None = None
        self._nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what a subclass knows --------------------------------------------------------------------------------
    def _granularity(self) -> int:
        raise NotImplementedError

    def _allocate(self, nbytes: int, teardown: Teardown) -> int:
        """Address of new memory of this device."""
        raise NotImplementedError

    def _export_handle(self) -> bytes:
        """At most 64 bytes for peers; what they need of this process goes on `self._export`."""
        raise NotImplementedError

    def _import(self, ticket: Ticket, rank: int, teardown: Teardown) -> int:
        """Address of a peer's memory."""
        raise NotImplementedError

    # ---- own slab ---------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Bytes that the own slab takes of the device: the layout's, rounded up to what the driver hands out."""
        if not self._nbytes:
            self.device.bind()
            step = self._granularity()
            self._nbytes = -(-self.layout.nbytes // step) * step
        return self._nbytes

    def create(self) -> CudaSlab:
        """Allocate, map and zero this rank's slab; its header is written. Raises FabricError, leaving nothing."""
        assert self.rank not in self._slabs, "created twice"
        teardown = self._teardowns.setdefault(self.rank, Teardown())
        with during(f"{self.name}: own slab of rank {self.rank}, {self.layout.nbytes} bytes"), self._undone(self.rank):
            self.device.bind()
            nbytes = self.nbytes
            address = with_trim(
                self.device,
                f"{self.name}: slab of rank {self.rank}",
                nbytes,
                lambda: self._try_allocate(nbytes, teardown),
            )
            self.device.driver.cuMemsetD8(address, 0, nbytes)  # may return before it has run; the write waits for both
            slab = CudaSlab(self.device, self.rank, address, self.layout.nbytes)
            slab.write(0, make_header(self.layout, self.rank, self.incarnation).tobytes())
            self._handle = self._export_handle()
            self._slabs[self.rank] = slab
        return slab

    def _try_allocate(self, nbytes: int, teardown: Teardown) -> int:
        try:
            return self._allocate(nbytes, teardown)
        except FabricError:  # it is tried again if the device was full
            with contextlib.suppress(FabricError):
                teardown.run()
            raise

    @contextlib.contextmanager
    def _undone(self, rank: int) -> Iterator[None]:
        """Undo what was taken for a slab if this block fails; what will not be undone now stays for `close`."""
        try:
            yield
        except BaseException:
            own = [self._export] if rank == self.rank else []
            with contextlib.suppress(FabricError):
                run_all([*own, self._teardowns[rank]])
            if not self._teardowns[rank]:
                del self._teardowns[rank]
            raise

    @property
    def ticket(self) -> bytes:
        """For SlabEntry.ticket; works in peers until `unlink`."""
        assert self._handle is not None, "no slab, or unlinked"
        return Ticket(self.name, self.machine, self.nbytes, self._handle).encode()

    # ---- peers' slabs -----------------------------------------------------------------------------------------
    def open(self, entry: SlabEntry) -> CudaSlab:
        """Map the slab of another rank. Raises FabricError with the claim that does not hold, or the driver's words."""
        rank = entry.rank
        assert rank != self.rank, "the own slab is mapped by create"
        if not 0 <= rank < self.layout.world or rank in self._slabs:
            raise rejected(entry, "rank", f"a new one below {self.layout.world}", rank)
        with during(f"{self.name}: slab of rank {rank} on {entry.host}"):
            self.device.bind()
            ticket = decode(entry, self.name, self.nbytes)
            if self.is_local and ticket.machine != self.machine:
                raise CapabilityMissing(
                    f"{self.name}: rank {rank} is on another machine ({entry.host}), where handles of {self.name} mean "
                    f"nothing: use --slabs fabric, or put all ranks on one machine"
                )
            teardown = self._teardowns.setdefault(rank, Teardown())
            with self._undone(rank):
                slab = CudaSlab(self.device, rank, self._import(ticket, rank, teardown), self.layout.nbytes)
                check_header(self.layout, entry, np.frombuffer(slab.read(0, HEADER.itemsize), HEADER))
                self._slabs[rank] = slab
        return slab

    def open_all(self, entries: Sequence[SlabEntry]) -> list[CudaSlab]:
        """Map the table of the world; own slab included, in rank order. Raises FabricError."""
        if [entry.rank for entry in entries] != list(range(self.layout.world)):
            raise FabricError(f"slab table: expected ranks 0..{self.layout.world - 1}, got {[e.rank for e in entries]}")
        return [self._slabs[self.rank] if entry.rank == self.rank else self.open(entry) for entry in entries]

    # ---- the end ----------------------------------------------------------------------------------------------
    def unlink(self) -> None:
        """Give up what only an import needs: descriptor and socket. Mappings live on. Idempotent."""
        self._handle = None
        self._export.run()

    def _release(self, ranks: Sequence[int]) -> None:
        self.device.bind()
        for rank in ranks:
            if (slab := self._slabs.pop(rank, None)) is not None:
                slab.address = 0
        try:
            run_all([self._teardowns[rank] for rank in ranks])
        finally:
            self._teardowns = {rank: left for rank, left in self._teardowns.items() if left}

    def close_peers(self) -> None:
        """Unmap all peers' slabs; the own one stays. Idempotent; after a failure it may be called again."""
        if ranks := [rank for rank in self._teardowns if rank != self.rank]:
            with during(f"{self.name}: unmapping peers at rank {self.rank}"):
                self._release(ranks)

    def close(self) -> None:
        """Unlink, unmap the peers, free the own slab. No kernel may be running. Idempotent; again after a failure."""
        steps = [Teardown() for _ in range(3)]
        # run_all goes on to the next of them when one fails.
        steps[0].push(self.unlink)
        steps[1].push(self.close_peers)
        steps[2].push(self._close_own)
        run_all(steps)

    def _close_own(self) -> None:
        if self.rank in self._teardowns:
            with during(f"{self.name}: freeing the slab of rank {self.rank}"):
                self._release([self.rank])


class _VmmSlabs(CudaSlabs):
    """Memory by cuMemCreate: a handle, an address range, a mapping and the right to use it."""

    handle_type: ClassVar[str]

    def _type(self) -> Any:
        return getattr(self.device.driver.api.CUmemAllocationHandleType, self.handle_type)

    def _prop(self) -> Any:
        api = self.device.driver.api
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = self._type()
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.device.ordinal
        return prop

    def _granularity(self) -> int:
        flags = self.device.driver.api.CUmemAllocationGranularity_flags
        recommended = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self.device.driver.cuMemGetAllocationGranularity(self._prop(), recommended))

    def _map(self, handle: Any, nbytes: int, teardown: Teardown) -> int:
        driver, api = self.device.driver, self.device.driver.api
        address = driver.cuMemAddressReserve(nbytes, 0, 0, 0)
        teardown.push(driver.cuMemAddressFree, address, nbytes)
        driver.cuMemMap(address, nbytes, 0, handle, 0)
        teardown.push(driver.cuMemUnmap, address, nbytes)
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.ordinal
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        driver.cuMemSetAccess(address, nbytes, [access], 1)
        return int(address)

    def _allocate(self, nbytes: int, teardown: Teardown) -> int:
        self._own = self.device.driver.cuMemCreate(nbytes, self._prop(), 0)
        teardown.push(self.device.driver.cuMemRelease, self._own)
        return self._map(self._own, nbytes, teardown)

    def _import_handle(self, shareable: Any, ticket: Ticket, teardown: Teardown) -> int:
        handle = self.device.driver.cuMemImportFromShareableHandle(shareable, self._type())
        teardown.push(self.device.driver.cuMemRelease, handle)
        return self._map(handle, ticket.nbytes, teardown)


class FabricSlabs(_VmmSlabs):
    """`fabric`: across machines of one NVLink domain; needs an IMEX channel on each."""

    name = "fabric"
    is_local = False
    handle_type = "CU_MEM_HANDLE_TYPE_FABRIC"

    def _export_handle(self) -> bytes:
        return bytes(self.device.driver.cuMemExportToShareableHandle(self._own, self._type(), 0).data)

    def _import(self, ticket: Ticket, rank: int, teardown: Teardown) -> int:
        shareable = self.device.driver.api.CUmemFabricHandle()
        shareable.data = ticket.handle
        return self._import_handle(shareable.getPtr(), ticket, teardown)


class PosixFdSlabs(_VmmSlabs):
    """`posix_fd`: one machine, one network namespace, one user."""

    name = "posix_fd"
    handle_type = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"

    def _export_handle(self) -> bytes:
        fd = int(self.device.driver.cuMemExportToShareableHandle(self._own, self._type(), 0))
        self._export.push(os.close, fd)
        os.set_inheritable(fd, False)
        server = FdServer(fd)
        self._export.push(server.close)
        return server.handle

    def _import(self, ticket: Ticket, rank: int, teardown: Teardown) -> int:
        fd = fetch(ticket.handle, rank)
        try:
            return self._import_handle(fd, ticket, teardown)
        finally:
            os.close(fd)  # the import has its own reference


class CudaIpcSlabs(CudaSlabs):
    """`cuda_ipc`: one machine."""

    name = "cuda_ipc"

    def _granularity(self) -> int:
        return _IPC_GRANULARITY

    def _allocate(self, nbytes: int, teardown: Teardown) -> int:
        self._own = self.device.driver.cuMemAlloc(nbytes)
        teardown.push(self.device.driver.cuMemFree, self._own)
        return int(self._own)

    def _export_handle(self) -> bytes:
        return ctypes.string_at(self.device.driver.cuIpcGetMemHandle(self._own).getPtr(), HANDLE_BYTES)

    def _import(self, ticket: Ticket, rank: int, teardown: Teardown) -> int:
        handle = self.device.driver.api.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), ticket.handle, HANDLE_BYTES)
        address = self.device.driver.cuIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
        teardown.push(self.device.driver.cuIpcCloseMemHandle, address)
        return int(address)


#: By name, the preferred one first.
PROVIDERS: Final[dict[str, type[CudaSlabs]]] = {
    provider.name: provider for provider in (FabricSlabs, PosixFdSlabs, CudaIpcSlabs)
}
