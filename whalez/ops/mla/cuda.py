"""MLA on the GPU: attention over one window of keys on tensor cores, absorbed decode over pages, and their launches.

Rule 1: positions, rows and strides are 64-bit from the argument to the address.   Rule 2: a tile lies in shared memory
as rows of 16-byte pieces, piece c of row i at place c ^ (i & 7) of its group of eight, and only `_copy_rows`,
`_scores` and `_fold` know it.

How a warp of 32 lanes holds a tile of 16 queries (README.md, "On tensor cores"): lane 4 g + p has rows g and g + 8, and
of every group of eight columns the columns 2 p and 2 p + 1. Value 4 n + 2 i + j of a lane is row g + 8 i, column
8 n + 2 p + j. Scores in this form are, rounded to bf16, the first operand of the second product as they are.

Hot: yes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import libdevice
from numba.cuda.types import float32, int32, int64, uint32, uint64

from whalez.errors import ShapeError
from whalez.ops.device.kernel import Kernel, kernel
from whalez.ops.device.limits import GRID_YZ_MAX, require_addresses, require_blocks, require_multiples
from whalez.ops.device.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait_all,
    cvt_bf16_f32,
    cvt_bf16x2_f32,
    ex2_approx_f32,
    f32_from_bits,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_bf16,
    shared_address,
)
from whalez.ops.device.stream import Stream
from whalez.ops.device.types import SHARED_ALIGN, bf16p, f32, f32p, i32, i32p, i64, i64p, u32p
from whalez.ops.lse.cuda import lse_finalise, lse_merge

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
                cp_async_16(
                    uint32(s_tile + i_row * PITCH + place * 16), uint64(g_rows + row * row_bytes + i_piece * 16)
                )

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
        """`visible` keys of the tile for the lane's first row, `visible_below` for the one eight below; any integer."""
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
    def soften_row_quad(t_scores: Any, i: Any, t_top: Any, t_mass: Any, t_shrink: Any, unit: Any) -> None:
        top = t_top[i]
        for n in range(GROUPS):
            top = max(top, max(t_scores[4 * n + 2 * i], t_scores[4 * n + 2 * i + 1]))
        top = max(top, cuda.shfl_xor_sync(ALL_LANES, top, 1))
        top = max(top, cuda.shfl_xor_sync(ALL_LANES, top, 2))
        # A row that has seen nothing yet: -inf - 0 is -inf, where -inf - -inf would be NaN.
        base = ZERO if top == EMPTY else top
        # Difference first, product second: equal scores then give a weight of exactly one, which one fused multiply-add
        # with a rounded base would not.
        shrink = ex2_approx_f32((t_top[i] - base) * unit)
        total = ZERO
        for n in range(GROUPS):
            left = ex2_approx_f32((t_scores[4 * n + 2 * i] - base) * unit)
            right = ex2_approx_f32((t_scores[4 * n + 2 * i + 1] - base) * unit)
            t_scores[4 * n + 2 * i] = left
            t_scores[4 * n + 2 * i + 1] = right
            total += left + right
        t_mass[i] = t_mass[i] * shrink + total
        t_top[i] = top
        t_shrink[i] = shrink

    @_inlined
    def soften_warp(t_scores: Any, t_top: Any, t_mass: Any, t_shrink: Any, scale: Any) -> None:
        """Running maximum (raw score) and sum of the lane's two rows; the sum is the lane's own columns' until the end.
        t_shrink: factor for what was summed under the earlier maximum."""
        # Two calls, not a loop: a loop that a compiler leaves standing would put the scores into memory.
        soften_row_quad(t_scores, 0, t_top, t_mass, t_shrink, scale * LOG2_E)
        soften_row_quad(t_scores, 1, t_top, t_mass, t_shrink, scale * LOG2_E)

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
    """One step of the first operand, 16 rows x 16 columns, from global memory; rows and `pair` count pairs."""
    t_query[4 * k] = g_pairs[row + pair]
    t_query[4 * k + 1] = g_pairs[row_below + pair]
    t_query[4 * k + 2] = g_pairs[row + pair + 4]
    t_query[4 * k + 3] = g_pairs[row_below + pair + 4]


@_inlined
def low_f32(pair: Any) -> Any:
    return f32_from_bits(uint32(pair << 16))


@_inlined
def high_f32(pair: Any) -> Any:
    return f32_from_bits(uint32(pair & 0xFFFF0000))


@_inlined
def mass_quad(mass: Any) -> Any:
    """Sum over the four lanes that share a row."""
    mass += cuda.shfl_xor_sync(ALL_LANES, mass, 1)
    return mass + cuda.shfl_xor_sync(ALL_LANES, mass, 2)


@_inlined
def lse_thread(top: Any, mass: Any, scale: Any) -> Any:
    """Natural logarithm of the sum of exp(scale * score)."""
    return EMPTY if mass == ZERO else top * scale + libdevice.logf(mass)


@_inlined
def quotient_thread(sum_: Any, divisor: Any, inverse: Any) -> Any:
    """sum_ / divisor with one division a row and the same bits: what the product is off by is exact in one fused
    multiply-add, and a second one adds it. The product alone would make a mean of equal values another value."""
    quotient = sum_ * inverse
    return libdevice.fmaf(libdevice.fmaf(-quotient, divisor, sum_), inverse, quotient)


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
    def copy_tile_block(
        s_stage: Any, g_kv: Any, kv_bytes: Any, g_kr: Any, kr_bytes: Any, first: Any, keys: Any
    ) -> None:
        copy_keys_block(s_stage, g_kv, kv_bytes, first, keys)
        copy_shared_block(s_stage, g_kr, kr_bytes, first, keys)
        copy_values_block(s_stage + KEY_BYTES, g_kv + 2 * NOPE, kv_bytes, first, keys)

    @kernel(
        f"mla_attend_{NOPE}_{SHARED}_{VALUE}_kernel",
        u32p, i64, i64, f32p, u32p, f32p, i64, i64, i64, i64, i64, i64, i64, i64, i32, f32,
        block=THREADS,
        tensor_cores=True,
        shared_bytes=tile.shared_bytes,
    )  # fmt: skip
    def mla_attend_kernel(
        g_q: Any, g_kv: Any, g_kr: Any, g_out: Any, g_out_pairs: Any, g_lse: Any,
        queries: Any, keys: Any, heads: Any, q_row: Any, kv_row: Any, kr_row: Any, out_row: Any,
        q_start: Any, how: Any, scale: Any,
    ) -> None:  # fmt: skip
        """One block: QUERIES queries of one head against every key they see. See mla_attend; rows are in values.

        how: bit 0 causal, bit 1 out is bf16 (pairs in g_out_pairs) and not f32 (g_out)
        """
        s_tiles = shared_address(cuda.shared.array(0, uint32, alignment=SHARED_ALIGN))
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
                divisor = mass if mass != ZERO else float32(1.0)
                inverse = float32(1.0) / divisor
                i_out = t * out_row + head * VALUE + 2 * (lane & 3)
                for n in range(VALUE // 8):
                    left = quotient_thread(t_acc[4 * n + 2 * i], divisor, inverse)
                    right = quotient_thread(t_acc[4 * n + 2 * i + 1], divisor, inverse)
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


# ---- decode ---------------------------------------------------------------------------------------------------------

RANK, RANK_SHARED = 512, 64  # latent and shared key columns of a cached row
LATENT = RANK + RANK_SHARED
DECODE_THREADS = 256
DECODE_HEADS = 32  # of one block: two groups of 16 heads, four warps each
DECODE_KEYS = 32  # of one tile
LATENT_PITCH = _pitch(LATENT)
LATENT_BYTES = DECODE_KEYS * LATENT_PITCH
PARTS = 4  # warps that share 16 heads: each multiplies a quarter of the columns, and owns a quarter of the output
PART_STEPS = LATENT // 16 // PARTS
PART_WORDS = 4 * PART_STEPS
PART_COLUMNS = RANK // PARTS
PART_SUMS = PART_COLUMNS // 2
PART_SCORES = DECODE_KEYS // 2
EXCHANGE_FIRST = 2 * LATENT_BYTES // 4  # in words: behind the two stages
DECODE_SHARED_BYTES = 2 * LATENT_BYTES + DECODE_THREADS * PART_SCORES * 4
ROW_LANES = DECODE_THREADS // DECODE_KEYS  # threads that copy one row together
ROW_ROUNDS = LATENT // 8 // ROW_LANES

scores_warp = _scores(DECODE_KEYS, PART_STEPS, LATENT_PITCH)
hide_thread = _hide(DECODE_KEYS)
soften_warp = _soften(DECODE_KEYS)
fold_warp = _fold(DECODE_KEYS, PART_COLUMNS, LATENT_PITCH)


@_inlined
def copy_latent_block(
    s_stage: Any, g_pool: Any, g_pages: Any, page_first: Any, page_tokens: Any, first: Any, end: Any
) -> None:
    """Start the copy of latent rows first..first+DECODE_KEYS of one sequence; a row behind `end` is the last row again.

    The sequence's page i is g_pages[page_first + i]; its length is below 2^32, so a row's page is a 32-bit division.
    """
    i_row = cuda.threadIdx.x // ROW_LANES
    i_lane = cuda.threadIdx.x % ROW_LANES
    token = uint32(min(first + i_row, end - 1))
    i_page = token // uint32(page_tokens)
    i_token = token % uint32(page_tokens)
    g_row = g_pool + (int64(g_pages[page_first + int64(i_page)]) * page_tokens + int64(i_token)) * (2 * LATENT)
    for i in range(ROW_ROUNDS):
        piece = i_lane + i * ROW_LANES
        place = piece ^ (i_row & 7)
        cp_async_16(uint32(s_stage + i_row * LATENT_PITCH + place * 16), uint64(g_row + piece * 16))


@kernel(
    "mla_decode_split_kernel",
    u32p, i64, i32p, i64p, f32p, f32p, i64, i64, i64, f32,
    block=DECODE_THREADS,
    tensor_cores=True,
    shared_bytes=DECODE_SHARED_BYTES,
)  # fmt: skip
def mla_decode_split_kernel(
    g_q: Any, g_pool: Any, g_pages: Any, g_lengths: Any, g_part: Any, g_part_lse: Any,
    heads: Any, pages_row: Any, page_tokens: Any, scale: Any,
) -> None:  # fmt: skip
    """One block: DECODE_HEADS heads of one request against one of gridDim.y shares of its latent rows.

    g_q bf16 [B, H, L] (in pairs), g_part f32 [B, shares, H, R], g_part_lse f32 [B, shares, H]; -inf: no part is written

    Four warps hold the same 16 heads. Each multiplies its quarter of the columns with all keys of the tile; through
    s_words they add the quarters up, in one order, so that all four hold the same scores and soften them alike. Then
    each folds its own quarter of the output columns.
    """
    s_words = cuda.shared.array(0, float32, alignment=SHARED_ALIGN)
    s_tiles = shared_address(s_words)
    lane = cuda.threadIdx.x & 31
    warp = cuda.threadIdx.x >> 5
    part = warp % PARTS
    shares = cuda.gridDim.y
    head = cuda.blockIdx.x * DECODE_HEADS + (warp // PARTS) * 16 + (lane >> 2)
    i_result = (int64(cuda.blockIdx.z) * shares + cuda.blockIdx.y) * heads
    length = g_lengths[cuda.blockIdx.z]
    page_first = cuda.blockIdx.z * pages_row
    share_tiles = ((length + DECODE_KEYS - 1) // DECODE_KEYS + shares - 1) // shares
    first = cuda.blockIdx.y * share_tiles * DECODE_KEYS
    end = min(length, first + share_tiles * DECODE_KEYS)
    if first < end:
        copy_latent_block(s_tiles, g_pool, g_pages, page_first, page_tokens, first, end)
    cp_async_commit()

    t_query = cuda.local.array(PART_WORDS, uint32)
    row = (cuda.blockIdx.z * heads + min(head, heads - 1)) * (LATENT // 2)
    row_below = (cuda.blockIdx.z * heads + min(head + 8, heads - 1)) * (LATENT // 2)
    for k in range(PART_STEPS):
        query_pair_thread(g_q, row, row_below, (part * PART_STEPS + k) * 8 + (lane & 3), t_query, k)
    t_scores = cuda.local.array(PART_SCORES, float32)
    t_acc = cuda.local.array(PART_SUMS, float32)
    t_top = cuda.local.array(2, float32)
    t_mass = cuda.local.array(2, float32)
    t_shrink = cuda.local.array(2, float32)
    for i in range(PART_SUMS):
        t_acc[i] = ZERO
    for i in range(2):
        t_top[i] = EMPTY
        t_mass[i] = ZERO

    tiles = (end - first + DECODE_KEYS - 1) // DECODE_KEYS
    for i_tile in range(tiles):
        i_key = first + i_tile * DECODE_KEYS
        s_stage = s_tiles + (i_tile & 1) * LATENT_BYTES
        cp_async_wait_all()
        # After this barrier the tile is there for all, and nobody reads the other stage or the exchange any more.
        cuda.syncthreads()
        if i_tile + 1 < tiles:
            s_next = s_tiles + (1 - (i_tile & 1)) * LATENT_BYTES
            copy_latent_block(s_next, g_pool, g_pages, page_first, page_tokens, i_key + DECODE_KEYS, end)
        cp_async_commit()
        scores_warp(t_query, s_stage, part * PART_STEPS, t_scores)
        i_mine = EXCHANGE_FIRST + warp * (PART_SCORES * 32) + lane
        for i in range(PART_SCORES):
            s_words[i_mine + 32 * i] = t_scores[i]
        cuda.syncthreads()
        i_group = EXCHANGE_FIRST + (warp - part) * (PART_SCORES * 32) + lane
        for i in range(PART_SCORES):
            score = s_words[i_group + 32 * i]
            for j in range(1, PARTS):
                score += s_words[i_group + 32 * i + j * (PART_SCORES * 32)]
            t_scores[i] = score
        if end - i_key < DECODE_KEYS:
            hide_thread(t_scores, end - i_key, end - i_key)
        soften_warp(t_scores, t_top, t_mass, t_shrink, scale)
        fold_warp(t_scores, s_stage + part * (2 * PART_COLUMNS), t_shrink, t_acc)

    for i in range(2):
        mass = mass_quad(t_mass[i])
        if head + 8 * i < heads:
            if part == 0 and lane & 3 == 0:
                g_part_lse[i_result + head + 8 * i] = lse_thread(t_top[i], mass, scale)
            if mass != ZERO:
                i_part = (i_result + head + 8 * i) * RANK + part * PART_COLUMNS + 2 * (lane & 3)
                for n in range(PART_COLUMNS // 8):
                    g_part[i_part + 8 * n] = t_acc[4 * n + 2 * i] / mass
                    g_part[i_part + 8 * n + 1] = t_acc[4 * n + 2 * i + 1] / mass


@kernel("mla_decode_merge_kernel", f32p, f32p, u32p, i64, i64, block=RANK // 2)
def mla_decode_merge_kernel(g_part: Any, g_part_lse: Any, g_mean: Any, heads: Any, shares: Any) -> None:
    """One block: one head of one request. g_mean bf16 [B, H, R] (in pairs) <- the shares weighted by exp(lse); 0 if all
    are empty, whose parts are not read."""
    head, request = cuda.blockIdx.x, cuda.blockIdx.y
    top = EMPTY
    for j in range(shares):
        top = max(top, g_part_lse[(request * shares + j) * heads + head])
    left = ZERO
    right = ZERO
    mass = ZERO
    for j in range(shares):
        i_result = (request * shares + j) * heads + head
        lse = g_part_lse[i_result]
        if lse != EMPTY:
            weight = libdevice.expf(lse - top)
            i_part = i_result * RANK + 2 * cuda.threadIdx.x
            left += weight * g_part[i_part]
            right += weight * g_part[i_part + 1]
            mass += weight
    divisor = mass if mass != ZERO else float32(1.0)
    i_mean = (request * heads + head) * (RANK // 2) + cuda.threadIdx.x
    g_mean[i_mean] = cvt_bf16x2_f32(left / divisor, right / divisor)


GEMV_THREADS = 256


@kernel("mla_absorb_kernel", u32p, u32p, u32p, i64, i64, i64, i64, i64, block=GEMV_THREADS)
def mla_absorb_kernel(
    g_q: Any, g_w: Any, g_absorbed: Any, heads: Any, nope: Any, shared: Any, value: Any, rank: Any
) -> None:
    """One block: one head of one request. g_absorbed bf16 [B, H, R+r] <- [W_K^T q_n | q_r]; all arrays in pairs."""
    head, request = cuda.blockIdx.x, cuda.blockIdx.y
    i_q = (request * heads + head) * ((nope + shared) >> 1)
    i_w = head * (nope + value) * (rank >> 1)
    i_absorbed = (request * heads + head) * ((rank + shared) >> 1)
    for pair in range(cuda.threadIdx.x, rank >> 1, GEMV_THREADS):
        left = ZERO
        right = ZERO
        for j in range(nope >> 1):
            q = g_q[i_q + j]
            i_row = i_w + 2 * j * (rank >> 1) + pair
            w = g_w[i_row]
            left += low_f32(q) * low_f32(w)
            right += low_f32(q) * high_f32(w)
            w = g_w[i_row + (rank >> 1)]
            left += high_f32(q) * low_f32(w)
            right += high_f32(q) * high_f32(w)
        g_absorbed[i_absorbed + pair] = cvt_bf16x2_f32(left, right)
    for pair in range(cuda.threadIdx.x, shared >> 1, GEMV_THREADS):
        g_absorbed[i_absorbed + (rank >> 1) + pair] = g_q[i_q + (nope >> 1) + pair]


@kernel("mla_project_kernel", u32p, u32p, bf16p, i64, i64, i64, i64, block=GEMV_THREADS)
def mla_project_kernel(g_mean: Any, g_w: Any, g_out: Any, heads: Any, nope: Any, value: Any, rank: Any) -> None:
    """One block: one head of one request; one warp a row. g_out bf16 [B, H, v] <- W_V mean; g_mean and g_w in pairs."""
    head, request = cuda.blockIdx.x, cuda.blockIdx.y
    lane = cuda.threadIdx.x & 31
    i_mean = (request * heads + head) * (rank >> 1)
    for i in range(cuda.threadIdx.x >> 5, value, GEMV_THREADS // 32):
        i_row = (head * (nope + value) + nope + i) * (rank >> 1)
        total = ZERO
        for pair in range(lane, rank >> 1, 32):
            mean = g_mean[i_mean + pair]
            w = g_w[i_row + pair]
            total += low_f32(mean) * low_f32(w)
            total += high_f32(mean) * high_f32(w)
        for step in range(5):
            total += cuda.shfl_xor_sync(ALL_LANES, total, 1 << step)
        if lane == 0:
            g_out[(request * heads + head) * value + i] = cvt_bf16_f32(total)


# ---- the ops: launches ----------------------------------------------------------------------------------------------


def _require_attend(queries: int, keys: int, heads: int, dims: tuple[int, int, int], scale: float) -> None:
    if dims not in ATTEND_TILES:
        raise ShapeError(f"dims: expected one of {sorted(ATTEND_TILES)}, got {dims}")
    if queries < 0 or keys < 0 or not 0 < heads <= GRID_YZ_MAX:
        raise ShapeError(f"queries, keys, heads: expected >= 0, >= 0, 1..{GRID_YZ_MAX}, got {queries}, {keys}, {heads}")
    if not scale > 0:
        raise ShapeError(f"scale: expected a positive number, got {scale}")


def mla_attend(
    stream: Stream,
    q: int,
    kv: int,
    kr: int,
    out: int,
    lse: int,
    *,
    queries: int,
    keys: int,
    heads: int,
    dims: tuple[int, int, int],
    q_start: int,
    causal: bool,
    scale: float,
    out_bf16: bool = False,
    q_row: int = 0,
    kv_row: int = 0,
    kr_row: int = 0,
    out_row: int = 0,
) -> None:
    """out = softmax(scale * (q_n . k + q_r . kr)) v over one window of keys; lse = log of the sum of exp(scores).

    Args:
        q:        bf16 [T, H, n+r]  address, a multiple of 4
        kv:       bf16 [S, H, n+v]  address, a multiple of 16: per head n key values, then v values of V
        kr:       bf16 [S, r]       address, a multiple of 16: key part shared by all heads (columns R: of latent rows)
        out:      f32 or bf16 (out_bf16) [T, H, v]  address
        lse:      f32 [T, H]        address; natural log; -inf marks a row that sees no key (its out is 0)
        queries, keys, heads: T, S, H, any
        dims:     (n, r, v), one of ATTEND_TILES
        q_start:  position of q[0] minus position of kv[0]; query t sees the keys s <= q_start + t. May be negative.
        causal:   False lets every query see the whole window, q_start is then not used
        scale:    multiplies the scores, positive
        ..._row:  values from row to row of that array, 0 for contiguous; even (q, out), a multiple of 8 (kv, kr)
    Writes:   out and lse, all rows
    Cost:     2 * H * (n+r+v) FLOP per visible (query, key) pair; reads K and V once per 128 queries
    Raises:   ShapeError before any launch
    """
    _require_attend(queries, keys, heads, dims, scale)
    nope, shared, value = dims
    q_row, kv_row = q_row or heads * (nope + shared), kv_row or heads * (nope + value)
    kr_row, out_row = kr_row or shared, out_row or heads * value
    require_multiples("row", ("q_row", q_row, 2), ("kv_row", kv_row, 8), ("kr_row", kr_row, 8), ("out_row", out_row, 2))
    require_addresses(q=(q, 4), kv=(kv, 16), kr=(kr, 16), out=(out, 4), lse=(lse, 4))
    if not queries:
        return
    tile, attend_kernel = ATTEND_TILES[dims]
    stream.launch(
        attend_kernel, (-(-queries // tile.queries), heads, 1), 32 * tile.warps, tile.shared_bytes,
        q, kv, kr, out, out, lse, queries, keys, heads, q_row, kv_row, kr_row, out_row, q_start,
        int(causal) + 2 * int(out_bf16), scale,
    )  # fmt: skip


@dataclass(frozen=True)
class Window:
    """What one call of mla_attend reads of the context: addresses and rows as there."""

    kv: int
    kr: int
    kv_row: int = 0
    kr_row: int = 0


def mla_attend_context(
    stream: Stream,
    read: Callable[[int, int], Window],
    q: int,
    out: int,
    lse: int,
    acc: int,
    part: int,
    part_lse: int,
    *,
    queries: int,
    start: int,
    window: int,
    heads: int,
    dims: tuple[int, int, int],
    scale: float,
) -> None:
    """Attention of T queries at positions start..start+T-1 over their whole context, at most `window` rows at a time.

    A context that fits in one window takes one causal call. A deeper one opens with the causal square of the span
    itself and walks the past in dense windows; partial results meet in f32 by their natural log-sum-exp. A span longer
    than a window is cut, and is then its own past too.

    Args:
        read:      read(first, count) enqueues the expansion of context rows first..first+count on the same stream and
                   says where they will lie; the space may be the same every time, as the stream keeps the order
        q:         bf16 [T, H, n+r]  address
        out:       bf16 [T, H, v]    address
        lse:       f32 [T, H]        address; of the whole context
        acc, part: f32 [T, H, v], part_lse f32 [T, H]: scratch, not used if start + T <= window (may be 0 then)
        others:    as mla_attend
    Writes:   out and lse, all rows
    Raises:   ShapeError before any launch
    """
    if window < 1 or start < 0:
        raise ShapeError(f"window, start: expected >= 1, >= 0, got {window}, {start}")
    _require_attend(queries, start + queries, heads, dims, scale)
    require_addresses(q=(q, 4), out=(out, 4), lse=(lse, 4), acc=(acc, 4), part=(part, 4), part_lse=(part_lse, 4))
    how: dict[str, Any] = {"heads": heads, "dims": dims, "scale": scale}
    if start + queries <= window:
        w = read(0, start + queries)
        mla_attend(
            stream, q, w.kv, w.kr, out, lse, queries=queries, keys=start + queries, q_start=start, causal=True,
            out_bf16=True, kv_row=w.kv_row, kr_row=w.kr_row, **how,
        )  # fmt: skip
        return
    nope, shared, value = dims
    row = heads * value
    for first in range(0, queries, window):
        count, own = min(window, queries - first), start + first
        tile_q, tile_lse = q + 2 * first * heads * (nope + shared), lse + 4 * first * heads
        tile_acc = acc + 4 * first * row
        w = read(own, count)
        mla_attend(
            stream, tile_q, w.kv, w.kr, tile_acc, tile_lse, queries=count, keys=count, q_start=0, causal=True,
            kv_row=w.kv_row, kr_row=w.kr_row, **how,
        )  # fmt: skip
        for past in range(0, own, window):
            depth = min(window, own - past)
            w = read(past, depth)
            mla_attend(
                stream, tile_q, w.kv, w.kr, part, part_lse, queries=count, keys=depth, q_start=0, causal=False,
                kv_row=w.kv_row, kr_row=w.kr_row, **how,
            )  # fmt: skip
            lse_merge(
                stream, tile_acc, row, tile_lse, part, row, part_lse, count, heads, value, part_is_bf16=False
            )  # fmt: skip
    lse_finalise(stream, acc, row, lse, out, row, queries, heads, value)


def mla_decode_shares(requests: int, heads: int, length_max: int, blocks: int) -> int:
    """Into how many shares to cut each sequence so that about `blocks` blocks run (two per multiprocessor, say)."""
    groups = max(1, requests * -(-heads // DECODE_HEADS))
    return max(1, min(-(-blocks // groups), -(-length_max // DECODE_KEYS), GRID_YZ_MAX))


def mla_decode_scratch_bytes(requests: int, heads: int, shares: int) -> int:
    """Of `scratch` of mla_decode and mla_decode_absorbed."""
    return sum(_decode_scratch(requests, heads, shares))


def _decode_scratch(requests: int, heads: int, shares: int) -> tuple[int, int, int, int]:
    """Bytes of part, part_lse, absorbed queries, absorbed results, in this order; each a multiple of 16."""
    rows = requests * heads
    return 4 * rows * shares * RANK, -(-4 * rows * shares // 16) * 16, 2 * rows * LATENT, 2 * rows * RANK


def mla_decode_absorbed(
    stream: Stream,
    q_absorbed: int,
    pool: int,
    pages: int,
    lengths: int,
    out: int,
    scratch: int,
    *,
    requests: int,
    heads: int,
    pages_row: int,
    page_tokens: int,
    shares: int,
    scale: float,
) -> None:
    """Attention of one new token per sequence over its paged latent rows: mean of the latent parts under the softmax.

    Args:
        q_absorbed: bf16 [B, H, R+r]     address, a multiple of 4; R = 512, r = 64
        pool:       bf16 [P, page, R+r]  address, a multiple of 16
        pages:      int32 [B, pages_row] address; page i of sequence b is pool[pages[b, i]]; entries behind its length
                    are not read
        lengths:    int64 [B]            address; rows visible, the new token's included (it is appended before), < 2^32
        out:        bf16 [B, H, R]       address, a multiple of 4; W_V is yet to be applied
        scratch:    mla_decode_scratch_bytes, address, a multiple of 16
        shares:     blocks that share a sequence (mla_decode_shares); fixed for a captured launch, whatever the lengths
        scale:      multiplies the scores, positive
    Writes:   out, all rows; a length of 0 gives 0
    Cost:     reads lengths * (R+r) * 2 bytes once per 32 heads
    Raises:   ShapeError before any launch
    """
    _require_decode(requests, heads, shares, page_tokens, scale)
    require_addresses(q_absorbed=(q_absorbed, 4), pool=(pool, 16), pages=(pages, 4), lengths=(lengths, 8))
    require_addresses(out=(out, 4), scratch=(scratch, 16))
    if not requests:
        return
    part_lse = scratch + _decode_scratch(requests, heads, shares)[0]
    stream.launch(
        mla_decode_split_kernel, (-(-heads // DECODE_HEADS), shares, requests), DECODE_THREADS, DECODE_SHARED_BYTES,
        q_absorbed, pool, pages, lengths, scratch, part_lse, heads, pages_row, page_tokens, scale,
    )  # fmt: skip
    stream.launch(mla_decode_merge_kernel, (heads, requests, 1), RANK // 2, 0, scratch, part_lse, out, heads, shares)


def _require_decode(requests: int, heads: int, shares: int, page_tokens: int, scale: float) -> None:
    if not 0 <= requests <= GRID_YZ_MAX or heads < 1 or not 0 < shares <= GRID_YZ_MAX:
        limits = f"0..{GRID_YZ_MAX}, >= 1, 1..{GRID_YZ_MAX}"
        raise ShapeError(f"requests, heads, shares: expected {limits}, got {requests}, {heads}, {shares}")
    if page_tokens < 1 or not scale > 0:
        raise ShapeError(f"page_tokens, scale: expected >= 1, > 0, got {page_tokens}, {scale}")


def mla_absorb(
    stream: Stream, q: int, w_kv_b: int, q_absorbed: int, *, requests: int, heads: int, dims: tuple[int, int, int]
) -> None:
    """q_absorbed[b, h] = [W_K^T q_n | q_r], the query in the space of latent rows.

    Args:
        q:          bf16 [B, H, n+r]          address, a multiple of 4, as all here
        w_kv_b:     bf16 [H*(n+v), R]         address; head-major, per head n key rows, then v value rows
        q_absorbed: bf16 [B, H, R+r]          address
        dims:       (n, r, v)
    Writes:   q_absorbed, all rows
    Cost:     reads the key half of w_kv_b once per request; a GEMM per head is cheaper from a few requests on
    Raises:   ShapeError before any launch
    """
    nope, shared, value = dims
    require_multiples("dim", ("nope", nope, 2), ("shared", shared, 2), ("value", value, 2))
    require_addresses(q=(q, 4), w_kv_b=(w_kv_b, 4), q_absorbed=(q_absorbed, 4))
    if requests:
        require_blocks("requests", requests)
        stream.launch(
            mla_absorb_kernel, (heads, requests, 1), GEMV_THREADS, 0,
            q, w_kv_b, q_absorbed, heads, nope, shared, value, RANK,
        )  # fmt: skip


def mla_project(
    stream: Stream, mean: int, w_kv_b: int, out: int, *, requests: int, heads: int, dims: tuple[int, int, int]
) -> None:
    """out[b, h] = W_V mean[b, h]: bf16 [B, H, R] -> bf16 [B, H, v]. Arguments as mla_absorb."""
    nope, _, value = dims
    require_multiples("dim", ("nope", nope, 2), ("value", value, 2))
    require_addresses(mean=(mean, 4), w_kv_b=(w_kv_b, 4), out=(out, 2))
    if requests:
        require_blocks("requests", requests)
        stream.launch(
            mla_project_kernel, (heads, requests, 1), GEMV_THREADS, 0, mean, w_kv_b, out, heads, nope, value, RANK
        )


def mla_decode(
    stream: Stream,
    q: int,
    w_kv_b: int,
    pool: int,
    pages: int,
    lengths: int,
    out: int,
    scratch: int,
    *,
    requests: int,
    heads: int,
    dims: tuple[int, int, int],
    pages_row: int,
    page_tokens: int,
    shares: int,
    scale: float,
) -> None:
    """The host's mla_decode: absorb, attend to the latent rows, project. Arguments as those three.

    q bf16 [B, H, n+r], out bf16 [B, H, v]; n and v free but even, R = 512, r = 64
    """
    _require_decode(requests, heads, shares, page_tokens, scale)
    require_addresses(q=(q, 4), w_kv_b=(w_kv_b, 4), pool=(pool, 16), pages=(pages, 4), lengths=(lengths, 8))
    require_addresses(out=(out, 2), scratch=(scratch, 16))
    if dims[1] != RANK_SHARED or dims[0] % 2 or dims[2] % 2:
        raise ShapeError(f"dims: expected (even, {RANK_SHARED}, even), got {dims}")
    part, part_lse, absorbed, _ = _decode_scratch(requests, heads, shares)
    q_absorbed = scratch + part + part_lse
    mean = q_absorbed + absorbed
    mla_absorb(stream, q, w_kv_b, q_absorbed, requests=requests, heads=heads, dims=dims)
    mla_decode_absorbed(
        stream, q_absorbed, pool, pages, lengths, mean, scratch, requests=requests, heads=heads,
        pages_row=pages_row, page_tokens=page_tokens, shares=shares, scale=scale,
    )  # fmt: skip
    mla_project(stream, mean, w_kv_b, out, requests=requests, heads=heads, dims=dims)
