"""What the composition root of a rank hands to its parts, and what it leaves when it fails."""

from __future__ import annotations

from whalez.config import FleetConfig
from whalez.engine.sizing import plan_policy
from whalez.model.config import KimiLinearConfig
from whalez.model.presets import PRESETS
from whalez.rank import make_sequencer


def test_the_gather_deadline_of_the_settings_reaches_the_sequencer() -> None:
    fleet = FleetConfig(world=4, node_ranks=4, gather_deadline_s=7.5)
    policy = plan_policy(KimiLinearConfig.from_json(PRESETS["tiny"]), fleet)
    assert make_sequencer(fleet, policy).deadline_ns == 7_500_000_000
