"""The pass between the two GEMMs of an expert, on the device: a thread takes eight columns of a row.

f32 inside, rounded to bf16 once. Tolerance against `naive.py`: twice the error of that rounding, one bf16 unit more.
Hot: yes.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from whalez.ops.device.kernel import kernel
from whalez.ops.device.limits import GRID_YZ_MAX, require_addresses, require_blocks
from whalez.ops.device.ptx import cvt_bf16_f32
from whalez.ops.device.rowwise import (
    load_bf16x8_thread,
    load_x1,
    sigmoid_thread,
    store_bf16x8_thread,
    vectors_of,
)
from whalez.ops.device.types import bf16p, f32, i64

THREADS = 128


def swiglu(stream: Any, gate_up: int, gate_up_stride: int, out: int, out_stride: int, rows: int, width: int) -> None:
    """out = silu(gate) * up.

    Args:
        gate_up:  bf16 [T, 2I]  rows gate_up_stride elements apart; gate in the first I columns, up in the last
        out:      bf16 [T, I]   rows out_stride elements apart; may be gate_up (then the strides are equal)
    Writes:   out[:T] only
    Raises:   ShapeError before any launch
    """
    require_addresses(gate_up=(gate_up, 2), out=(out, 2))
    require_blocks("width", width, GRID_YZ_MAX * THREADS)
    if not rows:
        return
    octets = vectors_of(width, 8, (gate_up, out), (gate_up_stride, out_stride, width))
    grid = (rows, -(-(octets or width) // THREADS), 1)
    stream.launch(swiglu_kernel, grid, THREADS, 0, gate_up, gate_up_stride, out, out_stride, octets, width)


@kernel("swiglu_kernel", bf16p, i64, bf16p, i64, i64, i64, block=THREADS)
def swiglu_kernel(g_gate_up: Any, gate_up_stride: Any, g_out: Any, out_stride: Any, octets: Any, width: Any) -> None:
    i_row = i64(cuda.blockIdx.x)
    i_lane = i64(cuda.blockIdx.y) * THREADS + i64(cuda.threadIdx.x)
    gate, out = i_row * gate_up_stride, i_row * out_stride
    if octets:
        if i_lane < octets:
            t_gate = cuda.local.array(8, f32)
            t_up = cuda.local.array(8, f32)
            load_bf16x8_thread(g_gate_up, (gate >> 3) + i_lane, t_gate)
            load_bf16x8_thread(g_gate_up, ((gate + width) >> 3) + i_lane, t_up)
            for j in range(8):
                t_up[j] *= t_gate[j] * sigmoid_thread(t_gate[j])
            store_bf16x8_thread(g_out, (out >> 3) + i_lane, t_up)
    elif i_lane < width:
        x = load_x1(g_gate_up, gate + i_lane)
        up = load_x1(g_gate_up, gate + width + i_lane)
        g_out[out + i_lane] = cvt_bf16_f32(x * sigmoid_thread(x) * up)
