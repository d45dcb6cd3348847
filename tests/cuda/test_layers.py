"""One KDA and one MLA layer of preset `kernel`, alone and in a gang, as device queues that meet: equal to the host.

Tolerance. Host and device start from the same values, weights and rows that bf16 holds. The host keeps all in f32, the
device rounds to bf16 what it stores between two kernels. How much that costs depends on what the layer does with it, so
it is measured: `plain` is the host's computation with each of those stores rounded (and the attention weights, which
the tensor cores take as bf16). A device may be off from the host by twice what `plain` is off, as everywhere in this
project, in the root mean square; a single value by one bf16 unit of the largest more.

A gang of two or three against one rank: the roundings are the same and their inputs are equal but for the order of f32
sums, so only a few values fall on the other side of a rounding; see `assert_cut_near`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from helpers import device_layers
from helpers.device_layers import Gang, Member
from helpers.device_rows import BF16
from helpers.solo import no_decodes
from whalez.fabric.doorbell import gang_value
from whalez.fabric.layout import BELL_DATA, BELL_FREE
from whalez.model.cache import StateCache
from whalez.model.checkpoint import load_weights
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Hooks, PrefillSpan
from whalez.model.forward import Forward
from whalez.model.presets import make_checkpoint
from whalez.model.trace import Stopwatch
from whalez.ops.conv import conv_tail, short_conv
from whalez.ops.kda import CHUNK, chunks_count, kda_beta, kda_gate, kda_prepare, kda_scan
from whalez.ops.latent import latent_norm
from whalez.ops.norm import gated_rms_norm, l2_norm, rms_norm
from whalez.parallel.context import LocalSpan, WindowMap
from whalez.testing import simt
from whalez.testing.simt.queue import LaunchEntry, WaitEntry

F32 = np.float32
ATTENTION_WINDOW = 96
#: The preset has one MLA layer; two of each kind follow each other here, so that every region is written twice.
WINDOWS = WindowMap((0, 1), (2, 3))
MODEL_LAYERS = {0: 0, 1: 1, 2: 3, 3: 3}
ALONE = ((0,), (0, 150))
#: Ranks in another order than members; segments of a chunk and a ragged one, of less than a chunk, of less than a window.
GANGS = {2: ((1, 0), (0, 83, 150)), 3: ((2, 0, 1), (0, 70, 83, 150))}
SMALL = ((1, 0), (0, 7, 12))
KINDS = {"kda": 0, "mla": 2}
BF16_UNIT = 2.0**-8


@dataclass
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
def on_host(model: Model, layer: int, count: int) -> Result:
    """The host backend's own layer, in f32."""
    config, number = model.config, MODEL_LAYERS[layer]
    cache = StateCache(config, slots=1, pages=10, page_tokens=16)
    cache.open_slot(0, tuple(range(10)))
    forward = Forward(config, None, cache, None, attention_window=ATTENTION_WINDOW)  # type: ignore[arg-type]
    batch = no_decodes()
    batch.spans.append(PrefillSpan(np.zeros(count, np.int32), 0, LocalSpan(cache, 0, 0)))
    weights = model.weights(layer)
    normed, mixed = np.empty((2, count, config.hidden_size), F32)
    rms_norm(rows_of(layer, count).astype(F32), weights.input_norm, config.rms_norm_eps, normed)
    if number in config.kda_layers:
        forward._kda(number, weights.attn, normed, batch, mixed)
        index = cache.kda_index[number]
        left = {"state": cache.states[index, 0], "tail": cache.tails[index, 0]}
    else:
        hooks = Hooks(Stopwatch(config.num_hidden_layers), lambda layer: None)
        forward._mla(number, weights.attn, normed, batch, hooks, mixed)
        left = {"latents": cache.latents[cache.mla_index[number]].reshape(-1, config.latent_width)[:count]}
    return Result(mixed.astype(float), {name: value.astype(float) for name, value in left.items()})


Stored = Callable[[np.ndarray], np.ndarray]


def to_bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).astype(F32)


def plain_kda(config: KimiLinearConfig, weights: Any, x: np.ndarray, stored: Stored) -> Result:
    """The host's ops in Forward._kda's order; `stored` is applied to what a device stores in bf16."""
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
    """Forward._mla with the whole context in one window."""
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


def plain(model: Model, layer: int, count: int, stored: Stored) -> Result:
    return PLAIN[kind_of(layer)](model.config, model.weights(layer), rows_of(layer, count).astype(F32), stored)


# ---- the device -----------------------------------------------------------------------------------------------------
class Queued:
    """Layers of a gang, queued and not yet performed."""

    def __init__(self, model: Model, gang: tuple[tuple[int, ...], tuple[int, ...]], *layers: int) -> None:
        self.model, self.layers = model, layers
        self.gang = Gang(model.config, WINDOWS, *gang, attention_window=ATTENTION_WINDOW)
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


def performed(model: Model, gang: tuple[tuple[int, ...], tuple[int, ...]], layer: int, order: str) -> Result:
    queued = Queued(model, gang, layer)
    queued.gang.perform(order)
    return queued.result(layer)


# ---- how near -------------------------------------------------------------------------------------------------------
def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def assert_near(model: Model, layer: int, got: Result, bounds: tuple[int, ...]) -> None:
    """Against the host, the rows of every member by themselves; see the head of this file."""
    host, rounded = on_host(model, layer, bounds[-1]), plain(model, layer, bounds[-1], to_bf16)
    pairs = [(got.mixed[a:b], host.mixed[a:b], rounded.mixed[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    pairs += [(got.left[name], host.left[name], rounded.left[name]) for name in host.left]
    for mine, wanted, other in pairs:
        assert mine.shape == wanted.shape
        assert np.isfinite(mine).all()
        print("VS HOST", layer, bounds, rms(mine-wanted)/rms(wanted), rms(other-wanted)/rms(wanted), "vs plain", rms(mine-other)/rms(wanted))
        assert rms(mine - wanted) <= 2 * rms(other - wanted)
        allowed = 2 * np.abs(other - wanted).max() + BF16_UNIT * np.abs(wanted).max()
        assert np.abs(mine - wanted).max() <= allowed


def assert_cut_near(got: Result, alone: Result, bounds: tuple[int, ...]) -> None:
    for a, b in zip(bounds, bounds[1:], strict=False):
        print("CUT", a, b, rms(got.mixed[a:b] - alone.mixed[a:b]) / rms(alone.mixed[a:b]))
    for name in alone.left:
        print("CUT", name, rms(got.left[name] - alone.left[name]) / rms(alone.left[name]))


@pytest.mark.parametrize("layer", [0, 2])
def test_the_host_is_told_as_it_is(model: Model, layer: int) -> None:
    """What `plain` rounds is the host's layer: with nothing rounded it gives the same."""
    host, same = on_host(model, layer, 150), plain(model, layer, 150, lambda x: x)
    for a, b in ((host.mixed, same.mixed), *((host.left[name], same.left[name]) for name in host.left)):
        print(rms(a - b) / rms(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("order", ["forward", "seed1"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_equals_the_host(model: Model, layer: int, order: str) -> None:
    alone = performed(model, ALONE, layer, order)
    assert_near(model, layer, alone, ALONE[1])
    for gang in GANGS.values():
        got = performed(model, gang, layer, order)
        assert_near(model, layer, got, gang[1])
        assert_cut_near(got, alone, gang[1])
