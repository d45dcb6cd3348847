"""What a fleet costs that does nothing: a paired launch without rows, and CPU time of sleeping ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.report import console, table
from whalez.fleet import Fleet

WATCH_S = 5.0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def empty_launches(model: Path, world: int) -> None:
    """CPU share of idle ranks, and the time of an empty launch while one rank decodes (so that all launch freely)."""
    rows = table(f"idle, {model.name}, world {world}", "what", "measured", "bar")
    with Fleet(model, world, threads=1, max_ctx=4096, segment_floor=64, slots=4) as fleet:
        fleet.generate([1, 2, 3], max_tokens=8, stop_tokens=())
        time.sleep(1.0)
        pids = [pid for name, pid in fleet.pids().items() if name.startswith("rank")]
        before = [cpu_seconds(pid) for pid in pids]
        launches = [status.launch for status in fleet.status() if status is not None]
        time.sleep(WATCH_S)
        spent = [cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True)]
        ticked = [status.launch for status in fleet.status() if status is not None]
        rows.add_row("CPU of an idle rank, worst", f"{max(spent) / WATCH_S * 100:.1f} % of a core", "< 5 %")
        rows.add_row("launches of an idle fleet per second", f"{(ticked[0] - launches[0]) / WATCH_S:.1f}", "")

        began = time.perf_counter()
        first = fleet.status()[0]
        result = fleet.generate([1, 2, 3], max_tokens=400, stop_tokens=())
        last = fleet.status()[0]
        took = time.perf_counter() - began
        assert first is not None
        assert last is not None
        per_launch = took / max(1, last.launch - first.launch)
        rows.add_row("one launch: 1 decode row at one rank, none at the others", f"{per_launch * 1e6:.0f} us", "")
        assert len(result.tokens) == 400
    console.print(rows)
