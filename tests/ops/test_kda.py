"""Chunked KDA against the float64 recurrence, and a segment as an affine map of its state.

Every case has several heads whose gates differ by orders of magnitude: with equal heads a wrong head offset is
invisible. Every output and every gap between row views starts as NaN: what is read before it is written, or written
outside, shows.
"""

from __future__ import annotations

import itertools
import mmap
from dataclasses import dataclass

import numpy as np
import pytest

from whalez.errors import ShapeError
from whalez.ops import kda, norm
from whalez.ops.kda import host_kernels, naive

TOLERANCE = 2e-6  # RMS of the difference over RMS of the reference, see ops/kda/README.md
LONG_TOLERANCE = 4e-5  # over thousands of tokens without decay
ROWS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 113, 1000]
HEADS, KEY, VALUE = 3, 24, 40


@dataclass
class Inputs:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray

    @property
    def scale(self):
        return self.k.shape[2] ** -0.5

    def rows(self, start, stop):
        return Inputs(*(x[start:stop] for x in (self.q, self.k, self.v, self.g, self.beta)), self.state)

    def naive(self, state=None):
        state = self.state if state is None else state
        return naive.kda(self.q, self.k, self.v, self.g, self.beta, self.scale, state)


@dataclass
class Prepared:
    q: np.ndarray
    k: np.ndarray
    u: np.ndarray
    w: np.ndarray
    p: np.ndarray
    decay: np.ndarray

    def scan(self, state):
        """Returns (out, state after), leaving `state` alone."""
        state = state.astype(np.float32)
        out = np.full(self.u.shape, np.nan, np.float32)
        kda.kda_scan(self.q, self.k, self.u, self.w, self.p, self.decay, state, out)
        return out, state

    def package(self):
        heads, key, value = *self.k.shape[1:], self.u.shape[2]
        m, d = np.full((heads, key, key), np.nan, np.float32), np.full((heads, key, value), np.nan, np.float32)
        kda.kda_package(self.k, self.u, self.w, self.decay, m, d)
        return m, d


def make(rows, heads=HEADS, key=KEY, value=VALUE, seed=0, gate=None):
    """gate: log decay of every token; by default head h decays by about exp(-10^(h-2)) per token, with wide spread."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((rows, heads, key)).astype(np.float32) for _ in range(2))
    norm.l2_norm(q)
    norm.l2_norm(k)
    v = rng.standard_normal((rows, heads, value)).astype(np.float32)
    g = -(10.0 ** (np.arange(heads)[:, None] - 2.0)) * np.logaddexp(0, 2 * rng.standard_normal((rows, heads, key)))
    if gate is not None:
        g = np.full(g.shape, gate)
    beta = (1 / (1 + np.exp(-2 * rng.standard_normal((rows, heads))))).astype(np.float32)
    state = rng.standard_normal((heads, key, value)).astype(np.float32)
    return Inputs(q, k, v, g.astype(np.float32), beta, state)


def prepare(x):
    """kda_prepare on copies that lie as column slices of one poisoned buffer [T + 1, ...]."""
    rows, heads, key = x.k.shape
    value = x.v.shape[2]
    widths = [heads * key, heads * key, heads * value, heads * key]
    buffer = np.full((rows + 1, sum(widths) + 5), np.nan, np.float32)
    views, column = [], 1
    for source, width in zip((x.q, x.k, x.v, x.g), widths, strict=True):
        view = buffer[:rows, column : column + width].reshape(source.shape, copy=False)
        view[:] = source
        views.append(view)
        column += width + 1
    p = np.full((rows, heads, kda.CHUNK), np.nan, np.float32)
    decay = np.full((kda.chunks_count(rows), heads, key), np.nan, np.float32)
    finite = np.isfinite(buffer)
    kda.kda_prepare(*views, x.beta, x.scale, p, decay)
    assert np.array_equal(np.isfinite(buffer), finite), (
        "kda_prepare wrote outside its rows, or left something not finite"
    )
    assert np.isfinite(p).all()
    assert np.isfinite(decay).all()
    return Prepared(views[0], views[1], views[2], views[3], p, decay)


def error(got, wanted):
    """RMS of the difference over RMS of the reference, the worst head; not finite is infinitely wrong."""
    if not np.isfinite(got).all():
        return np.inf
    head_axis = got.ndim - 2 if got.ndim == 3 and got.shape[0] != HEADS else 0
    axes = tuple(axis for axis in range(got.ndim) if axis != head_axis)
    return float(np.max(np.sqrt(np.mean((got - wanted) ** 2, axes) / np.mean(np.asarray(wanted) ** 2, axes))))


def by_head(out):
    """[T, H, V] -> [H, T, V], so that `error` looks at each head by itself."""
    return np.swapaxes(out, 0, 1)


@pytest.mark.parametrize("rows", ROWS)
def test_chunks_equal_the_recurrence(rows):
    x = make(rows, seed=rows)
    wanted, wanted_state = x.naive()
    out, state = prepare(x).scan(x.state)
    assert error(by_head(out), by_head(wanted)) < TOLERANCE
    assert error(state, wanted_state) < TOLERANCE


def test_chunks_equal_the_recurrence_at_the_model_s_width():
    x = make(200, heads=3, key=128, value=128)
    wanted, wanted_state = x.naive()
    out, state = prepare(x).scan(x.state)
    assert error(by_head(out), by_head(wanted)) < TOLERANCE
    assert error(state, wanted_state) < TOLERANCE


@pytest.mark.parametrize("rows", ROWS)
def test_package_equals_the_product_of_one_token_maps(rows):
    x = make(rows, seed=rows)
    wanted_m, wanted_d = naive.kda_package(x.k, x.v, x.g, x.beta)
    m, d = prepare(x).package()
    # A head that has forgotten everything has an M of rounding size: compare on the scale of the identity.
    assert np.max(np.abs(m - wanted_m)) < TOLERANCE
    assert error(d, wanted_d) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 65, 300])
def test_fused_package_equals_two_separate_runs(rows):
    x = make(rows, value=KEY)
    prepared = prepare(x)
    m, d = prepared.package()
    alone = np.full_like(d, np.nan)
    kda.kda_package_d(prepared.k, prepared.u, prepared.w, prepared.decay, alone)
    from_zero = prepared.scan(np.zeros_like(d))[1]
    no_values = prepare(Inputs(x.q, x.k, np.zeros_like(x.v), x.g, x.beta, x.state))
    from_identity = no_values.scan(np.tile(np.eye(KEY, dtype=np.float32), (HEADS, 1, 1)))[1]
    assert error(alone, d) < 1e-6
    assert error(d, from_zero) < 1e-6
    assert np.max(np.abs(m - from_identity)) < 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 70])
def test_a_split_at_any_row_carries_the_state(rows):
    x = make(rows, seed=rows)
    wanted, wanted_state = x.naive()
    for cut in range(rows + 1):
        first, state = prepare(x.rows(0, cut)).scan(x.state)
        second, state = prepare(x.rows(cut, rows)).scan(state)
        assert error(by_head(np.concatenate([first, second])), by_head(wanted)) < TOLERANCE
        assert error(state, wanted_state) < TOLERANCE


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_a_split_on_the_chunk_grid_gives_the_same_bits(cut):
    x = make(210)
    whole, whole_state = prepare(x).scan(x.state)
    first, state = prepare(x.rows(0, cut)).scan(x.state)
    second, state = prepare(x.rows(cut, 210)).scan(state)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    np.testing.assert_array_equal(state, whole_state)


def compose(packages, state):
    state = state.copy()
    for m, d in packages:
        kda.kda_compose(m, d, state)
    return state


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 64, 1), (63, 2, 130), (100, 1, 7, 200, 3)], ids=lambda lengths: "-".join(map(str, lengths))
)
def test_packages_of_unequal_segments_compose_to_the_sequential_state(lengths):
    bounds = np.cumsum((0, *lengths))
    x = make(int(bounds[-1]), seed=len(lengths))
    segments = [prepare(x.rows(a, b)) for a, b in itertools.pairwise(bounds)]
    packages = [segment.package() for segment in segments]
    for i, segment in enumerate(segments):
        wanted, wanted_state = x.rows(bounds[i], bounds[i + 1]).naive(x.rows(0, bounds[i]).naive()[1])
        out, state = segment.scan(compose(packages[:i], x.state))
        assert error(by_head(out), by_head(wanted)) < TOLERANCE, f"member {i}"
        assert error(state, wanted_state) < TOLERANCE, f"member {i}"


def test_dropping_m_shows_when_the_gates_do_not_decay():
    """Segments of 2048 tokens that forget almost nothing: most of the answer comes through M.

    beta is small, because 2048 strong writes to random keys erase an old state even where no gate does.
    """
    x = make(3 * 2048, key=64, value=32, gate=-1e-6)
    x.beta *= 0.02
    packages = [prepare(x.rows(a, a + 2048)).package() for a in (0, 2048, 4096)]
    wanted = x.naive()[1]
    assert error(compose(packages, x.state), wanted) < LONG_TOLERANCE
    assert error(compose([(np.zeros_like(m), d) for m, d in packages], x.state), wanted) > 0.1


@pytest.mark.parametrize("rows", [1, 63, 113])
def test_padding_the_ragged_tail_changes_nothing(rows):
    x = make(rows)
    padding = kda.chunks_count(rows) * kda.CHUNK - rows
    padded = Inputs(*(np.concatenate([a, np.zeros((padding, *a.shape[1:]), np.float32)]) for a in
                      (x.q, x.k, x.v, x.g, x.beta)), x.state)  # fmt: skip
    out, state = prepare(x).scan(x.state)
    padded_out, padded_state = prepare(padded).scan(x.state)
    assert error(by_head(padded_out[:rows]), by_head(out)) < 1e-6
    assert error(padded_state, state) < 1e-6
    assert np.max(np.abs(prepare(padded).package()[0] - prepare(x).package()[0])) < 1e-6


def test_no_rows_leave_the_state_and_give_the_identity():
    x = make(1).rows(0, 0)
    out, state = prepare(x).scan(x.state)
    m, d = prepare(x).package()
    assert out.shape == (0, HEADS, VALUE)
    np.testing.assert_array_equal(state, x.state)
    np.testing.assert_array_equal(m, np.tile(np.eye(KEY), (HEADS, 1, 1)))
    assert not d.any()


def test_one_token_that_forgets_all_does_not_blur_its_neighbours():
    """A cumulative sum near 6400 has a spacing of 5e-4, which would be the relative error of every later decay."""
    x = make(64, gate=-0.01)
    x.g[3] = -6400
    x.g[20] = -88
    x.g[41, 1] = -3e38  # exp must give 0, and no sum may overflow to inf - inf
    wanted, wanted_state = x.naive()
    out, state = prepare(x).scan(x.state)
    assert error(by_head(out), by_head(wanted)) < TOLERANCE
    assert error(state, wanted_state) < TOLERANCE


@pytest.mark.parametrize("log_rate", [0.0, np.log(16.0)])
def test_unbounded_softplus_gate_over_long_chunks(log_rate):
    """A_log up to log 16 and large inputs: exp(-G) over a chunk would be exp(10^4)."""
    x = make(256)
    f = (np.random.default_rng(5).standard_normal(x.g.shape) * 8).astype(np.float32)
    a_log, bias = np.full(HEADS, log_rate, np.float32), np.full((HEADS, KEY), 0.1, np.float32)
    wanted_g = naive.kda_gate(f, a_log, bias)
    kda.kda_gate(f, a_log, bias)
    np.testing.assert_allclose(f, wanted_g, rtol=4e-6, atol=1e-36)  # f + bias, near 40, is rounded before the exp
    x.g = f
    wanted, wanted_state = x.naive()
    out, state = prepare(x).scan(x.state)
    assert error(by_head(out), by_head(wanted)) < TOLERANCE
    assert error(state, wanted_state) < TOLERANCE


def test_gate_takes_each_head_s_own_rate_and_bias():
    rng = np.random.default_rng(1)
    buffer = np.full((65, HEADS * KEY + 3), np.nan, np.float32)
    f = buffer[:64, 2 : 2 + HEADS * KEY].reshape(64, HEADS, KEY, copy=False)
    f[:] = rng.standard_normal(f.shape) * 10
    a_log = np.log(np.float32([0.01, 1, 16]))
    bias = rng.standard_normal((HEADS, KEY)).astype(np.float32)
    wanted = naive.kda_gate(f, a_log, bias)
    kda.kda_gate(f, a_log, bias)
    np.testing.assert_allclose(f, wanted, rtol=2e-6)
    assert np.isfinite(buffer).sum() == f.size


def test_beta_is_a_sigmoid_on_row_views():
    buffer = np.full((9, 5), np.nan, np.float32)
    b = buffer[:, 1:4]
    b[:] = np.linspace(-90, 90, 27).reshape(9, 3)
    wanted = 1 / (1 + np.exp(-b.astype(np.float64)))
    kda.kda_beta(b)
    np.testing.assert_allclose(b, wanted, rtol=4e-7, atol=1e-37)
    assert np.isnan(buffer[:, [0, 4]]).all()


def test_16k_identical_keys_with_gate_minus_12_stay_finite_and_right():
    """The recipe that turned an fp16 Neumann inverse into NaN: one key, one value, beta near 1."""
    rows = 16384
    x = make(1, heads=2, key=16, value=8)
    x = Inputs(*(np.repeat(a, rows, axis=0) for a in (x.q, x.k, x.v, x.g, x.beta)), x.state)
    x.beta[:] = 1 / (1 + np.exp(-8.0))
    for gate in (kda_gate_value(-12.0), -1e-7):  # a gate input of -12, and hardly any decay
        x.g[:] = gate
        wanted, wanted_state = x.naive()
        prepared = prepare(x)
        out, state = prepared.scan(x.state)
        assert error(by_head(out), by_head(wanted)) < LONG_TOLERANCE
        assert error(state, wanted_state) < LONG_TOLERANCE
        assert np.isfinite(prepared.package()[0]).all()


def kda_gate_value(f):
    """The log decay of gate input f at rate 1 without bias."""
    g = np.full((1, 1, 1), f, np.float32)
    kda.kda_gate(g, np.zeros(1, np.float32), np.zeros((1, 1), np.float32))
    return g[0, 0, 0]


def test_correlated_keys_over_8192_tokens_stay_finite_and_right():
    rows = 8192
    x = make(rows, heads=2, key=32, value=8)
    rng = np.random.default_rng(2)
    common = rng.standard_normal((1, 2, 32))
    x.k[:] = common + 0.05 * rng.standard_normal(x.k.shape)
    norm.l2_norm(x.k)
    x.k[:] = (x.k.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # values bf16 can hold, as the report had
    x.g[:] = -0.03 * (1 + 0.1 * rng.standard_normal(x.g.shape))
    wanted, wanted_state = x.naive()
    out, state = prepare(x).scan(x.state)
    assert error(by_head(out), by_head(wanted)) < LONG_TOLERANCE
    assert error(state, wanted_state) < LONG_TOLERANCE


def test_decode_is_a_prefill_of_length_one_on_its_own_slot():
    x = make(4)
    states = np.random.default_rng(3).standard_normal((7, HEADS, KEY, VALUE)).astype(np.float32)
    before = states.copy()
    slots = np.array([5, 0, 6, 2])
    buffer = np.full((4, HEADS * VALUE + 2), np.nan, np.float32)
    out = buffer[:, 1:-1].reshape(4, HEADS, VALUE, copy=False)
    kda.kda_decode(x.q, x.k, x.v, x.g, x.beta, x.scale, states, slots, out)
    for b, slot in enumerate(slots):
        one = x.rows(b, b + 1)
        prefilled, state = prepare(one).scan(before[slot])
        assert error(by_head(out[b : b + 1]), by_head(prefilled)) < 1e-6
        assert error(states[slot], state) < 1e-6
        wanted, wanted_state = one.naive(before[slot])
        assert error(by_head(out[b : b + 1]), by_head(wanted)) < TOLERANCE
        assert error(states[slot], wanted_state) < TOLERANCE
    others = [1, 3, 4]
    np.testing.assert_array_equal(states[others], before[others])
    assert np.isnan(buffer[:, [0, -1]]).all()


def test_rows_more_than_2_to_31_values_apart():
    """Offsets are 64 bits wide: row 2 of these views starts at value 2^31. Only touched pages of it cost memory."""
    stride = 2**30
    x = make(3)
    map_noreserve = 0x4000  # Linux; the mmap module of Python 3.11 does not name it
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve
    with mmap.mmap(-1, 4 * (2 * stride + 4096), flags=flags) as memory:
        views, column = [], 0
        for source in (x.q, x.k, x.v, x.g):
            _, heads, dim = source.shape
            view = np.ndarray(source.shape, np.float32, memory, 4 * column, (4 * stride, 4 * dim, 4))
            view[:] = source
            views.append(view)
            column += heads * dim
        q, k, v, g = views
        p, decay = np.empty((3, HEADS, kda.CHUNK), np.float32), np.empty((1, HEADS, KEY), np.float32)
        out, state = np.empty_like(x.v), x.state.copy()
        kda.kda_prepare(q, k, v, g, x.beta, x.scale, p, decay)
        kda.kda_scan(q, k, v, g, p, decay, state, out)
        del views, view, q, k, v, g
    assert error(by_head(out), by_head(x.naive()[0])) < TOLERANCE


def test_one_compilation_serves_every_layout():
    """A launch compiles nothing: packed, strided, one row, other sizes and scalar types are one signature."""
    kda.warm()
    prepare(make(1)).scan(make(1).state)
    x = make(5, heads=2, key=8, value=4)
    p, decay = np.empty((5, 2, kda.CHUNK), np.float32), np.empty((1, 2, 8), np.float32)
    kda.kda_prepare(x.q, x.k, x.v, x.g, x.beta, np.float32(0.5), p, decay)
    kernels = {name: f for name, f in vars(host_kernels).items() if name.endswith("_kernel")}
    assert len(kernels) == 7
    for name, kernel in kernels.items():
        assert len(kernel.nopython_signatures) == 1, name


def test_out_may_take_the_place_of_u():
    x = make(130)
    prepared = prepare(x)
    wanted = prepared.scan(x.state)[0]
    kda.kda_scan(prepared.q, prepared.k, prepared.u, prepared.w, prepared.p, prepared.decay, x.state.copy(), prepared.u)
    np.testing.assert_array_equal(prepared.u, wanted)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "p", "decay"])
def test_prepare_refuses_a_wrong_shape_by_name_and_writes_nothing(name):
    x = make(65)
    arrays = {n: getattr(x, n) for n in ("q", "k", "v", "g", "beta")}
    arrays["p"] = np.zeros((65, HEADS, kda.CHUNK), np.float32)
    arrays["decay"] = np.zeros((2, HEADS, KEY), np.float32)
    before = {n: a.copy() for n, a in arrays.items()}
    wrong = arrays | {name: arrays[name][:-1]}
    with pytest.raises(ShapeError):
        kda.kda_prepare(*(wrong[n] for n in ("q", "k", "v", "g", "beta")), 1.0, wrong["p"], wrong["decay"])
    for n, a in arrays.items():
        np.testing.assert_array_equal(a, before[n])


def test_scan_package_compose_and_decode_refuse_a_wrong_state():
    x = make(65)
    prepared = prepare(x)
    m, d = prepared.package()
    bad = np.zeros((HEADS, VALUE, KEY), np.float32)
    inputs = (prepared.k, prepared.u, prepared.w, prepared.decay)
    with pytest.raises(ShapeError, match="state"):
        kda.kda_scan(prepared.q, *inputs[:3], prepared.p, prepared.decay, bad, np.empty_like(x.v))
    with pytest.raises(ShapeError, match="d:"):
        kda.kda_package(*inputs, m, bad)
    with pytest.raises(ShapeError, match="m:"):
        kda.kda_compose(bad, d, x.state)
    with pytest.raises(ShapeError, match="states"):
        kda.kda_decode(
            x.q[:1], x.k[:1], x.v[:1], x.g[:1], x.beta[:1], 1.0, bad[None], np.zeros(1, np.int64), x.v[:1].copy()
        )
