"""Hunt for a seed of the fleet simulator that breaks a property.

    python tools/simulate.py --seeds 1000              # seeds 0 to 999
    python tools/simulate.py --seeds 100000 --start 5000 --keep-going
    python tools/simulate.py --seeds 1 --start 4711 --log 400    # look at one seed

A failing seed is printed with the commit and a short log and is added to tests/sim/corpus.txt, which `make test` runs.
Exits non-zero if one was found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from whalez.testing.simulator import SimulationFailed, Simulator

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "sim" / "corpus.txt"
REPORT_S = 60.0
VALIDATED_EVERY = 16  #: seeds; the machines' own invariants cost a third of a run


def commit() -> str:
    """Of the checkout, with + if it was changed since."""
    ran = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return ran.stdout.strip() or "unknown"


def save(seed: int, at: str, reason: str) -> None:
    known = {line.split()[0] for line in CORPUS.read_text().splitlines() if line and not line.startswith("#")}
    if str(seed) not in known:
        with CORPUS.open("a") as file:
            file.write(f"{seed} {at} {reason[:160]}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    parser.add_argument("--log", type=int, default=20, help="entries of a failing run to print")
    args = parser.parse_args()
    at, reported, failed, steps, begun, slips, deaths = commit(), 0.0, 0, 0, 0, 0, 0
    began, began_cpu = time.perf_counter(), time.process_time()
    for seed in range(args.start, args.start + args.seeds):
        simulator = Simulator(seed, validate_machines=seed % VALIDATED_EVERY == 0)
        try:
            simulator.run()
        except SimulationFailed as failure:
            failed += 1
            reason = str(failure).splitlines()[0]
            print(f"FAILED at commit {at}: {reason}\n{simulator.trouble}\n{simulator.short_log(args.log)}", flush=True)
            save(seed, at, reason)
        steps += simulator.steps_count
        deaths += simulator.starts_count - simulator.world
        for run in simulator.runs:
            begun, slips = begun + len(run.checker.begun), slips + run.checker.slips
        took_s, took_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        done = seed - args.start + 1
        is_last = done == args.seeds or (failed and not args.keep_going)
        if is_last or took_s - reported > REPORT_S:
            reported = took_s
            print(
                f"commit {at}: seeds {args.start} to {seed}, {failed} failed; {done / took_s:.0f} seeds/s "
                f"({done / took_cpu_s:.0f} per core second); {steps} steps, {begun} whales, {slips} slips, "
                f"{deaths} restarts of ranks",
                flush=True,
            )
        if failed and not args.keep_going:
            break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
