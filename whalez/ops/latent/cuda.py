"""The latent ops on the device, on bf16 rows: the norm is rms_norm over a column slice, append and gather are copies.

A warp moves a row: 1,152 bytes at the models' 576 values, so the one division by the page size is paid once per row.
Copies keep every bit. Page numbers are read on the device and believed: who fills the table checks them.
Hot: yes.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from whalez.errors import ShapeError
from whalez.ops.device.kernel import kernel
from whalez.ops.device.limits import require_addresses
from whalez.ops.device.rowwise import copy_bf16x8_thread, vectors_of
from whalez.ops.device.types import bf16p, i32p, i64, i64p
from whalez.ops.norm.cuda import rms_norm

WARPS = 8
THREADS = 32 * WARPS


def latent_norm(stream: Any, c: int, c_stride: int, weight: int, eps: float, rows: int, rank: int) -> None:
    """RMS-normalise the latent part of each row, leave the shared key part as it is.

    Args:
        c:       bf16 [T, R+r]  in/out, rows c_stride elements apart: R latent columns, then r shared key columns
        weight:  f32 [R]
        eps:     added to the mean of squares
    Writes:   c[:T, :R] only
    Raises:   ShapeError before any launch, as all here
    """
    require_addresses(c=(c, 2), weight=(weight, 4))
    rms_norm(stream, c, c_stride, weight, eps, c, c_stride, rows, rank)


def latent_append(
    stream: Any,
    rows: int,
    rows_stride: int,
    pool: int,
    pages: int,
    pages_count: int,
    start: int,
    count: int,
    page_tokens: int,
    width: int,
) -> None:
    """Store latent rows into the paged cache of one sequence.

    Args:
        rows:   bf16 [T, L]        rows_stride elements apart
        pool:   bf16 [P, page, L]  in/out, packed; pages of all sequences of one layer
        pages:  int32 [n]          page t // page_tokens of the sequence is pool[pages[t // page_tokens]]
        start:  position of rows[0] in the sequence
    Writes:   the T rows only; the rest of their pages stays as it is
    Raises:   ShapeError before any launch, if the pages do not hold start + count rows
    """
    _require_room(start, count, pages_count, page_tokens)
    require_addresses(rows=(rows, 2), pool=(pool, 2), pages=(pages, 4))
    if count:
        octets = vectors_of(width, 8, (rows, pool), (rows_stride, width))
        stream.launch(
            latent_append_kernel, -(-count // WARPS), THREADS, 0,
            rows, rows_stride, pool, pages, start, count, page_tokens, octets, width,
        )  # fmt: skip


def latent_gather(
    stream: Any,
    pool: int,
    pages: int,
    pages_count: int,
    start: int,
    count: int,
    out: int,
    out_stride: int,
    page_tokens: int,
    width: int,
) -> None:
    """Read the rows [start, start + count) of one sequence out of the paged cache.

    Args:
        pool:   bf16 [P, page, L]  packed
        pages:  int32 [n]
        out:    bf16 [count, L]    rows out_stride elements apart
    Writes:   out[:count] only
    Raises:   ShapeError before any launch, if the pages do not hold start + count rows
    """
    _require_room(start, count, pages_count, page_tokens)
    require_addresses(pool=(pool, 2), pages=(pages, 4), out=(out, 2))
    if count:
        octets = vectors_of(width, 8, (out, pool), (out_stride, width))
        stream.launch(
            latent_gather_kernel, -(-count // WARPS), THREADS, 0,
            pool, pages, start, count, out, out_stride, page_tokens, octets, width,
        )  # fmt: skip


def latent_append_decode(
    stream: Any,
    rows: int,
    rows_stride: int,
    pool: int,
    pages: int,
    pages_stride: int,
    positions: int,
    requests: int,
    page_tokens: int,
    width: int,
) -> None:
    """Store one row of each request into the page its position is on; the positions are known to the device only.

    Args:
        rows:       bf16 [B, L]        rows_stride elements apart
        pool:       bf16 [P, page, L]  in/out, packed
        pages:      int32 [B, n]       tables, pages_stride elements apart
        positions:  int64 [B]          each below n * page_tokens
    Writes:   one row per request
    Raises:   ShapeError before any launch
    """
    require_addresses(rows=(rows, 2), pool=(pool, 2), pages=(pages, 4), positions=(positions, 8))
    if requests:
        octets = vectors_of(width, 8, (rows, pool), (rows_stride, width))
        stream.launch(
            latent_append_decode_kernel, -(-requests // WARPS), THREADS, 0,
            rows, rows_stride, pool, pages, pages_stride, positions, requests, page_tokens, octets, width,
        )  # fmt: skip


def _require_room(start: int, count: int, pages_count: int, page_tokens: int) -> None:
    room = pages_count * page_tokens
    if start < 0 or count < 0 or start + count > room:
        raise ShapeError(f"rows [{start}, {start + count}): expected inside the {room} rows of {pages_count} pages")


@cuda.jit(device=True)
def copy_row_warp(g_to: Any, to: Any, g_from: Any, source: Any, octets: Any, width: Any) -> None:
    """`width` values from element `source` to element `to`."""
    i_lane = i64(cuda.threadIdx.x % 32)
    i = i_lane
    while i < octets:
        copy_bf16x8_thread(g_to, (to >> 3) + i, g_from, (source >> 3) + i)
        i += 32
    i = 8 * octets + i_lane
    while i < width:
        g_to[to + i] = g_from[source + i]
        i += 32


@cuda.jit(device=True)
def paged_row_thread(g_pages: Any, table: Any, position: Any, page_tokens: Any) -> Any:
    """The number of the pool row that holds `position`, by the table that begins at element `table`."""
    i_page = position // page_tokens
    return i64(g_pages[table + i_page]) * page_tokens + (position - i_page * page_tokens)


@kernel("latent_append_kernel", bf16p, i64, bf16p, i32p, i64, i64, i64, i64, i64, block=THREADS)
def latent_append_kernel(
    g_rows: Any,
    rows_stride: Any,
    g_pool: Any,
    g_pages: Any,
    start: Any,
    count: Any,
    page_tokens: Any,
    octets: Any,
    width: Any,
) -> None:
    i_row = i64(cuda.blockIdx.x) * WARPS + i64(cuda.threadIdx.x // 32)
    if i_row < count:
        kept = paged_row_thread(g_pages, 0, start + i_row, page_tokens)
        copy_row_warp(g_pool, kept * width, g_rows, i_row * rows_stride, octets, width)


@kernel("latent_gather_kernel", bf16p, i32p, i64, i64, bf16p, i64, i64, i64, i64, block=THREADS)
def latent_gather_kernel(
    g_pool: Any,
    g_pages: Any,
    start: Any,
    count: Any,
    g_out: Any,
    out_stride: Any,
    page_tokens: Any,
    octets: Any,
    width: Any,
) -> None:
    i_row = i64(cuda.blockIdx.x) * WARPS + i64(cuda.threadIdx.x // 32)
    if i_row < count:
        kept = paged_row_thread(g_pages, 0, start + i_row, page_tokens)
        copy_row_warp(g_out, i_row * out_stride, g_pool, kept * width, octets, width)


@kernel("latent_append_decode_kernel", bf16p, i64, bf16p, i32p, i64, i64p, i64, i64, i64, i64, block=THREADS)
def latent_append_decode_kernel(
    g_rows: Any,
    rows_stride: Any,
    g_pool: Any,
    g_pages: Any,
    pages_stride: Any,
    g_positions: Any,
    requests: Any,
    page_tokens: Any,
    octets: Any,
    width: Any,
) -> None:
    i_row = i64(cuda.blockIdx.x) * WARPS + i64(cuda.threadIdx.x // 32)
    if i_row < requests:
        kept = paged_row_thread(g_pages, i_row * pages_stride, g_positions[i_row], page_tokens)
        copy_row_warp(g_pool, kept * width, g_rows, i_row * rows_stride, octets, width)
