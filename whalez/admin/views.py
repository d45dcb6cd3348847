"""Answers -> rows of text. What is shown here is all there is to `--json`, too, with the numbers left as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from whalez.admin.asking import Reply
from whalez.hub import admin

NONE = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell; nothing is cut."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def as_json(replies: Sequence[Reply]) -> dict[str, Any]:
    """{"ranks": [one object per rank; "answer" is null for one that gave none], "silent": [ranks]}"""
    return {
        "ranks": [
            {"rank": reply.rank, "endpoint": reply.endpoint, "answer": msgspec.to_builtins(reply.answer)}
            for reply in replies
        ],
        "silent": [reply.rank for reply in replies if reply.answer is None],
    }


# ---- status -------------------------------------------------------------------------------------------------------
STATUS_HEAD = (
    *("rank", "state", "launch", "age", "run", "wait", "cache", "records", "device", "transport", "pid"),
    *("incarnation", "trouble"),
)


def status_rows(replies: Sequence[Reply]) -> list[list[object]]:
    return [_status_row(reply) for reply in replies]


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
        answer.device,
        answer.transport,
        health.pid,
        health.incarnation,
        health.trouble or NONE,
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
