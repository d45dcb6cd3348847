"""The contract of the MoE ops in float64: one token at a time, sorted choices, every expert asked directly."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def naive_route(
    logits: Array, bias: Array, top_k: int, renormalize: bool, scaling: float, num_groups: int, topk_groups: int
) -> tuple[Array, Array]:
    """Sigmoid router.

    Args:
        logits:       [T, E]
        bias:         [E]  added to the scores for the choice, not for the weights
        renormalize:  w / (sum w + 1e-20) before the scaling
        num_groups, topk_groups:  groups kept by the sum of their two best biased scores
    Returns:
        ids int64 [T, k], best first, lowest index first among equals; weights f64 [T, k]
    """
    score = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    ids, weights = [], []
    for token in score:
        biased = token + bias.astype(np.float64)
        groups = biased.reshape(num_groups, -1)
        worth = [sum(sorted(group, reverse=True)[:2]) for group in groups]
        kept = sorted(range(num_groups), key=lambda g: (-worth[g], g))[:topk_groups]
        allowed = [e for e in range(len(biased)) if e // groups.shape[1] in kept]
        chosen = sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]
        weight = token[chosen]
        if renormalize:
            weight = weight / (weight.sum() + 1e-20)
        ids.append(chosen)
        weights.append(weight * scaling)
    return np.array(ids).reshape(len(score), top_k), np.array(weights).reshape(len(score), top_k)


def naive_swiglu(gate_up: Array) -> Array:
    """[T, 2I] -> f64 [T, I]: silu of the first half times the second."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    return gate / (1.0 + np.exp(-gate)) * up


def naive_expert(w13: Array, w2: Array, x: Array) -> Array:
    """w2 (silu(w1 x) * (w3 x)); w13 [2I, D] is w1 above w3, w2 [D, I], x [n, D] -> f64 [n, D]."""
    x64 = x.astype(np.float64)
    return naive_swiglu(x64 @ w13.astype(np.float64).T) @ w2.astype(np.float64).T


def naive_moe(x: Array, ids: Array, weights: Array, w13: Array, w2: Array) -> Array:
    """sum_k weights[t, k] * expert ids[t, k] (x[t]); w13 [E, 2I, D], w2 [E, D, I] -> f64 [T, D]."""
    out = np.zeros(x.shape)
    for e in range(w13.shape[0]):
        tokens, slots = np.nonzero(ids == e)
        if tokens.size:
            out[tokens] += weights[tokens, slots, None].astype(np.float64) * naive_expert(w13[e], w2[e], x[tokens])
    return out
