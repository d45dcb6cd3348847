"""lse_merge on the CPU: one pass over the rows, the smaller exponential only, no division by zero.

Hot: yes, `python bench/ops_mla.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, njit, void

from whalez.errors import ShapeError
from whalez.ops.checks import NDArray, reads, require, writes

_f32 = np.float32


@njit(
    void(writes(float32, 3), writes(float32, 2), reads(float32, 3), reads(float32, 2), float32), cache=True, nogil=True
)
def _merge(acc: Any, acc_lse: Any, part: Any, part_lse: Any, to_natural: Any) -> None:
    for t in range(acc.shape[0]):
        for h in range(acc.shape[1]):
            b = part_lse[t, h] * to_natural
            if b == -np.inf:
                if acc_lse[t, h] == -np.inf:
                    acc[t, h, :] = _f32(0.0)  # an empty side may hold anything
                continue
            a = acc_lse[t, h]
            if a == -np.inf:
                # Copied, not multiplied by one: a context of one window must keep its bits.
                acc[t, h, :] = part[t, h, :]
                acc_lse[t, h] = b
                continue
            gap = -abs(a - b)
            small = math.exp(gap)  # in [0, 1]: the larger side is the unit, so nothing can overflow
            total = _f32(1.0) + small
            big_share = _f32(1.0) / total
            small_share = small / total
            if a >= b:
                share_a, share_b, top = big_share, small_share, a
            else:
                share_a, share_b, top = small_share, big_share, b
            for i in range(acc.shape[2]):
                acc[t, h, i] = acc[t, h, i] * share_a + part[t, h, i] * share_b
            acc_lse[t, h] = top + math.log1p(small)


def lse_merge(acc: NDArray, acc_lse: NDArray, part: NDArray, part_lse: NDArray, *, part_base: float = math.e) -> None:
    """acc <- average over both key sets, acc_lse <- log(exp(acc_lse) + exp(part_lse)).

    Args:
        acc:       f32 [T, H, V]  in/out; may hold anything (NaN too) where acc_lse is -inf
        acc_lse:   f32 [T, H]     in/out, natural log; -inf marks an empty row
        part:      f32 [T, H, V]  result over a disjoint key set
        part_lse:  f32 [T, H]     natural log, or log2 with part_base=2.0
        part_base: e or 2.0, the base of part_lse; whalez's own ops write natural logs only. A lse of another base
                   cannot be told from its values, so a caller with a foreign kernel has to name it.
    Writes:   acc and acc_lse, all rows. Two empty sides give 0 and -inf; a part merged into an empty acc keeps its bits
    Raises:   ShapeError before any kernel runs
    """
    require("acc", acc, _f32, (-1, -1, -1))
    t, h, v = acc.shape
    require("acc_lse", acc_lse, _f32, (t, h))
    require("part", part, _f32, (t, h, v))
    require("part_lse", part_lse, _f32, (t, h))
    if part_base not in (math.e, 2.0):
        raise ShapeError(f"part_base: expected e or 2.0, got {part_base}")
    _merge(acc, acc_lse, part, part_lse, _f32(math.log(part_base)))
