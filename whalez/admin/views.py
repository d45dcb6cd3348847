"""Answers -> rows of text. `--json` has every answer as it came, so all that is shown here and more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from whalez.admin.asking import Reply
from whalez.hub import admin

NONE = "-"
_GANG_KINDS = ("data", "free")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell; nothing is cut."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def as_json(replies: Sequence[Reply]) -> dict[str, Any]:
    """{"ranks": [one object per rank; "answer" is null for one that gave none], "silent": [ranks without an answer]}"""
    return {
        "ranks": [
            {
                "rank": reply.rank,
                "endpoint": reply.endpoint,
                "answer": msgspec.to_builtins(reply.answer),
                "why": reply.why,
            }
            for reply in replies
        ],
        "silent": [reply.rank for reply in replies if reply.answer is None],
    }


# ---- status -------------------------------------------------------------------------------------------------------
#: What changes stands in front: a narrow terminal shows the beginning of a line.
STATUS_HEAD = (
    *("rank", "state", "launch", "age", "run", "wait", "cache", "records", "slips", "slept", "device", "transport"),
    *("pid", "incarnation"),
)


def status_rows(replies: Sequence[Reply]) -> list[list[object]]:
    return [_status_row(reply) for reply in replies]


def trouble_lines(replies: Sequence[Reply]) -> list[str]:
    """A sentence per rank that is in trouble, and one per rank that let something not through at its ports.

    Connections that ended are counted, too, but most of them ended in peace.
    """
    told = [(reply.rank, reply.answer.health) for reply in replies if isinstance(reply.answer, admin.RankStatus)]
    lines = [f"rank {rank}: {health.trouble}" for rank, health in told if health.trouble]
    for rank, health in told:
        kinds = {
            kind: count for kind, count in health.dropped.items() if count and not kind.endswith("_ended_connections")
        }
        if kinds:
            lines.append(f"rank {rank} dropped: " + ", ".join(f"{kind} {count}" for kind, count in kinds.items()))
    return lines


def silence_lines(replies: Sequence[Reply]) -> list[str]:
    """Ranks that gave no answer, and why where that is known."""
    return [f"rank {reply.rank} did not answer: {reply.why}" for reply in replies if reply.why]


def _status_row(reply: Reply) -> list[object]:
    answer = reply.answer
    if not isinstance(answer, admin.RankStatus):
        return [reply.rank, "no answer", *[NONE] * (len(STATUS_HEAD) - 2)]
    health = answer.health
    records = " ".join(_record(record) for record in answer.records)
    return [
        reply.rank,
        health.state,
        health.launch,
        f"{health.launch_age_s:.2f}s",
        health.running,
        health.waiting,
        f"{health.cache_used}/{health.cache_total}",
        records or NONE,
        answer.slips_total,
        answer.launches_with_sleep,
        answer.device,
        answer.transport,
        health.pid,
        health.incarnation,
    ]


def _record(record: admin.RecordLine) -> str:
    return f"{record.seq}:{record.state}" + (f"@{record.launch}" if record.launch is not None else "")


def socket_lines(replies: Sequence[Reply]) -> list[str]:
    """Options of every kind of socket, once; a rank whose options differ gets lines of its own."""
    groups: dict[str, list[int]] = {}
    for reply in replies:
        if isinstance(reply.answer, admin.RankStatus):
            for name, options in reply.answer.sockets.items():
                text = f"{name}: " + " ".join(f"{key}={value}" for key, value in options.items())
                groups.setdefault(text, []).append(reply.rank)
    return [f"sockets of ranks {ranks_text(ranks)}, {text}" for text, ranks in groups.items()]


def ranks_text(ranks: Sequence[int]) -> str:
    """0-3 for a run of them, else 0, 2, 5."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


# ---- slabs --------------------------------------------------------------------------------------------------------
def slab_lines(replies: Sequence[Reply]) -> list[str]:
    """The layout once, then every rank's slab and who has mapped it."""
    told = [reply.answer for reply in replies if isinstance(reply.answer, admin.Slabs)]
    if not told:
        return []
    regions = [
        [region.name, region.offset, "x".join(map(str, region.shape)), region.dtype, region.nbytes]
        for region in told[0].regions
    ]
    rows: list[list[object]] = []
    for reply in replies:
        mappers = ranks_text([each.rank for each in told if reply.rank in each.mapped]) or NONE
        if isinstance(reply.answer, admin.Slabs):
            rows.append([reply.rank, reply.answer.nbytes, reply.answer.pid, reply.answer.host, mappers])
        else:
            rows.append([reply.rank, NONE, NONE, "no answer", mappers])
    return [
        *table(("region", "offset", "shape", "dtype", "bytes"), regions),
        "",
        *table(("rank", "slab bytes", "pid", "host", "mapped by"), rows),
    ]


# ---- doorbells ----------------------------------------------------------------------------------------------------
def waits(replies: Sequence[Reply]) -> list[admin.WaitLine]:
    """Whom every rank waits for: its own word where it answered, else what the others read in its slab."""
    found: dict[int, admin.WaitLine] = {}
    answered = {reply.rank for reply in replies if isinstance(reply.answer, admin.Doorbells)}
    for reply in replies:
        if isinstance(reply.answer, admin.Doorbells):
            for line in reply.answer.waits:
                if line.rank == reply.rank or line.rank not in answered:
                    found[line.rank] = line
    return [found[rank] for rank in sorted(found)]


def blocked_on(told: Sequence[admin.WaitLine]) -> list[int]:
    """Ranks that somebody waits for and that wait for nobody: where a fleet that hangs is stuck."""
    return sorted({line.peer for line in told} - {line.rank for line in told})


def wait_lines(told: Sequence[admin.WaitLine]) -> list[str]:
    """A sentence per rank that waits, and whom the fleet is stuck on."""
    lines = [f"rank {line.rank} waits for rank {line.peer}: {_window(line)}" for line in told]
    if stuck := blocked_on(told):
        lines.append(f"waited for, and waiting for nobody: rank {ranks_text(stuck)}")
    return lines or ["no rank waits for another"]


def doorbell_lines(replies: Sequence[Reply], *, show_all: bool) -> list[str]:
    """Who waits for whom, what stands in every slab, then the lines where somebody is behind, or all of them."""
    first = next((reply.answer for reply in replies if isinstance(reply.answer, admin.Doorbells)), None)
    if first is None:
        return []
    slabs = [[peer.rank, peer.launch_count, peer.progress, peer.word] for peer in first.peers]
    rows = [
        [
            reply.rank,
            line.kind,
            line.peer,
            NONE if line.expected is None else f"{line.expected:#x}",
            f"{line.seen:#x}",
            f"{line.rung:#x}",
        ]
        for reply in replies
        if isinstance(reply.answer, admin.Doorbells)
        for line in reply.answer.lines
        if show_all or _is_behind(line)
    ]
    return [
        *wait_lines(waits(replies)),
        "",
        *table(("rank", "launches begun", "progress", "word"), slabs),
        "",
        *(table(("rank", "bell", "peer", "expected", "seen", "rung there"), rows) if rows else ["all bells are level"]),
    ]


def _is_behind(line: admin.BellLine) -> bool:
    """Awaited now, or a peer that has rung less than it was rung; gang kinds go one way, so they tell nothing."""
    return line.expected is not None or (line.kind not in _GANG_KINDS and line.seen < line.rung)


def _window(line: admin.WaitLine) -> str:
    seen = "" if line.seen is None else f", seen {line.seen:#x}"
    return f"{line.kind} doorbell at {line.place}, expected {line.expected:#x}{seen}"
