"""Trace files of a run folder -> one row per launch: who ran what, and which rank was the slowest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from whalez.errors import ConfigError

_NAME = re.compile(r"trace-(\d{1,5})\.jsonl")
HEAD = ("launch", "kind", "seq", "request", "ranks", "rows", "slowest", "seconds", "its phases")


class _Line(msgspec.Struct):
    """What is read here of a line."""

    launch: int
    kind: str
    seq: int | None
    request_id: str
    rows: int
    took_s: float
    wall_s: float
    phases: dict[str, float]


class Traces(NamedTuple):
    """What stands in the trace files of a run folder."""

    lines: list[dict[str, Any]]  #: with their ranks; a row's lines together (see `row_of`), rows in order of time
    skipped: dict[str, int]  #: file name -> lines that are none; the last may be one that is being written


def read_traces(folder: Path) -> Traces:
    """Raises ConfigError if there is no trace, or one that cannot be read."""
    lines: list[dict[str, Any]] = []
    skipped: dict[str, int] = {}
    paths = [(path, match) for path in folder.glob("trace-*.jsonl") if (match := _NAME.fullmatch(path.name))]
    if not paths:
        raise ConfigError(f"{folder}: no trace-<rank>.jsonl in it; start the fleet with --trace")
    for path, match in sorted(paths):
        try:
            texts = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
        for text in texts:
            try:
                line = msgspec.json.decode(text)
                msgspec.convert(line, _Line)
            except (ValueError, RecursionError):
                skipped[path.name] = skipped.get(path.name, 0) + 1
                continue
            lines.append({**line, "rank": int(match[1])})
    # Launches count from 0 in every world that writes into the files, so their numbers give no order.
    begins: dict[tuple[int, str], float] = {}
    for line in lines:
        row = row_of(line)
        begins[row] = min(line["wall_s"], begins.get(row, line["wall_s"]))
    lines.sort(key=lambda line: (begins[row_of(line)], row_of(line), line["rank"]))
    return Traces(lines, skipped)


def row_of(line: Mapping[str, Any]) -> tuple[int, str]:
    """Launch and request, which all members' lines of a superstep share."""
    return line["launch"], line["request_id"]


def rows(lines: Sequence[dict[str, Any]]) -> list[list[object]]:
    """One row per launch and request, in the order of the lines; in a superstep all members' lines are one row."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(row_of(line), []).append(line)
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
