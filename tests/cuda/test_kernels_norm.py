"""Norm and SwiGLU kernels against float64: odd shapes, all thread orders, guarded rows, seeded mistakes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from helpers.device_rows import Rows, assert_bf16_near, assert_compact, chips, draw, performed, sparse
from helpers.mutate import assert_caught, changes, seeds
from whalez.ops.moe import cuda as moe
from whalez.ops.moe.naive import naive_swiglu
from whalez.ops.norm import cuda as norm
from whalez.ops.norm import naive
from whalez.testing import simt

pytestmark = pytest.mark.usefixtures("device")  # the harness, and a GPU with -m gpu

# Rows; then the width and the gap behind it: whole vectors, vectors and a rest, rows that are not aligned, one value.
ROWS = [1, 2, 3, 63, 64, 65, 113]
WIDTHS = [(64, 0), (37, 3), (37, 0), (1, 0), (2304, 8), (300, 4)]
HEADS = [(1, 128, 0), (3, 128, 8), (9, 12, 4), (2, 37, 0), (5, 1, 3), (2, 6, 4)]


def check_rms_norm(rows, width, gap, in_place=False, order="forward", stream=None, seed=0):
    rng = np.random.default_rng(seed)
    x = Rows(draw(rng, rows, width), gap=gap, beyond=1)
    weight = Rows(rng.standard_normal((1, width)), np.float32)
    out = x if in_place else Rows.poisoned(rows, width, gap=gap + 8, beyond=1)
    wanted = naive.rms_norm(x.values.astype(float), weight.values[0], 1e-5)
    stream = stream or devices.Stream()
    norm.rms_norm(stream, x.address, x.stride, weight.address, 1e-5, out.address, out.stride, rows, width)
    performed(stream, order)
    assert_bf16_near(out.values, wanted)
    out.assert_rest_untouched()


def check_gated_rms_norm(rows, heads, width, gap, order="forward", stream=None):
    rng = np.random.default_rng(rows)
    o = Rows(draw(rng, rows, heads, width), gap=gap, beyond=1)
    gate = Rows(3 * rng.standard_normal((rows, heads, width)), gap=gap + 8)
    weight = Rows(rng.standard_normal((1, width)), np.float32)
    wanted = naive.gated_rms_norm(o.values.astype(float), weight.values[0], gate.values.astype(float), 1e-5)
    stream = stream or devices.Stream()
    norm.gated_rms_norm(
        stream, o.address, o.stride, weight.address, gate.address, gate.stride, 1e-5, rows, heads, width
    )
    performed(stream, order)
    assert_bf16_near(o.values, wanted)
    o.assert_rest_untouched()


def check_l2_norm(rows, heads, width, gap, order="forward", stream=None, values=None):
    x = Rows(draw(np.random.default_rng(rows), rows, heads, width) if values is None else values, gap=gap, beyond=1)
    wanted = naive.l2_norm(x.values.astype(float))
    stream = stream or devices.Stream()
    norm.l2_norm(stream, x.address, x.stride, rows, heads, width)
    performed(stream, order)
    assert_bf16_near(x.values, wanted)
    x.assert_rest_untouched()


def check_swiglu(rows, width, gap, in_place=False, order="forward", stream=None):
    rng = np.random.default_rng(rows)
    gate_up = Rows(3 * rng.standard_normal((rows, 2 * width)), gap=gap, beyond=1)
    out = Rows.poisoned(rows, width, gap=gap + 8, beyond=1)
    wanted = naive_swiglu(gate_up.values.astype(float))
    stream = stream or devices.Stream()
    to, to_stride = (gate_up.address, gate_up.stride) if in_place else (out.address, out.stride)
    moe.swiglu(stream, gate_up.address, gate_up.stride, to, to_stride, rows, width)
    performed(stream, order)
    assert_bf16_near(gate_up.values[:, :width] if in_place else out.values, wanted)
    (gate_up if in_place else out).assert_rest_untouched()


@simt.orders()
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_of_any_row_count(rows, order):
    check_rms_norm(rows, 64, 0, order=order)
    check_rms_norm(rows, 37, 3, in_place=True, order=order)


@simt.orders()
@pytest.mark.parametrize(("width", "gap"), WIDTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm_of_any_width(width, gap, in_place, order):
    check_rms_norm(2, width, gap, in_place, order)


@simt.orders()
@pytest.mark.parametrize("rows", ROWS)
def test_head_norms_of_any_row_count(rows, order):
    check_gated_rms_norm(rows, 3, 20, 4, order)
    check_l2_norm(rows, 3, 20, 4, order)


@simt.orders()
@pytest.mark.parametrize(("heads", "width", "gap"), HEADS)
def test_head_norms_of_any_width(heads, width, gap, order):
    check_gated_rms_norm(2, heads, width, gap, order)
    check_l2_norm(2, heads, width, gap, order)


@simt.orders()
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_of_any_row_count(rows, order):
    check_swiglu(rows, 24, 8, order=order)


@simt.orders()
@pytest.mark.parametrize(("width", "gap"), [(1032, 0), (37, 0), (1, 0), (130, 4), (16, 8)])
def test_swiglu_of_any_width(width, gap, order):
    check_swiglu(2, width, gap, order=order)
    check_swiglu(2, width, gap, in_place=True, order=order)


def test_unaligned_addresses_take_the_narrow_path():
    rng = np.random.default_rng(0)
    x = Rows(draw(rng, 3, 64), lead=1)
    weight = Rows(rng.standard_normal((1, 64)), np.float32, lead=1)
    wanted = naive.rms_norm(x.values.astype(float), weight.values[0], 1e-5)
    stream = devices.Stream()
    norm.rms_norm(stream, x.address, 64, weight.address, 1e-5, x.address, 64, 3, 64)
    performed(stream)
    assert_bf16_near(x.values, wanted)
    x.assert_rest_untouched()


def test_l2_epsilon_is_on_the_sum():
    check_l2_norm(1, 1, 100, 0, values=np.full((1, 1, 100), 1e-4))
    check_l2_norm(1, 2, 8, 0, values=np.zeros((1, 2, 8)))


def test_gates_far_out_are_0_and_1():
    o = Rows(np.ones((1, 1, 8)))
    gate = Rows(np.array([[[-3e38, -200, -88, -87, 0, 88, 200, 3e38]]]))
    weight = Rows(np.ones((1, 8)), np.float32)
    stream = devices.Stream()
    norm.gated_rms_norm(stream, o.address, 8, weight.address, gate.address, 8, 0.0, 1, 1, 8)
    performed(stream)
    np.testing.assert_allclose(o.values[0, 0].astype(float), [0, 0, 0, 0, 0.5, 1, 1, 1], rtol=0, atol=1e-37)


@pytest.mark.no_gpu
def test_no_rows_no_launch():
    stream = devices.Stream()
    norm.rms_norm(stream, 0, 8, 0, 1e-5, 0, 8, 0, 8)
    norm.gated_rms_norm(stream, 0, 8, 0, 0, 8, 1e-5, 0, 1, 8)
    norm.l2_norm(stream, 0, 8, 0, 1, 8)
    moe.swiglu(stream, 0, 16, 0, 8, 0, 8)
    assert not stream.queue


class FarRows:
    """Two rows of 64 values, the second one behind 2^31 elements."""

    STRIDE = 2**31 + 64

    def __init__(self, folder):
        rng = np.random.default_rng(5)
        self.x = rng.standard_normal((2, 64)).astype(np.float32)
        self.space = sparse(folder / "rows", 2, self.STRIDE)

    def check(self, call, wanted, stream):
        near = Rows(self.x)
        self.space[:, :64] = near.values.view(np.uint16)
        call(stream, devices.at(self.space), self.STRIDE)
        performed(stream)
        assert_bf16_near(np.array(self.space[:, :64]).view(near.dtype), wanted(near.values.astype(float)))


def test_rows_behind_2_31_elements(tmp_path):
    far = FarRows(tmp_path)
    weight, gate = Rows(np.ones((1, 64)), np.float32), Rows(np.zeros((1, 64)))
    calls = {
        norm.rms_norm_kernel: (
            lambda s, a, n: norm.rms_norm(s, a, n, weight.address, 1e-5, a, n, 2, 64),
            lambda x: naive.rms_norm(x, np.ones(64), 1e-5),
        ),
        norm.gated_rms_norm_kernel: (
            lambda s, a, n: norm.gated_rms_norm(s, a, n, weight.address, gate.address, 0, 1e-5, 2, 2, 32),
            lambda x: naive.rms_norm(x.reshape(2, 2, 32), np.ones(32), 1e-5).reshape(2, 64) / 2,
        ),
        norm.l2_norm_kernel: (
            lambda s, a, n: norm.l2_norm(s, a, n, 2, 2, 32),
            lambda x: naive.l2_norm(x.reshape(2, 2, 32)).reshape(2, 64),
        ),
        moe.swiglu_kernel: (
            lambda s, a, n: moe.swiglu(s, a, n, a, n, 2, 32),
            lambda x: np.concatenate([naive_swiglu(x), x[:, 32:]], 1),
        ),
    }
    for kernel, (call, wanted) in calls.items():
        stride = {norm.rms_norm_kernel: "i_row * x_stride", norm.l2_norm_kernel: "i_row * x_stride"}
        old = stride.get(
            kernel, "i_row * o_stride" if kernel is norm.gated_rms_norm_kernel else "i_row * gate_up_stride"
        )
        assert_caught(
            lambda s, call=call, wanted=wanted: far.check(call, wanted, s),
            devices.Stream(),
            kernel,
            simt.SimtError,
            old=old,
            new=f"((({old}) << 32) >> 32)",
        )


@seeds(norm.rms_norm_kernel)
@changes(
    {"old": "block_sum_block(square)", "new": "square"},
    {"old": "cuda.syncthreads()", "new": "pass", "inside": "block_sum_block"},
    {"old": "/ f32(width) + eps", "new": "+ eps"},
    {"old": "+ eps", "new": ""},
    {"old": "i = 8 * octets + i_thread", "new": "i = 8 * octets + 1 + i_thread", "nth": 0},
    {"old": "i = 8 * octets + i_thread", "new": "i = 8 * octets + 1 + i_thread", "nth": 1},
    {"old": "i < octets", "new": "i <= octets", "nth": 1},
    {"old": "i < width", "new": "i <= width", "nth": 1},
    {"old": "2 * i + 1", "new": "2 * i"},
)
def test_mistakes_in_rms_norm_are_caught(change):
    def check(stream):
        check_rms_norm(3, 37, 3, stream=stream)
        check_rms_norm(1, 512, 0, stream=stream)
        x = Rows(np.full((1, 16), 1e-3))
        weight = Rows(np.ones((1, 16)), np.float32)
        norm.rms_norm(stream, x.address, 16, weight.address, 1e-5, x.address, 16, 1, 16)
        performed(stream)
        assert_bf16_near(x.values, np.full((1, 16), 1e-3) / np.sqrt(1e-6 + 1e-5))

    assert_caught(check, devices.Stream(), norm.rms_norm_kernel, simt.SimtError, **change)


@seeds(norm.gated_rms_norm_kernel)
@changes(
    {"old": "sigmoid_thread(t_gate[j])", "new": "t_gate[j] * sigmoid_thread(t_gate[j])"},
    {"old": "i_row * gate_stride + i_head * width", "new": "i_row * gate_stride"},
    {"old": "i_head >= heads", "new": "i_head > heads"},
    {"old": "load_x4_thread(g_weight, i,", "new": "load_x4_thread(g_weight, i_head,"},
    {"old": "warp_sum_warp(square)", "new": "square", "inside": "square_of_head_warp"},
    {"old": "i = 4 * quads + i_lane", "new": "i = 4 * quads + 32 + i_lane", "inside": "square_of_head_warp"},
)
def test_mistakes_in_gated_rms_norm_are_caught(change):
    def check(stream):
        check_gated_rms_norm(2, 9, 20, 4, stream=stream)
        check_gated_rms_norm(2, 2, 37, 0, stream=stream)

    assert_caught(check, devices.Stream(), norm.gated_rms_norm_kernel, simt.SimtError, **change)


@seeds(norm.l2_norm_kernel)
@changes(
    {"constants": {"L2_EPS": 1e-5}},
    {"old": "f32(L2_EPS))", "new": "f32(L2_EPS)) * f32(8.0)"},
    {"old": "i = 4 * quads + i_lane", "new": "i = 4 * quads + 1 + i_lane"},
    {"old": "i < quads", "new": "i <= quads"},
)
def test_mistakes_in_l2_norm_are_caught(change):
    def check(stream):
        check_l2_norm(1, 1, 100, 0, stream=stream, values=np.full((1, 1, 100), 1e-4))
        check_l2_norm(2, 2, 37, 0, stream=stream)

    assert_caught(check, devices.Stream(), norm.l2_norm_kernel, simt.SimtError, **change)


@seeds(moe.swiglu_kernel)
@changes(
    {"old": "t_up[j] *= t_gate[j] * sigmoid_thread(t_gate[j])", "new": "t_up[j] *= sigmoid_thread(t_gate[j])"},
    {"old": "t_up[j] *= t_gate[j] * sigmoid", "new": "t_up[j] = t_gate[j] * t_up[j] * t_up[j] * sigmoid"},
    {"old": "(gate + width) >> 3", "new": "gate >> 3"},
    {"old": "i_lane < octets", "new": "i_lane <= octets"},
    {"old": "i_lane < width", "new": "i_lane <= width"},
)
def test_mistakes_in_swiglu_are_caught(change):
    def check(stream):
        check_swiglu(2, 24, 8, stream=stream)
        check_swiglu(2, 37, 0, stream=stream)

    assert_caught(check, devices.Stream(), moe.swiglu_kernel, simt.SimtError, **change)


@pytest.mark.slow  # ptxas; `make kernels` compiles and compares every kernel, too
@pytest.mark.no_gpu
@chips
@pytest.mark.parametrize(
    ("kernel", "accesses"),
    [
        (norm.rms_norm_kernel, ["LDG.128", "STG.128"]),
        (norm.gated_rms_norm_kernel, ["LDG.128", "LDG.64", "STG.64"]),
        (norm.l2_norm_kernel, ["LDG.64", "STG.64"]),
        (moe.swiglu_kernel, ["LDG.128", "STG.128"]),
    ],
)
def test_machine_code(kernel, accesses, arch):
    assert_compact(kernel, accesses, arch)
