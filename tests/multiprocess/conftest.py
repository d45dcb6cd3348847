"""Fleets of real rank processes over the `tiny` checkpoint: one of four ranks for all modules, others per module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.small import SETTINGS
from whalez.fleet import Fleet
from whalez.model.presets import make_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `tiny` preset in f32."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_checkpoint(folder, "kimi-linear", "tiny", 0, dtype="f32")
    return folder


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Fleet]]:
    """Start fleets; all are stopped at the end of the module."""
    fleets: list[Fleet] = []

    def begin(model: Path, world: int, **changes: object) -> Fleet:
        fleet = Fleet(model, world, **(SETTINGS | {"trace": True} | changes))  # type: ignore[arg-type]
        fleet.start()
        fleets.append(fleet)
        return fleet

    yield begin
    for fleet in fleets:
        fleet.stop()


@pytest.fixture(scope="package")
def four(tiny: Path) -> Iterator[Fleet]:
    with Fleet(tiny, 4, **(SETTINGS | {"trace": True})) as fleet:  # type: ignore[arg-type]
        yield fleet
