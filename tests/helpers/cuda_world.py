"""Ranks over the fake CUDA driver, in this process; and a peer in another one, over the fake driver or a real one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic_ns
from typing import Any

from whalez.fabric.cuda.driver import Device, Driver
from whalez.fabric.cuda.kernels import doorbell_ring_kernel, doorbell_wait_kernel, doorbell_write_kernel
from whalez.fabric.cuda.providers import PROVIDERS, CudaSlabs
from whalez.fabric.cuda.stream import codes_of
from whalez.fabric.layout import LINE_BYTES, SlabLayout, SlabSpec
from whalez.ops.device.kernel import Kernel
from whalez.rendezvous.messages import SlabEntry
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
                waited = monotonic_ns() - self.begun.setdefault((lines, value), monotonic_ns())
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
    assert len(os.listdir("/proc/self/fd")) == fds, "descriptors left"


# ---- a peer in another process ------------------------------------------------------------------------------------
def _serve(pipe: Any, name: str, is_fake: bool, machine: bytes | None) -> None:
    """Answer commands until told to close: one provider of rank 1, in a world of 2."""
    fake = FakeDriver() if is_fake else None
    device = Device(Driver(fake), 0)
    layout = make_layout(2)
    slabs = PROVIDERS[name](layout, device=device, rank=1, incarnation="i1", machine=machine)
    opened: dict[int, Any] = {}
    while True:
        command, arguments = pipe.recv()
        try:
            if command == "create":
                opened[1] = slabs.create()
                answer: Any = slabs.ticket
            elif command == "open":
                entry = SlabEntry(**arguments)
                opened[entry.rank] = slabs.open(entry)
                answer = None
            elif command == "read":
                rank, offset, nbytes = arguments
                answer = opened[rank].read(offset, nbytes)
            elif command == "write":
                rank, offset, data = arguments
                answer = opened[rank].write(offset, data)
            elif command == "close_peers":
                answer = slabs.close_peers()
            else:
                slabs.close()
                device.close()
                pipe.send(("ok", fake.leaks() if fake else {}))
                return
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))
        else:
            pipe.send(("ok", answer))


class PeerProcess:
    """Rank 1 in a process of its own."""

    def __init__(self, name: str, *, is_fake: bool, machine: bytes | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, is_fake, machine), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, command: str, *arguments: Any) -> Any:
        self._pipe.send((command, arguments[0] if len(arguments) == 1 else arguments))
        assert self._pipe.poll(60), f"peer does not answer to {command}"
        kind, answer = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(answer)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        if self.process.is_alive():
            assert self("close") == {}
        self.process.join(10)
        self._pipe.close()
