"""Draw the machines' transition tables into docs/protocol.md, between its two markers.

python tools/protocol_doc.py            # writes them anew
python tools/protocol_doc.py --check    # exits non-zero if they are not current
"""

from __future__ import annotations

import argparse
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from whalez.rendezvous import allgather, member, sequencer

DOC = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
BEGIN, END = "<!-- tables: begin (tools/protocol_doc.py) -->", "<!-- tables: end -->"

TABLES: dict[str, tuple[str, dict[Any, Any]]] = {
    "A rank": ("`member.PHASES`: what a rank is up to as a whole.", member.PHASES),
    "A post at its rank": ("`member.POSTS`: one request that wants a gang.", member.POSTS),
    "A whale at a rank": ("`member.RECORDS`: one seq, Stop included.", member.RECORDS),
    "The world": ("`sequencer.PHASES`: what the sequencer is up to.", sequencer.PHASES),
    "A whale at the sequencer": ("`sequencer.GATHERS`: one seq.", sequencer.GATHERS),
    "Coming up": ("`allgather.STEPS`: from the first Hello to the first launch.", allgather.STEPS),
}


def diagram(table: dict[tuple[Enum, Enum], Enum]) -> str:
    """Mermaid: one arrow per pair of states, one line per state for what leaves it as it is."""
    states = list(dict.fromkeys([state for state, _ in table] + list(table.values())))
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    stays: dict[Enum, list[str]] = {}
    for (state, what), after in table.items():
        if state is after:
            stays.setdefault(state, []).append(what.value)
        else:
            arrows.setdefault((state, after), []).append(what.value)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {states[0].value}"]
    lines += [f"    {state.value} --> {after.value}: {', '.join(what)}" for (state, after), what in arrows.items()]
    lines.append("```")
    if stays:
        lines += ["", "Taken without a change of state:"]
        lines += [f"- *{state.value}*: {', '.join(what)}" for state, what in stays.items()]
    return "\n".join(lines)


def tables() -> str:
    parts = [f"### {title}\n{text}\n\n{diagram(table)}\n" for title, (text, table) in TABLES.items()]
    return f"{BEGIN}\n" + "\n".join(parts) + END


def with_tables(text: str) -> str:
    """The document with its tables drawn anew. Raises ValueError if it lacks a marker."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + tables() + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = DOC.read_text()
    drawn = with_tables(text)
    if args.check:
        print("current" if drawn == text else f"{DOC} is not current: run python tools/protocol_doc.py")
        return 0 if drawn == text else 1
    DOC.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
