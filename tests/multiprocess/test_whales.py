"""Whales on a running fleet of four: every poster, two at once, two from one rank, narrow gangs, decode of others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.traces import trace_lines
from whalez.errors import Unavailable
from whalez.fleet import Fleet, Generated
from whalez.hub.admin import AskWhales
from whalez.hub.zmq_admin import ask_all
from whalez.serve.links import admin_address

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]


def prompt_of(tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


def whale(fleet: Fleet, prompt: list[int], poster: int, max_tokens: int = 8) -> Generated:
    return fleet.generate(prompt, max_tokens=max_tokens, poster=poster, lane="whale", stop_tokens=())


def entered(fleet: Fleet, result: Generated) -> set[int]:
    """Launches at which the members ran their segments; checks that all members did, each once."""
    lines = trace_lines(fleet, result.request_id)
    members = {rank: [line for line in found if line["kind"] == "superstep"] for rank, found in lines.items()}
    assert sorted(rank for rank, found in members.items() if found) == sorted(result.report.gang)
    assert all(len(found) <= 1 for found in members.values())
    return {found[0]["launch"] for found in members.values() if found}


def test_a_whale_can_be_posted_at_every_rank(four: Fleet) -> None:
    prompt = prompt_of(700, 1)
    expected = four.generate(prompt, max_tokens=8, poster=0, lane="local", stop_tokens=()).tokens
    for poster in range(4):
        result = whale(four, prompt, poster)
        assert result.tokens == expected
        assert result.report.gang[-1] == poster
        assert sorted(result.report.gang) == [0, 1, 2, 3]
        assert entered(four, result) == {result.report.entry_launch}


def test_two_whales_at_once_from_different_ranks(four: Fleet) -> None:
    prompts = [prompt_of(650, 2), prompt_of(777, 3)]
    alone = [four.generate(p, max_tokens=8, poster=0, lane="local", stop_tokens=()).tokens for p in prompts]
    both = [four.submit(p, max_tokens=8, poster=1 + i, lane="whale", stop_tokens=()) for i, p in enumerate(prompts)]
    results = [pending.result(60) for pending in both]
    assert [result.tokens for result in results] == alone
    launches = [entered(four, result) for result in results]
    assert all(len(found) == 1 for found in launches)
    first, second = sorted(found.pop() for found in launches)
    assert second >= first + 2, "one launch at least between two supersteps of a rank"


def test_two_whales_from_one_rank_queue_at_the_poster(four: Fleet) -> None:
    prompts = [prompt_of(650, 4), prompt_of(650, 5)]
    alone = [four.generate(p, max_tokens=4, poster=0, lane="local", stop_tokens=()).tokens for p in prompts]
    both = [four.submit(p, max_tokens=4, poster=2, lane="whale", stop_tokens=()) for p in prompts]
    results = [pending.result(60) for pending in both]
    assert [result.tokens for result in results] == alone
    reports = [result.report for result in results]
    assert reports[0].entry_launch + 2 <= reports[1].entry_launch
    assert reports[0].seq < reports[1].seq


def test_a_rank_outside_a_narrow_gang_sees_ordinary_launches_only(four: Fleet) -> None:
    prompt = prompt_of(200, 6)  # three segments of the floor of 64 fit, so the widest power of two is 2
    result = whale(four, prompt, 3)
    assert result.report.gang == (2, 3)
    lines = trace_lines(four, result.request_id)
    assert [rank for rank, found in lines.items() if found] == [2, 3]
    questions = [(admin_address(four.run_dir, rank), AskWhales(query_id=str(rank))) for rank in range(4)]
    lives = [{life.seq: life for life in answer.seen} for answer in ask_all(questions, 10.0)]
    assert [rank for rank, seen in enumerate(lives) if result.report.seq in seen] == [2, 3]
    assert result.tokens == four.generate(prompt, max_tokens=8, poster=0, lane="local", stop_tokens=()).tokens


def test_decode_of_others_goes_on_and_equals_a_quiet_fleet(four: Fleet) -> None:
    prompts = [prompt_of(90 + 7 * i, 10 + i) for i in range(4)]
    running = [four.submit(p, max_tokens=3000, poster=i, lane="local", stop_tokens=()) for i, p in enumerate(prompts)]
    loaded = [[next(iter(pending))] for pending in running]  # each has its first token before the whales come
    for i in range(3):
        whale(four, prompt_of(640, 20 + i), i)
    for pending in running:
        pending.cancel()
    for pending, tokens in zip(running, loaded, strict=True):
        with pytest.raises(Unavailable, match="cancelled"):  # so it had not ended before the last whale had
            tokens.extend(pending)
    for i, (prompt, tokens) in enumerate(zip(prompts, loaded, strict=True)):
        quiet = four.generate(prompt, max_tokens=len(tokens), poster=i, lane="local", stop_tokens=())
        assert list(quiet.tokens) == tokens


def test_a_short_prompt_waits_for_one_whale_at_most(four: Fleet) -> None:
    """Counted in launches, not in seconds: between its submission and its first token a short prompt sees at most one
    superstep, however many whales are queued."""
    whales = [
        four.submit(prompt_of(700, 30 + i), max_tokens=2, poster=i % 4, lane="whale", stop_tokens=()) for i in range(8)
    ]
    shorts = [
        four.generate(prompt_of(20, 50 + i), max_tokens=2, poster=i % 4, lane="local", stop_tokens=()) for i in range(8)
    ]
    done = [pending.result(60) for pending in whales]
    supersteps = sorted(result.report.entry_launch for result in done)
    assert len(set(supersteps)) == 8
    for result in shorts:
        report = result.report
        between = [n for n in supersteps if report.submit_launch <= n < report.first_token_launch]
        assert len(between) <= 1, (report.submit_launch, report.first_token_launch, supersteps)


def test_a_world_larger_than_the_experts_is_refused(tiny: Path, start: Callable[..., Fleet]) -> None:
    from whalez.errors import WhalezError

    with pytest.raises(WhalezError, match="world: expected at most 8"):
        start(tiny, 9)


def test_a_cancelled_whale_frees_its_slot_and_disturbs_nobody(four: Fleet) -> None:
    prompt = prompt_of(700, 70)
    expected = four.generate(prompt, max_tokens=4, poster=0, lane="local", stop_tokens=()).tokens
    queued = [four.submit(prompt, max_tokens=200, poster=1, lane="whale", stop_tokens=()) for _ in range(4)]
    for pending in queued:
        pending.cancel()
    for pending in queued:
        with contextlib.suppress(Unavailable):  # the first may have been over before its cancel arrived
            pending.result(60)
    assert whale(four, prompt, 1, max_tokens=4).tokens == expected
    deadline = time.monotonic() + 60
    while any(status is None or status.running or status.cache_used for status in four.status()):
        assert time.monotonic() < deadline, four.status()
        time.sleep(0.02)
