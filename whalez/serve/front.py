"""`python -m whalez.serve.front`: the process that speaks HTTP for one rank, or for all of them.

It shares nothing with a loop but the link, so parsing a long prompt never delays a launch, and /health is answered
while a loop is stuck.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from whalez.errors import WhalezError
from whalez.hub.address import bracketed
from whalez.serve.app import MAX_BODY_BYTES, Front
from whalez.serve.links import Ranks, connect
from whalez.serve.process import PARENT_GONE, bind, die_with_parent
from whalez.serve.tokenizer import load_tokenizer


class FrontServer(uvicorn.Server):
    """uvicorn with our reading of signals: the first drains, a second leaves at once; a parent that is gone drains."""

    def __init__(self, config: uvicorn.Config, front: Front) -> None:
        super().__init__(config)
        self._front = front

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # uvicorn's own raises the signal again at the end: a traceback
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave, True)
        loop.add_signal_handler(PARENT_GONE, self._leave, False)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, PARENT_GONE):
                loop.remove_signal_handler(number)

    def _leave(self, insists: bool) -> None:
        self.force_exit |= insists and self.should_exit
        self.should_exit = True
        self._front.draining = True


async def serve(arguments: argparse.Namespace) -> None:
    sock = bind(arguments.listen)
    links = [connect(address) for address in arguments.link]
    front = Front(
        Ranks(links),
        load_tokenizer(arguments.model),
        arguments.model_name,
        arguments.max_body_bytes,
        away=arguments.away,
    )
    config = uvicorn.Config(
        front.app(),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(0, round(arguments.grace)),
        lifespan="on",
        backlog=1024,
    )
    server = FrontServer(config, front)
    host, port = sock.getsockname()[:2]
    print(f"listening on http://{bracketed(host)}:{port}", flush=True)
    await server.serve(sockets=[sock])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m whalez.serve.front", description=__doc__, allow_abbrev=False)
    parser.add_argument("--link", action="append", required=True, metavar="ADDR", help="a rank's link; may be repeated")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--model-name", required=True, help="the name clients see")
    parser.add_argument("--model", type=Path, help="checkpoint folder, read for its tokenizer only")
    parser.add_argument("--grace", type=float, default=0.0, metavar="S", help="on SIGTERM, seconds to end what runs")
    parser.add_argument("--max-body-bytes", type=int, default=MAX_BODY_BYTES)
    parser.add_argument("--away", type=Path, metavar="FILE", help="while it exists, refuse with what is written in it")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    try:
        asyncio.run(serve(arguments))
    except WhalezError as error:
        print(f"whalez: front: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
