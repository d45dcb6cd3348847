"""Router, SwiGLU and one expert's forward on the CPU.

Hot: yes, `python bench/ops_mla.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, int32, int64, njit, void

from whalez.ops.checks import NDArray, reads, require, require_that, writes
from whalez.ops.fastmath import sigmoid_f32, silu_f32

_f32 = np.float32


@njit(cache=True, nogil=True)
def _take_best(score: Any, taken: Any) -> Any:
    """Index of the greatest score not taken yet, the lowest of equal ones; marks it taken. NaN counts as the least."""
    best = -1
    for e in range(score.shape[0]):
        if not taken[e] and (
            best < 0 or score[e] > score[best] or (score[best] != score[best] and score[e] == score[e])
        ):
            best = e
    taken[best] = True
    return best


@njit(
    void(
        reads(float32, 2),
        reads(float32, 1),
        boolean,
        float32,
        int64,
        int64,
        writes(int32, 2),
        writes(float32, 2),
    ),
    cache=True,
    nogil=True,
)
def _route(
    logits: Any, bias: Any, renormalize: Any, scaling: Any, num_groups: Any, topk_groups: Any, ids: Any, weights: Any
) -> None:
    tokens, experts = logits.shape
    top_k = ids.shape[1]
    group_size = experts // num_groups
    share = np.empty(experts, _f32)
    choice = np.empty(experts, _f32)
    taken = np.empty(experts, np.bool_)
    group_score = np.empty(num_groups, _f32)
    group_kept = np.empty(num_groups, np.bool_)
    for t in range(tokens):
        for e in range(experts):
            share[e] = sigmoid_f32(logits[t, e])
        for e in range(experts):
            choice[e] = share[e] + bias[e]
        taken[:] = False
        if num_groups > 1:
            for g in range(num_groups):
                group = choice[g * group_size : (g + 1) * group_size]
                group_taken = taken[g * group_size : (g + 1) * group_size]
                group_score[g] = group[_take_best(group, group_taken)]
                if group_size > 1:
                    group_score[g] += group[_take_best(group, group_taken)]
            group_kept[:] = False
            for _ in range(topk_groups):
                _take_best(group_score, group_kept)
            for e in range(experts):
                taken[e] = not group_kept[e // group_size]
        total = _f32(0.0)
        for i in range(top_k):
            e = _take_best(choice, taken)
            ids[t, i] = e
            weights[t, i] = share[e]
            total += share[e]
        factor = scaling / (total + _f32(1e-20)) if renormalize else scaling
        for i in range(top_k):
            weights[t, i] *= factor


@njit(void(reads(float32, 2), writes(float32, 2)), cache=True, nogil=True)
def _swiglu(gate_up: Any, out: Any) -> None:
    width = out.shape[1]
    for t in range(out.shape[0]):
        for i in range(width):
            out[t, i] = silu_f32(gate_up[t, i]) * gate_up[t, width + i]


def route(
    logits: NDArray,
    bias: NDArray,
    top_k: int,
    renormalize: bool,
    scaling: float,
    num_groups: int,
    topk_groups: int,
    ids: NDArray,
    weights: NDArray,
) -> None:
    """Choose each token's experts by sigmoid(logits) + bias; weigh them by sigmoid(logits) alone.

    Args:
        logits:       f32 [T, E]
        bias:         f32 [E]       correction bias, used for the choice only
        top_k:        experts per token
        renormalize:  divide the weights of a token by their sum (+ 1e-20)
        scaling:      multiplies the weights last
        num_groups:   E is cut into this many equal groups; 1 switches the group step off
        topk_groups:  groups kept, by the sum of the two best biased scores of each
        ids:          int32 [T, k]  best first; of equal scores the lowest expert (and group) first
        weights:      f32 [T, k]    in the order of ids
    Writes:   ids and weights, all rows; the ids of a token differ, also for NaN logits (whose weights are NaN)
    Raises:   ShapeError before any kernel runs
    """
    require("logits", logits, _f32, (-1, -1))
    tokens, experts = logits.shape
    require("bias", bias, _f32, (experts,))
    require("ids", ids, np.int32, (tokens, top_k))
    require("weights", weights, _f32, (tokens, top_k))
    require_that(
        num_groups > 0 and experts % num_groups == 0, f"num_groups: expected a divisor of {experts}, got {num_groups}"
    )
    require_that(0 < topk_groups <= num_groups, f"topk_groups: expected 1..{num_groups}, got {topk_groups}")
    allowed = topk_groups * (experts // num_groups)
    require_that(0 < top_k <= allowed, f"top_k: expected 1..{allowed}, got {top_k}")
    _route(logits, bias, renormalize, _f32(scaling), num_groups, topk_groups, ids, weights)


def swiglu(gate_up: NDArray, out: NDArray) -> None:
    """out = silu(gate) * up.

    Args:
        gate_up:  f32 [T, 2I]  gate in the first I columns, up in the last
        out:      f32 [T, I]
    Writes:   out, all rows
    Raises:   ShapeError before any kernel runs
    """
    require("out", out, _f32, (-1, -1))
    require("gate_up", gate_up, _f32, (out.shape[0], 2 * out.shape[1]))
    _swiglu(gate_up, out)


def expert_forward(w13: NDArray, w2: NDArray, x: NDArray, scratch_h: NDArray, scratch_a: NDArray, y: NDArray) -> None:
    """y = w2 (silu(w1 x) * (w3 x)), for the rows of one expert.

    Args:
        w13:        f32 [2I, D]  w1 (gate) above w3 (up)
        w2:         f32 [D, I]
        x:          f32 [n, D]
        scratch_h:  f32 [n, 2I]  overwritten
        scratch_a:  f32 [n, I]   overwritten
        y:          f32 [n, D]
    Writes:   y, all rows
    Raises:   ShapeError before any kernel runs
    """
    require("w13", w13, _f32, (-1, -1))
    inner, hidden = w13.shape[0] // 2, w13.shape[1]
    rows = x.shape[0]
    require("w13", w13, _f32, (2 * inner, hidden))
    require("w2", w2, _f32, (hidden, inner))
    require("x", x, _f32, (rows, hidden))
    require("scratch_h", scratch_h, _f32, (rows, 2 * inner))
    require("scratch_a", scratch_a, _f32, (rows, inner))
    require("y", y, _f32, (rows, hidden))
    np.matmul(x, w13.T, out=scratch_h)
    _swiglu(scratch_h, scratch_a)
    np.matmul(scratch_a, w2.T, out=y)
