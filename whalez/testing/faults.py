"""A rank that stops at a chosen place: `python -m whalez.testing.faults --at PLACE --mark FILE [--slow S] -- ARGS`.

The rank is the real one; one seam of it is wrapped. Once FILE.on exists, the first passage through the seam makes FILE
and stays there until FILE.go exists, or with --slow for so many seconds, in which the progress word moves.
Only the loop is held: the threads of the hub and of the link go on, as in a rank with an operation that never returns.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whalez.warm import prepare

if __name__ == "__main__":  # before anything imports numba, which reads the name of its cache once
    prepare(os.environ)

from whalez import rank
from whalez.engine.loop import Loop
from whalez.fabric.doorbell import Bells
from whalez.hub.zmq_hub import ZmqHub
from whalez.parallel.context import GangSpan
from whalez.parallel.expert import PairedExperts
from whalez.rendezvous.effects import Compose, LaunchKind
from whalez.rendezvous.messages import Commit, Gather

#: Place -> what the rank is about to do there.
PLACES = {
    "hello": "say hello",
    "allgather": "say that it has mapped the slabs of the table",
    "idle": "sleep",
    "gathering": "answer the Gather of a whale it is a member of",
    "armed": "read the Commit of a whale it has armed",
    "committed": "compose the next launch, with a whale committed",
    "dispatch": "ring dispatch in a superstep",
    "combine": "ring combine in a superstep",
    "data": "ring data",
    "free": "ring free",
    "decoding": "run a launch that decodes",
}


class Hold:
    """Where and how the rank stays. `pass_by` is called at every passage through the seam."""

    def __init__(self, mark: Path, slow_s: float | None) -> None:
        self.mark = mark
        self.slow_s = slow_s
        self.in_superstep = False
        self._on, self._go = Path(f"{mark}.on"), Path(f"{mark}.go")
        self._was_held = False

    def pass_by(self, bells: Bells | None = None) -> None:
        if self._was_held or not self._on.exists():
            return
        self._was_held = True
        self.mark.touch()
        begun = time.monotonic()
        while not self._go.exists() and (self.slow_s is None or time.monotonic() - begun < self.slow_s):
            if self.slow_s is not None and bells is not None:
                bells.raise_progress()
            time.sleep(0.05)


def install(place: str, hold: Hold) -> None:
    """Wrap the seam of `place`, in this process, for good."""

    def before(owner: type, name: str, act: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            act(self, *args)
            return inner(self, *args, **kwargs)

        setattr(owner, name, wrapped)

    def note_kind(loop: Loop, compose: Compose, plan: Any) -> None:
        hold.in_superstep = compose.kind is LaunchKind.SUPERSTEP

    def on_message(kind: type) -> Callable[..., None]:
        def act(loop: Loop, message: Any) -> None:
            if isinstance(message, kind) and (not isinstance(message, Gather) or loop.rank in message.plan.gang):
                hold.pass_by(loop.bells)

        return act

    def at_compose(loop: Loop) -> None:
        if loop.member.has_commit:
            hold.pass_by(loop.bells)

    def in_superstep(experts: PairedExperts, *_: Any) -> None:
        if hold.in_superstep:
            hold.pass_by(experts.bells)

    def at_window(span: GangSpan, *_: Any) -> None:
        hold.pass_by(span._bells)

    def at_decode(loop: Loop, compose: Compose, plan: Any) -> None:
        if plan.decodes:
            hold.pass_by(loop.bells)

    before(Loop, "_run", note_kind)
    match place:
        case "hello":
            before(ZmqHub, "start", lambda hub, *_: hold.pass_by())
        case "allgather":
            before(ZmqHub, "mapped", lambda hub, *_: hold.pass_by())
        case "idle":
            before(Bells, "sleep", lambda bells, *_: hold.pass_by(bells))
        case "gathering":
            before(Loop, "_receive", on_message(Gather))
        case "armed":
            before(Loop, "_receive", on_message(Commit))
        case "committed":
            before(Loop, "_may_sleep", at_compose)
        case "dispatch":
            before(PairedExperts, "_publish", in_superstep)
        case "combine":
            before(PairedExperts, "_ring_and_await_combine", in_superstep)
        case "data":
            before(GangSpan, "_ring_data", at_window)
        case "free":
            before(GangSpan, "_ring_free", at_window)
        case "decoding":
            before(Loop, "_run", at_decode)


def fault_arguments(place: str, mark: Path, *, slow_s: float | None = None) -> list[str]:
    """What comes before a rank's own arguments; `mark` and `slow_s` as in the module's words."""
    words = [sys.executable, "-m", "whalez.testing.faults", "--at", place, "--mark", str(mark)]
    return words if slow_s is None else [*words, "--slow", str(slow_s)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m whalez.testing.faults", description=__doc__, allow_abbrev=False)
    parser.add_argument("--at", choices=list(PLACES), required=True)
    parser.add_argument("--mark", type=Path, required=True)
    parser.add_argument("--slow", type=float)
    parser.add_argument("rank", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    install(arguments.at, Hold(arguments.mark, arguments.slow))
    rank.main([word for word in arguments.rank if word != "--"])


if __name__ == "__main__":
    main()
