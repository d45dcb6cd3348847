"""MLA on the CPU: one GEMM to expand, blocked attention through BLAS, absorbed decode over pages.

Hot: yes, bench `ops_mla`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whalez.ops.checks import NDArray, require, require_that

_f32 = np.float32


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
    raise NotImplementedError


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
    raise NotImplementedError
