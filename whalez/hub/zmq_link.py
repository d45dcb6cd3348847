"""The request link: how a client (front process, script) reaches the loop of one rank and hears its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from whalez.engine.requests import CancelRequest, Request, Response, Status, Submit
from whalez.hub.sockets import SocketOptions


class LinkServer:
    """The loop's end. Owns: a thread and the socket at `address`. Closed by: `close`, which blocks at most 1 s."""

    def __init__(
        self,
        address: str,
        on_request: Callable[[bytes, Submit | CancelRequest], None],
        status_provider: Callable[[], Status],
        *,
        options: SocketOptions | None = None,
    ) -> None:
        """Listens when this returns.

        Args:
            on_request: called in the link's thread with (client, request); must not block. A client that vanished
                yields a CancelRequest for each of its open requests. What it raises is answered as Failed("internal").
            status_provider: called in the link's thread, also while the loop is stuck; must not block. Its
                query_id is overwritten with the one asked for.

        Raises: HubError naming the address if it is taken or impossible.
        """
        raise NotImplementedError

    def reply(self, client: bytes, response: Response) -> None:
        """Queue a response. Any thread; never blocks.

        A client that does not read is dropped and its requests are cancelled, so that memory stays bounded.
        """
        raise NotImplementedError

    @property
    def bad_frames_total(self) -> int:
        """Frames that were no request of this protocol; counted and dropped."""
        raise NotImplementedError

    @property
    def clients_dropped_total(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """Flush what was replied (at most 1 s) and end the thread. Idempotent."""
        raise NotImplementedError


class LinkClient:
    """A client's end for threads. Owns: a thread and a socket. Closed by: `close`, or leaving the `with` block."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 5.0,
        silence_s: float = 5.0,
        options: SocketOptions | None = None,
    ) -> None:
        """Connects in the background.

        Args:
            connect_timeout_s: how long a request waits for a rank that is not there (yet)
            silence_s: a rank that answers nothing, not even status, for so long is gone: all open requests fail
        """
        raise NotImplementedError

    def submit(self, request: Submit) -> Iterator[Response]:
        """Send now; iterate over TokenOut..., ended by one Done or Failed (which is yielded, not raised).

        A rank that is silent, gone or restarted ends it with Failed(kind="unavailable"). Leaving the iterator
        early (`close`) cancels the request.
        Raises: RequestError for a request that can not travel; Unavailable after `close`.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """Lose interest; the stream still ends with Done or Failed."""
        raise NotImplementedError

    def status(self, timeout_s: float = 2.0) -> Status:
        """Ask the rank's link thread. Raises Unavailable if nothing comes back in time."""
        raise NotImplementedError

    def close(self) -> None:
        """Open streams end with Failed("unavailable"). Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> LinkClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncLinkClient:
    """The same for asyncio; make it inside a running loop. Same arguments, same errors."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 5.0,
        silence_s: float = 5.0,
        options: SocketOptions | None = None,
    ) -> None:
        raise NotImplementedError

    def submit(self, request: Submit) -> AsyncIterator[Response]:
        """Send now (not at the first `anext`); otherwise like `LinkClient.submit`. `aclose` cancels."""
        raise NotImplementedError

    async def cancel(self, request_id: str) -> None:
        raise NotImplementedError

    async def status(self, timeout_s: float = 2.0) -> Status:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> AsyncLinkClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


__all__ = ["AsyncLinkClient", "LinkClient", "LinkServer", "Request"]
