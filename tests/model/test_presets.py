"""Seeded checkpoints are what facts of the model ask for, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from whalez.errors import ConfigError
from whalez.model.checkpoint import load_weights, read_tensors, tensors_digest
from whalez.model.config import KimiLinearConfig
from whalez.model.presets import BOS, EOS, PAD, PRESETS, make_checkpoint, make_tensor


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_config(preset):
    config = KimiLinearConfig.from_json(PRESETS[preset])
    assert config.eos_token_ids == (EOS,)
    assert min(BOS, EOS, PAD) > 255
    assert set(PRESETS[preset]["linear_attn_config"]["full_attn_layers"]) == {n + 1 for n in config.mla_layers}


def test_same_seed_same_values_and_another_seed_others(tmp_path, tiny_dir):
    make_checkpoint(tmp_path / "again", "kimi-linear", "tiny", 0, "f32")
    make_checkpoint(tmp_path / "other", "kimi-linear", "tiny", 1, "f32")
    digests = [tensors_digest(read_tensors(path)) for path in (tiny_dir, tmp_path / "again", tmp_path / "other")]
    assert digests[0] == digests[1] != digests[2]


def test_bf16_is_the_rounded_f32_but_for_the_decay(tmp_path, tiny_dir):
    make_checkpoint(tmp_path, "kimi-linear", "tiny", 0, "bf16", max_shard_bytes=500_000)
    exact, rounded = read_tensors(tiny_dir), read_tensors(tmp_path)
    assert exact.keys() == rounded.keys()
    for name in exact:
        np.testing.assert_allclose(rounded[name], exact[name], rtol=2**-8)
        keeps = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        assert np.array_equal(rounded[name], exact[name]) is keeps
    config = KimiLinearConfig.from_dir(tmp_path)
    assert load_weights(tmp_path, config, 0, 2).embed.shape == (512, 128)


def test_progress_counts_every_value(tmp_path):
    calls = []
    make_checkpoint(tmp_path, "kimi-linear", "tiny", 3, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (1_081_456, 1_081_456)
    assert calls == sorted(calls)


def test_spread_of_the_values():
    def spread(name: str, *shape: int) -> float:
        return float(make_tensor(name, shape, 0, (3,)).std()) * shape[-1] ** 0.5

    layer = "model.layers.3."
    assert spread(layer + "self_attn.q_proj.weight", 400, 400) == pytest.approx(2, rel=0.02)
    assert spread("model.layers.2.self_attn.q_proj.weight", 400, 400) == pytest.approx(1, rel=0.02)
    assert spread(layer + "self_attn.o_proj.weight", 400, 400) == pytest.approx(0.6, rel=0.02)
    assert spread(layer + "block_sparse_moe.experts.1.w2.weight", 400, 400) == pytest.approx(0.6, rel=0.02)
    assert spread(layer + "block_sparse_moe.gate.weight", 400, 400) == pytest.approx(1.5, rel=0.02)
    conv = make_tensor(layer + "self_attn.q_conv1d.weight", (5000, 1, 4), 0, (3,))
    np.testing.assert_allclose(conv.mean((0, 1)), [0, 0, 0, 1], atol=0.03)
    bias = make_tensor(layer + "self_attn.dt_bias", (5000,), 0, (3,)).astype(np.float64)
    steps = np.log1p(np.exp(bias))
    assert 1e-3 * 0.999 < steps.min() < 1.2e-3
    assert 0.08 < steps.max() < 0.1 * 1.001
    a_log = make_tensor(layer + "self_attn.A_log", (1, 1, 5000, 1), 0, (3,))
    assert 0 <= a_log.min() < a_log.max() <= np.log(16) + 1e-6


@pytest.mark.parametrize(
    ("arch", "preset", "dtype", "field"),
    [
        ("llama", "tiny", "f32", "arch"),
        ("kimi-linear", "huge", "f32", "preset"),
        ("kimi-linear", "tiny", "f8", "dtype"),
    ],
)
def test_names_that_do_not_exist(tmp_path, arch, preset, dtype, field):
    with pytest.raises(ConfigError, match=f"{field}: expected"):
        make_checkpoint(tmp_path, arch, preset, 0, dtype)
