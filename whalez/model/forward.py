"""The Kimi Linear forward pass of one launch: row-wise work in tiles of rows, KDA and MLA per span.

Axes: R rows of the launch, B decode rows (the first ones), T rows of a span, D hidden, H heads, K KDA head dim,
L latent width. All arrays f32. Every part of a layer adds its result to the residual stream x f32 [R, D].
Hot: yes, bench id `superstep`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whalez.model.cache import StateCache
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Batch, Context, ExpertExchange, Hooks, PrefillSpan, PreparedKda
from whalez.model.scratch import Arena, Frames, tiles
from whalez.model.trace import Part
from whalez.model.weights import DenseWeights, KdaWeights, MlaWeights, MoeWeights, Weights
from whalez.ops.conv import conv_tail, short_conv, short_conv_decode
from whalez.ops.kda import chunks_count, kda_beta, kda_decode, kda_gate, kda_prepare, kda_scan
from whalez.ops.latent import latent_append, latent_norm
from whalez.ops.lse import lse_merge
from whalez.ops.mla import mla_attend, mla_decode, mla_expand
from whalez.ops.moe import route, swiglu
from whalez.ops.norm import gated_rms_norm, l2_norm, rms_norm


class Forward:
    """One rank's model; `run` is one launch.

    Args:
        rows_max:          most rows of one launch
        attention_window:  context rows that MLA prefill expands at once
    """

    def __init__(
        self,
        config: KimiLinearConfig,
        weights: Weights,
        cache: StateCache,
        experts: ExpertExchange,
        *,
        rows_max: int,
        attention_window: int,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.experts = experts
        self.attention_window = attention_window
        self.frames = Frames(config)
        self.scratch = Arena(self.frames.size(rows_max, attention_window))
        self._x = np.full((rows_max, config.hidden_size), 0, np.float32)

    def run(self, batch: Batch, hooks: Hooks) -> np.ndarray:
        """Residual stream f32 [R, D] after the last layer. Valid until the next launch."""
        watch = hooks.watch
        x = self._x[: batch.rows_count]
        tokens = np.concatenate([batch.decode_tokens, *(span.tokens for span in batch.spans)])
        np.take(self.weights.embed, tokens, axis=0, out=x, mode="clip")
        for layer, w in enumerate(self.weights.layers):
            watch.layer = layer
            if isinstance(w.attn, KdaWeights):
                self._kda(layer, w.attn, w.input_norm, x, batch)
            else:
                self._mla(layer, w.attn, w.input_norm, x, batch, hooks)
            watch.lap(Part.ATTENTION)
            hooks.progress(layer)
            if isinstance(w.mlp, MoeWeights):
                self._moe(layer, w.mlp, w.post_norm, x, hooks)
            else:
                self._dense(w.mlp, w.post_norm, x)
            watch.lap(Part.MLP)
            hooks.progress(layer)
        return x

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Logits f32 [n, vocab] of rows x f32 [n, D] of the residual stream."""
        normed = np.empty_like(x)
        rms_norm(x, self.weights.norm, self.config.rms_norm_eps, normed)
        return normed @ self.weights.lm_head.T

    # ---- KDA: facts in ops/kda/README.md ----------------------------------------------------------------------
    def _kda(self, layer: int, w: KdaWeights, norm: np.ndarray, x: np.ndarray, batch: Batch) -> None:
        row = len(batch.decode_tokens)
        if row:
            self._kda_decode(layer, w, norm, x[:row], batch.decode_slots)
        for span in batch.spans:
            end = row + len(span.tokens)
            self._kda_span(layer, w, norm, x[row:end], span)
            row = end

    def _kda_decode(self, layer: int, w: KdaWeights, norm: np.ndarray, x: np.ndarray, slots: np.ndarray) -> None:
        cache, index = self.cache, self.cache.kda_index[layer]
        with self.scratch.frame(self.frames.kda_span(len(x))) as f:
            q, k, v, g = self._kda_heads(f)
            for t in tiles(len(x)):
                with self.scratch.frame(self.frames.kda_in(len(x[t]))) as s:
                    self._kda_project(w, norm, x[t], s, g[t], f["beta"][t], f["gate_in"][t])
                    short_conv_decode(s["projected"], cache.tails[index], slots[t], w.conv, f["qkv"][t])
            l2_norm(q)
            l2_norm(k)
            kda_decode(q, k, v, g, f["beta"], self.config.kda_scale, cache.states[index], slots, v)
            self._kda_output(w, v, f["gate_in"], x)

    def _kda_span(self, layer: int, w: KdaWeights, norm: np.ndarray, x: np.ndarray, span: PrefillSpan) -> None:
        config, count = self.config, len(x)
        with self.scratch.frame(self.frames.kda_span(count)) as f:
            q, k, v, g = self._kda_heads(f)
            beta, p, decay, tail = f["beta"], f["p"], f["decay"], f["tail"]
            # The successor waits for the last rows of this span, so they are projected ahead of the rest.
            last = min(count, len(tail))
            with self.scratch.frame(self.frames.normed(last)) as s:
                rms_norm(x[count - last :], norm, config.rms_norm_eps, s["normed"])
                np.matmul(s["normed"], w.qkv.T, out=f["last"][:last])
            span.exchange.halo(layer, f["last"][:last], tail)
            for t in tiles(count):
                with self.scratch.frame(self.frames.kda_in(t.stop - t.start)) as s:
                    self._kda_project(w, norm, x[t], s, g[t], beta[t], f["gate_in"][t])
                    short_conv(s["projected"], tail, w.conv, f["qkv"][t])
                    conv_tail(s["projected"], tail)
                l2_norm(q[t])
                l2_norm(k[t])
                chunks = slice(chunks_count(t.start), chunks_count(t.stop))
                kda_prepare(q[t], k[t], v[t], g[t], beta[t], config.kda_scale, p[t], decay[chunks])
            state = span.exchange.state(layer, PreparedKda(k, v, g, decay))
            kda_scan(q, k, v, g, p, decay, state, v)
            self._kda_output(w, v, f["gate_in"], x)

    def _kda_heads(self, f: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Views [T, H, K] of a span frame: q, k, v, g."""
        heads, dim, inner = self.config.kda_heads, self.config.kda_head_dim, self.config.kda_inner
        qkv, g = f["qkv"], f["g"]
        q, k, v = (qkv[:, i * inner : (i + 1) * inner].reshape(-1, heads, dim) for i in range(3))
        return q, k, v, g.reshape(-1, heads, dim)

    def _kda_project(
        self,
        w: KdaWeights,
        norm: np.ndarray,
        x: np.ndarray,
        s: dict[str, np.ndarray],
        g: np.ndarray,
        beta: np.ndarray,
        gate_in: np.ndarray,
    ) -> None:
        """All that reads the normed rows of one tile: s["projected"] before its convolution, g, beta, gate_in."""
        dim, narrow = self.config.kda_head_dim, s["narrow"]
        rms_norm(x, norm, self.config.rms_norm_eps, s["normed"])
        np.matmul(s["normed"], w.qkv.T, out=s["projected"])
        np.matmul(s["normed"], w.x_proj.T, out=narrow)
        np.matmul(narrow[:, :dim], w.f_b.T, out=g.reshape(len(x), -1))
        kda_gate(g, w.a_log, w.dt_bias)
        gate_in[:] = narrow[:, dim : 2 * dim]
        beta[:] = narrow[:, 2 * dim :]
        kda_beta(beta)

    def _kda_output(self, w: KdaWeights, o: np.ndarray, gate_in: np.ndarray, x: np.ndarray) -> None:
        """x += what the heads' outputs o [T, H, K] give behind gate and norm; o is overwritten."""
        for t in tiles(len(x)):
            tile = o[t]
            with self.scratch.frame(self.frames.kda_out(len(tile))) as s:
                np.matmul(gate_in[t], w.g_b.T, out=s["gate"])
                gated_rms_norm(tile, w.o_norm, s["gate"].reshape(tile.shape), self.config.rms_norm_eps)
                x[t] += np.matmul(tile.reshape(len(tile), -1), w.o_proj.T, out=s["mixed"])

    # ---- MLA: facts in ops/mla/README.md ----------------------------------------------------------------------
    def _mla(self, layer: int, w: MlaWeights, norm: np.ndarray, x: np.ndarray, batch: Batch, hooks: Hooks) -> None:
        row = len(batch.decode_tokens)
        if row:
            self._mla_decode(layer, w, norm, x[:row], batch)
        for span in batch.spans:
            end = row + len(span.tokens)
            with self.scratch.frame(self.frames.mla_span(end - row)) as f:
                self._mla_project(w, norm, x[row:end], f)
                context = span.exchange.context(layer, f["latent"])
                self._attend(w, f, context, span.start, lambda: hooks.progress(layer))
                context.close()
                self._mla_output(w, f["o"], x[row:end])
            row = end

    def _mla_decode(self, layer: int, w: MlaWeights, norm: np.ndarray, x: np.ndarray, batch: Batch) -> None:
        cache, slots, lengths = self.cache, batch.decode_slots, batch.decode_lengths
        pool = cache.latents[cache.mla_index[layer]]
        with self.scratch.frame(self.frames.mla_span(len(x))) as f:
            self._mla_project(w, norm, x, f)
            for i, slot in enumerate(slots):
                latent_append(f["latent"][i : i + 1], pool, cache.pages(slot), int(lengths[i]))
            table = cache.page_table(slots)
            mla_decode(f["q"], w.kv_b, pool, table, lengths + 1, self.config.mla_scale, f["o"])
            self._mla_output(w, f["o"], x)

    def _mla_project(self, w: MlaWeights, norm: np.ndarray, x: np.ndarray, f: dict[str, np.ndarray]) -> None:
        """q and latent rows of a span frame."""
        for t in tiles(len(x)):
            with self.scratch.frame(self.frames.normed(t.stop - t.start)) as s:
                rms_norm(x[t], norm, self.config.rms_norm_eps, s["normed"])
                np.matmul(s["normed"], w.q_proj.T, out=f["q"][t].reshape(t.stop - t.start, -1))
                np.matmul(s["normed"], w.kv_a.T, out=f["latent"][t])
        latent_norm(f["latent"], w.kv_a_norm, self.config.latent_norm_eps)

    def _mla_output(self, w: MlaWeights, o: np.ndarray, x: np.ndarray) -> None:
        """x += the projection of the heads' outputs o [T, H, V]."""
        for t in tiles(len(x)):
            with self.scratch.frame(self.frames.mixed(t.stop - t.start)) as s:
                x[t] += np.matmul(o[t].reshape(t.stop - t.start, -1), w.o_proj.T, out=s["mixed"])

    def _attend(
        self, w: MlaWeights, f: dict[str, np.ndarray], context: Context, start: int, progress: Callable[[], None]
    ) -> None:
        """Attention of T queries at positions start..start+T-1 over their whole context, in windows.

        A context that fits in one window takes one causal call. A deeper one walks the past in dense windows and
        closes with the causal square of the span itself; partial results meet in f32 by their natural log-sum-exp.
        """
        q, out, lse = f["q"], f["o"], f["lse"]
        count, window = len(q), self.attention_window
        if start + count <= window:
            self._attend_window(w, q, context, 0, start + count, start, True, out, lse)
            return
        for tile in tiles(count, window):  # a span longer than a window is its own past too
            own = start + tile.start
            self._attend_window(w, q[tile], context, own, tile.stop - tile.start, 0, True, out[tile], lse[tile])
            with self.scratch.frame(self.frames.mla_part(tile.stop - tile.start)) as part:
                for past in range(0, own, window):
                    depth = min(window, own - past)
                    self._attend_window(w, q[tile], context, past, depth, 0, False, part["o"], part["lse"])
                    lse_merge(out[tile], lse[tile], part["o"], part["lse"])
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
        config = self.config
        with self.scratch.frame(self.frames.mla_window(depth)) as s:
            latent, kv = s["latent"], s["kv"]
            context.read(first, depth, latent)
            mla_expand(latent, w.kv_b, kv)
            mla_attend(q, kv, latent[:, config.kv_lora_rank :], q_start, causal, config.mla_scale, out, lse)

    # ---- MLP --------------------------------------------------------------------------------------------------
    def _dense(self, w: DenseWeights, norm: np.ndarray, x: np.ndarray) -> None:
        for t in tiles(len(x)):
            with self.scratch.frame(self.frames.normed(t.stop - t.start)) as s:
                rms_norm(x[t], norm, self.config.rms_norm_eps, s["normed"])
                self._gated_mlp(w, s["normed"], x[t])

    def _gated_mlp(self, w: DenseWeights, rows: np.ndarray, x: np.ndarray) -> None:
        """x += the MLP of one tile of rows."""
        with self.scratch.frame(self.frames.mlp(len(rows), w.down.shape[1])) as s:
            swiglu(np.matmul(rows, w.gate_up.T, out=s["gate_up"]), s["act"])
            x += np.matmul(s["act"], w.down.T, out=s["mixed"])

    def _moe(self, layer: int, w: MoeWeights, norm: np.ndarray, x: np.ndarray, hooks: Hooks) -> None:
        config, count = self.config, len(x)
        rows = self.experts.rows(count)
        rms_norm(x, norm, config.rms_norm_eps, rows)
        ids, weights = self.experts.choices(count)
        for t in tiles(count):
            with self.scratch.frame(self.frames.router(t.stop - t.start)) as s:
                route(
                    np.matmul(rows[t], w.router.T, out=s["scores"]),
                    w.bias,
                    config.num_experts_per_token,
                    config.moe_renormalize,
                    config.routed_scaling_factor,
                    config.num_expert_group,
                    config.topk_group,
                    ids[t],
                    weights[t],
                )
        if hooks.choices is not None:
            hooks.choices.append(ids.copy())

        def shared() -> None:
            if w.shared is not None:
                for t in tiles(count):
                    self._gated_mlp(w.shared, rows[t], x[t])

        hooks.watch.lap(Part.MLP)
        self.experts.moe(layer, count, w, x, shared)
