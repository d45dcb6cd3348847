"""Pure policy: which prompts are whales, which ranks share them, who prefills which tokens, and what it would cost.

No clock, socket, thread, array library or environment: the sequencer decides with these functions and every member
decides again, on another host and another Python, and must come to the same answer.
"""

from whalez.errors import PlanDiffers
from whalez.planning.choice import PlanRefused, check_plan, plan_whale
from whalez.planning.placement import place_gang
from whalez.planning.plan import GangPlan
from whalez.planning.policy import K3_BUCKETS, CostModel, PlanPolicy
from whalez.planning.predict import Lanes, describe_plan, predict_lanes
from whalez.planning.segments import split_cost, split_segments
from whalez.planning.width import covering_bucket, rows_max, segment_cap, widths

__all__ = [
    "K3_BUCKETS",
    "CostModel",
    "GangPlan",
    "Lanes",
    "PlanDiffers",
    "PlanPolicy",
    "PlanRefused",
    "check_plan",
    "covering_bucket",
    "describe_plan",
    "place_gang",
    "plan_whale",
    "predict_lanes",
    "rows_max",
    "segment_cap",
    "split_cost",
    "split_segments",
    "widths",
]
