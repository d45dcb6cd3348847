"""Router and expert exchange against float64: ties, groups, empty ranks, crowded experts, uneven blocks, sum order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalez.errors import FabricError, ShapeError
from whalez.ops.moe import (
    MoeScratch,
    combine_sum,
    expert_forward,
    gather_rows,
    owner_compute,
    plan_owner,
    route,
    scatter_add,
    swiglu,
)
from whalez.ops.moe.naive import naive_expert, naive_moe, naive_route, naive_swiglu

HIDDEN, INNER = 24, 20


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def run_route(logits, bias, top_k, renormalize=True, scaling=1.0, num_groups=1, topk_groups=1):
    ids = np.full((len(logits), top_k), -7, np.int32)
    weights = np.full((len(logits), top_k), np.nan, np.float32)
    route(logits, bias, top_k, renormalize, scaling, num_groups, topk_groups, ids, weights)
    return ids, weights


@pytest.mark.parametrize(
    ("t", "experts", "top_k", "renormalize", "scaling", "num_groups", "topk_groups"),
    [(0, 8, 2, True, 1.0, 1, 1), (63, 256, 8, True, 2.446, 1, 1), (113, 17, 3, False, 1.5, 1, 1),
     (100, 24, 4, True, 1.0, 6, 2), (50, 6, 2, True, 1.0, 6, 3), (9, 5, 5, True, 1.0, 1, 1)],
)  # fmt: skip
def test_route_against_naive(t, experts, top_k, renormalize, scaling, num_groups, topk_groups):
    rng = np.random.default_rng(experts)
    logits, bias = draw(rng, t, experts), (0.3 * draw(rng, experts)).astype(np.float32)
    ids, weights = run_route(logits, bias, top_k, renormalize, scaling, num_groups, topk_groups)
    want_ids, want = naive_route(logits, bias, top_k, renormalize, scaling, num_groups, topk_groups)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=2e-6)


def test_bias_chooses_but_does_not_weigh():
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    ids, weights = run_route(logits, np.array([9, 0, 0, 0], np.float32), 2, renormalize=False)
    assert ids.tolist() == [[0, 3]]
    np.testing.assert_allclose(weights, [[0.5, 1 / (1 + np.exp(-3.0))]], rtol=1e-6)


def test_ties_go_to_the_lowest_index():
    flat = np.zeros((3, 12), np.float32)
    flat[1, [3, 7, 11]] = 1
    flat[2, :] = 100  # the sigmoid is exactly 1 from about 17 on
    bias = np.zeros(12, np.float32)
    assert run_route(flat, bias, 4)[0].tolist() == [[0, 1, 2, 3], [3, 7, 11, 0], [0, 1, 2, 3]]
    grouped = run_route(flat, bias, 4, num_groups=4, topk_groups=2)[0].tolist()
    assert grouped == [[0, 1, 2, 3], [3, 7, 4, 5], [0, 1, 2, 3]]  # groups 1 and 2 win row 1 over 3 by index


def test_extreme_and_nan_logits_still_choose_distinct_experts():
    logits = np.array([[-1e4, 1e4, 0, np.nan], [np.nan] * 4], np.float32)
    ids, weights = run_route(logits, np.zeros(4, np.float32), 3, renormalize=False)
    assert ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    np.testing.assert_allclose(weights[0], [1, 0.5, 0], atol=1e-30)
    assert np.isnan(weights[1]).all()


@pytest.mark.parametrize(("t", "inner"), [(1, 1), (63, 33), (113, 100)])
def test_swiglu_and_expert_against_naive(t, inner):
    rng = np.random.default_rng(inner)
    gate_up = (30 * draw(rng, t, 2 * inner)).astype(np.float32)
    gate_up[0, 0] = -300
    out = np.full((t, inner), np.nan, np.float32)
    swiglu(gate_up, out)
    np.testing.assert_allclose(out, naive_swiglu(gate_up), rtol=2e-6, atol=1e-6)
    w13, w2, x = draw(rng, 2 * inner, 9), draw(rng, 9, inner), draw(rng, t, 9)
    y = np.full((t, 9), np.nan, np.float32)
    expert_forward(w13, w2, x, np.empty((t, 2 * inner), np.float32), out, y)
    want = naive_expert(w13, w2, x)
    assert np.abs(y - want).max() <= 3e-6 * np.abs(want).max()


class World:
    """W ranks in one process: every rank is a source with its own rows and the owner of a block of experts."""

    def __init__(self, seed, counts, bounds, top_k, block_rows=7, choose=None):
        rng = np.random.default_rng(seed)
        self.bounds, experts, self.top_k = np.array(bounds, np.int64), bounds[-1], top_k
        self.counts = np.array(counts, np.int64)
        self.w13 = draw(rng, experts, 2 * INNER, HIDDEN) / np.float32(HIDDEN**0.5)
        self.w2 = draw(rng, experts, HIDDEN, INNER) / np.float32(INNER**0.5)
        # One poisoned row behind each source's rows: reading it would show as NaN or as an impossible expert.
        self.x = [np.vstack([draw(rng, n, HIDDEN), np.full((1, HIDDEN), np.nan, np.float32)]) for n in counts]
        order = choose or (lambda n: rng.permuted(np.tile(np.arange(experts), (n, 1)), axis=1)[:, :top_k])
        self.ids = [np.vstack([order(n).reshape(n, top_k), np.zeros((1, top_k))]).astype(np.int32) for n in counts]
        self.weights = [np.abs(draw(rng, n + 1, top_k)) for n in counts]
        world = len(counts)
        self.partial = [np.full((self.counts.sum() + 1, HIDDEN), np.nan, np.float32) for _ in range(world)]
        self.offsets = [np.full(world + 1, -1, np.int64) for _ in range(world)]
        self.block_rows = block_rows

    @staticmethod
    def addresses(arrays):
        return np.array([array.ctypes.data for array in arrays], np.uint64)

    def own(self, rank):
        first, end = self.bounds[rank], self.bounds[rank + 1]
        rows = max(1, int(self.counts.sum()))
        sizes = {"top_k": self.top_k, "local_experts": int(end - first), "world": len(self.counts)}
        scratch = MoeScratch(rows, self.block_rows, HIDDEN, INNER, **sizes)
        owner_compute(
            self.addresses(self.ids), self.addresses(self.weights), self.addresses(self.x), self.counts, int(first),
            self.w13[first:end], self.w2[first:end], self.partial[rank], self.offsets[rank], scratch,
        )  # fmt: skip

    def combine(self, rank, out):
        n = self.counts[rank]
        start = np.array([offsets[rank] for offsets in self.offsets])
        made = np.array([offsets[rank + 1] - offsets[rank] for offsets in self.offsets])
        address = self.addresses(self.partial) + (start * HIDDEN * 4).astype(np.uint64)
        combine_sum(self.ids[rank][:n], self.bounds, address, out, made)

    def run(self):
        for rank in range(len(self.counts)):
            self.own(rank)
        outs = [np.ones((n, HIDDEN), np.float32) for n in self.counts]
        for rank, out in enumerate(outs):
            self.combine(rank, out)
        return outs

    def assert_equals_dense(self, outs):
        for rank, out in enumerate(outs):
            n = self.counts[rank]
            want = 1 + naive_moe(self.x[rank][:n], self.ids[rank][:n], self.weights[rank][:n], self.w13, self.w2)
            np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
        for partial, offsets in zip(self.partial, self.offsets, strict=True):
            assert np.isnan(partial[offsets[-1] :]).all()


@pytest.mark.parametrize(
    ("counts", "bounds"),
    [
        ([5], [0, 6]),
        ([13, 1, 40], [0, 2, 4, 6]),
        ([0, 9, 0, 3], [0, 3, 6, 8, 10]),  # uneven blocks of experts, empty sources
        ([0, 0], [0, 3, 6]),
        ([63, 113, 20, 1, 0], [0, 2, 4, 6, 7, 8]),
    ],
)
def test_exchange_equals_dense(counts, bounds):
    world = World(1, counts, bounds, top_k=3)
    world.assert_equals_dense(world.run())


@settings(max_examples=25)
@given(data=st.data())
def test_exchange_equals_dense_for_any_world(data):
    size = data.draw(st.integers(1, 5))
    counts = data.draw(st.lists(st.integers(0, 30), min_size=size, max_size=size))
    experts = data.draw(st.integers(size, 12))
    bounds = [rank * experts // size for rank in range(size + 1)]
    world = World(data.draw(st.integers(0, 99)), counts, bounds, top_k=data.draw(st.integers(1, min(4, experts))))
    world.assert_equals_dense(world.run())


def test_all_tokens_to_one_expert():
    world = World(2, [30, 0, 25], [0, 2, 4, 6], top_k=1, choose=lambda n: np.full((n, 1), 3))
    world.assert_equals_dense(world.run())
    assert [offsets[-1] for offsets in world.offsets] == [0, 55, 0]


def test_one_partial_row_for_all_experts_of_an_owner():
    world = World(3, [20, 20], [0, 4, 8], top_k=3, choose=lambda n: np.tile([1, 0, 2], (n, 1)))
    world.assert_equals_dense(world.run())
    assert [offsets.tolist() for offsets in world.offsets] == [[0, 20, 40], [0, 0, 0]]


def test_two_runs_give_the_same_bits_and_the_sum_has_one_order():
    first, second = World(4, [40, 33], [0, 4, 8], top_k=4), World(4, [40, 33], [0, 4, 8], top_k=4)
    assert [out.tobytes() for out in first.run()] == [out.tobytes() for out in second.run()]
    # Owners ascending: out + part 0 + part 1, whatever the order of the choices is.
    ids = np.array([[1, 0], [0, 1]], np.int32)
    parts = np.array([[[1]] * 2, [[-1e8]] * 2], np.float32)
    out = np.full((2, 1), 1e8, np.float32)
    bounds, made = np.array([0, 1, 2]), np.array([2, 2])
    combine_sum(ids, bounds, np.array([p.ctypes.data for p in parts], np.uint64), out, made)
    assert out.tolist() == [[0.0], [0.0]]  # (1e8 + 1) - 1e8 in f32; descending it would be 1


def test_owner_that_made_another_number_of_rows_is_named():
    world = World(5, [10, 6], [0, 3, 6], top_k=2)
    for rank in range(2):
        world.own(rank)
    world.offsets[1][1] += 1
    out = np.ones((10, HIDDEN), np.float32)
    with pytest.raises(FabricError, match="owner 1"):
        world.combine(0, out)
    assert (out == 1).all()


def test_plan_lists_sources_and_rows_ascending():
    ids = [np.array([[5, 2], [0, 1], [3, 2]], np.int32), np.array([[2, 3]], np.int32)]
    weights = [np.arange(6, dtype=np.float32), np.array([7, 8], np.float32)]
    starts, offsets = np.zeros(3, np.int64), np.zeros(3, np.int64)
    src, row, dest = np.full(8, -1, np.int32), np.full(8, -1, np.int32), np.full(8, -1, np.int64)
    weight = np.full(8, np.nan, np.float32)
    addresses = [np.array([a.ctypes.data for a in arrays], np.uint64) for arrays in (ids, weights)]
    count = plan_owner(*addresses, np.array([3, 1]), 2, 2, 2, starts, src, row, weight, dest, offsets)
    assert count == 5
    assert starts.tolist() == [0, 3, 5]
    assert src[:5].tolist() == [0, 0, 1, 0, 1]
    assert row[:5].tolist() == [0, 2, 0, 2, 0]
    assert weight[:5].tolist() == [1, 5, 7, 4, 8]
    assert dest[:5].tolist() == [0, 1, 2, 1, 2]
    assert offsets.tolist() == [0, 2, 3]
    assert (src[5:] == -1).all()
    with pytest.raises(ShapeError, match="5 entries do not fit into 4"):
        plan_owner(*addresses, np.array([3, 1]), 2, 2, 2, starts, src[:4], row[:4], weight[:4], dest[:4], offsets)


def test_rows_behind_2_31_elements(tmp_path):
    path = tmp_path / "rows"
    rows = np.memmap(path, np.float32, "w+", shape=(40_000, 65_536))  # 2.6e9 elements, sparse
    path.unlink()
    rows[39_999] = 3
    out = np.zeros((1, 65_536), np.float32)
    address = np.array([rows.ctypes.data], np.uint64)
    gather_rows(address, 65_536, np.zeros(1, np.int32), np.full(1, 39_999, np.int32), out)
    assert (out == 3).all()
    scatter_add(out, np.full(1, 2, np.float32), np.array([39_998]), rows)
    assert (rows[39_998] == 6).all()
    assert not rows[39_997].any()


def test_refuses_before_any_kernel():
    world = World(6, [10, 6], [0, 3, 6], top_k=2)
    good = {
        "ids_addr": world.addresses(world.ids),
        "weights_addr": world.addresses(world.weights),
        "rows_addr": world.addresses(world.x),
        "counts": world.counts,
        "first": 0,
        "w13": world.w13[:3],
        "w2": world.w2[:3],
        "partial": world.partial[0],
        "offsets": world.offsets[0],
        "scratch": MoeScratch(16, 4, HIDDEN, INNER, top_k=2, local_experts=3, world=2),
    }
    for change in [
        {"counts": np.array([10, 7])},
        {"counts": np.array([10, -1])},
        {"w2": world.w2[:2]},
        {"partial": world.partial[0][:15]},
        {"rows_addr": good["rows_addr"].astype(np.int64)},
        {"w13": world.w13, "w2": world.w2},
        {"offsets": world.offsets[0][:2].copy()},
    ]:
        with pytest.raises(ShapeError):
            owner_compute(**{**good, **change})
    assert np.isnan(world.partial[0]).all()
    logits = np.zeros((2, 6), np.float32)
    for top_k, groups, kept in [(7, 1, 1), (0, 1, 1), (2, 4, 1), (2, 3, 4), (3, 3, 1)]:
        with pytest.raises(ShapeError):
            run_route(logits, np.zeros(6, np.float32), top_k, num_groups=groups, topk_groups=kept)
