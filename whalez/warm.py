"""The kernel cache: compile every numba kernel of the host backend once, in one child process, before ranks start.

Rule 1: nothing heavy is imported here, so that `use_cache` can run before anything imports numba and a launcher that
finds the cache filled pays milliseconds.   Rule 2: numba checks only the file a kernel itself is in, and not the files
of what it inlines; so the folder is named after the contents of all of them, and an edit opens a new folder.

A folder is ready when its stamp says so. It is written last, under a lock, by whoever filled the folder; those who come
meanwhile wait for the lock and find the stamp. Ranks only read; a kernel they miss costs them time, never an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from whalez.config import cache_dir
from whalez.errors import ConfigError, WhalezError
from whalez.version import __version__

NUMBA_VARIABLE = "NUMBA_CACHE_DIR"
STAMP_FILE = "ready"
LOCK_FILE = "lock"
LOCK_S = 600.0  #: another process may fill the cache this long
KEPT_FOLDERS = 8  #: of versions, checkouts and processors; the ones not used for longest go
FILL_COMMAND = (sys.executable, "-P", "-m", "whalez.warm", "--fill")

Progress = Callable[[str, int, int], None]

_PACKAGE = Path(__file__).parent
_KERNELS = ("ops", "fabric")  # where kernels are
_CALLERS = ("model", "parallel", "rehearsal.py")  # what decides the types they are called with
_STEP = "kernel\t"
_CPU_KEYS = ("vendor_id", "model name", "flags", "cpu implementer", "cpu part", "features")


# ---- where ----------------------------------------------------------------------------------------------------
def _sources(parts: Sequence[str], package: Path) -> Iterator[Path]:
    for part in parts:
        path = package / part
        yield from [path] if path.suffix else sorted(path.rglob("*.py"))


def _cpu(cpuinfo: Path) -> str:
    """What of the first processor decides machine code."""
    with contextlib.suppress(OSError):
        first = cpuinfo.read_text().split("\n\n", 1)[0]
        return "\n".join(line for line in first.splitlines() if line.split("\t")[0].strip().lower() in _CPU_KEYS)
    return ""


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


def kernel_folder(root: Path, *, package: Path = _PACKAGE, cpuinfo: Path = Path("/proc/cpuinfo")) -> Path:
    """The folder for the kernels of these sources, this Python and this processor below the cache folder `root`."""
    sources = [(str(path), path.read_bytes()) for path in _sources(_KERNELS, package)]
    python = sys.implementation.cache_tag
    numba = f"{version('numba')}-{version('llvmlite')}"
    cpu = _digest(platform.machine(), _cpu(cpuinfo))
    return root / "kernels" / f"{__version__}-numba{numba}-{python}-{cpu}-{_digest(sources)}"


def stamp_text(package: Path = _PACKAGE) -> str:
    """What a ready folder says: numba drops a kernel whose file has another time or size, and callers choose types."""
    files = [(path, path.stat()) for path in _sources(_KERNELS, package)]
    callers = [path.read_bytes() for path in _sources(_CALLERS, package)]
    return _digest([(str(path), found.st_mtime_ns, found.st_size) for path, found in files], callers)


def kernel_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What a launcher adds to the environment of its ranks."""
    return {NUMBA_VARIABLE: str(kernel_folder(cache_dir(env)))}


def use_cache(env: MutableMapping[str, str]) -> None:
    """Name the kernel cache in this process's own environment. Must run before anything imports numba."""
    assert "numba" not in sys.modules, "numba has read the name of its cache already"
    env.update(kernel_environment(env))


def prepare(env: MutableMapping[str, str]) -> None:
    """For a rank's entry point, before its other imports: fill the cache, or wait for the rank that does, and name it.

    Raises: SystemExit(2) after one line on stderr.
    """
    try:
        warm(env)
    except WhalezError as error:
        print(f"whalez: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    use_cache(env)


# ---- filling --------------------------------------------------------------------------------------------------
def is_ready(folder: Path, stamp: str) -> bool:
    with contextlib.suppress(OSError):
        return (folder / STAMP_FILE).read_text() == stamp
    return False


def warm(env: Mapping[str, str], progress: Progress | None = None, *, command: Sequence[str] = FILL_COMMAND) -> Path:
    """Return the folder of the compiled kernels; fill it first, in a child process, if it is not ready.

    Args:
        progress: called with (kernel, number from 1, how many about) when its compilation begins
    Blocks:   a minute or so when the kernels have to be compiled, milliseconds when not
    Raises:   ConfigError if the folder cannot be written, WhalezError with the child's last words
    """
    folder = kernel_folder(cache_dir(env))
    if is_ready(folder, stamp_text()):
        with contextlib.suppress(OSError):
            os.utime(folder)  # it is in use: others go first
        return folder
    make_folder(folder)
    child = subprocess.Popen(
        [*command, str(folder)],
        env={**env, NUMBA_VARIABLE: str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # Ctrl-C reaches us alone, and we end it
    )
    assert child.stdout is not None
    words: deque[str] = deque(maxlen=3)
    try:
        for line in child.stdout:
            if line.startswith(_STEP):
                if progress is not None:
                    name, number, count = line.rstrip("\n").removeprefix(_STEP).split("\t")
                    progress(name, int(number), int(count))
            elif line.strip():
                words.append(line.strip())
        child.wait()
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        child.stdout.close()
    if child.returncode:
        raise WhalezError(f"compiling the kernels failed with exit code {child.returncode}: {' | '.join(words)}")
    return folder


def make_folder(folder: Path) -> None:
    """Make the cache folder, for this user only: numba runs what it finds there. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"WHALEZ_CACHE: expected a folder for compiled kernels that this user can write, got {folder}: "
            f"{error.strerror}"
        ) from None


def fill(folder: Path, stamp: str, rehearse: Callable[[], None], *, lock_s: float = LOCK_S) -> bool:
    """Fill the folder if it is not ready; one process at a time. Returns whether it was this one.

    Raises: WhalezError when another process holds the lock for `lock_s`.
    """
    with _locked(folder, lock_s):
        if is_ready(folder, stamp):
            return False
        (folder / STAMP_FILE).unlink(missing_ok=True)
        rehearse()
        written = folder / f"{STAMP_FILE}.{os.getpid()}"
        written.write_text(stamp)
        written.replace(folder / STAMP_FILE)
        prune(folder)
        return True


@contextlib.contextmanager
def _locked(folder: Path, lock_s: float) -> Iterator[None]:
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + lock_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WhalezError(f"another process has filled {folder} for more than {lock_s:g} s") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def prune(folder: Path) -> None:
    """Remove the neighbours of `folder` that were not used for longest. Who runs from one has loaded it already."""
    with contextlib.suppress(OSError):
        os.utime(folder)
        others = sorted((p for p in folder.parent.iterdir() if p != folder), key=lambda p: -p.stat().st_mtime_ns)
        for path in others[KEPT_FOLDERS - 1 :]:
            shutil.rmtree(path, ignore_errors=True)


# ---- the child ------------------------------------------------------------------------------------------------
def _kernels_count() -> int:
    """How many kernels there are, about: one of several types counts once."""
    return sum(len(re.findall(r"^@njit", path.read_text(), re.MULTILINE)) for path in _sources(_KERNELS, _PACKAGE))


def _report_compiles() -> None:
    """Print a line whenever numba starts on a kernel of ours."""
    from numba.core import event

    names: list[str] = []
    count = _kernels_count()

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            if function.__module__.startswith("whalez."):
                names.append(function.__name__)
                print(f"{_STEP}{names[-1].strip('_')}\t{len(names)}\t{max(count, len(names))}", flush=True)

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Listener())


def _rehearse() -> None:
    _report_compiles()
    from whalez.rehearsal import rehearse  # compiles the kernels that have explicit signatures

    rehearse()


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """`python -m whalez.warm`: fill the cache of this user and show how it goes."""
    try:
        if argv[:1] == ["--fill"]:
            fill(Path(argv[1]), stamp_text(), _rehearse)
            return 0
        begun = time.monotonic()
        folder = warm(env, lambda name, number, count: print(f"{number}/{count} {name}", flush=True))
        print(f"kernels are ready in {folder} after {time.monotonic() - begun:.1f} s")
    except WhalezError as error:
        print(f"whalez: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
