"""Latent kernels: the norm against float64, the paged copies bit by bit, pages of any size, pages far away."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from helpers.device_rows import BF16, Rows, assert_bf16_near, assert_compact, chips, draw, performed, sparse
from helpers.mutate import assert_caught, changes, seeds
from whalez.errors import ShapeError
from whalez.ops.latent import cuda as latent
from whalez.ops.latent.naive import naive_latent_append, naive_latent_gather, naive_latent_norm
from whalez.ops.norm.cuda import rms_norm_kernel
from whalez.testing import simt

pytestmark = pytest.mark.usefixtures("device")  # the harness, and a GPU with -m gpu

COUNTS = [1, 2, 3, 63, 64, 65, 113]
SPARE_PAGES = 3  # in the pool, of no sequence


def page_table(rng, count, page):
    """Enough pages for `count` rows, in no order; behind them numbers that must not be looked at."""
    pages_count = -(-count // page)
    pages = rng.permutation(pages_count + SPARE_PAGES)[:pages_count]
    return devices.array(np.concatenate([pages, [2**31 - 1]]), np.int32), pages_count


def any_bits(rng, *shape):
    return rng.integers(0, 2**16, shape, np.uint16).view(BF16)


def check_pages(count, width=12, gap=0, start=0, page=64, order="forward", stream=None):
    rng = np.random.default_rng(count)
    pages, pages_count = page_table(rng, start + count, page)
    pool = Rows.poisoned(pages_count + SPARE_PAGES, page, width)
    rows = Rows(any_bits(rng, count, width), gap=gap)
    wanted = pool.values.copy()
    naive_latent_append(rows.values.view(np.uint16), wanted.view(np.uint16), pages, start)
    stream = stream or devices.Stream()
    latent.latent_append(
        stream, rows.address, rows.stride, pool.address, devices.at(pages), pages_count, start, count, page, width
    )
    performed(stream, order)
    assert pool.values.tobytes() == wanted.tobytes()  # the poison of all other rows included

    out = Rows.poisoned(count, width, gap=gap + 8, beyond=1)
    latent.latent_gather(
        stream, pool.address, devices.at(pages), pages_count, start, count, out.address, out.stride, page, width
    )
    performed(stream, order)
    assert out.values.tobytes() == rows.values.tobytes()
    assert out.values.tobytes() == naive_latent_gather(pool.values, pages, start, count).tobytes()
    out.assert_rest_untouched()


def check_decode(requests, width=12, gap=0, page=4, order="forward", stream=None):
    rng = np.random.default_rng(requests)
    positions = devices.array(rng.integers(0, 3 * page, requests), np.int64)
    table = Rows(rng.permutation(3 * requests + SPARE_PAGES)[: 3 * requests].reshape(requests, 3), np.int32, gap=2)
    pool = Rows.poisoned(3 * requests + SPARE_PAGES, page, width)
    rows = Rows(any_bits(rng, requests, width), gap=gap)
    wanted = pool.values.copy()
    for b in range(requests):
        one = rows.values[b : b + 1].view(np.uint16)
        naive_latent_append(one, wanted.view(np.uint16), table.values[b], int(positions[b]))
    stream = stream or devices.Stream()
    latent.latent_append_decode(
        stream, rows.address, rows.stride, pool.address, table.address, table.stride, devices.at(positions),
        requests, page, width,
    )  # fmt: skip
    performed(stream, order)
    assert pool.values.tobytes() == wanted.tobytes()


def check_norm(rows, rank, shared, gap=0, order="forward", stream=None):
    rng = np.random.default_rng(rank)
    c = Rows(draw(rng, rows, rank + shared), gap=gap, beyond=1)
    weight = Rows(1 + 0.1 * rng.standard_normal((1, rank)), np.float32)
    wanted = naive_latent_norm(c.values.astype(float), weight.values[0], 1e-6)
    before = c.values[:, rank:].tobytes()
    stream = stream or devices.Stream()
    latent.latent_norm(stream, c.address, c.stride, weight.address, 1e-6, rows, rank)
    performed(stream, order)
    assert_bf16_near(c.values[:, :rank], wanted[:, :rank])
    assert c.values[:, rank:].tobytes() == before
    c.assert_rest_untouched()


@simt.orders()
@pytest.mark.parametrize("count", COUNTS)
def test_any_row_count(count, order):
    check_pages(count, start=5, page=7, order=order)
    check_pages(count, width=16, order=order)
    check_decode(count, order=order)
    check_norm(count, 64, 16, order=order)


@simt.orders()
@pytest.mark.parametrize(("width", "gap"), [(576, 0), (40, 8), (37, 3), (37, 0), (1, 0)])
def test_any_width(width, gap, order):
    check_pages(5, width, gap, start=2, page=4, order=order)
    check_decode(5, width, gap, order=order)


@simt.orders()
@pytest.mark.parametrize(("rank", "shared", "gap"), [(512, 64, 0), (509, 64, 3), (20, 4, 8), (1, 0, 0)])
def test_norm_of_any_width(rank, shared, gap, order):
    check_norm(2, rank, shared, gap, order)


@pytest.mark.parametrize("page", [1, 7, 64])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 64), (63, 1), (64, 64), (5, 117), (127, 2)])
def test_any_start(page, start, count):
    check_pages(count, start=start, page=page)


@pytest.mark.no_gpu
def test_rows_without_room_are_refused_before_a_launch():
    stream = devices.Stream()
    for start, count in ((0, 17), (10, 7), (-1, 2), (3, -1)):
        with pytest.raises(ShapeError, match=r"16 rows of 2 pages"):
            latent.latent_append(stream, 0, 8, 0, 0, 2, start, count, 8, 8)
        with pytest.raises(ShapeError, match=r"16 rows of 2 pages"):
            latent.latent_gather(stream, 0, 0, 2, start, count, 0, 8, 8, 8)
    latent.latent_append(stream, 0, 8, 0, 0, 2, 16, 0, 8, 8)
    latent.latent_gather(stream, 0, 0, 2, 16, 0, 0, 8, 8, 8)
    latent.latent_append_decode(stream, 0, 8, 0, 0, 1, 0, 0, 8, 8)
    assert not stream.queue


class FarPages:
    """Two rows, the first on page 59,999 of a pool of 2.2e9 elements, the second on page 3."""

    def __init__(self, folder):
        self.pool = sparse(folder / "pool", 60_000, 64 * 576)
        self.pages = devices.array([59_999, 3], np.int32)
        self.rows = Rows(any_bits(np.random.default_rng(0), 2, 576))

    def check(self, stream):
        self.pool[59_999], self.pool[3] = 0, 0
        at, pages = devices.at(self.pool), devices.at(self.pages)
        latent.latent_append(stream, self.rows.address, 576, at, pages, 2, 63, 2, 64, 576)
        out = Rows.poisoned(2, 576)
        latent.latent_gather(stream, at, pages, 2, 63, 2, out.address, 576, 64, 576)
        performed(stream)
        assert out.values.tobytes() == self.rows.values.tobytes()
        assert np.array(self.pool[59_999, -576:]).tobytes() == self.rows.values[0].tobytes()
        assert np.array(self.pool[3, :576]).tobytes() == self.rows.values[1].tobytes()

    def check_decode(self, stream):
        self.pool[59_999] = 0
        at, positions = devices.at(self.pool), devices.array([63], np.int64)
        latent.latent_append_decode(
            stream, self.rows.address, 576, at, devices.at(self.pages), 2, devices.at(positions), 1, 64, 576
        )
        performed(stream)
        assert np.array(self.pool[59_999, -576:]).tobytes() == self.rows.values[0].tobytes()


@pytest.mark.parametrize("op", ["append", "gather", "append_decode"])
def test_pages_behind_2_31_elements(tmp_path, op):
    far = FarPages(tmp_path)
    kernel = getattr(latent, f"latent_{op}_kernel")
    check = far.check_decode if op == "append_decode" else far.check
    assert_caught(
        check, devices.Stream(), kernel, simt.SimtError, old="kept * width", new="(((kept * width) << 32) >> 32)"
    )


@seeds(latent.latent_append_kernel, latent.latent_gather_kernel)
@pytest.mark.parametrize("op", ["append", "gather"])
@changes(
    {"old": "i_row < count", "new": "i_row <= count"},
    {"old": "start + i_row", "new": "i_row"},
    {"old": "position - i_page * page_tokens", "new": "position - i_page * page_tokens - 1", "inside": "row"},
    {"old": "table + i_page", "new": "table + i_page + 1", "inside": "row"},
    {"old": "i = 8 * octets + i_lane", "new": "i = 8 * octets + 1 + i_lane", "inside": "copy"},
    {"old": "(source >> 3) + i", "new": "(source >> 3) + i_lane", "inside": "copy"},
    {"old": "i < octets", "new": "i <= octets", "inside": "copy"},
)
def test_mistakes_in_append_and_gather_are_caught(op, change):
    inside = {"row": "paged_row_thread", "copy": "copy_row_warp"}.get(change.get("inside"))

    def check(stream):
        check_pages(9, 12, start=3, page=4, stream=stream)
        check_pages(9, 264, gap=8, start=3, page=4, stream=stream)

    kernel = latent.latent_append_kernel if op == "append" else latent.latent_gather_kernel
    assert_caught(check, devices.Stream(), kernel, simt.SimtError, **{**change, "inside": inside})


@seeds(latent.latent_append_decode_kernel)
@changes(
    {"old": "i_row * pages_stride", "new": "0"},
    {"old": "g_positions[i_row]", "new": "g_positions[0]"},
    {"old": "i_row < requests", "new": "i_row <= requests"},
)
def test_mistakes_in_append_decode_are_caught(change):
    assert_caught(
        lambda s: check_decode(9, stream=s),
        devices.Stream(),
        latent.latent_append_decode_kernel,
        simt.SimtError,
        **change,
    )


def test_a_norm_that_reaches_into_the_shared_keys_is_caught():
    change = {"old": "i < width", "new": "i < width + 1", "nth": 0}
    assert_caught(lambda s: check_norm(2, 37, 3, stream=s), devices.Stream(), rms_norm_kernel, simt.SimtError, **change)


@pytest.mark.slow  # ptxas; `make kernels` compiles and compares every kernel, too
@pytest.mark.no_gpu
@chips
@pytest.mark.parametrize(
    ("kernel", "accesses"),
    [
        (latent.latent_append_kernel, ["LDG.128", "STG.128"]),
        (latent.latent_gather_kernel, ["LDG.128", "STG.128"]),
        (latent.latent_append_decode_kernel, ["LDG.128", "STG.128"]),
    ],
)
def test_machine_code(kernel, accesses, arch):
    assert_compact(kernel, accesses, arch)
