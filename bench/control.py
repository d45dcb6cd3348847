"""The control plane alone: post to commit over the shipped hub and machines, and how long a world takes to stand."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report import ROOT, console, table

POSTS, WARM = 200, 20


def world_of(world: int, address: str, posts: int) -> list[dict[str, Any]]:
    """What every rank process printed."""
    command = [sys.executable, "-m", "bench.control_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), address, str(posts)], cwd=ROOT, stdout=subprocess.PIPE)
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"control: a rank of {world} ended with {[rank.returncode for rank in ranks]}")
    return [json.loads(text) for text in said]


def post_to_commit() -> None:
    """Gangs of the whole world, posted at its last rank; two round trips lie between a post and its commit."""
    rows = table("post to commit, median and 95th percentile", "ranks", "post to commit us", "95 % us",
                 "bare round trip us", "over two of them", "bar")  # fmt: skip
    for world in (2, 4, 8, 16):
        with tempfile.TemporaryDirectory(prefix="whalez-bench-") as folder:
            said = world_of(world, f"ipc://{Path(folder) / 'hub'}", POSTS)
        bare, took = said[0]["bare"][WARM:], said[-1]["took"][WARM:]
        trip, median = statistics.median(bare) / 1e3, statistics.median(took) / 1e3
        high = statistics.quantiles(took, n=20)[-1] / 1e3
        rows.add_row(str(world), f"{median:.0f}", f"{high:.0f}", f"{trip:.0f}", f"{median / (2 * trip):.2f}",
                     "<= 3" if world == 2 else "")  # fmt: skip
    console.print(rows)


def start_up() -> None:
    """From the last hello begun until the slowest rank has the table and knows that all have mapped."""
    rows = table("slab-table allgather", "ranks", "last hello to world stands ms", "first hello to world stands ms")
    for world in (16, 64):
        with tempfile.TemporaryDirectory(prefix="whalez-bench-") as folder:
            said = world_of(world, f"ipc://{Path(folder) / 'hub'}", 0)
        stood = max(each["stood"] for each in said)
        began = [each["began"] for each in said]
        rows.add_row(str(world), f"{(stood - max(began)) / 1e6:.0f}", f"{(stood - min(began)) / 1e6:.0f}")
    console.print(rows)
