"""How the harness comes up: pinned versions, a machine built outside the source tree."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from whalez.testing import simt
from whalez.testing.simt import machine, versions


def test_versions_are_the_pinned_ones():
    versions.check_versions()


@pytest.mark.parametrize("package", ["numba-cuda", "llvmlite"])
def test_another_version_is_refused_by_name(monkeypatch, package):
    monkeypatch.setitem(versions.PINNED, package, "0.0.1")
    with pytest.raises(simt.SimtError, match=rf"{package}: expected 0\.0\.1, got .*versions\.py"):
        versions.check_versions()


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(versions, "PINNED", {"numba-cuda-of-nobody": "1"})
    with pytest.raises(simt.SimtError, match="numba-cuda-of-nobody: expected 1, got none"):
        versions.check_versions()


def test_other_processors_are_refused(monkeypatch):
    monkeypatch.setattr(versions.platform, "machine", lambda: "aarch64")
    with pytest.raises(simt.SimtError, match="x86-64 Linux only"):
        versions.check_versions()


def test_machine_is_built_once_into_the_cache_and_nowhere_else(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    before = {p.name for p in machine.SOURCE.parent.iterdir()}
    source = tmp_path / "tiny.c"
    source.write_text("int one(void) { return 1; }\n")
    first = machine.build(source)
    assert first.parent == tmp_path / "cache" / "simt"
    stamp = first.stat().st_mtime_ns
    assert machine.build(source).stat().st_mtime_ns == stamp
    source.write_text("int one(void) { return 2; }\n")
    assert machine.build(source) != first
    assert {p.name for p in machine.SOURCE.parent.iterdir()} - {"__pycache__"} <= before
    assert not list((tmp_path / "cache" / "simt").glob("*.[0-9]*"))


def test_without_a_cache_folder_it_is_one_of_this_user(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = machine.cache_folder()
    assert folder.parent == tmp_path
    source = tmp_path / "tiny.c"
    source.write_text("int one(void) { return 1; }\n")
    machine.build(source)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_compiler_that_is_missing_or_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    source = tmp_path / "tiny.c"
    source.write_text("int one(void) { return nothing; }\n")
    with pytest.raises(simt.SimtError, match="nothing"):
        machine.build(source)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(simt.SimtError, match="no-such-compiler: not found; the harness needs a C compiler"):
        machine.build(source)


def test_package_imports_without_cuda_packages():
    code = (
        "import sys\n"
        "for name in ('numba_cuda', 'numba.cuda', 'cuda'): sys.modules[name] = None\n"
        "import whalez, whalez.testing\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_harness_is_not_in_the_wheel():
    from setuptools import find_packages

    root = Path(simt.__file__).parents[3]
    assert "whalez.testing.simt" not in find_packages(str(root), include=["whalez*"], exclude=["whalez.testing*"])
    assert 'exclude = ["whalez.testing*"]' in (root / "pyproject.toml").read_text()
