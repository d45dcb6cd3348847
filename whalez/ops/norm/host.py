"""Normalisation on the host: one pass over a row that stays in cache. Hot: yes, `python bench/ops_kda.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from whalez.ops.checks import axes_of, packed, rows_of
from whalez.ops.fastmath import f32_at, sigmoid_f32

Array = np.ndarray[Any, Any]
L2_EPS = 1e-6  # part of the model, not a setting; added to the sum of squares


def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row.

    Args:
        x:       f32 [T, D]  rows may lie apart
        weight:  f32 [D]
        out:     f32 [T, D]  rows may lie apart; may be x
    Writes:   out[:T] only
    Raises:   ShapeError before any kernel runs
    """
    rows, width = axes_of("x", x, "TD")
    x_addr, x_stride = rows_of("x", x, (rows, width))
    out_addr, out_stride = rows_of("out", out, (rows, width))
    rms_norm_kernel(x_addr, x_stride, packed("weight", weight, (width,)), float(eps), out_addr, out_stride, rows, width)


def gated_rms_norm(o: Array, weight: Array, gate: Array, eps: float) -> None:
    """o <- o / sqrt(mean_V(o^2) + eps) * weight * sigmoid(gate), head by head.

    Args:
        o:       f32 [T, H, V]  in place; rows may lie apart
        weight:  f32 [V]        shared by all heads
        gate:    f32 [T, H, V]  before the sigmoid; rows may lie apart
    Writes:   o[:T] only
    Raises:   ShapeError before any kernel runs
    """
    rows, heads, width = axes_of("o", o, "THV")
    o_addr, o_stride = rows_of("o", o, (rows, heads, width))
    gate_addr, gate_stride = rows_of("gate", gate, (rows, heads, width))
    weight_addr = packed("weight", weight, (width,))
    gated_rms_norm_kernel(o_addr, o_stride, weight_addr, gate_addr, gate_stride, float(eps), rows, heads, width)


def l2_norm(x: Array) -> None:
    """x <- x / sqrt(sum_K(x^2) + 1e-6), head by head.

    Args:
        x:  f32 [T, H, K]  in place; rows may lie apart
    Writes:   x[:T] only
    Raises:   ShapeError before any kernel runs
    """
    rows, heads, width = axes_of("x", x, "THK")
    x_addr, x_stride = rows_of("x", x, (rows, heads, width))
    l2_norm_kernel(x_addr, x_stride, rows, heads, width)


def warm() -> None:
    """Compile, or load from the cache, every kernel of this op."""
    x = np.ones((1, 1, 4), np.float32)
    rms_norm(x[0], x[0, 0], 1e-5, x[0])
    gated_rms_norm(x, x[0, 0].copy(), x.copy(), 1e-5)
    l2_norm(x)


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy")
def _sum_of_squares(x: Any, width: int) -> Any:
    total = np.float32(0.0)
    for i in range(width):
        total += x[i] * x[i]
    return total


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def rms_norm_kernel(
    x_addr: int, x_stride: int, weight_addr: int, eps: float, out_addr: int, out_stride: int, rows: int, width: int
) -> None:
    weight = f32_at(weight_addr)
    for t in range(rows):
        x = f32_at(x_addr + 4 * t * x_stride)
        out = f32_at(out_addr + 4 * t * out_stride)
        factor = np.float32(1.0 / math.sqrt(_sum_of_squares(x, width) / width + eps))
        for i in range(width):
            out[i] = x[i] * factor * weight[i]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def gated_rms_norm_kernel(
    o_addr: int,
    o_stride: int,
    weight_addr: int,
    gate_addr: int,
    gate_stride: int,
    eps: float,
    rows: int,
    heads: int,
    width: int,
) -> None:
    weight = f32_at(weight_addr)
    for t in range(rows):
        for h in range(heads):
            o = f32_at(o_addr + 4 * (t * o_stride + h * width))
            gate = f32_at(gate_addr + 4 * (t * gate_stride + h * width))
            factor = np.float32(1.0 / math.sqrt(_sum_of_squares(o, width) / width + eps))
            for i in range(width):
                o[i] = o[i] * factor * weight[i] * sigmoid_f32(gate[i])


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def l2_norm_kernel(x_addr: int, x_stride: int, rows: int, heads: int, width: int) -> None:
    for t in range(rows):
        for h in range(heads):
            x = f32_at(x_addr + 4 * (t * x_stride + h * width))
            factor = np.float32(1.0 / math.sqrt(_sum_of_squares(x, width) + L2_EPS))
            for i in range(width):
                x[i] = x[i] * factor
