"""Short convolution in float64, token by token: the contract of this op."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def short_conv(x: Array, tail: Array, weight: Array) -> tuple[Array, Array]:
    """Returns (out f64 [T, D], the tail after row T-1 f64 [3, D]) for x [T, D], tail [3, D], weight [D, 4]."""
    padded = np.concatenate([tail, x]).astype(np.float64)
    taps = weight.astype(np.float64)
    out = np.empty(x.shape)
    for t in range(len(x)):
        summed = sum(taps[:, j] * padded[t + j] for j in range(4))
        out[t] = summed / (1.0 + np.exp(-summed))
    return out, padded[len(padded) - 3 :]
