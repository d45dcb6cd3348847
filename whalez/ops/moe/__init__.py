"""Mixture of experts: router, SwiGLU, and both ends of the expert exchange (README.md)."""

from whalez.ops.moe.exchange import (
    MoeScratch,
    combine_sum,
    gather_rows,
    owner_compute,
    plan_owner,
    scatter_add,
)
from whalez.ops.moe.host import expert_forward, route, swiglu

__all__ = [
    "MoeScratch",
    "combine_sum",
    "expert_forward",
    "gather_rows",
    "owner_compute",
    "plan_owner",
    "route",
    "scatter_add",
    "swiglu",
]
