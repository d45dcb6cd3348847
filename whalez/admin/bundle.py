"""A bundle for a bug report: what every rank answers, and the files of the run folder.

Rule: no token of a prompt, and nothing computed from one, goes in unless it was asked for. So the files are named here
one by one; what is not named stays out.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from whalez.errors import OutputError
from whalez.version import __version__

LOG_BYTES_MAX = 4 << 20  #: of the end of each file
_OF_A_WORLD = ("rank-*.log", "post-mortem-*.json", "trace-*.jsonl")
#: A fleet that starts again puts what a failed world left into world-<n>.
_FILES = ("fleet.json", "front.log", *_OF_A_WORLD, *(f"world-*/{each}" for each in _OF_A_WORLD))
_PROMPT_FILES = ("capture/*/rank-*.npz",)
_PACKAGES = ("numpy", "numba", "scipy", "pyzmq", "msgspec", "safetensors")


def write_bundle(out: Path, answers: Mapping[str, object], run_dir: Path | None, *, with_prompts: bool) -> list[str]:
    """Write the tar.gz, mode 0600, for logs and prompts are nobody else's business; returns the names in it.

    answers: file name -> what goes into it as JSON

    Raises: OutputError; no file is left then, and one that was there before is as it was.
    """
    top = f"whalez-dump-{time.strftime('%Y%m%d-%H%M%S')}"
    contents = {f"{name}.json": _json(told) for name, told in answers.items()}
    contents["versions.json"] = _json(_versions())
    for name, path in _files(run_dir, _FILES + (_PROMPT_FILES if with_prompts else ())):
        contents[f"run/{name}"] = _tail(path)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".whalez-dump-") as folder:
            part = Path(folder) / "part"
            with open(part, "wb", opener=_for_us_only) as file, tarfile.open(fileobj=file, mode="w:gz") as bundle:
                for name, data in contents.items():
                    info = tarfile.TarInfo(f"{top}/{name}")
                    info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
                    bundle.addfile(info, io.BytesIO(data))
            part.replace(out)
    except OSError as error:
        raise OutputError(out, error) from None
    return list(contents)


def _for_us_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _files(run_dir: Path | None, patterns: Sequence[str]) -> list[tuple[str, Path]]:
    if run_dir is None:
        return []
    return [
        (str(path.relative_to(run_dir)), path)
        for pattern in patterns
        for path in sorted(run_dir.glob(pattern))
        if path.is_file() and not path.is_symlink()
    ]


def _tail(path: Path) -> bytes:
    """Arrays whole, of anything else the end: a log that ran for weeks must not fill a bug report."""
    try:
        with path.open("rb") as file:
            if path.suffix != ".npz":
                file.seek(max(0, path.stat().st_size - LOG_BYTES_MAX))
            return file.read()
    except OSError as error:  # moved away meanwhile, or another user's; the rest is worth having
        return f"cannot be read: {error}\n".encode()


def _json(told: object) -> bytes:
    return json.dumps(told, indent=1).encode() + b"\n"


def _versions() -> dict[str, str]:
    found = {"whalez": __version__, "python": sys.version, "platform": platform.platform()}
    for name in _PACKAGES:
        found[name] = metadata.version(name)
    return found
