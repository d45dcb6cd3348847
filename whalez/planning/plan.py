"""The plan of one whale: what the sequencer chooses once and every member recomputes."""

from __future__ import annotations

import msgspec


class GangPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who prefills which tokens of one whale.

    gang:       ranks in context-parallel order; the poster is always the last
    bounds:     len(gang) + 1 token offsets; member i prefills tokens bounds[i]:bounds[i+1]
    supersteps: launches the whale occupies
    balancing:  how bounds were chosen ("leveled")
    fan_in:     how KDA packages travel ("all": every member folds all of its upstream)
    """

    gang: tuple[int, ...]
    bounds: tuple[int, ...]
    supersteps: int = 1
    balancing: str = "leveled"
    fan_in: str = "all"

    @property
    def width(self) -> int:
        return len(self.gang)

    @property
    def poster(self) -> int:
        return self.gang[-1]

    def segment(self, rank: int) -> tuple[int, int]:
        """First token and length of this rank's segment. Raises ValueError for a rank outside the gang."""
        i = self.gang.index(rank)
        return self.bounds[i], self.bounds[i + 1] - self.bounds[i]
