"""`whalez doctor`: every probe on machines that are not this one, and the command on this one."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whalez import doctor
from whalez.doctor import Finding, Machine, Need
from whalez.errors import ConfigError, FabricError
from whalez.model.presets import PRESETS, make_checkpoint, tensor_shapes

GIB = 2**30
NEED = Need(world=4, ranks_here=4, slab_bytes=100 * 2**20, weights_bytes=GIB, cache_bytes=GIB)


def space(free: int) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 1, 1, free // 4096, 0, 0, 0, 0, 255))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine on which nothing is missing."""
    for name in ("proc/self", "cgroup/pod/box", "dev/shm"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text("model name\t: X\nflags\t\t: sse avx2 fma avx512f\n")
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {64 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    return Machine(
        system="Linux",
        arch="x86_64",
        python=(3, 11, 0),
        proc=tmp_path / "proc",
        cgroup=tmp_path / "cgroup",
        dev=tmp_path / "dev",
        env={"WHALEZ_CACHE": str(tmp_path / "cache")},
        cores=lambda: 8,
        statvfs=lambda path: space(GIB),
        getrlimit=lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        futex_wake=lambda arch: 0,
        pidfd_open=lambda: None,
        gemm_libraries=lambda: [blas("numpy", "SkylakeX"), blas("scipy", "SkylakeX")],
        load_library=no_library,
    )


def blas(package: str, architecture: str) -> dict[str, Any]:
    return {
        "filepath": f"/x/{package}.libs/y.so",
        "internal_api": "openblas",
        "version": "0.3",
        "architecture": architecture,
    }


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open")


def refused() -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


Probe = Callable[[Machine], Finding | None]
PROBES: dict[str, Probe] = {
    "system": doctor.probe_system,
    "python": doctor.probe_python,
    "cores": lambda machine: doctor.probe_cores(machine, 4, 2),
    "memory": lambda machine: doctor.probe_memory(machine, NEED),
    "cpu": doctor.probe_cpu,
    "gemm": doctor.probe_gemm,
    "shm": lambda machine: doctor.probe_shm(machine, NEED),
    "files": lambda machine: doctor.probe_files(machine, 4, 4),
    "file size": lambda machine: doctor.probe_file_size(machine, NEED),
    "futex": doctor.probe_futex,
    "pidfd": doctor.probe_pidfd,
    "kernels": doctor.probe_kernels,
    "cuda": doctor.probe_cuda,
}


@pytest.mark.parametrize("name", PROBES)
def test_nothing_is_missing(machine: Machine, name: str) -> None:
    finding = PROBES[name](machine)
    assert finding is not None
    assert (finding.level, finding.name, finding.advice) == ("ok", name, "")


@pytest.mark.parametrize(
    ("name", "lack", "level", "words"),
    [
        ("system", {"system": "Darwin"}, "fail", "Darwin on x86_64"),
        ("system", {"arch": "riscv64"}, "fail", "aarch64"),
        ("python", {"python": (3, 10, 9)}, "fail", "3.11 or newer"),
        ("cores", {"cores": lambda: 2}, "warn", "2 for 4 ranks"),
        ("cores", {"cores": lambda: 7}, "warn", "--threads 1"),
        ("gemm", {"gemm_libraries": lambda: [blas("numpy", "Nehalem")]}, "warn", "128-bit vectors of 512"),
        ("gemm", {"gemm_libraries": list}, "warn", "no BLAS"),
        ("shm", {"statvfs": lambda path: space(64 * 2**20)}, "fail", "need 419430400, .* 67108864 free.*=416m"),
        ("shm", {"statvfs": lambda path: refused()}, "fail", "not permitted"),
        ("files", {"getrlimit": lambda which: (64, 4096)}, "fail", "64 open files, about 96 .*-> ulimit -n 1024"),
        ("files", {"getrlimit": lambda which: (64, 64)}, "fail", "hard limit"),
        ("file size", {"getrlimit": lambda which: (4096, 4096)}, "fail", "4096 bytes, a slab has 104857600"),
        ("futex", {"futex_wake": lambda arch: errno.ENOSYS}, "fail", "not implemented"),
        ("pidfd", {"pidfd_open": refused}, "fail", "not permitted.*5.3"),
        ("kernels", {"env": {"WHALEZ_CACHE": "/proc/nowhere"}}, "fail", "/proc/nowhere"),
    ],
)
def test_a_lack_is_found(machine: Machine, name: str, lack: dict[str, Any], level: str, words: str) -> None:
    finding = PROBES[name](dataclasses.replace(machine, **lack))
    assert finding is not None
    assert finding.level == level
    assert_says(finding, words)


def assert_says(finding: Finding | None, words: str) -> None:
    assert finding is not None
    assert re.search(words, f"{finding.text} -> {finding.advice}"), finding


@pytest.mark.parametrize(("gib", "level"), [(4, "fail"), (9, "fail"), (10, "ok")])
@pytest.mark.parametrize("where", ["machine", "outer group", "v1"])
def test_memory_is_what_the_tightest_limit_leaves(machine: Machine, where: str, gib: int, level: str) -> None:
    if where == "machine":
        (machine.proc / "meminfo").write_text(f"MemAvailable: {gib * 2**20} kB\n")
    else:
        folder = machine.cgroup / ("pod" if where == "outer group" else "memory")
        names = ("memory.max", "memory.current") if where == "outer group" else V1
        folder.mkdir(exist_ok=True)
        (folder / names[0]).write_text(f"{(gib + 2) * GIB}\n")
        (folder / names[1]).write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
        (machine.cgroup / "pod/box/memory.max").write_text("max\n")
        (machine.cgroup / "pod/box/memory.current").write_text("1\n")
    finding = doctor.probe_memory(machine, NEED)
    assert finding.level == level
    assert_says(finding, f"^4 ranks need 9592 MiB, {gib * 1024} MiB are available")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_a_container_may_use_fewer_cores_than_it_sees(machine: Machine) -> None:
    (machine.cgroup / "pod/cpu.max").write_text("150000 100000\n")
    (machine.cgroup / "pod/box/cpu.max").write_text("max 100000\n")
    assert doctor.cores_count(machine) == 1.5


def test_cpu_features_of_arm(machine: Machine) -> None:
    (machine.proc / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd sve\n")
    assert_says(doctor.probe_cpu(machine), "asimd sve")
    (machine.proc / "cpuinfo").write_text("flags\t: sse2\n")
    assert doctor.probe_cpu(machine).level == "warn"


def test_a_forced_older_gemm_is_named(machine: Machine) -> None:
    forced = dataclasses.replace(
        machine, env={"OPENBLAS_CORETYPE": "Haswell"}, gemm_libraries=lambda: [blas("scipy", "Haswell")]
    )
    assert doctor.probe_gemm(forced).level == "warn"
    assert_says(doctor.probe_gemm(forced), "scipy: openblas 0.3 Haswell; OPENBLAS_CORETYPE=Haswell keeps it to 256")
    assert doctor.probe_gemm(dataclasses.replace(forced, env={})).level == "ok"


def test_launcher(machine: Machine) -> None:
    assert doctor.probe_launcher(machine) is None
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    assert_says(doctor.probe_launcher(dataclasses.replace(machine, env=torchrun)), "torchrun: rank 1 of 2, hub tcp://")
    odd = doctor.probe_launcher(dataclasses.replace(machine, env=torchrun | {"RANK": "x"}))
    assert odd is not None
    assert odd.level == "fail"


def test_the_preflight_is_reported_where_there_is_a_device(machine: Machine) -> None:
    def one(pointer: Any) -> int:
        pointer._obj.value = 1
        return 0

    def found(code: int, words: str) -> doctor.Finding:
        library = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetCount=one)
        there = dataclasses.replace(machine, load_library=lambda name: library, preflight=lambda: (code, words))
        finding = doctor.probe_preflight(there)
        assert finding is not None
        return finding

    assert found(0, "H200, driver 13000; slabs: posix_fd; fabric unavailable: x").level == "ok"
    refused = found(1, "preflight: cuInit -> 999")
    assert (refused.level, refused.text) == ("warn", "preflight: cuInit -> 999")
    assert doctor.probe_preflight(machine) is None  # no driver


@pytest.mark.parametrize("text", ["1", "7", "0", "-1", "many", ""])
def test_streams_that_may_share_a_hardware_queue_are_warned_of(machine: Machine, text: str) -> None:
    finding = doctor.probe_connections(dataclasses.replace(machine, env={"CUDA_DEVICE_MAX_CONNECTIONS": text}))
    assert finding is not None
    assert finding.level == "warn"
    assert f"CUDA_DEVICE_MAX_CONNECTIONS is {text!r}" in finding.text


@pytest.mark.parametrize("env", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}])
def test_enough_hardware_queues_need_no_word(machine: Machine, env: dict[str, str]) -> None:
    assert doctor.probe_connections(dataclasses.replace(machine, env=env)) is None


def test_the_preflight_runs_in_a_process_and_its_words_come_back() -> None:
    pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")
    code, words = doctor._preflight()
    assert words.startswith("preflight: ") if code else "slabs: " in words


def test_cuda_and_imex(machine: Machine) -> None:
    assert doctor.probe_imex(machine) is None
    (machine.dev / "nvidiactl").touch()
    assert_says(doctor.probe_cuda(machine), "there is a GPU")

    def version(pointer: Any) -> None:
        pointer._obj.value = 12080

    good = SimpleNamespace(cuInit=lambda flags: 0, cuDriverGetVersion=version, cuDeviceGetCount=lambda pointer: 0)
    assert_says(doctor.probe_cuda(dataclasses.replace(machine, load_library=lambda name: good)), "CUDA 12.8, 0 dev")
    assert doctor.probe_preflight(dataclasses.replace(machine, load_library=lambda name: good)) is None
    bad = SimpleNamespace(cuInit=lambda flags: 803)
    assert doctor.probe_preflight(dataclasses.replace(machine, load_library=lambda name: bad)) is None
    assert_says(doctor.probe_cuda(dataclasses.replace(machine, load_library=lambda name: bad)), "cuInit returned 803")
    channels = machine.dev / "nvidia-caps-imex-channels"
    channels.mkdir()
    assert_says(doctor.probe_imex(machine), "no channel")
    (channels / "channel0").touch()
    assert doctor.probe_imex(machine) == Finding("ok", "imex", "channel0")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The config of a checkpoint; nothing here reads a tensor."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    return folder


def test_a_fleet_that_cannot_come_up_is_refused(machine: Machine, model: Path) -> None:
    def examine(world: int = 4, **lack: Any) -> list[Finding]:
        return doctor.examine(world, model, {}, machine=dataclasses.replace(machine, **lack), quick=True)

    doctor.refuse(examine())
    with pytest.raises(FabricError, match=r"shm: 4 slabs of \d+ bytes need \d+.* 4096 free; .*--shm-size=\d+m"):
        doctor.refuse(examine(statvfs=lambda path: space(4096)))
    with pytest.raises(ConfigError, match=r"^world: expected at most 8"):
        doctor.refuse(examine(world=9))
    with pytest.raises(ConfigError, match=r"^python: 3.10.0; "):
        doctor.refuse(examine(python=(3, 10, 0)))


def test_a_context_beyond_memory_is_refused_with_both_numbers(machine: Machine, model: Path) -> None:
    (machine.proc / "meminfo").write_text(f"MemAvailable: {4 * 2**20} kB\n")

    def start(**settings: Any) -> None:
        doctor.refuse(doctor.examine(2, model, settings, machine=machine, quick=True))

    start(max_ctx=65536)
    for setting, value in (("max_ctx", 10**9), ("cache_tokens", 10**9), ("slots", 10**5)):
        words = rf"^memory: 2 ranks need \d+ MiB, 4096 MiB are available .*--{setting.replace('_', '-')}"
        with pytest.raises(ConfigError, match=words):
            start(**{setting: value})


def test_slabs_are_counted_on_the_machine_they_are_on(machine: Machine, model: Path) -> None:
    def shm(ranks_here: int | None) -> str:
        found = doctor.examine(8, model, {}, machine=machine, quick=True, ranks_here=ranks_here)
        return next(finding.text for finding in found if finding.name == "shm")

    assert shm(None).startswith("8 slabs")
    assert shm(2).startswith("2 slabs")


def test_what_is_needed_is_what_a_rank_allocates(model: Path) -> None:
    from whalez.config import fleet_config
    from whalez.model.cache import StateCache
    from whalez.model.config import KimiLinearConfig

    fleet = fleet_config(model, 3, {"slots": 2, "max_ctx": 4096})
    need = doctor.measure(model, fleet, 3)
    config = KimiLinearConfig.from_dir(model)
    cache = StateCache(config, slots=fleet.slots, pages=fleet.cache_pages, page_tokens=fleet.page_tokens)
    assert need.cache_bytes == cache.states.nbytes + cache.tails.nbytes + cache.latents.nbytes
    shapes = {name: math.prod(shape) for name, shape in tensor_shapes(config).items()}
    others = sum(size for name, size in shapes.items() if re.search(r"\.experts\.[3-7]\.", name))  # rank 0 has 3 of 8
    assert others > 0
    assert need.weights_bytes == 4 * (sum(shapes.values()) - others)


@pytest.mark.parametrize("preset", ["tiny", "kernel"])
def test_scratch_is_what_a_rank_makes_at_its_start(tmp_path: Path, preset: str) -> None:
    from helpers.solo import solo
    from whalez.engine import sizing
    from whalez.parallel.expert import BLOCK_ROWS

    assert sizing._EXPERT_BLOCK_ROWS == BLOCK_ROWS
    make_checkpoint(tmp_path, "kimi-linear", preset, 0, dtype="f32")
    with solo(tmp_path, chunk_tokens=300, attention_window=128) as one:
        owner = one.runner.experts._scratch
        assert owner is not None
        arrays = [array for array in vars(owner).values() if isinstance(array, np.ndarray)]
        forward = one.runner.forward
        made = forward.scratch._block.nbytes + forward._x.nbytes + sum(array.nbytes for array in arrays)
        counted = sizing.scratch_bytes(one.config, one.fleet, one.layout.spec.rows_max)
    assert abs(made - counted) <= 128  # alignment


def test_counting_loads_no_kernels(model: Path) -> None:
    """In a launcher numba would compile them into another cache, before it has started anything."""
    code = (
        "import sys; from pathlib import Path; from whalez import config, doctor\n"
        f"model = Path({str(model)!r}); doctor.measure(model, config.fleet_config(model, 2, {{}}), 2)\n"
        "print('numba' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--model", str(model), "--world", "2", "--max-ctx", "4096", "--json"])
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == int(any(row["level"] == "fail" for row in found.values()))
    assert found["shm"]["text"].startswith("2 slabs")
    assert {"gemm", "memory", "cuda"} <= set(found)
    assert doctor.main(["--model", str(model), "--world", "9"]) == 1
    assert "fail  model     world: expected at most 8" in capsys.readouterr().out
