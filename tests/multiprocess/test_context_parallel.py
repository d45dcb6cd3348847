"""Worlds of 1, 2, 4 and 8 rank processes against the float64 reference: every member's hidden rows, every logit.

Heads have different gates (the preset draws them per head), segments are uneven (the prompt is no multiple of anything
and leveling shortens the deep ones), and one checkpoint hardly decays, so that a member that dropped M would show.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.equal import assert_choices_close, relative_error
from whalez.fleet import Fleet, Generated
from whalez.model.checkpoint import read_tensors, write_checkpoint
from whalez.model.config import KimiLinearConfig
from whalez.model.naive import NaiveResult, naive_forward

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

GENERATED = 6


def without_decay(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose gates keep everything (log decay about -1e-6) and whose updates are weak.

    With weak updates M stays near the identity over a whole segment, so what lies upstream reaches every later token.
    """
    tensors = read_tensors(source)
    for name in tensors:
        if name.endswith("dt_bias"):
            tensors[name] = np.full_like(tensors[name], -16.0)
        if name.endswith(("f_b_proj.weight", "b_proj.weight")) and "kv_b" not in name:
            tensors[name] = tensors[name] * 0.05
    write_checkpoint(folder, json.loads((source / "config.json").read_text()), tensors)
    return folder


def captured(fleet: Fleet, result: Generated) -> dict[int, dict[str, np.ndarray]]:
    """Rank -> what it captured of a request; a helper may still be writing when the poster has answered."""
    arrays = {}
    for rank in result.report.gang or (result.report.poster,):
        path = fleet.run_dir / "capture" / result.request_id / f"rank-{rank}.npz"
        deadline = time.monotonic() + 10
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} never came"
            time.sleep(0.01)
        with np.load(path) as archive:
            arrays[rank] = dict(archive)
    return arrays


@functools.cache
def freely_routed(model: Path, tokens: tuple[int, ...]) -> NaiveResult:
    """The reference with its own expert choices: the same for every world and lane that chooses these tokens."""
    return naive_forward(KimiLinearConfig.from_dir(model), read_tensors(model), np.array(tokens))


def check_against_reference(model: Path, fleet: Fleet, prompt: list[int], result: Generated) -> None:
    """Hidden rows of every member and all logits, with the reference's expert choices forced to the lane's."""
    config, tensors = KimiLinearConfig.from_dir(model), read_tensors(model)
    parts = sorted(captured(fleet, result).values(), key=lambda part: int(part["start"]))
    assert [int(part["start"]) for part in parts] == [start for start, _ in result.report.segments or ((0, 0),)]
    tokens = np.array([*prompt, *result.tokens[:-1]])
    choices = list(np.concatenate([part["choices"] for part in parts], axis=1))
    free = freely_routed(model, tuple(tokens.tolist()))
    assert_choices_close(choices, free.choices, free.margins)
    forced = naive_forward(config, tensors, tokens, choices)

    row = 0
    for part in parts:  # each member by itself: an error upstream of the owner must not hide
        hidden = part["hidden"]
        assert relative_error(hidden, forced.hidden[row : row + len(hidden)]).max() <= 1e-4, f"rows from {row}"
        row += len(hidden)
    assert row == len(tokens)
    logits = next(part["logits"] for part in parts if "logits" in part)
    reference = forced.logits[len(prompt) - 1 :]
    assert logits.shape == reference.shape
    assert relative_error(logits, reference).max() <= 1e-4
    l2 = np.linalg.norm(logits - reference) / np.linalg.norm(reference)
    assert l2 <= 1e-4 * np.sqrt(config.num_hidden_layers)
    assert result.tokens == tuple(reference.argmax(-1))


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"decay": tiny, "no decay": without_decay(tiny, tmp_path_factory.mktemp("no-decay") / "model")}


@pytest.mark.parametrize(
    ("world", "decay"),
    [
        (1, "decay"),
        (2, "decay"),
        (4, "decay"),
        (4, "no decay"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "no decay"), (2, "no decay"))),
        *(pytest.param(8, decay, marks=pytest.mark.slow) for decay in ("decay", "no decay")),
    ],
)
def test_every_member_agrees_with_the_reference(
    models: dict[str, Path], start: Callable[..., Fleet], world: int, decay: str
) -> None:
    model = models[decay]
    fleet = start(model, world, capture=True)
    prompt = np.random.default_rng(3).integers(0, 256, 731).tolist()
    lanes = ("local", "whale") if world > 1 else ("local",)
    results = [
        fleet.generate(prompt, max_tokens=GENERATED, poster=world // 2, lane=lane, stop_tokens=()) for lane in lanes
    ]
    for result in results:
        check_against_reference(model, fleet, prompt, result)
    if world > 1:
        segments = results[1].report.segments
        assert len(segments) == world
        assert len({length for _, length in segments}) > 1, "segments are even, so unevenness was not tried"
    fleet.stop()
