"""The `whalez` command: what it writes, how it refuses, and that Ctrl-C is one line and two seconds."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_fleet import wait_gone

from helpers.machine import Pauses, python_s
from helpers.ports import free_ports
from whalez import cli
from whalez.engine import captures as capture
from whalez.errors import WhalezError
from whalez.fleet import Fleet, Generated, rank_command
from whalez.hub.requests import Report
from whalez.model.presets import PRESETS
from whalez.serve.process import front_command
from whalez.warm import FILL_COMMAND

HANG_S = 60.0  #: no time that is promised: who takes so long hangs

#: The command with ranks that have no engine.
DRIVER = """
import sys
sys.path.insert(0, {here!r})
import fake_fleet, whalez.fleet
whalez.fleet.rank_command = fake_fleet.fake_command
whalez.fleet.LEAVE_S = whalez.fleet.OWN_LEAVE_S = {leave_s}
whalez.fleet.Fleet._prepare = lambda self: None
from whalez.cli import main
main()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    (folder / "behave.json").write_text("{}")
    (tmp_path / "prompt.json").write_text("[1, 2, 3]")
    return folder


@pytest.fixture
def command(model: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    begun: list[subprocess.Popen] = []

    def begin(*words: Any, leave_s: float = 0.3, stdout: Any = subprocess.PIPE) -> subprocess.Popen:
        code = DRIVER.format(here=str(Path(__file__).parent), leave_s=leave_s)
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            cwd=model.parent,
            env={**os.environ, "TMPDIR": str(model.parent)},
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen, word: str) -> list[str]:
    lines = []
    assert process.stderr is not None
    while True:
        line = process.stderr.readline()
        assert line, f"ended without {word!r}: {lines}"
        lines.append(line.strip())
        if word in line:
            return lines


def pids_in(lines: list[str]) -> list[int]:
    return [int(line.split("pid ")[1].rstrip(")")) for line in lines if "(pid " in line]


# ---- generate -------------------------------------------------------------------------------------------------
@pytest.mark.multiprocess
def test_generate_writes_what_it_was_asked_for(command: Callable[..., Any], model: Path) -> None:
    (model.parent / "two.json").write_text("[[1, 2, 3], [9]]")
    words = [
        "--world",
        "2",
        "--poster",
        "1",
        "--max-tokens",
        "2",
        "--json",
        "out.json",
        "--logits",
        "l.npz",
        "--hidden",
        "h.npz",
        "--segment-floor",
        "64",
    ]
    process = command("generate", "--model", model, "--tokens", "two.json", *words)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert out.splitlines() == ["[2, 3]", "[10, 10]"]
    written = json.loads((model.parent / "out.json").read_text())
    first, second = written["requests"]
    assert first["tokens"] == [2, 3]
    assert second["prompt_tokens"] == 1
    wanted = "finish_reason lane why poster seq gang segments entry_launch ttft_s queue_s rendezvous_s prefill_s phases"
    assert set(wanted.split()) <= set(first)
    assert first["gang"] == [0, 1]
    logits = np.load(model.parent / "l.npz")
    assert sorted(logits) == ["request0_logits", "request1_logits"]
    assert logits["request0_logits"].shape == (3, 4)
    hidden = np.load(model.parent / "h.npz")
    assert int(hidden["request1_start_1"]) == 10
    assert (hidden["request0_hidden_1"] == 1).all()
    assert list(model.parent.glob("whalez-*")) == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["generate", "fleet"])
def test_ctrl_c_is_one_line_within_two_seconds(command: Callable[..., Any], model: Path, name: str) -> None:
    """With a rank that ignores the signal, so that all of the 1.5 s are used.

    The two seconds are those of a machine that runs and is idle. What this one paused meanwhile comes on top, and three
    times what a Python takes here and now: ranks, front and the command itself end one after the other.
    """
    (model / "behave.json").write_text('{"0": "stubborn"}')
    words = ["--tokens", "prompt.json", "--max-tokens", "90000", "--max-ctx", "100000"]
    if name == "fleet":
        words = ["--listen", f"127.0.0.1:{free_ports(3)}"]
    process = command(name, "--model", model, "--world", "2", *words, leave_s=1.5)
    lines = read_until(process, "ranks serve" if name == "generate" else "all ranks: ")
    with Pauses() as pauses:
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # until it is in the middle of its stop
        process.send_signal(signal.SIGINT)  # an impatient second one changes nothing
        _, err = process.communicate(timeout=HANG_S)
        took = time.monotonic() - began
    assert 1.4 < took < 2.0 + pauses.late_s + 3 * python_s()
    assert process.returncode == 128 + signal.SIGINT
    assert err == "whalez: stopped by SIGINT\n"
    wait_gone(pids_in(lines))
    assert list(model.parent.glob("whalez-*")) == []


@pytest.mark.multiprocess
def test_a_failed_start_is_one_line(command: Callable[..., Any], model: Path) -> None:
    (model / "behave.json").write_text('{"1": "dies"}')
    process = command("generate", "--model", model, "--tokens", "prompt.json", "--world", 2)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert out == ""
    assert [line for line in err.splitlines() if "serves" not in line] == [
        "whalez: rank 1 died: exited with 3; its last words: model.safetensors: tensor lm_head is cut short"
    ]


# ---- fleet ----------------------------------------------------------------------------------------------------
@pytest.mark.multiprocess
def test_fleet_restarts_the_world_and_ends_on_sigterm(command: Callable[..., Any], model: Path) -> None:
    port = free_ports(3)
    process = command("fleet", "--model", model, "--world", 2, "--listen", f"127.0.0.1:{port}", "--restart")
    lines = read_until(process, f"all ranks: http://127.0.0.1:{port} ")
    assert any(f"rank 1: http://127.0.0.1:{port + 2}" in line for line in lines)
    first = pids_in(lines)
    os.kill(first[0], signal.SIGKILL)
    lines = read_until(process, f"all ranks: http://127.0.0.1:{port} ")  # again, for there is a new world behind them
    assert all(f"whalez: rank {rank}: http://127.0.0.1:{port + 1 + rank}" in lines for rank in range(2))
    assert any("was killed by SIGKILL" in line and "starting again" in line for line in lines)
    second = pids_in(lines)
    assert len(second) == 2
    assert not set(first) & set(second)
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=HANG_S).status_code == 200
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG_S)
    assert err == "whalez: stopped by SIGTERM\n"
    assert process.returncode == 128 + signal.SIGTERM
    wait_gone(first + second)


# ---- refusals -------------------------------------------------------------------------------------------------
@pytest.fixture
def whalez(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run the command in this process: exit code and stderr."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words: Any) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        return int(ended.value.code or 0), capsys.readouterr().err

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ('{"a": 1}', "expected a list"),
        ("[1, 2.5]", "expected a list"),
        ('["a"]', "expected a list"),
        ("[[1], 2]", "expected a list"),
        ("[true]", "expected a list"),
        ("[]", "list 0: prompt: expected at least one token, got none"),
        ("[[1], []]", "list 1: prompt: expected at least one token, got none"),
        ("[[1], [2, 512]]", "list 1: prompt: expected token ids 0..511, got 512 at position 1"),
        ("[-1]", "list 0: prompt: expected token ids 0..511, got -1 at position 0"),
        (str([1] * 64), "list 0: prompt: expected at most 63 tokens, got 64"),
        (str([1] * 60), "list 0: max_tokens: expected at most 4 after a prompt of 60 tokens, got 16"),
        ("null", "expected a list"),
        pytest.param("[" * 100_000, "nested too deeply", id="deep"),
    ],
)
def test_a_bad_prompt_file_is_named_before_the_start(
    whalez: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    monkeypatch.setattr("whalez.fleet.Fleet", None)
    path = model.parent / "bad.json"
    path.write_text(content)
    code, err = whalez("generate", "--model", model, "--tokens", path, "--max-ctx", 64)
    assert code == 1
    assert err.startswith(f"whalez: {path}: ")
    assert said in err
    assert err.count("\n") == 1


def test_usage_errors_are_2_and_settings_1(whalez: Callable[..., Any], model: Path) -> None:
    prompt = model.parent / "prompt.json"
    good = ["generate", "--model", model, "--tokens", prompt]
    assert whalez(*good, "--poster", 4)[0] == 2
    assert whalez(*good, "--lane", "fast")[0] == 2
    assert whalez(*good, "--max-tokens", 0)[0] == 2
    assert whalez(*good, "--json", "/nowhere/out.json")[0] == 2
    assert whalez("generate", "--model", model / "none", "--tokens", prompt)[0] == 2
    assert whalez("nonsense")[0] == 2
    code, err = whalez(*good, "--segment-floor", 100, "--whale-min", 50)
    assert code == 1
    assert "whale_min" in err
    assert whalez("--version")[0] == 0


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--temperature", "nan", "temperature: expected 0 to 2, got nan"),
        ("--temperature", "-0.5", "temperature: expected 0 to 2, got -0.5"),
        ("--temperature", "inf", "temperature: expected 0 to 2, got inf"),
        ("--top-p", "nan", "top_p: expected above 0 and at most 1, got nan"),
        ("--top-p", "0", "top_p: expected above 0 and at most 1, got 0.0"),
        ("--max-tokens", "0", "max_tokens: expected at least 1, got 0"),
    ],
)
def test_sampling_is_refused_before_the_start_in_the_words_of_http(
    whalez: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch, flag: str, value: str, said: str
) -> None:
    monkeypatch.setattr("whalez.fleet.Fleet", None)  # nothing may start
    code, err = whalez("generate", "--model", model, "--tokens", model.parent / "prompt.json", flag, value)
    assert code == 2
    assert err.endswith(f"Error: {said}\n")


def test_a_fleet_that_holds_its_failed_ranks_does_not_restart(
    whalez: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whalez.fleet.Fleet", None)
    code, err = whalez("fleet", "--model", model, "--listen", "127.0.0.1:1", "--restart", "--hold-on-failure")
    assert code == 2
    assert err.endswith("--restart and --hold-on-failure: a world whose ranks stay cannot start again\n")


@pytest.mark.parametrize("flag", ["--json", "--logits", "--hidden"])
@pytest.mark.parametrize("name", ["no/out", "", "/proc/version", "shut/out"])
def test_an_output_that_cannot_be_written_is_named_before_the_start(
    whalez: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch, flag: str, name: str
) -> None:
    if os.geteuid() == 0 and name == "shut/out":
        pytest.skip("root may write everywhere")
    monkeypatch.setattr("whalez.fleet.Fleet", None)
    (model.parent / "shut").mkdir(mode=0o500)
    out = model.parent / name
    code, err = whalez("generate", "--model", model, "--tokens", model.parent / "prompt.json", flag, out)
    assert code == 2
    assert str(out) in err
    assert "bug" not in err


def test_an_output_that_is_there_is_not_cut_by_the_look_at_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cli.require_writable(out)
    assert list(tmp_path.iterdir()) == []
    out.write_text("before")
    cli.require_writable(out)
    assert out.read_text() == "before"


@pytest.mark.multiprocess
@pytest.mark.parametrize("flag", ["--json", "--logits", "--hidden", ">"])
def test_a_full_disk_is_named_and_the_tokens_are_shown(command: Callable[..., Any], model: Path, flag: str) -> None:
    words = ["generate", "--model", model, "--tokens", "prompt.json", "--world", 1, "--max-tokens", 2]
    if flag == ">":
        with open("/dev/full", "w") as full:
            process = command(*words, stdout=full)
            where = "standard output"
    else:
        process, where = command(*words, flag, "/dev/full"), "/dev/full"
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert err.splitlines()[-1] == f"whalez: {where}: cannot be written: No space left on device"
    assert flag != "--json" or out == "[2, 3]\n"


@pytest.mark.parametrize("listen", ["127.0.0.1", ":8300", "h:", "h:x", "h:70000", "h:²", "h:٣"])
def test_an_address_to_listen_on_is_checked(whalez: Callable[..., Any], model: Path, listen: str) -> None:
    code, err = whalez("fleet", "--model", model, "--listen", listen)
    assert (code, err) == (1, f"whalez: listen: expected HOST:PORT, got {listen!r}\n")


@pytest.mark.parametrize("listen", ["foo.invalid:8300", "a..b:8300"])
def test_an_unknown_host_is_named_before_the_start(
    whalez: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    monkeypatch.setattr("whalez.fleet.Fleet._prepare", None)
    code, err = whalez("fleet", "--model", model, "--listen", listen)
    assert code == 1
    host = listen.partition(":")[0]
    assert re.fullmatch(rf"whalez: cannot listen on {listen}: host '{re.escape(host)}': [^\n]+\n", err), err
    assert "Unknown error" not in err


@pytest.mark.parametrize(
    ("words", "imported"),
    [
        (["-c", "from whalez.entry import main; main()"], "click"),
        (["-m", "whalez.rank"], "click"),
        ([str(Path(__file__).parents[2] / "tools" / "demo.py")], "rich"),
    ],
)
def test_a_signal_while_a_program_is_imported_is_one_line(tmp_path: Path, words: list[str], imported: str) -> None:
    (tmp_path / f"{imported}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(number)
            _, err = process.communicate(timeout=HANG_S)
        assert err == f"whalez: stopped by {number.name}\n"
        assert process.returncode == 128 + number


IN_A_FINALIZER = """
import signal, whalez.fleet
class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
submit = whalez.fleet.Fleet.submit
def submit_and_strike(*arguments, **options):
    pending = submit(*arguments, **options)
    Dying()
    return pending
whalez.fleet.Fleet.submit = submit_and_strike
"""


@pytest.mark.multiprocess
def test_ctrl_c_that_strikes_in_a_finalizer_is_not_lost(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops the exception that a signal's handler raises there."""
    monkeypatch.setattr("test_cli.DRIVER", IN_A_FINALIZER + DRIVER)
    words = ["--tokens", "prompt.json", "--max-tokens", "90000", "--max-ctx", "100000"]
    process = command("generate", "--model", "model", "--world", "1", *words)
    lines = read_until(process, "ranks serve")
    _, err = process.communicate(timeout=HANG_S)
    assert err == "whalez: stopped by SIGINT\n"
    assert process.returncode == 128 + signal.SIGINT
    wait_gone(pids_in(lines))


def test_no_child_imports_from_the_folder_it_is_started_in(model: Path) -> None:
    """A file there could take the name of a module, and would run."""
    fleet = Fleet(model, 1)
    commands = [rank_command(fleet, 0), front_command([], "h:1", "m", model_dir="m"), FILL_COMMAND]
    assert [list(words[:3]) for words in commands] == [[sys.executable, "-P", "-m"]] * 3


def test_the_command_begins_where_signals_are_taken() -> None:
    project = tomllib.loads((Path(cli.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"whalez": "whalez.entry:main"}


def test_a_bug_is_one_line_too(whalez: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "read_prompts", lambda path: 1 / 0)
    code, err = whalez("generate", "--model", model, "--tokens", model.parent / "prompt.json")
    assert code == 1
    assert err == "whalez: ZeroDivisionError: division by zero (this is a bug; --debug shows where)\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom whalez.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'numba', 'zmq', 'starlette', 'uvicorn', 'asyncio') if m in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    for name in ("generate", "fleet", "make-checkpoint", "plan", "doctor"):
        assert f"  {name} " in out
    assert out.splitlines()[-1] == "[]"


# ---- captures -------------------------------------------------------------------------------------------------
def test_a_capture_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "WAIT_S", 0.1)
    report = Report(lane="whale", why="", poster=1, gang=(0, 1))
    result = Generated("r", (1,), "length", 3, report, "")
    folder = tmp_path / "capture" / "r"
    folder.mkdir(parents=True)
    np.savez(folder / "rank-1.npz", logits=np.zeros(2))
    with contextlib.suppress(FileNotFoundError), pytest.raises(WhalezError, match=r"r: rank-0\.npz was not captured"):
        capture.merge_captures(tmp_path, [result], tmp_path / "l.npz", None)
