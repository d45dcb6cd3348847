"""A launch of zero rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from helpers.solo import no_decodes
from whalez.engine.launch import LaunchRunner
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Hooks
from whalez.model.presets import PRESETS
from whalez.model.trace import Stopwatch


def test_an_idle_rank_of_a_model_without_experts_raises_its_progress() -> None:
    """Otherwise /health calls a rank stalled that has nothing to do."""
    config = KimiLinearConfig.from_json(PRESETS["tiny"] | {"first_k_dense_replace": 4})
    forward: Any = SimpleNamespace(weights=SimpleNamespace(layers=[SimpleNamespace(mlp=None)] * 4))
    experts: Any = SimpleNamespace(begin=lambda launch: None, finish=lambda: None)
    moved: list[int] = []
    runner = LaunchRunner(config, forward, experts, Hooks(Stopwatch(4), moved.append), capture=False)
    runner.run(0, no_decodes(), np.empty(0, np.int64))
    assert moved
