"""For all tests: kernels are compiled once, before the first of them, into the same cache that ranks use.

`make test` spreads the files over two workers. What starts rank processes stays together in one of them, for those
tests choose ports and bound times, and comes first, for it is the longest piece.
"""

import os

import pytest

from whalez.warm import use_cache, warm

use_cache(os.environ)  # before anything imports numba, which reads the name of its cache once


def pytest_sessionstart() -> None:
    last = ""

    def show(name: str, i: int, n: int) -> None:
        nonlocal last
        last = name
        print(f"\rcompiling kernels, {i} of {n}", end="", flush=True)

    warm(os.environ, show)
    if last:
        print()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        has_processes = item.get_closest_marker("multiprocess") is not None
        item.add_marker(pytest.mark.xdist_group("processes" if has_processes else str(item.path)))
    items.sort(key=lambda item: item.get_closest_marker("multiprocess") is None)
