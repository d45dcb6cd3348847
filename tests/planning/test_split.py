"""The split against exhaustive searches that know nothing of limits, greed or bisection."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalez.planning import CostModel, PlanPolicy, segment_cap, split_segments
from whalez.planning.segments import split_cost

MINI = CostModel.from_shapes(
    hidden=1024,
    kda_layers=6,
    mla_layers=2,
    moe_layers=7,
    kda_heads=8,
    kda_head_dim=128,
    mla_heads=8,
    qk_nope=128,
    qk_rope=64,
    v_head=128,
    kv_lora_rank=256,
    dense_intermediate=2048,
    dense_layers=1,
    moe_intermediate=512,
    experts_per_token=4,
    shared_experts=1,
    vocab=4096,
)


def naive_cost(bounds: tuple[int, ...], cost: CostModel) -> float:
    """Sum over layers of the slowest member, written from the formulas, pair by pair count."""
    last = len(bounds) - 2
    kda, mla = [], []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        rows = end - start
        share = 0 if i == last else 0.5 if i == 0 else 1
        pairs = sum(range(start + 1, end + 1)) if rows < 100 else (start + 1 + end) * rows / 2
        kda.append((cost.kda_row + share * cost.package_row) * rows + i * cost.package)
        mla.append(cost.mla_row * rows + cost.mla_pair * pairs + cost.mla_expand * start)
    return cost.kda_layers * max(kda) + cost.mla_layers * max(mla)


def exhaustive(length: int, width: int, floor: int, cap: int, cost: CostModel) -> float:
    """Cheapest of all splits, single-token grain."""
    return min(
        naive_cost((0, *cuts, length), cost)
        for cuts in itertools.combinations(range(1, length), width - 1)
        if all(floor <= b - a <= cap for a, b in itertools.pairwise((0, *cuts, length)))
    )


def best_on_grid(length: int, width: int, floor: int, cap: int, cost: CostModel, step: int) -> float:
    """Cheapest split with inner bounds on a grid: keeps every (slowest kda, slowest mla) no other one beats in both."""
    fronts: dict[int, list[tuple[float, float]]] = {0: [(0.0, 0.0)]}
    for i in range(width):
        ends = range(step, length, step) if i < width - 1 else [length]
        following: dict[int, list[tuple[float, float]]] = {}
        for end in ends:
            reached = set()
            for start, front in fronts.items():
                if floor <= end - start <= cap:
                    kda = cost.kda_cost(i, width, end - start)
                    mla = cost.mla_cost(start, end - start)
                    reached |= {(max(k, kda), max(m, mla)) for k, m in front}
            front = []
            for k, m in sorted(reached):
                if not front or m < front[-1][1]:
                    front.append((k, m))
            if front:
                following[end] = front
        fronts = following
    return min(cost.kda_layers * k + cost.mla_layers * m for k, m in fronts[length])


coefficients = st.builds(
    lambda kda, mla, row, pair, expand, package, package_row: CostModel(
        kda_layers=kda,
        mla_layers=mla,
        moe_layers=0,
        mla_row=row,
        mla_pair=pair,
        mla_expand=row * expand,
        package=package,
        package_row=package_row,
    ),
    kda=st.integers(0, 5),
    mla=st.integers(1, 5),
    row=st.floats(0.1, 3),
    pair=st.floats(0, 0.5),
    expand=st.floats(0, 1),
    package=st.floats(0, 3),
    package_row=st.floats(0, 1),
)


@given(cost=coefficients, width=st.sampled_from([2, 4]), data=st.data())
@settings(max_examples=120)
def test_small_prompts_against_all_splits(cost: CostModel, width: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(4 * width, 80 if width == 2 else 34))
    buckets = data.draw(st.sampled_from([(8, 16, 32, 64), (100,), (9, 10, 11, 12, 40)]))
    policy = PlanPolicy(world=width, segment_floor=4, whale_min=8, buckets=buckets, cost=cost)
    cap = segment_cap(length, width, policy)
    assert cap is not None
    bounds = split_segments(length, width, policy)
    best = exhaustive(length, width, 4, cap, cost)
    assert best * (1 - 1e-9) <= naive_cost(bounds, cost) <= 1.02 * best
    assert split_cost(bounds, cost) == pytest.approx(naive_cost(bounds, cost))


STEEP = msgspec.structs.replace(CostModel.k3(), mla_pair=4e-4, mla_expand=0.3, package=200.0, package_row=0.4)
LOOSE = (1 << 20,)
K3 = PlanPolicy(world=1).buckets


@pytest.mark.parametrize("cost", [CostModel.k3(), MINI, STEEP], ids=["k3", "mini", "steep"])
@pytest.mark.parametrize(
    ("length", "width", "floor", "buckets", "step"),
    [
        (4096, 2, 2048, K3, 1),
        (16_001, 2, 2048, LOOSE, 16),
        (16_384, 4, 256, LOOSE, 128),
        (16_384, 4, 2048, K3, 64),
        (65_100, 8, 2048, K3, 264),
        (40_000, 8, 64, LOOSE, 400),
        (20_000, 8, 2048, LOOSE, 128),
    ],
)
def test_long_prompts_against_a_fine_grid(
    cost: CostModel, length: int, width: int, floor: int, buckets: tuple[int, ...], step: int
) -> None:
    policy = PlanPolicy(world=width, segment_floor=floor, whale_min=2 * floor, buckets=buckets, cost=cost)
    cap = segment_cap(length, width, policy)
    assert cap is not None
    best = best_on_grid(length, width, floor, cap, cost, step)
    assert naive_cost(split_segments(length, width, policy), cost) <= 1.02 * best


def test_leveling_pays() -> None:
    """Guards the tests above: with much attention the even split is far from the best one."""
    policy = PlanPolicy(world=4, segment_floor=256, whale_min=512, buckets=LOOSE, cost=MINI)
    even = naive_cost((0, 16384, 32768, 49152, 65536), MINI)
    assert naive_cost(split_segments(65536, 4, policy), MINI) < 0.85 * even


def test_long_segments_keep_the_chunk_grid() -> None:
    for cost in (CostModel.k3(), MINI):
        bounds = split_segments(65_100, 8, PlanPolicy(world=8, cost=cost))
        assert all(bound % 64 == 0 for bound in bounds[:-1])


def test_only_one_layer_kind() -> None:
    kda_only = msgspec.structs.replace(MINI, mla_layers=0)
    mla_only = msgspec.structs.replace(MINI, kda_layers=0)
    for cost in (kda_only, mla_only):
        policy = PlanPolicy(world=4, segment_floor=256, whale_min=512, buckets=LOOSE, cost=cost)
        best = best_on_grid(20_000, 4, 256, 1 << 20, cost, 100)
        assert naive_cost(split_segments(20_000, 4, policy), cost) <= 1.02 * best


PINNED = {
    "k3": (0, 3648, 7232, 10816, 14400, 17984, 21568, 25088, 28517),
    "mini": (0, 32384, 46272, 56896, 65537),
    "steep": (0, 768, 1280, 1664, 1999),
}


def test_bounds_are_the_same_on_every_host() -> None:
    """Literal bounds: a member on another machine or Python must come to these, to the token."""
    wide = PlanPolicy(world=64)
    assert split_segments(28_517, 8, wide) == PINNED["k3"]
    assert split_segments(65_537, 4, PlanPolicy(world=4, buckets=LOOSE, cost=MINI)) == PINNED["mini"]
    assert (
        split_segments(1999, 4, PlanPolicy(world=4, segment_floor=16, whale_min=32, buckets=LOOSE, cost=STEEP))
        == PINNED["steep"]
    )
