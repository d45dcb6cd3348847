"""Ports of tests that run side by side, in workers of one suite and in suites of one machine."""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST, _END = 10_000, 32_768  # below those that Linux gives to whoever asks for any
_choice = random.SystemRandom()  # a seeded one would offer every worker the same


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row that are free now. From anywhere, so that nobody else is given them soon."""
    while True:
        first = _choice.randrange(_FIRST, _END - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
