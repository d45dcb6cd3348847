"""A fleet on this machine: start the rank processes, watch them, talk to them, leave nothing behind.

`with Fleet(model, world=4) as fleet: fleet.generate(tokens, max_tokens=16)`

Rule 1: a rank is only ever a process, a log and a link; nothing of an engine is imported here.
Rule 2: whatever ends a fleet (end of the block, Ctrl-C, a dead rank, a failed start) ends every process of it in 2 s.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import fcntl
import inspect
import operator
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from whalez.config import SETTING_NAMES, fleet_config, setting_flags
from whalez.errors import CheckpointError, ConfigError, OutputError, PeerDied, RequestError, Unavailable, WhalezError
from whalez.hub.address import bracketed
from whalez.hub.requests import Done, Failed, Report, Status, Submit, TokenOut
from whalez.latch import SLICE_S, Latch, Outcome
from whalez.serve.completions import check_sampling, check_tokens, pack_tokens, token_ids
from whalez.serve.endpoints import Endpoints, write_endpoints
from whalez.serve.links import SOCKET_PATH_MAX, Link, admin_address, connect, link_address
from whalez.serve.process import FRONT_GRACE_S, STOP, bind, front_command, held_line, parse_listen
from whalez.serve.tokenizer import load_tokenizer
from whalez.signals import heed
from whalez.warm import kernel_environment, warm

LEAVE_S = 1.5  #: what a rank has after the signal before it is killed
OWN_LEAVE_S = 3.0  #: the same after a peer's death or a drain, when it leaves by itself and has clients to tell
FRONT_LEAVE_S = 0.25  #: what fronts have after the last rank, to tell their clients
FRONT_FAIL_S = 2.0  #: the same when a rank has died: its clients are still to hear which
KILLED_S = 0.25  #: within which the killed are gone, and their ports free
START_S = 300.0  #: the world has this long to come up
STOPPED_S = 2.0  #: a rank that is stopped (SIGSTOP) for so long while the world comes up is dead
RESTARTS_MAX = 5  #: failures in a row after which `serve_on` gives up
STEADY_S = 60.0  #: a world that has served for so long ends a row of failures
BLAME_S = OWN_LEAVE_S + FRONT_FAIL_S + 1.0  #: after a death it is known by then who died
LOG_TAIL_LINES = 3
TEMPORARY = "whalez-"  #: begins the name of a run folder that goes with its fleet
AWAY = "away"  #: in the run folder while a kept front has no world behind it: why
OWN_LOCK = "temporary.lock"  #: held while the fleet of such a folder lives; never in a folder that is to be kept
_DEATH = re.compile(r"^rank (\d+) died: (.*)")  # a PeerDied in a rank's last words
_DRAINED = "exited with 0"  #: a rank does so only after a Stop that all have begun
_OUR_KILL = "did not leave and was killed"

#: Runs in the child before the rank's own program. The kernel kills the child when the launcher is gone, however it
#: went; the mark survives exec. A preexec_fn would do the same but runs Python between fork and exec of a process
#: with threads. Under nohup the launcher ignores SIGHUP and its children would too, but that is how a rank is stopped.
_TIED = (
    "import _signal,ctypes,os,sys;_signal.signal(1,_signal.SIG_DFL);ctypes.CDLL(None).prctl(1,9,0,0,0);"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);os.execv(sys.argv[2],sys.argv[2:])"
)

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """The result of one request."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: str  #: "stop" | "length"
    prompt_tokens: int
    report: Report
    text: str  #: empty when the checkpoint has a vocabulary we cannot read


class Pending:
    """A request on its way. Iterate for the tokens as they come, or take the `result`."""

    def __init__(self, fleet: Fleet, request_id: str, poster: int) -> None:
        self.request_id = request_id
        self.poster = poster
        self._fleet = fleet
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._result: Outcome[Generated] = Outcome()

    def __iter__(self) -> Iterator[int]:
        """Each token once. Raises what `result` raises."""
        while (token := self._tokens.get()) is not None:
            yield token
        self._tokens.put(None)  # a second iteration ends at once instead of waiting for ever
        self.result()

    def result(self, timeout_s: float | None = None) -> Generated:
        """Raises: RequestError, Unavailable or WhalezError as the rank said, the fleet's failure, TimeoutError."""
        return self._result.take(timeout_s)

    def cancel(self) -> None:
        """Lose interest; the result is then an Unavailable unless the request was over already."""
        self._fleet._cancel(self)

    def _settle(self, outcome: Generated | WhalezError) -> None:
        if not self._result.is_known:
            if isinstance(outcome, Generated):
                self._result.settle(outcome)
            else:
                self._result.fail(outcome)
            self._tokens.put(None)


class _Process:
    """One child in its own process group. Owns: the child until `reap`, its pidfd, nothing of its log."""

    def __init__(self, name: str, rank: int | None, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.rank = rank
        self.log = log
        self.how = ""  #: how it ended; empty while it runs
        self.killed_by_signal = False
        self.exited = asyncio.Event()
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C reaches the launcher only, which then signals once
                env={**os.environ, **kernel_environment(os.environ)},
            )
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.is_reaped = False
        self.is_leaving = False
        self._stopped_at: float | None = None

    def note_exit(self) -> None:
        """The pidfd is readable. The child is not reaped yet, so that its pid keeps naming its process group."""
        told = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert told is not None
        self.killed_by_signal = told.si_code != os.CLD_EXITED
        if self.killed_by_signal:
            self.how = f"was killed by {signal.Signals(told.si_status).name}"
        else:
            self.how = f"exited with {told.si_status}"
        self.exited.set()

    def stopped_s(self) -> float:
        """For how long every look has found it stopped (SIGSTOP); 0 when it runs or is gone."""
        told = None
        with contextlib.suppress(ChildProcessError):  # it has exited
            told = os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if told is None:
            self._stopped_at = None
            return 0.0
        now = time.monotonic()
        self._stopped_at = self._stopped_at or now
        return now - self._stopped_at

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ask_to_leave(self) -> None:
        """Once: a second signal means "at once". A rank that SIGTERM has told to leave takes this one as its first."""
        if not self.is_leaving:
            self.is_leaving = True
            self.signal(signal.SIGTERM if self.rank is None else STOP)

    def reap(self) -> None:
        """Kill what is left of the group, the child's own children included, and collect the child. Idempotent."""
        if self.is_reaped:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self.is_reaped = True
        os.close(self.pidfd)

    def is_alone(self) -> bool:
        """No other process is left of its group: a rank's own front has gone."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid != int(folder.name) and state != "Z":
                    return False
        return True

    def last_words(self) -> str:
        """The end of its log, on one line."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 4096))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            if line.startswith("whalez: "):  # it said itself why
                return line.removeprefix("whalez: ").removeprefix(f"{self.name}: ")
        said = [line.strip() for line in lines if line.strip() and not line.startswith("listening on ")]
        return " | ".join(said[-LOG_TAIL_LINES:])

    def obituary(self) -> str:
        words = self.last_words()
        return f"{self.how}; its last words: {words}" if words else f"{self.how} without a word"


RankCommand = Callable[["Fleet", int], list[str]]


def rank_command(fleet: Fleet, rank: int) -> list[str]:
    """The command line of one rank."""
    command = [sys.executable, "-P", "-m", "whalez.rank", "--rank", str(rank), "--world", str(fleet.world)]
    command += ["--hub", fleet.hub_address, "--model", str(fleet.model), "--run", str(fleet.run_dir)]
    # Its own id keeps this fleet's shared memory apart.
    command += ["--fleet-id", fleet.fleet_id, "--start-timeout", str(fleet.start_s), "--threads", str(fleet.threads)]
    if fleet.keys is not None:
        command += ["--keys", str(fleet.keys)]
    command += [f"--{name}" for name in ("pin", "capture", "trace") if getattr(fleet, name)]
    command += ["--hold-on-failure"] if fleet.hold_on_failure else []
    if fleet.listen is not None:
        host, port = parse_listen(fleet.listen)
        command += ["--listen", f"{bracketed(host)}:{port + 1 + rank}"]
    return command + setting_flags(fleet.settings)


class Fleet:
    """All ranks of a world on this machine.

    Owns:      the rank processes, the front process, the run folder when it made it
    Closed by: `stop`, or the end of the `with` block
    Blocks:    start until every rank serves; stop at most 2 s

    Args:
        model: checkpoint folder
        world: number of ranks
        listen: `H:P` of one URL for all ranks; rank r's own is on port P + 1 + r. None: no HTTP
        run_dir: logs, sockets, captures and post-mortems; kept when given, else a temporary folder that goes with the
            fleet, unless a post-mortem lies in it
        threads: GEMM threads of a rank; None: cores / world
        pin: bind every rank to cores of its own
        capture: have every rank write logits and hidden rows of each request to run_dir/capture/<request id>
        trace: have every rank write one line per prefill launch to run_dir
        keep_front: the front outlives a failed world and answers 503 until `restart` or `stop`
        keys: folder of `whalez keys`: only ranks with a key of it join the hub
        hold_on_failure: a rank that fails stays for a debugger, and no other is killed, until `stop`; a world of which
            ranks stay cannot start again, so not with `keep_front`
        start_s: the world has this long to come up
        progress: called with one line for each thing that happened
        settings: fleet settings by name (`segment_floor=64`), see `FleetConfig`
    """

    def __init__(
        self,
        model: str | Path,
        world: int = 4,
        *,
        listen: str | None = None,
        run_dir: str | Path | None = None,
        threads: int | None = None,
        pin: bool = False,
        capture: bool = False,
        trace: bool = False,
        keep_front: bool = False,
        keys: str | Path | None = None,
        hold_on_failure: bool = False,
        start_s: float = START_S,
        progress: Callable[[str], None] | None = None,
        command: RankCommand | None = None,
        **settings: Any,
    ) -> None:
        self.model = Path(model)
        if not (self.model / "config.json").is_file():
            raise CheckpointError(f"{self.model}: no config.json, so not a checkpoint")
        if unknown := set(settings) - set(SETTING_NAMES):
            raise ConfigError(f"{min(unknown)}: not a fleet setting; there are {', '.join(SETTING_NAMES)}")
        fleet_config(self.model, world, settings)  # refuses a bad setting by name before anything starts
        if listen is not None:
            port = parse_listen(listen)[1]
            if not 0 < port <= 65535 - world:
                raise ConfigError(f"listen: expected a port between 1 and {65535 - world}, got {port}")
        if hold_on_failure and keep_front:
            raise ConfigError("hold_on_failure: not with keep_front, for a world whose ranks stay cannot start again")
        self.world = world
        self.listen = listen
        self.settings = settings
        self.threads = threads or max(1, len(os.sched_getaffinity(0)) // world)
        self.pin = pin
        self.capture = capture
        self.trace = trace
        self.keep_front = keep_front
        self.keys = Path(keys).resolve() if keys is not None else None
        self.hold_on_failure = hold_on_failure
        self.fleet_id = secrets.token_hex(6)
        self.tokenizer = load_tokenizer(self.model)
        self.run_dir = Path(run_dir) if run_dir is not None else Path()  #: the real one once started
        self.failure: WhalezError | None = None  #: why the fleet is over, once it is
        self._is_own_run_dir = run_dir is None
        self.start_s = start_s
        self._tell = progress
        self._command = command or rank_command
        self._lock_fd: int | None = None
        self._gate = threading.Lock()  # guards the next: what is handed to a loop is handed to one that still runs it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Everything below belongs to the loop's thread.
        self._processes: list[_Process] = []
        self._links: list[Link] = []
        self._open: dict[Pending, asyncio.Task[None]] = {}
        self._calls: dict[Outcome[Any], asyncio.Task[None]] = {}
        self._statuses: list[Status | None] = [None] * world
        self._failing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None  # over ranks that are held
        self._released = asyncio.Event()  # of what is held
        self._stopping = Latch()
        self._has_served = False
        self._worlds_failed = 0
        self._over = Latch()

    # ---- life -------------------------------------------------------------------------------------------------
    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def hub_address(self) -> str:
        return f"ipc://{self.run_dir}/hub.sock"

    @property
    def links(self) -> list[str]:
        return [link_address(self.run_dir, rank) for rank in range(self.world)]

    @property
    def _admin_addresses(self) -> tuple[str, ...]:
        return tuple(admin_address(self.run_dir, rank) for rank in range(self.world))

    def start(self) -> None:
        """Return when every rank serves. Raises WhalezError with the rank and its last words; nothing is left then."""
        assert self._thread is None, "started twice"
        if self._stopping.is_set:
            raise WhalezError("this fleet has been stopped and does not start again; make another")
        if self.listen is not None:
            # A taken port should not cost the time it takes to load a model.
            host, port = parse_listen(self.listen)
            for offset in range(self.world + 1):
                bind(f"{host}:{port + offset}").close()
        if self._command is rank_command:
            self._prepare()
        if self.keys is not None:
            from whalez.hub.keys import load_keys  # zmq: not for those who only import Fleet

            for name in ("hub", "rank"):
                load_keys(self.keys).pair(name)  # refused by name before anything starts
        try:
            self._take_run_dir()
            self._loop = asyncio.new_event_loop()
            # The kernel ties the children to the thread that started them, so that thread lives as long as the fleet.
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="whalez-fleet", daemon=True)
            self._thread.start()
            atexit.register(self.stop)
            self._call(self._start_all())
        except BaseException:
            self.stop()
            raise

    def _prepare(self) -> None:
        """Refuse what cannot work here before anything starts, and compile the kernels once for all ranks."""
        from whalez.doctor import Machine, examine, refuse  # numpy: not for those who only import Fleet

        here = Machine(env=os.environ)
        findings = examine(self.world, self.model, self.settings, self.threads, machine=here, quick=True)
        refuse(findings)
        for finding in findings:
            if finding.level == "warn":
                self._progress(f"{finding.name}: {finding.text}; {finding.advice}")
        sweep_leftovers()
        warm(os.environ, lambda name, i, n: self._progress(f"compiling {name} ({i}/{n})"))

    def stop(self) -> None:
        """One signal each; what has not left after 1.5 s is killed. Idempotent, also after a failure."""
        heed()
        atexit.unregister(self.stop)
        self._stopping.set()  # here too: a second Ctrl-C may keep `_stop_all` from running
        loop, thread = self._loop, self._thread
        try:
            if loop is not None and thread is not None and thread.is_alive():
                self._call(self._stop_all())
        finally:
            self._over.set()
            for process in self._processes:  # only a second Ctrl-C leaves any
                process.reap()
            with self._gate:
                self._loop = None
            if loop is not None and thread is not None and thread.is_alive():
                loop.call_soon_threadsafe(loop.stop)
                thread.join(timeout=1.0)
                if not thread.is_alive():
                    loop.close()
            self._thread = None
            for pending in list(self._open):
                pending._settle(self.failure or Unavailable("the fleet is stopping"))
            self._sweep()

    def wait(self) -> None:
        """Until the fleet fails (raised), has drained, or another thread stops it."""
        self._over.wait()
        if self.failure is not None:
            raise self.failure

    def restart(self) -> None:
        """After a failure: start the world again, behind the front if that was kept; return when it serves.

        Logs, traces and post-mortems of the world before go to run_dir/world-<number>.
        Raises: WhalezError, and is then in failure as before; Unavailable when it is stopped meanwhile.
        """
        assert self.failure is not None, "nothing has failed"
        self._call(self._restart())

    def serve_on(self) -> None:
        """`wait`, and start the world again whenever it fails, after a pause that doubles from 0.5 to 8 s.

        Returns when another thread stops it. Raises: the failure that is the sixth in a row.
        """
        failures, began = 0, time.monotonic()
        while True:
            try:
                self.wait()
                return
            except WhalezError as error:
                if time.monotonic() - began > STEADY_S:
                    failures = 0
                failures += 1
                if failures > RESTARTS_MAX:
                    raise
                pause_s = min(8.0, 0.5 * 2 ** (failures - 1))
                self._progress(f"{error}; starting again in {pause_s:g} s, {failures} of {RESTARTS_MAX} in a row")
            if self._stopping.wait(pause_s):
                return
            with contextlib.suppress(WhalezError):  # `wait` raises it again
                self.restart()
            began = time.monotonic()

    # ---- requests ---------------------------------------------------------------------------------------------
    def submit(
        self,
        prompt: str | Iterable[int],
        *,
        max_tokens: int = 16,
        poster: int = 0,
        lane: str = "auto",
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
    ) -> Pending:
        """Hand a prompt to rank `poster` and return at once; several may be on their way.

        stop_tokens: None means the model's end-of-text ids; () runs to max_tokens
        Raises: RequestError, ConfigError before anything is sent; the fleet's failure.
        """
        if not 0 <= poster < self.world:
            raise ConfigError(f"poster: expected 0 to {self.world - 1}, got {poster}")
        if lane not in ("auto", "whale", "local"):
            raise ConfigError(f"lane: expected auto, whale or local, got {lane!r}")
        # Else the rank could not read the request, would not know whom to answer, and `result` would wait for ever.
        max_tokens, seed = operator.index(max_tokens), operator.index(seed)
        check_sampling(temperature, top_p)
        if self.failure is not None:
            raise self.failure
        status = self._statuses[poster]
        if self._loop is None or status is None:  # looked at again below; this one spares the work
            raise Unavailable("the fleet is not running")
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        check_tokens(tokens, max_tokens, status.max_ctx, status.vocab_size)
        pending = Pending(self, f"fleet-{secrets.token_hex(8)}", poster)
        submit = Submit(
            request_id=pending.request_id,
            tokens=pack_tokens(tokens),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_tokens=status.eos_tokens if stop_tokens is None else tuple(map(operator.index, stop_tokens)),
            lane=lane,
        )
        with self._gate:
            if self._loop is None:
                raise self.failure or Unavailable("the fleet is not running")
            self._loop.call_soon_threadsafe(self._begin, submit, pending)
        return pending

    def generate(self, prompt: str | Iterable[int], *, timeout_s: float | None = None, **options: Any) -> Generated:
        """`submit` and wait for the result. A request that times out or is interrupted is cancelled."""
        pending = self.submit(prompt, **options)
        try:
            return pending.result(timeout_s)
        except BaseException:
            pending.cancel()
            raise

    def status(self, timeout_s: float = 1.0) -> list[Status | None]:
        """Every rank's own word, None for one that does not answer. Raises: Unavailable, the fleet's failure."""
        return self._call(self._ask_all(timeout_s))

    def pids(self) -> dict[str, int]:
        """Name ("rank 0", "front") -> process id."""
        return {process.name: process.pid for process in self._processes}

    # ---- the loop's thread: processes -------------------------------------------------------------------------
    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Raises: what the work raises; Unavailable, or the fleet's failure, when the loop ends before it."""
        over = self.failure or Unavailable("the fleet is not running")
        with self._gate:
            if self._loop is None:
                work.close()
                raise over
            loop, thread = self._loop, self._thread
            outcome: Outcome[_T] = Outcome()
            loop.call_soon_threadsafe(self._begin_call, outcome, work)
        try:
            while not outcome.latch.wait(SLICE_S):
                if thread is None or not thread.is_alive():
                    if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                        work.close()  # it came too late to begin
                    raise over
            return outcome.take()
        except asyncio.CancelledError:
            raise self.failure or Unavailable("the fleet is stopping") from None
        except BaseException:
            # Ctrl-C here must not leave the work running there.
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._cancel_call, outcome)
            raise

    def _begin_call(self, outcome: Outcome[_T], work: Coroutine[Any, Any, _T]) -> None:
        # The task is this thread's alone: the caller's would run the callbacks of its end, in which Python drops what a
        # signal's handler raises.
        self._calls[outcome] = asyncio.create_task(_settle(outcome, work))
        self._calls[outcome].add_done_callback(lambda _: self._calls.pop(outcome))

    def _cancel_call(self, outcome: Outcome[Any]) -> None:
        if outcome in self._calls:
            self._calls[outcome].cancel()

    async def _restart(self) -> None:
        from whalez.fabric.host import remove_leftovers  # numpy: not for those who only import Fleet

        self._put_away()
        remove_leftovers(self.fleet_id)
        await asyncio.gather(*(link.close() for link in self._links))
        for process in self._processes:
            if process.exited.is_set():
                process.reap()  # a front that went while there was no world
        self._processes = [p for p in self._processes if not p.is_reaped]
        self._statuses = [None] * self.world
        self._failing = self.failure = None
        self._over.clear()
        try:
            await self._start_all()
        except WhalezError as error:
            if self._stopping.is_set:
                raise
            if self._failing is None:  # it did not come up in time
                for process in self._processes:
                    if process.rank is not None:
                        process.signal(signal.SIGKILL)
                late = error  # `error` is gone when the block is left
                self._failing = asyncio.create_task(self._end_world(lambda: late))
            await self._failing
            raise

    def _put_away(self) -> None:
        """What the failed world wrote, into a folder of its own."""
        self._worlds_failed += 1
        folder = self.run_dir / f"world-{self._worlds_failed}"
        folder.mkdir(exist_ok=True)
        for pattern in ("rank-*.log", "post-mortem-*.json", "trace-*.jsonl"):
            for path in self.run_dir.glob(pattern):
                path.rename(folder / path.name)

    async def _start_all(self) -> None:
        for rank in range(self.world):
            self._spawn(f"rank {rank}", rank, self._command(self, rank), self.run_dir / f"rank-{rank}.log")
        self._links = [connect(address) for address in self.links]
        began = time.monotonic()
        await self._unless_failed({f"rank {rank}": self._until_serving(rank) for rank in range(self.world)}, began)
        (self.run_dir / AWAY).unlink(missing_ok=True)
        if self.listen is not None:
            if all(process.rank is not None for process in self._processes):  # else one has outlived a world
                self._start_front(self.listen)
            host, port = parse_listen(self.listen)
            fronts = {"front": self._until_front_serves(host, port)}
            for process in self._processes:
                if process.rank is not None:
                    work = self._until_front_serves(host, port + 1 + process.rank, process)
                    fronts[f"the front of {process.name}"] = work
            await self._unless_failed(fronts, began)
        self._has_served = True
        if self.hold_on_failure:
            self._watching = asyncio.create_task(self._tell_of_held())
        self._progress(f"{self.world} ranks serve after {time.monotonic() - began:.1f} s")
        if self.listen is not None:
            self._say_urls(self.listen)

    def _progress(self, line: str) -> None:
        if self._tell is not None:
            with contextlib.suppress(OSError):  # whoever read it is gone; the fleet is not to hang or end for that
                self._tell(line)

    def _say_urls(self, listen: str) -> None:
        host, port = parse_listen(listen)
        shown = bracketed(host)
        for rank in range(self.world):
            self._progress(f"rank {rank}: http://{shown}:{port + 1 + rank}")
        self._progress(f"all ranks: http://{shown}:{port} (logs in {self.run_dir})")

    async def _unless_failed(self, works: Mapping[str, Coroutine[Any, Any, None]], began: float) -> None:
        """Wait for all that is to come up, by name. Raises the fleet's failure as soon as there is one."""
        tasks = {name: asyncio.create_task(work) for name, work in works.items()}
        work = asyncio.gather(*tasks.values())
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=0.1)
                if self._failing is not None:
                    await self._failing
                    assert self.failure is not None
                    raise self.failure
                if self._stopping.is_set:
                    raise Unavailable("the fleet was stopped")
                for process in self._processes:
                    if process.rank is not None and process.stopped_s() > STOPPED_S:
                        raise PeerDied(process.rank, f"stopped for {STOPPED_S:g} s while the world came up")
                if not work.done() and time.monotonic() - began > self.start_s:
                    raise WhalezError(self._who_is_late([name for name, task in tasks.items() if not task.done()]))
            work.result()
        finally:
            for task in tasks.values():  # of a gather that one of them has ended the others go on
                task.cancel()
            await asyncio.gather(work, *tasks.values(), return_exceptions=True)

    def _who_is_late(self, names: Sequence[str]) -> str:
        """A rank's front writes where its rank does."""
        logs = [process.last_words() for process in self._processes if names[0].endswith(process.name)]
        words = "; ".join(f"last words: {log}" for log in logs if log)
        return f"not serving after {self.start_s:g} s: {', '.join(names)}" + (f"; {words}" if words else "")

    async def _until_serving(self, rank: int) -> None:
        while True:
            with contextlib.suppress(TimeoutError, WhalezError):
                status = await self._links[rank].status(1.0)
                if status.state == "serving":
                    self._statuses[rank] = status
                    self._progress(f"rank {rank} serves (pid {status.pid})")
                    return
            await asyncio.sleep(0.05)

    def _start_front(self, listen: str) -> None:
        command = front_command(
            self.links,
            listen,
            self.model.resolve().name,
            model_dir=str(self.model),
            grace_s=LEAVE_S + FRONT_GRACE_S,
            away=str(self.run_dir / AWAY),
        )
        self._spawn("front", None, command, self.run_dir / "front.log")

    async def _until_front_serves(self, host: str, port: int, parent: _Process | None = None) -> None:
        """Until a front says that its ranks are well; it asks them to say so, and from then on it passes requests.

        parent: the rank whose own it is. Raises: WhalezError with its last words when that one has ended.
        """
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except OSError:
                if parent is not None and parent.is_alone():
                    raise WhalezError(f"the front of {parent.name} has ended: {parent.last_words()}") from None
            else:
                try:
                    with contextlib.suppress(OSError):
                        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                        if b" 200 " in await reader.readline():
                            return
                finally:
                    writer.close()
            await asyncio.sleep(0.05)

    def _spawn(self, name: str, rank: int | None, command: Sequence[str], log: Path) -> None:
        if self._stopping.is_set:
            raise Unavailable("the fleet was stopped")
        process = _Process(name, rank, command, log)
        self._processes.append(process)
        asyncio.get_running_loop().add_reader(process.pidfd, self._note_exit, process)

    def _note_exit(self, process: _Process) -> None:
        asyncio.get_running_loop().remove_reader(process.pidfd)
        process.note_exit()
        if process.rank is None and self.hold_on_failure and self._has_served and not self._stopping.is_set:
            self._progress(f"{process.name} {process.obituary()}; the ranks serve on until this fleet is stopped")
        elif not self._stopping.is_set and self._failing is None:
            self._failing = asyncio.create_task(self._fail(process))

    async def _fail(self, first: _Process) -> None:
        """A process is gone: the others leave by themselves and say why, or are killed. All with 0 were drained."""
        has_drained = first.rank is not None and first.how == _DRAINED
        if self.hold_on_failure and self._has_served and not has_drained:
            self._progress(f"{first.name} {first.obituary()}; the others are held until this fleet is stopped")
            await self._released.wait()
        if has_drained:
            await self._leave(OWN_LEAVE_S, FRONT_FAIL_S)
            if all(p.how == _DRAINED for p in self._processes if p.rank is not None):
                self._progress("the fleet was drained and has left")
                await self._end_requests(Unavailable("the fleet was drained"))
                self._over.set()
                return
        await self._end_world(lambda: self._blame(first))

    async def _end_world(self, blame: Callable[[], WhalezError]) -> None:
        """`blame` is asked when all have left, and once before for those who ask the front meanwhile."""
        if self.keep_front:
            self._say_away(blame())
        # Of a world that was coming up nobody has a peer yet whose death would make it leave.
        ranks_s = OWN_LEAVE_S if self._has_served else LEAVE_S
        await self._leave(ranks_s, FRONT_FAIL_S, keep_front=self.keep_front)
        self.failure = blame()
        if self.keep_front:
            self._say_away(self.failure)
        await self._end_requests(self.failure)
        self._over.set()

    def _say_away(self, why: WhalezError) -> None:
        """For the front: it refuses with these words while the file is there."""
        part = self.run_dir / f"{AWAY}.part"
        part.write_text(f"{why}; the fleet is starting again")
        part.rename(self.run_dir / AWAY)

    async def _tell_of_held(self) -> None:
        """Say once of every rank that has failed and stays, with the line to attach. Runs until cancelled."""
        told: set[int] = set()
        while True:
            for status in await self._ask_all(1.0):
                if status is not None and status.state == "failed" and status.rank not in told:
                    told.add(status.rank)
                    self._progress(f"rank {status.rank} failed: {status.trouble}")
                    self._progress(f"rank {status.rank} is {held_line(status.pid)}")
            await asyncio.sleep(0.5)

    def _blame(self, first: _Process) -> WhalezError:
        """Who ended the fleet: a killed rank, even if a peer left before we saw it; else whom the first one names."""
        if first.rank is None:
            return WhalezError(f"{first.name} {first.obituary()}")
        killed = [p for p in self._processes if p.rank is not None and p.killed_by_signal]
        if killed:
            assert killed[0].rank is not None
            return PeerDied(killed[0].rank, killed[0].obituary())
        if named := _DEATH.search(first.last_words()):
            return PeerDied(int(named[1]), named[2])
        return PeerDied(first.rank, first.obituary())

    async def _leave(self, ranks_s: float, fronts_s: float, *, keep_front: bool = False) -> None:
        """Wait for all to exit, kill the rest, reap everything. Fronts go last: they pass on how ranks ended."""
        ranks = [p for p in self._processes if p.rank is not None]
        kept = [p for p in self._processes if p.rank is None and keep_front and not p.exited.is_set()]
        fronts = [p for p in self._processes if p.rank is None and p not in kept]
        await self._until_exited(ranks, ranks_s)
        deadline = time.monotonic() + fronts_s
        for front in fronts:
            front.ask_to_leave()
        await self._until_exited(fronts, fronts_s)
        if self.listen is not None:  # then ranks have fronts of their own
            while time.monotonic() < deadline and not all(rank.is_alone() for rank in ranks):
                await asyncio.sleep(0.02)
        for process in (*ranks, *fronts):
            process.reap()
        # What a rank started itself is nobody's child any more; it is dying, but not in no time.
        deadline = time.monotonic() + KILLED_S
        while time.monotonic() < deadline and not all(process.is_alone() for process in (*ranks, *fronts)):
            await asyncio.sleep(0.01)

    async def _until_exited(self, processes: Sequence[_Process], seconds: float) -> None:
        """Kills what has not exited by then."""
        waits = [asyncio.create_task(p.exited.wait()) for p in processes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            for task in late:
                task.cancel()
        for process in processes:
            if not process.exited.is_set():
                asyncio.get_running_loop().remove_reader(process.pidfd)
                process.how = _OUR_KILL
                process.signal(signal.SIGKILL)

    async def _stop_all(self) -> None:
        self._stopping.set()
        if self._watching is not None:
            self._watching.cancel()
        if self._failing is not None:
            if self.hold_on_failure:
                for process in self._processes:
                    process.ask_to_leave()
                self._released.set()
            await self._failing
            if self.keep_front:
                await self._leave(LEAVE_S, FRONT_LEAVE_S)
        else:
            for process in self._processes:
                process.ask_to_leave()
            await self._end_requests(Unavailable("the fleet is stopping"))
            await self._leave(LEAVE_S, FRONT_LEAVE_S)
        await asyncio.gather(*(link.close() for link in self._links))
        # An interrupted start may still be unwinding; the loop must not end under it.
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in rest:
                task.cancel()
            await asyncio.wait(rest, timeout=0.2)

    # ---- the loop's thread: requests --------------------------------------------------------------------------
    def _begin(self, submit: Submit, pending: Pending) -> None:
        if self._failing is not None and not self._failing.done() and self.failure is None:
            self._failing.add_done_callback(lambda _: self._begin(submit, pending))  # then it is known who died
            return
        if self._stopping.is_set or self._failing is not None:
            pending._settle(self.failure or Unavailable("the fleet is stopping"))
            return
        task = asyncio.create_task(self._serve(submit, pending))
        self._open[pending] = task
        task.add_done_callback(lambda _: self._open.pop(pending, None))

    def _cancel(self, pending: Pending) -> None:
        async def cancel() -> None:
            if pending in self._open:
                await self._links[pending.poster].cancel(pending.request_id)

        with self._gate:
            if self._loop is not None and not pending._result.is_known:
                asyncio.run_coroutine_threadsafe(cancel(), self._loop)

    async def _serve(self, submit: Submit, pending: Pending) -> None:
        where = f"rank {pending.poster}"
        try:
            async for response in self._links[pending.poster].submit(submit):
                match response:
                    case TokenOut():
                        pending._tokens.put(response.token)
                    case Done():
                        pending._settle(self._generated(response))
                    case Failed(kind="gone"):
                        await asyncio.sleep(BLAME_S)  # `_end_requests` comes before, if that was a death
                        pending._settle(_failure(response, where))
                    case Failed():
                        pending._settle(_failure(response, where))
        except WhalezError as error:
            pending._settle(error)
        pending._settle(Unavailable(f"{where}: the link closed before the request was over"))

    async def _end_requests(self, why: WhalezError) -> None:
        tasks = list(self._open.values())
        for pending in list(self._open):
            pending._settle(why)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_all(self, timeout_s: float) -> list[Status | None]:
        answers = await asyncio.gather(*(link.status(timeout_s) for link in self._links), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, (TimeoutError, WhalezError)):
                raise answer
        return [answer if isinstance(answer, Status) else None for answer in answers]

    def _generated(self, done: Done) -> Generated:
        return Generated(
            request_id=done.request_id,
            tokens=done.tokens,
            finish_reason=done.finish_reason,
            prompt_tokens=done.prompt_tokens,
            report=done.report,
            text=self.tokenizer.decode(done.tokens),
        )

    # ---- the run folder ---------------------------------------------------------------------------------------
    def _take_run_dir(self) -> None:
        """Make and lock the folder. Raises ConfigError when it is too deep for a socket or in use, OutputError."""
        try:
            if self._is_own_run_dir:
                self.run_dir = Path(tempfile.mkdtemp(prefix=TEMPORARY))
            else:
                self.run_dir = self.run_dir.resolve()
                self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # its sockets ask for no key
        except OSError as error:
            raise OutputError(error.filename or "run_dir", error) from None
        longest = self._admin_addresses[-1].removeprefix("ipc://")
        if len(os.fsencode(longest)) > SOCKET_PATH_MAX:
            raise ConfigError(f"run_dir: a socket path has at most {SOCKET_PATH_MAX} bytes, {longest} is longer")
        lock = self.run_dir / (OWN_LOCK if self._is_own_run_dir else "fleet.lock")
        try:
            self._lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OutputError(lock, error) from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            self._lock_fd = None
            raise ConfigError(f"run_dir: another fleet runs in {self.run_dir}") from None
        told = Endpoints(
            fleet_id=self.fleet_id,
            world=self.world,
            model=str(self.model.resolve()),
            hub=self.hub_address,
            launcher_pid=os.getpid(),
            admin=self._admin_addresses,
        )
        try:
            write_endpoints(self.run_dir, told)
        except OSError as error:
            raise OutputError(error.filename or self.run_dir, error) from None

    def _sweep(self) -> None:
        """Remove what a killed rank cannot remove itself: names of shared memory, sockets, and our own run folder."""
        from whalez.fabric.host import remove_leftovers  # numpy: not for those who only import Fleet

        remove_leftovers(self.fleet_id)
        if self._lock_fd is not None:
            for address in (self.hub_address, *self.links, *self._admin_addresses):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = None
        if self._is_own_run_dir and self.run_dir != Path():
            # A fleet that never served has said all there is to say in its error.
            has_failed = self.failure is not None or self._worlds_failed > 0
            if has_failed and self._has_served and any(self.run_dir.glob("**/post-mortem-*.json")):
                (self.run_dir / OWN_LOCK).unlink(missing_ok=True)  # no longer temporary
                self._progress(f"logs and post-mortems are in {self.run_dir}")
            else:
                shutil.rmtree(self.run_dir, ignore_errors=True)
            self._is_own_run_dir = False


async def _settle(outcome: Outcome[_T], work: Coroutine[Any, Any, _T]) -> None:
    try:
        outcome.settle(await work)
    except BaseException as error:  # of the work, or that it was cancelled: for the caller to see
        outcome.fail(error)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Until it is stopped; what was handed to it too late to finish is cancelled, so that nobody waits for it."""
    loop.run_forever()
    if rest := asyncio.all_tasks(loop):
        for task in rest:
            task.cancel()
        loop.run_until_complete(asyncio.wait(rest, timeout=0.2))


def sweep_leftovers() -> list[str]:
    """Remove what fleets of this user left whose launcher was killed: slabs without a maker, temporary run folders.

    Returns their names. Nothing of a fleet that lives, or that was asked to keep its folder, is touched.
    """
    from whalez.fabric.host import sweep, unused_file  # numpy: not for those who only import Fleet

    swept = sweep()
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), unused_file(str(folder / OWN_LOCK)):
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(str(folder))
    return swept


def _failure(failed: Failed, where: str) -> WhalezError:
    if failed.kind == "invalid":
        return RequestError(failed.reason, param=failed.param)
    reason = failed.reason if where in failed.reason else f"{where}: {failed.reason}"
    return Unavailable(reason) if failed.kind in ("unavailable", "gone", "cancelled") else WhalezError(reason)
