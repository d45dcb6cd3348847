"""The short convolution: against float64, and the same to the last bit however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest

from whalez.errors import ShapeError
from whalez.ops import conv
from whalez.ops.conv import naive


def data(rows, width, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in ((rows, width), (3, width), (width, 4)))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 63, 65, 113, 1000])
@pytest.mark.parametrize("width", [1, 37, 384])
def test_against_naive_out_of_place_and_in_place(rows, width):
    x, tail, weight = data(rows, width)
    wanted, wanted_tail = naive.short_conv(x, tail, weight)
    buffer = np.full((rows + 1, width + 3), np.nan, np.float32)
    conv.short_conv(x, tail, weight, buffer[:rows, 1 : 1 + width])
    np.testing.assert_allclose(buffer[:rows, 1 : 1 + width], wanted, atol=4e-6)
    assert np.isnan(buffer[rows]).all()
    assert np.isnan(buffer[:, [0, -1, -2]]).all()
    new_tail = tail.copy()
    conv.conv_tail(x, new_tail)
    np.testing.assert_array_equal(new_tail, wanted_tail)
    in_place = x.copy()
    conv.short_conv(in_place, tail, weight, in_place)
    np.testing.assert_array_equal(in_place, buffer[:rows, 1 : 1 + width])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_any_two_cuts_give_the_same_bits(rows):
    """Pieces of 0, 1 and 2 rows must shift the tail, not replace it."""
    x, tail0, weight = data(rows, 33, seed=rows)
    whole = np.empty_like(x)
    conv.short_conv(x, tail0, weight, whole)
    end = tail0.copy()
    conv.conv_tail(x, end)
    for first in range(rows + 1):
        for second in range(first, rows + 1):
            tail = tail0.copy()
            out = np.full_like(x, np.nan)
            for start, stop in ((0, first), (first, second), (second, rows)):
                conv.short_conv(x[start:stop], tail, weight, out[start:stop])
                conv.conv_tail(x[start:stop], tail)
            np.testing.assert_array_equal(out, whole)
            np.testing.assert_array_equal(tail, end)


def test_decode_is_a_prefill_of_length_one_on_its_own_slot():
    x, _, weight = data(3, 40)
    tails = np.random.default_rng(1).standard_normal((6, 3, 40)).astype(np.float32)
    before = tails.copy()
    slots = np.array([4, 0, 3])
    out = np.full_like(x, np.nan)
    conv.short_conv_decode(x, tails, slots, weight, out)
    for b, slot in enumerate(slots):
        wanted = np.empty((1, 40), np.float32)
        tail = before[slot].copy()
        conv.short_conv(x[b : b + 1], tail, weight, wanted)
        conv.conv_tail(x[b : b + 1], tail)
        np.testing.assert_allclose(out[b], wanted[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(tails[slot], tail)
    np.testing.assert_array_equal(tails[[1, 2, 5]], before[[1, 2, 5]])
    tails = before.copy()
    conv.short_conv_decode(x, tails, slots, weight, x)
    np.testing.assert_array_equal(x, out)


@pytest.mark.parametrize("slots", [np.array([0, 6]), np.array([-1, 0]), np.array([0, 1], np.int32), np.array([0])])
def test_slots_that_do_not_exist_are_refused(slots):
    x, _, weight = data(2, 8)
    tails = np.zeros((6, 3, 8), np.float32)
    with pytest.raises(ShapeError, match="slots"):
        conv.short_conv_decode(x, tails, slots, weight, x)
    assert not tails.any()


def test_a_tail_of_the_wrong_shape_is_refused():
    x, _, weight = data(2, 8)
    with pytest.raises(ShapeError, match="tail"):
        conv.short_conv(x, np.zeros((4, 8), np.float32), weight, x)
