"""For all tests: kernels are compiled once, before the first of them, into the same cache that ranks use.

`make test` spreads the files over two workers. What starts rank processes stays together in one of them, for those
tests choose ports and bound times, and comes first, for it is the longest piece. What runs the same kernels in the
harness stays together too, for every process compiles them anew.
"""

import gc
import os
from typing import Any

import hypothesis
import pytest

from whalez.warm import use_cache, warm

PROCESSES, KERNELS = "processes", "kernels"

# A slow example is a slow machine: for one that hangs there is pytest's own time-out. All else stays Hypothesis' own.
hypothesis.settings.register_profile("whalez", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("whalez")

use_cache(os.environ)  # before anything imports numba, which reads the name of its cache once


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the scenarios of tests/rendezvous anew")


def pytest_sessionstart() -> None:
    gc.freeze()  # what is imported stays, and compilers make so many objects that looking through them is a tenth
    gc.set_threshold(50_000, 20, 100)
    last = ""

    def show(name: str, i: int, n: int) -> None:
        nonlocal last
        last = name
        print(f"\rcompiling kernels, {i} of {n}", end="", flush=True)

    warm(os.environ, show)
    if last:
        print()


def _piece(nodeid: str) -> str:
    """What a test must share a worker with: its file, all that starts rank processes, or the kernels."""
    file = nodeid.split("::")[0]
    folder, name = file.split("/")[-2:]
    if folder in ("multiprocess", "serve") or name.endswith("_processes.py"):
        return PROCESSES
    return KERNELS if name.startswith(("test_kernels_", "test_devices", "test_layers")) else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = [PROCESSES, KERNELS]
    items.sort(key=lambda item: first.index(piece) if (piece := _piece(item.nodeid)) in first else len(first))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Pieces(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _piece(nodeid)

    return Pieces(config, log)
