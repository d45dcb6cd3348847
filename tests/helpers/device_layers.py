"""KDA and MLA layers of a gang on devices: one queue per member, real slabs, real doorbells, real kernels.

On a GPU the members are streams of one device; in the harness, ranks that run in turns.

The device's twin of Forward and GangSpan: the same steps in the same order, queued instead of done.
Between the kernels only the matrix products are stand-ins. What lies in a slab's `halo` and `latent` is bf16 here and
takes the first half of the region; packages are f32 as on the host.

A product is summed in f64 and rounded once, to what the device would store: a row then has the same bits whatever rows
lie around it, and what a comparison of two cuts shows is the kernels and the exchange, not the order of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers import devices
from helpers.device_rows import BF16
from helpers.devices import at
from whalez.errors import DoorbellTimeout
from whalez.fabric.cuda.doorbell import DeviceBells, Peers, bell_tables
from whalez.fabric.cuda.kernels import REPORT_BYTES
from whalez.fabric.doorbell import gang_value
from whalez.fabric.layout import BELL_DATA, BELL_FREE, SlabLayout, SlabSpec
from whalez.model.config import KimiLinearConfig
from whalez.model.weights import KdaWeights, LayerWeights, MlaWeights
from whalez.ops.conv.cuda import short_conv, short_conv_scratch_bytes
from whalez.ops.kda import cuda as kda
from whalez.ops.latent.cuda import latent_append, latent_gather, latent_norm
from whalez.ops.mla.cuda import Window, mla_attend_context
from whalez.ops.norm.cuda import gated_rms_norm, l2_norm, rms_norm
from whalez.parallel.context import WindowMap
from whalez.testing.simt.machine import read_u64
from whalez.testing.simt.queue import WaitEntry, reached

F32 = np.float32
PAGE_TOKENS = 16


class Gang:
    """The members of one whale and the world they are.

    ranks:   in context-parallel order, the owner last; all ranks of the world
    bounds:  len(ranks) + 1 token offsets
    """

    def __init__(
        self,
        config: KimiLinearConfig,
        windows: WindowMap,
        ranks: Sequence[int],
        bounds: Sequence[int],
        *,
        attention_window: int,
        seq: int = 3,
    ) -> None:
        self.config, self.windows, self.ranks, self.bounds = config, windows, tuple(ranks), tuple(bounds)
        self.attention_window, self.seq = attention_window, seq
        world = len(ranks)
        self.layout = SlabLayout.from_spec(
            SlabSpec(
                world=world,
                rows_max=1,
                hidden=config.hidden_size,
                top_k=0,
                segment_rows_max=max(np.diff(bounds).tolist()),
                halo_values=(config.conv_width - 1) * 3 * config.kda_inner,
                package_heads=config.kda_heads,
                key_dim=config.kda_head_dim,
                value_dim=config.kda_head_dim,
                latent_width=config.latent_width,
            )
        )
        self.slabs = [devices.empty(self.layout.nbytes, np.uint8, align=4096) for _ in ranks]  # regions start as NaN
        for name in ("bells", "progress"):
            for rank in range(world):
                self.region(rank, name)[...] = 0
        self.members = [Member(self, index) for index in range(world)]
        self.streams = [member.stream for member in sorted(self.members, key=lambda member: member.rank)]

    def region(self, rank: int, name: str) -> np.ndarray:
        """A region of a rank's slab, with the shape and dtype that the layout gives it."""
        region = self.layout.regions[name]
        return self.slabs[rank][region.offset : region.end].view(region.dtype).reshape(region.shape)

    def address(self, rank: int, name: str) -> int:
        return at(self.slabs[rank]) + self.layout.offset_of(name)

    def perform(self, order: str = "forward") -> None:
        devices.run_queues(self.streams, order=order)

    def blocked(self) -> dict[int, DoorbellTimeout]:
        """By rank, the doorbell that its queue stands at, in the words of a wait that was given up."""
        return {member.rank: error for member in self.members if (error := member.blocked()) is not None}


class Member:
    """One rank: its queue, what is in its memory, and the layers as it queues them.

    states, tails, pools: per layer, of the owner's cache; a helper has states only, as long as the layer
    """

    def __init__(self, gang: Gang, index: int) -> None:
        self.gang, self.config, self.index = gang, gang.config, index
        self.rank = gang.ranks[index]
        self.start, self.rows = gang.bounds[index], gang.bounds[index + 1] - gang.bounds[index]
        self.upstream = gang.ranks[:index]
        self.downstream = Peers.of(gang.ranks[index + 1 :])
        self.successor = Peers.of(gang.ranks[index + 1 : index + 2])
        self.is_owner = index == len(gang.ranks) - 1
        self.states: dict[int, np.ndarray] = {}
        self.tails: dict[int, np.ndarray] = {}
        self.pools: dict[int, np.ndarray] = {}
        pages = -(-gang.bounds[-1] // PAGE_TOKENS)
        self.pages = devices.array(np.random.default_rng(pages).permutation(pages + 2)[:pages], np.int32)
        self.stream = devices.Stream(self.rank)
        self._kept: list[np.ndarray] = []  # a queue holds addresses only
        self._written: dict[str, int] = {}  # region -> window it carries
        addresses = [at(slab) for slab in gang.slabs]
        self.bells = DeviceBells(
            self.stream,
            gang.layout,
            addresses,
            self.rank,
            tables=at(self._array(np.frombuffer(bell_tables(gang.layout, addresses, self.rank), np.uint64))),
            report=at(self._array(np.zeros(REPORT_BYTES // 8, np.uint64))),
        )

    def latents(self, layer: int) -> np.ndarray:
        """Rows bf16 [T, L] of the whole context in the owner's pages."""
        return self.pools[layer][self.pages].reshape(-1, self.config.latent_width)[: self.gang.bounds[-1]]

    def blocked(self) -> DoorbellTimeout | None:
        """The doorbell at the head of the queue, if it stands there."""
        head = self.stream.queue[0] if self.stream.queue else None
        if isinstance(head, WaitEntry):
            for wait in self.bells.waits:
                lines = {peer: self.bells.line(wait.kind, peer) for peer in wait.peers.ranks}
                if head.pairs == tuple((line, wait.value) for line in lines.values()):
                    for peer, line in lines.items():
                        if not reached(seen := read_u64(line), wait.value):
                            return self.bells.timeout(wait, peer, seen, 0.0)
        return None

    # ---- memory, and what stands in for the library ---------------------------------------------------------------
    def _array(self, values: np.ndarray) -> np.ndarray:
        self._kept.append(devices.array(values, align=16))
        return self._kept[-1]

    def _empty(self, *shape: int, dtype: Any = BF16) -> np.ndarray:
        self._kept.append(devices.empty(shape, dtype, align=16))
        return self._kept[-1]

    def _multiply(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Queue out <- x @ weight.T, rounded to out's dtype."""

        def multiply() -> None:
            product = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(F32)
            out[:] = product.astype(out.dtype).reshape(out.shape)

        what = f"a matrix product {x.shape} x {weight.shape[::-1]}"
        devices.stand_in(self.stream, what, multiply, reads=[x], writes=[out])
        return out

    def _normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Queue the norm in front of a layer; x bf16 [T, D]."""
        given, width = self._array(x), self.config.hidden_size
        out = self._empty(self.rows, width)
        eps = self.config.rms_norm_eps
        rms_norm(self.stream, at(given), width, at(self._array(weight)), eps, at(out), width, self.rows, width)
        return out

    # ---- KDA ------------------------------------------------------------------------------------------------------
    def kda(self, layer: int, weights: LayerWeights, x: np.ndarray) -> np.ndarray:
        """Queue a layer's attention over this member's rows x bf16 [T, D]; the result bf16 [T, D], once performed."""
        w, config, stream, rows = weights.attn, self.config, self.stream, self.rows
        assert isinstance(w, KdaWeights)
        heads, dim, inner = config.kda_heads, config.kda_head_dim, config.kda_inner
        sizes = (heads, dim, dim)
        normed = self._normed(x, weights.input_norm)
        # The successor waits for the last rows of this segment, so they are projected ahead of the rest.
        last = self._multiply(normed[1 - config.conv_width :], w.qkv, self._empty(config.conv_width - 1, 3 * inner))
        tail = self._halo(layer, last)
        qkv = self._multiply(normed, w.qkv, self._empty(rows, 3 * inner))
        low = self._multiply(normed, w.x_proj[: 2 * dim], self._empty(rows, 2 * dim))
        beta = self._multiply(normed, w.b, self._empty(rows, heads, dtype=F32))
        decay = self._multiply(low[:, :dim], w.f_b, self._empty(rows, inner, dtype=F32))
        kda.kda_beta(stream, at(beta), heads, rows, heads)
        kda.kda_gate(stream, at(decay), inner, at(self._array(w.a_log)), at(self._array(w.dt_bias)), rows, heads, dim)

        self.tails[layer] = self._empty(config.conv_width - 1, 3 * inner)
        scratch = self._empty(short_conv_scratch_bytes(rows, 3 * inner) // 2)
        short_conv(
            stream, at(qkv), 3 * inner, at(tail), at(self.tails[layer]) if self.is_owner else 0,
            at(self._array(w.conv)), at(qkv), 3 * inner, at(scratch), rows, 3 * inner,
        )  # fmt: skip
        q, k, v = (qkv[:, i * inner : (i + 1) * inner] for i in range(3))
        l2_norm(stream, at(q), 3 * inner, rows, heads, dim)
        l2_norm(stream, at(k), 3 * inner, rows, heads, dim)

        tiles = self._empty(kda.kda_tiles_bytes(rows, *sizes) // 4, dtype=F32)
        kda.kda_prepare(
            stream, at(q), 3 * inner, at(k), 3 * inner, at(v), 3 * inner, at(decay), inner, at(beta), heads,
            config.kda_scale, at(tiles), rows, *sizes,
        )  # fmt: skip
        state = self.states[layer] = self._state(layer, tiles)
        out = self._empty(rows, inner)
        kda.kda_scan(stream, at(tiles), at(state), at(out), inner, rows, *sizes)

        gate = self._multiply(low[:, dim:], w.g_b, self._empty(rows, inner))
        o_norm = self._array(w.o_norm)
        gated_rms_norm(stream, at(out), inner, at(o_norm), at(gate), inner, config.rms_norm_eps, rows, heads, dim)
        mixed = self._multiply(out, w.o_proj, self._empty(rows, config.hidden_size))
        self.bells.raise_progress()
        return mixed

    def _halo(self, layer: int, last: np.ndarray) -> np.ndarray:
        """The three rows in front of this segment, before the convolution; its own last three go to the successor."""
        window = self.gang.windows.halo[layer]
        tail = self._empty(*last.shape)
        if self.successor.ranks:
            self.await_free(window, "halo", self.successor)
            self.stream.copy(self.gang.address(self.rank, "halo"), at(last), last.nbytes)
            self.ring_data(window, self.successor)
        if self.index == 0:
            self.stream.zero(at(tail), tail.nbytes)
        else:
            before = self.upstream[-1]
            self.await_data(window, before, layer)
            self.stream.copy(at(tail), self.gang.address(before, "halo"), tail.nbytes)
            self.ring_free(window, before)
        return tail

    def _state(self, layer: int, tiles: np.ndarray) -> np.ndarray:
        """The state in front of this segment; its package goes to all behind it."""
        window, stream, address = self.gang.windows.package[layer], self.stream, self.gang.address
        heads, dim = self.config.kda_heads, self.config.kda_head_dim
        if self.downstream.ranks:
            self.await_free(window, "package", self.downstream)
            d = address(self.rank, "package_d")
            if self.index == 0:
                kda.kda_package_d(stream, at(tiles), d, self.rows, heads, dim, dim)
            else:
                m = address(self.rank, "package_m")
                kda.kda_package(stream, at(tiles), m, d, self.rows, heads, dim, dim)
            self.ring_data(window, self.downstream)
        state = self._empty(heads, dim, dim, dtype=F32)
        if self.index == 0:
            stream.zero(at(state), state.nbytes)
        for i, rank in enumerate(self.upstream):
            self.await_data(window, rank, layer)
            d = address(rank, "package_d")
            if i == 0:  # nothing lies in front of the first member: its package is its state
                stream.copy(at(state), d, state.nbytes)
            else:
                kda.kda_compose(stream, address(rank, "package_m"), d, at(state), heads, dim, dim)
            self.ring_free(window, rank)
        return state

    # ---- MLA ------------------------------------------------------------------------------------------------------
    def mla(self, layer: int, weights: LayerWeights, x: np.ndarray) -> np.ndarray:
        """Queue a layer's attention over this member's rows x bf16 [T, D]; the result bf16 [T, D], once performed."""
        w, config, stream, rows = weights.attn, self.config, self.stream, self.rows
        assert isinstance(w, MlaWeights)
        heads, rank, width = config.num_attention_heads, config.kv_lora_rank, config.latent_width
        dims = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        normed = self._normed(x, weights.input_norm)
        q = self._multiply(normed, w.q_proj, self._empty(rows, heads * config.qk_head_dim))
        latent = self._multiply(normed, w.kv_a, self._empty(rows, width))
        latent_norm(stream, at(latent), width, at(self._array(w.kv_a_norm)), config.latent_norm_eps, rows, rank)

        context = self._context(layer, latent)
        window = self.gang.attention_window
        near = self._empty(window, width)
        expanded = self._empty(window, heads * (dims[0] + dims[2]))

        def read(first: int, count: int) -> Window:
            context.read(first, count, near)
            self._multiply(near[:count, :rank], w.kv_b, expanded[:count])
            return Window(at(expanded), at(near[:, rank:]), kr_row=width)

        out = self._empty(rows, heads * dims[2])
        lse, part_lse = (self._empty(rows, heads, dtype=F32) for _ in range(2))
        acc, part = (self._empty(rows, heads * dims[2], dtype=F32) for _ in range(2))
        mla_attend_context(
            stream, read, at(q), at(out), at(lse), at(acc), at(part), at(part_lse), queries=rows, start=self.start,
            window=window, heads=heads, dims=dims, scale=config.mla_scale,
        )  # fmt: skip
        context.close()
        mixed = self._multiply(out, w.o_proj, self._empty(rows, config.hidden_size))
        self.bells.raise_progress()
        return mixed

    def _context(self, layer: int, latent: np.ndarray) -> _Paged | _Lent:
        """What this segment attends to; its own latent rows go to all behind it."""
        window, stream = self.gang.windows.latent[layer], self.stream
        bounds, width = self.gang.bounds, self.config.latent_width
        if self.downstream.ranks:
            self.await_free(window, "latent", self.downstream)
            stream.copy(self.gang.address(self.rank, "latent"), at(latent), latent.nbytes)
            self.ring_data(window, self.downstream)
        pieces = []
        for i, rank in enumerate(self.upstream):
            self.await_data(window, rank, layer)
            pieces.append((bounds[i], bounds[i + 1] - bounds[i], self.gang.address(rank, "latent")))
        own = (self.start, self.rows, at(latent))
        if not self.is_owner:
            return _Lent(self, window, [*pieces, own])
        self.pools[layer] = self._empty(len(self.pages) + 2, PAGE_TOKENS, width)
        for first, count, rows in [*pieces, own]:
            latent_append(
                stream, rows, width, at(self.pools[layer]), at(self.pages), len(self.pages), first, count,
                PAGE_TOKENS, width,
            )  # fmt: skip
        self.release(window)
        return _Paged(self, self.pools[layer])

    # ---- the four beats -------------------------------------------------------------------------------------------
    def release(self, window: int) -> None:
        for rank in self.upstream:
            self.ring_free(window, rank)

    def await_free(self, window: int, region: str, consumers: Peers) -> None:
        last = self._written.get(region)
        self._written[region] = window
        if last is not None:
            self.bells.wait(BELL_FREE, consumers, gang_value(self.gang.seq, last))

    def await_data(self, window: int, rank: int, layer: int) -> None:
        self.bells.wait(BELL_DATA, Peers.of([rank]), gang_value(self.gang.seq, window), layer=layer)

    def ring_data(self, window: int, peers: Peers) -> None:
        self.bells.ring(BELL_DATA, peers, gang_value(self.gang.seq, window))

    def ring_free(self, window: int, rank: int) -> None:
        self.bells.ring(BELL_FREE, Peers.of([rank]), gang_value(self.gang.seq, window))


class _Paged:
    """The context in the owner's pages."""

    def __init__(self, member: Member, pool: np.ndarray) -> None:
        self._member, self._pool = member, pool

    def read(self, first: int, count: int, out: np.ndarray) -> None:
        member, width = self._member, out.shape[1]
        latent_gather(
            member.stream, at(self._pool), at(member.pages), len(member.pages), first, count, at(out), width,
            PAGE_TOKENS, width,
        )  # fmt: skip

    def close(self) -> None:
        pass


class _Lent:
    """The context in the slabs of those whose it is, and in this member's own rows."""

    def __init__(self, member: Member, window: int, pieces: list[tuple[int, int, int]]) -> None:
        self._member, self._window, self._pieces = member, window, pieces

    def read(self, first: int, count: int, out: np.ndarray) -> None:
        row_bytes = out[0].nbytes
        for begin, rows, address in self._pieces:
            low, high = max(first, begin), min(first + count, begin + rows)
            if low < high:
                source = address + (low - begin) * row_bytes
                self._member.stream.copy(at(out[low - first :]), source, (high - low) * row_bytes)

    def close(self) -> None:
        self._member.release(self._window)
