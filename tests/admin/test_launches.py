"""Trace files of one world and of several -> rows by time; lines that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whalez.admin import commands, launches
from whalez.errors import ConfigError


def line(launch: object, wall_s: object, request_id: object = "r", **changes: Any) -> str:
    told = {
        "launch": launch, "kind": "superstep", "request_id": request_id, "seq": 0, "start": 0, "rows": 64,
        "took_s": 0.5, "wall_s": wall_s, "phases": {"kda": 0.3, "exchange_wait": 0.1}, "layers_ns": [1],
    }  # fmt: skip
    return json.dumps(told | changes)


def test_the_last_launches_are_the_latest_not_those_with_the_highest_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files are appended to by every world of a fleet that starts again, and each counts from 0."""
    old = [line(900, 100.0, "old"), line(901, 101.0, "older")]
    (tmp_path / "trace-0.jsonl").write_text("\n".join([*old, line(3, 200.0, "a"), line(5, 201.0, "b")]) + "\n")
    (tmp_path / "trace-1.jsonl").write_text("\n".join([*old, line(3, 200.1, "a"), line(900, 300.0, "c")]) + "\n")
    assert commands.main(["trace", "--run", str(tmp_path), "--last", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["launches"]
    assert [(each["request_id"], each["rank"]) for each in told] == [("a", 0), ("a", 1), ("b", 0), ("c", 1)]
    assert commands.main(["trace", "--run", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["launch", "900", "901", "3", "5", "900"]
    assert [row.split()[4] for row in rows[1:]] == ["0,1", "0,1", "0,1", "0", "1"]


ODD = [
    b"5",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b"{",
    b"",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    line("x", 1.0).encode(),
    line(1, 1.0, phases=[]).encode(),
    line(1, 1.0, phases={"kda": "x"}).encode(),
    line(1, None).encode(),
    line(1, 1.0, None).encode(),
    line(1, 1.0)[:-5].encode(),
]


@pytest.mark.parametrize("text", ODD, ids=lambda text: repr(text[:20]))
def test_a_line_that_is_none_is_counted_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    (tmp_path / "trace-0.jsonl").write_bytes(b"\n".join([line(1, 1.0).encode(), text, line(2, 2.0).encode(), b""]))
    assert commands.main(["trace", "--run", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert [row.split()[0] for row in told.out.splitlines()] == ["launch", "1", "2"]
    assert told.err == "whalez: trace-0.jsonl: 1 lines are none of a trace\n"


def test_a_line_cannot_claim_another_rank(tmp_path: Path) -> None:
    (tmp_path / "trace-2.jsonl").write_text(line(1, 1.0, rank=7) + "\n")
    assert [each["rank"] for each in launches.read_traces(tmp_path).lines] == [2]


def test_a_trace_that_is_none_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace-x.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no trace-<rank>"):
        launches.read_traces(tmp_path)
    (tmp_path / "trace-0.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"trace-0\.jsonl: cannot be read"):
        launches.read_traces(tmp_path)
