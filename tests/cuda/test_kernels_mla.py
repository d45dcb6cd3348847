"""MLA kernels against float64: odd shapes, thread orders, positions, windows, pages, 64-bit addresses, mutations.

Tolerance: results that pass through bf16 weights may be off by twice what a plain computation with the same roundings
is off, and one rounding unit of the result; lse, which is f32 throughout, as on the host.
"""

import itertools
from contextlib import ExitStack
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from helpers.mutate import MutantStream, assert_caught, changes, mutate, seeds
from whalez.errors import ShapeError
from whalez.fabric.cuda.driver import DEFAULT_STREAM
from whalez.ops.device.compile import compile_cubin, resource_usage, sass_opcodes
from whalez.ops.device.kernel import KERNELS
from whalez.ops.mla.cuda import (
    ATTEND_TILES,
    DECODE_KEYS,
    RANK,
    Window,
    mla_absorb,
    mla_attend,
    mla_attend_context,
    mla_decode,
    mla_decode_absorbed,
    mla_decode_merge_kernel,
    mla_decode_scratch_bytes,
    mla_decode_shares,
    mla_decode_split_kernel,
    mla_project,
)
from whalez.ops.mla.naive import naive_mla_attend, naive_mla_decode
from whalez.testing import simt
from whalez.testing.simt import emulation

pytestmark = pytest.mark.usefixtures("device")  # the harness, and a GPU with -m gpu

BF16 = ml_dtypes.bfloat16
FULL, SMALL = (128, 64, 128), (32, 16, 32)
LATENT = RANK + 64
BF16_UNIT, F32_UNIT = 2.0**-8, 2.0**-22


def rounded(x):
    """The bf16 nearest to each value, as float64."""
    return np.asarray(x, np.float64).astype(np.float32).astype(BF16).astype(np.float64)


def draw(rng, *shape):
    return rounded(rng.standard_normal(shape))


def bits(x, align=16):
    """Guarded bf16 copy of values that bf16 holds."""
    return devices.array(np.asarray(x).astype(np.float32).astype(BF16).view(np.uint16), align=align)


def floats(array):
    return (array.view(BF16) if array.dtype == np.uint16 else array).astype(np.float64)


def at(array):
    return devices.at(array)


def assert_near(got, want, plain, unit):
    """The rule of the tolerance; a poisoned or forgotten value is NaN and fails."""
    allowed = 2 * np.abs(plain - want).max(initial=0) + unit * np.abs(want).max(initial=0)
    error = np.abs(got - want).max(initial=0)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


# ---- prefill --------------------------------------------------------------------------------------------------------


def plain_attend(q, kv, kr, q_start, causal, scale, out_bf16=True):
    """One pass in f32 with weights and result rounded to bf16: what low precision costs anyway."""
    nope = q.shape[2] - kr.shape[1]
    out = np.zeros((*q.shape[:2], kv.shape[2] - nope))
    seen = q_start + np.arange(len(q)) + 1 if causal else np.full(len(q), len(kr))
    hidden = np.arange(len(kr)) >= seen[:, None]
    for h in range(q.shape[1]):
        scores = (q[:, h, :nope] @ kv[:, h, :nope].T + q[:, h, nope:] @ kr.T) * scale
        scores[hidden] = -np.inf
        top = scores.max(1, initial=-np.inf, keepdims=True)
        weights = np.exp(scores - np.where(top == -np.inf, 0, top)).astype(np.float32)
        mass = weights.sum(1, keepdims=True)
        out[:, h] = rounded(weights) @ kv[:, h, nope:] / np.where(mass == 0, 1, mass)
    return rounded(out) if out_bf16 else out


@dataclass
class Attend:
    """One call on guarded arrays, and what it must give."""

    q: np.ndarray
    kv: np.ndarray
    kr: np.ndarray
    q_start: int
    causal: bool
    scale: float
    out_bf16: bool = False
    order: str = "forward"

    @classmethod
    def draw(cls, dims, t, s, heads, q_start, causal=True, **others):
        nope, shared, value = dims
        rng = np.random.default_rng(t * 1000 + s)
        q, kv, kr = 2 * draw(rng, t, heads, nope + shared), draw(rng, s, heads, nope + value), draw(rng, s, shared)
        return cls(q, kv, kr, q_start, causal, (nope + shared) ** -0.5, **others)

    @property
    def dims(self):
        shared = self.kr.shape[1]
        nope = self.q.shape[2] - shared
        return nope, shared, self.kv.shape[2] - nope

    def run(self, stream):
        (t, heads), s = self.q.shape[:2], len(self.kr)
        latent = np.full((s, 8 + self.kr.shape[1]), np.nan)  # kr is columns of longer rows
        latent[:, 8:] = self.kr
        q, kv, latent = bits(self.q, 4), bits(self.kv), bits(latent)
        out = devices.empty((t, heads, self.dims[2]), np.uint16 if self.out_bf16 else np.float32, 4)
        lse = devices.empty((t, heads))
        mla_attend(
            stream, at(q), at(kv), at(latent) + 16, at(out), at(lse), queries=t, keys=s, heads=heads, dims=self.dims,
            q_start=self.q_start, causal=self.causal, scale=self.scale, out_bf16=self.out_bf16,
            kr_row=latent.shape[1],
        )  # fmt: skip
        devices.run_queues([stream], order=self.order)
        return floats(out), floats(lse)

    def check(self, stream):
        arguments = self.q, self.kv, self.kr, self.q_start, self.causal, self.scale
        out, lse = self.run(stream)
        want, want_lse = naive_mla_attend(*arguments)
        assert_near(out, want, plain_attend(*arguments, self.out_bf16), BF16_UNIT if self.out_bf16 else F32_UNIT)
        np.testing.assert_array_equal(np.isinf(lse), np.isinf(want_lse))
        np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=5e-6)
        assert not out[np.isinf(want_lse)].any()


@simt.orders()
@pytest.mark.parametrize(
    ("t", "s", "heads", "q_start", "causal"),
    [
        (1, 1, 1, 0, True),
        (17, 63, 2, 46, True),
        (65, 65, 2, 0, True),
        (113, 200, 2, 87, True),
        (90, 70, 1, 0, True),  # queries go on behind the window
        (70, 40, 2, -66, True),  # a first block sees nothing, nor do two rows of the next
        (20, 40, 1, -20, True),  # nobody sees anything
        (63, 97, 2, -500, False),
        (3, 0, 1, 0, False),  # no keys at all
    ],
)
def test_attend_small(t, s, heads, q_start, causal, order):
    Attend.draw(SMALL, t, s, heads, q_start, causal, out_bf16=t % 2 == 1, order=order).check(devices.Stream())


@simt.orders()
@pytest.mark.parametrize(
    ("t", "s", "q_start", "causal"),
    [
        (1, 113, 112, True),
        (65, 65, 0, True),
        (130, 63, -2, True),
        (17, 129, 0, False),
        (129, 193, 64, True),
    ],
)
def test_attend_at_the_dims_of_kimi_linear(t, s, q_start, causal, order):
    out_bf16 = order in ("forward", "seed1")
    Attend.draw(FULL, t, s, 2 - t // 100, q_start, causal, out_bf16=out_bf16, order=order).check(devices.Stream())


@pytest.mark.parametrize("turn", [1, -1])
def test_scores_far_apart(turn):
    """Scores of hundreds, rising or falling over the tiles: the running maximum must carry the sum."""
    case = Attend.draw(SMALL, 40, 300, 2, 260)
    case.kv[:, :, :32] = rounded(case.kv[:, :, :32] * np.linspace(0, 40, 300)[::turn, None, None])
    assert np.ptp(naive_mla_attend(case.q, case.kv, case.kr, 260, True, case.scale)[1]) > 60
    case.check(devices.Stream())


DEPTH = 260_000  # tokens


def head_values(heads):
    """One value a head, 96 distinct ones, whose mean over any number of equal keys up to DEPTH is exact in f32.

    A value has 5 significant bits and a count of keys 18, so every partial sum has at most 23, and f32 holds 24.
    """
    i = np.arange(heads)
    return np.where(i % 2, -1, 1) * (31.0 - i // 6) * 2.0 ** (i // 2 % 3 - 5)


def inexact_means(values, depth):
    """Counts of equal keys up to `depth` at which a partial sum or the kernel's quotient is not the exact one."""
    keys = np.arange(1, depth + 1)
    divisor = keys.astype(np.float32)
    inverse = np.float32(1) / divisor
    wrong = np.zeros(depth, bool)
    for value in values:
        sums = np.cumsum(np.full(depth, value, np.float32), dtype=np.float32)
        quotient = sums * inverse
        left = (sums - quotient.astype(np.float64) * divisor).astype(np.float32)  # exact before it is rounded
        quotient = (quotient + left.astype(np.float64) * inverse).astype(np.float32)
        wrong |= (sums != keys * value) | (quotient != value)
    return keys[wrong]


@pytest.mark.no_gpu
def test_the_values_of_the_depth_tests_have_exact_means():
    values = head_values(96)
    assert len(set(values)) == 96
    np.testing.assert_array_equal(values, rounded(values))
    assert not len(inexact_means(values, DEPTH))
    assert len(inexact_means(rounded([2.9]), DEPTH))  # 8 bits: too many


def uniform_case(dims, t, s, heads, **others):
    """Equal keys, and one value a head, so that a right result has no error at all."""
    case = Attend.draw(dims, t, s, heads, s - t, **others)
    case.q[:], case.kv[:], case.kr[:] = rounded(0.7), rounded(0.3), rounded(0.3)
    case.kv[:, :, dims[0] :] = head_values(heads)[:, None]
    return case


@pytest.mark.parametrize(("dims", "t", "s"), [(SMALL, 17, 4113), (FULL, 33, 333)])
def test_uniform_keys_give_the_value_exactly(dims, t, s):
    case = uniform_case(dims, t, s, 3)
    out, lse = case.run(devices.Stream())
    np.testing.assert_array_equal(out, np.broadcast_to(case.kv[:1, :, dims[0] :], out.shape))
    np.testing.assert_allclose(lse[-1], lse[0] + np.log(s / (s - t + 1)), rtol=1e-6)


def test_a_tail_of_nan_stays_outside():
    """Keys behind the window are not there: NaN in them, and a NaN weight times them, must not come in."""
    case = Attend.draw(SMALL, 9, 37, 1, 0, causal=False)
    rows = np.full((64, 1, 64), np.nan)
    rows[:37] = case.kv
    kv, q, kr = bits(rows), bits(case.q), bits(case.kr)
    out, lse = devices.empty((9, 1, 32)), devices.empty((9, 1))
    stream = devices.Stream()
    mla_attend(
        stream, at(q), at(kv), at(kr), at(out), at(lse), queries=9, keys=37, heads=1, dims=SMALL, q_start=0,
        causal=False, scale=case.scale,
    )  # fmt: skip
    devices.run_queues([stream])
    np.testing.assert_array_equal(out, case.run(stream)[0])


class Deep:
    """Every 3,000th row of a context of 260,000 tokens and 96 heads: rows lie where they do in the whole tensors."""

    HEADS, STRIDE, KEYS, QUERIES = 96, 3000, 86, 3

    def __init__(self, folder):
        self.spaces = {}
        for name, row, rows, dtype in (
            ("kv", 256 * self.HEADS, self.KEYS, np.uint16),
            ("kr", 64, self.KEYS, np.uint16),
            ("q", 192 * self.HEADS, self.KEYS, np.uint16),
            ("out", 128 * self.HEADS, self.KEYS, np.float32),
        ):
            self.spaces[name] = devices.sparse(folder / name, rows, self.STRIDE * row, dtype)[:, :row]

    def check(self, stream):
        first = self.KEYS - self.QUERIES
        case = uniform_case(FULL, self.QUERIES, self.KEYS, 1)
        case.q = np.repeat(case.q, self.HEADS, 1)
        values = head_values(self.HEADS)
        case.kv = np.repeat(case.kv, self.HEADS, 1)
        case.kv[:, :, 128:] = values[:, None]
        for name, content in (("kv", case.kv), ("kr", case.kr), ("q", case.q)):
            space = self.spaces[name]
            space[len(space) - len(content) :] = bits(content).reshape(len(content), -1)
        kv, kr, q, out = (self.spaces[name] for name in ("kv", "kr", "q", "out"))
        q, out = q[first:], out[first:]
        out[:] = np.nan
        lse = devices.empty((self.QUERIES, self.HEADS))
        mla_attend(
            stream, at(q), at(kv), at(kr), at(out), at(lse), queries=self.QUERIES, keys=self.KEYS, heads=self.HEADS,
            dims=FULL, q_start=first, causal=True, scale=0.125, kv_row=kv.strides[0] // 2,
            kr_row=kr.strides[0] // 2, q_row=q.strides[0] // 2, out_row=out.strides[0] // 4,
        )  # fmt: skip
        devices.run_queues([stream])
        want = np.broadcast_to(values[:, None], (self.QUERIES, self.HEADS, 128))
        np.testing.assert_array_equal(out.reshape(want.shape), want)


def test_depth_of_260_000_tokens(tmp_path):
    """Offsets are past 2^32 values; with one product in 32 bits the rows are others, or none."""
    deep = Deep(tmp_path)
    assert deep.spaces["kv"].strides[0] // 2 * (deep.KEYS - 1) > 1 << 32
    kernel = ATTEND_TILES[FULL][1]
    change = {"inside": "copy_rows_block", "old": "row * row_bytes", "new": "int32(row * row_bytes)"}
    assert_caught(deep.check, devices.Stream(), kernel, simt.SimtError, **change)


def fill(device, address, pattern, count):
    """`count` copies of a row of bf16 bits in device memory."""
    rows = np.broadcast_to(pattern, (min(count, 2048), *pattern.shape)).copy()
    for first in range(0, count, len(rows)):
        part = rows[: count - first]
        device.driver.cuMemcpyHtoD(address + first * pattern.nbytes, part.ctypes.data, part.nbytes)


def whole_depth(device, tokens, heads, run):
    """Attention over `tokens` equal keys, in device memory: every output of every token must be its head's value.

    run: performs a stream that was told of the launch
    """
    nope, shared, value = FULL
    values = head_values(heads)
    kv_row, q_row = np.empty((heads, nope + value)), np.full((heads, nope + shared), rounded(0.7))
    kv_row[:, :nope], kv_row[:, nope:] = rounded(0.3), values[:, None]
    patterns = [np.asarray(row, np.float32).astype(BF16).view(np.uint16) for row in (q_row, kv_row)]
    patterns.append(np.full(shared, rounded(0.3), np.float32).astype(BF16).view(np.uint16))
    device.bind()
    driver, taken = device.driver, []
    out_row = heads * value * 4
    try:
        sizes = (*(pattern.nbytes * tokens for pattern in patterns), out_row * tokens, heads * 4 * tokens)
        taken.extend(driver.cuMemAlloc(nbytes) for nbytes in sizes)
        q, kv, kr, out, lse = map(int, taken)
        for address, pattern in zip((q, kv, kr), patterns, strict=True):
            fill(device, address, pattern, tokens)
        driver.cuMemsetD8(out, 0xFF, out_row * tokens)
        driver.cuStreamSynchronize(DEFAULT_STREAM)  # the streams of kernels do not wait for it
        stream = devices.Stream()
        mla_attend(
            stream, q, kv, kr, out, lse, queries=tokens, keys=tokens, heads=heads, dims=FULL, q_start=0, causal=True,
            scale=0.125,
        )  # fmt: skip
        run([stream])
        want = np.repeat(values.astype(np.float32), value)
        for first in range(0, tokens, 2048):
            got = np.empty((min(2048, tokens - first), len(want)), np.float32)
            driver.cuMemcpyDtoH(got.ctypes.data, out + first * out_row, got.nbytes)
            np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape), err_msg=f"from token {first}")
    finally:
        for pointer in taken:
            driver.cuMemFree(pointer)


@pytest.mark.timeout(600)
def test_depth_of_260_000_tokens_in_full(request, device):
    """All of it on a GPU: 36 GB, 1e15 products. Without one, 70 tokens over the fake driver."""
    with ExitStack() as stack:
        if request.node.callspec.params["device"] == "gpu":
            made, tokens, heads = request.getfixturevalue("gpu"), DEPTH, 96
            free, _ = made.device.driver.cuMemGetInfo()
            if free < 40e9:
                pytest.skip(f"260,000 tokens x 96 heads take 36 GB, {free / 1e9:.0f} GB are free")
        else:
            made, tokens, heads = devices.FakeGpu(stack), 70, 2
            stack.callback(made.close)
        with devices.used(made):
            whole_depth(made.device, tokens, heads, devices.run_queues)


@pytest.mark.no_gpu
def test_the_depth_test_sees_a_value_that_was_not_written():
    with ExitStack() as stack:
        fake = devices.FakeGpu(stack)
        stack.callback(fake.close)
        with devices.used(fake), pytest.raises(AssertionError, match="from token 0"):
            whole_depth(fake.device, 70, 2, lambda streams: None)


def leveled(rng, width, total):
    """Bounds of `width` uneven segments of `total` tokens, none empty."""
    cuts = np.sort(rng.choice(np.arange(1, total), width - 1, replace=False))
    return [0, *cuts.tolist(), total]


def check_segments(prefix, extend, width):
    """Every member's rows, by its own start, against the one pass over all."""
    rng = np.random.default_rng(prefix + extend)
    case = Attend.draw(SMALL, extend, prefix + extend, 2, prefix)
    want, want_lse = naive_mla_attend(case.q, case.kv, case.kr, prefix, True, case.scale)
    for begin, end in itertools.pairwise(leveled(rng, width, extend)):
        seen = prefix + end
        member = Attend(case.q[begin:end], case.kv[:seen], case.kr[:seen], prefix + begin, True, case.scale)
        out, lse = member.run(devices.Stream())
        plain = plain_attend(member.q, member.kv, member.kr, prefix + begin, True, case.scale, False)
        assert_near(out, want[begin:end], plain, F32_UNIT)
        np.testing.assert_allclose(lse, want_lse[begin:end], rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize(("prefix", "extend", "width"), [(1, 67, 4), (0, 65, 3), (130, 9, 4), (64, 64, 2), (3, 40, 7)])
def test_uneven_segments_behind_a_prefix_are_one_causal_pass(prefix, extend, width):
    """A length that was padded, clamped or levelled would shift the mask of some member."""
    check_segments(prefix, extend, width)


def test_the_segments_that_were_clamped():
    """Prefix 1, extension 3,670, four members: where a padded length made -1 of the prefix."""
    check_segments(1, 3670, 4)


@pytest.mark.parametrize(
    ("start", "queries", "window"),
    [(0, 40, 100), (60, 40, 100), (61, 40, 100), (230, 33, 100), (50, 120, 50)],
)
def test_context_in_windows(start, queries, window):
    heads, scale = 2, 48**-0.5
    rng = np.random.default_rng(start)
    keys = start + queries
    q, kv, kr = 2 * draw(rng, queries, heads, 48), draw(rng, keys, heads, 64), draw(rng, keys, 16)
    g_q, whole_kv, whole_kr = bits(q), bits(kv), bits(kr)
    space_kv, space_kr = devices.empty((window, heads, 64), np.uint16, 16), devices.empty((window, 16), np.uint16, 16)
    stream, calls = devices.Stream(), []

    def read(first, count):
        calls.append((first, count))
        stream.copy(at(space_kv), at(whole_kv[first:]), count * heads * 128)
        stream.copy(at(space_kr), at(whole_kr[first:]), count * 32)
        return Window(at(space_kv), at(space_kr))

    out, lse = devices.empty((queries, heads, 32), np.uint16), devices.empty((queries, heads))
    scratch = devices.empty((2, queries, heads, 32)), devices.empty((queries, heads))
    mla_attend_context(
        stream, read, at(g_q), at(out), at(lse), at(scratch[0][0]), at(scratch[0][1]), at(scratch[1]),
        queries=queries, start=start, window=window, heads=heads, dims=SMALL, scale=scale,
    )  # fmt: skip
    devices.run_queues([stream])
    want, want_lse = naive_mla_attend(q, kv, kr, start, True, scale)
    assert_near(floats(out), want, plain_attend(q, kv, kr, start, True, scale), BF16_UNIT)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=5e-6)
    assert (len(calls) == 1) == (keys <= window)


@seeds(ATTEND_TILES[SMALL][1])
@changes(
    {"old": "cuda.syncthreads()", "new": "pass"},
    {"old": "visible = keys - i_key", "new": "visible = keys - i_key + 1"},
    {"inside": "soften_row_quad", "old": "t_mass[i] * shrink + total", "new": "t_mass[i] + total"},
    {"old": "cp_async_wait_all()", "new": "pass"},
    {"old": "1 - (i_tile & 1)", "new": "i_tile & 1"},
    {"old": "q_start + row + 9", "new": "q_start + row + 8"},
    {"inside": "lse_thread", "old": "libdevice.logf", "new": "libdevice.log2f"},
    {"inside": "fold_warp", "old": "t_shrink[1]", "new": "t_shrink[0]", "nth": 1},
    quick=3,
)
def test_attend_mutations(change):
    case = Attend.draw(SMALL, 65, 113, 2, 48)
    case.kv[:, :, :32] = rounded(case.kv[:, :, :32] * np.linspace(1, 3, 113)[:, None, None])
    dense = Attend.draw(SMALL, 17, 41, 1, 0, causal=False)

    def check(stream):
        case.check(stream)
        dense.check(stream)

    assert_caught(check, devices.Stream(), ATTEND_TILES[SMALL][1], simt.SimtError, **change)


def test_a_product_with_the_inverse_is_no_quotient():
    """What the two multiply-adds behind it are for; each row divides by another mass."""
    case = uniform_case(SMALL, 65, 4113, 3)
    wanted = np.broadcast_to(case.kv[:1, :, SMALL[0] :], (65, 3, SMALL[2]))
    change = {"inside": "quotient_thread", "old": "libdevice.fmaf(-quotient, divisor, sum_)", "new": "ZERO"}

    def check(stream):
        np.testing.assert_array_equal(case.run(stream)[0], wanted)

    assert_caught(check, devices.Stream(), ATTEND_TILES[SMALL][1], **change)


@pytest.mark.no_gpu
def test_attend_refuses_before_any_launch():
    stream = devices.Stream()
    good = {"queries": 4, "keys": 4, "heads": 2, "dims": SMALL, "q_start": 0, "causal": True, "scale": 0.1}
    for bad, name in [
        ({"dims": (32, 16, 24)}, "dims"),
        ({"heads": 70_000}, "queries, keys, heads"),
        ({"scale": -1.0}, "scale"),
        ({"kv_row": 129}, "kv_row"),
        ({"kr_row": 18}, "kr_row"),
    ]:
        with pytest.raises(ShapeError, match=f"^{name}:"):
            mla_attend(stream, 4096, 4096, 4096, 4096, 4096, **(good | bad))
    for position, name in enumerate(("q", "kv", "kr", "out", "lse")):
        addresses = [4096] * 5
        addresses[position] += 2
        with pytest.raises(ShapeError, match=f"^{name}:"):
            mla_attend(stream, *addresses, **good)
    assert not stream.queue


# ---- decode ---------------------------------------------------------------------------------------------------------


@dataclass
class Decode:
    """Sequences of some lengths over shuffled pages; rows nobody may read are NaN."""

    lengths: tuple
    heads: int
    page: int
    shares: int
    order: str = "forward"
    dims: tuple = (32, 64, 48)
    scale: float = 0.1

    def draw(self):
        rng = np.random.default_rng(sum(self.lengths) + self.heads)
        nope, shared, value = self.dims
        pages_row = max(1, -(-max(self.lengths) // self.page))
        pool = np.full((len(self.lengths) * pages_row + 1, self.page, LATENT), np.nan)
        table = rng.permutation(len(pool))[: len(self.lengths) * pages_row].reshape(-1, pages_row).astype(np.int32)
        for pages, length in zip(table, self.lengths, strict=True):
            for t in range(length):
                pool[pages[t // self.page], t % self.page] = draw(rng, LATENT)
            pages[-(-length // self.page) :] = -1
        w = rounded(rng.standard_normal((self.heads * (nope + value), RANK)) * 2 * RANK**-0.5)
        return draw(rng, len(self.lengths), self.heads, nope + shared), w, pool, table, np.array(self.lengths)

    def run(self, stream, q, w, pool, table, lengths):
        requests, value = len(lengths), self.dims[2]
        g_q, g_w, g_pool = bits(q), bits(w), bits(pool)
        pages, g_lengths = devices.array(table), devices.array(lengths.astype(np.int64))
        out = devices.empty((requests, self.heads, value), np.uint16)
        scratch = devices.empty(mla_decode_scratch_bytes(requests, self.heads, self.shares), np.uint8, 16)
        mla_decode(
            stream, at(g_q), at(g_w), at(g_pool), at(pages), at(g_lengths), at(out), at(scratch), requests=requests,
            heads=self.heads, dims=self.dims, pages_row=table.shape[1], page_tokens=self.page, shares=self.shares,
            scale=self.scale,
        )  # fmt: skip
        devices.run_queues([stream], order=self.order)
        return floats(out)

    def plain(self, q, w, pool, table, lengths):
        """Absorbed in f64 with the roundings of the kernels: absorbed query, weights, mean, result."""
        nope, _, value = self.dims
        w = w.reshape(self.heads, nope + value, RANK)
        out = np.zeros((len(lengths), self.heads, value))
        for b, length in enumerate(lengths):
            rows = np.array([pool[table[b, t // self.page], t % self.page] for t in range(length)]).reshape(-1, LATENT)
            for h in range(self.heads):
                absorbed = np.concatenate([rounded(q[b, h, :nope] @ w[h, :nope]), q[b, h, nope:]])
                scores = rows @ absorbed * self.scale
                weights = np.exp(scores - scores.max(initial=-np.inf))
                mean = rounded(weights) @ rows[:, :RANK] / max(weights.sum(), 1e-30)
                out[b, h] = rounded(w[h, nope:] @ rounded(mean))
        return out

    def check(self, stream):
        case = self.draw()
        want = naive_mla_decode(*case, self.scale)
        assert_near(self.run(stream, *case), want, self.plain(*case), BF16_UNIT)


@simt.orders()
@pytest.mark.parametrize(
    ("lengths", "heads", "page", "shares"),
    [((1,), 1, 64, 1), ((65, 17), 3, 64, 2), ((113, 0, 63), 2, 7, 3)],
)
def test_decode_small(lengths, heads, page, shares, order):
    Decode(lengths, heads, page, shares, order).check(devices.Stream())


def test_decode_at_the_heads_of_kimi_linear():
    """More heads than one block has, the last group ragged; more shares than tiles."""
    Decode((70,), 35, 64, 4, "seed1", dims=(4, 64, 6)).check(devices.Stream())


def test_decode_of_equal_rows_is_the_row():
    rows = rounded(np.random.default_rng(5).standard_normal(LATENT))
    q = np.full((1, 2, LATENT), rounded(0.1))
    out = absorbed(np.broadcast_to(rows, (200, LATENT)).reshape(4, 50, LATENT), [[3, 1, 0, 2]], [187], q, 3)
    np.testing.assert_array_equal(out[0, 0], rows[:RANK])


def absorbed(pool, pages, lengths, q, shares, g_pool=None):
    stream = devices.Stream()
    requests, heads = q.shape[:2]
    out = devices.empty((requests, heads, RANK), np.uint16)
    scratch = devices.empty(mla_decode_scratch_bytes(requests, heads, shares), np.uint8, 16)
    g_pool = bits(pool) if g_pool is None else g_pool
    g_q, g_pages, g_lengths = (
        bits(q),
        devices.array(np.array(pages, np.int32)),
        devices.array(np.array(lengths, np.int64)),
    )
    mla_decode_absorbed(
        stream, at(g_q), at(g_pool), at(g_pages), at(g_lengths), at(out), at(scratch), requests=requests, heads=heads,
        pages_row=g_pages.shape[1], page_tokens=pool.shape[1], shares=shares, scale=0.05,
    )  # fmt: skip
    devices.run_queues([stream])
    return floats(out)


def test_decode_behind_2_31_values(tmp_path):
    pool = devices.sparse(tmp_path / "pool", 60_000, 64 * LATENT).reshape(60_000, 64, LATENT)  # 2.2e9 values
    rng = np.random.default_rng(6)
    rows = draw(rng, 70, LATENT)
    pool[59_999], pool[5, :6] = bits(rows[:64]), bits(rows[64:])
    q = draw(rng, 1, 2, LATENT)
    near = np.zeros((2, 64, LATENT))
    near[0], near[1, :6] = rows[:64], rows[64:]
    np.testing.assert_array_equal(
        absorbed(pool, [[59_999, 5]], [70], q, 1, g_pool=pool), absorbed(near, [[0, 1]], [70], q, 1)
    )


def test_shares_merge_over_gaps():
    """One share outweighs the others by e^200, one is empty: its weight is 1, and nothing overflows."""
    rows = np.zeros((4 * DECODE_KEYS, LATENT))
    rows[:, :RANK] = np.repeat(np.array([1.0, 2.0, 3.0, 4.0]), DECODE_KEYS)[:, None]
    rows[:, RANK] = np.repeat(np.array([0.0, 4000.0, -4000.0, 0.0]), DECODE_KEYS)
    q = np.zeros((1, 1, LATENT))
    q[0, 0, RANK] = 1.0
    out = absorbed(rows[None], [[0]], [3 * DECODE_KEYS], q, 4)
    np.testing.assert_array_equal(out, 2.0)


@seeds(mla_decode_split_kernel)
@changes(
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 0},
    {"inside": "copy_latent_block", "old": "g_pages[page_first + int64(i_page)]", "new": "g_pages[int64(i_page)]"},
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 1},
    {"old": "end - i_key, end - i_key", "new": "end - i_key + 1, end - i_key + 1"},
    quick=2,
)
def test_decode_split_mutations(change):
    case = Decode((70, 33), 3, 16, 2)
    assert_caught(case.check, devices.Stream(), mla_decode_split_kernel, simt.SimtError, **change)


@seeds(mla_decode_merge_kernel)
@pytest.mark.parametrize(
    "change",
    [
        {"old": "libdevice.expf", "new": "libdevice.exp2f"},
        {"old": "if lse != EMPTY", "new": "if lse == lse"},
        {"old": "mass += weight", "new": "mass += float32(1.0)"},
    ],
    ids=lambda change: change["new"],
)
def test_decode_merge_mutations(change):
    case = Decode((70, 33), 3, 16, 3)  # the second sequence has a share without rows
    assert_caught(case.check, devices.Stream(), mla_decode_merge_kernel, simt.SimtError, **change)


@seeds(KERNELS["mla_absorb_kernel"], KERNELS["mla_project_kernel"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mla_absorb_kernel", {"old": "low_f32(q) * high_f32(w)", "new": "high_f32(q) * high_f32(w)"}),
        ("mla_absorb_kernel", {"old": "head * (nope + value)", "new": "head * (nope + shared)"}),
        ("mla_project_kernel", {"old": "+ nope + i", "new": "+ i"}),
        ("mla_project_kernel", {"old": "range(5)", "new": "range(4)"}),
    ],
)
def test_gemv_mutations(name, change):
    case = Decode((9,), 2, 16, 1)
    assert_caught(case.check, devices.Stream(), KERNELS[name], simt.SimtError, **change)


@pytest.mark.no_gpu
def test_shares_fill_the_device():
    assert mla_decode_shares(1, 32, 100_000, 264) == 264
    assert mla_decode_shares(1, 96, 100_000, 264) == 88
    assert mla_decode_shares(300, 32, 100_000, 264) == 1
    assert mla_decode_shares(1, 32, 65, 264) == 3
    assert mla_decode_shares(0, 32, 0, 264) == 1


@pytest.mark.no_gpu
def test_decode_refuses_before_any_launch():
    stream = devices.Stream()
    sizes = {"requests": 1, "heads": 2, "pages_row": 1, "page_tokens": 64, "shares": 1, "scale": 0.1}
    for bad, name in [({"shares": 0}, "requests, heads, shares"), ({"page_tokens": 0}, "page_tokens, scale")]:
        with pytest.raises(ShapeError, match=f"^{name}:"):
            mla_decode_absorbed(stream, *[4096] * 6, **(sizes | bad))
    with pytest.raises(ShapeError, match=r"^pool:"):
        mla_decode_absorbed(stream, 4096, 4104, 4096, 4096, 4096, 4096, **sizes)
    with pytest.raises(ShapeError, match=r"^dims:"):
        mla_decode(stream, *[4096] * 7, dims=(128, 32, 128), **sizes)
    assert not stream.queue


@pytest.mark.no_gpu
def test_nothing_to_do_launches_nothing():
    stream = devices.Stream()
    mla_attend(stream, *[0] * 5, queries=0, keys=5, heads=2, dims=SMALL, q_start=0, causal=True, scale=0.1)
    mla_absorb(stream, 0, 0, 0, requests=0, heads=2, dims=FULL)
    mla_project(stream, 0, 0, 0, requests=0, heads=2, dims=FULL)
    assert not stream.queue


# ---- what the compiler made of it -----------------------------------------------------------------------------------


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("name", "arch", "products"),
    [("mla_attend_128_64_128_kernel", "sm_100", 160), ("mla_decode_split_kernel", "sm_80", 68)],
)
def test_machine_code(name, arch, products):
    """Every product on tensor cores, everything in registers, copies asynchronous; within a small device's limits."""
    kernel = KERNELS[name]
    cubin = compile_cubin(kernel, arch)
    usage, opcodes = resource_usage(cubin), sass_opcodes(cubin)
    assert (usage.stack_bytes, usage.spill_bytes) == (0, 0)
    assert usage.registers * kernel.block[0] <= 65_536
    assert kernel.shared_bytes < 100_000
    assert opcodes["HMMA"] == products
    assert opcodes["LDSM"] and opcodes["LDGSTS"] and opcodes["MUFU"]


@pytest.mark.no_gpu
def test_no_bank_conflicts(monkeypatch):
    """Every eight rows that ldmatrix fetches at a time lie in eight different places modulo 128 bytes."""
    monkeypatch.setattr(emulation, "REGISTRY", list(emulation.REGISTRY))
    fetched = []

    @simt.emulate(r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16", scope="warp")
    def _(addresses):
        fetched.append(addresses.reshape(4, 8))
        return np.zeros((32, 4), np.uint32)

    stream = devices.Stream()
    for kernel in (ATTEND_TILES[FULL][1], mla_decode_split_kernel):
        swapped = MutantStream(stream, kernel, mutate(kernel, "cp_async_commit()", "cp_async_commit()", nth=0))
        if kernel is mla_decode_split_kernel:
            case = Decode((33,), 1, 64, 1)
            case.run(swapped, *case.draw())
        else:
            Attend.draw(FULL, 1, 65, 1, 64).run(swapped)
        assert swapped.launches_count == 1
    places = np.sort(np.array(fetched) // 16 % 8)
    assert len(places) >= 2 * 8 * 80 + 2 * 8 * 34
    np.testing.assert_array_equal(places, np.broadcast_to(np.arange(8), places.shape))
