"""The plan as a whole: every world of 1-64 ranks, every poster, refusals by name and the members' recheck."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalez.errors import ConfigError, ProtocolError
from whalez.planning import (
    CostModel,
    GangPlan,
    PlanDiffers,
    PlanPolicy,
    PlanRefused,
    check_plan,
    covering_bucket,
    place_gang,
    plan_whale,
)

WORLDS = range(1, 65)
K3_16 = PlanPolicy(world=16)


def admits(length: int, width: int, policy: PlanPolicy) -> bool:
    """Admission in other words than the code's: equal segments keep to the floor and fit a bucket."""
    return length // width >= policy.segment_floor and any(bucket * width >= length for bucket in policy.buckets)


def assert_sound(plan: GangPlan, length: int, poster: int, policy: PlanPolicy) -> None:
    width = plan.width
    # every token exactly once, in order
    assert plan.bounds[0] == 0
    assert plan.bounds[-1] == length
    assert len(plan.bounds) == width + 1
    segments = [plan.bounds[i + 1] - plan.bounds[i] for i in range(width)]
    # the floor, and the bucket of the mean
    cap = min(bucket for bucket in policy.buckets if bucket * width >= length)
    assert policy.segment_floor <= min(segments)
    assert max(segments) <= cap
    # a contiguous block in rank order but for the poster, which is last
    block = sorted(plan.gang)
    assert block == list(range(block[0], block[0] + width))
    assert block[0] >= 0
    assert block[-1] < policy.world
    assert plan.gang[-1] == poster
    assert list(plan.gang[:-1]) == [rank for rank in block if rank != poster]


def assert_node_aligned_where_it_fits(plan: GangPlan, poster: int, policy: PlanPolicy) -> None:
    start, nodes, width, world = min(plan.gang), policy.node_ranks, plan.width, policy.world
    if width >= nodes:
        # some block on a node boundary holds the poster inside the world: then the gang is on one, or ends the world
        assert start % nodes == 0 or start == world - width
        if width % nodes == 0 and poster - poster % width + width <= world:
            assert start == poster - poster % width
    elif poster // nodes * nodes + nodes <= world:
        assert start // nodes == (start + width - 1) // nodes, "a gang that fits into a node crosses a boundary"


@given(
    length=st.integers(1, 2_200_000),
    floor=st.sampled_from([4, 64, 100, 2048]),
    buckets=st.sampled_from([(256, 528, 1056, 2112, 4224, 8448, 16896), (4096,), (5000, 5001, 40_000)]),
    node_ranks=st.sampled_from([1, 3, 4, 6, 8, 72]),
)
@settings(max_examples=12)
def test_all_worlds_all_posters(length: int, floor: int, buckets: tuple[int, ...], node_ranks: int) -> None:
    for world in WORLDS:
        policy = PlanPolicy(
            world=world, node_ranks=node_ranks, segment_floor=floor, whale_min=2 * floor, buckets=buckets
        )
        admitting = [width for width in (2, 4, 8, 16, 32, 64) if width <= world and admits(length, width, policy)]
        for poster in range(world):
            plan = plan_whale(length, poster, policy)
            if not admitting:
                assert isinstance(plan, PlanRefused)
                continue
            assert isinstance(plan, GangPlan)
            assert plan.width == admitting[-1]
            assert_sound(plan, length, poster, policy)
            assert_node_aligned_where_it_fits(plan, poster, policy)


@given(data=st.data(), world=st.integers(2, 24), node_ranks=st.sampled_from([1, 3, 4, 8]))
@settings(max_examples=150)
def test_excluded_ranks_take_no_part_and_members_still_agree(data: st.DataObject, world: int, node_ranks: int) -> None:
    policy = PlanPolicy(world=world, node_ranks=node_ranks, segment_floor=16, whale_min=32)
    poster = data.draw(st.integers(0, world - 1))
    excluded = data.draw(st.frozensets(st.integers(0, world - 1), max_size=6)) - {poster}
    length = data.draw(st.integers(32, 4000))
    plan = plan_whale(length, poster, policy, excluded)
    # the poster's run of ranks without a decliner is what any block has to fit into
    low = max((rank + 1 for rank in excluded if rank < poster), default=0)
    high = min((rank for rank in excluded if rank > poster), default=world)
    admitting = [width for width in (2, 4, 8, 16) if width <= high - low and admits(length, width, policy)]
    if not admitting:
        assert isinstance(plan, PlanRefused)
        return
    assert isinstance(plan, GangPlan)
    assert plan.width == admitting[-1]
    assert not excluded & set(plan.gang)
    assert_sound(plan, length, poster, policy)
    check_plan(plan, length, poster, policy, excluded)
    check_plan(plan, length, poster, policy)  # a member that was not told who declined


def test_the_tray_of_the_reference() -> None:
    assert place_gang(4, 6, 16, 4) == (4, 5, 7, 6)
    assert place_gang(8, 3, 16, 4) == (0, 1, 2, 4, 5, 6, 7, 3)
    assert place_gang(2, 5, 16, 4) == (4, 5)
    assert place_gang(8, 9, 12, 4) == (4, 5, 6, 7, 8, 10, 11, 9)  # 8..15 leaves the world
    assert place_gang(4, 5, 12, 6) == (2, 3, 4, 5)  # 4..7 would cross into the next machine
    assert place_gang(4, 6, 16, 4, frozenset({5})) == (7, 8, 9, 6)
    assert place_gang(2, 6, 16, 4, frozenset({7})) == (5, 6)
    assert place_gang(4, 6, 8, 4, frozenset({5, 7})) is None


def refused(length: int, poster: int, policy: PlanPolicy, excluded: frozenset[int] = frozenset()) -> PlanRefused:
    plan = plan_whale(length, poster, policy, excluded)
    assert isinstance(plan, PlanRefused), plan
    return plan


def test_refusals_say_why() -> None:
    assert refused(4095, 0, K3_16).field == "whale_min"
    assert "4096" in refused(4095, 0, K3_16).reason
    assert refused(0, 0, K3_16).field == "whale_min"
    assert refused(16 * 16896 + 1, 0, K3_16).field == "buckets"
    assert refused(100_000, 16, K3_16).field == "poster"
    assert refused(100_000, -1, K3_16).field == "poster"
    assert refused(100_000, 3, K3_16, frozenset({3})).field == "excluded"
    # ranks 2 and 4 around the poster, so not even a pair is left
    assert refused(100_000, 3, K3_16, frozenset({2, 4})).field == "excluded"
    assert refused(100_000, 0, PlanPolicy(world=1)).field == "world"
    # one decliner leaves 8 ranks, for which this prompt is too long
    assert refused(16 * 16000, 0, K3_16, frozenset({9})).field == "excluded"


def test_edges_of_admission() -> None:
    for length, width in ((4096, 2), (8191, 2), (8192, 4), (16 * 2048, 16), (16 * 16896, 16)):
        plan = plan_whale(length, 5, K3_16)
        assert isinstance(plan, GangPlan)
        assert plan.width == width
    smallest = plan_whale(4096, 5, K3_16)
    assert isinstance(smallest, GangPlan)
    assert smallest.bounds == (0, 2048, 4096)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"whale_min": 4095}, "whale_min"),
        ({"segment_floor": 3, "whale_min": 6}, "segment_floor"),
        ({"buckets": ()}, "buckets"),
        ({"buckets": (4096, 4096)}, "buckets"),
        ({"buckets": (256, 1024)}, "buckets"),
        ({"world": 0}, "world"),
        ({"node_ranks": 0}, "node_ranks"),
    ],
)
def test_bad_policy_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: expected .*, got "):
        PlanPolicy(**{"world": 4, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("mla_row", 0.0), ("mla_pair", -1.0), ("mla_expand", 2.0), ("unit_s", float("nan")), ("moe_layers", -1)],
)
def test_bad_cost_is_refused_by_name(field: str, value: float) -> None:
    fields = {**msgspec.structs.asdict(CostModel.k3()), field: value}
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        CostModel(**fields)


def test_member_names_the_field_that_differs() -> None:
    plan = plan_whale(30_000, 1, K3_16)
    assert isinstance(plan, GangPlan)
    check_plan(plan, 30_000, 1, K3_16)
    changed: list[tuple[str, object]] = [
        ("gang", (*plan.gang[1:-1], 20, 1)),
        ("gang", plan.gang[:-1] + plan.gang[:1]),
        ("gang", (1, 1, 1, 1, 1, 1, 1, 1)),
        ("gang", ()),
        ("bounds", (*plan.bounds[:3], plan.bounds[3] + 1, *plan.bounds[4:])),
        ("bounds", ()),
        ("supersteps", 2),
        ("balancing", "even"),
        ("fan_in", "scan"),
    ]
    for field, value in changed:
        with pytest.raises(PlanDiffers) as caught:
            check_plan(msgspec.structs.replace(plan, **{field: value}), 30_000, 1, K3_16)
        assert caught.value.field == field
        assert caught.value.got == value
        assert isinstance(caught.value, ProtocolError)
    for length, poster, field in ((29_999, 1, "bounds"), (30_000, 2, "gang"), (100, 1, "gang")):
        with pytest.raises(PlanDiffers) as caught:
            check_plan(plan, length, poster, K3_16)
        assert caught.value.field == field


def test_other_cost_coefficients_are_seen() -> None:
    plan = plan_whale(120_000, 1, K3_16)
    assert isinstance(plan, GangPlan)
    other = msgspec.structs.replace(CostModel.k3(), mla_pair=2e-4)
    with pytest.raises(PlanDiffers) as caught:
        check_plan(plan, 120_000, 1, PlanPolicy(world=16, cost=other))
    assert caught.value.field == "bounds"


def test_covering_bucket() -> None:
    assert [covering_bucket(rows, (8, 16)) for rows in (0, 8, 9, 16, 17)] == [8, 8, 16, 16, None]
