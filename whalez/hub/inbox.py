"""The box between a hub's thread and the loop: messages in order, then one failure for ever."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from whalez.errors import HubError
from whalez.hub.interface import HubLimits
from whalez.rendezvous.messages import Gather, Message, Post


def message_bytes(message: Message) -> int:
    """About what a message occupies; only prompts count."""
    return 256 + (len(message.tokens) if isinstance(message, Gather | Post) else 0)


class Inbox:
    """Written by a hub's thread, emptied by the loop. Every method may be called from any thread and never blocks."""

    def __init__(self, limits: HubLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._failure: Exception | None = None
        self._wake: Callable[[], None] | None = None

    @property
    def failure(self) -> Exception | None:
        return self._failure

    def put(self, message: Message) -> bool:
        """Append. False if the box is full or a failure closed it: the message is then not in it."""
        with self._lock:
            is_full = len(self._messages) >= self._limits.inbox_count or self._bytes >= self._limits.inbox_bytes
            if is_full or self._failure is not None:
                return False
            self._messages.append(message)
            self._bytes += message_bytes(message)
            wake = self._wake
        if wake is not None:
            wake()
        return True

    def fail(self, failure: Exception) -> bool:
        """Store the failure; the first one stays. True if it was the first."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = failure
            wake = self._wake
        if wake is not None:
            wake()
        return True

    def drain(self) -> list[Message]:
        with self._lock:
            if self._messages:
                drained = list(self._messages)
                self._messages.clear()
                self._bytes = 0
                return drained
        self.raise_failure()
        return []

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def close(self) -> None:
        self.fail(HubError("the hub is closed"))

    def set_waker(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._wake = wake
            has_news = bool(self._messages) or self._failure is not None
        if has_news:
            wake()
