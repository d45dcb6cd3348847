"""Norms against float64, on row views, with poison around what they may write."""

from __future__ import annotations

import numpy as np
import pytest

from whalez.errors import ShapeError
from whalez.ops import norm
from whalez.ops.norm import naive

SHAPES = [(1, 1, 1), (1, 3, 16), (2, 1, 63), (113, 3, 128), (1000, 2, 33)]
TOLERANCE = 2e-6  # of the largest value of the row


def check(got, wanted):
    assert np.isfinite(got).all()
    assert np.max(np.abs(got - wanted) / np.max(np.abs(wanted), axis=-1, keepdims=True)) < TOLERANCE


def view_of(rng, rows, heads, dim):
    """A [T, H, X] column slice of a wider poisoned buffer, and the buffer."""
    buffer = np.full((rows + 2, heads * dim + 7), np.nan, np.float32)
    view = buffer[:rows, 3 : 3 + heads * dim].reshape(rows, heads, dim, copy=False)
    view[:] = 10.0 ** rng.uniform(-3, 3, (rows, heads, 1)) * rng.standard_normal((rows, heads, dim))
    return view, buffer


def only_the_view_is_finite(buffer, rows, width):
    inside = np.zeros(buffer.shape, bool)
    inside[:rows, 3 : 3 + width] = True
    return np.array_equal(np.isfinite(buffer), inside)


@pytest.mark.parametrize(("rows", "heads", "dim"), SHAPES)
def test_rms_norm(rows, heads, dim):
    rng = np.random.default_rng(rows)
    x3, buffer = view_of(rng, rows, heads, dim)
    x = x3.reshape(rows, heads * dim, copy=False)
    weight = rng.standard_normal(heads * dim).astype(np.float32)
    wanted = naive.rms_norm(x, weight, 1e-5)
    out = np.full_like(x, np.nan)
    norm.rms_norm(x, weight, 1e-5, out)
    check(out, wanted)
    norm.rms_norm(x, weight, 1e-5, x)
    check(x, wanted)
    assert only_the_view_is_finite(buffer, rows, heads * dim)


@pytest.mark.parametrize(("rows", "heads", "dim"), SHAPES)
def test_gated_rms_norm_normalises_each_head_then_gates(rows, heads, dim):
    rng = np.random.default_rng(rows)
    o, buffer = view_of(rng, rows, heads, dim)
    gate = rng.standard_normal((rows, heads, dim)).astype(np.float32)
    weight = rng.standard_normal(dim).astype(np.float32)
    wanted = naive.gated_rms_norm(o, weight, gate, 1e-5)
    norm.gated_rms_norm(o, weight, gate, 1e-5)
    check(o, wanted)
    assert only_the_view_is_finite(buffer, rows, heads * dim)


@pytest.mark.parametrize(("rows", "heads", "dim"), SHAPES)
def test_l2_norm(rows, heads, dim):
    x, buffer = view_of(np.random.default_rng(rows), rows, heads, dim)
    wanted = naive.l2_norm(x)
    norm.l2_norm(x)
    check(x, wanted)
    assert only_the_view_is_finite(buffer, rows, heads * dim)


def test_l2_epsilon_is_on_the_sum():
    x = np.full((1, 1, 100), 1e-4, np.float32)  # the sum of squares is 1e-6, their mean 1e-8
    norm.l2_norm(x)
    np.testing.assert_allclose(x, 1e-4 / np.sqrt(2e-6), rtol=1e-6)


def test_zero_rows_and_zero_values():
    norm.l2_norm(np.empty((0, 2, 4), np.float32))
    x = np.zeros((1, 2, 4), np.float32)
    norm.l2_norm(x)
    assert not x.any()


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.zeros((3, 4), np.float32), "axes"),
        (np.zeros((3, 2, 4), np.float64), "float64"),
        (np.zeros((3, 2, 8), np.float32)[:, :, ::2], "contiguous"),
        (np.broadcast_to(np.zeros((1, 2, 4), np.float32), (3, 2, 4)), "overlap"),
        (np.zeros((3, 4, 2), np.float32).transpose(0, 2, 1), "contiguous"),
    ],
)
def test_wrong_arrays_are_refused_by_name(x, said):
    with pytest.raises(ShapeError, match=rf"x: .*{said}"):
        norm.l2_norm(x)


def test_weight_of_the_wrong_size_is_refused():
    x = np.zeros((2, 4), np.float32)
    with pytest.raises(ShapeError, match=r"weight: expected float32 \(4,\)"):
        norm.rms_norm(x, np.ones(3, np.float32), 1e-5, x)
