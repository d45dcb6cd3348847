"""The fleet fuzzer: random fleets of real machines keep the properties, and a broken protocol is found out.

Goal: no seed breaks unanimous entry, order, spacing, cancellation, the fate of requests, deaths, or Stop.
Method: `whalez.testing.simulator`, over every seed that ever failed and over seeds that no other commit runs; then
mutations of the protocol, each of which some seed must find from the outside (the machines' own invariants are not
looked at there). `tools/simulate.py` hunts on.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from whalez.testing.mutations import MUTATIONS
from whalez.testing.simulator import SimulationFailed, Simulator, Weather

pytestmark = pytest.mark.sim

ROOT = Path(__file__).resolve().parent.parent.parent
FRESH_SEEDS = 500
VALIDATED_EVERY = 16
MUTATION_SEEDS = 10_000


def corpus() -> list[int]:
    lines = (Path(__file__).parent / "corpus.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


def first_fresh_seed() -> int:
    """From the commit's hash; outside a checkout always the same."""
    ran = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return 1_000_000 + int(ran.stdout.strip()[:12] or "0", 16)


def test_seeds_that_once_failed() -> None:
    for seed in corpus():
        Simulator(seed, validate_machines=True).run()


def test_fresh_seeds_keep_the_properties() -> None:
    """Takes about 6 s: 500 fleets."""
    first = first_fresh_seed()
    print(f"seeds {first} to {first + FRESH_SEEDS - 1}")
    seen: Counter[str] = Counter()
    for seed in range(first, first + FRESH_SEEDS):
        simulator = Simulator(seed, validate_machines=seed % VALIDATED_EVERY == 0).run()
        seen.update([simulator.trouble.ending])
        seen.update(simulator.requests.values())
        seen["restarts"] += simulator.starts_count - simulator.world
        for run in simulator.runs:
            seen["begun"] += len(run.checker.begun)
            seen["slips"] += run.checker.slips
            seen["local"] += run.checker.local_count
    # A fuzzer that meets nothing proves nothing.
    assert min(seen[ending] for ending in ("quiet", "stop", "drain", "leave")) > 50
    assert min(seen[how] for how in ("finished", "refused", "cancelled", "error")) > 50
    assert seen["begun"] > 500
    assert seen["slips"] > 500
    assert seen["local"] > 100
    assert seen["restarts"] > 200


def test_worlds_are_small_and_sometimes_large() -> None:
    worlds = [Weather.draw(seed).world for seed in range(2_000)]
    assert min(worlds) == 2
    assert max(worlds) > 48
    assert 0.03 < sum(world > 8 for world in worlds) / len(worlds) < 0.07


def test_a_large_world_of_validated_machines() -> None:
    Simulator(7, Weather.draw(7, world=64), validate_machines=True).run()


def test_same_seed_same_run() -> None:
    runs = []
    for _ in range(2):
        simulator = Simulator(5).run()
        runs.append((simulator.now_ns, simulator.steps_count, simulator.requests, simulator.short_log()))
    assert runs[0] == runs[1]


def failure(mutation: dict[str, Any]) -> tuple[int, str]:
    for seed in range(MUTATION_SEEDS):
        try:
            Simulator(seed, **mutation).run(steps_max=40_000)
        except SimulationFailed as failed:
            return seed, str(failed)
    pytest.fail(f"{mutation} was not found in {MUTATION_SEEDS} seeds")


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(name: str) -> None:
    seed, text = failure(MUTATIONS[name])
    print(f"{name}: seed {seed}")
    # And it is the mutation that is found: the shipped protocol gets through the same seed.
    Simulator(seed).run(steps_max=40_000)
    assert text.startswith(f"seed {seed},")
    assert "Weather(" in text
