"""The device that a kernel test runs on: `pytestmark = pytest.mark.usefixtures("device")` in its module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

DEVICES = ["harness", pytest.param("gpu", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A GPU has one order of threads, its own, and does not run what only the harness can show."""
    kept, dropped = [], []
    for item in items:
        values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        is_moot = values.get("order", "forward") != "forward" or item.get_closest_marker("no_gpu")
        (dropped if values.get("device") == "gpu" and is_moot else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session")
def gpu() -> Iterator[Any]:
    """The GPU of this machine with all kernels loaded; compiling them the first time takes a minute."""
    from helpers import devices
    from whalez.errors import FabricError

    try:
        made = devices.Gpu()
    except FabricError as error:
        pytest.skip(f"no GPU to run on: {error}")
    yield made
    made.close()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where `helpers.devices` takes arrays and streams from during this test."""
    from helpers import devices

    if request.param == "harness":
        yield
        return
    made = request.getfixturevalue("gpu")
    with devices.used(made):
        yield
        made.check_guards()
        made.reset()
