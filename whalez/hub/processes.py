"""What one process can know of another one on the same machine: whether it has ended, and whether it is stopped."""

from __future__ import annotations

import contextlib
import os
import select
import threading


class Wake:
    """An eventfd that ends another thread's poll. Owns: the fd. Closed by: the polling thread's owner."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def set(self) -> None:
        """Any thread; never blocks."""
        with self._lock:  # or a write could go to a new file of the same number, opened after `close`
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):  # 2^64 - 2 unread wakes: it is awake
                    os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it has ended.

    Owns: the descriptor, closed by the caller. Raises OSError where the kernel or a sandbox forbids it.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def is_alive_and_running(pid: int) -> bool:
    """True for a process of this machine that is neither gone, a zombie, nor stopped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read(4096).rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in (b"T", b"t", b"Z", b"X")


class PeerWatch:
    """Pidfds of peers on this machine, for a poller. Used by one thread. Owns: the fds. Closed by: `close`."""

    def __init__(self) -> None:
        self._fds: dict[int, str] = {}  # fd -> incarnation
        self._pids: dict[str, int] = {}

    def add(self, incarnation: str, pid: int) -> int | None:
        """Watch; returns the fd to poll, or None if it is watched already or can not be.

        Raises: ProcessLookupError if the process has ended.
        """
        if incarnation in self._pids:
            return None
        try:
            fd = open_pidfd(pid)
        except OSError:
            return None  # the beats must do
        if fd is None:
            raise ProcessLookupError(pid)
        self._fds[fd] = incarnation
        self._pids[incarnation] = pid
        return fd

    def take(self, fd: int) -> str | None:
        """The process whose fd became readable, which is closed and forgotten. None if the fd is not ours."""
        incarnation = self._fds.pop(fd, None)
        if incarnation is not None:
            self._pids.pop(incarnation)
            os.close(fd)
        return incarnation

    def has_ended(self, incarnation: str) -> bool | None:
        """Whether a process has ended; None if it is not watched."""
        fd = next((fd for fd, known in self._fds.items() if known == incarnation), None)
        return None if fd is None else bool(select.select([fd], [], [], 0)[0])

    def is_starved(self, incarnation: str) -> bool:
        """Whether a silent process is known to live here and not to be stopped."""
        pid = self._pids.get(incarnation)
        return pid is not None and is_alive_and_running(pid)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._pids.clear()
