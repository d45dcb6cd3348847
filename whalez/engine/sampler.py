"""From logits to one token."""

from __future__ import annotations

import numpy as np


def sample(logits: np.ndarray, temperature: float, top_p: float, seed: int, position: int) -> int:
    """The next token from logits f32 [vocab].

    temperature 0 is greedy, ties to the lowest token. Otherwise nucleus sampling: the smallest set of tokens whose
    probabilities sum to at least top_p. The random number depends on (seed, position) only, so that load, lane and
    batch change nothing.
    """
    if temperature == 0.0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    cumulative = np.cumsum(p[order])
    kept = order[: int(np.searchsorted(cumulative, min(top_p, 1.0) - 1e-12)) + 1]
    draw = np.random.default_rng((seed, position)).random() * p[kept].sum()
    return int(kept[min(int(np.searchsorted(np.cumsum(p[kept]), draw, side="right")), len(kept) - 1)])
