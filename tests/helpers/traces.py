"""What the ranks of a fleet traced."""

from __future__ import annotations

import json
from typing import Any

from whalez.fleet import Fleet


def trace_lines(fleet: Fleet, request_id: str | None = None) -> dict[int, list[dict[str, Any]]]:
    """Rank -> trace lines in order, of one request or of all."""
    found = {}
    for rank in range(fleet.world):
        lines = [json.loads(t) for t in (fleet.run_dir / f"trace-{rank}.jsonl").read_text().splitlines()]
        found[rank] = [line for line in lines if request_id in (None, line["request_id"])]
    return found
