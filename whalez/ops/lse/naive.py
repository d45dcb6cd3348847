"""The contract of lse_merge in float64: weights are shares of exp(lse), an empty side has none."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def naive_lse_merge(acc: Array, acc_lse: Array, part: Array, part_lse: Array) -> tuple[Array, Array]:
    """Merge two partial softmax averages.

    Args:
        acc, part:          [T, H, V]  averages over two disjoint key sets; ignored where their lse is -inf
        acc_lse, part_lse:  [T, H]     natural log of the sum of exp(scores); -inf marks an empty row
    Returns:
        out [T, H, V], lse [T, H], both f64; an all-empty row gives 0 and -inf
    """
    a, b = acc_lse.astype(np.float64), part_lse.astype(np.float64)
    top = np.maximum(a, b)
    shift = np.where(np.isfinite(top), top, 0.0)
    mass_a, mass_b = np.exp(a - shift), np.exp(b - shift)
    total = mass_a + mass_b
    safe = np.where(total > 0, total, 1.0)
    left = np.where((mass_a > 0)[..., None], acc.astype(np.float64), 0.0)
    right = np.where((mass_b > 0)[..., None], part.astype(np.float64), 0.0)
    out = left * (mass_a / safe)[..., None] + right * (mass_b / safe)[..., None]
    with np.errstate(divide="ignore"):
        return out, np.log(total) + shift
