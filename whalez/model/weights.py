"""The parameters of a Kimi Linear model as the forward pass uses them, and which checkpoint tensor fills which rows.

Matrices are [out, in], so that a projection is `y = x @ w.T`. Matrices that read the same input are stacked along
`out`, so that one GEMM serves them. All arrays are f32 and C-contiguous, and so are the row slices that properties
hand out. `weight_plan` is the only place that pairs published tensor names with parameters.

Axes: D hidden, H heads, K head dim (key and value), R latent rank, E experts of the model, L experts of this rank,
I expert width, F dense width, W conv width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from whalez.model.config import KimiLinearConfig

F32: TypeAlias = NDArray[np.float32]
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """One KDA layer's attention."""

    qkv: F32  # [3*inner, D]    q, k, v; inner = H*K, channel = head*K + d
    conv: F32  # [3*inner, W]   taps of q, k, v; the last tap is the current token
    x_proj: F32  # [2*K + H, D] f_a, g_a, b: all the narrow readers of the layer's input
    f_b: F32  # [inner, K]      forget gate, second half
    g_b: F32  # [inner, K]      output gate, second half
    a_log: F32  # [H]           log decay is -exp(a_log) * softplus(f + dt_bias)
    dt_bias: F32  # [H, K]
    o_norm: F32  # [K]          one weight shared by all heads
    o_proj: F32  # [D, inner]

    @property
    def f_a(self) -> F32:
        """[K, D] forget gate, first half; a view of `x_proj`."""
        return self.x_proj[: self.o_norm.shape[0]]

    @property
    def g_a(self) -> F32:
        """[K, D] output gate, first half; a view of `x_proj`."""
        return self.x_proj[self.o_norm.shape[0] : 2 * self.o_norm.shape[0]]

    @property
    def b(self) -> F32:
        """[H, D] beta before its sigmoid; a view of `x_proj`."""
        return self.x_proj[2 * self.o_norm.shape[0] :]


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """One MLA layer's attention; n = qk_nope_head_dim, r = qk_rope_head_dim, v = v_head_dim."""

    q_proj: F32  # [H*(n+r), D] per head n channels, then r
    kv_a: F32  # [R+r, D]       latent, then the key channels shared by all heads
    kv_a_norm: F32  # [R]       for the latent only
    kv_b: F32  # [H*(n+v), R]   per head n key rows, then v value rows
    o_proj: F32  # [D, H*v]


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A gated MLP: down @ (silu(gate x) * up x)."""

    gate_up: F32  # [2F, D]     gate, then up
    down: F32  # [D, F]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router and shared experts in full, and this rank's block of the routed experts."""

    router: F32  # [E, D]
    bias: F32  # [E]            added to the scores to choose experts, never to weigh them
    shared: DenseWeights | None  # F = shared experts * I; None if the model has none
    w13: F32  # [L, 2I, D]      per expert gate, then up
    w2: F32  # [L, D, I]
    first_expert: int  # number of the expert in row 0 of w13 and w2

    @property
    def last_expert(self) -> int:
        """One past the last expert held here."""
        return self.first_expert + self.w13.shape[0]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: x += attn(input_norm(x)); x += mlp(post_norm(x))."""

    input_norm: F32  # [D]
    post_norm: F32  # [D]
    attn: KdaWeights | MlaWeights
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model, less the routed experts that other ranks hold."""

    embed: F32  # [vocab, D]
    layers: list[LayerWeights]
    norm: F32  # [D]
    lm_head: F32  # [vocab, D]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One checkpoint tensor and where it goes."""

    name: str
    shape: Shape  # as published
    other_shape: Shape | None  # a second spelling found in published files
    rows: F32 | None  # destination, of as many values as `shape`; None if another rank holds it


def expert_bounds(num_experts: int, world: int) -> list[int]:
    """Rank r holds experts bounds[r]..bounds[r+1]-1: contiguous blocks that differ by at most one, larger first."""
    assert 1 <= world <= num_experts, f"world {world}, experts {num_experts}"
    base, extra = divmod(num_experts, world)
    return [rank * base + min(rank, extra) for rank in range(world + 1)]


def weight_plan(
    config: KimiLinearConfig, first_expert: int, last_expert: int, allocate: Callable[[Shape], F32]
) -> tuple[Weights, list[TensorSlot]]:
    """The parameters of a rank that holds experts first..last-1, and a slot for every tensor of the checkpoint.

    `allocate` makes one parameter array. Each array is cut into the rows of its slots when it is made, so the slots
    with rows fill every parameter exactly once; no tensor has two slots.
    """
    plan = _Plan(config, first_expert, last_expert, allocate)
    size = (config.vocab_size, config.hidden_size)
    weights = Weights(
        embed=plan.fill(size, "model.embed_tokens.weight"),
        layers=[plan.layer(number) for number in range(config.num_hidden_layers)],
        norm=plan.fill((config.hidden_size,), "model.norm.weight"),
        lm_head=plan.fill(size, "lm_head.weight"),
    )
    assert len({slot.name for slot in plan.slots}) == len(plan.slots)
    return weights, plan.slots


class _Plan:
    def __init__(
        self, config: KimiLinearConfig, first_expert: int, last_expert: int, allocate: Callable[[Shape], F32]
    ) -> None:
        self.config = config
        self.first_expert = first_expert
        self.last_expert = last_expert
        self.allocate = allocate
        self.slots: list[TensorSlot] = []

    def fill(self, shape: Shape, name: str, *, published: Shape | None = None, other: Shape | None = None) -> F32:
        """A parameter that is one tensor, possibly published in another shape."""
        array = self.allocate(shape)
        self.slots.append(TensorSlot(name, published or shape, other, array))
        return array

    def stack(self, columns: Shape, *pieces: tuple[int, str], middle: Shape = ()) -> F32:
        """A parameter of tensors one below the other, given as (rows, name); the `middle` axes are in the file only."""
        array = self.allocate((sum(rows for rows, _ in pieces), *columns))
        self._cut(array, columns, pieces, middle)
        return array

    def _cut(self, array: F32, columns: Shape, pieces: tuple[tuple[int, str], ...], middle: Shape = ()) -> None:
        start = 0
        for rows, name in pieces:
            self.slots.append(TensorSlot(name, (rows, *middle, *columns), None, array[start : start + rows]))
            start += rows
        assert start == array.shape[0]

    def layer(self, number: int) -> LayerWeights:
        prefix = f"model.layers.{number}."
        hidden = (self.config.hidden_size,)
        return LayerWeights(
            input_norm=self.fill(hidden, prefix + "input_layernorm.weight"),
            post_norm=self.fill(hidden, prefix + "post_attention_layernorm.weight"),
            attn=self.kda(prefix + "self_attn.") if self.config.is_kda(number) else self.mla(prefix + "self_attn."),
            mlp=self.moe(prefix + "block_sparse_moe.")
            if self.config.is_moe(number)
            else self.dense(prefix + "mlp.", self.config.intermediate_size),
        )

    def kda(self, prefix: str) -> KdaWeights:
        config = self.config
        inner, heads, dim, hidden = config.kda_inner, config.kda_heads, config.kda_head_dim, config.hidden_size
        return KdaWeights(
            qkv=self.stack((hidden,), *((inner, f"{prefix}{x}_proj.weight") for x in "qkv")),
            conv=self.stack((config.conv_width,), *((inner, f"{prefix}{x}_conv1d.weight") for x in "qkv"), middle=(1,)),
            x_proj=self.stack(
                (hidden,),
                (dim, prefix + "f_a_proj.weight"),
                (dim, prefix + "g_a_proj.weight"),
                (heads, prefix + "b_proj.weight"),
            ),
            f_b=self.fill((inner, dim), prefix + "f_b_proj.weight"),
            g_b=self.fill((inner, dim), prefix + "g_b_proj.weight"),
            a_log=self.fill((heads,), prefix + "A_log", published=(1, 1, heads, 1), other=(heads,)),
            dt_bias=self.fill((heads, dim), prefix + "dt_bias", published=(inner,)),
            o_norm=self.fill((dim,), prefix + "o_norm.weight"),
            o_proj=self.fill((hidden, inner), prefix + "o_proj.weight"),
        )

    def mla(self, prefix: str) -> MlaWeights:
        config = self.config
        heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        return MlaWeights(
            q_proj=self.fill((heads * config.qk_head_dim, hidden), prefix + "q_proj.weight"),
            kv_a=self.fill((config.latent_width, hidden), prefix + "kv_a_proj_with_mqa.weight"),
            kv_a_norm=self.fill((rank,), prefix + "kv_a_layernorm.weight"),
            kv_b=self.fill((heads * (config.qk_nope_head_dim + config.v_head_dim), rank), prefix + "kv_b_proj.weight"),
            o_proj=self.fill((hidden, heads * config.v_head_dim), prefix + "o_proj.weight"),
        )

    def dense(self, prefix: str, width: int) -> DenseWeights:
        hidden = self.config.hidden_size
        return DenseWeights(
            gate_up=self.stack((hidden,), (width, prefix + "gate_proj.weight"), (width, prefix + "up_proj.weight")),
            down=self.fill((hidden, width), prefix + "down_proj.weight"),
        )

    def moe(self, prefix: str) -> MoeWeights:
        config = self.config
        hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        local = self.last_expert - self.first_expert
        w13 = self.allocate((local, 2 * width, hidden))
        w2 = self.allocate((local, hidden, width))
        for expert in range(experts):
            names = [f"{prefix}experts.{expert}.w{n}.weight" for n in (1, 3, 2)]
            if self.first_expert <= expert < self.last_expert:
                row = expert - self.first_expert
                self._cut(w13[row], (hidden,), ((width, names[0]), (width, names[1])))
                self._cut(w2[row], (width,), ((hidden, names[2]),))
            else:
                shapes = [(width, hidden), (width, hidden), (hidden, width)]
                self.slots += [TensorSlot(name, shape, None, None) for name, shape in zip(names, shapes, strict=True)]
        return MoeWeights(
            router=self.fill((experts, hidden), prefix + "gate.weight"),
            bias=self.fill((experts,), prefix + "gate.e_score_correction_bias"),
            shared=self.dense(prefix + "shared_experts.", config.shared_size) if config.num_shared_experts else None,
            w13=w13,
            w2=w2,
            first_expert=self.first_expert,
        )
