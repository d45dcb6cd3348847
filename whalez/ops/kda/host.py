"""KDA on the host: what each step takes and leaves behind. The loops are in host_kernels.py, the maths in README.md.

Row views: an array [T, H, X] below may be a column slice of a wider [T, ...] buffer (any row stride, the rest packed).
One call is one thread; nothing is allocated but a scratch tile of a few hundred kB.
Hot: yes, `python bench/ops_kda.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whalez.ops.checks import axes_of, packed, rows_of, slots_of
from whalez.ops.chunks import CHUNK, chunks_count
from whalez.ops.kda import host_kernels as kernels

Array = np.ndarray[Any, Any]


def kda_gate(f: Array, a_log: Array, dt_bias: Array) -> None:
    """f <- -exp(a_log) * softplus(f + dt_bias): the log decay, <= 0, without lower bound.

    Args:
        f:        f32 [T, H, K]  in place; row view
        a_log:    f32 [H]
        dt_bias:  f32 [H, K]
    Raises:   ShapeError before any kernel runs
    """
    rows, heads, key_dim = axes_of("f", f, "THK")
    f_addr, f_stride = rows_of("f", f, (rows, heads, key_dim))
    a_log_addr = packed("a_log", a_log, (heads,))
    kernels.kda_gate_kernel(
        f_addr, f_stride, a_log_addr, packed("dt_bias", dt_bias, (heads, key_dim)), rows, heads, key_dim
    )


def kda_beta(b: Array) -> None:
    """b <- sigmoid(b): the write strength.

    Args:
        b:  f32 [T, H]  in place; row view
    Raises:   ShapeError before any kernel runs
    """
    rows, heads = axes_of("b", b, "TH")
    b_addr, b_stride = rows_of("b", b, (rows, heads))
    kernels.kda_beta_kernel(b_addr, b_stride, rows, heads)


def kda_prepare(q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float, p: Array, decay: Array) -> None:
    """Everything of a segment that does not depend on the state that comes in, in place. Chunks start at row 0.

    Args:
        q:      f32 [T, H, K]   in: normalised query.   out: scale * q * exp(G); G = sum of g since the chunk began
        k:      f32 [T, H, K]   in: normalised key.     out: Kg = k * exp(G_end - G)
        v:      f32 [T, H, V]   in: value.              out: U = (I + A)^-1 beta v
        g:      f32 [T, H, K]   in: log decay <= 0.     out: Wm = (I + A)^-1 beta (exp(G) k)
        beta:   f32 [T, H]      after the sigmoid; row view
        p:      f32 [T, H, 64]  out: row t of P of its chunk; columns after t's own are 0; packed
        decay:  f32 [N, H, K]   out: exp(G_end), packed, N = chunks_count(T)
        All of q, k, v, g are row views and must not overlap.
    Writes:   rows :T and chunks :N only
    Raises:   ShapeError before any kernel runs
    See:      README.md, "Chunk form"
    """
    rows, heads, key_dim = axes_of("k", k, "THK")
    value_dim = axes_of("v", v, "THV")[2]
    q_addr, q_stride = rows_of("q", q, (rows, heads, key_dim))
    k_addr, k_stride = rows_of("k", k, (rows, heads, key_dim))
    v_addr, v_stride = rows_of("v", v, (rows, heads, value_dim))
    g_addr, g_stride = rows_of("g", g, (rows, heads, key_dim))
    beta_addr, beta_stride = rows_of("beta", beta, (rows, heads))
    p_addr = packed("p", p, (rows, heads, CHUNK))
    decay_addr = packed("decay", decay, (chunks_count(rows), heads, key_dim))
    scratch = np.empty(kernels.prepare_scratch_count(key_dim, value_dim), np.float32)
    kernels.kda_prepare_kernel(
        q_addr,
        q_stride,
        k_addr,
        k_stride,
        v_addr,
        v_stride,
        g_addr,
        g_stride,
        beta_addr,
        beta_stride,
        float(scale),
        p_addr,
        decay_addr,
        scratch.ctypes.data,
        rows,
        heads,
        key_dim,
        value_dim,
    )


def kda_scan(q: Array, k: Array, u: Array, w: Array, p: Array, decay: Array, state: Array, out: Array) -> None:
    """Run the chunks of a prepared segment from `state`, which becomes the state after row T-1.

    Args:
        q, k, u, w, p, decay:  as kda_prepare left q, k, v, g, p, decay; not written
        state:  f32 [H, K, V]  in and out, packed
        out:    f32 [T, H, V]  row view; may be u, nothing else
    Writes:   out[:T], state
    Raises:   ShapeError before any kernel runs
    """
    rows, heads, key_dim = axes_of("k", k, "THK")
    value_dim = axes_of("u", u, "THV")[2]
    q_addr, q_stride = rows_of("q", q, (rows, heads, key_dim))
    k_addr, k_stride = rows_of("k", k, (rows, heads, key_dim))
    u_addr, u_stride = rows_of("u", u, (rows, heads, value_dim))
    w_addr, w_stride = rows_of("w", w, (rows, heads, key_dim))
    p_addr = packed("p", p, (rows, heads, CHUNK))
    decay_addr = packed("decay", decay, (chunks_count(rows), heads, key_dim))
    state_addr = packed("state", state, (heads, key_dim, value_dim))
    out_addr, out_stride = rows_of("out", out, (rows, heads, value_dim))
    scratch = np.empty(CHUNK * value_dim, np.float32)
    kernels.kda_scan_kernel(
        q_addr,
        q_stride,
        k_addr,
        k_stride,
        u_addr,
        u_stride,
        w_addr,
        w_stride,
        p_addr,
        decay_addr,
        state_addr,
        out_addr,
        out_stride,
        scratch.ctypes.data,
        rows,
        heads,
        key_dim,
        value_dim,
    )


def kda_package(k: Array, u: Array, w: Array, decay: Array, m: Array, d: Array) -> None:
    """The segment as an affine map of its initial state, `state_out = m @ state_in + d` per head, in one pass.

    Args:
        k, u, w, decay:  as kda_prepare left k, v, g, decay; not written
        m:  f32 [H, K, K]  out, packed
        d:  f32 [H, K, V]  out, packed
    Writes:   m, d whole (T = 0 gives the identity)
    Raises:   ShapeError before any kernel runs
    See:      README.md, "Package"
    """
    heads, key_dim = axes_of("k", k, "THK")[1:]
    _package(k, u, w, decay, packed("m", m, (heads, key_dim, key_dim)), d)


def kda_package_d(k: Array, u: Array, w: Array, decay: Array, d: Array) -> None:
    """Only `d` of kda_package, the state after the segment run from zero: all that the first member of a gang sends."""
    _package(k, u, w, decay, 0, d)


def _package(k: Array, u: Array, w: Array, decay: Array, m_addr: int, d: Array) -> None:
    rows, heads, key_dim = axes_of("k", k, "THK")
    value_dim = axes_of("u", u, "THV")[2]
    k_addr, k_stride = rows_of("k", k, (rows, heads, key_dim))
    u_addr, u_stride = rows_of("u", u, (rows, heads, value_dim))
    w_addr, w_stride = rows_of("w", w, (rows, heads, key_dim))
    decay_addr = packed("decay", decay, (chunks_count(rows), heads, key_dim))
    d_addr = packed("d", d, (heads, key_dim, value_dim))
    scratch = np.empty((key_dim + CHUNK) * (key_dim + value_dim), np.float32)
    kernels.kda_package_kernel(
        k_addr,
        k_stride,
        u_addr,
        u_stride,
        w_addr,
        w_stride,
        decay_addr,
        m_addr,
        d_addr,
        scratch.ctypes.data,
        rows,
        heads,
        key_dim,
        value_dim,
    )


def kda_compose(m: Array, d: Array, state: Array) -> None:
    """state <- m @ state + d per head: carry a state across a segment that somebody else ran.

    Args:
        m:      f32 [H, K, K]  packed (may lie in another rank's slab)
        d:      f32 [H, K, V]  packed
        state:  f32 [H, K, V]  in and out, packed
    Raises:   ShapeError before any kernel runs
    """
    heads, key_dim, value_dim = axes_of("state", state, "HKV")
    m_addr = packed("m", m, (heads, key_dim, key_dim))
    d_addr = packed("d", d, (heads, key_dim, value_dim))
    state_addr = packed("state", state, (heads, key_dim, value_dim))
    scratch = np.empty(key_dim * value_dim, np.float32)
    kernels.kda_compose_kernel(m_addr, d_addr, state_addr, scratch.ctypes.data, heads, key_dim, value_dim)


def kda_decode(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float, states: Array, slots: Array, out: Array
) -> None:
    """One token of each request through the recurrence, on the states of the given slots.

    Args:
        q, k, g:  f32 [B, H, K]     normalised query and key, log decay; row views, not written
        v:        f32 [B, H, V]     row view, not written
        beta:     f32 [B, H]        after the sigmoid; row view
        states:   f32 [S, H, K, V]  in place, rows `slots` only; packed
        slots:    int64 [B]         distinct
        out:      f32 [B, H, V]     row view; may be v
    Raises:   ShapeError before any kernel runs
    """
    rows, heads, key_dim = axes_of("k", k, "BHK")
    value_dim = axes_of("v", v, "BHV")[2]
    slots_count = axes_of("states", states, "SHKV")[0]
    q_addr, q_stride = rows_of("q", q, (rows, heads, key_dim))
    k_addr, k_stride = rows_of("k", k, (rows, heads, key_dim))
    v_addr, v_stride = rows_of("v", v, (rows, heads, value_dim))
    g_addr, g_stride = rows_of("g", g, (rows, heads, key_dim))
    beta_addr, beta_stride = rows_of("beta", beta, (rows, heads))
    states_addr = packed("states", states, (slots_count, heads, key_dim, value_dim))
    slots_addr = slots_of(slots, rows, slots_count)
    out_addr, out_stride = rows_of("out", out, (rows, heads, value_dim))
    scratch = np.empty(2 * value_dim, np.float32)
    kernels.kda_decode_kernel(
        q_addr,
        q_stride,
        k_addr,
        k_stride,
        v_addr,
        v_stride,
        g_addr,
        g_stride,
        beta_addr,
        beta_stride,
        float(scale),
        states_addr,
        slots_addr,
        out_addr,
        out_stride,
        scratch.ctypes.data,
        rows,
        heads,
        key_dim,
        value_dim,
    )


def warm() -> None:
    """Compile, or load from the cache, every kernel of this op."""
    rows, heads, dim = 1, 1, 4
    q, k, v, g = (np.zeros((rows, heads, dim), np.float32) for _ in range(4))
    beta = np.zeros((rows, heads), np.float32)
    p = np.empty((rows, heads, CHUNK), np.float32)
    decay = np.empty((1, heads, dim), np.float32)
    state, m, d = (np.zeros((heads, dim, dim), np.float32) for _ in range(3))
    kda_gate(g, np.zeros(heads, np.float32), np.zeros((heads, dim), np.float32))
    kda_beta(beta)
    kda_decode(q, k, v, g, beta, 1.0, state[None], np.zeros(1, np.int64), v)
    kda_prepare(q, k, v, g, beta, 1.0, p, decay)
    kda_package(k, v, g, decay, m, d)
    kda_compose(m, d, state)
    kda_scan(q, k, v, g, p, decay, state, v)
