"""Predicted seconds of the lanes, the table for people, slab sizes, and what planning may import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import whalez.planning
from whalez.planning import (
    CostModel,
    GangPlan,
    PlanPolicy,
    describe_plan,
    plan_whale,
    predict_lanes,
    rows_max,
)

SIMPLE = CostModel(
    kda_layers=2,
    mla_layers=1,
    moe_layers=3,
    mla_row=1.0,
    mla_pair=0.5,
    mla_expand=0.25,
    moe_row=4.0,
    package=3.0,
    package_row=0.5,
    unit_s=2.0,
    launch_s=10.0,
)
POLICY = PlanPolicy(world=4, segment_floor=4, whale_min=8, buckets=(64,), cost=SIMPLE)
PAIR = GangPlan(gang=(2, 3), bounds=(0, 6, 10))


def test_lanes_by_hand() -> None:
    # whale, kda: member 0: 6 rows * 1.25 = 7.5; member 1: 4 rows + 1 package = 7
    # whale, mla: member 0: 6 + 0.5 * 21 = 16.5; member 1: 4 + 0.5 * (7 + 8 + 9 + 10) + 0.25 * 6 = 22.5
    # experts: 3 layers * 4.0 * 10 rows / 4 ranks = 30
    # local, chunks of 4: 2 * 10 + 10 + 0.5 * 55 + 0.25 * (4 + 8) = 60.5, the same experts, 3 launches
    whale_s, local_s = predict_lanes(10, PAIR, POLICY, chunk_tokens=4)
    assert whale_s == pytest.approx(2.0 * (2 * 7.5 + 22.5 + 30) + 7 * 10)
    assert local_s == pytest.approx(2.0 * (60.5 + 30) + 3 * 10)
    # on one core nothing is side by side: totals instead of the slowest, and all experts in a row
    whale_s, local_s = predict_lanes(10, PAIR, POLICY, chunk_tokens=4, cores=1)
    assert whale_s == pytest.approx(2.0 * (2 * 14.5 + 39 + 120) + 7 * 10)
    assert local_s == pytest.approx(2.0 * (60.5 + 120) + 3 * 10)
    # 5 divides 10: no ragged chunk
    assert predict_lanes(10, PAIR, POLICY, 5).local_s == pytest.approx(2.0 * (57.5 + 0.25 * 5 + 30) + 2 * 10)


def test_long_prompts_prefer_the_whale_and_short_ones_stay_local() -> None:
    policy = PlanPolicy(world=8, segment_floor=64, whale_min=128)
    for length, faster in ((128, False), (4096, True), (128_000, True)):
        plan = plan_whale(length, 0, policy)
        assert isinstance(plan, GangPlan)
        assert predict_lanes(length, plan, policy, 4224).whale_is_faster is faster


def test_table_for_people() -> None:
    first, second = describe_plan(10, PAIR, POLICY)
    assert (first["rank"], first["start"], first["length"]) == (2, 0, 6)
    assert (second["rank"], second["start"], second["length"]) == (3, 6, 4)
    assert first["kda_share"] == 1.0
    assert second["mla_share"] == 1.0
    assert first["mla_share"] == pytest.approx(16.5 / 22.5)
    assert second["kda_s"] == pytest.approx(2.0 * 2 * 7)
    assert first["moe_s"] == pytest.approx(2.0 * 30)
    superstep_s = 2.0 * (2 * 7.5 + 22.5 + 30)
    for member in (first, second):
        assert member["busy_s"] + member["wait_s"] == pytest.approx(superstep_s)


def test_estimate_from_shapes() -> None:
    """Kimi Linear 48B-A3B by hand: the published widths in multiply-adds."""
    cost = CostModel.from_shapes(
        hidden=2304,
        kda_layers=20,
        mla_layers=7,
        moe_layers=26,
        kda_heads=32,
        kda_head_dim=128,
        mla_heads=32,
        qk_nope=128,
        qk_rope=64,
        v_head=128,
        kv_lora_rank=512,
        dense_intermediate=9216,
        dense_layers=1,
        moe_intermediate=1024,
        experts_per_token=8,
        shared_experts=1,
        vocab=163840,
        flops_per_s=1e12,
    )
    row = 2 * (4 * 2304 * 4096 + 2304 * 32)  # q, k, v, o and beta
    row += 2 * 2 * 128 * (2304 + 4096)  # the low-rank pairs of both gates
    row += 6 * 2304 * (26 * 1024 + 9216) / 27  # shared experts and the dense layer, spread over all layers
    row += 32 * (10 * 64 * 128 + 6 * 128 * 128) / 0.6  # chunks of 64
    pair, expand, experts = 2 * 32 * (192 + 128) / 0.6, 2 * 512 * 32 * 256, 6 * 2304 * 1024 * 8
    assert cost.unit_s == pytest.approx(row / 1e12)
    assert cost.mla_pair * cost.unit_s * 1e12 == pytest.approx(pair)
    assert cost.mla_expand * cost.unit_s * 1e12 == pytest.approx(expand)
    assert cost.moe_row * cost.unit_s * 1e12 == pytest.approx(experts)
    assert cost.mla_row < 1


def test_k3_keeps_the_leveling_weight_of_the_reference() -> None:
    cost = CostModel.k3()
    start, rows = 112_000, 9_000
    total = cost.kda_layers * cost.kda_row * rows + cost.mla_layers * cost.mla_cost(start, rows)
    weight = rows + 2.7e-6 * (start + rows / 2) * rows
    assert total / (cost.kda_layers + cost.mla_layers) == pytest.approx(weight, rel=1e-4)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("max_ctx", [20, 64, 250, 420])
def test_slabs_hold_every_segment(world: int, max_ctx: int) -> None:
    policy = PlanPolicy(world=world, segment_floor=8, whale_min=20, buckets=(16, 48, 100), cost=SIMPLE)
    bound = rows_max(policy, max_ctx, chunk_tokens=12)
    largest = 12
    for length in range(1, max_ctx + 1):
        for decliner in range(-1, world - 1):
            plan = plan_whale(length, world - 1, policy, frozenset({decliner}))
            if isinstance(plan, GangPlan):
                largest = max(largest, *(plan.segment(rank)[1] for rank in plan.gang))
    assert largest <= bound
    assert bound <= max(12, 100, largest)
    if world == 1:
        assert bound == 12
    assert rows_max(policy, max_ctx, chunk_tokens=5000) == 5000


def test_planning_is_pure() -> None:
    """No clock, thread, array library or platform math; and no built-in sum, which rounds by Python version."""
    allowed = {"__future__", "collections", "functools", "typing", "msgspec", "whalez"}
    files = sorted(Path(whalez.planning.__file__).parent.glob("*.py"))
    assert len(files) >= 7
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
                if names[0].startswith("whalez"):
                    assert names[0].startswith(("whalez.planning", "whalez.errors")), (file.name, names)
            assert {name.split(".")[0] for name in names} <= allowed, (file.name, names)
            assert not (isinstance(node, ast.Name) and node.id in {"sum", "pow"}), (file.name, node.lineno)
            assert not isinstance(node, ast.Pow), file.name
