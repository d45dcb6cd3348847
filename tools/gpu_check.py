"""Run the tests that need a GPU, and say on what and how they went: `make gpu-check`.

    python tools/gpu_check.py [REPORT]        # build/gpu-check.md by default; further arguments go to pytest

Exit code: 0 if every test passed and some ran; 1 otherwise, and at once where there is no device.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from whalez.errors import FabricError
from whalez.fabric.cuda.driver import Device, Driver
from whalez.ops.device.compile import compiler_versions

PACKAGES = ("whalez", "cuda-bindings")


def facts() -> list[str]:
    """What the tests run on. Raises: FabricError without a device."""
    with Device(Driver(), 0) as device:
        major, minor = device.capability
        free, total = (int(value) for value in (device.bind(), device.driver.cuMemGetInfo())[1])
        lines = [
            f"device: {device.name}, compute capability {major}.{minor}, {total / 1e9:.1f} GB, {free / 1e9:.1f} free",
            f"driver: {device.driver_version}",
        ]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES} | compiler_versions()
    return [*lines, "packages: " + ", ".join(f"{name} {version}" for name, version in versions.items())]


def results(junit: Path) -> tuple[list[str], bool]:
    """The lines of a report made from pytest's XML, and whether all is well."""
    cases = list(ET.parse(junit).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed_count = len(cases) - len(failed) - len(skipped)
    lines = [f"results: {passed_count} passed, {len(failed)} failed, {len(skipped)} skipped"]
    for word, some, tags in (("failed", failed, ("failure", "error")), ("skipped", skipped, ("skipped",))):
        for case in some:
            details = [found for tag in tags if (found := case.find(tag)) is not None]
            message = (details[0].get("message") or "").splitlines()
            name = f"{case.get('classname')}::{case.get('name')}"
            lines.append(f"{word}: {name}: {message[0] if message else ''}")
    return lines, bool(passed_count) and not failed


def main(argv: Sequence[str]) -> int:
    report = Path(argv[0] if argv else "build/gpu-check.md")
    try:
        lines = facts()
    except FabricError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "--timeout", "900", f"--junitxml={junit}", *argv[1:]]
        code = subprocess.run(command).returncode
        told, is_well = results(junit) if junit.exists() else ([f"results: pytest ended with code {code}"], False)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("# The tests on a GPU\n\n" + "".join(f"- {line}\n" for line in [*lines, *told]))
    print(f"{told[0]}; {report}")
    return 0 if is_well and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
