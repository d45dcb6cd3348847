"""What an operator types. A query goes to all ranks at once; what came is shown, and who did not answer is named."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from whalez.admin import bundle, launches, postmortem, views
from whalez.admin import whales as lives
from whalez.admin.asking import TIMEOUT_S, Ranks, Reply
from whalez.errors import RequestError
from whalez.hub import admin
from whalez.rendezvous.messages import DRAIN_GRACE_S_MAX

OK, ERROR, SILENT = 0, 1, 3
_WATCHED_WHALES = 10
_OUT = click.Path(dir_okay=False, path_type=Path)

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
    @click.option("--keys", envvar="WHALEZ_KEYS", type=click.Path(path_type=Path), help="Key folder of the fleet.")
    @click.option("--timeout", "timeout_s", default=TIMEOUT_S, show_default=True, type=click.FloatRange(0.05, 60))
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @functools.wraps(function)
    def found(run_dir: Path | None, endpoint: str | None, keys: Path | None, timeout_s: float, **options: Any) -> int:
        if (run_dir is None) == (endpoint is None):
            raise click.UsageError("give either --run or --endpoint")
        return function(Ranks(run_dir, endpoint, timeout_s, keys), **options)

    return found


def _show(replies: Sequence[Reply], lines: Sequence[str], content: object, as_json: bool) -> int:
    """Print, name on stderr who is missing, and return the exit code."""
    click.echo(json.dumps(content, indent=1) if as_json else "\n".join(lines))
    code = OK
    for reply in replies:
        if reply.answer is None:
            code = SILENT
            why = f": {reply.why}" if reply.why else ""
            where = f" ({reply.endpoint})" if reply.endpoint else ""
            click.echo(f"whalez: rank {reply.rank} did not answer{where}{why}", err=True)
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
    lines = [*views.table(views.STATUS_HEAD, views.status_rows(replies)), *views.trouble_lines(replies)]
    if sockets:
        lines += views.socket_lines(replies)
    return _show(replies, lines, views.as_json(replies), as_json)


@command.command(epilog=_EPILOG)
@of_a_fleet
def whales(ranks: Ranks, as_json: bool) -> int:
    """Each whale's life: posted, gathered, ready by whom, committed at L, begun, done or cancelled and why, slips."""
    replies = ranks.ask(lambda query_id: admin.AskWhales(query_id=query_id))
    told = lives.stories(replies)
    lines = lives_lines(told, replies)
    content = views.as_json(replies) | {"whales": [_story(story) for story in told]}
    return _show(replies, lines, content, as_json)


def lives_lines(told: Sequence[lives.Story], replies: Sequence[Reply]) -> list[str]:
    """The table of whales, and the sequencer as it stands if rank 0 answered."""
    lines = views.table(lives.HEAD, lives.rows(told))
    for reply in replies:
        if isinstance(reply.answer, admin.Whales) and (line := reply.answer.sequencer) is not None:
            left = f", left: rank {views.ranks_text(line.left)}" if line.left else ""
            lines.append(
                f"sequencer: {line.phase} at launch {line.launch}, slack {line.slack}, "
                f"{line.waiting} posts wait for a seq{left}"
            )
    return lines


def _story(story: lives.Story) -> dict[str, Any]:
    return {**dataclasses.asdict(story), "state": story.state}


@command.command(epilog=_EPILOG)
@of_a_fleet
def slabs(ranks: Ranks, as_json: bool) -> int:
    """The layout of a slab, its bytes, and who has mapped whose."""
    replies = ranks.ask(lambda query_id: admin.AskSlabs(query_id=query_id))
    return _show(replies, views.slab_lines(replies), views.as_json(replies), as_json)


@command.command(epilog=_EPILOG)
@click.option("--all", "show_all", is_flag=True, help="Also the lines at which nobody is behind.")
@of_a_fleet
def doorbells(ranks: Ranks, as_json: bool, show_all: bool) -> int:
    """Who waits for whom, what is expected and what was seen: for a fleet that hangs."""
    replies = ranks.ask(lambda query_id: admin.AskDoorbells(query_id=query_id))
    told = views.waits(replies)
    content = views.as_json(replies) | {"waits": msgspec.to_builtins(told), "blocked_on": views.blocked_on(told)}
    return _show(replies, views.doorbell_lines(replies, show_all=show_all), content, as_json)


@command.command(epilog=_EPILOG)
@click.argument("seq", type=click.IntRange(min=0))
@of_a_fleet
def cancel(ranks: Ranks, as_json: bool, seq: int) -> int:
    """End whale SEQ and the request it is for. One that is committed runs to its end, for nobody."""
    told = {story.seq: story for story in lives.stories(ranks.ask(lambda query_id: admin.AskWhales(query_id=query_id)))}
    story = told.get(seq)
    if story is None or story.poster is None:
        raise RequestError(f"no whale {seq} is known to a rank that answers")
    if story.state in ("done", "cancelled"):
        raise RequestError(f"whale {seq} is {story.state} already")
    ranks.renew()
    poster, request_id = story.poster, story.request_id
    is_open = story.state in ("gathering", "ready")  # then the sequencer can still call the gang off
    replies = ranks.ask(
        lambda query_id: admin.CancelWhale(query_id=query_id, seq=seq, request_id=request_id, poster=poster),
        {0, poster} if is_open else {poster},
    )
    return _show(replies, _ordered_lines(replies), views.as_json(replies), as_json)


@command.group(epilog=_EPILOG)
def drain() -> None:
    """Make ranks leave."""


@drain.command("all", epilog=_EPILOG)
@click.option("--grace", "grace_s", default=30.0, show_default=True, type=click.FloatRange(0, DRAIN_GRACE_S_MAX))
@of_a_fleet
def drain_all(ranks: Ranks, as_json: bool, grace_s: float) -> int:
    """No new requests; those that run have --grace seconds to end; then all ranks leave at one launch, with exit 0."""
    replies = ranks.ask(lambda query_id: admin.DrainFleet(query_id=query_id, grace_s=grace_s))
    return _show(replies, _ordered_lines(replies), views.as_json(replies), as_json)


def _ordered_lines(replies: Sequence[Reply]) -> list[str]:
    return [f"rank {reply.rank}: {reply.answer.what}" for reply in replies if isinstance(reply.answer, admin.Ordered)]


@command.command(epilog=_EPILOG)
@click.option("--interval", "interval_s", default=0.5, show_default=True, type=click.FloatRange(0.1, 60))
@click.option("--times", default=None, type=click.IntRange(min=1), help="Stop after so many; default: until Ctrl-C.")
@of_a_fleet
def watch(ranks: Ranks, as_json: bool, interval_s: float, times: int | None) -> int:
    """Status, whales and waits, live. With --json one object a line."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    code = OK
    live = None if as_json else Live(Text(""), auto_refresh=False)
    with live or contextlib.nullcontext():
        for i in itertools.count() if times is None else range(times):
            if i:
                time.sleep(interval_s)
            ranks.renew()
            replies = ranks.ask(lambda query_id: admin.AskStatus(query_id=query_id))
            answering = {reply.rank for reply in replies if reply.answer is not None}
            seen = ranks.ask(lambda query_id: admin.AskWhales(query_id=query_id), answering)
            rung = ranks.ask(lambda query_id: admin.AskDoorbells(query_id=query_id), answering)
            told = lives.stories(seen)
            code = OK if len(answering) == len(replies) else SILENT
            if live is None:
                content = views.as_json(replies) | {
                    "whales": [_story(story) for story in told],
                    "waits": msgspec.to_builtins(views.waits(rung)),
                }
                click.echo(json.dumps(content))
            else:
                tables = [
                    views.table(views.STATUS_HEAD, views.status_rows(replies)),
                    ["", *lives_lines(told[-_WATCHED_WHALES:], seen), ""],
                ]
                status_table, whale_table = (Text("\n".join(t), no_wrap=True, overflow="ellipsis") for t in tables)
                troubles = [*views.trouble_lines(replies), *views.silence_lines(replies)]
                sentences = map(Text, (*troubles, *views.wait_lines(views.waits(rung))))
                live.update(Group(status_table, whale_table, *sentences), refresh=True)
    return code


@command.command(epilog=_EPILOG)
@click.option("--run", "run_dir", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--last", default=20, show_default=True, type=click.IntRange(min=1), help="Launches to show, by time.")
@click.option("--request", "request_id", help="Only launches of this request.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def trace(run_dir: Path, last: int, request_id: str | None, as_json: bool) -> int:
    """The last launches that prefilled something, from the trace files of a fleet that was started with --trace."""
    traces = launches.read_traces(run_dir)
    lines = [line for line in traces.lines if request_id in (None, line["request_id"])]
    kept = set(list(dict.fromkeys(map(launches.row_of, lines)))[-last:])
    lines = [line for line in lines if launches.row_of(line) in kept]
    if as_json:
        click.echo(json.dumps({"launches": lines, "skipped": traces.skipped}, indent=1))
    else:
        click.echo("\n".join(views.table(launches.HEAD, launches.rows(lines))))
    for name, count in traces.skipped.items():
        click.echo(f"whalez: {name}: {count} lines are none of a trace", err=True)
    return OK


@command.command(epilog=_EPILOG)
@click.option("--out", default=Path("whalez-dump.tar.gz"), show_default=True, type=_OUT)
@click.option("--with-prompts", is_flag=True, help="Also token ids of running requests, and captures.")
@of_a_fleet
def dump(ranks: Ranks, as_json: bool, out: Path, with_prompts: bool) -> int:
    """Write a bundle for a bug report: all answers, logs, post-mortems and traces; no prompts unless asked."""
    asked: dict[str, Callable[[str], admin.AdminQuery]] = {
        "status": lambda query_id: admin.AskStatus(query_id=query_id),
        "whales": lambda query_id: admin.AskWhales(query_id=query_id),
        "slabs": lambda query_id: admin.AskSlabs(query_id=query_id),
        "doorbells": lambda query_id: admin.AskDoorbells(query_id=query_id),
    }
    if with_prompts:
        asked["prompts"] = lambda query_id: admin.AskPrompts(query_id=query_id)
    answers: dict[str, object] = {}
    lacking: dict[int, Reply] = {}  # by rank: silent, or its prompts are not in the bundle
    for name, make in asked.items():
        ranks.renew()
        silent = {rank for rank, reply in lacking.items() if reply.answer is None}
        replies = ranks.ask(make, set(ranks.endpoints) - silent)
        is_prompts = name == "prompts"  # which were asked for by name; a rank that is starting has no doorbells
        answers[name] = _prompts(replies) if is_prompts else views.as_json(replies)
        lacking |= {
            reply.rank: reply
            for reply in replies
            if reply.answer is None or (is_prompts and isinstance(reply.answer, admin.NotDone))
        }
    names = bundle.write_bundle(out, answers, ranks.run_dir, with_prompts=with_prompts)
    content = {
        "out": str(out),
        "files": names,
        "silent": sorted(rank for rank, reply in lacking.items() if reply.answer is None),
        "refused": {r: each.answer.reason for r, each in lacking.items() if isinstance(each.answer, admin.NotDone)},
    }
    return _show(list(lacking.values()), [f"{out}: {len(names)} files", *names], content, as_json)


def _prompts(replies: Sequence[Reply]) -> object:
    """{rank: {request id: token ids}}; for a rank that gave none, why."""
    told: dict[int, object] = {}
    for reply in replies:
        if isinstance(reply.answer, admin.Prompts):
            told[reply.rank] = {
                request_id: list(struct.unpack(f"<{len(tokens) // 4}i", tokens))
                for request_id, tokens in reply.answer.prompts.items()
            }
        else:
            told[reply.rank] = reply.answer.reason if isinstance(reply.answer, admin.NotDone) else "no answer"
    return told


@command.command("postmortem", epilog=_EPILOG)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def postmortem_command(folder: Path, as_json: bool) -> int:
    """Merge the post-mortem files of a run folder into one page that names the first cause."""
    found = postmortem.read_files(folder)
    if as_json:
        cause = dataclasses.asdict(postmortem.first_cause(found.files, found.broken))
        content = {"cause": cause, "stale": list(found.stale), "broken": found.broken, "files": found.files}
        click.echo(json.dumps(content, indent=1))
    else:
        click.echo("\n".join(postmortem.page(folder, found)))
    return OK
