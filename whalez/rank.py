"""`python -m whalez.rank`: one rank process, put together from its parts. The composition root."""

from __future__ import annotations

if __name__ == "__main__":
    import whalez.early  # noqa: F401

import gc
import os

from whalez.warm import prepare

if __name__ == "__main__":  # before anything imports numba, which reads the name of its cache once
    gc.disable()  # imports make objects that stay: looking through them again and again is an eighth of their time
    prepare(os.environ)

import contextlib
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import click
import msgspec
from threadpoolctl import threadpool_limits

from whalez.config import (
    FleetConfig,
    RankConfig,
    fleet_config,
    fleet_options,
    placement_from_environment,
    rank_options,
)
from whalez.engine.answers import Answers, RankFacts, as_dict
from whalez.engine.health import Health
from whalez.engine.launch import LaunchRunner
from whalez.engine.loop import Loop
from whalez.engine.records import Capture, TraceFile, write_post_mortem
from whalez.engine.sizing import plan_policy, slab_spec
from whalez.engine.watchdog import Watchdog
from whalez.errors import ConfigError, DoorbellTimeout, PeerDied, Unavailable, WhalezError
from whalez.fabric.doorbell import BELL_KINDS, Bells
from whalez.fabric.host import HostSlabs
from whalez.fabric.layout import SlabLayout
from whalez.hub.address import host_identity
from whalez.hub.keys import load_keys
from whalez.hub.zmq_admin import ADMIN_OPTIONS, AdminServer
from whalez.hub.zmq_hub import ZmqHub
from whalez.hub.zmq_link import LinkServer
from whalez.latch import Latch
from whalez.model.cache import StateCache
from whalez.model.checkpoint import load_weights, model_hash
from whalez.model.config import KimiLinearConfig
from whalez.model.exchange import Hooks
from whalez.model.forward import Forward
from whalez.model.trace import Stopwatch
from whalez.model.weights import expert_bounds
from whalez.parallel.context import GangViews, WindowMap
from whalez.parallel.expert import PairedExperts
from whalez.planning import PlanPolicy, check_plan, plan_whale
from whalez.rendezvous.lives import WatchedSequencer
from whalez.rendezvous.member import Member
from whalez.rendezvous.messages import Died, Hello, SlabEntry
from whalez.rendezvous.sequencer import Sequencer
from whalez.serve.links import admin_address, link_address
from whalez.serve.process import STOP, bind, front_command, held_line


def make_sequencer(fleet: FleetConfig, policy: PlanPolicy) -> Sequencer:
    """Rank 0's sequencing machine under this fleet's settings."""
    return Sequencer(fleet.world, policy, plan=plan_whale, deadline_ns=int(fleet.gather_deadline_s * 1e9))


class RankProcess:
    """Everything one rank owns. `run` returns its exit code; whatever happens, nothing is left behind."""

    def __init__(self, rank: RankConfig, fleet: FleetConfig, cores: int) -> None:
        """cores: of this machine, for all its ranks"""
        self.rank, self.fleet = rank, fleet
        self.cores = cores
        self.incarnation = secrets.token_hex(8)
        self._incarnations: list[str] = []  # of all ranks, once they are known
        self.loop: Loop | None = None
        self._closers: list[Any] = []  # closed in reverse order
        self._signals = 0
        self._stops = 0
        self._is_held = False
        self._released = Latch()
        self._slabs: HostSlabs | None = None
        self._hub: ZmqHub | None = None
        self._watchdog: Watchdog | None = None
        self._failure_lock = threading.Lock()  # the watchdog's thread and the main one may both fail
        self._failure: str | None = None  #: the reason of the first

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        if signal.getsignal(STOP) is not signal.SIG_IGN:  # as nohup makes it; then it stays so
            signal.signal(STOP, self._on_signal)
        self.rank.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # its sockets ask for no key
        try:
            loop = self._start()
            loop.run()
        except WhalezError as error:
            what = self._fail(self._blame(error), error)
            print(f"whalez: rank {self.rank.rank}: {what}", file=sys.stderr, flush=True)
            self._hold()
            return 1
        except MemoryError as error:
            what = f"out of memory: {error}; use a smaller --max-ctx, --slots or --chunk-tokens"
            self._fail(what, error)
            print(f"whalez: rank {self.rank.rank}: {what}", file=sys.stderr, flush=True)
            self._hold()
            return 1
        except Exception as error:  # our own mistake; the process ends here, and its clients hear why all the same
            what = f"{type(error).__name__}: {error}"
            self._fail(what, error)
            traceback.print_exc()
            print(f"whalez: rank {self.rank.rank}: {what}", file=sys.stderr, flush=True)
            self._hold()
            return 1
        finally:
            if self._watchdog is not None:
                self._watchdog.close()
            for close in reversed(self._closers):
                try:
                    close()
                except Exception:  # what is left must be closed all the same
                    traceback.print_exc()
        return 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM, SIGINT: leave within the grace; STOP, also after those: without. A second of either kind, or any
        before the world runs: exit now. Held: end the hold.
        """
        if self._is_held:
            self._released.set()
            return
        if number == STOP:
            self._stops += 1
        else:
            self._signals += 1
        if self.loop is None or max(self._stops, self._signals) > 1:
            if self._slabs is not None:
                self._slabs.unlink()  # the one thing that would outlive the process
            os._exit(128 + number)
        self.loop.drain(0.0 if number == STOP else self.rank.grace_s)

    def _hold(self) -> None:
        """Keep the failed process as it is, if that was asked for and the world ran, until a signal comes."""
        if not self.rank.hold_on_failure or self.loop is None:
            return
        self._is_held = True
        print(f"whalez: rank {self.rank.rank}: {held_line(os.getpid())}", file=sys.stderr, flush=True)
        self._released.wait()

    def _start(self) -> Loop:
        rank, fleet = self.rank, self.fleet
        config = KimiLinearConfig.from_dir(rank.model_dir)
        if config.moe_layers and fleet.world > config.num_experts:
            raise ConfigError(f"world: expected at most {config.num_experts} (the model's experts), got {fleet.world}")
        policy = plan_policy(config, fleet)
        spec = slab_spec(config, fleet, policy)
        limits = threadpool_limits(rank.threads)
        self._closers.append(limits.restore_original_limits)

        # An ipc address says that all ranks are here, whatever node_ranks says about placement.
        node_ranks = None if rank.hub.startswith("ipc://") else fleet.node_ranks
        sequencer = WatchedSequencer(make_sequencer(fleet, policy)) if rank.rank == 0 else None
        keys = load_keys(rank.keys) if rank.keys is not None else None
        hub = ZmqHub(
            rank.rank,
            fleet.world,
            rank.hub,
            node_ranks=node_ranks,
            sequencer=sequencer,
            keys=keys,
            insecure=rank.insecure,
        )  # refuses an address or keys that can not work, before minutes go into loading

        health = Health(
            rank=rank.rank,
            world=fleet.world,
            incarnation=self.incarnation,
            model=rank.model_dir.resolve().name,
            vocab_size=config.vocab_size,
            max_ctx=fleet.max_ctx,
            stall_s=fleet.stall_s,
        )
        health.eos_tokens = config.eos_token_ids
        link = LinkServer(
            link_address(rank.run_dir, rank.rank),
            lambda client, request: self._submit(client, request),
            health.status,
        )
        self._closers.append(link.close)
        layout = SlabLayout.from_spec(spec)
        options = {"hub": hub.options, "link": link.options, "admin": ADMIN_OPTIONS}
        endpoint = rank.admin or admin_address(rank.run_dir, rank.rank)
        facts = RankFacts(
            rank=rank.rank,
            device=rank.device,
            transport="host shm",
            hub=rank.hub,
            host=host_identity(),
            sockets={name: as_dict(each) for name, each in options.items()},
        )
        answers = Answers(facts, health, layout, endpoint)
        server = AdminServer(endpoint, rank.rank, answers.answer, keys=keys, options=ADMIN_OPTIONS)
        self._closers.append(server.close)
        health.dropped = lambda: {**hub.dropped(), **link.dropped(), **server.dropped()}

        weights = load_weights(rank.model_dir, config, rank.rank, fleet.world)
        fingerprint = {
            **fleet.fingerprint(),
            "model": model_hash(rank.model_dir),
            "cost": repr(policy.cost),
        }

        slabs = HostSlabs(layout, fleet_id=rank.fleet_id, rank=rank.rank, incarnation=self.incarnation)
        self._closers.append(slabs.close)
        self._slabs = slabs
        slabs.create()
        self._closers.append(hub.close)
        entry = SlabEntry(
            rank=rank.rank,
            incarnation=self.incarnation,
            host=host_identity(),
            pid=os.getpid(),
            ticket=slabs.ticket,
            admin=endpoint,
        )
        answers.sequencer = sequencer
        table = hub.start(Hello(entry=entry, world=fleet.world, fingerprint=fingerprint), rank.start_s)
        answers.table = table
        self._incarnations = [each.incarnation for each in table]
        mapped = slabs.open_all(table)
        answers.mapped = tuple(slab.rank for slab in mapped)
        hub.mapped(rank.start_s)
        slabs.unlink()

        watch = Stopwatch(config.num_hidden_layers)
        bells = Bells(
            layout,
            mapped,
            rank.rank,
            stuck_s=fleet.stuck_s,
            steps_per_launch=2 * max(len(config.moe_layers), 1),
        )
        self._closers.append(bells.close)
        cache = StateCache(config, slots=fleet.slots, pages=fleet.cache_pages, page_tokens=fleet.page_tokens)
        experts = PairedExperts(
            bells,
            layout,
            mapped,
            rank=rank.rank,
            expert_bounds=expert_bounds(config.num_experts, fleet.world),
            moe_layers=len(config.moe_layers),
            top_k=config.num_experts_per_token,
            hidden=config.hidden_size,
            intermediate=config.moe_intermediate_size,
            watch=watch,
        )

        def raise_failure() -> None:
            if hub.failure is not None:
                raise hub.failure

        experts.on_slice = raise_failure
        forward = Forward(
            config,
            weights,
            cache,
            experts,
            rows_max=spec.rows_max,
            attention_window=min(fleet.attention_window, fleet.max_ctx),
        )

        def progress(layer: int) -> None:
            bells.raise_progress()
            health.moved()

        trace = TraceFile(rank.run_dir, rank.rank) if rank.trace else None
        if trace is not None:
            self._closers.append(trace.close)
        self._link, self._health = link, health
        loop = Loop(
            rank=rank.rank,
            fleet=fleet,
            policy=policy,
            rows_max=spec.rows_max - fleet.slots,
            cores=max(1, self.cores // rank.threads) if fleet.node_ranks >= fleet.world else None,
            member=Member(
                rank.rank,
                fleet.world,
                policy=policy,
                check=check_plan,
                slip_max_ns=int(fleet.gather_deadline_s * 1e9),
            ),
            hub=hub,
            bells=bells,
            runner=LaunchRunner(config, forward, experts, Hooks(watch, progress), capture=rank.capture),
            cache=cache,
            views=GangViews(layout, mapped),
            windows=WindowMap(config.kda_layers, config.mla_layers),
            reply=link.reply,
            trace=trace,
            capture=Capture(rank.run_dir, rank.rank) if rank.capture else None,
        )
        self.loop = loop
        self._hub = hub
        hub.set_waker(bells.wake)
        if rank.rank == 0:
            answers.withdraw = hub.withdraw
        self._start_front()
        self._watchdog = Watchdog(
            progress=lambda: bells.progress(rank.rank),
            may_rest=lambda: bells.status(rank.rank).peer is not None or loop.state == "stopping",
            stuck_s=lambda: bells.stuck_s,
            hub_failure=lambda: hub.failure,
            end=self._end_wedged,
        )
        health.loop = loop
        return loop

    def _submit(self, client: bytes, request: Any) -> None:
        if self.loop is None:
            raise Unavailable("the rank is starting")
        self.loop.submit(client, request)

    def _start_front(self) -> None:
        """The HTTP front of this rank, a process of its own."""
        rank = self.rank
        if rank.listen is None:
            return
        command = front_command(
            [link_address(rank.run_dir, rank.rank)],
            rank.listen,
            rank.model_dir.resolve().name,
            model_dir=str(rank.model_dir),
            parent=os.getpid(),
        )
        front = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._health.front = front.poll

        def stop() -> None:
            front.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a slow one ends by its own grace
                front.wait(1.0)

        self._closers.insert(0, stop)  # closed last: it passes on what the link flushes

    def _blame(self, error: WhalezError) -> str:
        """What to say of an error. Who holds up the others is told to them, or they would blame who left first."""
        if not isinstance(error, DoorbellTimeout) or self._hub is None:
            return str(error)
        stuck = PeerDied(error.root, f"stuck: rank {self.rank.rank} {error}")
        with contextlib.suppress(WhalezError):  # the hub has failed: they know of another death
            self._hub.send(Died(rank=error.root, how=stuck.how[:2000]))
        return str(stuck)

    def _end_wedged(self, cause: Exception | float) -> None:
        """In the watchdog's thread: say what the loop cannot, how long it has stood or that the hub failed; leave."""
        loop, hub = self.loop, self._hub
        assert loop is not None
        assert hub is not None
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        if isinstance(cause, float):
            cause = PeerDied(
                self.rank.rank, f"stuck: its loop has not moved for {cause:.1f} s, in launch {loop.launch}"
            )
            with contextlib.suppress(WhalezError):
                hub.send(Died(rank=cause.rank, how=cause.how))
            what = self._fail(str(cause), cause, stack)
        else:
            what = self._fail(f"{cause}; this rank's loop did not come back", cause, stack)
        print(f"whalez: rank {self.rank.rank}: {what}", file=sys.stderr, flush=True)
        self._hold()
        hub.close()
        self._link.close()
        os._exit(1)

    def _fail(self, reason: str, error: Exception, stack: str = "") -> str:
        """End the requests with an error that says why, and leave a post-mortem. Returns the reason, with the wait.

        Only the first failure does so and is told: a held loop that comes back late fails once more, of what the first
        one did to the world, and must not write over the stack of the place where it was stuck.
        """
        with self._failure_lock:
            if self._failure is None:
                self._failure = self._end_requests(reason, error, stack)
            return self._failure

    def _end_requests(self, reason: str, error: Exception, stack: str) -> str:
        if self._watchdog is not None:
            self._watchdog.close()
        loop = self.loop
        awaited = None if loop is None else loop.bells.awaited()
        if awaited is not None and not isinstance(error, DoorbellTimeout):  # which says it itself
            reason = f"{reason}; rank {self.rank.rank} {awaited}"
        record: dict[str, Any] = {
            "rank": self.rank.rank,
            "world": self.fleet.world,
            "fleet_id": self.rank.fleet_id,
            "incarnation": self.incarnation,
            "incarnations": self._incarnations,
            "pid": os.getpid(),
            "at_wall_s": time.time(),
            "blames": getattr(error, "rank", getattr(error, "peer", None)),  # the rank this one says is at fault
            "error": type(error).__name__,
            "message": reason if isinstance(error, WhalezError) else str(error),
            "traceback": stack or "".join(traceback.format_exception(error)),
            "waited_for": None if awaited is None else awaited._asdict(),
        }
        if loop is not None:
            self._health.failure = reason
            bells = loop.bells
            record |= {
                "launch": loop.launch,
                "waiting_for": bells.status(self.rank.rank)._asdict(),
                "peers": {
                    peer: {
                        "progress": bells.progress(peer),
                        "launch_count": bells.launch_count(peer),
                        "bells": {name: bells.seen(kind, peer) for kind, name in enumerate(BELL_KINDS)},
                        "waiting_for": bells.status(peer)._asdict(),
                    }
                    for peer in range(self.fleet.world)
                },
                "story": list(loop.member.story),
                "whales": msgspec.to_builtins(loop.whales.lives),
                "running": loop.scheduler.running_count,
                "waiting": loop.scheduler.waiting_count,
            }
            kind = "unavailable" if isinstance(error, WhalezError) else "internal"  # the latter is our own mistake
            loop.fail_all(kind, f"the fleet stopped: {reason}")
        write_post_mortem(self.rank.run_dir, self.rank.rank, record)
        return reason


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rank", type=int, default=None, help="This process's rank; default: from the launcher's environment.")
@click.option("--world", type=int, default=None, help="Ranks of the fleet; default: from the launcher's environment.")
@click.option("--hub", default=None, help="Where rank 0 listens: tcp://HOST:PORT or ipc:///path.")
@click.option("--model", "model_dir", type=click.Path(path_type=Path), required=True, help="Hugging Face folder.")
@click.option("--run", "run_dir", type=click.Path(path_type=Path), required=True, help="Folder for sockets and logs.")
@click.option("--listen", default=None, help="H:P of this rank's HTTP front.")
@click.option("--admin", default=None, help="Where this rank answers `whalez admin`; default: a socket in --run.")
@click.option("--fleet-id", default="fleet", help="Part of shared-memory names.")
@click.option("--device", default="cpu")
@click.option("--grace", "grace_s", type=float, default=30.0, help="Seconds that requests may take to end on SIGTERM.")
@click.option("--start-timeout", "start_s", type=float, default=300.0, help="Seconds the world may take to assemble.")
@click.option("--capture", is_flag=True, help="Debug: write hidden rows, logits and expert choices to the run folder.")
@click.option("--trace", is_flag=True, help="Write one line per prefill launch to the run folder.")
@click.option("--insecure", is_flag=True, help="Do without keys although other machines can reach the hub.")
@click.option("--hold-on-failure", is_flag=True, help="Stay after a failure, for a debugger, until SIGTERM.")
@rank_options
@fleet_options
def main(**flags: Any) -> None:
    """Run one rank of a fleet."""
    gc.freeze()  # and no collection in the loop looks at what the imports made
    gc.enable()
    try:
        place = placement_from_environment(os.environ)
        number = place.rank if flags["rank"] is None else flags["rank"]
        world = place.world if flags["world"] is None else flags["world"]
        hub = flags["hub"] or place.hub
        for name, value in (("rank", number), ("world", world), ("hub", hub)):
            if value is None:
                also = " (WHALEZ_HUB, or MASTER_ADDR and MASTER_PORT)" if name == "hub" else ""
                raise ConfigError(f"{name}: expected --{name} or a launcher's environment{also}, got neither")
        assert number is not None
        assert world is not None
        assert hub is not None
        if not 0 <= number < world:
            raise ConfigError(f"rank: expected 0..{world - 1}, got {number}")
        if flags["node_ranks"] is None and place.node_ranks:
            flags["node_ranks"] = place.node_ranks
        fleet = fleet_config(flags["model_dir"], world, flags)
        if flags["listen"] is not None:
            bind(flags["listen"]).close()  # its front would say so only when the world is up
        threads = flags["threads"] or max(1, len(os.sched_getaffinity(0)) // min(world, fleet.node_ranks))
        rank = RankConfig(
            rank=number,
            hub=hub,
            model_dir=flags["model_dir"],
            run_dir=flags["run_dir"].resolve(),
            listen=flags["listen"],
            admin=flags["admin"],
            fleet_id=flags["fleet_id"],
            device=flags["device"],
            threads=threads,
            pin=flags["pin"],
            grace_s=flags["grace_s"],
            start_s=flags["start_s"],
            capture=flags["capture"],
            trace=flags["trace"],
            keys=flags["keys"],
            insecure=flags["insecure"],
            hold_on_failure=flags["hold_on_failure"],
        )
        usable = sorted(os.sched_getaffinity(0))
        cores = len(usable)
        if rank.pin:
            first = number % fleet.node_ranks * threads
            os.sched_setaffinity(0, {usable[(first + i) % cores] for i in range(threads)})
    except WhalezError as error:
        print(f"whalez: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    code = RankProcess(rank, fleet, cores).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is closed; taking the interpreter with its LLVM modules down would cost another second


if __name__ == "__main__":
    main()
