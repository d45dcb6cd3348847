"""The two lanes side by side on one running fleet: time to first token, where it goes, and the cap the parts allow."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.report import console, table
from whalez.fleet import Fleet, Generated
from whalez.model.config import KimiLinearConfig
from whalez.model.trace import Part

SETTINGS = {"chunk_tokens": 2048, "slots": 4}
WORK = [Part.ATTENTION, Part.MLP]
GENERATED = 4


@dataclass
class Run:
    """One request and what its ranks traced of it."""

    result: Generated
    lines: dict[int, list[dict[str, object]]]  # rank -> trace lines of its launches

    def seconds(self, rank: int) -> np.ndarray:
        """[layers, parts] seconds over all launches of the request on `rank`."""
        return np.sum([np.array(line["layers_ns"]) for line in self.lines[rank]], axis=0) / 1e9

    @property
    def superstep_s(self) -> float:
        return max(float(line["took_s"]) for lines in self.lines.values() for line in lines)  # type: ignore[arg-type]


def make_prompt(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


def ask(fleet: Fleet, prompt: list[int], lane: str, poster: int) -> Run:
    """Prefill and a few decodes; the trace lines are those of this request."""
    result = fleet.generate(prompt, max_tokens=GENERATED, poster=poster, lane=lane, stop_tokens=())
    lines: dict[int, list[dict[str, object]]] = {}
    for rank in range(fleet.world):
        text = (fleet.run_dir / f"trace-{rank}.jsonl").read_text()
        mine = [line for line in map(json.loads, text.splitlines()) if line["request_id"] == result.request_id]
        if mine:
            lines[rank] = mine
    assert result.report.lane == lane, result.report
    return Run(result, lines)


def gate(runs: list[Run]) -> None:
    """No number without equal answers."""
    answers = {run.result.tokens for run in runs}
    if len(answers) != 1:
        raise SystemExit(f"correctness gate: lanes disagree: {answers}")


def median_run(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda run: run.result.report.ttft_s)[len(runs) // 2]


def ttft(model: Path, world: int, lengths: list[int], repeats: int) -> None:
    """Time to first token of both lanes, in turn, ranks pinned to one thread each."""
    rows = table(f"TTFT, {model.name}, world {world}, one pinned thread per rank, medians of {repeats}",
                 "tokens", "local s", "whale s", "local / whale", "superstep s", "intercept ms")  # fmt: skip
    with Fleet(model, world, threads=1, pin=True, trace=True, max_ctx=max(lengths) + 64, **SETTINGS) as fleet:
        ask(fleet, make_prompt(2048, 9), "whale", world - 1)  # warm: page in weights and scratch
        ask(fleet, make_prompt(2048, 9), "local", world - 1)
        for length in lengths:
            pairs = []
            for i in range(repeats):
                prompt = make_prompt(length, i)
                pairs.append((ask(fleet, prompt, "local", world - 1), ask(fleet, prompt, "whale", world - 1)))
                gate(list(pairs[-1]))
            local = median_run([pair[0] for pair in pairs])
            whale = median_run([pair[1] for pair in pairs])
            ratio = statistics.median(a.result.report.ttft_s / b.result.report.ttft_s for a, b in pairs)
            intercept = statistics.median(b.result.report.ttft_s - b.superstep_s for _, b in pairs)
            rows.add_row(
                str(length),
                f"{local.result.report.ttft_s:.2f}",
                f"{whale.result.report.ttft_s:.2f}",
                f"{ratio:.2f}",
                f"{whale.superstep_s:.2f}",
                f"{intercept * 1e3:.0f}",
            )
            if length == lengths[-1]:
                last = whale
    console.print(rows)
    anatomy(last, fleet)


def anatomy(run: Run, fleet: Fleet) -> None:
    """Per layer and rank: what the superstep did."""
    ranks = sorted(run.lines)
    rows = table(f"superstep of {run.result.prompt_tokens} tokens, seconds by layer: work | experts | wait", "layer",
                 *(f"rank {rank}" for rank in ranks))  # fmt: skip
    parts = {rank: run.seconds(rank) for rank in ranks}
    kda_layers = KimiLinearConfig.from_dir(fleet.model).kda_layers
    for layer in range(len(parts[ranks[0]])):
        cells = []
        for rank in ranks:
            s = parts[rank][layer]
            wait = s[Part.PAIR_WAIT] + s[Part.GANG_WAIT]
            cells.append(f"{s[WORK].sum():.3f} | {s[Part.EXPERTS]:.3f} | {wait:.3f}")
        rows.add_row(f"{layer} {'KDA' if layer in kda_layers else 'MLA'}", *cells)
    totals = [
        f"{p[:, WORK].sum():.2f} | {p[:, Part.EXPERTS].sum():.2f} | "
        f"{p[:, [Part.PAIR_WAIT, Part.GANG_WAIT]].sum():.2f}"
        for p in (parts[rank] for rank in ranks)
    ]  # fmt: skip
    rows.add_row("all", *totals)
    console.print(rows)


def cap(model: Path, tokens: int, repeats: int) -> None:
    """World 2: what the whale lane reaches of what its measured parts allow.

    cap = (D + E/2) / (sum over layers of the slowest rank + E/2), D = all but the routed experts, E = them.
    The local lane already has half of its experts computed by its peer. A world of one is slowed by what two
    independent worlds of one lose to each other side by side (shared caches and memory), measured here as well.
    """
    prompt = make_prompt(tokens)
    common = {"threads": 1, "pin": True, "trace": True, "max_ctx": tokens + 64, **SETTINGS}
    locals_, whales, alone = [], [], []
    with Fleet(model, 2, **common) as fleet:
        ask(fleet, make_prompt(2048, 9), "whale", 1)
        for _ in range(repeats):
            locals_.append(ask(fleet, prompt, "local", 1))
            whales.append(ask(fleet, prompt, "whale", 1))
    with Fleet(model, 1, **common) as one:
        ask(one, make_prompt(2048, 9), "local", 0)
        alone = [ask(one, prompt, "local", 0) for _ in range(repeats)]
    gate([*locals_, *whales, *alone])
    side_by_side = two_worlds_of_one(model, prompt, common)

    local, whale, single = median_run(locals_), median_run(whales), median_run(alone)
    d = float(local.seconds(1)[:, [*WORK, Part.OTHER]].sum())
    half_e = float(local.seconds(1)[:, Part.EXPERTS].sum())
    slowest = float(np.max([whale.seconds(r)[:, WORK].sum(1) for r in (0, 1)], axis=0).sum())
    allowed = (d + half_e) / (slowest + half_e)
    reached = local.result.report.ttft_s / whale.result.report.ttft_s
    lost = side_by_side / single.result.report.ttft_s
    against_one = single.result.report.ttft_s / whale.result.report.ttft_s * lost
    rows = table(f"world 2, {model.name}, {tokens} tokens, one pinned thread per rank, medians of {repeats}",
                 "what", "measured", "bar")  # fmt: skip
    rows.add_row("local lane TTFT s", f"{local.result.report.ttft_s:.2f}", "")
    rows.add_row("whale lane TTFT s", f"{whale.result.report.ttft_s:.2f}", "")
    rows.add_row("world of one TTFT s", f"{single.result.report.ttft_s:.2f}", "")
    rows.add_row("two worlds of one side by side, TTFT s", f"{side_by_side:.2f}", "")
    rows.add_row("D s, E/2 s, sum of slowest s", f"{d:.2f}, {half_e:.2f}, {slowest:.2f}", "")
    rows.add_row("cap of local / whale", f"{allowed:.2f}", "")
    rows.add_row("local / whale", f"{reached:.2f}", f">= 1.35 and >= {0.9 * allowed:.2f} (90 % of the cap)")
    rows.add_row("world of one, slowed as side by side / whale", f"{against_one:.2f}", ">= 1.6")
    console.print(rows)
    anatomy(whale, fleet)


def two_worlds_of_one(model: Path, prompt: list[int], common: dict[str, object]) -> float:
    """Median TTFT when two independent fleets of one prefill the same prompt at the same time on two cores."""
    import os

    cores = sorted(os.sched_getaffinity(0))[:2]
    fleets = []
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            fleets.append(Fleet(model, 1, **common).__enter__())  # type: ignore[arg-type]
    finally:
        os.sched_setaffinity(0, cores)
    try:
        for fleet in fleets:
            fleet.generate(make_prompt(2048, 9), max_tokens=1, lane="local", stop_tokens=())
        both = [f.submit(prompt, max_tokens=GENERATED, lane="local", stop_tokens=()) for f in fleets]
        return statistics.median(each.result().report.ttft_s for each in both)
    finally:
        for fleet in fleets:
            fleet.stop()
