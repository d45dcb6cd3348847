"""Router, SwiGLU and one expert's forward on the CPU.

Hot: yes, bench `ops_mla`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whalez.ops.checks import NDArray, require, require_that

_f32 = np.float32


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
    raise NotImplementedError


def swiglu(gate_up: NDArray, out: NDArray) -> None:
    """out = silu(gate) * up.

    Args:
        gate_up:  f32 [T, 2I]  gate in the first I columns, up in the last
        out:      f32 [T, I]
    Writes:   out, all rows
    Raises:   ShapeError before any kernel runs
    """
    raise NotImplementedError


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
    raise NotImplementedError
