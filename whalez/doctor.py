"""What this machine has and lacks for a given world and model, and what to do about it.

Rule 1: a probe reads one thing, catches only what it can explain, and ends in a `Finding` with both numbers: what is
needed and what is there.   Rule 2: a probe looks through a `Machine`, so that a test can show it any machine.

`whalez doctor` makes all probes. A start makes the quick ones, `refuse(examine(..., quick=True))`, so that a fleet that
cannot come up says so in a sentence before it has loaded anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from whalez.config import (
    FleetConfig,
    cache_dir,
    device_connections_warning,
    fleet_config,
    fleet_options,
    placement_from_environment,
)
from whalez.errors import ConfigError, FabricError, WhalezError
from whalez.warm import is_ready, kernel_folder, make_folder, stamp_text

MIB = 2**20
PYTHON_LEAST = (3, 11)
PROCESS_BYTES = 250 * MIB  #: an idle rank and its front: interpreters, libraries and loaded kernels
PREFLIGHT_S = 60  #: the first time it compiles a kernel
FILES_OF_A_RANK = 64  #: libraries, logs, sockets and epolls, before any peer
FILES_OF_A_PEER = 8  #: hub connection, pidfd, slab and a few clients
#: OpenBLAS kernels by the vector registers they use; an unknown name is taken for a current one.
GEMM_BITS = {
    **dict.fromkeys(("prescott", "core2", "penryn", "nehalem", "dunnington", "atom", "generic", "barcelona"), 128),
    **dict.fromkeys(("sandybridge", "bulldozer", "piledriver", "steamroller"), 256),
    **dict.fromkeys(("haswell", "zen", "excavator"), 256),
    **dict.fromkeys(("skylakex", "cooperlake", "sapphirerapids"), 512),
}
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE = 1

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found."""

    level: Level  #: "fail": a fleet of this configuration cannot run; "warn": it runs, but not as it should
    name: str
    text: str
    advice: str = ""  #: what to do; empty when there is nothing to


def _futex_wake(machine: str) -> int:
    """errno of a futex(2) that wakes nobody; 0 if the kernel takes it."""
    word = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    number = _FUTEX_NUMBERS.get(machine)
    if number is None:
        return errno.ENOSYS
    woken = libc.syscall(ctypes.c_long(number), ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0)
    return ctypes.get_errno() if woken < 0 else 0


def _pidfd_open() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _preflight() -> tuple[int, str]:
    """Exit code and words of the preflight of device 0. In a process of its own, with its context."""
    command = [sys.executable, "-P", "-m", "whalez.fabric.cuda.preflight"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PREFLIGHT_S)
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {PREFLIGHT_S} s"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, said[-1] if said else f"exit code {done.returncode}"


def _gemm_libraries() -> list[dict[str, Any]]:
    """What threadpoolctl knows of the BLAS of numpy (projections) and of scipy (GEMMs inside kernels)."""
    import numpy  # noqa: F401  # loads its BLAS
    import scipy.linalg.cython_blas  # noqa: F401  # where numba finds BLAS
    from threadpoolctl import threadpool_info

    return [library for library in threadpool_info() if library.get("user_api") == "blas"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the probes look. The defaults are this machine."""

    system: str = dataclasses.field(default_factory=platform.system)
    arch: str = dataclasses.field(default_factory=platform.machine)
    python: tuple[int, ...] = sys.version_info[:3]
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    dev: Path = Path("/dev")
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cores: Callable[[], int] = lambda: len(os.sched_getaffinity(0))
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
    futex_wake: Callable[[str], int] = _futex_wake
    pidfd_open: Callable[[], None] = _pidfd_open
    gemm_libraries: Callable[[], list[dict[str, Any]]] = _gemm_libraries
    load_library: Callable[[str], Any] = ctypes.CDLL
    preflight: Callable[[], tuple[int, str]] = _preflight

    @property
    def shm(self) -> Path:
        return self.dev / "shm"

    def read(self, path: Path) -> str | None:
        """The text of a file of the kernel; None where this kernel or container does not show it."""
        with contextlib.suppress(OSError):
            return path.read_text()
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the configuration asks of one machine; bytes."""

    world: int
    ranks_here: int
    slab_bytes: int  #: of one rank
    weights_bytes: int = 0  #: of one rank, the one with most experts
    cache_bytes: int = 0  #: of one rank with every slot and page written
    scratch_bytes: int = 0  #: of one rank in its largest launch


# ---- the machine ----------------------------------------------------------------------------------------------
def probe_system(machine: Machine) -> Finding:
    text = f"{machine.system} on {machine.arch}"
    if machine.system != "Linux" or machine.arch not in _FUTEX_NUMBERS:
        return Finding("fail", "system", text, "whalez runs on Linux on x86_64 or aarch64")
    return Finding("ok", "system", text)


def probe_python(machine: Machine) -> Finding:
    text = ".".join(map(str, machine.python))
    if machine.python < PYTHON_LEAST:
        return Finding("fail", "python", text, f"whalez needs Python {'.'.join(map(str, PYTHON_LEAST))} or newer")
    return Finding("ok", "python", text)


def cores_count(machine: Machine) -> float:
    """Cores this process may use: its affinity, or the quota of its container where that is less."""
    cores = float(machine.cores())
    for folder in _cgroups(machine):
        quota, _, period = (machine.read(folder / "cpu.max") or "max").partition(" ")
        if quota.strip().isdigit() and period.strip().isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


def probe_cores(machine: Machine, ranks_here: int, threads: int | None) -> Finding:
    cores = cores_count(machine)
    each = threads or max(1, int(cores) // ranks_here)
    text = f"{cores:g} for {ranks_here} ranks x {each} GEMM threads"
    if ranks_here > cores:
        return Finding("warn", "cores", text, "ranks share cores: answers are the same, but a gang is hardly faster")
    if ranks_here * each > cores:
        return Finding("warn", "cores", text, f"use --threads {max(1, int(cores) // ranks_here)}")
    return Finding("ok", "cores", text)


def _cgroups(machine: Machine) -> list[Path]:
    """Folders of this process's control groups, innermost first, as far as this container shows them."""
    inside = ""
    for line in (machine.read(machine.proc / "self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            inside = line[3:].strip("/")
    folder, folders = machine.cgroup / inside, []
    while folder != machine.cgroup:
        folders.append(folder)
        folder = folder.parent
    return [*folders, machine.cgroup]


def memory_available(machine: Machine) -> tuple[int, str] | None:
    """Bytes a fleet may still take and what sets the limit; None if the kernel does not say."""
    found: list[tuple[int, str]] = []
    lines = (machine.read(machine.proc / "meminfo") or "").splitlines()
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    found += [(1024 * each, "on this machine") for each in kib]
    for folder in _cgroups(machine):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            limit, used = machine.read(folder / limit_file), machine.read(folder / used_file)
            if limit is None or used is None or not limit.strip().isdigit():
                continue
            stat = machine.read((folder / limit_file).with_name("memory.stat")) or ""
            pages = [line.split()[1] for line in stat.splitlines() if line.startswith("inactive_file ")]
            free = int(limit) - int(used) + sum(map(int, pages))  # the kernel takes those back first
            found.append((max(free, 0), "under the limit of the container"))
    return min(found, default=None)


def probe_memory(machine: Machine, need: Need) -> Finding:
    available = memory_available(machine)
    if available is None:
        return Finding("warn", "memory", "the kernel does not say how much is available")
    parts = (  # what each takes, and what makes it smaller
        (need.cache_bytes, "full cache", "a smaller --max-ctx, --cache-tokens or --slots"),
        (need.weights_bytes, "weights", "fewer ranks or a smaller model"),
        (need.slab_bytes, "slab", "fewer ranks or a smaller --chunk-tokens"),
        (need.scratch_bytes, "scratch", "a smaller --chunk-tokens or --attention-window"),
    )
    needed = need.ranks_here * (sum(part[0] for part in parts) + PROCESS_BYTES)
    each = ", ".join(f"{name} {_mib(nbytes)}" for nbytes, name, _ in parts)
    text = (
        f"{need.ranks_here} ranks need {_mib(needed)}, {_mib(available[0])} are available {available[1]} "
        f"(each: {each}, process {_mib(PROCESS_BYTES)})"
    )
    if available[0] < needed:
        return Finding("fail", "memory", text, f"use {max(parts)[2]}")
    return Finding("ok", "memory", text)


def cpu_features(machine: Machine) -> set[str]:
    """Flags of the first processor, in lower case."""
    for line in (machine.read(machine.proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return set(value.lower().split())
    return set()


def _vector_bits(features: set[str]) -> int:
    if "avx512f" in features:
        return 512
    return 256 if "avx2" in features else 128


def probe_cpu(machine: Machine) -> Finding:
    features = cpu_features(machine)
    shown = [name for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve") if name in features]
    text = " ".join(shown) or "no vector features known to whalez"
    if not {"avx2", "asimd"} & features:
        return Finding("warn", "cpu", text, "without AVX2 or Advanced SIMD everything works, slowly")
    return Finding("ok", "cpu", text)


def probe_gemm(machine: Machine) -> Finding:
    try:
        libraries = machine.gemm_libraries()
    except ImportError as error:
        return Finding("fail", "gemm", str(error), "reinstall whalez: numpy, scipy or threadpoolctl is broken")
    parts, weakest = [], 512
    for library in libraries:
        path = str(library.get("filepath", ""))
        user = "scipy" if "scipy.libs" in path else "numpy" if "numpy.libs" in path else "both"
        kernels = library.get("architecture", "")
        parts.append(f"{user}: {library.get('internal_api')} {library.get('version')} {kernels}".rstrip())
        weakest = min(weakest, GEMM_BITS.get(str(kernels).lower(), 512))
    if not parts:
        return Finding("warn", "gemm", "no BLAS that threadpoolctl knows", "GEMM threads cannot be bounded: use --pin")
    text = "; ".join(parts)
    bits = _vector_bits(cpu_features(machine))
    forced = machine.env.get("OPENBLAS_CORETYPE")
    if weakest < bits and forced:
        return Finding(
            "warn",
            "gemm",
            f"{text}; OPENBLAS_CORETYPE={forced} keeps it to {weakest}-bit vectors of {bits}",
            "unset OPENBLAS_CORETYPE",
        )
    if weakest < min(bits, 256):
        return Finding("warn", "gemm", f"{text}: {weakest}-bit vectors of {bits}", "update numpy and scipy")
    return Finding("ok", "gemm", text + (f" (OPENBLAS_CORETYPE={forced})" if forced else ""))


# ---- what ranks share -----------------------------------------------------------------------------------------
def probe_shm(machine: Machine, need: Need) -> Finding:
    total = need.ranks_here * need.slab_bytes
    text = f"{need.ranks_here} slabs of {need.slab_bytes} bytes need {total}"
    advised = f"{-(-total // MIB) + 16}m"
    advice = (
        f"in a container start it with --shm-size={advised}, elsewhere `mount -o remount,size={advised} "
        f"{machine.shm}`, or use fewer ranks or a smaller --chunk-tokens or --slots"
    )
    try:
        space = machine.statvfs(machine.shm)
    except OSError as error:
        return Finding("fail", "shm", f"{text}; {machine.shm}: {error.strerror}", advice)
    free = space.f_bavail * space.f_frsize
    text += f", {machine.shm} has {free} free"
    return Finding("fail", "shm", text, advice) if free < total else Finding("ok", "shm", text)


def probe_files(machine: Machine, ranks_here: int, world: int) -> Finding:
    need = FILES_OF_A_RANK + FILES_OF_A_PEER * max(world, ranks_here)
    soft, hard = machine.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} open files, about {need} needed; locked memory is not needed"
    if soft != resource.RLIM_INFINITY and soft < need:
        low = hard != resource.RLIM_INFINITY and hard < need
        return Finding("fail", "files", text, f"{'raise the hard limit: ' if low else ''}ulimit -n {max(1024, need)}")
    return Finding("ok", "files", text)


def probe_file_size(machine: Machine, need: Need) -> Finding:
    """A slab is a file, so its size counts."""
    soft, _ = machine.getrlimit(resource.RLIMIT_FSIZE)
    text = f"files of {_limit(soft)} bytes, a slab has {need.slab_bytes}"
    if soft != resource.RLIM_INFINITY and soft < need.slab_bytes:
        return Finding("fail", "file size", text, "ulimit -f unlimited")
    return Finding("ok", "file size", text)


def probe_futex(machine: Machine) -> Finding:
    code = machine.futex_wake(machine.arch)
    if code:
        return Finding("fail", "futex", os.strerror(code), "allow the system call futex in the container's profile")
    return Finding("ok", "futex", "ranks can sleep on a doorbell")


def probe_pidfd(machine: Machine) -> Finding:
    try:
        machine.pidfd_open()
    except OSError as error:
        advice = "a kernel of 5.3 or newer, and pidfd_open allowed in the container's profile"
        return Finding("fail", "pidfd", str(error.strerror), advice)
    return Finding("ok", "pidfd", "a dead peer is seen at once")


def probe_kernels(machine: Machine) -> Finding:
    try:
        folder = kernel_folder(cache_dir(machine.env))
        if is_ready(folder, stamp_text()):
            return Finding("ok", "kernels", f"compiled in {folder}")
        make_folder(folder)
    except ConfigError as error:
        return Finding("fail", "kernels", str(error), "set WHALEZ_CACHE to a folder that this user can write")
    return Finding("ok", "kernels", f"the first start compiles them into {folder}, about half a minute")


# ---- launchers and devices ------------------------------------------------------------------------------------
def probe_launcher(machine: Machine) -> Finding | None:
    try:
        place = placement_from_environment(machine.env)
    except ConfigError as error:
        return Finding("fail", "launcher", str(error), "mend or unset the variable")
    if place.launcher == "none":
        return None
    text = f"{place.launcher}: rank {place.rank} of {place.world}, hub {place.hub}"
    if place.hub is None and (place.world or 1) > 1:
        return Finding("warn", "launcher", text, "set WHALEZ_HUB=tcp://<address of rank 0>:<port>")
    return Finding("ok", "launcher", text)


def probe_cuda(machine: Machine) -> Finding:
    """Present or not, it changes nothing here: this version computes on the host."""
    try:
        library = machine.load_library("libcuda.so.1")
    except OSError as error:
        text = f"no driver ({error}); the host backend needs none"
        if (machine.dev / "nvidiactl").exists():
            return Finding("warn", "cuda", text, "there is a GPU: make libcuda.so.1 visible (nvidia-container-toolkit)")
        return Finding("ok", "cuda", text)
    code = library.cuInit(0)
    if code:
        return Finding("warn", "cuda", f"cuInit returned {code}", "nvidia-smi says more; the host backend runs")
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    major, minor = version.value // 1000, version.value % 1000 // 10
    return Finding("ok", "cuda", f"driver for CUDA {major}.{minor}, {count.value} devices")


def probe_preflight(machine: Machine) -> Finding | None:
    """What two processes on device 0 can share, found out by doing; None without a driver and a device."""
    count = ctypes.c_int(0)
    try:
        library = machine.load_library("libcuda.so.1")
    except OSError:
        return None
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    code, words = machine.preflight()
    if code:
        return Finding("warn", "preflight", words, "the host backend runs without; a fleet on these devices would not")
    return Finding("ok", "preflight", words)


def probe_connections(machine: Machine) -> Finding | None:
    """None when CUDA_DEVICE_MAX_CONNECTIONS is unset or large enough."""
    warning = device_connections_warning(machine.env)
    return Finding("warn", "cuda", warning, "unset it; the host backend does not mind") if warning else None


def probe_imex(machine: Machine) -> Finding | None:
    folder = machine.dev / "nvidia-caps-imex-channels"
    try:
        channels = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return None
    except OSError as error:
        return Finding("warn", "imex", f"{folder}: {error.strerror}")
    if not channels:
        return Finding("warn", "imex", f"no channel in {folder}", "start the container with an IMEX channel")
    return Finding("ok", "imex", ", ".join(channels))


# ---- all together ---------------------------------------------------------------------------------------------
def measure(model_dir: Path, fleet: FleetConfig, ranks_here: int) -> Need:
    """What this model and configuration need. Raises: CheckpointError, ConfigError."""
    # Not at the top: numpy takes longer to import than all else here together.
    import numpy as np

    from whalez.engine.sizing import plan_policy, scratch_bytes, slab_spec
    from whalez.fabric.layout import SlabLayout
    from whalez.model.config import KimiLinearConfig
    from whalez.model.weights import expert_bounds, weight_plan

    config = KimiLinearConfig.from_dir(model_dir)
    if config.moe_layers and fleet.world > config.num_experts:
        raise ConfigError(f"world: expected at most {config.num_experts} (the model's experts), got {fleet.world}")
    spec = slab_spec(config, fleet, plan_policy(config, fleet))
    made: list[int] = []

    def note(shape: tuple[int, ...]) -> Any:
        made.append(4 * int(np.prod(shape)))
        return np.broadcast_to(np.float32(0), shape)

    last = expert_bounds(config.num_experts, fleet.world)[1] if config.moe_layers else 0
    weight_plan(config, 0, last, note)
    dim, inner = config.kda_head_dim, config.kda_inner
    state = len(config.kda_layers) * (inner * dim + (config.conv_width - 1) * 3 * inner)
    latent = len(config.mla_layers) * config.latent_width
    cache_bytes = 4 * (fleet.slots * state + fleet.cache_pages * fleet.page_tokens * latent)
    return Need(
        world=fleet.world,
        ranks_here=ranks_here,
        slab_bytes=SlabLayout.from_spec(spec).nbytes,
        weights_bytes=sum(made),
        cache_bytes=cache_bytes,
        scratch_bytes=scratch_bytes(config, fleet, spec.rows_max),
    )


def examine(
    world: int,
    model_dir: Path | None,
    settings: Mapping[str, Any],
    threads: int | None = None,
    *,
    machine: Machine,
    ranks_here: int | None = None,
    quick: bool = False,
) -> list[Finding]:
    """All findings, in the order a reader wants them.

    Args:
        model_dir:  None leaves out what follows from a model
        settings:   fleet settings by name, as flags bring them
        ranks_here: ranks on this machine; None: all of the world
        quick:      only what a fleet that starts has to know and costs next to nothing to find out
    """
    here = min(ranks_here or world, world)
    found: list[Finding | None] = [probe_system(machine), probe_python(machine)]
    found += [probe_cores(machine, here, threads), probe_cpu(machine)]
    if not quick:
        found.append(probe_gemm(machine))
    found += [probe_files(machine, here, world), probe_futex(machine), probe_pidfd(machine), probe_kernels(machine)]
    if model_dir is not None:
        try:
            need = measure(model_dir, fleet_config(model_dir, world, settings), here)
        except WhalezError as error:
            found.append(Finding("fail", "model", str(error)))
        else:
            found += [probe_shm(machine, need), probe_file_size(machine, need), probe_memory(machine, need)]
    if not quick:
        found += [probe_launcher(machine), probe_cuda(machine), probe_connections(machine)]
        found += [probe_preflight(machine), probe_imex(machine)]
    return [finding for finding in found if finding is not None]


_OF_THE_FABRIC = ("shm", "files", "file size", "futex", "pidfd")


def refuse(findings: Sequence[Finding]) -> None:
    """Raise the first failure: FabricError for what ranks share, ConfigError for the rest."""
    for finding in findings:
        if finding.level == "fail":
            _raise(finding)


def _raise(finding: Finding) -> NoReturn:
    # What comes from `measure` is a sentence that names its field already.
    text = finding.text if finding.name in ("model", "kernels") else f"{finding.name}: {finding.text}"
    line = f"{text}; {finding.advice}" if finding.advice else text
    raise FabricError(line) if finding.name in _OF_THE_FABRIC else ConfigError(line)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


# ---- the command ----------------------------------------------------------------------------------------------
def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")  # a path must stay whole
    for finding in findings:
        advice = f"\n-> {finding.advice}" if finding.advice else ""
        table.add_row(Text(finding.level, colours[finding.level]), finding.name, Text(finding.text + advice))
    Console(highlight=False).print(table)


def _print_lines(findings: Sequence[Finding]) -> None:
    for finding in findings:
        click.echo(f"{finding.level:<5} {finding.name:<9} {finding.text}")
        if finding.advice:
            click.echo(f"{'':<15} -> {finding.advice}")


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--world", default=4, show_default=True, type=click.IntRange(min=1), help="Number of ranks.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Checkpoint folder.")
@click.option("--threads", type=click.IntRange(min=1), default=None, help="GEMM threads of a rank.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of findings.")
@fleet_options
def command(world: int, model: Path | None, threads: int | None, as_json: bool, **settings: Any) -> int:
    """What this machine has and lacks for a given world and model, and what to do. Exits with 1 if anything fails."""
    findings = examine(world, model, settings, threads, machine=Machine(env=os.environ))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    elif sys.stdout.isatty():
        _print_table(findings)
    else:
        _print_lines(findings)
    if model is None and not as_json:
        click.echo("give --model for what depends on one: slabs in shared memory, memory, experts against ranks")
    return int(any(finding.level == "fail" for finding in findings))


def main(argv: Sequence[str]) -> int:
    """`whalez doctor`. Returns the exit code; a mistyped flag is a click.ClickException."""
    return int(command.main(args=list(argv), prog_name="whalez doctor", standalone_mode=False) or 0)
