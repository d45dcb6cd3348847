"""KDA kernels against the float64 recurrence, and a segment as an affine map of its state.

Heads have gates that differ by orders of magnitude: with equal heads a wrong head offset is invisible. Most cases have
the head width 32 of the tiny preset, whose kernels are the ones of 128 with fewer columns and channels.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from helpers.device_rows import BF16, Rows, assert_bf16_near, assert_compact, chips, performed, rounded, sparse
from helpers.mutate import assert_caught, changes, seeds
from whalez.errors import ShapeError
from whalez.ops.device.kernel import KERNELS
from whalez.ops.kda import cuda as kda
from whalez.ops.kda import naive
from whalez.testing import simt

pytestmark = pytest.mark.usefixtures("device")  # the harness, and a GPU with -m gpu

TOLERANCE = 2e-6  # RMS of the difference over RMS of the reference, per head, as on the host
LONG_TOLERANCE = 4e-5  # over many hundred tokens without decay
ROWS = [1, 2, 63, 64, 65, 130]
HEADS = 2
F32 = np.float32


def address(array: Any) -> int:
    return devices.at(array)


def unit(x: Any) -> Any:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


@dataclass(frozen=True)
class Inputs:
    """What goes into kda_prepare, as float64 values that bf16 (q, k, v) and f32 (g, beta, state) hold exactly."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    state: Any

    @property
    def scale(self):
        return self.k.shape[2] ** -0.5

    @property
    def sizes(self):
        rows, heads, dim = self.k.shape
        return rows, heads, dim, dim

    def part(self, start, stop):
        return Inputs(*(x[start:stop] for x in (self.q, self.k, self.v, self.g, self.beta)), self.state)

    @functools.cached_property
    def wanted(self):
        return naive.kda(self.q, self.k, self.v, self.g, self.beta, float(F32(self.scale)), self.state)

    @functools.cached_property
    def wanted_package(self):
        return naive.kda_package(self.k, self.v, self.g, self.beta)


def exact(x: Any) -> Any:
    return np.asarray(x, F32).astype(np.float64)


@functools.cache
def make(rows, dim=32, heads=HEADS, gate=None):
    """gate: log decay of every token; by default head h decays by about exp(-10^(h-2)) per token, with wide spread."""
    rng = np.random.default_rng(rows)
    q, k, v = (rng.standard_normal((rows, heads, dim)) for _ in range(3))
    g = -(10.0 ** (np.arange(heads)[:, None] - 2.0)) * np.logaddexp(0, 2 * rng.standard_normal((rows, heads, dim)))
    if gate is not None:
        g = np.full(g.shape, gate)
    beta = 1 / (1 + np.exp(-2 * rng.standard_normal((rows, heads))))
    state = rng.standard_normal((heads, dim, dim))
    return Inputs(rounded(unit(q)), rounded(unit(k)), rounded(v), exact(g), exact(beta), exact(state))


class Segment:
    """Inputs on the emulated device, in guarded rows with poison between and behind them."""

    def __init__(self, x: Inputs) -> None:
        self.x = x
        self.q, self.k, self.v = (Rows(a, gap=6, beyond=1) for a in (x.q, x.k, x.v))
        self.g, self.beta = (Rows(a, F32, gap=5, beyond=1) for a in (x.g, x.beta))
        self.tiles = devices.empty(kda.kda_tiles_bytes(*x.sizes) // 4, F32, align=16)

    def prepare(self, stream):
        """Queued only: keep the segment until the stream is performed."""
        kda.kda_prepare(
            stream,
            *(self.q.address, self.q.stride, self.k.address, self.k.stride, self.v.address, self.v.stride),
            *(self.g.address, self.g.stride, self.beta.address, self.beta.stride),
            self.x.scale,
            address(self.tiles),
            *self.x.sizes,
        )
        return self

    def scan(self, stream, state=None):
        """Returns (out, state after), filled once the stream is performed."""
        rows, heads, dim, _ = self.x.sizes
        state = devices.array(self.x.state if state is None else state, F32, align=16)
        out = Rows.poisoned(rows, heads, dim, gap=4, beyond=1)
        kda.kda_scan(stream, address(self.tiles), address(state), out.address, out.stride, *self.x.sizes)
        return out, state

    def package(self, stream):
        _, heads, dim, _ = self.x.sizes
        m, d = (devices.empty((heads, dim, dim), F32, align=16) for _ in range(2))
        kda.kda_package(stream, address(self.tiles), address(m), address(d), *self.x.sizes)
        return m, d

    def package_d(self, stream):
        _, heads, dim, _ = self.x.sizes
        d = devices.empty((heads, dim, dim), F32, align=16)
        kda.kda_package_d(stream, address(self.tiles), address(d), *self.x.sizes)
        return d


def scanned(x, state, order="forward"):
    """Prepared and run from `state`: (out, state after)."""
    segment, stream = Segment(x), devices.Stream()
    out, state = segment.prepare(stream).scan(stream, state)
    performed(stream, order)
    return out, state


def packaged(x):
    """(m, d) of prepared rows."""
    segment, stream = Segment(x), devices.Stream()
    package = segment.prepare(stream).package(stream)
    performed(stream)
    return package


def compose(stream, m, d, state):
    kda.kda_compose(stream, address(m), address(d), address(state), *state.shape)


def assert_near(got, wanted, tolerance=TOLERANCE):
    """f32 [H, ...], the worst head."""
    assert np.isfinite(got).all()
    axes = tuple(range(1, wanted.ndim))
    error = np.sqrt(np.mean((got - wanted) ** 2, axes) / np.mean(wanted**2, axes))
    assert error.max() <= tolerance, error


def assert_m_near(got, wanted, tolerance=TOLERANCE):
    """On the scale of the identity it starts from: of a fast head next to nothing is left."""
    assert np.isfinite(got).all()
    assert np.sqrt(np.mean((got - wanted) ** 2, (1, 2)) * wanted.shape[1]).max() <= tolerance


def assert_out_near(out: Rows, wanted, slack=1e-5):
    assert_bf16_near(out.values, wanted, slack)
    out.assert_rest_untouched()


def check_prefill(stream, x: Inputs, order="forward", tolerance=TOLERANCE):
    """prepare, then scan, package and package_d of the same tiles, then compose: all against the recurrence."""
    segment = Segment(x).prepare(stream)
    out, state = segment.scan(stream)
    m, d = segment.package(stream)
    only_d = segment.package_d(stream)
    composed = devices.array(x.state, F32, align=16)
    compose(stream, m, d, composed)
    performed(stream, order)
    assert np.isfinite(segment.tiles).all(), "kda_prepare left a tile unwritten"
    assert_out_near(out, x.wanted[0])
    assert_near(state, x.wanted[1], tolerance)
    assert_m_near(m, x.wanted_package[0], tolerance)
    assert_near(d, x.wanted_package[1], tolerance)
    np.testing.assert_array_equal(only_d, d)
    assert_near(composed, x.wanted[1], tolerance)
    for rows in (segment.q, segment.k, segment.v, segment.g, segment.beta):
        rows.assert_rest_untouched()


@simt.orders()
@pytest.mark.parametrize("rows", ROWS)
def test_chunks_equal_the_recurrence(rows, order):
    check_prefill(devices.Stream(), make(rows), order)


@pytest.mark.parametrize("rows", [1, 65])
def test_chunks_equal_the_recurrence_at_the_model_s_width(rows):
    check_prefill(devices.Stream(), make(rows, dim=128), "seed1")


@simt.orders()
def test_the_model_s_width_in_every_order(order):
    check_prefill(devices.Stream(), make(66, dim=128), order)


def test_a_cut_at_a_chunk_gives_the_same_bits():
    x = make(130)
    out, state = scanned(x, x.state)
    first, between = scanned(x.part(0, 64), x.state)
    second, last = scanned(x.part(64, 130), between)
    np.testing.assert_array_equal(last, state)
    np.testing.assert_array_equal(
        np.concatenate([first.values, second.values]).view(np.uint16), out.values.view(np.uint16)
    )


@simt.orders()
@pytest.mark.parametrize(
    "bounds", [(0, 1, 2, 3), (0, 70, 71, 130), (0, 64, 128, 130)], ids=lambda b: "-".join(map(str, b))
)
def test_a_gang_of_unequal_segments(bounds, order):
    """Each member's own state and rows, not only the last one's. The first sends its D only."""
    x, stream = make(bounds[-1]), devices.Stream()
    segments = [Segment(x.part(a, b)).prepare(stream) for a, b in itertools.pairwise(bounds)]
    zero = np.zeros_like(x.state)
    wanted, _ = naive.kda(x.q, x.k, x.v, x.g, x.beta, float(F32(x.scale)), zero)
    first_d = segments[0].package_d(stream)
    packages = [s.package(stream) for s in segments[1:-1]]
    performed(stream, order)
    for i, segment in enumerate(segments):
        state = devices.array(first_d if i else zero, F32, align=16)
        for m, d in packages[: max(0, i - 1)]:
            compose(stream, m, d, state)
        performed(stream, order)
        out, state = segment.scan(stream, state)
        performed(stream, order)
        assert_out_near(out, wanted[bounds[i] : bounds[i + 1]])
        before = x.part(0, bounds[i + 1])
        assert_near(state, naive.kda(before.q, before.k, before.v, before.g, before.beta, 1.0, zero)[1])


def test_packages_compose_in_order_only():
    """Later ones on the left, and a dropped M, a swapped product or a swapped pair is far outside the tolerance."""
    x, stream = make(140), devices.Stream()
    (m1, d1), (m2, d2) = packaged(x.part(0, 70)), packaged(x.part(70, 140))
    right, swapped = (devices.array(x.state, F32, align=16) for _ in range(2))
    for state, order in ((right, ((m1, d1), (m2, d2))), (swapped, ((m2, d2), (m1, d1)))):
        for m, d in order:
            compose(stream, m, d, state)
    performed(stream)
    assert_near(right, x.wanted[1])
    for wrong in (swapped, d2, np.swapaxes(m2, 1, 2) @ d1 + d2, d1 @ m2 + d2):
        with pytest.raises(AssertionError):
            assert_near(wrong, x.wanted[1], 1e-3)


def test_m_counts_when_nothing_decays():
    """Gates near 0 over 520 tokens: nothing is forgotten, and what came in is the larger part of what goes out."""
    x, stream = make(520, gate=-1e-7), devices.Stream()
    large = Inputs(x.q, x.k, x.v, x.g, x.beta, exact(100 * x.state))
    m, d = packaged(x)
    composed = devices.array(large.state, F32, align=16)
    compose(stream, m, d, composed)
    performed(stream)
    out, state = scanned(large, large.state)
    assert_near(composed, large.wanted[1], LONG_TOLERANCE)
    assert_near(state, large.wanted[1], LONG_TOLERANCE)
    assert_out_near(out, large.wanted[0], LONG_TOLERANCE)
    assert_m_near(m, large.wanted_package[0], LONG_TOLERANCE)
    with pytest.raises(AssertionError):
        assert_near(d, large.wanted[1], 0.5)


def test_no_rows():
    """A segment of no rows is the identity, and its scan leaves the state alone."""
    x, stream = make(1), devices.Stream()
    m, d = (devices.empty(x.state.shape, F32, align=16) for _ in range(2))
    state = devices.array(x.state, F32, align=16)
    sizes = (0, *x.sizes[1:])
    kda.kda_package(stream, 0, address(m), address(d), *sizes)
    kda.kda_scan(stream, 0, address(state), 0, 0, *sizes)
    kda.kda_prepare(stream, *([0] * 10), 1.0, 0, *sizes)
    kda.kda_gate(stream, 0, 0, 0, 0, *sizes[:3])
    kda.kda_beta(stream, 0, 0, *sizes[:2])
    performed(stream)
    np.testing.assert_array_equal(m, np.broadcast_to(np.eye(32), m.shape))
    np.testing.assert_array_equal(d, 0)
    np.testing.assert_array_equal(state, x.state)


# ---- numbers that have broken kernels of this kind ----------------------------------------------------------------


def gate_of(f):
    """The log decay of gate input f at rate 1 without bias."""
    return float(naive.kda_gate(np.full((1, 1, 1), f), np.zeros(1), np.zeros((1, 1)))[0, 0, 0])


@pytest.mark.parametrize(("rows", "dim"), [(200, 32), (72, 128)])
@pytest.mark.parametrize("g", [gate_of(-12.0), -1e-7])
def test_identical_keys_stay_finite_and_right(g, rows, dim):
    """The recipe that turned an fp16 Neumann inverse into NaN: one key, one value, gate input -12, beta sigmoid(8)."""
    one = make(1, dim=dim)
    x = Inputs(
        *(np.repeat(a, rows, axis=0) for a in (one.q, one.k, one.v)),
        exact(np.full((rows, HEADS, dim), g)),
        exact(np.full((rows, HEADS), 1 / (1 + np.exp(-8.0)))),
        one.state,
    )
    check_prefill(devices.Stream(), x, tolerance=LONG_TOLERANCE)


def test_correlated_keys_stay_finite_and_right():
    rows, rng = 400, np.random.default_rng(2)
    x = make(rows)
    k = unit(rng.standard_normal((1, HEADS, 32)) + 0.05 * rng.standard_normal(x.k.shape))
    g = -0.03 * (1 + 0.1 * rng.standard_normal(x.g.shape))
    check_prefill(devices.Stream(), Inputs(x.q, rounded(k), x.v, exact(g), x.beta, x.state), tolerance=LONG_TOLERANCE)


def plain_f32(x: Inputs):
    """(out, state after) of the recurrence, token by token in f32: what its precision costs in so long a chain."""
    q, k, v, g, beta = (a.astype(F32) for a in (x.q, x.k, x.v, x.g, x.beta))
    state, out = x.state.astype(F32), np.empty(x.v.shape, F32)
    for t in range(len(k)):
        state = np.exp(g[t])[:, :, None] * state
        update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * update[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t] * F32(x.scale))
    return out, state


def identical(rows):
    one = make(1)
    return Inputs(
        *(np.repeat(a, rows, axis=0) for a in (one.q, one.k, one.v)),
        exact(np.full((rows, HEADS, 32), gate_of(-12.0))),
        exact(np.full((rows, HEADS), 1 / (1 + np.exp(-8.0)))),
        one.state,
    )


def correlated(rows):
    x, rng = make(rows), np.random.default_rng(2)
    k = unit(rng.standard_normal((1, HEADS, 32)) + 0.05 * rng.standard_normal(x.k.shape))
    g = -0.03 * (1 + 0.1 * rng.standard_normal(x.g.shape))
    return Inputs(x.q, rounded(k), x.v, exact(g), x.beta, x.state)


@pytest.mark.parametrize(("recipe", "rows"), [(identical, 16_384), (correlated, 8_192)])
def test_the_recipes_at_their_full_length(recipe, rows):
    """16,384 identical keys; 8,192 correlated ones. At most twice as far off as the plain recurrence in f32."""
    x = recipe(rows)
    (wanted, wanted_state), (plain, plain_state) = x.wanted, plain_f32(x)
    out, state = scanned(x, x.state)

    def error(got):
        return np.sqrt(np.mean((got - wanted_state) ** 2, (1, 2)) / np.mean(wanted_state**2, (1, 2)))

    assert np.isfinite(state).all()
    assert (error(state) <= 2 * error(plain_state) + TOLERANCE).all(), (error(state), error(plain_state))
    off = np.abs(plain - wanted).max() / np.abs(wanted).max()
    assert_out_near(out, wanted, 2 * off + 1e-5)


def test_a_chain_of_packages_without_decay():
    """Five uneven segments, gates near 0: M carries everything, through every link, and a dropped one is far off."""
    x, stream = make(330, gate=-1e-7), devices.Stream()
    bounds = (0, 64, 65, 200, 263, 330)
    parts = [x.part(a, b) for a, b in itertools.pairwise(bounds)]
    packages = [packaged(part) for part in parts]
    composed, without = (devices.array(x.state, F32, align=16) for _ in range(2))
    for i, (m, d) in enumerate(packages):
        compose(stream, m, d, composed)
        if i != 2:
            compose(stream, m, d, without)
    performed(stream)
    assert_near(composed, x.wanted[1], LONG_TOLERANCE)
    with pytest.raises(AssertionError):
        assert_near(without, x.wanted[1], 0.1)


@pytest.mark.parametrize("where", [0, 3, 4, 17, 31, 32, 63])
def test_one_token_that_forgets_everything(where):
    """Behind log decay -6400 a cumulative sum has an f32 spacing of 5e-4, and exp(-G) overflows."""
    x = make(70, gate=-0.01)
    g = x.g.copy()
    g[where, 0] = -6400.0
    g[where, 1, ::2] = -np.inf
    check_prefill(devices.Stream(), Inputs(x.q, x.k, x.v, g, x.beta, x.state))


def test_small_gates_are_not_rounded_alike():
    """exp(-6e-6) is rounded the same way each time: products of it drift, exps of sums do not."""
    check_prefill(devices.Stream(), make(260, gate=-6e-6), tolerance=LONG_TOLERANCE)


# ---- gate, beta ---------------------------------------------------------------------------------------------------


def check_gate(stream, rows=5, heads=3, dim=33, order="forward"):
    rng = np.random.default_rng(rows)
    f = Rows(np.concatenate([rng.standard_normal((rows - 1, heads, dim)) * 10, [rng.uniform(-99, 99, (heads, dim))]]),
             F32, gap=3, beyond=1)  # fmt: skip
    a_log = devices.array(np.log([0.01, 1, 16])[:heads], F32)
    bias = devices.array(rng.standard_normal((heads, dim)), F32)
    wanted = naive.kda_gate(f.values, a_log, bias)
    kda.kda_gate(stream, f.address, f.stride, address(a_log), address(bias), rows, heads, dim)
    performed(stream, order)
    np.testing.assert_allclose(f.values, wanted, rtol=4e-6, atol=1e-36)
    f.assert_rest_untouched()


def check_beta(stream, rows=89, heads=3, order="forward"):
    b = Rows(np.linspace(-90, 90, rows * heads).reshape(rows, heads), F32, gap=2)  # a page fault behind the last row
    wanted = 1 / (1 + np.exp(-b.values.astype(np.float64)))
    kda.kda_beta(stream, b.address, b.stride, rows, heads)
    performed(stream, order)
    np.testing.assert_allclose(b.values, wanted, rtol=4e-7, atol=1e-37)
    b.assert_rest_untouched()


@simt.orders()
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (5, 33), (2, 128)])
def test_gate(rows, dim, order):
    check_gate(devices.Stream(), rows, 3, dim, order)


@simt.orders()
@pytest.mark.parametrize("rows", [1, 85, 86])
def test_beta(rows, order):
    check_beta(devices.Stream(), rows, 3, order)


# ---- decode -------------------------------------------------------------------------------------------------------


def check_decode(stream, dim=32, order="forward", out_is_v=False):
    x = make(4, dim=dim)
    q, k, v = (Rows(a, gap=6, beyond=1) for a in (x.q, x.k, x.v))
    g, beta = (Rows(a, F32, gap=5, beyond=1) for a in (x.g, x.beta))
    before = np.random.default_rng(3).standard_normal((7, *x.state.shape)).astype(F32)
    states = devices.array(before, F32)
    slots = devices.array([5, 0, 6, 2], np.int64)
    out = v if out_is_v else Rows.poisoned(*x.v.shape, gap=4, beyond=1)
    kda.kda_decode(
        stream,
        *(q.address, q.stride, k.address, k.stride, v.address, v.stride, g.address, g.stride),
        *(beta.address, beta.stride, x.scale, address(states), address(slots), out.address, out.stride),
        *x.sizes,
    )
    performed(stream, order)
    for b, slot in enumerate(slots):
        one = x.part(b, b + 1)
        wanted, wanted_state = naive.kda(one.q, one.k, one.v, one.g, one.beta, float(F32(x.scale)), before[slot])
        assert_bf16_near(out.values[b : b + 1], wanted)
        assert_near(states[slot], wanted_state)
    np.testing.assert_array_equal(states[[1, 3, 4]], before[[1, 3, 4]])
    for rows in (q, k, v, g, beta, out):
        rows.assert_rest_untouched()


@simt.orders()
@pytest.mark.parametrize("dim", [32, 128])
def test_decode(dim, order):
    check_decode(devices.Stream(), dim, order)


def test_decode_in_the_place_of_v():
    check_decode(devices.Stream(), out_is_v=True)


def test_decode_continues_a_prefill():
    x, stream = make(66), devices.Stream()
    _, state = scanned(x.part(0, 65), x.state)
    last = Segment(x.part(65, 66))
    out, slots = Rows.poisoned(1, *x.v.shape[1:]), devices.zeros(1, np.int64)
    kda.kda_decode(
        stream,
        *(last.q.address, 0, last.k.address, 0, last.v.address, 0, last.g.address, 0, last.beta.address, 0, x.scale),
        *(address(state), address(slots), out.address, 0, *last.x.sizes),
    )
    performed(stream)
    assert_out_near(out, x.wanted[0][65:])
    assert_near(state, x.wanted[1])


# ---- addresses, sizes, machine code -------------------------------------------------------------------------------

FAR = 2**31 + 64


def check_far(folder, stream):
    """Rows 2^31 values apart: offsets are 64 bits wide. Only touched pages cost memory."""
    x = make(2)
    rows, heads, dim, _ = x.sizes
    near = Segment(x)
    far = {}
    for name, dtype in (("q", BF16), ("k", BF16), ("v", BF16), ("g", F32), ("beta", F32), ("out", BF16)):
        far[name] = sparse(folder / name, rows, FAR, dtype)
        if name != "out":
            values = getattr(near, name).values
            far[name][:, : values[0].size] = values.reshape(rows, -1)
    state = devices.array(x.state, F32, align=16)
    kda.kda_prepare(
        stream,
        *(y for name in ("q", "k", "v", "g", "beta") for y in (address(far[name]), FAR)),
        *(x.scale, address(near.tiles), *x.sizes),
    )
    kda.kda_scan(stream, address(near.tiles), address(state), address(far["out"]), FAR, *x.sizes)
    performed(stream)
    got = np.array(far["out"][:, : heads * dim]).view(BF16).reshape(rows, heads, dim)
    assert_bf16_near(got, x.wanted[0])
    assert_near(state, x.wanted[1])


@pytest.mark.parametrize(
    ("kernel", "inside", "old"),
    [
        ("kda_scan_32_kernel", None, "row * out_stride"),
        *(
            pytest.param("kda_prepare_32_kernel", "solve_keys_thread", old, marks=pytest.mark.slow)
            for old in ("row * g_stride", "row * q_stride", "row * k_stride")
        ),
    ],
)
def test_rows_2_31_values_apart(tmp_path, kernel, inside, old):
    check = functools.partial(check_far, tmp_path)
    change = {"old": old, "new": f"((({old}) << 32) >> 32)", "inside": inside}
    assert_caught(check, devices.Stream(), KERNELS[kernel], simt.SimtError, **change)


@pytest.mark.no_gpu
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 32), (0, 0)])
def test_a_head_width_without_kernels_is_refused(key_dim, value_dim):
    stream = devices.Stream()
    for op, count in ((kda.kda_package_d, 2), (kda.kda_scan, 4)):
        with pytest.raises(ShapeError, match=r"K = V in \[32, 128\]"):
            op(stream, *([0] * count), 1, 1, key_dim, value_dim)
    with pytest.raises(ShapeError, match=f"K {key_dim}, V {value_dim}"):
        kda.kda_tiles_bytes(1, 1, key_dim, value_dim)


@pytest.mark.no_gpu
@pytest.mark.slow  # `make kernels` reports the same of every kernel
@chips
@pytest.mark.parametrize("name", sorted(name for name in KERNELS if name.startswith("kda_")))
def test_no_stack_and_no_spills(name, arch):
    assert_compact(KERNELS[name], [], arch)


@pytest.mark.no_gpu
def test_blocks_fit_a_multiprocessor():
    """99 KB is what a block may have on every chip from sm_80."""
    for name, kernel in KERNELS.items():
        if name.startswith("kda_"):
            assert kernel.shared_bytes <= 99 << 10, name


# ---- seeded mistakes ----------------------------------------------------------------------------------------------


def prefill_of_130(stream):
    check_prefill(stream, make(130), "seed1")


@seeds(kda.WIDTHS[32].prepare)
@changes(
    {"old": "decayed *= s_alpha[slot]", "new": "pass"},
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 0},
    {"old": "if row < rows_here:", "new": "if row <= rows_here:"},
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 1},
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 2},
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 3},
    {"old": "between += s_total[i * SLICE + channel]", "new": "pass", "nth": 0},
    {"old": "between += s_total[i * SLICE + channel]", "new": "pass", "nth": 1},
    {"old": "s_beta[GROUP * t_i + r] * a[r, c]", "new": "s_beta[GROUP * t_j + c] * a[r, c]"},
    {"old": "(apart > 7)", "new": "(apart > 8)", "inside": "level_thread"},
    {"old": "x[r] -= s_a", "new": "x[r] += s_a", "nth": 0, "inside": "solve_rows_thread"},
    {"old": "if row < rows_here:", "new": "if row <= rows_here:", "inside": "solve_keys_thread"},
    {"old": "* math.exp(total)", "new": "", "inside": "solve_values_thread"},
    quick=1,
)
def test_mistakes_in_prepare(change):
    assert_caught(prefill_of_130, devices.Stream(), kda.WIDTHS[32].prepare, simt.SimtError, **change)


@seeds(kda.WIDTHS[32].scan)
@changes(
    {"old": "cuda.syncthreads()", "new": "pass", "inside": "await_rows_block"},
    {"old": "state[r, c] *= decay", "new": "pass"},
    {"old": "if row < rows:", "new": "if row <= rows:"},
    {"old": "cp_async_wait_all()", "new": "pass", "inside": "await_rows_block"},
    {"old": "values[r, c] - acc[r, c]", "new": "values[r, c] + acc[r, c]"},
    {"old": "t_y + threads_y * r) * columns", "new": "t_y + threads_y * r + 1) * columns"},
    quick=1,
)
def test_mistakes_in_scan(change):
    assert_caught(prefill_of_130, devices.Stream(), kda.WIDTHS[32].scan, simt.SimtError, **change)


@seeds(kda.WIDTHS[32].package)
@changes(
    {"old": "x[r, c] *= decay", "new": "pass"},
    {"old": "cuda.syncthreads()", "new": "pass", "inside": "await_rows_block"},
    {"old": "on_diagonal and not is_d", "new": "on_diagonal"},
    {"old": "s_fresh, half_chunk * columns + 4 * t_x", "new": "s_fresh, 4 * t_x"},
    quick=1,
)
def test_mistakes_in_package(change):
    assert_caught(prefill_of_130, devices.Stream(), kda.WIDTHS[32].package, simt.SimtError, **change)


@seeds(kda.WIDTHS[32].compose)
@changes(
    {  # S M for M S
        "old": "g_left, g_right = g_m, g_state",
        "new": "g_left, g_right = g_state, g_m",
    },
    {"old": "cuda.syncthreads()", "new": "pass", "inside": "await_rows_block"},
    {"old": "g_d[(t_y + threads_y * r) * dim", "new": "g_d[(t_y + threads_y) * dim"},
    quick=1,
)
def test_mistakes_in_compose(change):
    assert_caught(prefill_of_130, devices.Stream(), kda.WIDTHS[32].compose, simt.SimtError, **change)


@seeds(kda.WIDTHS[32].decode)
@changes(
    {"old": "* s_alpha[warp_rows * warp + r]", "new": ""},
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 1},
    {"old": "g_slots[i_row]", "new": "i_row"},
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 0},
    {"old": "cuda.syncthreads()", "new": "pass", "nth": 2},
    quick=1,
)
def test_mistakes_in_decode(change):
    def check(stream):
        for order in ("forward", "reverse"):
            check_decode(stream, order=order)

    assert_caught(check, devices.Stream(), kda.WIDTHS[32].decode, simt.SimtError, **change)


@seeds(kda.kda_gate_kernel)
@changes(
    {"old": "math.exp(-abs(r))", "new": "math.exp(r)"},
    {"old": "g_a_log[i_head]", "new": "g_a_log[0]"},
    {"old": "i_head * key_dim", "new": "0", "nth": 1},
    {"old": "+ g_bias[x]", "new": ""},
    quick=1,
)
def test_mistakes_in_gate(change):
    assert_caught(check_gate, devices.Stream(), kda.kda_gate_kernel, simt.SimtError, **change)


@seeds(kda.kda_beta_kernel)
@changes(
    {"old": "x < rows * heads", "new": "x <= rows * heads"},
    {"old": "* b_stride", "new": "* heads"},
    quick=1,
)
def test_mistakes_in_beta(change):
    assert_caught(check_beta, devices.Stream(), kda.kda_beta_kernel, simt.SimtError, **change)
