"""Slabs in POSIX shared memory: names, allocation, tickets and mappings of the host backend.

Rule 1: a slab is allocated whole before anyone maps it: a full /dev/shm is an error here and never SIGBUS later.
Rule 2: a name lives from `create` to the barrier; after `unlink` no death of any rank can leave anything behind.
Rule 3: a slab is locked as long as its maker lives, so that what a killed launcher and its ranks left can be told from
what somebody uses.
Rule 4: a ticket comes from a peer: name, size, owner and header are checked before a byte of it is believed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from whalez.errors import ConfigError, FabricError, ShapeError
from whalez.fabric.header import check_header, make_header, rejected
from whalez.fabric.layout import HEADER, SlabLayout
from whalez.rendezvous.messages import SlabEntry

_FLEET = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_INCARNATION = re.compile(r"[A-Za-z0-9_.]{1,64}")  # no hyphen: it ends the fleet id in a name
_NAME = re.compile(r"whalez-[A-Za-z0-9_.-]{1,100}-[A-Za-z0-9_.]{1,64}-[0-9]+")
_TICKET = re.compile(rb"/(whalez-[A-Za-z0-9_.-]{1,200}) ([0-9]{1,19})")


class HostSlab:
    """A mapping of one shared-memory slab.

    Owns:      the mapping, and the duplicate of the file descriptor that `mmap` keeps with it
    Closed by: HostSlabs.close; views still alive then keep the memory mapped until they are gone, raw addresses do not
    """

    def __init__(self, rank: int, memory: mmap.mmap) -> None:
        self.rank = rank
        self.nbytes = len(memory)
        self._memory: mmap.mmap | None = memory
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)
        self.address = int(self._bytes.ctypes.data)

    def view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A C-contiguous array over the slab. Raises ShapeError when it does not fit or is not aligned."""
        assert self._bytes is not None, "slab is closed"
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=object)) * kind.itemsize
        if min(offset, *shape, 0) < 0 or offset + nbytes > self.nbytes or offset % min(kind.alignment, 8):
            raise ShapeError(f"slab of rank {self.rank}: {shape} of {kind} at byte {offset} of {self.nbytes}")
        return self._bytes[offset : offset + nbytes].view(kind).reshape(shape)

    def close(self) -> None:
        """Unmap. Idempotent."""
        memory, self._memory, self._bytes = self._memory, None, None
        if memory is not None:
            with contextlib.suppress(BufferError):  # a view is alive: the last one unmaps
                memory.close()


class HostSlabs:
    """SlabProvider over /dev/shm.

    Owns:      the name of the own slab until `unlink`, the mappings of all slabs until `close`
    Closed by: whoever made it; a context manager

    `directory` and `fallocate` are there for tests: another tmpfs, or one that is full.
    """

    def __init__(
        self,
        layout: SlabLayout,
        *,
        fleet_id: str,
        rank: int,
        incarnation: str,
        directory: str = "/dev/shm",
        fallocate: Callable[[int, int, int], None] = os.posix_fallocate,
    ) -> None:
        if not _FLEET.fullmatch(fleet_id):
            raise ConfigError(f"fleet_id: expected 1 to 100 of A-Z a-z 0-9 _ . -, got {fleet_id!r}")
        if not _INCARNATION.fullmatch(incarnation):
            raise ConfigError(f"incarnation: expected 1 to 64 of A-Z a-z 0-9 _ ., got {incarnation!r}")
        assert 0 <= rank < layout.world, rank
        self.layout = layout
        self.rank = rank
        self.incarnation = incarnation
        self.name = f"/whalez-{fleet_id}-{incarnation}-{rank}"
        self._directory = directory
        self._fallocate = fallocate
        self._slabs: dict[int, HostSlab] = {}
        self._is_linked = False

    def __enter__(self) -> HostSlabs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- own slab ---------------------------------------------------------------------------------------------
    def create(self) -> HostSlab:
        """Make, allocate and map this rank's slab; its header is written. Raises FabricError, leaving no name."""
        assert self.rank not in self._slabs, "created twice"
        path = self._directory + self.name
        self._is_linked = True  # before it is: the handler of a signal that strikes in between has to unlink it
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._is_linked = False
            raise FabricError(f"slab of rank {self.rank}: cannot create {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by the mapping, which keeps a duplicate of fd
            self._allocate(fd, path)
            slab = self._map(self.rank, fd)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(fd)
        self._slabs[self.rank] = slab
        self._write_header(slab)
        return slab

    def _map(self, rank: int, fd: int) -> HostSlab:
        try:
            return HostSlab(rank, mmap.mmap(fd, self.layout.nbytes, mmap.MAP_SHARED))
        except OSError as error:
            raise FabricError(
                f"cannot map the slab of rank {rank}, {self.layout.nbytes} bytes: {error.strerror}"
            ) from error

    def _allocate(self, fd: int, path: str) -> None:
        need = self.layout.nbytes
        try:
            self._fallocate(fd, 0, need)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise FabricError(
                    f"slab of rank {self.rank}: cannot allocate {need} bytes in {path}: {error.strerror}"
                ) from error
            space = os.statvfs(self._directory)
            advised = -(-need * self.layout.world // 2**20) + 16
            raise FabricError(
                f"slab of rank {self.rank} needs {need} bytes, but {self._directory} has "
                f"{space.f_bavail * space.f_frsize} free. The {self.layout.world} slabs of this fleet need "
                f"{need * self.layout.world} bytes together: in a container start it with --shm-size={advised}m, "
                f"elsewhere `mount -o remount,size={advised}m {self._directory}`, or use fewer ranks or smaller chunks"
            ) from error

    def _write_header(self, slab: HostSlab) -> None:
        header = make_header(self.layout, self.rank, self.incarnation)
        view = self.layout.view(slab, "header")
        for field in reversed(HEADER.names or ()):  # `magic` last: it says that the rest is there
            view[field] = header[field]

    @property
    def ticket(self) -> bytes:
        """Name and size of the own slab, for SlabEntry.ticket."""
        assert self.rank in self._slabs, "no slab yet"
        return f"{self.name} {self.layout.nbytes}".encode()

    # ---- peers' slabs -----------------------------------------------------------------------------------------
    def open(self, entry: SlabEntry) -> HostSlab:
        """Map the slab of another rank. Raises FabricError naming the claim that does not hold."""
        rank = entry.rank
        assert rank != self.rank, "the own slab is mapped by create"
        if not 0 <= rank < self.layout.world or rank in self._slabs:
            raise rejected(entry, "rank", f"a new one below {self.layout.world}", rank)
        match = _TICKET.fullmatch(entry.ticket)
        if match is None:
            raise rejected(entry, "ticket", "'/whalez-<fleet>-<incarnation>-<rank> <bytes>'", entry.ticket[:300])
        if int(match[2]) != self.layout.nbytes:
            raise rejected(entry, "size of the ticket", self.layout.nbytes, int(match[2]))
        path = f"{self._directory}/{match[1].decode()}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise FabricError(f"ticket of rank {rank} rejected: cannot open {path}: {error.strerror}") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise rejected(entry, "owner", f"a file of user {os.geteuid()}", f"one of {found.st_uid}")
            # A mapping beyond the end of the file would be SIGBUS at first touch.
            if found.st_size != self.layout.nbytes:
                raise rejected(entry, "size of the file", self.layout.nbytes, found.st_size)
            slab = self._map(rank, fd)
        finally:
            os.close(fd)
        try:
            check_header(self.layout, entry, slab.view(0, (1,), HEADER))
        except FabricError:
            slab.close()
            raise
        self._slabs[rank] = slab
        return slab

    def open_all(self, entries: Sequence[SlabEntry]) -> list[HostSlab]:
        """Map the table of the world; own slab included, in rank order. Raises FabricError."""
        if [entry.rank for entry in entries] != list(range(self.layout.world)):
            raise FabricError(f"slab table: expected ranks 0..{self.layout.world - 1}, got {[e.rank for e in entries]}")
        return [self._slabs[self.rank] if entry.rank == self.rank else self.open(entry) for entry in entries]

    # ---- the end ----------------------------------------------------------------------------------------------
    def unlink(self) -> None:
        """Remove the own name; the mappings live on. Idempotent."""
        if self._is_linked:
            self._is_linked = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._directory + self.name)

    def close(self) -> None:
        """Unlink if still linked, unmap all. Close the Bells first. Idempotent."""
        self.unlink()
        slabs, self._slabs = self._slabs, {}
        for slab in slabs.values():
            slab.close()


def remove_leftovers(fleet_id: str, directory: str = "/dev/shm") -> list[str]:
    """Unlink what ranks of this fleet left that died before the barrier. For the launcher, when all are gone."""
    pattern = re.compile(rf"whalez-{re.escape(fleet_id)}-[A-Za-z0-9_.]{{1,64}}-[0-9]+")
    names = sorted(name for name in os.listdir(directory) if pattern.fullmatch(name))
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{directory}/{name}")
    return names


SWEEP_AGE_S = 10.0  #: a file younger than that may not be locked yet


def sweep(directory: str = "/dev/shm") -> list[str]:
    """Unlink this user's slabs of any fleet whose makers are gone: launcher and ranks were killed before the barrier.

    Returns the names.
    """
    swept = []
    for name in sorted(filter(_NAME.fullmatch, os.listdir(directory))):
        path = f"{directory}/{name}"
        with contextlib.suppress(OSError), unused_file(path):
            os.unlink(path)
            swept.append(name)
    return swept


@contextlib.contextmanager
def unused_file(path: str) -> Iterator[None]:
    """Hold the lock of a file of this user that nobody holds. Raises OSError: it is in use, young, or not ours."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "not a file of this user", path)
        if time.time() - found.st_mtime < SWEEP_AGE_S:
            raise BlockingIOError(errno.EAGAIN, "too young", path)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
