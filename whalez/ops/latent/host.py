"""The latent ops on the CPU: one pass norm, page-sized copies.

Hot: yes, `python bench/ops_mla.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, njit, void

from whalez.ops.checks import NDArray, reads, require, require_that, writes

_f32 = np.float32


# `reassoc` lets the sum of squares run in vector lanes; nothing else in the function has an order that matters.
@njit(
    void(writes(float32, 2, "A"), reads(float32, 1), float32),
    cache=True,
    nogil=True,
    fastmath={"reassoc", "contract"},
)
def _norm(c: Any, weight: Any, eps: Any) -> None:
    rank = weight.shape[0]
    for t in range(c.shape[0]):
        row = c[t]
        square = _f32(0.0)
        for i in range(rank):
            square += row[i] * row[i]
        inverse = _f32(1.0) / math.sqrt(square / _f32(rank) + eps)
        for i in range(rank):
            row[i] = row[i] * inverse * weight[i]


def latent_norm(c: NDArray, weight: NDArray, eps: float) -> None:
    """RMS-normalise the latent part of each row, leave the shared key part as it is.

    Args:
        c:       f32 [T, R+r]  in/out, last axis stride 1: R latent columns, then r shared key columns
        weight:  f32 [R]
        eps:     added to the mean of squares
    Writes:   c[:, :R]
    Raises:   ShapeError before any kernel runs
    """
    require("weight", weight, _f32, (-1,))
    require("c", c, _f32, (-1, -1), rows_strided=True)
    require_that(0 < weight.shape[0] <= c.shape[1], f"weight: expected 1..{c.shape[1]} values, got {weight.shape[0]}")
    _norm(c, weight, _f32(eps))


def _require_pages(pool: NDArray, pages: NDArray, start: int, count: int) -> None:
    require("pool", pool, _f32, (-1, -1, -1))
    require("pages", pages, np.int32, (-1,))
    room = pages.shape[0] * pool.shape[1]
    require_that(
        start >= 0 and count >= 0 and start + count <= room,
        f"rows [{start}, {start + count}): expected inside the {room} rows of {pages.shape[0]} pages",
    )
    if count:
        used = pages[start // pool.shape[1] : (start + count - 1) // pool.shape[1] + 1]
        low, high = int(used.min()), int(used.max())
        require_that(low >= 0 and high < pool.shape[0], f"pages: expected 0..{pool.shape[0] - 1}, got {low}..{high}")


def latent_append(rows: NDArray, pool: NDArray, pages: NDArray, start: int) -> None:
    """Store latent rows into the paged cache of one sequence.

    Args:
        rows:   f32 [T, L]           last axis stride 1
        pool:   f32 [P, page, L]     in/out; pages of all sequences of one layer
        pages:  int32 [n]            page t // page of the sequence is pool[pages[t // page]]
        start:  position of rows[0] in the sequence
    Writes:   the T rows only; the rest of their pages stays as it is
    Raises:   ShapeError before anything is written
    """
    require("rows", rows, _f32, (-1, pool.shape[-1]), rows_strided=True)
    _require_pages(pool, pages, start, rows.shape[0])
    page_tokens, done = pool.shape[1], 0
    while done < rows.shape[0]:
        page, slot = divmod(start + done, page_tokens)
        count = min(page_tokens - slot, rows.shape[0] - done)
        pool[pages[page], slot : slot + count] = rows[done : done + count]
        done += count


def latent_gather(pool: NDArray, pages: NDArray, start: int, count: int, out: NDArray) -> None:
    """Read the rows [start, start + count) of one sequence out of the paged cache.

    Args:
        pool:   f32 [P, page, L]
        pages:  int32 [n]
        out:    f32 [count, L]  last axis stride 1
    Writes:   out, all rows
    Raises:   ShapeError before anything is written
    """
    require("out", out, _f32, (count, pool.shape[-1]), rows_strided=True)
    _require_pages(pool, pages, start, count)
    page_tokens, done = pool.shape[1], 0
    while done < count:
        page, slot = divmod(start + done, page_tokens)
        take = min(page_tokens - slot, count - done)
        out[done : done + take] = pool[pages[page], slot : slot + take]
        done += take
