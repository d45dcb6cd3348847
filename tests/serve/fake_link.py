"""A request link without a rank: the test says what the rank answers, and sees what it was sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from whalez.hub.requests import Done, Report, Response, Status, Submit, TokenOut

STATUS = Status(
    query_id="",
    rank=0,
    world=1,
    incarnation="i",
    pid=1,
    state="serving",
    launch=7,
    launch_age_s=0.01,
    healthy=True,
    trouble="",
    running=0,
    waiting=0,
    cache_used=0,
    cache_total=8,
    max_ctx=100,
    vocab_size=300,
    model="m",
)


def status(**fields: object) -> Status:
    return msgspec.structs.replace(STATUS, **fields)


def answer(text: bytes | Iterable[int], *, finish_reason: str = "length", rank: int = 0) -> Callable:
    """A rank that generates these tokens."""
    tokens = tuple(text)

    def respond(submit: Submit) -> list[Response]:
        name = submit.request_id
        out: list[Response] = [TokenOut(request_id=name, index=i, token=token) for i, token in enumerate(tokens)]
        report = Report(lane="local", why="short", poster=rank)
        count = len(submit.tokens) // 4
        return [
            *out,
            Done(request_id=name, finish_reason=finish_reason, tokens=tokens, prompt_tokens=count, report=report),
        ]

    return respond


class FakeLink:
    """Answers every request with what `respond` makes of it, then hangs if that did not end the request."""

    def __init__(self, respond: Callable | None = None, status: Status | None = STATUS) -> None:
        self.respond = respond or answer(b"hello")
        self.current: Status | None = status  #: None: the link thread does not answer
        self.submitted: list[Submit] = []
        self.cancelled: list[str] = []
        self.closed = False

    async def submit(self, submit: Submit) -> AsyncIterator[Response]:
        self.submitted.append(submit)
        for response in self.respond(submit):
            yield response
        await asyncio.Event().wait()

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def status(self, timeout_s: float) -> Status:
        if self.current is None:
            raise TimeoutError
        return self.current

    async def close(self) -> None:
        self.closed = True
