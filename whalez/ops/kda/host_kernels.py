"""The loops of KDA on the host: raw f32 addresses, row strides in elements, int64 sizes. Callers have checked shapes.

Only the products inside 16-token blocks and the element-wise passes are loops; the rest are GEMMs on row views, so no
tile is copied to be multiplied. Row `t`, head `h` of a row view lies at `addr + 4 * (t * stride + h * dim)`.
Underflow to 0 is right everywhere (a decay of that size is 0 in f32); no exponent is ever positive, so none overflows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from whalez.ops.chunks import CHUNK
from whalez.ops.fastmath import exp_f32, f32_at, i64_at, sgemm, sigmoid_f32, softplus_f32

BLOCK = 16  # rows inside which pairwise decays are multiplied up token by token

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_MINUS = np.float32(-1.0)


def prepare_scratch_count(key_dim: int, value_dim: int) -> int:
    """f32 values of scratch kda_prepare_kernel needs: the tiles laid out at its top."""
    return (
        CHUNK * (key_dim + value_dim)  # y
        + CHUNK * key_dim  # kd
        + 2 * BLOCK * key_dim  # left
        + 4 * key_dim  # alpha, inside, since, before
        + CHUNK * CHUNK  # a
        + 2 * BLOCK * CHUNK  # cross
    )


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def kda_gate_kernel(
    f_addr: int, f_stride: int, a_log_addr: int, bias_addr: int, rows: int, heads: int, key_dim: int
) -> None:
    a_log = f32_at(a_log_addr)
    for t in range(rows):
        for h in range(heads):
            f = f32_at(f_addr + 4 * (t * f_stride + h * key_dim))
            bias = f32_at(bias_addr + 4 * h * key_dim)
            factor = -exp_f32(a_log[h])
            for i in range(key_dim):
                f[i] = factor * softplus_f32(f[i] + bias[i])


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def kda_beta_kernel(b_addr: int, b_stride: int, rows: int, heads: int) -> None:
    for t in range(rows):
        b = f32_at(b_addr + 4 * t * b_stride)
        for h in range(heads):
            b[h] = sigmoid_f32(b[h])


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy")
def _decay_and_dot(kd: Any, alpha: Any, k: Any, q: Any, width: int) -> Any:
    """kd <- kd * alpha; returns (k . kd, q . kd)."""
    with_k = np.float32(0.0)
    with_q = np.float32(0.0)
    for i in range(width):
        decayed = kd[i] * alpha[i]
        kd[i] = decayed
        with_k += k[i] * decayed
        with_q += q[i] * decayed
    return with_k, with_q


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy")
def _dot(x: Any, y: Any, width: int) -> Any:
    total = np.float32(0.0)
    for i in range(width):
        total += x[i] * y[i]
    return total


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _multiply(x: Any, factor: Any, width: int) -> None:
    for i in range(width):
        x[i] = x[i] * factor[i]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _multiply_rows(x_addr: int, rows: int, factor: Any, width: int) -> None:
    """Row r of x [rows, width] times factor [width]."""
    for r in range(rows):
        _multiply(f32_at(x_addr + 4 * r * width), factor, width)


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _scale_rows(x_addr: int, stride: int, rows: int, factor: Any, width: int) -> None:
    """Row r of x [rows, width] times factor[r]."""
    for r in range(rows):
        x = f32_at(x_addr + 4 * r * stride)
        for i in range(width):
            x[i] = x[i] * factor[r]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _copy(source: Any, target: Any, width: int) -> None:
    for i in range(width):
        target[i] = source[i]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _open_token(
    g: Any,
    k: Any,
    q: Any,
    scale: Any,
    alpha: Any,
    inside: Any,
    before: Any,
    left_k: Any,
    left_q: Any,
    y: Any,
    width: int,
) -> None:
    """One token: alpha = exp(g), the sum `inside` since the block began, and the rows its exp makes."""
    for i in range(width):
        total = inside[i] + g[i]
        inside[i] = total
        alpha[i] = exp_f32(g[i])
        product = exp_f32(total)
        left_k[i] = k[i] * product
        left_q[i] = q[i] * product * scale
        y[i] = k[i] * product * before[i]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _close_block(inside: Any, since: Any, before: Any, width: int) -> None:
    """inside: sums of g in the block -> their exp. since, before: sum of g since the chunk began, and its exp."""
    for i in range(width):
        total = since[i] + inside[i]
        since[i] = total
        before[i] = exp_f32(total)
        inside[i] = exp_f32(inside[i])


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _close_query(left_q: Any, before: Any, q: Any, width: int) -> None:
    for i in range(width):
        q[i] = left_q[i] * before[i]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _subtract(y: Any, x: Any, factor: Any, width: int) -> None:
    for i in range(width):
        y[i] = y[i] - factor * x[i]


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def kda_prepare_kernel(
    q_addr: int,
    q_stride: int,
    k_addr: int,
    k_stride: int,
    v_addr: int,
    v_stride: int,
    g_addr: int,
    g_stride: int,
    beta_addr: int,
    beta_stride: int,
    scale: float,
    p_addr: int,
    decay_addr: int,
    scratch_addr: int,
    rows: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    scale32 = np.float32(scale)
    both = key_dim + value_dim
    y_addr = scratch_addr  # [CHUNK, K + V]: right-hand sides, then their solutions [Wm | U]
    kd_addr = y_addr + 4 * CHUNK * both  # [CHUNK, K]: keys decayed to the row in hand, in the end Kg
    left_addr = (
        kd_addr + 4 * CHUNK * key_dim
    )  # [2 BLOCK, K]: keys, then scaled queries, decayed since their block began
    alpha_addr = left_addr + 4 * 2 * BLOCK * key_dim
    inside_addr = alpha_addr + 4 * key_dim
    since_addr = inside_addr + 4 * key_dim  # sum of g from the chunk's begin to the block's begin
    before_addr = since_addr + 4 * key_dim  # its exp
    a_addr = before_addr + 4 * key_dim  # [CHUNK, CHUNK]: beta_i k_i k_j decay, strictly lower part used
    cross_addr = a_addr + 4 * CHUNK * CHUNK  # [2 BLOCK, CHUNK]
    alpha = f32_at(alpha_addr)
    inside = f32_at(inside_addr)
    since = f32_at(since_addr)
    before = f32_at(before_addr)

    for n in range((rows + CHUNK - 1) // CHUNK):
        row0 = n * CHUNK
        rows_n = min(CHUNK, rows - row0)
        for h in range(heads):
            for i in range(key_dim):
                since[i] = _ZERO
                before[i] = _ONE
            for first in range(0, rows_n, BLOCK):
                block = min(BLOCK, rows_n - first)
                for i in range(key_dim):
                    inside[i] = _ZERO
                for r in range(block):
                    t = row0 + first + r
                    beta = f32_at(beta_addr + 4 * (t * beta_stride + h))[0]
                    q = f32_at(q_addr + 4 * (t * q_stride + h * key_dim))
                    k = f32_at(k_addr + 4 * (t * k_stride + h * key_dim))
                    g = f32_at(g_addr + 4 * (t * g_stride + h * key_dim))
                    v = f32_at(v_addr + 4 * (t * v_stride + h * value_dim))
                    p = f32_at(p_addr + 4 * (t * heads + h) * CHUNK)
                    a = f32_at(a_addr + 4 * (first + r) * CHUNK)
                    left_k = f32_at(left_addr + 4 * r * key_dim)
                    left_q = f32_at(left_addr + 4 * (block + r) * key_dim)
                    y = f32_at(y_addr + 4 * (first + r) * both)
                    _open_token(g, k, q, scale32, alpha, inside, before, left_k, left_q, y, key_dim)
                    _copy(v, f32_at(y_addr + 4 * ((first + r) * both + key_dim)), value_dim)
                    for j in range(first, first + r):
                        with_k, with_q = _decay_and_dot(f32_at(kd_addr + 4 * j * key_dim), alpha, k, q, key_dim)
                        a[j] = beta * with_k
                        p[j] = scale32 * with_q
                    p[first + r] = scale32 * _dot(q, k, key_dim)
                    for j in range(first + r + 1, CHUNK):
                        p[j] = _ZERO
                    _copy(k, f32_at(kd_addr + 4 * (first + r) * key_dim), key_dim)
                    _close_query(left_q, before, q, key_dim)
                _close_block(inside, since, before, key_dim)
                if first:
                    # Keys of earlier blocks stand decayed to the end of the block before this one.
                    sgemm(
                        False, True, 2 * block, first, key_dim,
                        _ONE, left_addr, key_dim, kd_addr, key_dim, _ZERO, cross_addr, CHUNK,
                    )  # fmt: skip
                    for r in range(block):
                        t = row0 + first + r
                        beta = f32_at(beta_addr + 4 * (t * beta_stride + h))[0]
                        p = f32_at(p_addr + 4 * (t * heads + h) * CHUNK)
                        a = f32_at(a_addr + 4 * (first + r) * CHUNK)
                        cross_k = f32_at(cross_addr + 4 * r * CHUNK)
                        cross_q = f32_at(cross_addr + 4 * (block + r) * CHUNK)
                        for j in range(first):
                            a[j] = beta * cross_k[j]
                            p[j] = cross_q[j]
                    _multiply_rows(kd_addr, first, inside, key_dim)
            _copy(before, f32_at(decay_addr + 4 * (n * heads + h) * key_dim), key_dim)
            beta_column = beta_addr + 4 * (row0 * beta_stride + h)
            _solve(a_addr, y_addr, beta_column, beta_stride, rows_n, both)
            for r in range(rows_n):
                t = row0 + r
                y_row = y_addr + 4 * r * both
                _copy(f32_at(y_row), f32_at(g_addr + 4 * (t * g_stride + h * key_dim)), key_dim)
                _copy(f32_at(y_row + 4 * key_dim), f32_at(v_addr + 4 * (t * v_stride + h * value_dim)), value_dim)
                _copy(f32_at(kd_addr + 4 * r * key_dim), f32_at(k_addr + 4 * (t * k_stride + h * key_dim)), key_dim)


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _solve(a_addr: int, y_addr: int, beta_addr: int, beta_stride: int, rows: int, width: int) -> None:
    """y <- (I + A)^-1 (beta y) by forward substitution, blocks of rows by GEMM. a: [rows, CHUNK], y: [rows, width]."""
    for first in range(0, rows, BLOCK):
        block = min(BLOCK, rows - first)
        block_addr = y_addr + 4 * first * width
        for r in range(first, first + block):
            beta = f32_at(beta_addr + 4 * r * beta_stride)[0]
            y = f32_at(y_addr + 4 * r * width)
            for i in range(width):
                y[i] = beta * y[i]
        if first:
            sgemm(
                False, False, block, width, first,
                _MINUS, a_addr + 4 * first * CHUNK, CHUNK, y_addr, width, _ONE, block_addr, width,
            )  # fmt: skip
        for r in range(first + 1, first + block):
            a = f32_at(a_addr + 4 * r * CHUNK)
            for j in range(first, r):
                _subtract(f32_at(y_addr + 4 * r * width), f32_at(y_addr + 4 * j * width), a[j], width)


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def kda_scan_kernel(
    q_addr: int,
    q_stride: int,
    k_addr: int,
    k_stride: int,
    u_addr: int,
    u_stride: int,
    w_addr: int,
    w_stride: int,
    p_addr: int,
    decay_addr: int,
    state_addr: int,
    out_addr: int,
    out_stride: int,
    fresh_addr: int,
    rows: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    """fresh_addr: scratch [CHUNK, V], the values each token really writes: U - Wm S."""
    for h in range(heads):
        state = state_addr + 4 * h * key_dim * value_dim
        for n in range((rows + CHUNK - 1) // CHUNK):
            row0 = n * CHUNK
            rows_n = min(CHUNK, rows - row0)
            q = q_addr + 4 * (row0 * q_stride + h * key_dim)
            k = k_addr + 4 * (row0 * k_stride + h * key_dim)
            u = u_addr + 4 * (row0 * u_stride + h * value_dim)
            w = w_addr + 4 * (row0 * w_stride + h * key_dim)
            p = p_addr + 4 * (row0 * heads + h) * CHUNK
            out = out_addr + 4 * (row0 * out_stride + h * value_dim)
            for r in range(rows_n):
                _copy(f32_at(u + 4 * r * u_stride), f32_at(fresh_addr + 4 * r * value_dim), value_dim)
            sgemm(
                False, False, rows_n, value_dim, key_dim,
                _MINUS, w, w_stride, state, value_dim, _ONE, fresh_addr, value_dim,
            )  # fmt: skip
            sgemm(
                False, False, rows_n, value_dim, key_dim,
                _ONE, q, q_stride, state, value_dim, _ZERO, out, out_stride,
            )  # fmt: skip
            sgemm(
                False, False, rows_n, value_dim, rows_n,
                _ONE, p, heads * CHUNK, fresh_addr, value_dim, _ONE, out, out_stride,
            )  # fmt: skip
            _scale_rows(state, value_dim, key_dim, f32_at(decay_addr + 4 * (n * heads + h) * key_dim), value_dim)
            sgemm(
                True, False, key_dim, value_dim, rows_n,
                _ONE, k, k_stride, fresh_addr, value_dim, _ONE, state, value_dim,
            )  # fmt: skip


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def kda_package_kernel(
    k_addr: int,
    k_stride: int,
    u_addr: int,
    u_stride: int,
    w_addr: int,
    w_stride: int,
    decay_addr: int,
    m_addr: int,
    d_addr: int,
    scratch_addr: int,
    rows: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    """m_addr 0: only d. M and D are carried side by side as one [K, V + K] matrix, so each chunk is two GEMMs."""
    width = value_dim + (key_dim if m_addr else 0)
    map_addr = scratch_addr  # [K, width] = [D | M]
    fresh_addr = map_addr + 4 * key_dim * width  # [CHUNK, width] = [U - Wm D | -Wm M]
    for h in range(heads):
        for i in range(key_dim):
            row = f32_at(map_addr + 4 * i * width)
            for j in range(width):
                row[j] = _ONE if j == value_dim + i else _ZERO
        for n in range((rows + CHUNK - 1) // CHUNK):
            row0 = n * CHUNK
            rows_n = min(CHUNK, rows - row0)
            k = k_addr + 4 * (row0 * k_stride + h * key_dim)
            u = u_addr + 4 * (row0 * u_stride + h * value_dim)
            w = w_addr + 4 * (row0 * w_stride + h * key_dim)
            for r in range(rows_n):
                fresh = f32_at(fresh_addr + 4 * r * width)
                _copy(f32_at(u + 4 * r * u_stride), fresh, value_dim)
                for j in range(value_dim, width):
                    fresh[j] = _ZERO
            sgemm(
                False, False, rows_n, width, key_dim,
                _MINUS, w, w_stride, map_addr, width, _ONE, fresh_addr, width,
            )  # fmt: skip
            _scale_rows(map_addr, width, key_dim, f32_at(decay_addr + 4 * (n * heads + h) * key_dim), width)
            sgemm(
                True, False, key_dim, width, rows_n,
                _ONE, k, k_stride, fresh_addr, width, _ONE, map_addr, width,
            )  # fmt: skip
        for i in range(key_dim):
            row_addr = map_addr + 4 * i * width
            _copy(f32_at(row_addr), f32_at(d_addr + 4 * (h * key_dim + i) * value_dim), value_dim)
            if m_addr:
                _copy(f32_at(row_addr + 4 * value_dim), f32_at(m_addr + 4 * (h * key_dim + i) * key_dim), key_dim)


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def kda_compose_kernel(
    m_addr: int, d_addr: int, state_addr: int, scratch_addr: int, heads: int, key_dim: int, value_dim: int
) -> None:
    count = key_dim * value_dim
    for h in range(heads):
        state = state_addr + 4 * h * count
        _copy(f32_at(d_addr + 4 * h * count), f32_at(scratch_addr), count)
        sgemm(
            False, False, key_dim, value_dim, key_dim,
            _ONE, m_addr + 4 * h * key_dim * key_dim, key_dim, state, value_dim, _ONE, scratch_addr, value_dim,
        )  # fmt: skip
        _copy(f32_at(scratch_addr), f32_at(state), count)


@njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def kda_decode_kernel(
    q_addr: int,
    q_stride: int,
    k_addr: int,
    k_stride: int,
    v_addr: int,
    v_stride: int,
    g_addr: int,
    g_stride: int,
    beta_addr: int,
    beta_stride: int,
    scale: float,
    states_addr: int,
    slots_addr: int,
    out_addr: int,
    out_stride: int,
    scratch_addr: int,
    rows: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    """scratch: [2, V]. Two passes over a state: what it predicts for k, then the update and the read."""
    scale32 = np.float32(scale)
    slots = i64_at(slots_addr)
    fresh = f32_at(scratch_addr)
    read = f32_at(scratch_addr + 4 * value_dim)
    for b in range(rows):
        for h in range(heads):
            q = f32_at(q_addr + 4 * (b * q_stride + h * key_dim))
            k = f32_at(k_addr + 4 * (b * k_stride + h * key_dim))
            g = f32_at(g_addr + 4 * (b * g_stride + h * key_dim))
            v = f32_at(v_addr + 4 * (b * v_stride + h * value_dim))
            beta = f32_at(beta_addr + 4 * (b * beta_stride + h))[0]
            out = f32_at(out_addr + 4 * (b * out_stride + h * value_dim))
            state_addr = states_addr + 4 * (slots[b] * heads + h) * key_dim * value_dim
            for j in range(value_dim):
                fresh[j] = v[j]
                read[j] = _ZERO
            for i in range(key_dim):
                alpha = exp_f32(g[i])
                key = k[i]
                row = f32_at(state_addr + 4 * i * value_dim)
                for j in range(value_dim):
                    decayed = row[j] * alpha
                    row[j] = decayed
                    fresh[j] = fresh[j] - key * decayed
            for j in range(value_dim):
                fresh[j] = beta * fresh[j]
            for i in range(key_dim):
                key = k[i]
                query = q[i] * scale32
                row = f32_at(state_addr + 4 * i * value_dim)
                for j in range(value_dim):
                    updated = row[j] + key * fresh[j]
                    row[j] = updated
                    read[j] = read[j] + query * updated
            _copy(read, out, value_dim)
