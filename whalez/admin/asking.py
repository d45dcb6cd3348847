"""Which ranks there are, and what each answers to a query before one deadline that all share."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whalez.clock import now_ns
from whalez.errors import Unavailable
from whalez.hub.admin import ANSWERS, AdminAnswer, AdminQuery, AskStatus, NotDone, RankStatus
from whalez.hub.keys import load_keys
from whalez.hub.zmq_admin import NoAnswer, ask_all
from whalez.serve.endpoints import read_endpoints

TIMEOUT_S = 0.8  #: with the start of the interpreter, an operator has the answer in about a second

#: query id -> the query.
MakeQuery = Callable[[str], AdminQuery]


@dataclass(frozen=True, slots=True)
class Reply:
    """What one rank said. `answer` is None if it did not answer, and `why` says why not where that is known."""

    rank: int
    endpoint: str
    answer: AdminAnswer | None
    why: str = ""


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
        if isinstance(first, NoAnswer) and first.why:
            raise Unavailable(f"no rank answers at {endpoint}: {first.why}")
        if not isinstance(first, RankStatus):
            raise Unavailable(f"no rank answers at {endpoint} within {timeout_s:g} s")
        # "" where the rank at `endpoint` has not been told: the world is not complete yet.
        self.endpoints = dict(enumerate(first.endpoints)) | {first.rank: endpoint}

    def ask(self, make: MakeQuery, ranks: set[int] | None = None) -> list[Reply]:
        """The same query to all ranks, or to some; replies in rank order."""
        asked = [rank for rank in sorted(self.endpoints) if ranks is None or rank in ranks]
        queries = {rank: make(secrets.token_hex(8)) for rank in asked}
        known = [rank for rank in asked if self.endpoints[rank]]
        left_s = max(0.05, (self._deadline_ns - now_ns()) / 1e9)
        told = ask_all([(self.endpoints[rank], queries[rank]) for rank in known], left_s, self._keys)
        answers = dict(zip(known, told, strict=True))
        return [_reply(rank, self.endpoints[rank], queries[rank], answers.get(rank)) for rank in asked]

    def renew(self) -> None:
        """Begin another command: the deadline is as far away as at first."""
        self._deadline_ns = now_ns() + int(self.timeout_s * 1e9)


def _reply(rank: int, endpoint: str, query: AdminQuery, answer: AdminAnswer | NoAnswer | None) -> Reply:
    """Only what this rank says to this query is an answer: a file or an address may be another fleet's."""
    if answer is None:
        return Reply(rank, endpoint, None, "its address is not known before the world is complete")
    if isinstance(answer, NoAnswer):
        return Reply(rank, endpoint, None, answer.why)
    if answer.rank != rank:
        return Reply(rank, endpoint, None, f"rank {answer.rank} is what answers there")
    if not isinstance(answer, ANSWERS[type(query)] | NotDone):
        return Reply(rank, endpoint, None, f"it answers a {type(query).__name__} with a {type(answer).__name__}")
    return Reply(rank, endpoint, answer)
