"""Seeded checkpoints of small Kimi Linear models, with values that keep activations sane and logits apart.

Every tensor comes from its own generator, seeded by (seed, name), so it does not depend on which tensors were made
before it. Token ids 0 to 255 are bytes; the special ids follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from whalez.errors import ConfigError
from whalez.model.checkpoint import write_checkpoint
from whalez.model.config import KimiLinearConfig
from whalez.model.weights import F32, Shape, weight_plan

ARCHITECTURES = ("kimi-linear",)
BOS, EOS, PAD = 256, 257, 258

Progress = Callable[[int, int], None]

# Shares of the published keys that all presets have in common.
_COMMON: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_act": "silu",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": None,
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def _preset(
    *,
    vocab: int,
    hidden: int,
    layers: int,
    full: list[int],
    kda: tuple[int, int],
    mla: tuple[int, int, int, int, int],
    dense: int,
    moe: tuple[int, int, int],
) -> dict[str, Any]:
    """Published keys from: kda heads, head dim; mla heads, nope, rope, v, latent rank; moe experts, top-k, width."""
    heads, nope, rope, value, rank = mla
    experts, top_k, width = moe
    return _COMMON | {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,  # part of the published keys, used by no layer
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "kv_lora_rank": rank,
        "intermediate_size": dense,
        "num_experts": experts,
        "num_experts_per_token": top_k,
        "moe_intermediate_size": width,
        "linear_attn_config": {
            "num_heads": kda[0],
            "head_dim": kda[1],
            "short_conv_kernel_size": 4,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
        },
    }


PRESETS: dict[str, dict[str, Any]] = {
    # The least that has every kind of layer: for references and fast tests.
    "tiny": _preset(
        vocab=512,
        hidden=128,
        layers=5,
        full=[4],
        kda=(4, 32),
        mla=(4, 32, 16, 32, 64),
        dense=256,
        moe=(8, 3, 32),
    ),
    # Real head dims and a real share of the work in the experts: for measurements.
    "mini": _preset(
        vocab=4096,
        hidden=1024,
        layers=8,
        full=[4, 8],
        kda=(8, 128),
        mla=(8, 128, 64, 128, 256),
        dense=2048,
        moe=(16, 4, 512),
    ),
    # Real head dims and latent rank, and little else: for kernels.
    "kernel": _preset(
        vocab=512,
        hidden=256,
        layers=4,
        full=[4],
        kda=(2, 128),
        mla=(2, 128, 64, 128, 512),
        dense=512,
        moe=(4, 2, 128),
    ),
    # Small enough that a few ranks on a laptop prefill a long text while one watches.
    "demo": _preset(
        vocab=512,
        hidden=512,
        layers=6,
        full=[4],
        kda=(4, 128),
        mla=(4, 128, 64, 128, 256),
        dense=1024,
        moe=(8, 2, 512),
    ),
}

# Fleet settings that go with a preset: the defaults are K3's, which these models are far too small for. The host
# backend pads nothing, so its buckets may be fine; they only bound how far leveling may go.
_FINE = tuple(range(512, 16896 + 1, 512))
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {"segment_floor": 64, "buckets": (64, 128, 256, *_FINE)},
    "mini": {"segment_floor": 512, "buckets": _FINE},
    "kernel": {"segment_floor": 64, "buckets": (64, 128, 256, *_FINE)},
    "demo": {"segment_floor": 512, "buckets": _FINE},
}

# Kept in f32 whatever the checkpoint's dtype, as engines load them.
_ALWAYS_F32 = (".A_log", ".dt_bias", ".e_score_correction_bias")

_RESIDUAL_WRITERS = (".o_proj.weight", ".down_proj.weight", ".w2.weight")


def make_checkpoint(
    directory: str | Path,
    arch: str,
    preset: str,
    seed: int,
    dtype: str = "bf16",
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the checkpoint that `seed` makes of `preset`; see `write_checkpoint` for the folder and the shards.

    Args:
        dtype:    "bf16" or "f32" on disk; the bf16 values are the rounded f32 ones
        progress: called with (values made, values in all) after every tensor
    Raises: ConfigError for a name that does not exist; CheckpointError if the folder is taken or cannot be written.
    """
    _check("arch", arch, ARCHITECTURES)
    _check("preset", preset, tuple(PRESETS))
    _check("dtype", dtype, ("bf16", "f32"))
    shapes = tensor_shapes(KimiLinearConfig.from_json(PRESETS[preset]))
    mla_layers = KimiLinearConfig.from_json(PRESETS[preset]).mla_layers
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    done = 0
    tensors: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        tensor = make_tensor(name, shape, seed, mla_layers)
        keeps_f32 = dtype == "f32" or name.endswith(_ALWAYS_F32)
        tensors[name] = tensor if keeps_f32 else tensor.astype(ml_dtypes.bfloat16)
        done += tensor.size
        if progress is not None:
            progress(done, total)
    config = PRESETS[preset] | {"dtype": "bfloat16" if dtype == "bf16" else "float32"}
    write_checkpoint(directory, config, tensors, max_shard_bytes=max_shard_bytes, settings=SETTINGS[preset])


def tensor_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    """Published name and shape of every tensor of the model, in the order of the layers."""
    _, slots = weight_plan(config, 0, config.num_experts, lambda shape: np.broadcast_to(np.float32(0), shape))
    return {slot.name: slot.shape for slot in slots}


def make_tensor(name: str, shape: Shape, seed: int, mla_layers: tuple[int, ...]) -> F32:
    """The values of one tensor, f32."""
    digest = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest(), np.uint32)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(digest.tolist())))
    if name.endswith(".A_log"):
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if name.endswith(".dt_bias"):
        return _inverse_softplus(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))).astype(np.float32)
    values: F32 = rng.standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * values
    if name.endswith(".e_score_correction_bias"):
        return np.float32(0.05) * values
    if name.endswith("_conv1d.weight"):
        values *= np.float32(0.3)
        values[..., -1] += 1
        return values
    if name == "model.embed_tokens.weight":
        return values
    values *= np.float32(shape[-1] ** -0.5 * _gain(name, mla_layers))
    if name == "lm_head.weight":
        # Rows of unequal length let one token lead clearly. The end token's row is short, so that greedy
        # generation of a random model is not cut off by it.
        scales = np.exp(rng.normal(0, 0.4, (shape[0], 1))).astype(np.float32)
        scales[EOS] = 0.1
        values *= scales
    return values


def _gain(name: str, mla_layers: tuple[int, ...]) -> float:
    """What multiplies a matrix beyond 1/sqrt(fan_in)."""
    if name.endswith(_RESIDUAL_WRITERS):
        return 0.6
    if name.endswith("block_sparse_moe.gate.weight"):
        return 1.5
    if name.endswith(".self_attn.q_proj.weight") and int(name.split(".")[2]) in mla_layers:
        return 2.0
    return 1.0


def _inverse_softplus(value: NDArray[np.float64]) -> NDArray[np.float64]:
    return value + np.log(-np.expm1(-value))


def _check(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field}: expected {', '.join(allowed)}, got {value!r}")
