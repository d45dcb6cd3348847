"""Who has been silent for too long. Pure: time comes in.

Silence counts only while the watcher itself was running: on a busy machine a watcher that slept through its own
turns would otherwise accuse everybody the moment it wakes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from whalez.hub.interface import OVERSLEPT_NS, SILENCE_LIMIT_NS, STARVED_LIMIT_NS

K = TypeVar("K", bound=Hashable)


class Liveness(Generic[K]):
    """Clocks of the peers one watcher listens to."""

    def __init__(
        self,
        limit_ns: int = SILENCE_LIMIT_NS,
        starved_limit_ns: int = STARVED_LIMIT_NS,
        overslept_ns: int = OVERSLEPT_NS,
    ) -> None:
        assert limit_ns <= starved_limit_ns
        self._limit_ns = limit_ns
        self._starved_limit_ns = starved_limit_ns
        self._overslept_ns = overslept_ns
        self._heard_ns: dict[K, int] = {}
        self._looked_ns: int | None = None

    def heard(self, peer: K, now_ns: int) -> None:
        """A sign of life; the first one starts the watch."""
        self._heard_ns[peer] = now_ns

    def forget(self, peer: K) -> None:
        self._heard_ns.pop(peer, None)

    def silent(self, now_ns: int, is_starved: Callable[[K], bool] = lambda _: False) -> list[tuple[K, int]]:
        """Peers beyond their limit and for how long (ns). Call it at every turn, after reading what has arrived.

        `is_starved` tells of a silent peer whether its process is known to be alive and not stopped.
        """
        overslept = self._looked_ns is not None and now_ns - self._looked_ns > self._overslept_ns
        self._looked_ns = now_ns
        if overslept:
            for peer in self._heard_ns:
                self._heard_ns[peer] = now_ns
            return []
        late = [(peer, now_ns - heard) for peer, heard in self._heard_ns.items() if now_ns - heard > self._limit_ns]
        return [(peer, silence) for peer, silence in late if silence > self._starved_limit_ns or not is_starved(peer)]
