"""The report of the tests on a GPU, from what pytest wrote; and that without a device it is no report but an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

import whalez

ROOT = Path(whalez.__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_check  # noqa: E402  found beside the package

XML = """<testsuites><testsuite>
<testcase classname="tests.a" name="good" time="0.1"/>
<testcase classname="tests.a" name="moot"><skipped message="no fabric here: 800"/></testcase>
{}
</testsuite></testsuites>"""
BAD = '<testcase classname="tests.b" name="bad"><failure message="off by 3&#10;more">trace</failure></testcase>'


@pytest.mark.parametrize("is_well", [True, False])
def test_results(tmp_path: Path, is_well: bool) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(XML.format("" if is_well else BAD))
    lines, told_well = gpu_check.results(junit)
    assert told_well is is_well
    assert lines[0] == f"results: 1 passed, {int(not is_well)} failed, 1 skipped"
    assert lines[-1] == "skipped: tests.a::moot: no fabric here: 800"
    assert ("failed: tests.b::bad: off by 3" in lines) is not is_well


def test_all_skipped_is_not_well(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(XML.format("").replace('<testcase classname="tests.a" name="good" time="0.1"/>', ""))
    skipped = "skipped: tests.a::moot: no fabric here: 800"
    assert gpu_check.results(junit) == (["results: 0 passed, 0 failed, 1 skipped", skipped], False)


def test_without_a_device_it_fails_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "tools/gpu_check.py", str(tmp_path / "r.md"), "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    if "device: " in done.stdout:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-check: ")
    assert not (tmp_path / "r.md").exists()
