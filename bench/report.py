"""Where a number comes from: date, commit and machine stand beside every table."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
console = Console(highlight=False, width=140)


def provenance() -> str:
    """One line: date, commit (with a mark if the tree is changed), machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU part")):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{today} · commit {commit or 'unknown'} · {model}, {cores} cores, {platform.system()} {platform.machine()}"


def table(title: str, *columns: str) -> Table:
    """A table whose columns are right-aligned."""
    made = Table(title=title, title_justify="left")
    for name in columns:
        made.add_column(name, justify="right")
    return made
