"""Fold two attention results over disjoint key sets into one by their log-sum-exps (README.md)."""

from whalez.ops.lse.host import lse_merge

__all__ = ["lse_merge"]
