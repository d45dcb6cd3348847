"""The kernel cache: where it lies, who fills it, and that a process that finds it filled compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from whalez import warm
from whalez.config import cache_dir
from whalez.errors import ConfigError, WhalezError

TESTS = Path(__file__).parent

SECOND_START = """
import sys, tempfile
from pathlib import Path
from numba.core import event

compiled = []

class Listener(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        pass

event.register("numba:compile", Listener())

import numpy as np
from whalez.rehearsal import rehearse
rehearse()
sys.path.insert(0, sys.argv[1])
from helpers.solo import solo  # shared memory, and weights as a rank reads them
from whalez.model.presets import make_checkpoint
with tempfile.TemporaryDirectory() as folder:
    model = Path(folder) / "model"
    make_checkpoint(model, "kimi-linear", "tiny", 0)
    with solo(model, attention_window=100) as one:
        one.prefill(np.arange(150), 90)
        one.decode(3, 150)
print("compiled:", compiled)
"""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_second_start_compiles_nothing() -> None:
    folder = warm.warm(os.environ)
    second = run("-c", SECOND_START, str(TESTS), NUMBA_CACHE_DIR=str(folder))
    assert second.returncode == 0, second.stderr
    assert second.stdout.strip() == "compiled: []"


PREPARE = "import os; from whalez.warm import prepare; prepare(os.environ); print(os.environ['NUMBA_CACHE_DIR'])"


def test_a_rank_started_by_hand_uses_the_same_folder() -> None:
    assert run("-c", PREPARE, NUMBA_CACHE_DIR="/elsewhere").stdout.strip() == str(warm.warm(os.environ))


def test_a_rank_without_a_cache_says_so_in_one_line() -> None:
    done = run("-c", PREPARE, WHALEZ_CACHE="/proc/nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("whalez: WHALEZ_CACHE: expected a folder")
    assert done.stderr.count("\n") == 1


def test_the_module_imports_nothing_heavy() -> None:
    code = "import sys, whalez.warm; print(sorted({'numba', 'numpy', 'scipy', 'zmq'} & set(sys.modules)))"
    assert run("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"WHALEZ_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/whalez"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/whalez"),
        ({"WHALEZ_CACHE": "", "HOME": "/c"}, "/c/.cache/whalez"),
    ],
)
def test_the_cache_lies_where_the_user_says(env: dict[str, str], expected: str) -> None:
    assert cache_dir(env) == Path(expected)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Sources in the shape of the package."""
    for name in ("ops/kda/host.py", "fabric/doorbell.py", "model/forward.py", "parallel/context.py", "rehearsal.py"):
        path = tmp_path / "whalez" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")
    return tmp_path / "whalez"


def test_an_edited_kernel_opens_a_new_folder(tmp_path: Path, package: Path) -> None:
    before = warm.kernel_folder(tmp_path, package=package)
    (package / "model/forward.py").write_text("two")
    assert warm.kernel_folder(tmp_path, package=package) == before
    (package / "ops/kda/host.py").write_text("two")
    assert warm.kernel_folder(tmp_path, package=package) != before


def test_another_processor_opens_a_new_folder(tmp_path: Path, package: Path) -> None:
    names = set()
    for flags, mhz in (("avx2", 1), ("avx2", 2), ("avx2 avx512f", 1)):  # the clock does not matter
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"flags\t\t: {flags}\ncpu MHz\t\t: {mhz}\n\nprocessor\t: 1\n")
        names.add(warm.kernel_folder(tmp_path, package=package, cpuinfo=cpuinfo).name)
    assert len(names) == 2


@pytest.mark.parametrize("name", ["ops/kda/host.py", "model/forward.py"])
def test_a_ready_folder_is_not_ready_for_newer_sources(tmp_path: Path, package: Path, name: str) -> None:
    assert warm.fill(tmp_path, warm.stamp_text(package), lambda: None)
    assert warm.is_ready(tmp_path, warm.stamp_text(package))
    if name.startswith("ops"):
        os.utime(package / name, (1, 1))  # numba drops a kernel whose file has another time
    else:
        (package / name).write_text("two")
    assert not warm.is_ready(tmp_path, warm.stamp_text(package))


def test_of_two_launchers_at_once_one_compiles(tmp_path: Path) -> None:
    inside: list[int] = []
    second = threading.Event()

    def rehearse() -> None:
        inside.append(1)
        if len(inside) > 1:
            second.set()
        second.wait(0.3)  # leaves another one all the time it needs to come in

    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(warm.fill(tmp_path, "s", rehearse))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(inside) == 1
    assert sorted(results) == [False, True]


def test_a_failed_rehearsal_leaves_no_stamp_and_frees_the_lock(tmp_path: Path) -> None:
    (tmp_path / warm.STAMP_FILE).write_text("older")
    with pytest.raises(ZeroDivisionError):
        warm.fill(tmp_path, "s", lambda: print(1 // 0))
    assert not (tmp_path / warm.STAMP_FILE).exists()
    assert warm.fill(tmp_path, "s", lambda: None, lock_s=0)


def test_a_held_lock_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    def rehearse() -> None:
        with pytest.raises(WhalezError, match="another process has filled"):
            warm.fill(tmp_path, "s", lambda: None, lock_s=0)

    assert warm.fill(tmp_path, "s", rehearse)


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_progress_and_last_words_of_the_child(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    child = command("import sys; print('kernel\\tscan\\t1\\t9'); print('numba is unwell'); sys.exit(3)")
    with pytest.raises(WhalezError, match="exit code 3: numba is unwell"):
        warm.warm({"WHALEZ_CACHE": str(tmp_path)}, lambda *step: seen.append(step), command=child)
    assert seen == [("scan", 1, 9)]


def test_an_interrupted_launcher_ends_the_child(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(name: str, number: int, count: int) -> None:
        pids.append(number)
        raise KeyboardInterrupt

    child = command("import os, time; print(f'kernel\\tscan\\t{os.getpid()}\\t9', flush=True); time.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        warm.warm({"WHALEZ_CACHE": str(tmp_path)}, interrupt, command=child)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="WHALEZ_CACHE: expected a folder"):
        warm.warm({"WHALEZ_CACHE": str(tmp_path / "file")}, command=command(""))


def test_old_folders_go(tmp_path: Path) -> None:
    for age in range(warm.KEPT_FOLDERS + 3):
        folder = tmp_path / f"version-{age}"
        folder.mkdir()
        os.utime(folder, (1000 - age, 1000 - age))
    warm.prune(tmp_path / "version-10")  # in use, whatever its age
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"version-10", *(f"version-{age}" for age in range(warm.KEPT_FOLDERS - 1))}
