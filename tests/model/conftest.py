"""Checkpoints that the tests of this folder read; each is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from whalez.model.presets import PRESETS, make_checkpoint, make_tensor, tensor_shapes


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """The `tiny` preset in f32, one file."""
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "kimi-linear", "tiny", 0, "f32")
    return directory


@pytest.fixture(scope="session")
def small():
    """(config keys, tensors) of a model of a few kilobytes with every kind of layer and uneven sizes."""
    from whalez.model.config import KimiLinearConfig

    keys = PRESETS["tiny"] | {
        "vocab_size": 260,
        "hidden_size": 6,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
        "kv_lora_rank": 4,
        "intermediate_size": 7,
        "moe_intermediate_size": 3,
        "num_experts": 5,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "linear_attn_config": {
            "num_heads": 3,
            "head_dim": 4,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
        },
    }
    config = KimiLinearConfig.from_json(keys)
    shapes = tensor_shapes(config)
    return keys, {name: make_tensor(name, shape, 1, config.mla_layers) for name, shape in shapes.items()}
