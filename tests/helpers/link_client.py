"""The request link's client for threads: what the front has for asyncio, for tests that have no event loop."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from whalez.errors import Unavailable
from whalez.hub.requests import Done, Failed, Response, Status, Submit
from whalez.hub.sockets import SocketOptions
from whalez.hub.zmq_link import ClientThread


class LinkClient:
    """`AsyncLinkClient` for threads: the same methods, arguments and errors."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 5.0,
        silence_s: float = 5.0,
        options: SocketOptions | None = None,
    ) -> None:
        self._thread = ClientThread(address, connect_timeout_s, silence_s, options)
        self._address = address

    def submit(self, request: Submit) -> Iterator[Response]:
        responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._thread.submit(request, responses.put)
        return self._stream(request.request_id, responses)

    def _stream(self, request_id: str, responses: queue.SimpleQueue[Response]) -> Iterator[Response]:
        try:
            while True:
                response = responses.get()
                yield response
                if isinstance(response, Done | Failed):
                    return
        finally:
            self.cancel(request_id)  # does nothing for one that has ended

    def cancel(self, request_id: str) -> None:
        """Lose interest; the stream still ends with Done or Failed."""
        self._thread.cancel(request_id)

    def status(self, timeout_s: float = 2.0) -> Status:
        """Ask the rank's link thread. Raises Unavailable if nothing comes back in time."""
        answers: queue.SimpleQueue[Status | None] = queue.SimpleQueue()
        query_id = self._thread.ask(answers.put, timeout_s)
        try:
            status = answers.get(timeout=timeout_s)
        except queue.Empty:
            status = None
        finally:
            self._thread.forget(query_id)
        if status is None:
            raise Unavailable(f"no status from {self._address} within {timeout_s:g} s")
        return status

    def close(self) -> None:
        """Open streams end with Failed("unavailable"). Idempotent."""
        self._thread.close()

    def __enter__(self) -> LinkClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
