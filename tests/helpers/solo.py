"""A world of one rank inside the test process: the real forward pass over real shared memory, without hub or loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from whalez.config import FleetConfig, fleet_config
from whalez.engine.launch import LaunchRunner
from whalez.engine.sizing import plan_policy, slab_spec
from whalez.fabric.doorbell import Bells
from whalez.fabric.host import HostSlabs
from whalez.fabric.layout import SlabLayout
from whalez.fabric.provider import Slab
from whalez.model.cache import StateCache
from whalez.model.checkpoint import load_weights
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Batch, Hooks, PrefillSpan
from whalez.model.forward import Forward
from whalez.model.trace import Stopwatch
from whalez.model.weights import expert_bounds
from whalez.parallel.context import LocalSpan
from whalez.parallel.expert import PairedExperts


class Solo:
    """One request at a time in slot 0."""

    def __init__(
        self,
        config: KimiLinearConfig,
        fleet: FleetConfig,
        runner: LaunchRunner,
        cache: StateCache,
        layout: SlabLayout,
        slab: Slab,
        bells: Bells,
    ) -> None:
        self.config, self.fleet, self.runner, self.cache = config, fleet, runner, cache
        self.layout, self.slab, self.bells = layout, slab, bells
        self.launch = 0
        self.choices: list[np.ndarray] = []  # per MoE layer [T, k], of the last prefill

    def prefill(self, tokens: np.ndarray, chunk_tokens: int) -> np.ndarray:
        """Logits f32 [T, vocab] of every position, prefilled in chunks."""
        fleet = self.fleet
        self.cache.open_slot(0, tuple(range(-(-(len(tokens) + 64) // fleet.page_tokens))))
        logits, choices = [], []
        for start in range(0, len(tokens), chunk_tokens):
            span = tokens[start : start + chunk_tokens].astype(np.int32)
            batch = no_decodes()
            batch.spans.append(PrefillSpan(span, start, LocalSpan(self.cache, 0, start)))
            result = self.runner.run(self.launch, batch, np.arange(len(span)))
            self.launch += 1
            logits.append(result.logits)
            choices.append(result.choices)
        self.choices = [np.concatenate(layer) for layer in zip(*choices, strict=True)]
        return np.concatenate(logits)

    def decode(self, token: int, length: int) -> np.ndarray:
        """Logits f32 [vocab] after `token` at position `length`."""
        batch = Batch(np.array([token], np.int32), np.zeros(1, np.int64), np.array([length], np.int64))
        result = self.runner.run(self.launch, batch, np.arange(1))
        self.launch += 1
        return result.logits[0]


def no_decodes() -> Batch:
    return Batch(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


@contextlib.contextmanager
def solo(model_dir: Path, **settings: object) -> Iterator[Solo]:
    """Open the checkpoint in `model_dir` as a world of one."""
    config = KimiLinearConfig.from_dir(model_dir)
    fleet = fleet_config(model_dir, 1, {"max_ctx": 4096, "segment_floor": 64, "slots": 2, **settings})
    layout = SlabLayout.from_spec(slab_spec(config, fleet, plan_policy(config, fleet)))
    with HostSlabs(layout, fleet_id=f"solo{os.getpid()}", rank=0, incarnation="test") as slabs:
        slab = slabs.create()
        slabs.unlink()
        bells = Bells(layout, [slab], 0, steps_per_launch=2 * max(len(config.moe_layers), 1))
        watch = Stopwatch(config.num_hidden_layers)
        cache = StateCache(config, slots=fleet.slots, pages=fleet.cache_pages, page_tokens=fleet.page_tokens)
        cache.states[:] = np.nan  # poison: nothing may be read before it is written
        cache.tails[:] = np.nan
        cache.latents[:] = np.nan
        experts = PairedExperts(
            bells,
            layout,
            [slab],
            rank=0,
            expert_bounds=expert_bounds(config.num_experts, 1),
            moe_layers=len(config.moe_layers),
            top_k=config.num_experts_per_token,
            hidden=config.hidden_size,
            intermediate=config.moe_intermediate_size,
            watch=watch,
        )
        forward = Forward(
            config,
            load_weights(model_dir, config, 0, 1),
            cache,
            experts,
            rows_max=layout.spec.rows_max,
            attention_window=min(fleet.attention_window, fleet.max_ctx),
        )
        hooks = Hooks(watch, lambda layer: None)
        runner = LaunchRunner(config, forward, experts, hooks, capture=True)
        yield Solo(config, fleet, runner, cache, layout, slab, bells)
        bells.close()
