"""KDA in float64, token by token, exactly as the recurrence is written: the contract of this op.

Shares nothing with the chunk form: no cumulative sums, no inverse, no blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def kda_gate(f: Array, a_log: Array, dt_bias: Array) -> Array:
    """f64 [T, H, K] log decay from f [T, H, K], a_log [H], dt_bias [H, K]."""
    r = f.astype(np.float64) + dt_bias.astype(np.float64)
    return np.asarray(-np.exp(a_log.astype(np.float64))[:, None] * np.logaddexp(0.0, r))


def kda(q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float, state: Array) -> tuple[Array, Array]:
    """Returns (out f64 [T, H, V], state after row T-1 f64 [H, K, V]); the inputs as kda_prepare takes them."""
    q, k, v, g, beta = (x.astype(np.float64) for x in (q, k, v, g, beta))
    s = state.astype(np.float64)
    out = np.empty(v.shape)
    for t in range(len(k)):
        s = np.exp(g[t])[:, :, None] * s
        predicted = np.einsum("hkv,hk->hv", s, k[t])
        update = beta[t][:, None] * (v[t] - predicted)
        s = s + k[t][:, :, None] * update[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", s, q[t] * scale)
    return out, s


def kda_package(k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """Returns (m f64 [H, K, K], d f64 [H, K, V]): the product of one-token maps, later tokens on the left."""
    k, v, g, beta = (x.astype(np.float64) for x in (k, v, g, beta))
    heads, key_dim = k.shape[1:]
    m = np.tile(np.eye(key_dim), (heads, 1, 1))
    d = np.zeros((heads, key_dim, v.shape[2]))
    for t in range(len(k)):
        write = beta[t][:, None] * k[t]
        step = (np.eye(key_dim) - write[:, :, None] * k[t][:, None, :]) * np.exp(g[t])[:, None, :]
        m = step @ m
        d = step @ d + write[:, :, None] * v[t][:, None, :]
    return m, d
