"""Trace files of a run folder -> one row per launch: who ran what, and which rank was the slowest."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whalez.errors import ConfigError

HEAD = ("launch", "kind", "seq", "request", "ranks", "rows", "slowest", "seconds", "its phases")


def read_traces(folder: Path) -> list[dict[str, Any]]:
    """Every line of every rank's trace, with its rank, ascending launch. Raises ConfigError if there is no trace."""
    lines = []
    paths = sorted(folder.glob("trace-*.jsonl"))
    for path in paths:
        match = re.fullmatch(r"trace-(\d+)\.jsonl", path.name)
        if match is None:
            continue
        for text in path.read_text().splitlines():
            try:
                lines.append({"rank": int(match[1]), **json.loads(text)})
            except ValueError:  # the line that is being written
                continue
    if not paths:
        raise ConfigError(f"{folder}: no trace-<rank>.jsonl in it; start the fleet with --trace")
    return sorted(lines, key=lambda line: (line["launch"], line["rank"]))


def rows(lines: Sequence[dict[str, Any]]) -> list[list[object]]:
    """One row per launch and request; in a superstep all members' lines are one row."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["launch"], line["request_id"]), []).append(line)
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[dict[str, Any]]) -> list[object]:
    slowest = max(group, key=lambda line: line["took_s"] - line["phases"].get("exchange_wait", 0.0))
    phases = sorted(slowest["phases"].items(), key=lambda item: -item[1])
    return [
        slowest["launch"],
        slowest["kind"],
        "-" if slowest["seq"] is None else slowest["seq"],
        slowest["request_id"],
        ",".join(str(line["rank"]) for line in group),
        sum(line["rows"] for line in group),
        slowest["rank"],
        f"{slowest['took_s']:.4f}",
        " ".join(f"{name} {seconds:.4f}" for name, seconds in phases if seconds > 0),
    ]
