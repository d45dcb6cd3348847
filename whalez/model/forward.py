"""The Kimi Linear forward pass of one launch: row-wise work over all rows at once, KDA and MLA per span.

Axes: R rows of the launch, B decode rows (the first ones), T rows of a span, D hidden, H heads, K KDA head dim,
L latent width. All arrays f32.
Hot: yes, bench id `superstep`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whalez.model.buffers import Buffers
from whalez.model.cache import StateCache
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Batch, Context, ExpertExchange, Hooks, PreparedKda
from whalez.model.trace import Part
from whalez.model.weights import DenseWeights, KdaWeights, MlaWeights, MoeWeights, Weights
from whalez.ops.conv import short_conv, short_conv_decode
from whalez.ops.kda import CHUNK, chunks_count, kda_beta, kda_decode, kda_gate, kda_prepare, kda_scan
from whalez.ops.latent import latent_append, latent_norm
from whalez.ops.lse import lse_merge
from whalez.ops.mla import mla_attend, mla_decode, mla_expand
from whalez.ops.moe import route, swiglu
from whalez.ops.norm import gated_rms_norm, l2_norm, rms_norm


class Forward:
    """One rank's model; `run` is one launch."""

    def __init__(
        self,
        config: KimiLinearConfig,
        weights: Weights,
        cache: StateCache,
        experts: ExpertExchange,
        *,
        attention_window: int,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.experts = experts
        self.attention_window = attention_window
        self.buffers = Buffers()

    def run(self, batch: Batch, hooks: Hooks) -> np.ndarray:
        """Residual stream f32 [R, D] after the last layer. Valid until the next launch."""
        config, watch = self.config, hooks.watch
        rows = batch.rows_count
        x = self.buffers.take("x", rows, config.hidden_size)
        tokens = np.concatenate([batch.decode_tokens, *(span.tokens for span in batch.spans)])
        np.take(self.weights.embed, tokens, axis=0, out=x, mode="clip")
        normed = self.buffers.take("normed", rows, config.hidden_size)
        mixed = self.buffers.take("mixed", rows, config.hidden_size)
        for layer, w in enumerate(self.weights.layers):
            watch.layer = layer
            rms_norm(x, w.input_norm, config.rms_norm_eps, normed)
            if isinstance(w.attn, KdaWeights):
                self._kda(layer, w.attn, normed, batch, mixed)
            else:
                self._mla(layer, w.attn, normed, batch, hooks, mixed)
            x += mixed
            watch.lap(Part.ATTENTION)
            hooks.progress(layer)
            if isinstance(w.mlp, MoeWeights):
                self._moe(layer, w.mlp, x, w.post_norm, hooks, mixed)
            else:
                rms_norm(x, w.post_norm, config.rms_norm_eps, normed)
                self._gated_mlp(w.mlp, normed, mixed)
            x += mixed
            watch.lap(Part.MLP)
            hooks.progress(layer)
        return x

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Logits f32 [n, vocab] of rows x f32 [n, D] of the residual stream."""
        normed = np.empty_like(x)
        rms_norm(x, self.weights.norm, self.config.rms_norm_eps, normed)
        return normed @ self.weights.lm_head.T

    # ---- KDA: facts in ops/kda/README.md ----------------------------------------------------------------------
    def _kda(self, layer: int, w: KdaWeights, x: np.ndarray, batch: Batch, out: np.ndarray) -> None:
        config, cache, take = self.config, self.cache, self.buffers.take
        rows, heads, dim, inner = len(x), config.kda_heads, config.kda_head_dim, config.kda_inner
        decodes = len(batch.decode_tokens)
        index = cache.kda_index[layer]

        projected = np.matmul(x, w.qkv.T, out=take("projected", rows, 3 * inner))
        narrow = np.matmul(x, w.x_proj.T, out=take("narrow", rows, 2 * dim + heads))
        g = np.matmul(narrow[:, :dim], w.f_b.T, out=take("decay", rows, inner)).reshape(rows, heads, dim)
        beta = take("beta", rows, heads)
        beta[:] = narrow[:, 2 * dim :]
        kda_beta(beta)
        kda_gate(g, w.a_log, w.dt_bias)

        convolved = take("convolved", rows, 3 * inner)
        if decodes:
            short_conv_decode(projected[:decodes], cache.tails[index], batch.decode_slots, w.conv, convolved[:decodes])
        row = decodes
        tail = take("tail", config.conv_width - 1, 3 * inner)
        for span in batch.spans:
            part = slice(row, row + len(span.tokens))
            span.exchange.halo(layer, projected[part], tail)
            short_conv(projected[part], tail, w.conv, convolved[part])
            row = part.stop
        q = convolved[:, :inner].reshape(rows, heads, dim)
        k = convolved[:, inner : 2 * inner].reshape(rows, heads, dim)
        v = convolved[:, 2 * inner :].reshape(rows, heads, dim)
        l2_norm(q)
        l2_norm(k)

        o = take("attended", rows, inner).reshape(rows, heads, dim)
        if decodes:
            d = slice(0, decodes)
            kda_decode(q[d], k[d], v[d], g[d], beta[d], config.kda_scale, cache.states[index], batch.decode_slots, o[d])
        row = decodes
        for span in batch.spans:
            part = slice(row, row + len(span.tokens))
            count = len(span.tokens)
            p = take("scores", count, heads, CHUNK)
            decay = take("chunk_decay", chunks_count(count), heads, dim)
            kda_prepare(q[part], k[part], v[part], g[part], beta[part], config.kda_scale, p, decay)
            state = span.exchange.state(layer, PreparedKda(k[part], v[part], g[part], decay))
            kda_scan(q[part], k[part], v[part], g[part], p, decay, state, o[part])
            row = part.stop

        gate = np.matmul(narrow[:, dim : 2 * dim], w.g_b.T, out=take("gate", rows, inner)).reshape(rows, heads, dim)
        gated_rms_norm(o, w.o_norm, gate, config.rms_norm_eps)
        np.matmul(o.reshape(rows, inner), w.o_proj.T, out=out)

    # ---- MLA: facts in ops/mla/README.md ----------------------------------------------------------------------
    def _mla(self, layer: int, w: MlaWeights, x: np.ndarray, batch: Batch, hooks: Hooks, out: np.ndarray) -> None:
        config, cache, take = self.config, self.cache, self.buffers.take
        rows, heads, value_dim = len(x), config.num_attention_heads, config.v_head_dim
        decodes = len(batch.decode_tokens)
        pool = cache.latents[cache.mla_index[layer]]

        q = np.matmul(x, w.q_proj.T, out=take("q", rows, heads * config.qk_head_dim))
        q = q.reshape(rows, heads, config.qk_head_dim)
        latent = np.matmul(x, w.kv_a.T, out=take("latent", rows, config.latent_width))
        latent_norm(latent, w.kv_a_norm, config.latent_norm_eps)
        o = take("attended", rows, heads * value_dim).reshape(rows, heads, value_dim)

        if decodes:
            for i, slot in enumerate(batch.decode_slots):
                latent_append(latent[i : i + 1], pool, cache.pages(slot), int(batch.decode_lengths[i]))
            mla_decode(
                q[:decodes],
                w.kv_b,
                pool,
                cache.page_table(batch.decode_slots),
                batch.decode_lengths + 1,
                config.mla_scale,
                o[:decodes],
            )
        row = decodes
        for span in batch.spans:
            part = slice(row, row + len(span.tokens))
            context = span.exchange.context(layer, latent[part])
            self._attend(w, q[part], context, span.start, o[part], lambda: hooks.progress(layer))
            context.close()
            row = part.stop
        np.matmul(o.reshape(rows, heads * value_dim), w.o_proj.T, out=out)

    def _attend(
        self,
        w: MlaWeights,
        q: np.ndarray,
        context: Context,
        start: int,
        out: np.ndarray,
        progress: Callable[[], None],
    ) -> None:
        """Attention of T queries at positions start..start+T-1 over their whole context, in windows.

        A context that fits in one window takes one causal call. A deeper one walks the past in dense windows and
        closes with the causal square of the span itself; partial results meet in f32 by their natural log-sum-exp.
        """
        count, window = len(q), self.attention_window
        lse = self.buffers.take("lse", count, q.shape[1])
        if start + count <= window:
            self._attend_window(w, q, context, 0, start + count, start, True, out, lse)
            return
        part = self.buffers.take("part", *out.shape)
        part_lse = self.buffers.take("part_lse", count, q.shape[1])
        for first in range(0, count, window):  # query tiles: a span longer than a window is its own past too
            tile = slice(first, min(first + window, count))
            own = start + tile.start
            self._attend_window(w, q[tile], context, own, tile.stop - tile.start, 0, True, out[tile], lse[tile])
            for past in range(0, own, window):
                depth = min(window, own - past)
                self._attend_window(w, q[tile], context, past, depth, 0, False, part[tile], part_lse[tile])
                lse_merge(out[tile], lse[tile], part[tile], part_lse[tile])
                progress()

    def _attend_window(
        self,
        w: MlaWeights,
        q: np.ndarray,
        context: Context,
        first: int,
        depth: int,
        q_start: int,
        causal: bool,
        out: np.ndarray,
        lse: np.ndarray,
    ) -> None:
        """Expand latent rows first..first+depth and attend to them."""
        config, take = self.config, self.buffers.take
        latent = take("window_latent", depth, config.latent_width)
        context.read(first, depth, latent)
        kv = take("window_kv", depth, config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim)
        mla_expand(latent, w.kv_b, kv)
        mla_attend(q, kv, latent[:, config.kv_lora_rank :], q_start, causal, config.mla_scale, out, lse)

    # ---- MLP --------------------------------------------------------------------------------------------------
    def _gated_mlp(self, w: DenseWeights, x: np.ndarray, out: np.ndarray) -> None:
        width = w.down.shape[1]
        gate_up = np.matmul(x, w.gate_up.T, out=self.buffers.take("gate_up", len(x), 2 * width))
        act = self.buffers.take("act", len(x), width)
        swiglu(gate_up, act)
        np.matmul(act, w.down.T, out=out)

    def _moe(self, layer: int, w: MoeWeights, x: np.ndarray, norm: np.ndarray, hooks: Hooks, out: np.ndarray) -> None:
        config = self.config
        rows = self.experts.rows(len(x))
        rms_norm(x, norm, config.rms_norm_eps, rows)
        ids, weights = self.experts.choices(len(x))
        scores = np.matmul(rows, w.router.T, out=self.buffers.take("router", len(x), config.num_experts))
        route(
            scores,
            w.bias,
            config.num_experts_per_token,
            config.moe_renormalize,
            config.routed_scaling_factor,
            config.num_expert_group,
            config.topk_group,
            ids,
            weights,
        )
        if hooks.choices is not None:
            hooks.choices.append(ids.copy())

        def shared() -> None:
            if w.shared is None:
                out[:] = 0.0
            else:
                self._gated_mlp(w.shared, rows, out)

        hooks.watch.lap(Part.MLP)
        self.experts.moe(layer, len(x), w, out, shared)
