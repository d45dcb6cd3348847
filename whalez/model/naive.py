"""Kimi Linear in float64, whole and plain: what every faster path is measured against.

Rule 1: no code is shared with `whalez.ops` nor with `weights.py`; tensors are used under their published names.
Rule 2: KDA runs token by token as the recurrence is written, MLA as one masked softmax, experts one after another, so
that nothing here has a chunk, a window or a segment to get wrong. Memory is O(T * T) per MLA head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whalez.model.config import KimiLinearConfig

F64: TypeAlias = NDArray[np.float64]

_L2_EPS = 1e-6  # added to the sum of squares, whatever rms_norm_eps is


@dataclass(frozen=True, slots=True)
class NaiveResult:
    """What a float64 forward pass of T tokens gives, one row per position."""

    logits: F64  # [T, vocab]
    hidden: F64  # [T, D]                 the residual stream after the last layer, before the final norm
    choices: list[NDArray[np.int64]]  # per MoE layer [T, k]: experts used, best first (or as forced)
    margins: list[F64]  # per MoE layer [T]: biased score of the last one chosen minus that of the best one left out


def naive_forward(
    config: KimiLinearConfig,
    tensors: Mapping[str, NDArray[Any]],
    tokens: ArrayLike,
    forced_choices: Sequence[NDArray[Any]] | None = None,
) -> NaiveResult:
    """Logits of every position of one sequence that starts at `tokens[0]`.

    Args:
        tensors:        published name to array, any float dtype
        tokens:         int [T]
        forced_choices: per MoE layer int [T, k]; used instead of the own choice, with weights from the own scores.
                        Margins stay those of the own choice, so that a differing choice can be judged.
    """
    model = _Model(config, tensors, forced_choices)
    x = model.weight("model.embed_tokens.weight")[np.asarray(tokens, np.int64)]
    for layer in range(config.num_hidden_layers):
        x = model.layer(layer, x)
    logits = rms_norm(x, model.weight("model.norm.weight"), config.rms_norm_eps) @ model.weight("lm_head.weight").T
    return NaiveResult(logits, x, model.choices, model.margins)


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def silu(x: F64) -> F64:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: F64) -> F64:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(0, x)


def short_conv(x: F64, weight: F64) -> F64:
    """silu of the causal depthwise convolution of x [T, D] with taps [D, W], the last of which is the current token."""
    tokens_count, width = x.shape[0], weight.shape[1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return silu(sum(weight[:, tap] * padded[tap : tap + tokens_count] for tap in range(width)))


def l2_norm(x: F64) -> F64:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + _L2_EPS)


def delta_rule(q: F64, k: F64, v: F64, decay: F64, beta: F64) -> F64:
    """The KDA recurrence from a zero state: q, k, decay [T, H, K], v [T, H, V], beta [T, H] -> [T, H, V].

    Decay comes first, the update is predicted from the decayed state, and the output reads the updated one.
    """
    state = np.zeros((*k.shape[1:], v.shape[-1]))
    out = np.empty_like(v)
    for t in range(len(k)):
        state *= decay[t, :, :, None]
        update = beta[t, :, None] * (v[t] - np.matmul(k[t, :, None, :], state)[:, 0])
        state += k[t, :, :, None] * update[:, None, :]
        out[t] = np.matmul(q[t, :, None, :], state)[:, 0]
    return out


class _Model:
    def __init__(
        self,
        config: KimiLinearConfig,
        tensors: Mapping[str, NDArray[Any]],
        forced_choices: Sequence[NDArray[Any]] | None,
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.forced_choices = forced_choices
        self.choices: list[NDArray[np.int64]] = []
        self.margins: list[F64] = []

    def weight(self, name: str) -> F64:
        return self.tensors[name].astype(np.float64)

    def project(self, x: F64, name: str) -> F64:
        return x @ self.weight(f"{name}.weight").T

    def layer(self, layer: int, x: F64) -> F64:
        config, prefix = self.config, f"model.layers.{layer}."
        attention = self.kda if layer in config.kda_layers else self.mla
        normed = rms_norm(x, self.weight(prefix + "input_layernorm.weight"), config.rms_norm_eps)
        x = x + attention(prefix + "self_attn.", normed)
        normed = rms_norm(x, self.weight(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps)
        if layer >= config.first_k_dense_replace and layer % config.moe_layer_freq == 0:
            return x + self.moe(prefix + "block_sparse_moe.", normed)
        return x + self.mlp(prefix + "mlp.", normed)

    def kda(self, prefix: str, x: F64) -> F64:
        config = self.config
        split = (len(x), config.kda_heads, config.kda_head_dim)

        def convolved(name: str) -> F64:
            taps = self.weight(f"{prefix}{name}_conv1d.weight")[:, 0, :]
            return short_conv(self.project(x, f"{prefix}{name}_proj"), taps).reshape(split)

        def low_rank(name: str) -> F64:
            return self.project(self.project(x, f"{prefix}{name}_a_proj"), f"{prefix}{name}_b_proj").reshape(split)

        q = l2_norm(convolved("q")) * config.kda_head_dim**-0.5
        k = l2_norm(convolved("k"))
        v = convolved("v")
        a_log = self.weight(prefix + "A_log").reshape(config.kda_heads, 1)
        dt_bias = self.weight(prefix + "dt_bias").reshape(split[1:])
        decay = np.exp(-np.exp(a_log) * softplus(low_rank("f") + dt_bias))
        beta = sigmoid(self.project(x, prefix + "b_proj"))
        out = rms_norm(delta_rule(q, k, v, decay, beta), self.weight(prefix + "o_norm.weight"), config.rms_norm_eps)
        return self.project((out * sigmoid(low_rank("g"))).reshape(len(x), -1), prefix + "o_proj")

    def mla(self, prefix: str, x: F64) -> F64:
        config = self.config
        tokens_count, heads, nope = len(x), config.num_attention_heads, config.qk_nope_head_dim
        q = self.project(x, prefix + "q_proj").reshape(tokens_count, heads, nope + config.qk_rope_head_dim)
        compressed = self.project(x, prefix + "kv_a_proj_with_mqa")
        latent, shared_key = compressed[:, : config.kv_lora_rank], compressed[:, config.kv_lora_rank :]
        latent = rms_norm(latent, self.weight(prefix + "kv_a_layernorm.weight"), config.latent_norm_eps)
        expanded = self.project(latent, prefix + "kv_b_proj").reshape(tokens_count, heads, nope + config.v_head_dim)
        future = np.triu(np.ones((tokens_count, tokens_count), bool), 1)
        out = np.empty((tokens_count, heads, config.v_head_dim))
        for head in range(heads):
            scores = q[:, head, :nope] @ expanded[:, head, :nope].T + q[:, head, nope:] @ shared_key.T
            scores *= (nope + config.qk_rope_head_dim) ** -0.5
            scores[future] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ expanded[:, head, nope:]
        return self.project(out.reshape(tokens_count, -1), prefix + "o_proj")

    def mlp(self, prefix: str, x: F64, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> F64:
        gate, up, down = names
        return self.project(silu(self.project(x, prefix + gate)) * self.project(x, prefix + up), prefix + down)

    def moe(self, prefix: str, x: F64) -> F64:
        chosen, weights = self.route(prefix, x)
        out = self.mlp(prefix + "shared_experts.", x) if self.config.num_shared_experts else np.zeros_like(x)
        for expert in range(self.config.num_experts):
            rows, slots = np.nonzero(chosen == expert)
            if len(rows):
                routed = self.mlp(f"{prefix}experts.{expert}.", x[rows], ("w1", "w3", "w2"))
                out[rows] += weights[rows, slots, None] * routed
        return out

    def route(self, prefix: str, x: F64) -> tuple[NDArray[np.int64], F64]:
        """Experts [T, k] and their weights; the bias takes part in the choice only."""
        config, top_k = self.config, self.config.num_experts_per_token
        scores = sigmoid(self.project(x, prefix + "gate"))
        biased = scores + self.weight(prefix + "gate.e_score_correction_bias")
        if config.num_expert_group > 1:
            biased = self.keep_best_groups(biased)
        # Stable on the negated scores: of equal ones the lowest number comes first.
        order = np.argsort(-biased, axis=-1, kind="stable")
        ranked = np.take_along_axis(biased, order, -1)
        all_used = top_k == config.num_experts
        self.margins.append(np.full(len(x), np.inf) if all_used else ranked[:, top_k - 1] - ranked[:, top_k])
        chosen = order[:, :top_k]
        if self.forced_choices is not None:
            chosen = np.asarray(self.forced_choices[len(self.choices)], np.int64)
            assert chosen.shape == (len(x), top_k)
        self.choices.append(chosen)
        weights = np.take_along_axis(scores, chosen, -1)
        if config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return chosen, weights * config.routed_scaling_factor

    def keep_best_groups(self, biased: F64) -> F64:
        """-inf for the experts of all groups but the `topk_group` best; a group counts with its two best experts."""
        config = self.config
        grouped = biased.reshape(len(biased), config.num_expert_group, -1)
        group_scores = np.sort(grouped, -1)[..., -2:].sum(-1)
        kept = np.argsort(-group_scores, axis=-1, kind="stable")[:, : config.topk_group]
        mask = np.zeros(group_scores.shape, bool)
        np.put_along_axis(mask, kept, True, -1)
        return np.where(mask[..., None], grouped, -np.inf).reshape(biased.shape)
