"""Stories in files: commands, and what the machines did. `pytest --rewrite` tells them anew; a diff is read like code.

A file is a list of commands, each followed by `----`, what happened, and an empty line. Lines that begin with `#` are
for the reader. Commands:

    fleet WORLD [NAME=INT ...]   first; names are the Sequencer's arguments
    post RANK NAME LENGTH        even lengths: all ranks; odd: RANK and its neighbour; 13: refused; 40: two supersteps
    withdraw RANK NAME
    deliver | deliver in | deliver out     all queues until nothing moves | to the sequencer | to the ranks, once
    hold RANK | release RANK     what is sent to it stays under way
    refuse RANK                  it cannot reserve any more
    launch COUNT                 boundaries of all ranks, with nothing delivered between
    run COUNT                    the same, with everything delivered before each
    wait SECONDS                 and look at the deadlines
    stop | drain | drained RANK | dies RANK
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.control_fleet import SECOND, Fleet
from whalez.rendezvous import events as ev

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


def perform(fleet: Fleet | None, command: str) -> Fleet:
    verb, *words = command.split()
    if verb == "fleet":
        return Fleet(int(words[0]), **{name: int(value) for name, value in (word.split("=") for word in words[1:])})
    assert fleet is not None, "a scenario begins with a fleet"
    match verb, words:
        case "post", [rank, name, length]:
            fleet.post(int(rank), name, int(length))
        case "withdraw", [rank, name]:
            fleet.member(int(rank), ev.WithdrawWanted(name))
        case "deliver", []:
            fleet.deliver()
        case "deliver", ["in"]:
            fleet.deliver_inbound()
        case "deliver", ["out"]:
            fleet.deliver_outbound()
        case "hold", [rank]:
            fleet.held.add(int(rank))
        case "release", [rank]:
            fleet.held.discard(int(rank))
        case "refuse", [rank]:
            fleet.refusing.add(int(rank))
        case "launch", [count]:
            fleet.launch(int(count))
        case "run", [count]:
            fleet.run(int(count))
        case "wait", [seconds]:
            fleet.now_ns += int(seconds) * SECOND
            fleet.sequence(ev.Tick())
        case "stop", []:
            fleet.sequence(ev.StopWanted())
        case "drain", []:
            fleet.sequence(ev.StopWanted(30.0))
        case "drained", [rank]:
            fleet.member(int(rank), ev.DrainedHere())
        case "dies", [rank]:
            fleet.sequence(ev.PeerGone(int(rank), "killed"))
        case _:
            raise ValueError(f"no such command: {command}")
    return fleet


def told_anew(text: str) -> str:
    """The scenario with what happens now after each of its commands."""
    fleet: Fleet | None = None
    parts = []
    for block in text.strip().split("\n\n"):
        lines = block.split("----")[0].strip().splitlines()
        commands = [line for line in lines if not line.startswith("#")]
        told: list[str] = []
        for command in commands:
            fleet = perform(fleet, command)
            told += fleet.told
            fleet.told.clear()
        parts.append("\n".join(lines + (["----", *told] if commands else [])))
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    told = told_anew(text)
    if request.config.getoption("--rewrite"):
        path.write_text(told)
    assert path.read_text() == told


def test_there_are_stories() -> None:
    assert len(FILES) >= 8
