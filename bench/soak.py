"""Many whales, one after another: memory, descriptors and latency must stay where they were; slips are counted."""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path

from bench.memory import anonymous_bytes
from bench.report import console, table
from whalez.fleet import Fleet

PARTS = 4
SETTINGS = {"max_ctx": 4096, "segment_floor": 64, "slots": 4}


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def whales(model: Path, world: int, count: int) -> None:
    """A quarter is warm-up for everything that may grow once; the rest is compared with it."""
    rng = random.Random(0)
    rows = table(f"{count} whales, {model.name}, world {world}", "whales", "TTFT median ms", "95 % ms", "slips",
                 "anonymous MB, largest rank", "descriptors, largest rank")  # fmt: skip
    answers: dict[int, tuple[int, ...]] = {}
    with Fleet(model, world, threads=1, **SETTINGS) as fleet:
        ranks = [pid for name, pid in fleet.pids().items() if name.startswith("rank")]
        for part in range(PARTS):
            ttft, slips = [], 0
            for _ in range(count // PARTS):
                length = rng.choice((2, 3, 4, 6)) * 100
                result = fleet.generate(
                    [7 * i % 250 for i in range(length)],
                    max_tokens=2,
                    lane="whale",
                    poster=rng.randrange(world),
                    stop_tokens=(),
                )
                if answers.setdefault(length, result.tokens) != result.tokens:
                    raise SystemExit(f"soak: {length} tokens were answered {answers[length]} and now {result.tokens}")
                ttft.append(result.report.ttft_s * 1e3)
                slips += result.report.slips
            rows.add_row(
                f"{part * count // PARTS} to {(part + 1) * count // PARTS}",
                f"{statistics.median(ttft):.1f}",
                f"{statistics.quantiles(ttft, n=20)[-1]:.1f}",
                str(slips),
                f"{max(map(anonymous_bytes, ranks)) / 1e6:.1f}",
                str(max(map(descriptors, ranks))),
            )
    console.print(rows)
