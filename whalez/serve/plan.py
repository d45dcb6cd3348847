"""`whalez plan`: the planning functions a running fleet uses, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whalez.config import FleetConfig, fleet_config
from whalez.model.config import KimiLinearConfig
from whalez.planning import CostModel, PlanPolicy, PlanRefused, describe_plan, plan_whale, predict_lanes


def plan_policy(fleet: FleetConfig, model: KimiLinearConfig) -> PlanPolicy:
    """What this fleet admits as a whale, with costs estimated from the model's shapes."""
    cost = CostModel.from_shapes(
        hidden=model.hidden_size,
        kda_layers=len(model.kda_layers),
        mla_layers=len(model.mla_layers),
        moe_layers=len(model.moe_layers),
        kda_heads=model.kda_heads,
        kda_head_dim=model.kda_head_dim,
        mla_heads=model.num_attention_heads,
        qk_nope=model.qk_nope_head_dim,
        qk_rope=model.qk_rope_head_dim,
        v_head=model.v_head_dim,
        kv_lora_rank=model.kv_lora_rank,
        dense_intermediate=model.intermediate_size,
        dense_layers=len(model.dense_layers),
        moe_intermediate=model.moe_intermediate_size,
        experts_per_token=model.num_experts_per_token,
        shared_experts=model.num_shared_experts,
        vocab=model.vocab_size,
    )
    return PlanPolicy(
        world=fleet.world,
        node_ranks=fleet.node_ranks,
        segment_floor=fleet.segment_floor,
        whale_min=fleet.whale_min,
        buckets=fleet.buckets,
        cost=cost,
    )


def plan_lines(model_dir: Path, tokens: int, world: int, poster: int, settings: Mapping[str, Any]) -> Iterator[str]:
    """Lines to print. Raises ConfigError or CheckpointError."""
    fleet = fleet_config(model_dir, world, settings)
    policy = plan_policy(fleet, KimiLinearConfig.from_dir(model_dir))
    plan = plan_whale(tokens, poster, policy)
    if isinstance(plan, PlanRefused):
        yield f"{tokens} tokens at rank {poster}: local lane ({plan.field}: {plan.reason})"
        return
    lanes = predict_lanes(tokens, plan, policy, fleet.chunk_tokens)
    yield f"{tokens} tokens at rank {poster}: gang of {plan.width} of {world} ranks, {plan.supersteps} superstep"
    yield f"{'rank':>5} {'start':>9} {'length':>9} {'KDA s':>9} {'MLA s':>9} {'MoE s':>9} {'wait s':>9}"
    for row in describe_plan(tokens, plan, policy):
        times = " ".join(f"{row[name]:9.3f}" for name in ("kda_s", "mla_s", "moe_s", "wait_s"))
        yield f"{row['rank']:5d} {row['start']:9d} {row['length']:9d} {times}"
    faster = "whale" if lanes.whale_is_faster else "local"
    yield f"predicted prefill: whale {lanes.whale_s:.2f} s, local {lanes.local_s:.2f} s; --lane auto takes {faster}"
