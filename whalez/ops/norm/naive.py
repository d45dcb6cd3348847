"""Normalisation in float64, one line each: the contract of this op."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """f64 [T, D] from any-float x [T, D] and weight [D]."""
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(np.float64))


def gated_rms_norm(o: Array, weight: Array, gate: Array, eps: float) -> Array:
    """f64 [T, H, V]: normalise first, then gate; the gate is a sigmoid, not a SiLU."""
    return rms_norm(o, weight, eps) / (1.0 + np.exp(-gate.astype(np.float64)))


def l2_norm(x: Array) -> Array:
    """f64 [T, H, K]; the epsilon is added to the sum of squares, not to their mean."""
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6))
