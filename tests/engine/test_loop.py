"""The loop of a world of one, in this process: what a client can ask of it, and what it hears at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.solo import Solo, solo
from whalez.engine.loop import Loop
from whalez.engine.records import Capture
from whalez.engine.sizing import plan_policy
from whalez.hub.local import LocalHub
from whalez.hub.requests import CancelRequest, Done, Failed, Response, Submit
from whalez.parallel.context import GangViews, WindowMap
from whalez.planning import GangPlan, check_plan
from whalez.rendezvous.effects import Reserve
from whalez.rendezvous.events import CannotReserve, Reserved
from whalez.rendezvous.member import Member
from whalez.rendezvous.messages import Hello, SlabEntry


@dataclasses.dataclass
class One:
    """A rank that is its whole world, and what it has answered."""

    loop: Loop
    hub: LocalHub
    answers: list[Response]

    def ask(self, request_id: str, **changes: Any) -> None:
        tokens = np.arange(8, dtype="<i4").tobytes()
        self.loop.submit(b"me", Submit(**({"request_id": request_id, "tokens": tokens, "max_tokens": 2} | changes)))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()

    def ends(self) -> dict[str, Response]:
        return {a.request_id: a for a in self.answers if isinstance(a, Done | Failed)}


@pytest.fixture
def start(tiny_dir: Path) -> Iterator[Callable[..., One]]:
    open_worlds = []

    def begin(*, capture: Capture | None = None, **settings: object) -> One:
        world = solo(tiny_dir, **settings)
        made = world.__enter__()
        open_worlds.append(world)
        return one_loop(made, capture)

    yield begin
    for world in open_worlds:
        world.__exit__(None, None, None)


def one_loop(made: Solo, capture: Capture | None = None, hub: Any = None) -> One:
    """`hub`: of a world of one, not started yet; None: one without sockets."""
    policy = plan_policy(made.config, made.fleet)
    hub = hub or LocalHub.world(1, policy=policy)[0]
    entry = SlabEntry(rank=0, incarnation="me", host="here", pid=1, ticket=b"")
    hub.start(Hello(entry=entry, world=1, fingerprint={}), 10.0)
    hub.mapped(10.0)
    answers: list[Response] = []
    loop = Loop(
        rank=0,
        fleet=made.fleet,
        policy=policy,
        rows_max=made.layout.spec.rows_max - made.fleet.slots,
        cores=None,
        member=Member(0, 1, policy=policy, check=check_plan),
        hub=hub,
        bells=made.bells,
        runner=made.runner,
        cache=made.cache,
        views=GangViews(made.layout, [made.slab]),
        windows=WindowMap(made.config.kda_layers, made.config.mla_layers),
        reply=lambda client, response: answers.append(response),
        capture=capture,
    )
    hub.set_waker(made.bells.wake)
    return One(loop, hub, answers)


@pytest.mark.parametrize(
    ("field", "value"), [("seed", -1), ("temperature", -0.5), ("top_p", 0.0), ("top_p", 1.5), ("lane", "fast")]
)
def test_nonsense_about_sampling_or_lane_is_refused_and_others_go_on(
    start: Callable[..., One], field: str, value: object
) -> None:
    one = start()
    one.ask("good", temperature=1.0, seed=2**63 - 1)
    one.ask("bad", **({"temperature": 1.0} | {field: value}))
    one.turns(3)
    ends = one.ends()
    assert isinstance(ends["good"], Done)
    assert isinstance(ends["bad"], Failed)
    assert (ends["bad"].kind, ends["bad"].param) == ("invalid", field)


def test_a_request_behind_the_last_launch_is_answered(start: Callable[..., One]) -> None:
    one = start()
    one.loop.drain(0.0)
    turn = one.loop.turn

    def last_turn() -> bool:
        goes_on = turn()
        if not goes_on:
            one.ask("late")
        return goes_on

    one.loop.turn = last_turn  # type: ignore[method-assign]
    one.loop.run()
    end = one.ends()["late"]
    assert isinstance(end, Failed)
    assert end.kind == "unavailable"


def test_what_runs_when_the_world_stops_and_what_comes_after_is_answered(start: Callable[..., One]) -> None:
    one = start(max_ctx=256)
    one.ask("runs", max_tokens=200)
    one.turns(1)
    one.hub.stop_world()
    one.loop.run()
    one.ask("after")
    ends = one.ends()
    assert [type(ends[name]) for name in ("runs", "after")] == [Failed, Failed]


def test_only_who_asked_can_cancel(start: Callable[..., One]) -> None:
    """A client that gives somebody else's name, or sends his words again, cancels nothing of his."""
    one = start()
    one.ask("mine", max_tokens=4)
    one.loop.submit(b"you", Submit(request_id="mine", tokens=bytes(4), max_tokens=1))  # refused, the name is taken
    one.loop.submit(b"you", CancelRequest(request_id="mine"))
    one.turns(6)
    refused, done = (answer for answer in one.answers if isinstance(answer, Done | Failed))
    assert isinstance(refused, Failed)
    assert refused.kind == "invalid"
    assert isinstance(done, Done)
    assert len(done.tokens) == 4
    one.ask("next", max_tokens=4)
    one.loop.submit(b"me", CancelRequest(request_id="next"))
    one.turns(6)
    assert one.ends()["next"].kind == "cancelled"  # type: ignore[union-attr]


def test_armed_rows_above_a_chunk_do_not_overfill_a_launch(start: Callable[..., One]) -> None:
    """While Stop is committed launches are armed ones; the slab was sized by the chunk."""
    one = start(chunk_tokens=8, armed_rows=256, slots=2, max_ctx=64)
    one.ask("long", tokens=np.arange(40, dtype="<i4").tobytes())
    one.hub.stop_world()
    while one.loop.turn():
        pass
    assert one.loop.scheduler.entry("long").prefilled > 0


def test_a_post_that_the_grace_cuts_short_is_not_called_cancelled_by_its_client(
    start: Callable[..., One], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    monkeypatch.setattr(one.loop, "_choose_lane", lambda lane, length: (True, "asked for"))
    one.ask("posted")
    with monkeypatch.context() as deaf:
        deaf.setattr(one.hub, "drain", list)  # the sequencer's answer is on its way
        one.turns(1)
        one.loop.drain(0.0)
        one.turns(1)
        assert one.ends() == {}
    one.loop.run()
    end = one.ends()["posted"]
    assert isinstance(end, Failed)
    assert (end.kind, end.reason) == ("unavailable", "the fleet is stopping")


@pytest.mark.parametrize(("supersteps", "answer"), [(1, Reserved), (2, CannotReserve)])
def test_a_whale_of_several_supersteps_is_declined(start: Callable[..., One], supersteps: int, answer: type) -> None:
    plan = GangPlan(gang=(0,), bounds=(0, 64), supersteps=supersteps)
    reserve = Reserve(seq=0, request_id="w", plan=plan, tokens=b"", max_tokens=1, is_owner=True)
    assert type(start().loop._reserve(reserve)) is answer


def test_waiting_for_others_does_not_lengthen_the_stuck_clock(
    start: Callable[..., One], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start(stuck_s=0.001)
    one.ask("a")
    one.turns(1)
    working = one.loop.bells.stuck_s
    assert working > 0.001, "ten of the longest launch"
    monkeypatch.setattr(type(one.loop.runner), "waited_s", lambda self: 1e9)
    one.loop._longest_s = 0.0
    one.turns(1)
    assert one.loop.bells.stuck_s == 0.001


def test_rows_of_a_cancelled_request_are_dropped(start: Callable[..., One], tmp_path: Path) -> None:
    capture = Capture(tmp_path, 0)
    one = start(capture=capture, chunk_tokens=8)
    one.ask("prefills", tokens=np.arange(64, dtype="<i4").tobytes())
    one.ask("decodes", max_tokens=50)
    one.ask("ends", max_tokens=3)
    one.turns(3)
    assert {"prefills", "decodes"} <= set(capture._rows)
    for name in ("prefills", "decodes"):
        one.loop.submit(b"me", CancelRequest(request_id=name))
    while one.ends().keys() != {"prefills", "decodes", "ends"}:
        one.turns(1)
    assert (capture._rows, capture._logits) == ({}, {})
    assert [path.parent.name for path in tmp_path.rglob("*.npz")] == ["ends"]


def _tokens(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count).astype("<i4").tobytes()


def _run_dry(one: One, turns: int = 400) -> dict[str, Response]:
    for _ in range(turns):
        if not one.loop._live and not one.loop.submitted_count:
            return one.ends()
        one.loop.turn()
    raise AssertionError(f"still at work after {turns} launches")


def test_requests_beyond_the_slots_wait_and_answer_as_if_alone(start: Callable[..., One]) -> None:
    together = start(slots=2)
    for i in range(5):
        together.ask(f"r{i}", tokens=_tokens(20 + i, i), max_tokens=4)
    ends = _run_dry(together)
    for i in range(5):
        alone = start(slots=2)
        alone.ask("r", tokens=_tokens(20 + i, i), max_tokens=4)
        expected, got = _run_dry(alone)["r"], ends[f"r{i}"]
        assert isinstance(expected, Done) and isinstance(got, Done)
        assert got.tokens == expected.tokens
        assert len(got.tokens) == 4


def test_a_prompt_of_many_chunks_answers_like_one_of_a_single(start: Callable[..., One]) -> None:
    answers = []
    for chunk_tokens in (7, 256):
        one = start(chunk_tokens=chunk_tokens, max_ctx=256)
        one.ask("r", tokens=_tokens(200, 3), max_tokens=6)
        end = _run_dry(one)["r"]
        assert isinstance(end, Done)
        answers.append(end.tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("prompt", "taken"), [(250, True), (251, False)])
def test_a_request_may_fill_the_context_to_the_last_token(start: Callable[..., One], prompt: int, taken: bool) -> None:
    one = start(max_ctx=256, cache_tokens=256)
    one.ask("r", tokens=_tokens(prompt, 4), max_tokens=6)
    end = _run_dry(one)["r"]
    assert isinstance(end, Done) == taken
    if isinstance(end, Failed):
        assert (end.kind, end.param) == ("invalid", "max_tokens")
        assert "expected at most 5 after a prompt of 251 tokens, got 6" in end.reason


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(start: Callable[..., One]) -> None:
    one = start()
    one.ask("free", max_tokens=6)
    free = _run_dry(one)["free"]
    assert isinstance(free, Done) and len(free.tokens) == 6
    stop = free.tokens[3]
    one.ask("stopped", max_tokens=6, stop_tokens=(stop,))
    stopped = _run_dry(one)["stopped"]
    assert isinstance(stopped, Done)
    assert stopped.tokens == free.tokens[: free.tokens.index(stop)]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert not one.loop.scheduler.has_work
