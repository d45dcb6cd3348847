"""The HTTP face of one rank or of a whole fleet: a Starlette app over request links.

Rule 1: validation and shapes are `completions`, choice of a rank is `links`; here is only the life of a request.
Rule 2: never import numpy or numba; a front starts fast and stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from whalez.errors import RequestError, Unavailable, WhalezError
from whalez.hub.requests import Done, Failed, Report, TokenOut
from whalez.serve import completions
from whalez.serve.completions import Ask
from whalez.serve.links import PROCESS_ENDED, Ranks, RankView
from whalez.serve.tokenizer import StopFilter, Tokenizer

RETRY_AFTER_S = 5
LAST_WORDS_S = 1.0  #: the end of a process and the end of its link, after its last words, are seen within this
MAX_BODY_BYTES = 64 * 2**20  #: a million ids as JSON are about 8 MB

_json = msgspec.json.Encoder()


class BodyTooLarge(RequestError):
    """HTTP 413."""


class Piece(msgspec.Struct, frozen=True):
    """A step of an answer: text that is certain, and with the last one how it ended."""

    text: str
    finish_reason: str | None = None
    tokens: tuple[int, ...] = ()  #: with the last piece: all generated ids
    report: Report | None = None


class Front:
    """State shared by the endpoints of one front process."""

    def __init__(
        self,
        ranks: Ranks,
        tokenizer: Tokenizer,
        model_name: str,
        max_body_bytes: int = MAX_BODY_BYTES,
        away: Path | None = None,
    ) -> None:
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_body_bytes = max_body_bytes
        self.away = away  #: exists while the world behind this front is away, and says why
        self.draining = False  #: set by the process when it is to leave; new completions are refused
        self.started = int(time.time())

    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            watch = asyncio.create_task(self.ranks.watch())
            try:
                yield
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                await self.ranks.close()

        return Starlette(
            lifespan=lifespan,
            routes=[
                Route("/v1/completions", _Endpoint(self.completions), methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
            ],
            exception_handlers={404: _http_error, 405: _http_error},
        )

    # ---- endpoints --------------------------------------------------------------------------------------------
    async def health(self, _: Request) -> Response:
        """Asks afresh, so that it is true now; bounded by the status time-out even if every rank hangs."""
        await self.ranks.refresh(timeout_s=1.0)
        rows = [_health_row(view) for view in self.ranks.views]
        troubles = [row["trouble"] for row in rows if row["trouble"]]
        if self.draining:
            troubles.append("this front is draining")
        if why := self._why_away():
            troubles.insert(0, why)
        if troubles:
            body = {"status": "unhealthy", "trouble": "; ".join(troubles), "ranks": rows}
            return _respond(503, body, {"retry-after": str(RETRY_AFTER_S)})
        return _respond(200, {"status": "ok", "ranks": rows})

    async def models(self, _: Request) -> Response:
        model = {"id": self.model_name, "object": "model", "created": self.started, "owned_by": "whalez"}
        for view in self.ranks.views:
            if view.status is not None:
                model["max_model_len"] = view.status.max_ctx
                break
        return _respond(200, {"object": "list", "data": [model]})

    async def completions(self, request: Request, send: Send) -> None:
        """Everything that can be refused is refused before the first byte of a stream."""
        try:
            ask = await self._ask(request)
            view = self.ranks.choose()
        except WhalezError as error:
            await _refusal(error)(request.scope, request.receive, send)
            return
        answer = self._stream(ask, view, request, send) if ask.stream else self._whole(ask, view, request, send)
        await _while_connected(request.receive, answer)

    async def _ask(self, request: Request) -> Ask:
        body = completions.parse_body(await _read_body(request, self.max_body_bytes))
        if self.draining:
            raise Unavailable("draining: no new requests")
        if why := self._why_away():
            raise Unavailable(why)
        return completions.validate(
            body, self.tokenizer, self.ranks.any_status(), f"cmpl-{secrets.token_hex(12)}", secrets.randbits(63)
        )

    def _why_away(self) -> str:
        """Empty while there is a world."""
        try:
            return self.away.read_text() if self.away is not None else ""
        except FileNotFoundError:
            return ""

    # ---- the life of a request --------------------------------------------------------------------------------
    async def _whole(self, ask: Ask, view: RankView, request: Request, send: Send) -> None:
        created = int(time.time())
        try:
            async with contextlib.aclosing(self._pieces(ask, view)) as source:
                pieces = [piece async for piece in source]
        except WhalezError as error:
            await _refusal(error)(request.scope, request.receive, send)
            return
        last = pieces[-1]
        body = completions.completion(
            ask.submit.request_id,
            created,
            self.model_name,
            "".join(piece.text for piece in pieces),
            last.finish_reason,
            usage=completions.usage(ask.prompt_count, len(last.tokens)),
            whalez=completions.lane_report(list(last.tokens), last.report),
        )
        await _respond(200, body)(request.scope, request.receive, send)

    async def _stream(self, ask: Ask, view: RankView, request: Request, send: Send) -> None:
        """The status line waits for the first token, so that a request the rank refuses still gets its status."""
        created = int(time.time())
        begun = False
        try:
            async with contextlib.aclosing(self._pieces(ask, view)) as source:
                async for piece in source:
                    if not begun:
                        await _begin_events(send)
                        begun = True
                    for chunk in self._chunks(ask, piece, created):
                        await _event(send, _json.encode(chunk))
        except WhalezError as error:
            refusal = _refusal(error)
            if not begun:
                await refusal(request.scope, request.receive, send)
                return
            await _event(send, bytes(refusal.body))  # too late for a status: the stream ends without [DONE]
        else:
            await _event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunks(self, ask: Ask, piece: Piece, created: int) -> list[dict[str, Any]]:
        """One event per piece; after the last one the usage, if asked for, in an event without choices."""
        name = (ask.submit.request_id, created, self.model_name)
        if piece.finish_reason is None:
            return [completions.completion(*name, piece.text, None)]
        report = completions.lane_report(list(piece.tokens), piece.report)
        chunks = [completions.completion(*name, piece.text, piece.finish_reason, whalez=report)]
        if ask.include_usage:
            counts = completions.usage(ask.prompt_count, len(piece.tokens))
            chunks.append({**completions.completion(*name, "", None), "choices": [], "usage": counts})
        return chunks

    async def _pieces(self, ask: Ask, view: RankView) -> AsyncGenerator[Piece, None]:
        """One piece for every token that makes text certain, then exactly one with a finish reason.

        Whatever ends this generator early (stop string, client gone, rank lost) cancels the request at its rank.
        Raises: what the rank's `Failed` means.
        """
        request_id = ask.submit.request_id
        decoder = self.tokenizer.decoder()
        stops = StopFilter(ask.stops)
        tokens: list[int] = []
        over = False
        view.in_flight += 1
        responses = view.link.submit(ask.submit)
        try:
            while True:
                response = await _next_or_lost(responses, view)
                match response:
                    case TokenOut():
                        tokens.append(response.token)
                        text = stops.push(decoder.push(response.token))
                        if stops.stopped:
                            yield Piece(text, "stop", tuple(tokens))
                            return
                        if text or len(tokens) == 1:
                            yield Piece(text)
                    case Done():
                        over = True
                        rest = stops.push(decoder.finish())
                        reason = "stop" if stops.stopped else response.finish_reason
                        yield Piece(rest + stops.finish(), reason, response.tokens, response.report)
                        return
                    case Failed(kind="gone"):
                        over = True
                        with contextlib.suppress(TimeoutError):  # why, is known to whoever watches its process
                            await asyncio.wait_for(view.lost.wait(), LAST_WORDS_S)
                        raise Unavailable(f"{view.name}: {view.how_lost or response.reason}")
                    case Failed():
                        over = True
                        raise _failure(response, view)
                    case _:
                        raise WhalezError(f"{view.name}: unexpected {type(response).__name__} on the link")
        finally:
            view.in_flight -= 1
            if not over:
                await asyncio.shield(view.link.cancel(request_id))


class _Endpoint:
    """An ASGI endpoint with `send`, which Starlette's function endpoints do not get."""

    def __init__(self, handler: Callable[[Request, Send], Awaitable[None]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):  # while it was still sending its body
            await self._handler(Request(scope, receive), send)


async def _while_connected(receive: Receive, answer: Any) -> None:
    """Run the coroutine `answer`; end it when the client goes away. The body must have been read already."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not answering.done():
            answering.cancel()
        await asyncio.wait({answering, leaving})
    if not answering.cancelled():
        answering.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next_or_lost(responses: AsyncIterator[Any], view: RankView) -> Any:
    """The next response, or Unavailable once the rank is lost."""
    coming = asyncio.ensure_future(anext(responses))
    losing = asyncio.ensure_future(view.lost.wait())
    try:
        await asyncio.wait({coming, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done() and view.how_lost == PROCESS_ENDED:  # it may have said why, and that be on its way
            await asyncio.wait({coming}, timeout=LAST_WORDS_S)
        if coming.done():
            return coming.result()
        raise Unavailable(f"{view.name}: {view.how_lost}")
    except StopAsyncIteration:
        raise Unavailable(f"{view.name}: the link closed before the request was over") from None
    finally:
        losing.cancel()
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})


def _failure(failed: Failed, view: RankView) -> WhalezError:
    reason = failed.reason if view.name in failed.reason else f"{view.name}: {failed.reason}"
    if failed.kind == "invalid":
        return RequestError(failed.reason, param=failed.param)
    if failed.kind in ("unavailable", "cancelled"):
        return Unavailable(reason)
    return WhalezError(reason)


async def _read_body(request: Request, limit: int) -> bytes:
    """Stops reading at the limit; a client that announces too much is refused before it sends."""
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


# ---- answers --------------------------------------------------------------------------------------------------
def _respond(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(_json.encode(body), status, headers, media_type="application/json")


def _refusal(error: WhalezError) -> Response:
    """Which status an error is; the only place that decides it."""
    message = str(error)
    match error:
        case BodyTooLarge():
            # The rest of the body is still on its way, so the connection cannot carry another request.
            return _respond(
                413, completions.error_body(message, "invalid_request_error", "body"), {"connection": "close"}
            )
        case RequestError():
            return _respond(400, completions.error_body(message, "invalid_request_error", error.param))
        case Unavailable():
            return _respond(
                503, completions.error_body(message, "unavailable_error"), {"retry-after": str(RETRY_AFTER_S)}
            )
        case _:
            return _respond(500, completions.error_body(message, "internal_error"))


async def _http_error(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    message = f"{request.method} {request.url.path}: {getattr(error, 'detail', 'error')}"
    return _respond(status, completions.error_body(message, "invalid_request_error"), getattr(error, "headers", None))


async def _begin_events(send: Send) -> None:
    start: Message = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
    }
    await send(start)


async def _event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


def _health_row(view: RankView) -> dict[str, Any]:
    status = view.status
    if status is None:
        return {"rank": view.index, "state": "unknown", "healthy": False, "trouble": view.trouble}
    quiet = time.monotonic() - view.answered_at
    trouble = view.trouble or (f"{view.name}: no answer for {quiet:.1f} s" if quiet > 1.0 else "")
    return {
        "rank": status.rank,
        "state": status.state,
        "slabs": status.slabs,
        "healthy": not trouble,
        "trouble": trouble,
        "launch": status.launch,
        "launch_age_s": status.launch_age_s,
        "running": status.running,
        "waiting": status.waiting,
        "cache_used": status.cache_used,
        "cache_total": status.cache_total,
        "dropped": status.dropped,
    }
