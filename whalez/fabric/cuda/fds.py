"""File descriptors from one process to another over a unix socket (SCM_RIGHTS).

Not by pidfd_getfd: that needs ptrace rights, which siblings in a container do not have.

Rule 1: a descriptor goes to a process of the same user that knows the token; the socket's name is no secret.
Rule 2: both sides are bounded in time; a process that is gone is an error at once, for its socket went with it.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import struct
import threading
from typing import Final

from whalez.errors import FabricError

TOKEN_BYTES: Final = 16
_NAME_BYTES: Final = 16
HANDLE_BYTES: Final = _NAME_BYTES + TOKEN_BYTES
_UCRED: Final = struct.Struct("3i")
#: How long a peer asks (one whose server is gone is refused at once), and how long a silent one may hold up the others.
ASK_S: Final = 10.0
ANSWER_S: Final = 1.0


def _address(name: bytes) -> bytes:
    return b"\0whalez-" + name.hex().encode()  # abstract: nothing stays in a file system, however the process ends


class FdServer:
    """Hands one descriptor to every peer that asks.

    Owns:      the socket and the thread; not the descriptor
    Closed by: the provider, when all peers have mapped
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        name, self._token = secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(TOKEN_BYTES)
        self.handle = name + self._token  #: what a peer needs to ask
        self.refused_count = 0  #: connections that got nothing
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_address(name))
            self._socket.listen(256)
        except OSError as error:
            self._socket.close()
            raise FabricError(f"posix_fd: cannot listen for peers: {error.strerror}") from error
        self._thread = threading.Thread(target=self._serve, name="whalez-fds", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # shut down
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(ANSWER_S)
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        _, user, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        token = peer.recv(TOKEN_BYTES, socket.MSG_WAITALL)  # read in any case: unread bytes make the close a reset
        if user == os.geteuid() and secrets.compare_digest(token, self._token):
            socket.send_fds(peer, [b"+"], [self._fd])
        else:
            self.refused_count += 1

    def close(self) -> None:
        """Idempotent. Blocks: for the answer in progress, bounded by its time-out."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(3 * ANSWER_S)
        self._socket.close()


def _receive(peer: socket.socket) -> tuple[bytes, list[int]]:
    """One byte and the descriptors with it, closed on exec from the start: socket.recv_fds drops that flag."""
    data, ancillary, _, _ = peer.recvmsg(1, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    return data, fds.tolist()


def fetch(handle: bytes, rank: int) -> int:
    """Ask the server of `rank` for its descriptor. The caller closes it. Raises FabricError."""
    name, token = handle[:_NAME_BYTES], handle[_NAME_BYTES:HANDLE_BYTES]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(ASK_S)
        try:
            peer.connect(_address(name))
            peer.sendall(token)
            answer, fds = _receive(peer)
        except ConnectionRefusedError:
            raise FabricError(
                f"posix_fd: rank {rank} does not answer: its process is gone, or is in another network namespace "
                f"(containers that share a machine need one network for posix_fd)"
            ) from None
        except OSError as error:
            raise FabricError(f"posix_fd: rank {rank} did not hand over its descriptor: {error}") from error
    if answer != b"+" or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise FabricError(f"posix_fd: rank {rank} refused to hand over its descriptor: stale ticket, or another user's")
    return fds[0]
