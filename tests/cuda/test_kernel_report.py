"""The report of kernels: what it refuses, that it shows every change, that it knows every kernel."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba import cuda

import whalez
from whalez.ops.device import compile as compiler
from whalez.ops.device.kernel import Kernel
from whalez.ops.device.types import f32, f32p, i64

ROOT = Path(whalez.__file__).parents[1]


@pytest.fixture(scope="module")
def report() -> Any:
    spec = importlib.util.spec_from_file_location("kernel_report", ROOT / "tools" / "kernel_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def small_body(g_x: Any, n: Any) -> None:
    g_x[n] = 1.0


def loose_body(g_x: Any, n: Any) -> None:
    s_tile = cuda.shared.array(0, f32)  # aligned as its element is
    s_tile[n] = g_x[n]
    cuda.syncthreads()
    g_x[n] = s_tile[0]


def crowded_body(g_x: Any, n: Any) -> None:
    base = cuda.threadIdx.x * 96
    t = cuda.local.array(96, f32)
    for i in range(96):
        t[i] = g_x[base + i]
    for k in range(n):
        for i in range(96):
            t[i] = t[i] * t[(i + 5) % 96] + g_x[k]
    for i in range(96):
        g_x[base + i] = t[i]


@pytest.fixture
def bench(report: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The report over two kernels of which nothing is compiled: `bench.rows` is what was measured."""
    kernels = {
        "plain": Kernel("plain", small_body, (f32p, i64), (256, 1, 1)),
        "product": Kernel("product", small_body, (f32p, i64), (128, 1, 1), tensor_cores=True),
    }
    rows = [
        report.Row(name, arch, threads, 40, 0, 0, 0, 0, products, 6)
        for name, threads, products in (("plain", 256, 0), ("product", 128, 16))
        for arch in compiler.ARCHITECTURES
    ]
    monkeypatch.setattr(report, "KERNELS", kernels)
    monkeypatch.setattr(report, "load", lambda: kernels)
    monkeypatch.setattr(report, "measure", lambda jobs: rows)
    monkeypatch.setattr(report, "alignment_faults", lambda rows, jobs: [])
    monkeypatch.setattr(report, "MARKDOWN", tmp_path / "kernels.md")
    monkeypatch.setattr(report, "RECORDS", tmp_path / "kernels.json")
    report.rows = rows
    return report


def test_what_was_written_is_accepted(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--check"]) == 1  # there is none yet
    assert bench.main([]) == 0
    assert bench.main(["--check"]) == 0
    assert "2 kernels, 6 images" in capsys.readouterr().out
    kept = json.loads(bench.RECORDS.read_text())
    assert kept["compilers"] == compiler.compiler_versions()
    assert [bench.Row(**row) for row in kept["kernels"]] == bench.rows
    table = bench.MARKDOWN.read_text()
    assert "| plain | all | 256 | 40 |  |  |  |  |  | 6 |" in table
    assert "| product | all | 128 | 40 |  |  |  |  | 16 | 6 |" in table


@pytest.mark.parametrize("field", ["threads", "registers", "static_bytes", "dynamic_bytes", "tensor_core", "blocks"])
def test_every_change_is_shown(bench: Any, capsys: pytest.CaptureFixture[str], field: str) -> None:
    bench.main([])
    before = bench.MARKDOWN.read_text()
    bench.rows[4] = bench.rows[4]._replace(**{field: 77})
    assert bench.main(["--check"]) == 1
    told = capsys.readouterr()
    assert re.search(r"^\+\| product \| 90 \|.* 77 \|", told.out, re.MULTILINE)
    assert "-| product | all |" in told.out
    assert "kernels.md is not what the sources give" in told.err
    assert "kernels.json is not what the sources give" in told.err
    assert bench.MARKDOWN.read_text() == before


def test_a_new_and_a_lost_kernel_are_shown(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([])
    del bench.rows[:3]
    assert bench.main(["--check"]) == 1
    assert "-| plain | all |" in capsys.readouterr().out


def test_other_compilers_are_named(bench: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([])
    monkeypatch.setattr(compiler, "COMPILERS", ("numba-cuda",))
    assert bench.main(["--check"]) == 1
    assert "the report was made with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spill_bytes": 8}, "product on sm_90 spills 8 bytes"),
        ({"stack_bytes": 24}, "product on sm_90 has a stack frame of 24 bytes"),
        ({"tensor_core": 0}, "product on sm_90 claims tensor cores"),
        ({"blocks": 0}, "product on sm_90 cannot be launched"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--check"]])
def test_is_refused(
    bench: Any, capsys: pytest.CaptureFixture[str], change: dict[str, int], said: str, arguments: list[str]
) -> None:
    bench.rows[4] = bench.rows[4]._replace(**change)
    assert bench.main(arguments) == 1
    told = capsys.readouterr().err
    assert said in told and "plain" not in told.replace("kernels", "")
    assert not bench.MARKDOWN.exists()


def test_kernels_without_tensor_cores_need_none(bench: Any) -> None:
    assert list(bench.faults(bench.rows)) == []


def test_compiled_kernels_are_refused(report: Any, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    """The whole way, from the source to the complaint."""
    kernels = {
        "crowded": Kernel("crowded", crowded_body, (f32p, i64), (1024, 1, 1), arch="sm_100"),
        "boaster": Kernel("boaster", small_body, (f32p, i64), (32, 1, 1), tensor_cores=True, arch="sm_100"),
        "greedy": Kernel("greedy", small_body, (f32p, i64), (32, 1, 1), arch="sm_100", shared_bytes=232_449),
        "loose": Kernel("loose", loose_body, (f32p, i64), (32, 1, 1), arch="sm_100", shared_bytes=4096),
    }
    monkeypatch.setattr(report, "KERNELS", kernels)
    monkeypatch.setattr(report, "load", lambda: kernels)
    monkeypatch.setattr(report, "MARKDOWN", tmp_path / "kernels.md")
    monkeypatch.setattr(report, "RECORDS", tmp_path / "kernels.json")
    assert report.main(["--jobs", "1"]) == 1
    told = capsys.readouterr().err
    for said in (
        "crowded on sm_100 spills",
        "crowded on sm_100 has a stack frame",
        "boaster on sm_100 claims tensor cores",
        "greedy on sm_100 cannot be launched",
        "loose has shared memory that is not aligned to 16 bytes: .extern .shared .align 4 ",
    ):
        assert told.count(said) == 1, told
    assert told.count("kernel report:") == 5
    assert report.main(["--show", "boaster", "--arch", "sm_100"]) == 0
    assert re.search(r"STG\.E", capsys.readouterr().out)
    assert report.main(["--show", "boaster", "--ptx"]) == 0
    assert ".target sm_90" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "blocks"),
    [
        ("sm_80", 1024, 64, 0, 1),
        ("sm_80", 1024, 65, 0, 0),  # 72 registers are given, and 32 warps of them do not fit
        ("sm_80", 256, 32, 0, 8),
        ("sm_80", 256, 255, 0, 1),
        ("sm_80", 32, 16, 0, 32),
        ("sm_80", 256, 33, 0, 6),  # 40 are given
        ("sm_80", 128, 32, 40_960, 4),
        ("sm_80", 128, 32, 55_000, 2),  # of 164 KiB each block takes one KiB more
        ("sm_90", 128, 32, 40_960, 5),
        ("sm_80", 128, 32, 166_912, 1),
        ("sm_80", 128, 32, 166_913, 0),
        ("sm_100", 128, 32, 232_448, 1),
    ],
)
def test_resident_blocks(report: Any, arch: str, threads: int, registers: int, shared_bytes: int, blocks: int) -> None:
    assert report.resident_blocks(report.CHIPS[arch], threads, registers, shared_bytes) == blocks


def test_it_knows_every_kernel(report: Any) -> None:
    """Every decorated function of the package, counted in the text, is in a module the report imports."""
    decorated = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "whalez").rglob("*.py")
        if "testing" not in path.parts and re.search(r"^\s*@kernel\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert decorated <= set(report.modules())
    assert {"whalez.ops.mla.cuda", "whalez.ops.kda.cuda", "whalez.fabric.cuda.kernels"} <= decorated
    report.load()
    loaded = {kernel.function.__module__ for kernel in compiler.KERNELS.values()}
    assert decorated <= loaded


def test_the_committed_report_is_sound(report: Any) -> None:
    """Whether it is up to date is for `make kernels` to say, which compiles everything."""
    kept = json.loads((ROOT / "docs" / "kernels.json").read_text(encoding="utf-8"))
    rows = [report.Row(**row) for row in kept["kernels"]]
    report.load()
    assert list(report.faults([row for row in rows if row.kernel in report.KERNELS])) == []
    assert (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").count("\n| ") > len({row.kernel for row in rows})
