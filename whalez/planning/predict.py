"""How long a prompt would take in either lane, for `--lane auto` and for the reader of `whalez plan`.

With the member costs of policy.py, in units of unit_s, for N tokens in a world of R ranks:

    whale = (6 + supersteps) * launch_s + kda_layers * max_i kda + mla_layers * max_i mla + moe_layers * moe_row * N / R
    local = chunks * launch_s + kda_layers * kda_row * N + mla_layers * (mla_row * N + mla_pair * N (N + 1) / 2
            + mla_expand * sum of the chunks' starts) + moe_layers * moe_row * N / R

The routed experts of all tokens lie on the whole world in both lanes. In the local lane the poster does all the rest
alone, one chunk a launch, and expands its past again for every chunk. If only `cores` ranks can compute at the same
time, no layer is faster than its total over `cores`, and experts are spread over `cores`.
"""

from __future__ import annotations

from typing import NamedTuple

from whalez.planning.plan import GangPlan
from whalez.planning.policy import PlanPolicy
from whalez.planning.segments import slowest

#: Launches that pass between the post and the superstep on a quiet fleet: one to gather, one to answer, a slack of 4.
RENDEZVOUS_LAUNCHES = 6


class Lanes(NamedTuple):
    """Predicted seconds to the end of the prefill, in either lane."""

    whale_s: float
    local_s: float

    @property
    def whale_is_faster(self) -> bool:
        return self.whale_s < self.local_s


def predict_lanes(
    length: int, plan: GangPlan, policy: PlanPolicy, chunk_tokens: int, cores: int | None = None
) -> Lanes:
    """Seconds of the whale lane under `plan` and of the local lane, on a fleet that runs nothing else.

    cores: ranks of the world that can compute at the same time; None: all of them
    """
    cost = policy.cost
    parallel = policy.world if cores is None else max(1, min(cores, policy.world))
    kda, mla = slowest(plan.bounds, cost)
    kda_total = mla_total = 0.0
    for member in range(plan.width):
        start, rows = plan.bounds[member], plan.bounds[member + 1] - plan.bounds[member]
        kda_total += cost.kda_cost(member, plan.width, rows)
        mla_total += cost.mla_cost(start, rows)
    experts = cost.moe_layers * cost.moe_row * length / parallel
    whale = (
        cost.kda_layers * max(kda, kda_total / parallel) + cost.mla_layers * max(mla, mla_total / parallel) + experts
    )

    full_chunks, rest = divmod(length, chunk_tokens)
    starts = chunk_tokens * (full_chunks * (full_chunks - 1) // 2) + (full_chunks * chunk_tokens if rest else 0)
    alone = cost.kda_layers * cost.kda_row * length
    alone += cost.mla_layers * (cost.mla_cost(0, length) + cost.mla_expand * starts)
    return Lanes(
        whale_s=(RENDEZVOUS_LAUNCHES + plan.supersteps) * cost.launch_s + cost.unit_s * whale,
        local_s=(full_chunks + (1 if rest else 0)) * cost.launch_s + cost.unit_s * (alone + experts),
    )


def describe_plan(length: int, plan: GangPlan, policy: PlanPolicy) -> list[dict[str, int | float]]:
    """One row per member in context-parallel order, for people.

    rank, start, length       the segment
    kda_s, mla_s, moe_s       predicted seconds of its own work over all layers of that kind (moe: routed experts only)
    kda_share, mla_share      its work in such a layer over that of the slowest member, 1.0 for the slowest
    busy_s, wait_s            the three together, and what the rank waits for others in the superstep
    """
    assert length == plan.bounds[-1], (length, plan.bounds)
    cost = policy.cost
    kda_slowest, mla_slowest = slowest(plan.bounds, cost)
    moe_s = cost.unit_s * cost.moe_layers * cost.moe_row * length / policy.world
    superstep_s = cost.unit_s * (cost.kda_layers * kda_slowest + cost.mla_layers * mla_slowest) + moe_s
    members: list[dict[str, int | float]] = []
    for member, rank in enumerate(plan.gang):
        start, rows = plan.segment(rank)
        kda, mla = cost.kda_cost(member, plan.width, rows), cost.mla_cost(start, rows)
        kda_s, mla_s = cost.unit_s * cost.kda_layers * kda, cost.unit_s * cost.mla_layers * mla
        busy_s = kda_s + mla_s + moe_s
        members.append(
            {
                "rank": rank,
                "start": start,
                "length": rows,
                "kda_share": kda / kda_slowest,
                "mla_share": mla / mla_slowest,
                "kda_s": kda_s,
                "mla_s": mla_s,
                "moe_s": moe_s,
                "busy_s": busy_s,
                "wait_s": max(0.0, superstep_s - busy_s),
            }
        )
    return members
