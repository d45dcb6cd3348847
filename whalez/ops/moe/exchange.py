"""Both ends of the expert exchange: what an owner computes for all sources, and what a source adds up of all owners.

Peers' regions are raw addresses (uint64 [W], one per rank in rank order), so a slab may be anywhere. The rows of one
owner's partial region lie source after source; inside a source they are numbered in the order of those of its tokens
that chose at least one of the owner's experts. The source finds the same numbers from its own ids, so no index travels.

Sums have one order: experts ascending inside an owner, owners ascending at the source.

Hot: yes, `python bench/ops_mla.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, carray, float32, int32, int64, njit, types, uint64, void
from numba.extending import intrinsic

from whalez.errors import FabricError, ShapeError
from whalez.ops.checks import NDArray, reads, require, require_that, writes
from whalez.ops.moe.host import expert_forward

_f32 = np.float32


def _pointer_to(dtype: Any) -> Any:
    """An intrinsic that makes a raw address a pointer to `dtype`, for carray."""
    pointer = types.CPointer(dtype)

    @intrinsic
    def at(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(uint64), codegen

    return at


_as_f32 = _pointer_to(float32)
_as_i32 = _pointer_to(int32)


@njit(
    int64(
        reads(uint64, 1),
        reads(uint64, 1),
        reads(int64, 1),
        int64,
        int64,
        int64,
        writes(int64, 1),
        writes(int32, 1),
        writes(int32, 1),
        writes(float32, 1),
        writes(int64, 1),
        writes(int64, 1),
    ),
    cache=True,
    nogil=True,
)
def _plan(
    ids_addr: Any,
    weights_addr: Any,
    counts: Any,
    top_k: Any,
    first: Any,
    count_local: Any,
    starts: Any,
    src: Any,
    row: Any,
    weight: Any,
    dest: Any,
    offsets: Any,
) -> Any:
    """Fill the plan; returns the number of entries, or its negative (nothing filled) if they do not fit."""
    next_entry = np.zeros(count_local + 1, np.int64)
    for s in range(counts.shape[0]):
        if counts[s] > 0:
            ids = carray(_as_i32(ids_addr[s]), (counts[s] * top_k,))
            for i in range(counts[s] * top_k):
                local = np.int64(ids[i]) - first
                if 0 <= local < count_local:
                    next_entry[local + 1] += 1
    for e in range(count_local):
        next_entry[e + 1] += next_entry[e]
    entries = next_entry[count_local]
    if entries > src.shape[0]:
        return -entries
    starts[:] = next_entry
    partial_row = np.int64(0)
    for s in range(counts.shape[0]):
        offsets[s] = partial_row
        if counts[s] > 0:
            ids = carray(_as_i32(ids_addr[s]), (counts[s] * top_k,))
            weights = carray(_as_f32(weights_addr[s]), (counts[s] * top_k,))
            for t in range(counts[s]):
                ours = False
                for i in range(t * top_k, (t + 1) * top_k):
                    local = np.int64(ids[i]) - first
                    if 0 <= local < count_local:
                        entry = next_entry[local]
                        next_entry[local] += 1
                        src[entry] = s
                        row[entry] = t
                        weight[entry] = weights[i]
                        dest[entry] = partial_row
                        ours = True
                if ours:
                    partial_row += 1
    offsets[counts.shape[0]] = partial_row
    return entries


@njit(
    void(reads(uint64, 1), reads(int32, 1), reads(int32, 1), writes(float32, 2)),
    cache=True,
    nogil=True,
)
def _gather(rows_addr: Any, src: Any, row: Any, out: Any) -> None:
    hidden = out.shape[1]
    for i in range(out.shape[0]):
        start = rows_addr[src[i]] + np.uint64(np.int64(row[i]) * hidden * 4)
        out[i, :] = carray(_as_f32(start), (hidden,))


@njit(
    void(reads(float32, 2), reads(float32, 1), reads(int64, 1), writes(float32, 2)),
    cache=True,
    nogil=True,
)
def _scatter_add(y: Any, weight: Any, dest: Any, partial: Any) -> None:
    for i in range(y.shape[0]):
        into = partial[dest[i]]
        for j in range(y.shape[1]):
            into[j] += weight[i] * y[i, j]


@njit(boolean(reads(int32, 2), int64, int64, int64), cache=True, nogil=True)
def _asks(ids: Any, t: Any, first: Any, end: Any) -> Any:
    for i in range(ids.shape[1]):  # noqa: SIM110 - numba has no generator expressions
        if first <= ids[t, i] < end:
            return True
    return False


@njit(int64(reads(int32, 2), reads(int64, 1), reads(int64, 1)), cache=True, nogil=True)
def _first_wrong_owner(ids: Any, bounds: Any, partial_counts: Any) -> Any:
    for w in range(partial_counts.shape[0]):
        asked = np.int64(0)
        for t in range(ids.shape[0]):
            asked += _asks(ids, t, bounds[w], bounds[w + 1])
        if asked != partial_counts[w]:
            return w
    return -1


@njit(
    void(reads(int32, 2), reads(int64, 1), reads(uint64, 1), writes(float32, 2)),
    cache=True,
    nogil=True,
)
def _combine(ids: Any, bounds: Any, partial_addr: Any, out: Any) -> None:
    hidden = out.shape[1]
    next_addr = partial_addr.copy()
    for t in range(ids.shape[0]):
        into = out[t]
        for w in range(partial_addr.shape[0]):
            if _asks(ids, t, bounds[w], bounds[w + 1]):
                part = carray(_as_f32(next_addr[w]), (hidden,))
                for j in range(hidden):
                    into[j] += part[j]
                next_addr[w] += np.uint64(hidden * 4)


class MoeScratch:
    """All that owner_compute writes besides its results; made once and used for every layer and launch.

    Args:
        rows_max_total:  most rows all sources together may send in one launch (world * rows_max)
        block_rows:      rows of one expert computed at a time
        hidden:          D
        intermediate:    I
        top_k:           experts per token
        local_experts:   experts of this owner
        world:           number of sources
    """

    def __init__(
        self,
        rows_max_total: int,
        block_rows: int,
        hidden: int,
        intermediate: int,
        *,
        top_k: int,
        local_experts: int,
        world: int,
    ) -> None:
        require_that(
            min(rows_max_total, block_rows, hidden, intermediate, top_k, local_experts, world) > 0,
            f"MoeScratch: expected sizes of at least 1, got rows_max_total={rows_max_total}, block_rows={block_rows}, "
            f"hidden={hidden}, intermediate={intermediate}, top_k={top_k}, local_experts={local_experts}, "
            f"world={world}",
        )
        # A token names an expert once, so it makes no more entries here than there are experts here.
        entries = rows_max_total * min(top_k, local_experts)
        self.rows_max_total = rows_max_total
        self.block_rows = block_rows
        self.top_k = top_k
        self.world = world
        self.starts = np.empty(local_experts + 1, np.int64)
        self.src = np.empty(entries, np.int32)
        self.row = np.empty(entries, np.int32)
        self.weight = np.empty(entries, _f32)
        self.dest = np.empty(entries, np.int64)
        self.x = np.empty((block_rows, hidden), _f32)
        self.h = np.empty((block_rows, 2 * intermediate), _f32)
        self.a = np.empty((block_rows, intermediate), _f32)
        self.y = np.empty((block_rows, hidden), _f32)


def owner_compute(
    ids_addr: NDArray,
    weights_addr: NDArray,
    rows_addr: NDArray,
    counts: NDArray,
    first: int,
    w13: NDArray,
    w2: NDArray,
    partial: NDArray,
    offsets: NDArray,
    scratch: MoeScratch,
) -> None:
    """partial[row of (source, token)] = sum over this owner's experts e of the token: weight_e * expert_e(x).

    Args:
        ids_addr:      uint64 [W]  address of each source's int32 [counts[s], k]
        weights_addr:  uint64 [W]  address of each source's f32 [counts[s], k]
        rows_addr:     uint64 [W]  address of each source's f32 [counts[s], D]
        counts:        int64 [W]   rows of each source; zero is fine, its addresses are then never read
        first:         global id of w13[0]'s expert
        w13:           f32 [E_local, 2I, D]
        w2:            f32 [E_local, D, I]
        partial:       f32 [M, D]    out, M >= every row the sources sent (world * rows_max)
        offsets:       int64 [W+1]   out; rows of source s are partial[offsets[s] : offsets[s + 1]]
        scratch:       see MoeScratch
    Writes:   partial[: offsets[W]] and offsets; rows beyond stay as they are
    Order:    the caller has acquired every source's dispatch bell; it rings combine afterwards
    Raises:   ShapeError before any kernel runs (more rows than the scratch or `partial` can hold included)
    """
    world = counts.shape[0]
    experts, _, hidden = w13.shape
    require("w13", w13, _f32, (experts, scratch.h.shape[1], scratch.x.shape[1]))
    require("w2", w2, _f32, (experts, hidden, scratch.a.shape[1]))
    require("rows_addr", rows_addr, np.uint64, (world,))
    require("partial", partial, _f32, (-1, hidden))
    require_that(
        scratch.starts.shape[0] == experts + 1 and scratch.world == world,
        f"scratch: made for {scratch.starts.shape[0] - 1} experts and {scratch.world} ranks, got {experts} and {world}",
    )
    total = int(counts.sum())
    require_that(
        total <= min(scratch.rows_max_total, partial.shape[0]),
        f"counts: {total} rows, the scratch takes {scratch.rows_max_total} and partial {partial.shape[0]}",
    )
    plan = scratch.starts, scratch.src, scratch.row, scratch.weight, scratch.dest
    plan_owner(ids_addr, weights_addr, counts, scratch.top_k, first, experts, *plan, offsets)
    partial[: offsets[world]] = 0
    for e in range(experts):
        begin, end = int(scratch.starts[e]), int(scratch.starts[e + 1])
        for i in range(begin, end, scratch.block_rows):
            n = min(scratch.block_rows, end - i)
            x, y = scratch.x[:n], scratch.y[:n]
            _gather(rows_addr, scratch.src[i : i + n], scratch.row[i : i + n], x)
            expert_forward(w13[e], w2[e], x, scratch.h[:n], scratch.a[:n], y)
            _scatter_add(y, scratch.weight[i : i + n], scratch.dest[i : i + n], partial)


def combine_sum(ids: NDArray, bounds: NDArray, partial_addr: NDArray, out: NDArray, partial_counts: NDArray) -> None:
    """out[t] += the partial rows of token t, owners ascending.

    Args:
        ids:             int32 [T, k]  own choices as published
        bounds:          int64 [W+1]   owner w has the experts [bounds[w], bounds[w + 1])
        partial_addr:    uint64 [W]    address of the f32 [partial_counts[w], D] that owner w made for this source,
                                       that is its partial region + offsets[me] rows
        out:             f32 [T, D]    in/out
        partial_counts:  int64 [W]     offsets[me + 1] - offsets[me] of each owner
    Writes:   out, rows of tokens with at least one expert
    Raises:   ShapeError before any kernel runs; FabricError, with out unchanged, if an owner made another number of
              rows than our ids ask of it
    """
    world = partial_addr.shape[0]
    require("ids", ids, np.int32, (-1, -1))
    require("bounds", bounds, np.int64, (world + 1,))
    require("partial_addr", partial_addr, np.uint64, (world,))
    require("partial_counts", partial_counts, np.int64, (world,))
    require("out", out, _f32, (ids.shape[0], -1))
    wrong = _first_wrong_owner(ids, bounds, partial_counts)
    if wrong >= 0:
        raise FabricError(
            f"owner {wrong} made {int(partial_counts[wrong])} partial rows for this rank, but another number of its "
            f"{ids.shape[0]} tokens chose one of the experts {int(bounds[wrong])}..{int(bounds[wrong + 1]) - 1}"
        )
    _combine(ids, bounds, partial_addr, out)


def plan_owner(
    ids_addr: NDArray,
    weights_addr: NDArray,
    counts: NDArray,
    top_k: int,
    first: int,
    count_local: int,
    starts: NDArray,
    src: NDArray,
    row: NDArray,
    weight: NDArray,
    dest: NDArray,
    offsets: NDArray,
) -> int:
    """List, for each local expert, which rows of which source it computes and where its results are added.

    Args:
        ids_addr, weights_addr, counts:  as in owner_compute
        first, count_local:              this owner's experts are [first, first + count_local)
        starts:   int64 [count_local + 1]  out, CSR: entries of local expert e are [starts[e], starts[e + 1])
        src:      int32 [n]    out, source of each entry; entries of one expert ascend by (source, row)
        row:      int32 [n]    out, row in that source
        weight:   f32 [n]      out
        dest:     int64 [n]    out, row of the partial region
        offsets:  int64 [W+1]  out, first partial row of each source
    Returns:
        number of entries; n must be at least that (sum(counts) * top_k always suffices)
    Raises:   ShapeError before anything is written if n is too small
    """
    world = counts.shape[0]
    require("counts", counts, np.int64, (world,))
    require("ids_addr", ids_addr, np.uint64, (world,))
    require("weights_addr", weights_addr, np.uint64, (world,))
    require("starts", starts, np.int64, (count_local + 1,))
    require("src", src, np.int32, (-1,))
    require("row", row, np.int32, src.shape)
    require("weight", weight, _f32, src.shape)
    require("dest", dest, np.int64, src.shape)
    require("offsets", offsets, np.int64, (world + 1,))
    require_that(not world or int(counts.min()) >= 0, f"counts: expected no negative one, got {counts.tolist()}")
    entries = int(
        _plan(ids_addr, weights_addr, counts, top_k, first, count_local, starts, src, row, weight, dest, offsets)
    )
    if entries < 0:
        raise ShapeError(f"src: {-entries} entries do not fit into {src.shape[0]}")
    return entries


def gather_rows(rows_addr: NDArray, hidden: int, src: NDArray, row: NDArray, out: NDArray) -> None:
    """out[i] = row `row[i]` of source `src[i]`.

    Args:
        rows_addr:  uint64 [W]   address of each source's f32 [rows, hidden]
        src, row:   int32 [n]
        out:        f32 [n, hidden]
    """
    rows = out.shape[0]
    require("rows_addr", rows_addr, np.uint64, (-1,))
    require("src", src, np.int32, (rows,))
    require("row", row, np.int32, (rows,))
    require("out", out, _f32, (rows, hidden))
    _gather(rows_addr, src, row, out)


def scatter_add(y: NDArray, weight: NDArray, dest: NDArray, partial: NDArray) -> None:
    """partial[dest[i]] += weight[i] * y[i], i ascending.

    Args:
        y:        f32 [n, D]
        weight:   f32 [n]
        dest:     int64 [n]   inside partial
        partial:  f32 [M, D]  in/out
    """
    require("y", y, _f32, (-1, -1))
    require("weight", weight, _f32, (y.shape[0],))
    require("dest", dest, np.int64, (y.shape[0],))
    require("partial", partial, _f32, (-1, y.shape[1]))
    _scatter_add(y, weight, dest, partial)
