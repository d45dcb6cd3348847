"""What a machine adds by itself to a time that a test bounds: it pauses, and it takes long to start a Python."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import TracebackType

LOOK_S = 0.005


class Pauses:
    """While it is open a thread does nothing but sleep and look; `late_s` is by how much it woke late, in all.

    Nothing that a process does can begin while the machine does not run, so a bound may grow by so much.
    """

    def __init__(self) -> None:
        self.late_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        before = time.monotonic()
        while not self._over.is_set():
            time.sleep(LOOK_S)
            now = time.monotonic()
            late_s = now - before - LOOK_S
            if late_s > LOOK_S:  # less is how a timer is
                self.late_s += late_s
            before = now


def python_s() -> float:
    """What a Python that imports the launcher takes here and now, from its start to its end."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import whalez.cli, whalez.fleet"], check=True)
    return time.monotonic() - began
