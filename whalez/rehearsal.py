"""Every host kernel called once, with exactly the arguments of a real launch: three ranks of a tiny world in threads.

A numba kernel is compiled for the types it is called with. Calling each kernel by hand would repeat those types and
drift from them, so this runs the forward pass itself: a whale over all three ranks (first, middle and last member, a
context of several windows), then decode on its owner beside a local prefill in two chunks and an idle rank.
Memory is private: no shared memory, no hub, no checkpoint.
"""

from __future__ import annotations

import threading

import numpy as np

from whalez.config import FleetConfig
from whalez.engine.launch import LaunchRunner
from whalez.engine.sizing import plan_policy, slab_spec
from whalez.errors import WhalezError
from whalez.fabric import doorbell
from whalez.fabric.doorbell import Bells
from whalez.fabric.layout import BELL_LAUNCH, SlabLayout
from whalez.fabric.private import PrivateSlab
from whalez.model.cache import StateCache
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Batch, Hooks, PrefillSpan, SpanExchange
from whalez.model.forward import Forward
from whalez.model.presets import PRESETS
from whalez.model.trace import Stopwatch
from whalez.model.weights import expert_bounds, weight_plan
from whalez.parallel.context import GangSpan, GangViews, LocalSpan, WindowMap
from whalez.parallel.expert import PairedExperts
from whalez.planning.plan import GangPlan

WORLD = 3
SEGMENT = 70  # more than one KDA chunk, and a ragged one
PLAN = GangPlan(gang=(0, 1, 2), bounds=(0, SEGMENT, 2 * SEGMENT, 3 * SEGMENT))
WINDOW = 64  # less than a segment, so that partial results are merged
COMPILE_S = 600.0  # a rank may wait this long while another one compiles


class _Rank:
    """One rank of the rehearsal; the parts of a rank process below the loop."""

    def __init__(
        self,
        rank: int,
        config: KimiLinearConfig,
        fleet: FleetConfig,
        layout: SlabLayout,
        slabs: list[PrivateSlab],
        failures: list[BaseException],
    ) -> None:
        bounds = expert_bounds(config.num_experts, WORLD)
        rng = np.random.default_rng(0)  # the same on all ranks, experts aside; the numbers mean nothing
        weights, _ = weight_plan(
            config,
            bounds[rank],
            bounds[rank + 1],
            lambda shape: rng.standard_normal(shape, np.float32) * np.float32(0.02),
        )
        self.rank, self.failures = rank, failures
        self.watch = Stopwatch(config.num_hidden_layers)
        self.bells = Bells(
            layout,
            slabs,
            rank,
            stuck_s=COMPILE_S,
            steps_per_launch=2 * max(len(config.moe_layers), 1),
        )
        self.views = GangViews(layout, slabs)
        self.windows = WindowMap(config.kda_layers, config.mla_layers)
        self.cache = StateCache(config, slots=fleet.slots, pages=fleet.cache_pages, page_tokens=fleet.page_tokens)
        self.cache.open_slot(0, tuple(range(fleet.cache_pages)))
        self.peers = np.array([peer for peer in range(WORLD) if peer != rank], np.int64)
        experts = PairedExperts(
            self.bells,
            layout,
            slabs,
            rank=rank,
            expert_bounds=bounds,
            moe_layers=len(config.moe_layers),
            top_k=config.num_experts_per_token,
            hidden=config.hidden_size,
            intermediate=config.moe_intermediate_size,
            watch=self.watch,
        )
        experts.on_slice = self.give_up
        forward = Forward(
            config,
            weights,
            self.cache,
            experts,
            rows_max=layout.spec.rows_max,
            attention_window=fleet.attention_window,
        )
        hooks = Hooks(self.watch, lambda layer: self.bells.raise_progress())
        self.runner = LaunchRunner(config, forward, experts, hooks, capture=False)

    def give_up(self) -> None:
        """Called while waiting. The peer that is waited for may have failed."""
        if self.failures:
            raise WhalezError("another rank of the rehearsal failed")

    def perform(self) -> None:
        try:
            self._launch(0, _batch(_span(PLAN.segment(self.rank)[0], self._gang_span())))
            for launch in (1, 2):
                self._launch(launch, self._after(launch))
        except BaseException as error:  # carried to the thread that waits for this one
            self.failures.append(error)

    def _after(self, launch: int) -> Batch:
        """What this rank runs beside the others once the whale is over: a prefill in two chunks, nothing, decode."""
        if self.rank == 0:
            start = (launch - 1) * SEGMENT
            return _batch(_span(start, LocalSpan(self.cache, 0, start)))
        if self.rank == PLAN.poster:
            return _batch(decode_length=PLAN.bounds[-1] + launch - 1)
        return _batch()

    def _gang_span(self) -> GangSpan:
        return GangSpan(
            self.bells,
            self.views,
            self.windows,
            self.cache,
            PLAN,
            seq=0,
            rank=self.rank,
            slot=0 if self.rank == PLAN.poster else None,
            watch=self.watch,
            on_slice=self.give_up,
        )

    def _launch(self, launch: int, batch: Batch) -> None:
        self.bells.write_word(launch, 0)
        self.bells.set_launch_count(launch + 1)
        self.bells.ring(BELL_LAUNCH, self.peers, launch + 1)
        self.runner.run(launch, batch, np.arange(batch.rows_count)[-1:])


def _span(start: int, exchange: SpanExchange) -> PrefillSpan:
    return PrefillSpan(np.arange(SEGMENT, dtype=np.int32), start, exchange)


def _batch(*spans: PrefillSpan, decode_length: int | None = None) -> Batch:
    """These spans, behind one token after `decode_length` others in slot 0 if given."""
    lengths = np.array([] if decode_length is None else [decode_length], np.int64)
    return Batch(np.full(len(lengths), 7, np.int32), np.zeros(len(lengths), np.int64), lengths, list(spans))


def rehearse() -> None:
    """Compile, or load from numba's cache, every kernel a rank of the host backend calls.

    Raises: whatever the first failing rank raised.
    """
    doorbell.warm()
    config = KimiLinearConfig.from_json(PRESETS["tiny"])
    fleet = FleetConfig(
        world=WORLD,
        node_ranks=WORLD,
        chunk_tokens=2 * SEGMENT,
        buckets=(2 * SEGMENT,),
        segment_floor=SEGMENT,
        whale_min=2 * SEGMENT,
        max_ctx=8 * SEGMENT,
        slots=2,
        attention_window=WINDOW,
    )
    layout = SlabLayout.from_spec(slab_spec(config, fleet, plan_policy(config, fleet)))
    slabs = [PrivateSlab(rank, layout.nbytes) for rank in range(WORLD)]
    failures: list[BaseException] = []
    ranks = [_Rank(rank, config, fleet, layout, slabs, failures) for rank in range(WORLD)]
    threads = [threading.Thread(target=rank.perform, name=f"rehearsal-{rank.rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.bells.close()
    if failures:
        raise failures[0]
