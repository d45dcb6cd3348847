"""`whalez plan` refuses what no fleet would take, by name."""

from pathlib import Path

import pytest

from whalez.engine.preview import plan_lines
from whalez.errors import ConfigError
from whalez.model.presets import make_checkpoint


def test_a_plan_no_fleet_would_take_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "kimi-linear", "tiny", 0)
    assert "gang of 4 of 4 ranks" in next(plan_lines(tmp_path, 4095, 4, 0, {"max_ctx": 4096}))
    with pytest.raises(ConfigError, match="tokens: expected fewer than max_ctx = 4096, got 4096"):
        next(plan_lines(tmp_path, 4096, 4, 0, {"max_ctx": 4096}))
    with pytest.raises(ConfigError, match="world: expected at most 8"):
        next(plan_lines(tmp_path, 2000, 9, 0, {}))


def test_the_lane_is_that_of_ranks_that_share_cores(tmp_path: Path) -> None:
    """As a running fleet chooses it: four ranks on two cores gain less from a gang."""
    make_checkpoint(tmp_path, "kimi-linear", "tiny", 0)
    said = {cores: list(plan_lines(tmp_path, 550, 4, 0, {}, cores))[-1] for cores in (None, 4, 2)}
    assert said[None] == said[4]
    assert said[2].startswith("predicted prefill of 4 ranks on 2 cores: whale ")
    assert said[4].endswith("--lane auto takes whale") and said[2].endswith("--lane auto takes local")
