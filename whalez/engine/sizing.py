"""What follows from a model and a fleet's settings: the planning policy and the size of a slab."""

from __future__ import annotations

from whalez.config import FleetConfig
from whalez.fabric.layout import SlabSpec
from whalez.model.config import KimiLinearConfig
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
