"""The `whalez` command: what a user types, turned into a Fleet or a file.

Rule 1: heavy imports happen inside the commands, so that `--help` and a mistyped flag answer at once.
Rule 2: the process boundary: the one place that catches everything, and that takes signals.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whalez.config import fleet_config, fleet_options, rank_options
from whalez.errors import OutputError, RequestError, WhalezError
from whalez.signals import Signalled, take_signals
from whalez.version import __version__

if TYPE_CHECKING:
    from whalez.fleet import Generated


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. One line on stderr for whatever went wrong; exit 1, 2 for usage, 128 + n for signal n."""
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        take_signals()
        code = whalez.main(args=None if argv is None else list(argv), prog_name="whalez", standalone_mode=False)
    except Signalled as caught:
        code = _end(f"stopped by {signal.Signals(caught.number).name}", 128 + caught.number)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, BrokenPipeError):
        code = 1
    except WhalezError as error:
        code = _end(str(error), 1)
    except Exception as error:
        if debug:
            raise
        code = _end(f"{type(error).__name__}: {error} (this is a bug; --debug shows where)", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _end(line: str, code: int) -> int:
    print(f"whalez: {' '.join(line.split())}", file=sys.stderr)
    return code


def _say(line: str) -> None:
    click.echo(f"whalez: {line}", err=True)


def _print(line: str) -> None:
    """A line of results. Raises OutputError, BrokenPipeError."""
    try:
        click.echo(line)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError("standard output", error) from None


_model = click.option(
    "--model", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="Checkpoint folder."
)
_world = click.option("--world", default=4, show_default=True, type=click.IntRange(min=1), help="Number of ranks.")
_run = click.option(
    "--run", "run_dir", type=click.Path(file_okay=False, path_type=Path), help="Keep logs and sockets in this folder."
)
_out = click.Path(dir_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="whalez", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
def whalez(debug: bool) -> None:
    """Long-context prefill over a fleet of free-running rank processes."""


@whalez.command("make-checkpoint")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--arch", default="kimi-linear", show_default=True)
@click.option("--preset", default="mini", show_default=True, help="tiny, mini, kernel or demo.")
@click.option("--seed", default=0, show_default=True)
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "f32"]))
def make_checkpoint_command(directory: Path, arch: str, preset: str, seed: int, dtype: str) -> None:
    """Write a seeded random checkpoint in the published layout."""
    from whalez.model.presets import make_checkpoint

    make_checkpoint(directory, arch, preset, seed, dtype=dtype)
    size = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    _say(f"wrote {directory}: {arch} {preset}, seed {seed}, {size / 1e6:.0f} MB")


@whalez.command()
@_model
@click.option("--tokens", "tokens_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_world
@click.option("--lane", default="auto", show_default=True, type=click.Choice(["auto", "whale", "local"]))
@click.option("--poster", default=0, show_default=True, type=click.IntRange(min=0), help="Rank that gets the prompts.")
@click.option("--max-tokens", default=16, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Sample from the likeliest tokens of so much probability."
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1))
@click.option("--json", "json_out", type=_out, help="Per request: tokens, lane, plan, TTFT and its parts.")
@click.option("--logits", "logits_out", type=_out, help="f32 logits of the last prompt position and every generated.")
@click.option("--hidden", "hidden_out", type=_out, help="Final hidden rows of every member.")
@_run
@fleet_options
@rank_options
def generate(
    model: Path,
    tokens_file: Path,
    world: int,
    lane: str,
    poster: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    json_out: Path | None,
    logits_out: Path | None,
    hidden_out: Path | None,
    run_dir: Path | None,
    **settings: Any,
) -> None:
    """Start a fleet, generate from the prompts of a JSON file, stop the fleet.

    The file holds one list of token ids, or a list of such lists; all are posted at once.
    """
    from whalez.fleet import Fleet
    from whalez.hub.request_limits import check_max_tokens
    from whalez.model.config import KimiLinearConfig
    from whalez.serve.completions import check_sampling, check_tokens

    try:
        check_max_tokens(max_tokens)
        check_sampling(temperature, top_p)
        for out in (json_out, logits_out, hidden_out):
            if out is not None:
                require_writable(out)
    except (RequestError, OutputError) as error:
        raise click.UsageError(str(error)) from None
    if poster >= world:
        raise click.BadParameter(f"expected 0 to {world - 1}", param_hint="--poster")
    prompts = read_prompts(tokens_file)
    max_ctx, vocab_size = fleet_config(model, world, settings).max_ctx, KimiLinearConfig.from_dir(model).vocab_size
    for i, prompt in enumerate(prompts):
        try:  # before a fleet is started for it
            check_tokens(prompt, max_tokens, max_ctx, vocab_size)
        except RequestError as error:
            raise RequestError(f"{tokens_file}: list {i}: {error}", param=error.param) from None
    capture = logits_out is not None or hidden_out is not None
    with Fleet(model, world, run_dir=run_dir, capture=capture, progress=_say, **settings) as fleet:
        pending = [
            fleet.submit(
                prompt,
                max_tokens=max_tokens,
                poster=poster,
                lane=lane,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
            )
            for prompt in prompts
        ]
        results = [each.result() for each in pending]
        if capture:
            from whalez.engine.captures import merge_captures

            merge_captures(fleet.run_dir, results, logits_out, hidden_out)
    for each in results:
        _print_result(each)
    if json_out is not None:
        write_json(json_out, {"model": str(model), "world": world, "requests": [_row(each) for each in results]})


def read_prompts(path: Path) -> list[list[int]]:
    """Raises RequestError naming the file and what is wrong in it."""
    try:
        told = json.loads(path.read_bytes())
    except ValueError as error:
        raise RequestError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise RequestError(f"{path}: nested too deeply") from None
    prompts = [told] if isinstance(told, list) and not any(isinstance(item, list) for item in told) else told
    if not isinstance(prompts, list) or not all(
        isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in prompts
    ):
        raise RequestError(f"{path}: expected a list of token ids, or a list of such lists")
    return prompts


def require_writable(path: Path) -> None:
    """As far as can be seen before there is something to write. Raises OutputError."""
    try:
        if path.exists():
            path.open("ab").close()  # leaves what is in it
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise OutputError(path, error) from None


def write_json(path: Path, content: object) -> None:
    """Raises OutputError."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise OutputError(path, error) from None


def _row(result: Generated) -> dict[str, Any]:
    import msgspec

    report = msgspec.to_builtins(result.report)
    return {
        "request_id": result.request_id,
        "tokens": list(result.tokens),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        **report,
    }


def _print_result(result: Generated) -> None:
    report = result.report
    gang = f", gang {list(report.gang)} entered at launch {report.entry_launch}" if report.gang else ""
    _say(f"{result.prompt_tokens} tokens, {report.lane} lane ({report.why}){gang}, TTFT {report.ttft_s * 1e3:.0f} ms")
    _print(json.dumps(list(result.tokens)))


@whalez.command("fleet")
@_model
@_world
@click.option("--listen", required=True, metavar="HOST:PORT", help="One URL for all ranks; rank r on PORT + 1 + r.")
@click.option("--restart", is_flag=True, help="Start the world again after a failure; not with --hold-on-failure.")
@click.option("--trace", is_flag=True, help="Have every rank write one line per prefill launch to the run folder.")
@click.option(
    "--hold-on-failure", is_flag=True, help="Keep failed ranks for a debugger until Ctrl-C; not with --restart."
)
@_run
@fleet_options
@rank_options
def fleet_command(model: Path, world: int, listen: str, restart: bool, run_dir: Path | None, **settings: Any) -> None:
    """Serve all ranks behind one URL until Ctrl-C, or until `whalez admin drain all`."""
    from whalez.fleet import Fleet

    if restart and settings["hold_on_failure"]:
        raise click.UsageError("--restart and --hold-on-failure: a world whose ranks stay cannot start again")
    # A fleet that never served has a wrong setting or checkpoint; starting it again would not mend that.
    with Fleet(model, world, listen=listen, run_dir=run_dir, keep_front=restart, progress=_say, **settings) as fleet:
        if restart:
            fleet.serve_on()
        else:
            fleet.wait()


@whalez.command()
@_model
@click.option("--tokens", required=True, type=click.IntRange(min=1), help="Length of the prompt.")
@click.option("--world", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--poster", default=0, show_default=True, type=click.IntRange(min=0))
@fleet_options
def plan(model: Path, tokens: int, world: int, poster: int, **settings: Any) -> None:
    """Show the gang and the segments a prompt would get, without starting anything."""
    from whalez.engine.preview import plan_lines

    if poster >= world:
        raise click.BadParameter(f"expected 0 to {world - 1}", param_hint="--poster")
    for line in plan_lines(model, tokens, world, poster, settings, len(os.sched_getaffinity(0))):
        _print(line)


@whalez.command("keys")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def keys_command(directory: Path) -> None:
    """Make the keys of a fleet: who may join its hub, and who may give it orders.

    docs/security.md says which file belongs on which machine.
    """
    from whalez.hub.keys import make_keys

    for path in make_keys(directory):
        secret = path.suffix == ".key_secret"
        _say(f"wrote {path}{' (secret: this user only)' if secret else ''}")


@whalez.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(arguments: tuple[str, ...]) -> int:
    """What this machine has and lacks for a given world and model, and what to do."""
    return int(importlib.import_module("whalez.doctor").main(list(arguments)) or 0)


@whalez.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def admin(arguments: tuple[str, ...]) -> int:
    """Look into a running fleet, and give it orders."""
    return int(importlib.import_module("whalez.admin.commands").main(list(arguments)) or 0)


if __name__ == "__main__":
    main()
