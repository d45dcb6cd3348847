"""Short convolution on the device: a thread carries four channels down a tile of rows; twins of the host ops on bf16.

No row is ever copied to stand beside another. A thread has the three rows before its next one in registers, and takes
the first three of its tile from where they lie: the tail, or the last rows of the tile above.

In place (out is x, or the new tail overwrites the old one) the tile above may be finished, and its last rows gone,
before this tile begins. Then, if there is more than one tile, the halos of all tiles are first saved to a scratch: 3
rows of every 64, the only copies made.

Sums are f32, rounded to bf16 once, when stored. Tails hold bf16: they are the rows as they came, so every cut of a
prompt gives the same bits. Tolerance: against `naive.py`, twice the error of the one rounding and one bf16 unit more.
Hot: yes.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from whalez.ops.device.kernel import kernel
from whalez.ops.device.limits import GRID_YZ_MAX, require_addresses, require_blocks
from whalez.ops.device.ptx import cvt_bf16_f32, f32_from_bf16
from whalez.ops.device.rowwise import (
    load_bits_x4,
    load_x4_thread,
    sigmoid_thread,
    store_bf16x4_thread,
    store_bits_x4,
    vectors_of,
)
from whalez.ops.device.types import bf16p, f32, f32p, i64, i64p, u64

WIDTH = 4  # taps; the tail carries WIDTH - 1 rows
TAIL = WIDTH - 1
TILE_ROWS = 64
THREADS = 128


def short_conv_scratch_bytes(rows: int, width: int) -> int:
    """Bytes `short_conv` may write to its scratch for this many rows; 0 if it needs none."""
    tiles = -(-rows // TILE_ROWS)
    return 2 * TAIL * width * tiles if tiles > 1 else 0


def short_conv(
    stream: Any,
    x: int,
    x_stride: int,
    tail: int,
    next_tail: int,
    weight: int,
    out: int,
    out_stride: int,
    scratch: int,
    rows: int,
    width: int,
) -> None:
    """out[t] = silu(sum_j weight[:, j] * x[t - 3 + j]); rows before row 0 come from the tail.

    Args:
        x:          bf16 [T, D]  rows x_stride elements apart
        tail:       bf16 [3, D]  the three pre-conv rows before row 0, oldest first; zeros at the start of a prompt
        next_tail:  bf16 [3, D]  gets the last three rows of [tail; x]; may be tail; 0 if nobody wants them
        weight:     f32 [D, 4]   tap 3 is the current token
        out:        bf16 [T, D]  rows out_stride elements apart; may be x (then out_stride is x_stride), but may not
                                 overlap it otherwise
        scratch:    short_conv_scratch_bytes(rows, width) bytes, 16-aligned; read only if out is x or next_tail is tail
    Writes:   out[:T], next_tail, scratch
    Raises:   ShapeError before any launch, as all here
    """
    require_addresses(x=(x, 2), tail=(tail, 2), next_tail=(next_tail, 2), weight=(weight, 4), out=(out, 2))
    require_addresses(scratch=(scratch, 16))
    require_blocks("width", width, GRID_YZ_MAX * THREADS)
    if not rows:
        if next_tail not in (0, tail):
            stream.copy(next_tail, tail, 2 * TAIL * width)
        return
    tiles = -(-rows // TILE_ROWS)
    above, above_tile_stride, above_stride = x + 2 * (TILE_ROWS - TAIL) * x_stride, TILE_ROWS * x_stride, x_stride
    if tiles > 1 and (out == x or next_tail == tail):
        quads = vectors_of(width, 4, (x, tail, scratch), (x_stride, width))
        grid = _grid(tiles, quads or width)
        stream.launch(conv_halos_kernel, grid, THREADS, 0, x, x_stride, tail, scratch, quads, width)
        tail, above, above_tile_stride, above_stride = scratch, scratch + 2 * TAIL * width, TAIL * width, width
    quads = vectors_of(width, 4, (x, tail, next_tail, weight, out), (x_stride, out_stride, width))
    stream.launch(
        short_conv_kernel,
        _grid(tiles, quads or width),
        THREADS,
        0,
        x,
        x_stride,
        tail,
        above,
        above_tile_stride,
        above_stride,
        weight,
        out,
        out_stride,
        next_tail,
        int(next_tail != 0),
        rows,
        quads,
        width,
    )


def conv_tail(stream: Any, x: int, x_stride: int, tail: int, next_tail: int, rows: int, width: int) -> None:
    """next_tail <- the last three rows of [tail; x]. `short_conv` does the same on the way.

    Args:
        x:          bf16 [T, D]  pre-conv rows, x_stride elements apart; T may be 0, 1 or 2
        tail:       bf16 [3, D]
        next_tail:  bf16 [3, D]  may be tail
    Writes:   next_tail
    """
    require_addresses(x=(x, 2), tail=(tail, 2), next_tail=(next_tail, 2))
    require_blocks("width", width, GRID_YZ_MAX * THREADS)
    quads = vectors_of(width, 4, (x, tail, next_tail), (x_stride, width))
    stream.launch(
        conv_tail_kernel, _grid(1, quads or width), THREADS, 0, x, x_stride, tail, next_tail, rows, quads, width
    )


def short_conv_decode(
    stream: Any,
    x: int,
    x_stride: int,
    tails: int,
    slot_stride: int,
    slots: int,
    weight: int,
    out: int,
    out_stride: int,
    rows: int,
    width: int,
) -> None:
    """One token of each request: short_conv of one row with the tail of its slot, which is carried on in place.

    Args:
        x:       bf16 [B, D]     rows x_stride elements apart
        tails:   bf16 [S, 3, D]  in place, slots `slots` only; slot_stride elements from slot to slot
        slots:   int64 [B]       distinct, and inside tails: nothing checks them on the device
        weight:  f32 [D, 4]
        out:     bf16 [B, D]     rows out_stride elements apart; may be x
    Writes:   out[:B], tails[slots]
    """
    require_addresses(x=(x, 2), tails=(tails, 2), slots=(slots, 8), weight=(weight, 4), out=(out, 2))
    require_blocks("width", width, GRID_YZ_MAX * THREADS)
    if not rows:
        return
    quads = vectors_of(width, 4, (x, tails, weight, out), (x_stride, slot_stride, out_stride, width))
    stream.launch(
        short_conv_decode_kernel,
        _grid(rows, quads or width),
        THREADS,
        0,
        x,
        x_stride,
        tails,
        slot_stride,
        slots,
        weight,
        out,
        out_stride,
        quads,
        width,
    )


def _grid(rows_or_tiles: int, lanes: int) -> tuple[int, int, int]:
    return rows_or_tiles, -(-lanes // THREADS), 1


@cuda.jit(device=True)
def silu_of_taps_thread(a: Any, b: Any, c: Any, d: Any, w0: Any, w1: Any, w2: Any, w3: Any) -> Any:
    summed = a * w0 + b * w1 + c * w2 + d * w3
    return summed * sigmoid_thread(summed)


@cuda.jit(device=True)
def load_taps_thread(g_weight: Any, i_quad: Any, t_w: Any) -> None:
    """The 16 taps of four channels, channel by channel."""
    for c in range(4):
        load_x4_thread(g_weight, 4 * i_quad + c, t_w, 4 * c)


@cuda.jit(device=True)
def conv_row_thread(t_w: Any, t_x: Any, at: Any, t_y: Any) -> None:
    """One row of four channels from the four rows of t_x that begin at value `at`, the oldest first."""
    for c in range(4):
        i, w = at + c, 4 * c
        t_y[c] = silu_of_taps_thread(
            t_x[i], t_x[i + 4], t_x[i + 8], t_x[i + 12], t_w[w], t_w[w + 1], t_w[w + 2], t_w[w + 3]
        )


@kernel(
    "short_conv_kernel", bf16p, i64, bf16p, bf16p, i64, i64, f32p, bf16p, i64, bf16p, i64, i64, i64, i64, block=THREADS
)
def short_conv_kernel(
    g_x: Any,
    x_stride: Any,
    g_tail: Any,
    g_above: Any,
    above_tile_stride: Any,
    above_stride: Any,
    g_weight: Any,
    g_out: Any,
    out_stride: Any,
    g_next_tail: Any,
    has_next_tail: Any,
    rows: Any,
    quads: Any,
    width: Any,
) -> None:
    """Row j before tile i: row j of the tail if i = 0, else element (i-1) above_tile_stride + j above_stride of above.

    The last tile leaves the rows it carries as the next tail.
    """
    i_tile = i64(cuda.blockIdx.x)
    i_lane = i64(cuda.blockIdx.y) * THREADS + i64(cuda.threadIdx.x)
    i_row = i_tile * TILE_ROWS
    end = min(i_row + TILE_ROWS, rows)
    carries = end == rows and has_next_tail

    if quads:
        if i_lane >= quads:
            return
        t_w = cuda.local.array(16, f32)
        t_x = cuda.local.array(28, f32)  # three rows before, four rows now
        t_y = cuda.local.array(4, f32)
        load_taps_thread(g_weight, i_lane, t_w)
        for j in range(TAIL):
            if i_tile == 0:
                load_x4_thread(g_tail, ((j * width) >> 2) + i_lane, t_x, 4 * j)
            else:
                before = (i_tile - 1) * above_tile_stride + j * above_stride
                load_x4_thread(g_above, (before >> 2) + i_lane, t_x, 4 * j)
        # Four rows are read before the first of them is written: enough bytes under way, and `out` may be `x`.
        while i_row + 4 <= end:
            for j in range(4):
                load_x4_thread(g_x, (((i_row + j) * x_stride) >> 2) + i_lane, t_x, 12 + 4 * j)
            for j in range(4):
                conv_row_thread(t_w, t_x, 4 * j, t_y)
                store_bf16x4_thread(g_out, (((i_row + j) * out_stride) >> 2) + i_lane, t_y)
            for j in range(12):
                t_x[j] = t_x[j + 16]
            i_row += 4
        while i_row < end:
            load_x4_thread(g_x, ((i_row * x_stride) >> 2) + i_lane, t_x, 12)
            conv_row_thread(t_w, t_x, 0, t_y)
            store_bf16x4_thread(g_out, ((i_row * out_stride) >> 2) + i_lane, t_y)
            for j in range(12):
                t_x[j] = t_x[j + 4]
            i_row += 1
        if carries:
            for j in range(TAIL):
                for k in range(4):
                    t_y[k] = t_x[4 * j + k]
                store_bf16x4_thread(g_next_tail, ((j * width) >> 2) + i_lane, t_y)
        return

    if i_lane >= width:
        return
    w0, w1 = g_weight[4 * i_lane], g_weight[4 * i_lane + 1]
    w2, w3 = g_weight[4 * i_lane + 2], g_weight[4 * i_lane + 3]
    if i_tile == 0:
        a = g_tail[i_lane]
        b = g_tail[width + i_lane]
        c = g_tail[2 * width + i_lane]
    else:
        before = (i_tile - 1) * above_tile_stride + i_lane
        a = g_above[before]
        b = g_above[before + above_stride]
        c = g_above[before + 2 * above_stride]
    while i_row < end:
        d = g_x[i_row * x_stride + i_lane]
        y = silu_of_taps_thread(f32_from_bf16(a), f32_from_bf16(b), f32_from_bf16(c), f32_from_bf16(d), w0, w1, w2, w3)
        g_out[i_row * out_stride + i_lane] = cvt_bf16_f32(y)
        a, b, c = b, c, d
        i_row += 1
    if carries:
        g_next_tail[i_lane] = a
        g_next_tail[width + i_lane] = b
        g_next_tail[2 * width + i_lane] = c


@kernel("conv_halos_kernel", bf16p, i64, bf16p, bf16p, i64, i64, block=THREADS)
def conv_halos_kernel(g_x: Any, x_stride: Any, g_tail: Any, g_halos: Any, quads: Any, width: Any) -> None:
    """halos [tiles, 3, D] <- the three rows before each tile."""
    i_tile = i64(cuda.blockIdx.x)
    i_lane = i64(cuda.blockIdx.y) * THREADS + i64(cuda.threadIdx.x)
    if i_lane >= (quads if quads else width):
        return
    for j in range(TAIL):
        halo = (i_tile * TAIL + j) * width
        source = (i_tile * TILE_ROWS - TAIL + j) * x_stride
        if quads:
            if i_tile == 0:
                bits = load_bits_x4(g_tail, ((j * width) >> 2) + i_lane)
            else:
                bits = load_bits_x4(g_x, (source >> 2) + i_lane)
            store_bits_x4(g_halos, (halo >> 2) + i_lane, bits)
        elif i_tile == 0:
            g_halos[halo + i_lane] = g_tail[j * width + i_lane]
        else:
            g_halos[halo + i_lane] = g_x[source + i_lane]


@kernel("conv_tail_kernel", bf16p, i64, bf16p, bf16p, i64, i64, i64, block=THREADS)
def conv_tail_kernel(g_x: Any, x_stride: Any, g_tail: Any, g_next_tail: Any, rows: Any, quads: Any, width: Any) -> None:
    """All three rows are read before one is written, so a short piece shifts the tail in place."""
    i_lane = i64(cuda.blockIdx.y) * THREADS + i64(cuda.threadIdx.x)
    if i_lane >= (quads if quads else width):
        return
    if quads:
        t_bits = cuda.local.array(TAIL, u64)
        for j in range(TAIL):
            i_row = rows - TAIL + j
            if i_row < 0:
                t_bits[j] = load_bits_x4(g_tail, (((TAIL + i_row) * width) >> 2) + i_lane)
            else:
                t_bits[j] = load_bits_x4(g_x, ((i_row * x_stride) >> 2) + i_lane)
        for j in range(TAIL):
            store_bits_x4(g_next_tail, ((j * width) >> 2) + i_lane, t_bits[j])
        return
    t_value = cuda.local.array(TAIL, types.uint16)
    for j in range(TAIL):
        i_row = rows - TAIL + j
        if i_row < 0:
            t_value[j] = g_tail[(TAIL + i_row) * width + i_lane]
        else:
            t_value[j] = g_x[i_row * x_stride + i_lane]
    for j in range(TAIL):
        g_next_tail[j * width + i_lane] = t_value[j]


@kernel("short_conv_decode_kernel", bf16p, i64, bf16p, i64, i64p, f32p, bf16p, i64, i64, i64, block=THREADS)
def short_conv_decode_kernel(
    g_x: Any,
    x_stride: Any,
    g_tails: Any,
    slot_stride: Any,
    g_slots: Any,
    g_weight: Any,
    g_out: Any,
    out_stride: Any,
    quads: Any,
    width: Any,
) -> None:
    i_request = i64(cuda.blockIdx.x)
    i_lane = i64(cuda.blockIdx.y) * THREADS + i64(cuda.threadIdx.x)
    if i_lane >= (quads if quads else width):
        return
    tail = g_slots[i_request] * slot_stride
    x, out = i_request * x_stride, i_request * out_stride
    if quads:
        t_w = cuda.local.array(16, f32)
        t_x = cuda.local.array(16, f32)
        t_y = cuda.local.array(4, f32)
        load_taps_thread(g_weight, i_lane, t_w)
        for j in range(TAIL):
            load_x4_thread(g_tails, ((tail + j * width) >> 2) + i_lane, t_x, 4 * j)
        load_x4_thread(g_x, (x >> 2) + i_lane, t_x, 12)
        conv_row_thread(t_w, t_x, 0, t_y)
        store_bf16x4_thread(g_out, (out >> 2) + i_lane, t_y)
        for j in range(TAIL):
            for k in range(4):
                t_y[k] = t_x[4 * (j + 1) + k]
            store_bf16x4_thread(g_tails, ((tail + j * width) >> 2) + i_lane, t_y)
        return
    w = 4 * i_lane
    a, b, c = g_tails[tail + i_lane], g_tails[tail + width + i_lane], g_tails[tail + 2 * width + i_lane]
    d = g_x[x + i_lane]
    y = silu_of_taps_thread(
        f32_from_bf16(a),
        f32_from_bf16(b),
        f32_from_bf16(c),
        f32_from_bf16(d),
        g_weight[w],
        g_weight[w + 1],
        g_weight[w + 2],
        g_weight[w + 3],
    )
    g_out[out + i_lane] = cvt_bf16_f32(y)
    g_tails[tail + i_lane] = b
    g_tails[tail + width + i_lane] = c
    g_tails[tail + 2 * width + i_lane] = d
