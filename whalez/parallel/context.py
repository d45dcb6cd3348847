"""Context parallelism: which numbered window a gang exchanges at which layer, and the same questions answered alone.

Per KDA layer a gang has two windows, the convolution halo (from the predecessor only) and the packages (from all
upstream); per MLA layer one, the latent rows (from all upstream). A window has four beats: write the slab, ring data,
read, ring free. The owner of the request is the last member, so the state behind its segment, its convolution tail and
the whole latent context end up in its own cache and it decodes alone.

A region of the slab is used by many windows; before a member writes it again it waits until every consumer of the
window before has rung free. Consumers ring free in window order, so one word per consumer says it for all regions.

Hot: yes, bench id `superstep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from whalez.errors import ConfigError
from whalez.fabric.doorbell import STRIDE, Bells, gang_value
from whalez.fabric.layout import BELL_DATA, BELL_FREE, SlabLayout
from whalez.fabric.provider import ViewableSlab
from whalez.model.cache import StateCache
from whalez.model.exchange import Context, PreparedKda
from whalez.model.trace import Part, Stopwatch
from whalez.ops.conv import conv_tail
from whalez.ops.kda import kda_compose, kda_package, kda_package_d
from whalez.ops.latent import latent_append, latent_gather
from whalez.planning.plan import GangPlan


class WindowMap:
    """Numbers of the windows of one superstep: `halo[layer]`, `package[layer]`, `latent[layer]`."""

    def __init__(self, kda_layers: Sequence[int], mla_layers: Sequence[int]) -> None:
        self.halo: dict[int, int] = {}
        self.package: dict[int, int] = {}
        self.latent: dict[int, int] = {}
        number = 0
        for layer in range(len(kda_layers) + len(mla_layers)):
            if layer in set(kda_layers):
                self.halo[layer], self.package[layer] = number, number + 1
                number += 2
            else:
                self.latent[layer] = number
                number += 1
        self.count = number
        if self.count > STRIDE:
            raise ConfigError(f"layers: expected at most {STRIDE} exchange windows in a superstep, got {self.count}")


class PagedContext:
    """Latent rows of a request in this rank's own cache."""

    def __init__(self, pool: np.ndarray, pages: np.ndarray) -> None:
        self._pool, self._pages = pool, pages

    def read(self, start: int, count: int, out: np.ndarray) -> None:
        latent_gather(self._pool, self._pages, start, count, out)

    def close(self) -> None:
        pass


class LentContext:
    """Latent rows that lie in the slabs of the members they belong to; nothing is copied before it is needed."""

    def __init__(self, pieces: Sequence[tuple[int, np.ndarray]], release: Callable[[], None]) -> None:
        self._pieces = pieces  # (first position, rows), ascending and gapless
        self._release = release

    def read(self, start: int, count: int, out: np.ndarray) -> None:
        for first, rows in self._pieces:
            low, high = max(start, first), min(start + count, first + len(rows))
            if low < high:
                out[low - start : high - start] = rows[low - first : high - first]

    def close(self) -> None:
        self._release()


class LocalSpan:
    """A span whose whole past is in this rank's own cache. Implements model.exchange.SpanExchange."""

    def __init__(self, cache: StateCache, slot: int, start: int) -> None:
        self._cache, self._slot, self._start = cache, slot, start

    def halo(self, layer: int, rows: np.ndarray, out: np.ndarray) -> None:
        tail = self._cache.tails[self._cache.kda_index[layer], self._slot]
        out[:] = tail
        conv_tail(rows, tail)

    def state(self, layer: int, prepared: PreparedKda) -> np.ndarray:
        return self._cache.states[self._cache.kda_index[layer], self._slot]

    def context(self, layer: int, latent: np.ndarray) -> Context:
        pool = self._cache.latents[self._cache.mla_index[layer]]
        pages = self._cache.pages(self._slot)
        latent_append(latent, pool, pages, self._start)
        return PagedContext(pool, pages)


class GangViews:
    """What a rank sees of all slabs, made once: gang regions of every rank."""

    def __init__(self, layout: SlabLayout, slabs: Sequence[ViewableSlab]) -> None:
        self.halo = [layout.view(slab, "halo") for slab in slabs]
        self.package_m = [layout.view(slab, "package_m") for slab in slabs]
        self.package_d = [layout.view(slab, "package_d") for slab in slabs]
        self.latent = [layout.view(slab, "latent") for slab in slabs]


class GangSpan:
    """One member's segment of a whale. Implements model.exchange.SpanExchange.

    Args:
        slot: the owner's cache slot; None for a helper, whose states live only as long as the layer
    """

    def __init__(
        self,
        bells: Bells,
        views: GangViews,
        windows: WindowMap,
        cache: StateCache,
        plan: GangPlan,
        *,
        seq: int,
        rank: int,
        slot: int | None,
        watch: Stopwatch,
        on_slice: Callable[[], None] | None,
    ) -> None:
        index = plan.gang.index(rank)
        self._bells, self._views, self._windows, self._cache = bells, views, windows, cache
        self._bounds = plan.bounds
        self._seq, self._rank, self._index, self._slot = seq, rank, index, slot
        self._upstream = plan.gang[:index]
        self._downstream = np.array(plan.gang[index + 1 :], np.int64)
        self._successor = self._downstream[:1]
        self._watch, self._on_slice = watch, on_slice
        self._written: dict[str, int] = {}  # region -> window it carries
        self._state = np.zeros(cache.states.shape[2:], np.float32) if slot is None else None

    # ---- model.exchange.SpanExchange --------------------------------------------------------------------------
    def halo(self, layer: int, rows: np.ndarray, out: np.ndarray) -> None:
        window = self._windows.halo[layer]
        if len(self._successor):
            self._await_free("halo", window, self._successor)
            self._views.halo[self._rank][:] = rows.reshape(-1)
            self._ring_data(window, self._successor)
        if self._index == 0:
            out[:] = 0.0
        else:
            before = self._upstream[-1]
            self._await_data(window, before, layer)
            out[:] = self._views.halo[before].reshape(out.shape)
            self._ring_free(window, before)
        if self._slot is not None:
            tail = self._cache.tails[self._cache.kda_index[layer], self._slot]
            tail[:] = out
            conv_tail(rows, tail)

    def state(self, layer: int, prepared: PreparedKda) -> np.ndarray:
        window = self._windows.package[layer]
        if len(self._downstream):
            self._await_free("package", window, self._downstream)
            d = self._views.package_d[self._rank]
            if self._index == 0:
                kda_package_d(prepared.k, prepared.u, prepared.w, prepared.decay, d)
            else:
                kda_package(prepared.k, prepared.u, prepared.w, prepared.decay, self._views.package_m[self._rank], d)
            self._ring_data(window, self._downstream)
        state = self._state if self._slot is None else self._cache.states[self._cache.kda_index[layer], self._slot]
        assert state is not None
        state[:] = 0.0
        for i, rank in enumerate(self._upstream):
            self._await_data(window, rank, layer)
            if i == 0:  # nothing lies in front of the first member: its package is its state
                state[:] = self._views.package_d[rank]
            else:
                kda_compose(self._views.package_m[rank], self._views.package_d[rank], state)
            self._ring_free(window, rank)
        return state

    def context(self, layer: int, latent: np.ndarray) -> Context:
        window = self._windows.latent[layer]
        if len(self._downstream):
            self._await_free("latent", window, self._downstream)
            self._views.latent[self._rank][: len(latent)] = latent
            self._ring_data(window, self._downstream)
        pieces = []
        for i, rank in enumerate(self._upstream):
            self._await_data(window, rank, layer)
            pieces.append((self._bounds[i], self._views.latent[rank][: self._bounds[i + 1] - self._bounds[i]]))
        if self._slot is None:
            pieces.append((self._bounds[self._index], latent))
            return LentContext(pieces, lambda: self._release(window))
        pool, pages = self._cache.latents[self._cache.mla_index[layer]], self._cache.pages(self._slot)
        for first, rows in pieces:
            latent_append(rows, pool, pages, first)
        self._release(window)
        latent_append(latent, pool, pages, self._bounds[self._index])
        return PagedContext(pool, pages)

    # ---- the four beats ---------------------------------------------------------------------------------------
    def _release(self, window: int) -> None:
        for rank in self._upstream:
            self._ring_free(window, rank)

    def _await_free(self, region: str, window: int, consumers: np.ndarray) -> None:
        """Before `window` is written: every consumer has read what the region carried before."""
        last = self._written.get(region)
        self._written[region] = window
        if last is not None:
            self._watch.lap(Part.ATTENTION)
            self._bells.wait(BELL_FREE, consumers, gang_value(self._seq, last), on_slice=self._on_slice)
            self._watch.lap(Part.GANG_WAIT)

    def _await_data(self, window: int, rank: int, layer: int) -> None:
        self._watch.lap(Part.ATTENTION)
        ranks = np.array([rank], np.int64)
        self._bells.wait(BELL_DATA, ranks, gang_value(self._seq, window), layer=layer, on_slice=self._on_slice)
        self._watch.lap(Part.GANG_WAIT)

    def _ring_data(self, window: int, ranks: np.ndarray) -> None:
        self._bells.ring(BELL_DATA, ranks, gang_value(self._seq, window))

    def _ring_free(self, window: int, rank: int) -> None:
        self._bells.ring(BELL_FREE, np.array([rank], np.int64), gang_value(self._seq, window))
