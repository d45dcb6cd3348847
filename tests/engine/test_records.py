"""What a rank writes of a request: nothing of one without a result, and never outside its folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from whalez.engine.captures import merge_captures
from whalez.engine.records import Capture, capture_folder
from whalez.fleet import Generated
from whalez.hub.requests import Report


@pytest.mark.parametrize(
    "request_id",
    ["../../escaped", "/escaped", "..", ".", "", "a/b", "a\0b", "x" * 5000, "\udc80", "..\\x", "cmpl-0.1_a"],
)
def test_no_request_id_leads_out_of_the_folder(tmp_path: Path, request_id: str) -> None:
    run = tmp_path / "deep" / "run"
    run.mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    capture = Capture(run, 0)
    capture.rows(request_id, 0, np.ones((2, 3), np.float32), [])
    capture.logits(request_id, np.ones(4, np.float32))
    capture.finish(request_id)
    (written,) = set(tmp_path.rglob("*.npz")) - before
    assert written.parent.parent == run / "capture"
    result = Generated(request_id, (1,), "length", 2, Report(lane="local", why="", poster=0), "")
    merge_captures(run, [result], tmp_path / "logits.npz", None)
    assert np.load(tmp_path / "logits.npz")["logits"].shape == (1, 4)


def test_ids_keep_apart(tmp_path: Path) -> None:
    names = ["a/b", "a/c", "a", "A", "..", ".", "../a"]
    assert len({capture_folder(tmp_path, name) for name in names}) == len(names)
    assert capture_folder(tmp_path, "fleet-0a") == tmp_path / "capture" / "fleet-0a"
