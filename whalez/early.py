"""Import this first in a program: a signal that comes while the rest is being imported ends it in one line.

Rule: nothing is imported here that Python has not imported itself; the program takes the signals over.
"""

from __future__ import annotations

import os
import signal
import types


def _end(number: int, _: types.FrameType | None) -> None:
    """Nothing has begun, so there is nothing to close."""
    os.write(2, f"whalez: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


for _number in (signal.SIGINT, signal.SIGTERM):  # here and not in a function: this module is imported for this alone
    signal.signal(_number, _end)
