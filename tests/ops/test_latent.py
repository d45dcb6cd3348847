"""Latent norm and the paged rows: odd pages, boundaries, neighbours left alone, rows behind 2^31 elements."""

import numpy as np
import pytest

from whalez.errors import ShapeError
from whalez.ops.latent import latent_append, latent_gather, latent_norm
from whalez.ops.latent.naive import naive_latent_append, naive_latent_gather, naive_latent_norm


@pytest.mark.parametrize(("t", "rank", "shared"), [(1, 1, 0), (63, 64, 16), (113, 509, 64)])
def test_norm_against_naive(t, rank, shared):
    rng = np.random.default_rng(rank)
    c = (rng.standard_normal((t, rank + shared)) * 10.0 ** rng.integers(-3, 3, (t, 1))).astype(np.float32)
    weight = (1 + 0.1 * rng.standard_normal(rank)).astype(np.float32)
    want = naive_latent_norm(c, weight, 1e-6)
    before = c.copy()
    latent_norm(c, weight, 1e-6)
    np.testing.assert_allclose(c, want, rtol=2e-6, atol=1e-7)
    np.testing.assert_array_equal(c[:, rank:], before[:, rank:])


def test_norm_in_a_wider_buffer():
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((20, 40)).astype(np.float32)
    before = wide.copy()
    want = naive_latent_norm(wide[:, 5:30], np.ones(20, np.float32), 1e-6)
    latent_norm(wide[:, 5:30], np.ones(20, np.float32), 1e-6)
    np.testing.assert_allclose(wide[:, 5:30], want, rtol=2e-6)
    np.testing.assert_array_equal(wide[:, :5], before[:, :5])
    np.testing.assert_array_equal(wide[:, 30:], before[:, 30:])


@pytest.mark.parametrize("page", [1, 7, 64])
@pytest.mark.parametrize(("start", "count"), [(0, 0), (0, 1), (0, 64), (63, 1), (64, 64), (5, 117), (127, 2)])
def test_pages_against_naive(page, start, count):
    rng = np.random.default_rng(page)
    pages_count = -(-(start + count) // page) + 2
    pages = rng.permutation(pages_count + 3)[:pages_count].astype(np.int32)
    pool = np.full((pages_count + 3, page, 12), np.nan, np.float32)
    rows = rng.standard_normal((count, 12)).astype(np.float32)
    want = pool.copy()
    naive_latent_append(rows, want, pages, start)
    latent_append(rows, pool, pages, start)
    np.testing.assert_array_equal(pool, want)  # the NaN of all other rows included
    out = np.full((count + 1, 12), 9, np.float32)
    latent_gather(pool, pages, start, count, out[:count])
    np.testing.assert_array_equal(out[:count], rows)
    if count:
        np.testing.assert_array_equal(out[:count], naive_latent_gather(pool, pages, start, count))
    assert (out[count] == 9).all()


def test_pages_behind_2_31_elements(tmp_path):
    path = tmp_path / "pool"
    pool = np.memmap(
        path, np.float32, "w+", shape=(70_000, 64, 576)
    )  # 2.58e9 elements, sparse: only what is used exists
    path.unlink()
    pages = np.array([69_999, 3], np.int32)
    rows = np.arange(2 * 576, dtype=np.float32).reshape(2, 576)
    latent_append(rows, pool, pages, 63)
    out = np.zeros_like(rows)
    latent_gather(pool, pages, 63, 2, out)
    np.testing.assert_array_equal(out, rows)
    np.testing.assert_array_equal(pool[69_999, 63], rows[0])


def test_refuses_before_writing():
    pool, pages = np.zeros((4, 8, 6), np.float32), np.array([2, 9], np.int32)
    rows = np.ones((9, 6), np.float32)
    with pytest.raises(ShapeError, match=r"pages: expected 0\.\.3, got 2\.\.9"):
        latent_append(rows, pool, pages, 0)
    with pytest.raises(ShapeError, match=r"\[10, 19\)"):
        latent_append(rows, pool, pages, 10)
    with pytest.raises(ShapeError, match="rows"):
        latent_append(rows[:, :5].copy(), pool, pages, 0)
    with pytest.raises(ShapeError, match="out"):
        latent_gather(pool, pages, 0, 4, np.zeros((3, 6), np.float32))
    with pytest.raises(ShapeError, match="weight"):
        latent_norm(np.ones((2, 4), np.float32), np.ones(5, np.float32), 1e-6)
    assert not pool.any()
    latent_append(rows[:8], pool, pages, 0)  # a bad page that is not used is not looked at
