"""The hub inside one process: the contract of `interface.py` without a byte on a wire. For tests and simulations."""

from __future__ import annotations

from collections.abc import Callable

from whalez.hub.interface import SequencerLike
from whalez.rendezvous.messages import Hello, Message, SlabEntry


class LocalHub:
    """One rank's end of an in-process control plane. See `interface.Hub` for every method."""

    @classmethod
    def world(cls, world: int, sequencer: SequencerLike | None = None) -> list[LocalHub]:
        """`world` joined hubs in rank order. Each may be used by a thread of its own."""
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

    def kill(self, how: str = "killed") -> None:
        """Die without a word, as SIGKILL would; every other hub of the world sees PeerDied."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
