"""Peak memory of a rank at 64k tokens against 16k: what a long context may cost is its cache and nothing else.

Counted are anonymous pages and the rank's own slab, which is allocated whole when it is made. Pages of peers' slabs are
counted where they belong, at the peer.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from bench.lanes import make_prompt
from bench.report import console, table
from whalez.fleet import Fleet
from whalez.model.config import KimiLinearConfig

SHORT, LONG = 16384, 65536
SAMPLE_S = 0.02


def anonymous_bytes(pid: int) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def slab_bytes(pid: int, rank: int) -> int:
    """Size of the slab that `rank` owns; its name is long unlinked, its mapping keeps it."""
    found = re.search(rf"^(\w+)-(\w+) .*/whalez-\S+-{rank} \(deleted\)$", Path(f"/proc/{pid}/maps").read_text(), re.M)
    assert found is not None
    return int(found.group(2), 16) - int(found.group(1), 16)


class Peaks:
    """Highest anonymous memory of every rank while the block runs, sampled; the slab added."""

    def __init__(self, fleet: Fleet) -> None:
        self._pids = [fleet.pids()[f"rank {rank}"] for rank in range(fleet.world)]
        self._slabs = [slab_bytes(pid, rank) for rank, pid in enumerate(self._pids)]
        self._anonymous = [0] * fleet.world
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        self._anonymous = [max(b, anonymous_bytes(p)) for b, p in zip(self._anonymous, self._pids, strict=True)]

    def __enter__(self) -> Peaks:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def nbytes(self) -> list[int]:
        return [a + s for a, s in zip(self._anonymous, self._slabs, strict=True)]


def measure(model: Path, world: int, lane: str, length: int, **settings: int) -> tuple[list[int], list[int]]:
    """(bytes at start, peak bytes) of every rank of a fresh fleet that serves one prompt, posted at the last rank."""
    prompt = make_prompt(length)
    with Fleet(model, world, threads=1, **settings) as fleet:
        with Peaks(fleet) as before:
            pass
        with Peaks(fleet) as during:
            fleet.generate(prompt, max_tokens=2, lane=lane, poster=world - 1, stop_tokens=())
    return before.nbytes, during.nbytes


def growth(model: Path, world: int) -> None:
    """Each length on a fresh fleet of the same configuration; the rank that grew most is shown."""
    config = KimiLinearConfig.from_dir(model)
    rows = table(f"memory of the rank that grew most, {model.name}, world {world}", "lane", "at start MB",
                 "16k peak MB", "64k peak MB", "growth MB", "allowed MB")  # fmt: skip
    cache = (LONG - SHORT) * config.latent_width * 4 * len(config.mla_layers)
    settings = {"max_ctx": LONG + 64, "segment_floor": 512, "slots": 2, "attention_window": 8192}
    for lane in ("local", "whale"):
        start, short = measure(model, world, lane, SHORT, **settings)
        _, long = measure(model, world, lane, LONG, **settings)
        worst = max(range(world), key=lambda rank: long[rank] - short[rank])
        allowed = cache + 0.05 * short[worst] + 16e6
        figures = (start[worst], short[worst], long[worst], long[worst] - short[worst], allowed)
        rows.add_row(f"{lane}, rank {worst}", *(f"{nbytes / 1e6:.1f}" for nbytes in figures))
    console.print(rows)
