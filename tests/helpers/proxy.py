"""A TCP proxy that understands ZMTP 3 frames without encryption: it can lose, repeat, delay or cut at one message."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

GREETING_BYTES = 64
_LONG, _COMMAND = 2, 4


class FrameProxy:
    """Between ranks and a hub at `target_port`. Owns: its sockets and threads. Closed by: `close`.

    decide(to_hub, body): "pass", "drop", "twice", "cut" or seconds to hold this frame and what follows it back
    """

    def __init__(self, target_port: int, decide: Callable[[bool, bytes], str | float]) -> None:
        self.target_port = target_port
        self.decide = decide
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                near.close()  # the hub is not up yet; the rank tries again
                continue
            self._sockets += [near, far]
            for one, two, to_hub in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass_on, args=(one, two, to_hub), daemon=True).start()

    def _pass_on(self, one: socket.socket, two: socket.socket, to_hub: bool) -> None:
        try:
            for _ in range(GREETING_BYTES):  # each side waits for the other's first bytes before it says the rest
                two.sendall(self._read(one, 1))
            while True:
                head = self._read(one, 1)
                size_bytes = self._read(one, 8 if head[0] & _LONG else 1)
                size = struct.unpack(">Q" if head[0] & _LONG else ">B", size_bytes)[0]
                body = self._read(one, size)
                frame = head + size_bytes + body
                action = "pass" if head[0] & _COMMAND else self.decide(to_hub, body)
                if action == "cut":
                    two.sendall(frame[: len(frame) // 2])
                    break
                if isinstance(action, float):
                    time.sleep(action)
                if action != "drop":
                    two.sendall(frame)
                if action == "twice":
                    two.sendall(frame)
        except OSError:
            pass
        finally:
            for each in (one, two):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _read(source: socket.socket, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = source.recv(count - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)
