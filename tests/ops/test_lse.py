"""lse_merge against float64: gaps that overflow a naive exp, empty sides, foreign bases, folds over many windows."""

import math

import numpy as np
import pytest

from whalez.errors import ShapeError
from whalez.ops.lse import lse_merge
from whalez.ops.lse.naive import naive_lse_merge

NEG = -np.inf


def rows(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("t", "h", "v"), [(1, 1, 1), (63, 3, 20), (113, 2, 128)])
def test_merge_against_naive(t, h, v):
    rng = np.random.default_rng(t)
    acc, part = rows(rng, t, h, v), rows(rng, t, h, v)
    acc_lse, part_lse = 30 * rows(rng, t, h), 30 * rows(rng, t, h)
    want, want_lse = naive_lse_merge(acc, acc_lse, part, part_lse)
    lse_merge(acc, acc_lse, part, part_lse)
    np.testing.assert_allclose(acc, want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(acc_lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (0, 200),
        (200, 0),
        (-200, 0),
        (500, -500),
        (-3e38, 3e38),
        (0, 0),
        (90, 90),
        (NEG, 3),
        (3, NEG),
        (NEG, NEG),
        (NEG, -3e38),
    ],
)
def test_far_and_empty_sides(left, right):
    acc, part = np.full((2, 1, 5), 7, np.float32), np.full((2, 1, 5), -4, np.float32)
    acc_lse, part_lse = np.full((2, 1), left, np.float32), np.full((2, 1), right, np.float32)
    # What an empty side holds has no meaning: poison must not get through.
    if left == NEG:
        acc[:] = np.nan
    if right == NEG:
        part[:] = np.nan
    want, want_lse = naive_lse_merge(acc, acc_lse, part, part_lse)
    lse_merge(acc, acc_lse, part, part_lse)
    np.testing.assert_allclose(acc, want, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(np.isinf(acc_lse), np.isinf(want_lse))
    np.testing.assert_allclose(acc_lse, want_lse, rtol=1e-6)


def test_first_part_keeps_its_bits():
    rng = np.random.default_rng(5)
    part, part_lse = rows(rng, 50, 3, 17), rows(rng, 50, 3)
    acc, acc_lse = np.full_like(part, np.nan), np.full_like(part_lse, NEG)
    lse_merge(acc, acc_lse, part, part_lse)
    assert acc.tobytes() == part.tobytes()
    assert acc_lse.tobytes() == part_lse.tobytes()
    lse_merge(acc, acc_lse, np.full_like(part, np.nan), np.full_like(part_lse, NEG))
    assert acc.tobytes() == part.tobytes()


def softmax_part(scores, values):
    top = scores.max(axis=1, keepdims=True)
    weight = np.exp(scores - top)
    lse = np.log(weight.sum(axis=1)) + top[:, 0]
    out = weight @ values / weight.sum(axis=1, keepdims=True)
    return out[:, None].astype(np.float32), lse[:, None].astype(np.float32)


@pytest.mark.parametrize("prefix", [1024, 4096, 65536])
def test_bases_over_long_prefix_and_short_suffix(prefix):
    """A log2 lse taken for a natural one is an error of 0.1, easily lost in a bf16 tolerance; here it must show."""
    rng = np.random.default_rng(prefix)
    suffix = 40
    # The suffix scores higher, as recent tokens do; with equal scores the prefix outweighs it in either base.
    scores = np.concatenate(
        [rng.standard_normal((6, prefix)), rng.standard_normal((6, suffix)) + math.log(prefix / suffix)], 1
    )
    values = rng.standard_normal((prefix + suffix, 16)) + (np.arange(prefix + suffix) >= prefix)[:, None]
    want, want_lse = softmax_part(scores, values)
    head, head_lse = softmax_part(scores[:, :prefix], values[:prefix])
    tail, tail_lse = softmax_part(scores[:, prefix:], values[prefix:])
    tail2_lse = (tail_lse / math.log(2)).astype(np.float32)

    acc, acc_lse = head.copy(), head_lse.copy()
    lse_merge(acc, acc_lse, tail, tail_lse)
    np.testing.assert_allclose(acc, want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(acc_lse, want_lse, rtol=1e-6)

    acc, acc_lse = head.copy(), head_lse.copy()
    lse_merge(acc, acc_lse, tail, tail2_lse, part_base=2.0)
    np.testing.assert_allclose(acc, want, rtol=0, atol=5e-6)

    acc, acc_lse = head.copy(), head_lse.copy()
    lse_merge(acc, acc_lse, tail, tail2_lse)
    assert np.abs(acc - want).max() > 0.05


def test_refuses_before_writing():
    acc, lse = np.ones((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    for part, part_lse, name in [
        (np.ones((2, 3, 5), np.float32), lse, "part"),
        (np.ones((2, 3, 4)), lse, "part"),
        (np.ones((2, 4, 3), np.float32).transpose(0, 2, 1), lse, "part"),
        (acc.copy(), lse[:, :2].copy(), "part_lse"),
    ]:
        with pytest.raises(ShapeError, match=name):
            lse_merge(acc, lse, part, part_lse)
    with pytest.raises(ShapeError, match="part_base"):
        lse_merge(acc, lse, acc.copy(), lse.copy(), part_base=10.0)
    assert (acc == 1).all()
