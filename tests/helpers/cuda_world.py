"""Ranks over the fake CUDA driver, in this process; and a peer in another one, over the fake driver or a real one."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from whalez.fabric.cuda.doorbell import BellMemory, DeviceBells, Peers
from whalez.fabric.cuda.driver import Device, Driver
from whalez.fabric.cuda.kernels import doorbell_ring_kernel, doorbell_wait_kernel, doorbell_write_kernel
from whalez.fabric.cuda.preflight import choose, preflight
from whalez.fabric.cuda.providers import PROVIDERS, CudaSlab, CudaSlabs
from whalez.fabric.cuda.stream import CudaStream, KernelSet, codes_of
from whalez.fabric.cuda.watchdog import Watchdog
from whalez.fabric.layout import BELL_DATA, LINE_BYTES, SlabLayout, SlabSpec
from whalez.ops.device.kernel import Kernel
from whalez.rendezvous.messages import SlabEntry
from whalez.testing import simt
from whalez.testing.fake_driver import FakeDriver, FakeMachine, fake_processes, is_reached, read_word, write_word


def make_layout(world: int) -> SlabLayout:
    return SlabLayout.from_spec(
        SlabSpec(
            world=world,
            rows_max=5,
            hidden=16,
            top_k=2,
            segment_rows_max=7,
            halo_values=9,
            package_heads=2,
            key_dim=4,
            value_dim=4,
            latent_width=6,
        )
    )


def entry_of(slabs: Any, **fields: Any) -> SlabEntry:
    entry = {"rank": slabs.rank, "incarnation": slabs.incarnation, "host": "here", "pid": os.getpid()}
    return SlabEntry(**{**entry, "ticket": slabs.ticket, **fields} if "ticket" not in fields else {**entry, **fields})


def settled_fds(expected: int) -> int:
    """Open descriptors; the owner's thread may close its end of a connection a moment after the peer did."""
    deadline = time.monotonic() + 5
    while (count := len(os.listdir("/proc/self/fd"))) > expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return count


# ---- the doorbell kernels, as the fake driver runs them -----------------------------------------------------------
def image(kernel: Kernel) -> bytes:
    """What stands for a kernel's machine code."""
    return kernel.name.encode()


def _members(world: int, masks: list[int]) -> list[int]:
    bits = sum(mask << 64 * i for i, mask in enumerate(masks))
    return [peer for peer in range(world) if bits >> peer & 1]


def _ring(grid: Any, block: Any, shared: int, arguments: list[Any]) -> None:
    lines, world, *masks, value = arguments
    for peer in _members(world, masks):
        write_word(read_word(lines + 8 * peer), value)


class _Wait:
    """The bounded wait: looks once each time it is run."""

    def __init__(self) -> None:
        self.begun: dict[tuple[int, int], int] = {}

    def __call__(self, grid: Any, block: Any, shared: int, arguments: list[Any]) -> bool:
        lines, world, *masks, value, budget_ns, _progress, report, tag = arguments
        if read_word(report):
            return True
        for peer in _members(world, masks):
            seen = read_word(lines + LINE_BYTES * peer)
            if not is_reached(seen, value):
                waited = time.monotonic_ns() - self.begun.setdefault((lines, value), time.monotonic_ns())
                if waited < budget_ns:
                    return False
                for i, word in ((1, peer), (2, tag), (3, value), (4, seen), (5, waited), (0, 1)):
                    write_word(report + 8 * i, word)
                return True
        return True


def fake_kernels() -> dict[bytes, tuple[str, Any]]:
    runners: list[tuple[Kernel, Any]] = [
        (doorbell_ring_kernel, _ring),
        (doorbell_wait_kernel, _Wait()),
        (doorbell_write_kernel, lambda grid, block, shared, arguments: write_word(*arguments)),
    ]
    return {image(kernel): (codes_of(kernel), runner) for kernel, runner in runners}


# ---- the doorbell kernels themselves, in the CPU harness -------------------------------------------------------------
class _Spinning:
    """Runs a kernel in a thread of `pool`, beside the host that queued it: it may wait for what the host does.

    The harness runs one kernel after another, so those of a pool of one thread begin in the order of their launches.
    """

    def __init__(self, kernel: Kernel, pool: Executor) -> None:
        self._kernel, self._pool = kernel, pool
        self._running: dict[int, Future[None]] = {}  #: by the launch's own list of arguments, which lives as long as it
        simt.jit(kernel).compile(kernel.signature)  # now, for a watchdog counts the time from the launch on

    def __call__(self, grid: Any, block: Any, shared: int, arguments: list[Any]) -> bool:
        if id(arguments) not in self._running:
            launch = simt.Launch(self._kernel, grid, block, arguments, shared)
            run = partial(simt.run, [launch], spin_limit=2**62, cpu_s=5.0)
            self._running[id(arguments)] = self._pool.submit(run)
        if not self._running[id(arguments)].done():
            return False
        self._running.pop(id(arguments)).result()
        return True


def harness_kernels(pool: Executor) -> dict[bytes, tuple[str, Any]]:
    """As `fake_kernels`, of what numba compiles from the kernels; its time is the harness's own."""
    kernels = (doorbell_ring_kernel, doorbell_wait_kernel, doorbell_write_kernel)
    return {image(kernel): (codes_of(kernel), _Spinning(kernel, pool)) for kernel in kernels}


class Rank:
    """One rank of a fake world."""

    def __init__(self, layout: SlabLayout, name: str, rank: int, fake: FakeDriver) -> None:
        self.fake = fake
        self.device = Device(Driver(fake), 0)
        self.slabs: CudaSlabs = PROVIDERS[name](
            layout, device=self.device, rank=rank, incarnation=f"i{rank}", machine=fake.machine.identity
        )

    def close(self) -> None:
        self.slabs.close()
        self.device.close()


@contextmanager
def fake_world(
    name: str, world: int = 2, machines: Callable[[int], FakeMachine] | None = None, **options: Any
) -> Iterator[list[Rank]]:
    """`world` ranks with provider `name`, closed at the end; nothing may be left of them then."""
    fds = len(os.listdir("/proc/self/fd"))
    shared = FakeMachine()
    options.setdefault("kernels", fake_kernels())
    fakes = [FakeDriver(machines(rank) if machines else shared, **options) for rank in range(world)]
    layout = make_layout(world)
    with fake_processes(*fakes):
        with ExitStack() as stack:
            ranks = [Rank(layout, name, rank, fake) for rank, fake in enumerate(fakes)]
            for rank in ranks:
                stack.callback(rank.close)
            for rank in ranks:  # these run first
                stack.callback(rank.slabs.close_peers)
            yield ranks
        for fake in fakes:
            assert fake.leaks() == {}, fake.leaks()
            assert fake.machine.violations == []
            assert all(gpu.used == 0 for gpu in fake.machine.gpus)
    assert len(os.listdir("/proc/self/fd")) <= fds, "descriptors left"


# ---- the same in another process, over the fake driver or a real one ------------------------------------------------
class Member:
    """A rank of a world of two: slab, stream, bells and watchdog, made on command. Rank 1 lives in `PeerProcess`."""

    def __init__(self, name: str, rank: int, *, is_fake: bool, machine: bytes | None) -> None:
        self.fake = FakeDriver(kernels=fake_kernels()) if is_fake else None
        self.image = image if is_fake else None
        self.rank = rank
        self.layout = make_layout(2)
        self.stack = ExitStack()
        if self.fake is not None:
            self.stack.enter_context(fake_processes(self.fake))
        self.device = self.stack.enter_context(Device(Driver(self.fake), 0))
        self.slabs = self.stack.enter_context(
            PROVIDERS[name](self.layout, device=self.device, rank=rank, incarnation=f"i{rank}", machine=machine)
        )
        self.opened: dict[int, CudaSlab] = {}

    def create(self) -> bytes:
        self.opened[self.rank] = self.slabs.create()
        return self.slabs.ticket

    def open(self, ticket: bytes) -> None:
        peer = 1 - self.rank
        self.opened[peer] = self.slabs.open(entry_of(self.slabs, rank=peer, incarnation=f"i{peer}", ticket=ticket))

    def read(self, rank: int, offset: int, nbytes: int) -> bytes:
        return self.opened[rank].read(offset, nbytes)

    def write(self, rank: int, offset: int, data: bytes) -> None:
        self.opened[rank].write(offset, data)

    def arm(self, wait_by: str, budget_ns: int = 3 * 10**8) -> None:
        kernels = [doorbell_ring_kernel, doorbell_wait_kernel, doorbell_write_kernel]
        loaded = self.stack.enter_context(KernelSet(self.device, kernels, self.image))
        addresses = [self.opened[rank].address for rank in range(2)]
        memory = BellMemory(self.device, self.layout, addresses, self.rank)
        self.stack.callback(memory.close)
        self.stream = self.stack.enter_context(CudaStream(self.device, loaded, has_memops=wait_by == "memop"))
        self.bells = DeviceBells(
            self.stream,
            self.layout,
            addresses,
            self.rank,
            tables=memory.tables,
            report=memory.report,
            wait_by=wait_by,  # type: ignore[arg-type]
            budget_ns=budget_ns,
        )
        self.watchdog = Watchdog(self.device, loaded, self.bells, self.stream, stuck_s=20.0, slice_s=0.02)
        self.stack.callback(self.watchdog.close)

    def publish(self, value: int) -> None:
        """Fill the own halo with `value` and ring the peer with it: one beat."""
        halo = self.layout.regions["halo"]
        self.write(self.rank, halo.offset, value.to_bytes(4, "little") * (halo.nbytes // 4))
        self.bells.ring(BELL_DATA, Peers.of([1 - self.rank]), value)

    def wait(self, value: int) -> None:
        self.bells.wait(BELL_DATA, Peers.of([1 - self.rank]), value, layer=2)

    def join(self, stuck_s: float = 20.0) -> None:
        self.watchdog.stuck_s = stuck_s
        self.watchdog.join()

    def consume(self) -> bytes:
        """The peer's halo, copied by the stream behind what was waited for."""
        halo, progress = self.layout.regions["halo"], self.layout.regions["latent"]
        own, theirs = self.opened[self.rank].address, self.opened[1 - self.rank].address
        self.stream.copy(own + progress.offset, theirs + halo.offset, halo.nbytes)
        self.join()
        return self.read(self.rank, progress.offset, halo.nbytes)

    def preflight(self, gather: Callable[[bytes], list[bytes]]) -> tuple[str, str]:
        """What the world of two can use, and how this rank waits."""
        ballots = preflight(
            self.device,
            rank=self.rank,
            world=2,
            host="here",
            gather=gather,
            machine=self.slabs.machine,
            image=self.image,
        )
        return choose(ballots).provider, ballots[self.rank].wait_by

    def close_peers(self) -> None:
        self.slabs.close_peers()

    def close(self) -> dict[str, int]:
        self.stack.close()
        return self.fake.leaks() if self.fake is not None else {}


def _serve(pipe: Any, name: str, is_fake: bool, machine: bytes | None) -> None:
    """Rank 1 in a process of its own: methods of Member on command, until told to close."""
    member = Member(name, 1, is_fake=is_fake, machine=machine)

    def gather(mine: bytes) -> list[bytes]:
        pipe.send_bytes(mine)
        return [pipe.recv_bytes(), mine]

    while True:
        command, arguments = pipe.recv()
        try:
            answer = getattr(member, command)(*(arguments if command != "preflight" else (gather,)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))
        else:
            pipe.send(("ok", answer))
        if command == "close":
            return


class PeerProcess:
    """Rank 1."""

    def __init__(self, name: str, *, is_fake: bool, machine: bytes | None) -> None:
        context = multiprocessing.get_context("forkserver")  # its process imports once, and never sees a GPU
        context.set_forkserver_preload(["whalez.fabric.cuda.preflight", "whalez.testing.fake_driver"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, is_fake, machine), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, command: str, *arguments: Any) -> Any:
        self.ask(command, *arguments)
        return self.answer()

    def ask(self, command: str, *arguments: Any) -> None:
        self.pipe.send((command, arguments))

    def answer(self) -> Any:
        assert self.pipe.poll(60), "the peer does not answer"
        kind, answer = self.pipe.recv()
        if kind == "error":
            raise RuntimeError(answer)
        return answer

    def gather(self, mine: bytes) -> list[bytes]:
        """Rank 0's side of an allgather of two."""
        assert self.pipe.poll(60), "the peer does not answer"
        theirs = self.pipe.recv_bytes()
        self.pipe.send_bytes(mine)
        return [mine, theirs]

    def kill(self) -> None:
        """Idempotent."""
        if not self.pipe.closed:
            self.process.kill()
            self.process.join(10)
            self.process.close()
            self.pipe.close()
