"""What the ranks captured of a request, gathered into the two files `generate` was asked for.

Every rank writes `rank-<r>.npz` in the request's `capture_folder` once, under a name it renames at the end
(engine/records.py).
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from whalez.engine.records import capture_folder
from whalez.errors import OutputError, WhalezError
from whalez.hub.requests import Report

WAIT_S = 10.0  #: a member may still be writing when the poster has answered


class Captured(Protocol):
    """A finished request: what names its files and its ranks."""

    @property
    def request_id(self) -> str: ...

    @property
    def report(self) -> Report: ...


def merge_captures(
    run_dir: Path, results: Sequence[Captured], logits_out: Path | None, hidden_out: Path | None
) -> None:
    """Write `logits` to one file and `hidden_<rank>`, `start_<rank>` and what else there is to the other.

    With several requests every key is led by `request<i>_`. Raises WhalezError naming the file that never
    came, OutputError.
    """
    logits: dict[str, Any] = {}
    hidden: dict[str, Any] = {}
    for i, result in enumerate(results):
        lead = f"request{i}_" if len(results) > 1 else ""
        for rank in sorted({result.report.poster, *result.report.gang}):
            arrays = _load(capture_folder(run_dir, result.request_id) / f"rank-{rank}.npz")
            if "logits" in arrays:
                logits[f"{lead}logits"] = arrays.pop("logits")
            hidden.update({f"{lead}{name}_{rank}": array for name, array in arrays.items()})
    for out, arrays in ((logits_out, logits), (hidden_out, hidden)):
        if out is not None:
            try:
                with out.open("wb") as file:  # savez would add .npz to a name without it
                    np.savez(file, **arrays)
            except OSError as error:
                raise OutputError(out, error) from None


def _load(path: Path) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            with np.load(path) as archive:
                return dict(archive)
        except (FileNotFoundError, zipfile.BadZipFile, EOFError, ValueError) as error:
            if time.monotonic() > deadline:
                raise WhalezError(f"{path.parent.name}: {path.name} was not captured: {error}") from None
            time.sleep(0.05)
