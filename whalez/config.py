"""Settings: what must be equal on every rank, what belongs to one, and the only reader of flags and environment.

Rule 1: `FleetConfig` is equal on all ranks; its `fingerprint()` travels in the hello, a difference is refused by field.
Rule 2: nothing below this file reads `sys.argv` or `os.environ`; classes take the numbers they use.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from whalez.errors import ConfigError

PROTOCOL_VERSION = 1
SETTINGS_FILE = "whalez.json"  # beside config.json: the fleet settings a checkpoint brings along
BUCKETS = (256, 512, 1056, 2112, 4224, 8448, 16896)


def _require(ok: bool, field: str, expected: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"{field}: expected {expected}, got {got!r}")


_SECONDS_MAX = 86_400  #: beyond a day is a mistake, beyond 2^63 ns no number


def _require_seconds(name: str, value: float) -> None:
    _require(0 < value <= _SECONDS_MAX, name, f"more than 0 and at most {_SECONDS_MAX} seconds", value)


def _require_type(field: str, name: str, value: object) -> None:
    """JSON and Python callers can hand in anything; comparing a text with a number would only say TypeError."""
    if name == "buckets":
        ok = isinstance(value, list | tuple) and all(type(item) is int for item in value)
        _require(ok, field, "a list of whole numbers", value)
    elif name.endswith("_s"):
        _require(type(value) in (int, float), field, "a number of seconds", value)
    else:
        _require(type(value) is int, field, "a whole number", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Equal on every rank of a fleet."""

    world: int  #: ranks
    chunk_tokens: int = 2048  #: most prompt rows of one launch of the local lane
    buckets: tuple[int, ...] = BUCKETS  #: ascending row counts; a segment never exceeds the one covering the mean
    segment_floor: int = 2048  #: fewest tokens of a whale segment
    whale_min: int = 4096  #: shortest prompt a gang is gathered for; at least 2 x segment_floor
    max_ctx: int = 65536  #: most tokens of a request, prompt and generated
    armed_rows: int = 256  #: most prompt rows of a launch while a whale is gathered or committed
    node_ranks: int  #: ranks of one machine; gangs are aligned to it where they fit
    slots: int = 16  #: requests that hold state on one rank at once
    page_tokens: int = 64  #: tokens of one cache page
    cache_tokens: int = 0  #: tokens the latent cache of a rank holds; 0 = 2 x max_ctx
    attention_window: int = 16896  #: rows of context expanded at once in MLA prefill
    gather_deadline_s: float = 2.0  #: a gather older than this and than 64 launches is cancelled
    stall_s: float = 2.0  #: /health turns 503 when the progress word has not moved for this long
    stuck_s: float = 60.0  #: the fleet stops when it has not moved for so long, and for ten of its longest launches

    def __post_init__(self) -> None:
        _require(self.world >= 1, "world", "at least 1", self.world)
        for field in ("chunk_tokens", "segment_floor", "max_ctx", "armed_rows", "node_ranks", "slots", "page_tokens"):
            _require(getattr(self, field) >= 1, field, "at least 1", getattr(self, field))
        # A member hands its last 3 rows to the next one's convolution.
        _require(self.segment_floor >= 3, "segment_floor", "at least 3", self.segment_floor)
        _require(self.attention_window >= 1, "attention_window", "at least 1 token", self.attention_window)
        _require(
            len(self.buckets) > 0 and all(a < b for a, b in zip((0, *self.buckets), self.buckets, strict=False)),
            "buckets",
            "ascending positive row counts",
            self.buckets,
        )
        _require(
            self.whale_min >= 2 * self.segment_floor,
            "whale_min",
            f"at least 2 x segment_floor = {2 * self.segment_floor}",
            self.whale_min,
        )
        _require(self.cache_tokens >= 0, "cache_tokens", "0 or more", self.cache_tokens)
        for name in ("gather_deadline_s", "stall_s", "stuck_s"):
            _require_seconds(name, getattr(self, name))

    @property
    def cache_pages(self) -> int:
        """Pages of a rank's latent cache."""
        return -(-(self.cache_tokens or 2 * self.max_ctx) // self.page_tokens)

    def fingerprint(self) -> dict[str, str]:
        """Field -> value, the part of the hello that must be equal on all ranks."""
        values = {f.name: json.dumps(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"protocol": str(PROTOCOL_VERSION), **values}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Belongs to one rank."""

    rank: int
    hub: str  #: address rank 0 binds and the others connect to
    model_dir: Path
    run_dir: Path  #: link socket, log, traces and post-mortem go here
    listen: str | None = None  #: H:P of this rank's own HTTP front; None = no front
    admin: str | None = None  #: tcp://IP:PORT or ipc:///path for an operator's queries; None = a socket in run_dir
    fleet_id: str = "fleet"  #: part of shared-memory names
    device: str = "cpu"
    threads: int = 1  #: threads of the GEMM
    pin: bool = False  #: bound to as many cores of this machine as it has threads
    grace_s: float = 30.0  #: after SIGTERM or SIGINT the rank's own requests may take this long to finish
    start_s: float = 300.0  #: how long the world may take to assemble
    capture: bool = False  #: debug: write hidden rows, logits and expert choices of every request to run_dir
    trace: bool = False  #: write one line per launch that prefilled something
    keys: Path | None = None  #: folder of `whalez keys`: who may join the hub; None = everybody who reaches it
    insecure: bool = False  #: no keys although other machines reach the hub
    hold_on_failure: bool = False  #: a rank that fails once the world runs stays, for a debugger, until it is signalled

    def __post_init__(self) -> None:
        _require(self.rank >= 0, "rank", "0 or more", self.rank)
        _require(self.threads >= 1, "threads", "at least 1", self.threads)
        _require(0 <= self.grace_s <= _SECONDS_MAX, "grace", f"0 to {_SECONDS_MAX} seconds", self.grace_s)
        _require_seconds("start-timeout", self.start_s)
        if self.device.partition(":")[0] == "cuda":
            raise ConfigError(
                f"device: expected cpu, got {self.device}: slabs, doorbells and kernels for CUDA are here and "
                "`python -m whalez.fabric.cuda.preflight` tries them, but no model runs on them in this version"
            )
        _require(self.device == "cpu", "device", "cpu", self.device)


# ---- flags ----------------------------------------------------------------------------------------------------
class _Buckets(click.ParamType[tuple[int, ...]]):
    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"expected whole numbers separated by commas, got {value!r}", param, ctx)


_SETTING_HELP: dict[str, str] = {
    "segment_floor": "Fewest tokens of a whale segment.",
    "whale_min": "Shortest prompt a gang is gathered for.",
    "chunk_tokens": "Most prompt rows of one launch of the local lane.",
    "buckets": "Row counts a segment is capped at.",
    "max_ctx": "Most tokens of a request, prompt and generated.",
    "armed_rows": "Most prompt rows of a launch while a whale is pending.",
    "node_ranks": "Ranks of one machine.",
    "slots": "Requests that hold state on one rank at once.",
    "cache_tokens": "Tokens the latent cache of a rank holds.",
    "attention_window": "Context rows expanded at once in MLA prefill.",
    "gather_deadline_s": "Seconds after which a gather is cancelled.",
    "stall_s": "Seconds without progress until /health says 503.",
    "stuck_s": "Seconds without progress until the fleet stops; at least ten times its longest launch so far.",
}

SETTING_NAMES = tuple(_SETTING_HELP)  #: what flags and `Fleet(...)` can set; whalez.json can also set page_tokens


def _setting_type(name: str) -> click.ParamType[Any] | type:
    if name == "buckets":
        return _Buckets()
    return float if name.endswith("_s") else int


def fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the fleet settings as flags, equal for generate, fleet and rank. An absent flag arrives as None."""
    for name, text in reversed(_SETTING_HELP.items()):
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, name, type=_setting_type(name), default=None, help=text)(command)
    return command


def rank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: how ranks are spread over this machine, and who may join them."""
    command = click.option(
        "--keys",
        type=click.Path(path_type=Path),
        default=None,
        envvar="WHALEZ_KEYS",
        help="Folder of `whalez keys`: only ranks with a key of it join; default: $WHALEZ_KEYS.",
    )(command)
    command = click.option("--pin/--no-pin", default=False, help="Bind every rank to its own cores.")(command)
    return click.option(
        "--threads", type=click.IntRange(min=1), default=None, help="GEMM threads of a rank; default: cores / world."
    )(command)


def setting_flags(settings: Mapping[str, Any]) -> list[str]:
    """The command-line words that hand `settings` (absent values are None) to a rank process."""
    words: list[str] = []
    for name in _SETTING_HELP:
        value = settings.get(name)
        if value is not None:
            text = ",".join(map(str, value)) if name == "buckets" else str(value)
            words += ["--" + name.replace("_", "-"), text]
    return words


def fleet_config(model_dir: Path, world: int, settings: Mapping[str, Any]) -> FleetConfig:
    """Flags over what the checkpoint's `whalez.json` brings over the defaults.

    A smaller `segment_floor` alone brings the smallest whale down with it.
    Raises: ConfigError naming the file or field.
    """
    path = Path(model_dir) / SETTINGS_FILE
    merged: dict[str, Any] = {}
    if path.exists():
        try:
            merged = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: expected a JSON object of fleet settings: {error}") from None
        _require(isinstance(merged, dict), str(path), "a JSON object of fleet settings", merged)
        known = {f.name for f in dataclasses.fields(FleetConfig)} - {"world"}
        for name, value in merged.items():
            _require(name in known, f"{path}: {name}", f"one of {sorted(known)}", name)
            _require_type(f"{path}: {name}", name, value)
    flags = {name: value for name, value in settings.items() if value is not None and name in _SETTING_HELP}
    if "segment_floor" in flags and "whale_min" not in flags:
        merged.pop("whale_min", None)
    for name, value in flags.items():
        _require_type(name, name, value)
    merged.update(flags)
    if "buckets" in merged:
        merged["buckets"] = tuple(merged["buckets"])
    merged.setdefault("node_ranks", world)  # a launcher that knows of several machines says so
    merged.setdefault(
        "whale_min", 2 * merged.get("segment_floor", FleetConfig.__dataclass_fields__["segment_floor"].default)
    )
    return FleetConfig(world=world, **merged)


# ---- environment ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Placement:
    """Where a launcher put this process; None where it does not say."""

    launcher: str
    rank: int | None = None
    world: int | None = None
    hub: str | None = None
    node_ranks: int | None = None


DEVICE_CONNECTIONS_MIN = 8  # what the driver takes by itself


def device_connections_warning(env: Mapping[str, str]) -> str:
    """What is wrong with CUDA_DEVICE_MAX_CONNECTIONS; "" if nothing.

    It says over how many hardware queues the streams of a process are spread. In one queue, what is to end a wait may
    stand behind it.
    """
    text = env.get("CUDA_DEVICE_MAX_CONNECTIONS", str(DEVICE_CONNECTIONS_MIN))
    if text.strip().isdecimal() and int(text) >= DEVICE_CONNECTIONS_MIN:
        return ""
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS is {text!r}: streams may share a hardware queue, and stand behind one that "
        f"waits; leave it unset, or at {DEVICE_CONNECTIONS_MIN} or more"
    )


def _first_host(nodelist: str) -> str:
    """First host of a Slurm node list: `gpu[07-09,12],cpu3` -> `gpu07`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodelist)
    return "" if match is None else match.group(1) + (match.group(2) or "")


def _job_port(job: int) -> int:
    """Equal on all ranks of a job, different between jobs, and below the ports that Linux gives to clients."""
    return 15000 + job % 15000


def placement_from_environment(env: Mapping[str, str]) -> Placement:
    """Rank, world and hub from torchrun, Slurm, Open MPI or a Kubernetes indexed job.

    `WHALEZ_HUB` names the hub under every launcher. Without it: MASTER_ADDR with the port after MASTER_PORT (torchrun
    itself listens on MASTER_PORT), the first node of a Slurm step, or loopback when all ranks are on this machine. The
    port, if none is given, follows from the job, which Slurm and Open MPI name.
    Raises: ConfigError naming the variable.
    """

    def number(name: str) -> int | None:
        text = env.get(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name}: expected a whole number, got {text!r}") from None

    def hub(world: int | None, local: int | None, port: int | None, host: str | None) -> str | None:
        if "WHALEZ_HUB" in env:
            return env["WHALEZ_HUB"]
        if port is None:
            return None
        if world is not None and world == local:
            return f"tcp://127.0.0.1:{port}"
        if not host:
            return None
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    master, master_port = env.get("MASTER_ADDR"), number("MASTER_PORT")
    port = None if master_port is None else master_port + 1
    if "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env):
        world, local = number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE")
        return Placement("torchrun", number("RANK"), world, hub(world, local, port, master), local)
    if "SLURM_PROCID" in env:
        world = number("SLURM_NTASKS")
        per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")))
        local = int(per_node.group()) if per_node else None
        job = number("SLURM_JOB_ID")
        if port is None and job is not None:
            port = _job_port(job)
        host = master or _first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
        return Placement("slurm", number("SLURM_PROCID"), world, hub(world, local, port, host), local)
    if "OMPI_COMM_WORLD_RANK" in env:
        world, local = number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_LOCAL_SIZE")
        job_name = env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid"))
        if port is None and job_name is not None:
            port = _job_port(zlib.crc32(job_name.encode()))
        return Placement("openmpi", number("OMPI_COMM_WORLD_RANK"), world, hub(world, local, port, master), local)
    if "JOB_COMPLETION_INDEX" in env:
        world = number("WORLD_SIZE")
        return Placement("kubernetes", number("JOB_COMPLETION_INDEX"), world, hub(world, None, port, master), None)
    return Placement("none", hub=env.get("WHALEZ_HUB"))


def cache_dir(env: Mapping[str, str]) -> Path:
    """Where whalez keeps what it can make again: `$WHALEZ_CACHE`, else `whalez` in `$XDG_CACHE_HOME` or in `~/.cache`.

    Raises: ConfigError when this user has no home and neither variable is set.
    """
    if own := env.get("WHALEZ_CACHE"):
        return Path(own).absolute()
    shared = Path(env.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():  # a relative one is to be ignored, says the XDG specification
        return shared / "whalez"
    home = Path(env["HOME"]) if env.get("HOME") else Path("~").expanduser()
    _require(home.is_absolute(), "WHALEZ_CACHE", "a folder for compiled kernels, for this user has no home", str(home))
    return home / ".cache" / "whalez"
