"""What follows from a model and a fleet's settings: the planning policy, the size of a slab and of the scratch.

Nothing here imports numba: a launcher counts before it has started anything.
"""

from __future__ import annotations

from whalez.config import FleetConfig
from whalez.fabric.layout import SlabSpec
from whalez.model.config import KimiLinearConfig
from whalez.model.scratch import scratch_bytes as forward_bytes
from whalez.planning import CostModel, PlanPolicy, rows_max


def plan_policy(config: KimiLinearConfig, fleet: FleetConfig) -> PlanPolicy:
    """What this fleet admits as a whale, with costs estimated from the model's shapes."""
    cost = CostModel.from_shapes(
        hidden=config.hidden_size,
        kda_layers=len(config.kda_layers),
        mla_layers=len(config.mla_layers),
        moe_layers=len(config.moe_layers),
        kda_heads=config.kda_heads,
        kda_head_dim=config.kda_head_dim,
        mla_heads=config.num_attention_heads,
        qk_nope=config.qk_nope_head_dim,
        qk_rope=config.qk_rope_head_dim,
        v_head=config.v_head_dim,
        kv_lora_rank=config.kv_lora_rank,
        dense_intermediate=config.intermediate_size,
        dense_layers=len(config.dense_layers),
        moe_intermediate=config.moe_intermediate_size,
        experts_per_token=config.num_experts_per_token,
        shared_experts=config.num_shared_experts,
        vocab=config.vocab_size,
    )
    return PlanPolicy(
        world=fleet.world,
        node_ranks=fleet.node_ranks,
        segment_floor=fleet.segment_floor,
        whale_min=fleet.whale_min,
        buckets=fleet.buckets,
        cost=cost,
    )


def slab_spec(config: KimiLinearConfig, fleet: FleetConfig, policy: PlanPolicy) -> SlabSpec:
    """Sizes of a rank's slab under this configuration."""
    rows = rows_max(policy, fleet.max_ctx, fleet.chunk_tokens)
    return SlabSpec(
        world=fleet.world,
        rows_max=rows + fleet.slots,  # a segment or chunk, and one decode row of every slot
        hidden=config.hidden_size,
        top_k=config.num_experts_per_token if config.moe_layers else 0,
        segment_rows_max=rows if fleet.world > 1 else 0,
        halo_values=(config.conv_width - 1) * 3 * config.kda_inner,
        package_heads=config.kda_heads if config.kda_layers else 0,
        key_dim=config.kda_head_dim,
        value_dim=config.kda_head_dim,
        latent_width=config.latent_width,
    )


_EXPERT_BLOCK_ROWS = 1024  # rows of one expert that parallel.expert computes at a time


def scratch_bytes(config: KimiLinearConfig, settings: FleetConfig, rows: int) -> int:
    """Bytes a launch of `rows` rows takes beside weights, cache and slab: the block of the forward pass, and what an
    owner of experts needs."""
    forward = forward_bytes(config, rows, min(settings.attention_window, settings.max_ctx))
    if not config.moe_layers:
        return forward
    block = 4 * _EXPERT_BLOCK_ROWS * (2 * config.hidden_size + 3 * config.moe_intermediate_size)
    # Where each row of each source goes: source, row and weight in 4 bytes, destination in 8.
    most_here = -(-config.num_experts // settings.world)
    entries = settings.world * rows * min(config.num_experts_per_token, most_here)
    return forward + block + 20 * entries + 8 * (most_here + 1)
