"""SIGINT and SIGTERM of a command: the first one ends it through its `with` blocks, as an exception.

Python drops an exception that a handler raises while a finalizer or the callback of a weak reference runs. So it is
kept until somebody has acted on it, and every wait of the main thread raises it again.
"""

from __future__ import annotations

import signal
import sys
import threading
import types
from typing import Any

_raised: Signalled | None = None  #: by the handler, and nobody has acted on it yet


class Signalled(BaseException):
    """The user or a supervisor wants us to end; not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def take_signals() -> None:
    """From now on the first of both signals raises Signalled; further ones change nothing, the end is near."""

    def on_signal(number: int, _: types.FrameType | None) -> None:
        global _raised
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        _raised = Signalled(number)
        raise _raised

    def report(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, Signalled):
            sys.__unraisablehook__(dropped)

    sys.unraisablehook = report
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, on_signal)


def raise_again() -> None:
    """For waits: raise Signalled if a signal came and nobody has acted on it."""
    if _raised is not None and threading.current_thread() is threading.main_thread():
        raise _raised


def heed() -> None:
    """Whoever ends what runs says so, for it waits too."""
    global _raised
    _raised = None
