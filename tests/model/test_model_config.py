"""A config.json loads only if every key that matters is understood; otherwise file and key are named."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest

from whalez.errors import CheckpointError
from whalez.model.config import KimiLinearConfig
from whalez.model.presets import PRESETS, tensor_shapes
from whalez.model.weights import weight_plan

# The published config.json of Kimi Linear 48B-A3B.
FULL = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_published_config_counts_the_published_parameters():
    config = KimiLinearConfig.from_json(PUBLISHED)
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert len(config.kda_layers) == 20
    assert (config.kda_inner, config.latent_width, config.qk_head_dim) == (4096, 576, 192)
    assert config.dense_layers == (0,)
    assert config.eos_token_ids == (163586,)
    assert config.latent_norm_eps == 1e-6
    parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    assert parameters == pytest.approx(49.1227e9, rel=1e-6)


def test_preset_numbers():
    config = KimiLinearConfig.from_json(PRESETS["mini"])
    assert config.kda_layers == (0, 1, 2, 4, 5, 6)
    assert config.moe_layers == (1, 2, 3, 4, 5, 6, 7)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    assert parameters == pytest.approx(237e6, rel=0.01)


def test_eos_may_be_a_list_or_nothing():
    assert KimiLinearConfig.from_json(PUBLISHED | {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert KimiLinearConfig.from_json(PUBLISHED | {"eos_token_id": None}).eos_token_ids == ()


MISSING = object()

BAD = [
    ("architectures", ["LlamaForCausalLM"]),
    ("architectures", MISSING),
    ("architectures", "KimiLinearForCausalLM"),
    ("model_type", "kimi_k3"),
    ("hidden_size", MISSING),
    ("hidden_size", "2304"),
    ("hidden_size", 0),
    ("hidden_size", -2304),
    ("hidden_size", True),
    ("hidden_size", 2304.0),
    ("hidden_size", 10**12),
    ("num_hidden_layers", 10**9),
    ("num_experts", 10**9),
    ("num_experts_per_token", 257),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("moe_renormalize", 1),
    ("mla_use_nope", False),
    ("num_key_value_heads", 8),
    ("num_expert_group", 3),
    ("eos_token_id", 163840),
    ("eos_token_id", "</s>"),
    ("q_lora_rank", 1536),
    ("rope_scaling", {"type": "yarn"}),
    ("tie_word_embeddings", True),
    ("hidden_act", "situ"),
    ("moe_router_activation_func", "softmax"),
    ("num_nextn_predict_layers", 1),
    ("quantization_config", {"quant_method": "fp8"}),
    ("attn_res_block_size", 12),
    ("routed_expert_hidden_size", 3584),
    ("mla_use_output_gate", True),
    ("linear_attn_config", MISSING),
    ("linear_attn_config", [1]),
    ("linear_attn_config.kda_layers", [1, 2]),
    ("linear_attn_config.kda_layers", list(range(1, 28))),
    ("linear_attn_config.kda_layers", ["1"]),
    ("linear_attn_config.short_conv_kernel_size", 3),
    ("linear_attn_config.head_dim", None),
    ("linear_attn_config.gate_lower_bound", -5.0),
    ("linear_attn_config.use_full_rank_gate", True),
]


@pytest.mark.parametrize(("key", "value"), BAD, ids=[f"{key}-{i}" for i, (key, _) in enumerate(BAD)])
def test_bad_key_is_named_with_its_file(key, value, tmp_path):
    data = copy.deepcopy(PUBLISHED)
    *path, last = key.split(".")
    section = data[path[0]] if path else data
    if value is MISSING:
        del section[last]
    else:
        section[last] = value
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError) as caught:
        KimiLinearConfig.from_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert f"{key}: expected" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "[" * 100_000], ids=range(6))
def test_file_that_is_no_json_object(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        KimiLinearConfig.from_dir(tmp_path)


def test_folder_that_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere/config.json: cannot be read"):
        KimiLinearConfig.from_dir(tmp_path / "nowhere")


def test_config_may_be_planned_without_memory():
    config = KimiLinearConfig.from_json(PUBLISHED)
    weights, slots = weight_plan(config, 0, 16, lambda shape: np.broadcast_to(np.float32(0), shape))
    assert weights.layers[1].mlp.w13.shape == (16, 2048, 2304)
    assert sum(slot.rows is None for slot in slots) == 26 * 240 * 3
