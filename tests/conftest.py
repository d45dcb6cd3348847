"""For all tests: kernels are compiled once, before the first of them, into the same cache that ranks use."""

import os

import pytest

from whalez.warm import use_cache, warm

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
