"""Merge and finalise kernels against float64: gaps that overflow a naive exp, empty sides, bases, folds, far rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from helpers.device_rows import BF16, Rows, assert_compact, chips, performed, rounded, sparse
from helpers.mutate import assert_caught, changes, seeds
from whalez.errors import ShapeError
from whalez.ops.lse import cuda as lse
from whalez.ops.lse.naive import naive_lse_merge
from whalez.testing import simt

pytestmark = pytest.mark.usefixtures("device")  # the harness, and a GPU with -m gpu

NEG = -np.inf
DTYPES = [np.float32, BF16]
TOKENS = [1, 2, 3, 63, 64, 65, 113]
SHAPES = [(1, 128, 0), (3, 20, 4), (9, 4, 0), (2, 37, 0), (5, 1, 3), (2, 6, 4)]  # heads, value dim, gap


class Sides:
    """An accumulator and a part, on the emulated device."""

    def __init__(self, acc, acc_lse, part, part_lse, dtype=np.float32, gap=0):
        self.acc, self.part = Rows(acc, np.float32, gap=gap, beyond=1), Rows(part, dtype, gap=gap + 4)
        self.acc_lse, self.part_lse = Rows(acc_lse, np.float32, beyond=1), Rows(part_lse, np.float32)
        self.wanted, self.wanted_lse = naive_lse_merge(
            self.acc.values, self.acc_lse.values, self.part.values, self.part_lse.values
        )

    @classmethod
    def drawn(cls, tokens, heads, value_dim, dtype=np.float32, gap=0):
        rng = np.random.default_rng(tokens)
        acc, part = rng.standard_normal((2, tokens, heads, value_dim))
        acc_lse, part_lse = 10 * rng.standard_normal((2, tokens, heads))
        return cls(acc, acc_lse, part, part_lse, dtype, gap)

    def merge(self, stream, order="forward", **how):
        lse.lse_merge(
            stream,
            self.acc.address,
            self.acc.stride,
            self.acc_lse.address,
            self.part.address,
            self.part.stride,
            self.part_lse.address,
            *self.acc.shape,
            part_is_bf16=self.part.dtype == BF16,
            **how,
        )
        performed(stream, order)

    def check(self, stream, order="forward", atol=2e-6):
        self.merge(stream, order)
        np.testing.assert_allclose(self.acc.values, self.wanted, rtol=0, atol=atol)
        np.testing.assert_array_equal(np.isinf(self.acc_lse.values), np.isinf(self.wanted_lse))
        np.testing.assert_allclose(self.acc_lse.values, self.wanted_lse, rtol=1e-6, atol=1e-6)
        self.acc.assert_rest_untouched()
        self.acc_lse.assert_rest_untouched()


def check_finalise(tokens, heads, value_dim, gap=0, order="forward", stream=None):
    rng = np.random.default_rng(tokens)
    values, mass = rng.standard_normal((tokens, heads, value_dim)), 200 * rng.standard_normal((tokens, heads))
    mass[0, 0] = NEG
    values[0, 0] = np.nan
    acc, acc_lse = Rows(values, np.float32, gap=gap), Rows(mass, np.float32)
    out = Rows.poisoned(tokens, heads, value_dim, gap=gap + 4, beyond=1)
    stream = stream or devices.Stream()
    lse.lse_finalise(
        stream, acc.address, acc.stride, acc_lse.address, out.address, out.stride, tokens, heads, value_dim
    )
    performed(stream, order)
    values[0, 0] = 0
    np.testing.assert_array_equal(out.values.astype(float), rounded(values))
    out.assert_rest_untouched()


@simt.orders()
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_token_count(tokens, dtype, order):
    Sides.drawn(tokens, 3, 20, dtype, 4).check(devices.Stream(), order)
    check_finalise(tokens, 3, 20, 4, order)


@simt.orders()
@pytest.mark.parametrize(("heads", "value_dim", "gap"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape(heads, value_dim, gap, dtype, order):
    Sides.drawn(2, heads, value_dim, dtype, gap).check(devices.Stream(), order)
    check_finalise(2, heads, value_dim, gap, order)


FAR_AND_EMPTY = [
    (0, 200),
    (200, 0),
    (-200, 0),
    (0, -200),
    (500, -500),
    (-3e38, 3e38),
    (0, 0),
    (90, 90),
    (NEG, 3),
    (3, NEG),
    (NEG, NEG),
    (NEG, -3e38),
    (-3e38, NEG),
]


def far_or_empty(left, right, dtype, width):
    acc, part = np.full((2, 1, width), 7.0), np.full((2, 1, width), -4.0)
    # What an empty side holds has no meaning: poison must not get through.
    if left == NEG:
        acc[:] = np.nan
    if right == NEG:
        part[:] = np.nan
    return Sides(acc, np.full((2, 1), left), part, np.full((2, 1), right), dtype)


@pytest.mark.parametrize(("left", "right"), FAR_AND_EMPTY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 5])
def test_far_and_empty_sides(left, right, dtype, width):
    far_or_empty(left, right, dtype, width).check(devices.Stream())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 17])
def test_the_first_part_keeps_its_bits(dtype, width):
    rng = np.random.default_rng(5)
    part, part_lse = rng.standard_normal((5, 3, width)), rng.standard_normal((5, 3))
    part[0, 0, 0] = -0.0
    sides = Sides(np.full_like(part, np.nan), np.full_like(part_lse, NEG), part, part_lse, dtype)
    sides.merge(devices.Stream())
    first = sides.part.values.astype(np.float32).tobytes()
    assert sides.acc.values.tobytes() == first
    assert sides.acc_lse.values.tobytes() == sides.part_lse.values.tobytes()
    sides.part.flat[:] = np.nan
    sides.part_lse.flat[:] = NEG
    sides.merge(devices.Stream())
    assert sides.acc.values.tobytes() == first


def softmax_part(scores, values):
    top = scores.max(axis=1, keepdims=True)
    weight = np.exp(scores - top)
    mass = np.log(weight.sum(axis=1)) + top[:, 0]
    return (weight @ values / weight.sum(axis=1, keepdims=True))[:, None], mass[:, None]


@pytest.mark.parametrize("prefix", [1024, 4096, 65536])
def test_bases_over_long_prefix_and_short_suffix(prefix):
    """A log2 lse taken for a natural one is an error of 0.1, easily lost in a bf16 tolerance; here it must show."""
    rng, suffix = np.random.default_rng(prefix), 40
    # The suffix scores higher, as recent tokens do; with equal scores the prefix outweighs it in either base.
    scores = rng.standard_normal((6, prefix + suffix))
    scores[:, prefix:] += math.log(prefix / suffix)
    values = rng.standard_normal((prefix + suffix, 16)) + (np.arange(prefix + suffix) >= prefix)[:, None]
    wanted, wanted_lse = softmax_part(scores, values)
    head, head_lse = softmax_part(scores[:, :prefix], values[:prefix])
    tail, tail_lse = softmax_part(scores[:, prefix:], values[prefix:])

    natural = Sides(head, head_lse, tail, tail_lse)
    natural.merge(devices.Stream())
    np.testing.assert_allclose(natural.acc.values, wanted, rtol=0, atol=2e-6)
    np.testing.assert_allclose(natural.acc_lse.values, wanted_lse, rtol=1e-6)
    binary = Sides(head, head_lse, tail, tail_lse / math.log(2))
    binary.merge(devices.Stream(), part_base=2.0)
    np.testing.assert_allclose(binary.acc.values, wanted, rtol=0, atol=5e-6)
    mistaken = Sides(head, head_lse, tail, tail_lse / math.log(2))
    mistaken.merge(devices.Stream())
    assert np.abs(mistaken.acc.values - wanted).max() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_survives_a_long_fold(dtype):
    """Windows of one value per head give that value; 60 folds may not drift beyond the f32 tolerance."""
    rng = np.random.default_rng(1)
    value = np.broadcast_to(rounded(rng.standard_normal(4))[None, :, None], (2, 4, 8))
    sides = Sides(np.full((2, 4, 8), np.nan), np.full((2, 4), NEG), value, rng.standard_normal((2, 4)), dtype)
    total, stream = np.full((2, 4), NEG), devices.Stream()
    for _ in range(60):
        sides.part_lse.flat[:] = rng.uniform(-3, 3, 8)
        total = np.logaddexp(total, sides.part_lse.values.astype(float))
        sides.merge(stream)
    np.testing.assert_allclose(sides.acc.values, value, rtol=5e-6)
    np.testing.assert_allclose(sides.acc_lse.values, total, rtol=1e-6)


@pytest.mark.no_gpu
def test_another_base_is_refused_before_a_launch():
    stream = devices.Stream()
    with pytest.raises(ShapeError, match="part_base"):
        lse.lse_merge(stream, 0, 0, 0, 0, 0, 0, 1, 1, 4, part_is_bf16=False, part_base=10.0)
    lse.lse_merge(stream, 0, 0, 0, 0, 0, 0, 0, 1, 4, part_is_bf16=False)
    lse.lse_finalise(stream, 0, 0, 0, 0, 0, 0, 1, 4)
    assert not stream.queue


FAR = 2**31 + 64


def far_merge(folder, dtype, stream):
    acc, part = sparse(folder / "acc", 2, FAR, np.float32), sparse(folder / "part", 2, FAR, np.dtype(dtype))
    near = Sides.drawn(2, 3, 20, dtype)
    acc[:, :60], part[:, :60] = near.acc.values.reshape(2, 60), near.part.values.reshape(2, 60)
    lse.lse_merge(
        stream, devices.at(acc), FAR, near.acc_lse.address, devices.at(part), FAR, near.part_lse.address, 2, 3, 20,
        part_is_bf16=dtype == BF16,
    )  # fmt: skip
    performed(stream)
    np.testing.assert_allclose(np.array(acc[:, :60]), near.wanted.reshape(2, 60), rtol=0, atol=2e-6)


def far_finalise(folder, stream):
    acc, out = sparse(folder / "acc", 2, FAR, np.float32), sparse(folder / "out", 2, FAR)
    values = np.random.default_rng(0).standard_normal((2, 60))
    acc[:, :60] = values
    acc_lse = Rows(np.zeros((2, 3)), np.float32)
    lse.lse_finalise(stream, devices.at(acc), FAR, acc_lse.address, devices.at(out), FAR, 2, 3, 20)
    performed(stream)
    np.testing.assert_array_equal(np.array(out[:, :60]).view(BF16).astype(float), rounded(values))


@pytest.mark.parametrize(
    ("kernel", "check", "old"),
    [
        (lse.lse_merge_f32_kernel, lambda f, s: far_merge(f, np.float32, s), "i_token * acc_stride"),
        (lse.lse_merge_bf16_kernel, lambda f, s: far_merge(f, BF16, s), "i_token * part_stride"),
        (lse.lse_finalise_kernel, far_finalise, "i_token * acc_stride"),
        (lse.lse_finalise_kernel, far_finalise, "i_token * out_stride"),
    ],
)
def test_rows_behind_2_31_elements(tmp_path, kernel, check, old):
    wrapped = f"((({old}) << 32) >> 32)"
    stream = devices.Stream()
    assert_caught(lambda s: check(tmp_path, s), stream, kernel, simt.SimtError, old=old, new=wrapped)


@seeds(lse.lse_merge_f32_kernel, lse.lse_merge_bf16_kernel)
@pytest.mark.parametrize("dtype", DTYPES)
@changes(
    {"old": " * to_natural", "new": ""},
    {"old": "cuda.syncwarp()", "new": "pass"},
    {"old": "if a != f32(EMPTY):", "new": "if True:"},
    {"old": "i < quads", "new": "i <= quads"},
    {"old": "i = 4 * quads + i_lane", "new": "i = 4 * quads + 1 + i_lane"},
    {"old": "i_token * heads + i_head", "new": "i_token + i_head"},
    {"old": "-abs(a - b)", "new": "abs(a - b)", "inside": "shares_thread"},
    {"old": "small / total, f32(1.0) / total", "new": "f32(1.0) / total, small / total", "inside": "shares_thread"},
    {"old": "math.log1p(small)", "new": "math.log(small)", "nth": 0, "inside": "shares_thread"},
    {"old": "return part\n", "new": "return part * share_part\n", "inside": "merge_thread"},
    {"old": "return f32(0.0)", "new": "return part", "inside": "merge_thread"},
    {"old": "acc * share_acc + part", "new": "acc * share_part + part", "inside": "merge_thread"},
)
def test_mistakes_in_merge_are_caught(dtype, change):
    def check(stream):
        for order in ("forward", "reverse"):
            Sides.drawn(3, 3, 20, dtype).check(stream, order)
        Sides.drawn(2, 2, 37, dtype).check(stream)
        binary = Sides.drawn(2, 3, 20, dtype)
        binary.part_lse.flat[:] = (binary.part_lse.values / np.float32(math.log(2))).reshape(-1)
        binary.merge(stream, part_base=2.0)
        np.testing.assert_allclose(binary.acc.values, binary.wanted, rtol=0, atol=2e-5)
        for left, right in FAR_AND_EMPTY:
            far_or_empty(left, right, dtype, 8).check(stream)

    kernel = lse.lse_merge_bf16_kernel if dtype == BF16 else lse.lse_merge_f32_kernel
    assert_caught(check, devices.Stream(), kernel, simt.SimtError, **change)


@seeds(lse.lse_finalise_kernel)
@changes(
    {"old": "f32(0.0) if is_empty else t_acc[j]", "new": "t_acc[j]"},
    {"old": "f32(0.0) if is_empty else g_acc", "new": "g_acc"},
    {"old": "i_head >= heads", "new": "i_head > heads"},
    {"old": "i = 4 * quads + i_lane", "new": "i = 4 * quads + 1 + i_lane"},
    {"old": "i_token * heads + i_head", "new": "i_token * heads"},
)
def test_mistakes_in_finalise_are_caught(change):
    def check(stream):
        check_finalise(2, 3, 20, stream=stream)
        check_finalise(2, 9, 4, stream=stream)
        check_finalise(2, 1, 37, stream=stream)

    assert_caught(check, devices.Stream(), lse.lse_finalise_kernel, simt.SimtError, **change)


@pytest.mark.slow  # ptxas; `make kernels` compiles and compares every kernel, too
@pytest.mark.no_gpu
@chips
@pytest.mark.parametrize(
    ("kernel", "accesses"),
    [
        (lse.lse_merge_bf16_kernel, ["LDG.64", "LDG.128", "STG.128"]),
        (lse.lse_merge_f32_kernel, ["LDG.128", "STG.128"]),
        (lse.lse_finalise_kernel, ["LDG.128", "STG.64"]),
    ],
)
def test_machine_code(kernel, accesses, arch):
    assert_compact(kernel, accesses, arch)
