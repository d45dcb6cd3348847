"""For all tests: kernels are compiled once, before the first of them, into the same cache that ranks use.

`make test` spreads the files over two workers. What starts rank processes stays together in one of them, for those
tests choose ports and bound times, and comes first, for it is the longest piece.
"""

import os
from typing import Any

import pytest

from whalez.warm import use_cache, warm

PROCESSES = "processes"

use_cache(os.environ)  # before anything imports numba, which reads the name of its cache once


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the scenarios of tests/rendezvous anew")


def pytest_sessionstart() -> None:
    last = ""

    def show(name: str, i: int, n: int) -> None:
        nonlocal last
        last = name
        print(f"\rcompiling kernels, {i} of {n}", end="", flush=True)

    warm(os.environ, show)
    if last:
        print()


def _piece(nodeid: str) -> str:
    """What a test must share a worker with: its file, or all that starts rank processes."""
    file = nodeid.split("::")[0]
    folder, name = file.split("/")[-2:]
    return PROCESSES if folder in ("multiprocess", "serve") or name.endswith("_processes.py") else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _piece(item.nodeid) != PROCESSES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Pieces(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _piece(nodeid)

    return Pieces(config, log)
