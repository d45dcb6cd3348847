"""MLA against float64: odd shapes, windows folded by lse, gang positions, pages, decode and prefill, 64-bit indices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalez.errors import ShapeError
from whalez.ops.latent import latent_append
from whalez.ops.lse import lse_merge
from whalez.ops.mla import mla_attend, mla_decode, mla_expand
from whalez.ops.mla.naive import naive_mla_attend, naive_mla_decode, naive_mla_expand

NOPE, SHARED, VALUE = 32, 16, 24
SCALE = (NOPE + SHARED) ** -0.5


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def attend(q, kv, kr, q_start, causal=True, scale=SCALE):
    """mla_attend into poisoned outputs."""
    out = np.full((*q.shape[:2], kv.shape[2] - q.shape[2] + kr.shape[1]), np.nan, np.float32)
    lse = np.full(q.shape[:2], np.nan, np.float32)
    mla_attend(q, kv, kr, q_start, causal, scale, out, lse)
    return out, lse


def attend_in_windows(q, kv, kr, q_start, window):
    """The walk of a long context: dense windows over the past, each folded into an f32 accumulator."""
    acc, acc_lse = np.full((*q.shape[:2], VALUE), np.nan, np.float32), np.full(q.shape[:2], -np.inf, np.float32)
    for first in range(0, kr.shape[0], window):
        end = min(first + window, kr.shape[0])
        lse_merge(acc, acc_lse, *attend(q, kv[first:end], kr[first:end], q_start - first))
    return acc, acc_lse


def assert_equal_to_naive(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isinf(g), np.isinf(w))
        np.testing.assert_allclose(g, w, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize(
    ("s", "heads", "nope", "value", "rank"), [(1, 1, 1, 1, 1), (63, 3, 32, 24, 64), (113, 2, 128, 128, 100)]
)
def test_expand_against_naive(s, heads, nope, value, rank):
    rng = np.random.default_rng(s)
    latent, w = draw(rng, s, rank + 16), draw(rng, heads * (nope + value), rank)
    space = np.full((s + 1, heads, nope + value), np.nan, np.float32)
    mla_expand(latent, w, space[:s])
    np.testing.assert_allclose(space[:s], naive_mla_expand(latent, w, heads), rtol=1e-5, atol=1e-4)
    assert np.isnan(space[s]).all()


@pytest.mark.parametrize(
    ("t", "s", "heads", "q_start", "causal"),
    [
        (1, 1, 1, 0, True),
        (63, 63, 3, 0, True),
        (113, 1000, 2, 887, True),
        (130, 700, 1, 300, True),
        (300, 257, 1, 0, True),  # queries go on behind the window
        (90, 300, 2, -40, True),  # the first 40 queries see nothing
        (90, 300, 2, -90, True),  # nobody sees anything
        (63, 300, 1, -500, False),
        (1100, 40, 1, -1050, True),  # a second query tile that starts unseen
    ],
)
def test_attend_against_naive(t, s, heads, q_start, causal):
    rng = np.random.default_rng(t * 1000 + s)
    latent = draw(rng, s, 7 + SHARED)
    q, kv, kr = 2 * draw(rng, t, heads, NOPE + SHARED), draw(rng, s, heads, NOPE + VALUE), latent[:, 7:]
    assert_equal_to_naive(attend(q, kv, kr, q_start, causal), naive_mla_attend(q, kv, kr, q_start, causal, SCALE))


def test_attend_with_scores_far_apart():
    """Scores of some hundreds, ascending and descending over key blocks: the running maximum must carry the sum."""
    rng = np.random.default_rng(3)
    q, kv, kr = draw(rng, 40, 2, NOPE + SHARED), draw(rng, 900, 2, NOPE + VALUE), draw(rng, 900, SHARED)
    kv[:, 0, :NOPE] *= np.linspace(0, 60, 900, dtype=np.float32)[:, None]
    kv[:, 1, :NOPE] *= np.linspace(60, 0, 900, dtype=np.float32)[:, None]
    out, lse = attend(q, kv, kr, 860)
    want, want_lse = naive_mla_attend(q, kv, kr, 860, True, SCALE)
    assert np.ptp(want_lse) > 60
    np.testing.assert_allclose(out, want, atol=2e-4)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.parametrize("window", [100, 257, 999])
def test_ragged_windows_equal_one_pass(window):
    rng = np.random.default_rng(window)
    q, kv, kr = draw(rng, 130, 2, NOPE + SHARED), draw(rng, 1000, 2, NOPE + VALUE), draw(rng, 1000, SHARED)
    assert_equal_to_naive(attend_in_windows(q, kv, kr, 870, window), naive_mla_attend(q, kv, kr, 870, True, SCALE))


@pytest.mark.parametrize("prefix", [1024, 4096, 65536])
def test_long_prefix_and_short_suffix(prefix):
    rng = np.random.default_rng(prefix)
    keys, suffix = prefix + 5, 5
    q, kv, kr = 3 * draw(rng, suffix, 2, NOPE + SHARED), draw(rng, keys, 2, NOPE + VALUE), draw(rng, keys, SHARED)
    got = attend_in_windows(q, kv, kr, prefix, 16_896)
    assert_equal_to_naive(got, naive_mla_attend(q, kv, kr, prefix, True, SCALE))


def test_one_window_keeps_the_bits_of_the_plain_call():
    rng = np.random.default_rng(8)
    q, kv, kr = draw(rng, 300, 2, NOPE + SHARED), draw(rng, 700, 2, NOPE + VALUE), draw(rng, 700, SHARED)
    plain, windowed = attend(q, kv, kr, 400), attend_in_windows(q, kv, kr, 400, 700)
    assert plain[0].tobytes() == windowed[0].tobytes()
    assert plain[1].tobytes() == windowed[1].tobytes()


@settings(max_examples=25)
@given(
    prefix=st.integers(0, 300),
    segments=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    window=st.integers(40, 400),
    seed=st.integers(0, 2**32),
)
def test_gang_positions_equal_one_rank(prefix, segments, window, seed):
    """A member's queries are its own rows; positions and mask must be those of one rank doing it all."""
    rng = np.random.default_rng(seed)
    keys = prefix + sum(segments)
    q, kv, kr = draw(rng, keys, 1, NOPE + SHARED), draw(rng, keys, 1, NOPE + VALUE), draw(rng, keys, SHARED)
    alone = attend(q[prefix:], kv, kr, prefix)
    first = prefix
    for rows in segments:
        end = first + rows
        # A member holds the context up to its own last row and nothing behind it.
        out, lse = attend_in_windows(q[first:end], kv[:end], kr[:end], first, window)
        np.testing.assert_allclose(out, alone[0][first - prefix : end - prefix], atol=5e-6)
        np.testing.assert_allclose(lse, alone[1][first - prefix : end - prefix], atol=5e-6)
        first = end


def test_uniform_keys_give_the_value_exactly_at_140k():
    """One stored row stands for 140,000 (row stride 0): the mean of equal values must be that value, bit by bit."""
    keys, heads = 140_000, 2
    one = np.zeros((1, heads, NOPE + VALUE), np.float32)
    one[0, :, :NOPE] = 0.25
    one[0, :, NOPE:] = np.array([3.0, -5.5], np.float32)[:, None]
    kv = np.broadcast_to(one, (keys, heads, NOPE + VALUE))
    # Sixty queries see sixty counts of keys, so a division done as a product with 1 / count shows in some of them.
    q = np.ones((60, heads, NOPE + SHARED), np.float32)
    out, lse = attend(q, kv, np.zeros((keys, SHARED), np.float32), keys - 60)
    np.testing.assert_array_equal(out, np.broadcast_to(one[0, :, NOPE:], out.shape))
    np.testing.assert_allclose(lse[59], SCALE * 0.25 * NOPE + np.log(keys), rtol=1e-6)


def test_attend_behind_2_31_elements(tmp_path):
    path = tmp_path / "kv"
    stride = 700_000_000  # elements between rows: the fourth row starts behind 2^31
    space = np.memmap(path, np.float32, "w+", shape=(4 * stride,))
    path.unlink()
    kv = np.lib.stride_tricks.as_strided(space, (4, 2, NOPE + VALUE), (4 * stride, 4 * (NOPE + VALUE), 4))
    kr = np.lib.stride_tricks.as_strided(space[1000:], (4, SHARED), (4 * stride, 4))
    rng = np.random.default_rng(4)
    kv[:], kr[:] = draw(rng, *kv.shape), draw(rng, *kr.shape)
    q = draw(rng, 4, 2, NOPE + SHARED)
    assert_equal_to_naive(attend(q, kv, kr, 0), naive_mla_attend(q, kv.copy(), kr.copy(), 0, True, SCALE))


def decode_case(rng, lengths, heads, rank, page):
    pages_each = -(-max(lengths) // page)
    pool = np.full((len(lengths) * pages_each + 1, page, rank + SHARED), np.nan, np.float32)
    table = rng.permutation(len(pool))[: len(lengths) * pages_each].reshape(len(lengths), -1).astype(np.int32)
    for pages, length in zip(table, lengths, strict=True):
        latent_append(draw(rng, length, rank + SHARED), pool, pages, 0)
    w = (draw(rng, heads * (NOPE + VALUE), rank) * rank**-0.5).astype(np.float32)
    return draw(rng, len(lengths), heads, NOPE + SHARED), w, pool, table, np.array(lengths, np.int64)


@pytest.mark.parametrize("page", [1, 7, 64])
def test_decode_against_naive_over_page_boundaries(page):
    rng = np.random.default_rng(page)
    case = decode_case(rng, [1, 63, 64, 65, 7, 113], 3, 40, page)
    out = np.full((7, 3, VALUE), np.nan, np.float32)
    mla_decode(*case, SCALE, out[:6])
    np.testing.assert_allclose(out[:6], naive_mla_decode(*case, SCALE), rtol=1e-5, atol=5e-6)
    assert np.isnan(out[6]).all()


def test_decode_equals_prefill_of_one_row():
    rng = np.random.default_rng(11)
    q, w, pool, table, lengths = decode_case(rng, [200], 4, 64, 16)
    w.flags.writeable = False  # as a weight mapped from a file is
    out = np.empty((1, 4, VALUE), np.float32)
    mla_decode(q, w, pool, table, lengths, SCALE, out)
    latent = pool[table[0]].reshape(-1, pool.shape[2])[:200]
    kv = np.empty((200, 4, NOPE + VALUE), np.float32)
    mla_expand(latent, w, kv)
    np.testing.assert_allclose(out, attend(q, kv, latent[:, 64:], 199)[0], atol=5e-6)


def test_decode_of_nothing_and_of_an_unused_bad_page():
    rng = np.random.default_rng(12)
    q, w, pool, table, lengths = decode_case(rng, [20, 20], 2, 32, 8)
    out = np.full((2, 2, VALUE), np.nan, np.float32)
    table[0, :] = -1
    lengths[:] = 0, 16
    table[1, 2] = 10_000
    mla_decode(q, w, pool, table, lengths, SCALE, out)
    assert not out[0].any()
    np.testing.assert_allclose(out[1], naive_mla_decode(q[1:], w, pool, table[1:], lengths[1:], SCALE)[0], atol=5e-6)


def test_decode_behind_2_31_elements(tmp_path):
    path = tmp_path / "pool"
    pool = np.memmap(path, np.float32, "w+", shape=(700_000, 64, 32 + SHARED))  # 2.15e9 elements, sparse
    path.unlink()
    rng = np.random.default_rng(13)
    pages = np.array([[699_999, 5]], np.int32)
    latent_append(draw(rng, 70, 32 + SHARED), pool, pages[0], 0)
    case = draw(rng, 1, 2, NOPE + SHARED), draw(rng, 2 * (NOPE + VALUE), 32), pool, pages, np.array([70])
    out = np.empty((1, 2, VALUE), np.float32)
    mla_decode(*case, SCALE, out)
    np.testing.assert_allclose(out, naive_mla_decode(*case, SCALE), rtol=1e-5, atol=1e-5)


def test_refuses_before_any_kernel():
    rng = np.random.default_rng(1)
    q, kv, kr = draw(rng, 4, 2, NOPE + SHARED), draw(rng, 9, 2, NOPE + VALUE), draw(rng, 9, SHARED)
    out, lse = np.full((4, 2, VALUE), 7, np.float32), np.full((4, 2), 7, np.float32)
    for bad, name in [
        ((q, kv[:8], kr, 0, True, SCALE, out, lse), "kv"),
        ((q, kv[:, :, :-1].copy(), kr, 0, True, SCALE, out, lse), "kv"),
        ((q, kv, kr.astype(np.float64), 0, True, SCALE, out, lse), "kr"),
        ((q.transpose(1, 0, 2), kv, kr, 0, True, SCALE, out, lse), "q"),
        ((q, kv, kr, 0, True, SCALE, out, lse[:3]), "lse"),
    ]:
        with pytest.raises(ShapeError, match=f"^{name}:"):
            mla_attend(*bad)
    with pytest.raises(ShapeError, match="latent"):
        mla_expand(draw(rng, 9, 30), draw(rng, 2 * (NOPE + VALUE), 31), kv)
    case = list(decode_case(rng, [20, 20], 2, 32, 8))
    for index, bad_value, name in [
        (4, np.array([20, 25]), r"lengths\[1\]"),
        (3, case[3] + 100, r"pages\[0\]"),
        (3, case[3].astype(np.int64), "pages"),
        (1, case[1][:-1], "w_kv_b"),
    ]:
        with pytest.raises(ShapeError, match=name):
            mla_decode(*case[:index], bad_value, *case[index + 1 :], SCALE, out[:2])
    assert (out == 7).all()
    assert (lse == 7).all()
