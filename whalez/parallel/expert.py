"""The paired expert exchange: owners pull the rows their experts were chosen for, senders pull the partial sums back.

One dispatch and one combine per MoE layer in every launch of every rank, entered with however many rows the rank has.
A sender publishes its rows once, in its own slab; an owner returns one partial row per (owner, token). Each region has
a single buffer: a sender writes its next dispatch only after every owner's combine, and an owner rings combine only
after it has read every dispatch; an owner writes its next combine only after every sender's next dispatch, and a sender
dispatches again only after it has read every combine (argument in fabric/README.md).

Hot: yes, bench id `empty_launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from whalez.errors import FabricError
from whalez.fabric.doorbell import Bells
from whalez.fabric.layout import BELL_COMBINE, BELL_DISPATCH, SlabLayout
from whalez.fabric.provider import ViewableSlab
from whalez.model.trace import Part, Stopwatch
from whalez.model.weights import MoeWeights
from whalez.ops.moe import MoeScratch, combine_sum, owner_compute
from whalez.parallel.pacing import PairedChain

BLOCK_ROWS = 1024  # rows of one expert computed at a time: enough for full GEMM speed, little scratch


class PairedExperts:
    """This rank's end of the paired exchange. Implements model.exchange.ExpertExchange."""

    def __init__(
        self,
        bells: Bells,
        layout: SlabLayout,
        slabs: Sequence[ViewableSlab],
        *,
        rank: int,
        expert_bounds: Sequence[int],
        moe_layers: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        watch: Stopwatch,
    ) -> None:
        world = len(slabs)
        self.bells = bells
        self.rank = rank
        self.watch = watch
        self.chain = PairedChain(moe_layers)
        self.peers = np.array([r for r in range(world) if r != rank], np.int64)
        self.words: tuple[int, ...] = (0,) * world  #: confirmation words of the launch, after its first exchange
        self.on_slice: Callable[[], None] | None = None  #: called while waiting; raises to give up
        self._has_moe = moe_layers > 0
        self._first = True

        own = slabs[rank]
        self._rows_count = layout.view(own, "dispatch_count")
        self._rows = layout.view(own, "dispatch_rows")
        self._ids = layout.view(own, "dispatch_ids")
        self._weights = layout.view(own, "dispatch_weights")
        self._partial = layout.view(own, "combine_rows")
        self._offsets = layout.view(own, "combine_offsets")
        self._all_counts = [layout.view(slab, "dispatch_count") for slab in slabs]
        self._all_offsets = [layout.view(slab, "combine_offsets") for slab in slabs]

        def addresses(region: str) -> np.ndarray:
            return np.array([slab.address + layout.offset_of(region) for slab in slabs], np.uint64)

        self._ids_addr = addresses("dispatch_ids")
        self._weights_addr = addresses("dispatch_weights")
        self._rows_addr = addresses("dispatch_rows")
        self._partial_addr = addresses("combine_rows")
        self._bounds = np.array(expert_bounds, np.int64)
        self._counts = np.zeros(world, np.int64)
        self._starts = np.zeros(world, np.int64)
        self._partial_counts = np.zeros(world, np.int64)
        self._row_bytes = hidden * 4
        self._scratch = (
            MoeScratch(
                world * self._rows.shape[0],
                BLOCK_ROWS,
                hidden,
                intermediate,
                top_k=top_k,
                local_experts=int(self._bounds[rank + 1] - self._bounds[rank]),
                world=world,
            )
            if moe_layers
            else None
        )

    def begin(self, launch: int) -> None:
        """Start the chain of this launch."""
        self.chain.begin(launch)
        self._first = True

    def finish(self) -> None:
        """End the launch: a model without MoE layers pairs here, once, empty."""
        if not self._has_moe:
            self._publish(0)
            self._await(BELL_DISPATCH, self._value, -1)
            self._ring_and_await_combine(-1)
        self.chain.complete()

    # ---- model.exchange.ExpertExchange ------------------------------------------------------------------------
    def rows(self, count: int) -> np.ndarray:
        return self._rows[:count]

    def choices(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self._ids[:count], self._weights[:count]

    def moe(self, layer: int, count: int, weights: MoeWeights, out: np.ndarray, meanwhile: Callable[[], None]) -> None:
        assert self._scratch is not None
        self._publish(count)
        meanwhile()
        self.watch.lap(Part.MLP)
        self._await(BELL_DISPATCH, self._value, layer)
        for source, view in enumerate(self._all_counts):
            self._counts[source] = view[0]
        self._require_inside(self._counts, self._counts, len(self._rows), "dispatch count")
        owner_compute(
            self._ids_addr,
            self._weights_addr,
            self._rows_addr,
            self._counts,
            weights.first_expert,
            weights.w13,
            weights.w2,
            self._partial,
            self._offsets,
            self._scratch,
        )
        self.watch.lap(Part.EXPERTS)
        self._ring_and_await_combine(layer)
        for owner, view in enumerate(self._all_offsets):
            self._starts[owner] = view[self.rank]
            self._partial_counts[owner] = view[self.rank + 1] - view[self.rank]
        ends = self._starts + self._partial_counts
        self._require_inside(self._starts, ends, len(self._partial), "combine offsets")
        mine = self._partial_addr + (self._starts * self._row_bytes).astype(np.uint64)
        combine_sum(self._ids[:count], self._bounds, mine, out, self._partial_counts)
        self.watch.lap(Part.EXPERTS)

    def _require_inside(self, starts: np.ndarray, ends: np.ndarray, rows: int, what: str) -> None:
        """What a rank wrote must lie in its slab, or raw addresses would lead out of it. Raises FabricError."""
        wrong = (starts < 0) | (ends < starts) | (ends > rows)
        if wrong.any():
            rank = int(wrong.argmax())
            raise FabricError(
                f"rank {rank}: {what} outside its slab: expected 0..{rows}, got {starts[rank]}..{ends[rank]}"
            )

    # ---- the four beats ---------------------------------------------------------------------------------------
    def _publish(self, count: int) -> None:
        self._rows_count[0] = count
        self._value = self.chain.advance()
        self.bells.ring(BELL_DISPATCH, self.peers, self._value)

    def _ring_and_await_combine(self, layer: int) -> None:
        value = self.chain.advance()
        self.bells.ring(BELL_COMBINE, self.peers, value)
        self._await(BELL_COMBINE, value, layer)

    def _await(self, kind: int, value: int, layer: int) -> None:
        self.bells.wait(kind, self.peers, value, layer=layer, on_slice=self.on_slice)
        if self._first:  # every rank fixed its word before it rang this launch's first dispatch
            self.words = self.bells.read_words(self.chain.launch)
            self._first = False
        self.watch.lap(Part.PAIR_WAIT)
