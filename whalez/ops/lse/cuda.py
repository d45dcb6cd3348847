"""lse_merge on the device: one warp per (token, head), f32 accumulator, bf16 or f32 partials; and the end of the fold.

Only the smaller exponential is formed, so nothing overflows. Tolerance: f32 as the host's; the bf16 result
is the accumulator rounded to nearest even.
Hot: yes.
"""

from __future__ import annotations

import math
from typing import Any

from numba import cuda

from whalez.errors import ShapeError
from whalez.ops.device.kernel import kernel
from whalez.ops.device.limits import GRID_YZ_MAX, require_addresses, require_blocks
from whalez.ops.device.ptx import cvt_bf16_f32
from whalez.ops.device.rowwise import (
    load_x1,
    load_x4_thread,
    store_bf16x4_thread,
    store_f32x4_thread,
    vectors_of,
)
from whalez.ops.device.types import bf16p, f32, f32p, i64

WARPS_MAX = 8
EMPTY = -math.inf
TAKES_NOTHING, TAKES_PART, TAKES_BOTH = 0, 1, 2  # which sides a row that is written is made of


def lse_merge(
    stream: Any,
    acc: int,
    acc_stride: int,
    acc_lse: int,
    part: int,
    part_stride: int,
    part_lse: int,
    tokens: int,
    heads: int,
    value_dim: int,
    *,
    part_is_bf16: bool,
    part_base: float = math.e,
) -> None:
    """Merge `part` into `acc`, as if softmax had run over the union of their keys.

    Args:
        acc:       f32 [T, H, V]  in/out; tokens acc_stride elements apart; may hold anything where acc_lse is -inf
        acc_lse:   f32 [T, H]     in/out, packed, natural log; -inf marks an empty row
        part:      f32 or bf16 [T, H, V]  result over a disjoint key set; tokens part_stride elements apart
        part_lse:  f32 [T, H]     packed, natural log, or log2 with part_base=2.0
        part_base: e or 2.0; the base cannot be told from the values, so a caller with a foreign kernel has to name it
    Writes:   acc[:T] and acc_lse[:T]. Two empty sides give 0 and -inf; a part merged into an empty acc keeps its bits
    Raises:   ShapeError before any launch
    """
    if part_base not in (math.e, 2.0):
        raise ShapeError(f"part_base: expected e or 2.0, got {part_base}")
    part_align = 2 if part_is_bf16 else 4
    require_addresses(acc=(acc, 4), acc_lse=(acc_lse, 4), part=(part, part_align), part_lse=(part_lse, 4))
    if not tokens:
        return
    quads = vectors_of(value_dim, 4, (acc, part), (acc_stride, part_stride, value_dim))
    grid, threads = _grid(tokens, heads)
    stream.launch(
        lse_merge_bf16_kernel if part_is_bf16 else lse_merge_f32_kernel,
        grid,
        threads,
        0,
        acc,
        acc_stride,
        acc_lse,
        part,
        part_stride,
        part_lse,
        math.log(part_base),
        heads,
        quads,
        value_dim,
    )


def lse_finalise(
    stream: Any,
    acc: int,
    acc_stride: int,
    acc_lse: int,
    out: int,
    out_stride: int,
    tokens: int,
    heads: int,
    value_dim: int,
) -> None:
    """out = acc in bf16; 0 where acc_lse is -inf, whatever acc holds there.

    Args:
        acc:      f32 [T, H, V]   tokens acc_stride elements apart
        acc_lse:  f32 [T, H]      packed
        out:      bf16 [T, H, V]  tokens out_stride elements apart; may not overlap acc
    Writes:   out[:T] only
    Raises:   ShapeError before any launch
    """
    require_addresses(acc=(acc, 4), acc_lse=(acc_lse, 4), out=(out, 2))
    if not tokens:
        return
    quads = vectors_of(value_dim, 4, (acc, out), (acc_stride, out_stride, value_dim))
    grid, threads = _grid(tokens, heads)
    stream.launch(
        lse_finalise_kernel, grid, threads, 0, acc, acc_stride, acc_lse, out, out_stride, heads, quads, value_dim
    )


def _grid(tokens: int, heads: int) -> tuple[tuple[int, int, int], int]:
    # Tokens on x, which may be 2^31 - 1 long; no division of a flat index, which costs as much as half a row.
    require_blocks("heads", heads, GRID_YZ_MAX * WARPS_MAX)
    warps = min(heads, WARPS_MAX)
    return (tokens, -(-heads // warps), 1), 32 * warps


@cuda.jit(device=True)
def shares_thread(a: Any, b: Any) -> Any:
    """(share of a, share of b, log(exp a + exp b)) of two sides of which neither is empty.

    The larger side is the unit: its exponential is 1, the other's in [0, 1].
    """
    small = math.exp(-abs(a - b))
    total = f32(1.0) + small
    if a >= b:
        return f32(1.0) / total, small / total, a + math.log1p(small)
    return small / total, f32(1.0) / total, b + math.log1p(small)


@cuda.jit(device=True)
def merge_thread(acc: Any, part: Any, takes: Any, share_acc: Any, share_part: Any) -> Any:
    """What an empty side holds has no meaning and may be poison, so it is left out, not multiplied by zero."""
    if takes == TAKES_NOTHING:
        return f32(0.0)
    if takes == TAKES_PART:
        return part
    return acc * share_acc + part * share_part


def merge_row(
    g_acc: Any,
    acc_stride: Any,
    g_acc_lse: Any,
    g_part: Any,
    part_stride: Any,
    g_part_lse: Any,
    to_natural: Any,
    heads: Any,
    quads: Any,
    value_dim: Any,
) -> None:
    """One warp merges one row; compiled for bf16 and for f32 partials."""
    i_token, i_lane = i64(cuda.blockIdx.x), i64(cuda.threadIdx.x % 32)
    i_head = i64(cuda.blockIdx.y) * i64(cuda.blockDim.x // 32) + i64(cuda.threadIdx.x // 32)
    if i_head >= heads:
        return
    i_row = i_token * heads + i_head
    acc_base, part_base = i_token * acc_stride + i_head * value_dim, i_token * part_stride + i_head * value_dim
    t_acc = cuda.local.array(4, f32)
    t_part = cuda.local.array(4, f32)

    a, b = g_acc_lse[i_row], g_part_lse[i_row] * to_natural
    cuda.syncwarp()  # all lanes have read acc_lse before one of them writes it
    share_acc, share_part, lse = f32(0.0), f32(0.0), b
    if b == f32(EMPTY):
        if a != f32(EMPTY):
            return
        takes = TAKES_NOTHING
    elif a == f32(EMPTY):
        takes = TAKES_PART
    else:
        takes = TAKES_BOTH
        share_acc, share_part, lse = shares_thread(a, b)
    if i_lane == 0:
        g_acc_lse[i_row] = lse

    i = i_lane
    while i < quads:
        load_x4_thread(g_acc, (acc_base >> 2) + i, t_acc, 0)
        load_x4_thread(g_part, (part_base >> 2) + i, t_part, 0)
        for j in range(4):
            t_acc[j] = merge_thread(t_acc[j], t_part[j], takes, share_acc, share_part)
        store_f32x4_thread(g_acc, (acc_base >> 2) + i, t_acc)
        i += 32
    i = 4 * quads + i_lane
    while i < value_dim:
        part = load_x1(g_part, part_base + i)
        g_acc[acc_base + i] = merge_thread(g_acc[acc_base + i], part, takes, share_acc, share_part)
        i += 32


_MERGE_BEHIND_PART = (i64, f32p, f32, i64, i64, i64)
lse_merge_bf16_kernel = kernel(
    "lse_merge_bf16_kernel", f32p, i64, f32p, bf16p, *_MERGE_BEHIND_PART, block=32 * WARPS_MAX
)(merge_row)
lse_merge_f32_kernel = kernel("lse_merge_f32_kernel", f32p, i64, f32p, f32p, *_MERGE_BEHIND_PART, block=32 * WARPS_MAX)(
    merge_row
)


@kernel("lse_finalise_kernel", f32p, i64, f32p, bf16p, i64, i64, i64, i64, block=32 * WARPS_MAX)
def lse_finalise_kernel(
    g_acc: Any,
    acc_stride: Any,
    g_acc_lse: Any,
    g_out: Any,
    out_stride: Any,
    heads: Any,
    quads: Any,
    value_dim: Any,
) -> None:
    i_token, i_lane = i64(cuda.blockIdx.x), i64(cuda.threadIdx.x % 32)
    i_head = i64(cuda.blockIdx.y) * i64(cuda.blockDim.x // 32) + i64(cuda.threadIdx.x // 32)
    if i_head >= heads:
        return
    acc_base, out_base = i_token * acc_stride + i_head * value_dim, i_token * out_stride + i_head * value_dim
    is_empty = g_acc_lse[i_token * heads + i_head] == f32(EMPTY)
    t_acc = cuda.local.array(4, f32)
    i = i_lane
    while i < quads:
        load_x4_thread(g_acc, (acc_base >> 2) + i, t_acc, 0)
        for j in range(4):
            t_acc[j] = f32(0.0) if is_empty else t_acc[j]
        store_bf16x4_thread(g_out, (out_base >> 2) + i, t_acc)
        i += 32
    i = 4 * quads + i_lane
    while i < value_dim:
        g_out[out_base + i] = cvt_bf16_f32(f32(0.0) if is_empty else g_acc[acc_base + i])
        i += 32
