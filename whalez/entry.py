"""Where the `whalez` command begins: a signal that comes while the command is still being imported ends it in one line.

Rule: nothing is imported here that Python has not imported itself; `whalez.cli` takes the signals over.
"""

from __future__ import annotations

import os
import signal
import types


def _end(number: int, _: types.FrameType | None) -> None:
    """Nothing has begun, so there is nothing to close."""
    os.write(2, f"whalez: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


for _number in (signal.SIGINT, signal.SIGTERM):  # here and not in `main`: this module is imported for this alone
    signal.signal(_number, _end)


def main() -> None:
    from whalez.cli import main as run

    run()
