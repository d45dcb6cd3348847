"""Orders of an operator at a rank that lives: nothing he says ends the world, and what is called ordered follows."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_loop import One, one_loop

from helpers.solo import solo
from whalez.engine.answers import Answers, RankFacts
from whalez.engine.health import Health
from whalez.engine.sizing import plan_policy
from whalez.hub import admin
from whalez.hub.requests import Done
from whalez.hub.zmq_admin import AdminServer, ask_all
from whalez.hub.zmq_hub import ZmqHub
from whalez.planning import GangPlan, plan_whale
from whalez.rendezvous.events import Received
from whalez.rendezvous.lives import Life, WatchedSequencer
from whalez.rendezvous.messages import Post, Ready
from whalez.rendezvous.sequencer import Sequencer

INT_MAX = (1 << 63) - 1
EXTREMES: dict[Any, list[Any]] = {
    int: [0, 1, 7, -1, INT_MAX, -INT_MAX],
    float: [-1.0, -5e-324, 86_400.1, 1e10, 1e300, 1.7976931348623157e308],
    str: ["", "x" * 65_000, "\x00\n%s{}", "served"],
}
QUERIES = admin.Query.__args__  # type: ignore[attr-defined]


def extremes(kind: type[admin.AdminQuery]) -> Iterator[admin.AdminQuery]:
    """Every combination of extreme values, each under an id of its own."""
    fields = [field for field in msgspec.structs.fields(kind) if field.name != "query_id"]
    for values in itertools.product(*(EXTREMES[field.type] for field in fields)):
        yield kind(query_id=secrets.token_hex(8), **{f.name: v for f, v in zip(fields, values, strict=True)})


class Rank(msgspec.Struct):
    """Rank 0 of a world of one, with real sockets, sequencer, loop and answers."""

    one: One
    health: Health
    sequencer: WatchedSequencer
    endpoint: str

    def ask(self, query: admin.AdminQuery) -> admin.AdminAnswer:
        (answer,) = ask_all([(self.endpoint, query)], 10.0)
        assert isinstance(answer, admin.AdminAnswer)
        return answer

    def serves(self, request_id: str) -> None:
        """Answer one more request."""
        self.one.ask(request_id)
        deadline = time.monotonic() + 20
        while request_id not in self.one.ends():
            assert time.monotonic() < deadline
            self.one.turns(1)
        assert isinstance(self.one.ends()[request_id], Done)


@pytest.fixture
def rank(tiny_dir: Path, tmp_path: Path) -> Iterator[Rank]:
    with solo(tiny_dir) as made:
        watched = WatchedSequencer(Sequencer(1, plan_policy(made.config, made.fleet), plan=plan_whale))
        hub = ZmqHub(0, 1, f"ipc://{tmp_path}/hub", sequencer=watched)
        one = one_loop(made, hub=hub)
        health = Health(
            rank=0, world=1, incarnation="me", model="m", vocab_size=256, max_ctx=made.fleet.max_ctx, stall_s=60.0
        )
        health.loop = one.loop
        facts = RankFacts(rank=0, device="cpu", transport="host shm", hub="", host="here", sockets={})
        endpoint = f"ipc://{tmp_path}/admin"
        answers = Answers(facts, health, made.layout, endpoint)
        answers.sequencer, answers.withdraw = watched, hub.withdraw
        server = AdminServer(endpoint, 0, answers.answer)
        try:
            yield Rank(one, health, watched, endpoint)
        finally:
            server.close()
            hub.close()


@pytest.mark.parametrize("kind", QUERIES)
def test_no_query_whatever_is_in_it_ends_the_world(rank: Rank, kind: type[admin.AdminQuery]) -> None:
    rank.serves("before")
    for query in extremes(kind):
        answer = rank.ask(query)
        assert answer.query_id == query.query_id
        if isinstance(query, admin.GuardedQuery) and not isinstance(query, admin.AskPrompts):
            assert isinstance(answer, admin.NotDone)
            assert len(answer.reason) < 500
    rank.serves("after")
    assert rank.one.hub.failure is None
    assert rank.sequencer.sequencer.state.phase.value == "serving"


def test_what_reaches_the_sequencer_s_thread_past_the_answers_is_ignored(rank: Rank) -> None:
    """Whoever is the next to hand it an order without looking."""
    rank.one.hub.withdraw(7, "unheard-of")
    rank.one.hub.withdraw(-1, "")
    for grace_s in (1e300, -1.0, float("nan"), float("inf")):
        rank.one.hub.stop_world(grace_s)
    rank.serves("after")
    assert rank.one.hub.failure is None
    assert rank.sequencer.sequencer.state.phase.value == "serving"


@pytest.mark.parametrize("grace_s", [0.0, 5e-324, 86_400.0])
def test_a_drain_within_bounds_is_obeyed(rank: Rank, grace_s: float) -> None:
    assert isinstance(rank.ask(admin.DrainFleet(query_id="q", grace_s=grace_s)), admin.Ordered)
    rank.one.loop.run()
    assert rank.one.hub.failure is None
    gone = rank.ask(admin.DrainFleet(query_id="q", grace_s=grace_s))
    assert isinstance(gone, admin.NotDone) and "last launch" in gone.reason


def test_a_failed_rank_says_that_nothing_follows(rank: Rank) -> None:
    """As a held one, whose loop has ended."""
    rank.health.failure = "rank 1 died"
    for query in (
        admin.DrainFleet(query_id="q", grace_s=1.0),
        admin.CancelWhale(query_id="q", seq=0, request_id="served", poster=0),
    ):
        answer = rank.ask(query)
        assert isinstance(answer, admin.NotDone) and "has failed" in answer.reason
    assert not rank.one.loop._orders


# ---- cancel: what each rank says of it -----------------------------------------------------------------------------
class Posted:
    """Rank `own` of a world of two while rank 1's request "r" is whale 0, as far as `until` says."""

    def __init__(self, own: int, until: str) -> None:
        sequencer = Sequencer(2, None, plan=lambda *_: GangPlan(gang=(0, 1), bounds=(0, 1, 2), supersteps=1))
        watched = WatchedSequencer(sequencer)
        post = Post(rank=1, request_id="r", tokens=bytes(8), prompt_hash="", max_tokens=1)
        watched.step(Received(post, 1), 0, 0)
        if until == "committed":
            for each in (0, 1):
                watched.step(Received(Ready(rank=each, seq=0, count=0), each), 0, 0)
        life = Life(seq=0, request_id="r", poster=1, gang=(0, 1), tokens=2)
        self.orders: list[Any] = []
        self.withdrawn: list[Any] = []
        loop: Any = SimpleNamespace(
            state="serving",
            order=self.orders.append,
            serves=lambda request_id: own == 1 and request_id in ("r", "other"),
            whales=SimpleNamespace(lives=(life,)),
        )
        health: Any = SimpleNamespace(loop=loop, failure="")
        facts = RankFacts(rank=own, device="cpu", transport="host shm", hub="", host="here", sockets={})
        layout: Any = SimpleNamespace(world=2)
        self.answers = Answers(facts, health, layout, "")
        if own == 0:
            self.answers.sequencer = watched
            self.answers.withdraw = lambda poster, request_id: self.withdrawn.append((poster, request_id))


@pytest.mark.parametrize(
    ("own", "until", "changes", "said", "follows"),
    [
        (0, "gathered", {}, "calls whale 0 off", "withdrawn"),
        (0, "committed", {}, "is committed and runs to its end", ""),
        (0, "gathered", {"request_id": "x"}, "another request", ""),
        (0, "gathered", {"poster": 0}, "another request", ""),
        (0, "gathered", {"seq": 5}, "is over, or never was", ""),
        (1, "gathered", {}, "ends at this rank's next boundary", "ordered"),
        (1, "committed", {}, "ends at this rank's next boundary", "ordered"),
        (1, "gathered", {"request_id": "x", "seq": 5}, "serves no request 'x'", ""),
        (1, "gathered", {"request_id": "other"}, "another request", ""),
        (1, "gathered", {"poster": 0}, "neither its poster nor rank 0", ""),
        (1, "gathered", {"poster": 2}, "poster: expected 0 to 1, got 2", ""),
    ],
)
def test_a_cancel_is_called_ordered_exactly_where_something_follows(
    own: int, until: str, changes: dict[str, Any], said: str, follows: str
) -> None:
    posted = Posted(own, until)
    query = admin.CancelWhale(**({"query_id": "q", "seq": 0, "request_id": "r", "poster": 1} | changes))
    answer = posted.answers.answer(query)
    assert isinstance(answer, admin.Ordered if follows else admin.NotDone)
    assert said in (answer.what if isinstance(answer, admin.Ordered) else answer.reason)
    assert posted.withdrawn == ([(1, "r")] if follows == "withdrawn" else [])
    assert posted.orders == ([query] if follows == "ordered" else [])
