"""The contract of the MLA ops in float64: expand, plain masked softmax, one (query, head) at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def naive_mla_expand(latent: Array, w_kv_b: Array, heads: int) -> Array:
    """[S, L] x [H*(n+v), R] -> f64 [S, H, n+v], from the first R columns of each row."""
    lat = latent[:, : w_kv_b.shape[1]].astype(np.float64)
    return np.einsum("sr,hcr->shc", lat, w_kv_b.astype(np.float64).reshape(heads, -1, w_kv_b.shape[1]))


def naive_mla_attend(q: Array, kv: Array, kr: Array, q_start: int, causal: bool, scale: float) -> tuple[Array, Array]:
    """Softmax attention over one window of keys.

    Args:
        q:        [T, H, n+r]
        kv:       [S, H, n+v]
        kr:       [S, r]       key part shared by all heads
        q_start:  position of q[0] minus position of kv[0]; query t sees the keys s <= q_start + t
        causal:   False: every query sees every key
        scale:    multiplies the scores
    Returns:
        out f64 [T, H, v], lse f64 [T, H] natural log; a row that sees no key gives 0 and -inf
    """
    queries, heads, key_width = q.shape
    keys, shared = kr.shape
    nope = key_width - shared
    out = np.zeros((queries, heads, kv.shape[2] - nope))
    lse = np.full((queries, heads), -np.inf)
    for h in range(heads):
        key = np.concatenate([kv[:, h, :nope], kr], axis=1).astype(np.float64)
        value = kv[:, h, nope:].astype(np.float64)
        for t in range(queries):
            seen = max(0, min(keys, q_start + t + 1)) if causal else keys
            if seen:
                score = key[:seen] @ q[t, h].astype(np.float64) * scale
                weight = np.exp(score - score.max())
                out[t, h] = weight @ value[:seen] / weight.sum()
                lse[t, h] = score.max() + np.log(weight.sum())
    return out, lse


def naive_mla_decode(q: Array, w_kv_b: Array, pool: Array, pages: Array, lengths: Array, scale: float) -> Array:
    """[B, H, n+r] against the paged latent rows of each sequence, by expansion -> f64 [B, H, v]."""
    page_tokens, rank = pool.shape[1], w_kv_b.shape[1]
    results = []
    for b, length in enumerate(lengths):
        rows = np.array([pool[pages[b, t // page_tokens], t % page_tokens] for t in range(length)])
        rows = rows.reshape(length, pool.shape[2])
        kv = naive_mla_expand(rows, w_kv_b, q.shape[1])
        results.append(naive_mla_attend(q[b : b + 1], kv, rows[:, rank:], 0, False, scale)[0][0])
    return np.stack(results)
