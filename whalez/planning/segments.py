"""Where one segment of a whale ends and the next begins.

Ranks pair at every MoE layer, so a superstep lasts the sum over layers of its slowest member. With kda and mla as in
policy.py, the split minimises

    kda_layers * max_i kda(i, n_i)  +  mla_layers * max_i mla(s_i, n_i)        floor <= n_i <= cap, sum n_i = length

(the experts add the same to every split). KDA wants equal segments, MLA long early and short deep ones; the best split
lies between. For two limits (k, a) on the two maxima, whether a split exists is decided greedily: a later start never
makes a given end dearer (mla_expand <= mla_row), so the ends that i members can reach are an interval, from i * floor
to the end reached when every member takes as many rows as the limits allow. k is tried on a grid of 1/256 between the
smallest that has a split and the one taken when a alone counts; for each k one test tells whether any a beats the best
so far, and only then a is bisected. The result is within 1 % of the best, and bounds are moved to multiples of 64 or
16 tokens where that costs at most another 1 %. A multiple of 64 keeps the KDA chunk grid of a rank alone.
"""

from __future__ import annotations

from functools import lru_cache

from whalez.planning.policy import CostModel, PlanPolicy
from whalez.planning.width import segment_cap

_KDA_STEP = 1 + 1 / 256
_PRECISION = 1 / 1024
_ALIGN_SLACK = 1 + 1 / 100
_GRAINS = (64, 16)

Bounds = tuple[int, ...]


def split_segments(length: int, width: int, policy: PlanPolicy) -> Bounds:
    """Token offsets of the segments, width + 1 of them from 0 to length. The width must admit the prompt (width.py)."""
    cap = segment_cap(length, width, policy)
    assert cap is not None, (length, width, policy.buckets)
    return _split(length, width, policy.segment_floor, cap, policy.cost)


def slowest(bounds: Bounds, cost: CostModel) -> tuple[float, float]:
    """Cost of one KDA layer and of one MLA layer for the member that is slowest in it."""
    width = len(bounds) - 1
    kda = max(cost.kda_cost(i, width, bounds[i + 1] - bounds[i]) for i in range(width))
    mla = max(cost.mla_cost(bounds[i], bounds[i + 1] - bounds[i]) for i in range(width))
    return kda, mla


def split_cost(bounds: Bounds, cost: CostModel) -> float:
    """What a split minimises, in units: the slowest member of every layer, without experts."""
    kda, mla = slowest(bounds, cost)
    return cost.kda_layers * kda + cost.mla_layers * mla


# The sequencer's process plans, rank 0's member checks, and a regathered post comes again: same question, same answer.
@lru_cache(maxsize=256)
def _split(length: int, width: int, floor: int, cap: int, cost: CostModel) -> Bounds:
    assert width * floor <= length <= width * cap, (length, width, floor, cap)
    if width == 1:
        return (0, length)
    search = _Search(length, width, floor, cap, cost)
    best = search.best()
    kda, mla = slowest(best, cost)
    for grain in _GRAINS:
        aligned = search.fit(kda * _ALIGN_SLACK, mla * _ALIGN_SLACK, grain)
        if aligned is not None and split_cost(aligned, cost) <= split_cost(best, cost) * _ALIGN_SLACK:
            return aligned
    return best


class _Search:
    def __init__(self, length: int, width: int, floor: int, cap: int, cost: CostModel) -> None:
        self.length = length
        self.width = width
        self.floor = floor
        self.cap = min(cap, length - (width - 1) * floor)
        self.cost = cost
        self.kda_rows = tuple(cost.kda_row_of(i, width) for i in range(width))
        # Limits that no split can reach stand for "no limit".
        self.kda_free = max(cost.kda_cost(i, width, self.cap) for i in range(width)) * 2
        self.mla_free = cost.mla_cost(length, self.cap) * 2

    def best(self) -> Bounds:
        """The cheapest split at single-token grain."""
        cost = self.cost
        even = self.least_kda()
        if cost.mla_layers == 0:
            return even
        free = self.least_mla(self.kda_free, self.mla_free, 0.0)
        assert free is not None, (self.length, self.width, self.floor, self.cap)
        if cost.kda_layers == 0:
            return free
        best, best_cost = min(((split, split_cost(split, cost)) for split in (even, free)), key=lambda pair: pair[1])
        mla_low = slowest(free, cost)[1] * (1 - 2 * _PRECISION)
        limits = [slowest(even, cost)[0]]
        kda_high = slowest(free, cost)[0]
        while limits[-1] < kda_high:
            limits.append(limits[-1] * _KDA_STEP)
        for stride in (32, 8, 1):  # coarse first: a good split early lets most limits fall at their first test
            for kda_limit in limits[::stride]:
                mla_limit = (best_cost * (1 - _PRECISION) - cost.kda_layers * kda_limit) / cost.mla_layers
                if mla_limit < mla_low:
                    break  # a higher KDA limit leaves even less
                split = self.least_mla(kda_limit, mla_limit, mla_low)
                if split is not None and split_cost(split, cost) < best_cost:
                    best, best_cost = split, split_cost(split, cost)
        return best

    def least_kda(self) -> Bounds:
        """The split whose slowest KDA member is fastest."""
        split = self.fit(self.kda_free, self.mla_free)
        assert split is not None, (self.length, self.width, self.floor, self.cap)
        low, high = 0.0, slowest(split, self.cost)[0]
        while high - low > high * _PRECISION / 4:
            middle = (low + high) / 2
            found = self.fit(middle, self.mla_free)
            if found is None:
                low = middle
            else:
                split, high = found, middle
        return split

    def least_mla(self, kda_limit: float, mla_limit: float, mla_low: float) -> Bounds | None:
        """The split under both limits whose slowest MLA member is fastest; None if there is none under them."""
        split = self.fit(kda_limit, mla_limit)
        if split is None:
            return None
        low, high = mla_low, min(mla_limit, slowest(split, self.cost)[1])
        while high - low > high * _PRECISION:
            middle = (low + high) / 2
            found = self.fit(kda_limit, middle)
            if found is None:
                low = middle
            else:
                split, high = found, min(middle, slowest(found, self.cost)[1])
        return split

    def fit(self, kda_limit: float, mla_limit: float, grain: int = 1) -> Bounds | None:
        """A split in which no member exceeds a limit, inner bounds at multiples of `grain`; None if none was found.

        With grain 1 none found means none exists.
        """
        cost, floor, width, length = self.cost, self.floor, self.width, self.length
        # The deepest start at which `floor` rows still keep to the MLA limit.
        room = mla_limit - cost.mla_cost(0, floor)
        per_start = cost.mla_pair * floor + cost.mla_expand
        if room < 0:
            return None
        deepest = length if room >= per_start * length else int(room / per_start)
        reach = [0]
        rows_allowed = []
        for i in range(width):
            rows = int(min(self.cap, (kda_limit - cost.package * i) / self.kda_rows[i]))
            start = min(reach[i], deepest)
            if rows < floor or start < i * floor:
                return None
            rows_allowed.append(rows)
            rows = min(rows, length - (width - 1 - i) * floor - start)
            if cost.mla_cost(start, rows) > mla_limit:
                rows = max(floor, self.rows_under(start, mla_limit))
            end = start + rows
            if i < width - 1:
                end -= end % grain
            reach.append(end)
        if reach[width] < length:
            return None
        bounds = [length]
        for i in range(width - 1, 0, -1):  # from the end: every member as short as those before it allow
            end = bounds[-1]
            start = min(reach[i], deepest, end - floor)
            start -= start % grain
            if grain > 1 and (
                start < i * floor or end - start > rows_allowed[i] or cost.mla_cost(start, end - start) > mla_limit
            ):
                return None
            bounds.append(start)
        if bounds[-1] > reach[1]:
            return None
        bounds.append(0)
        return tuple(reversed(bounds))

    def rows_under(self, start: int, mla_limit: float) -> int:
        """Most rows from `start` under the MLA limit.

        Solves mla(start, n) = limit, a n^2 + b n = c, by Newton's steps from the right of the root, where they fall
        monotonically: no square root, so no platform's math library.
        """
        cost = self.cost
        a = cost.mla_pair / 2
        b = cost.mla_row + cost.mla_pair * start + a
        c = mla_limit - cost.mla_expand * start
        rows = c / b
        while True:
            lower = (a * rows * rows + c) / (2 * a * rows + b)
            if rows - lower < 0.25:
                break
            rows = lower
        whole = int(lower)
        while whole > 0 and cost.mla_cost(start, whole) > mla_limit:
            whole -= 1
        return whole
