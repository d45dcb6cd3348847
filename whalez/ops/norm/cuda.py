"""Normalisation on the device: a block takes a row, or a warp a head. Twins of the host ops on bf16.

Two passes over a row, of which the second finds it in L1. Sums, root and products are f32; a value is rounded to bf16
once, when it is stored. Tolerance: against `naive.py`, twice the error of that one rounding and one bf16 unit more.
Hot: yes.
"""

from __future__ import annotations

import math
from typing import Any

from numba import cuda

from whalez.ops.device.kernel import kernel
from whalez.ops.device.limits import GRID_YZ_MAX, require_addresses, require_blocks
from whalez.ops.device.ptx import cvt_bf16_f32
from whalez.ops.device.rowwise import (
    block_sum_block,
    load_bf16x8_thread,
    load_x1,
    load_x4_thread,
    sigmoid_thread,
    store_bf16x4_thread,
    store_bf16x8_thread,
    vectors_of,
    warp_sum_warp,
)
from whalez.ops.device.types import bf16p, f32, f32p, i64

L2_EPS = 1e-6  # part of the model, not a setting; added to the sum of squares
ROW_THREADS_MAX = 256
HEAD_WARPS_MAX = 8


def rms_norm(
    stream: Any, x: int, x_stride: int, weight: int, eps: float, out: int, out_stride: int, rows: int, width: int
) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row.

    Args:
        x:       bf16 [T, D]  rows x_stride elements apart
        weight:  f32 [D]
        out:     bf16 [T, D]  rows out_stride elements apart; may be x
    Writes:   out[:T] only
    Raises:   ShapeError before any launch, as all here
    """
    require_addresses(x=(x, 2), weight=(weight, 4), out=(out, 2))
    if not rows:
        return
    octets = vectors_of(width, 8, (x, weight, out), (x_stride, out_stride))
    threads = min(ROW_THREADS_MAX, -(-(octets + width - 8 * octets) // 32) * 32)
    stream.launch(rms_norm_kernel, rows, threads, 0, x, x_stride, weight, eps, out, out_stride, octets, width)


def gated_rms_norm(
    stream: Any,
    o: int,
    o_stride: int,
    weight: int,
    gate: int,
    gate_stride: int,
    eps: float,
    rows: int,
    heads: int,
    width: int,
) -> None:
    """o <- o / sqrt(mean_V(o^2) + eps) * weight * sigmoid(gate), head by head.

    Args:
        o:       bf16 [T, H, V]  in place; rows o_stride elements apart
        weight:  f32 [V]         shared by all heads
        gate:    bf16 [T, H, V]  before the sigmoid; rows gate_stride elements apart
    Writes:   o[:T] only
    """
    require_addresses(o=(o, 2), weight=(weight, 4), gate=(gate, 2))
    if not rows:
        return
    quads = vectors_of(width, 4, (o, weight, gate), (o_stride, gate_stride, width))
    grid, threads = _heads_grid(rows, heads)
    stream.launch(
        gated_rms_norm_kernel, grid, threads, 0, o, o_stride, weight, gate, gate_stride, eps, heads, quads, width
    )


def l2_norm(stream: Any, x: int, x_stride: int, rows: int, heads: int, width: int) -> None:
    """x <- x / sqrt(sum_K(x^2) + 1e-6), head by head.

    Args:
        x:  bf16 [T, H, K]  in place; rows x_stride elements apart
    Writes:   x[:T] only
    """
    require_addresses(x=(x, 2))
    if not rows:
        return
    quads = vectors_of(width, 4, (x,), (x_stride, width))
    grid, threads = _heads_grid(rows, heads)
    stream.launch(l2_norm_kernel, grid, threads, 0, x, x_stride, heads, quads, width)


def _heads_grid(rows: int, heads: int) -> tuple[tuple[int, int, int], int]:
    # Rows on x, which may be 2^31 - 1 long, and no division of a flat index, which costs as much as half a head.
    require_blocks("heads", heads, GRID_YZ_MAX * HEAD_WARPS_MAX)
    warps = min(heads, HEAD_WARPS_MAX)
    return (rows, -(-heads // warps), 1), 32 * warps


@kernel("rms_norm_kernel", bf16p, i64, f32p, f32, bf16p, i64, i64, i64, block=ROW_THREADS_MAX)
def rms_norm_kernel(
    g_x: Any, x_stride: Any, g_weight: Any, eps: Any, g_out: Any, out_stride: Any, octets: Any, width: Any
) -> None:
    i_row, i_thread, threads = i64(cuda.blockIdx.x), i64(cuda.threadIdx.x), i64(cuda.blockDim.x)
    x_row, out_row = i_row * x_stride, i_row * out_stride
    t_x = cuda.local.array(8, f32)
    t_w = cuda.local.array(8, f32)

    square = f32(0.0)
    i = i_thread
    while i < octets:
        load_bf16x8_thread(g_x, (x_row >> 3) + i, t_x)
        for j in range(8):
            square += t_x[j] * t_x[j]
        i += threads
    i = 8 * octets + i_thread
    while i < width:
        x = load_x1(g_x, x_row + i)
        square += x * x
        i += threads

    factor = f32(1.0) / math.sqrt(block_sum_block(square) / f32(width) + eps)

    i = i_thread
    while i < octets:
        load_bf16x8_thread(g_x, (x_row >> 3) + i, t_x)
        load_x4_thread(g_weight, 2 * i, t_w, 0)
        load_x4_thread(g_weight, 2 * i + 1, t_w, 4)
        for j in range(8):
            t_x[j] = t_x[j] * factor * t_w[j]
        store_bf16x8_thread(g_out, (out_row >> 3) + i, t_x)
        i += threads
    i = 8 * octets + i_thread
    while i < width:
        g_out[out_row + i] = cvt_bf16_f32(load_x1(g_x, x_row + i) * factor * g_weight[i])
        i += threads


@cuda.jit(device=True)
def square_of_head_warp(g_x: Any, base: Any, quads: Any, width: Any) -> Any:
    """The sum of squares of `width` values from element `base`, known to all lanes."""
    i_lane = i64(cuda.threadIdx.x % 32)
    t_x = cuda.local.array(4, f32)
    square = f32(0.0)
    i = i_lane
    while i < quads:
        load_x4_thread(g_x, (base >> 2) + i, t_x, 0)
        for j in range(4):
            square += t_x[j] * t_x[j]
        i += 32
    i = 4 * quads + i_lane
    while i < width:
        x = load_x1(g_x, base + i)
        square += x * x
        i += 32
    return warp_sum_warp(square)


@kernel("gated_rms_norm_kernel", bf16p, i64, f32p, bf16p, i64, f32, i64, i64, i64, block=32 * HEAD_WARPS_MAX)
def gated_rms_norm_kernel(
    g_o: Any,
    o_stride: Any,
    g_weight: Any,
    g_gate: Any,
    gate_stride: Any,
    eps: Any,
    heads: Any,
    quads: Any,
    width: Any,
) -> None:
    i_row, i_lane = i64(cuda.blockIdx.x), i64(cuda.threadIdx.x % 32)
    i_head = i64(cuda.blockIdx.y) * i64(cuda.blockDim.x // 32) + i64(cuda.threadIdx.x // 32)
    if i_head >= heads:
        return
    o_base, gate_base = i_row * o_stride + i_head * width, i_row * gate_stride + i_head * width
    factor = f32(1.0) / math.sqrt(square_of_head_warp(g_o, o_base, quads, width) / f32(width) + eps)

    t_o = cuda.local.array(4, f32)
    t_w = cuda.local.array(4, f32)
    t_gate = cuda.local.array(4, f32)
    i = i_lane
    while i < quads:
        load_x4_thread(g_o, (o_base >> 2) + i, t_o, 0)
        load_x4_thread(g_gate, (gate_base >> 2) + i, t_gate, 0)
        load_x4_thread(g_weight, i, t_w, 0)
        for j in range(4):
            t_o[j] = t_o[j] * factor * t_w[j] * sigmoid_thread(t_gate[j])
        store_bf16x4_thread(g_o, (o_base >> 2) + i, t_o)
        i += 32
    i = 4 * quads + i_lane
    while i < width:
        normed = load_x1(g_o, o_base + i) * factor * g_weight[i]
        g_o[o_base + i] = cvt_bf16_f32(normed * sigmoid_thread(load_x1(g_gate, gate_base + i)))
        i += 32


@kernel("l2_norm_kernel", bf16p, i64, i64, i64, i64, block=32 * HEAD_WARPS_MAX)
def l2_norm_kernel(g_x: Any, x_stride: Any, heads: Any, quads: Any, width: Any) -> None:
    i_row, i_lane = i64(cuda.blockIdx.x), i64(cuda.threadIdx.x % 32)
    i_head = i64(cuda.blockIdx.y) * i64(cuda.blockDim.x // 32) + i64(cuda.threadIdx.x // 32)
    if i_head >= heads:
        return
    base = i_row * x_stride + i_head * width
    factor = f32(1.0) / math.sqrt(square_of_head_warp(g_x, base, quads, width) + f32(L2_EPS))

    t_x = cuda.local.array(4, f32)
    i = i_lane
    while i < quads:
        load_x4_thread(g_x, (base >> 2) + i, t_x, 0)
        for j in range(4):
            t_x[j] *= factor
        store_bf16x4_thread(g_x, (base >> 2) + i, t_x)
        i += 32
    i = 4 * quads + i_lane
    while i < width:
        g_x[base + i] = cvt_bf16_f32(load_x1(g_x, base + i) * factor)
        i += 32
