"""The float64 reference against other people's implementations, and the properties that make it a judge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from whalez.model.checkpoint import read_tensors, tensors_digest
from whalez.model.config import KimiLinearConfig
from whalez.model.naive import naive_forward
from whalez.model.presets import PRESETS, make_checkpoint

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.fixture(scope="module")
def tiny(tiny_dir):
    return KimiLinearConfig.from_dir(tiny_dir), read_tensors(tiny_dir)


def relative_error(got: np.ndarray, reference: np.ndarray) -> float:
    """max |a - b| / max |reference|, of the worst position."""
    return float((np.abs(got - reference).max(-1) / np.abs(reference).max(-1)).max())


@pytest.mark.parametrize("name", ["tiny-transformers", "tiny-mlx-lm", "kernel-transformers"])
def test_logits_of_other_implementations(name, tmp_path):
    golden = np.load(GOLDENS / f"{name}.npz")
    make_checkpoint(tmp_path, "kimi-linear", name.split("-")[0], 0, "f32")
    tensors = read_tensors(tmp_path)
    result = naive_forward(KimiLinearConfig.from_dir(tmp_path), tensors, golden["tokens"])
    same = tensors_digest(tensors) == golden["tensors"]
    error = relative_error(golden["logits"], result.logits[golden["positions"]])
    assert error < 1e-4, f"{golden['source']}; checkpoint values are {'those' if same else 'not those'} of the golden"
    assert min(margins.min() for margins in result.margins) > 5e-4
    assert np.array_equal(golden["logits"].argmax(-1), result.logits[golden["positions"]].argmax(-1))


@pytest.mark.slow  # four forward passes of the reference
def test_golden_notices_a_wrong_formula(tiny):
    """The bound is tight enough: a decay or a scale that is off by 0.1 % is seen."""
    config, tensors = tiny
    golden = np.load(GOLDENS / "tiny-transformers.npz")
    for suffix in (".A_log", ".kv_a_layernorm.weight", ".e_score_correction_bias", ".q_conv1d.weight"):
        bent = {name: t * 1.001 if name.endswith(suffix) else t for name, t in tensors.items()}
        result = naive_forward(config, bent, golden["tokens"])
        moved = relative_error(golden["logits"], result.logits) > 1e-4
        assert moved is (suffix != ".e_score_correction_bias")


def test_later_tokens_do_not_matter(tiny):
    config, tensors = tiny
    tokens = np.random.default_rng(3).integers(0, 512, 40)
    whole, part = naive_forward(config, tensors, tokens), naive_forward(config, tensors, tokens[:17])
    np.testing.assert_allclose(part.logits, whole.logits[:17], rtol=1e-10, atol=1e-10)
    assert whole.logits.shape == (40, 512)
    assert whole.hidden.shape == (40, 128)
    assert (whole.logits.dtype, whole.hidden.dtype) == (np.float64, np.float64)


def test_choices_and_margins(tiny):
    config, tensors = tiny
    tokens = np.random.default_rng(4).integers(0, 512, 30)
    result = naive_forward(config, tensors, tokens)
    assert len(result.choices) == len(result.margins) == len(config.moe_layers)
    for choices, margins in zip(result.choices, result.margins, strict=True):
        assert choices.shape == (30, 3)
        assert all(len(set(row)) == 3 for row in choices.tolist())
        assert margins.shape == (30,)
        assert (margins > 0).all()


def test_forced_choices(tiny):
    config, tensors = tiny
    tokens = np.random.default_rng(5).integers(0, 512, 20)
    free = naive_forward(config, tensors, tokens)
    same = naive_forward(config, tensors, tokens, [choices[:, ::-1] for choices in free.choices])
    np.testing.assert_allclose(same.logits, free.logits, rtol=1e-10, atol=1e-10)
    changed = [choices.copy() for choices in free.choices]
    changed[1][7] = [expert for expert in range(8) if expert not in changed[1][7]][:3]
    forced = naive_forward(config, tensors, tokens, changed)
    np.testing.assert_allclose(forced.logits[:7], free.logits[:7], rtol=1e-10, atol=1e-10)
    assert relative_error(forced.logits[7:8], free.logits[7:8]) > 1e-3
    assert np.array_equal(forced.choices[1], changed[1])
    # The margins of the layer where the choice was forced are still those of the free choice.
    np.testing.assert_allclose(forced.margins[1], free.margins[1])


def test_equal_scores_choose_the_lowest_number(tiny):
    config, tensors = tiny
    flat = {name: np.zeros_like(t) if ".gate." in name else t for name, t in tensors.items()}
    result = naive_forward(config, flat, [1, 2, 3])
    assert all((choices == [0, 1, 2]).all() for choices in result.choices)
    assert all((margins == 0).all() for margins in result.margins)


def test_groups_count_with_their_two_best(tiny):
    _, tensors = tiny
    config = KimiLinearConfig.from_json(PRESETS["tiny"] | {"num_expert_group": 2, "topk_group": 1})
    bias = np.array([9, 0, 0, 0, 5, 5, 5, 0], np.float32)
    biased = {name: bias if name.endswith("correction_bias") else t for name, t in tensors.items()}
    result = naive_forward(config, biased, [1, 2, 3])
    assert all(set(row) == {4, 5, 6} for choices in result.choices for row in choices.tolist())
