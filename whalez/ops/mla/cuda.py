"""MLA on the GPU: attention over one window of keys on tensor cores, absorbed decode over pages, and their launches.

Rule 1: positions, rows and strides are 64-bit from the argument to the address.   Rule 2: a tile lies in shared memory
as rows of 16-byte pieces, piece c of row i at place c ^ (i & 7) of its group of eight, and only `_copy_rows`,
`_scores` and `_fold` know it.

How a warp of 32 lanes holds a tile of 16 queries (README.md, "On tensor cores"): lane 4 g + p has rows g and g + 8, and of
every group of eight columns the columns 2 p and 2 p + 1. Value 4 n + 2 i + j of a lane is row g + 8 i, column
8 n + 2 p + j. Scores in this form are, rounded to bf16, the first operand of the second product as they are.

Hot: yes.
"""

# mypy: disable-error-code="misc,untyped-decorator"
# (numba-cuda's decorators carry no types)
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import libdevice
from numba.cuda.types import float32, int32, uint32, uint64

from whalez.errors import ShapeError
from whalez.ops.device.kernel import Kernel, kernel
from whalez.ops.device.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait_all,
    cvt_bf16x2_f32,
    ex2_approx_f32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_bf16,
    shared_address,
)
from whalez.ops.device.types import f32, f32p, i32, i32p, i64, i64p, u32p

_inlined = cuda.jit(device=True, forceinline=True)

# exp(x) is taken as 2^(x log2 e) by the hardware's exponential. Its error (2^-22) and that of the product are far below
# the 2^-9 of the bf16 the weight is rounded to; no logarithm of base 2 leaves a function.
LOG2_E = np.float32(math.log2(math.e))
EMPTY = np.float32(-np.inf)
ZERO = np.float32(0.0)
ALL_LANES = 0xFFFFFFFF


# ---- pieces of both attention kernels -------------------------------------------------------------------------------


def _pitch(columns: int) -> int:
    """Bytes from row to row of a tile: whole groups of eight pieces, so that the swizzle stays inside the row."""
    return -(-columns // 64) * 128


def _copy_rows(rows: int, columns: int, pitch: int, first_column: int, threads: int) -> Any:
    """Device function: start the copy of ROWS rows into a tile, from an array of any row stride."""
    ROWS, PIECES, PITCH, FIRST, THREADS = rows, columns // 8, pitch, first_column // 8, threads
    ROUNDS = -(-ROWS * PIECES // THREADS)
    EXACT = ROWS * PIECES % THREADS == 0

    @_inlined
    def copy_rows_block(s_tile: Any, g_rows: Any, row_bytes: Any, first: Any, end: Any) -> None:
        """Rows first..first+ROWS of the array at address g_rows; a row behind `end` is the last row again, as whatever
        lies there would meet a weight of zero, and zero times NaN is NaN."""
        for i in range(ROUNDS):
            piece = cuda.threadIdx.x + i * THREADS
            i_row = piece // PIECES
            i_piece = piece % PIECES
            if EXACT or i_row < ROWS:
                place = (FIRST + i_piece) ^ (i_row & 7)
                row = min(first + i_row, end - 1)
                cp_async_16(uint32(s_tile + i_row * PITCH + place * 16), uint64(g_rows + row * row_bytes + i_piece * 16))

    return copy_rows_block


def _scores(keys: int, steps: int, pitch: int) -> Any:
    """Device function: the product of 16 queries with KEYS rows of a tile over 16 * STEPS columns."""
    GROUPS, STEPS, PITCH = keys // 16, steps, pitch

    @_inlined
    def scores_warp(t_query: Any, s_tile: Any, step_first: Any, t_scores: Any) -> None:
        lane = cuda.threadIdx.x & 31
        # Lanes 0-7, 8-15, 16-23, 24-31 name the rows of: keys 0-7 left half, keys 0-7 right half, keys 8-15 likewise.
        s_row = s_tile + ((lane & 7) + ((lane >> 4) << 3)) * PITCH
        turn = ((lane >> 3) & 1) ^ (lane & 7)
        for i in range(8 * GROUPS):
            t_scores[i] = ZERO
        for k in range(STEPS):
            piece = 2 * (step_first + k)
            s_piece = s_row + (piece >> 3) * 128 + (((piece & 7) ^ turn) << 4)
            for n in range(GROUPS):
                b0, b1, b2, b3 = ldmatrix_x4(uint32(s_piece + n * 16 * PITCH))
                for half in range(2):
                    j = 8 * n + 4 * half
                    c0, c1, c2, c3 = mma_m16n8k16_bf16(
                        t_query[4 * k], t_query[4 * k + 1], t_query[4 * k + 2], t_query[4 * k + 3],
                        b2 if half else b0, b3 if half else b1,
                        t_scores[j], t_scores[j + 1], t_scores[j + 2], t_scores[j + 3],
                    )  # fmt: skip
                    t_scores[j] = c0
                    t_scores[j + 1] = c1
                    t_scores[j + 2] = c2
                    t_scores[j + 3] = c3

    return scores_warp


def _hide(keys: int) -> Any:
    """Device function: scores of keys a row does not see become -inf."""
    KEYS = keys

    @_inlined
    def hide_thread(t_scores: Any, visible: Any, visible_below: Any) -> None:
        """`visible` keys of the tile for the lane's first row, `visible_below` for the one eight rows below; any integer."""
        column = 2 * (cuda.threadIdx.x & 3)
        count = int32(max(min(visible, KEYS), 0)) - column
        count_below = int32(max(min(visible_below, KEYS), 0)) - column
        for n in range(KEYS // 8):
            for j in range(2):
                if 8 * n + j >= count:
                    t_scores[4 * n + j] = EMPTY
                if 8 * n + j >= count_below:
                    t_scores[4 * n + 2 + j] = EMPTY

    return hide_thread


def _soften(keys: int) -> Any:
    """Device function: scores become weights relative to each row's running maximum."""
    GROUPS = keys // 8

    @_inlined
    def soften_warp(t_scores: Any, t_top: Any, t_mass: Any, t_shrink: Any, scale: Any) -> None:
        """Running maximum (raw score) and sum of the lane's two rows; the sum is the lane's own columns' until the end.
        t_shrink: factor for what was summed under the earlier maximum."""
        for i in range(2):
            top = t_top[i]
            for n in range(GROUPS):
                top = max(top, max(t_scores[4 * n + 2 * i], t_scores[4 * n + 2 * i + 1]))
            top = max(top, cuda.shfl_xor_sync(ALL_LANES, top, 1))
            top = max(top, cuda.shfl_xor_sync(ALL_LANES, top, 2))
            # A row that has seen nothing yet: -inf - 0 is -inf, where -inf - -inf would be NaN.
            base = ZERO if top == EMPTY else top
            # Difference first, product second: equal scores then give a weight of exactly one, which one fused
            # multiply-add with a rounded base would not.
            unit = scale * LOG2_E
            shrink = ex2_approx_f32((t_top[i] - base) * unit)
            total = ZERO
            for n in range(GROUPS):
                for j in range(2):
                    weight = ex2_approx_f32((t_scores[4 * n + 2 * i + j] - base) * unit)
                    t_scores[4 * n + 2 * i + j] = weight
                    total += weight
            t_mass[i] = t_mass[i] * shrink + total
            t_top[i] = top
            t_shrink[i] = shrink

    return soften_warp


def _fold(keys: int, columns: int, pitch: int) -> Any:
    """Device function: acc <- acc * shrink + weights times KEYS rows of a tile, COLUMNS of it."""
    STEPS, PAIRS, PITCH = keys // 16, columns // 16, pitch

    @_inlined
    def fold_warp(t_weights: Any, s_tile: Any, t_shrink: Any, t_acc: Any) -> None:
        lane = cuda.threadIdx.x & 31
        s_row = s_tile + (lane & 15) * PITCH
        turn = (lane >> 4) ^ (lane & 7)
        for n in range(2 * PAIRS):
            t_acc[4 * n] *= t_shrink[0]
            t_acc[4 * n + 1] *= t_shrink[0]
            t_acc[4 * n + 2] *= t_shrink[1]
            t_acc[4 * n + 3] *= t_shrink[1]
        for k in range(STEPS):
            a0 = cvt_bf16x2_f32(t_weights[8 * k], t_weights[8 * k + 1])
            a1 = cvt_bf16x2_f32(t_weights[8 * k + 2], t_weights[8 * k + 3])
            a2 = cvt_bf16x2_f32(t_weights[8 * k + 4], t_weights[8 * k + 5])
            a3 = cvt_bf16x2_f32(t_weights[8 * k + 6], t_weights[8 * k + 7])
            for n in range(PAIRS):
                s_piece = s_row + k * 16 * PITCH + (n >> 2) * 128 + (((2 * (n & 3)) ^ turn) << 4)
                b0, b1, b2, b3 = ldmatrix_x4_trans(uint32(s_piece))
                for half in range(2):
                    j = 8 * n + 4 * half
                    c0, c1, c2, c3 = mma_m16n8k16_bf16(
                        a0, a1, a2, a3,
                        b2 if half else b0, b3 if half else b1,
                        t_acc[j], t_acc[j + 1], t_acc[j + 2], t_acc[j + 3],
                    )  # fmt: skip
                    t_acc[j] = c0
                    t_acc[j + 1] = c1
                    t_acc[j + 2] = c2
                    t_acc[j + 3] = c3

    return fold_warp


@_inlined
def query_pair_thread(g_pairs: Any, row: Any, row_below: Any, pair: Any, t_query: Any, k: Any) -> None:
    """One step of the first operand, 16 rows x 16 columns, from global memory; rows and `pair` count pairs of values."""
    t_query[4 * k] = g_pairs[row + pair]
    t_query[4 * k + 1] = g_pairs[row_below + pair]
    t_query[4 * k + 2] = g_pairs[row + pair + 4]
    t_query[4 * k + 3] = g_pairs[row_below + pair + 4]


@_inlined
def mass_quad(mass: Any) -> Any:
    """Sum over the four lanes that share a row."""
    mass += cuda.shfl_xor_sync(ALL_LANES, mass, 1)
    return mass + cuda.shfl_xor_sync(ALL_LANES, mass, 2)


@_inlined
def lse_thread(top: Any, mass: Any, scale: Any) -> Any:
    """Natural logarithm of the sum of exp(scale * score)."""
    return EMPTY if mass == ZERO else top * scale + libdevice.logf(mass)


# ---- prefill --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttendTile:
    """One instantiation of the prefill kernel: head dims, and the cut of the work into blocks."""

    nope: int
    shared: int
    value: int
    warps: int  # of 16 queries each
    keys: int  # of one tile

    @property
    def queries(self) -> int:
        return 16 * self.warps

    @property
    def key_bytes(self) -> int:
        return self.keys * _pitch(self.nope + self.shared)

    @property
    def stage_bytes(self) -> int:
        return self.key_bytes + self.keys * _pitch(self.value)

    @property
    def shared_bytes(self) -> int:
        return 2 * self.stage_bytes


def _attend(tile: AttendTile) -> Kernel:
    NOPE, SHARED, VALUE, KEYS, QUERIES = tile.nope, tile.shared, tile.value, tile.keys, tile.queries
    STEPS = (NOPE + SHARED) // 16
    QUERY_WORDS, SCORES, SUMS = 4 * STEPS, KEYS // 2, VALUE // 2  # of one lane
    KEY_BYTES, STAGE_BYTES, THREADS = tile.key_bytes, tile.stage_bytes, 32 * tile.warps
    key_pitch, value_pitch = _pitch(NOPE + SHARED), _pitch(VALUE)
    copy_keys_block = _copy_rows(KEYS, NOPE, key_pitch, 0, THREADS)
    copy_shared_block = _copy_rows(KEYS, SHARED, key_pitch, NOPE, THREADS)
    copy_values_block = _copy_rows(KEYS, VALUE, value_pitch, 0, THREADS)
    scores_warp = _scores(KEYS, STEPS, key_pitch)
    hide_thread = _hide(KEYS)
    soften_warp = _soften(KEYS)
    fold_warp = _fold(KEYS, VALUE, value_pitch)

    @_inlined
    def copy_tile_block(s_stage: Any, g_kv: Any, kv_bytes: Any, g_kr: Any, kr_bytes: Any, first: Any, keys: Any) -> None:
        copy_keys_block(s_stage, g_kv, kv_bytes, first, keys)
        copy_shared_block(s_stage, g_kr, kr_bytes, first, keys)
        copy_values_block(s_stage + KEY_BYTES, g_kv + 2 * NOPE, kv_bytes, first, keys)

    @kernel(
        f"mla_attend_{NOPE}_{SHARED}_{VALUE}_kernel",
        u32p, i64, i64, f32p, u32p, f32p, i64, i64, i64, i64, i64, i64, i64, i64, i32, f32,
        block=(THREADS, 1, 1),
        tensor_cores=True,
    )  # fmt: skip
    def mla_attend_kernel(
        g_q: Any, g_kv: Any, g_kr: Any, g_out: Any, g_out_pairs: Any, g_lse: Any,
        queries: Any, keys: Any, heads: Any, q_row: Any, kv_row: Any, kr_row: Any, out_row: Any,
        q_start: Any, how: Any, scale: Any,
    ) -> None:  # fmt: skip
        """One block: QUERIES queries of one head against every key they see. See mla_attend; rows are in values.

        how: bit 0 causal, bit 1 out is bf16 (pairs in g_out_pairs) and not f32 (g_out)
        """
        s_tiles = shared_address(cuda.shared.array(0, uint32))
        lane = cuda.threadIdx.x & 31
        # Deep blocks first: under a causal mask they take longest.
        first = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * QUERIES
        head = cuda.blockIdx.y
        causal = how & 1
        row_first = first + (cuda.threadIdx.x >> 5) * 16
        row = row_first + (lane >> 2)
        end = keys
        if causal:
            end = max(min(keys, q_start + min(first + QUERIES, queries)), 0)
        g_head = g_kv + head * (2 * (NOPE + VALUE))
        if end > 0:
            copy_tile_block(s_tiles, g_head, 2 * kv_row, g_kr, 2 * kr_row, 0, keys)
        cp_async_commit()

        t_query = cuda.local.array(QUERY_WORDS, uint32)
        column = head * (NOPE + SHARED) + 2 * (lane & 3)
        for k in range(STEPS):
            query_pair_thread(
                g_q,
                min(row, queries - 1) * q_row >> 1,
                min(row + 8, queries - 1) * q_row >> 1,
                (column >> 1) + 8 * k,
                t_query,
                k,
            )
        t_scores = cuda.local.array(SCORES, float32)
        t_acc = cuda.local.array(SUMS, float32)
        t_top = cuda.local.array(2, float32)
        t_mass = cuda.local.array(2, float32)
        t_shrink = cuda.local.array(2, float32)
        for i in range(SUMS):
            t_acc[i] = ZERO
        for i in range(2):
            t_top[i] = EMPTY
            t_mass[i] = ZERO

        for i_tile in range((end + KEYS - 1) // KEYS):
            i_key = i_tile * KEYS
            s_stage = s_tiles + (i_tile & 1) * STAGE_BYTES
            cp_async_wait_all()
            # After this barrier the tile is there for all, and nobody reads the other stage any more.
            cuda.syncthreads()
            if i_key + KEYS < end:
                s_next = s_tiles + (1 - (i_tile & 1)) * STAGE_BYTES
                copy_tile_block(s_next, g_head, 2 * kv_row, g_kr, 2 * kr_row, i_key + KEYS, keys)
            cp_async_commit()
            scores_warp(t_query, s_stage, 0, t_scores)
            seen = keys - i_key
            if causal:
                seen = min(seen, q_start + row_first + 1 - i_key)
            if seen < KEYS:  # the first row of the warp does not see the whole tile: the diagonal, or the ragged end
                visible = keys - i_key
                visible_below = visible
                if causal:
                    visible = min(visible, q_start + row + 1 - i_key)
                    visible_below = min(visible_below, q_start + row + 9 - i_key)
                hide_thread(t_scores, visible, visible_below)
            soften_warp(t_scores, t_top, t_mass, t_shrink, scale)
            fold_warp(t_scores, s_stage + KEY_BYTES, t_shrink, t_acc)

        for i in range(2):
            mass = mass_quad(t_mass[i])
            t = row + 8 * i
            if t < queries:
                if lane & 3 == 0:
                    g_lse[t * heads + head] = lse_thread(t_top[i], mass, scale)
                # Divided, not multiplied by 1 / mass: a mean of equal values is that value.
                divisor = mass if mass != ZERO else float32(1.0)
                i_out = t * out_row + head * VALUE + 2 * (lane & 3)
                for n in range(VALUE // 8):
                    left = t_acc[4 * n + 2 * i] / divisor
                    right = t_acc[4 * n + 2 * i + 1] / divisor
                    if how & 2:
                        g_out_pairs[(i_out >> 1) + 4 * n] = cvt_bf16x2_f32(left, right)
                    else:
                        g_out[i_out + 8 * n] = left
                        g_out[i_out + 8 * n + 1] = right

    return mla_attend_kernel


ATTEND_TILES = {
    (tile.nope, tile.shared, tile.value): (tile, _attend(tile))
    for tile in (
        AttendTile(nope=128, shared=64, value=128, warps=8, keys=64),
        AttendTile(nope=32, shared=16, value=32, warps=4, keys=32),  # small models
    )
}
