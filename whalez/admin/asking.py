"""Which ranks there are, and what each answers before one deadline that all share."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whalez.clock import now_ns
from whalez.errors import Unavailable
from whalez.hub.admin import AdminAnswer, AdminQuery, AskStatus, RankStatus
from whalez.hub.keys import load_keys
from whalez.hub.zmq_admin import ask_all
from whalez.serve.endpoints import read_endpoints

TIMEOUT_S = 0.8  #: with the start of the interpreter, an operator has the answer in about a second

#: query id -> the query.
MakeQuery = Callable[[str], AdminQuery]


@dataclass(frozen=True, slots=True)
class Reply:
    """What one rank said. `answer` is None if it said nothing in time."""

    rank: int
    endpoint: str
    answer: AdminAnswer | None


class Ranks:
    """The ranks of one fleet, and the deadline of the command that asks them."""

    def __init__(self, run_dir: Path | None, endpoint: str | None, timeout_s: float, keys: Path | None = None) -> None:
        """Exactly one of `run_dir` and `endpoint`, any rank's, is given; `keys` if the fleet has some.

        Raises: ConfigError for a folder that is none of a fleet or holds no keys; Unavailable if the endpoint does not
            answer.
        """
        self.timeout_s = timeout_s
        self._keys = load_keys(keys) if keys is not None else None
        self._deadline_ns = now_ns() + int(timeout_s * 1e9)
        if run_dir is not None:
            self.run_dir: Path | None = run_dir.resolve()
            self.endpoints = read_endpoints(self.run_dir)
            return
        assert endpoint is not None
        self.run_dir = None
        first = ask_all([(endpoint, AskStatus(query_id=secrets.token_hex(8)))], timeout_s, self._keys)[0]
        if not isinstance(first, RankStatus):
            raise Unavailable(f"no rank answers at {endpoint} within {timeout_s:g} s")
        told = {rank: each for rank, each in enumerate(first.endpoints) if each}
        self.endpoints = told | {first.rank: endpoint}

    def ask(self, make: MakeQuery, ranks: set[int] | None = None) -> list[Reply]:
        """The same query to all ranks, or to some; replies in rank order."""
        asked = [rank for rank in sorted(self.endpoints) if ranks is None or rank in ranks]
        questions = [(self.endpoints[rank], make(secrets.token_hex(8))) for rank in asked]
        left_s = max(0.05, (self._deadline_ns - now_ns()) / 1e9)
        answers = ask_all(questions, left_s, self._keys)
        return [Reply(rank, self.endpoints[rank], answer) for rank, answer in zip(asked, answers, strict=True)]

    def renew(self) -> None:
        """Begin another command: the deadline is as far away as at first."""
        self._deadline_ns = now_ns() + int(self.timeout_s * 1e9)
