"""KDA on the device: what each step takes and leaves behind, and the kernels. The maths is in README.md.

Twins of the host ops, with two differences. What `kda_prepare` makes goes into a buffer of its own, because q, k and v
come as bf16 and the chunk products are kept in f32; and of an address nothing is checked but how it is aligned.

The chunk products of one chunk of one head lie together as one *tile* of f32, all 64 rows of it, a ragged end filled
up with zeros, so that what reads tiles knows no ragged chunk:

    q [64, K]   scale q exp(G)      w [64, K]   Wm      k [64, K]   Kg      u [64, V]   U
    p [64, 64]  P, zeros above its diagonal            decay [K]   exp(G_end)

All of it is f32 and so is every product. U - Wm S cancels when keys repeat, and what is left goes into the state, where
it stays; q and p touch only the output, where bf16 would do, and are f32 because nothing multiplies bf16 here yet.
Every kernel exists per head width (K = V), since accumulators live in registers only if their loops have constant ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import float32 as f32
from numba.cuda import uint32

from whalez.errors import ShapeError
from whalez.ops.device.kernel import Kernel, kernel
from whalez.ops.device.limits import require_addresses, require_blocks
from whalez.ops.device.pointers import offset, shared_address_of, shared_pointer
from whalez.ops.device.ptx import (
    address_of,
    cp_async_16,
    cp_async_commit,
    cp_async_wait_all,
    cvt_bf16_f32,
    f32_from_bf16,
)
from whalez.ops.device.stream import Stream
from whalez.ops.device.types import SHARED_ALIGN, bf16p, f32p, i64, i64p
from whalez.ops.device.types import f32 as f32_t
from whalez.ops.kda.host import CHUNK, chunks_count

THREADS = 256
DIMS = (32, 128)  # head widths there are kernels for

GROUP = 4  # rows of a register tile of A and P
GROUPS = CHUNK // GROUP
LEVELS = 4  # boundaries between groups lie 8, 4, 2 or 1 groups from the ends of what they divide
SLICE = 16  # channels of a chunk that A and P are summed over at a time
PITCH = SLICE + 4  # values between rows in shared memory: 16-byte loads of eight groups hit different banks
LOWER = GROUPS * (GROUPS - 1) // 2  # register tiles strictly below the diagonal
SOLVED = 8  # rows of the forward substitution a thread holds in registers
DECODE_THREADS = 128
DECODE_COLUMNS = 32
WARPS = DECODE_THREADS // 32


# ---- row-wise ---------------------------------------------------------------------------------------------------


@kernel("kda_gate_kernel", f32p, i64, f32p, f32p, i64, i64, block=THREADS)
def kda_gate_kernel(g_f: Any, f_stride: Any, g_a_log: Any, g_dt_bias: Any, heads: Any, key_dim: Any) -> None:
    """One block per row, a warp per head."""
    lane = cuda.threadIdx.x % 32
    for i_head in range(cuda.threadIdx.x // 32, heads, THREADS // 32):
        factor = -math.exp(g_a_log[i_head])
        g_row = offset(g_f, i64(cuda.blockIdx.x) * f_stride + i_head * key_dim)
        g_bias = offset(g_dt_bias, i_head * key_dim)
        for x in range(lane, key_dim, 32):
            r = g_row[x] + g_bias[x]
            g_row[x] = factor * (max(r, f32(0.0)) + math.log1p(math.exp(-abs(r))))


@kernel("kda_beta_kernel", f32p, i64, i64, i64, block=THREADS)
def kda_beta_kernel(g_b: Any, b_stride: Any, rows: Any, heads: Any) -> None:
    x = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if x < rows * heads:
        at_x = x // heads * b_stride + x % heads
        g_b[at_x] = f32(1.0) / (f32(1.0) + math.exp(-g_b[at_x]))


# ---- pieces of the chunk kernels --------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def load_rows_block(s_to: Any, pitch: Any, g_from: Any, stride: Any, rows: Any, width: Any) -> None:
    """Begin to copy g_from [rows, width] to s_to [rows, pitch], both on 16 bytes; await_rows_block ends it."""
    quads = width // 4
    first = cuda.threadIdx.x // quads
    column = cuda.threadIdx.x % quads * 4
    step = THREADS // quads
    to = shared_address_of(offset(s_to, first * pitch + column))
    source = offset(g_from, first * stride + column)
    for i in range((rows + step - 1) // step):
        if first + i * step < rows:
            cp_async_16(to + uint32(4 * i * step * pitch), address_of(offset(source, i * step * stride)))


@cuda.jit(device=True, forceinline=True)
def await_rows_block() -> None:
    """All that was loaded is there, and nobody still reads what the next load overwrites."""
    cp_async_wait_all()
    cuda.syncthreads()


def _rows_times(rows: int, groups: int) -> Any:
    @cuda.jit(device=True, forceinline=True)
    def rows_times_thread(
        acc: Any, s_a: Any, a_at: Any, a_step: Any, s_b: Any, b_at: Any, b_pitch: Any, count: Any
    ) -> None:
        """acc[r, 4 n + c] += sum over i < count of a[a_at + r a_step + i] b[b_at + i b_pitch + 64 n + c]."""
        a = cuda.local.array((rows, 4), f32)
        b = cuda.local.array(4, f32)
        for i in range(0, count, 4):
            for r in range(rows):
                for x in range(4):
                    a[r, x] = s_a[a_at + r * a_step + i + x]
            for x in range(4):
                for n in range(groups):
                    for c in range(4):
                        b[c] = s_b[b_at + (i + x) * b_pitch + 64 * n + c]
                    for c in range(4):
                        for r in range(rows):
                            acc[r, 4 * n + c] += a[r, x] * b[c]

    return rows_times_thread


def _columns_times(rows: int) -> Any:
    @cuda.jit(device=True, forceinline=True)
    def columns_times_thread(
        acc: Any, s_a: Any, a_at: Any, a_pitch: Any, s_b: Any, b_at: Any, b_pitch: Any, count: Any
    ) -> None:
        """acc[r, c] += sum over t < count of a[a_at + t a_pitch + r] b[b_at + t b_pitch + c]."""
        b = cuda.local.array(4, f32)
        for t in range(count):
            for c in range(4):
                b[c] = s_b[b_at + t * b_pitch + c]
            for r in range(rows):
                a = s_a[a_at + t * a_pitch + r]
                for c in range(4):
                    acc[r, c] += a * b[c]

    return columns_times_thread


def tile_count(dim: int) -> int:
    """f32 values of one tile."""
    return 4 * CHUNK * dim + CHUNK * CHUNK + dim


# ---- prepare ----------------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def lower_tile_thread(t: Any) -> Any:
    """Register tile t of LOWER below the diagonal, as (group of rows, group of columns)."""
    i_group = 1
    while t >= i_group:
        t -= i_group
        i_group += 1
    return i_group, t


@cuda.jit(device=True, forceinline=True)
def level_thread(i_group: Any, j_group: Any) -> Any:
    """The boundary that parts two groups: the place of the highest bit in which their numbers differ."""
    apart = i_group ^ j_group
    return (apart > 1) + (apart > 3) + (apart > 7)


def _prepare(dim: int) -> Kernel:
    tile = tile_count(dim)
    level_count = CHUNK * PITCH  # values of one level, a row of group i at slot 16 (row % 4) + i
    y_at = LEVELS * level_count
    raw_at = y_at + LEVELS * level_count
    alpha_at = raw_at + 2 * level_count
    total_at = alpha_at + level_count
    shared_bytes = 4 * (total_at + GROUPS * SLICE + CHUNK)

    @cuda.jit(device=True, forceinline=True)
    def solve_rows_thread(x: Any, s_a: Any, g_column: Any, first: Any) -> None:
        """SOLVED rows from `first` on of a column of (I + A)^-1 y, by forward substitution; y comes in x."""
        for j in range(first):
            solved = g_column[j * dim]
            for r in range(SOLVED):
                x[r] -= s_a[j * CHUNK + first + r] * solved
        for j in range(SOLVED):
            for r in range(SOLVED):
                if r > j:
                    x[r] -= s_a[(first + j) * CHUNK + first + r] * x[j]
        for r in range(SOLVED):
            g_column[(first + r) * dim] = x[r]

    @cuda.jit(device=True)
    def solve_keys_thread(
        g_q: Any,
        q_stride: Any,
        g_k: Any,
        k_stride: Any,
        g_g: Any,
        g_stride: Any,
        scale: Any,
        s_a: Any,
        s_beta: Any,
        g_tile: Any,
        channel: Any,
        rows_here: Any,
    ) -> None:
        """One channel of q exp(G) and of Wm."""
        g_w = offset(g_tile, CHUNK * dim + channel)
        x = cuda.local.array(SOLVED, f32)
        total = f32(0.0)
        for first in range(0, CHUNK, SOLVED):
            for r in range(SOLVED):
                row = first + r
                query = f32(0.0)
                x[r] = f32(0.0)
                if row < rows_here:
                    total += g_g[row * g_stride + channel]
                    decay = math.exp(total)
                    query = scale * f32_from_bf16(g_q[row * q_stride + channel]) * decay
                    x[r] = s_beta[row] * f32_from_bf16(g_k[row * k_stride + channel]) * decay
                g_tile[row * dim + channel] = query
            solve_rows_thread(x, s_a, g_w, first)

    @cuda.jit(device=True)
    def solve_values_thread(
        g_k: Any,
        k_stride: Any,
        g_v: Any,
        v_stride: Any,
        g_g: Any,
        g_stride: Any,
        s_a: Any,
        s_beta: Any,
        g_tile: Any,
        channel: Any,
        rows_here: Any,
    ) -> None:
        """One channel of Kg, of exp(G_end) and of U."""
        g_kg = offset(g_tile, 2 * CHUNK * dim + channel)
        g_u = offset(g_tile, 3 * CHUNK * dim + channel)
        total = f32(0.0)
        for back in range(CHUNK):
            row = CHUNK - 1 - back
            key = f32(0.0)
            if row < rows_here:
                key = f32_from_bf16(g_k[row * k_stride + channel]) * math.exp(total)
                total += g_g[row * g_stride + channel]
            g_kg[row * dim] = key
        g_tile[4 * CHUNK * dim + CHUNK * CHUNK + channel] = math.exp(total)
        x = cuda.local.array(SOLVED, f32)
        for first in range(0, CHUNK, SOLVED):
            for r in range(SOLVED):
                row = first + r
                x[r] = f32(0.0)
                if row < rows_here:
                    x[r] = s_beta[row] * f32_from_bf16(g_v[row * v_stride + channel])
            solve_rows_thread(x, s_a, g_u, first)

    @kernel(
        f"kda_prepare_{dim}_kernel",
        *(bf16p, i64, bf16p, i64, bf16p, i64, f32p, i64, f32p, i64, f32_t, f32p, i64),
        block=(THREADS, 1, 1),
        shared_bytes=shared_bytes,
    )
    def kda_prepare_kernel(
        g_q: Any,
        q_stride: Any,
        g_k: Any,
        k_stride: Any,
        g_v: Any,
        v_stride: Any,
        g_g: Any,
        g_stride: Any,
        g_beta: Any,
        beta_stride: Any,
        scale: Any,
        g_tiles: Any,
        rows: Any,
    ) -> None:
        """One block per chunk and head. First A and P, summed over slices of channels; then a thread per column."""
        i_chunk = i64(cuda.blockIdx.x)
        i_head = i64(cuda.blockIdx.y)
        tid = cuda.threadIdx.x
        row0 = i_chunk * CHUNK
        rows_here = min(i64(CHUNK), rows - row0)
        g_q = offset(g_q, row0 * q_stride + i_head * dim)
        g_k = offset(g_k, row0 * k_stride + i_head * dim)
        g_v = offset(g_v, row0 * v_stride + i_head * dim)
        g_g = offset(g_g, row0 * g_stride + i_head * dim)
        g_beta = offset(g_beta, row0 * beta_stride + i_head)
        g_tile = offset(g_tiles, (i_head * cuda.gridDim.x + i_chunk) * tile)
        g_p = offset(g_tile, 4 * CHUNK * dim)

        s_x = shared_pointer(cuda.shared.array(0, f32, alignment=SHARED_ALIGN))  # [LEVELS, CHUNK, PITCH] keys, decayed
        s_y = offset(s_x, y_at)  # [LEVELS, CHUNK, PITCH] queries, decayed since the boundary before them
        s_k = offset(s_x, raw_at)  # [CHUNK, PITCH] as they came, queries behind them
        s_q = offset(s_k, level_count)
        s_alpha = offset(s_x, alpha_at)  # [CHUNK, PITCH] exp(g)
        s_total = offset(s_x, total_at)  # [GROUPS, SLICE] sums of g
        s_beta = offset(s_total, GROUPS * SLICE)  # [CHUNK]
        s_a = s_x  # [CHUNK, CHUNK] A transposed, once the levels are done with

        if tid < CHUNK:
            s_beta[tid] = g_beta[tid * beta_stride] if tid < rows_here else f32(0.0)

        is_lower = tid < LOWER
        is_diagonal = not is_lower and tid < LOWER + GROUPS
        if is_diagonal:
            t_i = tid - LOWER
            t_j = t_i
        else:
            t_i, t_j = lower_tile_thread(tid if is_lower else tid - LOWER - GROUPS)
        at_level = level_thread(t_i, t_j) * level_count

        a = cuda.local.array((GROUP, GROUP), f32)
        p = cuda.local.array((GROUP, GROUP), f32)
        left_k = cuda.local.array((GROUP, 4), f32)
        left_q = cuda.local.array((GROUP, 4), f32)
        right = cuda.local.array(4, f32)
        for r in range(GROUP):
            for c in range(GROUP):
                a[r, c] = f32(0.0)
                p[r, c] = f32(0.0)

        # A thread makes one channel of one group of rows ready, at every level.
        channel = tid & (SLICE - 1)
        i_group = tid >> 4
        k = cuda.local.array(GROUP, f32)
        q = cuda.local.array(GROUP, f32)
        since = cuda.local.array(GROUP, f32)  # sum of g from the group's first row to this one
        until = cuda.local.array(GROUP, f32)  # sum of g from the row after this one to the group's last
        for d in range(0, dim, SLICE):
            sum_since = f32(0.0)
            for r in range(GROUP):
                row = GROUP * i_group + r
                log_decay = f32(0.0)
                k[r] = f32(0.0)
                q[r] = f32(0.0)
                if row < rows_here:
                    log_decay = g_g[row * g_stride + d + channel]
                    k[r] = f32_from_bf16(g_k[row * k_stride + d + channel])
                    q[r] = f32_from_bf16(g_q[row * q_stride + d + channel])
                slot = (GROUPS * r + i_group) * PITCH + channel
                s_k[slot] = k[r]
                s_q[slot] = q[r]
                s_alpha[slot] = math.exp(log_decay)
                sum_since += log_decay
                since[r] = sum_since
                until[r] = log_decay
            s_total[i_group * SLICE + channel] = sum_since
            sum_until = f32(0.0)
            for x in range(GROUP):
                log_decay = until[GROUP - 1 - x]
                until[GROUP - 1 - x] = sum_until
                sum_until += log_decay
            cuda.syncthreads()

            for level in range(LEVELS):
                half = 1 << level
                boundary = (i_group | (2 * half - 1)) + 1 - half
                between = f32(0.0)
                if i_group >= boundary:
                    for i in range(boundary, i_group):
                        between += s_total[i * SLICE + channel]
                else:
                    for i in range(i_group + 1, boundary):
                        between += s_total[i * SLICE + channel]
                for r in range(GROUP):
                    slot = level * level_count + (GROUPS * r + i_group) * PITCH + channel
                    if i_group >= boundary:
                        decay = math.exp(between + since[r])
                        s_y[slot] = q[r] * decay
                    else:
                        decay = math.exp(until[r] + between)
                    s_x[slot] = k[r] * decay
            cuda.syncthreads()

            if is_lower:
                for i in range(0, SLICE, 4):
                    for r in range(GROUP):
                        for x in range(4):
                            left_k[r, x] = s_x[at_level + (GROUPS * r + t_i) * PITCH + i + x]
                            left_q[r, x] = s_y[at_level + (GROUPS * r + t_i) * PITCH + i + x]
                    for c in range(GROUP):
                        for x in range(4):
                            right[x] = s_x[at_level + (GROUPS * c + t_j) * PITCH + i + x]
                        for x in range(4):
                            for r in range(GROUP):
                                a[r, c] += left_k[r, x] * right[x]
                                p[r, c] += left_q[r, x] * right[x]
            elif is_diagonal:
                for i in range(SLICE):
                    for c in range(GROUP):
                        decayed = s_k[(GROUPS * c + t_i) * PITCH + i]
                        p[c, c] += s_q[(GROUPS * c + t_i) * PITCH + i] * decayed
                        for r in range(GROUP):
                            if r > c:
                                slot = (GROUPS * r + t_i) * PITCH + i
                                decayed *= s_alpha[slot]
                                a[r, c] += s_k[slot] * decayed
                                p[r, c] += s_q[slot] * decayed
            cuda.syncthreads()

        # Threads beyond the diagonal hold zeros: P above it.
        for r in range(GROUP):
            for c in range(GROUP):
                if is_lower or is_diagonal:
                    g_p[(GROUP * t_i + r) * CHUNK + GROUP * t_j + c] = scale * p[r, c]
                    s_a[(GROUP * t_j + c) * CHUNK + GROUP * t_i + r] = s_beta[GROUP * t_i + r] * a[r, c]
                else:
                    g_p[(GROUP * t_j + r) * CHUNK + GROUP * t_i + c] = f32(0.0)
        cuda.syncthreads()

        if tid < dim:
            solve_keys_thread(g_q, q_stride, g_k, k_stride, g_g, g_stride, scale, s_a, s_beta, g_tile, tid, rows_here)
        elif tid < 2 * dim:
            solve_values_thread(g_k, k_stride, g_v, v_stride, g_g, g_stride, s_a, s_beta, g_tile, tid - dim, rows_here)

    return kda_prepare_kernel


# ---- scan -------------------------------------------------------------------------------------------------------


def _scan(dim: int, columns: int) -> Kernel:
    tile = tile_count(dim)
    threads_x = columns // 4
    threads_y = THREADS // threads_x
    state_rows = dim // threads_y
    half = dim // 2
    stage = max(2 * CHUNK * (half + 4), CHUNK * dim, CHUNK * (CHUNK + 4))
    fresh_at = dim * columns
    stages_at = fresh_at + CHUNK * columns
    output_rows = CHUNK // threads_y
    product_rows = 2 * output_rows
    products = _rows_times(product_rows, 1)
    outputs = _rows_times(output_rows, 1)
    update = _columns_times(state_rows)

    @cuda.jit(device=True, forceinline=True)
    def load_halves_block(s_to: Any, g_tile: Any, column: Any) -> None:
        """Half the columns of Wm, and of q below it."""
        load_rows_block(s_to, half + 4, offset(g_tile, CHUNK * dim + column), dim, CHUNK, half)
        load_rows_block(offset(s_to, CHUNK * (half + 4)), half + 4, offset(g_tile, column), dim, CHUNK, half)
        cp_async_commit()

    @kernel(
        f"kda_scan_{dim}_kernel",
        *(f32p, f32p, bf16p, i64, i64),
        block=(THREADS, 1, 1),
        shared_bytes=4 * (stages_at + 2 * stage),
    )
    def kda_scan_kernel(g_tiles: Any, g_state: Any, g_out: Any, out_stride: Any, rows: Any) -> None:
        """One block per head and `columns` columns of its state, which it carries through the chunks in registers.

        Each chunk is four stages of loads, each running while the stage before it is computed with:
        [Wm; q] left halves, right halves, P, Kg.
        """
        i_head = i64(cuda.blockIdx.y)
        column0 = i64(cuda.blockIdx.x) * columns
        tid = cuda.threadIdx.x
        t_x = tid % threads_x
        t_y = tid // threads_x
        chunks = (rows + CHUNK - 1) // CHUNK
        g_tiles = offset(g_tiles, i_head * chunks * tile)
        g_state = offset(g_state, i_head * dim * dim + column0 + 4 * t_x)
        g_out = offset(g_out, i_head * dim + column0 + 4 * t_x)

        s_state = shared_pointer(cuda.shared.array(0, f32, alignment=SHARED_ALIGN))  # [dim, columns]
        s_fresh = offset(s_state, fresh_at)  # [CHUNK, columns] U - Wm S: the values each token really writes
        s_even = offset(s_state, stages_at)
        s_odd = offset(s_even, stage)

        state = cuda.local.array((state_rows, 4), f32)
        acc = cuda.local.array((product_rows, 4), f32)
        out = cuda.local.array((output_rows, 4), f32)
        values = cuda.local.array((output_rows, 4), f32)
        for r in range(state_rows):
            for c in range(4):
                state[r, c] = g_state[(state_rows * t_y + r) * dim + c]
                s_state[(state_rows * t_y + r) * columns + 4 * t_x + c] = state[r, c]

        load_halves_block(s_even, g_tiles, 0)
        for i_chunk in range(chunks):
            g_tile = offset(g_tiles, i_chunk * tile)

            await_rows_block()
            load_halves_block(s_odd, g_tile, half)
            for r in range(product_rows):
                for c in range(4):
                    acc[r, c] = f32(0.0)
            products(acc, s_even, t_y * (half + 4), threads_y * (half + 4), s_state, 4 * t_x, columns, half)

            await_rows_block()
            load_rows_block(s_even, CHUNK + 4, offset(g_tile, 4 * CHUNK * dim), CHUNK, CHUNK, CHUNK)
            cp_async_commit()
            for r in range(output_rows):
                for c in range(4):
                    values[r, c] = g_tile[(3 * CHUNK + t_y + threads_y * r) * dim + column0 + 4 * t_x + c]
            products(
                acc,
                s_odd,
                t_y * (half + 4),
                threads_y * (half + 4),
                s_state,
                half * columns + 4 * t_x,
                columns,
                half,
            )
            for r in range(output_rows):
                for c in range(4):
                    s_fresh[(t_y + threads_y * r) * columns + 4 * t_x + c] = values[r, c] - acc[r, c]
                    out[r, c] = acc[output_rows + r, c]

            await_rows_block()
            load_rows_block(s_odd, dim, offset(g_tile, 2 * CHUNK * dim), dim, CHUNK, dim)
            cp_async_commit()
            outputs(out, s_even, t_y * (CHUNK + 4), threads_y * (CHUNK + 4), s_fresh, 4 * t_x, columns, CHUNK)
            for r in range(output_rows):
                row = i_chunk * CHUNK + t_y + threads_y * r
                if row < rows:
                    for c in range(4):
                        g_out[row * out_stride + c] = cvt_bf16_f32(out[r, c])

            await_rows_block()
            if i_chunk + 1 < chunks:
                load_halves_block(s_even, offset(g_tile, tile), 0)
            for r in range(state_rows):
                decay = g_tile[4 * CHUNK * dim + CHUNK * CHUNK + state_rows * t_y + r]
                for c in range(4):
                    state[r, c] *= decay
            update(state, s_odd, state_rows * t_y, dim, s_fresh, 4 * t_x, columns, CHUNK)
            for r in range(state_rows):
                for c in range(4):
                    s_state[(state_rows * t_y + r) * columns + 4 * t_x + c] = state[r, c]

        for r in range(state_rows):
            for c in range(4):
                g_state[(state_rows * t_y + r) * dim + c] = state[r, c]

    return kda_scan_kernel


# ---- package ----------------------------------------------------------------------------------------------------


def _package(dim: int, columns: int) -> Kernel:
    tile = tile_count(dim)
    threads_x = columns // 4
    threads_y = THREADS // threads_x
    map_rows = dim // threads_y
    fresh_rows = CHUNK // threads_y
    half = dim // 2
    half_chunk = CHUNK // 2
    stage = max(CHUNK * (half + 4), half_chunk * dim)
    fresh_at = dim * columns
    stages_at = fresh_at + CHUNK * columns
    blocks_d = dim // columns
    products = _rows_times(fresh_rows, 1)
    update = _columns_times(map_rows)

    @kernel(
        f"kda_package_{dim}_kernel",
        *(f32p, f32p, f32p, i64),
        block=(THREADS, 1, 1),
        shared_bytes=4 * (stages_at + 2 * stage),
    )
    def kda_package_kernel(g_tiles: Any, g_m: Any, g_d: Any, chunks: Any) -> None:
        """One block per head and `columns` columns of [D | M], which is carried through the chunks like a state.

        M and D are one pass: blocks of one head read the same Wm and Kg at the same time. A grid that ends with D's
        blocks makes D only, and g_m is not touched. Stages of a chunk: Wm left half, right half, Kg rows 0-31, 32-63.
        """
        i_head = i64(cuda.blockIdx.y)
        is_d = cuda.blockIdx.x < blocks_d
        column0 = i64(cuda.blockIdx.x) * columns - (0 if is_d else dim)
        tid = cuda.threadIdx.x
        t_x = tid % threads_x
        t_y = tid // threads_x
        g_tiles = offset(g_tiles, i_head * chunks * tile)

        s_map = shared_pointer(cuda.shared.array(0, f32, alignment=SHARED_ALIGN))  # [dim, columns]
        s_fresh = offset(s_map, fresh_at)  # [CHUNK, columns] U - Wm D, or -Wm M
        s_even = offset(s_map, stages_at)
        s_odd = offset(s_even, stage)

        x = cuda.local.array((map_rows, 4), f32)
        acc = cuda.local.array((fresh_rows, 4), f32)
        for r in range(map_rows):
            for c in range(4):
                on_diagonal = map_rows * t_y + r == column0 + 4 * t_x + c
                x[r, c] = f32(1.0) if on_diagonal and not is_d else f32(0.0)
                s_map[(map_rows * t_y + r) * columns + 4 * t_x + c] = x[r, c]

        if chunks > 0:
            load_rows_block(s_even, half + 4, offset(g_tiles, CHUNK * dim), dim, CHUNK, half)
            cp_async_commit()
        for i_chunk in range(chunks):
            g_tile = offset(g_tiles, i_chunk * tile)

            await_rows_block()
            load_rows_block(s_odd, half + 4, offset(g_tile, CHUNK * dim + half), dim, CHUNK, half)
            cp_async_commit()
            for r in range(fresh_rows):
                for c in range(4):
                    acc[r, c] = f32(0.0)
            products(acc, s_even, t_y * (half + 4), threads_y * (half + 4), s_map, 4 * t_x, columns, half)

            await_rows_block()
            load_rows_block(s_even, dim, offset(g_tile, 2 * CHUNK * dim), dim, half_chunk, dim)
            cp_async_commit()
            products(
                acc,
                s_odd,
                t_y * (half + 4),
                threads_y * (half + 4),
                s_map,
                half * columns + 4 * t_x,
                columns,
                half,
            )
            for r in range(fresh_rows):
                for c in range(4):
                    value = f32(0.0)
                    if is_d:
                        value = g_tile[(3 * CHUNK + t_y + threads_y * r) * dim + column0 + 4 * t_x + c]
                    s_fresh[(t_y + threads_y * r) * columns + 4 * t_x + c] = value - acc[r, c]

            await_rows_block()
            load_rows_block(s_odd, dim, offset(g_tile, (2 * CHUNK + half_chunk) * dim), dim, half_chunk, dim)
            cp_async_commit()
            for r in range(map_rows):
                decay = g_tile[4 * CHUNK * dim + CHUNK * CHUNK + map_rows * t_y + r]
                for c in range(4):
                    x[r, c] *= decay
            update(x, s_even, map_rows * t_y, dim, s_fresh, 4 * t_x, columns, half_chunk)

            await_rows_block()
            if i_chunk + 1 < chunks:
                load_rows_block(s_even, half + 4, offset(g_tile, tile + CHUNK * dim), dim, CHUNK, half)
                cp_async_commit()
            update(x, s_odd, map_rows * t_y, dim, s_fresh, half_chunk * columns + 4 * t_x, columns, half_chunk)
            for r in range(map_rows):
                for c in range(4):
                    s_map[(map_rows * t_y + r) * columns + 4 * t_x + c] = x[r, c]

        g_to = offset(g_d if is_d else g_m, i_head * dim * dim + column0 + 4 * t_x)
        for r in range(map_rows):
            for c in range(4):
                g_to[(map_rows * t_y + r) * dim + c] = x[r, c]

    return kda_package_kernel


# ---- compose ----------------------------------------------------------------------------------------------------


def _compose(dim: int) -> Kernel:
    groups = max(1, dim // 64)  # of four columns, 64 columns apart, that a thread has
    threads_x = dim // 4 // groups
    threads_y = THREADS // threads_x
    thread_rows = dim // threads_y
    thread_columns = 4 * groups
    stage = dim * PITCH
    stages_at = dim * dim
    products = _rows_times(thread_rows, groups)

    @kernel(
        f"kda_compose_{dim}_kernel",
        *(f32p, f32p, f32p),
        block=(THREADS, 1, 1),
        shared_bytes=4 * (stages_at + 2 * stage),
    )
    def kda_compose_kernel(g_m: Any, g_d: Any, g_state: Any) -> None:
        """One block per head, so that a package in a peer's slab crosses the link once."""
        i_head = i64(cuda.blockIdx.x)
        tid = cuda.threadIdx.x
        t_x = tid % threads_x
        t_y = tid // threads_x
        g_m = offset(g_m, i_head * dim * dim)
        g_d = offset(g_d, i_head * dim * dim)
        g_state = offset(g_state, i_head * dim * dim)

        s_state = shared_pointer(cuda.shared.array(0, f32, alignment=SHARED_ALIGN))  # [dim, dim]
        s_even = offset(s_state, stages_at)  # [dim, PITCH] sixteen columns of M
        s_odd = offset(s_even, stage)
        acc = cuda.local.array((thread_rows, thread_columns), f32)
        g_left, g_right = g_m, g_state

        load_rows_block(s_state, dim, g_right, dim, dim, dim)
        load_rows_block(s_even, PITCH, g_left, dim, dim, SLICE)
        cp_async_commit()
        for r in range(thread_rows):
            for n in range(groups):
                for c in range(4):
                    acc[r, 4 * n + c] = g_d[(t_y + threads_y * r) * dim + 64 * n + 4 * t_x + c]
        for i in range(0, dim, 2 * SLICE):
            await_rows_block()
            load_rows_block(s_odd, PITCH, offset(g_left, i + SLICE), dim, dim, SLICE)
            cp_async_commit()
            products(acc, s_even, t_y * PITCH, threads_y * PITCH, s_state, i * dim + 4 * t_x, dim, SLICE)
            await_rows_block()
            if i + 2 * SLICE < dim:
                load_rows_block(s_even, PITCH, offset(g_left, i + 2 * SLICE), dim, dim, SLICE)
                cp_async_commit()
            products(acc, s_odd, t_y * PITCH, threads_y * PITCH, s_state, (i + SLICE) * dim + 4 * t_x, dim, SLICE)
        for r in range(thread_rows):
            for n in range(groups):
                for c in range(4):
                    g_state[(t_y + threads_y * r) * dim + 64 * n + 4 * t_x + c] = acc[r, 4 * n + c]

    return kda_compose_kernel


# ---- decode -----------------------------------------------------------------------------------------------------


def _decode(dim: int) -> Kernel:
    warp_rows = dim // WARPS

    @kernel(
        f"kda_decode_{dim}_kernel",
        *(bf16p, i64, bf16p, i64, bf16p, i64, f32p, i64, f32p, i64, f32_t, f32p, i64p, bf16p, i64),
        block=(DECODE_THREADS, 1, 1),
    )
    def kda_decode_kernel(
        g_q: Any,
        q_stride: Any,
        g_k: Any,
        k_stride: Any,
        g_v: Any,
        v_stride: Any,
        g_g: Any,
        g_stride: Any,
        g_beta: Any,
        beta_stride: Any,
        scale: Any,
        g_states: Any,
        g_slots: Any,
        g_out: Any,
        out_stride: Any,
    ) -> None:
        """One block per request, head and 32 columns: a lane per column, a quarter of the rows per warp."""
        i_row = i64(cuda.blockIdx.z)
        i_head = i64(cuda.blockIdx.y)
        tid = cuda.threadIdx.x
        lane = tid % 32
        warp = tid // 32
        column = i64(cuda.blockIdx.x) * DECODE_COLUMNS + lane
        head = i_head * dim
        g_state = offset(g_states, ((g_slots[i_row] * cuda.gridDim.y + i_head) * dim + warp_rows * warp) * dim + column)

        s_q = cuda.shared.array(dim, f32)
        s_k = cuda.shared.array(dim, f32)
        s_alpha = cuda.shared.array(dim, f32)
        s_part = cuda.shared.array((2, WARPS, DECODE_COLUMNS), f32)
        if tid < dim:
            s_q[tid] = scale * f32_from_bf16(g_q[i_row * q_stride + head + tid])
            s_k[tid] = f32_from_bf16(g_k[i_row * k_stride + head + tid])
            s_alpha[tid] = math.exp(g_g[i_row * g_stride + head + tid])
        cuda.syncthreads()

        state = cuda.local.array(warp_rows, f32)
        predicted = f32(0.0)
        for r in range(warp_rows):
            state[r] = g_state[r * dim] * s_alpha[warp_rows * warp + r]
            predicted += s_k[warp_rows * warp + r] * state[r]
        s_part[0, warp, lane] = predicted
        cuda.syncthreads()

        fresh = f32_from_bf16(g_v[i_row * v_stride + head + column])
        for x in range(WARPS):
            fresh -= s_part[0, x, lane]
        fresh *= g_beta[i_row * beta_stride + i_head]
        read = f32(0.0)
        for r in range(warp_rows):
            updated = state[r] + s_k[warp_rows * warp + r] * fresh
            g_state[r * dim] = updated
            read += s_q[warp_rows * warp + r] * updated
        s_part[1, warp, lane] = read
        cuda.syncthreads()

        if warp == 0:
            total = f32(0.0)
            for x in range(WARPS):
                total += s_part[1, x, lane]
            g_out[i_row * out_stride + head + column] = cvt_bf16_f32(total)

    return kda_decode_kernel


# ---- the ops ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Width:
    """The kernels of one head width, and how many columns of the value axis a block of scan and package takes."""

    prepare: Kernel
    scan: Kernel
    scan_columns: int
    package: Kernel
    package_columns: int
    compose: Kernel
    decode: Kernel


def _width(dim: int, scan_columns: int, package_columns: int) -> _Width:
    return _Width(
        prepare=_prepare(dim),
        scan=_scan(dim, scan_columns),
        scan_columns=scan_columns,
        package=_package(dim, package_columns),
        package_columns=package_columns,
        compose=_compose(dim),
        decode=_decode(dim),
    )


# 32 columns keep the state of 4 x heads blocks in flight; a package has twice the columns and can be wider per block.
WIDTHS = {32: _width(32, 32, 32), 128: _width(128, 32, 64)}


def _of(key_dim: int, value_dim: int) -> _Width:
    if key_dim != value_dim or key_dim not in WIDTHS:
        raise ShapeError(f"heads: expected K = V in {sorted(WIDTHS)}, got K {key_dim}, V {value_dim}")
    return WIDTHS[key_dim]


def kda_tiles_bytes(rows: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Bytes of the buffer that kda_prepare fills for `rows` rows; the device addresses of it are on 16 bytes."""
    _of(key_dim, value_dim)
    return 4 * tile_count(key_dim) * heads * chunks_count(rows)


def kda_gate(
    stream: Stream, f: int, f_stride: int, a_log: int, dt_bias: int, rows: int, heads: int, key_dim: int
) -> None:
    """f <- -exp(a_log) * softplus(f + dt_bias): the log decay, <= 0, without lower bound.

    Args:
        f:        f32 [T, H, K]  in place; rows f_stride values apart. f32, since it is an exponent: bf16 would make an
                                 error of 2^-9 of it a factor on everything the state holds
        a_log:    f32 [H]
        dt_bias:  f32 [H, K]
    """
    require_addresses(f=(f, 4), a_log=(a_log, 4), dt_bias=(dt_bias, 4))
    if rows:
        stream.launch(kda_gate_kernel, rows, THREADS, 0, f, f_stride, a_log, dt_bias, heads, key_dim)


def kda_beta(stream: Stream, b: int, b_stride: int, rows: int, heads: int) -> None:
    """b <- sigmoid(b): the write strength. b: f32 [T, H] in place, rows b_stride values apart."""
    require_addresses(b=(b, 4))
    if rows and heads:
        stream.launch(kda_beta_kernel, -(-rows * heads // THREADS), THREADS, 0, b, b_stride, rows, heads)


def kda_prepare(
    stream: Stream,
    q: int,
    q_stride: int,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    g: int,
    g_stride: int,
    beta: int,
    beta_stride: int,
    scale: float,
    tiles: int,
    rows: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    """Everything of a segment that does not depend on the state that comes in. Chunks start at row 0.

    Args:
        q, k:   bf16 [T, H, K]  normalised; rows q_stride, k_stride values apart, as below
        v:      bf16 [T, H, V]
        g:      f32 [T, H, K]   log decay <= 0
        beta:   f32 [T, H]      after the sigmoid
        tiles:  kda_tiles_bytes, all of it written; on 16 bytes
        The inputs are only read.
    Raises:   ShapeError for a head width without kernels, and as all here for an address that is not aligned
    """
    width = _of(key_dim, value_dim)
    require_addresses(q=(q, 2), k=(k, 2), v=(v, 2), g=(g, 4), beta=(beta, 4), tiles=(tiles, 16))
    require_blocks("heads", heads)
    if rows:
        stream.launch(
            width.prepare,
            (chunks_count(rows), heads, 1),
            THREADS,
            width.prepare.shared_bytes,
            *(q, q_stride, k, k_stride, v, v_stride, g, g_stride, beta, beta_stride, scale, tiles, rows),
        )


def kda_scan(
    stream: Stream,
    tiles: int,
    state: int,
    out: int,
    out_stride: int,
    rows: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    """Run the chunks of a prepared segment from `state`, which becomes the state after row T-1.

    Args:
        tiles:  as kda_prepare left them for the same `rows`; not written
        state:  f32 [H, K, V]   in and out, packed
        out:    bf16 [T, H, V]  rows out_stride values apart
    Raises:   ShapeError for a head width without kernels
    """
    width = _of(key_dim, value_dim)
    require_addresses(tiles=(tiles, 16), state=(state, 4), out=(out, 2))
    require_blocks("heads", heads)
    if rows:
        grid = (value_dim // width.scan_columns, heads, 1)
        stream.launch(width.scan, grid, THREADS, width.scan.shared_bytes, tiles, state, out, out_stride, rows)


def kda_package(
    stream: Stream, tiles: int, m: int, d: int, rows: int, heads: int, key_dim: int, value_dim: int
) -> None:
    """The segment as an affine map of its initial state, `state_out = m @ state_in + d` per head, in one pass.

    Args:
        tiles:  as kda_prepare left them for the same `rows`; not written
        m:      f32 [H, K, K]  out, packed
        d:      f32 [H, K, V]  out, packed
    Writes:   m, d whole (T = 0 gives the identity)
    Raises:   ShapeError for a head width without kernels
    """
    width = _of(key_dim, value_dim)
    require_addresses(tiles=(tiles, 16), m=(m, 4), d=(d, 4))
    require_blocks("heads", heads)
    grid = ((value_dim + key_dim) // width.package_columns, heads, 1)
    stream.launch(width.package, grid, THREADS, width.package.shared_bytes, tiles, m, d, chunks_count(rows))


def kda_package_d(stream: Stream, tiles: int, d: int, rows: int, heads: int, key_dim: int, value_dim: int) -> None:
    """Only `d` of kda_package, the state after the segment run from zero: all that the first member of a gang sends."""
    width = _of(key_dim, value_dim)
    require_addresses(tiles=(tiles, 16), d=(d, 4))
    require_blocks("heads", heads)
    grid = (value_dim // width.package_columns, heads, 1)
    stream.launch(width.package, grid, THREADS, width.package.shared_bytes, tiles, 0, d, chunks_count(rows))


def kda_compose(stream: Stream, m: int, d: int, state: int, heads: int, key_dim: int, value_dim: int) -> None:
    """state <- m @ state + d per head: carry a state across a segment that somebody else ran.

    Args:
        m:      f32 [H, K, K]  packed, on 16 bytes (may lie in another rank's slab)
        d:      f32 [H, K, V]  packed
        state:  f32 [H, K, V]  in and out, packed, on 16 bytes
    """
    width = _of(key_dim, value_dim)
    require_addresses(m=(m, 16), d=(d, 4), state=(state, 16))
    if heads:
        stream.launch(width.compose, heads, THREADS, width.compose.shared_bytes, m, d, state)


def kda_decode(
    stream: Stream,
    q: int,
    q_stride: int,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    g: int,
    g_stride: int,
    beta: int,
    beta_stride: int,
    scale: float,
    states: int,
    slots: int,
    out: int,
    out_stride: int,
    rows: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    """One token of each request through the recurrence, on the states of the given slots.

    Args:
        q, k:     bf16 [B, H, K]    normalised; rows q_stride, k_stride values apart, as below; not written
        v:        bf16 [B, H, V]    not written
        g:        f32 [B, H, K]     log decay
        beta:     f32 [B, H]        after the sigmoid
        states:   f32 [S, H, K, V]  in place, rows `slots` only; packed
        slots:    int64 [B]         distinct
        out:      bf16 [B, H, V]    may be v
    Raises:   ShapeError, also for more than 65,535 requests, which a grid does not take
    """
    width = _of(key_dim, value_dim)
    require_addresses(q=(q, 2), k=(k, 2), v=(v, 2), g=(g, 4), beta=(beta, 4))
    require_addresses(states=(states, 4), slots=(slots, 8), out=(out, 2))
    require_blocks("heads", heads)
    if rows:
        require_blocks("rows", rows)
        stream.launch(
            width.decode,
            (value_dim // DECODE_COLUMNS, heads, rows),
            DECODE_THREADS,
            0,
            *(q, q_stride, k, k_stride, v, v_stride, g, g_stride, beta, beta_stride, scale),
            *(states, slots, out, out_stride),
        )
