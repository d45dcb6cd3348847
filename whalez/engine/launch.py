"""Running one launch: from what the scheduler composed to logits.

Rule 1: a launch makes the whole paired chain whatever it carries; a launch of zero rows makes nothing else.
Hot: yes, bench ids `empty_launch`, `superstep`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Batch, Hooks
from whalez.model.forward import Forward
from whalez.model.trace import Part, Stopwatch
from whalez.model.weights import MoeWeights
from whalez.parallel.expert import PairedExperts


@dataclass(slots=True)
class LaunchResult:
    """logits f32 [n, vocab] of the rows that were asked for; the debug fields are filled only when capturing."""

    logits: np.ndarray
    hidden: np.ndarray | None = None  #: f32 [R, D] residual stream after the last layer
    choices: list[np.ndarray] = field(default_factory=list)  #: i32 [R, k] per MoE layer


class LaunchRunner:
    """The device side of the loop."""

    def __init__(
        self, config: KimiLinearConfig, forward: Forward, experts: PairedExperts, hooks: Hooks, *, capture: bool
    ) -> None:
        self.config = config
        self.forward = forward
        self.experts = experts
        self.hooks = hooks
        self.capture = capture
        self._nothing = np.empty((0, config.hidden_size), np.float32)

    @property
    def watch(self) -> Stopwatch:
        return self.hooks.watch

    def run(self, launch: int, batch: Batch, wanted: np.ndarray) -> LaunchResult:
        """Run launch number `launch`; `wanted` i64 [n] are the rows whose logits are needed."""
        self.watch.start()
        self.experts.begin(launch)
        if batch.rows_count:
            self.hooks.choices = [] if self.capture else None
            x = self.forward.run(batch, self.hooks)
            result = LaunchResult(self.forward.logits(x[wanted]))
            if self.capture:
                result.hidden, result.choices = x.copy(), self.hooks.choices or []
        else:
            self._run_empty()
            result = LaunchResult(np.empty((0, self.config.vocab_size), np.float32))
        self.experts.finish()
        self.watch.lap(Part.OTHER)
        return result

    def _run_empty(self) -> None:
        """No rows of our own: only serve the experts we hold to the others."""
        for layer, w in enumerate(self.forward.weights.layers):
            self.watch.layer = layer
            if isinstance(w.mlp, MoeWeights):
                self.experts.moe(layer, 0, w.mlp, self._nothing, lambda: None)
            self.hooks.progress(layer)

    def waited_s(self) -> float:
        """Seconds the last launch spent waiting for other ranks."""
        return float(self.watch.ns[:, [Part.PAIR_WAIT, Part.GANG_WAIT]].sum() / 1e9)

    def phases(self) -> dict[str, float]:
        """Seconds of the last launch: kda, mla, dense, moe (router, shared, routed), exchange_wait, other."""
        seconds = self.watch.ns / 1e9
        config = self.config
        kda, mla = list(config.kda_layers), list(config.mla_layers)
        moe, dense = list(config.moe_layers), list(config.dense_layers)
        return {
            "kda": float(seconds[kda, Part.ATTENTION].sum()),
            "mla": float(seconds[mla, Part.ATTENTION].sum()),
            "moe": float(seconds[moe][:, [Part.MLP, Part.EXPERTS]].sum()),
            "dense": float(seconds[dense, Part.MLP].sum()),
            "exchange_wait": float(seconds[:, [Part.PAIR_WAIT, Part.GANG_WAIT]].sum()),
            "other": float(seconds[:, Part.OTHER].sum()),
        }
