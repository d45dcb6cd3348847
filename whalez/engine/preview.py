"""`whalez plan`: the planning functions a running fleet uses, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whalez.config import fleet_config
from whalez.engine.sizing import plan_policy
from whalez.errors import ConfigError
from whalez.model.config import KimiLinearConfig
from whalez.planning import PlanRefused, describe_plan, plan_whale, predict_lanes


def plan_lines(
    model_dir: Path, tokens: int, world: int, poster: int, settings: Mapping[str, Any], cores: int | None = None
) -> Iterator[str]:
    """Lines to print. Raises ConfigError or CheckpointError.

    cores: ranks that can compute at the same time; None: all of them
    """
    fleet = fleet_config(model_dir, world, settings)
    config = KimiLinearConfig.from_dir(model_dir)
    if config.moe_layers and world > config.num_experts:
        raise ConfigError(f"world: expected at most {config.num_experts} (the model's experts), got {world}")
    if tokens >= fleet.max_ctx:
        raise ConfigError(f"tokens: expected fewer than max_ctx = {fleet.max_ctx}, got {tokens}")
    policy = plan_policy(config, fleet)
    plan = plan_whale(tokens, poster, policy)
    if isinstance(plan, PlanRefused):
        yield f"{tokens} tokens at rank {poster}: local lane ({plan.field}: {plan.reason})"
        return
    lanes = predict_lanes(tokens, plan, policy, fleet.chunk_tokens, cores)
    yield f"{tokens} tokens at rank {poster}: gang of {plan.width} of {world} ranks, {plan.supersteps} superstep"
    yield f"{'rank':>5} {'start':>9} {'length':>9} {'KDA s':>9} {'MLA s':>9} {'MoE s':>9} {'wait s':>9}"
    for row in describe_plan(tokens, plan, policy):
        times = " ".join(f"{row[name]:9.3f}" for name in ("kda_s", "mla_s", "moe_s", "wait_s"))
        yield f"{row['rank']:5d} {row['start']:9d} {row['length']:9d} {times}"
    faster = "whale" if lanes.whale_is_faster else "local"
    where = f" of {world} ranks on {cores} cores" if cores is not None and cores < world else ""
    times = f"whale {lanes.whale_s:.2f} s, local {lanes.local_s:.2f} s"
    yield f"predicted prefill{where}: {times}; --lane auto takes {faster}"
