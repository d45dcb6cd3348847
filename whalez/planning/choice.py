"""The plan of a whale: chosen once by the sequencer, recomputed by every member.

plan_whale takes the widest width that admits the prompt and has a block free of excluded ranks, and levels it.
Everything in the plan is a function of (length, poster, policy, excluded); a member that computes another plan refuses
by field.
"""

from __future__ import annotations

from collections.abc import Set

import msgspec

from whalez.errors import PlanDiffers
from whalez.planning.placement import place_gang
from whalez.planning.plan import GangPlan
from whalez.planning.policy import PlanPolicy
from whalez.planning.segments import split_segments
from whalez.planning.width import why_not_width, widths


class PlanRefused(msgspec.Struct, frozen=True, kw_only=True):
    """No gang for this prompt; it is prefilled locally.

    reason: a sentence for the client's report
    field:  the setting or circumstance that refuses: poster, world, whale_min, segment_floor, buckets or excluded
    """

    reason: str
    field: str


def plan_whale(
    length: int, poster: int, policy: PlanPolicy, excluded: Set[int] = frozenset()
) -> GangPlan | PlanRefused:
    """Choose gang and segments for a prompt of `length` tokens posted at rank `poster`.

    excluded: ranks that must not take part (they declined or drain)
    """
    if not 0 <= poster < policy.world:
        return PlanRefused(field="poster", reason=f"rank {poster} is not in this world of {policy.world}")
    if poster in excluded:
        return PlanRefused(field="excluded", reason=f"the poster, rank {poster}, itself takes no part")
    if policy.world < 2:
        return PlanRefused(field="world", reason="a gang needs at least 2 ranks, this world has 1")
    if length < policy.whale_min:
        return PlanRefused(
            field="whale_min", reason=f"{length} tokens are below the smallest whale, {policy.whale_min} tokens"
        )
    refusals = []
    for width in widths(policy.world):
        refusal = why_not_width(length, width, policy)
        if refusal is None:
            gang = place_gang(width, poster, policy.world, policy.node_ranks, excluded)
            if gang is not None:
                return GangPlan(gang=gang, bounds=split_segments(length, width, policy))
            refusal = "excluded", f"width {width}: every block with rank {poster} holds an excluded rank"
        refusals.append(refusal)
    # whale_min >= 2 * segment_floor: the narrowest width is never refused for its floor, so its reason is the real one.
    field = refusals[-1][0]
    if any(name == "excluded" for name, _ in refusals):
        field = "excluded"
    return PlanRefused(field=field, reason="; ".join(sentence for _, sentence in refusals))


def check_plan(plan: GangPlan, length: int, poster: int, policy: PlanPolicy, excluded: Set[int] | None = None) -> None:
    """Recompute a plan that came over the wire and refuse a difference.

    excluded: the decliners, if known. A member that does not know them passes None: every rank outside the gang then
              counts as excluded, which gives the same plan (placement.py) and leaves only the width to trust.
    Raises: PlanDiffers naming the first field that differs; any plan at all may be passed.
    """
    if excluded is None:
        excluded = frozenset(range(policy.world)) - frozenset(plan.gang)
    expected = plan_whale(length, poster, policy, excluded)
    if isinstance(expected, PlanRefused):
        raise PlanDiffers("gang", f"none, {expected.field}: {expected.reason}", plan.gang)
    for field in GangPlan.__struct_fields__:
        if getattr(plan, field) != getattr(expected, field):
            raise PlanDiffers(field, getattr(expected, field), getattr(plan, field))
