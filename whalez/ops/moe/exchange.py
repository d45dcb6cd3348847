"""Both ends of the expert exchange: what an owner computes for all sources, and what a source adds up of all owners.

Peers' regions are raw addresses (uint64 [W], one per rank in rank order), so a slab may be anywhere. The rows of one owner's
partial region lie source after source; inside a source they are numbered in the order of those of its tokens that chose at
least one of the owner's experts. The source finds the same numbers from its own ids, so no index travels (README.md).

Sums have one order: experts ascending inside an owner, owners ascending at the source.

Hot: yes, bench `ops_mla`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whalez.ops.checks import NDArray, require, require_that

_f32 = np.float32


class MoeScratch:
    """Everything owner_compute and combine_sum write besides their results, sized once and reused by every layer and launch.

    Args:
        rows_max_total:  most rows all sources together may send in one launch (world * rows_max)
        block_rows:      rows of one expert computed at a time
        hidden:          D
        intermediate:    I
        top_k:           experts per token
        local_experts:   experts of this owner
        world:           number of ranks
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
        raise NotImplementedError


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
    raise NotImplementedError


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
    Raises:   ShapeError before any kernel runs; FabricError, with out unchanged, if an owner made another number of rows than
              our ids ask of it
    """
    raise NotImplementedError


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
    raise NotImplementedError


def gather_rows(rows_addr: NDArray, hidden: int, src: NDArray, row: NDArray, out: NDArray) -> None:
    """out[i] = row `row[i]` of source `src[i]`.

    Args:
        rows_addr:  uint64 [W]   address of each source's f32 [rows, hidden]
        src, row:   int32 [n]
        out:        f32 [n, hidden]
    """
    raise NotImplementedError


def scatter_add(y: NDArray, weight: NDArray, dest: NDArray, partial: NDArray) -> None:
    """partial[dest[i]] += weight[i] * y[i], i ascending.

    Args:
        y:        f32 [n, D]
        weight:   f32 [n]
        dest:     int64 [n]   inside partial
        partial:  f32 [M, D]  in/out
    """
    raise NotImplementedError
