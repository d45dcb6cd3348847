"""Ranks over the fake CUDA driver, in this process; and a peer in another one, over the fake driver or a real one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from whalez.fabric.cuda.driver import Device, Driver
from whalez.fabric.cuda.providers import PROVIDERS, CudaSlabs
from whalez.fabric.layout import SlabLayout, SlabSpec
from whalez.rendezvous.messages import SlabEntry
from whalez.testing.fake_driver import FakeDriver, FakeMachine, fake_processes


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
