"""Settings: refused by name, merged in order, and found in every launcher's environment."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from whalez.config import (
    FleetConfig,
    Placement,
    RankConfig,
    fleet_config,
    fleet_options,
    placement_from_environment,
    setting_flags,
)
from whalez.errors import ConfigError

GOOD = {"world": 4, "node_ranks": 4}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("world", 0),
        ("chunk_tokens", 0),
        ("segment_floor", 0),
        ("segment_floor", 2),  # fewer rows than the convolution hands to the next segment
        ("max_ctx", 0),
        ("armed_rows", 0),
        ("node_ranks", 0),
        ("slots", 0),
        ("page_tokens", 0),
        ("attention_window", 0),
        ("buckets", ()),
        ("buckets", (512, 256)),
        ("buckets", (0, 256)),
        ("whale_min", 4095),  # below 2 x segment_floor
        ("cache_tokens", -1),
        ("gather_deadline_s", 0.0),
        ("stall_s", 0.0),
        ("stuck_s", -1.0),
        ("gather_deadline_s", 1e300),  # whose nanoseconds are no number
        ("stall_s", float("inf")),
        ("stuck_s", float("nan")),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: object) -> None:
    FleetConfig(**GOOD)
    with pytest.raises(ConfigError, match=f"^{field}: expected .*, got "):
        FleetConfig(**{**GOOD, field: value})


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("rank", "rank", -1),
        ("threads", "threads", 0),
        ("grace_s", "grace", -1.0),
        ("grace_s", "grace", 1e300),  # whose nanoseconds are no number
        ("grace_s", "grace", float("nan")),
        ("start_s", "start-timeout", 0.0),
        ("start_s", "start-timeout", 1e300),
        ("device", "device", "tpu"),
    ],
)
def test_a_bad_rank_setting_is_refused_by_name(field: str, name: str, value: object) -> None:
    good = {"rank": 0, "hub": "ipc:///x", "model_dir": Path(), "run_dir": Path()}
    RankConfig(**good)
    with pytest.raises(ConfigError, match=f"^{name}: expected .*, got "):
        RankConfig(**{**good, field: value})


def test_a_rank_on_cuda_is_refused_with_what_there_is() -> None:
    good = {"rank": 0, "hub": "ipc:///x", "model_dir": Path(), "run_dir": Path()}
    for device in ("cuda", "cuda:3"):
        with pytest.raises(ConfigError, match=f"^device: expected cpu, got {device}: .* no model runs on them"):
            RankConfig(**good, device=device)


def test_flags_win_over_the_checkpoint_which_wins_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "whalez.json").write_text(json.dumps({"segment_floor": 64, "whale_min": 200, "buckets": [64, 128]}))
    fleet = fleet_config(tmp_path, 2, {"chunk_tokens": 99, "max_ctx": None})
    assert (fleet.segment_floor, fleet.whale_min, fleet.buckets) == (64, 200, (64, 128))
    assert (fleet.chunk_tokens, fleet.max_ctx, fleet.node_ranks) == (99, FleetConfig(**GOOD).max_ctx, 2)
    assert fleet_config(tmp_path, 2, {"segment_floor": 50}).whale_min == 100


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"segment_flor": 3}',
        '{"world": 3}',
        '{"buckets": 5}',
        '{"buckets": ["a"]}',
        '{"segment_floor": "64"}',
        '{"slots": 1.5}',
        '{"slots": true}',
        '{"stall_s": null}',
        '{"slots": "2"}',
        '{"slots": 2.5}',
        '{"stall_s": "1"}',
        '{"max_ctx": null}',
    ],
)
def test_a_bad_settings_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "whalez.json").write_text(text)
    with pytest.raises(ConfigError, match=r"whalez\.json"):
        fleet_config(tmp_path, 2, {})


def test_every_setting_is_in_the_fingerprint() -> None:
    """A rank that differs in any of them must be refused, so none may be missing."""
    base = FleetConfig(**GOOD).fingerprint()
    changes = {"buckets": (256, 99999), "whale_min": 5000, "gather_deadline_s": 9.0, "stall_s": 9.0, "stuck_s": 9.0}
    for field in FleetConfig.__dataclass_fields__:
        other = FleetConfig(**{**GOOD, field: changes.get(field, 77)}).fingerprint()
        assert {name for name in base if base[name] != other[name]} == {field}


def test_flags_round_trip() -> None:
    seen: dict[str, object] = {}

    @click.command()
    @fleet_options
    def command(**settings: object) -> None:
        seen.update(settings)

    settings = {"buckets": (64, 128), "max_ctx": 5, "stall_s": 0.5}
    CliRunner().invoke(command, setting_flags(settings), standalone_mode=False)
    assert {name: value for name, value in seen.items() if value is not None} == settings


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_ID": "41",
         "SLURM_STEP_NODELIST": "gpu[07-09,12],cpu3"}  # fmt: skip
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "400"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Placement("none")),
        ({"WHALEZ_HUB": "tcp://1.2.3.4:5"}, Placement("none", hub="tcp://1.2.3.4:5")),
        (TORCHRUN, Placement("torchrun", 3, 8, "tcp://10.0.0.1:29501", 4)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, Placement("torchrun", 3, 8, "tcp://127.0.0.1:29501", 8)),
        (TORCHRUN | {"WHALEZ_HUB": "tcp://1.2.3.4:5"}, Placement("torchrun", 3, 8, "tcp://1.2.3.4:5", 4)),
        (SLURM, Placement("slurm", 5, 16, "tcp://gpu07:15041", 8)),
        (SLURM | {"SLURM_STEP_NODELIST": "node3"}, Placement("slurm", 5, 16, "tcp://node3:15041", 8)),
        (SLURM | {"SLURM_NTASKS": "8"}, Placement("slurm", 5, 8, "tcp://127.0.0.1:15041", 8)),
        (SLURM | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "7"}, Placement("slurm", 5, 16, "tcp://10.0.0.9:8", 8)),
        (OPENMPI, Placement("openmpi", 1, 2, None, 2)),
        (OPENMPI | {"MASTER_ADDR": "h", "MASTER_PORT": "9"}, Placement("openmpi", 1, 2, "tcp://127.0.0.1:10", 2)),
        (OPENMPI | {"PMIX_NAMESPACE": "prterun-gpu07-77@1"}, Placement("openmpi", 1, 2, "tcp://127.0.0.1:18438", 2)),
        (KUBERNETES, Placement("kubernetes", 2, 4, "tcp://10.1.2.3:401", None)),
        (KUBERNETES | {"MASTER_ADDR": "fd00::7"}, Placement("kubernetes", 2, 4, "tcp://[fd00::7]:401", None)),
        ({"JOB_COMPLETION_INDEX": "0"}, Placement("kubernetes", 0)),
    ],
)
def test_placement_from_the_environment(env: dict[str, str], expected: Placement) -> None:
    assert placement_from_environment(env) == expected


def test_an_unreadable_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_PROCID: expected a whole number, got 'x'"):
        placement_from_environment({"SLURM_PROCID": "x"})
