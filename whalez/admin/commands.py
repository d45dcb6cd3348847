"""What an operator types. Every command asks all ranks at once, shows what came, and says who did not answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from whalez.admin import views
from whalez.admin.asking import TIMEOUT_S, Ranks, Reply
from whalez.hub import admin

OK, ERROR, SILENT = 0, 1, 3

_EPILOG = (
    "Exit codes: 0 all ranks answered and what was asked is done; 1 error; 2 usage; 3 some rank did not answer "
    "(what the others said is shown all the same)."
)


def main(argv: Sequence[str]) -> int:
    """`whalez admin`. Returns the exit code; a mistyped flag is a click.ClickException."""
    return int(command.main(args=list(argv), prog_name="whalez admin", standalone_mode=False) or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
def command() -> None:
    """Look into a running fleet, and give it orders."""


def of_a_fleet(function: Callable[..., int]) -> Callable[..., int]:
    """Decorator: the options by which a fleet is found; the command gets `ranks` and `as_json`."""

    @click.option("--run", "run_dir", type=click.Path(file_okay=False, path_type=Path), help="The fleet's run folder.")
    @click.option("--endpoint", metavar="ADDRESS", help="Admin address of any rank: ipc:///path or tcp://IP:PORT.")
    @click.option("--timeout", "timeout_s", default=TIMEOUT_S, show_default=True, type=click.FloatRange(0.05, 60))
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @functools.wraps(function)
    def found(run_dir: Path | None, endpoint: str | None, timeout_s: float, **options: Any) -> int:
        if (run_dir is None) == (endpoint is None):
            raise click.UsageError("give either --run or --endpoint")
        return function(Ranks(run_dir, endpoint, timeout_s), **options)

    return found


def _show(replies: Sequence[Reply], lines: Sequence[str], content: object, as_json: bool) -> int:
    """Print, name on stderr who is missing, and return the exit code."""
    click.echo(json.dumps(content, indent=1) if as_json else "\n".join(lines))
    code = OK
    for reply in replies:
        if reply.answer is None:
            code = SILENT
            click.echo(f"whalez: rank {reply.rank} did not answer ({reply.endpoint})", err=True)
        elif isinstance(reply.answer, admin.NotDone):
            code = code or ERROR
            click.echo(f"whalez: rank {reply.rank}: {reply.answer.reason}", err=True)
    return code


@command.command(epilog=_EPILOG)
@click.option("--sockets", is_flag=True, help="Also the options of every socket, as configured.")
@of_a_fleet
def status(ranks: Ranks, as_json: bool, sockets: bool) -> int:
    """One row per rank: state, launch and its age, requests, cache, records by seq."""
    replies = ranks.ask(lambda query_id: admin.AskStatus(query_id=query_id))
    lines = views.table(views.STATUS_HEAD, views.status_rows(replies))
    if sockets:
        lines += views.socket_lines(replies)
    return _show(replies, lines, views.as_json(replies), as_json)
