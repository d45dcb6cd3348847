"""The files that the ranks of a failed fleet left -> the first cause, and one page about it.

Nearly every file of a failure says that somebody else died. The first cause is found by following who blames whom:
from the earliest file to the rank it names, from that rank's file to whom it names, until
- a rank that blames nobody: its own error is the cause;
- a rank that left no file: it was killed or stopped;
- a rank that only heard of the death of one that had waited for it, directly or not: it did not get on;
- a circle of ranks that wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from whalez.admin.views import table
from whalez.errors import ConfigError

_DEATH = "PeerDied"
_ONE_START_S = 900.0  #: more than a start may take; ranks that fail in one do so within it
_Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_LOG_TAIL_LINES = 3
_STORY_LINES = 8


@dataclass(frozen=True, slots=True)
class Cause:
    """What ended the fleet first."""

    ranks: tuple[int, ...]  #: the rank at fault; all of a circle
    text: str
    chain: tuple[str, ...]  #: how one gets there, a sentence per step


class _Wait(msgspec.Struct):
    peer: int | None = None
    kind: str = ""
    value: int = 0


class _Moment(msgspec.Struct):
    what: str


class _Life(msgspec.Struct):
    seq: int
    request_id: str
    launch: int | None = None
    moments: list[_Moment] = []


class _File(msgspec.Struct):
    """What is read here of a file; a rank of another version, or a disk that was full, may have written anything."""

    rank: _Rank
    error: str
    message: str
    world: _Rank = 0
    fleet_id: str = ""
    incarnation: str = ""
    incarnations: list[str] = []
    at_wall_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)] = 0.0
    blames: _Rank | None = None
    launch: int | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_for: _Wait | None = None
    traceback: str = ""
    story: list[list[Any]] = []
    whales: list[_Life] = []


class Found(NamedTuple):
    """The files of a run folder."""

    files: dict[int, dict[str, Any]]  #: rank -> its file, of the last failure
    stale: dict[int, dict[str, Any]]  #: rank -> its file, of another failure before that one
    broken: dict[str, str]  #: name of a file -> why it cannot be read


def read_files(folder: Path) -> Found:
    """Raises ConfigError for a folder without a file that can be read; it names the folders of earlier worlds."""
    told: dict[int, dict[str, Any]] = {}
    broken: dict[str, str] = {}
    for path in sorted(folder.glob("post-mortem-*.json")):
        try:
            each = msgspec.json.decode(path.read_bytes())
            rank = msgspec.convert(each, _File).rank
            if path.name != f"post-mortem-{rank}.json":
                raise ValueError(f"it is rank {rank}'s")
            told[rank] = each
        except (OSError, ValueError, RecursionError) as error:
            broken[path.name] = f"{type(error).__name__}: {error}"
    if not told:
        why = "".join(f"; {name}: not a post-mortem: {reason}" for name, reason in broken.items())
        earlier = sorted({path.parent.name for path in folder.glob("world-*/post-mortem-*.json")}, key=_natural)
        if earlier:
            why += f"; worlds that failed before left theirs in {', '.join(str(folder / name) for name in earlier)}"
        raise ConfigError(f"{folder}: no post-mortem-<rank>.json in it{why}")
    last = max(told.values(), key=_when)
    files = {rank: each for rank, each in told.items() if _is_of_one_failure(each, last)}
    return Found(files, {rank: each for rank, each in told.items() if rank not in files}, broken)


def _is_of_one_failure(told: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Whether two ranks were of one world. Starts by hand share the fleet's id, so the incarnations decide: a rank
    that had heard of all others names them. Two that had not are of one failed start if little time lies between."""
    if told.get("fleet_id") != last.get("fleet_id"):
        return False
    for one, other in ((last, told), (told, last)):
        if one.get("incarnations"):
            return other.get("incarnation") in one["incarnations"]
    return _when(last) - _when(told) <= _ONE_START_S


def _natural(name: str) -> tuple[int, str]:
    return len(name), name


def first_cause(files: Mapping[int, Mapping[str, Any]], broken: Collection[str] = ()) -> Cause:
    """Follow the blame from the earliest file to its end. `broken`: names of files that cannot be read."""
    at = int(min(files.values(), key=_when)["rank"])
    chain: list[str] = []
    path: list[int] = []
    while at not in path:
        told = files.get(at)
        if told is None:
            text = f"rank {at} left no post-mortem: it was killed, or stopped, or its machine is gone"
            if f"post-mortem-{at}.json" in broken:
                text = f"rank {at} left a post-mortem that cannot be read"
            says = [str(each["message"]) for each in sorted(files.values(), key=_when) if each.get("blames") == at]
            return Cause((at,), f"{text} ({says[0]})", tuple(chain))
        chain.append(f"rank {at} says: {told['error']}: {told['message']}")
        path.append(at)
        blamed = told.get("blames")
        if blamed is None or blamed == at:
            return Cause((at,), f"rank {at} failed by itself: {told['error']}: {told['message']}", tuple(chain))
        if told["error"] == _DEATH and blamed in path:
            text = f"rank {at} did not get on; it is waited for, and heard only that rank {blamed} had ended"
            return Cause((at,), text, tuple(chain))
        at = int(blamed)
    circle = path[path.index(at) :]
    names = " -> ".join(map(str, [*circle, at]))
    return Cause(tuple(circle), f"ranks {names} wait for each other in a circle", tuple(chain))


def page(folder: Path, found: Found) -> list[str]:
    """The whole of it as Markdown."""
    files, stale, broken = found
    cause = first_cause(files, broken)
    begin = min(_when(told) for told in files.values())
    world = max((int(told.get("world", 0)) for told in files.values()), default=0)
    lines = [f"# Post-mortem of {folder}", "", f"**First cause: {cause.text}**", ""]
    lines += [f"{i}. {sentence}" for i, sentence in enumerate(cause.chain, 1)]
    missing = sorted(set(range(world)) - set(files))
    if missing:
        lines += ["", f"No file of this failure from rank {', '.join(map(str, missing))}."]
    lines += [f"\n{name} cannot be read: {reason}." for name, reason in broken.items()]
    if stale:
        who = ", ".join(f"rank {rank} ({_clock(_when(told))})" for rank, told in sorted(stale.items()))
        lines += ["", f"Left out, of another failure than the last one: {who}."]
    lines += ["", f"## What the ranks say (the first at {_clock(begin)})", "", "```"]
    rows = [_row(told, begin) for told in sorted(files.values(), key=_when)]
    lines += [*table(("rank", "after", "launch", "waits for", "run", "wait", "error"), rows), "```"]
    lines += _whale_lines(files)
    for rank in missing:
        lines += _log_lines(folder, rank)
    for rank in cause.ranks:
        if rank in files:
            lines += ["", f"## Rank {rank}", "", "```", *_story_lines(files[rank]), "```"]
    return lines


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "unknown time"


def _when(told: Mapping[str, Any]) -> float:
    return float(told.get("at_wall_s", 0.0))


def _row(told: Mapping[str, Any], begin: float) -> list[object]:
    wait = told.get("waiting_for") or {}
    awaited = (
        "-" if wait.get("peer") is None else f"rank {wait['peer']} {wait.get('kind', '')} {wait.get('value', 0):#x}"
    )
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
