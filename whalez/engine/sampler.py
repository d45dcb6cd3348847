"""From logits to one token."""

from __future__ import annotations

import numpy as np

from whalez.errors import RequestError


def check_sampling(temperature: float, top_p: float, seed: int) -> None:
    """What `sample` can be asked for. Raises RequestError naming the field."""
    if not temperature >= 0:
        raise RequestError(f"temperature: expected 0 or more, got {temperature}", "temperature")
    if not 0 < top_p <= 1:
        raise RequestError(f"top_p: expected above 0 and at most 1, got {top_p}", "top_p")
    if seed < 0:
        raise RequestError(f"seed: expected 0 or more, got {seed}", "seed")


def sample(logits: np.ndarray, temperature: float, top_p: float, seed: int, position: int) -> int:
    """The next token from logits f32 [vocab].

    temperature 0 is greedy, ties to the lowest token. Otherwise nucleus sampling: the smallest set of tokens whose
    probabilities sum to at least top_p. The random number depends on (seed, position) only, so that load, lane and
    batch change nothing. The arguments have passed `check_sampling`.
    """
    if temperature == 0.0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    cumulative = np.cumsum(p[order])
    kept = order[: int(np.searchsorted(cumulative, top_p - 1e-12)) + 1]
    draw = np.random.default_rng((seed, position)).random() * p[kept].sum()
    return int(kept[min(int(np.searchsorted(np.cumsum(p[kept]), draw, side="right")), len(kept) - 1)])
