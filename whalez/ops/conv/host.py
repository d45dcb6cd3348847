"""Short convolution on the host. Rows are walked from the last to the first, so that `out` may be `x`.

Hot: yes, `python bench/ops_kda.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from whalez.ops.checks import axes_of, packed, rows_of, slots_of
from whalez.ops.fastmath import f32_at, i64_at, silu_f32

Array = np.ndarray[Any, Any]
WIDTH = 4  # taps; the tail carries WIDTH - 1 rows
TAIL = WIDTH - 1


def short_conv(x: Array, tail: Array, weight: Array, out: Array) -> None:
    """out[t] = silu(sum_j weight[:, j] * x[t - 3 + j]); rows before row 0 come from the tail.

    Args:
        x:       f32 [T, D]  rows may lie apart
        tail:    f32 [3, D]  the three pre-conv rows before row 0, oldest first; zeros at the start of a prompt
        weight:  f32 [D, 4]  tap 3 is the current token
        out:     f32 [T, D]  rows may lie apart; may be x itself, but may not overlap it otherwise
    Writes:   out[:T] only; the tail is left as it is (see conv_tail, called BEFORE this one if out is x)
    Raises:   ShapeError before any kernel runs
    """
    rows, width = axes_of("x", x, "TD")
    x_addr, x_stride = rows_of("x", x, (rows, width))
    out_addr, out_stride = rows_of("out", out, (rows, width))
    tail_addr = packed("tail", tail, (TAIL, width))
    packed("weight", weight, (width, WIDTH))
    taps = np.ascontiguousarray(weight.T)  # [4, D]: a few kB, so that the taps of neighbouring channels are neighbours
    scratch = np.empty(width, np.float32)
    short_conv_kernel(
        x_addr, x_stride, tail_addr, taps.ctypes.data, out_addr, out_stride, scratch.ctypes.data, rows, width
    )


def conv_tail(x: Array, tail: Array) -> None:
    """tail <- the last three rows of [tail; x].

    Args:
        x:     f32 [T, D]  pre-conv rows; T may be 0, 1 or 2
        tail:  f32 [3, D]  in place
    Raises:   ShapeError
    """
    rows, width = axes_of("x", x, "TD")
    rows_of("x", x, (rows, width))
    packed("tail", tail, (TAIL, width))
    if rows >= TAIL:
        tail[:] = x[rows - TAIL :]
    elif rows:
        tail[: TAIL - rows] = tail[rows:].copy()
        tail[TAIL - rows :] = x


def short_conv_decode(x: Array, tails: Array, slots: Array, weight: Array, out: Array) -> None:
    """One token of each request: short_conv of length 1 followed by conv_tail, on the tails of the given slots.

    Args:
        x:       f32 [B, D]     rows may lie apart
        tails:   f32 [S, 3, D]  in place, rows `slots` only
        slots:   int64 [B]      distinct
        weight:  f32 [D, 4]
        out:     f32 [B, D]     may be x
    Raises:   ShapeError before any kernel runs
    """
    rows, width = axes_of("x", x, "BD")
    slots_count = axes_of("tails", tails, "STD")[0]
    x_addr, x_stride = rows_of("x", x, (rows, width))
    out_addr, out_stride = rows_of("out", out, (rows, width))
    tails_addr = packed("tails", tails, (slots_count, TAIL, width))
    weight_addr = packed("weight", weight, (width, WIDTH))
    slots_addr = slots_of(slots, rows, slots_count)
    scratch = np.empty(width, np.float32)
    short_conv_decode_kernel(
        x_addr,
        x_stride,
        tails_addr,
        slots_addr,
        weight_addr,
        out_addr,
        out_stride,
        scratch.ctypes.data,
        rows,
        width,
    )


def warm() -> None:
    """Compile, or load from the cache, every kernel of this op."""
    x = np.ones((1, 4), np.float32)
    tails = np.zeros((1, TAIL, 4), np.float32)
    weight = np.ones((4, WIDTH), np.float32)
    short_conv(x, tails[0], weight, x)
    short_conv_decode(x, tails, np.zeros(1, np.int64), weight, x)


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _silu_row(summed: Any, out: Any, width: int) -> None:
    for d in range(width):
        out[d] = silu_f32(summed[d])


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def short_conv_kernel(
    x_addr: int,
    x_stride: int,
    tail_addr: int,
    taps_addr: int,
    out_addr: int,
    out_stride: int,
    scratch_addr: int,
    rows: int,
    width: int,
) -> None:
    """scratch: one row. The sums go through it because a loop that reads and writes one row is not made vector code."""
    summed = f32_at(scratch_addr)
    w0 = f32_at(taps_addr)
    w1 = f32_at(taps_addr + 4 * width)
    w2 = f32_at(taps_addr + 8 * width)
    w3 = f32_at(taps_addr + 12 * width)
    for back in range(rows):
        t = rows - 1 - back
        x3 = f32_at(x_addr + 4 * t * x_stride)
        x2 = f32_at(x_addr + 4 * (t - 1) * x_stride if t >= 1 else tail_addr + 4 * (t + 2) * width)
        x1 = f32_at(x_addr + 4 * (t - 2) * x_stride if t >= 2 else tail_addr + 4 * (t + 1) * width)
        x0 = f32_at(x_addr + 4 * (t - 3) * x_stride if t >= 3 else tail_addr + 4 * t * width)
        for d in range(width):
            summed[d] = x0[d] * w0[d] + x1[d] * w1[d] + x2[d] * w2[d] + x3[d] * w3[d]
        _silu_row(summed, f32_at(out_addr + 4 * t * out_stride), width)


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def short_conv_decode_kernel(
    x_addr: int,
    x_stride: int,
    tails_addr: int,
    slots_addr: int,
    weight_addr: int,
    out_addr: int,
    out_stride: int,
    scratch_addr: int,
    rows: int,
    width: int,
) -> None:
    summed = f32_at(scratch_addr)
    slots = i64_at(slots_addr)
    weight = f32_at(weight_addr)
    for b in range(rows):
        x = f32_at(x_addr + 4 * b * x_stride)
        tail_addr = tails_addr + 4 * slots[b] * 3 * width
        t0 = f32_at(tail_addr)
        t1 = f32_at(tail_addr + 4 * width)
        t2 = f32_at(tail_addr + 8 * width)
        for d in range(width):
            w = 4 * d
            summed[d] = t0[d] * weight[w] + t1[d] * weight[w + 1] + t2[d] * weight[w + 2] + x[d] * weight[w + 3]
        for d in range(width):
            t0[d] = t1[d]
            t1[d] = t2[d]
            t2[d] = x[d]
        _silu_row(summed, f32_at(out_addr + 4 * b * out_stride), width)
