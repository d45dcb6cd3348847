"""`make demo`: a long text, prefilled by four rank processes together, on this machine's CPU.

Starts a fleet of 4 ranks, sends the text to one rank in the whale lane and in the local lane and to another rank in the
whale lane, shows who did what and how long it took, and fails unless all three answers are equal.
"""

from __future__ import annotations

if __name__ == "__main__":
    import whalez.early  # noqa: F401

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from whalez.errors import WhalezError
from whalez.fleet import Fleet, Generated
from whalez.model.presets import make_checkpoint
from whalez.signals import Signalled, take_signals

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "checkpoints" / "demo"
TEXT = ROOT / "tools" / "demo_text.txt"
WORLD = 4
MAX_TOKENS = 16
TOKENS_MIN = 16_000
LINE_S = 2.0  # where stdout is no terminal, a progress line each

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something goes on: a spinner on a terminal, else a line now and then."""
    if console.is_terminal:
        with console.status(what):
            yield
        return
    began = time.monotonic()
    over = threading.Event()

    def tell() -> None:
        while not over.wait(LINE_S):
            say(f"  {what}: {time.monotonic() - began:.0f} s")

    say(f"  {what}")
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def say(line: str) -> None:
    """A line now, also into a pipe."""
    console.print(line)
    sys.stdout.flush()


def ensure_checkpoint() -> None:
    if (MODEL / "config.json").exists():
        return
    with working("writing the demo checkpoint (once)"):
        make_checkpoint(MODEL, "kimi-linear", "demo", 0)
    console.print(f"wrote {MODEL.relative_to(ROOT)}: Kimi Linear, preset demo, seed 0")


def read_trace(run_dir: Path, seq: int | None) -> dict[int, dict[str, object]]:
    """Rank -> its trace line of the superstep `seq`."""
    lines = {}
    for rank in range(WORLD):
        for text in (run_dir / f"trace-{rank}.jsonl").read_text().splitlines():
            line = json.loads(text)
            if line["seq"] == seq and seq is not None:
                lines[rank] = line
    return lines


def ask(fleet: Fleet, text: str, poster: int, lane: str) -> Generated:
    with working(f"rank {poster}, {lane} lane: prefilling {len(text.encode())} tokens"):
        return fleet.generate(text, max_tokens=MAX_TOKENS, poster=poster, lane=lane, stop_tokens=())


def show_superstep(fleet: Fleet, result: Generated) -> None:
    """Segments, entry and phases of every gang member."""
    report = result.report
    lines = read_trace(fleet.run_dir, report.seq)
    table = Table(title=f"whale {report.seq} of rank {report.poster}: one superstep, seconds; wait = for exchanges")
    for name in ("rank", "tokens", "launch", "kda", "mla", "moe", "dense", "wait", "total"):
        table.add_column(name, justify="right", no_wrap=name == "tokens")
    for rank, (start, length) in zip(report.gang, report.segments, strict=True):
        line = lines[rank]
        phases: dict[str, float] = line["phases"]  # type: ignore[assignment]
        seconds = [f"{phases[k]:.2f}" for k in ("kda", "mla", "moe", "dense", "exchange_wait")]
        tokens = f"{start}..{start + length - 1}"
        table.add_row(str(rank), tokens, str(line["launch"]), *seconds, f"{line['took_s']:.2f}")
    console.print(table)
    launches = {line["launch"] for line in lines.values()}
    if launches != {report.entry_launch} or set(lines) != set(report.gang):
        raise WhalezError(f"the gang {report.gang} did not enter as one: {launches}")


def main() -> int:
    started = time.monotonic()
    text = TEXT.read_text()
    ensure_checkpoint()
    with Fleet(MODEL, WORLD, trace=True, progress=lambda line: say(f"  {line}")) as fleet:
        console.print(f"{WORLD} ranks serve; the prompt has {len(text.encode())} tokens (at least {TOKENS_MIN})")
        first = ask(fleet, text, 1, "whale")
        show_superstep(fleet, first)
        second = ask(fleet, text, 2, "whale")
        show_superstep(fleet, second)
        local = ask(fleet, text, 1, "local")

    lanes = Table(title="time to first token, same fleet, same prompt")
    for name in ("lane", "poster", "TTFT s", "against local"):
        lanes.add_column(name, justify="right")
    for result in (first, second, local):
        report = result.report
        lanes.add_row(
            report.lane, str(report.poster), f"{report.ttft_s:.2f}", f"{local.report.ttft_s / report.ttft_s:.2f} x"
        )
    console.print(lanes)
    cores = len(os.sched_getaffinity(0))
    if cores < WORLD:
        console.print(f"{WORLD} ranks share {cores} cores here: the gang cannot be faster than its cores")
    console.print(f"generated: {first.text!r}")
    equal = first.tokens == second.tokens == local.tokens
    console.print(f"three answers {'equal' if equal else 'DIFFER'}; {time.monotonic() - started:.0f} s in all")
    if not equal:
        for result in (first, second, local):
            console.print(f"  {result.report.lane} at rank {result.report.poster}: {list(result.tokens)}")
    return 0 if equal and len(text.encode()) >= TOKENS_MIN else 1


if __name__ == "__main__":
    take_signals()
    try:
        sys.exit(main())
    except WhalezError as error:
        sys.exit(f"demo: {error}")
    except Signalled:
        sys.exit("demo: stopped")
