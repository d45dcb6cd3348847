"""MLA on the CPU: one GEMM to expand, blocked attention through BLAS, absorbed decode over pages.

Hot: yes, `python bench/ops_mla.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import boolean, float32, int32, int64, njit, void

from whalez.ops.checks import NDArray, reads, require, require_that, writes
from whalez.ops.fastmath import exp_f32

_f32 = np.float32
_TILE = 1024  # queries for which one block of keys is copied and reused
_QUERIES = 128  # queries and keys of one score block: with its K and V it stays in a core's L2 cache
_KEYS = 256


# A reduction runs in vector lanes only if its order may change and a NaN need not win the comparison; a NaN score still
# reaches the sum through the exponential.
@njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _row_max(row: Any, count: Any, top: Any) -> Any:
    for j in range(count):
        top = row[j] if row[j] > top else top
    return top


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _row_exp(row: Any, count: Any, top: Any) -> Any:
    """row[:count] <- exp(row - top); returns their sum."""
    total = _f32(0.0)
    for j in range(count):
        row[j] = exp_f32(row[j] - top)
        total += row[j]
    return total


@njit(cache=True, nogil=True)
def _soften(scores: Any, visible_first: Any, top: Any, mass: Any, shrink: Any) -> None:
    """Turn one block of scores into weights relative to each row's running maximum.

    Args:
        scores:         f32 [Q, S]  in/out
        visible_first:  keys that row 0 sees (<= 0: none); each next row sees one more
        top, mass:      f32 [Q]     in/out, running maximum and sum of weights
        shrink:         f32 [Q]     out, factor for what was summed under the earlier maximum
    """
    keys = scores.shape[1]
    for i in range(scores.shape[0]):
        row = scores[i]
        seen = min(keys, visible_first + i)
        if seen <= 0:
            row[:] = _f32(0.0)
            shrink[i] = _f32(1.0)
            continue
        higher = _row_max(row, seen, top[i])
        shrink[i] = _f32(0.0) if top[i] == -np.inf else exp_f32(top[i] - higher)
        mass[i] = mass[i] * shrink[i] + _row_exp(row, seen, higher)
        top[i] = higher
        row[seen:] = _f32(0.0)


@njit(cache=True, nogil=True)
def _fold(acc: Any, part: Any, shrink: Any) -> None:
    for i in range(part.shape[0]):
        factor = shrink[i]
        for j in range(part.shape[1]):
            acc[i, j] = acc[i, j] * factor + part[i, j]


@njit(
    void(
        reads(float32, 3),
        reads(float32, 3, "A"),
        reads(float32, 2, "A"),
        int64,
        boolean,
        float32,
        writes(float32, 3),
        writes(float32, 2),
    ),
    cache=True,
    nogil=True,
)
def _attend(q: Any, kv: Any, kr: Any, q_start: Any, causal: Any, scale: Any, out: Any, lse: Any) -> None:
    queries, heads, key_width = q.shape
    keys_total, shared = kr.shape
    value_width = out.shape[2]
    nope = key_width - shared
    tile = min(queries, _TILE)
    block = min(keys_total, _KEYS)
    q_tile = np.empty((tile, key_width), _f32)
    acc = np.empty((tile, value_width), _f32)
    top = np.empty(tile, _f32)
    mass = np.empty(tile, _f32)
    shrink = np.empty(tile, _f32)
    key_block = np.empty((block, key_width), _f32)
    value_block = np.empty((block, value_width), _f32)
    score_space = np.empty(_QUERIES * block, _f32)
    part_space = np.empty((_QUERIES, value_width), _f32)
    for h in range(heads):
        for tile_first in range(0, queries, tile):
            rows = min(tile, queries - tile_first)
            for i in range(rows):
                for j in range(key_width):
                    q_tile[i, j] = q[tile_first + i, h, j] * scale
            acc[:rows] = _f32(0.0)
            mass[:rows] = _f32(0.0)
            top[:rows] = -np.inf
            # Keys behind the last query of the tile are seen by none of its rows.
            limit = min(keys_total, q_start + tile_first + rows) if causal else keys_total
            for k in range(0, limit, block):
                keys = min(block, keys_total - k)
                for i in range(keys):
                    for j in range(nope):
                        key_block[i, j] = kv[k + i, h, j]
                    for j in range(shared):
                        key_block[i, nope + j] = kr[k + i, j]
                    for j in range(value_width):
                        value_block[i, j] = kv[k + i, h, nope + j]
                for b in range(0, rows, _QUERIES):
                    e = min(rows, b + _QUERIES)
                    visible_first = q_start + tile_first + b - k + 1 if causal else keys
                    if visible_first + (e - b) - 1 <= 0:
                        continue
                    scores = score_space[: (e - b) * keys].reshape(e - b, keys)
                    part = part_space[: e - b]
                    np.dot(q_tile[b:e], key_block[:keys].T, scores)
                    _soften(scores, visible_first, top[b:e], mass[b:e], shrink[b:e])
                    np.dot(scores, value_block[:keys], part)
                    _fold(acc[b:e], part, shrink[b:e])
            for i in range(rows):
                t = tile_first + i
                if mass[i] == _f32(0.0):
                    out[t, h, :] = _f32(0.0)
                    lse[t, h] = -np.inf
                else:
                    # Divided, not multiplied by 1 / mass: a mean of equal values is that value.
                    for j in range(value_width):
                        out[t, h, j] = acc[i, j] / mass[i]
                    lse[t, h] = top[i] + math.log(mass[i])


@njit(
    void(
        reads(float32, 3),
        reads(float32, 2),
        reads(float32, 3),
        reads(int32, 2),
        reads(int64, 1),
        float32,
        writes(float32, 3),
    ),
    cache=True,
    nogil=True,
)
def _decode(q: Any, w_kv_b: Any, pool: Any, pages: Any, lengths: Any, scale: Any, out: Any) -> None:
    requests, heads, key_width = q.shape
    value_width = out.shape[2]
    page_tokens, latent_width = pool.shape[1:]
    rank = w_kv_b.shape[1]
    shared = latent_width - rank
    nope = key_width - shared
    per_head = nope + value_width
    absorbed = np.empty((requests, heads, latent_width), _f32)
    mean = np.empty((heads, requests, latent_width), _f32)
    head_q = np.empty((requests, nope), _f32)
    head_absorbed = np.empty((requests, rank), _f32)
    # All requests go through one head's matrix together, so the weights are read once a step.
    for h in range(heads):
        for b in range(requests):
            for j in range(nope):
                head_q[b, j] = q[b, h, j] * scale
            for j in range(shared):
                absorbed[b, h, rank + j] = q[b, h, nope + j] * scale
        np.dot(head_q, w_kv_b[h * per_head : h * per_head + nope], head_absorbed)
        for b in range(requests):
            absorbed[b, h, :rank] = head_absorbed[b]
    score_space = np.empty(heads * page_tokens, _f32)
    acc = np.empty((heads, latent_width), _f32)
    part = np.empty((heads, latent_width), _f32)
    top = np.empty(heads, _f32)
    mass = np.empty(heads, _f32)
    shrink = np.empty(heads, _f32)
    for b in range(requests):
        acc[:] = _f32(0.0)
        top[:] = -np.inf
        mass[:] = _f32(0.0)
        length = lengths[b]
        for p in range((length + page_tokens - 1) // page_tokens):
            keys = min(page_tokens, length - p * page_tokens)
            rows = pool[pages[b, p]][:keys]
            scores = score_space[: heads * keys].reshape(heads, keys)
            np.dot(absorbed[b], rows.T, scores)
            for h in range(heads):
                higher = _row_max(scores[h], keys, top[h])
                shrink[h] = _f32(0.0) if top[h] == -np.inf else exp_f32(top[h] - higher)
                mass[h] = mass[h] * shrink[h] + _row_exp(scores[h], keys, higher)
                top[h] = higher
            # The r shared columns are summed too and never read: a contiguous operand is worth more than they cost.
            np.dot(scores, rows, part)
            _fold(acc, part, shrink)
        for h in range(heads):
            for j in range(latent_width):
                mean[h, b, j] = acc[h, j] / mass[h] if mass[h] > _f32(0.0) or mass[h] != mass[h] else _f32(0.0)
    head_mean = np.empty((requests, rank), _f32)
    head_out = np.empty((requests, value_width), _f32)
    for h in range(heads):
        head_mean[:] = mean[h, :, :rank]
        np.dot(head_mean, w_kv_b[h * per_head + nope : (h + 1) * per_head].T, head_out)
        for b in range(requests):
            out[b, h, :] = head_out[b]


def mla_expand(latent: NDArray, w_kv_b: NDArray, kv: NDArray) -> None:
    """kv[s, h] = the key part (n values) and the value (v values) of head h: w_kv_b times the latent part of row s.

    Args:
        latent:  f32 [S, L]          last axis stride 1; the first R columns are used (rows may be [R | r])
        w_kv_b:  f32 [H*(n+v), R]    head-major, per head n key rows, then v value rows
        kv:      f32 [S, H, n+v]
    Writes:   kv, all rows
    Raises:   ShapeError before any kernel runs
    """
    require("w_kv_b", w_kv_b, _f32, (-1, -1))
    require("kv", kv, _f32, (-1, -1, -1))
    require("latent", latent, _f32, (kv.shape[0], -1), rows_strided=True)
    width, rank = w_kv_b.shape
    require_that(latent.shape[1] >= rank, f"latent: expected at least {rank} columns, got {latent.shape[1]}")
    require_that(kv.shape[1] * kv.shape[2] == width, f"kv: expected {width} values a row, got {kv.shape[1:]}")
    np.matmul(latent[:, :rank], w_kv_b.T, out=kv.reshape(kv.shape[0], width))


def mla_attend(
    q: NDArray,
    kv: NDArray,
    kr: NDArray,
    q_start: int,
    causal: bool,
    scale: float,
    out: NDArray,
    lse: NDArray,
) -> None:
    """out = softmax(scale * (q_n . k + q_r . kr)) v over one window of keys; lse = log of the sum of exp(scores).

    Args:
        q:        f32 [T, H, n+r]
        kv:       f32 [S, H, n+v]  last axis stride 1, other strides free: per head n key values, then v values of V
        kr:       f32 [S, r]       last axis stride 1: key part shared by all heads (columns R: of the latent rows)
        q_start:  position of q[0] minus position of kv[0]; query t sees the keys s <= q_start + t. May be negative.
        causal:   False lets every query see the whole window, q_start is then not used
        scale:    multiplies the scores
        out:      f32 [T, H, v]
        lse:      f32 [T, H]       natural log; -inf marks a row that sees no key (its out is 0)
    Writes:   out and lse, all rows
    Cost:     2 * H * (n+r+v) FLOP per visible (query, key) pair
    Raises:   ShapeError before any kernel runs
    """
    require("q", q, _f32, (-1, -1, -1))
    queries, heads, key_width = q.shape
    require("kr", kr, _f32, (-1, -1), rows_strided=True)
    require("kv", kv, _f32, (kr.shape[0], heads, -1), rows_strided=True)
    require("out", out, _f32, (queries, heads, -1))
    require("lse", lse, _f32, (queries, heads))
    nope = key_width - kr.shape[1]
    require_that(
        nope >= 0 and kv.shape[2] == nope + out.shape[2],
        f"kv: expected {nope} key + {out.shape[2]} value columns a head, got {kv.shape[2]}",
    )
    _attend(q, kv, kr, q_start, causal, _f32(scale), out, lse)


def mla_decode(
    q: NDArray,
    w_kv_b: NDArray,
    pool: NDArray,
    pages: NDArray,
    lengths: NDArray,
    scale: float,
    out: NDArray,
) -> None:
    """Attention of one new token per sequence over its paged latent rows, absorbed: keys and values are never expanded.

    Args:
        q:        f32 [B, H, n+r]
        w_kv_b:   f32 [H*(n+v), R]
        pool:     f32 [P, page, L]  L = R + r
        pages:    int32 [B, n]      page i of sequence b is pool[pages[b, i]]; entries beyond the length are not read
        lengths:  int64 [B]         rows visible, the new token's included (it is appended before)
        scale:    multiplies the scores
        out:      f32 [B, H, v]
    Writes:   out, all rows; a length of 0 gives 0
    Cost:     reads lengths * L * 4 bytes once per sequence
    Raises:   ShapeError before any kernel runs
    """
    require("q", q, _f32, (-1, -1, -1))
    requests, heads, key_width = q.shape
    require("w_kv_b", w_kv_b, _f32, (-1, -1))
    require("pool", pool, _f32, (-1, -1, -1))
    require("pages", pages, np.int32, (requests, -1))
    require("lengths", lengths, np.int64, (requests,))
    require("out", out, _f32, (requests, heads, -1))
    nope = key_width - (pool.shape[2] - w_kv_b.shape[1])
    require_that(
        0 <= nope <= key_width and w_kv_b.shape[0] == heads * (nope + out.shape[2]),
        f"w_kv_b: expected {heads} x ({nope} key + {out.shape[2]} value) rows, got {w_kv_b.shape[0]}",
    )
    room = pages.shape[1] * pool.shape[1]
    for b in range(requests):
        length = int(lengths[b])
        require_that(0 <= length <= room, f"lengths[{b}]: expected 0..{room}, got {length}")
        used = pages[b, : -(-length // pool.shape[1])]
        require_that(
            not used.size or (int(used.min()) >= 0 and int(used.max()) < pool.shape[0]),
            f"pages[{b}]: expected 0..{pool.shape[0] - 1} for the first {used.size}, got {used.tolist()[:8]}",
        )
    _decode(q, w_kv_b, pool, pages, lengths, _f32(scale), out)
