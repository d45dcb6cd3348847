"""The files that the ranks of a failed fleet left -> the first cause, and one page about it.

Nearly every file of a failure says that somebody else died. The first cause is found by following who blames whom:
from the earliest file to the rank it names, from that rank's file to whom it names, until
- a rank that blames nobody: its own error is the cause;
- a rank that left no file: it was killed or stopped;
- a rank that only heard of the death of one that had waited for it, directly or not: it did not get on;
- a circle of ranks that wait for each other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whalez.admin.views import table
from whalez.errors import ConfigError

_DEATH = "PeerDied"
_LOG_TAIL_LINES = 3
_STORY_LINES = 8


@dataclass(frozen=True, slots=True)
class Cause:
    """What ended the fleet first."""

    ranks: tuple[int, ...]  #: the rank at fault; all of a circle
    text: str
    chain: tuple[str, ...]  #: how one gets there, a sentence per step


def read_files(folder: Path) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Rank -> its file, of the last failure; and ranks whose files are of an earlier start of a fleet.

    Raises: ConfigError for a folder without a file, or for one that is no post-mortem.
    """
    files: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("post-mortem-*.json")):
        try:
            told = json.loads(path.read_bytes())
            files[int(told["rank"])] = told
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not a post-mortem: {type(error).__name__}: {error}") from None
    if not files:
        raise ConfigError(f"{folder}: no post-mortem-<rank>.json in it")
    last = max(files.values(), key=_when)
    stale = [rank for rank, told in files.items() if told.get("fleet_id") != last.get("fleet_id")]
    return {rank: told for rank, told in files.items() if rank not in stale}, stale


def first_cause(files: Mapping[int, Mapping[str, Any]]) -> Cause:
    """Follow the blame from the earliest file to its end."""
    at = int(min(files.values(), key=_when)["rank"])
    chain: list[str] = []
    path: list[int] = []
    while at not in path:
        told = files.get(at)
        if told is None:
            text = f"rank {at} left no post-mortem: it was killed, or stopped, or its machine is gone"
            says = [str(each["message"]) for each in sorted(files.values(), key=_when) if each.get("blames") == at]
            return Cause((at,), f"{text} ({says[0]})", tuple(chain))
        chain.append(f"rank {at} says: {told['error']}: {told['message']}")
        path.append(at)
        blamed = told.get("blames")
        if blamed is None:
            return Cause((at,), f"rank {at} failed by itself: {told['error']}: {told['message']}", tuple(chain))
        if told["error"] == _DEATH and blamed in path:
            text = f"rank {at} did not get on; it is waited for, and heard only that rank {blamed} had ended"
            return Cause((at,), text, tuple(chain))
        at = int(blamed)
    circle = path[path.index(at) :]
    names = " -> ".join(map(str, [*circle, at]))
    return Cause(tuple(circle), f"ranks {names} wait for each other in a circle", tuple(chain))


def page(folder: Path, files: Mapping[int, Mapping[str, Any]], stale: Sequence[int]) -> list[str]:
    """The whole of it as Markdown."""
    cause = first_cause(files)
    begin = min(_when(told) for told in files.values())
    world = max((int(told.get("world", 0)) for told in files.values()), default=0)
    lines = [f"# Post-mortem of {folder}", "", f"**First cause: {cause.text}**", ""]
    lines += [f"{i}. {sentence}" for i, sentence in enumerate(cause.chain, 1)]
    missing = sorted(set(range(world)) - set(files))
    if missing:
        lines += ["", f"No file of this failure from rank {', '.join(map(str, missing))}."]
    if stale:
        lines += ["", f"Left out, of an earlier start: rank {', '.join(map(str, sorted(stale)))}."]
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin)) if begin else "unknown time"
    lines += ["", f"## What the ranks say (the first at {clock})", "", "```"]
    rows = [_row(told, begin) for told in sorted(files.values(), key=_when)]
    lines += [*table(("rank", "after", "launch", "waits for", "run", "wait", "error"), rows), "```"]
    lines += _whale_lines(files)
    for rank in missing:
        lines += _log_lines(folder, rank)
    for rank in cause.ranks:
        if rank in files:
            lines += ["", f"## Rank {rank}", "", "```", *_story_lines(files[rank]), "```"]
    return lines


def _when(told: Mapping[str, Any]) -> float:
    return float(told.get("at_wall_s", 0.0))


def _row(told: Mapping[str, Any], begin: float) -> list[object]:
    wait = told.get("waiting_for") or {}
    awaited = "-" if wait.get("peer") is None else f"rank {wait['peer']} {wait['kind']} {wait['value']:#x}"
    return [
        told["rank"],
        f"+{_when(told) - begin:.3f}s",
        told.get("launch", "-"),
        awaited,
        told.get("running", "-"),
        told.get("waiting", "-"),
        f"{told['error']}: {told['message']}",
    ]


def _whale_lines(files: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Whales that some rank had begun or was about to begin when it ended."""
    open_ = []
    for rank, told in sorted(files.items()):
        for life in told.get("whales", ()):
            moments = life.get("moments") or [{}]
            if (last := moments[-1].get("what")) not in ("done", "cancelled"):
                open_.append([rank, life["seq"], life["request_id"] or "stop", last, life.get("launch") or "-"])
    if not open_:
        return ["", "No whale was open."]
    return ["", "## Whales that were open", "", "```",
            *table(("rank", "seq", "request", "last seen", "L"), open_), "```"]  # fmt: skip


def _log_lines(folder: Path, rank: int) -> list[str]:
    try:
        text = (folder / f"rank-{rank}.log").read_text(errors="replace")
    except OSError:
        return []
    tail = [line for line in text.splitlines() if line.strip()][-_LOG_TAIL_LINES:]
    return ["", f"## Log of rank {rank}", "", "```", *(tail or ["(empty)"]), "```"]


def _story_lines(told: Mapping[str, Any]) -> list[str]:
    story = [" ".join(map(str, entry)) for entry in told.get("story", ())[-_STORY_LINES:]]
    return [*str(told.get("traceback", "")).rstrip().splitlines(), *(["", "last events:"] if story else []), *story]
