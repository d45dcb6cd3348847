"""The contract of the latent ops: float64 norm, one token at a time through the page table."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def naive_latent_norm(c: Array, weight: Array, eps: float) -> Array:
    """[T, R+r] -> f64 copy whose first R columns are c / sqrt(mean(c^2) + eps) * weight; the last r are unchanged."""
    rank = weight.shape[0]
    out = c.astype(np.float64)
    for row in out:
        mean_square = sum(float(x) ** 2 for x in row[:rank]) / rank
        row[:rank] *= weight.astype(np.float64) / np.sqrt(mean_square + eps)
    return out


def naive_latent_append(rows: Array, pool: Array, pages: Array, start: int) -> None:
    """Token start + t of the sequence goes to pool[pages[(start+t) // page], (start+t) % page]."""
    page_tokens = pool.shape[1]
    for t in range(rows.shape[0]):
        pool[pages[(start + t) // page_tokens], (start + t) % page_tokens] = rows[t]


def naive_latent_gather(pool: Array, pages: Array, start: int, count: int) -> Array:
    """The rows [start, start + count) of the sequence, [count, L]."""
    page_tokens = pool.shape[1]
    return np.stack([pool[pages[t // page_tokens], t % page_tokens] for t in range(start, start + count)])
