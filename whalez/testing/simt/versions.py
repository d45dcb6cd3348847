"""Which versions the harness was tested with.

It rewrites the IR text that numba-cuda writes and parses it with llvmlite's LLVM; neither promises to keep its form.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from whalez.testing.simt.errors import SimtError

PINNED = {"numba-cuda": "0.30.4", "llvmlite": "0.50.0"}


def check_versions() -> None:
    """Raises: SimtError naming the package, the version wanted and the one found."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SimtError(f"the harness runs on x86-64 Linux only, this is {sys.platform} on {platform.machine()}")
    for name, wanted in PINNED.items():
        try:
            got = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            got = "none"
        if got != wanted:
            raise SimtError(
                f"{name}: expected {wanted}, got {got}. The harness depends on the text this package writes or reads: "
                f"install {name}=={wanted}, or run tests/cuda/test_simt_* with the other one and move the pin in "
                "whalez/testing/simt/versions.py"
            )
