"""One KDA and one MLA layer of preset `kernel`, alone and in a gang, as device queues that meet: equal to the host.

Tolerance. Host and device start from the same values, weights and rows that bf16 holds. The host keeps all in f32, the
device rounds to bf16 what it stores between two kernels. How much that costs depends on what the layer does with it, so
it is measured: `plain` is the host's computation with each of those stores rounded (and the attention weights, which
the tensor cores take as bf16). A device may be off from the host by twice what `plain` is off, as everywhere in this
project, in the root mean square; a single value by one bf16 unit of the largest more. And since it rounds where `plain`
does, most of its error must be that one's: it has to be nearer to `plain` than `plain` is to the host.

A gang of two or three against one rank: the roundings are the same and their inputs are equal but for the order of f32
sums, so only a few values fall on the other side of a rounding; see `assert_cut_near`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import devices
from helpers.device_layers import Gang, Member
from helpers.device_rows import BF16
from helpers.solo import no_decodes
from whalez.errors import DoorbellTimeout
from whalez.model.cache import StateCache
from whalez.model.checkpoint import load_weights
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Hooks, PrefillSpan
from whalez.model.forward import Forward
from whalez.model.presets import make_checkpoint
from whalez.model.trace import Stopwatch
from whalez.ops.conv import conv_tail, short_conv
from whalez.ops.kda import CHUNK, chunks_count, kda_beta, kda_gate, kda_prepare, kda_scan
from whalez.ops.kda import cuda as kda_cuda
from whalez.ops.kda.cuda import kda_compose
from whalez.ops.latent import latent_norm
from whalez.ops.norm import gated_rms_norm, l2_norm, rms_norm
from whalez.parallel.context import LocalSpan, WindowMap
from whalez.testing import simt

pytestmark = pytest.mark.usefixtures("device")  # the harness, and a GPU with -m gpu: members are streams of one

F32 = np.float32
ATTENTION_WINDOW = 96
#: The preset has one MLA layer; two of each kind follow each other here, so that every region is written twice.
WINDOWS = WindowMap((0, 1), (2, 3))
MODEL_LAYERS = {0: 0, 1: 1, 2: 3, 3: 3}
Ranks = tuple[tuple[int, ...], tuple[int, ...]]  # of a gang: ranks by member, bounds
ALONE: Ranks = ((0,), (0, 150))
#: Ranks in another order than members. Segments of a chunk and a ragged one, and of less than a chunk.
PAIR: Ranks = ((1, 0), (0, 83, 150))
THREE: Ranks = (
    (2, 0, 1),
    (0, 70, 83, 150),
)  # the least that carries a state through a map M; MLA: a helper with a context
SMALL: Ranks = ((1, 0), (0, 7, 12))
BF16_UNIT = 2.0**-8  # largest error of a rounding of values in [1, 2)
ROUNDING = BF16_UNIT / 3**0.5 / (1.5 / math.log(2)) ** 0.5  # rms error over rms value, values of any size
OPS_TOLERANCE = 2e-6  # of f32 KDA results, as in test_kernels_kda.py


@dataclass(frozen=True, eq=False)
class Model:
    config: KimiLinearConfig
    layers: list[Any]

    def weights(self, layer: int) -> Any:
        return self.layers[MODEL_LAYERS[layer]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("layers") / "kernel"
    make_checkpoint(directory, "kimi-linear", "kernel", 7, "bf16")
    config = KimiLinearConfig.from_dir(directory)
    return Model(config, load_weights(directory, config, 0, 1).layers)


def rows_of(layer: int, count: int) -> np.ndarray:
    """Residual stream bf16 [count, D] in front of a layer."""
    return np.random.default_rng((11, layer)).standard_normal((150, 256)).astype(BF16)[:count]


@dataclass
class Result:
    """What a layer leaves behind, f64: every row's result, and what the owner decodes from."""

    mixed: np.ndarray  # [T, D]
    left: dict[str, np.ndarray]  # KDA: state, tail. MLA: latents


# ---- the host -------------------------------------------------------------------------------------------------------
@functools.cache
def on_host(model: Model, layer: int, count: int) -> Result:
    """The host backend's own layer, in f32."""
    config, number = model.config, MODEL_LAYERS[layer]
    cache = StateCache(config, slots=1, pages=10, page_tokens=16)
    cache.open_slot(0, tuple(range(10)))
    forward = Forward(config, None, cache, None, rows_max=count, attention_window=ATTENTION_WINDOW)  # type: ignore[arg-type]
    batch = no_decodes()
    batch.spans.append(PrefillSpan(np.zeros(count, np.int32), 0, LocalSpan(cache, 0, 0)))
    weights, x = model.weights(layer), rows_of(layer, count).astype(F32)
    if number in config.kda_layers:
        forward._kda(number, weights.attn, weights.input_norm, x, batch)
        index = cache.kda_index[number]
        left = {"state": cache.states[index, 0], "tail": cache.tails[index, 0]}
    else:
        hooks = Hooks(Stopwatch(config.num_hidden_layers), lambda layer: None)
        forward._mla(number, weights.attn, weights.input_norm, x, batch, hooks)
        left = {"latents": cache.latents[cache.mla_index[number]].reshape(-1, config.latent_width)[:count]}
    mixed = x.astype(float) - rows_of(layer, count).astype(float)  # the layer has added its result
    return Result(mixed, {name: value.astype(float) for name, value in left.items()})


Stored = Callable[[np.ndarray], np.ndarray]


def to_bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).astype(F32)


def plain_kda(config: KimiLinearConfig, weights: Any, x: np.ndarray, stored: Stored) -> Result:
    """The host's KDA layer, op by op; `stored` is applied to what a device stores in bf16."""
    w, rows = weights.attn, len(x)
    heads, dim, inner = config.kda_heads, config.kda_head_dim, config.kda_inner
    normed = np.empty_like(x)
    rms_norm(x, weights.input_norm, config.rms_norm_eps, normed)
    normed = stored(normed)
    projected = stored(normed @ w.qkv.T)
    narrow = normed @ w.x_proj.T
    low, beta = stored(narrow[:, : 2 * dim]), narrow[:, 2 * dim :].copy()
    g = (low[:, :dim] @ w.f_b.T).reshape(rows, heads, dim)
    kda_beta(beta)
    kda_gate(g, w.a_log, w.dt_bias)
    tail = np.zeros((config.conv_width - 1, 3 * inner), F32)
    convolved = np.empty_like(projected)
    short_conv(projected, tail, w.conv, convolved)
    conv_tail(projected, tail)
    q, k, v = (stored(convolved)[:, i * inner : (i + 1) * inner].reshape(rows, heads, dim).copy() for i in range(3))
    l2_norm(q)
    l2_norm(k)
    q, k = stored(q), stored(k)
    p, decay = np.empty((rows, heads, CHUNK), F32), np.empty((chunks_count(rows), heads, dim), F32)
    kda_prepare(q, k, v, g, beta, config.kda_scale, p, decay)
    state, o = np.zeros((heads, dim, dim), F32), np.empty_like(v)
    kda_scan(q, k, v, g, p, decay, state, o)
    o = stored(o)
    gated_rms_norm(o, w.o_norm, stored(low[:, dim:] @ w.g_b.T).reshape(rows, heads, dim), config.rms_norm_eps)
    mixed = stored(stored(o).reshape(rows, inner) @ w.o_proj.T)
    return Result(mixed.astype(float), {"state": state.astype(float), "tail": tail.astype(float)})


def plain_mla(config: KimiLinearConfig, weights: Any, x: np.ndarray, stored: Stored) -> Result:
    """The host's MLA layer with the whole context in one window."""
    w, rows, heads = weights.attn, len(x), config.num_attention_heads
    nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
    normed = np.empty_like(x)
    rms_norm(x, weights.input_norm, config.rms_norm_eps, normed)
    normed = stored(normed)
    q = stored(normed @ w.q_proj.T).reshape(rows, heads, -1)
    latent = stored(normed @ w.kv_a.T)
    latent_norm(latent, w.kv_a_norm, config.latent_norm_eps)
    latent = stored(latent)
    kv = stored(latent[:, :rank] @ w.kv_b.T).reshape(rows, heads, -1)
    o = np.empty((rows, heads, config.v_head_dim), F32)
    for h in range(heads):
        scores = (q[:, h, :nope] @ kv[:, h, :nope].T + q[:, h, nope:] @ latent[:, rank:].T) * F32(config.mla_scale)
        scores[np.triu_indices(rows, 1)] = -np.inf
        p = np.exp(scores - scores.max(1, keepdims=True))
        o[:, h] = stored(p) @ kv[:, h, nope:] / p.sum(1, keepdims=True)
    mixed = stored(stored(o).reshape(rows, -1) @ w.o_proj.T)
    return Result(mixed.astype(float), {"latents": latent.astype(float)})


PLAIN = {"kda": plain_kda, "mla": plain_mla}


def kind_of(layer: int) -> str:
    return "kda" if layer in WINDOWS.halo else "mla"


@functools.cache
def plain(model: Model, layer: int, count: int, stored: Stored) -> Result:
    return PLAIN[kind_of(layer)](model.config, model.weights(layer), rows_of(layer, count).astype(F32), stored)


# ---- the device -----------------------------------------------------------------------------------------------------
class Queued:
    """Layers of a gang, queued and not yet performed."""

    def __init__(self, model: Model, gang: Ranks, *layers: int, attention_window: int = ATTENTION_WINDOW) -> None:
        self.model, self.layers = model, layers
        self.gang = Gang(model.config, WINDOWS, *gang, attention_window=attention_window)
        self.rows = self.gang.bounds[-1]
        self._mixed: dict[int, list[np.ndarray]] = {}
        for layer in layers:
            x, weights = rows_of(layer, self.rows), model.weights(layer)
            self._mixed[layer] = [
                getattr(member, kind_of(layer))(layer, weights, x[member.start : member.start + member.rows])
                for member in self.gang.members
            ]

    def result(self, layer: int) -> Result:
        owner = self.gang.members[-1]
        if kind_of(layer) == "kda":
            left = {"state": owner.states[layer], "tail": owner.tails[layer]}
        else:
            left = {"latents": owner.latents(layer)}
        mixed = np.concatenate(self._mixed[layer]).astype(float)
        return Result(mixed, {name: value.astype(float) for name, value in left.items()})

    def check(self) -> None:
        for layer in self.layers:
            assert_near(self.model, layer, self.result(layer), self.gang.bounds)


def performed(
    model: Model, gang: Ranks, layer: int, order: str = "forward", attention_window: int = ATTENTION_WINDOW
) -> Result:
    queued = Queued(model, gang, layer, attention_window=attention_window)
    queued.gang.perform(order)
    return queued.result(layer)


# ---- how near -------------------------------------------------------------------------------------------------------
def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def assert_near(model: Model, layer: int, got: Result, bounds: tuple[int, ...]) -> None:
    """Against the host, the rows of every member by themselves; see the head of this file."""
    host, rounded = on_host(model, layer, bounds[-1]), plain(model, layer, bounds[-1], to_bf16)
    triples = [(got.mixed[a:b], host.mixed[a:b], rounded.mixed[a:b]) for a, b in itertools.pairwise(bounds)]
    triples += [(got.left[name], host.left[name], rounded.left[name]) for name in host.left]
    for mine, wanted, other in triples:
        assert mine.shape == wanted.shape
        assert np.isfinite(mine).all()
        cost = rms(other - wanted)
        assert rms(mine - wanted) <= 2 * cost
        assert rms(mine - other) <= cost
        allowed = 2 * np.abs(other - wanted).max() + BF16_UNIT * np.abs(wanted).max()
        assert np.abs(mine - wanted).max() <= allowed


def assert_cut_near(layer: int, got: Result, alone: Result, bounds: tuple[int, ...]) -> None:
    """A gang against one rank. The first member does what one rank does with these rows: the same bits.

    KDA: segments cut chunks elsewhere, so f32 results differ by up to twice what the ops may be off (2e-6). Of values
    that differ by d before they are rounded, d / unit end one unit apart, which is sqrt(d unit) in the mean square; it
    happens at three stores: out of the scan, behind the gated norm, the result.
    MLA: windows are cut elsewhere, so weights are rounded under other maxima. That is two independent roundings, at the
    weights, and as what differs by that much is rounded apart, at the attention's and the layer's result.
    """
    np.testing.assert_array_equal(got.mixed[: bounds[1]], alone.mixed[: bounds[1]])
    if kind_of(layer) == "kda":
        allowed = (3 * 2 * OPS_TOLERANCE * BF16_UNIT) ** 0.5
        assert rms(got.left["state"] - alone.left["state"]) <= 2 * OPS_TOLERANCE * rms(alone.left["state"])
        np.testing.assert_array_equal(got.left["tail"], alone.left["tail"])
    else:
        allowed = (3 * 2) ** 0.5 * ROUNDING
        np.testing.assert_array_equal(got.left["latents"], alone.left["latents"])
    for a, b in itertools.pairwise(bounds):
        assert rms(got.mixed[a:b] - alone.mixed[a:b]) <= allowed * rms(alone.mixed[a:b])


@pytest.mark.no_gpu
@pytest.mark.parametrize("layer", [0, 2])
def test_plain_rounds_the_host_s_own_layer(model: Model, layer: int) -> None:
    """With nothing rounded it gives what the host gives, up to the order of f32 sums."""
    host, same = on_host(model, layer, 150), plain(model, layer, 150, lambda x: x)
    for a, b in ((host.mixed, same.mixed), *((host.left[name], same.left[name]) for name in host.left)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


# ---- equal to the host ----------------------------------------------------------------------------------------------
@simt.orders()
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_equals_the_host(model: Model, layer: int, order: str) -> None:
    """The first order takes seconds: the kernels are compiled, once per process."""
    alone = performed(model, ALONE, layer, order)
    assert_near(model, layer, alone, ALONE[1])
    for gang in (PAIR, THREE):
        got = performed(model, gang, layer, order)
        assert_near(model, layer, got, gang[1])
        assert_cut_near(layer, got, alone, gang[1])


@pytest.mark.no_gpu
@pytest.mark.parametrize("layer", [0, 2])
def test_a_gang_is_streams_of_one_device(model: Model, layer: int) -> None:
    """As a GPU would run it, over the driver that is not there: the same bits as in the harness."""
    want = performed(model, PAIR, layer)
    with contextlib.ExitStack() as stack:
        fake = devices.FakeGpu(stack)
        stack.callback(fake.close)
        with devices.used(fake):
            got = performed(model, PAIR, layer)
    np.testing.assert_array_equal(got.mixed, want.mixed)
    for name, value in want.left.items():
        np.testing.assert_array_equal(got.left[name], value)
    heart = {"kda": "kda_scan_", "mla": "mla_attend_"}[kind_of(layer)]
    assert any(name.startswith(heart) for name in fake.launched)


@pytest.mark.parametrize("window", [40, 64, 150])
def test_attention_in_windows_of_any_size(model: Model, window: int) -> None:
    """From several merges, of windows that end within a lent piece, to none."""
    alone = performed(model, ALONE, 2, attention_window=window)
    for gang in (ALONE, PAIR, THREE):
        got = performed(model, gang, 2, attention_window=window)
        assert_near(model, 2, got, gang[1])
        assert_cut_near(2, got, alone, gang[1])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda stream, m, d, state, *sizes: kda_compose(stream, d, m, state, *sizes),
        lambda stream, m, d, state, heads, key, value: stream.copy(state, d, 4 * heads * key * value),  # M is zero
        lambda stream, m, d, state, *sizes: None,  # M is the identity and D zero
    ],
    ids=["swapped", "without M", "left out"],
)
def test_a_mistake_in_the_composition_is_caught(model: Model, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third member's state is the first one's package, carried through the second one's M."""
    monkeypatch.setattr(kda_cuda, "kda_compose", wrong)
    got = performed(model, THREE, 0)
    first, second = (slice(a, b) for a, b in itertools.pairwise(THREE[1][:3]))
    host = on_host(model, 0, 150).mixed
    for rows in (first, second):  # whom it does not concern
        assert rms(got.mixed[rows] - host[rows]) < 0.01 * rms(host[rows])
    with pytest.raises(AssertionError):
        assert_near(model, 0, got, THREE[1])


# ---- the rings and waits are real -----------------------------------------------------------------------------------
# Rank 1 goes first in SMALL and rank 0 behind it. A ring says everything before it too: what matters is the last one.


def change_beat(
    monkeypatch: pytest.MonkeyPatch, beat: str, rank: int, windows: set[int], new: Callable[[Member, Any], None]
) -> None:
    """`new(member, queue)` in the place of one rank's beat at these windows; queue() is the beat as it was."""
    old = getattr(Member, beat)

    def changed(member: Member, window: int, *more: Any) -> None:
        if member.rank == rank and window in windows:
            new(member, lambda: old(member, window, *more))
        else:
            old(member, window, *more)

    monkeypatch.setattr(Member, beat, changed)


def leave_out(monkeypatch: pytest.MonkeyPatch, beat: str, rank: int, windows: set[int]) -> None:
    change_beat(monkeypatch, beat, rank, windows, lambda member, queue: None)


def hold_behind(monkeypatch: pytest.MonkeyPatch, beat: str, rank: int, window: int) -> np.ndarray:
    """That rank goes no further than this beat until the word, u64 [1], is 1."""
    word = simt.zeros(1, np.uint64)

    def held(member: Member, queue: Callable[[], None]) -> None:
        queue()
        member.stream.wait_value((word.ctypes.data, 1))

    change_beat(monkeypatch, beat, rank, {window}, held)
    return word


def perform_until_stuck(queued: Queued) -> str:
    with pytest.raises(simt.SimtError, match="deadlock") as caught:
        queued.gang.perform()
    return str(caught.value)


LEFT_OUT = [  # layers, beat, rank, windows; whom each rank then waits for
    ((0,), "ring_data", 1, {1}, {0: (1, "data", "seq 3 window 1 layer 0")}),
    ((2,), "ring_data", 1, {4}, {0: (1, "data", "seq 3 window 4 layer 2")}),
    ((0, 1), "ring_free", 0, {0, 1}, {0: (1, "data", "seq 3 window 2 layer 1"), 1: (0, "free", "seq 3 window 0")}),
    ((2, 3), "ring_free", 0, {4}, {0: (1, "data", "seq 3 window 5 layer 3"), 1: (0, "free", "seq 3 window 4")}),
]


def named(error: DoorbellTimeout) -> tuple[int, str, str]:
    return error.peer, error.kind, error.where


@pytest.mark.no_gpu
@pytest.mark.parametrize(("layers", "beat", "rank", "windows", "wanted"), LEFT_OUT)
def test_a_ring_that_is_left_out_is_reported_with_rank_and_window(
    model: Model, monkeypatch: pytest.MonkeyPatch, layers: Any, beat: str, rank: int, windows: set[int], wanted: Any
) -> None:
    leave_out(monkeypatch, beat, rank, windows)
    queued = Queued(model, SMALL, *layers)
    said = perform_until_stuck(queued)
    blocked = queued.gang.blocked()
    assert {waiting: named(error) for waiting, error in blocked.items()} == wanted
    for waiting, error in blocked.items():
        head = rf"rank {waiting}, after \d+ entries: wait for \[\w+\] expected {error.expected} seen {error.seen} "
        assert re.search(head + r"\(blocked\)", said), said


def test_a_later_ring_stands_for_one_that_is_left_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values rise and the halo lies in the slab before the package: late, but right."""
    leave_out(monkeypatch, "ring_data", 1, {0})
    queued = Queued(model, SMALL, 0)
    queued.gang.perform()
    queued.check()


@pytest.mark.no_gpu
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("layer", "window"), [(0, 0), (0, 1), (2, 4)], ids=["halo", "package", "latent"])
def test_a_slow_writer_is_waited_for(
    model: Model, monkeypatch: pytest.MonkeyPatch, layer: int, window: int, waits: bool
) -> None:
    """Without the wait the reader takes what lies in the slab before anything was written: NaN."""
    word = hold_behind(monkeypatch, "await_free", 1, window)
    if not waits:
        leave_out(monkeypatch, "await_data", 0, {window})
    queued = Queued(model, SMALL, layer)
    perform_until_stuck(queued)
    blocked = queued.gang.blocked()
    if waits:
        assert named(blocked[0]) == (1, "data", f"seq 3 window {window} layer {layer}")
    word[0] = 1
    queued.gang.perform()
    with contextlib.nullcontext() if waits else pytest.raises(AssertionError):
        queued.check()


@pytest.mark.no_gpu
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("layers", "window", "next_window"),
    [((0, 1), 0, 2), ((0, 1), 1, 3), ((2, 3), 4, 5)],
    ids=["halo", "package", "latent"],
)
def test_a_slow_reader_is_waited_for_before_its_region_is_written_again(
    model: Model, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, int], window: int, next_window: int, waits: bool
) -> None:
    """The reader has seen the ring and has not yet read. Without the wait it reads what the next layer wrote."""
    word = hold_behind(monkeypatch, "await_data", 0, window)
    if not waits:
        leave_out(monkeypatch, "await_free", 1, {next_window})
    queued = Queued(model, SMALL, *layers)
    perform_until_stuck(queued)
    blocked = queued.gang.blocked()
    if waits:
        assert named(blocked[1]) == (0, "free", f"seq 3 window {window}")
    word[0] = 1
    queued.gang.perform()
    with contextlib.nullcontext() if waits else pytest.raises(AssertionError):
        queued.check()
