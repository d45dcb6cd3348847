"""What a fleet costs that does nothing: a paired launch without rows, and CPU time of sleeping ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

from bench.report import console, table
from whalez.fleet import Fleet

WATCH_S = 5.0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def empty_launches(model: Path, world: int) -> None:
    """CPU share of idle ranks, and the time of an empty launch while a whale is being gathered."""
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

        # Between its post and its superstep a whale's members launch freely and carry nothing.
        posts = [fleet.generate([1] * 512, max_tokens=1, lane="whale", stop_tokens=()).report for _ in range(20)]
        empty = [r.rendezvous_s / max(1, (r.entry_launch or 0) - r.submit_launch) for r in posts]
        rows.add_row(
            "a launch that carries nothing but the paired exchanges, median", f"{median(empty) * 1e6:.0f} us", ""
        )
        rows.add_row(
            "launches from post to superstep, median",
            f"{median((r.entry_launch or 0) - r.submit_launch for r in posts)}",
            "",
        )
    console.print(rows)
