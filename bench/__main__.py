"""`python -m bench [NAME ...]`: all measurements, or the named ones."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from bench import control, idle, lanes, memory, soak
from bench.report import ROOT, console, provenance
from whalez.errors import WhalezError
from whalez.model.presets import make_checkpoint

NAMES = ("control", "idle", "ttft", "cap", "memory", "soak")


def checkpoint(preset: str) -> Path:
    folder = ROOT / "checkpoints" / preset
    if not (folder / "config.json").exists():
        with console.status(f"writing checkpoint {preset} (once)"):
            make_checkpoint(folder, "kimi-linear", preset, 0)
    return folder


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--world", default=2, show_default=True)
@click.option("--tokens", default=16384, show_default=True, help="Length for `cap`.")
@click.option("--lengths", default="4096,8192,16384,32768", show_default=True, help="Lengths for `ttft`.")
@click.option("--repeats", default=3, show_default=True)
def main(names: tuple[str, ...], world: int, tokens: int, lengths: str, repeats: int) -> None:
    """Measure whalez on this machine."""
    started = time.monotonic()
    console.print(provenance())
    chosen = names or NAMES
    try:
        if "control" in chosen:
            control.post_to_commit()
            control.start_up()
        if "idle" in chosen:
            idle.empty_launches(checkpoint("tiny"), 4)
            idle.empty_launches(checkpoint("mini"), 2)
        if "ttft" in chosen:
            lanes.ttft(checkpoint("mini"), world, [int(n) for n in lengths.split(",")], repeats)
        if "cap" in chosen:
            lanes.cap(checkpoint("mini"), tokens, repeats)
        if "memory" in chosen:
            memory.growth(checkpoint("tiny"), 4)
        if "soak" in chosen:
            soak.whales(checkpoint("tiny"), 4, 2000)
    except WhalezError as error:
        sys.exit(f"bench: {error}")
    console.print(f"{time.monotonic() - started:.0f} s")


main()
