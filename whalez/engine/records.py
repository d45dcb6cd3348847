"""Files a rank leaves in the run folder: traces, debug captures and the post-mortem."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class TraceFile:
    """One JSON line per launch that prefilled something, in RUN/trace-<rank>.jsonl."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._file = open(run_dir / f"trace-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115 - closed by close()

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


_PLAIN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


def capture_folder(run_dir: Path, request_id: str) -> Path:
    """RUN/capture/<request id>. An id comes from a client: one that is no plain name is replaced by its hash."""
    name = request_id
    if not _PLAIN_ID.fullmatch(request_id):
        name = "id-" + hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return run_dir / "capture" / name


class Capture:
    """Debug arrays of each request, gathered in memory and written to `capture_folder`/rank-<rank>.npz at its end.

    Keys: start, hidden f32 [rows, D] (residual stream after the last layer), choices i32 [MoE layers, rows, k];
    on the owner also logits f32 [1 + generated, vocab].
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._rows: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {}
        self._logits: dict[str, list[np.ndarray]] = {}

    def rows(self, request_id: str, start: int, hidden: np.ndarray, choices: list[np.ndarray]) -> None:
        stacked = np.stack(choices) if choices else np.empty((0, len(hidden), 0), np.int32)
        self._rows.setdefault(request_id, []).append((start, hidden, stacked))

    def logits(self, request_id: str, row: np.ndarray) -> None:
        self._logits.setdefault(request_id, []).append(row.copy())

    def drop(self, request_id: str) -> None:
        """The request ended without a result; nobody will ask for its rows."""
        self._rows.pop(request_id, None)
        self._logits.pop(request_id, None)

    def finish(self, request_id: str) -> None:
        """Write what was gathered; readers never see half a file."""
        rows = self._rows.pop(request_id, [])
        logits = self._logits.pop(request_id, [])
        arrays: dict[str, Any] = {}
        if rows:
            arrays["start"] = np.int64(rows[0][0])
            arrays["hidden"] = np.concatenate([hidden for _, hidden, _ in rows])
            arrays["choices"] = np.concatenate([choices for _, _, choices in rows], axis=1)
        if logits:
            arrays["logits"] = np.stack(logits)
        folder = capture_folder(self._run_dir, request_id)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self._rank}.npz"
        with open(path.with_suffix(".part"), "wb") as file:
            np.savez(file, **arrays)
        path.with_suffix(".part").rename(path)


def write_post_mortem(run_dir: Path, rank: int, record: Mapping[str, Any]) -> Path:
    """RUN/post-mortem-<rank>.json: what this rank knew when it stopped; readers never see half a file."""
    path = run_dir / f"post-mortem-{rank}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=2, default=str) + "\n")
    part.rename(path)
    return path
