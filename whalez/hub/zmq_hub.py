"""The control plane over ZeroMQ: one hub thread per rank, and the sequencer's thread in rank 0's process."""

from __future__ import annotations

from collections.abc import Callable

from whalez.hub.interface import SequencerLike
from whalez.hub.sockets import SocketOptions
from whalez.planning.policy import PlanPolicy  # type: ignore[import-not-found]
from whalez.rendezvous.messages import Hello, Message, SlabEntry


class ZmqHub:
    """One rank's end of the control plane. See `interface.Hub` for every method."""

    def __init__(
        self,
        rank: int,
        world: int,
        address: str,
        policy: PlanPolicy | None = None,
        *,
        node_ranks: int | None = None,
        sequencer: SequencerLike | None = None,
        options: SocketOptions | None = None,
    ) -> None:
        """No socket is opened before `start`.

        Args:
            address:    where rank 0 listens: tcp://IP:PORT or ipc:///path (one machine only)
            policy:     needed on rank 0 unless `sequencer` is given: what its Sequencer plans with
            node_ranks: ranks per machine; below `world` means that peers are elsewhere. None = all are here
            sequencer:  rank 0 only, instead of the one made from `policy`

        Raises: HubError for an address that can not work, within a second.
        """
        raise NotImplementedError

    def start(self, hello: Hello, timeout_s: float) -> tuple[SlabEntry, ...]:
        raise NotImplementedError

    def mapped(self, timeout_s: float) -> None:
        raise NotImplementedError

    def send(self, message: Message) -> None:
        raise NotImplementedError

    def drain(self) -> list[Message]:
        raise NotImplementedError

    @property
    def failure(self) -> Exception | None:
        raise NotImplementedError

    def set_waker(self, wake: Callable[[], None]) -> None:
        raise NotImplementedError

    def report_launch(self, launch: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
