"""Peak memory of a rank at 64k tokens against 16k: what a long context may cost is its cache and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from bench.lanes import make_prompt
from bench.report import console, table
from whalez.fleet import Fleet
from whalez.model.config import KimiLinearConfig

SHORT, LONG = 16384, 65536


def peak_bytes(pid: int) -> int:
    """Peak of anonymous and shared pages: VmHWM counts both."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    assert found is not None
    return int(found.group(1)) * 1024


def growth(model: Path, world: int) -> None:
    """Each length on a fresh fleet of the same configuration; the poster's peak is compared."""
    config = KimiLinearConfig.from_dir(model)
    rows = table(f"peak memory of the poster, {model.name}, world {world}", "lane", "16k MB", "64k MB", "growth MB",
                 "allowed MB")  # fmt: skip
    cache = (LONG - SHORT) * config.latent_width * 4 * len(config.mla_layers)
    for lane in ("local", "whale"):
        peaks = []
        for length in (SHORT, LONG):
            settings = {"max_ctx": LONG + 64, "segment_floor": 512, "slots": 2, "attention_window": 8192}
            with Fleet(model, world, threads=1, **settings) as fleet:
                fleet.generate(make_prompt(length), max_tokens=2, lane=lane, poster=world - 1, stop_tokens=())
                peaks.append(peak_bytes(fleet.pids()[f"rank {world - 1}"]))
        allowed = cache + 0.05 * peaks[0] + 16e6
        rows.add_row(lane, *(f"{b / 1e6:.1f}" for b in (*peaks, peaks[1] - peaks[0], allowed)))
    console.print(rows)
